"""Integer arithmetic, bits and fields (PTX ISA: integer arithmetic, logic and shift)."""

from __future__ import annotations

from wanfp4.simulator.grammar import op
from wanfp4.simulator.ops.sources import constant, field, inserted, matters, source_bytes
from wanfp4.simulator.ptx import SIZES, Instruction, Operand
from wanfp4.simulator.translate import Block

_TYPES = ".u16|u32|u64|s16|s32|s64"


def _call(b: Block, ins: Instruction, kind: str, name: str, *more: str) -> str:
    return f"{name}({', '.join([*(b.read(operand, kind) for operand in ins.operands[1:]), *more])})"


@op(f"add {_TYPES}", f"sub {_TYPES}", f"mul.lo {_TYPES}")
def basic(b: Block, ins: Instruction, kind: str) -> None:
    symbol = {"add": "+", "sub": "-", "mul": "*"}[ins.opcode[:3]]
    first, second = (b.read(operand, kind) for operand in ins.operands[1:])
    b.store(ins.operands[0], kind, f"{first} {symbol} {second}")


@op("add.sat.s32", "sub.sat.s32")
def saturated(b: Block, ins: Instruction) -> None:
    b.store(ins.operands[0], "s32", _call(b, ins, "s32", f"{ins.opcode[:3]}_sat_s32"))


@op(f"mad.lo {_TYPES}")
def mad(b: Block, ins: Instruction, kind: str) -> None:
    first, second, third = (b.read(operand, kind) for operand in ins.operands[1:])
    b.store(ins.operands[0], kind, f"{first} * {second} + {third}")


@op(f"mul.hi {_TYPES}", f"mad.hi {_TYPES}")
def high(b: Block, ins: Instruction, kind: str) -> None:
    b.store(ins.operands[0], kind, _call(b, ins, kind, f"{ins.opcode[:3]}_hi"))


@op("mul.wide .u16|u32|s16|s32", "mad.wide .u16|u32|s16|s32")
def wide(b: Block, ins: Instruction, kind: str) -> None:
    result = f"{kind[0]}{2 * int(kind[1:])}"
    reads = [b.read(operand, kind) for operand in ins.operands[1:3]]
    reads += [b.read(operand, result) for operand in ins.operands[3:]]
    b.store(ins.operands[0], result, f"{ins.opcode[:3]}_wide({', '.join(reads)})")


@op("mul24 .lo|hi .u32|s32")
def mul24(b: Block, ins: Instruction, part: str, kind: str) -> None:
    b.store(ins.operands[0], kind, _call(b, ins, kind, "mul24", str(part == "hi")))


@op(f"div {_TYPES}", f"rem {_TYPES}")
def division(b: Block, ins: Instruction, kind: str) -> None:
    b.store(ins.operands[0], kind, _call(b, ins, kind, f"{ins.opcode[:3]}_int"))


@op(f"min {_TYPES}", f"max {_TYPES}")
def extreme(b: Block, ins: Instruction, kind: str) -> None:
    b.store(ins.operands[0], kind, _call(b, ins, kind, f"np.{ins.opcode[:3]}imum"))


@op("neg .s16|s32|s64")
def neg(b: Block, ins: Instruction, kind: str) -> None:
    b.store(ins.operands[0], kind, f"-{b.read(ins.operands[1], kind)}")


@op("abs .s16|s32|s64")
def magnitude(b: Block, ins: Instruction, kind: str) -> None:
    b.store(ins.operands[0], kind, f"np.abs({b.read(ins.operands[1], kind)})")


@op("not .pred|b16|b32|b64")
def not_(b: Block, ins: Instruction, kind: str) -> None:
    b.store(ins.operands[0], kind, f"~{b.read(ins.operands[1], kind)}")


@op("cnot .b16|b32|b64")
def cnot(b: Block, ins: Instruction, kind: str) -> None:
    value = b.read(ins.operands[1], kind)
    b.store(ins.operands[0], kind, f"({value} == 0).astype({value}.dtype)")


@op("shf .l|r .clamp|wrap .b32")
def funnel(b: Block, ins: Instruction, way: str, mode: str) -> None:
    b.store(ins.operands[0], "b32", _call(b, ins, "b32", "funnel_shift", str(way == "l"), str(mode == "wrap")))


@op("bfe .u32|s32|u64|s64", uses=False)
def bfe(b: Block, ins: Instruction, kind: str) -> None:
    """A field whose place is constant is moved, and what lies beside it does not matter."""
    value, start, length = ins.operands[1:]
    poison, place = None, _place(b, start, length)
    if place is None:
        b.use(value, start, length)
    elif found := b.poison(value):
        bits = field(8 * SIZES[kind], *place, kind[0] == "s")
        poison = f"gathered({found}, {source_bytes(bits)!r})"
    text = f"bfe({b.read(value, kind)}, {b.read(start, 'u32')}, {b.read(length, 'u32')})"
    b.store(ins.operands[0], kind, text, poison)


@op("bfi .b32|b64", uses=False)
def bfi(b: Block, ins: Instruction, kind: str) -> None:
    """The same: at a constant place both values are moved, and what is overwritten does not matter."""
    first, second, start, length = ins.operands[1:]
    poisons, place = [], _place(b, start, length)
    if place is None:
        b.use(first, second, start, length)
    else:
        for value, bits in zip((first, second), inserted(8 * SIZES[kind], *place), strict=True):
            if found := b.poison(value):
                poisons.append(f"gathered({found}, {source_bytes(bits)!r})")
    reads = (b.read(first, kind), b.read(second, kind), b.read(start, "u32"), b.read(length, "u32"))
    b.store(ins.operands[0], kind, f"bfi({', '.join(reads)})", f"union({', '.join(poisons)})" if poisons else None)


def _place(b: Block, start: Operand, length: Operand) -> tuple[int, int] | None:
    """Start and length of a field if both are constants (PTX ISA, bfe and bfi: their low bytes)."""
    first, count = constant(b, start, "u32"), constant(b, length, "u32")
    return None if first is None or count is None else (first & 255, count & 255)


@op("lop3.b32", uses=False)
def lop3(b: Block, ins: Instruction) -> None:
    """With a constant it selects, clears or sets as `and` and `or` do: undefined bytes stay, where they matter."""
    operands, table = ins.operands[1:4], int(str(ins.operands[4]), 0)
    constants = [constant(b, operand, "b32") for operand in operands]
    poisons = []
    if all(value is None for value in constants):
        b.use(*operands)
    else:
        for i, operand in enumerate(operands):
            if found := b.poison(operand):
                poisons.append(f"kept({found}, {matters(table, i, constants)})")
    reads = ", ".join(b.read(operand, "b32") for operand in operands)
    b.store(ins.operands[0], "b32", f"lop3({reads}, {table})", f"union({', '.join(poisons)})" if poisons else None)


@op("popc .b32|b64", "clz .b32|b64")
def count(b: Block, ins: Instruction, kind: str) -> None:
    b.store(ins.operands[0], "u32", _call(b, ins, kind, ins.opcode.split(".")[0]))


@op("brev .b32|b64")
def brev(b: Block, ins: Instruction, kind: str) -> None:
    b.store(ins.operands[0], kind, _call(b, ins, kind, "brev"))


@op("bfind .shiftamt? .u32|s32|u64|s64")
def bfind(b: Block, ins: Instruction, shiftamt: str, kind: str) -> None:
    b.store(ins.operands[0], "u32", _call(b, ins, kind, "bfind", str(bool(shiftamt))))


@op("sad .u16|u32|u64|s16|s32|s64")
def sad(b: Block, ins: Instruction, kind: str) -> None:
    b.store(ins.operands[0], kind, _call(b, ins, kind, "sad"))


@op("dp4a .u32|s32 .u32|s32")
def dp4a(b: Block, ins: Instruction, first: str, second: str) -> None:
    b.store(ins.operands[0], "b32", _call(b, ins, "b32", "dp4a", str(first == "s32"), str(second == "s32")))


@op("dp2a .lo|hi .u32|s32 .u32|s32")
def dp2a(b: Block, ins: Instruction, part: str, first: str, second: str) -> None:
    modes = (str(first == "s32"), str(second == "s32"), str(part == "hi"))
    b.store(ins.operands[0], "b32", _call(b, ins, "b32", "dp2a", *modes))
