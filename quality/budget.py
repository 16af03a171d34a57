"""Budgets: limits on a report's figures, so that a script or CI can fail on drift.

A limit holds for every policy of a report. A figure that is NaN (a model that broke) exceeds any limit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wanfp4.errors import SettingsError
from wanfp4.quality.aggregate import Json, number


@dataclass(frozen=True)
class Metric:
    """A figure that can be limited: from above, or from below when `at_least`."""

    name: str
    meaning: str
    unit: str
    at_least: bool
    of: Callable[[Mapping[str, Any]], float]


@dataclass(frozen=True)
class Violation:
    """One limit that one policy does not keep."""

    policy: str
    metric: str
    value: float
    limit: float
    sentence: str

    def __str__(self) -> str:
        return self.sentence


_ALL = (
    Metric(
        "velocity",
        "teacher-forced velocity, relative L2: the worst step's median over prompts and seeds",
        "",
        False,
        lambda s: float(s["velocity_worst"]["median"]),
    ),
    Metric(
        "velocity-median",
        "teacher-forced velocity, relative L2: the median step's median over prompts and seeds",
        "",
        False,
        lambda s: float(s["velocity"]["median"]),
    ),
    Metric(
        "velocity-mean",
        "teacher-forced velocity, relative L2: the mean over a run's steps, median over prompts and seeds",
        "",
        False,
        lambda s: float(s["velocity_mean"]["median"]),
    ),
    Metric(
        "floor-ratio",
        "velocity-median divided by the noise floor's",
        "×",
        False,
        lambda s: float(s["over_floor"]),
    ),
    Metric(
        "latent",
        "free-running latent after the last step, relative L2: median over prompts and seeds",
        "",
        False,
        lambda s: float(s["after"][-1]["rel_l2"]["median"]),
    ),
    Metric(
        "latent-frame",
        "the worst latent frame of the free-running final latent, relative L2: median over prompts and seeds",
        "",
        False,
        lambda s: float(s["worst_latent_frame"]["median"]),
    ),
    Metric(
        "psnr",
        "PSNR of the decoded clip: median over prompts and seeds",
        "dB",
        True,
        lambda s: float(s["psnr"]["median"]),
    ),
    Metric(
        "ssim",
        "SSIM of the decoded clip: median over prompts and seeds",
        "",
        True,
        lambda s: float(s["ssim"]["median"]),
    ),
    Metric(
        "flicker",
        "distance of the flicker ratio from 1: median ratio over prompts and seeds",
        "",
        False,
        lambda s: abs(float(s["flicker_ratio"]["median"]) - 1),
    ),
    Metric(
        "black-frames",
        "frames that are black where the reference's are not, all clips together",
        "frames",
        False,
        lambda s: float(s["frames_black_new"]),
    ),
    Metric(
        "nan-frames",
        "latent frames with NaN or infinity in the final latents, all clips together",
        "frames",
        False,
        lambda s: float(s["latent_frames_nan"]),
    ),
)
METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}


def parse_budget(texts: Sequence[str]) -> dict[str, float]:
    """`["velocity=0.1", "psnr=25"]` as a dict; a plain number is the limit of `velocity`.

    Raises SettingsError, naming the metrics that exist, for anything else and for a metric given twice.
    """
    budget: dict[str, float] = {}
    for text in texts:
        name, equals, limit = text.rpartition("=")
        name = name.strip() if equals else "velocity"
        try:
            value = float(limit)
        except ValueError:
            raise SettingsError(
                f"budget {text!r} must be METRIC=LIMIT with a number, as velocity=0.1; {_known()}"
            ) from None
        if name in budget:
            raise SettingsError(f"budget for {name!r} is given twice: {budget[name]:g} and {value:g}")
        budget[name] = value
    return check_budget(budget)


def check_budget(budget: Mapping[str, float]) -> dict[str, float]:
    """The budget as a dict of floats; SettingsError for unknown metrics and for limits that are not finite numbers."""
    for name, limit in budget.items():
        if name not in METRICS:
            raise SettingsError(f"there is no budget metric {name!r}; {_known()}")
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not math.isfinite(limit):
            raise SettingsError(f"the budget for {name} must be a finite number, not {limit!r}")
    return {name: float(limit) for name, limit in budget.items()}


def violations(policies: Sequence[Mapping[str, Any]], budget: Mapping[str, float]) -> list[Violation]:
    """Every limit that a policy's section exceeds, policy by policy."""
    found = []
    for section in policies:
        if not section["runs"]:
            continue
        for name, limit in check_budget(budget).items():
            metric = METRICS[name]
            value = metric.of(section["summary"])
            kept = value >= limit if metric.at_least else value <= limit  # False for NaN
            if not kept:
                unit = f" {metric.unit}" if metric.unit else ""
                bound = f"at {'least' if metric.at_least else 'most'} {limit:g}{unit}"
                sentence = f"{section['name']}: {name} is {value:.4g}{unit}, the budget is {bound} ({metric.meaning})"
                found.append(Violation(section["name"], name, value, limit, sentence))
    return found


def verdict(policies: Sequence[Mapping[str, Any]], budget: Mapping[str, float]) -> Json | None:
    """The budget part of a report; None without a budget."""
    if not budget:
        return None
    limits = {
        name: {"limit": limit, "at_least": METRICS[name].at_least, "meaning": METRICS[name].meaning}
        for name, limit in budget.items()
    }
    found = [{**dataclasses.asdict(v), "value": number(v.value)} for v in violations(policies, budget)]
    return {"limits": limits, "passed": not found, "violations": found}


def _known() -> str:
    return f"the metrics are {', '.join(METRICS)}"
