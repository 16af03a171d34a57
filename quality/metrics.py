"""Distances between latents and between clips. docs/drift.md explains how to read each one.

Latents are torch tensors [B, C, T, H, W] of any floating dtype on any device; sums run in float64. Clips are uint8
arrays [T, H, W, 3]. The second argument is always the reference.

Where a definition divides by the reference and the reference is zero: a result that is zero as well has cosine 1,
relative L2 0 and flicker ratio 1; any other has cosine 0 and relative L2 and flicker ratio infinity. NaN or infinite
input gives NaN, never a number that looks healthy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from skimage.metrics import structural_similarity
from torch import Tensor

from wanfp4.quality.medians import median

Clip = npt.NDArray[np.uint8]

# The defaults of ffmpeg's `blackdetect` filter: 98 % of the pixels at or below 10 % luma.
BLACK_LUMA = 0.10 * 255
BLACK_SHARE = 0.98
LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601


def cosine(a: Tensor, b: Tensor) -> float:
    """⟨a, b⟩ / (‖a‖‖b‖) over all entries, in [−1, 1]. Raises ValueError when the shapes differ."""
    return _distances(a, b, ())[0].item()


def rel_l2(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖ over all entries, at least 0. Raises ValueError when the shapes differ."""
    return _distances(a, b, ())[1].item()


@dataclass(frozen=True)
class Distance:
    """Cosine and relative L2 of a whole latent, and of each latent frame of it [T]."""

    cosine: float
    rel_l2: float
    cosine_frames: tuple[float, ...]
    rel_l2_frames: tuple[float, ...]


def distance(a: Tensor, b: Tensor) -> Distance:
    """All of `Distance` for latents [B, C, T, H, W]. Raises ValueError for other or differing shapes."""
    if a.ndim != 5:
        raise ValueError(f"latents must be [batch, channels, frames, height, width]; found shape {list(a.shape)}")
    whole, frames = _distances(a, b, ()), _distances(a, b, (2,))
    return Distance(whole[0].item(), whole[1].item(), tuple(frames[0].tolist()), tuple(frames[1].tolist()))


def _distances(a: Tensor, b: Tensor, keep: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Cosine and relative L2, summed over every dimension but those in `keep`."""
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {list(a.shape)} and {list(b.shape)}")
    a, b = a.double(), b.double()
    over = [d for d in range(a.ndim) if d not in keep]
    dot, aa, bb, error = ((x * y).sum(over) for x, y in ((a, b), (a, a), (b, b), (a - b, a - b)))
    return from_sums(dot, aa, bb, error)


def from_sums(dot: Tensor, aa: Tensor, bb: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and relative L2 from ⟨a, b⟩, ‖a‖², ‖b‖² and ‖a − b‖², float64 tensors of one shape; b is the reference."""
    both_zero, one_zero = (aa == 0) & (bb == 0), (aa == 0) ^ (bb == 0)
    cos = torch.where(both_zero, 1.0, torch.where(one_zero, 0.0, dot / (aa.sqrt() * bb.sqrt()))).clamp(-1, 1)
    # 0/0 must read 0, and x/0 infinity, which is what the division gives for x > 0.
    rel = torch.where(both_zero, 0.0, error.sqrt() / bb.sqrt())
    finite = torch.isfinite(aa) & torch.isfinite(bb)
    nan = torch.full_like(rel, math.nan)
    return torch.where(finite, cos, nan), torch.where(finite, rel, nan)


def nonfinite_frames(latents: Tensor) -> list[int]:
    """Indices of the latent frames of [B, C, T, H, W] that hold a NaN or an infinity."""
    good = torch.isfinite(latents).all(dim=4).all(dim=3).all(dim=1).all(dim=0)
    return [int(i) for i in (~good).nonzero().flatten()]


def psnr(clip: Clip, reference: Clip) -> float:
    """10·log10(255² / MSE) in dB, MSE over every value of the clip; infinity for identical clips."""
    _check(clip, reference)
    # Frame by frame: a whole clip of float64 squares would take eight times the clip's memory.
    squares = [float(np.mean(np.square(a.astype(np.float64) - b))) for a, b in zip(clip, reference, strict=True)]
    mse = math.fsum(squares) / len(squares)
    return math.inf if mse == 0 else 10 * math.log10(255**2 / mse)


def ssim(clip: Clip, reference: Clip) -> float:
    """Mean over frames of scikit-image's structural similarity (7 × 7 windows, the mean of the RGB channels).

    In [−1, 1]; NaN when a side is shorter than the 7 pixels of a window.
    """
    _check(clip, reference)
    if min(clip.shape[1:3]) < 7:
        return math.nan
    values = [
        structural_similarity(b, a, channel_axis=-1, data_range=255) for a, b in zip(clip, reference, strict=True)
    ]
    return float(np.mean(values))


def flicker(clip: Clip) -> float:
    """Mean absolute difference between neighbouring frames, in levels of 255; NaN for a single frame.

    It holds motion as well as flicker, so it is read as a ratio to the reference's (`flicker_ratio`).
    """
    if len(clip) < 2:
        return math.nan
    steps = [np.mean(np.abs(b.astype(np.int16) - a)) for a, b in itertools.pairwise(clip)]
    return float(np.mean(steps))


def flicker_ratio(clip: Clip, reference: Clip) -> float:
    """`flicker(clip) / flicker(reference)`: above 1 it flickers more, near 0 it is frozen."""
    _check(clip, reference)
    a, b = flicker(clip), flicker(reference)
    if b == 0:
        return 1.0 if a == 0 else math.inf
    return a / b


def black_frames(clip: Clip) -> list[int]:
    """Indices of the black frames: 98 % or more of the pixels with a luma of at most 10 %, as ffmpeg's blackdetect."""
    return [i for i, frame in enumerate(clip) if np.mean(frame @ LUMA <= BLACK_LUMA) >= BLACK_SHARE]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest of some runs' figures. A NaN among them makes all three NaN: it must be seen."""
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0 or np.isnan(array).any():
        return {"median": math.nan, "min": math.nan, "max": math.nan}
    return {"median": median(array), "min": float(array.min()), "max": float(array.max())}


def _check(clip: Clip, reference: Clip) -> None:
    for name, value in (("clip", clip), ("reference", reference)):
        if value.ndim != 4 or value.shape[3] != 3 or value.dtype != np.uint8 or not value.size:
            raise ValueError(
                f"{name} must be uint8 [frames, height, width, 3]; found {value.dtype} {list(value.shape)}"
            )
    if clip.shape != reference.shape:
        raise ValueError(f"clips differ in shape: {list(clip.shape)} and {list(reference.shape)}")
