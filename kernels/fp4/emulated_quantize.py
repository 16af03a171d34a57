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
    e4m3_block_scale,
    e4m3_scale,
    inverse_power,
    magnitude_bits,
    round_e2m1,
    round_e4m3,
    signed,
    to_bf16,
)


@triton.jit
def physical_token(place, tokens, ANCHORS: tl.constexpr):
    """The token that stands at `place`: ANCHORS evenly spaced ones first, then the others (`reference.key_order`).

    Anchor i is round(i·(S − 1)/(N − 1)); N − 1 is odd, so nothing lies halfway. It has at most j other tokens before it
    when 2i·(S − N) < (N − 1)(2j + 1), so the j-th other token comes after ⌈(N − 1)(2j + 1)/(2(S − N))⌉ anchors.
    """
    place = place.to(tl.int64)
    span = tokens.to(tl.int64) - 1
    anchor = (2 * place * span + (ANCHORS - 1)) // (2 * (ANCHORS - 1))
    other = tl.maximum(place - ANCHORS, 0)
    others = tl.maximum(span + 1 - ANCHORS, 1)
    before = ((ANCHORS - 1) * (2 * other + 1) + 2 * others - 1) // (2 * others)
    token = tl.where(place < ANCHORS, anchor, other + before)
    return tl.where(span < ANCHORS, place, token)


@triton.jit
def _scaled_e2m1(x, scale):
    """scale · E2M1(x / scale) by IEEE division; 0 where the scale is 0."""
    code = at_most(tl.div_rn(tl.abs(x), tl.where(scale == 0, float("inf"), scale)), 6.0)
    return scale * round_e2m1(code, 1.0)


@triton.jit
def nvfp4_rows(x, T: tl.constexpr):
    """NVFP4 along the channels of x [T, 128]: a scale for every 16."""
    blocks = tl.reshape(x, (T, 8, 16))
    amax = tl.max(magnitude_bits(blocks), 2, keep_dims=True).to(tl.float32, bitcast=True)
    scale = tl.broadcast_to(e4m3_scale(amax), (T, 8, 16))
    return tl.reshape(signed(_scaled_e2m1(blocks, scale), blocks), (T, 128))


@triton.jit
def _folded_error(x, scale, T: tl.constexpr):
    """Sums of squared errors [T, 4] of x [T, 4, 2, 2, 2, 2, 2] ≥ 0: halves first, then offsets 8, 4, 2, 1 apart."""
    spread = tl.broadcast_to(tl.reshape(scale, (T, 4, 1, 1, 1, 1, 1)), (T, 4, 2, 2, 2, 2, 2))
    e = x - _scaled_e2m1(x, spread)
    a, b = tl.split(e * e)
    a, b = tl.split(a + b)
    a, b = tl.split(a + b)
    a, b = tl.split(a + b)
    a, b = tl.split(a + b)
    return a + b


@triton.jit
def nvfp4_folded_rows(x, T: tl.constexpr):
    """NVFP4 along the channels of x [T, 128], blocks b and b + 4 with one scale, the best of 11 candidates."""
    # [half, block, 8, 4, 2, 1] with the half last, so that the tree of additions splits the last dimension each time.
    tree = tl.permute(tl.reshape(x, (T, 2, 4, 2, 2, 2, 2)), (0, 2, 6, 5, 4, 3, 1))
    size = tl.abs(tree)
    amax = tl.max(tl.reshape(magnitude_bits(tree), (T, 4, 32)), 2).to(tl.float32, bitcast=True)
    base = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32))
    best = round_e4m3(at_most(base, 448.0), 1.0)
    least = _folded_error(size, best, T)
    # A loop, not eleven copies of it: those take the compiler 20 seconds.
    for i in range(11):
        # FOLD_CANDIDATES: .25 to .5 by sixteenths, then to 1.25 by eighths. 1, the start itself, is no improvement.
        place = i * 1.0
        factor = 0.25 + place * 0.0625 + tl.maximum(place - 4.0, 0.0) * 0.0625
        scale = round_e4m3(at_most(base * factor, 448.0), 1.0)
        error = _folded_error(size, scale, T)
        better = error < least
        best = tl.where(better, scale, best)
        least = tl.where(better, error, least)
    spread = tl.broadcast_to(tl.reshape(best, (T, 4, 1, 1, 1, 1, 1)), (T, 4, 2, 2, 2, 2, 2))
    values = signed(_scaled_e2m1(size, spread), tree)
    return tl.reshape(tl.permute(values, (0, 6, 1, 5, 4, 3, 2)), (T, 128))


@triton.jit
def nvfp4_tokens(x, T: tl.constexpr):
    """NVFP4 along the tokens of x [T, 128]: a scale for every 16 of a channel."""
    blocks = tl.reshape(x, (T // 16, 16, 128))
    amax = tl.max(magnitude_bits(blocks), 1, keep_dims=True).to(tl.float32, bitcast=True)
    scale = tl.broadcast_to(e4m3_scale(amax), (T // 16, 16, 128))
    return tl.reshape(signed(_scaled_e2m1(blocks, scale), blocks), (T, 128))


@triton.jit
def mxfp4_direct_tokens(x, T: tl.constexpr):
    """6 × MXFP4-direct along the tokens of x [T, 128]: an amplitude for every 32 of a channel, value α·code."""
    blocks = tl.reshape(x, (T // 32, 32, 128))
    alpha = direct_amplitude(tl.max(magnitude_bits(blocks), 1, keep_dims=True))
    code = round_e2m1(at_most(tl.abs(blocks) * inverse_power(alpha) * 6.0, 6.0), 1.0)
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
    channel = tl.arange(0, 128)
    token = place.to(tl.int64)
    if ANCHORS > 0:
        moved = physical_token(place, tokens, ANCHORS)
        if GUARDED:
            moved = tl.where(tl.load(flag) != 0, moved, token)
        token = moved
    source = x + (head // heads) * batch_stride + (head % heads) * head_stride
    real = (place < tokens)[:, None]
    pointers = source + token[:, None] * token_stride + channel[None, :].to(tl.int64) * channel_stride
    values = tl.load(pointers, mask=real, other=0.0).to(tl.float32)
    if LSE_SHIFT:
        means = tl.load(row_means + head * 128 + channel)
        tl.store(lse_shift + head * padded + place, tl.sum(values * means[None, :], 1) * scale)
    if MEAN:
        values = tl.where(real, values - tl.load(mean + head * 128 + channel)[None, :], 0.0)
    if BLOCK_MEAN:
        count = tl.minimum(tokens - tile * T, T)
        means = tl.where(count > 0, tl.sum(values, 0) / tl.maximum(count, 1).to(tl.float32), 0.0)
        tl.store(block_means + (head * tiles + tile) * 128 + channel, means)
        values = tl.where(real, values - means[None, :], 0.0)

    if FORMAT == "nvfp4":
        values = nvfp4_rows(values, T)
    elif FORMAT == "nvfp4-folded":
        values = nvfp4_folded_rows(values, T)
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
        norm = tl.sqrt(tl.sum(values * values, 1))
        if NORM == "rows":
            tl.store(norms + head * padded + place, norm)
        else:
            tl.atomic_max(largest + head, tl.max(magnitude_bits(norm), 0).to(tl.int32, bitcast=True))
    target = out + (head * padded + place.to(tl.int64)[:, None]) * 128 + channel[None, :]
    tl.store(target, to_bf16(values))


@triton.jit
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
    # A whole-precision product: a 128th of the work of the scores themselves.
    product = tl.dot(mean, tl.trans(key), input_precision="ieee")
    target = out + (local * blocks + block[:, None]) * padded + place[None, :]
    tl.store(target, product, mask=(block < blocks)[:, None])


@triton.jit
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
    ).to(tl.float32)
    columns = tl.load(
        k + key[:, None] * k_token_stride + channel[None, :] * k_channel_stride,
        mask=(column < keys)[:, None],
        other=0.0,
    ).to(tl.float32)
    size = tl.abs(tl.dot(rows, tl.trans(columns), input_precision="ieee")) * scale
    # Where there is no query or key, infinities of the other would meet zeros: NaN, which exceeds nothing.
    exceeds = tl.max(tl.max((size > limit).to(tl.int32), 1), 0)
    tl.atomic_max(flag, exceeds)
