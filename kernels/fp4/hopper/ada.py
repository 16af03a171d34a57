"""The backend "sm89": `fp8-direct` in Triton, for the FP8 tensor cores of Ada and of GeForce cards after it.

Importing it imports no triton. With TRITON_INTERPRET=1, set before triton is imported, it runs on CPU tensors.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from wanfp4.kernels import emulated
from wanfp4.kernels.devices import no_gpu, unfit, wrong_device
from wanfp4.kernels.hopper import backend as sm90
from wanfp4.policy import Numerics

CAPABILITY = (8, 9)
_NEEDED_GPU = "a GPU of compute capability 8.9 or 12 (RTX 40, L4, L40S, RTX 50)"


def missing() -> str | None:
    """Why this machine cannot run the kernels, or None. CUDA is not initialised for this: as long as nothing else has
    done so, a GPU that is too old is not noticed here but by `refuses`."""
    found = emulated.not_installed()
    if found or emulated.interpreted():
        return found
    return no_gpu(_NEEDED_GPU, wrong_gpu)


@functools.cache
def wrong_gpu(index: int) -> str | None:
    """Why CUDA device `index` cannot run the kernels, or None."""
    return unfit(index, _NEEDED_GPU, lambda capability: capability == CAPABILITY or capability[0] == 12)


def refuses(numerics: Numerics, device: torch.device) -> str | None:
    """Why the kernels do not compute these numerics on this device, or None."""
    if not (device.type == "cpu" and emulated.interpreted()):
        wrong = wrong_device(device, _NEEDED_GPU, wrong_gpu)
        if wrong:
            return wrong
    return limits(numerics)


def limits(numerics: Numerics) -> str | None:
    """Why the kernels do not compute these numerics on any device, or None."""
    if numerics.p != "fp8-direct":
        return f"its P is 'fp8-direct', and these numerics ask for {numerics.p!r}"
    return sm90.limits(numerics)


def run(
    q: Tensor, k: Tensor, v: Tensor, numerics: Numerics, scale: float, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Queue an attention call that `limits` and `sm90.declines` have nothing against: out [B, Sq, H, 128] BF16
    and lse [B, H, Sq] or None."""
    if q.is_cuda:
        with torch.cuda.device(q.device):
            return _run(q, k, v, numerics, scale, return_lse)
    return _run(q, k, v, numerics, scale, return_lse)


def _run(
    q: Tensor, k: Tensor, v: Tensor, numerics: Numerics, scale: float, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    from wanfp4.kernels.hopper import ada_forward as kernels

    batch, queries, heads, _ = q.shape
    tiles = sm90.quantize(q, k, v, numerics, scale, image=False)
    out = torch.empty(batch, queries, heads, sm90.TILE, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(batch, heads, queries, device=q.device) if return_lse else None
    rows = 128 if q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9 else 64
    kernels.forward[(batch * heads * -(-queries // rows),)](
        tiles.q, tiles.k, tiles.v, tiles.octaves, tiles.meta, tiles.v_mean, out, lse, heads, queries, k.shape[1],
        *out.stride()[:3], PEAK=math.log2(sm90.PEAK),
        V_MEAN=tiles.v_mean is not None, LSE=return_lse, BM=rows, num_warps=rows // 16, num_stages=2,
    )  # fmt: skip
    return out, lse
