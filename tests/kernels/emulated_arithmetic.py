"""Division as the Triton backend's quantisers do it, in a kernel of its own: for the interpreter and for a GPU."""

import torch
import triton
import triton.language as tl

from wanfp4.kernels.emulated_rounding import divided, reciprocal


@triton.jit
def _divide(x, scale, out, size, N: tl.constexpr):
    place = tl.program_id(0) * N + tl.arange(0, N)
    a = tl.load(x + place, mask=place < size, other=0.0)
    s = tl.load(scale + place, mask=place < size, other=1.0)
    tl.store(out + place, divided(a, s, reciprocal(s)), mask=place < size)


def cases(device="cpu"):
    """x, scale: every significand of BF16, and random ones of float32, at some exponents, with every E4M3 scale."""
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    significands = torch.cat(
        (1 + torch.arange(128) / 128, 1 + torch.rand(512, generator=torch.Generator().manual_seed(0)))
    )
    x = (significands[None] * 2.0 ** torch.tensor([-90, -3, 0, 4, 99])[:, None]).flatten()
    return tuple(t.flatten().contiguous().to(device) for t in torch.meshgrid(x, scales, indexing="ij"))


def quotients(x, scale):
    """x / scale."""
    out = torch.empty_like(x)
    _divide[(triton.cdiv(x.numel(), 4096),)](x, scale, out, x.numel(), N=4096, enable_fp_fusion=False)
    return out
