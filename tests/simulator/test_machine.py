"""The CTA: divergence, special registers, schedules, statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import handmade as h
import numpy as np
import pytest
from handmade import bar, call

from wanfp4.simulator.findings import BoundsError, ProtocolError
from wanfp4.simulator.machine import CTA
from wanfp4.simulator.memory import PARAM_BASE, GlobalMemory
from wanfp4.simulator.scheduler import FULL


class Blocks:
    """A program of blocks that say themselves where they go on."""

    static_bytes = 64

    def __init__(self, *blocks: Callable[..., int], threads: tuple[int, int, int] = (32, 1, 1)) -> None:
        self.full, self.part = list(blocks), list(blocks)
        self.sizes = [1] * len(blocks)
        self.kernel = h.Shape(1)
        self.kernel.threads = threads

    def registers(self) -> tuple[list[Any], list[Any]]:
        return [None, None], [None, None]

    def line(self, index: int) -> int:
        return 10 * index


def machine(code: Any, **options: Any) -> CTA:
    place = options.pop("block", (0, 0, 0))
    grid = options.pop("grid", (1, 1, 1))
    return CTA(code, place, grid, 0, np.zeros(0, np.uint8), GlobalMemory({}), **options)


def test_lanes_part_and_meet_again() -> None:
    trail: list[tuple[int, int | None]] = []

    def note(index: int, mask: Any) -> None:
        trail.append((index, None if mask is None else int(mask.sum())))

    def start(w: Any, registers: Any, mask: Any = None) -> int:
        note(0, mask)
        w.split = (h.LANE < 8, 2, 1)  # eight lanes branch to block 2, the others fall through to 1
        return -2

    def straight(index: int, then: int) -> Callable[..., int]:
        def block(w: Any, registers: Any, mask: Any = None) -> int:
            note(index, mask)
            return then

        return block

    code = Blocks(start, straight(1, 3), straight(2, 3), straight(3, -1))
    cta = machine(code)
    cta.run()
    assert trail == [(0, None), (1, 24), (2, 8), (3, None)], "a warp that is whole again runs the faster code"
    assert cta.warps[0].hits == [1, 1, 1, 1]


def test_some_lanes_end_early() -> None:
    masks: list[Any] = []

    def start(w: Any, registers: Any, mask: Any = None) -> int:
        w.split = (h.LANE % 2 == 0, -1, 1)
        return -2

    def rest(w: Any, registers: Any, mask: Any = None) -> int:
        masks.append(mask)
        return -1

    machine(Blocks(start, rest)).run()
    np.testing.assert_array_equal(masks[0], h.LANE % 2 == 1)


def test_a_loop_counts_its_blocks_and_stays_whole() -> None:
    def loop(w: Any, registers: Any, mask: Any = None) -> int:
        assert mask is None
        registers[0] = (registers[0] or 0) + 1
        return 0 if registers[0] < 10_000 else 1

    cta = machine(Blocks(loop, lambda w, registers, mask=None: -1), seed=4)
    cta.run()
    assert cta.warps[0].hits == [10_000, 1]
    assert FULL.all()


def test_special_registers() -> None:
    seen: dict[int, dict[str, Any]] = {}

    def read(w: Any, registers: Any, mask: Any = None) -> int:
        seen[w.index] = {name: w.special[name] for name in w.special}
        clocks = [int(w.special["%clock64"][0]) for _ in range(3)]
        assert clocks == sorted(set(clocks))
        assert w.special["%clock64"].dtype == np.uint64
        assert w.special["%clock"].dtype == np.uint32
        with pytest.raises(KeyError):
            w.special["%pm0"]
        return -1

    machine(Blocks(read, threads=(16, 4, 2)), block=(3, 4, 5), grid=(7, 8, 9)).run()
    assert sorted(seen) == [0, 1, 2, 3]
    thread = np.arange(128).reshape(4, 32)
    for warp, special in seen.items():
        np.testing.assert_array_equal(special["%tid.x"], thread[warp] % 16)
        np.testing.assert_array_equal(special["%tid.y"], thread[warp] // 16 % 4)
        np.testing.assert_array_equal(special["%tid.z"], thread[warp] // 64)
        for name, value in {
            "%warpid": warp,
            "%nwarpid": 4,
            "%ntid.y": 4,
            "%ctaid.x": 3,
            "%ctaid.z": 5,
            "%nctaid.y": 8,
        }.items():
            assert (special[name] == value).all(), name
        masks = [int(special[f"%lanemask_{how}"][5]) for how in ("lt", "le", "eq", "ge", "gt")]
        assert masks == [0x1F, 0x3F, 0x20, 0xFFFFFFE0, 0xFFFFFFC0]
        assert int(special["%lanemask_gt"][31]) == 0
        assert int(special["%lanemask_le"][31]) == 0xFFFFFFFF


def test_schedules_repeat_by_seed_and_differ_between_seeds() -> None:
    def order(seed: int | None) -> tuple[int, ...]:
        turns: list[int] = []
        h.run(*[[lambda w: turns.append(w.index)] * 6 for _ in range(4)], seed=seed)
        return tuple(turns)

    assert order(None) == tuple(np.repeat(range(4), 6))
    orders = [order(seed) for seed in range(10)]
    assert orders == [order(seed) for seed in range(10)]
    assert len(set(orders)) > 5


def test_kernels_that_cannot_be() -> None:
    empty: Callable[..., int] = lambda w, registers, mask=None: -1  # noqa: E731
    with pytest.raises(ProtocolError, match="a CTA of 33 threads: whole warps"):
        machine(Blocks(empty, threads=(33, 1, 1)))
    with pytest.raises(ProtocolError, match="a CTA of 2048 threads"):
        machine(Blocks(empty, threads=(1024, 2, 1)))
    with pytest.raises(ProtocolError, match="ordering is 'strict'; it can be 'pipe' or 'isa'"):
        machine(Blocks(empty), ordering="strict")


def test_parameters() -> None:
    params = np.arange(16, dtype=np.uint8)
    cta = h.cta([], params=params)
    np.testing.assert_array_equal(cta.load_param(4, 8), params[4:12])
    assert cta.param_offset(PARAM_BASE + 12) == 12
    with pytest.raises(BoundsError, match="0x400 is not the address of a parameter"):
        cta.param_offset(1024)
    with pytest.raises(BoundsError, match=r"parameter bytes 12..19, of 16"):
        cta.load_param(12, 8)


def test_setmaxnreg_is_the_same_in_a_warpgroup() -> None:
    same = [[call("set_registers", 200), call("set_registers", 24)] for _ in range(4)]
    other = [[call("set_registers", 56)] for _ in range(4)]
    h.run(*same, *other)
    other[2] = [call("set_registers", 64)]
    for seed in (None, 0, 1):
        with pytest.raises(ProtocolError, match=r"setmaxnreg .*, while warp .* of the same warpgroup has"):
            h.run(*same, *other, seed=seed)


def test_a_warp_that_waits_at_its_last_instruction_has_not_ended() -> None:
    with pytest.raises(Exception, match="deadlock"):
        h.run([bar()], [])
    h.run([bar()], [bar()])
