"""Looks for mistakes in PTX without running it: python -m wanfp4.simulator.lint FILE.ptx …

It follows all paths through a kernel, so it also sees what no run came past; but it knows neither which warps take a
path nor which barrier an address names. It is meant for our own kernels: those of others rely on what ptxas does beyond
the PTX ISA.

| rule | what is wrong |
|---|---|
| tmem-load | a register of tcgen05.ld is used before tcgen05.wait::ld (PTX ISA, tcgen05.wait) |
| tmem-store | tcgen05.st, then an arrival or a barrier, with no tcgen05.wait::st between (the same) |
| tmem-allocation | tcgen05.alloc without dealloc of as many columns, or relinquish_alloc_permit (tcgen05.alloc) |
| mbarrier-init | an mbarrier is used after its init without fence.mbarrier_init and a barrier (membar/fence) |
| undefined | a register is used that nothing has written on some path |

Moving a value (mov, selp) is no use of it: the compiler moves loaded and undefined values about as it likes, and the
machine code keeps track of both. What a move writes is as unusable as what it read.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from wanfp4.errors import Wanfp4Error
from wanfp4.simulator.findings import UnknownInstruction
from wanfp4.simulator.lines import SourceMap
from wanfp4.simulator.ptx import Instruction, Kernel, Operand, read_kernels


@dataclass(frozen=True, order=True)
class Finding:
    """A mistake at a line of the PTX file."""

    line: int
    rule: str
    message: str
    text: str
    kernel: str


def lint(ptx: str) -> list[Finding]:
    """The mistakes in a PTX module, by line. Raises UnknownInstruction for PTX that cannot be read."""
    return [finding for kernel in read_kernels(ptx).values() for finding in lint_kernel(kernel)]


def lint_kernel(kernel: Kernel) -> list[Finding]:
    """The mistakes in one kernel, by line."""
    checks = (_tensor_memory_loads, _tensor_memory_stores, _allocation, _barrier_init, _undefined)
    found = [mistake for check in checks for mistake in check(kernel)]
    return sorted(Finding(ins.line, rule, message, str(ins), kernel.name) for ins, rule, message in found)


Mistake = tuple[Instruction, str, str]

# Opcodes whose first operand is read although it is no address.
_NO_RESULT = re.compile(
    r"bar\.|barrier\.(?!(cta\.)?red)|bra\b|brx|ret\b|exit\b|setmaxnreg|griddepcontrol|nanosleep|trap|fence|membar|"
    r"tcgen05\.(?!ld\b)|st\b|red\b|cp\b|prefetch|discard|applypriority|mbarrier\.(init|inval|expect_tx|complete_tx)"
)
_MOVES = re.compile(r"(mov|selp)\b")
_BARRIER = re.compile(r"bar\.(sync|red)|barrier\.(cta\.)?(sync|red)|barrier\.cluster\.wait")
_ARRIVAL = re.compile(r"bar\.(sync|arrive|red)|barrier\.(cta\.|cluster\.)?(sync|arrive|red)|mbarrier\.arrive")
_MBARRIER_USE = re.compile(r"mbarrier\.(?!init|inval)|tcgen05\.commit|cp\.async\.bulk.*\.mbarrier|cp\.async\.mbarrier")
_NAME = re.compile(r"[%\w$@]+")

State = TypeVar("State", int, frozenset[tuple[int, bool]], frozenset[int])


def _registers(kernel: Kernel, operands: Sequence[Operand]) -> list[str]:
    parts = (part for op in operands for part in ((op,) if isinstance(op, str) else op))
    return [name for part in parts for name in _NAME.findall(part) if name in kernel.registers]


def _results(ins: Instruction) -> int:
    """How many operands, from the first, an instruction writes."""
    if _NO_RESULT.match(ins.opcode):
        return 0
    if ins.opcode.startswith("tcgen05.ld"):  # with .red it has two
        return next(i for i, op in enumerate(ins.operands) if isinstance(op, str) and op.startswith("["))
    first = ins.operands[0] if ins.operands else "["
    return 0 if isinstance(first, str) and first.startswith("[") else 1


def _written(kernel: Kernel, ins: Instruction) -> list[str]:
    return _registers(kernel, ins.operands[: _results(ins)])


def _read(kernel: Kernel, ins: Instruction) -> list[str]:
    return [*([ins.guard] if ins.guard else []), *_registers(kernel, ins.operands[_results(ins) :])]


def _successors(kernel: Kernel) -> list[list[int]]:
    """The blocks that may follow each block."""
    for ins in kernel.instructions:
        if re.match(r"(brx|call)\b", ins.opcode):
            raise UnknownInstruction(f"{ins.opcode} leads to places that the lint does not follow", line=ins.line)
    result = []
    for index, block in enumerate(kernel.blocks):
        last = block[-1]
        head = last.opcode.split(".")[0]
        following = []
        if head == "bra":
            target = last.operands[0]
            following.append(kernel.targets[str(target)])
        if head not in ("bra", "ret", "exit", "trap") or last.guard:
            following.append(index + 1)
        result.append([block for block in following if block < len(kernel.blocks)])
    return result


def _states(
    kernel: Kernel, start: State, nothing: State, step: Callable[[Instruction, State], State]
) -> Iterator[tuple[Instruction, State]]:
    """Each instruction that can be reached, with what may hold before it: the union over all paths from the entry."""
    successors = _successors(kernel)
    entry: dict[int, State] = {0: start}
    waiting = [0]
    while waiting:
        index = waiting.pop()
        state = entry[index]
        for ins in kernel.blocks[index]:
            state = step(ins, state)
        for following in successors[index]:
            known = entry.get(following, nothing)
            if following not in entry or known | state != known:
                entry[following] = known | state
                waiting.append(following)
    for index in sorted(entry):
        state = entry[index]
        for ins in kernel.blocks[index]:
            yield ins, state
            state = step(ins, state)


def _tainted(
    kernel: Kernel, start: int, source: Callable[[Instruction], bool], cleansed: Callable[[Instruction], bool]
) -> Iterator[tuple[Instruction, str]]:
    """Uses of registers that must not be used. A state is a set of registers as bits.

    `source` says that an instruction writes such values, `cleansed` that all of them become usable there.
    """
    bits = {name: 1 << i for i, name in enumerate(kernel.registers)}
    reads = {id(ins): _mask(bits, _read(kernel, ins)) for ins in kernel.instructions}
    writes = {id(ins): _mask(bits, _written(kernel, ins)) for ins in kernel.instructions}

    def step(ins: Instruction, state: int) -> int:
        if cleansed(ins) and ins.guard is None:
            return 0
        written = writes[id(ins)]
        if source(ins) or (_MOVES.match(ins.opcode) and state & reads[id(ins)]):
            return state | written
        return state if ins.guard else state & ~written

    for ins, state in _states(kernel, start, 0, step):
        if state & reads[id(ins)] and not _MOVES.match(ins.opcode):
            for name in dict.fromkeys(_read(kernel, ins)):
                if state & bits[name]:
                    yield ins, name


def _mask(bits: dict[str, int], names: list[str]) -> int:
    result = 0
    for name in names:
        result |= bits[name]
    return result


def _tensor_memory_loads(kernel: Kernel) -> Iterator[Mistake]:
    def loads(ins: Instruction) -> bool:
        return ins.opcode.startswith("tcgen05.ld")

    def waits(ins: Instruction) -> bool:
        return ins.opcode.startswith("tcgen05.wait::ld")

    # One finding for each load, at its first use: a load may fill 128 registers.
    origins: dict[str, set[int]] = {}
    for ins in kernel.instructions:
        lines = {ins.line} if loads(ins) else set()
        if _MOVES.match(ins.opcode):
            lines = {line for name in _read(kernel, ins) for line in origins.get(name, ())}
        for name in _written(kernel, ins):
            origins.setdefault(name, set()).update(lines)
    told: set[int] = set()
    for ins, name in _tainted(kernel, 0, loads, waits):
        for line in sorted(origins[name] - told):
            told.add(line)
            yield ins, "tmem-load", f"{name}, loaded by tcgen05.ld (line {line}), is used before tcgen05.wait::ld"


def _undefined(kernel: Kernel) -> Iterator[Mistake]:
    everything = (1 << len(kernel.registers)) - 1
    written = {name for ins in kernel.instructions for name in _written(kernel, ins)}
    told: set[str] = set()
    for ins, name in _tainted(kernel, everything, lambda ins: False, lambda ins: False):
        if name not in told:
            told.add(name)
            how = "not written on every path" if name in written else "never written"
            yield ins, "undefined", f"{name} is used, but {how}, or made of what is not"


def _tensor_memory_stores(kernel: Kernel) -> Iterator[Mistake]:
    def step(ins: Instruction, state: frozenset[int]) -> frozenset[int]:
        if ins.opcode.startswith("tcgen05.st"):
            return state | {ins.line}
        if ins.opcode.startswith("tcgen05.wait::st") and ins.guard is None:
            return frozenset()
        return state

    nothing: frozenset[int] = frozenset()
    for ins, stores in _states(kernel, nothing, nothing, step):
        if stores and _ARRIVAL.match(ins.opcode):
            lines = ", ".join(str(line) for line in sorted(stores))
            yield ins, "tmem-store", f"tcgen05.st (line {lines}) is not waited for with tcgen05.wait::st before this"


def _barrier_init(kernel: Kernel) -> Iterator[Mistake]:
    """A state holds the lines of initialisations that others may not have seen, and whether a fence came after them."""

    def step(ins: Instruction, state: frozenset[tuple[int, bool]]) -> frozenset[tuple[int, bool]]:
        if ins.opcode.startswith("mbarrier.init"):
            return state | {(ins.line, False)}
        if ins.opcode.startswith("fence.mbarrier_init"):
            return frozenset((line, True) for line, _ in state)
        if _BARRIER.match(ins.opcode):
            return frozenset((line, fenced) for line, fenced in state if not fenced)
        return state

    nothing: frozenset[tuple[int, bool]] = frozenset()
    for ins, state in _states(kernel, nothing, nothing, step):
        if state and _MBARRIER_USE.match(ins.opcode):
            unfenced = sorted(line for line, fenced in state if not fenced)
            lines = ", ".join(map(str, unfenced or sorted(line for line, _ in state)))
            missing = "fence.mbarrier_init" if unfenced else "a barrier"
            yield ins, "mbarrier-init", f"an mbarrier is used without {missing} after mbarrier.init (line {lines})"


def _allocation(kernel: Kernel) -> Iterator[Mistake]:
    instructions = list(kernel.instructions)
    allocations = [ins for ins in instructions if ins.opcode.startswith("tcgen05.alloc")]
    released = {ins.operands[1] for ins in instructions if ins.opcode.startswith("tcgen05.dealloc")}
    for ins in allocations:
        columns = ins.operands[1]
        if not released:
            yield ins, "tmem-allocation", "tensor memory is never given back with tcgen05.dealloc"
        elif columns not in released and str(columns).isdigit() and all(str(other).isdigit() for other in released):
            found = ", ".join(sorted(map(str, released)))
            yield ins, "tmem-allocation", f"{columns} columns are allocated, but dealloc gives {found}"
    if allocations and not any(ins.opcode.startswith("tcgen05.relinquish_alloc_permit") for ins in instructions):
        message = "tcgen05.relinquish_alloc_permit never follows: no other CTA can allocate"
        yield allocations[-1], "tmem-allocation", message


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings of PTX files; 1 if there are any, 2 if a file cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m wanfp4.simulator.lint", description="Look for mistakes in PTX.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.ptx")
    status = 0
    for path in parser.parse_args(arguments).files:
        try:
            text = path.read_text()
            findings = lint(text)
        except (OSError, UnicodeError, Wanfp4Error) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
        sources = SourceMap(text)
        for finding in findings:
            source = sources.where(finding.line)
            print(f"{path}:{finding.line}: {finding.rule}: {finding.message}")
            print(f"    {finding.text}" + (f"  // {source}" if source else ""))
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
