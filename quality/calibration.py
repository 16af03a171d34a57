"""Fit a policy's constants to a model: those with the least output error on recorded attention inputs.

The error of a call is the relative L2 of its output, computed by the torch reference, against exact float32 attention
of the same unrounded q, k, v. Everything is chosen on the fit half of a recording; the held-out half is read once the
policy is fixed, and only to report. A change is kept when the bootstrap interval of its gain, over prompts and calls of
the fit half, does not reach 0.
docs/calibration.md says what is tried.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from wanfp4.errors import PolicyError, SettingsError, Wanfp4Error
from wanfp4.kernels.blackwell import backend as sm100
from wanfp4.policy import Classifier, Guard, Policy, get_policy, policies
from wanfp4.processors.environment import versions
from wanfp4.quality.aggregate import Json, number
from wanfp4.quality.calibration_bench import Bench, Choice, Errors
from wanfp4.quality.calibration_pages import fit_markdown, verdict
from wanfp4.quality.files import write
from wanfp4.quality.intervals import LOWER, Comparison, Interval, compare, interval
from wanfp4.quality.recording import FIT, HELD_OUT, Recorded, Recording
from wanfp4.quality.report import json_text

KIND, SCHEMA = "wanfp4 calibration", 1

# The coarse grids of the classifiers' coefficients; the search goes on from the best point in steps of half a cell.
AFFINE_GRID = {"A": (1.0, 1.2, 1.4, 1.6, 1.8, 2.0), "B": (0.35, 0.65, 0.95, 1.25, 1.55)}
TWO_PIECE_GRID = {
    "A": (0.25, 0.5, 0.75),
    "B": (0.75, 1.0, 1.25),
    "A2": (1.8, 2.2, 2.6),
    "B2": (-1.6, -0.8, 0.0),
}
HALVINGS = 3
# A smaller gain of the median call is no reason for a change.
LEAST_GAIN = 0.005
# Margins of an anchor that are tried for Direct-P, in octaves. A block's codes depend on where the row's maximum lies
# between two powers of two, so fractions matter, and whole octaves only move exponents.
MARGINS = (0.0, 0.25, 0.5, 0.75)
PEAKS = (1.0, 16.0, 64.0, 256.0, 1024.0, 2688.0)
# Shares of the fit half's calls that a guard with a lower limit would take.
GUARDED_SHARES = (0.25, 0.5, 1.0)


class Fit:
    """A fitted policy, and in `data` the evidence: everything tried, what was chosen and why, held-out figures."""

    def __init__(self, policy: Policy, data: Json) -> None:
        self.policy = policy
        self.data = data

    @property
    def changed(self) -> bool:
        """False when no change was worth it, and the policy has the base's constants."""
        return any(stage["kept"] for stage in self.data["stages"])

    @property
    def verdict(self) -> list[str]:
        """What came of it, in sentences."""
        return verdict(self.data)

    def save(self, path: str | Path) -> list[Path]:
        """Write the policy to `path`, and beside it NAME.fit.json and NAME.report.md. Raises OutputError."""
        path, fit_json, page = outputs(path)
        return [
            write(path, self.policy.to_json()),
            write(fit_json, json_text(self.data)),
            write(page, fit_markdown(self.data)),
        ]


def outputs(path: str | Path) -> tuple[Path, Path, Path]:
    """The policy's file, and those of its evidence. Raises SettingsError unless it ends in .json."""
    path = Path(path)
    if path.suffix != ".json" or not path.stem:
        raise SettingsError(f"a policy's file must end in .json, not {str(path)!r}")
    return path, path.with_name(f"{path.stem}.fit.json"), path.with_name(f"{path.stem}.report.md")


def check_base(base: str | Path | Policy) -> Policy:
    """The policy to start from. Raises PolicyError for one whose error single rows of a single head do not show."""
    policy = get_policy(base)
    n = policy.numerics
    if n.is_exact:
        raise PolicyError(f"policy {policy.name!r} rounds nothing outside its rules, so there is nothing to fit")
    why = None
    if n.smooth_q:
        why = "smooths Q, over blocks of 128 tokens"
    elif n.qk == "mxfp8-token-block":
        why = "shares exponents of Q among 32 tokens"
    elif n.global_scale:
        why = "scales a tensor by its largest value over all heads"
    if why:
        raise PolicyError(f"policy {policy.name!r} {why}; a recording has single query rows of single heads")
    return policy


def check_name(name: str) -> str:
    """A name for the fitted policy. Raises PolicyError for a preset's: reports go by the name."""
    if name in policies():
        raise PolicyError(f"{name!r} is the name of a preset; give the fitted policy another one")
    return name


def fit(
    recording: Recording,
    base: str | Path | Policy = "wan-fast",
    name: str = "fitted",
    *,
    progress: bool = True,
    command: str | None = None,
) -> Fit:
    """The base policy with the constants that fit the recording's model best.

    In this order, each step starting from what the one before chose: smoothing of K, of V, row reference with its
    margin, the guard's limit, the row peak of NVFP4 P, coefficients of the classifier. What a step finds is kept when
    the error of the median call is lower by half a percent, with an interval over prompts and calls below 0. A base
    that the Blackwell kernels compute stays one that they compute. Rules stay as they are, and calls that they send
    elsewhere do not count. The result depends on the recording and the base alone.

    Raises PolicyError (base or name), Wanfp4Error (a half without calls, or NaN in one).
    """
    policy, name = check_base(base), check_name(name)
    bench = Bench(_calls(recording, FIT, policy))
    start = chosen = Choice(policy.numerics, policy.guard)
    stages: list[Json] = []
    with tqdm(unit="candidate", disable=not progress, dynamic_ncols=True) as bar:
        for title, propose in _STAGES:
            stage = _Stage(title, bench, chosen, bar)
            propose(stage)
            chosen = stage.decide()
            stages.append(stage.to_dict())
    halves = {FIT: _half(bench.errors(start), bench.errors(chosen))}
    bench = Bench(_calls(recording, HELD_OUT, policy))
    halves[HELD_OUT] = _half(bench.errors(start), bench.errors(chosen))
    data: Json = {
        "kind": KIND,
        "schema": SCHEMA,
        "command": command,
        "versions": versions(),
        "recording": _provenance(recording),
        "base": policy.to_dict(),
        "stages": stages,
        "halves": halves,
        "off_blackwell": off_blackwell(chosen),
    }
    described = {"numerics": chosen.numerics, "guard": chosen.guard, "name": name}
    fitted = policy.with_(**described, description=_description(policy, data))
    return Fit(fitted, {**data, "policy": fitted.to_dict()})


def _calls(recording: Recording, half: str, policy: Policy) -> list[Recorded]:
    """The calls of a half that compute the policy's own numerics."""
    calls = [
        call
        for call in recording.calls(half)
        if policy.resolve(
            layer=call.layer,
            num_layers=call.num_layers,
            sigma=call.sigma,
            expert=call.expert,
            tokens=call.tokens,
        ).numerics
        == policy.numerics
    ]
    if not calls:
        found = len(recording.runs(half))
        raise Wanfp4Error(
            f"the {half} half of {str(recording.folder)!r} has no call that {policy.name!r} rounds ({found} runs are "
            "recorded); go on recording, or record longer sequences"
        )
    for call in calls:
        if not all(bool(t.isfinite().all()) for t in (call.q, call.k, call.v)):
            raise Wanfp4Error(
                f"a recorded call holds NaN or infinity: prompt {call.prompt}, seed {call.seed}, {call.expert} layer "
                f"{call.layer}, step {call.step}"
            )
    return calls


class _Stage:
    """One thing that is chosen: candidates tried, the best of them, and whether it is worth a change."""

    def __init__(self, title: str, bench: Bench, before: Choice, bar: Any) -> None:
        self.title = title
        self.bench = bench
        self.before = before
        self.bar = bar
        self.tried: dict[Choice, tuple[str, float]] = {}
        self.left_out: list[tuple[str, str]] = []
        self.note = ""
        self.comparison: Comparison | None = None
        self.kept = False
        self.best = before
        self.score(describe(before, title), before)

    def score(self, label: str, choice: Choice) -> float:
        """The error of a candidate; each is computed once."""
        if choice not in self.tried:
            self.tried[choice] = label, self.bench.errors(choice).mean
            self.bar.set_description(self.title)
            self.bar.update()
        return self.tried[choice][1]

    def try_(self, guard: Guard | None, **fields: Any) -> float:
        """The error with some numerics changed; infinity for what is not legal, or leaves the Blackwell kernels."""
        try:
            numerics = dataclasses.replace(self.before.numerics, **fields)
        except PolicyError as error:
            self._leave_out(fields, str(error))
            return math.inf
        choice = Choice(numerics, guard)
        lost = off_blackwell(choice)
        if lost is not None and off_blackwell(self.before) is None:
            self._leave_out(fields, f"the Blackwell kernels compute the base and not this: {lost}")
            return math.inf
        return self.score(describe(choice, self.title), choice)

    def decide(self) -> Choice:
        """The best candidate if it is better than what was there, with an interval that says so."""
        self.best = min(self.tried, key=lambda choice: self.tried[choice][1])
        if self.best != self.before:
            better, worse = self.bench.errors(self.best), self.bench.errors(self.before)
            change = [b / a - 1 if a else 0.0 for a, b in zip(worse.values, better.values, strict=True)]
            prompts = [call.prompt for call in self.bench.calls]
            self.comparison = compare(change, [0.0] * len(change), prompts, floor=LEAST_GAIN)
            self.kept = self.comparison.verdict == LOWER
        return self.best if self.kept else self.before

    def to_dict(self) -> Json:
        return {
            "title": self.title,
            "note": self.note,
            "before": self.tried[self.before][0],
            "best": self.tried[self.best][0],
            "kept": self.kept,
            "error_before": number(self.tried[self.before][1]),
            "error_best": number(self.tried[self.best][1]),
            "comparison": None if self.comparison is None else self.comparison.to_dict(),
            "candidates": [{"what": label, "error": number(error)} for label, error in self.tried.values()],
            "left_out": [{"what": what, "why": why} for what, why in dict.fromkeys(self.left_out)],
        }

    def _leave_out(self, fields: Mapping[str, Any], why: str) -> None:
        what = ", ".join(f"{k} {v.label if isinstance(v, Classifier) else v}" for k, v in fields.items())
        self.left_out.append((what, why))


def off_blackwell(choice: Choice) -> str | None:
    """Why the Blackwell kernels do not compute a choice, or None."""
    lost = sm100.limits(choice.numerics)
    n, guard = choice.numerics, choice.guard
    if lost is None and guard is not None and n.p == "mxfp4-direct" and n.row_reference != "shiftless":
        return f"they guard 'shiftless' numerics only, and these have {n.row_reference!r}"
    return lost


SMOOTH_K, SMOOTH_V, ROW_REFERENCE, GUARD, PEAK, COEFFICIENTS = (
    "smooth K",
    "smooth V",
    "row reference",
    "guard",
    "row peak",
    "classifier",
)


def describe(choice: Choice, title: str) -> str:
    """A candidate in the words of its stage."""
    n, guard = choice.numerics, choice.guard
    if title in (SMOOTH_K, SMOOTH_V):
        return "yes" if (n.smooth_k if title == SMOOTH_K else n.smooth_v) else "no"
    guarded = "no guard" if guard is None else f"guard above {guard.logit_limit:.4g}"
    if title == ROW_REFERENCE:
        margin = f" + {n.margin:g} ({n.margin_unit})" if n.row_reference.startswith("anchor") else ""
        return f"{n.row_reference}{margin}, {guarded}"
    if title == GUARD:
        return guarded
    return f"{n.p_peak:g}" if title == PEAK else n.classifier.label


def _smooth_k(stage: _Stage) -> None:
    n = stage.before.numerics
    if n.qk == "exact":
        stage.note = "K is exact"
        return
    stage.try_(stage.before.guard, smooth_k=not n.smooth_k)


def _smooth_v(stage: _Stage) -> None:
    n = stage.before.numerics
    if n.v == "exact":
        stage.note = "V is exact"
        return
    stage.try_(stage.before.guard, smooth_v=not n.smooth_v)


def _row_reference(stage: _Stage) -> None:
    n, guard = stage.before.numerics, stage.before.guard
    if n.p in ("exact", "bf16"):
        stage.note = f"P in {n.p} does not depend on it"
        return
    margins = MARGINS if n.p == "mxfp4-direct" else (0.0,)
    for anchor in ("anchor32", "anchor128"):
        for margin in margins:
            # An anchor is what a guard would set: it needs none.
            stage.try_(None, row_reference=anchor, margin=margin, margin_unit="log2")
        if guard is not None and n.p == "mxfp4-direct":
            stage.try_(None, row_reference=anchor, margin=guard.margin, margin_unit=guard.margin_unit)
    stage.try_(None, row_reference="rowmax", margin=0.0)


def _guard(stage: _Stage) -> None:
    n, guard = stage.before.numerics, stage.before.guard
    if guard is None or n.p != "mxfp4-direct":
        stage.note = "there is none" if guard is None else f"P in {n.p} has nothing to guard"
        return
    # Without one a model would be unguarded against logits that the recording does not hold, so that is not tried.
    logits = sorted(call.largest for call in stage.bench.calls)
    for share in GUARDED_SHARES:
        limit = 0.0 if share == 1 else float(f"{np.quantile(logits, 1 - share):.3g}")
        if limit < guard.logit_limit:
            stage.try_(dataclasses.replace(guard, logit_limit=limit))


def _peak(stage: _Stage) -> None:
    if stage.before.numerics.p != "nvfp4":
        stage.note = f"P in {stage.before.numerics.p} has no two-level scales"
        return
    for peak in PEAKS:
        stage.try_(stage.before.guard, p_peak=peak)


def _coefficients(stage: _Stage) -> None:
    old = stage.before.numerics.classifier
    if old.kind == "exp2":
        stage.note = "exp2 has no coefficients"
        return
    grid = TWO_PIECE_GRID if old.kind == "two-piece" else AFFINE_GRID

    def score(point: tuple[float, ...]) -> float:
        values: dict[str, Any] = dict(zip(grid, point, strict=True))
        try:
            classifier = dataclasses.replace(old, **values)
        except PolicyError as error:
            stage.left_out.append((", ".join(f"{n} {v:g}" for n, v in values.items()), str(error)))
            return math.inf
        return stage.try_(stage.before.guard, classifier=classifier)

    points = [tuple(getattr(old, n) for n in grid), *itertools.product(*grid.values())]
    search(score, points, [(axis[1] - axis[0]) / 2 for axis in grid.values()])


_STAGES: tuple[tuple[str, Callable[[_Stage], None]], ...] = (
    (SMOOTH_K, _smooth_k),
    (SMOOTH_V, _smooth_v),
    (ROW_REFERENCE, _row_reference),
    (GUARD, _guard),
    (PEAK, _peak),
    (COEFFICIENTS, _coefficients),
)


def search(
    score: Callable[[tuple[float, ...]], float],
    points: Iterable[tuple[float, ...]],
    steps: Sequence[float],
    halvings: int = HALVINGS,
) -> tuple[float, ...]:
    """The best of `points`, improved by coordinate search: a step up or down along each axis while that helps, then
    half the step, `halvings` times. Codes make the error a function with small steps of its own, so no derivatives."""
    best = min(points, key=score)
    least = score(best)
    for halving in range(halvings + 1):
        moved = True
        while moved:
            moved = False
            for axis, step in enumerate(steps):
                for sign in (1, -1):
                    value = round(best[axis] + sign * step / 2**halving, 6)
                    trial = (*best[:axis], value, *best[axis + 1 :])
                    error = score(trial)
                    if error < least:
                        best, least, moved = trial, error, True
                        break
    return best


def _half(base: Errors, fitted: Errors) -> Json:
    """Figures of one half: base and fitted policy, over all calls and by layer, with intervals over runs."""
    layers = []
    for expert, layer in base.layers():
        a, b = base.per_run((expert, layer)), fitted.per_run((expert, layer))
        here = [i for i, value in enumerate(a) if not math.isnan(value)]
        layers.append(
            {
                "expert": expert,
                "layer": layer,
                "calls": sum((c.expert, c.layer) == (expert, layer) for c in base.calls),
                **_pair([a[i] for i in here], [b[i] for i in here], [base.prompts[i] for i in here]),
            }
        )
    return {
        "runs": len(base.prompts),
        "prompts": len(set(base.prompts)),
        "calls": len(base.calls),
        "mean": {"base": number(base.mean), "fitted": number(fitted.mean)},
        **_pair(base.per_run(), fitted.per_run(), base.prompts),
        "layers": layers,
    }


def _pair(base: Sequence[float], fitted: Sequence[float], prompts: Sequence[int]) -> Json:
    found: dict[str, Interval] = {
        "base": interval(base, prompts),
        "fitted": interval(fitted, prompts),
        "change": interval([b / a - 1 if a else 0.0 for a, b in zip(base, fitted, strict=True)], prompts),
    }
    return {
        **{name: one.to_dict() for name, one in found.items()},
        "verdict": compare(fitted, base, prompts).verdict,
    }


def _provenance(recording: Recording) -> Json:
    data = recording.data
    kept = ("created", "model", "scheduler", "settings", "prompts", "seeds", "rows", "calls", "complete")
    return {
        **{key: data[key] for key in kept},
        "attention": data["attention"],
        "fit_prompts": sorted({run["prompt"] for run in recording.runs(FIT)}),
        "held_out_prompts": sorted({run["prompt"] for run in recording.runs(HELD_OUT)}),
    }


def _description(base: Policy, data: Json) -> str:
    model, held = data["recording"]["model"], data["halves"][HELD_OUT]
    changes = [f"{s['title']} {s['best']}" for s in data["stages"] if s["kept"]]
    return (
        f"{base.name} fitted to {model['model']} (weights {model['weights'][:12]}): "
        f"{'; '.join(changes) if changes else 'no change was worth it'}. Relative L2 of attention on "
        f"{held['prompts']} held-out prompts {float(held['fitted']['median']):.4f}, "
        f"{base.name} {float(held['base']['median']):.4f}."
    )
