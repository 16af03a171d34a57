"""Find the cheapest policy inside a budget: per group of layers and range of the noise level, from measured damage.

1. Sensitivities: every candidate alone in every group of layers, teacher-forced, for each prompt and seed.
2. How well squares of single errors add up: random policies, predicted and measured.
3. For each target a knapsack (`wanfp4.quality.knapsack`), then the policy itself on prompts or seeds held out; where
   its drift is not what was predicted, again with the target corrected by what was found.
4. What else one would do, measured in the same way: all BF16, all fast, first and last steps in BF16.

docs/search.md explains every figure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from wanfp4.errors import OutputError, SettingsError
from wanfp4.policy import Policy
from wanfp4.processors.patch import patch
from wanfp4.processors.pipelines import Settings, info_of, shifted
from wanfp4.quality import costs
from wanfp4.quality.aggregate import Json, number, numbers
from wanfp4.quality.cells import (
    Assignment,
    Floats,
    Grid,
    Sensitivities,
    bins_of,
    check_candidates,
    check_length,
    finite,
    groups_of,
    metric,
)
from wanfp4.quality.choice import Chooser
from wanfp4.quality.files import output_folder
from wanfp4.quality.jobs import attention_of, header, log_above_bar, quiet, said_once, weights_digest
from wanfp4.quality.plan import DEFAULT_SEEDS, check_call, make_plan
from wanfp4.quality.rivals import Rivals
from wanfp4.quality.runs import Pair, Runs
from wanfp4.quality.search_report import KIND, SCHEMA, SearchReport
from wanfp4.quality.targets import (
    SHARE,
    Target,
    candidates_for,
    check_counts,
    check_held_out,
    check_reachable,
    check_targets,
)

log = logging.getLogger("wanfp4")

BINS, CHECKS, ROUNDS = 5, 8, 4
# A corrected target aims a little below the limit; a verified drift this close to it is not tried to be bettered.
AIM, CLOSE = 0.99, 0.97
# What has to agree for figures of an earlier session to be used: words for the message, by key of the header.
_SAME = {
    "model": "model",
    "attention": "attention of its own",
    "settings": "settings",
    "scheduler": "scheduler",
    "backend": "backend",
    "strict": "--strict",
    "call": "arguments of the pipeline's call",
    "machine": "machine",
    "versions": "versions",
}


def search(
    pipe: Any,
    policies: Sequence[str | Path | Policy] | None = None,
    prompts: Sequence[str] | str = (),
    seeds: Sequence[int] | int = DEFAULT_SEEDS,
    steps: int | None = None,
    *,
    budget: Mapping[str, float] | None = None,
    shares: Sequence[float] = (),
    verify_prompts: Sequence[str] = (),
    verify_seeds: Sequence[int] | None = None,
    groups: int | None = None,
    bins: int = BINS,
    checks: int = CHECKS,
    rounds: int = ROUNDS,
    times: str | Path | None = None,
    settings: Settings | None = None,
    backend: str | None = None,
    strict: bool = False,
    progress: bool = True,
    folder: str | Path | None = None,
    force: bool = False,
    model: str | None = None,
    command: str | None = None,
    **call: Any,
) -> SearchReport:
    """Search policies for `pipe`, an unpatched diffusers text-to-video pipeline, made of `policies` and BF16.

    policies  candidates for every cell, without rules of their own; wan-fast and fp8-direct when None, wan-fast alone
              when every target is a share.
    prompts, seeds, steps, settings, backend, strict, progress, model, command, call  as `wanfp4.drift`.
    budget    {"velocity": 0.3}: the fastest policy whose worst step's teacher-forced velocity error stays below, median
              over runs; or "velocity-mean", of the mean over steps. Each is a target of its own.
    shares    [0.8]: the least drift with at least this share of attention's multiply-adds in 4 bits; a target each.
    verify_prompts, verify_seeds  of the runs that verify (`check_held_out`).
    groups    groups of neighbouring layers; by default each layer, 12 groups in deeper models.
    bins      ranges of the noise level, of about equal numbers of steps.
    checks    random policies that show how well the prediction holds.
    rounds    how often at most a target's policy is verified and corrected.
    times     a file of `wanfp4 bench --json` to take costs from.
    folder    where everything is kept as it is measured. What is there already and was made with the same model,
              settings and machine is used, so the same call goes on; `force` begins anew.

    Time, in denoising runs: for each prompt and seed of the search 1 + candidates × groups + `checks`; for each to
    verify 1 + 2 × (policies verified: one or more a target, and four to six baselines).

    Raises PolicyError, BackendError, SettingsError, ModelError, OutputError.
    """
    targets = check_targets(budget or {}, shares)
    if policies is None:
        policies = candidates_for(targets)
    info = info_of(pipe)
    plan = make_plan(info, policies, prompts, seeds, steps, settings=settings)
    check_call(pipe, call)
    check_counts(bins=bins, rounds=rounds, checks=checks)
    check_candidates(plan.policies)
    check_length(plan.policies, info.tokens(plan.settings))
    in_4_bits = [costs.share_in_4_bits(p.numerics) for p in plan.policies]
    check_reachable(targets, in_4_bits)
    pairs, held_out = check_held_out(plan.prompts, plan.seeds, verify_prompts, verify_seeds)
    layers = info.experts[0].layers
    if any(expert.layers != layers for expert in info.experts):
        raise SettingsError("the model's experts have different numbers of layers, which a search cannot group")
    prices, source = _costs(plan.policies, times, backend, info.tokens(plan.settings))
    grid = Grid((), groups_of(layers, groups), plan.policies, prices, tuple(in_4_bits))
    attention = attention_of(pipe, info)
    for policy in plan.policies:
        with patch(pipe, policy, backend, strict=strict):
            pass  # raises what it must before the first run

    known = header(KIND, SCHEMA, pipe, info, plan, backend, strict, call, model, command)
    known["model"]["weights"] = weights_digest(pipe)
    state: Json = {
        **known,
        "attention": attention,
        "held_out": [{"prompt": p, "seed": s} for p, s in held_out],
        "targets": [target.label for target in targets],
        "candidates": [
            {"name": p.name, "policy": p.to_dict(), "numerics": p.numerics.label, "time": number(c), "share": s}
            for p, c, s in zip(grid.candidates, grid.costs, grid.shares, strict=True)
        ],
        "cost_source": source,
        "groups": [list(group) for group in grid.groups],
        "bins": [],
        "references": [],
        "measured": [],
        "sensitivities": [],
        "additivity": None,
        "results": [],
    }
    report = SearchReport(state)
    with contextlib.nullcontext() if folder is None else output_folder(folder) as place:
        if place is not None and not force:
            _take_over(place, state)
        before = list(state["measured"])
        try:
            with (
                shifted(pipe, plan.settings.shift),
                quiet(pipe),
                said_once(),
                _emulation_said_once(),
                tqdm(unit="step", disable=not progress, dynamic_ncols=True) as bar,
                log_above_bar(),
            ):
                runs = Runs(
                    pipe,
                    plan.settings,
                    call,
                    strict,
                    state,
                    bar,
                    None if place is None else functools.partial(report.save, place, pages=False),
                )
                job = _Job(runs, grid, backend, pairs, held_out, bins, checks, rounds, report)
                job.run(targets)
        except BaseException:
            if place is not None and state["measured"] != before:  # otherwise what is there is at least as good
                report.save(place)
                log.warning("stopped early: what has finished is in %s; the same search goes on from it", place)
            raise
        state["complete"] = True
        if place is not None:
            report.save(place)
    return report


def _costs(
    policies: Sequence[Policy], times: str | Path | None, backend: str | None, tokens: int
) -> tuple[tuple[float, ...], str]:
    if times is None:
        return tuple(costs.modelled(p.numerics) for p in policies), costs.MODEL
    found, source = costs.measured(policies, times, backend, tokens)
    for policy, cost in zip(policies, found, strict=True):
        if cost >= 1:
            log.warning("by these times %s is no faster than BF16, so a budget never chooses it", policy.name)
    return tuple(found), source


@contextlib.contextmanager
def _emulation_said_once() -> Iterator[None]:
    """That a backend emulates is said once for all the policies that a search makes up, not for each by name."""
    said: set[Any] = set()

    def new(record: logging.LogRecord) -> bool:
        if "emulates" not in str(record.msg) or not isinstance(record.args, tuple):
            return True
        fresh = record.args[0] not in said
        said.add(record.args[0])
        return fresh

    log.addFilter(new)
    try:
        yield
    finally:
        log.removeFilter(new)


def _take_over(folder: Path, state: Json) -> None:
    """Into `state`, what an earlier search of the same model, settings and machine measured.

    Raises OutputError when the folder's search is of something else: it would be lost.
    """
    path = folder / "search.json"
    if not path.is_file():
        return
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        known = (earlier["kind"], earlier["schema"]) == (KIND, SCHEMA)
    except (OSError, ValueError, TypeError, KeyError):
        known = False
    if not known:
        raise OutputError(f"{str(path)!r} is not a search of this version; choose another folder, or add --force")
    if "weights" not in (earlier.get("model") or {}):
        raise OutputError(
            f"{str(path)!r} is of an earlier version, which did not keep the weights' digest: whether its figures are "
            "of this model is not known; choose another folder, or add --force"
        )
    wrong = [words for key, words in _SAME.items() if _essence(key, earlier.get(key)) != _essence(key, state[key])]
    if wrong:
        raise OutputError(
            f"{str(folder)!r} holds a search with another {', '.join(wrong)}; give the same to go on with it, choose "
            "another folder, or add --force"
        )
    for key in ("steps", "references", "measured"):
        state[key] = earlier[key]


def _essence(key: str, value: Any) -> Any:
    """What has to agree: of a model neither its name nor what its folder says of defaults, as the weights' digest says
    which it is and `settings` what was used."""
    left_out = {"machine": ("threads",), "model": ("model", "defaults", "source")}.get(key, ())
    return {k: v for k, v in value.items() if k not in left_out} if isinstance(value, dict) else value


class _Job:
    """The search as it goes on; every figure that is asked for twice comes from `runs`' memory."""

    def __init__(
        self,
        runs: Runs,
        grid: Grid,
        backend: str | None,
        pairs: list[Pair],
        held_out: list[Pair],
        bins: int,
        checks: int,
        rounds: int,
        report: SearchReport,
    ) -> None:
        self.runs = runs
        self.backend = backend
        self.pairs = pairs
        self.held_out = held_out
        self.checks = checks
        self.rounds = rounds
        self.state = report.data
        count = len(grid.candidates) * len(grid.groups) + checks + 1
        runs.expect(len(pairs) * count + len(held_out))
        self.grid = dataclasses.replace(grid, bins=bins_of(runs.steps(pairs[0]), bins))
        self.state["bins"] = [
            {"expert": b.expert, "steps": [i + 1 for i in b.steps], "sigma": numbers(b.sigma)} for b in self.grid.bins
        ]
        self.known: Sensitivities
        self.chooser: Chooser
        self.rivals: Rivals

    def run(self, targets: Sequence[Target]) -> None:
        self.known = self.sensitivities()
        self.chooser = Chooser(self.known)
        self.rivals = Rivals(self.runs, self.known, self.backend, self.held_out)
        self.additivity()
        for target in targets:
            result = self.solve(target)
            result["baselines"] = self.rivals.rows(target, result)
            self.rivals.compare(result)
            self.state["results"].append(result)
        self.verified()

    def sensitivities(self) -> Sensitivities:
        """Each candidate in each group of layers, at all steps of one run: steps are told apart afterwards."""
        grid = self.grid
        squares = np.zeros((len(grid.candidates) + 1, len(grid.groups), len(self.pairs), len(self.state["steps"])))
        for r, pair in enumerate(self.pairs):
            for g in range(len(grid.groups)):
                for c in range(1, len(grid.candidates) + 1):
                    chosen = grid.uniform(0)
                    chosen[:, g] = c
                    layers = grid.groups[g]
                    where = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"
                    policy = grid.policy(chosen, f"{grid.label(c)} in {where}")
                    squares[c, g, r] = self.runs.velocities(policy, self.backend, [pair])[0] ** 2
        self.state["sensitivities"] = [
            {
                "candidate": grid.label(c),
                "group": g,
                "rel_l2": [
                    number(float(np.median(np.sqrt(squares[c, g][:, list(b.steps)].mean(axis=-1))))) for b in grid.bins
                ],
            }
            for c in range(1, len(grid.candidates) + 1)
            for g in range(len(grid.groups))
        ]
        # A run that broke (NaN) must never look cheap.
        return Sensitivities(grid, np.where(np.isnan(squares), math.inf, squares))

    def additivity(self) -> None:
        """Random policies on the runs that were searched on: what squares that add up predict, and what is measured."""
        generator = np.random.default_rng(0)
        choices = len(self.grid.candidates) + 1
        chosen = []
        for _ in range(self.checks):
            mixing = generator.dirichlet(np.ones(choices))
            chosen.append(generator.choice(choices, size=self.grid.shape, p=mixing).astype(np.int64))
        policies = [self.grid.policy(one, f"random {i}") for i, one in enumerate(chosen, 1)]
        for pair in self.pairs:
            for policy in policies:
                self.runs.measure(policy, self.backend, pair)
        points = [
            self._point(policy.name, one, self.runs.velocities(policy, self.backend, self.pairs), "random")
            for policy, one in zip(policies, chosen, strict=True)
        ]
        self.state["additivity"] = {"points": points, **_errors(points)}

    def _point(self, name: str, chosen: Assignment, measured: Floats, kind: str) -> Json:
        return {
            "name": name,
            "kind": kind,
            "predicted": number(metric(self.known.predict(chosen), "velocity-mean")),
            "measured": number(metric(measured, "velocity-mean")),
        }

    def verified(self) -> None:
        """Add the policies that were verified on held-out runs to the points."""
        for result in self.state["results"]:
            for one in result["rounds"]:
                self.state["additivity"]["points"].append(
                    {
                        "name": f"{result['label']}, round {one['round']}",
                        "kind": "verified",
                        "predicted": one["predicted_mean"],
                        "measured": one["measured_mean"],
                    }
                )

    def solve(self, target: Target) -> Json:
        """Choose, verify on held-out runs, correct the goal by what was found, choose again."""
        goal, name = target.limit, f"searched-{target.label}"
        tried: list[Json] = []
        seen: set[bytes] = set()
        best: tuple[float, Assignment, Policy] | None = None
        for number_of in range(1, self.rounds + 1):
            chosen = self.chooser.assign(target, goal)
            if chosen.tobytes() in seen or not chosen.any():
                break
            seen.add(chosen.tobytes())
            policy = self.grid.policy(chosen, name, self._description(target, chosen))
            self.runs.expect(2 * len(self.held_out))
            measured = self.runs.velocities(policy, self.backend, self.held_out, free=True)
            kind = "velocity-mean" if target.kind == SHARE else target.kind
            predicted, found = metric(self.known.predict(chosen), kind), metric(measured, kind)
            kept = finite(measured) if target.kind == SHARE else found <= target.limit
            tried.append(
                {
                    "round": number_of,
                    "goal": number(goal),
                    "predicted": number(predicted),
                    "measured": number(found),
                    "predicted_mean": number(metric(self.known.predict(chosen), "velocity-mean")),
                    "measured_mean": number(metric(measured, "velocity-mean")),
                    "time": number(self.grid.time(chosen)),
                    "share": number(self.grid.share(chosen)),
                    "kept": kept,
                }
            )
            if kept and (best is None or self.grid.time(chosen) < best[0]):
                best = self.grid.time(chosen), chosen, policy
            if target.kind == SHARE or (kept and found >= CLOSE * target.limit):
                break
            ratio = found / predicted if predicted > 0 and math.isfinite(found) and found > 0 else 2.0
            goal = min(AIM ** len(tried) * target.limit / ratio, math.inf if kept else AIM * predicted)
        result: Json = {"label": target.label, "kind": target.kind, "limit": target.limit, "text": target.text}
        result |= {"rounds": tried, "kept": best is not None, "policy": None, "chosen": None, "searched": None}
        if best is not None:
            _, chosen, policy = best
            result["policy"] = policy.to_dict()
            result["chosen"] = [[self.grid.label(int(c)) for c in row] for row in chosen]
            result["searched"] = self.rivals.row(policy, self.backend, self.grid.time(chosen), self.grid.share(chosen))
        return result

    def _description(self, target: Target, chosen: Assignment) -> str:
        names = ", ".join(p.name for p in self.grid.candidates)
        return (
            f"Searched from {names} for {target.text}: {100 * self.grid.share(chosen):.0f} % of attention in 4 bits, "
            f"{self.grid.time(chosen):.2f} of BF16's attention time."
        )


def _errors(points: Sequence[Json]) -> Json:
    """How far predictions are off: measured over predicted, its median, and the largest deviation either way."""
    ratios = [
        float(p["measured"]) / float(p["predicted"])
        for p in points
        if float(p["predicted"]) > 0 and math.isfinite(float(p["measured"])) and math.isfinite(float(p["predicted"]))
    ]
    if not ratios:
        return {"ratio": None, "error": None, "largest": None}
    off = [abs(r - 1) for r in ratios]
    return {
        "ratio": number(float(np.median(ratios))),
        "error": number(float(np.median(off))),
        "largest": number(max(off)),
    }
