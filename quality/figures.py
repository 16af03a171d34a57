"""One figure for each run of a drift report: what bootstrap intervals and paired comparisons are made of.

docs/drift.md defines the quantities. A summary's own figures are medians over runs of these, but for the worst step,
which a summary picks once for all runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from wanfp4.quality.aggregate import CHECKPOINTS
from wanfp4.quality.medians import median

Run = Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """A figure of a run.

    of      the figure, NaN where the run has none (a clip that could not be decoded).
    floor   from the medians of a policy and of the noise floor: what a change of kernel, which the noise floor is,
            makes of a policy's figure.
    """

    key: str
    label: str
    of: Callable[[Run], float]
    floor: Callable[[float, float], float]


def figures(steps: int) -> list[Figure]:
    """The figures of runs of `steps` steps, in the order that tables show."""
    checkpoints = [
        Figure(f"latent_{at}", f"latent after step {at}", _latent_after(at), in_squares)
        for at in CHECKPOINTS
        if at < steps
    ]
    return [
        Figure("velocity", "velocity, median step", lambda run: median(_velocity(run)), in_squares),
        Figure("velocity_mean", "velocity, mean of steps", lambda run: statistics.fmean(_velocity(run)), in_squares),
        Figure("velocity_worst", "velocity, each run's worst step", lambda run: _largest(_velocity(run)), in_squares),
        *checkpoints,
        Figure("latent_last", "latent after the last step", _latent_after(0), in_squares),
        Figure("latent_frame", "latent, each run's worst frame", _worst_frame, in_squares),
        Figure("psnr", "PSNR, dB", _of_clip("psnr"), _psnr_floor),
        Figure("ssim", "SSIM", _of_clip("ssim"), lambda policy, floor: 1 - floor),
        Figure("flicker_ratio", "flicker ratio", _of_clip("flicker_ratio"), lambda policy, floor: abs(1 - floor)),
    ]


def _velocity(run: Run) -> list[float]:
    return [float(v) for v in run["teacher_forced"]["velocity"]["rel_l2"]]


def _largest(values: list[float]) -> float:
    return math.nan if any(math.isnan(v) for v in values) else max(values)


def _latent_after(step: int) -> Callable[[Run], float]:
    """Of the free-running latent after `step`, counted from 1; 0 is the last."""
    return lambda run: float(run["free_running"]["latent"]["rel_l2"][step - 1])


def _worst_frame(run: Run) -> float:
    return _largest([float(v) for v in run["free_running"]["latent"]["rel_l2_frames"][-1]])


def _of_clip(name: str) -> Callable[[Run], float]:
    return lambda run: float(run["frames"][name]) if run["frames"] else math.nan


def in_squares(policy: float, floor: float) -> float:
    """What an error of `floor` adds to a distance when the two have nothing to do with each other."""
    # The hypotenuse of infinity and NaN is infinity: their difference is NaN all the same.
    return math.hypot(policy, floor) - policy


def _psnr_floor(policy: float, floor: float) -> float:
    # In dB; mean square errors add.
    if math.isnan(policy) or math.isnan(floor):
        return math.nan
    if math.isinf(floor):
        return 0.0
    return math.inf if math.isinf(policy) else 10 * math.log10(1 + 10 ** ((policy - floor) / 10))
