"""Does the judge judge? Drop one synchronisation of a kernel at a time, and see whether anything notices.

    with mutate.Recorder("sm_100a", track=True) as gpu:
        gpu.register(q=q, k=k, v=v, o=o)
        compiled(…)
    experiment = mutate.Experiment(gpu.launches[-1], seeds=(None, 1, 2))
    for verdict in experiment.run():
        print(verdict)

A mutant counts as caught if under any seed it ends in a finding, or in other bytes of a tensor than the original's.
Misses get a reason, which is checked on runs of the original, and for pairs on runs without both:

never executed       the kernel did not come by there
fresh barrier        a wait that only ever met a barrier in its first phase, for the parity of the one before
nobody waits         an arrival or commit of phases that no warp ever waits for
nothing new          a wait or fence that, under every seed, told no warp of any access it did not already know of
granted              the ordering grants what it is for ("pipe": tcgen05.wait::ld for registers, and tcgen05.fence)
at the end           it told warps something, and those made no access and no arrival any more
doubled              without `partner` it makes a difference: dropping both is caught, and otherwise than dropping
                     `partner` alone
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from wanfp4.simulator.barriers import Mbarrier
from wanfp4.simulator.device import Device
from wanfp4.simulator.findings import SimulationError
from wanfp4.simulator.judge import FENCED, Clock, Judge, Shadow
from wanfp4.simulator.lines import SourceMap
from wanfp4.simulator.machine import CTA
from wanfp4.simulator.memory import Bytes, GlobalMemory
from wanfp4.simulator.ptx import Instruction
from wanfp4.simulator.report import LaunchReport
from wanfp4.simulator.scheduler import Warp
from wanfp4.simulator.translate import Code

KINDS = (
    "mbarrier.try_wait",
    "mbarrier.arrive.expect_tx",
    "mbarrier.arrive",
    "tcgen05.commit",
    "tcgen05.wait::st",
    "tcgen05.wait::ld",
    "tcgen05.fence::before_thread_sync",
    "tcgen05.fence::after_thread_sync",
    "fence.proxy.async",
    "fence.mbarrier_init",
    "cp.async.bulk.wait_group",
    "bar.sync",
    "bar.arrive",
    "barrier.sync",
    "barrier.arrive",
    "barrier.cta.sync",
    "barrier.cta.arrive",
)
ARRIVALS = ("mbarrier.arrive.expect_tx", "mbarrier.arrive", "tcgen05.commit")
NOTHING = "griddepcontrol.launch_dependents"  # a hint


@dataclass
class Launch:
    """What a kernel was launched with, and what its tensors held before."""

    code: Code
    grid: tuple[int, int, int]
    params: Bytes
    shared_bytes: int
    memory: GlobalMemory
    before: list[Bytes] = field(default_factory=list, repr=False)
    sources: SourceMap | None = None

    def __post_init__(self) -> None:
        if not self.before:
            self.before = [region.data.copy() for region in self.memory.regions]


class Recorder(Device):
    """A device that keeps its launches. Their tensors must outlive it."""

    def __init__(self, arch: str = "sm_100a", **options: Any) -> None:
        super().__init__(arch, **options)
        self.launches: list[Launch] = []

    def run(
        self,
        code: Code,
        grid: tuple[int, int, int],
        params: Bytes,
        shared_bytes: int = 0,
        *,
        sources: SourceMap | None = None,
    ) -> LaunchReport:
        self.launches.append(Launch(code, grid, params.copy(), shared_bytes, self.memory, sources=sources))
        return super().run(code, grid, params, shared_bytes, sources=sources)


@dataclass(frozen=True)
class Site:
    """A synchronisation: instruction `position` of block `block`."""

    block: int
    position: int
    kind: str
    instruction: Instruction
    source: str | None = None

    @property
    def line(self) -> int:
        return self.instruction.line

    def __str__(self) -> str:
        return f"PTX line {self.line}: {self.instruction}" + f", from {self.source}" * (self.source is not None)


@dataclass(frozen=True)
class Verdict:
    """What dropping a site led to: `finding` and the first seed with one, or, for a miss, the reason."""

    site: Site
    finding: str | None = None
    seed: int | None = None
    reason: str | None = None
    partner: Site | None = None

    @property
    def caught(self) -> bool:
        return self.finding is not None

    @property
    def explained(self) -> bool:
        return self.caught or self.reason is not None

    def __str__(self) -> str:
        if self.finding is not None:
            return f"caught, seed {self.seed}: {self.site}: {self.finding}"
        partner = f" by line {self.partner.line}" if self.partner else ""
        return f"missed, {self.reason or 'UNEXPLAINED'}{partner}: {self.site}"


class Notes:
    """What the synchronisations of the original did, under all seeds, by PTX line."""

    def __init__(self) -> None:
        # Line -> (run, warp) that it told of an access, and how much that warp had done when it was last told.
        self.told: defaultdict[int, dict[tuple[object, int], int]] = defaultdict(dict)
        self.done: dict[tuple[object, int], int] = {}  # accesses and arrivals of each warp in all
        self.later: set[int] = set()  # waits that met a barrier whose first phase was complete
        self.waited: dict[tuple[object, int], int] = {}  # (run, mbarrier) -> how many phases warps have waited for
        self.arrived: defaultdict[int, set[tuple[object, int, int]]] = defaultdict(set)  # line -> run, mbarrier, phase


class Experiment:
    """Mutants of one launch.

    seeds     of the simulator, for the original and for each mutant, until one catches it.
    ordering  "pipe" or "isa", as for the device.
    limit     turns of the scheduler after which a mutant counts as one that never ends; None: 20 times the original's.

    Raises what the original raises under any seed. The tensors end up as they were before the launch.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        seeds: Sequence[int | None] = (None, 1, 2),
        ordering: str = "pipe",
        limit: int | None = None,
    ) -> None:
        self.launch, self.seeds, self.ordering, self.limit = launch, tuple(seeds), ordering, limit
        code = launch.code
        self.code = code if code.tracked else Code(code.kernel, tracked=True)
        self.notes = Notes()
        self.executed = [0] * len(code.kernel.blocks)
        self.after: list[Bytes] = []
        turns = 0
        for number, seed in enumerate(self.seeds):
            after, ctas = self._original(number, seed)
            if self.after and any((a != b).any() for a, b in zip(after, self.after, strict=True)):
                raise SimulationError(f"the original's results under seed {seed} are not those under {self.seeds[0]}")
            self.after = after
            turns = max(turns, *(cta.turns for cta in ctas))
        if self.limit is None:
            self.limit = 1000 + 20 * turns

    def sites(self, kinds: Iterable[str] = KINDS) -> Iterator[Site]:
        """All synchronisations of these kinds, executed or not."""
        wanted = set(kinds)
        sources = self.launch.sources
        for index, block in enumerate(self.code.kernel.blocks):
            for position, ins in enumerate(block):
                kind = next((k for k in KINDS if (ins.opcode + ".").startswith((k + ".", k + "::"))), None)
                if kind in wanted:
                    source = str(sources.where(ins.line) or "") if sources is not None else ""
                    yield Site(index, position, kind or "", ins, source or None)

    def run(self, sites: Iterable[Site] | None = None, *, pairs: bool = True) -> list[Verdict]:
        """A verdict for each site (None: all). With `pairs`, misses without a reason are tried in pairs."""
        verdicts = [self.verdict(site) for site in (self.sites() if sites is None else sites)]
        if pairs:
            verdicts = [v if v.explained else replace(v, **self._doubled(v.site, verdicts)) for v in verdicts]
        return verdicts

    def verdict(self, site: Site) -> Verdict:
        """Of one site, and the reason if it is missed, except for pairs."""
        if not self.executed[site.block]:
            return Verdict(site, reason="never executed")
        finding, seed = self.without(site)
        if finding is not None:
            return Verdict(site, finding, seed)
        return Verdict(site, reason=self._reason(site))

    def without(self, *sites: Site, seeds: Sequence[int | None] | None = None) -> tuple[str | None, int | None]:
        """What is found without all of these, and under which of the seeds (None: the experiment's)."""
        undo: list[Callable[[], None]] = []
        blocks = self.code.kernel.blocks
        for index in sorted({site.block for site in sites}):
            block = list(blocks[index])
            for site in (s for s in sites if s.block == index):
                block[site.position] = _dropped(site)
            undo.append(self.code.replace(index, block))
        try:
            for seed in self.seeds if seeds is None else seeds:
                finding = self._mutant(seed)
                if finding is not None:
                    return finding, seed
        finally:
            for one in undo:
                one()
        return None, None

    # ---- runs ----
    def _ctas(self, seed: int | None, limit: int | None, make: Callable[..., CTA]) -> Iterator[CTA]:
        launch = self.launch
        for z, y, x in itertools.product(*(range(n) for n in reversed(launch.grid))):
            cta = make(
                self.code,
                (x, y, z),
                launch.grid,
                launch.shared_bytes,
                launch.params,
                launch.memory,
                seed=seed,
                track=True,
                ordering=self.ordering,
                limit=limit,
            )
            with np.errstate(all="ignore"):
                cta.run()
            yield cta

    def _original(self, number: int, seed: int | None) -> tuple[list[Bytes], list[CTA]]:
        self._restore()
        try:
            keys = itertools.count()
            ctas = list(
                self._ctas(
                    seed,
                    self.limit,
                    lambda *rest, **more: Observed(*rest, notes=self.notes, run=(number, next(keys)), **more),
                )
            )
            after = [region.data.copy() for region in self.launch.memory.regions]
        except SimulationError as error:
            self.code.locate(error)
            raise
        finally:
            self._restore()
        for cta in ctas:
            for warp in cta.warps:
                self.executed = [n + m for n, m in zip(self.executed, warp.hits, strict=True)]
        return after, ctas

    def _mutant(self, seed: int | None) -> str | None:
        try:
            for _ in self._ctas(seed, self.limit, CTA):
                pass
            regions = self.launch.memory.regions
            wrong = [r.name for r, after in zip(regions, self.after, strict=True) if (r.data != after).any()]
        except SimulationError as error:
            self.code.locate(error)
            return f"{type(error).__name__}: {str(error.message).splitlines()[0]}"
        finally:
            self._restore()
        return f"other results in {', '.join(wrong)}" if wrong else None

    def _restore(self) -> None:
        for region, before in zip(self.launch.memory.regions, self.launch.before, strict=True):
            if region.writable:
                region.data[:] = before

    # ---- reasons ----
    def _reason(self, site: Site) -> str | None:
        line, notes = site.line, self.notes
        if self.ordering == "pipe" and site.kind.startswith(("tcgen05.wait::ld", "tcgen05.fence")):
            return "granted"
        if site.kind in ARRIVALS:
            waited = any(phase < notes.waited.get((run, barrier), 0) for run, barrier, phase in notes.arrived[line])
            return None if waited else "nobody waits"
        if site.kind == "mbarrier.try_wait" and line not in notes.later:
            return "fresh barrier"
        told = notes.told[line]
        if not told:
            return "nothing new"
        return "at the end" if all(notes.done[who] == done for who, done in told.items()) else None

    def _doubled(self, site: Site, verdicts: list[Verdict]) -> dict[str, Any]:
        """Nearest first: what doubles a synchronisation is mostly near it."""
        for other in sorted(verdicts, key=lambda v: abs(v.site.line - site.line)):
            if other.site != site and self.executed[other.site.block]:
                finding, _ = self.without(site, other.site, seeds=(other.seed,) if other.caught else None)
                if finding != other.finding:
                    return {"reason": "doubled", "partner": other.site}
        return {}


def _dropped(site: Site) -> Instruction:
    """What stands in for a dropped instruction: a wait is over at once, anything else does nothing."""
    old = site.instruction
    if site.kind == "mbarrier.try_wait":
        return Instruction(old.guard, old.negated, "mov.pred", (old.operands[0], "1"), old.line)
    return Instruction(None, False, NOTHING, (), old.line)


class Accesses:
    """When each agent accessed shared or tensor memory, and when warps wrote shared memory through the generic proxy."""

    def __init__(self) -> None:
        self.any: defaultdict[int, set[int]] = defaultdict(set)
        self.generic: defaultdict[int, set[int]] = defaultdict(set)
        self.done: Counter[int] = Counter()  # per warp, with arrivals


class WatchedShadow(Shadow):
    """A shadow that also keeps the times of accesses."""

    def __init__(self, judge: Judge, old: Shadow, accesses: Accesses) -> None:
        super().__init__(judge, len(old.writer), old.tensor)
        self.accesses = accesses

    def read(self, agent: int, time: int, *rest: Any, **more: Any) -> None:
        super().read(agent, time, *rest, **more)
        self.accesses.any[agent].add(time)
        self.accesses.done[rest[3]] += 1

    def write(self, agent: int, time: int, *rest: Any, **more: Any) -> None:
        super().write(agent, time, *rest, **more)
        self.accesses.any[agent].add(time)
        self.accesses.done[rest[3]] += 1
        if agent < self.judge.warps:
            self.accesses.generic[agent].add(time)


class Observed(CTA):
    """A CTA that notes what its synchronisations tell its warps."""

    def __init__(self, *rest: Any, notes: Notes, run: object, **more: Any) -> None:
        super().__init__(*rest, **more)
        assert self.judge is not None
        self.notes, self.run_key, self.clocks = notes, run, self.judge.clock
        self.accesses = Accesses()
        self.judge.shared = WatchedShadow(self.judge, self.judge.shared, self.accesses)
        self.judge.tensor = WatchedShadow(self.judge, self.judge.tensor, self.accesses)
        self.first: dict[tuple[int, int], Clock] = {}  # (barrier, warp) -> the warp's clock when it came

    def _note(self, line: int, warp: int, before: Clock) -> bool:
        """Whether a warp knows of more accesses than `before`; then the line has told it."""
        after = self.clocks[warp]
        for row, agent in np.argwhere(after > before).tolist():
            times = self.accesses.generic if row == FENCED else self.accesses.any
            low, high = int(before[row, agent]), int(after[row, agent])
            if (row != FENCED or agent < len(self.warps)) and any(low < t <= high for t in times[agent]):
                self._told(line, warp)
                return True
        return False

    def _told(self, line: int, warp: int) -> None:
        self.notes.told[line][self.run_key, warp] = self.accesses.done[warp]

    def run(self) -> None:
        super().run()
        for warp in self.warps:
            self.notes.done[self.run_key, warp.index] = self.accesses.done[warp.index]

    def _noted(self, w: Warp, call: Callable[[], None]) -> None:
        before = self.clocks[w.index].copy()
        call()
        self._note(w.at, w.index, before)

    def bar(self, w: Warp, index: int, threads: int | None, wait: bool) -> None:
        self.accesses.done[w.index] += 1
        self.first[index, w.index] = self.clocks[w.index].copy()
        arrived = dict(self.named[index].arrived) if index in self.named else {}
        generation = self.named[index].generation if index in self.named else 0
        waiting = [*(self.named[index].waiting if index in self.named else ()), *([w] if wait else [])]
        super().bar(w, index, threads, wait)
        if self.named[index].generation != generation:
            for one in waiting:
                if self._note(w.at, one.index, self.first[index, one.index]):
                    for line in {*arrived.values(), w.at}:
                        self._told(line, one.index)

    def try_wait(self, w: Warp, address: int, parity: int, loops: bool) -> bool:
        before = self.clocks[w.index].copy()
        passed = super().try_wait(w, address, parity, loops)
        barrier = self.barriers[address & 0xFFFFFFFF]
        if passed and barrier.phase:
            self.notes.later.add(w.at)
            key = (self.run_key, barrier.address)
            self.notes.waited[key] = max(self.notes.waited.get(key, 0), barrier.phase)
            self._note(w.at, w.index, before)
        return passed

    def _arrive(self, barrier: Mbarrier, clock: Clock | None, count: int, expect: int, line: int, warp: int) -> None:
        self.accesses.done[warp] += 1
        self.notes.arrived[line].add((self.run_key, barrier.address, barrier.phase))
        super()._arrive(barrier, clock, count, expect, line, warp)

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

    def fence_mbarrier_init(self, w: Warp) -> None:
        unfenced = [b for b in self.barriers.values() if b.warp == w.index and b.fenced is None]
        super().fence_mbarrier_init(w)
        if unfenced:
            self._told(w.at, w.index)
            self.accesses.any[w.index].add(self.judge.now(w.index) if self.judge is not None else 0)
