"""Happens-before: every pattern that orders, and the same with one of its parts left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import handmade as h
import numpy as np
import pytest
from handmade import arrive, bar, call, init, ld, st, wait

from wanfp4.simulator import mma
from wanfp4.simulator.findings import PoisonError, ProtocolError, RaceError, SimulationError
from wanfp4.simulator.judge import Judge

FULL, EMPTY, DONE = h.BASE + 4096, h.BASE + 4104, h.BASE + 4112  # mbarriers
DATA, OTHER = h.BASE + 1024, h.BASE + 2048
SEEDS = (None, 0, 1, 2, 3)
LOADED = h.aligned(128)
LOADED.view(np.uint32)[:] = h.LANE


@pytest.fixture(autouse=True)
def simple_tensor_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor core of which only the accesses matter: reads 128 bytes at `b` and column `a`, writes column `d`."""

    def multiply(cta: Any, kind: str, d: int, a: int, a_in_tmem: bool, b: int, *rest: Any, **options: Any) -> None:
        if b:
            cta.shared.take(np.arange(b, b + 128))
        if a_in_tmem:
            cta.tensor.take(slice(0, 128), slice(a, a + 1))
        if rest[1]:  # accumulate
            cta.tensor.take(slice(0, 128), slice(d, d + 1))
        cta.tensor.put(slice(0, 128), slice(d, d + 1), np.full((128, 1), 7, np.uint32))

    def copy(cta: Any, taddr: int, desc: int, shape: str) -> None:
        words = cta.shared.take(np.arange(desc, desc + 128)).view(np.uint32)
        cta.tensor.put(slice(0, 128), slice(taddr, taddr + 1), np.tile(words, 4)[:, None])

    monkeypatch.setattr(mma, "mma", multiply)
    monkeypatch.setattr(mma, "copy_scales", copy)


def multiply(
    d: int, b: int = 0, a: int | None = None, accumulate: bool = False, kind: str = "f16", shape: int = 0
) -> h.Step:
    return call("mma", kind, d, a or 0, a is not None, b, shape, accumulate)


def copy(column: int, source: int) -> h.Step:
    return call("copy_scales", column, source, "32x128b.warpx4")


def commit(barrier: int) -> h.Step:
    return call("commit", barrier)


def load(destination: int, barrier: int = FULL) -> h.Step:
    return call("bulk_load", destination, LOADED.ctypes.data, 128, barrier)


def store(source: int) -> h.Step:
    return call("bulk_store", source, OUT.ctypes.data, 128)


def to_tmem(column: int) -> h.Step:
    return lambda w: w.cta.tmem_store(w, w.index % 4 << 21 | column, "32x32b", [h.LANE])


def from_tmem(column: int, late: bool = False) -> h.Step:
    """`late`: when nothing asynchronous is under way any more, so that only the order is wrong, never the value."""

    def step(w: Any) -> Any:
        if late and (w.cta.pipe or any(other.stores for other in w.cta.warps)):
            return False
        return w.cta.tmem_load(w, w.index % 4 << 21 | column, "32x32b", 1)

    return step


OUT = h.aligned(128)
GROUP = call("commit_group")
FENCE = call("fence_proxy")
BEFORE, AFTER = call("fence_before"), call("fence_after")
WAIT_ST, WAIT_LD = call("wait_st"), call("wait_ld")

DROP_ALL = call("tmem_dealloc", 0, 32)
SETUP = [
    init(FULL),
    init(EMPTY),
    init(DONE),
    call("fence_mbarrier_init"),
    call("tmem_alloc", h.BASE, 32),
    BEFORE,
    bar(),
]
JOIN = [bar(), AFTER]
# What gives tensor memory back must come after everything that used it.
FINISH = [BEFORE, bar(1), AFTER, DROP_ALL]
LEAVE = [BEFORE, bar(1)]

Warps = Sequence[Sequence[h.Step]]


def verdict(warps: Warps, seed: int | None, ordering: str) -> SimulationError | None:
    tensors = {"in": LOADED, "out": OUT}
    try:
        h.run(*warps, seed=seed, ordering=ordering, tensors=tensors)
    except (RaceError, PoisonError) as error:
        return error
    return None


def right(*warps: Sequence[h.Step], orderings: Sequence[str] = ("pipe", "isa")) -> None:
    for ordering in orderings:
        for seed in SEEDS:
            error = verdict(warps, seed, ordering)
            assert error is None, f"seed {seed}, {ordering}: {error}"


def wrong(match: str, *warps: Sequence[h.Step], lines: tuple[int, int] | None = None,
          orderings: Sequence[str] = ("pipe", "isa")) -> None:  # fmt: skip
    """A finding under every seed, without one the race in the text. `lines` are of the accesses, in either order."""
    for ordering in orderings:
        for seed in SEEDS:
            error = verdict(warps, seed, ordering)
            assert error is not None, f"seed {seed}, {ordering}: missed"
            if seed is None:
                assert isinstance(error, RaceError)
                assert re.search(match, error.message), error.message
                if lines is not None:
                    assert {error.line, error.other} == set(lines)
                assert error.line is not None
                assert error.warp == error.line // 100


# Generic accesses


def test_write_then_read() -> None:
    right([st(DATA), bar()], [bar(), ld(DATA, 1)])
    wrong("warp 1 reads shared memory 0x800, which warp 0 wrote, with no wait", [st(DATA)], [ld(DATA)], lines=(1, 101))
    right([init(DONE), bar(), st(DATA), arrive(DONE)], [bar(), wait(DONE), ld(DATA, 1)])
    wrong(
        "which warp 0 wrote", [init(DONE), bar(), arrive(DONE), st(DATA)], [bar(), wait(DONE), ld(DATA)], lines=(4, 103)
    )
    # bar.arrive passes on; what comes after it is not covered.
    right([st(DATA), bar(3, 64, False)], [bar(3, 64), ld(DATA, 1)])
    wrong("which warp 0 wrote", [bar(3, 64, False), st(DATA)], [bar(3, 64), ld(DATA)])


def test_read_then_write_and_write_then_write() -> None:
    right([st(DATA), bar(), ld(DATA, 1), bar()], [bar(), bar(), st(DATA)])
    wrong(
        "warp 0 reads shared memory 0x800, which warp 1 wrote",
        [st(DATA), bar(), ld(DATA)],
        [bar(), st(DATA)],
        lines=(3, 102),
    )
    wrong("warp 1 overwrites shared memory 0x800, which warp 0 reads", [st(DATA), bar(), bar(), ld(DATA)],
          [bar(), bar(), lambda w: st(DATA)(w) if not w.cta.warps[0].groups else False], lines=(4, 103))  # fmt: skip
    wrong("overwrites shared memory 0x800, which warp 0 wrote", [st(DATA)], [st(DATA)], lines=(1, 101))
    right([st(DATA)], [st(OTHER)])


def test_order_passes_through_a_third_warp() -> None:
    chain = [st(DATA), bar(1, 64)], [bar(1, 64), bar(2, 64)], [bar(2, 64), ld(DATA)]
    right(*chain)
    wrong("warp 2 reads", [bar(1, 64), st(DATA)], *chain[1:])


def test_granules_are_words() -> None:
    def half(offset: int) -> h.Step:
        data = np.zeros((32, 2), np.uint8)
        return call("store_shared", h.at(DATA + offset, 4), data, None, None)

    right([call("store_shared", h.at(DATA, 8), h.words(1), None, None)],
          [call("store_shared", h.at(DATA + 4, 8), h.words(1), None, None)])  # fmt: skip
    wrong("overwrites", [half(0)], [half(2)])


# The asynchronous proxy


def test_generic_write_then_asynchronous_read_needs_a_fence() -> None:
    tail = [GROUP, call("wait_group", 0, True)]
    right([st(DATA), FENCE, store(DATA), *tail])
    wrong("bulk stores of warp 0 reads shared memory 0x800, which warp 0 wrote, with no fence.proxy.async",
          [st(DATA), store(DATA), *tail], lines=(1, 2))  # fmt: skip
    wrong("no fence.proxy.async", [FENCE, st(DATA), store(DATA), *tail], lines=(2, 3))
    # On the path from one warp to another it may stand on either side.
    right([st(DATA), FENCE, bar()], [bar(), store(DATA), *tail])
    right([st(DATA), bar()], [bar(), FENCE, store(DATA), *tail])
    right([st(DATA), bar(1, 64)], [bar(1, 64), FENCE, bar(2, 64)], [bar(2, 64), store(DATA), *tail])
    wrong("no fence.proxy.async", [st(DATA), bar()], [bar(), store(DATA), *tail])
    wrong("no fence.proxy.async", [st(DATA), bar()], [FENCE, bar(), store(DATA), *tail])
    wrong("no wait", [st(DATA), FENCE], [store(DATA), *tail])


def test_generic_write_then_asynchronous_write() -> None:
    """Only the ISA's letter asks for a fence here."""
    steps = [
        init(FULL),
        call("fence_mbarrier_init"),
        st(DATA),
        arrive(FULL, 1, 128),
        load(DATA),
        wait(FULL),
        ld(DATA, h.LANE),
    ]
    right(steps, orderings=["pipe"])
    wrong("no fence.proxy.async", steps, orderings=["isa"], lines=(3, 5))
    right([*steps[:3], FENCE, *steps[3:]])


def test_bulk_load() -> None:
    expect = arrive(FULL, 1, 128)
    right([*SETUP[:4], bar(), expect, load(DATA)], [bar(), wait(FULL), ld(DATA, h.LANE)])
    wrong("warp 0 reads shared memory 0x800, which the bulk loads that report to mbarrier 0x1400 wrote, with no wait",
          [*SETUP[:4], bar(), expect, load(DATA), lambda w: ld(DATA)(w) if w.cta.shared.poison[DATA] == 0 else False],
          lines=(7, 8))  # fmt: skip
    # A buffer is free when its reader has said so.
    ring = [expect, load(DATA), wait(EMPTY), arrive(FULL, 1, 128), load(DATA), wait(FULL, 1)]
    right([*SETUP[:4], bar(), *ring], [bar(), wait(FULL), ld(DATA), arrive(EMPTY), wait(FULL, 1)])
    wrong("overwrites shared memory 0x800, which warp 1 reads", [*SETUP[:4], bar(), *ring],
          [bar(), wait(FULL), arrive(EMPTY), ld(DATA), wait(FULL, 1)], orderings=["pipe"])  # fmt: skip


def test_bulk_loads_are_not_ordered_with_each_other() -> None:
    steps = [*SETUP[:4], arrive(FULL, 1, 256), load(DATA), load(OTHER), wait(FULL)]
    right(steps)
    wrong("overwrites", [*SETUP[:4], arrive(FULL, 1, 256), load(DATA), load(DATA), wait(FULL)], lines=(6, 7))


def test_bulk_store() -> None:
    def steps(*middle: h.Step) -> list[h.Step]:
        return [st(DATA), FENCE, store(DATA), GROUP, *middle]

    again = [st(DATA), call("wait_group", 0, True)]
    right(steps(call("wait_group", 0, True), *again))
    right(steps(call("wait_group", 0, False), *again))
    wrong("overwrites shared memory 0x800, which the bulk stores of warp 0 reads", steps(*again), lines=(3, 5))
    wrong("overwrites", steps(call("wait_group", 1, True), *again))
    two = [st(DATA), st(OTHER), FENCE, store(DATA), GROUP, store(OTHER), GROUP, call("wait_group", 1, True)]
    right([*two, st(DATA), call("wait_group", 0, True)])
    wrong("overwrites", [*two, st(OTHER), call("wait_group", 0, True)], lines=(6, 9))
    # Only the warp that issued the store can wait for it; others hear of it through a barrier.
    right([*steps(call("wait_group", 0, True)), bar()], [bar(), st(DATA)])
    wrong("overwrites", [*steps(bar(), call("wait_group", 0, True))], [bar(), st(DATA)])


@pytest.mark.parametrize(
    ("match", "line", "steps"),
    [
        ("the bulk stores of warp 0", 3, [st(DATA), FENCE, store(DATA), GROUP]),
        (
            "the bulk loads that report to mbarrier",
            4,
            [init(FULL), call("fence_mbarrier_init"), arrive(FULL, 1, 128), load(DATA)],
        ),
        ("the tensor pipe", 8, [*SETUP, multiply(0), DROP_ALL]),
    ],
)
def test_the_end_waits_for_what_is_asynchronous(match: str, line: int, steps: Any) -> None:
    kind = RaceError if "pipe" in match else ProtocolError
    message = "the tensor pipe wrote" if "pipe" in match else f"nobody has waited for the last action of {match}"
    with pytest.raises(kind, match=message) as caught:
        h.run(steps, tensors={"in": LOADED, "out": OUT})
    assert caught.value.line == line or caught.value.other == line


# mbarrier.init


def test_init_must_be_seen() -> None:
    right([init(DONE), bar(), arrive(DONE)], [bar(), wait(DONE)])
    late = lambda step: lambda w: step(w) if DONE in w.cta.barriers else False  # noqa: E731
    match = "warp 1 uses mbarrier 0x1410, which warp 0 initialised, with no wait"
    wrong(match, [init(DONE), arrive(DONE)], [late(wait(DONE))], lines=(1, 101))
    wrong("warp 1 uses mbarrier", [init(DONE)], [late(arrive(DONE))], lines=(1, 101))


def test_init_must_be_fenced_for_the_asynchronous_proxy() -> None:
    def steps(*fence: h.Step) -> list[list[h.Step]]:
        return [[init(FULL), *fence, bar(), wait(FULL)], [bar(), arrive(FULL, 1, 128), load(DATA), wait(FULL)]]

    right(*steps(call("fence_mbarrier_init")))
    right(*steps(FENCE))
    wrong("cp.async.bulk of warp 1 reports to mbarrier 0x1400, which warp 0 initialised, with no fence.mbarrier_init",
          *steps(), lines=(1, 103))  # fmt: skip
    wrong("no fence.mbarrier_init", [call("fence_mbarrier_init"), *steps()[0]], steps()[1])
    # Of the inits of the warp itself only, unlike the proxy fence. The barriers of warp 0 make its clock run ahead.
    alone = [bar(5, 32)] * 4
    other = [bar(), call("fence_mbarrier_init"), arrive(FULL, 1, 128), load(DATA), wait(FULL)]
    wrong("no fence.mbarrier_init", [init(FULL), *alone, bar(), wait(FULL)], other)
    right([init(FULL), *alone, bar(), wait(FULL)], [FENCE if step is other[1] else step for step in other])
    wrong("tcgen05.commit of warp 0 reports to mbarrier", [init(DONE), commit(DONE), wait(DONE)])


# Tensor memory in pipe order


def test_pipe_order_of_the_tensor_core() -> None:
    base = [st(DATA), FENCE, *SETUP]
    steps = [
        copy(8, DATA),
        multiply(0, a=8),
        copy(8, DATA),
        multiply(1, a=8),
        multiply(0),
        multiply(2, a=0),
        commit(DONE),
    ]
    right([*base, *steps, wait(DONE), from_tmem(0), DROP_ALL], orderings=["pipe"])
    wrong("tensor memory column 0 of lanes 0-31, which the tensor pipe wrote, with no wait",
          [*base, multiply(0), from_tmem(0, late=True), DROP_ALL],
          orderings=["pipe"])  # fmt: skip


def test_commit_covers_what_was_issued_before_it() -> None:
    late = from_tmem(0, late=True)
    right([*SETUP, multiply(0), commit(DONE), wait(DONE), late, DROP_ALL], orderings=["pipe"])
    wrong("which the tensor pipe wrote", [*SETUP, commit(DONE), multiply(0), wait(DONE), late, DROP_ALL],
          lines=(9, 11), orderings=["pipe"])  # fmt: skip


def test_what_follows_an_issue_does_not_lie_before_it() -> None:
    tail = [commit(DONE), wait(DONE), DROP_ALL]
    wrong("the tensor pipe", [*SETUP, to_tmem(0), WAIT_ST, multiply(0), from_tmem(0), *tail],
          lines=(10, 11), orderings=["pipe"])  # fmt: skip
    right([*SETUP, st(DATA), multiply(0), commit(DONE), bar(2), *FINISH], [*JOIN, wait(DONE), bar(2), ld(DATA), *LEAVE])
    first = [*SETUP, multiply(0), commit(DONE), st(DATA), bar(2), wait(DONE), *FINISH]
    wrong("warp 0 wrote|warp 1 reads", first, [*JOIN, wait(DONE), ld(DATA), bar(2), *LEAVE])


def test_a_bulk_load_does_not_stand_in_for_the_tensor_fences() -> None:
    head = [*SETUP, to_tmem(0), WAIT_ST]
    copy = [arrive(FULL, 1, 128), load(DATA), bar(2), *FINISH]
    tail = [bar(2), *LEAVE]
    fenced = [*JOIN, wait(FULL), call("fence_after"), multiply(0), commit(DONE), wait(DONE), *tail]
    right([*head, BEFORE, *copy], fenced)
    wrong("tcgen05.st of warp 0 wrote", [*head, *copy], fenced, orderings=["isa"])
    unfenced = [*JOIN, wait(FULL), multiply(0), commit(DONE), wait(DONE), *tail]
    wrong("tcgen05.st of warp 0 wrote", [*head, BEFORE, *copy], unfenced, orderings=["isa"])
    right([*head, *copy], unfenced, orderings=["pipe"])


def test_columns_given_back_start_afresh() -> None:
    again = [DROP_ALL, call("tmem_alloc", h.BASE, 32), BEFORE, bar(2), *FINISH]
    right([*SETUP, to_tmem(0), WAIT_ST, *again], [*JOIN, bar(2), AFTER, to_tmem(0), WAIT_ST, *LEAVE])


def test_operands_are_free_after_the_commit() -> None:
    def steps(*middle: h.Step) -> list[h.Step]:
        return [
            st(DATA),
            FENCE,
            *SETUP,
            multiply(0, b=DATA),
            commit(DONE),
            *middle,
            st(DATA),
            wait(DONE),
            AFTER,
            DROP_ALL,
        ]

    right(steps(wait(DONE)))
    wrong("overwrites shared memory 0x800", steps())


# Tensor memory by the PTX ISA, 9.7.16.6.4 (canonical synchronization patterns). With "pipe" the tcgen05 fences may go.


def dropped(steps: Sequence[h.Step], step: h.Step) -> list[h.Step]:
    return [s for s in steps if s is not step]


def test_store_then_load_in_one_thread() -> None:
    right([*SETUP, to_tmem(0), WAIT_ST, from_tmem(0), WAIT_LD, DROP_ALL])
    wrong("tcgen05.st of warp 0 wrote", [*SETUP, to_tmem(0), from_tmem(0, late=True), WAIT_LD, DROP_ALL])
    right([*SETUP, from_tmem(0), WAIT_LD, to_tmem(0), WAIT_ST, DROP_ALL])
    match = "overwrites tensor memory column 0 of lanes 0-31, which tcgen05.ld of warp 0 reads, with no wait for its"
    steps = [*SETUP, from_tmem(0), to_tmem(0), WAIT_LD, WAIT_ST, DROP_ALL]
    wrong(match, steps, lines=(8, 9), orderings=["isa"])
    wrong(
        "overwrites tensor memory", [*SETUP, to_tmem(0), to_tmem(0), WAIT_ST, DROP_ALL], lines=(8, 9), orderings=["isa"]
    )


@pytest.mark.parametrize("leave_out", ["nothing", "commit", "after"])
def test_multiply_then_load(leave_out: str) -> None:
    """9.7.16.6.4.2 in one thread and 9.7.16.6.4.4, example 2, between two."""
    after = call("fence_after")
    late = from_tmem(0, late=True)
    one = [*SETUP, multiply(0), commit(DONE), wait(DONE), after, late, WAIT_LD, DROP_ALL]
    two = [*SETUP, multiply(0), commit(DONE), *FINISH], [*JOIN, wait(DONE), after, late, WAIT_LD, *LEAVE]
    if leave_out == "nothing":
        right(one)
        right(*two)
    elif leave_out == "commit":
        wrong("no wait", [*SETUP, multiply(0), after, late, WAIT_LD, DROP_ALL])
        wrong("no wait", [*SETUP, arrive(DONE), multiply(0), *FINISH], two[1])
    else:
        wrong(
            "tcgen05.ld of warp 0 reads .* no tcgen05.fence::after_thread_sync", dropped(one, after), orderings=["isa"]
        )
        wrong(
            "tcgen05.ld of warp 1 reads .* no tcgen05.fence::after_thread_sync",
            two[0],
            dropped(two[1], after),
            orderings=["isa"],
        )
        right(dropped(one, after), orderings=["pipe"])


@pytest.mark.parametrize("leave_out", ["nothing", "before", "after", "wait"])
@pytest.mark.parametrize("first", ["load", "store"])
def test_load_or_store_then_multiply_in_another_thread(first: str, leave_out: str) -> None:
    """9.7.16.6.4.4, example 1, and the same with tcgen05.st."""
    before, after = call("fence_before"), call("fence_after")
    done = call("wait_ld" if first == "load" else "wait_st")
    access = from_tmem(0) if first == "load" else to_tmem(0)
    other = [*JOIN, access, done, before, arrive(DONE), *LEAVE]
    core = [
        *SETUP,
        wait(DONE),
        after,
        multiply(1, a=0) if first == "store" else multiply(0),
        commit(FULL),
        wait(FULL),
        *FINISH,
    ]
    # A warp owns a quarter of the lanes: three more write the rest of the column.
    others = [[*JOIN, to_tmem(0), WAIT_ST, BEFORE, arrive(DONE), *LEAVE] for _ in range(2)]
    core[2], core[7:7] = init(DONE, 3), [to_tmem(0), WAIT_ST]

    def warps(first_of: Sequence[h.Step], last_of: Sequence[h.Step]) -> list[Sequence[h.Step]]:
        return [last_of, first_of, *others]

    if leave_out == "nothing":
        right(*warps(other, core))
    elif leave_out == "before":
        wrong("no", *warps(dropped(other, before), core), orderings=["isa"])
        right(*warps(dropped(other, before), core), orderings=["pipe"])
    elif leave_out == "after":
        wrong("no tcgen05.fence::after_thread_sync", *warps(other, dropped(core, after)), orderings=["isa"])
        right(*warps(other, dropped(core, after)), orderings=["pipe"])
    else:
        wrong("no", *warps(dropped(other, done), core), orderings=["isa"] if first == "load" else ["pipe", "isa"])


@pytest.mark.parametrize("leave_out", ["nothing", "before", "after"])
def test_copy_then_multiply_in_another_thread(leave_out: str) -> None:
    """9.7.16.6.4.3: a pipelined pair needs no wait for completion, also between threads."""
    before, after = call("fence_before"), call("fence_after")
    first = [st(DATA), FENCE, *SETUP, copy(8, DATA), before, arrive(DONE), commit(EMPTY), wait(EMPTY), *FINISH]
    second = [*JOIN, wait(DONE), after, multiply(0, a=8), commit(FULL), wait(FULL), *LEAVE]
    if leave_out == "nothing":
        right(first, second)
        return
    warps = (dropped(first, before), second) if leave_out == "before" else (first, dropped(second, after))
    wrong("tcgen05.cp of warp 0 wrote", *warps, orderings=["isa"])
    right(*warps, orderings=["pipe"])


def test_pipelined_pairs_of_one_thread() -> None:
    """9.7.16.6.2: cp then mma, and mma then mma of the same accumulator, shape and kind; nothing else."""
    head, tail = [st(DATA), FENCE, *SETUP], [commit(DONE), wait(DONE), AFTER, DROP_ALL]
    right([*head, copy(8, DATA), multiply(0, a=8), multiply(0, a=8, accumulate=True), *tail])
    for match, steps in [
        ("tcgen05.cp of warp 0 overwrites", [copy(8, DATA), multiply(0, a=8), copy(8, DATA)]),  # mma, then cp
        ("tcgen05.cp of warp 0 overwrites", [copy(8, DATA), copy(8, DATA)]),
        ("reads tensor memory column 0", [multiply(0), multiply(1, a=0)]),  # another accumulator
        ("overwrites tensor memory column 0", [multiply(0), multiply(0, shape=1 << 17)]),  # another shape
        ("overwrites tensor memory column 0", [multiply(0), multiply(0, kind="tf32")]),
    ]:
        wrong(match, [*head, *steps, *tail], orderings=["isa"])
        right([*head, *steps, *tail], orderings=["pipe"])
        # A commit and a wait between them always will do.
        between = [*steps[:-1], commit(FULL), wait(FULL), AFTER, steps[-1]]
        right([*head, *between, *tail])


def test_commit_is_of_its_own_thread_by_the_isa() -> None:
    late = from_tmem(0, late=True)
    first = [*SETUP, multiply(0), bar(2), commit(FULL), wait(DONE), AFTER, late, WAIT_LD, wait(FULL), *FINISH]
    second = [*JOIN, bar(2), commit(DONE), *LEAVE]
    right(first, second, orderings=["pipe"])
    wrong("tcgen05.ld of warp 0 reads", first, second, orderings=["isa"])


def test_dealloc_comes_last() -> None:
    reader = [*JOIN, from_tmem(0), WAIT_LD, *LEAVE]
    right([*SETUP, *FINISH], reader)
    early = [*SETUP, bar(2, 64), DROP_ALL]
    reader = [*JOIN, bar(2, 64), from_tmem(0), WAIT_LD]
    for ordering in ("pipe", "isa"):
        with pytest.raises(Exception, match=r"deallocated at line|tcgen05.ld|warp 1 reads"):
            h.run(early, reader, ordering=ordering)
    wrong("warp 0 overwrites tensor memory column 0 of lanes 32-63, which .*warp 1 reads, with no wait",
          [*SETUP, lambda w: DROP_ALL(w) if not w.cta.warps[1].groups else False],
          [*JOIN, from_tmem(0), WAIT_LD])  # fmt: skip


# The judge by itself


def test_room_for_agents_is_limited_with_a_message() -> None:
    judge = Judge(1, 4096, False)
    for barrier in range(256):
        judge.load(0, 1, barrier, "a load")
    with pytest.raises(Exception, match="more than 256 mbarriers"):
        judge.load(0, 1, 256, "a load")


def test_random_programs_against_a_plain_definition() -> None:
    """Random programs of st, ld and named barriers: races by definition, every pair of accesses, no vector clocks."""
    rng = np.random.default_rng(5)
    found = {True: 0, False: 0}
    for _ in range(300):
        warps: list[list[tuple[str, int]]] = [[], []]
        for _ in range(int(rng.integers(1, 4))):
            for steps in warps:
                for _ in range(int(rng.integers(0, 3))):
                    steps.append((("st", "ld")[int(rng.integers(2))], int(rng.integers(3))))
            for steps in warps:
                steps.append(("bar", 0))

        def accesses(steps: list[tuple[str, int]]) -> list[tuple[int, str, int]]:
            epoch, out = 0, []
            for what, which in steps:
                if what == "bar":
                    epoch += 1
                else:
                    out.append((epoch, what, which))
            return out

        racy = any(
            a[0] == b[0] and a[2] == b[2] and "st" in (a[1], b[1])
            for a in accesses(warps[0])
            for b in accesses(warps[1])
        )
        make: dict[str, Callable[[int], h.Step]] = {
            "st": lambda i: st(DATA + 128 * i),
            "ld": lambda i: ld(DATA + 128 * i),
            "bar": lambda i: bar(),
        }
        programs = [[make[what](which) for what, which in steps] for steps in warps]
        for seed in (None, 1):
            assert (verdict(programs, seed, "pipe") is not None) == racy
        found[racy] += 1
    assert min(found.values()) > 30
