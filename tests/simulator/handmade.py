"""Warps made by hand, for the machine's tests: each is a list of steps, Python functions of the warp.

Step `i` of warp `w` is at "PTX line" 100·w + i + 1. A step that returns False is repeated, like the loop around a
try_wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from wanfp4.simulator.machine import CTA
from wanfp4.simulator.memory import SHARED_BASE, GlobalMemory

Step = Callable[[Any], Any]
BASE = SHARED_BASE
LANE = np.arange(32, dtype=np.uint32)


class Shape:
    def __init__(self, warps: int) -> None:
        self.threads = (32 * warps, 1, 1)


class Program:
    """See `scheduler.Program`."""

    def __init__(self, warps: Sequence[Sequence[Step]], static_bytes: int) -> None:
        self.warps, self.static_bytes = warps, static_bytes
        self.kernel = Shape(len(warps))
        blocks = max(len(steps) for steps in warps)
        self.sizes = [1] * max(blocks, 1)
        self.full = [self._block(i) for i in range(max(blocks, 1))]
        self.part = self.full

    def _block(self, index: int) -> Callable[..., int]:
        def block(w: Any, registers: list[Any], mask: Any = None) -> int:
            steps = self.warps[w.index]
            if index >= len(steps):
                return -1
            w.at = 100 * w.index + index + 1
            if steps[index](w) is False:
                return index
            return index + 1 if index + 1 < len(steps) else -1

        return block

    def registers(self) -> tuple[list[Any], list[Any]]:
        return [], []

    def line(self, index: int) -> int:
        return index + 1


def cta(
    *warps: Sequence[Step],
    track: bool = True,
    seed: int | None = None,
    ordering: str = "pipe",
    size: int = 8192,
    tensors: Mapping[str, Any] | None = None,
    read_only: Sequence[str] = (),
    params: Any = None,
    limit: int | None = 10_000,
) -> CTA:
    memory = GlobalMemory(tensors or {}, read_only)
    params = np.zeros(0, np.uint8) if params is None else params
    program = Program(warps, size)
    options: dict[str, Any] = {"seed": seed, "track": track, "ordering": ordering, "limit": limit}
    return CTA(program, (0, 0, 0), (1, 1, 1), 0, params, memory, **options)


def run(*warps: Sequence[Step], **options: Any) -> CTA:
    machine = cta(*warps, **options)
    machine.run()
    return machine


def at(address: int, step: int = 4) -> Any:
    return (address + step * LANE).astype(np.uint32)


def words(value: int | Any) -> Any:
    return np.broadcast_to(np.asarray(value, np.uint32), (32,)).copy().view(np.uint8).reshape(32, 4)


def st(address: int, value: Any = 1) -> Step:
    """A word by every lane."""
    return lambda w: w.cta.store_shared(w, at(address), words(value), None, None)


def ld(address: int, want: Any = None) -> Step:
    def step(w: Any) -> None:
        values, poison = w.cta.load_shared(w, at(address), 4, None)
        if want is not None:
            assert poison is None
            np.testing.assert_array_equal(values.view(np.uint32)[:, 0], words(want).view(np.uint32)[:, 0])

    return step


def bar(index: int = 0, threads: int | None = None, wait: bool = True) -> Step:
    return lambda w: w.cta.bar(w, index, threads, wait)


def init(address: int, count: int = 1) -> Step:
    return lambda w: w.cta.mbarrier_init(w, address, count)


def arrive(address: int, count: int = 1, expect: int = 0) -> Step:
    return lambda w: w.cta.arrive(w, address, count, expect)


def wait(address: int, parity: int = 0) -> Step:
    return lambda w: w.cta.try_wait(w, address, parity, True)


def call(name: str, *operands: Any, **options: Any) -> Step:
    """Any other instruction."""

    def step(w: Any) -> None:
        getattr(w.cta, name)(w, *operands, **options)

    return step


def aligned(size: int, alignment: int = 256) -> Any:
    """A buffer of zero bytes at an aligned address."""
    raw = np.zeros(size + alignment, np.uint8)
    return raw[-raw.ctypes.data % alignment :][:size]


def tensor_map(
    data: Any, sizes: Sequence[int], box: Sequence[int], *, bits: int, kind: int, swizzle: int = 0, flags: int = 0
) -> Any:
    """The 128 bytes of a tensor map of a dense tensor, dimension 0 first (encoding: see `tma`)."""
    w = [0] * 8
    w[0] = data.ctypes.data
    rank = len(sizes)
    low = 1 << 1 | (rank - 1) << 4 | kind << 7 | swizzle << 13 | 1 << 18 | flags
    strides, step = [], sizes[0] * bits // 8
    for n in sizes[1:]:
        strides.append(step // 16)
        step *= n
    strides += [0] * (4 - len(strides))
    full = [n - 1 for n in sizes] + [0] * (5 - rank)
    boxes = [n - 1 for n in box] + [0] * (5 - rank)
    w[1] = low | strides[0] << 32
    w[2] = strides[1] | strides[2] << 32
    w[3] = strides[3]
    w[4] = full[0] | full[1] << 32
    w[5] = full[2] | full[3] << 32
    w[6] = full[4] | boxes[0] << 56
    w[7] = boxes[1] | boxes[2] << 8 | boxes[3] << 16 | boxes[4] << 24
    return np.concatenate([np.array(w, np.uint64).view(np.uint8), np.zeros(64, np.uint8)])
