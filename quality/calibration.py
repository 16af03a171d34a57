"""Fit a policy's constants to a model: those with the least output error on recorded attention inputs.

The error of a call is the relative L2 of its output, computed by the torch reference, against exact float32 attention
of the same unrounded q, k, v. Everything is chosen on the fit half of a recording; the held-out half is read once the
policy is fixed, and only to report. A change is kept when the bootstrap interval of its gain, over prompts and calls of
the fit half, does not reach 0. What is tried: `calibration_steps`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from wanfp4.errors import PolicyError, SettingsError, Wanfp4Error
from wanfp4.policy import Policy, get_policy, guarding, policies
from wanfp4.processors.environment import versions
from wanfp4.quality.aggregate import Json, number
from wanfp4.quality.calibration_bench import Bench, Choice, Errors
from wanfp4.quality.calibration_pages import fit_markdown, verdict
from wanfp4.quality.calibration_steps import STEPS, Stage, off_blackwell
from wanfp4.quality.files import write
from wanfp4.quality.intervals import Interval, compare, few, interval
from wanfp4.quality.recording import FIT, HELD_OUT, Recorded, Recording
from wanfp4.quality.report import json_text

KIND, SCHEMA = "wanfp4 calibration", 1


class Fit:
    """A fitted policy, and in `data` the evidence: everything tried, what was chosen and why, held-out figures."""

    def __init__(self, policy: Policy, data: Json) -> None:
        self.policy = policy
        self.data = data

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


def check_keep(keep: Sequence[str]) -> tuple[str, ...]:
    """Names of steps that a fit leaves out. Raises SettingsError for one that there is not, or for all of them."""
    if unknown := [name for name in keep if name not in STEPS]:
        raise SettingsError(f"there is no step {unknown[0]!r} to keep; the steps are {', '.join(STEPS)}")
    if set(keep) == set(STEPS):
        raise SettingsError("every step is kept, so there is nothing to fit")
    return tuple(keep)


def fit(
    recording: Recording,
    base: str | Path | Policy = "wan-fast",
    name: str = "fitted",
    *,
    keep: Sequence[str] = (),
    progress: bool = True,
    command: str | None = None,
) -> Fit:
    """The base policy with the constants that fit the recording's model best.

    In this order, each step starting from what the one before chose: smoothing of K, of V, row reference with its
    margin, the guard's limit, the row peak of NVFP4 P, coefficients of the classifier. What a step finds is kept when
    the error of the median call is lower by half a percent, with an interval over prompts and calls below 0. A base
    that the Blackwell kernels compute stays one that they compute. Rules stay as they are, and calls that they send
    elsewhere do not count; where the policy's guard is theirs, too, it stays. The result depends on the recording and
    the base alone.

    keep  names of steps (`STEPS`) to leave out: what they choose stays as the base has it. A row reference other than
          `shiftless` takes time on Blackwell.

    Raises PolicyError (base or name), SettingsError (keep), Wanfp4Error (a half without calls, or NaN in one).
    """
    policy, name, kept = check_base(base), check_name(name), check_keep(keep)
    bench = Bench(_calls(recording, FIT, policy))
    start = chosen = Choice(policy.numerics, policy.guard)
    shared = any(guarding(rule.numerics, policy.guard) for rule in policy.rules)
    stages: list[Json] = []
    with tqdm(unit="candidate", disable=not progress, dynamic_ncols=True) as bar:
        for title, propose in STEPS.items():
            stage = Stage(title, bench, chosen, bar, shared=shared)
            if title in kept:
                stage.note = "kept, as asked"
            else:
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
        "few": few(base.prompts),
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
