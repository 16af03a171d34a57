"""Direct-P FP4 attention for SM100: the forward kernel, read from top to bottom.

One CTA works on 256 queries of one head at a time, two stages of 128, and walks over all keys in tiles of 128:

    load warp     records of Q, K and V (see `wanfp4.kernels.blackwell.quantize`) into shared memory, by bulk copies
    MMA warp      S = Q Kᵀ and O += P V, both block-scaled FP4, and the copies of scale pages
    softmax       a warpgroup a stage, a thread a query: scores → codes and scales of P, the sum of the codes, and at the
    warps         end O / L

Tensor memory, all 512 columns: S of stage 0 and 1 at 0 and 128, O at 256 and 384. Once a bank's scores are in
registers it is free, and holds until the next scores arrive

    0–7 (0–15)    scales of Q and K for the *other* stage's next scores (wider where they are not folded)
    16–19 (–23)   scales of V       32–35 (–39)   scales of P       64–79   codes of P, 8 to a column

P V reads a bank before the scores that follow overwrite it, because the tensor core works in the order of issue.

Exponents. A block of 32 keys has α = 2^e, e = floor(max t + 0.41504), t = score · log2 e − m. What is stored is e + bias,
with a bias for each row that puts the first tile's largest block at `TARGET`: whole octaves cancel in O / L, so this
moves any row into the range of a byte and of FP32. Should a later block pass `CEILING`, the row's O and L are scaled
down by a power of two, which is exact, and the bias follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, cute

from wanfp4.kernels.blackwell import ptx

ROWS = 128  # queries of a stage, keys of a tile, channels
THREADS = 384  # three warpgroups: softmax of each stage; MMA, load and two idle warps
SOFTMAX_REGISTERS, OTHER_REGISTERS = 224, 64  # a thread; 64K in all
SOFTMAX_WARPS, MMA_WARP, LOAD_WARP = 8, 8, 9
CODES = ROWS * ROWS // 2  # bytes of a tile's codes
PAGE = 512  # bytes of 128 × 4 scales
SLOT = CODES + 2 * PAGE  # of shared memory: a record with up to two pages, a multiple of the swizzle's 1024 bytes

LOG2_6 = math.log2(6)
DIRECT_ROUNDING = 0.41504
MAGIC = 1.5 * 2**23  # added with rounding down, it leaves the floor in the low bits
MAGIC_BITS = 0x4B400000
TARGET, CEILING = 120, 215  # stored exponents: of a row's first tile, and the largest accepted before rescaling
MASKED = -1.0e30
FLOOR = -10000.0  # octaves: no block's exponent is lower, so keys beyond the end get code 0

# Offsets into dynamic shared memory.
_Q_FULL, _Q_EMPTY, _S_FULL, _S_FREE, _P_FULL, _O_DONE = (16 * i for i in range(6))
_KV_FULL, _KV_EMPTY = 128, 256
_TENSOR_ADDRESS, _TABLE = 384, 388
_P_PAGES = 1024
_Q = 4096
_KV = _Q + 2 * SLOT

# Offsets into a bank of tensor memory.
_V_SCALES, _P_SCALES, _P_CODES = 16, 32, 64

# Instruction descriptors (PTX ISA, "Instruction descriptor"): M and N 128, E2M1 both; bit 23 UE8M0; scale ids.
_IDESC = 8 << 24 | 16 << 17 | 1 << 10 | 1 << 7
_UE8M0 = 1 << 23
_SECOND_IDS = 2 << 29 | 2 << 4

# Shared-memory descriptors (PTX ISA, "Shared memory descriptor"): upper words.
_TILE_DESC = 1 << 31 | 1 << 14 | 512 >> 4  # 64-byte swizzle, 512 bytes from 8 rows to the next 8
_PAGE_DESC = 1 << 14 | 128 >> 4


@dataclass(frozen=True)
class Options:
    """Everything that is compiled in.

    classifier     "affine", "two-piece", "exp2" or "mix", with its coefficients
    row_reference  "shiftless", "anchor32", "anchor128" or "rowmax"
    folded         Q and K have one scale page a tile, not two
    out            "bf16" or "f16"
    lse, v_mean    whether the log-sum-exp is written, and channel means are added to the output
    slots          K and V tiles that shared memory holds
    in_order       rely on the tensor core working in the order of issue, as NVIDIA's kernels do. Otherwise wait for each
                   P V before the scores that overwrite its P: slower, and nothing beyond the PTX ISA
    """

    classifier: str = "affine"
    A: float = 1.6
    B: float = 0.95
    A2: float = 0.0
    B2: float = 0.0
    density: int = 0
    row_reference: str = "shiftless"
    folded: bool = True
    out: str = "bf16"
    lse: bool = False
    v_mean: bool = False
    slots: int = 12
    in_order: bool = True

    @property
    def qk_record(self) -> int:
        """Bytes of a tile of Q or K."""
        return CODES + PAGE * (1 if self.folded else 2)

    @property
    def v_record(self) -> int:
        """Bytes of a tile of V."""
        return CODES + PAGE

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory."""
        return _KV + self.slots * SLOT


@dataclass(frozen=True)
class Place:
    """Where a softmax thread works, and what it keeps.

    bank      its stage's bank in its lanes of tensor memory; O is 256 columns further
    barriers  shared memory, moved so that its stage's barriers are at `_S_FULL`, `_S_FREE` …
    page      its word of the scale page
    lowest    score below which no block's largest counts
    maps      pairs of equal floats: scale, and scale times the classifier's slopes
    table     the doubled values of codes 0 to 3
    """

    lane: Int32
    bank: Int32
    barriers: Int32
    page: Int32
    lowest: Float32
    maps: tuple[Int64, Int64, Int64]
    table: Int32


class Forward:
    """The kernel for one set of `Options`; compile an instance with `cute.compile`.

    q, k, v      addresses of records [B·H, tiles, record]
    out, lse     addresses of [B, Sq, H, 128] with strides in elements, and of float32 [B·H, Sq]
    v_mean       address of float32 [B·H, 128]
    scale        softmax scale · log2 e, and the formats' own factors: octaves of one unit of q·k
    margin       octaves that an anchor is raised by
    """

    def __init__(self, options: Options) -> None:
        self.o = options

    @cute.jit
    def __call__(
        self,
        q: Int64,
        k: Int64,
        v: Int64,
        out: Int64,
        lse: Int64,
        v_mean: Int64,
        batch_heads: Int32,
        heads: Int32,
        queries: Int32,
        keys: Int32,
        stride_b: Int64,
        stride_s: Int64,
        stride_h: Int64,
        scale: Float32,
        margin: Float32,
        grid: Int32,
        stream: CUstream,
    ):
        self.kernel(
            q, k, v, out, lse, v_mean, batch_heads, heads, queries, keys, stride_b, stride_s, stride_h, scale, margin
        ).launch(grid=(grid, 1, 1), block=(THREADS, 1, 1), smem=self.o.shared_bytes, stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        q: Int64,
        k: Int64,
        v: Int64,
        out: Int64,
        lse: Int64,
        v_mean: Int64,
        batch_heads: Int32,
        heads: Int32,
        queries: Int32,
        keys: Int32,
        stride_b: Int64,
        stride_s: Int64,
        stride_h: Int64,
        scale: Float32,
        margin: Float32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread % 32
        shared = Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint())
        q_tiles, k_tiles = (queries + ROWS - 1) // ROWS, (keys + ROWS - 1) // ROWS
        pairs = (q_tiles + 1) // 2
        jobs = batch_heads * pairs

        if warp == MMA_WARP:
            if lane == 0:
                self.init_barriers(shared)
            ptx.tmem_alloc(shared + _TENSOR_ADDRESS)
        cute.arch.sync_threads()
        tensor = ptx.load_shared(shared + _TENSOR_ADDRESS)

        if warp < SOFTMAX_WARPS:
            cute.arch.setmaxregister_increase(SOFTMAX_REGISTERS)
            self.softmax(
                shared, tensor, thread, jobs, pairs, q_tiles, k_tiles, out, lse, v_mean, heads, queries, keys,
                stride_b, stride_s, stride_h, scale, margin,
            )  # fmt: skip
        else:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
        if warp == MMA_WARP:
            with cute.arch.elect_one():
                self.multiply(shared, tensor, jobs, k_tiles)
        if warp == LOAD_WARP:
            with cute.arch.elect_one():
                self.load(shared, q, k, v, jobs, pairs, q_tiles, k_tiles)
        ptx.fence_before()
        cute.arch.sync_threads()
        ptx.fence_after()
        if warp == MMA_WARP:
            ptx.tmem_dealloc(tensor)

    def init_barriers(self, shared: Int32) -> None:
        """Of one thread. Softmax warps arrive once each, everybody else is a commit or a counted copy."""
        for stage in range(2):
            for offset, count in ((_Q_FULL, 1), (_Q_EMPTY, 1), (_S_FULL, 1), (_S_FREE, 4), (_P_FULL, 4), (_O_DONE, 1)):
                ptx.barrier_init(shared + (offset + 8 * stage), count)
        for slot in range(self.o.slots):
            ptx.barrier_init(shared + (_KV_FULL + 8 * slot), 1)
            ptx.barrier_init(shared + (_KV_EMPTY + 8 * slot), 1)
        ptx.barrier_init_fence()
        # A constant that the compiler cannot see: it would move one it sees into a register again for every use.
        ptx.store_shared(shared + _TABLE, Int32(0x03020100))

    # The load warp, one thread: for each job Q of both stages and K₀, then V₀ K₁ V₁ K₂ … through one ring of slots.

    @cute.jit
    def load(
        self, shared: Int32, q: Int64, k: Int64, v: Int64, jobs: Int32, pairs: Int32, q_tiles: Int32, k_tiles: Int32
    ):
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        turn, item = Int32(0), Int32(0)
        for job in cutlass.range(block, jobs, grid, unroll=1):
            head, pair = Int64(job // pairs), job % pairs
            for stage in cutlass.range_constexpr(2):
                tile = cutlass.min(2 * pair + stage, q_tiles - 1)  # a missing second tile repeats the first
                ptx.wait(shared + (_Q_EMPTY + 8 * stage), (turn & 1) ^ 1)
                full = shared + (_Q_FULL + 8 * stage)
                ptx.expect(full, self.o.qk_record)
                source = q + (head * Int64(q_tiles) + Int64(tile)) * self.o.qk_record
                ptx.bulk_load(shared + (_Q + SLOT * stage), source, self.o.qk_record, full)
            k_head = k + head * Int64(k_tiles) * self.o.qk_record
            v_head = v + head * Int64(k_tiles) * self.o.v_record
            self.fill(shared, item, k_head, self.o.qk_record)
            item += 1
            for tile in cutlass.range(k_tiles, unroll=1):
                self.fill(shared, item, v_head + Int64(tile) * self.o.v_record, self.o.v_record)
                item += 1
                if tile + 1 < k_tiles:
                    self.fill(shared, item, k_head + Int64(tile + 1) * self.o.qk_record, self.o.qk_record)
                    item += 1
            turn += 1
        # Nobody may still read shared memory, or be about to arrive in it, when the CTA ends.
        for stage in cutlass.range_constexpr(2):
            ptx.wait(shared + (_Q_EMPTY + 8 * stage), (turn & 1) ^ 1)
        for _ in cutlass.range(self.o.slots, unroll=1):
            ptx.wait(shared + _KV_EMPTY + 8 * (item % self.o.slots), ((item // self.o.slots) & 1) ^ 1)
            item += 1

    def fill(self, shared: Int32, item: Int32, source: Int64, size: int) -> None:
        """Copy a record into the ring's next slot, once that is empty."""
        slot = item % self.o.slots
        ptx.wait(shared + _KV_EMPTY + 8 * slot, ((item // self.o.slots) & 1) ^ 1)
        full = shared + _KV_FULL + 8 * slot
        ptx.expect(full, size)
        ptx.bulk_load(shared + _KV + SLOT * slot, source, size, full)

    # The MMA warp, one thread.

    @cute.jit
    def multiply(self, shared: Int32, tensor: Int32, jobs: Int32, k_tiles: Int32):
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        turn, item, count = Int32(0), Int32(0), Int32(0)  # jobs, ring slots and key tiles so far
        for job in cutlass.range(block, jobs, grid, unroll=1):
            k_slot = self.filled(shared, item)
            item += 1
            for stage in cutlass.range_constexpr(2):
                ptx.wait(shared + (_Q_FULL + 8 * stage), turn & 1)
                self.scores(shared, tensor, stage, k_slot, count)
            self.release(shared, k_slot)
            for tile in cutlass.range(k_tiles, unroll=1):
                more = tile + 1 < k_tiles
                v_slot = self.filled(shared, item)
                item += 1
                next_k = item % self.o.slots
                for stage in cutlass.range_constexpr(2):
                    ptx.wait(shared + (_P_FULL + 8 * stage), count & 1)
                    ptx.fence_after()
                    self.values(shared, tensor, stage, v_slot, tile)
                    ptx.commit(shared + (_O_DONE + 8 * stage))
                    if more:
                        if cutlass.const_expr(stage == 0):
                            self.filled(shared, item)
                        self.scores(shared, tensor, stage, next_k, count + 1)
                self.release(shared, v_slot)
                if more:
                    self.release(shared, next_k)
                    item += 1
                count += 1
            for stage in cutlass.range_constexpr(2):
                ptx.commit(shared + (_Q_EMPTY + 8 * stage))
            turn += 1

    def filled(self, shared: Int32, item: Int32) -> Int32:
        """The slot of the ring's item, when it has arrived."""
        slot = item % self.o.slots
        ptx.wait(shared + _KV_FULL + 8 * slot, (item // self.o.slots) & 1)
        return slot

    def release(self, shared: Int32, slot: Int32) -> None:
        """The slot may be filled again when everything issued so far is done."""
        ptx.commit(shared + _KV_EMPTY + 8 * slot)

    @cute.jit
    def scores(self, shared: Int32, tensor: Int32, stage: cutlass.Constexpr, k_slot: Int32, count: Int32):
        """S of key tile `count` for one stage. Its scales stand in the other bank, whose scores must be in registers."""
        pages = 1 if self.o.folded else 2
        other = tensor + 128 * (1 - stage)
        if cutlass.const_expr(stage == 0):
            # The other stage's last scores are those before; on the barrier's first phase there are none.
            ptx.wait(shared + (_S_FREE + 8), (count & 1) ^ 1)
        else:
            ptx.wait(shared + _S_FREE, count & 1)
        if cutlass.const_expr(not self.o.in_order):
            ptx.wait(shared + (_O_DONE + 8 * stage), (count & 1) ^ 1)
        ptx.fence_after()
        q_tile, k_tile = shared + (_Q + SLOT * stage), shared + _KV + SLOT * k_slot
        for page in cutlass.range_constexpr(pages):
            ptx.copy_page(other + 4 * page, _descriptor(q_tile + (CODES + PAGE * page), _PAGE_DESC))
            ptx.copy_page(other + (8 + 4 * page), _descriptor(k_tile + (CODES + PAGE * page), _PAGE_DESC))
        for half in cutlass.range_constexpr(2):
            page = half if pages == 2 else 0
            ptx.mma_scores(
                tensor + 128 * stage,
                _descriptor(q_tile + 32 * half, _TILE_DESC),
                _descriptor(k_tile + 32 * half, _TILE_DESC),
                _IDESC,
                other + 4 * page,
                other + (8 + 4 * page),
                half > 0,
            )
        ptx.commit(shared + (_S_FULL + 8 * stage))

    def values(self, shared: Int32, tensor: Int32, stage: int, v_slot: Int32, tile: Int32) -> None:
        """O of one stage += P V for one key tile: 64 keys and two scale bytes at a time, out of one page of scales."""
        bank, v_tile = tensor + 128 * stage, shared + _KV + SLOT * v_slot
        ptx.copy_page(bank + _P_SCALES, _descriptor(shared + (_P_PAGES + 2 * PAGE * stage), _PAGE_DESC))
        ptx.copy_page(bank + _V_SCALES, _descriptor(v_tile + CODES, _PAGE_DESC))
        for half in range(2):
            ptx.mma_values(
                tensor + (256 + 128 * stage),
                bank + (_P_CODES + 8 * half),
                _descriptor(v_tile + 32 * half, _TILE_DESC),
                _IDESC | _UE8M0 | _SECOND_IDS * half,
                bank + _P_SCALES,
                bank + _V_SCALES,
                Int32(1) if half else tile,
                32,
            )

    # The softmax warps.

    @cute.jit
    def softmax(
        self,
        shared: Int32,
        tensor: Int32,
        thread: Int32,
        jobs: Int32,
        pairs: Int32,
        q_tiles: Int32,
        k_tiles: Int32,
        out: Int64,
        lse: Int64,
        v_mean: Int64,
        heads: Int32,
        queries: Int32,
        keys: Int32,
        stride_b: Int64,
        stride_s: Int64,
        stride_h: Int64,
        scale: Float32,
        margin: Float32,
    ):
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        stage, row, lane = thread // 128, thread % 128, thread % 32
        lanes = (row // 32) << 21  # this warp's quarter of tensor memory
        place = Place(
            lane=lane,
            bank=tensor + 128 * stage + ((row // 32) << 21),
            barriers=shared + 8 * stage,
            page=shared + _P_PAGES + 2 * PAGE * stage + (row % 32) * 16 + (row // 32) * 4,
            lowest=Float32(FLOOR) / scale,
            maps=tuple(ptx.twice(scale * a) for a in (1.0, self.o.A, self.o.A2)),
            table=ptx.load_shared(shared + _TABLE),
        )
        count = Int32(0)
        for job in cutlass.range(block, jobs, grid, unroll=1):
            total, reference, bias = Float32(0.0), Float32(0.0), Int32(0)
            for tile in cutlass.range(keys // ROWS, unroll=1):
                total, reference, bias = self.tile(
                    place, scale, margin, count, tile, Int32(ROWS), total, reference, bias, False
                )
                count += 1
            if keys % ROWS != 0:
                total, reference, bias = self.tile(
                    place, scale, margin, count, keys // ROWS, keys % ROWS, total, reference, bias, True
                )
                count += 1

            head, pair = job // pairs, job % pairs
            q_tile = 2 * pair + stage
            position = q_tile * ROWS + row
            ptx.wait(place.barriers + _O_DONE, (count - 1) & 1)
            ptx.fence_after()
            # V's grid is α·code/6, and the code sum counts halves: O = (Σ/6) / (total/2).
            inverse = ptx.reciprocal(total) * Float32(1 / 3)
            target = (
                out
                + (Int64(head // heads) * stride_b + Int64(head % heads) * stride_h + Int64(position) * stride_s) * 2
            )
            for first in cutlass.range_constexpr(0, 128, 32):
                part = ptx.tmem_load(place.bank + 256 + first, 32)
                if position < queries:
                    values = [x * inverse for x in part]
                    if cutlass.const_expr(self.o.v_mean):
                        for i in cutlass.range_constexpr(0, 32, 4):
                            mean = ptx.load_global4(v_mean + (Int64(head) * 128 + (first + i)) * 4)
                            for c in cutlass.range_constexpr(4):
                                values[i + c] = values[i + c] + mean[c]
                    halves = [ptx.pack_halves(values[2 * i], values[2 * i + 1], self.o.out) for i in range(16)]
                    for i in cutlass.range_constexpr(0, 16, 4):
                        ptx.store_global4(target + (2 * first + 4 * i), halves[i : i + 4])
            if cutlass.const_expr(self.o.lse):
                if position < queries:
                    # Σ 2^t = total/12 · 2^(127 − bias)
                    octaves = ptx.log2(total) + (Float32(127.0 - math.log2(12)) - Float32(bias)) + reference
                    ptx.store_global(
                        lse + (Int64(head) * Int64(queries) + Int64(position)) * 4, octaves * Float32(math.log(2))
                    )

    @cute.jit
    def tile(
        self,
        place: Place,
        scale: Float32,
        margin: Float32,
        count: Int32,
        tile: Int32,
        length: Int32,
        total: Float32,
        reference: Float32,
        bias: Int32,
        masked: cutlass.Constexpr,
    ):
        """One key tile of `length` keys: scores to codes, scales and their sum. Returns total, reference and bias."""
        ptx.wait(place.barriers + _S_FULL, count & 1)
        ptx.fence_after()
        scores = ptx.tmem_load(place.bank, 128)
        ptx.fence_before()
        ptx.sync_warp()
        if place.lane == 0:
            ptx.arrive(place.barriers + _S_FREE)
        if cutlass.const_expr(masked):
            scores = [ptx.masked(scores[i], i, length, MASKED) for i in range(128)]

        tops = [self.largest(scores, block, place.lowest) for block in range(4)]
        top = ptx.max3(ptx.max3(tops[0], tops[1], tops[2]), tops[3], tops[3])
        factor, changed = Float32(1.0), Int32(0)
        if cutlass.const_expr(self.o.row_reference == "rowmax"):
            bias = Int32(TARGET)
            raised = top * scale
            if tile == 0:
                reference = raised
            if raised > reference:
                factor = ptx.exp2(reference - raised)
                reference = raised
                changed = Int32(1)
        elif cutlass.const_expr(self.o.row_reference != "shiftless"):
            if tile == 0:
                reference = (tops[0] if self.o.row_reference == "anchor32" else top) * scale + margin

        # e + MAGIC for each block; its low bits are e.
        floors = [ptx.add_down(ptx.fma(t, scale, DIRECT_ROUNDING - reference), Float32(MAGIC)) for t in tops]
        exponents = [ptx.bits(f) - MAGIC_BITS for f in floors]
        if cutlass.const_expr(self.o.row_reference != "rowmax"):
            highest = cutlass.max(cutlass.max(exponents[0], exponents[1]), cutlass.max(exponents[2], exponents[3]))
            if tile == 0:
                bias = TARGET - highest
            if highest + bias > CEILING:
                down = highest + bias - TARGET
                bias -= down
                factor = ptx.as_float((127 - cutlass.min(down, 126)) << 23)
                if down > 126:
                    factor = Float32(0.0)  # what came before is less than 2^-126 of what comes now
                changed = Int32(1)
        if ptx.any_lane(changed) != 0:
            total = total * factor
            self.rescale(place, count, factor)

        stored = [cutlass.max(e + bias, 1) for e in exponents]
        words = []
        for block in cutlass.range_constexpr(4):
            codes, codes_sum = self.codes(scores, block, floors[block] - MAGIC, reference, place)
            words += codes
            weight = ptx.as_float(codes_sum) - Float32(2**23)
            total = ptx.fma(ptx.as_float(stored[block] << 23), weight, total)
        total = ptx.fma(top, Float32(0.0), total)  # NaN and infinite scores must show
        ptx.tmem_store(place.bank + _P_CODES, words)
        ptx.store_shared(place.page, stored[0] | stored[1] << 8 | stored[2] << 16 | stored[3] << 24)
        ptx.tmem_wait_store()
        ptx.fence_before()
        ptx.fence_async()
        ptx.sync_warp()
        if place.lane == 0:
            ptx.arrive(place.barriers + _P_FULL)
        return total, reference, bias

    def largest(self, scores: Any, block: int, lowest: Float32) -> Float32:
        """Of 32 scores and `lowest`, three at a time."""
        value = lowest
        for i in range(32 * block, 32 * block + 32, 2):
            value = ptx.max3(scores[i], scores[i + 1], value)
        return value

    def codes(
        self,
        scores: list[Float32],
        block: int,
        exponent: Float32,
        reference: Float32,
        place: Place,
    ) -> tuple[list[Int32], Int32]:
        """The four words of a block's codes, and 2^23 + Σ 2q as the bits of a float.

        Codes are E2M1(u(x)) with x = score · scale − reference − exponent + log2 6.
        """
        o = self.o
        offset = Float32(LOG2_6) - reference
        first = (place.maps[1], ptx.twice(ptx.fma(exponent, Float32(-o.A), offset * o.A + o.B)))
        maps = [*first]
        if o.classifier == "two-piece":
            maps += [place.maps[2], ptx.twice(ptx.fma(exponent, Float32(-o.A2), offset * o.A2 + o.B2))]
        elif o.classifier != "affine":
            maps += [place.maps[0], ptx.twice(offset - exponent)]
        pairs = {"exp2": 0xFFFF, "mix": _mix_pairs(block, o.density)}.get(o.classifier)
        words, sums = [], []
        for i in range(4):
            eight = [scores[32 * block + 8 * i + j] for j in range(8)]
            word, low, high = ptx.codes(eight, place.table, maps, None if pairs is None else pairs >> (4 * i) & 15)
            words.append(word)
            sums += [low, high]
        return words, ptx.byte_sum(sums, 0x4B000000)

    @cute.jit
    def rescale(self, place: Place, count: Int32, factor: Float32):
        """Multiply this warp's rows of O, after the P V before has been added. Seldom or never needed."""
        ptx.wait(place.barriers + _O_DONE, (count & 1) ^ 1)
        ptx.fence_after()
        for first in cutlass.range_constexpr(0, 128, 32):
            part = ptx.tmem_load(place.bank + 256 + first, 32)
            ptx.tmem_store(place.bank + 256 + first, [x * factor for x in part])
        ptx.tmem_wait_store()
        ptx.fence_before()


def _descriptor(address: Int32, upper: int) -> Int64:
    """A shared-memory descriptor: its lower word has the address and a leading offset of 16 bytes."""
    low = (address >> 4) | (1 << 16)
    return Int64(low) | (Int64(upper) << 32)


def _mix_pairs(block: int, density: int) -> int:
    """Bits of the 16 pairs of a block that take an exponential; `block` is its place in 128 keys (docs/numerics.md)."""
    pairs = {block, block + 8, 4, 12}
    if density >= 2:
        pairs |= {(block + 2) & 3, 6, 8 + ((block + 2) & 3), 14}
    return 0xFFFF if density == 4 else sum(1 << pair for pair in pairs)
