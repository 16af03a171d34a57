"""The fused attention forward of the Triton backend: BF16 tensor cores over operands whose values BF16 holds exactly.

A program works on BM queries of one head and walks over the keys in tiles of BN. P never leaves registers: a score
becomes u, u is rounded to E2M1 (or P's other formats) by a few float operations, and what BF16 multiplies is α·code.

Exponents. Direct-P's block of 32 keys has α = 2^e; what is multiplied is 2^(e + bias), with a whole number `bias` for
each row that puts the largest block of the first keys at `TARGET`: whole octaves cancel in O / L, so this moves any
row into FP32's range. Should a later block pass `CEILING`, O and L are scaled down by a power of two, which is exact.
Blocks more than 86 octaves below the first keys' largest get α = 2^-126, where the reference has its smallest byte:
neither can be seen in the result.

The other formats of P take the row's maximum so far, or an anchor: then `bias` is what the anchor is scaled to, and a
row whose P would pass the format's largest is scaled down by whole octaves on the way.

Two loops. Where the norms of Q and K say that no score of the program can pass, a fast loop takes all whole tiles, and
the careful one, which masks and rescales, what is left. Else the careful loop takes all. Both are loops, and what is
no loop is no `if` either: triton 3.6 gives the tiles of either branch shared memory of their own, and for a barrier in
a branch the two warpgroups would have to meet.

Everything is in octaves: `octaves` is what one unit of q·k counts for, the softmax scale times log2 e.
"""

import triton
import triton.language as tl

from wanfp4.kernels.emulated_rounding import (
    at_most,
    bound,
    direct_e4m3,
    dot,
    e4m3_block_scale,
    e4m3_scale,
    log2_normal,
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
def row_max(s, P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Largest score of every row, in the layout that `step` has it in, or the loop would shuffle it among threads."""
    if P == "nvfp4":
        top = tl.max(block_max(s, BM, BN, 16), 1)
    elif P == "mxfp4-direct" or P == "mxfp8":
        top = tl.max(block_max(s, BM, BN, 32), 1)
    else:
        top = tl.max(s, 1)
    return top


@triton.jit
def exponents(tops, octaves, reference):
    """e of Direct-P blocks with these largest scores, whole numbers in float32."""
    g = tops * octaves - reference
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
    weight = round_e2m1(u, alpha[:, :, None], CLASSIFIER == "exp2")
    weight = tl.reshape(weight, (BM, BN))
    if CODES:
        total = tl.sum(weight, 1)
    else:
        # In the shape of the blocks: for another one, the compiler would move the scores through shared memory.
        total = tl.sum(tl.sum(tl.exp2(blocks * octaves + (bias - reference + LOG2_6)[:, None, None]), 2), 1)
    return weight, total


@triton.jit
def nvfp4_p(
    s, tops, shift, octaves, A, B, A2, B2,
    CLASSIFIER: tl.constexpr, CLAMP: tl.constexpr, CODES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Weights E4M3 scale · code [BM, BN] with `shift` [BM] octaves for a score of 0, and what the denominator gets."""
    blocks = tl.reshape(s, (BM, BN // 16, 16))
    scale = e4m3_scale(tl.exp2(tops * octaves + shift[:, None]))
    # A block whose scale is 0 has weights 0, but still counts where the denominator is exact.
    divisor = tl.where(scale == 0, 1.0, scale)
    offset = shift[:, None] - log2_normal(divisor)
    u = classify(blocks, octaves, offset[:, :, None], 1.0, 0.0, False, A, B, A2, B2, CLASSIFIER, False)
    clamped = u
    if CLAMP:
        clamped = at_most(u, 6.0)
    weight = round_e2m1(clamped, 1.0, CLASSIFIER == "exp2") * scale[:, :, None]
    if CODES:
        total = tl.sum(weight, 2)
    elif CLASSIFIER == "exp2":
        total = tl.sum(u, 2) * divisor
    else:
        total = tl.sum(tl.exp2(blocks * octaves + shift[:, None, None]), 2)
    return tl.reshape(weight, (BM, BN)), tl.sum(total, 1)


@triton.jit
def mxfp8_p(s, tops, shift, octaves, CODES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Weights E4M3 · power of two, one for every 32 keys."""
    p = tl.exp2(tl.reshape(s, (BM, BN // 32, 32)) * octaves + shift[:, None, None])
    # The largest of the exponentials is that of the largest, or an ulp beside it, which 448 does not notice.
    scale = e4m3_block_scale(tl.exp2(tops * octaves + shift[:, None]))
    weight = round_e4m3(p, scale[:, :, None])
    return tl.reshape(weight, (BM, BN)), tl.sum(tl.sum(weight if CODES else p, 2), 1)


@triton.jit
def plain_p(s, shift, octaves, P: tl.constexpr, CODES: tl.constexpr):
    """Weights in E4M3, or to be rounded to BF16 for the product."""
    if P == "fp8-direct":
        weight = direct_e4m3(s * (octaves * 8.0) + (shift * 8.0 + 56.0)[:, None])
        if not CODES:
            total = tl.sum(tl.exp2(s * octaves + shift[:, None]), 1)
    else:
        p = tl.exp2(s * octaves + shift[:, None])
        weight = p
        if P == "fp8":
            weight = round_e4m3(p, 1.0)
        if not CODES:
            total = tl.sum(p, 1)
    if CODES:
        total = tl.sum(weight, 1)
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
    q, k_desc, v_desc, bias_row, acc, total, reference, bias, row, key, keys, octaves, peak, largest, A, B, A2, B2,
    P: tl.constexpr, CLASSIFIER: tl.constexpr, DENSITY: tl.constexpr, CLAMP: tl.constexpr, CODES: tl.constexpr,
    ROWMAX: tl.constexpr, BIAS: tl.constexpr, CAREFUL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """The online softmax's next tile of keys. CAREFUL: the keys may end in it, and a row may pass its largest."""
    s = scores(q, k_desc, bias_row, row, key, keys, BIAS, CAREFUL, BN, TMA)
    if P == "nvfp4":
        tops = block_max(s, BM, BN, 16)
        top = tl.max(tops, 1)
    elif P == "mxfp4-direct" or P == "mxfp8":
        tops = block_max(s, BM, BN, 32)
        top = tl.max(tops, 1)
    else:
        top = tl.max(s, 1)
    if ROWMAX:
        raised = tl.maximum(reference, top * octaves)
        factor = tl.exp2(reference - raised)
        reference = raised
        acc *= factor[:, None]
        total *= factor
    elif CAREFUL:
        if P == "mxfp4-direct":
            highest = bias + exponents(top, octaves, reference)
            down = tl.where(highest > CEILING, highest - TARGET, 0.0)
        else:
            down = tl.maximum(tl.ceil(top * octaves - reference + bias - largest), 0.0)
        bias -= down
        factor = tl.exp2(-down)
        acc *= factor[:, None]
        total *= factor
    shift = (peak if ROWMAX else bias) - reference
    if P == "mxfp4-direct":
        e = exponents(tops, octaves, reference[:, None])
        lanes = False
        if CLASSIFIER == "mix":
            lanes = mix_lanes(key, BN, DENSITY)
        p, part = direct_p(s, e, reference, bias, octaves, lanes, A, B, A2, B2, CLASSIFIER, CLAMP, CODES, BM, BN)
    elif P == "nvfp4":
        p, part = nvfp4_p(s, tops, shift, octaves, A, B, A2, B2, CLASSIFIER, CLAMP, CODES, BM, BN)
    elif P == "mxfp8":
        p, part = mxfp8_p(s, tops, shift, octaves, CODES, BM, BN)
    else:
        p, part = plain_p(s, shift, octaves, P, CODES)
    total += part
    v = tile(v_desc, row + key, BN, TMA)
    acc += dot(to_bf16(p), v)
    return acc, total, reference, bias


# What may be 1 in one call and not in the next: triton would compile once more for it. The others are multiples of 128.
@triton.jit(do_not_specialize=["heads", "queries", "keys", "first_head"])
def forward(
    q_desc, k_desc, v_desc, out, lse, score_bias, lse_shift, v_mean, v_gain, q_norms, k_norms, flag,
    octaves, margin, peak, largest, v_factor, A, B, A2, B2, heads, queries, keys, q_padded, k_padded, first_head,
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
    peak         octaves that P's row reference is scaled to, and `largest` those of the format's largest; not for
                 Direct-P
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
    else:
        # The first keys' scores once more: they say what the row is relative to.
        anchor = tl.full((BM,), float("-inf"), tl.float32)
        top = anchor
        for key in tl.range(0, bound(tl.minimum(keys, ANCHORS if ANCHORS > BN else BN)), BN, num_stages=1):
            s = scores(q, k_desc, bias_row, row, key, keys, BIAS, True, BN, TMA)
            top = tl.maximum(top, row_max(s, P, BM, BN))
            if ANCHORS > 0 and ANCHORS < BN:
                s = tl.where((tl.arange(0, BN) < ANCHORS)[None, :], s, float("-inf"))
            anchor = tl.maximum(anchor, row_max(s, P, BM, BN))
        if ANCHORS > 0:
            reference = anchor * octaves + margin
            if GUARDED:
                reference = tl.where(tl.load(flag) != 0, reference, 0.0)
        if P == "mxfp4-direct":
            bias = TARGET - exponents(top, octaves, reference)
        else:
            top = top * octaves - reference
            bias = peak - tl.maximum(tl.ceil(top + peak - largest), 0.0) - tl.minimum(tl.floor(top + 4.0), 0.0)

    acc = tl.zeros((BM, 128), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    whole = keys // BN * BN
    if not ROWMAX:
        if BIAS:
            whole *= 0
        else:
            norm = tl.load(q_norms + head.to(tl.int64) * q_padded + position + tl.arange(0, BM))
            longest = tl.load(k_norms + head).to(tl.float32, bitcast=True)
            # No score is larger than the product of the norms, rounding counted in.
            highest = norm * (longest * octaves * 1.001) - reference + 1.0 + bias
            whole = tl.where(tl.max(highest, 0) > (CEILING if P == "mxfp4-direct" else largest), 0, whole)
    if ROWMAX or not BIAS:
        for key in tl.range(0, bound(whole), BN):
            acc, total, reference, bias = step(
                q, k_desc, v_desc, bias_row, acc, total, reference, bias, row, key, keys, octaves, peak, largest,
                A, B, A2, B2, P, CLASSIFIER, DENSITY, CLAMP, CODES, ROWMAX, BIAS, False, BM, BN, TMA,
            )  # fmt: skip
    for key in tl.range(bound(whole), bound(keys), BN):
        acc, total, reference, bias = step(
            q, k_desc, v_desc, bias_row, acc, total, reference, bias, row, key, keys, octaves, peak, largest,
            A, B, A2, B2, P, CLASSIFIER, DENSITY, CLAMP, CODES, ROWMAX, BIAS, True, BM, BN, TMA,
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
        # A row's sum is Σ 2^(t + bias)·6 for Direct-P, Σ 2^(t + bias or peak) otherwise.
        unit = (bias + LOG2_6) if P == "mxfp4-direct" else (peak if ROWMAX else bias)
        natural = (tl.log2(total) - unit + reference) * LN_2
        if LSE_SHIFT:
            natural += tl.load(lse_shift + head.to(tl.int64) * q_padded + rows)
        tl.store(lse + head.to(tl.int64) * queries + rows, natural, mask=real)
