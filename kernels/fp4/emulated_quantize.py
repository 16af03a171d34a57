"""Quantisers of the Triton backend: Q, K and V to values of their formats, in BF16, once per call.

Code times scale has at most 6 significant bits in every format, so BF16 holds it exactly; what all values of a tensor
share (1/6 of MXFP4-direct, the gain of FP8) stays out and is a factor of the result. Results are [B·H, S, 128],
contiguous, S padded with zeros to whole tiles of 128 tokens, keys in the physical order of their anchors.

The guard is decided here, too: `sample_logits` is `reference.sampled_logit` on the device.
"""

import triton
import triton.language as tl

from wanfp4.kernels.emulated_rounding import (
    at_most,
    direct_amplitude,
    divided,
    dot,
    e4m3_block_scale,
    e4m3_scale,
    fma,
    inverse_power,
    magnitude_bits,
    reciprocal,
    round_e2m1,
    round_e4m3,
    signed,
    sixth,
    to_bf16,
)

# What infinities become where a residual would make NaN of them: far beyond what any scale reaches.
LARGE = tl.constexpr(2.0**100)


@triton.jit
def physical_token(place, tokens, ANCHORS: tl.constexpr):
    """The token that stands at `place`: ANCHORS evenly spaced ones first, then the others (`reference.key_order`).

    Anchor i is round(i·(S − 1)/(N − 1)); N − 1 is odd, so nothing lies halfway. It has at most j other tokens before it
    when 2i·(S − N) < (N − 1)(2j + 1), so the j-th other token comes after ⌈(N − 1)(2j + 1)/(2(S − N))⌉ anchors.
    """
    # A 64-bit division takes a hundred instructions, more than all else that is done for a token.
    if tokens < 8000000:
        token = _in_order(place.to(tl.uint32), tokens.to(tl.uint32), ANCHORS).to(tl.int64)
    else:
        token = _in_order(place.to(tl.int64), tokens.to(tl.int64), ANCHORS)
    return token


@triton.jit
def _in_order(place, tokens, ANCHORS: tl.constexpr):
    """`physical_token` in the integers of `place`, which must hold 256 · tokens. Where it is no anchor's place the
    anchor may overflow, and is not taken."""
    span = tokens - 1
    anchor = (2 * place * span + (ANCHORS - 1)) // (2 * (ANCHORS - 1))
    other = tl.where(place < ANCHORS, place * 0, place - ANCHORS)
    others = tl.where(tokens > ANCHORS, tokens - ANCHORS, tokens * 0 + 1)
    before = ((ANCHORS - 1) * (2 * other + 1) + 2 * others - 1) // (2 * others)
    token = tl.where(place < ANCHORS, anchor, other + before)
    return tl.where(span < ANCHORS, place, token)


@triton.jit
def _scaled_e2m1(x, scale, inverse):
    """scale · E2M1(|x| / scale) with x's sign; 0 where the scale is 0. `inverse`: `reciprocal` of the scale."""
    size = at_most(tl.abs(x), LARGE)
    return signed(scale * round_e2m1(at_most(divided(size, scale, inverse), 6.0), 1.0, True), x)


@triton.jit
def nvfp4_rows(x, T: tl.constexpr):
    """NVFP4 along the channels of x [T, 128]: a scale for every 16."""
    blocks = tl.reshape(x, (T, 8, 16))
    amax = tl.max(magnitude_bits(blocks), 2, keep_dims=True).to(tl.float32, bitcast=True)
    scale = e4m3_scale(amax)
    return tl.reshape(_scaled_e2m1(blocks, scale, reciprocal(scale)), (T, 128))


@triton.jit
def _squared_error(x, scale, inverse):
    """Of x ≥ 0."""
    code = round_e2m1(at_most(divided(x, scale, inverse), 6.0), 1.0, True)
    # The product has six significant bits, so it makes no difference that it is fused.
    e = fma(code, -scale, x)
    return e * e


@triton.jit
def _folded_error(a, b, c, d, scale, T: tl.constexpr):
    """Sums of squared errors [T, 4] of four pieces ≥ 0 [T, 4, 8] of a block: halves first, then 8, 4, 2, 1 apart."""
    inverse = reciprocal(scale)[:, :, None]
    scale = scale[:, :, None]
    first = _squared_error(a, scale, inverse) + _squared_error(c, scale, inverse)
    second = _squared_error(b, scale, inverse) + _squared_error(d, scale, inverse)
    # Of two numbers, tl.sum can only make one sum.
    fours = tl.sum(tl.reshape(first + second, (T, 4, 2, 4)), 2)
    twos = tl.sum(tl.reshape(fours, (T, 4, 2, 2)), 2)
    return tl.sum(twos, 2)


@triton.jit
def nvfp4_folded(a, b, c, d, T: tl.constexpr):
    """NVFP4 along the channels, blocks b and b + 4 with one scale, the best of 11 candidates. The pieces [T, 4, 8] are
    the first and second eight channels of the 16 of every block in the first half of the channels, then in the second.

    Everything about one scale happens in one thread: that is what the pieces are for.
    """
    bits = tl.maximum(magnitude_bits(a), magnitude_bits(b))
    bits = tl.maximum(bits, tl.maximum(magnitude_bits(c), magnitude_bits(d)))
    amax = tl.max(bits, 2).to(tl.float32, bitcast=True)
    base = sixth(at_most(amax, LARGE))
    size_a, size_b = at_most(tl.abs(a), LARGE), at_most(tl.abs(b), LARGE)
    size_c, size_d = at_most(tl.abs(c), LARGE), at_most(tl.abs(d), LARGE)
    best = round_e4m3(at_most(base, 448.0), 1.0)
    least = _folded_error(size_a, size_b, size_c, size_d, best, T)
    # A loop, not ten copies of it: those take the compiler long, and the instruction cache would not hold them.
    for i in range(10):
        # FOLD_CANDIDATES: .25 to .5 by sixteenths, then to 1.25 by eighths. 1, the start itself, is left out.
        place = i * 1.0
        factor = 0.25 + place * 0.0625 + tl.maximum(place - 4.0, 0.0) * 0.0625
        factor += tl.where(place > 7.0, 0.125, 0.0)
        scale = round_e4m3(at_most(base * factor, 448.0), 1.0)
        error = _folded_error(size_a, size_b, size_c, size_d, scale, T)
        better = error < least
        best = tl.where(better, scale, best)
        least = tl.where(better, error, least)
    inverse = reciprocal(best)[:, :, None]
    best = best[:, :, None]
    return (
        _scaled_e2m1(a, best, inverse),
        _scaled_e2m1(b, best, inverse),
        _scaled_e2m1(c, best, inverse),
        _scaled_e2m1(d, best, inverse),
    )


@triton.jit
def nvfp4_tokens(x, T: tl.constexpr):
    """NVFP4 along the tokens of x [T, 128]: a scale for every 16 of a channel."""
    blocks = tl.reshape(x, (T // 16, 16, 128))
    amax = tl.max(magnitude_bits(blocks), 1, keep_dims=True).to(tl.float32, bitcast=True)
    scale = e4m3_scale(amax)
    return tl.reshape(_scaled_e2m1(blocks, scale, reciprocal(scale)), (T, 128))


@triton.jit
def mxfp4_direct_tokens(x, T: tl.constexpr):
    """6 × MXFP4-direct along the tokens of x [T, 128]: an amplitude for every 32 of a channel, value α·code."""
    blocks = tl.reshape(x, (T // 32, 32, 128))
    alpha = direct_amplitude(tl.max(magnitude_bits(blocks), 1, keep_dims=True))
    code = round_e2m1(at_most(tl.abs(blocks) * inverse_power(alpha) * 6.0, 6.0), 1.0, True)
    return tl.reshape(signed(code, blocks) * alpha, (T, 128))


@triton.jit
def mxfp8_token_blocks(x, T: tl.constexpr):
    """E4M3 of x [T, 128] with one power of two for 32 tokens."""
    blocks = tl.reshape(x, (T // 32, 32 * 128))
    amax = tl.max(magnitude_bits(blocks), 1, keep_dims=True).to(tl.float32, bitcast=True)
    scale = e4m3_block_scale(amax)
    code = round_e4m3(at_most(tl.abs(blocks) * inverse_power(scale), 448.0), 1.0)
    return tl.reshape(signed(code, blocks) * scale, (T, 128))


@triton.jit
def _channels(FIRST: tl.constexpr):
    """[4, 8]: eight channels from FIRST on in each of four blocks."""
    return FIRST + tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 8)[None, :]


@triton.jit
def _smoothed(
    source, token, real, channel, token_stride, channel_stride, mean, row_means, block_means, count,
    MEAN: tl.constexpr, BLOCK_MEAN: tl.constexpr, LSE_SHIFT: tl.constexpr,
):  # fmt: skip
    """Channels of T tokens, less their means, and their part of x · row_means [T]. `real` is [T, 1] or [T, 1, 1] and
    `channel` [128] or [4, 8]; the other arguments as in `quantize`, moved to the head or the tile."""
    rows = tl.reshape(token, real.shape)
    values = tl.load(
        source + rows * token_stride + tl.expand_dims(channel, 0).to(tl.int64) * channel_stride, mask=real, other=0.0
    ).to(tl.float32)
    shift = 0.0
    if LSE_SHIFT:
        shift = values * tl.expand_dims(tl.load(row_means + channel), 0)
        if len(channel.shape) == 2:
            shift = tl.sum(shift, 2)
        shift = tl.sum(shift, 1)
    if MEAN:
        values = tl.where(real, values - tl.expand_dims(tl.load(mean + channel), 0), 0.0)
    if BLOCK_MEAN:
        means = tl.where(count > 0, tl.sum(values, 0) / tl.maximum(count, 1).to(tl.float32), 0.0)
        tl.store(block_means + channel, means)
        values = tl.where(real, values - tl.expand_dims(means, 0), 0.0)
    return values, shift


@triton.jit
def _squares(piece):
    """Sums of squares [T] of [T, 4, 8]."""
    return tl.sum(tl.sum(piece * piece, 2), 1)


# What may be 1 in one call and not in the next, and is no part of an address's alignment: triton would compile once for
# 1, once for multiples of 16, once for other numbers.
@triton.jit(do_not_specialize=["heads", "tokens", "padded"])
def quantize(
    x, out, mean, gain, flag, norms, largest, block_means, row_means, lse_shift,
    batch_stride, token_stride, head_stride, channel_stride, heads, tokens, padded, scale,
    FORMAT: tl.constexpr, ANCHORS: tl.constexpr, GUARDED: tl.constexpr, MEAN: tl.constexpr, NORM: tl.constexpr,
    BLOCK_MEAN: tl.constexpr, LSE_SHIFT: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """One tile of T tokens of one head of x [B, S, H, 128] → out [B·H, padded, 128] in BF16.

    mean         MEAN: [B·H, 128] subtracted from every token
    gain         FORMAT "fp8": [B·H] factor before rounding
    flag         GUARDED: ANCHORS stand first only where it is 1
    norms        NORM "rows": [B·H, padded] Euclidean norms of the rounded tokens; "largest": of a head into `largest`,
                 bits of the float
    block_means  BLOCK_MEAN: [B·H, padded / 128, 128] subtracted means of 128 tokens; T must be 128
    lse_shift    LSE_SHIFT: [B·H, padded] x · row_means [B·H, 128] · scale
    """
    tiles = padded // T
    head = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    place = tile * T + tl.arange(0, T)
    token = place.to(tl.int64)
    if ANCHORS > 0:
        moved = physical_token(place, tokens, ANCHORS)
        if GUARDED:
            moved = tl.where(tl.load(flag) != 0, moved, token)
        token = moved
    source = x + (head // heads) * batch_stride + (head % heads) * head_stride
    count = tl.minimum(tokens - tile * T, T)
    if MEAN:
        mean += head * 128
    if LSE_SHIFT:
        row_means += head * 128
    if BLOCK_MEAN:
        block_means += (head * tiles + tile) * 128

    if FORMAT == "nvfp4-folded":
        real = (place < tokens)[:, None, None]
        a, shift = _smoothed(
            source, token, real, _channels(0), token_stride, channel_stride, mean, row_means, block_means, count,
            MEAN, BLOCK_MEAN, LSE_SHIFT,
        )  # fmt: skip
        b, more = _smoothed(
            source, token, real, _channels(8), token_stride, channel_stride, mean, row_means, block_means, count,
            MEAN, BLOCK_MEAN, LSE_SHIFT,
        )  # fmt: skip
        shift += more
        c, more = _smoothed(
            source, token, real, _channels(64), token_stride, channel_stride, mean, row_means, block_means, count,
            MEAN, BLOCK_MEAN, LSE_SHIFT,
        )  # fmt: skip
        shift += more
        d, more = _smoothed(
            source, token, real, _channels(72), token_stride, channel_stride, mean, row_means, block_means, count,
            MEAN, BLOCK_MEAN, LSE_SHIFT,
        )  # fmt: skip
        shift += more
        a, b, c, d = nvfp4_folded(a, b, c, d, T)
        if NORM != "none":
            square = _squares(a) + _squares(b) + _squares(c) + _squares(d)
        target = out + (head * padded + place.to(tl.int64)[:, None, None]) * 128
        tl.store(target + tl.expand_dims(_channels(0), 0), to_bf16(a))
        tl.store(target + tl.expand_dims(_channels(8), 0), to_bf16(b))
        tl.store(target + tl.expand_dims(_channels(64), 0), to_bf16(c))
        tl.store(target + tl.expand_dims(_channels(72), 0), to_bf16(d))
    else:
        real = (place < tokens)[:, None]
        channel = tl.arange(0, 128)
        values, shift = _smoothed(
            source, token, real, channel, token_stride, channel_stride, mean, row_means, block_means, count,
            MEAN, BLOCK_MEAN, LSE_SHIFT,
        )  # fmt: skip
        if FORMAT == "nvfp4":
            values = nvfp4_rows(values, T)
        elif FORMAT == "nvfp4-tokens":
            values = nvfp4_tokens(values, T)
        elif FORMAT == "mxfp4-direct":
            values = mxfp4_direct_tokens(values, T)
        elif FORMAT == "mxfp8-token-block":
            values = mxfp8_token_blocks(values, T)
        elif FORMAT == "fp8":
            values *= tl.load(gain + head)
            values = signed(round_e4m3(at_most(tl.abs(values), 448.0), 1.0), values)
        if NORM != "none":
            square = tl.sum(values * values, 1)
        target = out + (head * padded + place.to(tl.int64)[:, None]) * 128 + channel[None, :]
        tl.store(target, to_bf16(values))
    if LSE_SHIFT:
        tl.store(lse_shift + head * padded + place, shift * scale)
    if NORM != "none":
        norm = tl.sqrt(square)
        if NORM == "rows":
            tl.store(norms + head * padded + place, norm)
        else:
            tl.atomic_max(largest + head, tl.max(magnitude_bits(norm), 0).to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["heads", "keys", "padded", "blocks", "first_head"])
def score_bias(
    means, k, k_mean, out, batch_stride, token_stride, head_stride, channel_stride, heads, keys, padded, blocks,
    first_head, ANCHORS: tl.constexpr, MEAN: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """What Q smoothing took: out [n, blocks, padded] float32 = block means of Q · unrounded K, for n heads from
    `first_head`. `means` is [B·H, blocks, 128], a program makes 16 blocks × T keys."""
    tiles = padded // T
    groups = tl.cdiv(blocks, 16)
    local = (tl.program_id(0) // (tiles * groups)).to(tl.int64)
    head = local + first_head
    rest = tl.program_id(0) % (tiles * groups)
    place = (rest % tiles) * T + tl.arange(0, T)
    block = (rest // tiles) * 16 + tl.arange(0, 16)
    channel = tl.arange(0, 128)
    token = place.to(tl.int64)
    if ANCHORS > 0:
        token = physical_token(place, keys, ANCHORS)
    source = k + (head // heads) * batch_stride + (head % heads) * head_stride
    real = place < keys
    pointers = source + token[:, None] * token_stride + channel[None, :].to(tl.int64) * channel_stride
    key = tl.load(pointers, mask=real[:, None], other=0.0).to(tl.float32)
    if MEAN:
        key -= tl.load(k_mean + head * 128 + channel)[None, :]
    mean = tl.load(means + (head * blocks + block[:, None]) * 128 + channel[None, :], mask=(block < blocks)[:, None])
    product = dot(mean, tl.trans(key))
    target = out + (local * blocks + block[:, None]) * padded + place[None, :]
    tl.store(target, product, mask=(block < blocks)[:, None])


@triton.jit(do_not_specialize=["heads", "queries", "keys"])
def sample_logits(
    q, k, flag, q_batch_stride, q_token_stride, q_head_stride, q_channel_stride, k_batch_stride, k_token_stride,
    k_head_stride, k_channel_stride, heads, queries, keys, scale, limit,
):  # fmt: skip
    """flag ← 1 where a logit of up to 128 × 128 evenly spaced queries and keys of a head exceeds `limit` in magnitude.

    Each program takes 32 of the queries. NaN exceeds nothing.
    """
    head = (tl.program_id(0) // 4).to(tl.int64)
    row = (tl.program_id(0) % 4) * 32 + tl.arange(0, 32)
    column = tl.arange(0, 128)
    channel = tl.arange(0, 128).to(tl.int64)
    query = physical_token(row, queries, 128)
    key = physical_token(column, keys, 128)
    q += (head // heads) * q_batch_stride + (head % heads) * q_head_stride
    k += (head // heads) * k_batch_stride + (head % heads) * k_head_stride
    rows = tl.load(
        q + query[:, None] * q_token_stride + channel[None, :] * q_channel_stride,
        mask=(row < queries)[:, None],
        other=0.0,
    )
    columns = tl.load(
        k + key[:, None] * k_token_stride + channel[None, :] * k_channel_stride,
        mask=(column < keys)[:, None],
        other=0.0,
    )
    size = tl.abs(dot(rows, tl.trans(columns))) * scale
    # Where there is no query or key, infinities of the other would meet zeros: NaN, which exceeds nothing.
    exceeds = tl.max(tl.max((size > limit).to(tl.int32), 1), 0)
    tl.atomic_max(flag, exceeds)
