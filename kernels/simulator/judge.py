"""Happens-before between everything that touches shared and tensor memory (vector clocks).

Agents are what can act on its own: each warp; the tensor pipe; per warp its tcgen05.st, its tcgen05.ld and its bulk
stores; per mbarrier the bulk loads that report to it. A clock is an int32 matrix [rows, agents]: for every other agent
the number of its latest action that is known to have happened. What "known" grants depends on the row:

KNOWN    Actions whose effects generic accesses see (PTX ISA, Memory Consistency Model, causality order).
FENCED   Of the others' generic writes, those known to lie before a proxy fence that lies before now. An asynchronous
         access may use what a generic write left only through this row (PTX ISA, Memory Consistency Model,
         proxy-preserved base causality order). The fence may stand on the writer's or the reader's side of the path.

With ``isa`` ordering, tensor memory is judged by four further rows (PTX ISA 9.2, 9.7.16.6 Memory Consistency Model
for 5th generation of TensorCore operations), and KNOWN no longer counts for it. A thread has two streams: its tcgen05
operations, and its ordering operations (barriers, mbarriers).

DONE     Actions on tensor memory complete before the thread's next tcgen05 operation.
ISSUED   The same, and also those that were only issued before it, which is enough for pipelined pairs.
DONE_HEARD, ISSUED_HEARD
         The same for the thread's next ordering operation: what an arrival passes on and a wait receives.

So tcgen05.wait::ld and wait::st move the thread's own loads or stores into DONE; tcgen05.fence::before_thread_sync
moves DONE and ISSUED into the heard rows; tcgen05.fence::after_thread_sync moves the heard rows back (9.7.16.6.3);
tcgen05.commit makes its mbarrier release every earlier tcgen05.mma and cp of the thread straight into the heard rows,
because it performs the before fence itself (9.7.16.6.4.2). Two pairs are granted by ISSUED alone (9.7.16.6.2): cp
before mma, and mma before mma of the same accumulator, shape and kind; every other pair needs DONE. tcgen05.ld has read
tensor memory only at wait::ld, although its registers may be used at once (9.7.16.6.4.5, true register dependencies).
Operands that tcgen05.mma and cp read from shared memory are judged by KNOWN and FENCED in both orderings: the fences of
9.7.16.6.3 order tcgen05 operations with each other.

A generic read before an asynchronous write needs no proxy fence in either ordering: NVIDIA's kernels have none there.

With ``pipe`` ordering, tcgen05.mma and cp are one agent that acts in issue order in both directions, tcgen05.ld reads
at issue, tcgen05.fence grants and demands nothing, and an asynchronous *write* needs no proxy fence after a generic
one. That is what NVIDIA's own kernels rely on.

Granules are 4 bytes of shared memory and one column of one quarter (32 lanes) of tensor memory. Lanes of one warp are
one agent: what goes wrong between them inside of a warp is not seen. Global memory is not judged.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from wanfp4.simulator.findings import RaceError, SimulationError

KNOWN, FENCED, DONE, DONE_HEARD, ISSUED, ISSUED_HEARD = range(6)
OWN_ROWS = (DONE, ISSUED)  # a thread's own: arrivals do not pass them on
CAPACITY = 256  # mbarriers that receive bulk loads, and streams of tcgen05.mma with "isa" ordering

Clock: TypeAlias = NDArray[np.int32]
Where: TypeAlias = slice | NDArray[np.int64]


class Action:
    """One asynchronous operation: what it is, where it was issued, and what lies before it.

    The vectors say for every agent which of its actions lies before this one: `known` by the causality order alone,
    `shared_read` and `shared_write` for accesses of shared memory, `tensor` for those of tensor memory, `heard` what a
    tcgen05.fence::after_thread_sync would add. `after` is the clock that completion releases. Without tracking only
    `what`, `line` and `warp` are set.
    """

    __slots__ = (
        "after", "agent", "heard", "known", "line", "shared_read", "shared_write", "tensor", "time", "warp", "what"
    )  # fmt: skip

    def __init__(self, what: str, line: int, warp: int) -> None:
        self.what, self.line, self.warp = what, line, warp
        self.agent = self.time = 0
        self.known: Clock
        self.shared_read: Clock
        self.shared_write: Clock
        self.tensor: Clock
        self.heard: Clock | None = None
        self.after: Clock | None = None


class Shadow:
    """Who last wrote and read each granule of one memory."""

    def __init__(self, judge: Judge, granules: int, tensor: bool) -> None:
        self.judge, self.tensor = judge, tensor
        self.writer = np.zeros(granules, np.int32)
        self.written = np.zeros(granules, np.int32)
        self.line = np.zeros(granules, np.int32)
        self.slots: dict[int, int] = {}  # agents that read -> rows of the two matrices
        self.readers = np.zeros((0, 1), np.int32)
        self.times = np.zeros((4, granules), np.int32)
        self.lines = np.zeros((4, granules), np.int32)

    def read(
        self, agent: int, time: int, known: Clock, where: Where, line: int, warp: int, action: Action | None = None
    ) -> None:
        late = known[self.writer[where]] < self.written[where]
        if late.any():
            self._late_write("reads", late, agent, time, where, line, warp, action)
        slot = self.slots.get(agent)
        if slot is None:
            slot = self._slot(agent)
        self.times[slot, where] = time
        self.lines[slot, where] = line

    def write(
        self,
        agent: int,
        time: int,
        known: Clock,
        where: Where,
        line: int,
        warp: int,
        action: Action | None = None,
        reads: Clock | None = None,
    ) -> None:
        """`reads` is the vector for the reads before it, where it is another than the one for the writes (`known`)."""
        late = known[self.writer[where]] < self.written[where]
        if late.any():
            self._late_write("overwrites", late, agent, time, where, line, warp, action)
        readers = len(self.readers)
        if readers:
            order = (known if reads is None else reads)[self.readers]
            seen = self.times[:readers, where] > order
            if seen.any():
                self._late_read(seen, agent, time, where, line, warp, action)
        self.writer[where] = agent
        self.written[where] = time
        self.line[where] = line

    def forget(self, where: Where) -> None:
        self.written[where] = 0
        self.times[:, where] = 0

    def place(self, granule: int) -> str:
        if not self.tensor:
            return f"shared memory {4 * granule:#x}"
        lane = granule // 512 * 32
        return f"tensor memory column {granule % 512} of lanes {lane}-{lane + 31}"

    def _slot(self, agent: int) -> int:
        slot = self.slots[agent] = len(self.slots)
        self.readers = np.append(self.readers, np.int32(agent)).reshape(-1, 1)
        if slot == len(self.times):
            self.times = np.concatenate([self.times, np.zeros_like(self.times)])
            self.lines = np.concatenate([self.lines, np.zeros_like(self.lines)])
        return slot

    def _late_write(
        self,
        verb: str,
        late: NDArray[np.bool_],
        agent: int,
        time: int,
        where: Where,
        line: int,
        warp: int,
        action: Action | None,
    ) -> None:
        late = late & ~((self.writer[where] == agent) & (self.written[where] == time))  # by this very action
        if late.any():
            granule = _granule(where, int(late.argmax()))
            other, when, at = int(self.writer[granule]), int(self.written[granule]), int(self.line[granule])
            self._race(f"{verb} {self.place(granule)}", "wrote", agent, line, warp, other, when, at, action)

    def _late_read(
        self,
        seen: NDArray[np.bool_],
        agent: int,
        time: int,
        where: Where,
        line: int,
        warp: int,
        action: Action | None,
    ) -> None:
        own = self.slots.get(agent)
        if own is not None:
            seen[own] &= self.times[own, where] != time
        if seen.any():
            slot, first = (int(i) for i in np.argwhere(seen)[0])
            granule, other = _granule(where, first), int(self.readers[slot, 0])
            when, at = int(self.times[slot, granule]), int(self.lines[slot, granule])
            self._race(f"overwrites {self.place(granule)}", "reads", agent, line, warp, other, when, at, action)

    def _race(
        self,
        does: str,
        did: str,
        agent: int,
        line: int,
        warp: int,
        other: int,
        when: int,
        at: int,
        action: Action | None,
    ) -> None:
        names, missing = self.judge.names, self.judge.missing(warp, other, when, self.tensor, action)
        raise RaceError(
            f"{names[agent]} {does}, which {names[other]} {did}, with {missing} between", line=line, warp=warp, other=at
        )


def _granule(where: Where, index: int) -> int:
    return int(where[index]) if isinstance(where, np.ndarray) else int(where.start or 0) + index


class Judge:
    """The clocks of all agents of one CTA, and the shadows of its memories."""

    def __init__(self, warps: int, shared_bytes: int, isa: bool) -> None:
        self.warps, self.isa = warps, isa
        each = range(warps)
        self.names = [f"warp {i}" for i in each]
        self.pipe = self._add(["the tensor pipe"])
        self.copies = self._add([f"tcgen05.cp of warp {i}" for i in each])  # "isa" only
        self.st = self._add([f"tcgen05.st of warp {i}" for i in each])
        self.ld = self._add([f"tcgen05.ld of warp {i}" for i in each])  # "isa" only
        self.bulk = self._add([f"the bulk stores of warp {i}" for i in each])
        self.rows = 6 if isa else 2
        self.total = len(self.names) + CAPACITY
        self.clock = np.zeros((self.total, self.rows, self.total), np.int32)
        for warp in each:
            self.clock[warp, KNOWN, warp] = 1
        self.last = np.zeros(self.total, np.int32)  # lines of the agents' last actions
        self.extra: dict[object, int] = {}
        self.streams: list[list[int]] = [[self.copies + i] for i in each]  # tcgen05.mma and cp agents of each warp
        self.stream_key: dict[int, object] = {}
        self.shared = Shadow(self, (shared_bytes + 3) // 4, tensor=False)
        self.tensor = Shadow(self, 4 * 512, tensor=True)

    def _add(self, names: list[str]) -> int:
        first = len(self.names)
        self.names += names
        return first

    def _agent(self, key: object, name: str) -> int:
        agent = self.extra.get(key)
        if agent is None:
            if len(self.names) == self.total:
                raise SimulationError(
                    f"more than {CAPACITY} mbarriers and MMA streams: the judge has no room for {name}"
                )
            agent = self.extra[key] = self._add([name])
        return agent

    # ---- what a warp does itself ----
    def release(self, warp: int) -> Clock:
        """What an arrival of the warp passes on."""
        clock: Clock = self.clock[warp].copy()
        if self.isa:
            clock[DONE] = clock[ISSUED] = 0
        self.clock[warp, KNOWN, warp] += 1
        return clock

    def acquire(self, warp: int, clock: Clock) -> None:
        np.maximum(self.clock[warp], clock, out=self.clock[warp])

    def now(self, warp: int) -> int:
        return int(self.clock[warp, KNOWN, warp])

    def knows(self, warp: int, agent: int, time: int) -> bool:
        return bool(self.clock[warp, KNOWN, agent] >= time)

    def fence_proxy(self, warp: int) -> None:
        """PTX ISA, fence.proxy.async: generic accesses before it and asynchronous ones after it see each other."""
        mine = self.clock[warp]
        np.maximum(mine[FENCED], mine[KNOWN], out=mine[FENCED])
        mine[KNOWN, warp] += 1

    def fence_before(self, warp: int) -> None:
        """tcgen05.fence::before_thread_sync."""
        if self.isa:
            mine = self.clock[warp]
            np.maximum(mine[DONE_HEARD], mine[DONE], out=mine[DONE_HEARD])
            np.maximum(mine[ISSUED_HEARD], mine[ISSUED], out=mine[ISSUED_HEARD])

    def fence_after(self, warp: int) -> None:
        """tcgen05.fence::after_thread_sync."""
        if self.isa:
            mine = self.clock[warp]
            np.maximum(mine[DONE], mine[DONE_HEARD], out=mine[DONE])
            np.maximum(mine[ISSUED], mine[ISSUED_HEARD], out=mine[ISSUED])

    def read_shared(self, warp: int, where: Where, line: int) -> None:
        known = self.clock[warp, KNOWN]
        self.shared.read(warp, int(known[warp]), known, where, line, warp)

    def write_shared(self, warp: int, where: Where, line: int) -> None:
        known = self.clock[warp, KNOWN]
        self.shared.write(warp, int(known[warp]), known, where, line, warp)

    # ---- asynchronous actions ----
    def load(self, warp: int, line: int, barrier: int, what: str) -> Action:
        """A bulk copy to shared memory that reports to an mbarrier."""
        agent = self._agent(barrier, f"the bulk loads that report to mbarrier {barrier:#x}")
        return self._issue(Action(what, line, warp), agent, self.clock[warp])

    def store(self, warp: int, line: int, what: str) -> Action:
        """A bulk copy from shared memory."""
        return self._issue(Action(what, line, warp), self.bulk + warp, self.clock[warp])

    def tensor_store(self, warp: int, line: int) -> Action:
        return self._issue(Action("tcgen05.st", line, warp), self.st + warp, self.clock[warp])

    def tensor_load(self, warp: int, line: int) -> Action:
        """tcgen05.ld: with "pipe" ordering the warp's own read."""
        if self.isa:
            return self._issue(Action("tcgen05.ld", line, warp), self.ld + warp, self.clock[warp])
        action = Action("tcgen05.ld", line, warp)
        action.agent, action.tensor = warp, self.clock[warp, KNOWN]
        action.time = int(action.tensor[warp])
        return action

    def tensor_pipe(self, warp: int, line: int, what: str, stream: object = None) -> Action:
        """tcgen05.mma (`stream` names its accumulator, shape and kind) or tcgen05.cp (`stream` None)."""
        if not self.isa:
            return self._issue(Action(what, line, warp), self.pipe, self.clock[warp])
        if stream is None:
            agent = self.copies + warp
        else:
            agent = self._agent((warp, stream), f"tcgen05.mma of warp {warp} ({stream})")
            if agent not in self.stream_key:
                self.stream_key[agent] = stream
                self.streams[warp].append(agent)
        return self._issue(Action(what, line, warp), agent, self.clock[warp], stream)

    def _issue(self, action: Action, agent: int, issuer: Clock, stream: object = None) -> Action:
        """Number the action and fix what lies before it.

        Waits cover a prefix of an agent's actions, so numbers follow the order of issue, whenever they are performed.
        """
        mine = self.clock[agent]
        np.maximum(mine, issuer, out=mine)
        time = int(mine[KNOWN, agent]) + 1
        mine[KNOWN, agent] = time
        in_order = not self.isa and (agent == self.pipe or self.st <= agent < self.ld)
        before = mine if in_order else issuer
        known, fenced = before[KNOWN].copy(), before[FENCED].copy()
        fenced[self.warps :] = known[self.warps :]  # only warps write through the generic proxy
        action.agent, action.time, action.known, action.tensor = agent, time, known, known
        action.shared_read, action.shared_write = fenced, fenced if self.isa else known
        if self.isa and (self.copies <= agent < self.bulk or agent in self.stream_key):
            granted = issuer[DONE].copy()
            if stream is not None:
                pairs = [*range(self.copies, self.st), *(a for a, key in self.stream_key.items() if key == stream)]
                granted[pairs] = np.maximum(granted[pairs], issuer[ISSUED][pairs])
            action.tensor, action.heard = granted, issuer[DONE_HEARD].copy()
            np.maximum(mine[DONE], granted, out=mine[DONE])
            mine[DONE, agent] = time
            issuer[ISSUED, agent] = time
        self.last[agent] = action.line
        action.after = mine.copy()
        if self.isa:
            action.after[DONE] = action.after[ISSUED] = 0
        self.clock[action.warp, KNOWN, action.warp] += 1  # what the warp does from here on does not lie before it
        return action

    def commit(self, warp: int) -> Clock:
        """What the arrival that tcgen05.commit asks for will release."""
        if not self.isa:
            mine = self.clock[self.pipe]
            np.maximum(mine, self.clock[warp], out=mine)
            self.clock[warp, KNOWN, warp] += 1
            done: Clock = mine.copy()
            return done
        done = self.clock[self.streams[warp]].max(0)
        np.maximum(done[DONE_HEARD], done[DONE], out=done[DONE_HEARD])
        np.maximum(done[ISSUED_HEARD], done[DONE], out=done[ISSUED_HEARD])
        done[DONE] = done[ISSUED] = 0
        return done

    def wait_own(self, warp: int, first: int) -> None:
        """tcgen05.wait::st (`first` is self.st) or wait::ld (self.ld): the warp's own are complete."""
        theirs = self.clock[first + warp]
        if not self.isa:
            self.acquire(warp, theirs)
            return
        mine = self.clock[warp]
        for row in OWN_ROWS:
            np.maximum(mine[row], theirs[DONE], out=mine[row])

    def dealloc(self, warp: int, where: Where, line: int) -> None:
        """tcgen05.dealloc must come after every access to the columns it gives up."""
        known = self.clock[warp, KNOWN]
        if self.isa:
            known = np.maximum(self.clock[warp, DONE], self.clock[warp, DONE_HEARD])
        self.tensor.write(warp, self.now(warp), known, where, line, warp)
        self.tensor.forget(where)

    def read(self, action: Action, shadow: Shadow, where: Where) -> None:
        known = action.tensor if shadow.tensor else action.shared_read
        shadow.read(action.agent, action.time, known, where, action.line, action.warp, action)

    def write(self, action: Action, shadow: Shadow, where: Where) -> None:
        known, reads = (action.tensor, None) if shadow.tensor else (action.shared_write, action.known)
        shadow.write(action.agent, action.time, known, where, action.line, action.warp, action, reads)

    def unobserved(self) -> list[tuple[str, int]]:
        """Agents whose last asynchronous access of shared memory no warp knows to be complete, and its line."""
        agents = [*range(self.pipe, self.st), *range(self.bulk, self.bulk + self.warps), *self.extra.values()]
        known = self.clock[: self.warps, KNOWN].max(0)
        return [(self.names[a], int(self.last[a])) for a in agents if self.clock[a, KNOWN, a] > known[a]]

    def missing(self, warp: int, other: int, when: int, tensor: bool, action: Action | None) -> str:
        """In words: what does not stand between action `when` of `other` and this one."""
        if action is not None and tensor and action.heard is not None:
            if action.heard[other] >= when:
                return "no tcgen05.fence::after_thread_sync"
            if self.clock[warp, ISSUED, other] >= when:
                return "no wait for its completion"
        elif action is not None and not tensor and action.known[other] >= when:
            return "no fence.proxy.async"
        return "no wait"
