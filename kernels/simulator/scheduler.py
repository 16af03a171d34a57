"""Warps, and who goes on when.

Without a seed, warps go on in turn, each until it has to wait, and whatever is asynchronous completes at issue. With a
seed, one warp or one piece of asynchronous work is drawn at a time, and everyone's speed is drawn once from four
decades: late completion and lazy warps are what a wrong kernel does not survive.

Nobody can go on: every warp waits, or goes round in a loop. A warp goes round if it comes back to a state that it had,
all its registers the same, while no memory and no barrier changed: it would do so for ever. That is certain, so it is
reported at once. A loop that changes its registers (it counts its looks, or reads a clock) is given up after CALM
blocks in which nothing but registers changed; a `limit` takes the place of that.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wanfp4.simulator.barriers import MbarrierLook, MbarrierWait, NamedWait
from wanfp4.simulator.findings import DeadlockError
from wanfp4.simulator.judge import Action
from wanfp4.simulator.memory import Bytes, Mask

if TYPE_CHECKING:
    from wanfp4.simulator.machine import CTA

FULL: Mask = np.ones(32, np.bool_)
FINISHED, SPLIT = -1, -2  # what a block returns in place of the next block's number
PATIENCE = 4096  # blocks a warp runs before others get a turn, when it never has to wait
IDLE_PATIENCE = 64  # the same, when nothing has changed since its last turn
CALM = 1 << 21  # blocks run by all warps while nothing but registers changes, after which nothing is expected to change
FIRST_ANCHOR = 16  # turns without a change after which a warp's state is kept, to see whether it comes back


class KernelShape(Protocol):
    """What the machine needs of a kernel's declaration."""

    @property
    def threads(self) -> Sequence[int]: ...


class Program(Protocol):
    """Translated code, as the machine runs it.

    Block `i` is `full[i](warp, registers)` for a whole warp and `part[i](warp, registers, mask)` for some of its lanes.
    It returns the next block, FINISHED, or SPLIT after setting `warp.split` to (lanes that branch, their block, the
    others' block). `registers()` gives values and poison of a new warp, `line(i)` a PTX line of block `i`.
    """

    @property
    def full(self) -> Sequence[Callable[..., int]]: ...
    @property
    def part(self) -> Sequence[Callable[..., int]]: ...
    @property
    def sizes(self) -> Sized: ...
    @property
    def static_bytes(self) -> int: ...
    @property
    def kernel(self) -> KernelShape: ...
    def registers(self) -> tuple[list[Any], list[Any]]: ...
    def line(self, index: int, /) -> int: ...


CLOCKS = frozenset(("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"))


class Specials(dict[str, NDArray[np.unsignedinteger[Any]]]):
    """Special registers by name; clocks only ever move on."""

    def __init__(self) -> None:
        super().__init__()
        self.ticks = 0

    def __missing__(self, name: str) -> NDArray[np.unsignedinteger[Any]]:
        if name not in CLOCKS:
            raise KeyError(name)
        self.ticks += 64
        value = self.ticks >> 32 if name.endswith("_hi") else self.ticks
        return np.full(32, value, np.uint64 if name in ("%clock64", "%globaltimer") else np.uint32)


class Watch:
    """A warp while nothing outside of its registers changes: turns it had, and the state it had after one of them."""

    __slots__ = ("changes", "groups", "registers", "rounds", "ticks", "turns")

    def __init__(self, changes: int) -> None:
        self.changes, self.turns, self.ticks, self.rounds = changes, 0, 0, False
        self.groups: dict[int, Mask] | None = None
        self.registers: list[Any] = []

    def look(self, warp: Warp) -> None:
        """After a turn. The state is compared with an older one, which moves on as turns double (Brent's algorithm)."""
        if self.rounds:
            return
        self.turns += 1
        if self.groups is not None and self._same(warp):
            self.rounds = True
        elif self.turns >= FIRST_ANCHOR and not self.turns & (self.turns - 1):
            self.groups, self.registers, self.ticks = dict(warp.groups), list(warp.R), warp.special.ticks

    def _same(self, warp: Warp) -> bool:
        groups = self.groups or {}
        return (
            groups.keys() == warp.groups.keys()
            and self.ticks == warp.special.ticks
            and all((groups[pc] == mask).all() for pc, mask in warp.groups.items())
            # Registers are never written in place; as bytes, for a NaN is the same as itself.
            and all(
                a is b or np.asarray(a).tobytes() == np.asarray(b).tobytes()
                for a, b in zip(self.registers, warp.R, strict=True)
            )
        )


class Warp:
    """One warp: registers `R` and their poison `P`, groups of lanes by the block they are at, and what it waits for."""

    def __init__(self, cta: CTA, index: int) -> None:
        self.cta, self.index = cta, index
        self.R, self.P = cta.code.registers()
        self.groups: dict[int, Mask] = {0: FULL}
        self.wait: MbarrierWait | MbarrierLook | NamedWait | None = None
        self.watch = Watch(-1)
        self.split: tuple[Mask, int, int]
        self.at = 0  # PTX line being executed
        self.hits = [0] * len(cta.code.sizes)
        self.loads: dict[int, int] = {}  # register slots loaded from tensor memory -> line
        self.stores: deque[tuple[Action, Callable[[], None]]] = deque()  # tcgen05.st not performed yet
        self.group = 0  # bulk groups committed so far
        self.register_counts: list[tuple[int, int]] = []  # of setmaxnreg: count, line
        self.special = Specials()
        self.special.update(_specials(index, cta.code.kernel.threads, cta.block, cta.grid))

    def loaded(self, slots: Sequence[int], poison: Bytes | None) -> None:
        """tcgen05.ld has set these registers (PTX ISA, 9.7.16.6.4.5: they may be used at once)."""
        for column, slot in enumerate(slots):
            one = None if poison is None else poison[:, column]
            self.P[slot] = one if one is not None and one.any() else None
            self.loads[slot] = self.at

    def origin(self, slot: int) -> str:
        """For messages: where a register's poison may come from."""
        line = self.loads.get(slot)
        return "" if line is None else f" (last loaded from tensor memory at line {line})"

    def state(self) -> str:
        """For the deadlock report."""
        if not self.groups and self.wait is None:
            return f"warp {self.index}: has ended (line {self.at})"
        lanes = ", ".join(f"block ending at line {self.cta.code.line(pc)}" for pc in sorted(self.groups))
        return f"warp {self.index}: line {self.at}, {self.wait or 'can go on'}" + f" ({lanes})" * (
            len(self.groups) > 1 or not self.wait
        )


def _specials(
    index: int, threads: Sequence[int], block: Sequence[int], grid: Sequence[int]
) -> Iterable[tuple[str, NDArray[np.uint32]]]:
    lane = np.arange(32, dtype=np.uint32)
    tid = 32 * index + lane
    x, y = threads[0], threads[1]
    warps = threads[0] * threads[1] * threads[2] // 32
    yield from (("%tid.x", tid % x), ("%tid.y", tid // x % y), ("%tid.z", tid // (x * y)), ("%laneid", lane))
    one = np.uint32(1)
    bit = one << lane
    yield from (("%lanemask_eq", bit), ("%lanemask_lt", bit - one), ("%lanemask_le", bit | (bit - one)))
    yield from (("%lanemask_gt", ~(bit | (bit - one))), ("%lanemask_ge", ~(bit - one)))
    same = {"%warpid": index, "%nwarpid": warps, "%smid": 0, "%nsmid": 1, "%gridid": 0}
    same |= {"%cluster_ctarank": 0, "%cluster_nctarank": 1, "%is_explicit_cluster": 0}
    for i, axis in enumerate("xyz"):
        same |= {f"%ntid.{axis}": threads[i], f"%ctaid.{axis}": block[i], f"%nctaid.{axis}": grid[i]}
        same |= {f"%cluster_ctaid.{axis}": 0, f"%cluster_nctaid.{axis}": 1}
        same |= {f"%clusterid.{axis}": block[i], f"%nclusterid.{axis}": grid[i]}
    yield from ((name, np.full(32, value, np.uint32)) for name, value in same.items())


SPECIAL = CLOCKS | {name for name, _ in _specials(0, (32, 1, 1), (0, 0, 0), (1, 1, 1))}  # all that are modelled


class Work:
    """Asynchronous work that is under way: what it is, and its steps that are left."""

    __slots__ = ("action", "group", "steps", "warp")

    def __init__(self, action: Action, warp: Warp, group: int, *steps: Callable[[], None]) -> None:
        self.action, self.warp, self.group, self.steps = action, warp, group, deque(steps)

    def step(self) -> bool:
        """Perform one step; True if that was the last."""
        self.steps.popleft()()
        return not self.steps

    def __str__(self) -> str:
        return f"{self.action.what} of warp {self.action.warp}, line {self.action.line}"


class Scheduler:
    """The part of the CTA that lets warps and asynchronous work go on."""

    code: Program
    warps: list[Warp]
    limit: int | None

    def __init__(self, seed: int | None, warps: int) -> None:
        self.random = random.Random(seed) if seed is not None else None
        self.pipe: deque[Work] = deque()  # tcgen05.mma, cp and commit, in order
        self.loads: list[Work] = []  # bulk loads, in any order
        self.stores: list[Work] = []  # bulk stores: read shared memory, then write global memory
        self.budget = PATIENCE
        self.turns = 0
        self.changes = 0  # of memory, barriers and asynchronous work: whatever a warp may be waiting for
        self.blocks = 0  # run by all warps
        self.calm = (0, 0)  # changes, and blocks run until then
        self.speed: dict[Any, float] = {}
        if self.random is not None:
            for who in ("pipe", "load", "store", "st", *range(warps)):
                self.speed[who] = 10.0 ** self.random.uniform(-2, 2)

    def _go(self) -> None:
        """Until every warp has ended and nothing is under way."""
        while True:
            self.turns += 1
            if self.limit is not None and self.turns > self.limit:
                raise self._stuck(f"no end after {self.limit} turns")
            alive = [w for w in self.warps if w.groups or w.wait is not None]
            ready = [w for w in alive if w.wait is None or w.wait.ready()]
            if self.random is None:
                if not alive:
                    return
                if not ready:
                    raise self._stuck("deadlock: no warp can go on")
                for warp in ready:
                    self.budget = PATIENCE if warp.watch.changes != self.changes else IDLE_PATIENCE
                    self.step(warp)
                    self._watch(warp)
                self._moving(ready)
            elif not self._draw(self.random, ready):
                if alive:
                    raise self._stuck("deadlock: no warp can go on")
                return

    def _draw(self, draw: random.Random, ready: list[Warp]) -> bool:
        choices: list[Any] = [w.index for w in ready]
        if self.pipe:
            choices.append("pipe")
        if self.loads:
            choices.append("load")
        if self.stores:
            choices.append("store")
        pending = [w for w in self.warps if w.stores]
        if pending:
            choices.append("st")
        if not choices:
            return False
        what = draw.choices(choices, [self.speed[c] for c in choices])[0]
        if what == "pipe":
            if self.pipe[0].step():
                self.pipe.popleft()
        elif what == "load":
            index = draw.randrange(len(self.loads))
            if self.loads[index].step():
                del self.loads[index]
        elif what == "store":
            index = draw.randrange(len(self.stores))
            if self.stores[index].step():
                del self.stores[index]
        elif what == "st":
            warp = draw.choice(pending)
            index = draw.randrange(len(warp.stores))
            perform = warp.stores[index][1]
            del warp.stores[index]
            perform()
        else:
            self.budget = draw.choice((1, 3, 10, 1000))
            self.step(self.warps[what])
            self._watch(self.warps[what])
            if len(choices) == len(ready):
                self._moving(ready)
        return True

    def _watch(self, warp: Warp) -> None:
        """After a turn of a warp."""
        if warp.watch.changes != self.changes:
            warp.watch = Watch(self.changes)
        else:
            warp.watch.look(warp)

    def _moving(self, ready: list[Warp]) -> None:
        """With no asynchronous work under way. Raises DeadlockError if all these warps, ready a turn ago, go round."""
        changes, blocks = self.calm
        if changes != self.changes:
            self.calm = self.changes, self.blocks
            return
        if all(w.watch.rounds and w.watch.changes == changes and w.groups for w in ready):
            raise self._stuck("deadlock: all warps that can go on are in loops that change nothing")
        if self.limit is None and self.blocks - blocks > CALM:
            raise self._stuck(f"no end: nothing but registers changed over {CALM} blocks")

    def step(self, warp: Warp) -> None:
        """Run a warp until it has to wait, ends, or the budget of blocks is spent. Lanes that are behind go first."""
        warp.wait = None
        groups, registers, hits = warp.groups, warp.R, warp.hits
        full, part = self.code.full, self.code.part
        budget = self.budget
        while groups:
            pc = min(groups) if len(groups) > 1 else next(iter(groups))
            mask = groups.pop(pc)
            hits[pc] += 1
            after = full[pc](warp, registers) if mask is FULL else part[pc](warp, registers, mask)
            if after >= 0:
                if groups:
                    self._join(groups, after, mask)
                else:
                    groups[after] = mask
            elif after == SPLIT:
                taken, target, fall = warp.split
                for block, lanes in ((target, taken), (fall, mask & ~taken)):
                    if block >= 0:
                        self._join(groups, block, lanes)
            budget -= 1
            if warp.wait is not None or budget <= 0:
                break
        self.blocks += self.budget - budget

    @staticmethod
    def _join(groups: dict[int, Mask], pc: int, mask: Mask) -> None:
        if pc in groups:
            mask = groups[pc] | mask
        groups[pc] = FULL if mask is FULL or mask.all() else mask

    def _stuck(self, what: str) -> DeadlockError:
        lines = [what, *(f"  {w.state()}" for w in self.warps)]
        lines += [f"  under way: {work}" for queue in (self.pipe, self.loads, self.stores) for work in queue]
        lines += [f"  under way: {a.what} of warp {a.warp}, line {a.line}" for w in self.warps for a, _ in w.stores]
        alive = sorted((w for w in self.warps if w.wait is not None or w.groups), key=lambda w: w.wait is None)
        line = None
        if alive:  # without a wait, what it did last that reached beyond registers may lie before the loop
            line = alive[0].at if alive[0].wait is not None else self.code.line(min(alive[0].groups))
        return DeadlockError("\n".join(lines), line=line or None)
