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


_TYPES = ".b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64"


@op(f"setp .eq|ne|lt|le|gt|ge|lo|ls|hi|hs|equ|neu|ltu|leu|gtu|geu|num|nan .ftz? {_TYPES}")
def setp(b: Block, ins: Instruction, how: str, ftz: str, kind: str) -> None:
    target, _, complement = str(ins.operands[0]).partition("|")
    text = _compared(b, ins, how, ftz, kind)
    b.emit(f"v = {text}")
    b.write(target, "v")
    if complement:
        b.write(complement, "~v")


@op(f"setp .eq|ne|lt|le|gt|ge|lo|ls|hi|hs|equ|neu|ltu|leu|gtu|geu|num|nan .and|or|xor .ftz? {_TYPES}")
def setp_combined(b: Block, ins: Instruction, how: str, combine: str, ftz: str, kind: str) -> None:
    target, _, complement = str(ins.operands[0]).partition("|")
    symbol = {"and": "&", "or": "|", "xor": "^"}[combine]
    b.emit(f"v = {_compared(b, ins, how, ftz, kind)}")
    b.emit(f"u = {b.read(ins.operands[3], 'pred')}")
    b.emit(f"v, u = v {symbol} u, ~v {symbol} u")
    b.write(target, "v")
    if complement:
        b.write(complement, "u")


def _compared(b: Block, ins: Instruction, how: str, ftz: str, kind: str) -> str:
    first, second = b.read(ins.operands[1], kind), b.read(ins.operands[2], kind)
    if kind[0] == "f":
        return f"compare_float({how!r}, {first}, {second}, {bool(ftz)})"
    return f"({first} {_COMPARE[how]} {second})"


@op(f"selp {_TYPES}", uses=False)
def selp(b: Block, ins: Instruction, kind: str) -> None:
    target, first, second, condition = ins.operands
    b.use(condition)
    bits = "b" + kind[1:]
    test = b.read(condition, "pred")
    poisons = b.poison(first), b.poison(second)
    poison = f"chosen({test}, {poisons[0]}, {poisons[1]})" if any(poisons) else None
    b.store(target, bits, f"np.where({test}, {b.read(first, bits)}, {b.read(second, bits)})", poison)


@op("elect.sync")
def elect(b: Block, ins: Instruction) -> None:
    leader, _, flag = str(ins.operands[0]).partition("|")
    b.emit(f"active({b.uniform(ins.operands[1], 'b32')}, {b.mask})")
    b.emit(f"v = elect({b.mask})")
    b.write(flag, "v")
    b.write(leader, "np.full(32, v.argmax(), UINT32)")


@op("vote.sync .ballot .b32")
def ballot(b: Block, ins: Instruction) -> None:
    b.emit(f"active({b.uniform(ins.operands[2], 'b32')}, {b.mask})")
    b.write(ins.operands[0], f"ballot({b.read(ins.operands[1], 'pred')}, {b.mask})")


@op("vote.sync .all|any|uni .pred")
def vote(b: Block, ins: Instruction, how: str) -> None:
    b.emit(f"active({b.uniform(ins.operands[2], 'b32')}, {b.mask})")
    b.emit(f"v = {b.read(ins.operands[1], 'pred')}" + (f"[{b.mask}]" if b.mask else ""))
    result = {"all": "v.all()", "any": "v.any()", "uni": "v.all() or not v.any()"}[how]
    b.write(ins.operands[0], f"np.full(32, {result})")


@op("activemask .b32")
def activemask(b: Block, ins: Instruction) -> None:
    b.write(ins.operands[0], f"ballot(np.ones(32, BOOL), {b.mask})")


@op("shfl.sync .up|down|bfly|idx .b32", uses=False)
def shfl(b: Block, ins: Instruction, mode: str) -> None:
    target, _, flag = str(ins.operands[0]).partition("|")
    source, lane, bounds, members = ins.operands[1:]
    b.use(lane, bounds, members)
    b.emit(f"active({b.uniform(members, 'b32')}, {b.mask})")
    b.emit(f"l, v = shfl_source({mode!r}, {b.read(lane, 'b32')}, {b.read(bounds, 'b32')})")
    if b.mask:  # PTX ISA, shfl.sync: the value of an inactive lane is undefined
        b.emit(f"if not {b.mask}[l][{b.mask}].all(): raise ProtocolError('shfl.sync reads an inactive lane')")
    poison = b.poison(source)
    b.write(target, f"{b.read(source, 'b32')}[l]", f"moved({poison}, l)" if poison else None)
    if flag:
        b.write(flag, "v")


@op("redux.sync .add|min|max .u32|s32", "redux.sync .and|or|xor .b32")
def redux(b: Block, ins: Instruction, how: str, kind: str = "b32") -> None:
    b.emit(f"active({b.uniform(ins.operands[2], 'b32')}, {b.mask})")
    b.store(ins.operands[0], kind, f"redux({how!r}, {b.read(ins.operands[1], kind)}, {b.mask})")


@op("redux.sync .min|max .abs? .NaN? .f32")
def redux_float(b: Block, ins: Instruction, how: str, magnitude: str, nan: str) -> None:
    b.emit(f"active({b.uniform(ins.operands[2], 'b32')}, {b.mask})")
    text = b.read(ins.operands[1], "f32")
    if magnitude:
        text = f"np.abs({text})"
    b.store(ins.operands[0], "f32", f"redux({(how + nan)!r}, {text}, {b.mask})")


@op("griddepcontrol .launch_dependents|wait", "nanosleep .u32", "bar.warp.sync", targets=0)
def nothing(b: Block, ins: Instruction, *parts: str) -> None:
    """One grid at a time, and a warp's lanes go together: nothing to wait for."""
    if ins.opcode == "bar.warp.sync":
        b.emit(f"active({b.uniform(ins.operands[0], 'b32')}, {b.mask})")


@op("setmaxnreg .inc|dec .sync .aligned .u32", targets=0)
def setmaxnreg(b: Block, ins: Instruction, how: str) -> None:
    count = int(str(ins.operands[0]), 0)
    if not 24 <= count <= 256 or count % 8:
        b.emit(f"raise ProtocolError('setmaxnreg takes a multiple of 8 from 24 to 256, not {count}')")
    b.emit(f"whole({b.mask})")
    b.emit(f"w.cta.set_registers(w, {count})")
