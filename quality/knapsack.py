"""The multiple-choice knapsack of a policy search: one choice for each cell, cost against damage, exactly.

`frontier` merges the cells one after another and keeps, of all sums of costs and damages, those that no other beats in
both (Nemhauser and Ullmann's dominance). Sums of equal costs meet, so for cells of a few different costs the front
stays small and every optimum is on it, whichever of the two is limited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

# Sums that differ by less than this part of the largest total are equal: floats depend on the order of adding.
PARTS = 10**9
# Beyond this many points, points of nearly equal cost are thinned to the best of them.
MOST_POINTS = 20_000


@dataclass(frozen=True)
class Frontier:
    """Every choice that no other beats in both cost and damage, from the cheapest to the least damaging.

    cost, damage  [points], as the sums of what was chosen.
    exact  False when points had to be thinned; costs are then at most `cells / MOST_POINTS` of the range too high.
    """

    cost: Floats
    damage: Floats
    exact: bool
    _chosen: npt.NDArray[np.int16]

    def choices(self, point: int) -> list[int]:
        """The choice in every cell at one point."""
        return [int(choice) for choice in self._chosen[point]]

    def __len__(self) -> int:
        return len(self.cost)


def frontier(costs: Sequence[Sequence[float]], damages: Sequence[Sequence[float]]) -> Frontier:
    """The frontier of sums; costs[i][j] and damages[i][j] are of choice j in cell i, both at least 0.

    A choice whose damage is not finite is never made. Raises ValueError when the tables do not match, a cost is
    negative or not finite, or a cell has no choice left.
    """
    if len(costs) != len(damages) or not costs or any(len(c) != len(d) for c, d in zip(costs, damages, strict=True)):
        raise ValueError("costs and damages must be of the same cells and choices, one cell or more")
    cells = [(np.asarray(c, np.float64), np.asarray(d, np.float64)) for c, d in zip(costs, damages, strict=True)]
    if not all(np.isfinite(c).all() and (c >= 0).all() for c, _ in cells):
        raise ValueError("costs must be finite and at least 0")
    if not all(np.isfinite(d).any() and not (d < 0).any() for _, d in cells):
        raise ValueError("every cell needs a choice of finite damage, and no damage may be negative")
    unit = sum(float(c.max()) for c, _ in cells) / PARTS or 1.0
    least = sum(float(d[np.isfinite(d)].max()) for _, d in cells) / PARTS
    total: Floats = np.zeros(1)
    damage: Floats = np.zeros(1)
    chosen: npt.NDArray[np.int16] = np.zeros((1, 0), np.int16)
    exact = True
    for cost, harm in cells:
        usable = np.flatnonzero(np.isfinite(harm))
        all_costs = np.add.outer(total, cost[usable]).ravel()
        all_damage = np.add.outer(damage, harm[usable]).ravel()
        parts: Integers = np.rint(all_costs / unit).astype(np.int64)
        order = np.lexsort((all_damage, parts))
        best = np.minimum.accumulate(all_damage[order])
        kept = order[np.concatenate(([True], best[1:] < best[:-1] - least))]
        if len(kept) > MOST_POINTS:
            exact = False
            bucket = parts[kept] // max(1, int(parts[kept[-1]] - parts[kept[0]]) // MOST_POINTS)
            kept = kept[np.concatenate((bucket[1:] != bucket[:-1], [True]))]
        total, damage = all_costs[kept], all_damage[kept]
        choice = usable[kept % len(usable)].astype(np.int16)
        chosen = np.column_stack((chosen[kept // len(usable)], choice))
    return Frontier(total, damage, exact, chosen)
