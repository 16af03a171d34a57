"""Quantisers for SM100: [B, S, H, 128] BF16 or FP16 tensors to records that the forward kernel copies as they are.

A record holds a tile of 128 tokens of one head: 8192 bytes of E2M1 codes, then pages of 512 bytes of scales.

* Q and K: token r, dims 2i and 2i + 1 in byte i of row r (64 bytes a row), the even dim in the low nibble.
* V: dim d is the row, keys 2i and 2i + 1 of the tile in byte i.
* Rows are 64-byte swizzled: byte o of the codes is found at o ^ ((o >> 3) & 0x30).
* Scale k of row r: page k // 4, byte (r % 32)·16 + (r // 32)·4 + k % 4. Folded Q and K have 4 scales a row (k serves
  dims 16k… and 64 + 16k…), unfolded ones 8; V has 4 (MXFP4-direct, 32 keys each) or 8 (NVFP4, 16 keys each).
* Tokens beyond S have codes 0, and scale bytes 0 where a block has no other tokens.

Codes and scales are those of `wanfp4.kernels.formats`, bit for bit. With `anchor` keys stand in the order of
`reference.key_order`, computed here (with `guarded` only if a flag in device memory is set); with `mean` a float32 mean
[B·H, 128] over the tokens is subtracted first.

`compile_quantizer` and `compile_mean` make functions, `launch_quantizer` and `launch_mean` call them; `quantize` and
`token_mean` do both and keep what they compiled. Every length, stride and count is a run-time value.
"""

import dataclasses
import functools
from typing import Any

import cutlass
import torch
from cuda.bindings import driver
from cutlass import Float32, Int32, Int64, Uint32, Uint64, cute

from wanfp4.errors import UnsupportedInputError
from wanfp4.kernels.blackwell import quantize_ops as ops

HEAD_DIM = 128
TILE = 128
CODE_BYTES = TILE * HEAD_DIM // 2
PAGE_BYTES = 512
ALIGNMENT = 512  # of the records, bytes
DTYPES = (torch.bfloat16, torch.float16)

_MEAN_TOKENS = 512  # of a partial sum


@dataclasses.dataclass(frozen=True)
class QuantizerOptions:
    """What is fixed when a quantiser is compiled.

    operand  "qk" or "v".
    format   "nvfp4" or "nvfp4-folded" for Q and K, "mxfp4-direct" or "nvfp4" for V.
    dtype    torch.bfloat16 or torch.float16.
    anchor   0, or the 32 or 128 sampled tokens that come first (keys and values of the anchor policies).
    mean     a mean is subtracted.
    guarded  they come first only if an int32 flag in device memory is not 0 (see `wanfp4.kernels.blackwell.guard`).

    Raises UnsupportedInputError for anything else.
    """

    operand: str
    format: str
    dtype: torch.dtype
    anchor: int = 0
    mean: bool = False
    guarded: bool = False

    def __post_init__(self) -> None:
        formats = {"qk": ("nvfp4", "nvfp4-folded"), "v": ("mxfp4-direct", "nvfp4")}
        if self.operand not in formats:
            raise UnsupportedInputError(f"operand is {self.operand!r}; the SM100 quantiser knows 'qk' and 'v'")
        if self.format not in formats[self.operand]:
            raise UnsupportedInputError(
                f"the SM100 quantiser makes no {self.format!r} of {self.operand!r}; it makes "
                f"{' and '.join(map(repr, formats[self.operand]))}"
            )
        if self.dtype not in DTYPES:
            raise UnsupportedInputError(f"the SM100 quantiser reads torch.bfloat16 and torch.float16, not {self.dtype}")
        if self.anchor not in (0, 32, 128):
            raise UnsupportedInputError(f"anchor is {self.anchor}; the SM100 quantiser knows 0, 32 and 128")
        if self.guarded and not self.anchor:
            raise UnsupportedInputError("guarded says when anchors come first; anchor is 0, and 32 or 128 is needed")

    @property
    def pages(self) -> int:
        """Pages of scales in a record."""
        return 1 if self.format in ("nvfp4-folded", "mxfp4-direct") else 2

    @property
    def record_bytes(self) -> int:
        return CODE_BYTES + PAGE_BYTES * self.pages


@cute.jit
def _physical_token(place: Int32, tokens: Int32, anchors: cutlass.Constexpr[int]) -> Int32:
    """The token at a physical place, as `reference.key_order` says.

    The i-th anchor is round(i·(S − 1)/(N − 1)); N − 1 is odd, so nothing lies halfway. Anchor i has at most j tokens
    that are no anchors before it when 2i·(S − N) < (N − 1)(2j + 1), so the j-th such token comes after
    ⌈(N − 1)(2j + 1)/(2(S − N))⌉ anchors. With S ≤ N all tokens are anchors, in order.
    """
    token = place
    if tokens > anchors:
        if place < anchors:
            doubled = Uint64(place) * 2 * Uint64(tokens - 1) + (anchors - 1)
            token = Int32(doubled // (2 * (anchors - 1)))
        else:
            other, others = Uint64(place - anchors), Uint64(tokens - anchors)
            before = ((anchors - 1) * (2 * other + 1) + 2 * others - 1) // (2 * others)
            token = Int32(other + before)
    return token


@cute.jit
def _ordered_token(place: Int32, tokens: Int32, flag: Int64, options: cutlass.Constexpr) -> Int32:
    """The token at a physical place under an anchor that may depend on a flag."""
    token = place
    if cutlass.const_expr(options.guarded):
        if ops.load_int(flag) != 0:
            token = _physical_token(place, tokens, options.anchor)
    else:
        token = _physical_token(place, tokens, options.anchor)
    return token


@cute.jit
def _place_of_cta(tokens: Int32, heads: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """(batch, tile, head, tiles): neighbouring CTAs read neighbouring heads, which lie side by side in memory."""
    block, _, _ = cute.arch.block_idx()
    tiles = (tokens + (TILE - 1)) // TILE
    rest = block // heads
    return rest // tiles, rest % tiles, block % heads, tiles


def _swizzled(row: Int32, offset: Int32) -> Int32:
    return row * 64 + (offset ^ (((row >> 1) & 3) << 4))


class QuantizeQK:
    """Q or K to records. A thread takes the 32 values that share a folded scale, of four tokens in turn.

    Four neighbouring lanes hold a token, so a warp writes 512 bytes of codes in one go.
    """

    THREADS = 128
    BLOCKS = 4
    CARVEOUT = 5

    def __init__(self, options: QuantizerOptions) -> None:
        self.options = options
        self.half = options.dtype == torch.float16
        self.fold = options.format == "nvfp4-folded"

    @cute.jit
    def __call__(
        self,
        x: Int64,
        mean: Int64,
        records: Int64,
        batch_stride: Int64,
        token_stride: Int64,
        head_stride: Int64,
        flag: Int64,
        batch: Int32,
        tokens: Int32,
        heads: Int32,
        stream: driver.CUstream,
    ) -> None:
        tiles = (tokens + (TILE - 1)) // TILE
        self.kernel(x, mean, records, batch_stride, token_stride, head_stride, flag, tokens, heads).launch(
            grid=(tiles * batch * heads, 1, 1),
            block=(self.THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.BLOCKS,
            preferred_smem_carveout=self.CARVEOUT,
        )

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        mean: Int64,
        records: Int64,
        batch_stride: Int64,
        token_stride: Int64,
        head_stride: Int64,
        flag: Int64,
        tokens: Int32,
        heads: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        batch, tile, head, tiles = _place_of_cta(tokens, heads)
        flat_head = Int64(batch) * heads + head
        source = x + 2 * (batch * batch_stride + head * head_stride)
        record = records + (flat_head * tiles + tile) * self.options.record_bytes
        means = mean + flat_head * (4 * HEAD_DIM)
        column = thread & 3
        first_row = thread >> 2
        if cutlass.const_expr(self.options.anchor):
            order = cute.make_tensor(cute.arch.alloc_smem(Int32, TILE), cute.make_layout(TILE))
            order[thread] = _ordered_token(tile * TILE + thread, tokens, flag, self.options)
            cute.arch.sync_threads()

        page = Uint32(0)
        second_page = Uint32(0)
        for quarter in cutlass.range(4, unroll=1):
            row = first_row + 32 * quarter
            place = tile * TILE + row
            valid = place < tokens
            token = place
            if cutlass.const_expr(self.options.anchor):
                token = order[row]
            values = self.load(source + 2 * (token * token_stride) + 32 * column, means + 64 * column, valid)
            if cutlass.const_expr(self.fold):
                scale_bytes, words = self.folded(values)
                page = self.collect(page, scale_bytes, quarter, column)
            else:
                scale_bytes, second_bytes, words = self.unfolded(values)
                page = self.collect(page, scale_bytes, quarter, column)
                second_page = self.collect(second_page, second_bytes, quarter, column)
            self.store(record, row, column, words)

        # The lane that kept quarter k of the rows holds their word of the page: word 4·(row % 32) + k.
        ops.store_word(record + CODE_BYTES + 4 * thread, page)
        if cutlass.const_expr(not self.fold):
            ops.store_word(record + CODE_BYTES + PAGE_BYTES + 4 * thread, second_page)

    def load(self, address: Int64, means: Int64, valid: Any) -> list[ops.Pair]:
        """16 dims and the 16 of the partner block, 64 dims on; zeros beyond the last token."""
        pairs = []
        for offset in (0, 16, 128, 144):
            words = ops.load_16_bytes(address + offset, valid)
            if self.options.mean:
                loaded = [w for part in (0, 16) for w in ops.load_16_bytes(means + 2 * offset + part, valid)]
                floats = iter([ops.as_float(word) for word in loaded])
                pairs += [tuple(ops.deviation(word, i, self.half, next(floats)) for i in range(2)) for word in words]
            else:
                pairs += [ops.widen(word, self.half) for word in words]
        return pairs

    @cute.jit
    def folded(self, values: Any) -> Any:
        """Scale byte and code words under the best of the scales E4M3(base · c).

        The rule of `formats`: the start c = 1, then all c in ascending order, each winning when its error is strictly
        smaller. So the smallest error wins, of equal ones the start or else the smallest c. Those from .75 up are
        always tried. One below saturates the largest value so much that its error is known to be too large, nearly
        always in all lanes of the warp; otherwise they follow in descending order, and then one wins a tie with any
        but the start.
        """
        amax = ops.amplitude([value for pair in values for value in pair])
        base = ops.sixth(amax)
        best, scale = ops.scale(base)
        first, words = ops.try_scale(values, scale)
        w0, w1, w2, w3 = words
        least = first
        for i in cutlass.range(4, unroll=1):
            c = 0.75 + 0.125 * Float32(i + (i >> 1))  # .75, .875, 1.125, 1.25
            byte, scale = ops.scale(base * c)
            error, codes = ops.try_scale(values, scale)
            better = error < least
            least = ops.select(better, error, least)
            best = ops.select(better, byte, best)
            w0 = ops.select(better, codes[0], w0)
            w1 = ops.select(better, codes[1], w1)
            w2 = ops.select(better, codes[2], w2)
            w3 = ops.select(better, codes[3], w3)
        bound = ops.least_error(amax, ops.scale(base * 0.625)[1])
        if cute.arch.vote_any_sync((bound <= least) & (bound < first)):
            for i in cutlass.range(6, unroll=1):
                c = 0.5625 - 0.0625 * Float32(i)  # .625, .5, .4375, .375, .3125, .25
                if i == 0:
                    c = Float32(0.625)
                byte, scale = ops.scale(base * c)
                error, codes = ops.try_scale(values, scale)
                better = (error <= least) & (error < first)
                least = ops.select(better, error, least)
                best = ops.select(better, byte, best)
                w0 = ops.select(better, codes[0], w0)
                w1 = ops.select(better, codes[1], w1)
                w2 = ops.select(better, codes[2], w2)
                w3 = ops.select(better, codes[3], w3)
        return best, (w0, w1, w2, w3)

    def unfolded(self, values: list[ops.Pair]) -> tuple[Uint32, Uint32, list[Uint32]]:
        """Scale bytes of both blocks, and code words."""
        halves = values[:8], values[8:]
        bases = [ops.sixth(ops.amplitude([value for pair in half for value in pair])) for half in halves]
        both, scales = ops.scales((bases[0], bases[1]))
        words = [w for half, scale in zip(halves, scales, strict=True) for w in ops.encode_block(half, scale)]
        return both & 0xFF, both >> 8, words

    def collect(self, page: Uint32, scale_byte: Uint32, quarter: Int32, column: Int32) -> Uint32:
        """`page`, or where `quarter` is this lane's column the four scale bytes of the token as a word."""
        word = scale_byte << Uint32(8 * column)
        for lanes in (1, 2):
            word = word | cute.arch.shuffle_sync_bfly(word, lanes)
        return ops.select(quarter == column, word, page)

    def store(self, record: Int64, row: Int32, column: Int32, words: Any) -> None:
        """Neighbours swap words, so that each lane has 16 bytes in a row: even ones of dims 0-63, odd of 64-127."""
        odd = (column & 1) == 1
        received = [cute.arch.shuffle_sync_bfly(ops.select(odd, words[i], words[i + 2]), 1) for i in range(2)]
        out = [ops.select(odd, a, b) for a, b in zip((*received, *words[2:]), (*words[:2], *received), strict=True)]
        chunk = (column >> 1) + 2 * (column & 1)
        ops.store_16_bytes(record + _swizzled(row, 16 * chunk), out)


class QuantizeV:
    """V to records, transposed through shared memory. A thread takes two dims of 32 keys.

    In shared memory the 16-byte chunks of a token are exchanged by block of 32 keys, so that the eight pairs of dims
    and four blocks that a warp reads at once lie in 32 banks.
    """

    THREADS = 256
    BLOCKS = 3
    CARVEOUT = 100

    def __init__(self, options: QuantizerOptions) -> None:
        self.options = options
        self.half = options.dtype == torch.float16

    @cute.jit
    def __call__(
        self,
        x: Int64,
        mean: Int64,
        records: Int64,
        batch_stride: Int64,
        token_stride: Int64,
        head_stride: Int64,
        flag: Int64,
        batch: Int32,
        tokens: Int32,
        heads: Int32,
        stream: driver.CUstream,
    ) -> None:
        tiles = (tokens + (TILE - 1)) // TILE
        self.kernel(x, mean, records, batch_stride, token_stride, head_stride, flag, tokens, heads).launch(
            grid=(tiles * batch * heads, 1, 1),
            block=(self.THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.BLOCKS,
            preferred_smem_carveout=self.CARVEOUT,
        )

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        mean: Int64,
        records: Int64,
        batch_stride: Int64,
        token_stride: Int64,
        head_stride: Int64,
        flag: Int64,
        tokens: Int32,
        heads: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        batch, tile, head, tiles = _place_of_cta(tokens, heads)
        flat_head = Int64(batch) * heads + head
        source = x + 2 * (batch * batch_stride + head * head_stride)
        record = records + (flat_head * tiles + tile) * self.options.record_bytes
        buffer = cute.arch.alloc_smem(Uint32, TILE * HEAD_DIM // 2, 16).toint()
        if cutlass.const_expr(self.options.anchor):
            order = cute.make_tensor(cute.arch.alloc_smem(Int32, TILE), cute.make_layout(TILE))
            if thread < TILE:
                order[thread] = _ordered_token(tile * TILE + thread, tokens, flag, self.options)
            cute.arch.sync_threads()

        chunk = thread & 15
        loaded = []
        for step in cutlass.range_constexpr(TILE * 16 // self.THREADS):
            row = (thread >> 4) + step * (self.THREADS // 16)
            place = tile * TILE + row
            token = place
            if cutlass.const_expr(self.options.anchor):
                token = order[row]
            loaded.append(ops.load_16_bytes(source + 2 * (token * token_stride) + 16 * chunk, place < tokens))
        for step in cutlass.range_constexpr(TILE * 16 // self.THREADS):
            row = (thread >> 4) + step * (self.THREADS // 16)
            ops.store_shared(buffer + row * 256 + 16 * (chunk ^ (2 * (row >> 5))), loaded[step])
        cute.arch.sync_threads()

        block = thread & 3
        pair = thread >> 2
        address = buffer + block * (32 * 256) + 16 * ((pair >> 2) ^ (2 * block)) + 4 * (pair & 3)
        words = [ops.load_shared(address + 256 * key) for key in range(32)]
        means = [Float32(0), Float32(0)]
        if cutlass.const_expr(self.options.mean):
            means = ops.load_floats(mean + flat_head * (4 * HEAD_DIM) + 8 * pair, 2)
        left = tokens - tile * TILE - 32 * block
        pages = []
        for which in cutlass.range_constexpr(2):
            if cutlass.const_expr(self.options.mean):
                values = self.within([ops.deviation(word, which, self.half, means[which]) for word in words], left)
            else:
                values = [ops.widen_half(word, which, self.half) for word in words]
            pairs = list(zip(values[::2], values[1::2], strict=True))
            scale, codes = self.quantize(values, pairs)
            row = 2 * pair + which
            ops.store_16_bytes(record + _swizzled(row, 16 * block), codes)
            pages.append(scale)
        self.store_scales(record + CODE_BYTES, pair, block, pages)

    @cute.jit
    def within(self, values: Any, left: Int32) -> Any:
        """The values, 0 from place `left` on: beyond the last token there is no mean to subtract."""
        if left < 32:
            values = [ops.select(left > key, value, Float32(0)) for key, value in enumerate(values)]
        return values

    def quantize(self, values: Any, pairs: Any) -> tuple[Uint32, list[Uint32]]:
        """Scale bytes of 32 keys (one, or two in bits 0-7 and 8-15), and their codes."""
        if self.options.format == "mxfp4-direct":
            byte, scale = ops.direct_scale(ops.amplitude(values))
            return byte, ops.encode_direct(pairs, scale)
        both, scales = ops.scales(tuple(ops.sixth(ops.amplitude(values[i : i + 16])) for i in (0, 16)))
        return both, [w for i, scale in enumerate(scales) for w in ops.encode_block(pairs[8 * i : 8 * i + 8], scale)]

    @cute.jit
    def store_scales(self, pages: Int64, pair: Int32, block: Int32, scales: Any) -> None:
        """Lanes of one pair of dims join their bytes to words, one for each dim and page."""
        direct = cutlass.const_expr(self.options.format == "mxfp4-direct")
        words = []
        for scale in scales:
            if cutlass.const_expr(direct):
                word = scale << Uint32(8 * block)
                word = word | cute.arch.shuffle_sync_bfly(word, 1)
                word = word | cute.arch.shuffle_sync_bfly(word, 2)
            else:
                word = scale << Uint32(16 * (block & 1))
                word = word | cute.arch.shuffle_sync_bfly(word, 1)
            words.append(word)
        odd = block & 1
        row = 2 * pair + odd
        address = pages + (row & 31) * 16 + (row >> 5) * 4
        word = ops.select(odd == 1, words[1], words[0])
        if cutlass.const_expr(direct):
            if block < 2:
                ops.store_word(address, word)
        else:
            ops.store_word(address + PAGE_BYTES * (block >> 1), word)


class TokenMean:
    """Means over the tokens, in a fixed order: 16 interleaved sums of a chunk of 512 tokens, these 16 in order, then
    the chunks in order, divided by S. torch adds in another order, so its last bits differ."""

    THREADS = 256

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in DTYPES:
            raise UnsupportedInputError(f"the SM100 quantiser reads torch.bfloat16 and torch.float16, not {dtype}")
        self.half = dtype == torch.float16

    @cute.jit
    def __call__(
        self,
        x: Int64,
        partial: Int64,
        mean: Int64,
        batch_stride: Int64,
        token_stride: Int64,
        head_stride: Int64,
        batch: Int32,
        tokens: Int32,
        heads: Int32,
        stream: driver.CUstream,
    ) -> None:
        chunks = (tokens + (_MEAN_TOKENS - 1)) // _MEAN_TOKENS
        self.sum_chunks(x, partial, batch_stride, token_stride, head_stride, tokens, heads, chunks).launch(
            grid=(chunks * batch * heads, 1, 1), block=(self.THREADS, 1, 1), stream=stream
        )
        self.join(partial, mean, tokens, chunks).launch(
            grid=(batch * heads, 1, 1), block=(HEAD_DIM, 1, 1), stream=stream
        )

    @cute.kernel
    def sum_chunks(
        self,
        x: Int64,
        partial: Int64,
        batch_stride: Int64,
        token_stride: Int64,
        head_stride: Int64,
        tokens: Int32,
        heads: Int32,
        chunks: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        head, rest = block % heads, block // heads
        chunk, batch = rest % chunks, rest // chunks
        rows = self.THREADS // 16
        sums = cute.make_tensor(cute.arch.alloc_smem(Float32, rows * HEAD_DIM, 16), cute.make_layout(rows * HEAD_DIM))
        column, row = thread & 15, thread >> 4
        source = x + 2 * (batch * batch_stride + head * head_stride) + 16 * column
        total = [Float32(0)] * 8
        for step in cutlass.range(_MEAN_TOKENS // rows, unroll=4):
            token = chunk * _MEAN_TOKENS + step * rows + row
            words = ops.load_16_bytes(source + 2 * (token * token_stride), token < tokens)
            values = [value for word in words for value in ops.widen(word, self.half)]
            total = [a + b for a, b in zip(total, values, strict=True)]
        for i in cutlass.range_constexpr(8):
            sums[row * HEAD_DIM + 8 * column + i] = total[i]
        cute.arch.sync_threads()
        if thread < HEAD_DIM:
            result = sums[thread]
            for i in cutlass.range_constexpr(1, rows):
                result = result + sums[i * HEAD_DIM + thread]
            flat_head = Int64(batch) * heads + head
            ops.store_float(partial + 4 * ((flat_head * chunks + chunk) * HEAD_DIM + thread), result)

    @cute.kernel
    def join(self, partial: Int64, mean: Int64, tokens: Int32, chunks: Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        head, _, _ = cute.arch.block_idx()
        source = partial + 4 * (Int64(head) * chunks * HEAD_DIM + thread)
        result = Float32(0)
        for chunk in cutlass.range(chunks, unroll=8):
            result = result + ops.load_float(source + Int64(chunk) * (4 * HEAD_DIM))
        ops.store_float(mean + 4 * (Int64(head) * HEAD_DIM + thread), result / Float32(tokens))


def compile_quantizer(options: QuantizerOptions) -> Any:
    """The compiled quantiser, for the architecture that CuTe DSL is set to."""
    kernel = (QuantizeQK if options.operand == "qk" else QuantizeV)(options)
    return cute.compile(kernel, *[0] * 7, *[1] * 3, driver.CUstream(0))


def compile_mean(dtype: torch.dtype) -> Any:
    """The compiled `TokenMean`, for the architecture that CuTe DSL is set to."""
    return cute.compile(TokenMean(dtype), *[0] * 6, *[1] * 3, driver.CUstream(0))


def record_shape(x: torch.Tensor, options: QuantizerOptions) -> tuple[int, int, int]:
    """[B·H, tiles, bytes] of the records of x [B, S, H, 128]."""
    batch, tokens, heads, _ = x.shape
    return batch * heads, -(-tokens // TILE), options.record_bytes


def mean_workspace(x: torch.Tensor) -> int:
    """float32 elements that `launch_mean` needs for x [B, S, H, 128]."""
    batch, tokens, heads, _ = x.shape
    return batch * heads * -(-tokens // _MEAN_TOKENS) * HEAD_DIM


def check_input(x: torch.Tensor, name: str = "the tensor") -> None:
    """Raises UnsupportedInputError unless x is [B, S, H, 128] in BF16 or FP16, the last dimension contiguous, every
    token's row 16-byte aligned, and no dimension empty."""
    if x.ndim != 4 or x.shape[-1] != HEAD_DIM or 0 in x.shape:
        raise UnsupportedInputError(f"{name} is {list(x.shape)}; the SM100 quantiser reads [B, S, H, {HEAD_DIM}]")
    if x.dtype not in DTYPES:
        raise UnsupportedInputError(f"{name} is {x.dtype}; the SM100 quantiser reads torch.bfloat16 and torch.float16")
    if x.stride(-1) != 1:
        raise UnsupportedInputError(f"{name} has stride {x.stride(-1)} along the head dimension; it must be contiguous")
    if x.data_ptr() % 16 or any(x.shape[i] > 1 and x.stride(i) % 8 for i in range(3)):
        raise UnsupportedInputError(
            f"{name} starts at byte {x.data_ptr() % 16} of 16 with strides {tuple(x.stride())}; the SM100 quantiser "
            f"loads 16 bytes at a time, so rows must start at multiples of 8 elements"
        )
    batch, tokens, heads, _ = x.shape
    if tokens >= 2**31 - TILE or batch * heads * -(-tokens // TILE) >= 2**31:
        raise UnsupportedInputError(f"{name} is {list(x.shape)}; the grid of the SM100 quantiser ends at 2^31 tiles")


def launch_quantizer(
    compiled: Any, x: torch.Tensor, records: torch.Tensor, mean: torch.Tensor | None, stream: int, flag: int = 0
) -> None:
    """Run what `compile_quantizer` made on x [B, S, H, 128], into `records` (`record_shape`, uint8, 512-byte aligned).

    `mean` is float32 [B·H, 128] for options with one, None otherwise; `stream` is the address of a CUDA stream, `flag`
    that of the int32 that `guarded` reads.
    Nothing is checked (see `check_input`) and nothing is waited for.
    """
    batch, tokens, heads, _ = x.shape
    batch_stride, token_stride, head_stride, _ = x.stride()
    compiled(
        x.data_ptr(),
        0 if mean is None else mean.data_ptr(),
        records.data_ptr(),
        batch_stride,
        token_stride,
        head_stride,
        flag,
        batch,
        tokens,
        heads,
        driver.CUstream(stream),
    )


def launch_mean(compiled: Any, x: torch.Tensor, workspace: torch.Tensor, mean: torch.Tensor, stream: int) -> None:
    """Run what `compile_mean` made: the means of x [B, S, H, 128] over the tokens, into `mean` float32 [B·H, 128].

    `workspace` has `mean_workspace(x)` float32 elements.
    """
    batch, tokens, heads, _ = x.shape
    batch_stride, token_stride, head_stride, _ = x.stride()
    compiled(
        x.data_ptr(),
        workspace.data_ptr(),
        mean.data_ptr(),
        batch_stride,
        token_stride,
        head_stride,
        batch,
        tokens,
        heads,
        driver.CUstream(stream),
    )


quantizer_function = functools.cache(compile_quantizer)
mean_function = functools.cache(compile_mean)


def quantize(
    x: torch.Tensor,
    options: QuantizerOptions,
    *,
    mean: torch.Tensor | None = None,
    records: torch.Tensor | None = None,
    stream: int = 0,
) -> torch.Tensor:
    """Records of x, new or in `records`; compiles at the first use of `options`."""
    check_input(x)
    if options.mean != (mean is not None):
        raise UnsupportedInputError("a mean is needed by options with mean=True, and only by them")
    if records is None:
        records = torch.empty(record_shape(x, options), dtype=torch.uint8, device=x.device)
    launch_quantizer(quantizer_function(options), x, records, mean, stream)
    return records


def token_mean(x: torch.Tensor, *, stream: int = 0) -> torch.Tensor:
    """float32 [B·H, 128] means over the tokens."""
    check_input(x)
    mean = torch.empty(x.shape[0] * x.shape[2], HEAD_DIM, dtype=torch.float32, device=x.device)
    workspace = torch.empty(mean_workspace(x), dtype=torch.float32, device=x.device)
    launch_mean(mean_function(x.dtype), x, workspace, mean, stream)
    return mean
