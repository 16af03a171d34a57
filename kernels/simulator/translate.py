"""Basic blocks of PTX → Python functions over 32-lane NumPy arrays.

Every block is translated twice: `f` for a whole warp, `g` for a warp with some lanes masked off. Registers hold arrays
that are never written in place, so constants and views may be shared. With `tracked` the functions carry poison along
(see `wanfp4.simulator.runtime`).
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wanfp4.simulator import arithmetic, conversions, grammar, integers, memory, runtime
from wanfp4.simulator.findings import SimulationError, UnknownInstruction
from wanfp4.simulator.ptx import SIZES, Instruction, Kernel, Operand
from wanfp4.simulator.scheduler import FINISHED, SPECIAL

DTYPES: dict[str, Any] = {
    "pred": np.bool_,
    "b8": np.uint8,
    "u8": np.uint8,
    "s8": np.int8,
    "b16": np.uint16,
    "u16": np.uint16,
    "s16": np.int16,
    "f16": np.float16,
    "bf16": np.uint16,
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
    "f64": np.float64,
    "f32x2": np.uint64,
}
# Constants that are written as their bits (PTX ISA, Floating-Point Constants), and what they may be an operand for.
_FLOATS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "0f": (np.uint32, np.float32, ("f32", "b32", "u32")),
    "0d": (np.uint64, np.float64, ("f64", "b64", "u64")),
}
_FLOATS |= {name.upper(): what for name, what in _FLOATS.items()}
NAMES = {kind: {"bool": "BOOL"}.get(np.dtype(d).name, np.dtype(d).name.upper()) for kind, d in DTYPES.items()}


class Code:
    """A translated kernel: what `machine.CTA` runs."""

    def __init__(self, kernel: Kernel, *, tracked: bool = False) -> None:
        from wanfp4.simulator import ops  # fills the grammar's table

        del ops
        self.kernel, self.tracked = kernel, tracked
        self.names = list(kernel.registers)
        self.slots = {name: slot for slot, name in enumerate(self.names)}
        self.shared, self.static_bytes = _place(kernel)
        self.constants: list[npt.NDArray[Any]] = []
        self.sizes = [len(block) for block in kernel.blocks]
        self.lines: dict[str, list[int]] = {}  # file name of generated code → PTX line of each of its lines
        self._space = _namespace() | {"K": self.constants}
        self.full: list[Callable[..., int]] = []
        self.part: list[Callable[..., int]] = []
        whole, masked = self._compile("ptx", list(enumerate(kernel.blocks)))
        self.full, self.part = whole, masked

    def _compile(self, name: str, blocks: list[tuple[int, list[Instruction]]]) -> tuple[list[Any], list[Any]]:
        source: list[str] = []
        lines: list[int] = []
        for index, instructions in blocks:
            for masked in (False, True):
                block = Block(self, index, instructions, masked)
                source += block.source
                lines += block.lines
        file = f"<{name} of {self.kernel.name}>"
        self.lines[file] = lines
        exec(compile("\n".join(source), file, "exec"), self._space)
        return [self._space[f"f{i}"] for i, _ in blocks], [self._space[f"g{i}"] for i, _ in blocks]

    def replace(self, index: int, block: list[Instruction]) -> Callable[[], None]:
        """Put another block in the place of one (mutation tests); returns what undoes it."""
        old = self.full[index], self.part[index]
        whole, masked = self._compile(f"change {len(self.lines)}", [(index, block)])
        self.full[index], self.part[index] = whole[0], masked[0]

        def undo() -> None:
            self.full[index], self.part[index] = old

        return undo

    def registers(self) -> tuple[list[npt.NDArray[Any]], list[Any]]:
        """Values and poison of a new warp's registers: nothing is defined."""
        types = (self.kernel.registers[name] for name in self.names)
        kinds = ["pred" if kind == "pred" else f"b{8 * SIZES[kind]}" for kind in types]
        values = {kind: np.frombuffer(b"\xff" * (32 * SIZES[kind]), DTYPES[kind]) for kind in set(kinds) - {"pred"}}
        values["pred"] = np.ones(32, np.bool_)
        poison = {kind: np.full(32, (1 << SIZES[kind]) - 1, np.uint8) for kind in set(kinds)}
        return [values[kind] for kind in kinds], [poison[kind] for kind in kinds]

    def line(self, index: int) -> int:
        """The last PTX line of a block; 0 behind the end."""
        return self.kernel.blocks[index][-1].line if 0 <= index < len(self.kernel.blocks) else 0

    def locate(self, error: SimulationError) -> None:
        """Give an error that has no line the one whose translation raised it."""
        trace: types.TracebackType | None = error.__traceback__
        while trace is not None and error.line is None:
            lines = self.lines.get(trace.tb_frame.f_code.co_filename)
            if lines is not None:
                error.line = lines[trace.tb_lineno - 1]
            trace = trace.tb_next

    def constant(self, value: Any, dtype: Any) -> str:
        """An expression for a 32-lane constant."""
        array = np.full(32, value, dtype)
        array.flags.writeable = False
        self.constants.append(array)
        return f"K[{len(self.constants) - 1}]"


def _place(kernel: Kernel) -> tuple[dict[str, int], int]:
    """Addresses of shared symbols, static ones first, and how many bytes those take."""
    places, offset = {}, memory.SHARED_BASE
    for symbol in (s for s in kernel.shared if s.size is not None):
        offset = -(-offset // symbol.align) * symbol.align
        places[symbol.name] = offset
        offset += symbol.size or 0
    static = offset - memory.SHARED_BASE
    for symbol in (s for s in kernel.shared if s.size is None):
        places[symbol.name] = -(-offset // symbol.align) * symbol.align
        static = max(static, places[symbol.name] - memory.SHARED_BASE)
    return places, static


def _namespace() -> dict[str, Any]:
    space: dict[str, Any] = {"np": np}
    for module in (arithmetic, integers, conversions, runtime):
        space |= {name: value for name, value in vars(module).items() if callable(value) and name[0] != "_"}
    space |= {NAMES[kind]: dtype for kind, dtype in DTYPES.items()}
    return space | {"YES": bytes([1] * 32), "NO": bytes(32), "SHARED_WINDOW": np.uint64(memory.SHARED_WINDOW)}


class Block:
    """One basic block being translated; handlers of `wanfp4.simulator.ops` write into it."""

    def __init__(self, code: Code, index: int, block: list[Instruction], masked: bool) -> None:
        self.code, self.kernel, self.index, self.tracked = code, code.kernel, index, code.tracked
        self.next = index + 1 if index + 1 < len(self.kernel.blocks) else FINISHED
        self.base = "m" if masked else None
        self.mask, self.indent, self.line = self.base, " ", block[0].line
        self.source: list[str] = []
        self.lines: list[int] = []
        self.clean: set[int] = set()  # registers known to hold no poison in any lane of the block
        self.done = False
        self.indent = ""
        self.emit(f"def {'g' if masked else 'f'}{index}(w, R{', m' if masked else ''}):")
        self.indent = " "
        if self.tracked:
            self.emit("P = w.P")
        for ins in block:
            self._instruction(ins)
        self.indent = " "
        if not self.done:
            self.emit(f"return {self.next}")

    def emit(self, text: str) -> None:
        """One line of Python."""
        self.source.append(self.indent + text)
        self.lines.append(self.line)

    def _instruction(self, ins: Instruction) -> None:
        self.line = ins.line
        self.mask, self.indent = self.base, " "
        try:
            if ins.guard is None or ins.opcode.split(".")[0] in ("bra", "ret", "exit"):
                grammar.translate(self, ins)
                return
            self.use(ins.guard)
            self.emit(f"q = {self.guard(ins)}" + (f" & {self.base}" if self.base else ""))
            self.emit("if q.any():")
            self.mask, self.indent = "q", "  "
            self.emit("pass")
            grammar.translate(self, ins)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise UnknownInstruction(f"operands are not understood ({error!r}): {ins}", line=ins.line) from error

    def guard(self, ins: Instruction) -> str:
        """The predicate of an instruction as an expression."""
        text = self.read(ins.guard or "", "pred")
        return f"(~{text})" if ins.negated else text

    # Operands

    def size(self, name: str) -> int:
        """Bytes of a register."""
        return SIZES[self.kernel.registers[name]]

    def is_register(self, operand: Operand) -> bool:
        """A declared register, not a constant or special one."""
        return isinstance(operand, str) and operand in self.code.slots

    def read(self, operand: Operand, kind: str) -> str:
        """An expression for the operand's 32 lanes, of the NumPy type of `kind`."""
        if not isinstance(operand, str):
            raise TypeError(f"{operand} where one operand is expected")
        if operand in self.code.slots:
            declared = self.kernel.registers[operand]
            text = f"R[{self.code.slots[operand]}]"
            if kind == "pred" or declared == "pred":
                return text
            if SIZES[declared] != SIZES[kind]:
                text = f"{text}.astype(UINT{8 * SIZES[kind]})"
            return text if NAMES[kind].startswith("UINT") else f"{text}.view({NAMES[kind]})"
        if operand.startswith("!"):
            return f"(~{self.read(operand[1:], kind)})"
        if operand.startswith("%"):
            if operand not in SPECIAL:
                raise ValueError(f"{operand} is no register of the kernel, nor a special one that is modelled")
            text = f"w.special[{operand!r}]"
            return text if NAMES[kind] == "UINT32" else f"{text}.astype({NAMES[kind]})"
        return self.code.constant(self.immediate(operand, kind), DTYPES[kind])

    def bits(self, operand: Operand, kind: str) -> str:
        """The same as an unsigned array of the size of `kind`, for instructions that only move it."""
        if kind[0] == "f" and isinstance(operand, str) and not self.is_register(operand) and operand[0] not in "%!":
            value = np.array([self.immediate(operand, kind)], DTYPES[kind]).view(f"u{SIZES[kind]}")[0]
            return self.code.constant(value, value.dtype)
        return self.read(operand, kind if kind == "pred" else "b" + kind[1:])

    def immediate(self, text: str, kind: str) -> Any:
        """A constant, or the address of a parameter or shared symbol, as a value of `kind`."""
        if text in self.kernel.params:
            return memory.PARAM_BASE + self.kernel.params[text][0]
        symbol, _, shift = text.partition("+")
        if symbol in self.code.shared:
            return self.code.shared[symbol] + int(shift or "0", 0)
        if text[:2] in _FLOATS:
            bits_type, value_type, kinds = _FLOATS[text[:2]]
            if kind not in kinds:
                raise ValueError(f"{text} where a value of type {kind} is expected")
            bits = np.array([int(text[2:], 16)], bits_type)
            return bits.view(value_type)[0] if kind[0] == "f" else bits[0]
        if kind in ("f32", "f64"):
            if re.fullmatch(r"[-+]?\d*\.\d+([eE][-+]?\d+)?|[-+]?\d+\.", text) is None:
                raise ValueError(f"{text} where a value of type {kind} is expected")
            return float(text)
        value = int(text.rstrip("U"), 0)
        if kind == "pred":
            return bool(value)
        bits_of = 8 * SIZES[kind]
        value &= (1 << bits_of) - 1
        return value - (1 << bits_of) if kind[0] == "s" and value >> (bits_of - 1) else value

    def address(self, operand: Operand) -> str:
        """An expression for the addresses of `[base+offset]`."""
        base, _, offset = str(operand)[1:-1].partition("+")
        base, shift = base.strip(), int(offset or "0", 0)
        wide = (self.is_register(base) and self.size(base) == 8) or base in self.kernel.params
        kind = "u64" if wide else "u32"
        text = self.read(base, kind)
        if shift:
            text = f"({text} + {self.code.constant(self.immediate(str(shift), kind), DTYPES[kind])})"
        return text

    def lead(self, text: str) -> str:
        """An expression for the one value that all active lanes must share."""
        return f"lead({text}, {self.mask})"

    def uniform(self, operand: Operand, kind: str) -> str:
        """The same of an operand; constants stay Python numbers."""
        if isinstance(operand, str) and not self.is_register(operand) and operand[0] not in "%!":
            return repr(self.immediate(operand, kind))
        return self.lead(self.read(operand, kind))

    def both(self, operand: Operand) -> tuple[str, str]:
        """The two results `a|b`; "_" for a second one that is not wanted."""
        first, _, second = str(operand).partition("|")
        return first.strip(), second.strip() or "_"

    def members(self, operand: Operand) -> None:
        """The check of a member mask."""
        self.emit(f"active(w, {self.uniform(operand, 'b32')}, {self.mask}, {self.base})")

    # Poison

    def use(self, *operands: Operand) -> None:
        """Check, where poison is tracked, that every register among the operands is defined."""
        if not self.tracked:
            return
        slots = [slot for slot in dict.fromkeys(self._slots(operands)) if slot not in self.clean]
        if not slots:
            return
        test = " or ".join(f"P[{slot}] is not None" for slot in slots)
        self.emit(f"if {test}: used(w, {tuple(slots)!r}, {self.mask})")
        if self.mask == self.base:
            self.clean.update(slots)

    def _slots(self, operands: Sequence[Operand]) -> list[int]:
        found = []
        for operand in operands:
            for text in operand if isinstance(operand, tuple) else (operand,):
                for name in text.strip("[]").replace("{", " ").replace("}", " ").replace("|", " ").split(","):
                    base = name.partition("+")[0].strip().lstrip("!")
                    if base in self.code.slots:
                        found.append(self.code.slots[base])
        return found

    def poison(self, operand: Operand) -> str | None:
        """An expression for an operand's poison; None where there is certainly none."""
        name = str(operand).removeprefix("!")
        if not self.tracked or not self.is_register(name):
            return None
        slot = self.code.slots[name]
        return None if slot in self.clean else f"P[{slot}]"

    # Results

    def write(self, name: Operand, text: str, poison: str | None = None) -> None:
        """Set a register to an array of its own unsigned type (predicates: bool)."""
        if name == "_":
            return
        slot = self.code.slots[str(name)]
        self.emit(f"R[{slot}] = np.where({self.mask}, {text}, R[{slot}])" if self.mask else f"R[{slot}] = {text}")
        if self.tracked:
            self._mark(slot, poison)

    def _mark(self, slot: int, poison: str | None) -> None:
        if poison is None:
            if slot in self.clean:
                return
            self.emit(f"P[{slot}] = merge({self.mask}, None, P[{slot}])" if self.mask else f"P[{slot}] = None")
            if self.mask == self.base:
                self.clean.add(slot)
        else:
            self.emit(f"P[{slot}] = merge({self.mask}, {poison}, P[{slot}])" if self.mask else f"P[{slot}] = {poison}")
            self.clean.discard(slot)

    def undefine(self, name: Operand) -> None:
        """Nothing defines a register any more."""
        if self.tracked and name != "_":
            self._mark(self.code.slots[str(name)], f"np.full(32, {(1 << self.size(str(name))) - 1}, UINT8)")

    def store(self, name: Operand, kind: str, text: str, poison: str | None = None) -> None:
        """Set a register to a value of the NumPy type of `kind`, extended if the register is larger."""
        if name == "_":
            return
        declared = self.kernel.registers[str(name)]
        if declared == "pred":
            self.write(name, text, poison)
            return
        size = 8 * SIZES[declared]
        if SIZES[declared] < SIZES[kind]:
            raise ValueError(f"a result of type {kind} for {name}, which is .{declared}")
        if SIZES[declared] != SIZES[kind]:
            if kind[0] == "f":  # its bits
                text, kind = f"({text}).view(UINT{8 * SIZES[kind]})", f"b{8 * SIZES[kind]}"
            text = f"({text}).astype({'INT' if kind[0] == 's' else 'UINT'}{size})"
            kind = f"{'s' if kind[0] == 's' else 'u'}{size}"
        self.write(name, text if NAMES[kind].startswith("UINT") else f"({text}).view(UINT{size})", poison)
