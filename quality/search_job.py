"""The search as it goes on: what it measures, in which order, and what it makes of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Mapping, Sequence

import numpy as np

from wanfp4.policy import Policy
from wanfp4.quality.aggregate import Json, number, numbers
from wanfp4.quality.cells import Assignment, Floats, Grid, Sensitivities, bins_of, finite, metric
from wanfp4.quality.choice import Chooser
from wanfp4.quality.rivals import Rival, Rivals, Wanted
from wanfp4.quality.runs import Pair, Runs, digest
from wanfp4.quality.search_report import SearchReport
from wanfp4.quality.targets import SHARE, Target

# A corrected target aims a little below the limit; a verified drift this close to it is not tried to be bettered.
AIM, CLOSE = 0.99, 0.97


class Job:
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
        alone, mixed = self._alone(), self._mixed()
        self._measure([(p, self.backend) for p in (*alone.values(), *(p for p, _ in mixed))], self.pairs)
        self.known = self.sensitivities(alone)
        self.chooser = Chooser(self.known)
        self.rivals = Rivals(self.runs, self.known, self.backend, self.held_out)
        self.additivity(mixed)
        # All targets go on together, from one set of runs to the next: pair by pair, so that few references are made.
        solving = {target: self.solve(target) for target in targets}
        results: dict[Target, Json] = {}
        wanted: list[Wanted] = [(row.policy, row.backend) for row in self.rivals.everywhere()]
        while solving:
            for target in list(solving):
                try:
                    wanted += next(solving[target])
                except StopIteration as end:
                    results[target] = end.value
                    del solving[target]
            self.state["results"] = [results[target] for target in targets if target in results]
            self._measure(wanted, self.held_out, free=True)
            wanted = []
        self.verified()

    def _measure(self, wanted: Sequence[Wanted], pairs: Sequence[Pair], *, free: bool = False) -> None:
        """Every policy for each pair, pair by pair: a reference for which there is no room beside the others, as of a
        large model, is made once for all policies and not once for each. The figures stay with `runs`."""
        different: dict[str, Wanted] = {}
        for policy, backend in wanted:
            different.setdefault(digest(policy, backend), (policy, backend))
        if free:  # the others are on the bar from the start
            self.runs.expect(2 * sum(not self.runs.met(*one, pair) for one in different.values() for pair in pairs))
        for pair in pairs:
            for policy, backend in different.values():
                self.runs.measure(policy, backend, pair, free=free)

    def _alone(self) -> dict[tuple[int, int], Policy]:
        """By choice and group of layers, the policy of each candidate in each group alone, at all steps."""
        grid, found = self.grid, {}
        for g, layers in enumerate(grid.groups):
            where = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"
            for c in range(1, len(grid.candidates) + 1):
                chosen = grid.uniform(0)
                chosen[:, g] = c
                found[c, g] = grid.policy(chosen, f"{grid.label(c)} in {where}")
        return found

    def _mixed(self) -> list[tuple[Policy, Assignment]]:
        """Random policies over all cells, and what each chooses."""
        generator = np.random.default_rng(0)
        choices = len(self.grid.candidates) + 1
        found = []
        for i in range(1, self.checks + 1):
            mixing = generator.dirichlet(np.ones(choices))
            chosen = generator.choice(choices, size=self.grid.shape, p=mixing).astype(np.int64)
            found.append((self.grid.policy(chosen, f"random {i}"), chosen))
        return found

    def sensitivities(self, alone: Mapping[tuple[int, int], Policy]) -> Sensitivities:
        """Each candidate in each group of layers, at all steps of one run: steps are told apart afterwards."""
        grid = self.grid
        squares = np.zeros((len(grid.candidates) + 1, len(grid.groups), len(self.pairs), len(self.state["steps"])))
        for (c, g), policy in alone.items():
            squares[c, g] = self.runs.velocities(policy, self.backend, self.pairs) ** 2
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

    def additivity(self, mixed: Sequence[tuple[Policy, Assignment]]) -> None:
        """Random policies on the runs that were searched on: what squares that add up predict, and what is measured."""
        points = [
            self._point(policy.name, chosen, self.runs.velocities(policy, self.backend, self.pairs), "random")
            for policy, chosen in mixed
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

    def solve(self, target: Target) -> Generator[list[Wanted], None, Json]:
        """Choose, verify on held-out runs, correct the goal by what was found, choose again; then the baselines.

        Yields what has to be measured on the held-out runs before it goes on.
        """
        goal, name = target.limit, f"searched-{target.label}"
        tried: list[Json] = []
        seen: set[bytes] = set()
        best: tuple[float, Assignment, Policy] | None = None
        for number_of in range(1, self.rounds + 1):
            chosen = self.chooser.assign(target, goal)
            exact = self.chooser.exact
            if chosen.tobytes() in seen or not chosen.any():
                break
            seen.add(chosen.tobytes())
            policy = self.grid.policy(chosen, name, self._description(target, chosen))
            wanted = [(policy, self.backend)]
            if target.kind == SHARE:  # kept by construction, so what it will be held against is known already
                wanted += [(row.policy, row.backend) for row in self.rivals.first_last(target, chosen)]
            yield wanted
            measured = self.runs.velocities(policy, self.backend, self.held_out, free=True)
            kind = "velocity-mean" if target.kind == SHARE else target.kind
            expected = self.known.predict(chosen)
            predicted, found = metric(expected, kind), metric(measured, kind)
            kept = finite(measured) if target.kind == SHARE else found <= target.limit
            tried.append(
                {
                    "round": number_of,
                    "goal": number(goal),
                    "exact": exact,
                    "predicted": number(predicted),
                    "measured": number(found),
                    "predicted_mean": number(metric(expected, "velocity-mean")),
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
        rivals = self.rivals.everywhere()
        if best is not None:
            _, chosen, policy = best
            result["policy"] = policy.to_dict()
            result["chosen"] = [[self.grid.label(int(c)) for c in row] for row in chosen]
            time, share = self.grid.time(chosen), self.grid.share(chosen)
            result["searched"] = self.rivals.measured(Rival(policy, self.backend, time, share, "searched"))
            rivals += self.rivals.first_last(target, chosen)
        yield [(row.policy, row.backend) for row in rivals]
        result["baselines"] = [self.rivals.measured(row) for row in rivals]
        self.rivals.compare(result)
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
