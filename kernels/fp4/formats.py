"""Number formats: E2M1, UE4M3, E4M3, UE8M0, and the block formats made of them.

Element formats come as `round_*` (to the nearest value, float32), `encode_*` (to codes, uint8) and `decode_*`. Block
formats come as `quantize_*`, which return a `Quantized`: codes, scale bytes, and `dequantize()`.

Special values, everywhere: rounding is to nearest, ties to even; values beyond the largest saturate, infinities too
(as `cvt….satfinite` of the PTX ISA does). NaN has no E2M1 code and becomes +6 there, but a block that holds a NaN gets
a NaN scale, so the whole block decodes to NaN and nothing hides it. A block of zeros decodes to zeros.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E8M0_NAN = 255

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_VALUES = (*(2.0 ** (byte - 127) for byte in range(E8M0_NAN)), float("nan"))

FOLD_CANDIDATES = (0.25, 0.3125, 0.375, 0.4375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.125, 1.25)
# So many are tried at once on tensors of at most so many elements: starting an operation takes longer than a small one.
_FOLD_GROUP, _FOLD_CPU, _FOLD_GPU = 4, 2**12, 2**24


def round_e2m1(x: Tensor) -> Tensor:
    """The nearest of ±{0, .5, 1, 1.5, 2, 3, 4, 6} as float32, ties to the even code (.25→0, 2.5→2, 3.5→4, 5→4)."""
    x = x.float().clamp(-E2M1_MAX, E2M1_MAX)
    # The spacing is half the power of two at or below |x| (its exponent bits alone), .5 at least; torch.round takes
    # ties to even multiples of it, which are the even codes.
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    step = power.clamp(min=1) * 0.5
    return torch.nan_to_num(torch.round(x / step) * step, nan=E2M1_MAX)


def encode_e2m1(x: Tensor) -> Tensor:
    """E2M1 codes 0..15 (uint8): sign in bit 3, then two exponent bits and one mantissa bit. -0 keeps its sign."""
    value = round_e2m1(x)
    magnitude = value.abs()
    # From 1 up, the code is float32's exponent and first mantissa bit, counted from 252; below are only 0 and .5.
    code = ((magnitude.view(torch.int32) >> 22) - 252).clamp(min=0) + (magnitude == 0.5)
    return (code + 8 * torch.signbit(value)).to(torch.uint8)


def decode_e2m1(codes: Tensor) -> Tensor:
    """float32 values of E2M1 codes 0..15."""
    return _table(_E2M1_MAGNITUDES + tuple(-m for m in _E2M1_MAGNITUDES), codes.device)[codes.int()]


@functools.lru_cache(maxsize=32)
def _table(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Kept, since a copy to a GPU waits for all that is queued there. Never written to."""
    with torch.inference_mode(False):
        return torch.tensor(values, device=device)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Two codes a byte along the last dimension, the even element in the low nibble; an odd length is padded with 0."""
    if codes.shape[-1] % 2:
        codes = pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor, length: int | None = None) -> Tensor:
    """Inverse of `pack_e2m1`; `length` drops the padding of an odd length."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return codes if length is None else codes[..., :length]


def encode_e4m3(x: Tensor) -> Tensor:
    """E4M3 bytes (no infinities; largest 448, smallest 2^-9), saturating. NaN is 0x7F."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(codes: Tensor) -> Tensor:
    """float32 values of E4M3 bytes. UE4M3 scales are the same bytes with sign 0."""
    return codes.contiguous().view(torch.float8_e4m3fn).float()


def round_e4m3(x: Tensor) -> Tensor:
    """The nearest E4M3 value as float32, saturating at ±448."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def encode_e8m0(exponent: Tensor) -> Tensor:
    """UE8M0 bytes of 2^exponent, for whole exponents of any dtype: exponent + 127, clamped to 0..254; NaN is 255."""
    byte = (exponent.float() + 127).clamp(0, 254)
    return byte.nan_to_num(nan=E8M0_NAN).to(torch.uint8)


def decode_e8m0(codes: Tensor) -> Tensor:
    """float32 values 2^(byte − 127) of UE8M0 bytes; byte 0 is 2^-127 (subnormal in float32), byte 255 NaN."""
    # A table, not torch.ldexp, which goes through pow and may flush 2^-127.
    return _table(_E8M0_VALUES, codes.device)[codes.int()]


def direct_exponent(amax: Tensor) -> Tensor:
    """Exponent e (float32) of the amplitude α = 2^e nearest to amax ≥ 0, arithmetic midpoint 1.5; -inf for 0.

    For values with at most 17 mantissa bits, BF16 and FP16 among them, this is floor(log2 amax + 0.41504) exactly;
    it is defined on the mantissa so that no logarithm's rounding enters.
    """
    mantissa, exponent = torch.frexp(amax.float())  # amax = mantissa · 2^exponent, mantissa in [.5, 1)
    e = exponent.float() - 1 + (mantissa >= 0.75).float()
    e = torch.where(amax == 0, -torch.inf, e)
    return torch.where(amax.isnan(), torch.nan, torch.where(amax.isinf(), torch.inf, e))


def divide(x: Tensor, number: float) -> Tensor:
    """x / number as IEEE 754 divides.

    PyTorch multiplies a CUDA tensor by the rounded reciprocal of a Python number instead, and the ties that BF16 inputs
    are full of then fall to the other side.
    """
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def e4m3_exponent(amax: Tensor) -> Tensor:
    """The smallest exponent e (float32) with amax ≤ 448 · 2^e, for amax ≥ 0; -inf for 0, inf for inf, NaN for NaN."""
    mantissa, exponent = torch.frexp(divide(amax, E4M3_MAX))
    e = exponent.float() - (mantissa == 0.5).float()
    e = torch.where(amax == 0, -torch.inf, torch.where(amax.isinf(), torch.inf, e))
    return torch.where(amax.isnan(), torch.nan, e)


@dataclass(frozen=True)
class Quantized:
    """A tensor in a block format.

    codes       uint8, one code per element, in the shape of the input (E2M1 codes 0..15 or E4M3 bytes).
    scales      uint8 scale bytes, one per block, the blocked dimension shrunk (rounded up where the length is ragged).
    format      "nvfp4", "mxfp4-direct", "mxfp4" or "mxfp8-token-block".
    dim         the blocked dimension (the contraction), negative.
    block       elements per scale along `dim`.
    factor      float32 scalar that every value carries: 1/6 for mxfp4-direct, 1/G for nvfp4.
    folded      scales are shared by block b and b + 4 (K64 folding); `scales` holds the shared ones once.
    """

    codes: Tensor
    scales: Tensor
    format: str
    dim: int
    block: int
    factor: Tensor
    folded: bool = False

    def scale_values(self) -> Tensor:
        """float32 scale of every element, in the shape of `codes`, without `factor`."""
        scale = decode_e4m3(self.scales) if self.format == "nvfp4" else decode_e8m0(self.scales)
        if self.folded:
            scale = torch.cat((scale, scale), self.dim)
        scale = scale.repeat_interleave(self.block, self.dim).narrow(self.dim, 0, self.codes.shape[self.dim])
        return scale.expand_as(self.codes)

    def values(self) -> Tensor:
        """Code times scale without `factor`: what a block-scaled MMA multiplies. At most 6 significant bits (E4M3
        scales) or 4 (E4M3 codes), so it is exact in BF16."""
        code = decode_e4m3(self.codes) if self.format == "mxfp8-token-block" else decode_e2m1(self.codes)
        scale = self.scale_values()
        # A zero scale (NVFP4 underflow) makes the block 0, whatever its codes; -0 must not appear from it.
        return torch.where(scale == 0, 0.0, code * scale)

    def dequantize(self) -> Tensor:
        """float32 values in the shape of the input."""
        return self.values() * self.factor


def _blocks(x: Tensor, dim: int, block: int) -> Tensor:
    """[…, n, block] view of `x` with `dim` last, zero-padded to whole blocks."""
    x = x.float().movedim(dim, -1)
    short = -x.shape[-1] % block
    blocks: Tensor = (pad(x, (0, short)) if short else x).unflatten(-1, (-1, block))
    return blocks


def _unblocks(x: Tensor, dim: int, length: int) -> Tensor:
    """Inverse of `_blocks`."""
    return x.flatten(-2)[..., :length].movedim(-1, dim)


def _negative(dim: int, x: Tensor) -> int:
    return dim if dim < 0 else dim - x.ndim


def quantize_nvfp4(x: Tensor, dim: int = -1, *, fold: bool = False, global_scale: bool = False) -> Quantized:
    """NVFP4: E2M1 codes, one UE4M3 scale per 16 elements along `dim`.

    s = E4M3(amax/6 · G), code = E2M1(x · G / s) with IEEE division, value = code · s / G. G is 1, or with
    `global_scale` 6·448/amax of the whole tensor (then the largest block scale is 448). s = 0 makes the block 0.

    `fold` (K64 folding of arXiv 2609.04105; `dim` must have 128 elements): blocks b and b + 4 share one scale, chosen
    from E4M3(base · c) for c in `FOLD_CANDIDATES`, base = amax/6 of the 32 values, starting from E4M3(base): a
    candidate wins when its sum of squared errors over the 32 values is strictly smaller; the first best stays. The
    sum is a fixed tree (both halves, then offsets 8, 4, 2, 1 apart, no fused multiply-add), so that every backend can
    reach the same scale.
    """
    dim = _negative(dim, x)
    blocks = _blocks(x, dim, 16)
    amax = blocks.abs().amax(-1)
    gain = torch.ones((), device=x.device)
    if global_scale:
        largest = amax.amax() if amax.numel() else gain
        gain = torch.where(largest > 0, E2M1_MAX * E4M3_MAX / largest, 1.0)
        blocks, amax = blocks * gain, amax * gain
    if fold:
        if x.shape[dim] != 128:
            raise ValueError(f"K64 folding needs 128 elements along the blocked dimension, found {x.shape[dim]}")
        shared = _fold_scales(blocks.unflatten(-2, (2, 4)), amax.unflatten(-1, (2, 4)).amax(-2))
        scale_bytes, scale = shared, decode_e4m3(torch.cat((shared, shared), -1))
    else:
        scale_bytes = encode_e4m3(divide(amax, E2M1_MAX))
        scale = decode_e4m3(scale_bytes)
    codes = encode_e2m1(_divide(blocks, scale.unsqueeze(-1)))
    return Quantized(
        _unblocks(codes, dim, x.shape[dim]), scale_bytes.movedim(-1, dim), "nvfp4", dim, 16, 1 / gain, folded=fold
    )


def _divide(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, and zeros where the scale is 0."""
    return x / torch.where(scale == 0, torch.inf, scale)


def _fold_scales(pairs: Tensor, amax: Tensor) -> Tensor:
    """UE4M3 bytes […, 4] shared by the halves of `pairs` […, 2, 4, 16], whose largest magnitudes are `amax` […, 4]."""

    x = pairs.movedim((-3, -1), (0, 1)).contiguous()  # [2, 16, …, 4]: a scale is broadcast over the outer dimensions

    def errors(scales: Tensor) -> Tensor:  # of scales [n, …, 4]; in place, as memory is what takes the time
        scales = scales[:, None, None]
        y = _divide(x, scales).clamp_(-E2M1_MAX, E2M1_MAX)
        # `round_e2m1`: 1.5·2^22 times the power of two has half of it in its last place, and is an even multiple of it.
        grid = (y.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=1).mul_(1.5 * 2**22)
        e = torch.sub(x, y.add_(grid).sub_(grid).mul_(scales)).square_()
        e = e[:, 0] + e[:, 1]
        for width in (8, 4, 2, 1):
            e = e[:, :width] + e[:, width:]
        return e[:, 0]

    base = divide(amax, E2M1_MAX)
    best = round_e4m3(base)
    least = errors(best[None])[0]
    others = [c for c in FOLD_CANDIDATES if c != 1]  # 1 is the start itself
    group = _FOLD_GROUP if x.numel() <= (_FOLD_CPU if x.device.type == "cpu" else _FOLD_GPU) else 1
    for start in range(0, len(others), group):
        scales = torch.stack([round_e4m3(base * candidate) for candidate in others[start : start + group]])
        for scale, e in zip(scales, errors(scales), strict=True):
            better = e < least
            best, least = torch.where(better, scale, best), torch.where(better, e, least)
    return encode_e4m3(best)


def quantize_mxfp4_direct(x: Tensor, dim: int = -1) -> Quantized:
    """MXFP4 on the Direct-P grid: amplitude α = 2^e (`direct_exponent` of amax), one UE8M0 per 32 elements along `dim`.

    code = E2M1(6x/α), value = α · code / 6. Values above α saturate (amax/α reaches 1.5). This is not the OCP grid.
    """
    dim = _negative(dim, x)
    blocks = _blocks(x, dim, 32)
    scales = encode_e8m0(direct_exponent(blocks.abs().amax(-1)))
    codes = encode_e2m1(blocks / decode_e8m0(scales).unsqueeze(-1) * E2M1_MAX)
    factor = torch.full((), 1 / E2M1_MAX, device=x.device)
    return Quantized(_unblocks(codes, dim, x.shape[dim]), scales.movedim(-1, dim), "mxfp4-direct", dim, 32, factor)


def quantize_mxfp4(x: Tensor, dim: int = -1) -> Quantized:
    """OCP MXFP4 (Microscaling Formats v1.0): 2^e with e = floor(log2 amax) − 2 per 32 elements, code = E2M1(x/2^e)."""
    dim = _negative(dim, x)
    blocks = _blocks(x, dim, 32)
    amax = blocks.abs().amax(-1)
    exponent = torch.frexp(amax)[1].float() - 3  # frexp's mantissa is in [.5, 1): floor(log2) is its exponent − 1
    exponent = torch.where(amax == 0, -torch.inf, exponent)
    exponent = torch.where(amax.isnan(), torch.nan, torch.where(amax.isinf(), torch.inf, exponent))
    scales = encode_e8m0(exponent)
    codes = encode_e2m1(blocks / decode_e8m0(scales).unsqueeze(-1))
    one = torch.ones((), device=x.device)
    return Quantized(_unblocks(codes, dim, x.shape[dim]), scales.movedim(-1, dim), "mxfp4", dim, 32, one)


def quantize_mxfp8_token_block(x: Tensor) -> Quantized:
    """E4M3 with one UE8M0 exponent per 32 tokens × the whole head.

    `x` is […, tokens, head_dim], the scales are […, ⌈tokens/32⌉, 1]. The exponent e is the smallest with
    amax ≤ 448 · 2^e, so nothing saturates; one exponent serves rows and columns (FLAMIA's token-block scaling).
    """
    blocks = _blocks(x, -2, 32)  # […, head_dim, n, 32]
    amax = blocks.abs().amax((-3, -1))  # […, n]
    scales = encode_e8m0(e4m3_exponent(amax))
    codes = encode_e4m3(blocks / decode_e8m0(scales)[..., None, :, None])
    one = torch.ones((), device=x.device)
    return Quantized(
        _unblocks(codes, -2, x.shape[-2]).contiguous(), scales.unsqueeze(-1), "mxfp8-token-block", -2, 32, one
    )
