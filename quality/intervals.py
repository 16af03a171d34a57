"""Medians with bootstrap intervals over prompts and seeds, and when two medians differ.

Percentile bootstrap (Efron), seeded: the same figures give the same interval. Runs of one prompt are alike, so prompts
are drawn with replacement first, and then the runs of each drawn prompt; with a single prompt its runs are drawn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wanfp4.quality.aggregate import Json, number
from wanfp4.quality.medians import medians

LEVEL = 0.95
RESAMPLES = 2000
# Where nothing differs, n figures all lie on one side with probability 2^(1−n): from here on below 5 %.
ENOUGH = 6

INSIDE_FLOOR = "inside the noise floor"
NOT_TOLD_APART = "not told apart by these runs"
LOWER, HIGHER = "lower", "higher"


@dataclass(frozen=True)
class Interval:
    """The median of some runs' figures, and the interval in which `level` of its bootstrap medians lie.

    low and high are NaN for a single run, which shows no spread, and everything is NaN when a figure is.
    """

    median: float
    low: float
    high: float
    runs: int
    level: float = LEVEL

    @property
    def known(self) -> bool:
        """False for a single run: there is a median and nothing to say how far it may be off."""
        return not (math.isnan(self.low) or math.isnan(self.high))

    def to_dict(self) -> Json:
        values = {"median": number(self.median), "low": number(self.low), "high": number(self.high)}
        return {**values, "runs": self.runs, "level": self.level}


@dataclass(frozen=True)
class Comparison:
    """Whether figures `a` differ from paired figures `b`: of the same prompts, seeds and noise.

    difference  of a − b.
    verdict     `LOWER` or `HIGHER` (a than b), `INSIDE_FLOOR`, or `NOT_TOLD_APART` when the interval holds 0, and for a
                single run.
    floor       what a mere change of kernel makes of the figure; smaller differences mean nothing.
    """

    difference: Interval
    verdict: str
    floor: float

    def to_dict(self) -> Json:
        return {"difference": self.difference.to_dict(), "verdict": self.verdict, "floor": number(self.floor)}


def interval(
    values: Sequence[float], prompts: Sequence[Hashable] | None = None, *, level: float = LEVEL, seed: int = 0
) -> Interval:
    """Median and bootstrap interval of one figure per run; `prompts` says which runs share a prompt.

    Raises ValueError for no values, or as many prompts as there are not values.
    """
    [found] = intervals(np.asarray(values, dtype=np.float64)[:, None], prompts, level=level, seed=seed)
    return found


def intervals(
    values: npt.ArrayLike, prompts: Sequence[Hashable] | None = None, *, level: float = LEVEL, seed: int = 0
) -> list[Interval]:
    """`interval` of every column of values [runs, figures]; all figures are resampled together."""
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2 or not len(table):
        raise ValueError(f"intervals need figures of one run or more; found an array of shape {list(table.shape)}")
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, not {level}")
    runs = len(table)
    middle = medians(table)
    if prompts is not None and len(prompts) != runs:
        raise ValueError(f"{runs} runs need as many prompts; found {len(prompts)}")
    if runs == 1:
        return [Interval(float(m), math.nan, math.nan, 1, level) for m in middle]
    draws = _draws(_numbered([0] * runs if prompts is None else prompts), seed)
    low, high = np.empty(table.shape[1]), np.empty(table.shape[1])
    for i, column in enumerate(table.T):
        # Not the interpolated quantile: between infinities it would be NaN.
        low[i], high[i] = np.quantile(
            medians(column[draws].T), [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf"
        )
    bad = np.isnan(middle)
    low[bad] = high[bad] = math.nan
    return [Interval(float(m), float(a), float(b), runs, level) for m, a, b in zip(middle, low, high, strict=True)]


def compare(
    a: Sequence[float],
    b: Sequence[float],
    prompts: Sequence[Hashable] | None = None,
    *,
    floor: float = 0.0,
    level: float = LEVEL,
    seed: int = 0,
) -> Comparison:
    """Judge the median of a − b, figures of the same runs in the same order. Above a NaN floor nothing is told apart.

    Raises ValueError when they are not as many.
    """
    if len(a) != len(b):
        raise ValueError(f"paired figures are needed; found {len(a)} and {len(b)}")
    difference = interval([x - y for x, y in zip(a, b, strict=True)], prompts, level=level, seed=seed)
    if abs(difference.median) <= floor:
        verdict = INSIDE_FLOOR
    elif math.isnan(floor):
        verdict = NOT_TOLD_APART
    elif difference.low > 0:
        verdict = HIGHER
    elif difference.high < 0:
        verdict = LOWER
    else:
        verdict = NOT_TOLD_APART
    return Comparison(difference, verdict, floor)


def few(prompts: Sequence[Hashable]) -> str | None:
    """What to add to intervals and verdicts over runs with these prompts, one for each run; None for nothing.

    Prompts are what is drawn, so seeds do not make up for them. Where prompts differ by more than seeds do, the sides
    that n prompts point to are n throws of a coin, and all agree in 2^(1−n) of cases. A single run has no interval.
    """
    if len(prompts) < 2:
        return None
    several = len(set(prompts)) > 1
    drawn = len(set(prompts)) if several else len(prompts)
    said = [] if several else ["All runs have one prompt, so intervals and verdicts are of that prompt alone."]
    if drawn < ENOUGH:
        said.append(
            f"With {drawn} {'prompts' if several else 'runs'} the intervals are less than 95 % sure: where nothing "
            f"differs, all can point one way in {100 * 2 ** (1 - drawn):.0f} % of cases"
            f"{', however many seeds there are' if several else ''}. Take the verdicts as hints."
        )
    return " ".join(said) or None


def _numbered(prompts: Sequence[Hashable]) -> tuple[int, ...]:
    """Each run's prompt, counted in order of appearance."""
    numbers = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    return tuple(numbers[prompt] for prompt in prompts)


@functools.lru_cache(maxsize=8)
def _draws(prompts: tuple[int, ...], seed: int) -> npt.NDArray[np.int64]:
    """[RESAMPLES, draws] indices of drawn runs. Every drawn prompt gives as many as the one with the most runs has.

    Kept, because drawing takes far longer than the medians of a figure, and tables of layers and steps ask for the same
    draws again and again.
    """
    generator = np.random.default_rng(seed)
    groups = [np.flatnonzero(np.equal(prompts, one)) for one in range(max(prompts) + 1)]
    most = max(len(group) for group in groups)
    rows = []
    for _ in range(RESAMPLES):
        chosen = generator.integers(len(groups), size=len(groups)) if len(groups) > 1 else [0]
        rows.append(np.concatenate([generator.choice(groups[g], size=most) for g in chosen]))
    draws = np.array(rows)
    draws.flags.writeable = False
    return draws
