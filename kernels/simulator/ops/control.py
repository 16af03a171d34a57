"""Control flow, predicates, and what lanes of a warp tell each other (PTX ISA: control flow, comparison)."""

from __future__ import annotations

from wanfp4.simulator.grammar import op
from wanfp4.simulator.ptx import Instruction
from wanfp4.simulator.scheduler import FINISHED, SPLIT
from wanfp4.simulator.translate import Block

_COMPARE = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}


@op("bra .uni?", targets=0, uses=False)
def bra(b: Block, ins: Instruction, uniform: str) -> None:
    if not isinstance(ins.operands[0], str):
        raise TypeError("a branch needs a label")
    target = b.kernel.targets[ins.operands[0]]
    target = target if target < len(b.kernel.blocks) else FINISHED
    b.done = True
    if ins.guard is None:
        b.emit(f"return {target}")
        return
    b.use(ins.guard)
    b.emit(f"p = {b.guard(ins)}")
    if b.base:
        b.emit("p = p & m")
        b.emit(f"if not p.any(): return {b.next}")
        b.emit(f"if (p == m).all(): return {target}")
    else:
        b.emit("t = p.tobytes()")
        b.emit(f"if t == YES: return {target}")
        b.emit(f"if t == NO: return {b.next}")
    if uniform:
        b.emit("raise ProtocolError('bra.uni is taken by some active lanes and not by others')")
    b.emit(f"w.split = (p, {target}, {b.next})")
    b.emit(f"return {SPLIT}")


@op("ret .uni?", "exit", targets=0, uses=False)
def ret(b: Block, ins: Instruction, uniform: str = "") -> None:
    b.done = True
    if ins.guard is None:
        b.emit(f"return {FINISHED}")
        return
    b.use(ins.guard)
    b.emit(f"p = {b.guard(ins)}" + (" & m" if b.base else ""))
    b.emit(f"if {'(p == m)' if b.base else 'p'}.all(): return {FINISHED}")
    b.emit(f"if not p.any(): return {b.next}")
    b.emit(f"w.split = (p, {FINISHED}, {b.next})")
    b.emit(f"return {SPLIT}")


_ORDERED = "eq|ne|lt|le|gt|ge"
_FLOAT = f".{_ORDERED}|equ|neu|ltu|leu|gtu|geu|num|nan"
_BITS, _SIGNED, _UNSIGNED = ".b16|b32|b64", ".s16|s32|s64", ".u16|u32|u64"


@op(
    f"setp .eq|ne {_BITS}",
    f"setp .{_ORDERED} {_SIGNED}",
    f"setp .{_ORDERED}|lo|ls|hi|hs {_UNSIGNED}",
    f"setp .eq|ne .and|or|xor {_BITS}",
    f"setp .{_ORDERED} .and|or|xor {_SIGNED}",
    f"setp .{_ORDERED}|lo|ls|hi|hs .and|or|xor {_UNSIGNED}",
)
def setp(b: Block, ins: Instruction, how: str, *parts: str) -> None:
    first, second = (b.read(operand, parts[-1]) for operand in ins.operands[1:3])
    _set(b, ins, f"({first} {_COMPARE[how]} {second})", parts[0] if len(parts) > 1 else "")


@op(
    f"setp {_FLOAT} .ftz? .f32",
    f"setp {_FLOAT} .f64",
    f"setp {_FLOAT} .and|or|xor .ftz? .f32",
    f"setp {_FLOAT} .and|or|xor .f64",
)
def setp_float(b: Block, ins: Instruction, how: str, *parts: str) -> None:
    kind = ins.opcode[-3:]
    first, second = (b.read(operand, kind) for operand in ins.operands[1:3])
    combine = next((part for part in parts if part in _SYMBOLS), "")
    _set(b, ins, f"compare_float({how!r}, {first}, {second}, {'ftz' in parts})", combine)


_SYMBOLS = {"and": "&", "or": "|", "xor": "^"}


def _set(b: Block, ins: Instruction, text: str, combine: str) -> None:
    """PTX ISA, setp: `p|q` get the comparison and its complement, each combined with a third operand."""
    if len(ins.operands) != (4 if combine else 3):
        raise ValueError(f"{len(ins.operands)} operands")
    target, complement = b.both(ins.operands[0])
    b.emit(f"v = {text}")
    results = ["v", "~v"]
    if combine:
        symbol = _SYMBOLS[combine]
        b.emit(f"u = {b.read(ins.operands[3], 'pred')}")
        b.emit(f"v, u = v {symbol} u, ~v {symbol} u")
        results[1] = "u"
    b.write(target, results[0])
    b.write(complement, results[1])


@op("selp .b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64", uses=False)
def selp(b: Block, ins: Instruction, kind: str) -> None:
    target, first, second, condition = ins.operands
    b.use(condition)
    test = b.read(condition, "pred")
    poisons = b.poison(first), b.poison(second)
    poison = f"chosen({test}, {poisons[0]}, {poisons[1]})" if any(poisons) else None
    text = f"np.where({test}, {b.bits(first, kind)}, {b.bits(second, kind)})"
    b.store(target, "b" + kind[1:], text, poison)


@op("elect.sync")
def elect(b: Block, ins: Instruction) -> None:
    leader, flag = b.both(ins.operands[0])
    b.members(ins.operands[1])
    b.emit(f"v = elect({b.mask})")
    b.write(flag, "v")
    b.write(leader, "np.full(32, v.argmax(), UINT32)")


@op("vote.sync .ballot .b32")
def ballot(b: Block, ins: Instruction) -> None:
    b.members(ins.operands[2])
    b.write(ins.operands[0], f"ballot({b.read(ins.operands[1], 'pred')}, {b.mask})")


@op("vote.sync .all|any|uni .pred")
def vote(b: Block, ins: Instruction, how: str) -> None:
    b.members(ins.operands[2])
    b.emit(f"v = {b.read(ins.operands[1], 'pred')}" + (f"[{b.mask}]" if b.mask else ""))
    result = {"all": "v.all()", "any": "v.any()", "uni": "v.all() or not v.any()"}[how]
    b.write(ins.operands[0], f"np.full(32, {result})")


@op("activemask .b32")
def activemask(b: Block, ins: Instruction) -> None:
    b.write(ins.operands[0], f"ballot(np.ones(32, BOOL), {b.mask})")


@op("shfl.sync .up|down|bfly|idx .b32", uses=False)
def shfl(b: Block, ins: Instruction, mode: str) -> None:
    target, flag = b.both(ins.operands[0])
    source, lane, bounds, members = ins.operands[1:]
    b.use(lane, bounds, members)
    b.members(members)
    b.emit(f"l, v = shfl_source({mode!r}, {b.read(lane, 'b32')}, {b.read(bounds, 'b32')})")
    if b.mask:  # PTX ISA, shfl.sync: the value of an inactive lane is undefined
        b.emit(f"if not {b.mask}[l][{b.mask}].all(): raise ProtocolError('shfl.sync reads an inactive lane')")
    poison = b.poison(source)
    b.write(target, f"{b.read(source, 'b32')}[l]", f"moved({poison}, l)" if poison else None)
    b.write(flag, "v")


@op("redux.sync .add|min|max .u32|s32", "redux.sync .and|or|xor .b32")
def redux(b: Block, ins: Instruction, how: str, kind: str = "b32") -> None:
    b.members(ins.operands[2])
    b.store(ins.operands[0], kind, f"redux({how!r}, {b.read(ins.operands[1], kind)}, {b.mask})")


@op("redux.sync .min|max .abs? .NaN? .f32")
def redux_float(b: Block, ins: Instruction, how: str, magnitude: str, nan: str) -> None:
    b.members(ins.operands[2])
    modes = f"{bool(magnitude)}, {bool(nan)}"
    b.store(ins.operands[0], "f32", f"redux({how!r}, {b.read(ins.operands[1], 'f32')}, {b.mask}, {modes})")


@op("griddepcontrol .launch_dependents|wait", "nanosleep .u32", "bar.warp.sync", targets=0)
def nothing(b: Block, ins: Instruction, *parts: str) -> None:
    """One grid at a time, and a warp's lanes go together: nothing to wait for."""
    if ins.opcode == "bar.warp.sync":
        b.members(ins.operands[0])


@op("setmaxnreg .inc|dec .sync .aligned .u32", targets=0, effects=True)
def setmaxnreg(b: Block, ins: Instruction, how: str) -> None:
    count = int(str(ins.operands[0]), 0)
    if not 24 <= count <= 256 or count % 8:
        b.emit(f"raise ProtocolError('setmaxnreg takes a multiple of 8 from 24 to 256, not {count}')")
    b.emit(f"whole({b.mask})")
    b.emit(f"w.cta.set_registers(w, {count})")
