"""The simulated device: catches launches of CuTe DSL functions and runs them on CPU tensors, in place.

with simulator.device("sm_100a", seed=3, track=True) as gpu:
    gpu.register(q=q, k=k, v=v, o=o)
    compiled = cute.compile(kernel, …)
    compiled(…)                                a finding comes out of here as an exception
    print(gpu.report())
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import time
from types import TracebackType
from typing import Any, Self

import numpy as np

from wanfp4.simulator.errors import HostError
from wanfp4.simulator.findings import Place, ProtocolError, SimulationError
from wanfp4.simulator.launch import Interceptor, Launch
from wanfp4.simulator.lines import SourceMap
from wanfp4.simulator.machine import ACCUMULATIONS, CTA, ORDERINGS
from wanfp4.simulator.memory import GlobalMemory
from wanfp4.simulator.ptx import Kernel, read_kernels
from wanfp4.simulator.report import LaunchReport
from wanfp4.simulator.translate import Code

Extent = tuple[int, int, int]

ARCHITECTURES = ("sm_100a", "sm_103a")


class Simulator:
    """Runs kernels from their PTX; `Device` feeds it with what CuTe DSL launches.

    seed      None: warps in turn, everything asynchronous completes at once. A number: warps and asynchronous work go
              on at very unequal speeds, in an order drawn from it.
    track     also judge: undefined values, and accesses that nothing orders.
    ordering  what may be relied on, "pipe" or "isa"; see `wanfp4.simulator.judge`.
    limit     turns of the scheduler, after which a CTA counts as one that never ends. Without, it does when all its
              warps wait or go round in loops in which nothing can change; a loop that goes on writing never ends.
    accumulation  how tcgen05.mma adds up, "exact" or "truncated"; see `wanfp4.simulator.mma`.
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        track: bool = False,
        ordering: str = "pipe",
        limit: int | None = None,
        accumulation: str = "exact",
    ) -> None:
        if ordering not in ORDERINGS:
            raise HostError(f"ordering is {ordering!r}; it can be {' or '.join(map(repr, ORDERINGS))}")
        if accumulation not in ACCUMULATIONS:
            raise HostError(f"accumulation is {accumulation!r}; it can be {' or '.join(map(repr, ACCUMULATIONS))}")
        self.seed, self.track, self.ordering, self.limit = seed, track, ordering, limit
        self.accumulation = accumulation
        self.memory = GlobalMemory({})
        self.reports: list[LaunchReport] = []

    def register(self, *tensors: Any, **named: Any) -> None:
        """Let kernels touch the memory of these CPU tensors, PyTorch or NumPy; views count with their whole storage.

        Raises HostError for anything else.
        """
        for name, tensor in itertools.chain(
            ((f"tensor {len(self.memory) + i}", t) for i, t in enumerate(tensors)), named.items()
        ):
            self.memory.add(name, storage(tensor))

    def report(self) -> LaunchReport:
        """Of the last launch. Raises HostError when there was none."""
        if not self.reports:
            raise HostError("nothing was launched, so there is no report")
        return self.reports[-1]

    def run(
        self,
        code: Code,
        grid: tuple[int, int, int],
        params: np.ndarray[Any, np.dtype[np.uint8]],
        shared_bytes: int = 0,
        *,
        sources: SourceMap | None = None,
    ) -> LaunchReport:
        """Run all CTAs, one after the other. `params` is the parameter block.

        Raises what `findings` lists, HostError for a kernel that was not translated for this or names no threads.
        """
        if code.tracked != self.track:
            raise HostError(f"the kernel was translated with tracked={code.tracked}, and track is {self.track}")
        if not code.kernel.threads_by:
            raise HostError(
                f"kernel {code.kernel.name} does not say how many threads a CTA has: it needs .reqntid (or .maxntid, "
                "which is then taken to be the number) after its parameters"
            )
        report = LaunchReport(code.kernel.name, grid, int(np.prod(code.kernel.threads)))
        self.reports.append(report)
        started = time.perf_counter()
        try:
            for z, y, x in itertools.product(*(range(n) for n in reversed(grid))):
                cta = CTA(
                    code,
                    (x, y, z),
                    grid,
                    shared_bytes,
                    params,
                    self.memory,
                    seed=self.seed,
                    track=self.track,
                    ordering=self.ordering,
                    limit=self.limit,
                    accumulation=self.accumulation,
                )
                with np.errstate(all="ignore"):
                    cta.run()
                report.add(code, cta)
        except SimulationError as error:
            code.locate(error)
            _explain(error, code.kernel.name, code.kernel.text, sources)
            raise
        finally:
            report.seconds = time.perf_counter() - started
        return report


class Device(Simulator):
    """A context manager; see `device`."""

    def __init__(self, arch: str, *, line_info: bool = True, **options: Any) -> None:
        if arch not in ARCHITECTURES:
            raise HostError(f"{arch!r} is not modelled; {' and '.join(ARCHITECTURES)} are")
        super().__init__(**options)
        self._interceptor = Interceptor(arch, self._launched, line_info=line_info)
        self._codes: dict[tuple[str, str, bool, Extent], tuple[Code, SourceMap]] = {}

    def __enter__(self) -> Self:
        self._interceptor.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._interceptor.__exit__(kind, error, trace)

    def code(self, ptx: str, kernel: str, block: Extent) -> tuple[Code, SourceMap]:
        """A kernel of a module for CTAs of `block` threads, translated at its first use.

        Raises ProtocolError when the kernel is not made for so many, UnknownInstruction.
        """
        key = (ptx, kernel, self.track, block)
        if key not in self._codes:
            sources = SourceMap(ptx)
            try:
                entry = _for_block(read_kernels(ptx)[kernel], block)
                self._codes[key] = Code(entry, tracked=self.track), sources
            except SimulationError as error:
                _explain(error, kernel, ptx, sources)
                raise
        return self._codes[key]

    def _launched(self, launch: Launch) -> None:
        if launch.cluster != (1, 1, 1):
            raise HostError(f"{launch.kernel} is launched in clusters of {launch.cluster}; one CTA is modelled")
        code, sources = self.code(launch.ptx, launch.kernel, launch.block)
        size = max((offset + size for offset, size in code.kernel.params.values()), default=0)
        params = np.zeros(size, np.uint8)
        for index, (offset, length) in enumerate(code.kernel.params.values()):
            params[offset : offset + length] = np.frombuffer(launch.params(index, length), np.uint8)
        self.run(code, launch.grid, params, launch.shared_bytes, sources=sources)


def device(
    arch: str = "sm_100a",
    *,
    seed: int | None = None,
    track: bool = False,
    ordering: str = "pipe",
    limit: int | None = None,
    accumulation: str = "exact",
    line_info: bool = True,
) -> Device:
    """A simulated GPU for a `with` block, in which compiled CuTe DSL functions run on registered CPU tensors.

    The options are those of `Simulator`. Without `line_info` functions compile in about half the time, and findings
    name no line of their source.

    Raises HostError for another architecture or option, and where cutlass is missing.
    """
    options: dict[str, Any] = {"seed": seed, "track": track, "ordering": ordering, "limit": limit}
    return Device(arch, line_info=line_info, accumulation=accumulation, **options)


def storage(tensor: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a CPU tensor's memory, of its whole storage, not copied. They keep the tensor alive.

    Raises HostError for what is no strided tensor of PyTorch on the CPU, nor an array of NumPy.
    """
    if isinstance(tensor, np.ndarray):
        root: Any = tensor
        while isinstance(root.base, np.ndarray):
            root = root.base
        low, high = np.lib.array_utils.byte_bounds(root)
        memory: Any = (ctypes.c_uint8 * (high - low)).from_address(low)
        memory.owner = tensor
        view = np.ndarray((high - low,), np.uint8, buffer=memory)
        view.flags.writeable = root.flags.writeable
        return view
    if not hasattr(tensor, "untyped_storage"):
        raise HostError(
            f"a {type(tensor).__module__}.{type(tensor).__qualname__} cannot be registered; PyTorch tensors on the CPU "
            "and NumPy arrays can"
        )
    if tensor.device.type != "cpu":
        raise HostError(f"a tensor on {tensor.device} cannot be simulated; CPU tensors can")
    try:
        whole = tensor.untyped_storage()
    except NotImplementedError:  # PyTorch's, for sparse tensors
        raise HostError(
            f"a tensor of layout {tensor.layout} has no one storage; strided tensors can be registered"
        ) from None
    if not whole.nbytes():
        return np.zeros(0, np.uint8)
    buffer: Any = (ctypes.c_uint8 * whole.nbytes()).from_address(whole.data_ptr())
    buffer.owner = tensor
    return np.ndarray((whole.nbytes(),), np.uint8, buffer=buffer)


def _for_block(kernel: Kernel, block: Extent) -> Kernel:
    """The kernel with CTAs of the size of a launch. PTX ISA: .reqntid is met exactly, .maxntid bounds the product."""
    if kernel.threads_by == ".reqntid" and block != kernel.threads:
        raise ProtocolError(f"launched with {block} threads, and .reqntid asks for {kernel.threads}")
    if kernel.threads_by == ".maxntid" and math.prod(block) > math.prod(kernel.threads):
        raise ProtocolError(f"launched with {block} threads, and .maxntid allows {math.prod(kernel.threads)}")
    return dataclasses.replace(kernel, threads=block, threads_by="launch")


def _explain(error: SimulationError, kernel: str, ptx: str, sources: SourceMap | None) -> None:
    """Name kernel, PTX text and source line of a finding."""
    lines = ptx.split("\n")

    def place(line: int | None) -> Place | None:
        if not line:
            return None
        text = lines[line - 1].strip() if line <= len(lines) else ""
        return Place(line, text[:120], sources.where(line) if sources is not None else None)

    error.kernel = kernel
    error.place, error.other_place = place(error.line), place(error.other)
