"""Numerics that the backend "triton" takes, data for them, and the comparison with the reference: for the tests in the
interpreter and those on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from wanfp4.kernels import emulated, reference
from wanfp4.policy import Classifier, Guard, Numerics, policies

SCALE = 128**-0.5
POLICIES = {name: policy.numerics for name, policy in policies().items() if not policy.numerics.is_exact}
FAST = POLICIES["wan-fast"]
# Folding takes the interpreter longest, and the presets show it.
UNFOLDED = dataclasses.replace(FAST, qk="nvfp4")
EXTRA = {
    "fast, K, Q and V smoothed": dataclasses.replace(UNFOLDED, smooth_k=True, smooth_q=True, smooth_v=True),
    "two-piece-nv, K and V smoothed": dataclasses.replace(POLICIES["wan-two-piece-nv"], smooth_k=True, smooth_v=True),
    "fp8, V smoothed": dataclasses.replace(POLICIES["nvfp4-fp8"], smooth_v=True),
    "fp8, high peak": dataclasses.replace(POLICIES["nvfp4-fp8"], p_peak=1000.0, denominator="codes"),
    "fp8-direct, high peak": Numerics(qk="nvfp4", p="fp8-direct", v="fp8", p_peak=440.0),
    "fp8, anchored": dataclasses.replace(POLICIES["nvfp4-fp8"], row_reference="anchor32", margin=60.0),
    "nvfp4, anchored": dataclasses.replace(POLICIES["nvfp4"], row_reference="anchor128"),
    "mxfp8, rowmax": Numerics(qk="mxfp8-token-block", p="mxfp8", v="mxfp8-token-block", denominator="codes"),
    "bf16, anchored": dataclasses.replace(POLICIES["nvfp4-bf16"], row_reference="anchor32"),
    "nvfp4, codes": dataclasses.replace(POLICIES["nvfp4"], denominator="codes"),
    "two-piece-nv, exact": dataclasses.replace(POLICIES["wan-two-piece-nv"], denominator="exact"),
    "mxfp8, exact": dataclasses.replace(POLICIES["mxfp8-token-block"], denominator="exact"),
    "guarded, raw margin": Guard(110, 16).apply(UNFOLDED),
    "guarded, log2 margin": Guard(110, 16, margin_unit="log2").apply(UNFOLDED),
    "mix density 2": dataclasses.replace(UNFOLDED, classifier=Classifier("mix", 1.65, 0.8, density=2)),
    "mix density 4": dataclasses.replace(UNFOLDED, classifier=Classifier("mix", 1.65, 0.8, density=4)),
    "affine beyond 7": dataclasses.replace(UNFOLDED, classifier=Classifier("affine", 2.5, 0.5)),
    "direct, rowmax": dataclasses.replace(UNFOLDED, row_reference="rowmax"),
    "direct, exact denominator": dataclasses.replace(UNFOLDED, denominator="exact"),
    "P alone": Numerics(p="mxfp4-direct", classifier=FAST.classifier, denominator="codes"),
    "bf16 V": dataclasses.replace(POLICIES["nvfp4-bf16"], v="exact"),
}
ALL = POLICIES | EXTRA


def draw(
    queries: int,
    keys: int,
    *,
    batch: int = 1,
    heads: int = 1,
    sharpness: float = 1.0,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [B, S, H, 128] from N(0, 1), q times `sharpness`."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, queries, heads, 128, generator=g) * sharpness
    k, v = (torch.randn(batch, keys, heads, 128, generator=g) for _ in range(2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def run_head_by_head(*args: Any) -> Any:
    """`emulated.run`, one head at a time where Q is smoothed."""
    groups = emulated.groups
    emulated.groups = lambda flat, *_: [(head, 1) for head in range(flat)]
    try:
        return emulated.run(*args)
    finally:
        emulated.groups = groups


def rel_l2(a: Tensor, b: Tensor) -> float:
    """|a − b| / |b|."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def check(
    mine: Any, q: Tensor, k: Tensor, v: Tensor, numerics: Numerics, scale: float = SCALE, limit: float = 2e-3
) -> None:
    """Output and log-sum-exp of an `emulated.run` against the reference on the same device."""
    truth = reference.attention(q, k, v.float(), numerics, scale=scale, return_lse=True)
    out = truth.out.to(v.dtype)
    # The messages say what pytest would, which does not rewrite this module.
    assert mine.out.shape == out.shape, f"{mine.out.shape} instead of {out.shape}"
    assert mine.out.dtype == v.dtype, f"{mine.out.dtype} instead of {v.dtype}"
    off = (mine.lse - truth.lse).abs() / truth.lse.abs().clamp(min=1)
    found = f"out {rel_l2(mine.out, out):.2e} rel-L2, lse {off.median():.1e} median, {off.max():.1e} largest"
    assert rel_l2(mine.out, out) < limit, f"{found}; the limit is {limit}"
    assert off.median() < 1e-5, f"{found}; the limit is 1e-5"
    assert off.max() < 5e-3, f"{found}; the limit is 5e-3"
