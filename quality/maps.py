"""Attention maps: the error of every self-attention call of a run, by layer, step, CFG branch, expert and head.

`attention_map` runs a pipeline with a policy and computes the pipeline's own attention on the same q, k, v beside it.
docs/maps.md defines every figure.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from tqdm import tqdm

from wanfp4.errors import SettingsError
from wanfp4.policy import Policy
from wanfp4.processors.patch import Patch, patch
from wanfp4.processors.pipelines import Settings, generate_latents, info_of, shifted
from wanfp4.processors.session import Call
from wanfp4.quality.aggregate import Json, number, numbers
from wanfp4.quality.attribution import Attributed, attribute, summarise
from wanfp4.quality.files import output_folder, writable_folder, write
from wanfp4.quality.intervals import intervals
from wanfp4.quality.jobs import attention_of, header, log_above_bar, quiet, said_once, weights_digest
from wanfp4.quality.map_pages import map_html, map_markdown
from wanfp4.quality.medians import median, medians
from wanfp4.quality.plan import DEFAULT_SEEDS, Plan, check_call, make_plan
from wanfp4.quality.record import Seen, watching
from wanfp4.quality.report import json_text, steps_of
from wanfp4.quality.results import MAP, read_result
from wanfp4.quality.shadow import FIGURES, ROWS, Place, Record, Shadow, spaced
from wanfp4.quality.suspects import SMALLEST, TOLERATED, Suspect, suspects

log = logging.getLogger("wanfp4")

KIND, SCHEMA = MAP.kind, MAP.schema
# Steps of a run whose calls are attributed: the first, the last and those between, evenly spaced.
ATTRIBUTED_STEPS = 3
# Suspicious places that are listed.
SUSPECTS = 10

Floats = npt.NDArray[np.float64]


class AttentionMap:
    """What `attention_map` found. `data` holds every figure as JSON values (docs/maps.md).

    Arrays come as [runs, cells] in the order of `places`; a cell that a run did not reach is NaN.
    """

    def __init__(self, data: Json) -> None:
        self.data = data

    @property
    def complete(self) -> bool:
        """False while runs are missing."""
        return bool(self.data["complete"])

    @property
    def places(self) -> list[Place]:
        """Every (expert, blocks, layer, step, branch) of the map, in the order that the calls came."""
        return [Place(*cell) for cell in self.data["cells"]]

    @property
    def prompts(self) -> list[int]:
        """The prompt of each run, as an index: what `intervals` takes to draw runs by prompt."""
        return [run["prompt"] for run in self.data["runs"]]

    def values(self, figure: str) -> Floats:
        """[runs, cells] of a figure, one of `shadow.FIGURES`. Raises ValueError for another name."""
        self._check(figure)
        return np.array([_floats(run["figures"][figure]) for run in self.data["runs"]], np.float64)

    def heads(self, figure: str) -> Floats:
        """[runs, cells, heads] of a figure. Raises ValueError when the map was made without `per_head`."""
        self._check(figure)
        if not self.data["per_head"]:
            raise ValueError("this map has no figures of single heads: make it with per_head=True")
        width = self.data["heads"]
        return np.array(
            [
                [[math.nan] * width if cell is None else _floats(cell) for cell in run["heads"][figure]]
                for run in self.data["runs"]
            ],
            np.float64,
        )

    def medians(self, figure: str) -> dict[Place, float]:
        """Median over runs of each cell."""
        return dict(zip(self.places, _medians(self.values(figure), self._reached()), strict=True))

    def rounded(self) -> npt.NDArray[np.bool_]:
        """[cells]: where the policy ran something else than the pipeline's own attention."""
        return np.array([ran != "exact" for ran in self.data["ran"]])

    def suspects(self, keep: int | None = SUSPECTS) -> list[Suspect]:
        """Where something is wrong, most suspicious first; `Suspect.stands_out` says whether anything is. None: all.

        First where a result is not what the numerics make of its q, k, v ("unexplained"): damage. Then where the error
        itself is larger than the rest of the map lets expect ("rel_l2"): places that are hard for the policy. Cells
        that stay in the pipeline's own attention are left out.
        """
        damage = [one for one in self._suspects("unexplained", TOLERATED) if one.stands_out]
        hard = [one for one in self._suspects("rel_l2", SMALLEST) if not any(d.overlaps(one) for d in damage)]
        return [*damage, *hard][:keep]

    def _suspects(self, figure: str, least: float) -> list[Suspect]:
        chosen = self.rounded()
        cells = {p: v for (p, v), on in zip(self.medians(figure).items(), chosen, strict=True) if on}
        if not cells:
            return []
        heads = None
        if self.data["per_head"]:
            middle = _medians(self.heads(figure), self._reached())
            heads = {p: list(v) for p, v, on in zip(self.places, middle, chosen, strict=True) if on}
        return suspects(cells, heads, figure=figure, least=least, keep=None)

    def to_dict(self) -> Json:
        """What map.json holds: a copy, plain JSON values."""
        return {**copy.deepcopy(self.data), "summary": self._summary()}

    def save(self, folder: str | Path, *, pages: bool = True) -> Path:
        """Write map.json and, with `pages`, map.html and map.md; returns the folder. Raises OutputError."""
        folder = writable_folder(folder)
        data = self.to_dict()
        if pages:
            write(folder / "map.html", map_html(data))
            write(folder / "map.md", map_markdown(data))
        write(folder / "map.json", json_text(data))
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> AttentionMap:
        """The map in a folder. Raises SettingsError when there is none, or one of another schema."""
        data = read_result(folder, MAP)
        data.pop("summary", None)  # it is made anew
        return cls(data)

    def add_run(
        self, prompt: int, seed: int, seconds: float, records: Sequence[Record], receipt: Json, *, complete: bool
    ) -> None:
        """Add a run's records, those of an unfinished run, too; calls of one place in one run are averaged."""
        by_place: dict[Place, list[Record]] = {}
        for record in records:
            by_place.setdefault(record.place, []).append(record)
        known = {tuple(cell): i for i, cell in enumerate(self.data["cells"])}
        for place, group in by_place.items():
            if tuple(place) not in known:
                known[tuple(place)] = len(known)
                self.data["cells"].append(list(place))
                self.data["ran"].append(group[0].ran)
                self.data["heads"] = max(self.data["heads"], len(group[0].heads["rel_l2"]))
                for earlier in self.data["runs"]:
                    for values in (*earlier["figures"].values(), *(earlier["heads"] or {}).values()):
                        values.append(None)
        run: Json = {"prompt": prompt, "seed": seed, "complete": complete, "wall_seconds": number(seconds)}
        run["figures"] = {name: [None] * len(known) for name in FIGURES}
        run["heads"] = {name: [None] * len(known) for name in FIGURES} if self.data["per_head"] else None
        for place, group in by_place.items():
            at = known[tuple(place)]
            for name in FIGURES:
                run["figures"][name][at] = number(float(np.mean([r.figures[name] for r in group])))
                if run["heads"] is not None:
                    run["heads"][name][at] = numbers(list(np.mean([r.heads[name] for r in group], axis=0)))
        run["receipt"] = receipt
        self.data["runs"].append(run)

    def _reached(self) -> npt.NDArray[np.bool_]:
        """[runs, cells]: what is NaN there is a broken figure, elsewhere a missing one."""
        return np.array([[v is not None for v in run["figures"]["rel_l2"]] for run in self.data["runs"]])

    def _check(self, figure: str) -> None:
        if figure not in FIGURES:
            raise ValueError(f"no figure {figure!r}; the figures are {', '.join(FIGURES)}")

    def _summary(self) -> Json:
        """Medians and intervals over runs, of the whole map, of each layer and of each step; and what stands out."""
        if not self.data["runs"]:
            return {"overall": {}, "layers": [], "steps": [], "over_floor": None, "suspects": [], "standing_out": 0}
        places, chosen = self.places, self.rounded()
        tables, reached = {name: self.values(name) for name in FIGURES}, self._reached()

        def over(cells: npt.NDArray[np.bool_]) -> Json:
            # Calls in the pipeline's own attention have no error to count, unless they are all there is.
            cells = cells & chosen if (cells & chosen).any() else cells
            runs = [i for i, row in enumerate(reached) if (row & cells).any()]
            if not runs:
                return {}
            # A NaN among a run's cells makes its median NaN: a broken call must be seen.
            typical = [[median(t[i, reached[i] & cells]) for t in tables.values()] for i in runs]
            spread = intervals(typical, [self.prompts[i] for i in runs])
            return {name: one.to_dict() for name, one in zip(tables, spread, strict=True)}

        rows = dict.fromkeys(place[:3] for place in places)
        columns = dict.fromkeys((place.expert, place.step) for place in places)
        overall = over(np.ones_like(chosen))
        floor = float(overall["floor"]["median"]) if "floor" in overall else math.nan
        error = float(overall["rel_l2"]["median"]) if "rel_l2" in overall else math.nan
        found = self.suspects(None)
        return {
            "overall": overall,
            "over_floor": number(error / floor) if floor > 0 else None,
            "layers": [
                {"expert": e, "blocks": b, "layer": n, **over(np.array([p[:3] == (e, b, n) for p in places]))}
                for e, b, n in rows
            ],
            "steps": [
                {"expert": e, "step": s, **over(np.array([(p.expert, p.step) == (e, s) for p in places]))}
                for e, s in columns
            ],
            "suspects": [{**one.to_dict(), "where": one.where, "text": str(one)} for one in found[:SUSPECTS]],
            "standing_out": sum(one.stands_out for one in found),
        }


def attention_map(
    pipe: Any,
    policy: str | Path | Policy = "wan-fast",
    prompts: Sequence[str] | str = (),
    seeds: Sequence[int] | int = DEFAULT_SEEDS,
    steps: int | None = None,
    *,
    settings: Settings | None = None,
    backend: str | None = None,
    strict: bool = False,
    forced: bool = True,
    per_head: bool = False,
    attribution: bool = False,
    rows: int = ROWS,
    progress: bool = True,
    partial: str | Path | None = None,
    model: str | None = None,
    command: str | None = None,
    **call: Any,
) -> AttentionMap:
    """Map the error of `policy` in `pipe`, an unpatched diffusers text-to-video pipeline.

    prompts, seeds, steps, settings, backend, strict, progress, model, command, call  as `wanfp4.drift`.
    forced       the model goes on with the pipeline's own attention, so that every call gets what an unpatched run
                 gives it, and nothing adds up; otherwise with the policy's, as in use.
    per_head     keep the figures of every head, too.
    attribution  try the policy's numerics with one part exact, and with one lever added, at three steps of each run.
    rows         query rows of each call and head that the figures of logits and codes are sampled from.
    partial      a folder that gets map.json after every run, and on a failure or Ctrl-C all pages with what there is,
                 an unfinished run's finished calls among it.

    Time: one run for each prompt and seed, with both attentions in it. Memory beyond the run's own: see `Shadow`.

    Raises PolicyError, BackendError, SettingsError, ModelError, OutputError before the first step; FallbackError with
    `strict`.
    """
    info = info_of(pipe)
    plan = make_plan(info, [policy], prompts, seeds, steps, settings=settings)
    check_call(pipe, call)
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise SettingsError(f"rows must be a whole number from 1, not {rows!r}")
    attention = attention_of(pipe, info)
    known = header(KIND, SCHEMA, pipe, info, plan, backend, strict, call, model, command)
    known["model"]["weights"] = weights_digest(pipe)
    [chosen] = plan.policies
    found = AttentionMap(
        {
            **known,
            "attention": attention,
            "policy": chosen.to_dict(),
            "numerics": chosen.numerics.label,
            "forced": forced,
            "per_head": per_head,
            "rows": rows,
            "heads": 0,
            "cells": [],
            "ran": [],
            "runs": [],
            "attribution": None,
        }
    )
    with contextlib.nullcontext() if partial is None else output_folder(partial) as folder:
        try:
            with patch(pipe, chosen, backend, strict=strict) as handle:
                _run_all(pipe, plan, found, handle, call, attribution, progress, folder)
        except BaseException:
            if folder is not None and found.data["runs"]:
                found.save(folder)
                log.warning("stopped early: what has finished is in %s, marked incomplete", folder)
            raise
    found.data["complete"] = True
    return found


def _run_all(
    pipe: Any,
    plan: Plan,
    found: AttentionMap,
    handle: Patch,
    call: Mapping[str, Any],
    attribution: bool,
    progress: bool,
    folder: Path | None,
) -> None:
    total = len(plan.prompts) * len(plan.seeds) * plan.settings.steps
    attributed: list[list[Attributed]] = []
    with (
        shifted(pipe, plan.settings.shift),
        quiet(pipe),
        said_once(),
        tqdm(total=total, unit="step", disable=not progress, dynamic_ncols=True) as bar,
        log_above_bar(),
    ):
        for p, prompt in enumerate(plan.prompts):
            for seed in plan.seeds:
                bar.set_description(f"prompt {p + 1}, seed {seed}")
                handle.reset()
                run = _Run(found.data["forced"], found.data["rows"], plan.settings.steps if attribution else 0, bar)
                started, done = time.perf_counter(), False
                try:
                    with handle.observing(run.observe), watching(pipe, run.step):
                        generate_latents(pipe, prompt, plan.settings, seed, **call)
                    done = True
                finally:
                    records = run.shadow.take() if done else run.finished()
                    if records:
                        receipt = handle.receipt()
                        kept = {"summary": receipt.summary(), "fallbacks": len(receipt.fallbacks)}
                        seconds = time.perf_counter() - started
                        found.add_run(p, seed, seconds, records, kept, complete=done)
                        if done or not found.data["steps"]:
                            found.data["steps"] = steps_of([seen.step for seen in run.seen])
                    attributed.append(run.attributed)
                    if attribution:
                        prompts = [q for q in range(len(plan.prompts)) for _ in plan.seeds][: len(attributed)]
                        found.data["attribution"] = summarise(attributed, prompts)
                if folder is not None:
                    found.save(folder, pages=False)


class _Run:
    """One denoising run as it goes on."""

    def __init__(self, forced: bool, rows: int, attributed_of: int, bar: Any) -> None:
        self.shadow = Shadow(forced=forced, rows=rows)
        self.chosen = set(spaced(ATTRIBUTED_STEPS, attributed_of)) if attributed_of else set()
        self.bar = bar
        self.seen: list[Seen] = []
        self.attributed: list[Attributed] = []

    def observe(self, call: Call) -> Tensor | None:
        # Attribution is of one branch: the other has the same layers and steps, and nearly the same activations.
        if call.step in self.chosen and call.branch != "uncond" and not call.numerics.is_exact:
            self.attributed.append(attribute(call))
        return self.shadow(call)

    def step(self, seen: Seen) -> None:
        self.seen.append(Seen(seen.step, *(seen.sample.new_empty(0) for _ in range(3))))  # without the latents
        self.bar.update()

    def finished(self) -> list[Record]:
        """Records of the steps that an interrupted run has finished."""
        try:
            return [record for record in self.shadow.take() if record.place.step < len(self.seen)]
        except Exception as error:  # noqa: BLE001 - whatever broke the run may break this too, and must not hide it
            log.warning("the interrupted run's figures are lost: %s", error)
            return []


def _floats(values: Sequence[Any]) -> list[float]:
    return [math.nan if v is None else float(v) for v in values]


def _medians(table: Floats, reached: npt.NDArray[np.bool_]) -> Floats:
    """Median over those runs that reached a cell, of table [runs, cells, …]; NaN where one of them is."""
    out = np.empty(table.shape[1:])
    for i, runs in enumerate(reached.T):
        out[i] = medians(table[runs, i])
    return out
