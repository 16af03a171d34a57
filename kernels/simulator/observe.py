"""What the synchronisations of a launch tell its warps: the evidence for the reasons that `mutate` gives.

Every access of shared or tensor memory has an agent and a time (`judge`). A synchronisation tells a warp of an access
when the warp's clock covers it afterwards and did not before. `mute` holds that back for one PTX line, in an otherwise
unchanged run, and keeps its own account of whether later accesses of the same places are ordered all the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wanfp4.simulator.barriers import Mbarrier
from wanfp4.simulator.judge import FENCED, KNOWN, Clock, Judge, Shadow, Where
from wanfp4.simulator.machine import CTA
from wanfp4.simulator.scheduler import Warp

Run: TypeAlias = tuple[int, int]  # number of the seed, number of the CTA


class Notes:
    """Of all runs of an experiment, by PTX line."""

    def __init__(self) -> None:
        self.told: set[int] = set()  # told a warp of an access that it did not know of
        self.again: set[int] = set()  # told of an access to what somebody accessed later
        self.later: set[int] = set()  # waits that met a barrier whose first phase was complete
        self.waited: dict[tuple[Run, int], int] = {}  # (run, mbarrier) -> phases that warps have waited for
        self.arrived: defaultdict[int, set[tuple[Run, int, int]]] = defaultdict(set)  # line -> run, mbarrier, phase
        self.unordered: set[int] = set()  # lines of accesses that only the muted line orders


@dataclass(frozen=True)
class Access:
    """Where an access was, and what it was."""

    shadow: WatchedShadow
    where: Where
    write: bool


class Accesses:
    """All accesses so far, by agent and time."""

    def __init__(self) -> None:
        self.places: defaultdict[int, defaultdict[int, list[Access]]] = defaultdict(lambda: defaultdict(list))
        self.count = 0
        self.unordered: set[int] = set()  # lines of accesses that are not ordered after one of those


class WatchedShadow(Shadow):
    """A shadow that also keeps which accesses there were."""

    def __init__(self, judge: Judge, old: Shadow, accesses: Accesses) -> None:
        super().__init__(judge, len(old.writer), old.tensor)
        self.accesses = accesses
        self.latest: NDArray[np.float64] = np.zeros(len(old.writer))  # number of the latest access of each granule
        self.held: dict[tuple[int, bool], Clock] = {}  # agent, write? -> per granule, the last time that is held back

    def read(self, agent: int, time: int, known: Clock, where: Where, line: int, *rest: Any, **more: Any) -> None:
        self._check(agent, known, None, where, line)
        super().read(agent, time, known, where, line, *rest, **more)
        self._access(agent, time, where, False)

    def write(
        self,
        agent: int,
        time: int,
        known: Clock,
        where: Where,
        line: int,
        warp: int,
        action: Any = None,
        reads: Clock | None = None,
    ) -> None:
        self._check(agent, known, known if reads is None else reads, where, line)
        super().write(agent, time, known, where, line, warp, action, reads)
        self._access(agent, time, where, True)

    def _access(self, agent: int, time: int, where: Where, write: bool) -> None:
        self.accesses.places[agent][time].append(Access(self, where, write))
        self.accesses.count += 1
        self.latest[where] = self.accesses.count

    def _check(self, agent: int, after_write: Clock, after_read: Clock | None, where: Where, line: int) -> None:
        """Whether an access is ordered after those that are held back. Two reads need no order."""
        for (other, write), times in self.held.items():
            known = after_write if write else after_read
            if other != agent and known is not None and (times[where] > known[other]).any():
                self.accesses.unordered.add(line)

    def hold(self, agent: int, time: int, where: Where, write: bool) -> None:
        """An access that the muted line was to tell of."""
        times = self.held.setdefault((agent, write), np.zeros(len(self.latest), np.int32))
        times[where] = np.maximum(times[where], time)


class Observed(CTA):
    """A CTA that notes what its synchronisations tell its warps; those of line `mute` tell nothing."""

    def __init__(self, *rest: Any, notes: Notes, key: Run, mute: int | None = None, **more: Any) -> None:
        super().__init__(*rest, **more)
        assert self.judge is not None
        self.notes, self.key, self.mute, self.clocks = notes, key, mute, self.judge.clock
        self.accesses = Accesses()
        self.judge.shared = WatchedShadow(self.judge, self.judge.shared, self.accesses)
        self.judge.tensor = WatchedShadow(self.judge, self.judge.tensor, self.accesses)
        self.came: dict[tuple[int, int], Clock] = {}  # (barrier, warp) -> the warp's clock when it came
        self.told: dict[tuple[int, int, int], int] = {}  # line, agent, time of an access -> accesses until then

    def run(self) -> None:
        super().run()
        for (line, agent, time), count in self.told.items():
            if any((one.shadow.latest[one.where] > count).any() for one in self.accesses.places[agent][time]):
                self.notes.again.add(line)
        self.notes.unordered |= self.accesses.unordered

    def _note(self, line: int, warp: int, before: Clock) -> bool:
        """Whether a warp knows of more accesses than `before`; then the line has told it."""
        after, told = self.clocks[warp], False
        for row, agent in np.argwhere(after > before).tolist():
            if (row == FENCED and agent >= len(self.warps)) or (row == KNOWN and agent == warp):
                continue  # only warps access generically; a warp knows of itself
            low, high = int(before[row, agent]), int(after[row, agent])
            for time, places in self.accesses.places[agent].items():
                if low < time <= high and (row != FENCED or any(one.write for one in places)):
                    told = True
                    self.told.setdefault((line, agent, time), self.accesses.count)
                    for one in places if line == self.mute else ():
                        one.shadow.hold(agent, time, one.where, one.write)
        if told:
            self.notes.told.add(line)
        if line == self.mute:
            own = int(after[KNOWN, warp])  # its own time goes on
            after[:] = before
            after[KNOWN, warp] = own
        return told

    def _noted(self, w: Warp, call: Callable[[], None]) -> None:
        before = self.clocks[w.index].copy()
        call()
        self._note(w.at, w.index, before)

    # ---- barriers ----
    def bar(self, w: Warp, index: int, threads: int | None, wait: bool) -> None:
        self.came[index, w.index] = self.clocks[w.index].copy()
        old = self.named.get(index)
        generation = old.generation if old is not None else 0
        lines = {*old.arrived.values(), w.at} if old is not None else {w.at}
        waiting = [*(old.waiting if old is not None else ()), *([w] if wait else [])]
        super().bar(w, index, threads, wait)
        if self.named[index].generation != generation:
            for one in waiting:
                if self._note(one.at, one.index, self.came[index, one.index]):
                    self.notes.told |= lines

    def mbarrier_init(self, w: Warp, address: int, count: int) -> None:
        super().mbarrier_init(w, address, count)
        time = int(self.clocks[w.index, KNOWN, w.index])
        for one in self.accesses.places[w.index][time][-1:]:
            one.shadow.latest[one.where] = np.inf  # every use of the mbarrier

    def try_wait(self, w: Warp, address: int, parity: int, loops: bool) -> bool:
        before = self.clocks[w.index].copy()
        passed = super().try_wait(w, address, parity, loops)
        barrier = self.barriers[address & 0xFFFFFFFF]
        if passed and barrier.phase:
            self.notes.later.add(w.at)
            mine = (self.key, barrier.address)
            self.notes.waited[mine] = max(self.notes.waited.get(mine, 0), barrier.phase)
            self._note(w.at, w.index, before)
        return passed

    def _arrive(self, barrier: Mbarrier, clock: Clock | None, count: int, expect: int, line: int, warp: int) -> None:
        self.notes.arrived[line].add((self.key, barrier.address, barrier.phase))
        super()._arrive(barrier, clock, count, expect, line, warp)

    def fence_mbarrier_init(self, w: Warp) -> None:
        mine = [b for b in self.barriers.values() if b.warp == w.index and b.fenced is None]
        super().fence_mbarrier_init(w)
        if mine:
            self.notes.told.add(w.at)
            self.notes.again.add(w.at)
        if w.at == self.mute:
            for barrier in mine:
                barrier.fenced = None

    # ---- waits and fences of the warp itself ----
    def wait_group(self, w: Warp, left: int, read: bool) -> None:
        self._noted(w, lambda: super(Observed, self).wait_group(w, left, read))

    def wait_st(self, w: Warp) -> None:
        self._noted(w, lambda: super(Observed, self).wait_st(w))

    def wait_ld(self, w: Warp) -> None:
        self._noted(w, lambda: super(Observed, self).wait_ld(w))

    def fence_proxy(self, w: Warp) -> None:
        self._noted(w, lambda: super(Observed, self).fence_proxy(w))

    def fence_before(self, w: Warp) -> None:
        self._noted(w, lambda: super(Observed, self).fence_before(w))

    def fence_after(self, w: Warp) -> None:
        self._noted(w, lambda: super(Observed, self).fence_after(w))
