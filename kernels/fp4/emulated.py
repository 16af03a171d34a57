"""The backend "triton": every policy's numerics on any CUDA GPU from SM80 up. Importing this module imports no triton.

Products of 4-bit and 8-bit operands are exact in BF16 tensor cores with float32 accumulation, so the codes are those of
hardware that has the formats, at about the speed of BF16 attention. An attention call is, in stream order and without a
word from the device:

    flag ← 0, guard       only for Direct-P with a guard: does a sample of the logits exceed the limit?
    means, extremes       only where K or V are smoothed, or V is FP8
    Q, K, V               rounded to values in BF16, one launch each; keys in the order of their anchors
    forward               a program for each tile of queries

With TRITON_INTERPRET=1, set before triton is imported, the same kernels run on CPU tensors.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wanfp4.kernels.devices import no_gpu, unfit, wrong_device
from wanfp4.policy import Guard, Numerics, guarded, guarding

TILE = 128
LOG2_E = math.log2(math.e)
NEEDED = (3, 6)
CAPABILITY = (8, 0)


class Launched(NamedTuple):
    """out [B, Sq, H, 128], lse [B, H, Sq] float32 or None, and the guard's flag, an int32 tensor [1] on the device that
    is 1 when the call was guarded, or None where there was nothing to decide."""

    out: Tensor
    lse: Tensor | None
    flag: Tensor | None


@dataclass(frozen=True)
class Config:
    """How the forward kernel is launched: queries and keys of a tile, warps, stages of its pipeline, and whether tiles
    are copied by the tensor memory accelerator."""

    queries: int
    keys: int
    warps: int
    stages: int
    tma: bool = True


# The first is what runs; kernels/bench/attention.py times all. They are chosen once, not by timing at run time, so
# that two runs give the same bytes. Where the running maximum counts, a tile is the 128 keys of the contract. Those
# of 64 queries are for two programs on a multiprocessor at a time, one computing products and the other codes: 113
# KiB each; that is faster where codes need exponentials.
_DIRECT = (
    Config(128, 128, 8, 3),
    Config(128, 128, 8, 2),
    Config(128, 64, 8, 2),
    Config(64, 128, 4, 1),
    Config(64, 64, 4, 3),
    Config(64, 64, 4, 2),
    Config(128, 128, 8, 3, tma=False),
)
_EXPONENTIAL = (Config(64, 64, 4, 3), *(config for config in _DIRECT if config != Config(64, 64, 4, 3)))
_ROWMAX = (
    Config(128, 128, 8, 3),
    Config(128, 128, 8, 2),
    Config(64, 128, 4, 3),
    Config(64, 128, 4, 1),
    Config(64, 128, 4, 1, tma=False),
    Config(128, 128, 8, 3, tma=False),
)
# Without the accelerator, and within 99 KiB of shared memory, as all others from SM80 up have.
_SMALL_DIRECT = (Config(128, 64, 8, 2, tma=False), Config(64, 64, 4, 2, tma=False))
_SMALL_ROWMAX = (Config(128, 128, 8, 2, tma=False), Config(64, 128, 4, 1, tma=False))


def configs(numerics: Numerics, capability: tuple[int, int] = (9, 0)) -> tuple[Config, ...]:
    """What the forward kernel of these numerics may be launched with, the default first."""
    if capability[0] not in (9, 10):
        return _SMALL_ROWMAX if numerics.row_reference == "rowmax" else _SMALL_DIRECT
    if numerics.row_reference == "rowmax":
        return _ROWMAX
    # A row that P's range makes rise does so from tile to tile, so there, too, a tile is the contract's.
    exponential = numerics.classifier.kind in ("exp2", "mix") and numerics.p not in ("fp8", "fp8-direct")
    return _EXPONENTIAL if exponential else _DIRECT


# Who takes what


@functools.cache
def not_installed() -> str | None:
    """Why there is no triton to compile kernels with, or None."""
    needed = ".".join(map(str, NEEDED))
    if sys.platform != "linux":
        return f"it needs triton, which runs on Linux; this is {sys.platform}"
    try:
        found = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return f"triton is not installed, and it needs {needed} or later, which PyTorch for CUDA brings along"
    if tuple(int(part) for part in found.split(".")[:2] if part.isdigit()) < NEEDED:
        return f"triton {found} is installed, and it needs {needed} or later"
    return None


def interpreted() -> bool:
    """Whether triton runs kernels in its interpreter, on the CPU: TRITON_INTERPRET=1."""
    if not_installed():
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def missing() -> str | None:
    """Why this machine cannot run the kernels, or None. CUDA is not initialised for this: as long as nothing else has
    done so, a GPU that is too old is not noticed here but by `refuses`."""
    found = not_installed()
    if found or interpreted():
        return found
    return no_gpu(_needed_gpu(), wrong_gpu)


def _needed_gpu() -> str:
    return f"a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or later (A100 and newer)"


@functools.cache
def wrong_gpu(index: int) -> str | None:
    """Why CUDA device `index` cannot run the kernels, or None."""
    return unfit(index, _needed_gpu(), lambda capability: capability >= CAPABILITY)


def refuses(numerics: Numerics, device: torch.device) -> str | None:
    """Why the kernels do not compute these numerics on this device, or None."""
    if not (device.type == "cpu" and interpreted()):
        wrong = wrong_device(device, _needed_gpu(), wrong_gpu)
        if wrong:
            return wrong
        if numerics.p == "mxfp4-direct" and torch.cuda.get_device_capability(device)[0] in (10, 11):
            return "triton 3.6 does not compile its Direct-P for tensor memory; the backend 'sm100' runs that there"
    return limits(numerics)


@functools.lru_cache(256)
def limits(numerics: Numerics) -> str | None:
    """Why the kernels do not compute these numerics on any device, or None."""
    n = numerics
    if n.is_exact:
        return "it computes attention in 4 or 8 bits, and these numerics round nothing"
    if n.p == "exact":
        return "it multiplies P in BF16 at most, and these numerics ask for 'exact'"
    if n.qk == "exact" and (n.smooth_k or n.smooth_q):
        return "it multiplies Q and K in BF16 at most, and smoothed ones that are not rounded do not fit"
    if n.v == "exact" and n.smooth_v:
        return "it multiplies V in BF16 at most, and a smoothed one that is not rounded does not fit"
    if n.global_scale:
        return "its NVFP4 operands have no global scale"
    return None


def declines(
    q: Tensor, k: Tensor, v: Tensor, numerics: Numerics, guard: Guard | None, scale: float, return_lse: bool
) -> str | None:
    """Why the kernels do not take this call, though they compute its numerics, or None."""
    if not (math.isfinite(scale) and scale > 0):
        return f"its softmax scale is a positive number; found {scale}"
    exact = (("q", q, numerics.qk), ("k", k, numerics.qk), ("v", v, numerics.v))
    for name, t, kind in exact:
        if kind == "exact" and t.dtype != torch.bfloat16:
            return f"it multiplies in BF16, and these numerics leave {name}, which is {t.dtype}, unrounded"
    if guarding(numerics, guard) and numerics.row_reference != "shiftless":
        return f"it guards 'shiftless' numerics only, and these have {numerics.row_reference!r}"
    for name, t in (("q", q), ("k", k)):
        batch, tokens, heads, _ = t.shape
        if batch * heads * (-(-tokens // TILE) * TILE) >= 2**31:
            return f"it counts the tokens of all heads in 32 bits; {name} is {list(t.shape)}"
    return None


# Running


class Rounded(NamedTuple):
    """Q, K and V as the forward kernel reads them: BF16 [B·H, padded tokens, 128], and what goes with them (None where
    these numerics have no such thing; `emulated_forward.forward` says what is what)."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_norms: Tensor | None = None
    k_norms: Tensor | None = None
    block_means: Tensor | None = None
    k_mean: Tensor | None = None
    lse_shift: Tensor | None = None
    v_mean: Tensor | None = None
    v_gain: Tensor | None = None
    flag: Tensor | None = None


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    numerics: Numerics,
    guard: Guard | None,
    scale: float,
    return_lse: bool,
    config: Config | None = None,
) -> Launched:
    """Queue an attention call that `limits` and `declines` have nothing against; shapes as in `dispatch.attention`."""
    if q.device.type == "cuda":
        with torch.cuda.device(q.device):
            return _run(q, k, v, numerics, guard, scale, return_lse, config)
    return _run(q, k, v, numerics, guard, scale, return_lse, config)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    numerics: Numerics,
    guard: Guard | None,
    scale: float,
    return_lse: bool,
    config: Config | None,
) -> Launched:
    rounded = quantize(q, k, v, numerics, guard, scale, return_lse)
    out, lse = multiply(rounded, q, k, v, numerics, guard, scale, return_lse, config)
    return Launched(out, lse, rounded.flag)


def quantize(
    q: Tensor, k: Tensor, v: Tensor, numerics: Numerics, guard: Guard | None, scale: float, return_lse: bool
) -> Rounded:
    """Round the operands, and decide the guard."""
    from wanfp4.kernels import emulated_quantize as kernels

    n = numerics
    batch, queries, heads, _ = q.shape
    keys, device = k.shape[1], q.device
    flat, q_padded, k_padded = batch * heads, _padded(queries), _padded(keys)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    flag = None
    if guard is not None and guarding(n, guard):
        flag = torch.zeros(1, dtype=torch.int32, device=device)
        kernels.sample_logits[(flat * 4,)](
            q, k, flag, *_strides(q), *_strides(k), heads, queries, keys, scale, float(guard.logit_limit)
        )
    # Without Q's smoothing, norms bound the scores; with it the forward kernel looks at every tile.
    bounded = n.row_reference != "rowmax" and not n.smooth_q
    k_mean = k.mean(1, dtype=torch.float32).reshape(flat, TILE) if n.smooth_k else None
    v_mean = v.mean(1, dtype=torch.float32).reshape(flat, TILE) if n.smooth_v else None
    rounded = Rounded(
        q=new(flat, q_padded, TILE, dtype=torch.bfloat16),
        k=new(flat, k_padded, TILE, dtype=torch.bfloat16),
        v=new(flat, k_padded, TILE, dtype=torch.bfloat16),
        q_norms=new(flat, q_padded) if bounded else None,
        k_norms=torch.zeros(flat, dtype=torch.int32, device=device) if bounded else None,
        block_means=new(flat, q_padded // TILE, TILE) if n.smooth_q else None,
        k_mean=k_mean,
        lse_shift=new(flat, q_padded) if return_lse and n.smooth_k else None,
        v_mean=v_mean,
        v_gain=_gain(v, v_mean) if n.v == "fp8" else None,
        flag=flag,
    )
    # Fused multiply-adds would give other sums of squared errors than the contract's.
    exactly = {"enable_fp_fusion": False} if n.qk == "nvfp4-folded" else {}
    anchor = guarded(n, guard).anchors
    # Few tokens for many registers; the interpreter's cost is the number of programs.
    few = TILE if interpreted() else 32
    q_tile = TILE if n.smooth_q else few
    kernels.quantize[(flat * (q_padded // q_tile),)](
        q, rounded.q, None, None, None, rounded.q_norms, None, rounded.block_means, k_mean, rounded.lse_shift,
        *_strides(q), heads, queries, q_padded, scale,
        FORMAT=n.qk, ANCHORS=0, GUARDED=False, MEAN=False, NORM="rows" if bounded else "none",
        BLOCK_MEAN=n.smooth_q, LSE_SHIFT=rounded.lse_shift is not None, T=q_tile, num_warps=q_tile // 8, **exactly,
    )  # fmt: skip
    kernels.quantize[(flat * (k_padded // few),)](
        k, rounded.k, k_mean, None, flag, None, rounded.k_norms, None, None, None,
        *_strides(k), heads, keys, k_padded, scale,
        FORMAT=n.qk, ANCHORS=anchor, GUARDED=flag is not None, MEAN=n.smooth_k, NORM="largest" if bounded else "none",
        BLOCK_MEAN=False, LSE_SHIFT=False, T=few, num_warps=4, **exactly,
    )  # fmt: skip
    kernels.quantize[(flat * (k_padded // few),)](
        v, rounded.v, v_mean, rounded.v_gain, flag, None, None, None, None, None,
        *_strides(v), heads, keys, k_padded, scale,
        FORMAT="nvfp4-tokens" if n.v == "nvfp4" else n.v, ANCHORS=anchor, GUARDED=flag is not None, MEAN=n.smooth_v,
        NORM="none", BLOCK_MEAN=False, LSE_SHIFT=False, T=few, num_warps=4,
    )  # fmt: skip
    return rounded


def multiply(
    rounded: Rounded,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    numerics: Numerics,
    guard: Guard | None,
    scale: float,
    return_lse: bool,
    config: Config | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The fused forward over rounded operands: out [B, Sq, H, 128] in v's dtype, contiguous, and lse [B, H, Sq]."""
    from wanfp4.kernels import emulated_forward as kernels

    n = numerics
    if config is None:
        config = configs(n, torch.cuda.get_device_capability(q.device) if q.is_cuda else (9, 0))[0]
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    flat, q_padded, k_padded = batch * heads, rounded.q.shape[1], rounded.k.shape[1]
    out = torch.empty(batch, queries, heads, TILE, dtype=v.dtype, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device) if return_lse else None
    meant = guarded(n, guard)
    margin = meant.margin * (scale if meant.margin_unit == "raw" else 1.0)
    c = n.classifier

    operands = (
        _operand(rounded.q, config.queries, config.tma),
        _operand(rounded.k, config.keys, config.tma),
        _operand(rounded.v, config.keys, config.tma),
    )
    launches, bias = [(0, flat)], None
    if rounded.block_means is not None:
        blocks = rounded.block_means.shape[1]
        launches = groups(flat, blocks, q_padded, k_padded)
        bias = torch.empty(launches[0][1], blocks, k_padded, dtype=torch.float32, device=q.device)
    for first, count in launches:
        if bias is not None:
            _score_bias(rounded, k, n, first, count, bias)
        kernels.forward[(count * -(-queries // config.queries),)](
            *operands, out, lse, bias, rounded.lse_shift, rounded.v_mean, rounded.v_gain, rounded.q_norms,
            rounded.k_norms, rounded.flag, scale * LOG2_E, margin, peak(n), largest(n),
            1 / 6 if n.v == "mxfp4-direct" else 1.0, c.A, c.B, c.A2, c.B2, heads, queries, keys, q_padded, k_padded,
            first, *out.stride()[:3],
            P=n.p, CLASSIFIER=c.kind, DENSITY=c.density, CLAMP=may_saturate(n), CODES=n.denominator == "codes",
            ROWMAX=n.row_reference == "rowmax", ANCHORS=meant.anchors, GUARDED=rounded.flag is not None,
            BIAS=bias is not None, V_MEAN=rounded.v_mean is not None, V_GAIN=rounded.v_gain is not None,
            LSE=return_lse, LSE_SHIFT=rounded.lse_shift is not None, BM=config.queries, BN=config.keys,
            TMA=config.tma, num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
    return out, lse


def _operand(x: Tensor, tokens: int, tma: bool) -> Any:
    if not tma:
        return x
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x.view(-1, TILE), [tokens, TILE])


def largest(numerics: Numerics) -> float:
    """Octaves of the largest P that its format holds, for those that are scaled to a peak."""
    return {"nvfp4": math.log2(6 * 448), "fp8": math.log2(448), "fp8-direct": math.log2(448)}.get(numerics.p, 60.0)


def peak(numerics: Numerics) -> float:
    """Octaves that P's row reference is scaled to: log2 p_peak, less whole octaves where the format ends below it."""
    log2_peak = math.log2(numerics.p_peak)
    return log2_peak - max(0, math.ceil(log2_peak - largest(numerics)))


def may_saturate(numerics: Numerics) -> bool:
    """Whether u can reach 7, the first that nearest rounding would not take to 6. A block's x ends at log2 9: where an
    amplitude is rounded down from 1.5, or the smallest E4M3 scale from 1.5 times itself."""
    return numerics.classifier.kind == "mix" or numerics.classifier.at(math.log2(9) + 2.0**-10) >= 7


def groups(flat: int, blocks: int, queries: int, keys: int) -> list[tuple[int, int]]:
    """First head and number of heads of each launch with Q smoothing: as many as keep what is added back, `blocks` ×
    `keys` floats a head, within 16 % of the bytes of Q, K and V in BF16, or 32 MiB where that is more; one head at
    least. So a call takes 1.5 times the memory of Q, K and V. `queries` and `keys` are padded."""
    budget = max(flat * (queries + 2 * keys) * TILE * 2 * 16 // 100, 2**25)
    count = max(1, min(flat, budget // (blocks * keys * 4)))
    return [(first, min(count, flat - first)) for first in range(0, flat, count)]


def _score_bias(rounded: Rounded, k: Tensor, numerics: Numerics, first: int, count: int, bias: Tensor) -> None:
    """What Q smoothing took of `count` heads from `first`, into bias [n, blocks, padded keys]."""
    from wanfp4.kernels import emulated_quantize as kernels

    assert rounded.block_means is not None
    _, blocks, padded = bias.shape
    keys = 64  # twice as many would not fit into registers
    kernels.score_bias[(count * -(-blocks // 16) * (padded // keys),)](
        rounded.block_means, k, rounded.k_mean, bias, *_strides(k), k.shape[2], k.shape[1], padded, blocks, first,
        ANCHORS=numerics.anchors, MEAN=rounded.k_mean is not None, T=keys, num_warps=4,
    )  # fmt: skip


def _gain(v: Tensor, v_mean: Tensor | None) -> Tensor:
    """448 / the largest |v| of each head [B·H]. Subtracting a mean keeps the order, so extremes of channels will do."""
    extremes = torch.stack((v.amax(1), v.amin(1))).float().flatten(1, 2)  # [2, B·H, 128]
    if v_mean is not None:
        extremes = extremes - v_mean
    return (448.0 / extremes.abs().amax((0, 2)).clamp(min=2.0**-100)).contiguous()


def _padded(tokens: int) -> int:
    return -(-tokens // TILE) * TILE


def _strides(x: Tensor) -> tuple[int, int, int, int]:
    """Of batch, token, head and channel: x is [B, S, H, 128]."""
    batch, token, head, channel = x.stride()
    return batch, token, head, channel
