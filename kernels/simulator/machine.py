"""One CTA: its memories, its warps, and what their instructions do beyond registers.

Addresses are arrays of 32 lanes, uint32 for shared memory and uint64 for global and generic ones; a mask is None for
all lanes. Operands that must be uniform are Python ints. Errors say the PTX line (`warp.at`) and the warp.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wanfp4.simulator.barriers import Barriers
from wanfp4.simulator.engines import Engines
from wanfp4.simulator.findings import BoundsError, PoisonError, ProtocolError, UnknownInstruction
from wanfp4.simulator.judge import Judge
from wanfp4.simulator.memory import (
    PARAM_BASE,
    SHARED_BASE,
    SHARED_LIMIT,
    SHARED_WINDOW,
    Bytes,
    GlobalMemory,
    Lanes,
    Mask,
    Params,
    SharedMemory,
)
from wanfp4.simulator.scheduler import Program, Scheduler, Warp
from wanfp4.simulator.tensor_memory import TensorMemory

ORDERINGS = ("pipe", "isa")
ACCUMULATIONS = ("exact", "truncated")


@dataclass
class Statistics:
    """What one CTA did, for reports.

    waits           per barrier: completed waits, and times a warp was blocked
    tma             bulk copies: "loads", "stores", "bytes in", "bytes out"
    mma             tcgen05.mma by kind
    scale_copies    tcgen05.cp
    shared_bytes    high-water mark of shared memory, from its start
    tensor_columns  most columns allocated at one time
    """

    waits: dict[str, tuple[int, int]] = field(default_factory=dict)
    tma: Counter[str] = field(default_factory=Counter)
    mma: Counter[str] = field(default_factory=Counter)
    scale_copies: int = 0
    shared_bytes: int = 0
    tensor_columns: int = 0


class CTA(Scheduler, Barriers, Engines):
    """One CTA of a launch.

    code          translated kernel (`scheduler.Program`)
    block, grid   %ctaid and %nctaid
    shared_bytes  dynamic shared memory
    params        bytes of the parameter block
    seed          None: warps in turn, asynchronous work completes at issue. A number: see `scheduler`.
    track         also poison and happens-before
    ordering      "pipe" or "isa": what may be relied on (`judge`)
    limit         turns of the scheduler after which the kernel counts as one that never ends; None: see `scheduler`
    accumulation  "exact" or "truncated": how tcgen05.mma adds up (`mma`)
    """

    def __init__(
        self,
        code: Program,
        block: tuple[int, int, int],
        grid: tuple[int, int, int],
        shared_bytes: int,
        params: Bytes,
        memory: GlobalMemory,
        *,
        seed: int | None = None,
        track: bool = False,
        ordering: str = "pipe",
        limit: int | None = None,
        accumulation: str = "exact",
    ) -> None:
        if ordering not in ORDERINGS:
            raise ProtocolError(f"ordering is {ordering!r}; it can be {' or '.join(map(repr, ORDERINGS))}")
        size = code.static_bytes + shared_bytes
        if size > SHARED_LIMIT:
            raise ProtocolError(
                f"{size} bytes of shared memory ({code.static_bytes} static, {shared_bytes} dynamic): "
                f"a CTA has {SHARED_LIMIT} at most"
            )
        threads = int(np.prod(code.kernel.threads))
        if threads % 32 or not 0 < threads <= 1024:
            raise ProtocolError(f"a CTA of {threads} threads: whole warps are modelled, up to 1024 threads")
        Scheduler.__init__(self, seed, threads // 32)
        Barriers.__init__(self)
        Engines.__init__(self)
        self.code, self.block, self.grid, self.memory, self.limit = code, block, grid, memory, limit
        self.isa, self.accumulation = ordering == "isa", accumulation
        self.parameters = Params(params)
        self.shared = SharedMemory(size, track)
        self.tensor = TensorMemory(track)
        self.judge: Judge | None = None
        if track:
            self.judge = Judge(threads // 32, len(self.shared.data), self.isa)
            self.shared.judge = self.tensor.judge = self.judge
        self.warps = [Warp(self, index) for index in range(threads // 32)]

    def run(self) -> None:
        """Run to the end. Raises what `findings` lists."""
        with np.errstate(all="ignore"):
            self._go()
        if self.tensor.allocations:
            left = self.tensor.allocations[0]
            raise ProtocolError(
                f"{left.columns} tensor memory columns at {left.base} are not deallocated at the end", line=left.line
            )
        self._same_registers()
        if self.judge is not None:
            self.settled()
            for name, line in self.judge.unobserved():
                raise ProtocolError(f"the CTA ends, and nobody has waited for the last action of {name}", line=line)

    def shared_address(self, w: Warp, address: int) -> int:
        """Of a generic address. Raises BoundsError for one that is not of shared memory."""
        if address >> 32 != SHARED_WINDOW >> 32:
            raise BoundsError(
                f"generic address {address:#x} is not one of shared memory, and the opcode names no state space",
                line=w.at,
                warp=w.index,
            )
        return address & 0xFFFFFFFF

    def shared_addresses(self, w: Warp, addresses: Lanes, m: Mask | None) -> Lanes:
        """The same of each active lane."""
        for address in addresses if m is None else addresses[m]:
            self.shared_address(w, int(address))
        return addresses.astype(np.uint32)

    @property
    def statistics(self) -> Statistics:
        waits = {name: (count, blocked) for name, (count, blocked) in self.waits.items()}
        used, columns = self.shared.highest - SHARED_BASE, self.tensor.highest
        return Statistics(waits, self.copied, self.multiplied, self.scale_copies, used, columns)

    # ---- loads and stores of the generic proxy ----
    def load_shared(self, w: Warp, address: Lanes, size: int, m: Mask | None) -> tuple[Bytes, Mask | None]:
        """(bytes [32, size], poison bool [32, size] or None); inactive lanes read as zero."""
        values, poison = self.shared.load(address if m is None else address[m], size, w.at, w.index)
        marks = None if poison is None else poison.view(np.bool_)
        if m is None:
            return values, marks
        return _spread(values, m), None if marks is None else _spread(marks, m)

    def store_shared(self, w: Warp, address: Lanes, values: Bytes, poison: Mask | None, m: Mask | None) -> None:
        self.changes += 1
        marks = None if poison is None else poison.view(np.uint8)
        if m is not None:
            address, values, marks = address[m], values[m], None if marks is None else marks[m]
        self.shared.store(address, values, marks, w.at, w.index)

    def load_global(self, w: Warp, address: Lanes, size: int, m: Mask | None) -> tuple[Bytes, None]:
        values = self.memory.load(address if m is None else address[m], size, w.at, w.index)
        return values if m is None else _spread(values, m), None

    def store_global(self, w: Warp, address: Lanes, values: Bytes, poison: Mask | None, m: Mask | None) -> None:
        if m is not None:
            address, values, poison = address[m], values[m], None if poison is None else poison[m]
        if poison is not None and poison.any():
            raise PoisonError("a value that nobody defined is stored to global memory", line=w.at, warp=w.index)
        self.changes += 1
        self.memory.store(address, values, w.at, w.index)

    def load_generic(self, w: Warp, address: Lanes, size: int, m: Mask | None) -> tuple[Bytes, Mask | None]:
        """PTX ISA, Generic addressing: windows of shared memory and of parameters, everything else is global."""
        out, marks = np.zeros((32, size), np.uint8), np.zeros((32, size), np.bool_)
        for window, lanes in _windows(address, m):
            if window == SHARED_WINDOW >> 56:
                values, poison = self.load_shared(w, address.astype(np.uint32), size, lanes)
                if poison is not None:
                    marks |= poison
            elif window == PARAM_BASE >> 56:
                values = np.zeros((32, size), np.uint8)
                for lane in np.flatnonzero(lanes):
                    values[lane] = self.load_param(self.param_offset(int(address[lane])), size)
            else:
                values, _ = self.load_global(w, address, size, lanes)
            out[lanes] = values[lanes]
        return out, marks if marks.any() else None

    def store_generic(self, w: Warp, address: Lanes, values: Bytes, poison: Mask | None, m: Mask | None) -> None:
        for window, lanes in _windows(address, m):
            if window == SHARED_WINDOW >> 56:
                self.store_shared(w, address.astype(np.uint32), values, poison, lanes)
            elif window == PARAM_BASE >> 56:
                raise BoundsError("store to a kernel parameter", line=w.at, warp=w.index)
            else:
                self.store_global(w, address, values, poison, lanes)

    def unordered(self, w: Warp, address: Lanes, m: Mask | None, order: str) -> None:
        """For .acquire and .release at generic addresses, with tracking: they are modelled for global memory only."""
        if any(window == SHARED_WINDOW >> 56 for window, _ in _windows(address, m)):
            raise UnknownInstruction(
                f".{order} on shared memory is not modelled where accesses are judged (track); "
                "barriers and mbarriers are",
                line=w.at,
                warp=w.index,
            )

    def load_param(self, offset: int, size: int) -> Bytes:
        return self.parameters.load(offset, size)

    def param_offset(self, address: int) -> int:
        """Of the address of a parameter. Raises BoundsError for another address."""
        if address >> 56 != PARAM_BASE >> 56:
            raise BoundsError(f"{address:#x} is not the address of a parameter")
        return address - PARAM_BASE

    def atomic(
        self, w: Warp, space: str, how: str, address: Lanes, values: NDArray[Any], m: Mask | None
    ) -> NDArray[Any]:
        """atom and red: the old values. Lanes act one after the other, lowest first (PTX ISA leaves the order open).

        With tracking, an atomic must come after the last plain write; atomics among each other are in no race, and
        plain reads of what they left are not judged.
        """
        size = values.dtype.itemsize
        old = np.zeros(32, values.dtype)
        lanes = range(32) if m is None else [int(lane) for lane in np.flatnonzero(m)]
        for lane in lanes:
            one = address[lane : lane + 1]
            where = one
            in_shared = space == "shared"
            if space == "generic" and int(one[0]) >> 32 == SHARED_WINDOW >> 32:
                where, in_shared = one.astype(np.uint32), True
            if in_shared:
                raw, poison = self.shared.load(where, size, w.at, w.index)
                if poison is not None:
                    raise PoisonError(
                        f"atomic on shared memory {int(where[0]):#x}, which nobody defined", line=w.at, warp=w.index
                    )
            else:
                raw = self.memory.load(one, size, w.at, w.index)
            before = raw.view(values.dtype)[0, 0]
            old[lane] = before
            after = np.array([_combine(how, before, values[lane])], values.dtype).view(np.uint8).reshape(1, size)
            self.changes += int(after.tobytes() != raw.tobytes())
            if in_shared:
                self.shared.views[size][int(where[0]) // size] = after.view(f"u{size}")[0, 0]
            else:
                self.memory.store(one, after, w.at, w.index)
        return old

    def set_registers(self, w: Warp, count: int) -> None:
        """PTX ISA, setmaxnreg: all warps of a warpgroup must run the same one."""
        mine = w.register_counts
        mine.append((count, w.at))
        first = w.index // 4 * 4
        for other in self.warps[first : first + 4]:
            if len(other.register_counts) >= len(mine) and other.register_counts[len(mine) - 1][0] != count:
                theirs, line = other.register_counts[len(mine) - 1]
                raise ProtocolError(
                    f"setmaxnreg {count}, while warp {other.index} of the same warpgroup has {theirs}",
                    line=w.at,
                    warp=w.index,
                    other=line,
                )

    def _same_registers(self) -> None:
        """At the end: each warp of a warpgroup has run as many setmaxnreg as the others."""
        for first in range(0, len(self.warps), 4):
            group = self.warps[first : first + 4]
            most = max(group, key=lambda w: len(w.register_counts))
            for other in group:
                if len(other.register_counts) < len(most.register_counts):
                    count, line = most.register_counts[len(other.register_counts)]
                    raise ProtocolError(
                        f"setmaxnreg {count}, and warp {other.index} of the same warpgroup never comes to it",
                        line=line,
                        warp=most.index,
                    )


def _spread(values: NDArray[Any], mask: Mask) -> NDArray[Any]:
    """Rows of active lanes -> rows of all 32."""
    out = np.zeros((32, *values.shape[1:]), values.dtype)
    out[mask] = values
    return out


def _windows(address: Lanes, m: Mask | None) -> list[tuple[int, Mask]]:
    """The address windows (top bytes) that active lanes point into, each with its lanes; 0 for global memory.

    A window has 2^32 addresses; one beyond is in no tensor either.
    """
    high = address.astype(np.uint64) >> np.uint64(32)
    top = (high >> np.uint64(24)).astype(np.int64)
    top[~np.isin(high, (SHARED_WINDOW >> 32, PARAM_BASE >> 32))] = 0
    live = np.ones(32, np.bool_) if m is None else m
    return [(int(window), live & (top == window)) for window in np.unique(top[live])]


def _combine(how: str, old: Any, value: Any) -> Any:
    """PTX ISA, atom: the value left behind."""
    match how:
        case "add":
            return old + value
        case "min":
            return min(old, value)
        case "max":
            return max(old, value)
        case "exch":
            return value
        case "and":
            return old & value
        case "or":
            return old | value
        case "xor":
            return old ^ value
        case "inc":
            return 0 if old >= value else old + type(old)(1)
        case "dec":
            return value if old == 0 or old > value else old - type(old)(1)
    raise UnknownInstruction(f"atom.{how} is not modelled")
