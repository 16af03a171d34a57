"""What the compiler made of the kernels: registers, memory, and what the softmax loop costs a key tile, without a GPU.

Kernels are compiled and "launched" with the simulator catching the launch, so shared memory and block sizes are what
the host code asks for. Everything else is read from the machine code.

The cycles are a model on paper. A key tile (128 queries × 128 keys of one stage) is the work of four warps, one on each
of a multiprocessor's four schedulers, so n instructions a warp take

    n cycles to issue,  and  n_pipe · 128 / lanes_pipe  cycles of a pipe that serves so many threads a clock.

The model takes the largest of these, and of the tensor core's own time. Latencies, waits, bank conflicts and whatever
else warps on the same scheduler do are not in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import re
import sys
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wanfp4.errors import SettingsError, Wanfp4Error
from wanfp4.kernels.blackwell import sass
from wanfp4.kernels.blackwell.cache import _KINDS, Function, Kernel

ARCHITECTURES = ("sm_100a", "sm_103a")
SHARED_LIMIT = 227 * 1024  # bytes that a block may ask for
RESERVED = 1024  # bytes of every block that has shared memory, the driver's own: cuobjdump counts them
TENSOR_COLUMNS = 512
THREADS = 128  # that share a key tile, a query each
TILE = 128  # keys


@dataclass(frozen=True)
class Rates:
    """Threads that a multiprocessor serves in a clock, by pipe, and cycles of its tensor core for a key tile.

    An `FFMA2` is one instruction of a thread on two floats. The conversion rate is that of a pair of floats to E2M1.
    """

    lanes: dict[str, float]
    tensor_fp4: int = 256  # 128 for Q·Kᵀ, 128 for P·V
    tensor_bf16: int = 1024  # a quarter of the FP4 rate


def rates(arch: str) -> Rates:
    """Published or measured rates: exponentials 16 (32 on SM103), conversions to E2M1 57, FP32 128, integers 64."""
    return Rates({"FMA": 128, "ALU": 64, "conversion": 57, "MUFU": 32 if arch.startswith("sm_103") else 16, "dp4a": 64})


@dataclass(frozen=True)
class SoftmaxLoop:
    """The loop over whole key tiles of one softmax warp, per pass.

    pairs        of P elements that a thread makes in it
    slots        instructions of a pass in which no row has to be rescaled and no wait fails, by pipe
    conditional  of these, instructions behind a branch; they are counted as if it were always taken
    names        the same instructions by their names
    rescale      instructions of the branch that rescales O, which are not in `slots`
    retries      instructions of waits that were not over at the first look, which are not in `slots`
    tail         instructions of the part that does the last, incomplete tile; None where there is no such part
    """

    pairs: int
    slots: dict[str, int]
    conditional: int
    names: dict[str, int]
    rescale: int
    retries: int
    tail: int | None

    @property
    def total(self) -> int:
        """Issue slots of a pass."""
        return sum(self.slots.values())

    @property
    def exponentials(self) -> int:
        """Of a pass."""
        return self.names.get("MUFU.EX2", 0)

    def to_dict(self, arch: str) -> dict[str, Any]:
        """Plain JSON values, those of the model among them."""
        tiles = self.pairs / (TILE // 2)
        return {
            **dataclasses.asdict(self),
            "slots_per_pair": self.per_pair(),
            "slots_per_tile": round(self.total / tiles),
            "exponentials_per_tile": round(self.exponentials / tiles),
            "cycles": self.cycles(arch),
        }

    def per_pair(self, pipe: str | None = None) -> float:
        """Issue slots for two P elements, of one pipe or of all."""
        return (self.total if pipe is None else self.slots[pipe]) / self.pairs

    def cycles(self, arch: str) -> dict[str, float]:
        """Cycles of a 128 × 128 tile on each pipe, and to issue, by the model on paper."""
        scale = TILE // 2 / self.pairs
        found = {"issue": self.total * scale}
        for pipe, lanes in rates(arch).lanes.items():
            found[pipe] = self.slots[pipe] * scale * THREADS / lanes
        return found


@dataclass(frozen=True)
class KernelFigures:
    """One compiled kernel.

    registers        of a thread at launch; `setmaxnreg` what warps then ask for
    spills           instructions that load or store local memory
    stack, local     bytes
    static_shared, dynamic_shared  bytes of shared memory, the driver's own 1 KiB not among them
    tensor_columns   columns of tensor memory that are allocated
    tensor_core      instructions for the tensor core and its copies of scales, by name
    """

    name: str
    threads: int
    registers: int
    setmaxnreg: tuple[int, ...]
    spills: int
    stack: int
    local: int
    static_shared: int
    dynamic_shared: int
    tensor_columns: int
    instructions: int
    tensor_core: dict[str, int]
    loop: SoftmaxLoop | None = None

    @property
    def faults(self) -> list[str]:
        """What is over the limits of the hardware or spills."""
        found = []
        if self.spills or self.stack or self.local:
            found.append(f"{self.spills} spills, {self.stack} bytes of stack, {self.local} of local memory")
        if self.static_shared + self.dynamic_shared > SHARED_LIMIT:
            found.append(f"{self.static_shared + self.dynamic_shared} bytes of shared memory, over {SHARED_LIMIT}")
        if self.tensor_columns > TENSOR_COLUMNS:
            found.append(f"{self.tensor_columns} columns of tensor memory, over {TENSOR_COLUMNS}")
        if self.registers * self.threads > 64 * 1024:
            found.append(f"{self.registers} registers for {self.threads} threads, over {64 * 1024} in all")
        if self.setmaxnreg:
            # setmaxnreg draws on what the launch gave the CTA; a warpgroup that asks for more waits for ever. Who runs
            # which value the code does not say: warpgroups beyond the different values count with the largest.
            groups = self.threads // 128
            wanted = sum(self.setmaxnreg) + (groups - len(self.setmaxnreg)) * max(self.setmaxnreg)
            if wanted > groups * self.registers:
                found.append(f"setmaxnreg asks for {wanted * 128} registers, of {self.registers * self.threads}")
        return found

    def to_dict(self, arch: str) -> dict[str, Any]:
        """Plain JSON values."""
        loop = None
        if self.loop is not None:
            loop = self.loop.to_dict(arch)
            limit = rates(arch)
            block_scaled = any(name.startswith("UTCOMMA") for name in self.tensor_core)
            loop["cycles"]["tensor core"] = limit.tensor_fp4 if block_scaled else limit.tensor_bf16
        return {**dataclasses.asdict(self), "loop": loop, "faults": self.faults}


class Compiler:
    """Compiles kernels for `arch` and reads what came out; use it as a context manager.

    With `keep`, PTX, cubin and disassembly of each stay in that folder. Raises SettingsError for an architecture that
    is not known, HostError without nvidia-cutlass-dsl, Wanfp4Error without NVIDIA's disassembler.
    """

    def __init__(self, arch: str = "sm_100a", keep: Path | None = None) -> None:
        if arch not in ARCHITECTURES:
            raise SettingsError(f"{arch!r} is no architecture of these kernels; {' and '.join(ARCHITECTURES)} are")
        self.arch = arch
        self.keep = keep
        self._launches: list[Any] = []
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Compiler:
        from wanfp4.simulator.launch import Interceptor

        for name in ("cuobjdump", "nvdisasm"):
            sass.tool(name)
        with contextlib.ExitStack() as undo:
            folder = self.keep or Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="wanfp4-inspect-")))
            undo.enter_context(Interceptor(self.arch, self._launches.append, keep=folder, line_info=False))
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def figures(self, kernel: Kernel) -> list[KernelFigures]:
        """What a kernel of ours is made of; more than one where a call launches more than one."""
        found = self._figures(lambda: _compile_and_call(kernel, self.arch))
        if kernel.kind == "forward":
            return [dataclasses.replace(figures, loop=softmax_loop(code, "E2M1")) for figures, code in found]
        return [figures for figures, _ in found]

    def flash_attention(self) -> KernelFigures | None:
        """The BF16 forward of flash-attn-4 for 128 channels, not causal; None where the package is not installed."""
        if importlib.util.find_spec("flash_attn") is None:
            return None
        import torch

        with _without_triton(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it uses names that cutlass is about to drop
            from cuda.bindings import driver
            from cutlass import cute
            from cutlass.cute.runtime import from_dlpack
            from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100

            tensors = [torch.zeros(1, TILE, 1, 128, dtype=torch.bfloat16) for _ in range(4)]
            arguments = [
                from_dlpack(x, assumed_align=16).mark_layout_dynamic(leading_dim=x.ndim - 1)
                for x in (*tensors, torch.zeros(1, 1, TILE))
            ]
            kernel = FlashAttentionForwardSm100(128, is_static_persistent=False)
            stream = driver.CUstream(0)
            run = lambda: cute.compile(kernel, *arguments, 1.0, stream=stream)(*arguments, 1.0, stream=stream)  # noqa: E731
            [(figures, code)] = self._figures(run)
        return dataclasses.replace(figures, loop=softmax_loop(code, "BF16"))

    def _figures(self, run: Callable[[], object]) -> list[tuple[KernelFigures, sass.Function]]:
        """Compile and launch, and read each kernel that was launched."""
        self._launches.clear()
        run()
        return [_read(launch) for launch in self._launches]


def _compile_and_call(kernel: Kernel, arch: str) -> None:
    """With arguments that do not matter: what is launched with them is caught."""
    types = _KINDS[kernel.kind][2]
    Function(kernel.compile(arch), types)(*({"q": 0, "i": 1, "f": 1.0, "s": 0}[t] for t in types))


def describe(kernel: Kernel) -> str:
    """A kernel other than the forward in a few words."""
    o = kernel.options
    if kernel.kind in ("guard", "mean"):
        return {"guard": "guard: sample of the logits", "mean": "mean over tokens"}[kernel.kind]
    order = f", anchor{o.anchor} first{' where guarded' if o.guarded else ''}" if o.anchor else ""
    return f"quantise {'Q, K' if o.operand == 'qk' else 'V'}: {o.format}{order}{', less the mean' if o.mean else ''}"


def peer_name() -> str:
    """What `Compiler.flash_attention` compiles."""
    return f"flash-attn-4 {importlib.metadata.version('flash-attn-4')}, BF16"


@contextlib.contextmanager
def _without_triton() -> Iterator[None]:
    """Importing flash-attn-4 imports a tuner that needs Triton, of which nothing is used here."""
    name = "quack.autotuner"
    if importlib.util.find_spec("triton") is not None or name in sys.modules:
        yield
        return
    stand_in = types.ModuleType(name)
    vars(stand_in).update(AutotuneConfig=lambda *args, **options: None, autotune=lambda *args, **options: lambda f: f)
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        del sys.modules[name]


def _read(launch: Any) -> tuple[KernelFigures, sass.Function]:
    cubin = launch.ptx_path.with_suffix(".cubin")
    taken = sass.resources(cubin)[launch.kernel]
    code = sass.functions(cubin)[launch.kernel]
    cubin.with_suffix(".sass").write_text(sass.listing(cubin), encoding="utf-8")
    names = code.names()
    x, y, z = launch.block
    figures = KernelFigures(
        name=launch.kernel,
        threads=x * y * z,
        registers=taken.registers,
        setmaxnreg=tuple(
            sorted({int(i.operands.split()[-1], 0) for i in code.instructions if i.base == "USETMAXREG"}, reverse=True)
        ),
        spills=sum(n for name, n in names.items() if name.partition(".")[0] in ("LDL", "STL")),
        stack=taken.stack,
        local=taken.local,
        static_shared=max(0, taken.shared - RESERVED),
        dynamic_shared=launch.shared_bytes,
        tensor_columns=tensor_columns(launch.ptx),
        instructions=len(code.instructions),
        tensor_core={name: n for name, n in sorted(names.items()) if re.match(r"UTC(CP|\w*MMA)\b", name)},
    )
    return figures, code


def tensor_columns(ptx: str) -> int:
    """Columns of tensor memory that a module's kernel allocates. Raises Wanfp4Error when its PTX does not tell."""
    columns = 0
    for count in re.findall(r"tcgen05\.alloc\.[\w.:]+\s+\[[^]]+\],\s*([%\w]+);", ptx):
        value = count if count.isdigit() else None
        if value is None and (constants := set(re.findall(rf"mov\.\w+\s+{re.escape(count)},\s*(\d+);", ptx))):
            [value] = constants
        if value is None:
            raise Wanfp4Error(f"the columns of a tcgen05.alloc are no constant: {count}")
        columns += int(value)
    return columns


def softmax_loop(code: sass.Function, element: str) -> SoftmaxLoop:
    """The loop in which P is made: elements are converted to `element` ("E2M1", "BF16") and stored to tensor memory.

    Where there are several, the shortest: the others mask. Raises Wanfp4Error when there is none.
    """

    def converts(blocks: frozenset[str]) -> int:
        found = (i for b in blocks for i in code.blocks[b].instructions)
        return sum(i.base == "F2FP" and f".{element}" in i.name for i in found)

    def stores(blocks: frozenset[str]) -> bool:
        return any(i.base == "STTM" for b in blocks for i in code.blocks[b].instructions)

    def passes(loop: sass.Loop) -> frozenset[str]:
        return code.always(loop.latches, loop.blocks)

    loops = [loop for loop in code.loops if converts(passes(loop)) and stores(passes(loop))]
    if not loops:
        raise Wanfp4Error(f"{code.name} has no loop that converts to {element} and stores to tensor memory")
    loop = min(loops, key=lambda loop: _count(code, passes(loop)))
    taken, skipped = passes(loop), Counter[str]()
    for group in code.joined(loop.blocks - taken):
        kind = _kind(code, group)
        skipped[kind] += _count(code, group)
        if kind == "conditional":
            taken |= group
    instructions = [i for b in taken for i in code.blocks[b].instructions]
    return SoftmaxLoop(
        pairs=converts(taken),
        slots={pipe: sum(i.pipe == pipe for i in instructions) for pipe in sass.PIPES},
        conditional=skipped["conditional"],
        names=dict(Counter(i.name for i in instructions).most_common()),
        rescale=skipped["rescale"],
        retries=skipped["retries"],
        tail=_tail(code, loop, converts),
    )


def _count(code: sass.Function, blocks: frozenset[str]) -> int:
    return sum(len(code.blocks[b].instructions) for b in blocks)


def _kind(code: sass.Function, group: frozenset[str]) -> str:
    """What blocks are that a pass through the loop may leave out."""
    bases = {i.base for b in group for i in code.blocks[b].instructions}
    if "STTM" in bases:
        return "rescale"
    return "retries" if "NANOSLEEP" in bases else "conditional"


def _tail(code: sass.Function, loop: sass.Loop, converts: Callable[[frozenset[str]], int]) -> int | None:
    """Instructions of a pass through the part outside of the loop that makes P of the last tile.

    None where P is made in no single such part: flash-attn-4 has one before its loop for a first tile of any length.
    """
    makers = [b for b in code.dominators if b not in loop.blocks and converts(frozenset([b]))]
    around = min(
        (other for other in code.loops if loop.blocks < other.blocks and other.blocks.issuperset(makers)),
        key=lambda other: len(other.blocks),
        default=None,
    )
    if not makers or around is None:
        return None
    # The part begins with the first block that only this tile passes.
    every = code.always(around.latches, around.blocks)
    conditional = [code.dominators[b] & around.blocks - every for b in makers]
    if not (common := frozenset.intersection(*conditional)):
        return None
    first = min(common, key=lambda b: len(code.dominators[b]))
    part = frozenset(b for b in around.blocks if first in code.dominators.get(b, ()))
    ends = [b for b in part if set(code.blocks[b].next) & around.blocks - part]
    taken = code.always(ends, part)
    for group in code.joined(part - taken):
        if _kind(code, group) == "conditional":
            taken |= group
    return _count(code, taken)
