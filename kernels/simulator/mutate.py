"""Does the judge judge? Drop one synchronisation of a kernel at a time, and see whether anything notices.

    with mutate.Recorder("sm_100a", track=True) as gpu:
        gpu.register(q=q, k=k, v=v, o=o)
        compiled(…)
    experiment = mutate.Experiment(gpu.launches[-1], seeds=(None, 1, 2))
    for verdict in experiment.run():
        print(verdict)

A mutant counts as caught if under any seed it ends in a finding, or in other bytes of a tensor than the original's.
Misses get a reason, which is checked on runs of the original (`observe`), and for pairs on runs without both. An
"access" is one of shared or tensor memory.

never executed       the kernel did not come by there
granted              "pipe" ordering grants what it is for: tcgen05.wait::ld before a use, and tcgen05.fence
nobody waits         an arrival or commit of phases that no warp ever waits for
fresh barrier        a wait that only ever met a barrier in its first phase, for the parity of the one before
nothing new          under every seed, it told no warp of any access that the warp did not already know of
never touched again  nobody accessed any more what the accesses that it told of had accessed
ordered otherwise    with what it tells held back, in runs that are otherwise those of the original, each later access
                     of the same places still knows of the earlier one
doubled              the same, and dropping it together with `partner`, which is missed alone too, is caught
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from wanfp4.simulator.device import Device
from wanfp4.simulator.findings import SimulationError
from wanfp4.simulator.lines import SourceMap
from wanfp4.simulator.machine import CTA
from wanfp4.simulator.memory import Bytes, GlobalMemory
from wanfp4.simulator.observe import Notes, Observed
from wanfp4.simulator.ptx import Instruction
from wanfp4.simulator.report import LaunchReport
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
AnyCTA = TypeVar("AnyCTA", bound=CTA)
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
    """A device that keeps its launches, and with them their tensors."""

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
        self.trials = 0
        turns = 0
        for number, seed in enumerate(self.seeds):
            after, ctas = self._original(number, seed, self.notes)
            for warp in (warp for cta in ctas for warp in cta.warps):
                self.executed = [n + m for n, m in zip(self.executed, warp.hits, strict=True)]
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
        """A verdict for each site (None: all). `pairs`: try in pairs what is ordered otherwise or has no reason."""
        verdicts = [self.verdict(site) for site in (self.sites() if sites is None else sites)]
        if pairs:
            verdicts = [v if v.caught else self._paired(v, verdicts) for v in verdicts]
        return verdicts

    def verdict(self, site: Site) -> Verdict:
        """Of one site, and the reason if it is missed, except for pairs."""
        if not self.executed[site.block]:
            return Verdict(site, reason="never executed")
        finding, seed = self.without(site)
        if finding is not None:
            return Verdict(site, finding, seed)
        reason = self._reason(site)
        if reason is None and site.kind not in ARRIVALS and self._ordered_otherwise(site):
            reason = "ordered otherwise"
        return Verdict(site, reason=reason)

    def without(self, *sites: Site) -> tuple[str | None, int | None]:
        """What is found without all of these, and under which seed; (None, None) for nothing."""
        undo: list[Callable[[], None]] = []
        blocks = self.code.kernel.blocks
        for index in sorted({site.block for site in sites}):
            block = list(blocks[index])
            for site in (s for s in sites if s.block == index):
                block[site.position] = _dropped(site)
            undo.append(self.code.replace(index, block))
        try:
            for seed in self.seeds:
                finding = self._mutant(seed)
                if finding is not None:
                    return finding, seed
        finally:
            for one in undo:
                one()
        return None, None

    # ---- runs ----
    def _ctas(self, seed: int | None, limit: int | None, make: Callable[..., AnyCTA]) -> Iterator[AnyCTA]:
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

    def _original(
        self, number: int, seed: int | None, notes: Notes, mute: int | None = None
    ) -> tuple[list[Bytes], list[Observed]]:
        keys = itertools.count()

        def make(*rest: Any, **more: Any) -> Observed:
            return Observed(*rest, notes=notes, key=(number, next(keys)), mute=mute, **more)

        self._restore()
        try:
            ctas = list(self._ctas(seed, self.limit, make))
            after = [region.data.copy() for region in self.launch.memory.regions]
        except SimulationError as error:
            self.code.locate(error)
            raise
        finally:
            self._restore()
        return after, ctas

    def _mutant(self, seed: int | None) -> str | None:
        self.trials += 1
        if self.trials % 25 == 0:  # a CTA is a cycle of few objects and many bytes: left alone, it stays for long
            gc.collect()
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
        if line not in notes.told:
            return "nothing new"
        return None if line in notes.again else "never touched again"

    def _ordered_otherwise(self, site: Site) -> bool:
        notes = Notes()
        try:
            for number, seed in enumerate(self.seeds):
                self._original(number, seed, notes, mute=site.line)
        except SimulationError:
            return False
        return not notes.unordered

    def _paired(self, verdict: Verdict, verdicts: list[Verdict]) -> Verdict:
        """Nearest first: what doubles a synchronisation is mostly near it."""
        doubtful = (None, "ordered otherwise", "nothing new")
        if verdict.reason not in doubtful[:2]:
            return verdict
        others = [v.site for v in verdicts if not v.caught and v.site != verdict.site and v.reason in doubtful]
        for other in sorted(others, key=lambda site: abs(site.line - verdict.site.line)):
            if self.without(verdict.site, other)[0] is not None:
                return replace(verdict, reason="doubled", partner=other)
        return verdict


def _dropped(site: Site) -> Instruction:
    """What stands in for a dropped instruction: a wait is over at once, anything else does nothing."""
    old = site.instruction
    if site.kind == "mbarrier.try_wait":
        return Instruction(old.guard, old.negated, "mov.pred", (old.operands[0], "1"), old.line)
    return Instruction(None, False, NOTHING, (), old.line)
