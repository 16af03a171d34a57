"""TMA through PTX: every swizzle, element size and rank, over every edge, against NumPy."""

import zlib
from typing import Any

import numpy as np
import pytest
from programs import aligned, everywhere
from tensors import BASE, ELEMENTS, LOADS, REDUCTIONS, ROOM, STORES, SWIZZLES, Tensor, swizzled, tensor_map

from wanfp4.simulator.launch import Interceptor
from wanfp4.simulator.tma import TensorMap

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


MAPS = [
    ("Uint8", "u8", (300, 700), (1, 320), (64, 8), "64", (2, 4, 3)),
    ("Float16", "f16", (256, 512, 7, 5, 3), (1, 256, 153600, 1228800, 19660800), (64, 4, 2, 3, 2), "128", (3, 4, 3)),
    ("Float32", "f32", (100, 20, 3), (1, 112, 2304), (32, 4, 2), "128, atoms of 32", (2, 5, 2)),
    ("Float4E2M1FN", "u4", (512, 256), (1, 512), (64, 8), "32", (1, 4, 3)),
    ("Uint64", "u64", (64,), (1,), (16,), "none", None),
]


def test_maps_that_cute_dsl_builds_read_the_same():
    """Its host code fills the 128 bytes; what they say must be what ours say that were put together from bit fields."""
    cutlass = pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    from cutlass.cute.nvgpu import cpasync
    from cutlass.cute.runtime import make_ptr

    cute, caught = cutlass.cute, []
    buffer = aligned(np.zeros(4096, np.uint8))

    def build(kind: Any, shape: Any, stride: Any, box: Any, pattern: Any) -> None:
        @cute.kernel
        def use(atom: cute.CopyAtom):
            if cute.arch.thread_idx()[0] == 0:
                cpasync.prefetch_descriptor(atom)

        @cute.jit
        def launch(pointer: cute.Pointer):
            tensor = cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))
            layout = cute.make_ordered_layout(box, order=tuple(range(len(box))))
            if cutlass.const_expr(pattern is not None):
                layout = cute.make_composed_layout(cute.make_swizzle(*pattern), 0, layout)
            atom, _ = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, box)
            use(atom).launch(grid=(1, 1, 1), block=(32, 1, 1))

        pointer = make_ptr(kind, buffer.ctypes.data, cute.AddressSpace.gmem, assumed_align=32)
        cute.compile(launch, pointer)(pointer)

    with Interceptor("sm_100a", lambda launch: caught.append(launch.params(0, 128))):
        for name, _, shape, stride, box, _, pattern in MAPS:
            build(getattr(cutlass, name), shape, stride, box, pattern)
    for raw, (name, element, sizes, strides, box, swizzle, _) in zip(caught, MAPS, strict=True):
        bits = ELEMENTS[element][1]
        ours = tensor_map(buffer.ctypes.data, element, sizes, [s * bits // 8 for s in strides[1:]], box, swizzle)
        one, other = vars(TensorMap(raw)), vars(TensorMap(ours))
        assert one == other, name
        assert (one["sizes"], one["box"], one["address"]) == (list(sizes), list(box), buffer.ctypes.data)
