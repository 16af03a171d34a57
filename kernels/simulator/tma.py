"""TMA: the tensor map as the hardware holds it, the boxes it describes, and where their bytes land.

The encoding of the 128-byte map was read off what CuTe DSL's host code builds; NVIDIA documents only the host function
that makes it (CUDA driver API, cuTensorMapEncodeTiled), whose rules `TensorMap` checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wanfp4.simulator.findings import BoundsError, DescriptorError
from wanfp4.simulator.memory import Bytes, GlobalMemory, Index, Span

# Bits 7-10 of word 1 -> name, bits of an element, NumPy type for reductions.
TYPES: dict[int, tuple[str, int, Any]] = {
    0: ("u8", 8, None),
    1: ("u16", 16, None),
    2: ("u32", 32, np.uint32),
    3: ("s32", 32, np.int32),
    4: ("u64", 64, np.uint64),
    5: ("s64", 64, np.int64),
    6: ("f16", 16, np.float16),
    7: ("f32", 32, np.float32),
    9: ("f64", 64, np.float64),
    10: ("bf16", 16, "bf16"),
    11: ("packed 4-bit", 4, None),
}
SPANS = (0, 32, 64, 128)  # bytes of a swizzled row, by swizzle mode
ALIGNMENT = 128  # of a box in shared memory (PTX ISA, Tensor copies: shared memory addresses)


class TensorMap:
    """One tensor map, decoded and checked. Raises DescriptorError.

    `sizes` and `box` are in elements and `strides` in bytes, dimension 0 (contiguous) first.
    """

    def __init__(self, raw: bytes) -> None:
        words = [int.from_bytes(raw[8 * i : 8 * i + 8], "little") for i in range(8)]
        flags = words[1] & 0xFFFFFFFF
        self.address = words[0]
        self.rank = (flags >> 4 & 7) + 1
        kind = flags >> 7 & 15
        if kind not in TYPES:
            raise DescriptorError(f"tensor map: element type {kind} is not modelled")
        self.type, self.bits, self.dtype = TYPES[kind]
        self.swizzle = flags >> 13 & 3  # 0 none, 1 32 B, 2 64 B, 3 128 B
        self.atom32 = bool(flags >> 19 & 1)  # swizzle atoms of 32 bytes instead of 16
        if self.rank > 5:
            raise DescriptorError(f"tensor map: {self.rank} dimensions; there can be 5")
        halves = [half for word in words[1:] for half in (word & 0xFFFFFFFF, word >> 32)]  # halves[0] is word 1, low
        self.sizes = [n + 1 for n in halves[6:11]][: self.rank]
        self.strides = [0, *(16 * n for n in halves[1:5])][: self.rank]
        boxes = [words[6] >> 56, *(words[7] >> shift & 255 for shift in (0, 8, 16, 24))]
        self.box = [n + 1 for n in boxes][: self.rank]
        self.row = self.box[0] * self.bits // 8  # bytes
        self.bytes = int(np.prod(self.box)) * self.bits // 8
        if words[6] >> 32 & 0xFFFFFF:
            raise DescriptorError(f"tensor map: element strides other than 1 are not modelled: {self}")
        if self.address % 16:
            raise DescriptorError(f"tensor map: global address {self.address:#x} is not a multiple of 16: {self}")
        if self.box[0] * self.bits % 128:
            raise DescriptorError(f"tensor map: the box's inner dimension is not a multiple of 16 bytes: {self}")
        if self.swizzle and self.row > SPANS[self.swizzle]:
            raise DescriptorError(
                f"tensor map: rows of {self.row} bytes are wider than the swizzle's {SPANS[self.swizzle]}: {self}"
            )
        if self.atom32 and self.swizzle != 3:
            raise DescriptorError(f"tensor map: 32-byte atoms without the 128-byte swizzle: {self}")

    def __repr__(self) -> str:
        how = f", swizzle {SPANS[self.swizzle]} B" + ", atoms of 32 B" * self.atom32 if self.swizzle else ""
        return f"{self.type} tensor {self.sizes} at {self.address:#x}, strides {self.strides[1:]}, box {self.box}{how}"

    @property
    def layout(self) -> int:
        """The swizzle as a shared-memory descriptor's layout code."""
        return 1 if self.atom32 else (0, 6, 4, 2)[self.swizzle]

    def window(self, coordinates: Sequence[int]) -> tuple[int, list[slice] | None]:
        """Global address of the box's first element, and per dimension the part of the box inside of the tensor.

        The address may lie outside; None instead of the parts if nothing is inside. Dimension 0 is in bytes.
        """
        if len(coordinates) != self.rank:
            raise DescriptorError(f"{len(coordinates)} coordinates for {self}")
        if coordinates[0] * self.bits % 8:
            raise DescriptorError(f"coordinate {coordinates[0]} is in the middle of a byte of {self}")
        first = self.address + coordinates[0] * self.bits // 8
        first += sum(c * s for c, s in zip(coordinates[1:], self.strides[1:], strict=True))
        inside = []
        for start, size, box in zip(coordinates, self.sizes, self.box, strict=True):
            low, high = max(0, -start), min(box, size - start)
            if low >= high:
                return first, None
            inside.append(slice(low, high))
        inside[0] = slice(inside[0].start * self.bits // 8, inside[0].stop * self.bits // 8)
        return first, inside

    def view(self, memory: GlobalMemory, first: int, inside: list[slice], write: bool) -> NDArray[np.uint8]:
        """The box's bytes inside of the tensor, outer dimension first, as a view of global memory.

        Raises BoundsError where the map reaches beyond the registered tensor.
        """
        strides = [1, *self.strides[1:]]
        low = first + sum(part.start * stride for part, stride in zip(inside, strides, strict=True))
        high = first + sum((part.stop - 1) * stride for part, stride in zip(inside, strides, strict=True)) + 1
        region = memory.find(low, high, write)
        if region is None:
            raise BoundsError(f"box of {self} at global {low:#x}..{high - 1:#x}: {memory.why(low, high)}")
        shape = tuple(part.stop - part.start for part in reversed(inside))
        return np.lib.stride_tricks.as_strided(
            region.data[low - region.base :], shape, tuple(reversed(strides)), writeable=region.writable
        )

    def read(self, memory: GlobalMemory, coordinates: Sequence[int]) -> Bytes:
        """The box's bytes as they land, zero outside of the tensor (PTX ISA, Tensor copies: out-of-bound access)."""
        first, inside = self.window(coordinates)
        shape = (*reversed(self.box[1:]), self.row)
        if inside is None:
            return np.zeros(self.bytes, np.uint8)
        source = self.view(memory, first, inside, False)
        if source.shape == shape:
            return np.ascontiguousarray(source).reshape(-1)
        out = np.zeros(shape, np.uint8)
        out[tuple(reversed(inside))] = source
        return out.reshape(-1)

    def write(self, memory: GlobalMemory, coordinates: Sequence[int], values: Bytes, reduce: str | None = None) -> int:
        """Put the box's bytes, or combine them with what is there, except outside of the tensor.

        Returns how many bytes were written.
        """
        first, inside = self.window(coordinates)
        if inside is None:
            return 0
        target = self.view(memory, first, inside, True)
        source = values.reshape(*reversed(self.box[1:]), self.row)[tuple(reversed(inside))]
        if reduce is None:
            target[...] = source
        else:
            target[...] = combined(np.ascontiguousarray(target), np.ascontiguousarray(source), self, reduce)
        return target.size

    def span(self, start: int) -> Span:
        """Where the box's bytes lie when it starts at shared-memory address `start`."""
        return _span(start, self.bytes, self.layout)


def combined(old: Bytes, new: Bytes, tensor_map: TensorMap, how: str) -> Bytes:
    """PTX ISA, cp.reduce.async.bulk.tensor: add, min, max per element; 16-bit floats round to nearest even."""
    dtype = tensor_map.dtype
    if dtype is None or how not in ("add", "min", "max"):
        raise DescriptorError(f"reduction {how} is not modelled for {tensor_map}")
    operation = {"add": np.add, "min": np.minimum, "max": np.maximum}[how]
    if dtype != "bf16":
        result: NDArray[Any] = operation(old.view(dtype), new.view(dtype))
        return result.view(np.uint8)
    wide = [(x.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for x in (old, new)]
    bits = operation(*wide).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, 0x7FFF, rounded).astype(np.uint16).view(np.uint8)


@lru_cache(maxsize=256)
def decode(raw: bytes) -> TensorMap:
    return TensorMap(raw)


@lru_cache(maxsize=4096)
def _span(start: int, size: int, layout: int) -> Span:
    chunks: Index = swizzle(start + 16 * np.arange(size // 16, dtype=np.int64), layout) // 16
    return Span.of_chunks(chunks)


def swizzle(address: Index, layout: int) -> Index:
    """Absolute shared-memory byte addresses, swizzled (CUTLASS, include/cute/swizzle.hpp).

    Layout codes are those of the shared-memory descriptor: 0 none, 6 32 B, 4 64 B, 2 128 B, 1 128 B in atoms of 32 B.
    """
    if layout == 0:
        return address
    if layout == 1:
        return address ^ ((address >> 2) & 0x60)
    return address ^ ((address >> 3) & {2: 0x70, 4: 0x30, 6: 0x10}[layout])
