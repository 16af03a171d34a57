"""Reads PTX: text → kernels made of basic blocks.

Registers and labels that a scope `{ … }` declares are renamed apart, because inline assembly repeats names: every wait
of CuTe DSL is a scope with the same P1, LAB_WAIT and DONE.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from wanfp4.simulator.findings import UnknownInstruction

SIZES = {
    "pred": 1,
    "b8": 1,
    "u8": 1,
    "s8": 1,
    "b16": 2,
    "u16": 2,
    "s16": 2,
    "f16": 2,
    "bf16": 2,
    "b32": 4,
    "u32": 4,
    "s32": 4,
    "f32": 4,
    "f16x2": 4,
    "bf16x2": 4,
    "b64": 8,
    "u64": 8,
    "s64": 8,
    "f64": 8,
    "f32x2": 8,
    "b128": 16,
}

# A warp may have to give up its turn after these: they end a basic block.
YIELDING = (
    "bar.sync",
    "bar.cta.sync",
    "barrier.sync",
    "barrier.cta.sync",
    "mbarrier.try_wait",
    "mbarrier.test_wait",
    "tcgen05.wait",
    "cp.async.bulk.wait_group",
    "nanosleep",
)

Operand = str | tuple[str, ...]


@dataclass(frozen=True)
class Instruction:
    """One instruction; `operands` are texts, or tuples of texts for {vectors}; `line` is its line in the module."""

    guard: str | None
    negated: bool
    opcode: str
    operands: tuple[Operand, ...]
    line: int

    def __str__(self) -> str:
        guard = f"@{'!' if self.negated else ''}{self.guard} " if self.guard else ""
        shown = (op if isinstance(op, str) else "{" + ", ".join(op) + "}" for op in self.operands)
        return f"{guard}{self.opcode} {', '.join(shown)}".rstrip() + ";"


@dataclass(frozen=True)
class SharedSymbol:
    """A variable in shared memory; `size` is None for the dynamic part, `extern .shared x[]`."""

    name: str
    size: int | None
    align: int


@dataclass
class Kernel:
    """An `.entry`: parameters by name (offset, bytes), register types by name, blocks, and block numbers of labels.

    `threads` of a CTA, as far as it says: exactly so many (`threads_by` ".reqntid"), at most (".maxntid"), or nothing.
    """

    name: str
    text: str = field(repr=False)
    params: dict[str, tuple[int, int]] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    blocks: list[list[Instruction]] = field(default_factory=list)
    targets: dict[str, int] = field(default_factory=dict)
    threads: tuple[int, int, int] = (1, 1, 1)
    threads_by: str = ""
    shared: list[SharedSymbol] = field(default_factory=list)

    @property
    def instructions(self) -> Iterator[Instruction]:
        """All of them, in order."""
        return (ins for block in self.blocks for ins in block)


def read_kernels(text: str) -> dict[str, Kernel]:
    """The kernels of a module by name. Raises UnknownInstruction for what this reader does not understand."""
    plain = _without_comments(text)
    outer = _symbols(plain[: _first_entry(plain)])
    kernels = {}
    for entry in re.finditer(r"\.entry\b", plain):
        match = _ENTRY.match(plain, entry.start())
        if match is None:
            line = plain.count("\n", 0, entry.start()) + 1
            raise UnknownInstruction(f"cannot read PTX near {plain[entry.start() :][:80]!r}", line=line)
        kernel = Kernel(match.group(1), text)
        _read_params(kernel, match.group(2) or "")
        for directive in (".reqntid", ".maxntid"):
            threads = re.search(rf"\{directive}\s+([\d, ]+)", match.group(3))
            if threads:
                x, y, z = (*(int(n) for n in threads.group(1).split(",")), 1, 1)[:3]
                kernel.threads, kernel.threads_by = (x, y, z), directive
                break
        kernel.shared += outer
        _Body(kernel, plain, match.end()).read()
        kernels[kernel.name] = kernel
    return kernels


# Name, parameters, directives such as .reqntid, and the body's brace.
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?\s*((?:\.\w[^{};]*)?)\{", re.S)


def _without_comments(text: str) -> str:
    """Comments and strings (of .file and .pragma, nothing that matters here) become spaces; line numbers stay."""
    return re.sub(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', lambda m: re.sub(r"[^\n]", " ", m.group(0)), text, flags=re.S)


def _first_entry(text: str) -> int:
    match = re.search(r"\.entry\b", text)
    return match.start() if match else len(text)


_SHARED = re.compile(r"(?:^|[;{}\n])\s*(?:\.(?:extern|visible|weak)\s+)?\.shared\b([^;]*)")
_VARIABLE = re.compile(r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)\s*(?:\[\s*(\d*)\s*\])?")


def _symbols(text: str) -> list[SharedSymbol]:
    found = []
    for declaration in _SHARED.findall(text):
        match = _VARIABLE.fullmatch(declaration.strip())
        if match is None or match.group(2) not in SIZES:
            raise UnknownInstruction(f"shared variable cannot be read: .shared {declaration.strip()}")
        align, kind, name, count = match.groups()
        size = None if count == "" else SIZES[kind] * int(count or 1)
        found.append(SharedSymbol(name, size, int(align or SIZES[kind])))
    return found


def _read_params(kernel: Kernel, text: str) -> None:
    offset = 0
    pattern = (
        r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
        r"(?:\.ptr(?:\s*\.(?!align)\w+)*(?:\s*\.align\s+\d+)?\s+)?([\w$]+)(?:\[(\d+)\])?"
    )
    for declaration in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(pattern, declaration)
        if match is None or match.group(2) not in SIZES:
            raise UnknownInstruction(f"parameter {declaration!r} of kernel {kernel.name} cannot be read")
        align, kind, name, count = match.groups()
        size = SIZES[kind] * int(count or 1)
        step = int(align or SIZES[kind])
        offset = -(-offset // step) * step
        kernel.params[name] = (offset, size)
        offset += size


# One statement: a label, a brace, a directive that ends with its line, or anything up to a semicolon.
_STATEMENT = re.compile(
    r"\s*(?:([$\w]+)[ \t]*:(?!:)|([{}])|(\.(?:loc|file)\b[^\n]*)|([^;{}]*(?:\{[^{}]*\}[^;{}]*)*);)", re.S
)
_AHEAD = re.compile(r"\{[^;{}:]*\}|[{}]|(?:(?<=[\n;{}:])|^)\s*([$\w]+)[ \t]*:(?!:)")
_NAME = re.compile(r"(?<![\w$%.])[$%]?[A-Za-z_][\w$]*")  # not the x of %tid.x, nor the end of a number


class _Body:
    """Reads the statements of one kernel."""

    def __init__(self, kernel: Kernel, text: str, position: int) -> None:
        self.kernel, self.text, self.position = kernel, text, position
        self.line = text.count("\n", 0, position) + 1
        self.scopes: list[dict[str, str]] = [{}]
        self.numbers = [0]
        self.opened = 0
        self.items: list[Instruction | str] = []  # a text is a label

    def read(self) -> None:
        while self.scopes:
            match = _STATEMENT.match(self.text, self.position)
            if match is None:
                near = self.text[self.position : self.position + 80].strip()
                raise UnknownInstruction(f"cannot read PTX near {near!r}", line=self.line)
            start = match.end() - len(match.group(0).lstrip())
            line = self.line + self.text.count("\n", self.position, start)
            self.line += self.text.count("\n", self.position, match.end())
            self.position = match.end()
            label, brace, _, statement = match.groups()
            if label:
                self.items.append(self._resolve(label))
            elif brace == "{":
                self._open()
            elif brace == "}":
                self.scopes.pop()
                self.numbers.pop()
            elif statement and statement.strip():
                self._statement(statement.strip(), line)
        self._split()

    def _open(self) -> None:
        """Labels may be used before they stand in their scope, so a scope is scanned ahead for them."""
        self.opened += 1
        scope: dict[str, str] = {}
        depth = 0
        for token in _AHEAD.finditer(self.text, self.position):
            text = token.group(0)
            if text == "{":
                depth += 1
            elif text == "}":
                depth -= 1
                if depth < 0:
                    break
            elif token.group(1) and depth == 0:
                scope[token.group(1)] = f"{token.group(1)}@{self.opened}"
        self.scopes.append(scope)
        self.numbers.append(self.opened)

    def _resolve(self, name: str) -> str:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), name)

    def _statement(self, text: str, line: int) -> None:
        if text.startswith(".reg"):
            self._registers(text, line)
        elif text.startswith(".shared"):
            self.kernel.shared += _symbols(text)
        elif text.startswith(".local"):
            raise UnknownInstruction("local memory (a spill or an indexed array) is not modelled", line=line)
        elif not text.startswith("."):
            self.items.append(self._instruction(text, line))
        elif not text.startswith((".pragma", ".branchtargets")):
            raise UnknownInstruction(f"directive {text!r} is not modelled", line=line)

    def _registers(self, text: str, line: int) -> None:
        _, kind, names = text.split(None, 2)
        if kind[1:] not in SIZES:
            raise UnknownInstruction(f"registers of type {kind} are not modelled: {text}", line=line)
        for name in (part.strip() for part in names.split(",")):
            several = re.fullmatch(r"(.*)<(\d+)>", name)
            declared = [f"{several.group(1)}{i}" for i in range(int(several.group(2)))] if several else [name]
            for one in declared:
                unique = one if len(self.scopes) == 1 else f"{one}@{self.numbers[-1]}"
                self.scopes[-1][one] = unique
                self.kernel.registers[unique] = kind[1:]

    def _instruction(self, text: str, line: int) -> Instruction:
        guard = re.match(r"@(!?)([%\w$]+)\s+", text)
        if guard:
            text = text[guard.end() :]
        opcode, *rest = text.split(None, 1)
        operands = tuple(
            tuple(self._renamed(part) for part in op) if isinstance(op, tuple) else self._renamed(op)
            for op in split_operands(rest[0] if rest else "")
        )
        register = self._resolve(guard.group(2)) if guard else None
        return Instruction(register, bool(guard and guard.group(1)), opcode, operands, line)

    def _renamed(self, text: str) -> str:
        return _NAME.sub(lambda match: self._resolve(match.group(0)), text)

    def _split(self) -> None:
        """Into basic blocks, which end at branches, before labels and after `YIELDING`."""
        block: list[Instruction] = []
        blocks = self.kernel.blocks
        for item in self.items:
            if isinstance(item, str):
                if block:
                    blocks.append(block)
                    block = []
                if item in self.kernel.targets:
                    raise UnknownInstruction(f"label {item} stands at two places in kernel {self.kernel.name}")
                self.kernel.targets[item] = len(blocks)
                continue
            block.append(item)
            if item.opcode.split(".")[0] in ("bra", "ret", "exit") or item.opcode.startswith(YIELDING):
                blocks.append(block)
                block = []
        if block:
            blocks.append(block)


def split_operands(text: str) -> list[Operand]:
    """At top-level commas; {a, b} becomes a tuple."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    if text[start:].strip():
        parts.append(text[start:].strip())
    return [tuple(x.strip() for x in part[1:-1].split(",")) if part.startswith("{") else part for part in parts]
