"""Tensor memory: data, allocation, lanes, columns and poison (PTX ISA, Tensor Memory)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wanfp4.simulator.findings import BoundsError, PoisonError, ProtocolError
from wanfp4.simulator.judge import Action, Judge, Where
from wanfp4.simulator.memory import Bytes

LANES, COLUMNS = 128, 512


@dataclass
class Allocation:
    base: int
    columns: int
    line: int


class TensorMemory:
    """Tensor memory of one CTA: 128 lanes x 512 columns of 32 bits, and who may use which columns."""

    def __init__(self, track: bool) -> None:
        self.cells: NDArray[np.uint32] = np.full((LANES, COLUMNS), 0xFFFFFFFF, np.uint32)
        self.poison: Bytes | None = np.full((LANES, COLUMNS), 15, np.uint8) if track else None
        self.judge: Judge | None = None
        self.acting: Action
        self.owned = np.zeros(COLUMNS, bool)
        self.allocations: list[Allocation] = []
        self.relinquished: int | None = None  # line of tcgen05.relinquish_alloc_permit
        self.smallest = COLUMNS  # of the allocations so far: PTX ISA, "should not increase between any two allocations"
        self.highest = 0  # most columns allocated at one time
        self.freed: dict[int, int] = {}  # column -> line of its latest tcgen05.dealloc

    # ---- allocation: PTX ISA, tcgen05.alloc, tcgen05.dealloc, tcgen05.relinquish_alloc_permit ----
    def alloc(self, columns: int, line: int, warp: int) -> int:
        """The first column of a new allocation. Lowest free place, aligned to its size."""
        if columns < 32 or columns > COLUMNS or columns & (columns - 1):
            raise ProtocolError(
                f"tcgen05.alloc of {columns} columns: must be a power of two from 32 to 512", line=line, warp=warp
            )
        if self.relinquished is not None:
            raise ProtocolError(
                f"tcgen05.alloc after tcgen05.relinquish_alloc_permit (line {self.relinquished})", line=line, warp=warp
            )
        if self.smallest < columns:
            raise ProtocolError(
                f"tcgen05.alloc of {columns} columns after one of {self.smallest}: sizes must not increase",
                line=line,
                warp=warp,
            )
        for base in range(0, COLUMNS, columns):
            if not self.owned[base : base + columns].any():
                break
        else:
            taken = ", ".join(f"{a.base}-{a.base + a.columns - 1} (line {a.line})" for a in self.allocations)
            raise ProtocolError(
                f"tcgen05.alloc of {columns} columns would wait: columns {taken} are allocated", line=line, warp=warp
            )
        self.owned[base : base + columns] = True
        self.smallest = columns
        self.allocations.append(Allocation(base, columns, line))
        self.highest = max(self.highest, int(self.owned.sum()))
        self.cells[:, base : base + columns] = 0xFFFFFFFF
        if self.poison is not None:
            self.poison[:, base : base + columns] = 15
        return base

    def dealloc(self, base: int, columns: int, line: int, warp: int) -> None:
        found = next((a for a in self.allocations if a.base == base), None)
        if found is None or found.columns != columns:
            have = ", ".join(f"{a.columns} at column {a.base}" for a in self.allocations) or "nothing"
            raise ProtocolError(
                f"tcgen05.dealloc of {columns} columns at column {base}: allocated is {have}", line=line, warp=warp
            )
        if self.judge is not None:
            where = (512 * np.arange(4)[:, None] + np.arange(base, base + columns)).reshape(-1)
            self.judge.dealloc(warp, where, line)
        self.allocations.remove(found)
        self.owned[base : base + columns] = False
        self.freed |= dict.fromkeys(range(base, base + columns), line)

    def relinquish(self, line: int) -> None:
        self.relinquished = line

    def allocated(self, low: int, high: int, what: str, line: int, warp: int) -> None:
        """Every column low..high-1 must be allocated."""
        if low < 0 or high > COLUMNS or not self.owned[low:high].all():
            wrong = next((c for c in range(max(low, 0), min(high, COLUMNS)) if not self.owned[c]), high - 1)
            self._refuse(low, high, wrong, what, line, warp)

    def _refuse(self, low: int, high: int, wrong: int, what: str, line: int, warp: int) -> None:
        why = f"deallocated at line {self.freed[wrong]}" if wrong in self.freed else "not allocated"
        raise BoundsError(
            f"{what} of tensor memory columns {low}-{high - 1}: column {wrong} is {why}", line=line, warp=warp
        )

    # ---- accesses of the acting operation ----
    def take(self, lanes: NDArray[Any] | slice, columns: NDArray[Any] | slice) -> NDArray[np.uint32]:
        """Words at `lanes` x `columns`, which broadcast; two slices give [lanes, columns]."""
        place, where = self._place(lanes, columns)
        acting = self.acting
        if self.judge is not None and self.poison is not None:
            self.judge.read(acting, self.judge.tensor, where)
            found = self.poison[place]
            if found.any():
                at = tuple(int(i) for i in np.argwhere(found)[0])
                lane, column = self._where(lanes, columns, at)
                raise PoisonError(
                    f"{acting.what} reads tensor memory lane {lane}, column {column}, which nobody defined",
                    line=acting.line,
                    warp=acting.warp,
                )
        out: NDArray[np.uint32] = self.cells[place]
        return out.copy() if isinstance(place[0], slice) else out

    def put(
        self, lanes: NDArray[Any] | slice, columns: NDArray[Any] | slice, values: NDArray[np.uint32], poison: Any = 0
    ) -> None:
        place, where = self._place(lanes, columns)
        if self.judge is not None and self.poison is not None:
            self.judge.write(self.acting, self.judge.tensor, where)
            self.poison[place] = poison
        self.cells[place] = values

    def _place(self, lanes: NDArray[Any] | slice, columns: NDArray[Any] | slice) -> tuple[tuple[Any, Any], Where]:
        acting = self.acting
        lanes, columns = _as_slice(lanes, 1), _as_slice(columns, 0)
        if isinstance(lanes, slice) and isinstance(columns, slice):
            if lanes.start < 0 or lanes.stop > LANES:
                raise BoundsError(
                    f"{acting.what}: tensor memory has no lane {lanes.stop - 1}", line=acting.line, warp=acting.warp
                )
            self.allocated(columns.start, columns.stop, acting.what, acting.line, acting.warp)
            quarters = np.arange(lanes.start // 32, (lanes.stop - 1) // 32 + 1)
            where = (512 * quarters[:, None] + np.arange(columns.start, columns.stop)).reshape(-1)
            return (lanes, columns), where
        if isinstance(lanes, slice):
            lanes = np.arange(lanes.start, lanes.stop)[:, None]
        if isinstance(columns, slice):
            columns = np.arange(columns.start, columns.stop)[None, :]
        if lanes.min() < 0 or lanes.max() >= LANES:
            raise BoundsError(f"{acting.what}: tensor memory has {LANES} lanes", line=acting.line, warp=acting.warp)
        low, high = int(columns.min()), int(columns.max()) + 1
        if low < 0 or high > COLUMNS or not self.owned[columns].all():
            wrong = [int(c) for c in columns.flat if not 0 <= c < COLUMNS or not self.owned[c]]
            self._refuse(low, high, wrong[0], acting.what, acting.line, acting.warp)
        mark = np.zeros(4 * COLUMNS, bool)
        mark[(lanes >> 5) * COLUMNS + columns] = True
        return (lanes, columns), np.flatnonzero(mark)

    @staticmethod
    def _where(lanes: Any, columns: Any, at: tuple[int, ...]) -> tuple[int, int]:
        if isinstance(lanes, slice):
            lanes = np.arange(lanes.start, lanes.stop)[:, None]
        if isinstance(columns, slice):
            columns = np.arange(columns.start, columns.stop)[None, :]
        lane, column = np.broadcast_arrays(lanes, columns)
        return int(lane[at]), int(column[at])


def _as_slice(index: NDArray[Any] | slice, axis: int) -> NDArray[Any] | slice:
    """A column ([n, 1], axis 1) or row ([1, n], axis 0) of consecutive numbers as a slice, which is faster to index."""
    if isinstance(index, slice) or index.ndim != 2 or index.shape[axis] != 1:
        return index
    flat = index.reshape(-1)
    first = int(flat[0])
    if int(flat[-1]) - first == len(flat) - 1 and (len(flat) == 1 or (np.diff(flat) == 1).all()):
        return slice(first, first + len(flat))
    return index
