"""Tensor maps, boxes, swizzles and copies against NumPy."""

from __future__ import annotations

from typing import Any

import handmade as h
import ml_dtypes
import numpy as np
import pytest
from handmade import arrive, call, init, wait

from wanfp4.simulator import tma
from wanfp4.simulator.findings import BoundsError, DescriptorError, ProtocolError
from wanfp4.simulator.memory import PARAM_BASE

BARRIER, BOX = h.BASE, h.BASE + 1024
RNG = np.random.default_rng(1)
# name -> code, bits
TYPES = {
    "u8": (0, 8),
    "u16": (1, 16),
    "u32": (2, 32),
    "u64": (4, 64),
    "f16": (6, 16),
    "f32": (7, 32),
    "bf16": (10, 16),
    "u4": (11, 4),
}
# A box of 128 bytes a row for every swizzle's row width.
SWIZZLES = {0: 64, 1: 32, 2: 64, 3: 128}


def padded(array: Any, box: Any, at: Any) -> Any:
    """The box at an origin, zero where it is outside. Dimension 0 of `at` is the array's last axis."""
    out = np.zeros(tuple(reversed(box)), array.dtype)
    for index in np.ndindex(out.shape):
        place = tuple(i + a for i, a in zip(index, reversed(at), strict=True))
        if all(0 <= p < n for p, n in zip(place, array.shape, strict=True)):
            out[index] = array[place]
    return out


def swizzled(offset: int, mode: int, atom32: bool = False) -> int:
    """By moving bits of one address, as CUTLASS's swizzle.hpp says it in words."""
    if atom32:
        return offset ^ (offset >> 7 & 3) << 5
    return offset ^ (offset >> 7 & (0, 1, 3, 7)[mode]) << 4


def copy(
    data: Any,
    sizes: Any,
    box: Any,
    at: Any,
    *,
    bits: int,
    kind: int,
    swizzle: int = 0,
    flags: int = 0,
    seed: int | None = None,
    store: Any = None,
    reduce: str | None = None,
) -> Any:
    """Load a box of `data` to BOX, or with `store`, its bytes as they lie there, store one. Returns both."""
    raw = h.tensor_map(data, sizes, box, bits=bits, kind=kind, swizzle=swizzle, flags=flags)
    size = int(np.prod(box)) * bits // 8
    options: dict[str, Any] = {"tensors": {"data": data}, "params": raw, "size": 1024 + 32768, "seed": seed}
    if store is None:
        steps = [init(BARRIER), call("fence_mbarrier_init"), arrive(BARRIER, 1, size)]
        steps += [call("tma_load", BOX, PARAM_BASE, at, BARRIER), wait(BARRIER)]
    else:

        def fill(w: Any) -> None:
            w.cta.shared.data[BOX : BOX + len(store)] = store
            if w.cta.shared.poison is not None:
                w.cta.shared.poison[BOX : BOX + len(store)] = 0

        steps = [
            fill,
            call("tma_store", BOX, PARAM_BASE, at, reduce),
            call("commit_group"),
            call("wait_group", 0, False),
        ]
    machine = h.run(steps, **options)
    return machine.shared.data[BOX : BOX + size].copy(), machine


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("seed", [None, 1])
def test_every_swizzle_lands_where_it_should(swizzle: int, seed: int | None) -> None:
    row = SWIZZLES[swizzle]
    data = h.aligned(64 * 256)
    data[:] = RNG.integers(0, 256, data.size)
    got, _ = copy(data, [256, 64], [row, 40], [16, 3], bits=8, kind=0, swizzle=swizzle, seed=seed)
    box = data.reshape(64, 256)[3:43, 16 : 16 + row].reshape(-1)
    want = np.zeros_like(box)
    for i, value in enumerate(box):
        want[swizzled(BOX + i, swizzle) - BOX] = value
    np.testing.assert_array_equal(got, want)


def test_swizzle_with_atoms_of_32_bytes() -> None:
    data = h.aligned(16 * 128)
    data[:] = RNG.integers(0, 256, data.size)
    got, _ = copy(data, [128, 16], [128, 16], [0, 0], bits=8, kind=0, swizzle=3, flags=1 << 19)
    want = np.zeros_like(data)
    for i, value in enumerate(data):
        want[swizzled(BOX + i, 3, atom32=True) - BOX] = value
    np.testing.assert_array_equal(got, want)


def test_swizzles_are_permutations_of_absolute_addresses() -> None:
    address = np.arange(4096, dtype=np.int64)
    for layout in (0, 1, 2, 4, 6):
        moved = tma.swizzle(address, layout)
        np.testing.assert_array_equal(np.sort(moved), address)
        np.testing.assert_array_equal(tma.swizzle(moved, layout), address)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("at", [(0, 0, 0), (-8, 1, -1), (40, 5, 2), (64, 0, 0), (0, -3, 0), (16, 2, 9)])
def test_boxes_of_every_type_and_place(name: str, at: tuple[int, int, int]) -> None:
    kind, bits = TYPES[name]
    sizes, box = [64, 6, 3], [32, 4, 2]
    data = h.aligned(64 * 6 * 3 * bits // 8)
    data[:] = RNG.integers(0, 256, data.size)
    got, _ = copy(data, sizes, box, at, bits=bits, kind=kind)
    if bits == 4:
        elements = np.stack([data & 15, data >> 4], -1).reshape(3, 6, 64)
        want = padded(elements, box, at)
        want = want[..., ::2] | want[..., 1::2] << 4
    else:
        want = padded(data.view(f"u{bits // 8}").reshape(3, 6, 64), box, at)
    np.testing.assert_array_equal(got, np.ascontiguousarray(want).view(np.uint8).reshape(-1))


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("seed", [None, 2])
def test_stores_of_every_rank_leave_the_rest_alone(rank: int, seed: int | None) -> None:
    sizes, box, at = [32, 3, 4, 2, 3][:rank], [16, 2, 2, 2, 2][:rank], [24, -1, 3, 1, 2][:rank]
    data = h.aligned(int(np.prod(sizes)) * 4)
    data[:] = 255
    value = RNG.integers(0, 256, int(np.prod(box)) * 4).astype(np.uint8)
    _, machine = copy(data, sizes, box, at, bits=32, kind=2, store=value, seed=seed)
    want = np.full(tuple(reversed(sizes)), 0xFFFFFFFF, np.uint32)
    source = value.view(np.uint32).reshape(tuple(reversed(box)))
    for index in np.ndindex(source.shape):
        place = tuple(i + a for i, a in zip(index, reversed(at), strict=True))
        if all(0 <= p < n for p, n in zip(place, want.shape, strict=True)):
            want[place] = source[index]
    np.testing.assert_array_equal(data.view(np.uint32).reshape(want.shape), want)
    assert machine.statistics.tma == {"stores": 1, "bytes out": len(value)}


@pytest.mark.parametrize("how", ["add", "min", "max"])
@pytest.mark.parametrize("name", ["u32", "f32", "f16", "bf16"])
def test_reductions(how: str, name: str) -> None:
    dtype: Any = {"u32": np.uint32, "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}[name]
    kind, bits = TYPES[name]
    data = h.aligned(64 * bits // 8)
    old, new = (np.abs(RNG.normal(0, 30, 64)).astype(dtype) for _ in range(2))
    data.view(dtype)[:] = old
    copy(data, [64], [64], [0], bits=bits, kind=kind, store=new.view(np.uint8), reduce=how)
    operation: Any = {"add": np.add, "min": np.minimum, "max": np.maximum}[how]
    np.testing.assert_array_equal(data.view(dtype), operation(old, new))
    with pytest.raises(DescriptorError, match=f"reduction {how} is not modelled for u8"):
        copy(data, [64], [64], [0], bits=8, kind=0, store=new.view(np.uint8)[:64], reduce=how)


def test_bf16_sums_round_to_even_and_keep_nan() -> None:
    one, small = 1.0, 2.0**-8  # half of one's last place
    old = np.array([one, one + 2.0**-7, np.nan, np.inf, 3e38], ml_dtypes.bfloat16)
    new = np.array([small, small, 1, -np.inf, 3e38], ml_dtypes.bfloat16)
    data = h.aligned(16)
    data[:10] = old.view(np.uint8)
    copy(
        data, [8], [8], [0], bits=16, kind=10, store=np.append(new.view(np.uint8), np.zeros(6, np.uint8)), reduce="add"
    )
    got = data[:10].view(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(got, [1, 1 + 2.0**-6, np.nan, np.nan, np.inf])


def test_every_byte_of_the_box_counts_even_outside() -> None:
    data = h.aligned(4096)
    _, machine = copy(data, [64, 4], [64, 4], [32, 3], bits=8, kind=0)  # hangs if only the inside counted
    assert machine.statistics.tma == {"loads": 1, "bytes in": 256}


@pytest.mark.parametrize(
    ("match", "change"),
    [
        ("inner dimension is not a multiple of 16 bytes", {"box": [8, 4]}),
        ("rows of 64 bytes are wider than the swizzle's 32", {"swizzle": 1, "box": [64, 4]}),
        ("32-byte atoms without the 128-byte swizzle", {"flags": 1 << 19}),
        ("element type 13 is not modelled", {"kind": 13}),
        ("2 coordinates for|1 coordinates for", {"at": [0]}),
    ],
)
def test_maps_that_do_not_exist(match: str, change: Any) -> None:
    options: dict[str, Any] = {"sizes": [64, 16], "box": [32, 4], "at": [0, 0], "bits": 8, "kind": 0} | change
    with pytest.raises(DescriptorError, match=match) as caught:
        copy(h.aligned(1024), **options)
    assert caught.value.line == 4
    assert caught.value.warp == 0


def test_a_map_at_an_odd_address_or_with_element_strides() -> None:
    with pytest.raises(DescriptorError, match="is not a multiple of 16"):
        copy(h.aligned(2048)[8:1032], [64, 16], [32, 4], [0, 0], bits=8, kind=0)
    raw = h.tensor_map(h.aligned(1024), [64, 16], [32, 4], bits=8, kind=0)
    raw[52] = 1
    with pytest.raises(DescriptorError, match="element strides other than 1"):
        tma.decode(raw.tobytes())
    with pytest.raises(DescriptorError, match="coordinate 1 is in the middle of a byte"):
        copy(h.aligned(1024), [64, 16], [32, 4], [1, 0], bits=4, kind=11)


def test_bounds_and_alignment_of_copies() -> None:
    data, beyond = h.aligned(1024), h.aligned(4096)
    raw = h.tensor_map(beyond[: 64 * 64], [64, 64], [64, 4], bits=8, kind=0)
    setup = [init(BARRIER), call("fence_mbarrier_init")]

    def fails(kind: type[Exception], match: str, step: h.Step, **options: Any) -> None:
        for seed in (None, 0):
            with pytest.raises(kind, match=match) as caught:
                h.run([*setup, step], tensors={"data": data, "part": beyond[:2048]}, params=raw, seed=seed, **options)
            error: Any = caught.value
            assert (error.line, error.warp) == (3, 0)

    load = lambda at, where: call("tma_load", at, PARAM_BASE, where, BARRIER)  # noqa: E731
    fails(BoundsError, r"shared memory 0x840: not a multiple of 128", load(BOX + 64, [0, 0]))
    fails(BoundsError, r"of shared memory 0x2380..0x247f: the CTA has", load(h.BASE + 8192 - 128, [0, 0]))
    fails(BoundsError, r"128 bytes past the end of tensor 'part'", load(BOX, [0, 30]))
    fails(ProtocolError, r"cp.async.bulk.tensor touches the live mbarrier at 0x400", load(h.BASE, [0, 0]))
    fails(BoundsError, r"tensor map at 0x7e00000000000020: not a multiple of 64",
          call("tma_load", BOX, PARAM_BASE + 32, [0, 0], BARRIER))  # fmt: skip
    fails(BoundsError, r"parameter bytes 64..191, of 128", call("tma_load", BOX, PARAM_BASE + 64, [0, 0], BARRIER))
    start = data.ctypes.data
    fails(BoundsError, r"cp.async.bulk of 24 bytes.*not multiples of 16", call("bulk_load", BOX, start, 24, BARRIER))
    fails(BoundsError, r"not multiples of 16", call("bulk_load", BOX + 8, start, 32, BARRIER))
    fails(BoundsError, r"not multiples of 16", call("bulk_load", BOX, start + 8, 32, BARRIER))
    fails(BoundsError, r"16 bytes past the end of tensor 'data'", call("bulk_load", BOX, start + 1008, 32, BARRIER))
    fails(BoundsError, r"16 bytes past the end of tensor 'data'", lambda w: h.st(BOX)(w) or call("fence_proxy")(w)
          or call("bulk_store", BOX, start + 1008, 32)(w), track=False)  # fmt: skip
    fails(ProtocolError, "no mbarrier was initialised there", call("tma_load", BOX, PARAM_BASE, [0, 0], BARRIER + 8))


def test_a_tensor_map_in_global_memory() -> None:
    data, where = h.aligned(1024), h.aligned(128)
    data[:] = RNG.integers(0, 256, 1024)
    where[:] = h.tensor_map(data, [64, 16], [64, 16], bits=8, kind=0)
    steps = [init(BARRIER), call("fence_mbarrier_init"), arrive(BARRIER, 1, 1024)]
    steps += [call("tma_load", BOX, where.ctypes.data, [0, 0], BARRIER), wait(BARRIER)]
    machine = h.run(steps, tensors={"data": data, "map": where})
    np.testing.assert_array_equal(machine.shared.data[BOX : BOX + 1024], data)


def test_linear_copies_both_ways() -> None:
    source, target = h.aligned(256), h.aligned(512)
    source[:] = RNG.integers(0, 256, 256)
    steps = [init(BARRIER), call("fence_mbarrier_init"), arrive(BARRIER, 1, 256)]
    steps += [call("bulk_load", BOX, source.ctypes.data, 256, BARRIER), wait(BARRIER)]
    steps += [
        call("bulk_store", BOX + 64, target.ctypes.data + 128, 128),
        call("commit_group"),
        call("wait_group", 0, False),
    ]
    for seed in (None, 0, 1):
        target[:] = 0
        machine = h.run(steps, tensors={"source": source, "target": target}, seed=seed)
        np.testing.assert_array_equal(target[128:256], source[64:192])
        assert not target[:128].any()
        assert not target[256:].any()
        assert machine.statistics.tma == {"loads": 1, "bytes in": 256, "stores": 1, "bytes out": 128}
