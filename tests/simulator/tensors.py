"""Tensor maps from their bit fields, what TMA does with them said in NumPy, and the programs that have it done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from asynchronous import START, wait
from programs import kernel

# Name -> code of the type in the map, bits of an element.
ELEMENTS = {"u4": (11, 4), "u8": (0, 8), "f16": (6, 16), "f32": (7, 32), "u64": (4, 64)}
# Name -> (bits 13-14, bit 19), bytes of a row of the pattern.
SWIZZLES = {
    "none": ((0, 0), 48),
    "32": ((1, 0), 32),
    "64": ((2, 0), 64),
    "128": ((3, 0), 128),
    "128, atoms of 32": ((3, 1), 128),
}


def tensor_map(
    address: int, element: str, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: str = "none"
) -> bytes:
    """The 128 bytes. Dimension 0 first; sizes and box in elements, strides in bytes, none of dimension 0."""
    code, (mode, atom) = ELEMENTS[element][0], SWIZZLES[swizzle][0]
    words = [0] * 16
    words[0] = address
    words[1] = 1 << 1 | (len(sizes) - 1) << 4 | code << 7 | mode << 13 | 1 << 18 | atom << 19 | 1 << 21
    for place, stride in zip(((1, 32), (2, 0), (2, 32), (3, 0)), strides, strict=False):
        words[place[0]] |= stride // 16 << place[1]
    for place, size in zip(((4, 0), (4, 32), (5, 0), (5, 32), (6, 0)), sizes, strict=False):
        words[place[0]] |= (size - 1) << place[1]
    for place, size in zip(((6, 56), (7, 0), (7, 8), (7, 16), (7, 24)), box, strict=False):
        words[place[0]] |= (size - 1) << place[1]
    return b"".join(word.to_bytes(8, "little") for word in words)


def swizzled(address: Any, swizzle: str) -> Any:
    """Which 16 bytes (32: of 32-byte atoms) of a pattern's row: its number is combined with the row's."""
    if swizzle == "128, atoms of 32":
        return address ^ (address // 128 % 4) * 32
    rows = {"none": 1, "32": 2, "64": 4, "128": 8}[swizzle]
    return address ^ (address // 128 % rows) * 16


class Tensor:
    """A tensor of `sizes` in memory with holes between its rows, and a box of it."""

    def __init__(self, rng: np.random.Generator, element: str, swizzle: str, rank: int) -> None:
        self.element, self.swizzle, self.rank, self.bits = element, swizzle, rank, ELEMENTS[element][1]
        inner = SWIZZLES[swizzle][1]
        self.box = [inner * 8 // self.bits, 5, 3, 2, 2][:rank]
        unit = 2 if self.bits == 4 else 1
        self.sizes = [int(rng.integers(self.box[0] // 2, 2 * self.box[0])) * unit] + [
            int(n) for n in rng.integers(2, 7, rank - 1)
        ]
        self.strides, stride = [], -(-self.sizes[0] * self.bits // 8)
        for size in self.sizes[1:]:
            stride = -(-stride // 16) * 16 + 16 * int(rng.integers(0, 3))
            self.strides.append(stride)
            stride *= size
        self.data = rng.integers(0, 256, -(-stride // 16) * 16 + 16, np.uint8)
        self.bytes = int(np.prod(self.box)) * self.bits // 8
        self.unit = unit

    def map_at(self, array: np.ndarray) -> bytes:
        return tensor_map(array.ctypes.data, self.element, self.sizes, self.strides, self.box, self.swizzle)

    def corners(self, rng: np.random.Generator) -> list[list[int]]:
        """Where boxes may start: at the origin, over an edge on either side, wholly outside, anywhere."""
        over = [(size - box // 2) // self.unit * self.unit for size, box in zip(self.sizes, self.box, strict=True)]
        before = [-(box // 2) // self.unit * self.unit for box in self.box]
        anywhere = [
            int(rng.integers(-b, s)) // self.unit * self.unit for b, s in zip(self.box, self.sizes, strict=True)
        ]
        return [[0] * self.rank, over, before, [*over[:-1], self.sizes[-1] + 4], anywhere]

    def bits_of(self, corner: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """For each bit of the box, dimension 0 fastest: the bit in memory, and whether it is inside of the tensor."""
        place = np.indices(tuple(reversed(self.box))).reshape(self.rank, -1)[::-1] + np.array(corner)[:, None]
        inside = ((place >= 0) & (place < np.array(self.sizes)[:, None])).all(0)
        first = place[0] * self.bits + 8 * (place[1:] * np.array(self.strides, int).reshape(-1, 1)).sum(0)
        return (first[:, None] + np.arange(self.bits)).reshape(-1), np.repeat(inside, self.bits)

    def loaded(self, corner: Sequence[int]) -> np.ndarray:
        """The box's bytes."""
        memory, (place, inside) = np.unpackbits(self.data, bitorder="little"), self.bits_of(corner)
        return np.packbits(np.where(inside, memory[np.where(inside, place, 0)], 0), bitorder="little")

    def stored(self, corner: Sequence[int], values: np.ndarray) -> np.ndarray:
        """The tensor's memory after a store of the box's bytes."""
        memory, (place, inside) = np.unpackbits(self.data, bitorder="little"), self.bits_of(corner)
        memory[place[inside]] = np.unpackbits(values, bitorder="little")[inside]
        return np.packbits(memory, bitorder="little")


BASE = 1024  # address of the kernels' shared memory
ROOM = 10240  # bytes of it that boxes may lie in
FOUR = "{%r10, %r11, %r12, %r13}"
TOP = f".shared .align 1024 .b8 memory[{ROOM + 1024}];\n"


def _coordinates(rank: int) -> list[str]:
    return [f"ld.global.b32 %r{20 + i}, [%c+{4 * i}];" for i in range(rank)]


def _each_word(step: str, name: str) -> list[str]:
    """`step` for every 16 bytes of the boxes' room: %r2 their address in shared memory, %d2 their offset."""
    return [
        "shl.b32 %r1, %thread, 4;",
        f"{name}: add.u32 %r2, %r1, %base;",
        "cvt.u64.u32 %d2, %r1;",
        step,
        "add.u32 %r1, %r1, 2048;",
        f"setp.lt.u32 %p1, %r1, {ROOM};",
        f"@%p1 bra {name};",
    ]


def load_program(rank: int, space: str = "shared::cta", tile: str = "", more: str = "") -> str:
    """Boxes land at offset %at of memory that holds 0xAA; all of it goes to `o`. `n` is the box's bytes."""
    at = ", ".join(f"%r{20 + i}" for i in range(rank))
    policy = ", %d5" if "cache_hint" in more else ""
    body = [
        ".reg .b32 %base, %bar;",
        START,
        "mov.b32 %base, memory;",
        f"add.u32 %bar, %base, {ROOM};",
        "mov.b64 %d5, 0;",
    ]
    body += [
        "mov.b32 %r3, 0xAAAAAAAA;",
        *_each_word("st.shared.v4.b32 [%r2], {%r3, %r3, %r3, %r3};", "FILL"),
        "fence.proxy.async.shared::cta;",
    ]
    body += ["@%p0 mbarrier.init.shared.b64 [%bar], 1;", "@%p0 fence.mbarrier_init.release.cluster;", "bar.sync 0;"]
    body += [
        "@!%p0 bra ISSUED;",
        *_coordinates(rank),
        "mbarrier.arrive.expect_tx.shared.b64 _, [%bar], %n;",
        "add.u32 %r4, %base, %at;",
    ]
    body += [
        f"cp.async.bulk.tensor.{rank}d.{space}.global{tile}.mbarrier::complete_tx::bytes{more} "
        f"[%r4], [%m, {{{at}}}], [%bar]{policy};",
        "ISSUED:",
        wait("%bar", 0, "WAIT"),
        *_each_word(
            f"ld.shared.v4.b32 {FOUR}, [%r2];\n add.u64 %d3, %o, %d2;\n st.global.v4.b32 [%d3], {FOUR};", "DUMP"
        ),
        "ret;",
    ]
    params = {"t": "u64", "m": "map", "c": "u64", "o": "u64", "n": "u32", "at": "u32"}
    return kernel("\n".join(body), params, threads=128, top=TOP)


def store_program(
    rank: int, opcode: str = "cp.async.bulk.tensor", how: str = "", tile: str = "", more: str = ""
) -> str:
    """Memory is filled from `o`; a whole warp stores the box at offset %at (a reduction: one thread)."""
    at = ", ".join(f"%r{20 + i}" for i in range(rank))
    policy = ", %d5" if "cache_hint" in more else ""
    body = [".reg .b32 %base;", "mov.b32 %base, memory;", "mov.b64 %d5, 0;"]
    body += _each_word(
        f"add.u64 %d3, %o, %d2;\n ld.global.v4.b32 {FOUR}, [%d3];\n st.shared.v4.b32 [%r2], {FOUR};", "FILL"
    )
    body += [
        f"setp.lt.u32 %p0, %thread, {1 if how else 32};",
        "fence.proxy.async.shared::cta;",
        "bar.sync 0;",
        "@!%p0 bra END;",
    ]
    body += [*_coordinates(rank), "add.u32 %r4, %base, %at;"]
    body += [f"{opcode}.{rank}d.global.shared::cta{how}{tile}.bulk_group{more} [%m, {{{at}}}], [%r4]{policy};"]
    body += ["cp.async.bulk.commit_group;", "cp.async.bulk.wait_group 0;", "END: ret;"]
    params = {"t": "u64", "m": "map", "c": "u64", "o": "u64", "at": "u32"}
    return kernel("\n".join(body), params, threads=128, top=TOP)


LOADS = {
    rank: load_program(rank, space, tile, more)
    for rank, space, tile, more in (
        (1, "shared::cta", "", ""),
        (2, "shared::cluster", ".tile", ""),
        (3, "shared::cta", "", ".cta_group::1"),
        (4, "shared::cluster", "", ".L2::cache_hint"),
        (5, "shared::cta", ".tile", ".cta_group::1.L2::cache_hint"),
    )
}
STORES = {
    rank: store_program(rank, tile=tile, more=more)
    for rank, tile, more in (
        (1, "", ""),
        (2, ".tile", ""),
        (3, "", ".L2::cache_hint"),
        (4, ".tile", ".L2::cache_hint"),
        (5, "", ""),
    )
}
REDUCTIONS = {
    rank: store_program(rank, "cp.reduce.async.bulk.tensor", how, tile, more)
    for rank, how, tile, more in (
        (1, ".add", "", ""),
        (2, ".min", ".tile", ""),
        (3, ".max", "", ".L2::cache_hint"),
        (4, ".add", ".tile", ".L2::cache_hint"),
        (5, ".min", "", ""),
    )
}
