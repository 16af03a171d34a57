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
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from wanfp4.errors import OutputError, SettingsError
from wanfp4.policy import Policy
from wanfp4.processors.patch import patch
from wanfp4.processors.pipelines import Settings, info_of, shifted
from wanfp4.quality import costs
from wanfp4.quality.aggregate import Json, number
from wanfp4.quality.cells import Grid, check_candidates, check_length, groups_of
from wanfp4.quality.files import output_folder
from wanfp4.quality.jobs import attention_of, essence, header, log_above_bar, quiet, said_once, weights_digest
from wanfp4.quality.plan import DEFAULT_SEEDS, check_call, make_plan
from wanfp4.quality.results import SEARCH, read_earlier
from wanfp4.quality.runs import Runs
from wanfp4.quality.search_files import claim
from wanfp4.quality.search_job import Job
from wanfp4.quality.search_report import KIND, SCHEMA, SearchReport
from wanfp4.quality.targets import (
    candidates_for,
    check_counts,
    check_held_out,
    check_reachable,
    check_targets,
)

log = logging.getLogger("wanfp4")

BINS, CHECKS, ROUNDS = 5, 8, 4
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
              settings and machine is used, so the same call goes on; `force` begins anew. Files that no search has
              written are not written over without `force`.

    Time, in denoising runs: for each prompt and seed of the search 1 + candidates × groups + `checks`; for each to
    verify 1 + 2 × (policies verified: one or more a target, and from 1 + candidates to 1 + 3 × candidates baselines).

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
        "files": [],
    }
    report = SearchReport(state)
    with contextlib.nullcontext() if folder is None else output_folder(folder) as place:
        if place is not None:
            state["files"] = claim(place, state["targets"], force=force)
            if not force:
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
                Job(runs, grid, backend, pairs, held_out, bins, checks, rounds, report).run(targets)
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
    earlier = read_earlier(folder, SEARCH)
    if earlier is None:
        return
    if "weights" not in (earlier.get("model") or {}):
        path = str(folder / SEARCH.file)
        raise OutputError(
            f"{path!r} is of an earlier version, which did not keep the weights' digest: whether its figures are "
            "of this model is not known; choose another folder, or add --force"
        )
    wrong = [words for key, words in _SAME.items() if essence(key, earlier.get(key)) != essence(key, state[key])]
    if wrong:
        raise OutputError(
            f"{str(folder)!r} holds a search with another {', '.join(wrong)}; give the same to go on with it, choose "
            "another folder, or add --force"
        )
    for key in ("steps", "references", "measured"):
        state[key] = earlier[key]
