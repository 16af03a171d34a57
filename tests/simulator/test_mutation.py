"""Proof that the judge judges: kernels without one of their synchronisations are found out, or it is known why not."""

from typing import Any

import numpy as np
import pytest
from handwritten import Case, program
from proof import FlashAttention, HandWritten

from wanfp4.simulator import RaceError
from wanfp4.simulator.judge import Shadow
from wanfp4.simulator.memory import GlobalMemory
from wanfp4.simulator.mutate import KINDS, Experiment, Launch, Verdict

SEEDS = (None, 1, 2)


def by_reason(verdicts: list[Verdict]) -> dict[str, list[str]]:
    """Of the misses: reason → opcodes."""
    out: dict[str, list[str]] = {}
    for verdict in verdicts:
        if not verdict.caught:
            out.setdefault(verdict.reason or "UNEXPLAINED", []).append(verdict.site.instruction.opcode)
    return out


def test_with_isa_ordering_every_synchronisation_of_the_fp4_kernel_is_needed() -> None:
    """All but one: the first tcgen05.wait::ld, because the second covers its load too before anything is given up."""
    verdicts = Experiment(HandWritten().launch, seeds=SEEDS, ordering="isa").run()
    kinds = {verdict.site.kind for verdict in verdicts}
    assert kinds >= set(KINDS) - {"barrier.sync", "barrier.arrive", "barrier.cta.sync", "barrier.cta.arrive"}
    assert by_reason(verdicts) == {"ordered otherwise": ["tcgen05.wait::ld.sync.aligned"]}
    assert sum(verdict.caught for verdict in verdicts) == 29


def test_with_pipe_ordering_fences_are_granted_and_one_barrier_is_doubled_by_another() -> None:
    """The last bar.sync stands before dealloc, and bar 2 orders the loads of the other warps before it already."""
    verdicts = Experiment(HandWritten().launch, seeds=SEEDS).run()
    missed = by_reason(verdicts)
    assert missed.pop("ordered otherwise") == ["bar.sync"]
    assert set(missed) == {"granted"}
    assert {opcode.split("::")[0] for opcode in missed["granted"]} == {"tcgen05.fence", "tcgen05.wait"}
    assert sum(verdict.caught for verdict in verdicts) == 22


def test_flash_attention_sample(flash_attention_forward: Any) -> None:
    """Every third of its synchronisations."""
    experiment = Experiment(FlashAttention(flash_attention_forward, 256, 256, 64, False).launch, seeds=SEEDS)
    verdicts = experiment.run(list(experiment.sites())[::3])
    assert len(verdicts) > 30
    assert [str(verdict) for verdict in verdicts if not verdict.explained] == []
    assert sum(verdict.caught for verdict in verdicts) >= 0.7 * len(verdicts)


@pytest.mark.slow
def test_flash_attention(flash_attention_forward: Any) -> None:
    """All of them; proof.py also does longer and causal problems, which take minutes."""
    launch = FlashAttention(flash_attention_forward, 256, 256, 64, False).launch
    verdicts = Experiment(launch, seeds=SEEDS).run()
    assert [str(verdict) for verdict in verdicts if not verdict.explained] == []
    assert sum(verdict.caught for verdict in verdicts) >= 80


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that looks at no access."""
    monkeypatch.setattr(Shadow, "read", lambda *a, **b: None)
    monkeypatch.setattr(Shadow, "write", lambda *a, **b: None)


def test_reasons_do_not_come_from_the_judge(blind: None) -> None:
    """What a blind judge misses gets no reason, unless it is one that holds with eyes open too."""
    blinded = {v.site.line: v for v in Experiment(HandWritten().launch, seeds=SEEDS, ordering="isa").run(pairs=False)}
    unexplained = {v.site.kind for v in blinded.values() if not v.explained}
    assert unexplained == {
        "bar.sync",
        "fence.proxy.async",
        "tcgen05.wait::ld",
        "tcgen05.fence::before_thread_sync",
        "tcgen05.fence::after_thread_sync",
    }
    reasons = [v.reason for v in blinded.values() if not v.caught and v.explained]
    assert reasons == ["ordered otherwise"]


def small_launch(body: str, threads: int) -> Launch:
    case = Case("test", program(body, threads=threads), {}, np.zeros(0, np.uint8))
    return Launch(case.code(), (1, 1, 1), case.params, 1024, GlobalMemory({}))


SHARE = "setp.eq.u32 %p0, %t, 0;\n@%p0 st.shared.b32 [%s+0], %t;\n{}ld.shared.b32 %r0, [%s+0];\n{}"


def test_two_barriers_double_each_other() -> None:
    experiment = Experiment(small_launch(SHARE.format("bar.sync 0;\nbar.sync 1;\n", ""), 64))
    verdicts = experiment.run()
    assert [verdict.reason for verdict in verdicts] == ["doubled", "nothing new"]
    assert verdicts[0].partner == verdicts[1].site
    finding, seed = experiment.without(*(verdict.site for verdict in verdicts))
    assert finding is not None
    assert finding.startswith("RaceError")
    assert seed is None


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        ("bar.sync 1;", "never touched again"),
        ("bra over;\nbar.sync 1;\nover:", "never executed"),
        ("bar.sync 0;\n@%p0 st.shared.b32 [%s+4], %t;\nbar.sync 1;", "never touched again"),
    ],
)
def test_a_barrier_that_orders_nothing_says_so(tail: str, reason: str) -> None:
    """The last site is one whose loss nobody can notice."""
    body = SHARE.format("bar.sync 0;\n", tail)
    last = Experiment(small_launch(body, 64)).run(pairs=False)[-1]
    assert (last.caught, last.reason) == (False, reason)


def test_a_fresh_barrier_and_an_arrival_nobody_waits_for() -> None:
    body = """setp.eq.u32 %p0, %t, 0;
@%p0 mbarrier.init.shared.b64 [%s+64], 1;
bar.sync 0;
wait:
mbarrier.try_wait.parity.shared.b64 %p1, [%s+64], 1;
@%p1 bra over;
bra wait;
over:
@%p0 mbarrier.arrive.shared.b64 _, [%s+64];"""
    verdicts = Experiment(small_launch(body, 64)).run()
    assert [v.reason or v.caught for v in verdicts] == [True, "fresh barrier", "nobody waits"]


def test_an_original_with_a_finding_is_no_subject() -> None:
    with pytest.raises(RaceError) as caught:
        Experiment(small_launch(SHARE.format("", ""), 64))
    assert caught.value.line is not None
