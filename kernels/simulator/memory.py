"""Global, parameter and shared memory: data, bounds, alignment and poison.

Without tracking there is no poison and no judge, only bounds and alignment.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wanfp4.simulator.findings import BoundsError, PoisonError, ProtocolError
from wanfp4.simulator.judge import Action, Judge, Where

Bytes: TypeAlias = NDArray[np.uint8]
Mask: TypeAlias = NDArray[np.bool_]
Lanes: TypeAlias = NDArray[np.unsignedinteger[Any]]  # one value per lane
Index: TypeAlias = NDArray[np.int64]

SHARED_BASE = 1024  # the first kilobyte of shared memory belongs to the system
SHARED_LIMIT = 227 * 1024  # bytes a CTA can have of it (CUDA programming guide, technical specifications)
SHARED_WINDOW = 0x7D00_0000_0000_0000  # generic addresses of shared memory
PARAM_BASE = 0x7E00_0000_0000_0000  # addresses of kernel parameters

UNITS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SHIFTS = {1 << n: np.uint32(n) for n in range(6)}
OFFSETS = {size: np.arange(size) for size in (1, 2, 4, 8, 16, 32)}


def _view(data: Bytes, size: int) -> NDArray[Any]:
    """The whole units of `size` bytes (1, 2, 4, 8: flat; 16, 32: rows of 64-bit words)."""
    whole = data[: len(data) // size * size]
    return whole.view(UNITS[size]) if size <= 8 else whole.view(np.uint64).reshape(-1, size // 8)


def _units(values: Bytes, size: int) -> NDArray[Any]:
    """[n, size] bytes as what `_view` indexes."""
    flat = np.ascontiguousarray(values)
    return flat.view(UNITS[size]).reshape(-1) if size <= 8 else flat.view(np.uint64)


def natural(address: Lanes, size: int, space: str, verb: str, line: int, warp: int) -> None:
    """PTX ISA, Addresses as Operands: an address must be a multiple of the access's size."""
    if size > 1 and int(np.bitwise_or.reduce(address)) & (size - 1):
        wrong = int(address[(address & address.dtype.type(size - 1)) != 0][0])
        raise BoundsError(f"{verb} of {size} bytes at {space} {wrong:#x}: not aligned", line=line, warp=warp)


@dataclass
class Region:
    """A registered tensor."""

    name: str
    base: int
    size: int
    data: Bytes
    writable: bool
    views: dict[int, NDArray[Any] | None] = field(default_factory=dict)

    def view(self, size: int) -> NDArray[Any] | None:
        if size not in self.views:
            self.views[size] = None if self.base % size else _view(self.data, size)
        return self.views[size]


class GlobalMemory:
    """The CPU tensors that a kernel may touch, by name; anything else is out of bounds.

    `tensors` maps names to flat uint8 views of the tensors' bytes, which are read and written in place. A name in
    `read_only`, or a view that is not writeable, refuses stores. Tensors may overlap.
    """

    def __init__(self, tensors: Mapping[str, Bytes], read_only: Collection[str] = ()) -> None:
        self.regions: list[Region] = []
        self.bases: list[int] = []
        for name, data in tensors.items():
            self.add(name, data, read_only=name in read_only)

    def __len__(self) -> int:
        return len(self.regions)

    def add(self, name: str, data: Bytes, *, read_only: bool = False) -> None:
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise TypeError(f"tensor {name!r} must be given as a flat, contiguous uint8 view of its bytes")
        region = Region(name, data.ctypes.data, data.nbytes, data, data.flags.writeable and not read_only)
        index = bisect_right(self.bases, region.base)
        self.regions.insert(index, region)
        self.bases.insert(index, region.base)

    def find(self, low: int, high: int, write: bool) -> Region | None:
        index = bisect_right(self.bases, low) - 1
        if index >= 0:
            region = self.regions[index]
            if high <= region.base + region.size and (region.writable or not write):
                return region
            for region in self.regions[:index]:
                if low >= region.base and high <= region.base + region.size and (region.writable or not write):
                    return region
        return None

    def region(self, low: int, high: int, write: bool, verb: str, line: int, warp: int) -> Region:
        """The tensor that holds bytes low..high-1.

        Raises BoundsError, naming the nearest tensor, if there is none, or only a read-only one for a write.
        """
        region = self.find(low, high, write)
        if region is None:
            raise BoundsError(
                f"{verb} of {high - low} bytes at global {low:#x}: {self.why(low, high)}", line=line, warp=warp
            )
        return region

    def why(self, low: int, high: int) -> str:
        inside = self.find(low, high, False)
        if inside is not None:
            return f"tensor {inside.name!r} is read-only"
        if not self.regions:
            return "no tensor is registered"
        gap = {id(r): max(high - (r.base + r.size), r.base - low) for r in self.regions}
        near = min(self.regions, key=lambda r: gap[id(r)])
        if high > near.base + near.size:
            return f"{high - near.base - near.size} bytes past the end of tensor {near.name!r} ({near.size} bytes)"
        return f"{near.base - low} bytes before tensor {near.name!r} ({near.size} bytes)"

    def load(self, address: Lanes, size: int, line: int, warp: int) -> Bytes:
        natural(address, size, "global", "load", line, warp)
        low, high = int(address.min()), int(address.max()) + size
        region = self.find(low, high, False)
        if region is None:  # lanes in several tensors, or one of them in none
            return np.concatenate([self._load_one(int(a), size, line, warp) for a in address])
        index = (address - address.dtype.type(region.base)).astype(np.int64)
        view = region.view(size)
        if view is None:
            out: Bytes = region.data[index[:, None] + OFFSETS[size]]
            return out
        return np.ascontiguousarray(view[index // size]).view(np.uint8).reshape(-1, size)

    def _load_one(self, address: int, size: int, line: int, warp: int) -> Bytes:
        region = self.region(address, address + size, False, "load", line, warp)
        return region.data[address - region.base : address - region.base + size].reshape(1, size)

    def store(self, address: Lanes, values: Bytes, line: int, warp: int) -> None:
        size = values.shape[1]
        natural(address, size, "global", "store", line, warp)
        low, high = int(address.min()), int(address.max()) + size
        region = self.find(low, high, True)
        if region is None:
            for one, row in zip(address, values, strict=True):
                start = int(one)
                region = self.region(start, start + size, True, "store", line, warp)
                region.data[start - region.base : start - region.base + size] = row
            return
        index = (address - address.dtype.type(region.base)).astype(np.int64)
        view = region.view(size)
        if view is None:
            region.data[index[:, None] + OFFSETS[size]] = values
        else:
            view[index // size] = _units(values, size)


class Params:
    """The kernel's parameters: an address space of its own that starts at PARAM_BASE."""

    def __init__(self, data: Bytes) -> None:
        self.data = data

    def load(self, offset: int, size: int, line: int = 0, warp: int = 0) -> Bytes:
        if offset < 0 or offset + size > len(self.data):
            where = f"parameter bytes {offset}..{offset + size - 1}, of {len(self.data)}"
            raise BoundsError(f"load of {where}", line=line, warp=warp)
        return self.data[offset : offset + size]


class SharedMemory:
    """Shared memory of one CTA, `size` bytes from SHARED_BASE on.

    `acting` is the asynchronous operation being performed; `take` and `give` are its accesses, through the
    asynchronous proxy. `load` and `store` are those of a warp, through the generic proxy.
    """

    def __init__(self, size: int, track: bool) -> None:
        self.end = SHARED_BASE + size
        self.data: Bytes = np.full(-(-self.end // 128) * 128, 0xFF, np.uint8)
        self.poison: Bytes | None = np.ones(len(self.data), np.uint8) if track else None
        self.judge: Judge | None = None
        self.acting: Action
        self.highest = SHARED_BASE  # high-water mark: end of the highest byte touched
        self.barriers: set[int] = set()  # addresses of live mbarriers
        self.barrier_words = np.zeros(len(self.data) // 8, bool)
        self.barrier_range = (self.end, 0)
        self.views = {size: _view(self.data, size) for size in OFFSETS}
        self.poisons = {} if self.poison is None else {size: _view(self.poison, size) for size in OFFSETS}
        self.plans: dict[int, tuple[weakref.ref[NDArray[Any]], Span]] = {}

    # ---- mbarriers live here, opaque to ordinary accesses ----
    def claim(self, address: int) -> None:
        self.barriers.add(address)
        self.highest = max(self.highest, address + 8)
        self.barrier_words[address >> 3] = True
        self.barrier_range = (min(self.barriers), max(self.barriers) + 8)
        if self.poison is not None:
            self.poison[address : address + 8] = 1

    def release(self, address: int) -> None:
        self.barriers.discard(address)
        self.barrier_words[address >> 3] = False
        self.barrier_range = (min(self.barriers, default=self.end), max(self.barriers, default=-8) + 8)

    def _bounds(self, low: int, high: int, verb: str, line: int, warp: int) -> None:
        if low < SHARED_BASE or high > self.end:
            raise BoundsError(
                f"{verb} of shared memory {low:#x}..{high - 1:#x}: the CTA has {SHARED_BASE:#x}..{self.end - 1:#x}",
                line=line,
                warp=warp,
            )
        self.highest = max(self.highest, high)

    def _guard(self, address: NDArray[Any], size: int, verb: str, line: int, warp: int) -> None:
        """PTX ISA, mbarrier: the object is opaque, only mbarrier operations may touch it."""
        words = (address.astype(np.int64)[..., None] + OFFSETS[size][:: min(8, size)]) >> 3
        if self.barrier_words[words].any():
            at = 8 * int(words[self.barrier_words[words]][0])
            raise ProtocolError(f"{verb} of the live mbarrier at {at:#x}", line=line, warp=warp)

    def check(self, address: Lanes, size: int, verb: str, line: int, warp: int) -> None:
        low, high = int(np.minimum.reduce(address)), int(np.maximum.reduce(address)) + size
        if low < SHARED_BASE or high > self.end:
            wrong = address[(address < SHARED_BASE) | (address > self.end - size)]
            self._bounds(int(wrong[0]), int(wrong[0]) + size, verb, line, warp)
        if size > 1:
            natural(address, size, "shared memory", verb, line, warp)
        if low < self.barrier_range[1] and high > self.barrier_range[0]:
            self._guard(address, size, verb, line, warp)
        if high > self.highest:
            self.highest = high

    @staticmethod
    def granules(address: NDArray[Any], size: int) -> Index:
        first = (address >> 2).astype(np.int64)
        return first if size <= 4 else (first[:, None] + OFFSETS[size // 4]).reshape(-1)

    def load(self, address: Lanes, size: int, line: int, warp: int) -> tuple[Bytes, Bytes | None]:
        """([n, size] bytes, the same shape of poison or None) of n active lanes."""
        self.check(address, size, "load", line, warp)
        index = address >> SHIFTS[size]
        values = self.views[size][index].view(np.uint8).reshape(-1, size)
        poison = None
        if self.judge is not None:
            self.judge.read_shared(warp, self.granules(address, size), line)
            found = self.poisons[size][index]
            if found.any():
                poison = found.view(np.uint8).reshape(-1, size)
        return values, poison

    def store(self, address: Lanes, values: Bytes, poison: Bytes | None, line: int, warp: int) -> None:
        size = values.shape[1]
        self.check(address, size, "store", line, warp)
        index = address >> SHIFTS[size]
        if self.judge is not None:
            self.judge.write_shared(warp, self.granules(address, size), line)
            self.poisons[size][index] = 0 if poison is None else _units(poison, size)
        units = _units(values, size)
        self.views[size][index] = units
        if self.judge is not None and (lost := self.views[size][index] != units).any():
            # PTX ISA, st leaves open which of several lanes' values stays.
            at = int(address[lost.reshape(len(address), -1).any(1)][0])
            raise ProtocolError(f"lanes store different values at shared memory {at:#x}", line=line, warp=warp)

    # ---- the asynchronous proxy ----
    def take(self, addresses: NDArray[Any]) -> Bytes:
        """Bytes at `addresses` (any shape), read by the acting operation.

        Bounds and granules of an array that is not writeable are worked out once: make cached address arrays read-only.
        """
        plan = self._plan(addresses)
        self._asynchronous(plan, self.acting)
        if self.judge is not None and self.poison is not None:
            self.judge.read(self.acting, self.judge.shared, plan.where)
            self._defined(self.poison[addresses], addresses)
        out: Bytes = self.data[addresses]
        return out

    def drain(self, span: Span) -> Bytes:
        """The bytes of a bulk copy's source."""
        self._asynchronous(span, self.acting)
        if self.judge is not None:
            self.judge.read(self.acting, self.judge.shared, span.where)
            found = self.poisons[16][span.chunks]
            if found.any():
                bad = int(np.flatnonzero(np.ascontiguousarray(found).view(np.uint8))[0])
                self._poisoned(16 * int(span.chunks[bad // 16]) + bad % 16)
        return np.ascontiguousarray(self.views[16][span.chunks]).view(np.uint8).reshape(-1)

    def fill(self, span: Span, values: Bytes | int) -> None:
        """Write a bulk copy's bytes, in the order of `span.chunks`; an int fills them all."""
        self._asynchronous(span, self.acting)
        if self.judge is not None:
            self.judge.write(self.acting, self.judge.shared, span.where)
            self.poisons[16][span.chunks] = 0
        self.views[16][span.chunks] = values if isinstance(values, int) else _units(values, 16).reshape(-1, 2)

    def _asynchronous(self, span: Span, acting: Action) -> None:
        self._bounds(span.low, span.high, acting.what, acting.line, acting.warp)
        if span.low < self.barrier_range[1] and span.high > self.barrier_range[0]:
            where = span.where
            words = np.unique((np.arange(where.start, where.stop) if isinstance(where, slice) else where) >> 1)
            hit = self.barrier_words[words]
            if hit.any():
                at = 8 * int(words[hit][0])
                raise ProtocolError(
                    f"{acting.what} touches the live mbarrier at {at:#x}", line=acting.line, warp=acting.warp
                )

    def _defined(self, found: Bytes, addresses: NDArray[Any]) -> None:
        if found.any():
            self._poisoned(int(addresses[found != 0][0]))

    def _poisoned(self, at: int) -> None:
        acting = self.acting
        raise PoisonError(
            f"{acting.what} reads shared memory {at:#x}, which nobody defined", line=acting.line, warp=acting.warp
        )

    def _plan(self, addresses: NDArray[Any]) -> Span:
        kept = self.plans.get(id(addresses))
        if kept is not None and kept[0]() is addresses:
            return kept[1]
        span = Span.of_bytes(addresses)
        if not addresses.flags.writeable and addresses.flags.owndata:
            if len(self.plans) > 4096:
                self.plans.clear()
            self.plans[id(addresses)] = weakref.ref(addresses), span
        return span


@dataclass(frozen=True)
class Span:
    """A set of shared-memory bytes: bounds [low, high), 16-byte chunks in order (bulk copies only), and granules."""

    low: int
    high: int
    chunks: Index
    where: Where

    @staticmethod
    def of_chunks(chunks: Index) -> Span:
        low, high = int(chunks.min()), int(chunks.max()) + 1
        chunks.flags.writeable = False
        if len(np.unique(chunks)) == high - low:
            return Span(16 * low, 16 * high, chunks, slice(4 * low, 4 * high))
        return Span(16 * low, 16 * high, chunks, (4 * np.unique(chunks)[:, None] + np.arange(4)).reshape(-1))

    @staticmethod
    def of_bytes(addresses: NDArray[Any]) -> Span:
        low, high = int(addresses.min()), int(addresses.max()) + 1
        mark = np.zeros((high + 3) // 4 - low // 4, bool)
        mark[(addresses >> 2) - (low >> 2)] = True
        where: Where = slice(low >> 2, (low >> 2) + len(mark))
        if not mark.all():
            where = np.flatnonzero(mark) + (low >> 2)
        return Span(low, high, np.zeros(0, np.int64), where)
