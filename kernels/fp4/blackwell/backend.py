"""The SM100 backend: from a policy's numerics to kernels, from tensors to launches. Importing it imports no cutlass.

An attention call is, in stream order and without a word from the device:

    flag ← 0, guard       only for Direct-P with a guard: does a sample of the logits exceed the limit?
    means of K, of V      only where they are smoothed (two launches each)
    Q, K, V to records    one launch each; K and V in the order of their anchors, which may depend on the flag
    forward               persistent, at most one CTA a multiprocessor

Workspace comes from PyTorch's allocator, call by call, and goes back when the launches are queued, so calls can be
captured into CUDA graphs (after one outside: the first call of a policy loads or compiles its kernels).
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wanfp4.errors import BackendError, PolicyError
from wanfp4.kernels.blackwell import cache
from wanfp4.kernels.blackwell.cache import Function, Kernel, Kernels
from wanfp4.kernels.devices import no_gpu, unfit, wrong_device
from wanfp4.policy import Guard, Numerics, guarded, guarding, policies

TILE = 128
LOG2_E = math.log2(math.e)
DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
NEEDED_DSL = (4, 8, 1)
INSTALL = 'pip install "wanfp4[blackwell]"'
_MEAN_TOKENS = 512  # of a partial sum of `quantize.TokenMean`


class Launched(NamedTuple):
    """What a call gave: out [B, Sq, H, 128], lse [B, H, Sq] float32 or None, and the guard's flag, an int32 tensor on
    the device that is 1 when the call was guarded, or None where there was no guard to decide."""

    out: Tensor
    lse: Tensor | None
    flag: Tensor | None


@dataclass(frozen=True)
class Target:
    """Where calls run: kernels for an architecture, the size of the persistent grid, and who gives memory."""

    kernels: Kernels
    multiprocessors: int
    empty: Callable[..., Tensor] = torch.empty


# Who takes what


def not_installed() -> str | None:
    """Why kernels cannot be compiled or launched from this installation, or None."""
    needed = ".".join(map(str, NEEDED_DSL))
    if sys.platform != "linux":
        return f"it needs nvidia-cutlass-dsl, which runs on Linux; this is {sys.platform}"
    try:
        found = importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        return f"nvidia-cutlass-dsl is not installed, and it needs {needed} or later: {INSTALL}"
    if tuple(int(part) for part in found.split(".")[:3] if part.isdigit()) < NEEDED_DSL:
        return f"nvidia-cutlass-dsl {found} is installed, and it needs {needed} or later: {INSTALL}"
    return None


def missing() -> str | None:
    """Why this machine cannot run the kernels, or None. CUDA is not initialised for this: as long as nothing else has
    done so, a GPU of another kind is not noticed here but by `refuses`."""
    return _not_installed() or no_gpu(_needed_gpu(), _wrong_gpu)


_not_installed = functools.cache(not_installed)


def _needed_gpu() -> str:
    versions = " or ".join(f"{major}.{minor}" for major, minor in cache.ARCHITECTURES)
    return f"a GPU of compute capability {versions} (B200, GB200, B300, GB300)"


@functools.cache
def _wrong_gpu(index: int) -> str | None:
    return unfit(index, _needed_gpu(), lambda capability: capability in cache.ARCHITECTURES)


def refuses(numerics: Numerics, device: torch.device) -> str | None:
    """Why the kernels do not compute these numerics on this device, or None."""
    return wrong_device(device, _needed_gpu(), _wrong_gpu) or limits(numerics)


@functools.lru_cache(256)
def limits(numerics: Numerics) -> str | None:
    """Why the kernels do not compute these numerics on any device, or None."""
    n = numerics
    if n.is_exact:
        return "it computes 4-bit attention, and these numerics round nothing"
    if n.qk not in ("nvfp4", "nvfp4-folded"):
        return f"its Q and K are NVFP4, folded or not, and these numerics ask for {n.qk!r}"
    if (n.p, n.v) not in (("mxfp4-direct", "mxfp4-direct"), ("nvfp4", "nvfp4")):
        return f"its P and V are both 'mxfp4-direct' or both 'nvfp4', and these numerics ask for {n.p!r} and {n.v!r}"
    if n.denominator != "codes":
        return f"its denominator is summed from P's codes, and these numerics ask for {n.denominator!r}"
    if n.smooth_q:
        return "it does not smooth Q"
    if n.global_scale:
        return "its NVFP4 operands have no global scale"
    if n.p == "nvfp4" and n.row_reference != "rowmax":
        return f"its NVFP4 P is relative to the row's maximum, and these numerics ask for {n.row_reference!r}"
    return None


def declines(
    q: Tensor, k: Tensor, v: Tensor, numerics: Numerics, guard: Guard | None, scale: float, return_lse: bool
) -> str | None:
    """Why the kernels do not take this call, though they compute its numerics, or None."""
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        found = str(q.dtype) if q.dtype == k.dtype == v.dtype else f"{q.dtype}, {k.dtype} and {v.dtype}"
        return f"it reads bfloat16 or float16, one of them for q, k and v; found {found}: cast them"
    if not 1e-20 <= scale <= 1e20:  # keys beyond the end have a score that counts for nothing at such scales
        return f"its softmax scale is a number from 1e-20 to 1e20; found {scale}"
    if guarding(numerics, guard) and numerics.row_reference != "shiftless":
        return f"it guards 'shiftless' numerics only, and these have {numerics.row_reference!r}"
    if return_lse and numerics.smooth_k:
        return "with smooth_k it gives no log-sum-exp"
    for name, t in (("q", q), ("k", k)):
        batch, tokens, heads, _ = t.shape
        if tokens >= 2**31 - TILE or batch * heads * -(-tokens // TILE) >= 2**31:
            return f"its grids end at 2^31 tiles of {TILE} tokens of a head; {name} is {list(t.shape)}"
    return None


# What a call needs


@dataclass(frozen=True)
class Plan:
    """Kernels and constants of a call with given numerics.

    mean     makes the token means of K or V, for each that is smoothed
    guard    None where there is nothing to decide
    margin   octaves that an anchor is raised by, for each unit of softmax scale and besides
    limit    largest float32 that is not above the guard's limit
    """

    q: Kernel
    k: Kernel
    v: Kernel
    mean: Kernel | None
    guard: Kernel | None
    forward: Kernel
    smooth_k: bool
    smooth_v: bool
    margin: tuple[float, float]
    limit: float

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """All of them, each once."""
        some = (self.guard, self.mean, self.q, self.k, self.v, self.forward)
        return tuple(dict.fromkeys(kernel for kernel in some if kernel is not None))


@functools.lru_cache(256)
def plan(numerics: Numerics, guard: Guard | None, dtype: torch.dtype, return_lse: bool) -> Plan:
    """What a call needs that `limits` and `declines` have nothing against."""
    from wanfp4.kernels.blackwell.layout import Options
    from wanfp4.kernels.blackwell.quantize import QuantizerOptions

    decides = guarding(numerics, guard)
    anchored = guarded(numerics, guard)
    c = numerics.classifier
    forward = Options(
        classifier=c.kind,
        A=c.A,
        B=c.B,
        A2=c.A2,
        B2=c.B2,
        density=c.density,
        row_reference="guarded" if decides else numerics.row_reference,
        p=numerics.p,
        folded=numerics.qk == "nvfp4-folded",
        out=DTYPES[dtype],
        lse=return_lse,
        v_mean=numerics.smooth_v,
        p_peak=numerics.p_peak if numerics.p == "nvfp4" else Options.p_peak,
    )
    order: dict[str, Any] = {"anchor": anchored.anchors} | ({"guarded": True} if decides else {})
    raw = anchored.margin_unit == "raw"
    return Plan(
        q=Kernel("quantize-qk", QuantizerOptions("qk", numerics.qk, dtype)),
        k=Kernel("quantize-qk", QuantizerOptions("qk", numerics.qk, dtype, mean=numerics.smooth_k, **order)),
        v=Kernel("quantize-v", QuantizerOptions("v", numerics.v, dtype, mean=numerics.smooth_v, **order)),
        mean=Kernel("mean", dtype) if numerics.smooth_k or numerics.smooth_v else None,
        guard=Kernel("guard", dtype) if decides else None,
        forward=Kernel("forward", forward),
        smooth_k=numerics.smooth_k,
        smooth_v=numerics.smooth_v,
        margin=(anchored.margin, 0.0) if raw else (0.0, anchored.margin),
        limit=_float_below(guard.logit_limit) if guard is not None and decides else 0.0,
    )


def _float_below(x: float) -> float:
    """The largest float32 that is not above x: a float32 exceeds the one exactly when it exceeds the other."""
    near = np.float32(x)
    return float(near if float(near) <= x else np.nextafter(near, np.float32(-np.inf)))


def preset_kernels(names: Sequence[str] = ()) -> tuple[Kernel, ...]:
    """Every kernel that the presets need, or those of `names`, with and without LSE. Raises PolicyError."""
    known = policies()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise PolicyError(f"unknown policy {unknown[0]!r}; presets are {', '.join(known)}")
    found: dict[Kernel, None] = {}
    for name in names or known:
        policy = known[name]
        why = limits(policy.numerics)
        if why is None:
            for dtype in DTYPES:
                for lse in (False, True):
                    found.update(dict.fromkeys(plan(policy.numerics, policy.guard, dtype, lse).kernels))
        elif names:
            raise PolicyError(f"policy {name!r} has no SM100 kernels: {why}")
    return tuple(found)


class _Ready(NamedTuple):
    """A plan and its functions on one target."""

    plan: Plan
    q: Function
    k: Function
    v: Function
    mean: Function | None
    guard: Function | None
    forward: Function
    q_record: int  # bytes; K's are as long
    v_record: int


@functools.lru_cache(256)
def _ready(kernels: Kernels, numerics: Numerics, guard: Guard | None, dtype: torch.dtype, lse: bool) -> _Ready:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise BackendError("the first call with these numerics loads kernels: make one before capturing a CUDA graph")
    p = plan(numerics, guard, dtype, lse)

    def maybe(kernel: Kernel | None) -> Function | None:
        return None if kernel is None else kernels.get(kernel)

    return _Ready(
        p,
        kernels.get(p.q),
        kernels.get(p.k),
        kernels.get(p.v),
        maybe(p.mean),
        maybe(p.guard),
        kernels.get(p.forward),
        p.q.options.record_bytes,
        p.v.options.record_bytes,
    )


# Running


@functools.cache
def _target(index: int) -> Target:
    arch = cache.ARCHITECTURES[torch.cuda.get_device_capability(index)]
    return Target(cache.kernels(arch), torch.cuda.get_device_properties(index).multi_processor_count)


def run(
    q: Tensor, k: Tensor, v: Tensor, numerics: Numerics, guard: Guard | None, scale: float, return_lse: bool
) -> Launched:
    """Queue an attention call on q's device and its current stream; shapes as in `dispatch.attention`."""
    with torch.cuda.device(q.device):
        index = torch.cuda.current_device()
        stream = torch.cuda.current_stream(index).cuda_stream
        return run_on(_target(index), q, k, v, numerics, guard, scale, return_lse, stream)


def run_on(
    target: Target,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    numerics: Numerics,
    guard: Guard | None,
    scale: float,
    return_lse: bool,
    stream: int = 0,
) -> Launched:
    """Queue an attention call that `limits` and `declines` have nothing against, on a CUDA stream's address.

    Tensors are read where they are when the last dimension is contiguous and rows start at multiples of 16 bytes;
    others are copied first. The result is contiguous. The stream must be PyTorch's current one of q's device.
    """
    ready = _ready(target.kernels, numerics, guard, v.dtype, return_lse)
    new, device = target.empty, q.device
    q, k, v = _readable(q, new), _readable(k, new), _readable(v, new)
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    flat, q_tiles, k_tiles = batch * heads, -(-queries // TILE), -(-keys // TILE)
    q_strides, k_strides, v_strides = q.stride()[:3], k.stride()[:3], v.stride()[:3]

    out = new((batch, queries, heads, TILE), dtype=v.dtype, device=device)
    lse = new((batch, heads, queries), dtype=torch.float32, device=device) if return_lse else None
    q_records = new((flat, q_tiles, ready.q_record), dtype=torch.uint8, device=device)
    k_records = new((flat, k_tiles, ready.q_record), dtype=torch.uint8, device=device)
    v_records = new((flat, k_tiles, ready.v_record), dtype=torch.uint8, device=device)
    flag = k_mean = v_mean = None
    flag_address = k_mean_address = v_mean_address = 0
    if ready.guard is not None:
        flag = new((1,), dtype=torch.int32, device=device).zero_()
        flag_address = flag.data_ptr()
        ready.guard(
            q.data_ptr(), k.data_ptr(), flag_address, *q_strides, *k_strides,
            batch, heads, queries, keys, scale, ready.plan.limit, stream,
        )  # fmt: skip
    if ready.mean is not None:
        sums = new((flat, -(-keys // _MEAN_TOKENS), TILE), dtype=torch.float32, device=device)
        if ready.plan.smooth_k:
            k_mean = new((flat, TILE), dtype=torch.float32, device=device)
            k_mean_address = k_mean.data_ptr()
            ready.mean(k.data_ptr(), sums.data_ptr(), k_mean_address, *k_strides, batch, keys, heads, stream)
        if ready.plan.smooth_v:
            v_mean = new((flat, TILE), dtype=torch.float32, device=device)
            v_mean_address = v_mean.data_ptr()
            ready.mean(v.data_ptr(), sums.data_ptr(), v_mean_address, *v_strides, batch, keys, heads, stream)
    ready.q(q.data_ptr(), 0, q_records.data_ptr(), *q_strides, 0, batch, queries, heads, stream)
    ready.k(k.data_ptr(), k_mean_address, k_records.data_ptr(), *k_strides, flag_address, batch, keys, heads, stream)
    ready.v(v.data_ptr(), v_mean_address, v_records.data_ptr(), *v_strides, flag_address, batch, keys, heads, stream)
    ready.forward(
        q_records.data_ptr(), k_records.data_ptr(), v_records.data_ptr(), out.data_ptr(),
        0 if lse is None else lse.data_ptr(), v_mean_address, flag_address,
        flat, heads, queries, keys, *out.stride()[:3],
        scale * LOG2_E, ready.plan.margin[0] * scale + ready.plan.margin[1],
        min(flat * ((q_tiles + 1) // 2), target.multiprocessors), stream,
    )  # fmt: skip
    return Launched(out, lse, flag)


def _readable(x: Tensor, empty: Callable[..., Tensor]) -> Tensor:
    """x, or a copy where its strides or its address do not allow to load 16 bytes at a time."""
    *strides, last = x.stride()
    if last == 1 and not x.data_ptr() % 16:
        for size, stride in zip(x.shape, strides, strict=False):
            if stride % 8 and size > 1:
                break
        else:
            return x
    return empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
