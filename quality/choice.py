"""The choice of a policy search: from sensitivities and a target to what every cell runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from wanfp4.errors import SettingsError
from wanfp4.quality.cells import Assignment, Floats, Sensitivities, finite, metric
from wanfp4.quality.knapsack import Frontier, frontier
from wanfp4.quality.targets import SHARE, Target

# How often squares are weighted anew; the weight of a range in which BF16 is to gather; beyond so many ranges no start
# gathers it, as there would be too many.
REWEIGHTINGS, GATHERED, MOST_STARTS = 20, 100.0, 12


class Chooser:
    """Knapsacks over the cells of `known`.

    exact   False when a knapsack of the last choice had so many sums that they were thinned (`Frontier.exact`).
    """

    def __init__(self, known: Sensitivities) -> None:
        self.known = known
        self.exact = True

    def assign(self, target: Target, goal: float) -> Assignment:
        """What the knapsack chooses for a target whose limit is `goal`."""
        self.exact = True
        grid, weights = self.known.grid, self.known.grid.weights()
        if target.kind == "velocity":  # the worst step decides, so every range of noise levels is on its own
            found = grid.uniform(0)
            damage = self.known.damage(worst=True)
            for b in range(len(grid.bins)):
                cost = [list(w * np.array([1.0, *grid.costs])) for w in weights[b]]
                front = self._frontier(cost, damage[b])
                steps = list(grid.bins[b].steps)
                for point in range(len(front)):
                    found[b] = front.choices(point)
                    if metric(self.known.predict(found)[:, steps], "velocity") <= goal:
                        break
            return found
        return min(
            (self._descend(target, goal, start) for start in self._starts()), key=lambda c: self._merit(target, c)
        )

    def _frontier(self, cost: Sequence[Sequence[float]], damage: Floats) -> Frontier:
        found = frontier(cost, [list(d) for d in damage])
        self.exact &= found.exact
        return found

    def _starts(self) -> list[Floats | None]:
        """Weights [runs, steps] to begin with: none, and those that gather BF16 in one range of noise levels or two."""
        shape, count = self.known.squares.shape[2:], len(self.known.grid.bins)
        starts: list[Floats | None] = [None]
        for size in (1, 2):
            for some in itertools.combinations(range(count), size) if count <= MOST_STARTS else ():
                weights = np.ones(shape)
                for b in some:
                    weights[:, list(self.known.grid.bins[b].steps)] = GATHERED
                starts.append(weights)
        return starts

    def _descend(self, target: Target, goal: float, weights: Floats | None) -> Assignment:
        """The choice for some weights, then for those that its own errors suggest, as long as that is better.

        A mean over steps is of roots, and squares are what adds. √s ≤ √s₀ + (s − s₀) / 2√s₀, so squares weighted by the
        last choice's 1/√s₀ bound the mean from above, and their least sum is no worse (majorisation, Hunter and Lange).
        """
        chosen = self._pick(target, goal, weights)
        for _ in range(REWEIGHTINGS):
            errors = self.known.predict(chosen)
            if not errors.any() or not finite(errors):
                break
            again = self._pick(target, goal, 1 / np.maximum(errors, 1e-3 * np.median(errors[errors > 0])))
            if self._merit(target, again) >= self._merit(target, chosen) - 1e-12:
                break
            chosen = again
        return chosen

    def _merit(self, target: Target, chosen: Assignment) -> float:
        """What is to be small: the error for a share, the time for a budget."""
        return (
            metric(self.known.predict(chosen), "velocity-mean")
            if target.kind == SHARE
            else self.known.grid.time(chosen)
        )

    def _pick(self, target: Target, goal: float, weights: Floats | None) -> Assignment:
        """The knapsack over all cells, with squares weighted by [runs, steps]."""
        grid = self.known.grid
        per_choice = np.array([1.0, *grid.costs]) if target.kind != SHARE else 1 - np.array([0.0, *grid.shares])
        cost = [list(w * per_choice) for w in grid.weights().ravel()]
        front = self._frontier(cost, self.known.damage(weights).reshape(len(cost), -1))
        if target.kind == SHARE:
            kept = np.flatnonzero(1 - front.cost >= goal - 1e-9)
            if not len(kept):
                raise SettingsError(f"{target.text} is out of reach: the candidates' figures are not finite")
            return np.array(front.choices(int(kept[-1])), np.int64).reshape(grid.shape)
        for point in range(len(front)):
            chosen = np.array(front.choices(point), np.int64).reshape(grid.shape)
            if metric(self.known.predict(chosen), target.kind) <= goal:
                break
        return chosen
