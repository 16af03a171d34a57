"""The forward kernel of the backend "sm89": what attention.cu does, in Triton, for FP8 tensor cores without wgmma.
Importing it imports triton."""

import triton
import triton.language as tl

from wanfp4.kernels.emulated_rounding import INTERPRET, bound, to_bf16

TILE = tl.constexpr(128)
LOG2_448 = tl.constexpr(8.80735)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def from_e4m3(byte):
    """Float32 values of E4M3 bytes, for the interpreter, which cannot multiply them as they are."""
    size = (byte & 0x7F).to(tl.int32)
    normal = ((size + 960) << 20).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    value = tl.where(size == 127, float("nan"), value)
    return tl.where(byte >= 128, -value, value)


@triton.jit
def dot8(a, b):
    """a · b in float32, of matrices of E4M3 bytes."""
    if INTERPRET:
        product = tl.dot(from_e4m3(a), from_e4m3(b), input_precision="ieee")
    else:
        product = tl.dot(a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True))
    return product


@triton.jit
def octaves_of(q, k, numbers, q_octaves, key, keys, MASKED: tl.constexpr):
    """Scores [BM, 128] of a tile of keys in octaves; −∞ where there is no key."""
    block = tl.arange(0, TILE) // 32
    factor = q_octaves[:, None] * tl.load(numbers + block)[None, :]
    t = dot8(q, tl.trans(k)) * factor
    if MASKED:
        t = tl.where((key + tl.arange(0, TILE) < keys)[None, :], t, float("-inf"))
    return t


@triton.jit
def tile_of(source, row, ROWS: tl.constexpr):
    """[ROWS, 128] bytes from `row` on."""
    rows = (row + tl.arange(0, ROWS)).to(tl.int64)
    return tl.load(source + rows[:, None] * 128 + tl.arange(0, 128)[None, :])


@triton.jit
def step(q, k, v, meta, q_octaves, acc, total, reference, line, key, keys, MASKED: tl.constexpr):
    """One more tile of keys, the `line`-th of all heads' tiles."""
    numbers = meta + line * 16
    block = tl.arange(0, TILE) // 32
    t = octaves_of(q, tile_of(k, line * TILE, TILE), numbers, q_octaves, key, keys, MASKED)
    top = tl.max(t, 1) - reference
    if tl.max(top, 0) > LOG2_448:
        raised = tl.ceil(tl.maximum(top - LOG2_448, 0.0))
        reference += raised
        factor = tl.exp2(-raised)
        acc *= factor[:, None]
        total *= factor
    behind = tl.load(numbers + 4 + block)
    t += behind[None, :] - reference[:, None]
    # 2^23 and more has no fraction: adding it rounds.
    byte = tl.minimum(tl.maximum(t * 8.0 + 56.0, 0.0), 126.0)
    p = ((byte + 8388608.0).to(tl.uint32, bitcast=True) & 0x7F).to(tl.uint8)
    value = from_e4m3(p) if INTERPRET else p.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    total += tl.sum(value * tl.exp2(-behind)[None, :], 1) + tl.load(numbers + 9)
    acc += dot8(p, tl.trans(tile_of(v, line * 136, TILE))) * tl.load(numbers + 8)
    return acc, total, reference


@triton.jit(do_not_specialize=["heads", "queries", "keys"])
def forward(
    q, k, v, octaves, meta, v_mean, out, lse, heads, queries, keys, batch_stride, token_stride, head_stride,
    PEAK: tl.constexpr, V_MEAN: tl.constexpr, LSE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Attention of BM queries of one head; BM divides 128.

    q, k, v      bytes [B·H, tiles, 128 or 136, 128], octaves [B·H, tiles of q, 4], meta [B·H, tiles of k, 16]: as
                 `quantize.quantize` writes them without IMAGE, keys behind their anchors
    v_mean       V_MEAN: [B·H, 128]; LSE: lse [B·H, queries]
    out          [B, queries, H, 128] BF16 with strides in elements
    PEAK         octaves of the anchors' largest probability
    """
    blocks = tl.cdiv(queries, BM)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    position = (tl.program_id(0) % blocks) * BM
    rows = position + tl.arange(0, BM)
    q_padded = tl.cdiv(queries, TILE) * TILE
    tiles = tl.cdiv(keys, TILE)
    mine = tile_of(q, head * q_padded + position, BM)
    q_octaves = tl.load(octaves + (head * q_padded + rows) // 32)
    line = head * tiles
    first = octaves_of(mine, tile_of(k, line * TILE, TILE), meta + line * 16, q_octaves, 0, keys, True)
    reference = tl.max(first, 1) - PEAK
    acc = tl.zeros((BM, 128), tl.float32)
    total = q_octaves * 0.0  # NaN where the queries hold what is not finite
    whole = keys // TILE
    for tile in range(bound(whole)):
        acc, total, reference = step(
            mine, k, v, meta, q_octaves, acc, total, reference, line + tile, tile * TILE, keys, False
        )
    if keys % TILE != 0:
        acc, total, reference = step(
            mine, k, v, meta, q_octaves, acc, total, reference, line + whole, whole * TILE, keys, True
        )
    channel = tl.arange(0, 128)
    o = acc / total[:, None]
    if V_MEAN:
        o += tl.load(v_mean + head * 128 + channel)[None, :]
    base = out + (head // heads) * batch_stride + (head % heads) * head_stride
    target = base + rows.to(tl.int64)[:, None] * token_stride + channel[None, :]
    tl.store(target, to_bf16(o), mask=(rows < queries)[:, None])
    if LSE:
        tl.store(lse + head * queries + rows, (reference + tl.log2(total)) * LN_2, mask=rows < queries)
