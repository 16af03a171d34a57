"""From the figures of single runs to what a report says of a policy. docs/drift.md defines every one of them.

A report is plain JSON values throughout. JSON has no NaN and no infinity: they are the texts "NaN" and "Infinity",
which `float()` reads back (as Number() does in JavaScript).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from wanfp4.quality.metrics import Distance, spread

Json = dict[str, Any]

# What is compared under each way of running, in the order that reports show.
QUANTITIES = {"teacher_forced": ("velocity",), "free_running": ("velocity", "latent", "x0")}
FRAME_FIGURES = ("psnr", "ssim", "flicker_ratio")
# The paper's table (arXiv 2609.04105) gives the latent after steps 1, 4 and 20; ours after 1, 4 and the last.
CHECKPOINTS = (1, 4)


def number(value: float) -> float | str:
    """A JSON value for a figure: eight significant digits, or a text for what JSON has no number for."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return float(f"{value:.8g}")


def numbers(values: Sequence[float]) -> list[float | str]:
    return [number(v) for v in values]


def series(distances: Sequence[Distance]) -> Json:
    """One quantity of one run: cosine and relative L2 for each step [steps] and latent frame [steps][frames]."""
    return {
        "cosine": numbers([d.cosine for d in distances]),
        "rel_l2": numbers([d.rel_l2 for d in distances]),
        "cosine_frames": [numbers(d.cosine_frames) for d in distances],
        "rel_l2_frames": [numbers(d.rel_l2_frames) for d in distances],
    }


def spread_of(values: Sequence[Any]) -> Json:
    """`metrics.spread` of JSON figures, as JSON figures; None when there are none."""
    return {key: number(value) for key, value in spread([float(v) for v in values]).items()}


def per_step(runs: Sequence[Mapping[str, Any]]) -> Json:
    """Median, min and max over `runs` of every way of running, quantity and figure: lists over steps."""
    result: Json = {way: {q: {} for q in quantities} for way, quantities in QUANTITIES.items()}
    for way, quantities in QUANTITIES.items():
        for quantity in quantities:
            for figure in ("cosine", "rel_l2"):
                spreads = [spread_of(v) for v in zip(*(run[way][quantity][figure] for run in runs), strict=True)]
                result[way][quantity][figure] = {key: [s[key] for s in spreads] for key in ("median", "min", "max")}
    return result


def summary(runs: Sequence[Mapping[str, Any]], floor: Mapping[str, Any] | None = None) -> Json:
    """The figures of the verdict table. `floor` is the noise floor's own summary, None for the floor itself."""
    steps = per_step(runs)
    velocity = steps["teacher_forced"]["velocity"]["rel_l2"]
    worst, last = _worst(velocity["median"]), len(velocity["median"])
    frames = _final_frames(runs)
    typical = spread_of([spread_of(run["teacher_forced"]["velocity"]["rel_l2"])["median"] for run in runs])
    mean = [sum(float(v) for v in run["teacher_forced"]["velocity"]["rel_l2"]) / last for run in runs]
    result: Json = {
        "runs": len(runs),
        "velocity": typical,
        "velocity_mean": spread_of(mean),
        "velocity_worst": {"step": worst + 1, **{k: v[worst] for k, v in velocity.items()}},
        "after": [_after(runs, at) for at in sorted({min(c, last) for c in (*CHECKPOINTS, last)})],
        "latent_frames": frames,
        "worst_latent_frame": {"frame": (at := _worst(frames["median"])), **{k: v[at] for k, v in frames.items()}},
        "latent_frames_nan": sum(len(run["latent_frames_nan"]) for run in runs),
        "frames_black": sum(len(run["frames"]["black"]) for run in runs if run["frames"]),
        "frames_black_new": sum(len(run["frames"]["black_new"]) for run in runs if run["frames"]),
    }
    if floor is not None:
        result["over_floor"] = number(_ratio(float(typical["median"]), float(floor["velocity"]["median"])))
    for figure in FRAME_FIGURES:
        # A run without frames (NaN latents) makes the figure NaN instead of leaving the worst run out.
        result[figure] = spread_of([run["frames"][figure] if run["frames"] else "NaN" for run in runs])
    return result


def _after(runs: Sequence[Mapping[str, Any]], step: int) -> Json:
    latents = [run["free_running"]["latent"] for run in runs]
    return {"step": step, **{f: spread_of([latent[f][step - 1] for latent in latents]) for f in ("cosine", "rel_l2")}}


def _final_frames(runs: Sequence[Mapping[str, Any]]) -> Json:
    """Relative L2 of every latent frame of the free-running final latent: median, min and max over runs [frames]."""
    finals = [run["free_running"]["latent"]["rel_l2_frames"][-1] for run in runs]
    spreads = [spread_of(column) for column in zip(*finals, strict=True)]
    return {key: [s[key] for s in spreads] for key in ("median", "min", "max")}


def _worst(values: Sequence[float | str]) -> int:
    """Index of the largest figure; NaN is the worst there is."""
    found = [float(v) for v in values]
    return max(range(len(found)), key=lambda i: math.inf if math.isnan(found[i]) else found[i])


def _ratio(value: float, floor: float) -> float:
    if floor == 0:
        return 1.0 if value == 0 else math.nan if math.isnan(value) else math.inf
    return value / floor
