"""The simulated device: catches launches of CuTe DSL functions and runs them on CPU tensors, in place.

with simulator.device("sm_100a", seed=3, track=True) as gpu:
    gpu.register(q=q, k=k, v=v, o=o)
    compiled = cute.compile(kernel, …)
    compiled(…)                                a finding comes out of here as an exception
    print(gpu.report())
"""

from __future__ import annotations

import ctypes
import itertools
import time
from types import TracebackType
from typing import Any, Self

import numpy as np

from wanfp4.simulator.findings import Place, ProtocolError, SimulationError, UnknownInstruction
from wanfp4.simulator.launch import Interceptor, Launch
from wanfp4.simulator.lines import SourceMap
from wanfp4.simulator.machine import CTA, ORDERINGS
from wanfp4.simulator.memory import GlobalMemory
from wanfp4.simulator.ptx import Kernel, read_kernels
from wanfp4.simulator.report import LaunchReport
from wanfp4.simulator.translate import Code

ARCHITECTURES = ("sm_100a", "sm_103a")


class Simulator:
    """Runs kernels from their PTX; `Device` feeds it with what CuTe DSL launches.

    seed      None: warps in turn, everything asynchronous completes at once. A number: warps and asynchronous work go
              on at very unequal speeds, in an order drawn from it.
    track     also judge: undefined values, and accesses that nothing orders.
    ordering  what may be relied on, "pipe" or "isa"; see `wanfp4.simulator.judge`.
    limit     turns of the scheduler, after which a launch counts as one that never ends; None for no limit.
    """

    def __init__(
        self, *, seed: int | None = None, track: bool = False, ordering: str = "pipe", limit: int | None = None
    ) -> None:
        if ordering not in ORDERINGS:
            raise ProtocolError(f"ordering is {ordering!r}; it can be {' or '.join(map(repr, ORDERINGS))}")
        self.seed, self.track, self.ordering, self.limit = seed, track, ordering, limit
        self.memory = GlobalMemory({})
        self.reports: list[LaunchReport] = []

    def register(self, *tensors: Any, **named: Any) -> None:
        """Let kernels touch the memory of these CPU tensors, PyTorch or NumPy; views count with their whole storage."""
        for name, tensor in itertools.chain(
            ((f"tensor {len(self.memory) + i}", t) for i, t in enumerate(tensors)), named.items()
        ):
            self.memory.add(name, storage(tensor))

    def report(self) -> LaunchReport:
        """Of the last launch. Raises ProtocolError when there was none."""
        if not self.reports:
            raise ProtocolError("nothing was launched")
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
        """Run all CTAs, one after the other. `params` is the parameter block. Raises what `findings` lists."""
        if code.tracked != self.track:
            raise ProtocolError(f"the kernel was translated with tracked={code.tracked}, and track is {self.track}")
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
                )
                with np.errstate(all="ignore"):
                    cta.run()
                report.add(code, cta)
        except SimulationError as error:
            code.locate(error)
            _explain(error, code.kernel, sources)
            raise
        finally:
            report.seconds = time.perf_counter() - started
        return report


class Device(Simulator):
    """A context manager; see `device`."""

    def __init__(self, arch: str, *, line_info: bool = True, **options: Any) -> None:
        if arch not in ARCHITECTURES:
            raise UnknownInstruction(f"{arch!r} is not modelled; {' and '.join(ARCHITECTURES)} are")
        super().__init__(**options)
        self._interceptor = Interceptor(arch, self._launched, line_info=line_info)
        self._codes: dict[tuple[str, str, bool], tuple[Code, SourceMap]] = {}

    def __enter__(self) -> Self:
        self._interceptor.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._interceptor.__exit__(kind, error, trace)

    def code(self, ptx: str, kernel: str) -> tuple[Code, SourceMap]:
        """A kernel of a module, translated at its first use."""
        key = (ptx, kernel, self.track)
        if key not in self._codes:
            self._codes[key] = Code(read_kernels(ptx)[kernel], tracked=self.track), SourceMap(ptx)
        return self._codes[key]

    def _launched(self, launch: Launch) -> None:
        code, sources = self.code(launch.ptx, launch.kernel)
        if launch.cluster != (1, 1, 1):
            raise UnknownInstruction(
                f"{launch.kernel} is launched in clusters of {launch.cluster}; one CTA is modelled"
            )
        if launch.block != code.kernel.threads:
            raise ProtocolError(
                f"{launch.kernel} is launched with {launch.block} threads and needs {code.kernel.threads}"
            )
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
    line_info: bool = True,
) -> Device:
    """A simulated GPU for a `with` block, in which compiled CuTe DSL functions run on registered CPU tensors.

    The options are those of `Simulator`. Without `line_info` functions compile in about half the time, and findings
    name no line of their source.

    Raises UnknownInstruction for another architecture, HostError where cutlass is missing.
    """
    return Device(arch, seed=seed, track=track, ordering=ordering, limit=limit, line_info=line_info)


def storage(tensor: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a CPU tensor's memory, of its whole storage, not copied. They keep the tensor alive."""
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
    if tensor.device.type != "cpu":
        raise ProtocolError(f"a tensor on {tensor.device} cannot be simulated; CPU tensors can")
    whole = tensor.untyped_storage()
    if not whole.nbytes():
        return np.zeros(0, np.uint8)
    buffer: Any = (ctypes.c_uint8 * whole.nbytes()).from_address(whole.data_ptr())
    buffer.owner = tensor
    return np.ndarray((whole.nbytes(),), np.uint8, buffer=buffer)


def _explain(error: SimulationError, kernel: Kernel, sources: SourceMap | None) -> None:
    """Name kernel, PTX text and source line of a finding."""
    lines = kernel.text.split("\n")

    def place(line: int | None) -> Place | None:
        if not line:
            return None
        text = lines[line - 1].strip() if line <= len(lines) else ""
        return Place(line, text[:120], sources.where(line) if sources is not None else None)

    error.kernel = kernel.name
    error.place, error.other_place = place(error.line), place(error.other)
