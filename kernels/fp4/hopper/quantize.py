"""Quantisers of the backends "sm90" and "sm89": Q, K and V to E4M3 with one exponent per 32 tokens. Importing it
imports triton.

They write tiles of 128 rows of 128 bytes. Q and K have a row for each token, V one for each channel and eight more for
the sum of P. With IMAGE they are what `attention.cu` copies into shared memory in whole: row r's 16-byte chunk c stands
at place c XOR (r mod 8), and V's tokens in the order in which wgmma gives scores to threads.
"""

import triton
import triton.language as tl

from wanfp4.kernels.emulated_quantize import physical_token
from wanfp4.kernels.emulated_rounding import (
    INTERPRET,
    at_most,
    e4m3_block_scale,
    inverse_power,
    magnitude_bits,
    round_e4m3,
)


@triton.jit
def e4m3_byte(value):
    """Bytes of E4M3 numbers ≥ 0. NaN becomes 0x7F."""
    bits = value.to(tl.uint32, bitcast=True)
    normal = (bits >> 20) - 960  # eight exponents and fractions an octave, 2^-6 at 8
    small = (value * 512.0).to(tl.uint32)  # subnormal, in units of 2^-9
    byte = tl.where(bits < 0x3C800000, small, normal)
    return tl.where(bits > 0x7F800000, 0x7F, byte).to(tl.uint8)


@triton.jit
def to_e4m3(x):
    """E4M3 bytes of x, nearest, ties to even, saturating; NaN becomes 0x7F or 0xFF. The interpreter has no rounding
    conversion."""
    if INTERPRET:
        byte = e4m3_byte(round_e4m3(at_most(tl.abs(x), 448.0), 1.0))
        code = byte | ((x.to(tl.uint32, bitcast=True) >> 24) & 0x80).to(tl.uint8)
    else:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return code


@triton.jit
def store_tile(out, codes, ROWS: tl.constexpr, IMAGE: tl.constexpr):
    """A tile of [ROWS, 128] bytes, for IMAGE swizzled."""
    row = tl.arange(0, ROWS)
    chunk = tl.arange(0, 8)
    place = row[:, None] * 128 + (chunk * 16)[None, :]
    if IMAGE:
        place = row[:, None] * 128 + ((chunk[None, :] ^ (row[:, None] & 7)) * 16)
    tl.store(out + place[:, :, None] + tl.arange(0, 16)[None, None, :], tl.reshape(codes, (ROWS, 8, 16)))


@triton.jit(do_not_specialize=["heads", "tokens"])
def quantize(
    x, out, numbers, mean, batch_stride, token_stride, head_stride, channel_stride, heads, tokens, scale,
    KIND: tl.constexpr, ANCHORS: tl.constexpr, MEAN: tl.constexpr, IMAGE: tl.constexpr,
):  # fmt: skip
    """One tile of 128 tokens of one head of x [B, S, H, 128].

    KIND "q"   out [B·H, tiles, 128, 128] bytes, numbers [B·H, tiles, 4] ← block scales · `scale`
    KIND "k"   the same, numbers [B·H, tiles, 16] ← block scales in its first four places; in the tenth NaN where the
               tile holds a number that is not finite, which P's saturation would hide, else 0
    KIND "v"   out [B·H, tiles, 136, 128], numbers [B·H, tiles, 16] ← in places 4 to 7 the blocks' exponents relative to
               the tile's largest, -3 at least, and in place 8 the tile's scale
    ANCHORS    that many evenly spaced tokens come first
    mean       MEAN: [B·H, 128] subtracted from every token
    """
    tiles = tl.cdiv(tokens, 128)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    line = head * tiles + tile
    block = tl.arange(0, 4)
    place = tl.arange(0, 128)
    if KIND == "v" and IMAGE:
        place = (place & ~15) + ((place >> 2) & 3) * 2 + (place & 1) + ((place >> 1) & 1) * 8
    place += tile * 128
    token = place.to(tl.int64)
    if ANCHORS > 0:
        token = physical_token(place, tokens, ANCHORS)
    channel = tl.arange(0, 128)
    source = x + (head // heads) * batch_stride + (head % heads) * head_stride
    real = (place < tokens)[:, None]
    pointers = source + token[:, None] * token_stride + channel[None, :].to(tl.int64) * channel_stride
    values = tl.load(pointers, mask=real, other=0.0).to(tl.float32)
    if MEAN:
        values = tl.where(real, values - tl.load(mean + head * 128 + channel)[None, :], 0.0)
    blocks = tl.reshape(values, (4, 32, 128))
    amax = tl.max(tl.max(magnitude_bits(blocks), 2), 1).to(tl.float32, bitcast=True)
    # Blocks of zeros have scale 1: two smallest ones would multiply to 0, and 0 times the -inf of no key is NaN.
    power = tl.where(amax < float("inf"), tl.where(amax == 0, 1.0, e4m3_block_scale(amax)), float("nan"))
    if KIND == "v":
        # Further down they would take so much off P's exponent that its byte were 0, and with it the keys' part of the
        # denominator. E4M3's own exponents hold the rest.
        exponent = tl.where(amax == 0, 1, (power.to(tl.uint32, bitcast=True) >> 23).to(tl.int32))
        largest = tl.max(exponent, 0)
        exponent = tl.where(amax == 0, largest, tl.maximum(exponent, largest - 3))
        power = (exponent.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
        power = tl.where(amax < float("inf"), power, float("nan"))
        behind = exponent - largest
        tl.store(numbers + line * 16 + 4 + block, behind.to(tl.float32))
        tl.store(numbers + line * 16 + 8, (largest.to(tl.uint32) << 23).to(tl.float32, bitcast=True))
    elif KIND == "k":
        tl.store(numbers + line * 16 + block, power)
        tl.store(numbers + line * 16 + 9, tl.sum(power * 0.0, 0))
    else:
        tl.store(numbers + line * 4 + block, power * scale)
    inverse = inverse_power(power)[:, None, None]
    codes = tl.reshape(to_e4m3(blocks * inverse), (128, 128))
    if KIND == "v":
        base = out + line * (136 * 128)
        store_tile(base, tl.trans(codes), 128, IMAGE)
        # 2^-behind: with it a row's sum of P counts what P is without V's exponents.
        ones = tl.broadcast_to(((7 - behind) << 3)[:, None], (4, 32))
        ones = tl.where(place < tokens, tl.reshape(ones, (128,)), 0).to(tl.uint8)
        store_tile(base + 128 * 128, tl.broadcast_to(ones[None, :], (8, 128)), 8, IMAGE)
    else:
        store_tile(out + line * (128 * 128), codes, 128, IMAGE)
