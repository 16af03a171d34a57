"""What goes on beside the warps: when it happens, in which order, and what waits for it."""

from __future__ import annotations

from typing import Any

import handmade as h
import numpy as np
import pytest
from handmade import arrive, bar, call, init, ld, st, wait

from wanfp4.simulator import mma
from wanfp4.simulator.findings import DescriptorError, UnknownInstruction

DONE, DATA = h.BASE, h.BASE + 1024
FENCED = [init(DONE), call("fence_mbarrier_init")]
SEEDS = (None, *range(6))
RNG = np.random.default_rng(3)


def test_copies_complete_late_with_a_seed_only() -> None:
    source = h.aligned(128)
    source[:] = 5
    early = {}
    for seed in SEEDS:
        seen: list[bool] = []

        def look(w: Any, seen: list[bool] = seen) -> None:
            seen.append(bool((w.cta.shared.data[DATA : DATA + 128] == 5).all()))

        steps = [
            *FENCED,
            arrive(DONE, 1, 128),
            call("bulk_load", DATA, source.ctypes.data, 128, DONE),
            look,
            wait(DONE),
            look,
        ]
        h.run(steps, seed=seed, tensors={"source": source})
        early[seed], after = seen
        assert after
    assert early[None]
    assert not all(early.values())


def test_loads_overtake_each_other() -> None:
    source = h.aligned(256)
    orders = set()
    for seed in range(12):
        order: list[int] = []
        steps = [*FENCED, init(DONE + 8), call("fence_mbarrier_init"), arrive(DONE, 1, 128), arrive(DONE + 8, 1, 128)]
        steps += [call("bulk_load", DATA + 128 * i, source.ctypes.data, 128, DONE + 8 * i) for i in range(2)]

        def watch(w: Any, order: list[int] = order) -> bool:
            for i in range(2):
                if w.cta.barriers[DONE + 8 * i].phase and i not in order:
                    order.append(i)
            return len(order) == 2

        h.run([*steps, watch, wait(DONE), wait(DONE + 8)], seed=seed, tensors={"source": source})
        orders.add(tuple(order))
    assert orders == {(0, 1), (1, 0)}


def test_wait_group_read_frees_the_source_and_wait_group_the_destination() -> None:
    target = h.aligned(128)
    reads: dict[bool, set[bool]] = {True: set(), False: set()}
    for read in (True, False):
        for seed in range(12):
            target[:] = 0

            def look(w: Any, read: bool = read) -> None:
                reads[read].add(bool(target.any()))

            steps = [
                st(DATA),
                call("fence_proxy"),
                call("bulk_store", DATA, target.ctypes.data, 128),
                call("commit_group"),
            ]
            steps += [call("wait_group", 0, read), st(DATA, 9), look, call("wait_group", 0, False)]
            h.run(steps, seed=seed, tensors={"target": target})
            assert (target.view(np.uint32) == 1).all(), "the source was read before it was written again"
    assert reads == {True: {True, False}, False: {True}}


def test_the_latest_groups_may_be_left() -> None:
    target = h.aligned(256)
    left = set()
    for seed in range(60):
        target[:] = 0
        store = [call("bulk_store", DATA + 128 * i, target.ctypes.data + 128 * i, 128) for i in range(2)]
        steps = [
            st(DATA),
            st(DATA + 128),
            call("fence_proxy"),
            store[0],
            call("commit_group"),
            store[1],
            call("commit_group"),
        ]
        look: h.Step = lambda w: left.add((bool(target[:128].any()), bool(target[128:].any())))  # noqa: E731
        h.run(
            [*steps, call("wait_group", 1, False), look, call("wait_group", 0, False)],
            seed=seed,
            tensors={"target": target},
        )
        assert target.all() or (target.view(np.uint32) == 1).all()
    assert left == {(True, False), (True, True)}


def test_tensor_stores_are_late_until_waited_for() -> None:
    late = set()
    for seed in range(12):
        seen: list[bool] = []

        def look(w: Any, seen: list[bool] = seen) -> None:
            seen.append(bool((w.cta.tensor.cells[:32, 0] == h.LANE).all()))

        steps = [call("tmem_alloc", h.BASE, 32), call("tmem_store", 0, "32x32b", [h.LANE]), look, call("wait_st"), look]
        h.run([*steps, call("tmem_dealloc", 0, 32)], seed=seed)
        late.add(seen[0])
        assert seen[1]
    assert late == {False, True}
    with pytest.raises(UnknownInstruction, match=r"tcgen05.ld.16x64b is not modelled"):
        h.run([call("tmem_load", 0, "16x64b", 1)])


def test_the_tensor_pipe_keeps_its_order_and_commit_arrives_last(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(mma, "mma", lambda cta, kind, d, *rest, **options: log.append(f"mma {d}"))
    monkeypatch.setattr(mma, "copy_scales", lambda cta, taddr, desc, shape: log.append(f"cp {taddr} {shape}"))
    operation = [call("mma", "f16", d, 0, False, 0, 0, False) for d in range(3)]
    copy = call("copy_scales", 9, 0, "32x128b.warpx4")
    for seed in SEEDS:
        log.clear()
        steps = [
            *FENCED,
            operation[0],
            copy,
            operation[1],
            call("commit", DONE),
            wait(DONE),
            lambda w: log.append("seen"),
        ]
        machine = h.run([*steps, operation[2], call("commit", DONE), wait(DONE, 1)], seed=seed)
        assert log == ["mma 0", "cp 9 32x128b.warpx4", "mma 1", "seen", "mma 2"]
        assert machine.statistics.mma == {"f16": 3}
        assert machine.statistics.scale_copies == 1
    with pytest.raises(UnknownInstruction, match="multicast"):
        h.run([*FENCED, call("commit", DONE, 3)])


def test_findings_of_the_tensor_core_name_the_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*operands: Any, **options: Any) -> None:
        raise DescriptorError("what a descriptor")

    monkeypatch.setattr(mma, "mma", refuse)
    other = [bar(), call("mma", "mxf4nvf4", 0, 0, False, 0, 0, False, block=16), bar(), bar()]
    for seed in SEEDS:
        with pytest.raises(DescriptorError, match="what a descriptor") as caught:
            h.run([bar(), bar(), bar()], other, seed=seed)
        assert (caught.value.line, caught.value.warp) == (102, 1)


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("ordering", ["pipe", "isa"])
def test_a_whole_multiplication(seed: int | None, ordering: str) -> None:
    """D [128, 16] = A · B, K = 16, FP16, operands copied from global memory, no swizzle, read by four warps."""
    a, b = (RNG.integers(-8, 8, (rows, 16)).astype(np.float16) for rows in (128, 16))
    out = np.zeros((128, 16), np.float32)

    def laid_out(operand: Any) -> Any:
        """K-major without swizzle: 8 × 16-byte core matrices, K next to each other (LBO 128), then rows (SBO 256)."""
        raw = h.aligned(operand.nbytes)
        raw[:] = operand.reshape(-1, 8, 2, 8).transpose(0, 2, 1, 3).copy().view(np.uint8).reshape(-1)
        return raw

    sides = [laid_out(a), laid_out(b)]
    places = [h.BASE + 1024, h.BASE + 1024 + 4096]
    descriptors = [p >> 4 | 8 << 16 | 16 << 32 | 1 << 46 for p in places]
    idesc = 1 << 4 | 2 << 17 | 8 << 24
    full, done = h.BASE, h.BASE + 8
    lead = [init(full), init(done), call("fence_mbarrier_init"), call("tmem_alloc", h.BASE + 16, 32), bar()]
    lead += [arrive(full, 1, 4096 + 512)]
    lead += [call("bulk_load", p, s.ctypes.data, s.nbytes, full) for p, s in zip(places, sides, strict=True)]
    lead += [
        wait(full),
        call("mma", "f16", 0, descriptors[0], False, descriptors[1], idesc, False),
        call("commit", done),
    ]

    def read(w: Any) -> None:
        values, poison = w.cta.tmem_load(w, w.index << 21, "32x32b", 16)
        assert poison is None
        out[32 * w.index : 32 * w.index + 32] = np.stack(values, 1).view(np.float32)

    tail = [wait(done), call("fence_after"), read, call("wait_ld"), call("fence_before"), bar(1)]
    warps = [[*lead, *tail, call("fence_after"), call("tmem_dealloc", 0, 32)], *[[bar(), *tail] for _ in range(3)]]
    machine = h.run(*warps, seed=seed, ordering=ordering, tensors={"a": sides[0], "b": sides[1]}, size=1024 + 8192)
    np.testing.assert_array_equal(out, a.astype(np.float32) @ b.astype(np.float32).T)
    assert machine.statistics.tma == {"loads": 2, "bytes in": 4608}


def test_deadlock_reports_work_under_way() -> None:
    """With a seed everything asynchronous is done before a deadlock is called one; the report of a limit shows it."""
    source = h.aligned(128)
    texts = []
    for seed in range(8):
        load = call("bulk_load", DATA, source.ctypes.data, 128, DONE)
        with pytest.raises(Exception, match="no end after 6 turns") as caught:
            h.run([*FENCED, load, lambda w: False], seed=seed, limit=6, tensors={"source": source})
        texts.append(str(caught.value))
    assert any("under way: cp.async.bulk of warp 0, line 3" in text for text in texts)


def test_values_written_late_are_the_values_at_issue() -> None:
    """tcgen05.st takes its registers at issue, a bulk store its source when it is performed."""
    for seed in SEEDS:
        register = h.LANE.copy()

        def store(w: Any, register: Any = register) -> None:
            w.cta.tmem_store(w, 0, "32x32b", [register])

        steps = [call("tmem_alloc", h.BASE, 32), store, call("wait_st")]
        seen: list[Any] = []
        look: h.Step = lambda w, seen=seen: seen.append(w.cta.tmem_load(w, 0, "32x32b", 1)[0][0])  # noqa: E731
        h.run([*steps, look, call("tmem_dealloc", 0, 32)], seed=seed)
        np.testing.assert_array_equal(seen[0], h.LANE)


def test_shared_memory_is_visible_to_the_next_warp() -> None:
    for seed in SEEDS:
        h.run([st(DATA, h.LANE), bar(), bar()], [bar(), ld(DATA, h.LANE), bar()], seed=seed)
