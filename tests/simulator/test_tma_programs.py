"""TMA through PTX: every swizzle, element size and rank, over every edge, against NumPy."""

import zlib
from typing import Any

import numpy as np
import pytest
from programs import everywhere
from tensors import BASE, ELEMENTS, LOADS, REDUCTIONS, ROOM, STORES, SWIZZLES, Tensor, swizzled

VARIANTS: dict[str, dict[str, Any]] = {"plain": {}, "tracked": {"track": True}, "seeded": {"seed": 3, "track": True}}


def two(at: int) -> dict[str, dict[str, Any]]:
    """Plain, and one of the others in turn."""
    return {name: VARIANTS[name] for name in ("plain", ("tracked", "seeded")[at // 128 % 2])}


def tensors(element: str, swizzle: str) -> Any:
    """(tensor, generator, a corner and an offset in shared memory for each of its kinds) of each rank."""
    for rank in range(1, 6):
        rng = np.random.default_rng(zlib.crc32(f"{element} {swizzle} {rank}".encode()))
        tensor = Tensor(rng, element, swizzle, rank)
        for number, corner in enumerate(tensor.corners(rng)):
            yield tensor, rng, corner, 128 * (number + rank)


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_loads(element, swizzle):
    """Zero outside of the tensor, the whole box's bytes counted, nothing else touched."""
    for tensor, _, corner, at in tensors(element, swizzle):
        place = np.array([*corner, *[0] * (5 - tensor.rank)], np.int32)
        out = np.zeros(ROOM, np.uint8)
        args = (tensor.data, lambda arrays, t=tensor: t.map_at(arrays[0]), place, out, tensor.bytes, at)
        found = everywhere(LOADS[tensor.rank], *args, variants=two(at))[-1]
        want = np.full(ROOM, 0xAA, np.uint8)
        want[swizzled(BASE + at + np.arange(tensor.bytes), swizzle) - BASE] = tensor.loaded(corner)
        np.testing.assert_array_equal(found, want, f"{tensor.rank} dimensions, at {corner}")


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_stores(element, swizzle):
    """What is outside of the tensor is skipped, holes between its rows stay as they were."""
    for tensor, rng, corner, at in tensors(element, swizzle):
        place = np.array([*corner, *[0] * (5 - tensor.rank)], np.int32)
        image = rng.integers(0, 256, ROOM, np.uint8)
        args = (tensor.data, lambda arrays, t=tensor: t.map_at(arrays[0]), place, image, at)
        found = everywhere(STORES[tensor.rank], *args, variants=two(at))[0]
        values = image[swizzled(BASE + at + np.arange(tensor.bytes), swizzle) - BASE]
        np.testing.assert_array_equal(found, tensor.stored(corner, values), f"{tensor.rank} dimensions, at {corner}")


@pytest.mark.parametrize("rank", REDUCTIONS)
def test_reductions(rank):
    how = {1: np.add, 2: np.minimum, 3: np.maximum, 4: np.add, 5: np.minimum}[rank]
    rng = np.random.default_rng(rank)
    tensor = Tensor(rng, "f32", "128", rank)
    tensor.data = rng.integers(-50, 50, tensor.data.size // 4).astype(np.float32).view(np.uint8)
    image = rng.integers(-50, 50, ROOM // 4).astype(np.float32).view(np.uint8)
    values = image[swizzled(BASE + 512 + np.arange(tensor.bytes), "128") - BASE]
    for corner in tensor.corners(rng):
        place = np.array([*corner, *[0] * (5 - rank)], np.int32)
        args = (tensor.data, lambda arrays: tensor.map_at(arrays[0]), place, image, 512)
        found = everywhere(REDUCTIONS[rank], *args, variants=VARIANTS)[0]
        both = how(tensor.loaded(corner).view(np.float32), values.view(np.float32))
        np.testing.assert_array_equal(found, tensor.stored(corner, both.view(np.uint8)))
