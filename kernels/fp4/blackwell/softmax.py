"""The softmax warps of the forward kernel: a thread a query, from scores to codes of P, and from O to the output.

Scores of a key tile come in with one wait. Per block of 32 keys (16 for NVFP4): its largest, its scale, one or two maps
of each score to what E2M1 rounds, eight codes to a word, and the sum of the codes. Nothing waits for another thread;
scales go through shared memory, because the tensor core wants every row's in all four lane quarters.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from wanfp4.kernels.blackwell import layout as at
from wanfp4.kernels.blackwell import ptx
from wanfp4.kernels.blackwell.layout import Arguments, Options, Place


class Softmax:
    """The part of `forward.Forward` that its first eight warps run."""

    o: Options

    @cute.jit
    def softmax(self, shared: Int32, tensor: Int32, thread: Int32, a: Arguments) -> None:
        """All jobs of one thread."""
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        stage, row = thread // 128, thread % 128
        place = Place(
            lane=thread % 32,
            bank=tensor + 128 * stage + ((row // 32) << 21),  # this warp's quarter of the lanes
            barriers=shared + 8 * stage,
            page=shared + at.P_PAGES + 2 * at.PAGE * stage + (row % 32) * 16 + (row // 32) * 4,
            lowest=Float32(at.FLOOR) / a.scale,
            maps=tuple(ptx.twice(a.scale * slope) for slope in (1.0, self.o.A, self.o.A2)),
            table=ptx.load_shared(shared + at.TABLE + 4 * (thread % 32)),
            guard=ptx.load_global(a.guard) if self.o.row_reference == "guarded" else Int32(0),
        )
        count, turn = Int32(0), Int32(0)  # key tiles and jobs so far
        for job in cutlass.range(block, a.jobs, grid, unroll=1):
            total, reference, bias = Float32(0.0), Float32(0.0), Int32(0)
            for tile in cutlass.range(a.keys // at.ROWS, unroll=1):
                total, reference, bias = self.tile(place, a, count, tile, Int32(at.ROWS), total, reference, bias, False)
                count += 1
            if a.keys % at.ROWS != 0:
                total, reference, bias = self.tile(
                    place, a, count, a.keys // at.ROWS, a.keys % at.ROWS, total, reference, bias, True
                )
                count += 1
            ptx.wait(place.barriers + at.O_DONE, (turn if self.o.in_order else count - 1) & 1)
            ptx.fence_after()
            turn += 1
            head, position = job // a.pairs, (2 * (job % a.pairs) + stage) * at.ROWS + row
            self.finish(place, a, head, position, total, reference, bias)

    @cute.jit
    def tile(
        self,
        place: Place,
        a: Arguments,
        count: Int32,
        tile: Int32,
        length: Int32,
        total: Float32,
        reference: Float32,
        bias: Int32,
        masked: cutlass.Constexpr,
    ) -> tuple[Float32, Float32, Int32]:
        """One key tile of `length` keys. Returns the row's sum of codes, its reference in octaves, and its bias."""
        ptx.wait(place.barriers + at.S_FULL, count & 1)
        ptx.fence_after()
        scores = ptx.tmem_load(place.bank, 128)
        ptx.fence_before()
        ptx.sync_warp()
        if place.lane == 0:
            ptx.arrive(place.barriers + at.S_FREE)
        if cutlass.const_expr(masked):
            scores = [ptx.masked(scores[i], i, length, place.lowest + place.lowest) for i in range(128)]

        size = 32 if self.o.p == "mxfp4-direct" else 16
        tops = [self.largest(scores[i : i + size], place.lowest) for i in range(0, 128, size)]
        top = self.largest(tops[1:] + tops[-1:] * (len(tops) % 2 == 0), tops[0])
        factor, changed = Float32(1.0), Int32(0)
        if cutlass.const_expr(self.o.row_reference == "rowmax"):
            raised = top * a.scale
            if tile == 0:
                reference = raised
            if raised > reference:
                factor = ptx.exp2(reference - raised)
                reference = raised
                changed = Int32(1)
        elif cutlass.const_expr(self.o.row_reference != "shiftless"):
            anchor = tops[0] if self.o.row_reference == "anchor32" else top
            reference = self.anchored(place, a, tile, anchor, reference)

        # e + MAGIC for each block; its low bits are e.
        floors = [
            ptx.add_down(ptx.fma(t, a.scale, at.DIRECT_ROUNDING - reference), Float32(at.MAGIC)) for t in tops[:4]
        ]
        exponents = [ptx.bits(f) - at.MAGIC_BITS for f in floors]
        if cutlass.const_expr(self.o.row_reference == "rowmax"):
            bias = Int32(at.TARGET)
        else:
            highest = cutlass.max(cutlass.max(exponents[0], exponents[1]), cutlass.max(exponents[2], exponents[3]))
            if tile == 0:
                bias = at.TARGET - highest
            if highest + bias > at.CEILING:
                down = highest + bias - at.TARGET
                bias -= down
                factor = ptx.as_float((127 - cutlass.min(down, 126)) << 23)
                if down > 126:
                    factor = Float32(0.0)  # what came before is less than 2^-126 of what comes now
                changed = Int32(1)
        if ptx.any_lane(changed) != 0:
            total = total * factor
            self.rescale(place, factor)

        if cutlass.const_expr(self.o.p == "nvfp4"):
            total = self.publish_nvfp4(place, a, scores, tops, total, reference)
        else:
            total = self.publish_direct(place, scores, floors, exponents, total, reference, bias)
        total = ptx.fma(top, Float32(0.0), total)  # NaN and infinite scores must show
        ptx.tmem_wait_store()
        ptx.fence_before()
        ptx.fence_async()
        ptx.sync_warp()
        if place.lane == 0:
            ptx.arrive(place.barriers + at.P_FULL)
        return total, reference, bias

    @cute.jit
    def anchored(self, place: Place, a: Arguments, tile: Int32, anchor: Float32, reference: Float32) -> Float32:
        """The reference once the first tile is known; for "guarded", where the flag asks for one."""
        wanted = tile == 0
        if cutlass.const_expr(self.o.row_reference == "guarded"):
            wanted = wanted and place.guard != 0
        if wanted:
            reference = anchor * a.scale + a.margin
        return reference

    def largest(self, scores: list[Float32], lowest: Float32) -> Float32:
        """Of an even number of scores and `lowest`, three at a time."""
        value = lowest
        for first, second in zip(scores[::2], scores[1::2], strict=True):
            value = ptx.max3(first, second, value)
        return value

    def publish_direct(
        self,
        place: Place,
        scores: list[Float32],
        floors: list[Float32],
        exponents: list[Int32],
        total: Float32,
        reference: Float32,
        bias: Int32,
    ) -> Float32:
        """Direct-P: codes of u(x), x = score · scale − reference − e + log2 6, with scale bytes e + bias."""
        offset = Float32(at.LOG2_6) - reference
        stored = [cutlass.max(e + bias, 1) for e in exponents]
        words: list[Int32] = []
        for block in range(4):
            codes, sums = self.codes(
                scores[32 * block : 32 * block + 32], place, offset, floors[block] - at.MAGIC, block
            )
            words += codes
            weight = ptx.as_float(ptx.byte_sum(sums, 0x4B000000)) - Float32(2**23)
            total = ptx.fma(ptx.as_float(stored[block] << 23), weight, total)
        ptx.tmem_store(place.bank + at.P_CODES, words)
        ptx.store_shared(place.page, stored[0] | stored[1] << 8 | stored[2] << 16 | stored[3] << 24)
        return total

    def publish_nvfp4(
        self, place: Place, a: Arguments, scores: list[Float32], tops: list[Float32], total: Float32, reference: Float32
    ) -> Float32:
        """NVFP4: s = E4M3(2^max/6), codes of u(x), x = log2 of the scaled probability − log2 s."""
        peak = Float32(math.log2(self.o.p_peak)) - reference
        for page in range(2):
            words: list[Int32] = []
            blocks = range(4 * page, 4 * page + 4)
            peaks = [ptx.exp2(ptx.fma(tops[b], a.scale, peak)) * Float32(1 / 6) for b in blocks]
            packed = ptx.pack_scales(peaks)
            for block, scale in zip(blocks, ptx.unpack_scales(packed), strict=True):
                codes, sums = self.codes(scores[16 * block : 16 * block + 16], place, peak, ptx.log2(scale), block)
                words += codes
                weight = ptx.as_float(ptx.byte_sum(sums, 0x4B000000)) - Float32(2**23)
                total = ptx.fma(scale, weight, total)
            ptx.store_shared(place.page + at.PAGE * page, packed)
            ptx.tmem_store(place.bank + (at.P_CODES + 8 * page), words)
        return total

    def codes(
        self, scores: list[Float32], place: Place, offset: Float32, exponent: Float32, block: int
    ) -> tuple[list[Int32], list[Int32]]:
        """Words of E2M1(max(u(x), 0)), x = score · scale + offset − exponent; and what each half of a word counts."""
        o = self.o
        maps = [place.maps[1], ptx.twice(ptx.fma(exponent, Float32(-o.A), offset * o.A + o.B))]
        if o.classifier == "two-piece":
            maps += [place.maps[2], ptx.twice(ptx.fma(exponent, Float32(-o.A2), offset * o.A2 + o.B2))]
        elif o.classifier != "affine":
            maps += [place.maps[0], ptx.twice(offset - exponent)]
        pairs = {"exp2": 0xFFFF, "mix": at.mix_pairs(block, o.density)}.get(o.classifier)
        words: list[Int32] = []
        sums: list[Int32] = []
        for i in range(0, len(scores), 8):
            exponentials = None if pairs is None else pairs >> (i // 2) & 15
            word, low, high = ptx.codes(scores[i : i + 8], place.table, maps, exponentials)
            words.append(word)
            sums += [low, high]
        return words, sums

    def rescale(self, place: Place, factor: Float32) -> None:
        """Multiply this warp's rows of O. Seldom or never needed.

        The P V before has been added: scores are committed after it. The wait for stores is that of P's.
        """
        for first in range(0, 128, 32):
            part = ptx.tmem_load(place.bank + (at.OUTPUT + first), 32)
            ptx.tmem_store(place.bank + (at.OUTPUT + first), [x * factor for x in part])

    @cute.jit
    def finish(
        self,
        place: Place,
        a: Arguments,
        head: Int32,
        position: Int32,
        total: Float32,
        reference: Float32,
        bias: Int32,
    ) -> None:
        """The row's output and log-sum-exp. The code sum counts halves; Direct-P's V is α·code/6."""
        direct = self.o.p == "mxfp4-direct"
        inverse = ptx.reciprocal(total) * Float32(1 / 3 if direct else 2.0)
        place_of_head = Int64(head // a.heads) * a.stride_b + Int64(head % a.heads) * a.stride_h
        size = 4 if self.o.out == "f32" else 2
        target = a.out + (place_of_head + Int64(position) * a.stride_s) * size
        for first in cutlass.range_constexpr(0, 128, 32):
            part = ptx.tmem_load(place.bank + (at.OUTPUT + first), 32)
            if position < a.queries:
                values = [x * inverse for x in part]
                if cutlass.const_expr(self.o.v_mean):
                    values = self.add_means(values, a.v_mean + (Int64(head) * 128 + first) * 4)
                words = self.words(values)
                for i in cutlass.range_constexpr(0, len(words), 4):
                    ptx.store_global4(target + (size * first + 4 * i), words[i : i + 4])
        if cutlass.const_expr(self.o.lse):
            # Σ 2^t is total/12 · 2^(127 − bias) for Direct-P, total/2 / p_peak for NVFP4.
            unit = 127.0 - math.log2(12) if direct else -1.0 - math.log2(self.o.p_peak)
            octaves = ptx.log2(total) + (Float32(unit) - Float32(bias if direct else Int32(0))) + reference
            if position < a.queries:
                ptx.store_global(
                    a.lse + (Int64(head) * Int64(a.queries) + Int64(position)) * 4, octaves * Float32(math.log(2))
                )

    def words(self, values: list[Any]) -> list[Int32]:
        """Floats as the output's words."""
        if self.o.out == "f32":
            return [ptx.bits(x) for x in values]
        pairs = zip(values[::2], values[1::2], strict=True)
        return [ptx.pack_halves(low, high, self.o.out) for low, high in pairs]

    def add_means(self, values: list[Float32], means: Int64) -> list[Any]:
        """Channel means of V, which smoothing took out."""
        out: list[Any] = []
        for i in range(0, len(values), 4):
            four = ptx.load_global4(means + 4 * i)
            out += [value + mean for value, mean in zip(values[i : i + 4], four, strict=True)]
        return out
