"""Medians of figures that may be NaN or infinite, by one rule: where one of them is NaN, so is the median.

A broken result must be seen, so it is never averaged away; nor is it ever the better of two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def medians(table: npt.ArrayLike) -> Floats:
    """Medians over the first axis: the mean of the middle two of an even number. NaN where there is nothing."""
    ordered = np.sort(np.asarray(table, dtype=np.float64), axis=0)
    if not len(ordered):
        return np.full(ordered.shape[1:], math.nan)
    below, above = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    # Not np.median: the mean of two infinities is fine, but numpy warns on the way to it.
    with np.errstate(invalid="ignore"):
        middle = np.where(below == above, below, below / 2 + above / 2)
    return np.where(np.isnan(ordered[-1]), math.nan, middle)  # NaN sorts last


def median(values: Iterable[float]) -> float:
    """The same of a few numbers, which takes a tenth of the time."""
    ordered = sorted(map(float, values))
    if not ordered or any(map(math.isnan, ordered)):
        return math.nan
    below, above = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return below if below == above else below / 2 + above / 2


def badness(error: float | str) -> float:
    """An error, or its JSON value, as a number to order by: NaN is as bad as infinity."""
    return math.inf if math.isnan(float(error)) else float(error)
