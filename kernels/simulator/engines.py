"""What goes on beside the warps: bulk copies, the tensor pipe, tcgen05.st and ld.

Each operation is issued by a warp, which fixes what it may rely on (`judge.Action`), and performed at once without a
seed, or whenever the scheduler draws it.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from wanfp4.simulator import tma
from wanfp4.simulator.barriers import Mbarrier
from wanfp4.simulator.findings import BoundsError, ProtocolError, SimulationError, UnknownInstruction
from wanfp4.simulator.judge import Action, Clock, Judge
from wanfp4.simulator.memory import PARAM_BASE, Bytes, GlobalMemory, Mask, Params, SharedMemory, Span
from wanfp4.simulator.scheduler import Work
from wanfp4.simulator.tensor_memory import TensorMemory

if TYPE_CHECKING:
    from wanfp4.simulator.scheduler import Warp

MAP_ALIGNMENT, BULK_ALIGNMENT = 64, 16


class Engines:
    """The part of the CTA that issues and performs asynchronous operations."""

    judge: Judge | None
    shared: SharedMemory
    tensor: TensorMemory
    memory: GlobalMemory
    parameters: Params
    random: random.Random | None
    pipe: deque[Work]
    loads: list[Work]
    stores: list[Work]
    isa: bool
    changes: int
    accumulation: str

    def __init__(self) -> None:
        self.copied: Counter[str] = Counter()
        self.multiplied: Counter[str] = Counter()
        self.scale_copies = 0
        self.groups: dict[int, list[tuple[int, Clock]]] = {}  # warp -> (bulk group, clock) of its bulk stores

    def _use_async(self, address: int, what: str, w: Warp) -> Mbarrier:
        raise NotImplementedError

    def _report(self, barrier: Mbarrier, action: Action, count: int, size: int, clock: Clock | None) -> None:
        raise NotImplementedError

    def _act(self, action: Action, perform: Callable[[], None]) -> Callable[[], None]:
        """`perform` on behalf of `action`: accesses and findings count as its own."""

        def run() -> None:
            self.changes += 1
            self.shared.acting = self.tensor.acting = action
            try:
                perform()
            except SimulationError as error:
                if error.line is None:
                    error.line, error.warp = action.line, action.warp
                raise

        return run

    # ---- bulk copies: PTX ISA, cp.async.bulk and cp.async.bulk.tensor ----
    def tensor_map(self, w: Warp, address: int) -> tma.TensorMap:
        """The tensor map at a generic address, of a parameter or of global memory."""
        if address % MAP_ALIGNMENT:
            raise BoundsError(f"tensor map at {address:#x}: not a multiple of {MAP_ALIGNMENT}", line=w.at, warp=w.index)
        if address >> 56 == PARAM_BASE >> 56:
            raw = self.parameters.load(address - PARAM_BASE, 128, w.at, w.index).tobytes()
        else:
            region = self.memory.region(address, address + 128, False, "tensor map", w.at, w.index)
            raw = region.data[address - region.base : address - region.base + 128].tobytes()
        try:
            return tma.decode(raw)
        except SimulationError as error:
            error.line, error.warp = w.at, w.index
            raise

    def tma_load(self, w: Warp, destination: int, map_address: int, coordinates: Sequence[int], barrier: int) -> None:
        box = self.tensor_map(w, map_address)
        span = self._box_span(w, box, destination, "cp.async.bulk.tensor to shared memory")
        at = list(coordinates)
        self._load(w, span, box.bytes, barrier, "cp.async.bulk.tensor", lambda: box.read(self.memory, at))

    def bulk_load(self, w: Warp, destination: int, source: int, size: int, barrier: int) -> None:
        """cp.async.bulk, global to shared memory."""
        span = self._line_span(w, destination, source, size)

        def read() -> Bytes:
            region = self.memory.region(source, source + size, False, "cp.async.bulk", line, warp)
            return region.data[source - region.base : source - region.base + size]

        line, warp = w.at, w.index
        self._load(w, span, size, barrier, "cp.async.bulk", read)

    def _load(self, w: Warp, span: Span, size: int, address: int, what: str, read: Callable[[], Bytes]) -> None:
        barrier = self._use_async(address, what, w)
        if self.judge is not None:
            action = self.judge.load(w.index, w.at, barrier.address, what)
        else:
            action = Action(what, w.at, w.index)
        self.copied["loads"] += 1
        self.copied["bytes in"] += size

        def perform() -> None:
            self.shared.fill(span, read())
            self._report(barrier, action, 0, size, action.after)

        work = Work(action, w, 0, self._act(action, perform))
        if self.random is None:
            work.step()
        else:
            self.loads.append(work)

    def store_lanes(self, w: Warp, mask: Mask | None) -> None:
        """Who may issue one tensor store: a lane; and, as NVIDIA's kernels rely on, a whole converged warp.

        By the PTX ISA each lane of that warp stores the same, so "isa" wants one lane.
        """
        count = 32 if mask is None else int(mask.sum())
        if count != 1 and (self.isa or count != 32):
            allowed = "one must be elected" if self.isa else "one must be elected, or the whole warp converge"
            raise ProtocolError(f"cp.async.bulk.tensor is issued by {count} lanes; {allowed}", line=w.at, warp=w.index)

    def tma_store(
        self, w: Warp, source: int, map_address: int, coordinates: Sequence[int], reduce: str | None = None
    ) -> None:
        box = self.tensor_map(w, map_address)
        span = self._box_span(w, box, source, "cp.async.bulk.tensor from shared memory")
        at = list(coordinates)
        what = "cp.reduce.async.bulk.tensor" if reduce else "cp.async.bulk.tensor"
        self._store(w, span, box.bytes, what, lambda values: box.write(self.memory, at, values, reduce))

    def bulk_store(self, w: Warp, source: int, destination: int, size: int) -> None:
        """cp.async.bulk, shared to global memory."""
        span = self._line_span(w, source, destination, size)
        line, warp = w.at, w.index

        def write(values: Bytes) -> int:
            region = self.memory.region(destination, destination + size, True, "cp.async.bulk", line, warp)
            region.data[destination - region.base : destination - region.base + size] = values
            return size

        self._store(w, span, size, "cp.async.bulk", write)

    def _store(self, w: Warp, span: Span, size: int, what: str, write: Callable[[Bytes], int]) -> None:
        action = self.judge.store(w.index, w.at, what) if self.judge is not None else Action(what, w.at, w.index)
        if action.after is not None:
            self.groups.setdefault(w.index, []).append((w.group, action.after))
        self.copied["stores"] += 1
        self.copied["bytes out"] += size
        values: list[Bytes] = []
        steps = (
            self._act(action, lambda: values.append(self.shared.drain(span))),
            self._act(action, lambda: _drop(write(values[0]))),
        )
        work = Work(action, w, w.group, *steps)
        if self.random is None:
            work.step()
            work.step()
        else:
            self.stores.append(work)

    def _box_span(self, w: Warp, box: tma.TensorMap, address: int, what: str) -> Span:
        self._in_shared(w, address, what)
        if address % tma.ALIGNMENT:
            raise BoundsError(f"{what} {address:#x}: not a multiple of {tma.ALIGNMENT}", line=w.at, warp=w.index)
        return box.span(address)

    def _in_shared(self, w: Warp, address: int, what: str) -> None:
        """Shared memory has 32-bit addresses; what lies beyond is a generic or a global one, or a mistake."""
        if address >> 32:
            raise BoundsError(f"{what} {address:#x}: outside of shared memory", line=w.at, warp=w.index)

    def _line_span(self, w: Warp, shared: int, other: int, size: int) -> Span:
        self._in_shared(w, shared, "cp.async.bulk, shared memory")
        if size <= 0 or (shared | other | size) % BULK_ALIGNMENT:
            raise BoundsError(
                f"cp.async.bulk of {size} bytes, shared memory {shared:#x}, global {other:#x}: "
                f"not multiples of {BULK_ALIGNMENT}",
                line=w.at,
                warp=w.index,
            )
        return Span.of_chunks(np.arange(shared // 16, (shared + size) // 16))

    def commit_group(self, w: Warp) -> None:
        """cp.async.bulk.commit_group."""
        self.changes += 1
        w.group += 1

    def wait_group(self, w: Warp, left: int, read: bool) -> None:
        """cp.async.bulk.wait_group: all but `left` groups have read their source and, without `read`, written."""
        last = w.group - left
        for work in [work for work in self.stores if work.warp is w and work.group < last]:
            while work.steps and not (read and len(work.steps) == 1):
                work.step()
            if not work.steps:
                self.stores.remove(work)
        if self.judge is not None and w.index in self.groups:
            mine = self.groups[w.index]
            while mine and mine[0][0] < last:
                self.judge.acquire(w.index, mine.pop(0)[1])

    def fence_proxy(self, w: Warp) -> None:
        if self.judge is not None:
            self.judge.fence_proxy(w.index)

    # ---- the tensor pipe: PTX ISA, tcgen05.mma, tcgen05.cp, tcgen05.commit ----
    def _queue(self, action: Action, w: Warp, perform: Callable[[], None]) -> None:
        self.changes += 1
        work = Work(action, w, 0, self._act(action, perform))
        if self.random is None:
            work.step()
        else:
            self.pipe.append(work)

    def _issue(self, w: Warp, what: str, stream: object = None) -> Action:
        if self.judge is None:
            return Action(what, w.at, w.index)
        return self.judge.tensor_pipe(w.index, w.at, what, stream)

    def mma(
        self,
        w: Warp,
        kind: str,
        d: int,
        a: int,
        a_in_tmem: bool,
        b: int,
        idesc: int,
        accumulate: bool,
        *,
        keep_lanes: Mask | None = None,
        sfa: int | None = None,
        sfb: int | None = None,
        block: int | None = None,
    ) -> None:
        """tcgen05.mma; `mma.py` says what the operands mean."""
        from wanfp4.simulator.mma import mma

        self.multiplied[kind if block is None else f"{kind} block{block}"] += 1
        # The same accumulator, shape and kind: D's address, N and M (bits 17-28 of the descriptor), and the kind.
        stream = f"{kind}, D {d:#x}, M and N {idesc >> 17 & 0xFFF:#x}"
        action = self._issue(w, f"tcgen05.mma.kind::{kind}", stream)
        self._queue(
            action,
            w,
            lambda: mma(
                self,
                kind,
                d,
                a,
                a_in_tmem,
                b,
                idesc,
                accumulate,
                keep_lanes,
                sfa,
                sfb,
                block,
                accumulation=self.accumulation,
            ),
        )

    def copy_scales(self, w: Warp, taddr: int, desc: int, shape: str) -> None:
        """tcgen05.cp."""
        from wanfp4.simulator.mma import copy_scales

        self.scale_copies += 1
        action = self._issue(w, f"tcgen05.cp.{shape}")
        self._queue(action, w, lambda: copy_scales(self, taddr, desc, shape))

    def commit(self, w: Warp, address: int, multicast: int | None = None) -> None:
        """tcgen05.commit: one arrival when all earlier tcgen05.mma and cp are complete."""
        if multicast is not None:
            raise UnknownInstruction("tcgen05.commit with multicast: one CTA is modelled", line=w.at, warp=w.index)
        barrier = self._use_async(address, "tcgen05.commit", w)
        action = Action("tcgen05.commit", w.at, w.index)
        clock = self.judge.commit(w.index) if self.judge is not None else None
        self._queue(action, w, lambda: self._report(barrier, action, 1, 0, clock))

    # ---- tensor memory: PTX ISA, tcgen05.alloc, dealloc, ld, st, wait, fence ----
    def tmem_alloc(self, w: Warp, address: int, columns: int) -> None:
        self._in_shared(w, address, "tcgen05.alloc to")
        self.changes += 1
        base = self.tensor.alloc(columns, w.at, w.index)
        where = np.array([address], np.uint32)
        self.shared.store(where, np.array([[base]], "<u4").view(np.uint8), None, w.at, w.index)

    def tmem_dealloc(self, w: Warp, address: int, columns: int) -> None:
        if address >> 16:
            raise ProtocolError(
                f"tcgen05.dealloc at {address:#x}: not an address that alloc gave", line=w.at, warp=w.index
            )
        self.changes += 1
        self.tensor.dealloc(address, columns, w.at, w.index)

    def tmem_relinquish(self, w: Warp) -> None:
        self.tensor.relinquish(w.at)

    def _tensor_place(self, w: Warp, address: int, shape: str, columns: int, what: str) -> tuple[slice, slice]:
        """PTX ISA, Tensor memory: access restrictions. A warp reaches the 32 lanes of its place in its warpgroup."""
        if shape != "32x32b":
            raise UnknownInstruction(f"{what}.{shape} is not modelled", line=w.at, warp=w.index)
        lane, column, own = address >> 16, address & 0xFFFF, 32 * (w.index % 4)
        if lane != own:
            raise BoundsError(
                f"{what} at {address:#x}: warp {w.index} reaches tensor memory lanes {own}-{own + 31}, not {lane}",
                line=w.at,
                warp=w.index,
            )
        self.tensor.allocated(column, column + columns, what, w.at, w.index)
        return slice(own, own + 32), slice(column, column + columns)

    def tmem_load(self, w: Warp, address: int, shape: str, count: int) -> tuple[list[NDArray[np.uint32]], Bytes | None]:
        """tcgen05.ld: `count` registers, and their poison uint8 [32, count] (bit i: byte i) or None."""
        place = self._tensor_place(w, address, shape, count, "tcgen05.ld")
        poison = None
        if self.judge is not None and self.tensor.poison is not None:
            action = self.judge.tensor_load(w.index, w.at)
            self.judge.read(action, self.judge.tensor, _quarter(w.index, place[1]))
            found = self.tensor.poison[place]
            if found.any():
                poison = found.copy()
        return list(self.tensor.cells[place].T.copy()), poison

    def tmem_store(
        self,
        w: Warp,
        address: int,
        shape: str,
        registers: Sequence[NDArray[np.uint32]],
        poison: Sequence[Bytes | None] | None = None,
    ) -> None:
        """tcgen05.st."""
        place = self._tensor_place(w, address, shape, len(registers), "tcgen05.st")
        values = np.concatenate(registers).reshape(-1, 32).T
        judge = self.judge
        action = judge.tensor_store(w.index, w.at) if judge is not None else Action("tcgen05.st", w.at, w.index)
        marks: Bytes | None = None
        if poison is not None:
            marks = np.stack([np.zeros(32, np.uint8) if p is None else p for p in poison], 1)

        def perform() -> None:
            self.changes += 1
            self.tensor.allocated(place[1].start, place[1].stop, "tcgen05.st", action.line, action.warp)
            if judge is not None and self.tensor.poison is not None:
                judge.write(action, judge.tensor, _quarter(action.warp, place[1]))
                self.tensor.poison[place] = 0 if marks is None else marks
            self.tensor.cells[place] = values

        if self.random is None:
            perform()
        else:
            w.stores.append((action, perform))

    def wait_st(self, w: Warp) -> None:
        """tcgen05.wait::st."""
        while w.stores:
            w.stores.popleft()[1]()
        if self.judge is not None:
            self.judge.wait_own(w.index, self.judge.st)

    def wait_ld(self, w: Warp) -> None:
        """tcgen05.wait::ld."""
        if self.isa and self.judge is not None:
            self.judge.wait_own(w.index, self.judge.ld)

    def fence_before(self, w: Warp) -> None:
        if self.judge is not None:
            self.judge.fence_before(w.index)

    def fence_after(self, w: Warp) -> None:
        if self.judge is not None:
            self.judge.fence_after(w.index)


def _quarter(warp: int, columns: slice) -> slice:
    """Granules of a warp's quarter of tensor memory."""
    first = 512 * (warp % 4)
    return slice(first + columns.start, first + columns.stop)


def _drop(value: int) -> None:
    """A step has no result."""
