"""What a searched policy is held against, measured in the same way: all BF16, all fast, first and last steps BF16."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from wanfp4.policy import Policy, get_policy
from wanfp4.quality.aggregate import Json, number, numbers
from wanfp4.quality.cells import Assignment, Grid, Sensitivities, bins_of, metric
from wanfp4.quality.drift import FLOOR_BACKEND
from wanfp4.quality.figures import in_squares
from wanfp4.quality.intervals import compare, interval
from wanfp4.quality.runs import Pair, Runs, velocities_of
from wanfp4.quality.targets import SHARE, Target

Wanted = tuple[Policy, str | None]  # a policy to measure, and the backend


class Rival(NamedTuple):
    """A policy to measure beside others: its time over BF16's, its share in 4 bits, and its kind for the page."""

    policy: Policy
    backend: str | None
    time: float
    share: float
    kind: str


class Rivals:
    """Measures policies on the held-out runs; `known` tells which split of first and last steps is best."""

    def __init__(self, runs: Runs, known: Sensitivities, backend: str | None, held_out: list[Pair]) -> None:
        self.runs = runs
        self.grid: Grid = known.grid
        self.known = known
        self.backend = backend
        self.held_out = held_out
        self.prompts = [p for p, _ in held_out]
        steps = runs.steps(held_out[0])
        self.by_step = dataclasses.replace(self.grid, bins=bins_of(steps, len(steps)))

    def measured(self, rival: Rival) -> Json:
        """The row of a policy: what the held-out runs say of it."""
        entries = [self.runs.measure(rival.policy, rival.backend, pair, free=True) for pair in self.held_out]
        forced = velocities_of(entries)
        figures = {
            "velocity_mean": list(forced.mean(axis=1)),
            "velocity_worst": list(forced.max(axis=1)),
            "latent": [float(e["free"]["latent"]) for e in entries],
        }
        return {
            "name": rival.policy.name,
            "kind": rival.kind,
            "time": number(rival.time),
            "share": number(rival.share),
            "velocity": number(metric(forced, "velocity")),
            "runs": {name: numbers(values) for name, values in figures.items()},
            **{name: interval(values, self.prompts).to_dict() for name, values in figures.items()},
            "per_step": numbers(list(np.median(forced, axis=0))),
            "backend": sorted({b for e in entries for b in e["backend"]}),
            "emulated": any(e["emulated"] for e in entries),
            "receipt": entries[0]["receipt"],
        }

    def everywhere(self) -> list[Rival]:
        """All BF16 (the noise floor), and every candidate everywhere."""
        grid = self.grid
        floor = get_policy("bf16").with_(name="all BF16, exact float32 attention")
        rows = [Rival(floor, FLOOR_BACKEND, 1.0, 0.0, "floor")]
        for c, policy in enumerate(grid.candidates, 1):
            everywhere = grid.policy(grid.uniform(c), f"all {policy.name}")
            rows.append(Rival(everywhere, self.backend, grid.costs[c - 1], grid.shares[c - 1], "all"))
        return rows

    def first_last(self, target: Target, searched: Assignment) -> list[Rival]:
        """First and last steps in BF16, of the candidate with most in 4 bits and of others in 4 bits that `searched`
        uses: as many steps as make it comparable with `searched`, split evenly and as predicted best."""
        grid, rows = self.grid, []
        steps = len(self.by_step.bins)
        fast = min(range(len(grid.candidates)), key=lambda c: (-grid.shares[c], grid.costs[c]))
        for c, policy in enumerate(grid.candidates):
            if c != fast and not ((searched == c + 1).any() and grid.shares[c] > 0):
                continue
            kept = self._kept_steps(target, searched, c, steps)
            if kept is None:
                continue
            whole = Sensitivities(self.by_step, self.known.squares)
            splits = [(kept - last, last) for last in range(kept + 1)]
            chosen = {split: self._first_last(c + 1, *split, steps) for split in splits}
            usual = (kept - kept // 2, kept // 2)
            best = min(splits, key=lambda split: metric(whole.predict(chosen[split]), "velocity-mean"))
            for split in dict.fromkeys((usual, best)):
                first, last = split
                kind = "first-last" if split == usual else "first-last, best split"
                name = f"{policy.name}, BF16 in {_kept_in_bf16(first, last)}"
                made = self.by_step.policy(chosen[split], name)
                time, share = self.by_step.time(chosen[split]), self.by_step.share(chosen[split])
                rows.append(Rival(made, self.backend, time, share, kind))
        return rows

    def _first_last(self, choice: int, first: int, last: int, steps: int) -> Assignment:
        chosen = self.by_step.uniform(choice)
        chosen[:first] = 0
        chosen[steps - last :] = 0
        return chosen

    def _kept_steps(self, target: Target, searched: Assignment, c: int, steps: int) -> int | None:
        """Fewest BF16 steps with which a candidate is no faster than the searched policy (for a share: has no larger
        one); None when that is none of its steps, or all."""
        for kept in range(steps):
            chosen = self._first_last(c + 1, kept, 0, steps)
            if target.kind == SHARE:
                enough = self.by_step.share(chosen) <= self.grid.share(searched) + 1e-9
            else:
                enough = self.by_step.time(chosen) >= self.grid.time(searched) - 1e-9
            if enough:
                return kept or None
        return None

    def compare(self, result: Json) -> None:
        """The searched policy against every baseline, run by run."""
        searched = result["searched"]
        if searched is None:
            return
        floor = float(result["baselines"][0]["velocity_mean"]["median"])
        for row in result["baselines"]:
            mine, other = ([float(v) for v in r["runs"]["velocity_mean"]] for r in (searched, row))
            smaller = min(float(r["velocity_mean"]["median"]) for r in (searched, row))
            judged = compare(mine, other, self.prompts, floor=in_squares(smaller, floor))
            a, b = searched["velocity_mean"], row["velocity_mean"]
            known = all(math.isfinite(float(x[k])) for x in (a, b) for k in ("low", "high"))
            apart = known and (float(a["high"]) < float(b["low"]) or float(b["high"]) < float(a["low"]))
            row["against"] = {**judged.to_dict(), "intervals_apart": apart}


def _kept_in_bf16(first: int, last: int) -> str:
    parts = [
        f"the {which} step" if count == 1 else f"the {which} {count} steps"
        for which, count in (("first", first), ("last", last))
        if count
    ]
    if first > 1 and last > 1:
        return f"the first {first} and the last {last} steps"
    return " and ".join(parts)
