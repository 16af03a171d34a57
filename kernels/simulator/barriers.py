"""mbarriers and named barriers: PTX ISA, Parallel Synchronization and Communication Instructions (mbarrier, bar)."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from wanfp4.simulator.findings import BoundsError, ProtocolError, RaceError, UnknownInstruction
from wanfp4.simulator.judge import FENCED, KNOWN, Action, Clock, Judge
from wanfp4.simulator.memory import SHARED_BASE, Mask, SharedMemory

if TYPE_CHECKING:
    from wanfp4.simulator.scheduler import Warp

COUNT_LIMIT = TX_LIMIT = (1 << 20) - 1  # PTX ISA, Contents of the mbarrier object


class Mbarrier:
    """State of one mbarrier. `phase` counts completed phases."""

    def __init__(self, address: int, count: int, line: int, warp: int, time: int) -> None:
        self.address, self.count, self.pending = address, count, count
        self.tx = self.phase = 0
        self.line, self.warp, self.time = line, warp, time  # of the init
        self.fenced: int | None = None  # time at which the warp that initialised it ran fence.mbarrier_init
        self.seen: Clock | None = None  # what the arrivals so far have released
        self.released: Clock | None = None  # the same, as of the last completed phase
        self.observed = True  # somebody has seen the last completed phase

    def __str__(self) -> str:
        return f"mbarrier {self.address:#x}"

    def state(self) -> str:
        return f"phase {self.phase}, {self.pending} of {self.count} arrivals pending, tx-count {self.tx}"

    def ready(self, parity: int) -> bool:
        return self.phase & 1 != parity

    def learn(self, clock: Clock | None) -> None:
        if clock is not None:
            self.seen = clock if self.seen is None else np.maximum(self.seen, clock)

    def settle(self, line: int, warp: int) -> None:
        """PTX ISA, Phase completion of the mbarrier object: pending count and tx-count are both zero."""
        if self.pending < 0:
            raise ProtocolError(
                f"{self}: {-self.pending} arrivals more than the {self.count} of its phase {self.phase}",
                line=line,
                warp=warp,
            )
        if abs(self.tx) > TX_LIMIT:
            raise ProtocolError(f"{self}: tx-count {self.tx} is out of range (±{TX_LIMIT})", line=line, warp=warp)
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.count
            self.released = self.seen
            self.observed = False


class NamedBarrier:
    """One of the CTA's 16 barriers."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.threads = 0  # what the arrivals of this generation ask for
        self.line = 0  # of the first of them
        self.arrived: dict[int, int] = {}  # warps of this generation, and their lines
        self.generation = 0
        self.seen: Clock | None = None
        self.waiting: list[Warp] = []

    def __str__(self) -> str:
        return f"barrier {self.index}"


class MbarrierWait:
    """A warp waits for a phase."""

    def __init__(self, barrier: Mbarrier, parity: int) -> None:
        self.barrier, self.parity = barrier, parity

    def ready(self) -> bool:
        return self.barrier.phase & 1 != self.parity

    def __str__(self) -> str:
        return f"waits for parity {self.parity} of {self.barrier} ({self.barrier.state()})"


class MbarrierLook(MbarrierWait):
    """A warp looked, the phase is not complete, and it goes on: others get a turn first."""

    def ready(self) -> bool:
        return True

    def __str__(self) -> str:
        return f"can go on; has looked for parity {self.parity} of {self.barrier} ({self.barrier.state()})"


class NamedWait:
    """A warp waits for a named barrier."""

    def __init__(self, barrier: NamedBarrier) -> None:
        self.barrier, self.generation = barrier, barrier.generation

    def ready(self) -> bool:
        return self.barrier.generation != self.generation

    def __str__(self) -> str:
        here = sorted(self.barrier.arrived)
        return f"waits at {self.barrier} ({32 * len(here)} of {self.barrier.threads} threads arrived: warps {here})"


class Barriers:
    """The part of the CTA that keeps barriers."""

    shared: SharedMemory
    judge: Judge | None
    isa: bool
    warps: list[Warp]
    changes: int

    def __init__(self) -> None:
        self.barriers: dict[int, Mbarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.waits: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])  # name -> waits, times one was blocked

    # ---- named barriers ----
    def bar(self, w: Warp, index: int, threads: int | None, wait: bool) -> None:
        """barrier.sync (`wait`) or barrier.arrive.

        PTX ISA, bar: the count is a multiple of the warp size and the same for all, and a warp takes part once.
        """
        everyone = 32 * len(self.warps)
        threads = everyone if threads is None else threads
        if not 0 <= index < 16:
            raise ProtocolError(f"barrier {index}: there are 16", line=w.at, warp=w.index)
        if threads <= 0 or threads % 32 or threads > everyone:
            raise ProtocolError(
                f"barrier {index} for {threads} threads: must be a multiple of 32, up to {everyone}",
                line=w.at,
                warp=w.index,
            )
        barrier = self.named.get(index)
        if barrier is None:
            barrier = self.named[index] = NamedBarrier(index)
        if not barrier.arrived:
            barrier.threads, barrier.line = threads, w.at
        elif barrier.threads != threads:
            raise ProtocolError(
                f"{barrier} for {threads} threads, but warps {sorted(barrier.arrived)} are at it for {barrier.threads}",
                line=w.at,
                warp=w.index,
                other=barrier.line,
            )
        if w.index in barrier.arrived:
            raise ProtocolError(
                f"warp {w.index} arrives at {barrier} again before all others have",
                line=w.at,
                warp=w.index,
                other=barrier.arrived[w.index],
            )
        barrier.arrived[w.index] = w.at
        self.changes += 1
        if self.judge is not None:
            clock = self.judge.release(w.index)
            barrier.seen = clock if barrier.seen is None else np.maximum(barrier.seen, clock)
        statistics = self.waits[str(barrier)] if wait else None
        if statistics is not None:
            statistics[0] += 1
        if 32 * len(barrier.arrived) == threads:
            if wait:
                barrier.waiting.append(w)
            if self.judge is not None and barrier.seen is not None:
                for one in barrier.waiting:
                    self.judge.acquire(one.index, barrier.seen)
            barrier.generation += 1
            barrier.arrived, barrier.waiting, barrier.seen = {}, [], None
        elif wait:
            w.wait = NamedWait(barrier)
            barrier.waiting.append(w)
            assert statistics is not None
            statistics[1] += 1

    def whole_barrier(self, w: Warp, mask: Mask | None) -> None:
        """For barrier.sync and arrive without .aligned, which some lanes of a warp may run before the others."""
        if mask is not None and not mask.all():
            raise UnknownInstruction(
                f"barrier by {int(mask.sum())} lanes of a warp: it may be right, and is modelled for whole warps",
                line=w.at,
                warp=w.index,
            )

    def settled(self) -> None:
        """At the end of the CTA. Raises ProtocolError if others were expected at a barrier, or bytes were not expected.

        Bytes that were expected and never asked for are not a fault: NVIDIA's pipelines end that way (producer_tail).
        """
        for named in self.named.values():
            if named.arrived:
                raise ProtocolError(
                    f"the CTA ends, and only warps {sorted(named.arrived)} have come to {named} "
                    f"for {named.threads} threads",
                    line=named.line,
                    warp=min(named.arrived),
                )
        for barrier in self.barriers.values():
            if barrier.tx < 0:
                raise ProtocolError(
                    f"the CTA ends, and {barrier} got {-barrier.tx} bytes that nobody expected (phase {barrier.phase})",
                    line=barrier.line,
                    warp=barrier.warp,
                )

    # ---- mbarriers ----
    def mbarrier_init(self, w: Warp, address: int, count: int) -> None:
        address = self._mbarrier_address(address, "mbarrier.init", w)
        if address in self.barriers:
            raise ProtocolError(
                f"mbarrier.init of the live mbarrier at {address:#x}; it needs mbarrier.inval first",
                line=w.at,
                warp=w.index,
                other=self.barriers[address].line,
            )
        if not 1 <= count <= COUNT_LIMIT:
            raise ProtocolError(f"mbarrier.init with count {count}: 1 to {COUNT_LIMIT}", line=w.at, warp=w.index)
        time = 0
        if self.judge is not None:
            time = self.judge.now(w.index)
            self.judge.write_shared(w.index, slice(address // 4, address // 4 + 2), w.at)
        self.barriers[address] = Mbarrier(address, count, w.at, w.index, time)
        self.changes += 1
        self.shared.claim(address)

    def mbarrier_inval(self, w: Warp, address: int) -> None:
        barrier = self.mbarrier(address, "mbarrier.inval", w.at, w.index)
        self._use(barrier, w)
        del self.barriers[barrier.address]
        self.changes += 1
        self.shared.release(barrier.address)

    def _mbarrier_address(self, address: int, what: str, w: Warp) -> int:
        if address % 8:
            raise BoundsError(f"{what} at {address:#x}: not a multiple of 8", line=w.at, warp=w.index)
        if address < SHARED_BASE or address + 8 > self.shared.end:
            raise BoundsError(f"{what} at {address:#x}: outside of shared memory", line=w.at, warp=w.index)
        return address

    def mbarrier(self, address: int, what: str, line: int, warp: int) -> Mbarrier:
        barrier = self.barriers.get(address)
        if barrier is None:
            if address >> 32:
                raise BoundsError(f"{what} at {address:#x}: outside of shared memory", line=line, warp=warp)
            raise ProtocolError(f"{what} at {address:#x}: no mbarrier was initialised there", line=line, warp=warp)
        return barrier

    def _use(self, barrier: Mbarrier, w: Warp) -> None:
        """mbarrier.init is a write that must happen before every other warp's use."""
        if self.judge is not None and not self.judge.knows(w.index, barrier.warp, barrier.time):
            raise RaceError(
                f"warp {w.index} uses {barrier}, which warp {barrier.warp} initialised, with no wait between",
                line=w.at,
                warp=w.index,
                other=barrier.line,
            )

    def _use_async(self, address: int, what: str, w: Warp) -> Mbarrier:
        """The mbarrier that an asynchronous operation of the warp will report to.

        The asynchronous proxy sees an init only behind fence.mbarrier_init or fence.proxy.async (PTX ISA, membar).
        """
        barrier = self.mbarrier(address, what, w.at, w.index)
        if self.judge is None:
            return barrier
        self._use(barrier, w)
        known, fenced = (int(self.judge.clock[w.index, row, barrier.warp]) for row in (KNOWN, FENCED))
        if fenced < barrier.time and (barrier.fenced is None or known < barrier.fenced):
            raise RaceError(
                f"{what} of warp {w.index} reports to {barrier}, which warp {barrier.warp} initialised, "
                "with no fence.mbarrier_init or fence.proxy.async between",
                line=w.at,
                warp=w.index,
                other=barrier.line,
            )
        return barrier

    def _report(self, barrier: Mbarrier, action: Action, count: int, size: int, clock: Clock | None) -> None:
        """An asynchronous operation is complete: `count` arrivals (commit) or `size` bytes (bulk load)."""
        if self.barriers.get(barrier.address) is not barrier:
            raise ProtocolError(
                f"{action.what} reports to {barrier}, invalidated by now", line=action.line, warp=action.warp
            )
        self._arrive(barrier, clock, count, -size, action.line, action.warp)

    def fence_mbarrier_init(self, w: Warp) -> None:
        """fence.mbarrier_init.release.cluster: the warp's own inits become visible to the asynchronous proxy."""
        if self.judge is not None:
            for barrier in self.barriers.values():
                if barrier.warp == w.index and barrier.fenced is None:
                    barrier.fenced = self.judge.now(w.index)

    def arrive(self, w: Warp, addresses: int | list[int], count: int, expect: int = 0) -> None:
        """mbarrier.arrive, with `expect` bytes more to come (.expect_tx); at each of several addresses."""
        clock = self.judge.release(w.index) if self.judge is not None else None
        for address in [addresses] if isinstance(addresses, int) else addresses:
            barrier = self.mbarrier(address, "mbarrier.arrive", w.at, w.index)
            self._use(barrier, w)
            self._arrive(barrier, clock, count, expect, w.at, w.index)

    def _arrive(self, barrier: Mbarrier, clock: Clock | None, count: int, expect: int, line: int, warp: int) -> None:
        if self.isa and not barrier.observed and count:
            # PTX ISA, Phase of the mbarrier object: a test_wait or try_wait must return true before the next arrive-on.
            raise ProtocolError(
                f"arrival at {barrier} in phase {barrier.phase}: nobody has waited for phase {barrier.phase - 1}",
                line=line,
                warp=warp,
            )
        self.changes += 1
        barrier.learn(clock)
        barrier.tx += expect
        if abs(barrier.tx) <= TX_LIMIT:
            barrier.pending -= count
        barrier.settle(line, warp)

    def expect_tx(self, w: Warp, address: int, size: int) -> None:
        barrier = self.mbarrier(address, "mbarrier.expect_tx", w.at, w.index)
        self._use(barrier, w)
        self.changes += 1
        barrier.tx += size
        barrier.settle(w.at, w.index)

    def try_wait(self, w: Warp, address: int, parity: int, loops: bool) -> bool:
        """Whether the phase of this parity is complete. If not, and the kernel loops on it, the warp sleeps.

        PTX ISA, mbarrier.test_wait: valid values of phaseParity are 0 and 1.
        """
        barrier = self.mbarrier(address, "mbarrier.try_wait", w.at, w.index)
        self._use(barrier, w)
        if parity not in (0, 1):
            raise ProtocolError(f"parity {parity} of {barrier}: it can be 0 or 1", line=w.at, warp=w.index)
        statistics = self.waits[str(barrier)]
        if barrier.phase & 1 != parity:
            statistics[0] += 1
            barrier.observed = True
            if self.judge is not None and barrier.released is not None:
                self.judge.acquire(w.index, barrier.released)
            return True
        if loops:
            statistics[1] += 1
            w.wait = MbarrierWait(barrier, parity)
        else:
            w.wait = MbarrierLook(barrier, parity)
        return False

    def test_wait(self, w: Warp, address: int, parity: int, loops: bool = False) -> bool:
        return self.try_wait(w, address, parity, loops)
