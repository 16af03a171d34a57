"""PTX test programs: how to write one shortly, and how to run it in all the ways that must make no difference."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from wanfp4.simulator.device import Simulator
from wanfp4.simulator.ptx import Kernel, read_kernels
from wanfp4.simulator.report import LaunchReport
from wanfp4.simulator.translate import Code

HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"
MAP = "map"  # a parameter that holds a tensor map

# Options of a run that change nothing in a right program.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tracked": {"track": True},
    "tracked, isa": {"track": True, "ordering": "isa"},
    "plain, seed 1": {"seed": 1},
    "tracked, seed 2": {"seed": 2, "track": True},
}

Argument = Any  # an array (its address is passed), an int, bytes, or a function of all arrays that gives bytes


def kernel(body: str, params: Mapping[str, str] | str = "", *, threads: int | str = 32, top: str = "") -> str:
    """A module with one kernel `k`.

    `params` maps names to types (`MAP` for a tensor map), or lists names of 64-bit pointers separated by blanks.
    Parameter `a` is in register %a (of a tensor map, its address), the thread's number in %thread, and of general use
    there are %p0…%p31, %h0…%h31 (16 bits), %r0…%r99, %f0…%f15 and %d0…%d47 (64 bits). `top` stands before the kernel.
    """
    kinds = dict.fromkeys(params.split(), "u64") if isinstance(params, str) else dict(params)
    declared = [
        f".param .align 64 .b8 {name}[128]" if kind == MAP else f".param .{kind} {name}" for name, kind in kinds.items()
    ]
    lines = [".reg .pred %p<32>;", ".reg .b16 %h<32>;", ".reg .b32 %r<100>;", ".reg .f32 %f<16>;", ".reg .b64 %d<48>;"]
    lines.append(".reg .b32 %thread;")
    for name, kind in kinds.items():
        lines.append(f".reg .{'b64' if kind == MAP else kind} %{name};")
        if kind == MAP:
            lines += [f"mov.b64 %{name}, {name};", f"cvta.param.u64 %{name}, %{name};"]
        else:
            lines.append(f"ld.param.{kind} %{name}, [{name}];")
    lines.append("mov.u32 %thread, %tid.x;")
    inside = "\n".join(f"  {line}" for line in lines)
    return f"{HEADER}{top}.visible .entry k({', '.join(declared)})\n.reqntid {threads}\n{{\n{inside}\n{body}\n}}\n"


@lru_cache(maxsize=8)
def parsed(text: str) -> Kernel:
    """Kernel `k` of a module."""
    return read_kernels(text)["k"]


@lru_cache(maxsize=64)
def translated(text: str, tracked: bool) -> Code:
    """Kernel `k` of a module, as the machine runs it."""
    return Code(parsed(text), tracked=tracked)


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy whose address is a multiple of 256."""
    store = np.empty(array.nbytes + 256, np.uint8)
    start = -store.ctypes.data % 256
    copy = store[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def run(
    text: str, *args: Argument, shared: int = 0, grid: tuple[int, int, int] = (1, 1, 1), **options: Any
) -> LaunchReport:
    """Run kernel `k`, which reads and writes the arrays among `args` in place."""
    sim = Simulator(**{"limit": 100_000, **options})
    code = translated(text, sim.track)
    arrays = [arg for arg in args if isinstance(arg, np.ndarray)]
    for index, array in enumerate(arrays):
        sim.memory.add(f"array {index}", array.reshape(-1).view(np.uint8))
    params = np.zeros(max((at + size for at, size in code.kernel.params.values()), default=0), np.uint8)
    assert len(args) == len(code.kernel.params)
    for arg, (at, size) in zip(args, code.kernel.params.values(), strict=True):
        if isinstance(arg, np.ndarray):
            arg = arg.ctypes.data
        elif callable(arg):
            arg = arg(arrays)
        raw = arg if isinstance(arg, bytes) else int(arg).to_bytes(size, "little")
        params[at : at + size] = np.frombuffer(raw, np.uint8)
    return sim.run(code, grid, params, shared)


def everywhere(
    text: str, *args: Argument, variants: Mapping[str, Mapping[str, Any]] = VARIANTS, **options: Any
) -> list[np.ndarray]:
    """The arrays among `args` after a run: the same, byte for byte, in all variants, which execute every opcode."""
    first: list[np.ndarray] | None = None
    for name, variant in variants.items():
        copies = [aligned(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
        report = run(text, *copies, **{**options, **variant})
        tracked = bool(variant.get("track"))
        missing = {ins.opcode for ins in translated(text, tracked).kernel.instructions} - set(report.opcodes)
        assert not missing, f"never executed: {missing}"
        arrays = [copy for copy in copies if isinstance(copy, np.ndarray)]
        if first is None:
            first = arrays
        for index, (one, other) in enumerate(zip(first, arrays, strict=True)):
            assert one.tobytes() == other.tobytes(), f"array {index} differs in variant {name}"
    assert first is not None
    return first
