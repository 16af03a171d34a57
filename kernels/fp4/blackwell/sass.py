"""Machine code of a cubin: its resources, control-flow graph and loops, read with NVIDIA's own tools.

`cuobjdump` tells what a kernel takes, `nvdisasm` takes its code apart and finds the basic blocks. Both are wheels, and
neither needs a GPU or a driver.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from wanfp4.errors import Wanfp4Error

# What an instruction keeps busy, by the first part of its name. Names that are not here are uniform datapath (U…),
# branches, moves between register files and the like: "other".
_PIPES = {
    "FMA": "FFMA FFMA2 FMUL FMUL2 FADD FADD2 IMAD HFMA2 HADD2 HMUL2",
    "ALU": "FMNMX FMNMX3 VIMNMX VIMNMX3 VIADDMNMX VIADD IADD IADD3 LOP3 SHF PRMT LEA MOV SEL FSEL ISETP FSETP PLOP3 "
    "IABS SGXT BMSK FSET FCHK P2R R2P",
    "conversion": "F2FP F2F F2I I2F FRND I2FP F2IP",
    "MUFU": "MUFU",
    "dp4a": "IDP IDP4A",
    "tensor memory": "LDTM STTM UTCCP UTCOMMA UTCHMMA UTCQMMA UTCIMMA UTCBAR UTCATOMSWS UTCSHIFT",
    "shared": "LDS LDSM STS STSM ATOMS",
    "sync": "SYNCS BAR MEMBAR FENCE WARPSYNC DEPBAR NANOSLEEP ERRBAR BSSY BSYNC ELECT",
}
PIPES = (*_PIPES, "other")
_PIPE_OF = {name: pipe for pipe, names in _PIPES.items() for name in names.split()}

INSTALL = 'pip install "wanfp4[inspect]"'


@dataclass(frozen=True)
class Instruction:
    """One instruction: byte offset in its function, "@P0" or the like, full name, operands."""

    offset: int
    predicate: str
    name: str
    operands: str

    @property
    def base(self) -> str:
        """The name without what follows its first dot."""
        return self.name.partition(".")[0]

    @property
    def pipe(self) -> str:
        """One of `PIPES`."""
        return _PIPE_OF.get(self.base, "other")


@dataclass(frozen=True)
class Block:
    """A basic block and the blocks that may come after it."""

    name: str
    instructions: tuple[Instruction, ...]
    next: tuple[str, ...]


@dataclass(frozen=True)
class Loop:
    """A natural loop: its first block, the blocks that jump back to it, and all of its blocks."""

    header: str
    latches: frozenset[str]
    blocks: frozenset[str]


@dataclass(frozen=True)
class Resources:
    """Of one kernel: registers of a thread, and bytes of stack, static shared and local memory."""

    registers: int
    stack: int
    shared: int
    local: int


@dataclass(frozen=True)
class Function:
    """The code of one kernel, its first block first."""

    name: str
    blocks: dict[str, Block]

    @property
    def instructions(self) -> list[Instruction]:
        """All, in the order of their offsets."""
        return sorted((i for block in self.blocks.values() for i in block.instructions), key=lambda i: i.offset)

    def names(self) -> Counter[str]:
        """How often each instruction occurs, by its full name."""
        return Counter(i.name for i in self.instructions)

    @functools.cached_property
    def before(self) -> dict[str, frozenset[str]]:
        """The blocks that lead to each block."""
        found: dict[str, set[str]] = {name: set() for name in self.blocks}
        for block in self.blocks.values():
            for name in block.next:
                found[name].add(block.name)
        return {name: frozenset(blocks) for name, blocks in found.items()}

    @functools.cached_property
    def dominators(self) -> dict[str, frozenset[str]]:
        """For each block that can be reached, the blocks that every way to it passes, itself included."""
        entry = next(iter(self.blocks))
        order, seen, todo = [], {entry}, [(entry, iter(self.blocks[entry].next))]
        while todo:
            name, rest = todo[-1]
            following = next((n for n in rest if n not in seen), None)
            if following is None:
                order.append(name)
                todo.pop()
            else:
                seen.add(following)
                todo.append((following, iter(self.blocks[following].next)))
        order.reverse()
        known = {name: frozenset(order) for name in order}
        known[entry] = frozenset([entry])
        changed = True
        while changed:
            changed = False
            for name in order[1:]:
                ways = [known[p] for p in self.before[name] if p in known]
                found = frozenset.intersection(*ways) | {name}
                if found != known[name]:
                    known[name], changed = found, True
        return known

    @functools.cached_property
    def loops(self) -> tuple[Loop, ...]:
        """Its natural loops; those with the same first block are one."""
        latches: dict[str, set[str]] = {}
        for name, dominators in self.dominators.items():
            for header in self.blocks[name].next:
                if header in dominators:
                    latches.setdefault(header, set()).add(name)
        loops = []
        for header, ends in latches.items():
            inside, todo = {header}, list(ends)
            while todo:
                name = todo.pop()
                if name not in inside:
                    inside.add(name)
                    todo += [p for p in self.before[name] if p in self.dominators]
            loops.append(Loop(header, frozenset(ends), frozenset(inside)))
        return tuple(loops)

    def innermost(self, block: str) -> Loop | None:
        """The smallest loop that has the block."""
        return min(
            (loop for loop in self.loops if block in loop.blocks), key=lambda loop: len(loop.blocks), default=None
        )

    def always(self, ends: Iterable[str], inside: frozenset[str]) -> frozenset[str]:
        """The blocks of `inside` that every way to each of `ends` passes."""
        return frozenset.intersection(inside, *(self.dominators[end] for end in ends))

    def joined(self, blocks: frozenset[str]) -> list[frozenset[str]]:
        """`blocks` in groups that hang together by jumps among them."""
        left, groups = set(blocks), []
        while left:
            group, todo = set(), [left.pop()]
            while todo:
                name = todo.pop()
                group.add(name)
                around = (set(self.blocks[name].next) | self.before[name]) & left
                left -= around
                todo += around
            groups.append(frozenset(group))
        return groups


def tool(name: str) -> Path:
    """`cuobjdump` or `nvdisasm`: of the wheels, else on the PATH. Raises Wanfp4Error when there is none."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(folder).glob(f"cu*/bin/{name}"), reverse=True):
            return path
    if found := shutil.which(name):
        return Path(found)
    raise Wanfp4Error(
        f"machine code is read with NVIDIA's {name}, which is neither installed as a wheel nor on the PATH; {INSTALL} "
        f"brings it (Linux)"
    )


def _run(name: str, *arguments: str) -> str:
    program = tool(name)
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        complaint = (done.stderr or done.stdout).strip().splitlines()
        raise Wanfp4Error(f"{program} failed with exit code {done.returncode}: {' '.join(complaint[-1:])}")
    return done.stdout


def resources(cubin: Path) -> dict[str, Resources]:
    """What each kernel of a cubin takes, by its name."""
    found = {}
    for name, line in re.findall(
        r"Function (\S+):\s*\n\s*(REG:.*)", _run("cuobjdump", "--dump-resource-usage", str(cubin))
    ):
        figures = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}
        found[name] = Resources(figures["REG"], figures["STACK"], figures["SHARED"], figures["LOCAL"])
    return found


def functions(cubin: Path) -> dict[str, Function]:
    """The functions of a cubin by name: kernels, and what the compiler adds to them."""
    graph = _run("nvdisasm", "--output-control-flow-graph-with-basic-blocks", "--print-instr-offsets-cfg", str(cubin))
    return parse(graph)


def listing(cubin: Path) -> str:
    """The disassembly of a cubin, for people."""
    return _run("nvdisasm", "--print-code", str(cubin))


def parse(graph: str) -> dict[str, Function]:
    """Functions from the graph that `nvdisasm -bbcfg -poff` prints in the language of Graphviz."""
    found = {}
    parts = re.split(r'^subgraph "cluster_(.+)" \{$', graph, flags=re.MULTILINE)
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        code = {
            block: tuple(_instructions(label))
            for block, label in re.findall(r'^"([^"\n]+)"\n\[label="\{(.*)\}"\]$', text, flags=re.MULTILINE)
        }
        edges: dict[str, list[str]] = {block: [] for block in code}
        for start, end in re.findall(r'^"([^"\n]+)":\w+:\w+ -> "([^"\n]+)":', text, flags=re.MULTILINE):
            # A call's edge leads into another function.
            if end in code and end not in edges[start]:
                edges[start].append(end)
        order = sorted(code, key=lambda block: code[block][0].offset if code[block] else 0)
        for block, following in itertools.pairwise(order):
            # What is called comes back to the next instruction, and the graph does not say so.
            if code[block] and code[block][-1].base == "CALL" and following not in edges[block]:
                edges[block].append(following)
        found[name] = Function(name, {b: Block(b, code[b], tuple(edges[b])) for b in order})
    return found


def _instructions(label: str) -> Iterable[Instruction]:
    for line in re.sub(r"\|?<\w+>", r"\\l", label).split(r"\l"):
        text = re.sub(r"\\(.)", r"\1", line)
        if match := re.fullmatch(r"([0-9a-f]{4,}):\s+(@!?U?P\w+)?\s*([A-Z][\w.]*)\s*(.*?)\s*;\s*", text):
            offset, predicate, name, operands = match.groups(default="")
            yield Instruction(int(offset, 16), predicate, name, operands)
