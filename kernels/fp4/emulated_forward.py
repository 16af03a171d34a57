"""The fused attention forward of the Triton backend: BF16 tensor cores over operands whose values BF16 holds exactly.

A program works on BM queries of one head and walks over the keys in tiles of BN. P never leaves registers: a score
becomes u, u is rounded to E2M1 (or P's other formats) by a few float operations, and what BF16 multiplies is α·code.

Exponents. Direct-P's block of 32 keys has α = 2^e; what is multiplied is 2^(e + bias), with a whole number `bias` for
each row that puts the largest block of the first 128 keys at `TARGET`: whole octaves cancel in O / L, so this moves any
row into FP32's range. Should a later block pass `CEILING`, O and L are scaled down by a power of two, which is exact.
Most calls can do without that test: where the norms of Q and K say that no score of the program can pass, the loop runs
without it. Blocks more than 86 octaves below the first 128 keys' largest get α = 2^-126, where the reference has its
smallest byte: neither can be seen in the result.

Everything is in octaves: `octaves` is what one unit of q·k counts for, the softmax scale times log2 e.
"""

import triton
import triton.language as tl

from wanfp4.kernels.emulated_rounding import (
    at_most,
    bound,
    dot,
    e4m3_block_scale,
    e4m3_scale,
    magnitude_bits,
    round_e2m1,
    round_e4m3,
    to_bf16,
)

DIRECT_ROUNDING = tl.constexpr(0.41504)
LOG2_6 = tl.constexpr(2.584962500721156)
LN_2 = tl.constexpr(0.6931471805599453)
TARGET = tl.constexpr(-40.0)
CEILING = tl.constexpr(60.0)
FLOOR = tl.constexpr(-4194304.0)  # 2^22 octaves below: as low as float32 counts quarters of an octave


@triton.jit
def block_max(s, BM: tl.constexpr, BN: tl.constexpr, SIZE: tl.constexpr):
    """Largest score of every block of SIZE keys: [BM, BN / SIZE]. NaN is left out."""
    return tl.max(tl.reshape(s, (BM, BN // SIZE, SIZE)), 2)


@triton.jit
def exponents(tops, octaves, reference):
    """e [BM, n] of Direct-P blocks, whole numbers in float32."""
    g = tops * octaves - reference[:, None]
    return tl.floor(tl.where(g > FLOOR, g, FLOOR) + DIRECT_ROUNDING)  # FLOOR for −∞ and NaN, too


@triton.jit
def mix_lanes(first, BN: tl.constexpr, DENSITY: tl.constexpr):
    """[1, BN / 32, 32]: the lanes of the keys from `first` that take exp2, of 16 pairs those that fit the block's place
    o in its 128 keys."""
    key = tl.arange(0, BN)
    if BN < 128:
        key += first
    o = (key // 32) % 4
    pair = (key % 32) // 2
    chosen = (pair == o) | (pair == o + 8) | (pair == 4) | (pair == 12)
    if DENSITY >= 2:
        other = (o + 2) % 4
        chosen = chosen | (pair == other) | (pair == other + 8) | (pair == 6) | (pair == 14)
    if DENSITY == 4:
        chosen = pair >= 0
    return tl.reshape(chosen, (1, BN // 32, 32))


@triton.jit
def classify(
    s, octaves, offset, unit, log2_unit, lanes, A, B, A2, B2, CLASSIFIER: tl.constexpr, CLAMP: tl.constexpr
):  # fmt: skip
    """unit · u(x), x = s · octaves + offset, for blocks s [BM, n, size] with offsets and units [BM, n, 1].

    `log2_unit` is only read by exponentials. CLAMP says whether u may reach 7, where E2M1 must saturate.
    """
    if CLASSIFIER == "exp2":
        u = tl.exp2(s * octaves + (offset + log2_unit))
    else:
        u = s * (octaves * A * unit) + (offset * A + B) * unit
        if CLASSIFIER == "two-piece":
            u = tl.maximum(u, s * (octaves * A2 * unit) + (offset * A2 + B2) * unit, propagate_nan=tl.PropagateNan.ALL)
        elif CLASSIFIER == "mix":
            u = tl.where(lanes, tl.exp2(s * octaves + (offset + log2_unit)), u)
    if CLAMP:
        u = at_most(u, 6.0 * unit)
    return u


@triton.jit
def direct_p(
    s, e, reference, bias, octaves, lanes, A, B, A2, B2,
    CLASSIFIER: tl.constexpr, CLAMP: tl.constexpr, CODES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Weights 2^(e + bias)·code [BM, BN] of scores s, and their contribution to the denominator [BM]."""
    blocks = tl.reshape(s, (BM, BN // 32, 32))
    log2_alpha = tl.maximum(e + bias[:, None], -126.0)
    alpha = ((log2_alpha.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    offset = -(reference[:, None] + e) + LOG2_6
    u = classify(
        blocks, octaves, offset[:, :, None], alpha[:, :, None], log2_alpha[:, :, None], lanes, A, B, A2, B2,
        CLASSIFIER, CLAMP,
    )  # fmt: skip
    weight = tl.reshape(round_e2m1(u, alpha[:, :, None]), (BM, BN))
    counted = weight if CODES else tl.exp2(s * octaves + (bias - reference + LOG2_6)[:, None])
    return weight, tl.sum(counted, 1)


@triton.jit
def nvfp4_p(
    s, reference, peak, octaves, A, B, A2, B2,
    CLASSIFIER: tl.constexpr, CLAMP: tl.constexpr, CODES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Weights E4M3 scale · code [BM, BN] with `peak` octaves for the row reference, and what the denominator gets."""
    blocks = tl.reshape(s, (BM, BN // 16, 16))
    shift = peak - reference
    scale = e4m3_scale(tl.exp2(tl.max(blocks, 2) * octaves + shift[:, None]))
    # A block whose scale is 0 has weights 0, but still counts where the denominator is exact.
    divisor = tl.where(scale == 0, 1.0, scale)
    offset = shift[:, None] - tl.log2(divisor)
    u = classify(blocks, octaves, offset[:, :, None], 1.0, 0.0, False, A, B, A2, B2, CLASSIFIER, False)
    clamped = u
    if CLAMP:
        clamped = at_most(u, 6.0)
    weight = round_e2m1(clamped, 1.0) * scale[:, :, None]
    if CODES:
        total = tl.sum(tl.sum(weight, 2), 1)
    elif CLASSIFIER == "exp2":
        total = tl.sum(tl.sum(u, 2) * divisor, 1)
    else:
        total = tl.sum(tl.exp2(s * octaves + shift[:, None]), 1)
    return tl.reshape(weight, (BM, BN)), total


@triton.jit
def mxfp8_p(s, reference, peak, octaves, CODES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Weights E4M3 · power of two, one for every 32 keys."""
    p = tl.exp2(s * octaves + (peak - reference)[:, None])
    blocks = tl.reshape(p, (BM, BN // 32, 32))
    scale = e4m3_block_scale(tl.max(magnitude_bits(blocks), 2).to(tl.float32, bitcast=True))
    weight = tl.reshape(round_e4m3(blocks, scale[:, :, None]), (BM, BN))
    total = tl.sum(weight if CODES else p, 1)
    return weight, total


@triton.jit
def plain_p(s, reference, peak, octaves, P: tl.constexpr, CODES: tl.constexpr):
    """Weights in E4M3, or to be rounded to BF16 for the product."""
    p = tl.exp2(s * octaves + (peak - reference)[:, None])
    weight = p
    if P == "fp8":
        weight = round_e4m3(p, 1.0)
    total = tl.sum(weight if CODES else p, 1)
    return weight, total


@triton.jit
def tile(source, row, N: tl.constexpr, TMA: tl.constexpr):
    """N rows of 128 from `row`: of a descriptor, or without TMA of the address of row 0."""
    if TMA:
        values = source.load([row, 0])
    else:
        rows = (row + tl.arange(0, N)).to(tl.int64)
        values = tl.load(source + rows[:, None] * 128 + tl.arange(0, 128)[None, :])
    return values


@triton.jit
def scores(
    q, k_desc, bias_row, row, key, keys,
    BIAS: tl.constexpr, MASKED: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """q·k [BM, BN] of the keys at `key`, with what Q smoothing took; −∞ where there is no key."""
    k = tile(k_desc, row + key, BN, TMA)
    s = dot(q, tl.trans(k))
    column = key + tl.arange(0, BN)
    if BIAS:
        s += tl.load(bias_row + column)[None, :]
    if MASKED:
        s = tl.where((column < keys)[None, :], s, float("-inf"))
    return s


@triton.jit
def step(
    q, k_desc, v_desc, bias_row, acc, total, reference, bias, row, key, keys, octaves, peak, A, B, A2, B2,
    P: tl.constexpr, CLASSIFIER: tl.constexpr, DENSITY: tl.constexpr, CLAMP: tl.constexpr, CODES: tl.constexpr,
    ROWMAX: tl.constexpr, BIAS: tl.constexpr, CHECK: tl.constexpr, MASKED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The online softmax's next tile of keys. CHECK: may a row pass CEILING? MASKED: do the keys end in it?"""
    s = scores(q, k_desc, bias_row, row, key, keys, BIAS, MASKED, BN, TMA)
    if ROWMAX:
        raised = tl.maximum(reference, tl.max(s, 1) * octaves)
        factor = tl.exp2(reference - raised)
        reference = raised
        acc *= factor[:, None]
        total *= factor
    if P == "mxfp4-direct":
        e = exponents(block_max(s, BM, BN, 32), octaves, reference)
        if CHECK:
            highest = tl.max(e, 1) + bias
            if tl.max(highest, 0) > CEILING:
                down = tl.where(highest > CEILING, highest - TARGET, 0.0)
                bias -= down
                factor = tl.exp2(-down)
                acc *= factor[:, None]
                total *= factor
        lanes = False
        if CLASSIFIER == "mix":
            lanes = mix_lanes(key, BN, DENSITY)
        p, part = direct_p(s, e, reference, bias, octaves, lanes, A, B, A2, B2, CLASSIFIER, CLAMP, CODES, BM, BN)
    elif P == "nvfp4":
        p, part = nvfp4_p(s, reference, peak, octaves, A, B, A2, B2, CLASSIFIER, CLAMP, CODES, BM, BN)
    elif P == "mxfp8":
        p, part = mxfp8_p(s, reference, peak, octaves, CODES, BM, BN)
    else:
        p, part = plain_p(s, reference, peak, octaves, P, CODES)
    total += part
    v = tile(v_desc, row + key, BN, TMA)
    acc += dot(to_bf16(p), v)
    return acc, total, reference, bias


@triton.jit
def walk(
    q, k_desc, v_desc, bias_row, acc, total, reference, bias, row, keys, octaves, peak, A, B, A2, B2,
    P: tl.constexpr, CLASSIFIER: tl.constexpr, DENSITY: tl.constexpr, CLAMP: tl.constexpr, CODES: tl.constexpr,
    ROWMAX: tl.constexpr, BIAS: tl.constexpr, CHECK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """All whole tiles of keys."""
    for key in range(0, bound(keys // BN * BN), BN):
        acc, total, reference, bias = step(
            q, k_desc, v_desc, bias_row, acc, total, reference, bias, row, key, keys, octaves, peak, A, B, A2,
            B2, P, CLASSIFIER, DENSITY, CLAMP, CODES, ROWMAX, BIAS, CHECK, False, BM, BN, TMA,
        )  # fmt: skip
    return acc, total, reference, bias


@triton.jit
def forward(
    q_desc, k_desc, v_desc, out, lse, score_bias, lse_shift, v_mean, v_gain, q_norms, k_norms, flag,
    octaves, margin, peak, v_factor, A, B, A2, B2, heads, queries, keys, q_padded, k_padded, first_head,
    batch_stride, token_stride, head_stride,
    P: tl.constexpr, CLASSIFIER: tl.constexpr, DENSITY: tl.constexpr, CLAMP: tl.constexpr, CODES: tl.constexpr,
    ROWMAX: tl.constexpr, ANCHORS: tl.constexpr, GUARDED: tl.constexpr, BIAS: tl.constexpr, V_MEAN: tl.constexpr,
    V_GAIN: tl.constexpr, LSE: tl.constexpr, LSE_SHIFT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Attention of BM queries of one head.

    q_desc, k_desc, v_desc  TMA: descriptors of [B·H · padded tokens, 128] in BF16, blocks of BM or BN tokens; else
                 addresses
    out, lse     [B, Sq, H, 128] with strides in elements; LSE: [B·H, Sq] float32
    score_bias   BIAS: [n, q_padded / 128, k_padded] float32, n heads from `first_head`; BM must divide 128
    lse_shift    LSE_SHIFT: [B·H, q_padded], natural units
    v_mean       V_MEAN: [B·H, 128];  v_gain  V_GAIN: [B·H], V was multiplied by it
    q_norms      [B·H, q_padded], k_norms [B·H] bits: Euclidean norms and the largest of them, for Direct-P without BIAS
    flag         GUARDED: ANCHORS and `margin` apply only where it is 1
    margin       octaves that the anchor is raised by
    """
    tiles = tl.cdiv(queries, BM)
    local = tl.program_id(0) // tiles
    head = local + first_head
    position = (tl.program_id(0) % tiles) * BM
    row = head * k_padded
    q = tile(q_desc, head * q_padded + position, BM, TMA)
    bias_row = score_bias
    if BIAS:
        bias_row += (local.to(tl.int64) * (q_padded // 128) + position // 128) * k_padded
    reference = tl.zeros((BM,), tl.float32)
    bias = tl.zeros((BM,), tl.float32)
    if ROWMAX:
        reference += float("-inf")
        bias += TARGET
    elif P == "mxfp4-direct":
        # The first tile's scores once more: they say what the row is relative to.
        s = scores(q, k_desc, bias_row, row, 0, keys, BIAS, True, BN, TMA)
        tops = block_max(s, BM, BN, 32)
        if ANCHORS > 0:
            if ANCHORS >= BN:
                anchor = tl.max(tops, 1)
            else:
                anchor = tl.max(tl.where(tl.arange(0, BN // 32)[None, :] * 32 < ANCHORS, tops, float("-inf")), 1)
            for key in tl.range(BN, ANCHORS, BN, num_stages=1):
                more = scores(q, k_desc, bias_row, row, key, keys, BIAS, True, BN, TMA)
                anchor = tl.maximum(anchor, tl.max(more, 1))
            reference = anchor * octaves + margin
            if GUARDED:
                reference = tl.where(tl.load(flag) != 0, reference, 0.0)
        bias = -tl.max(exponents(tops, octaves, reference), 1) + TARGET

    acc = tl.zeros((BM, 128), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    check = False
    if P == "mxfp4-direct" and not ROWMAX:
        if BIAS:
            check = True
        else:
            norm = tl.load(q_norms + head.to(tl.int64) * q_padded + position + tl.arange(0, BM))
            longest = tl.load(k_norms + head).to(tl.float32, bitcast=True)
            # No score is larger than the product of the norms, rounding counted in.
            highest = norm * (longest * octaves * 1.001) - reference + 1.0 + bias
            check = tl.max(highest, 0) > CEILING
    if check:
        acc, total, reference, bias = walk(
            q, k_desc, v_desc, bias_row, acc, total, reference, bias, row, keys, octaves, peak, A, B, A2, B2,
            P, CLASSIFIER, DENSITY, CLAMP, CODES, ROWMAX, BIAS, True, BM, BN, TMA,
        )  # fmt: skip
    else:
        acc, total, reference, bias = walk(
            q, k_desc, v_desc, bias_row, acc, total, reference, bias, row, keys, octaves, peak, A, B, A2, B2,
            P, CLASSIFIER, DENSITY, CLAMP, CODES, ROWMAX, BIAS, False, BM, BN, TMA,
        )  # fmt: skip
    if keys % BN != 0:
        acc, total, reference, bias = step(
            q, k_desc, v_desc, bias_row, acc, total, reference, bias, row, keys // BN * BN, keys, octaves, peak,
            A, B, A2, B2, P, CLASSIFIER, DENSITY, CLAMP, CODES, ROWMAX, BIAS, not ROWMAX, True, BM, BN, TMA,
        )  # fmt: skip

    rows = position + tl.arange(0, BM)
    real = rows < queries
    channel = tl.arange(0, 128)
    inverse = v_factor / total
    if V_GAIN:
        inverse /= tl.load(v_gain + head)
    o = acc * inverse[:, None]
    if V_MEAN:
        o += tl.load(v_mean + head.to(tl.int64) * 128 + channel)[None, :]
    base = out + (head // heads).to(tl.int64) * batch_stride + (head % heads).to(tl.int64) * head_stride
    target = base + rows.to(tl.int64)[:, None] * token_stride + channel[None, :]
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(target, to_bf16(o), mask=real[:, None])
    else:
        tl.store(target, o.to(out.dtype.element_ty), mask=real[:, None])
    if LSE:
        # A row's sum is Σ 2^(t + bias)·6 for Direct-P, Σ 2^(t + peak) otherwise.
        unit = (bias + LOG2_6) if P == "mxfp4-direct" else peak
        natural = (tl.log2(total) - unit + reference) * LN_2
        if LSE_SHIFT:
            natural += tl.load(lse_shift + head.to(tl.int64) * q_padded + rows)
        tl.store(lse + head.to(tl.int64) * queries + rows, natural, mask=real)
