"""Memories: bounds, alignment, poison, allocation."""

from __future__ import annotations

from typing import Any

import handmade as h
import numpy as np
import pytest

from wanfp4.simulator.findings import BoundsError, PoisonError, ProtocolError, SimulationError
from wanfp4.simulator.judge import Action
from wanfp4.simulator.memory import PARAM_BASE, SHARED_WINDOW, GlobalMemory

RNG = np.random.default_rng(0)


def fails(
    kind: type[SimulationError], match: str, *warps: Any, line: int | None = None, **options: Any
) -> SimulationError:
    with pytest.raises(kind, match=match) as caught:
        h.run(*warps, **options)
    if line is not None:
        assert caught.value.line == line
    return caught.value


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("masked", [False, True])
def test_shared_round_trip(size: int, masked: bool) -> None:
    data = RNG.integers(0, 256, (32, size), np.uint8)
    mask = h.LANE % 3 == 0 if masked else None
    seen: list[Any] = []

    def step(w: Any) -> None:
        w.cta.store_shared(w, h.at(h.BASE, size), data, None, mask)
        seen.append(w.cta.load_shared(w, h.at(h.BASE, size), size, mask))

    h.run([step])
    values, poison = seen[0]
    assert poison is None
    np.testing.assert_array_equal(values, data if mask is None else np.where(mask[:, None], data, 0))


def test_shared_poison_moves_by_bytes() -> None:
    poison = RNG.integers(0, 2, (32, 4)).astype(np.bool_)
    seen: list[Any] = []

    def step(w: Any) -> None:
        seen.append(w.cta.load_shared(w, h.at(h.BASE), 4, None)[1])
        w.cta.store_shared(w, h.at(h.BASE), h.words(7), poison, None)
        seen.append(w.cta.load_shared(w, h.at(h.BASE), 4, None)[1])
        w.cta.store_shared(w, h.at(h.BASE), h.words(8), None, None)
        seen.append(w.cta.load_shared(w, h.at(h.BASE), 4, None)[1])

    h.run([step])
    assert seen[0].all()
    np.testing.assert_array_equal(seen[1], poison)
    assert seen[2] is None
    seen.clear()
    h.run([step], track=False)
    assert seen == [None, None, None]


def test_lanes_that_store_to_one_place() -> None:
    place = np.where(h.LANE < 30, h.at(h.BASE), h.BASE + 256).astype(np.uint32)

    def store(values: Any) -> h.Step:
        return h.call("store_shared", place, h.words(values), None, None)

    h.run([store(5)])
    fails(ProtocolError, "lanes store different values at shared memory 0x500", [store(h.LANE)], line=1)
    h.run([store(h.LANE)], track=False)
    wide = h.call(
        "store_shared", np.full(32, h.BASE, np.uint32), np.tile(h.LANE[:, None], 16).astype(np.uint8), None, None
    )
    fails(ProtocolError, "different values at shared memory 0x400", [wide])


@pytest.mark.parametrize(
    ("address", "size", "message"),
    [
        (h.BASE - 4, 4, r"load of shared memory 0x3fc..0x3ff: the CTA has 0x400..0x23ff"),
        (h.BASE + 8192 - 124, 4, r"load of shared memory 0x2400"),
        (h.BASE + 2, 4, r"load of 4 bytes at shared memory 0x402: not aligned"),
        (h.BASE + 8, 16, r"load of 16 bytes at shared memory 0x408: not aligned"),
    ],
)
@pytest.mark.parametrize("track", [False, True])
def test_shared_bounds_and_alignment(address: int, size: int, message: str, track: bool) -> None:
    step = h.call("load_shared", h.at(address, max(size, 4)), size, None)
    error = fails(BoundsError, message, [h.st(h.BASE), step], track=track, line=2)
    assert error.warp == 0


def test_high_water_marks() -> None:
    steps = [h.st(h.BASE + 1024), h.call("tmem_alloc", h.BASE, 64), h.call("tmem_alloc", h.BASE + 8, 32)]
    steps += [h.call("tmem_dealloc", 0, 64), h.call("tmem_dealloc", 64, 32)]
    statistics = h.run(steps).statistics
    assert (statistics.shared_bytes, statistics.tensor_columns) == (1024 + 128, 96)


def test_asynchronous_reads_of_shared_memory() -> None:
    machine = h.cta([h.st(h.BASE, h.LANE), h.call("fence_proxy")], track=True)
    machine.run()
    assert machine.judge is not None
    shared = machine.shared
    shared.acting = machine.judge.store(0, 5, "a copy")
    addresses = (h.BASE + np.arange(128)).reshape(4, 32)
    addresses = np.array(addresses)  # one that owns its data, so that its plan is kept
    addresses.flags.writeable = False
    want = h.words(h.LANE).reshape(4, 32)
    for _ in range(2):
        np.testing.assert_array_equal(shared.take(addresses), want)
    assert len(shared.plans) == 1
    with pytest.raises(PoisonError, match="a copy reads shared memory 0x480, which nobody defined") as caught:
        shared.take(addresses + 16)
    assert caught.value.line == 5
    with pytest.raises(BoundsError, match="a copy of shared memory"):
        shared.take(addresses + 8192)
    assert len(shared.plans) == 1, "an array that may change must not be remembered"


# Global memory


def test_global_round_trip_in_place() -> None:
    data, other = np.zeros(256, np.uint8), np.zeros(128, np.uint8)
    address = data.ctypes.data + 8 * h.LANE.astype(np.uint64)
    values = RNG.integers(0, 256, (32, 8), np.uint8)
    mask = h.LANE < 7
    seen: list[Any] = []

    def step(w: Any) -> None:
        w.cta.store_global(w, address, values, None, mask)
        seen.append(w.cta.load_global(w, address, 8, mask)[0])

    h.run([step], tensors={"data": data, "other": other})
    np.testing.assert_array_equal(seen[0], np.where(mask[:, None], values, 0))
    np.testing.assert_array_equal(data.reshape(32, 8)[:7], values[:7])
    assert not data[56:].any()


def test_global_lanes_in_several_tensors_and_odd_bases() -> None:
    raw = h.aligned(600)
    first, second = raw[2:258], raw[300:556]  # not multiples of 4: their bytes are gathered one by one
    first[:], second[:] = 1, 2
    address = np.where(h.LANE < 16, first.ctypes.data + 2, second.ctypes.data) + 4 * h.LANE.astype(np.uint64)
    seen: list[Any] = []

    def step(w: Any) -> None:
        seen.append(w.cta.load_global(w, address.astype(np.uint64), 4, None)[0])
        w.cta.store_global(w, address.astype(np.uint64), h.words(0x03030303), None, None)
        seen.append(w.cta.load_global(w, address.astype(np.uint64), 4, None)[0])

    h.run([step], tensors={"first": first, "second": second})
    np.testing.assert_array_equal(seen[0][:, 0], np.where(h.LANE < 16, 1, 2))
    assert (seen[1] == 3).all()
    assert (first == 3).sum() == 64
    assert (second == 3).sum() == 64


def test_global_bounds_name_the_nearest_tensor() -> None:
    raw = h.aligned(4096)
    memory = GlobalMemory({"low": raw[:256], "high": raw[1024:2048]}, read_only=["high"])
    start = raw.ctypes.data
    cases = [
        (start + 256, "load", r"12 bytes past the end of tensor 'low' \(256 bytes\)"),
        (start + 1000, "load", r"24 bytes before tensor 'high'"),
        (start + 2040, "load", r"4 bytes past the end of tensor 'high'"),
        (start + 1024, "store", r"tensor 'high' is read-only"),
    ]
    for address, verb, message in cases:
        with pytest.raises(BoundsError, match=message) as caught:
            memory.region(address, address + 12, verb == "store", verb, 7, 3)
        assert (caught.value.line, caught.value.warp) == (7, 3)
    with pytest.raises(BoundsError, match="no tensor is registered"):
        GlobalMemory({}).load(np.array([64], np.uint64), 4, 1, 0)
    frozen = raw[:64].copy()
    frozen.flags.writeable = False
    with pytest.raises(BoundsError, match="'frozen' is read-only"):
        GlobalMemory({"frozen": frozen}).store(
            np.array([frozen.ctypes.data], np.uint64), np.zeros((1, 4), np.uint8), 1, 0
        )
    with pytest.raises(BoundsError, match="not aligned"):
        memory.load(np.array([start + 2], np.uint64), 4, 1, 0)


def test_overlapping_tensors() -> None:
    raw = h.aligned(1024)
    memory = GlobalMemory({"all": raw, "part": raw[256:512]}, read_only=["part"])
    start = raw.ctypes.data
    assert memory.region(start + 500, start + 700, False, "load", 1, 0).name == "all"
    assert memory.region(start + 256, start + 300, True, "store", 1, 0).name == "all"
    with pytest.raises(TypeError, match="flat, contiguous uint8"):
        memory.add("strided", raw[::2])


def test_undefined_values_do_not_reach_global_memory() -> None:
    data = np.zeros(128, np.uint8)
    address = data.ctypes.data + 4 * h.LANE.astype(np.uint64)
    poison = np.zeros((32, 4), np.bool_)
    poison[9, 2] = True
    store = h.call("store_global", address, h.words(1), poison, None)
    fails(PoisonError, "nobody defined is stored to global", [store], tensors={"data": data}, line=1)
    h.run([h.call("store_global", address, h.words(1), poison, h.LANE != 9)], tensors={"data": data})


def test_generic_addresses() -> None:
    data = np.full(128, 9, np.uint8)
    params = np.arange(128, dtype=np.uint8)
    windows = [SHARED_WINDOW + h.BASE, PARAM_BASE, data.ctypes.data]
    address = np.array([windows[lane % 3] + 4 * lane for lane in range(32)], np.uint64)
    seen: list[Any] = []

    def step(w: Any) -> None:
        seen.append(w.cta.load_generic(w, address, 4, None))
        w.cta.store_generic(w, address, h.words(0x05050505), None, h.LANE % 3 != 1)

    h.run([h.st(h.BASE, 0x07070707), step, h.ld(h.BASE, np.where(h.LANE % 3 == 0, 0x05050505, 0x07070707))],
          tensors={"data": data}, params=params)  # fmt: skip
    values, poison = seen[0]
    assert poison is None
    want = np.where(h.LANE % 3 == 0, 7, np.where(h.LANE % 3 == 1, 4 * h.LANE, 9))
    np.testing.assert_array_equal(values[:, 0], want)
    np.testing.assert_array_equal(data.reshape(32, 4)[:, 0], np.where(h.LANE % 3 == 2, 5, 9))
    to_param = h.call("store_generic", np.full(32, PARAM_BASE, np.uint64), h.words(0), None, None)
    fails(BoundsError, "store to a kernel parameter", [to_param], params=params, line=1)
    beyond = h.call("load_generic", np.full(32, PARAM_BASE + 126, np.uint64), 4, None)
    fails(BoundsError, r"parameter bytes 126..129, of 128", [beyond], params=params)


@pytest.mark.parametrize(
    ("how", "dtype", "old", "new", "left"),
    [
        ("add", np.uint32, 5, 3, 8),
        ("add", np.float32, 0.5, 0.25, 0.75),
        ("min", np.int32, -5, 3, -5),
        ("max", np.int32, -5, 3, 3),
        ("exch", np.uint64, 5, 3, 3),
        ("and", np.uint32, 6, 3, 2),
        ("or", np.uint32, 6, 3, 7),
        ("xor", np.uint32, 6, 3, 5),
        ("inc", np.uint32, 3, 3, 0),
        ("inc", np.uint32, 2, 3, 3),
        ("dec", np.uint32, 0, 3, 3),
        ("dec", np.uint32, 2, 3, 1),
    ],
)
@pytest.mark.parametrize("space", ["shared", "global", "generic"])
def test_atomics(how: str, dtype: Any, old: Any, new: Any, left: Any, space: str) -> None:
    size = np.dtype(dtype).itemsize
    data = np.full(32, old, dtype)
    where = h.at(h.BASE, size) if space == "shared" else data.ctypes.data + size * h.LANE.astype(np.uint64)
    if space == "generic":
        where = SHARED_WINDOW + h.at(h.BASE, size).astype(np.uint64)
    mask = h.LANE != 4
    seen: list[Any] = []

    def step(w: Any) -> None:
        seen.append(w.cta.atomic(w, space, how, where, np.full(32, new, dtype), mask))
        seen.append(w.cta.load_shared(w, h.at(h.BASE, size), size, None)[0].copy().view(dtype)[:, 0])

    def fill(w: Any) -> None:
        w.cta.store_shared(w, h.at(h.BASE, size), data.view(np.uint8).reshape(32, size).copy(), None, None)

    h.run([fill, step], tensors={"data": data.view(np.uint8)})
    np.testing.assert_array_equal(seen[0], np.where(mask, old, 0).astype(dtype))
    result = data if space == "global" else seen[1]
    np.testing.assert_array_equal(result, np.where(mask, left, old).astype(dtype))


def test_atomics_add_up_over_lanes() -> None:
    where = np.full(32, h.BASE, np.uint32)
    h.run(
        [
            h.st(h.BASE, 0),
            h.call("atomic", "shared", "add", where, h.LANE, None),
            h.ld(h.BASE, np.where(h.LANE, 0, 496)),
        ]
    )
    fails(PoisonError, "atomic on shared memory 0x400", [h.call("atomic", "shared", "add", where, h.LANE, None)])


# Bytes of an mbarrier


def test_live_mbarriers_are_opaque() -> None:
    inside = h.BASE + 64
    start = [h.init(inside)]
    fails(ProtocolError, "load of the live mbarrier at 0x440", [*start, h.ld(h.BASE)], line=2)
    fails(ProtocolError, "store of the live mbarrier at 0x440", [*start, h.st(h.BASE)], line=2)
    wide = h.call("load_shared", h.at(h.BASE, 16), 16, h.LANE == 3)
    h.run([*start, wide])
    wide = h.call("load_shared", h.at(h.BASE, 16), 16, h.LANE == 4)
    fails(ProtocolError, "load of the live mbarrier at 0x440", [*start, wide], line=2)
    h.run([*start, h.call("mbarrier_inval", inside), h.st(h.BASE), h.ld(h.BASE, 1)])


# Tensor memory


def held(*steps: h.Step, columns: int = 64) -> list[h.Step]:
    """Steps of one warp that owns columns 0..columns-1."""
    return [h.call("tmem_alloc", h.BASE, columns), *steps, h.call("tmem_dealloc", 0, columns)]


def test_allocation_follows_the_order_and_writes_the_address() -> None:
    seen: list[int] = []

    def look(w: Any) -> None:
        values, _ = w.cta.load_shared(w, np.full(32, h.BASE, np.uint32), 4, None)
        seen.append(int(values.view(np.uint32)[0, 0]))

    alloc, free = (lambda n: h.call("tmem_alloc", h.BASE, n)), (lambda at, n: h.call("tmem_dealloc", at, n))
    h.run([alloc(128), look, alloc(64), look, alloc(64), look, free(128, 64), alloc(32), look, alloc(32), look,
           free(0, 128), free(192, 64), free(128, 32), free(160, 32)])  # fmt: skip
    assert seen == [0, 128, 192, 128, 160]


@pytest.mark.parametrize(
    ("steps", "message", "line"),
    [
        ([("tmem_alloc", h.BASE, 48)], "48 columns: must be a power of two", 1),
        ([("tmem_alloc", h.BASE, 16)], "16 columns: must be a power of two", 1),
        ([("tmem_alloc", h.BASE, 1024)], "1024 columns: must be a power of two", 1),
        ([("tmem_alloc", h.BASE, 32), ("tmem_alloc", h.BASE, 64)], "after one of 32: sizes must not increase", 2),
        ([("tmem_alloc", h.BASE, 512), ("tmem_alloc", h.BASE, 32)], r"would wait: columns 0-511 \(line 1\)", 2),
        ([("tmem_relinquish",), ("tmem_alloc", h.BASE, 32)], r"after tcgen05.relinquish_alloc_permit \(line 1\)", 2),
        (
            [("tmem_alloc", h.BASE, 64), ("tmem_dealloc", 0, 32)],
            "32 columns at column 0: allocated is 64 at column 0",
            2,
        ),
        ([("tmem_alloc", h.BASE, 64), ("tmem_dealloc", 32, 64)], "64 columns at column 32: allocated is 64", 2),
        ([("tmem_dealloc", 0, 64)], "allocated is nothing", 1),
        ([("tmem_alloc", h.BASE, 64), ("tmem_dealloc", 1 << 16, 64)], "not an address that alloc gave", 2),
        ([("tmem_alloc", h.BASE, 64)], "64 tensor memory columns at 0 are not deallocated at the end", 1),
    ],
)
@pytest.mark.parametrize("track", [False, True])
def test_allocation_rules(steps: Any, message: str, line: int, track: bool) -> None:
    fails(ProtocolError, message, [h.call(*step) for step in steps], line=line, track=track)


def test_tensor_memory_is_reached_by_quarter_and_column() -> None:
    registers = [h.LANE, h.LANE + np.uint32(100)]
    load = h.call("tmem_load", 0, "32x32b", 2)
    lane = h.call("tmem_store", 32 << 16 | 0, "32x32b", registers)
    fails(BoundsError, "tcgen05.st at 0x200000: warp 0 reaches tensor memory lanes 0-31, not 32", held(lane), line=2)
    fails(BoundsError, "tcgen05.ld of tensor memory columns 0-1: column 0 is not allocated", [load], line=1)
    beyond = h.call("tmem_load", 63, "32x32b", 2)
    fails(BoundsError, "columns 63-64: column 64 is not allocated", held(beyond), line=2)
    fails(BoundsError, "columns 511-512", [h.call("tmem_alloc", h.BASE, 512), h.call("tmem_load", 511, "32x32b", 2)])
    fails(BoundsError, "column 0 is deallocated at line 2", [*held(), load], line=3)


@pytest.mark.parametrize("track", [False, True])
def test_tensor_memory_keeps_values_and_poison(track: bool) -> None:
    registers = [RNG.integers(0, 2**32, 32, np.uint32) for _ in range(3)]
    poison = [None, RNG.integers(0, 16, 32).astype(np.uint8), None]
    seen: list[Any] = []

    def load(w: Any) -> None:
        seen.append(w.cta.tmem_load(w, 5, "32x32b", 4))

    h.run(held(h.call("tmem_store", 5, "32x32b", registers, poison), h.call("wait_st"), load), track=track)
    values, marks = seen[0]
    for value, register in zip(values, registers, strict=False):
        np.testing.assert_array_equal(value, register)
    if track:
        np.testing.assert_array_equal(marks, np.stack([np.zeros(32), poison[1], np.zeros(32), np.full(32, 15)], 1))
    else:
        assert marks is None


def test_columns_allocated_again_are_undefined() -> None:
    seen: list[Any] = []
    look: h.Step = lambda w: seen.append(w.cta.tmem_load(w, 0, "32x32b", 1)[1])  # noqa: E731
    fill = [h.call("tmem_store", 0, "32x32b", [h.LANE]), h.call("wait_st"), look]
    h.run([*held(*fill), *held(look)])
    assert seen[0] is None
    assert (seen[1] == 15).all()


def test_take_and_put_agree_for_slices_and_arrays() -> None:
    machine = h.cta(held())
    tensor, judge = machine.tensor, machine.judge
    assert judge is not None
    tensor.alloc(64, 1, 0)
    tensor.acting = judge.tensor_pipe(0, 3, "an operation")
    values = RNG.integers(0, 2**32, (128, 8), np.uint32)
    tensor.put(slice(0, 128), slice(4, 12), values)
    lanes, columns = np.arange(128)[:, None], np.arange(4, 12)[None, :]
    np.testing.assert_array_equal(tensor.take(lanes, columns), values)
    np.testing.assert_array_equal(tensor.take(lanes[::-1], columns[:, ::2]), values[::-1, ::2])
    np.testing.assert_array_equal(tensor.take(slice(32, 64), slice(5, 6)), values[32:64, 1:2])
    some = np.array([3, 77])
    np.testing.assert_array_equal(tensor.take(some, np.array([4, 9])), values[some, [0, 5]])
    with pytest.raises(
        PoisonError, match="an operation reads tensor memory lane 40, column 12, which nobody"
    ) as caught:
        tensor.take(slice(40, 64), slice(11, 13))
    assert caught.value.line == 3
    with pytest.raises(PoisonError, match="lane 7, column 12"):
        tensor.take(np.array([[7], [40]]), np.array([[11, 12]]))
    with pytest.raises(BoundsError, match="columns 60-67: column 64 is not allocated"):
        tensor.take(slice(0, 128), slice(60, 68))
    with pytest.raises(BoundsError, match="column 70 is not allocated"):
        tensor.take(np.array([1, 2]), np.array([3, 70]))
    with pytest.raises(BoundsError, match="no lane 128"):
        tensor.take(slice(100, 129), slice(4, 5))


def test_messages_without_tracking_name_the_operation() -> None:
    machine = h.cta([], track=False)
    machine.tensor.acting = Action("tcgen05.mma", 12, 3)
    with pytest.raises(BoundsError, match=r"tcgen05.mma of tensor memory columns 0-7") as caught:
        machine.tensor.take(slice(0, 128), slice(0, 8))
    assert (caught.value.line, caught.value.warp) == (12, 3)
