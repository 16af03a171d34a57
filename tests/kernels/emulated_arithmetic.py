"""Division and rounding as the Triton kernels do them, in kernels of their own: for the interpreter and for a GPU."""

import torch
import triton
import triton.language as tl

from wanfp4.kernels.emulated_rounding import divided, reciprocal, round_e4m3


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


@triton.jit
def _round(x, out, unit, size, N: tl.constexpr):
    place = tl.program_id(0) * N + tl.arange(0, N)
    values = tl.load(x + place, mask=place < size, other=0.0)
    tl.store(out + place, round_e4m3(values, unit), mask=place < size)


def numbers(device="cpu"):
    """Numbers from 2^-12 to 448: random ones, all BF16 significands, up to 40 units in the last place on either side of
    each power of two, each E4M3 number and each place halfway between two."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (codes[1:] + codes[:-1]) / 2
    landmarks = torch.cat((codes[1:], halves, 2.0 ** torch.arange(-12, 9)))
    near = landmarks.view(torch.int32)[:, None] + torch.arange(-40, 41, dtype=torch.int32)
    significands = (1 + torch.arange(128) / 128)[None] * 2.0 ** torch.arange(-12, 8)[:, None]
    drawn = torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 448
    every = torch.cat((near.flatten().view(torch.float32), significands.flatten(), drawn))
    return every[every <= 448].to(device)


def rounded_e4m3(x, unit):
    """`unit` · E4M3(x / unit)."""
    out = torch.empty_like(x)
    _round[(triton.cdiv(x.numel(), 4096),)](x, out, unit, x.numel(), N=4096)
    return out
