"""mbarriers and named barriers: counts, phases, misuse."""

from __future__ import annotations

from typing import Any

import handmade as h
import numpy as np
import pytest
from handmade import arrive, bar, call, init, wait

from wanfp4.simulator.findings import BoundsError, DeadlockError, ProtocolError
from wanfp4.simulator.memory import SHARED_WINDOW

B, C = h.BASE, h.BASE + 8
SEEDS = (None, 0, 1, 2)


def fails(kind: type[Exception], match: str, *warps: Any, line: int | None = None, **options: Any) -> Any:
    with pytest.raises(kind, match=match) as caught:
        h.run(*warps, **options)
    error: Any = caught.value
    if line is not None:
        assert error.line == line
    return error


def look(seen: list[bool], parity: int) -> h.Step:
    return lambda w: seen.append(w.cta.test_wait(w, B, parity)) or True


def test_parity_of_a_fresh_barrier_and_of_later_phases() -> None:
    """PTX ISA, mbarrier.test_wait: the phase before the first counts as complete and has parity 1."""
    seen: list[bool] = []
    steps = [
        init(B, 2),
        look(seen, 1),
        look(seen, 0),
        arrive(B),
        look(seen, 0),
        arrive(B),
        look(seen, 0),
        look(seen, 1),
    ]
    machine = h.run([*steps, arrive(B, 2), look(seen, 1), look(seen, 0)])
    assert seen == [True, False, False, True, False, True, False]
    barrier = machine.barriers[B]
    assert (barrier.phase, barrier.pending, barrier.tx) == (2, 2, 0)
    assert machine.statistics.waits == {"mbarrier 0x400": (3, 0)}


def test_a_phase_needs_arrivals_and_bytes() -> None:
    seen: list[bool] = []
    data = h.aligned(64)
    copy = call("bulk_load", h.BASE + 128, data.ctypes.data, 64, B)
    fence = call("fence_mbarrier_init")
    h.run([init(B), fence, arrive(B, 1, 128), look(seen, 0), copy, look(seen, 0), copy, look(seen, 0)],
          tensors={"data": data}, track=False)  # fmt: skip
    assert seen == [False, False, True]
    seen.clear()
    # Bytes may come before they are expected: the tx-count is negative for a while.
    h.run([init(B), fence, copy, look(seen, 0), call("expect_tx", B, 64), look(seen, 0), arrive(B), look(seen, 0)],
          tensors={"data": data})  # fmt: skip
    assert seen == [False, False, True]


def test_arrivals_of_lanes() -> None:
    h.run(
        [
            init(B, 32),
            init(C, 1),
            arrive(B, 32),
            wait(B),
            call("arrive", [B, C], 1),
            call("arrive", [B] * 31, 1),
            wait(B, 1),
        ]
    )
    h.run([init(B, 2), call("arrive", B, 2), wait(B)])


@pytest.mark.parametrize("seed", SEEDS)
def test_waits_are_counted(seed: int | None) -> None:
    def patient(w: Any) -> bool:
        return "mbarrier" in str(w.cta.warps[1].wait)

    machine = h.run([init(B), bar(), patient, arrive(B)], [bar(), wait(B)], seed=seed)
    assert machine.statistics.waits["mbarrier 0x400"] == (1, 1)
    assert machine.statistics.waits["barrier 0"] == (2, 1)


@pytest.mark.parametrize(
    ("match", "kind", "steps", "line"),
    [
        ("1 arrivals more than the 2", ProtocolError, [init(B, 2), arrive(B), arrive(B, 2)], 3),
        ("no mbarrier was initialised there", ProtocolError, [arrive(B)], 1),
        ("no mbarrier was initialised there", ProtocolError, [init(B), wait(C)], 2),
        ("no mbarrier was initialised there", ProtocolError, [call("expect_tx", B, 4)], 1),
        ("no mbarrier was initialised there", ProtocolError, [call("mbarrier_inval", B)], 1),
        ("no mbarrier was initialised there", ProtocolError, [init(B), call("mbarrier_inval", B), arrive(B)], 3),
        ("mbarrier.init of the live mbarrier at 0x400", ProtocolError, [init(B), init(B)], 2),
        ("mbarrier.init at 0x404: not a multiple of 8", BoundsError, [init(B + 4)], 1),
        ("outside of shared memory", BoundsError, [init(h.BASE - 8)], 1),
        ("outside of shared memory", BoundsError, [init(h.BASE + 8192)], 1),
        ("mbarrier.init at 0x100000400: outside of shared memory", BoundsError, [init(B + (1 << 32))], 1),
        ("mbarrier.arrive at 0x7d00000000000400: outside", BoundsError, [init(B), arrive(SHARED_WINDOW + B)], 2),
        ("parity 2 of mbarrier 0x400: it can be 0 or 1", ProtocolError, [init(B), wait(B, 2)], 2),
        ("parity 3 of mbarrier 0x400", ProtocolError, [init(B), arrive(B), wait(B, 3)], 3),
        ("mbarrier.init with count 0", ProtocolError, [init(B, 0)], 1),
        ("mbarrier.init with count 1048576", ProtocolError, [init(B, 1 << 20)], 1),
        (r"tx-count 1048576 is out of range \(±1048575\)", ProtocolError, [init(B), arrive(B, 1, 1 << 20)], 2),
        (
            "tx-count 1048576 is out",
            ProtocolError,
            [init(B), call("expect_tx", B, 1 << 19), call("expect_tx", B, 1 << 19)],
            3,
        ),
    ],
)
@pytest.mark.parametrize("track", [False, True])
def test_misuse(match: str, kind: type[Exception], steps: Any, line: int, track: bool) -> None:
    error = fails(kind, match, steps, line=line, track=track)
    assert error.warp == 0


def test_init_again_after_inval() -> None:
    h.run([init(B), arrive(B), wait(B), call("mbarrier_inval", B), init(B, 2), arrive(B, 2), wait(B)])


def test_a_copy_that_outlives_its_mbarrier() -> None:
    data = h.aligned(64)
    steps = [init(B), call("fence_mbarrier_init"), call("bulk_load", h.BASE + 128, data.ctypes.data, 64, B)]
    for seed in range(4):
        options: dict[str, Any] = {"tensors": {"data": data}, "track": False, "seed": seed}
        with pytest.raises(ProtocolError, match="invalidated by now"):
            h.run([*steps, lambda w: bool(w.cta.loads), call("mbarrier_inval", B)], **options)


def test_every_phase_must_be_waited_for_by_the_isa() -> None:
    """PTX ISA, Phase of the mbarrier object: one successful test_wait or try_wait before the next phase's arrivals."""
    steps = [init(B), arrive(B), arrive(B), wait(B, 1)]
    h.run(steps)
    fails(
        ProtocolError,
        "arrival at mbarrier 0x400 in phase 1: nobody has waited for phase 0",
        steps,
        ordering="isa",
        line=3,
    )
    h.run([init(B), arrive(B), wait(B), arrive(B), wait(B, 1)], ordering="isa")


# Named barriers


@pytest.mark.parametrize("seed", SEEDS)
def test_named_barriers_release_in_generations(seed: int | None) -> None:
    order: list[tuple[int, int]] = []

    def note(stage: int) -> h.Step:
        return lambda w: order.append((stage, w.index))

    warps = [[note(0), bar(), note(1), bar(), note(2)] for _ in range(4)]
    h.run(*warps, seed=seed)
    assert [stage for stage, _ in order] == [0] * 4 + [1] * 4 + [2] * 4
    order.clear()
    # Producers arrive and go on, consumers wait; two warps each.
    free = h.run(
        [note(0), bar(5, 128, False), note(2)], [note(0), bar(5, 128, False)], *[[bar(5, 128), note(1)]] * 2, seed=seed
    )
    stages = [stage for stage, _ in order if stage != 2]
    assert stages == [0, 0, 1, 1]
    assert free.statistics.waits["barrier 5"][0] == 2


@pytest.mark.parametrize(
    ("match", "warps", "line"),
    [
        ("barrier 16: there are 16", [[bar(16)]], 1),
        ("barrier 1 for 33 threads: must be a multiple of 32, up to 64", [[bar(1, 33)], []], 1),
        ("barrier 1 for 96 threads", [[bar(1, 96)], []], 1),
        ("barrier 1 for 0 threads", [[bar(1, 0, False)], []], 1),
        ("barrier 1 for 32 threads, but warps .0. are at it for 64", [[bar(1, 64)], [bar(1, 32)]], 101),
        ("warp 0 arrives at barrier 1 again before all others have", [[bar(1, 64, False), bar(1, 64)], []], 2),
    ],
)
def test_misuse_of_named_barriers(match: str, warps: Any, line: int) -> None:
    fails(ProtocolError, match, *warps, line=line)


# Deadlock


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("track", [False, True])
def test_deadlock_says_who_waits_for_what(seed: int | None, track: bool) -> None:
    data = h.aligned(64)
    setup = [init(B, 2), init(C), call("fence_mbarrier_init"), bar()]
    warps = [*setup, arrive(B, 1, 64), wait(B)], [bar(), wait(C, 0)], [bar(), bar(3, 64)], [bar()]
    message = "deadlock: no warp can go on"
    error = fails(DeadlockError, message, *warps, seed=seed, track=track, tensors={"data": data})
    text = error.message
    assert (
        "warp 0: line 6, waits for parity 0 of mbarrier 0x400 (phase 0, 1 of 2 arrivals pending, tx-count 64)" in text
    )
    assert (
        "warp 1: line 102, waits for parity 0 of mbarrier 0x408 (phase 0, 1 of 1 arrivals pending, tx-count 0)" in text
    )
    assert "warp 2: line 202, waits at barrier 3 (32 of 64 threads arrived: warps [2])" in text
    assert "warp 3: has ended (line 301)" in text
    assert error.line == 6


def test_deadlock_of_a_whole_block_barrier_shows_who_left() -> None:
    error = fails(DeadlockError, "deadlock", [bar()], [])
    assert "warp 0: line 1, waits at barrier 0 (32 of 64 threads arrived: warps [0])" in error.message
    assert "warp 1: has ended" in error.message


def test_endless_polling_ends_at_the_limit() -> None:
    poll: h.Step = lambda w: w.cta.test_wait(w, B, 0)  # noqa: E731
    for seed in SEEDS:
        error = fails(DeadlockError, "no end after 12 turns", [init(B), poll], [lambda w: False], seed=seed, limit=12)
        assert error.message.count("can go on") == 2


def test_two_warps_that_hand_over_with_peeks() -> None:
    """A peek whose "no" is an answer must not stop the others."""
    for seed in SEEDS:
        machine = h.run([init(B), bar(), lambda w: w.cta.test_wait(w, B, 0)], [bar(), arrive(B)], seed=seed)
        assert machine.barriers[B].phase == 1


def test_lanes_of_arrive_go_to_their_own_addresses() -> None:
    machine = h.run([init(B, 3), init(C, 2), call("arrive", [B, C, B], 1)])
    assert [machine.barriers[x].pending for x in (B, C)] == [1, 1]
    np.testing.assert_equal(machine.barriers[B].phase, 0)
