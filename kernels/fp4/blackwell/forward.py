"""Direct-P FP4 attention for SM100: the forward kernel, read from top to bottom.

One CTA works on 256 queries of one head at a time, two stages of 128, and walks over all keys in tiles of 128:

    load warp     records of Q, K and V (see `wanfp4.kernels.blackwell.quantize`) into shared memory, by bulk copies
    MMA warp      S = Q Kᵀ and O += P V, both block-scaled FP4, and the copies of scale pages
    softmax       a warpgroup a stage, a thread a query: scores → codes and scales of P, the sum of the codes, and at
    warps         the end O / L

Tensor memory, all 512 columns: S of stage 0 and 1 at 0 and 128, O at 256 and 384. Once a bank's scores are in
registers it is free, and until the next scores arrive it holds

    0–7 (0–15)    scales of Q and K for the *other* stage's next scores (wider where they are not folded)
    16–19 (–23)   scales of V       32–35 (–39)   scales of P       64–79   codes of P, 8 to a column

P V reads a bank before the scores that follow overwrite it, because the tensor core works in the order of issue.

Exponents. A block of 32 keys has α = 2^e, e = floor(max t + 0.41504), t = score · log2 e − m. What is stored is
e + bias, with a bias for each row that puts the first tile's largest block at `TARGET`: whole octaves cancel in O / L,
so this moves any row into the range of a byte and of FP32. Should a later block pass `CEILING`, the row's O and L are
scaled down by a power of two, which is exact, and the bias follows.
"""

from __future__ import annotations

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, cute

from wanfp4.kernels.blackwell import layout as at
from wanfp4.kernels.blackwell import ptx
from wanfp4.kernels.blackwell.layout import Arguments, Options
from wanfp4.kernels.blackwell.softmax import Softmax

__all__ = ["Forward", "Options"]

# Instruction descriptors (PTX ISA, "Instruction descriptor"): M and N 128, E2M1 both; bit 23 UE8M0; scale ids.
_IDESC = 8 << 24 | 16 << 17 | 1 << 10 | 1 << 7
_UE8M0 = 1 << 23
_SECOND_IDS = 2 << 29 | 2 << 4

# Shared-memory descriptors (PTX ISA, "Shared memory descriptor"): upper words.
_TILE_DESC = 1 << 31 | 1 << 14 | 512 >> 4  # 64-byte swizzle, 512 bytes from 8 rows to the next 8
_PAGE_DESC = 1 << 14 | 128 >> 4


class Forward(Softmax):
    """The kernel for one set of `Options`; compile an instance with `cute.compile`.

    q, k, v      addresses of records [B·H, tiles, record]
    out, lse     addresses of [B, Sq, H, 128] with strides in elements, and of float32 [B·H, Sq]
    v_mean       address of float32 [B·H, 128]
    guard        address of an int32 flag, for `row_reference="guarded"`
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
        guard: Int64,
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
    ) -> None:
        # Out of the kernel's constants these cost no registers.
        q_tiles, k_tiles = (queries + at.ROWS - 1) // at.ROWS, (keys + at.ROWS - 1) // at.ROWS
        pairs = (q_tiles + 1) // 2
        self.kernel(
            q, k, v, out, lse, v_mean, guard, batch_heads, heads, queries, keys, stride_b, stride_s, stride_h, scale,
            margin, q_tiles, k_tiles, pairs, batch_heads * pairs,
        ).launch(
            grid=(grid, 1, 1), block=(at.THREADS, 1, 1), smem=self.o.shared_bytes, stream=stream, min_blocks_per_mp=1
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q: Int64,
        k: Int64,
        v: Int64,
        out: Int64,
        lse: Int64,
        v_mean: Int64,
        guard: Int64,
        batch_heads: Int32,
        heads: Int32,
        queries: Int32,
        keys: Int32,
        stride_b: Int64,
        stride_s: Int64,
        stride_h: Int64,
        scale: Float32,
        margin: Float32,
        q_tiles: Int32,
        k_tiles: Int32,
        pairs: Int32,
        jobs: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread % 32
        shared = Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint())
        a = Arguments(
            q, k, v, out, lse, v_mean, guard, batch_heads, heads, queries, keys, stride_b, stride_s, stride_h, scale,
            margin, q_tiles, k_tiles, pairs, jobs,
        )  # fmt: skip

        if warp == at.MMA_WARP:
            if lane == 0:
                self.init_barriers(shared)
            # Where the compiler knows that a value is the same in all lanes, it fetches it anew for every use.
            ptx.store_shared(shared + at.TABLE + 4 * lane, Int32(at.TABLE_WORD))
            ptx.tmem_alloc(shared + at.TENSOR_ADDRESS)
        cute.arch.sync_threads()
        tensor = ptx.load_shared(shared + at.TENSOR_ADDRESS)

        if warp < at.SOFTMAX_WARPS:
            cute.arch.setmaxregister_increase(at.SOFTMAX_REGISTERS)
            self.softmax(shared, tensor, thread, a)
        else:
            cute.arch.setmaxregister_decrease(at.OTHER_REGISTERS)
            if warp == at.MMA_WARP:
                with cute.arch.elect_one():
                    self.multiply(shared, tensor, a)
            if warp == at.LOAD_WARP:
                with cute.arch.elect_one():
                    self.load(shared, a)
        ptx.fence_before()
        cute.arch.sync_threads()
        if warp == at.MMA_WARP:
            ptx.fence_after()
            ptx.tmem_dealloc(tensor)

    def init_barriers(self, shared: Int32) -> None:
        """Of one thread. Softmax warps arrive once each, everybody else is a commit or a counted copy."""
        for stage in range(2):
            for offset, count in (
                (at.Q_FULL, 1),
                (at.Q_EMPTY, 1),
                (at.S_FULL, 1),
                (at.S_FREE, 4),
                (at.P_FULL, 4),
                (at.O_DONE, 1),
            ):
                ptx.barrier_init(shared + (offset + 8 * stage), count)
        for slot in range(self.o.slots):
            ptx.barrier_init(shared + (at.KV_FULL + 8 * slot), 1)
            ptx.barrier_init(shared + (at.KV_EMPTY + 8 * slot), 1)
        ptx.barrier_init_fence()

    # The load warp, one thread: for each job Q of both stages and K₀, then V₀ K₁ V₁ K₂ … through one ring of slots.

    @cute.jit
    def load(self, shared: Int32, a: Arguments) -> None:
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        turn, item = Int32(0), Int32(0)
        for job in cutlass.range(block, a.jobs, grid, unroll=1):
            head, pair = Int64(job // a.pairs), job % a.pairs
            for stage in cutlass.range_constexpr(2):
                tile = cutlass.min(2 * pair + stage, a.q_tiles - 1)  # a missing second tile repeats the first
                ptx.wait(shared + (at.Q_EMPTY + 8 * stage), (turn & 1) ^ 1)
                full = shared + (at.Q_FULL + 8 * stage)
                ptx.expect(full, self.o.qk_record)
                source = a.q + (head * Int64(a.q_tiles) + Int64(tile)) * self.o.qk_record
                ptx.bulk_load(shared + (at.Q + at.SLOT * stage), source, self.o.qk_record, full)
            keys = a.k + head * Int64(a.k_tiles) * self.o.qk_record
            values = a.v + head * Int64(a.k_tiles) * self.o.v_record
            self.fill(shared, item, keys, self.o.qk_record)
            item += 1
            for tile in cutlass.range(a.k_tiles, unroll=1):
                self.fill(shared, item, values + Int64(tile) * self.o.v_record, self.o.v_record)
                item += 1
                if tile + 1 < a.k_tiles:
                    self.fill(shared, item, keys + Int64(tile + 1) * self.o.qk_record, self.o.qk_record)
                    item += 1
            turn += 1
        # Nobody may be about to arrive in shared memory when the CTA ends.
        for stage in cutlass.range_constexpr(2):
            ptx.wait(shared + (at.Q_EMPTY + 8 * stage), (turn & 1) ^ 1)
        for _ in cutlass.range(self.o.slots, unroll=1):
            ptx.wait(shared + at.KV_EMPTY + 8 * (item % self.o.slots), ((item // self.o.slots) & 1) ^ 1)
            item += 1

    def fill(self, shared: Int32, item: Int32, source: Int64, size: int) -> None:
        """Copy a record into the ring's next slot, once that is empty."""
        slot = item % self.o.slots
        ptx.wait(shared + at.KV_EMPTY + 8 * slot, ((item // self.o.slots) & 1) ^ 1)
        full = shared + at.KV_FULL + 8 * slot
        ptx.expect(full, size)
        ptx.bulk_load(shared + at.KV + at.SLOT * slot, source, size, full)

    # The MMA warp, one thread.

    @cute.jit
    def multiply(self, shared: Int32, tensor: Int32, a: Arguments) -> None:
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        turn, item, count = Int32(0), Int32(0), Int32(0)  # jobs, ring slots and key tiles so far
        for _ in cutlass.range(block, a.jobs, grid, unroll=1):
            k_slot = self.filled(shared, item)
            item += 1
            for stage in cutlass.range_constexpr(2):
                ptx.wait(shared + (at.Q_FULL + 8 * stage), turn & 1)
                self.scores(shared, tensor, stage, k_slot, count, a.k_tiles == 1)
            self.release(shared, k_slot)
            for tile in cutlass.range(a.k_tiles, unroll=1):
                more = tile + 1 < a.k_tiles
                v_slot = self.filled(shared, item)
                item += 1
                next_k = item % self.o.slots
                for stage in cutlass.range_constexpr(2):
                    ptx.wait(shared + (at.P_FULL + 8 * stage), count & 1)
                    ptx.fence_after()
                    self.values(shared, tensor, stage, v_slot, tile)
                    if cutlass.const_expr(not self.o.in_order) or not more:
                        ptx.commit(shared + (at.O_DONE + 8 * stage))
                    if more:
                        if cutlass.const_expr(stage == 0):
                            self.filled(shared, item)
                        self.scores(shared, tensor, stage, next_k, count + 1, tile + 2 == a.k_tiles)
                self.release(shared, v_slot)
                if more:
                    self.release(shared, next_k)
                    item += 1
                count += 1
            turn += 1

    def filled(self, shared: Int32, item: Int32) -> Int32:
        """The slot of the ring's item, when it has arrived."""
        slot = item % self.o.slots
        ptx.wait(shared + at.KV_FULL + 8 * slot, (item // self.o.slots) & 1)
        return slot

    def release(self, shared: Int32, slot: Int32) -> None:
        """The slot may be filled again when everything issued so far is done."""
        ptx.commit(shared + at.KV_EMPTY + 8 * slot)

    @cute.jit
    def scores(
        self,
        shared: Int32,
        tensor: Int32,
        stage: cutlass.Constexpr,
        k_slot: Int32,
        count: Int32,
        last: Boolean,
    ) -> None:
        """S of key tile `count` for one stage. Its scales go to the other bank, whose scores must be in registers."""
        pages = 1 if self.o.folded else 2
        other = tensor + 128 * (1 - stage)
        if cutlass.const_expr(stage == 0):
            # The other stage's last scores are those before; on the barrier's first phase there are none.
            ptx.wait(shared + (at.S_FREE + 8), (count & 1) ^ 1)
        else:
            ptx.wait(shared + at.S_FREE, count & 1)
        if cutlass.const_expr(not self.o.in_order):
            ptx.wait(shared + (at.O_DONE + 8 * stage), (count & 1) ^ 1)
        ptx.fence_after()
        q_tile, k_tile = shared + (at.Q + at.SLOT * stage), shared + at.KV + at.SLOT * k_slot
        for page in cutlass.range_constexpr(pages):
            ptx.copy_page(other + 4 * page, _descriptor(q_tile + (at.CODES + at.PAGE * page), _PAGE_DESC))
            ptx.copy_page(
                other + (at.K_SCALES + 4 * page), _descriptor(k_tile + (at.CODES + at.PAGE * page), _PAGE_DESC)
            )
        for half in cutlass.range_constexpr(2):
            page = half if pages == 2 else 0
            ptx.mma_scores(
                tensor + 128 * stage,
                _descriptor(q_tile + 32 * half, _TILE_DESC),
                _descriptor(k_tile + 32 * half, _TILE_DESC),
                _IDESC,
                other + 4 * page,
                other + (at.K_SCALES + 4 * page),
                half > 0,
            )
        ptx.commit(shared + (at.S_FULL + 8 * stage))
        if last:  # of the job: the next one's Q may come
            ptx.commit(shared + (at.Q_EMPTY + 8 * stage))

    def values(self, shared: Int32, tensor: Int32, stage: int, v_slot: Int32, tile: Int32) -> None:
        """O of one stage += P V for one key tile, 64 keys at a time.

        With a scale for 32 keys one page serves both halves, each with two of a word's four bytes; with one for 16 each
        half has its own.
        """
        bank, v_tile = tensor + 128 * stage, shared + at.KV + at.SLOT * v_slot
        for page in range(self.o.p_pages):
            p_page = shared + (at.P_PAGES + at.PAGE * (2 * stage + page))
            ptx.copy_page(bank + (at.P_SCALES + 4 * page), _descriptor(p_page, _PAGE_DESC))
            ptx.copy_page(
                bank + (at.V_SCALES + 4 * page), _descriptor(v_tile + (at.CODES + at.PAGE * page), _PAGE_DESC)
            )
        one_page = self.o.p_pages == 1
        for half in range(2):
            column = 0 if one_page else 4 * half
            ptx.mma_values(
                tensor + (at.OUTPUT + 128 * stage),
                bank + (at.P_CODES + 8 * half),
                _descriptor(v_tile + 32 * half, _TILE_DESC),
                _IDESC | (_UE8M0 | _SECOND_IDS * half) * one_page,
                bank + (at.P_SCALES + column),
                bank + (at.V_SCALES + column),
                Int32(1) if half else tile,
                32 if one_page else 16,
            )


def _descriptor(address: Int32, upper: int) -> Int64:
    """A shared-memory descriptor: its lower word has the address and a leading offset of 16 bytes."""
    low = (address >> 4) | (1 << 16)
    return Int64(low) | (Int64(upper) << 32)
