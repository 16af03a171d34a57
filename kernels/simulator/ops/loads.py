"""Loads, stores and atomics of the generic proxy (PTX ISA: ld, st, atom, red)."""

from __future__ import annotations

from wanfp4.simulator.findings import UnknownInstruction
from wanfp4.simulator.grammar import op
from wanfp4.simulator.ptx import SIZES, Instruction, Operand
from wanfp4.simulator.translate import NAMES, Block

_TYPES = ".b8|u8|s8|b16|u16|s16|b32|u32|s32|f32|b64|u64|s64|f64"
_SCOPE = ".cta|cluster|gpu|sys?"
_LOAD, _STORE = f".weak|volatile|relaxed|acquire? {_SCOPE}", f".weak|volatile|relaxed|release? {_SCOPE}"
_HINTS = (
    ".L1::evict_normal|L1::evict_unchanged|L1::evict_first|L1::evict_last|L1::no_allocate? "
    ".L2::evict_normal|L2::evict_first|L2::evict_last? .L2::cache_hint?"
)


@op(f"ld.param .v2|v4? {_TYPES}", uses=False)
def ld_param(b: Block, ins: Instruction, vector: str, kind: str) -> None:
    name, _, offset = str(ins.operands[1])[1:-1].partition("+")
    if name in b.kernel.params:
        where = str(b.kernel.params[name][0] + int(offset or "0", 0))
    else:  # through a register that holds the address of a parameter
        b.use(ins.operands[1])
        b.emit(f"o = w.cta.param_offset({b.lead(b.address(ins.operands[1]))})")
        where = "o"
    for i, register in enumerate(_registers(ins, ins.operands[0])):
        at = f"{where} + {i * SIZES[kind]}"
        b.store(register, kind, f"np.full(32, w.cta.load_param({at}, {SIZES[kind]}).view({NAMES[kind]})[0])")


@op(
    f"ld {_LOAD} .shared|shared::cta|shared::cluster .v2|v4? {_TYPES}",
    f"ld {_LOAD} .global .ca|cg|cs|lu|cv? .nc? {_HINTS} .L2::64B|L2::128B|L2::256B? .v2|v4|v8? {_TYPES}",
    f"ld {_LOAD} .v2|v4? {_TYPES}",
    effects=True,
)
def ld(b: Block, ins: Instruction, *parts: str) -> None:
    _order(b, ins)
    kind = parts[-1]
    registers = _registers(ins, ins.operands[0])
    size = SIZES[kind] * len(registers)
    space = _space(ins)
    b.emit(f"v, e = w.cta.load_{space}(w, {b.address(ins.operands[1])}, {size}, {b.mask})")
    for i, register in enumerate(registers):
        at = i * SIZES[kind]
        poison = None
        if b.tracked and space != "global":
            poison = f"from_bytes(e, {at}, {SIZES[kind]})"
            if kind[0] == "s" and register != "_" and b.size(register) > SIZES[kind]:
                poison = f"extended({poison}, {SIZES[kind]})"
        b.store(register, kind, f"column(v, {at}, {NAMES[kind]})", poison)


@op(
    f"st {_STORE} .shared|shared::cta|shared::cluster .v2|v4? {_TYPES}",
    f"st {_STORE} .global .wb|cg|cs|wt? {_HINTS} .v2|v4|v8? {_TYPES}",
    f"st {_STORE} .v2|v4? {_TYPES}",
    targets=0,
    uses=False,
    effects=True,
)
def st(b: Block, ins: Instruction, *parts: str) -> None:
    kind = parts[-1]
    registers = _registers(ins, ins.operands[1])
    space = _space(ins)
    b.use(ins.operands[0])
    _order(b, ins)
    poison = "None"
    if space == "global":
        b.use(ins.operands[1])
    elif any(b.poison(r) for r in registers):
        poison = f"to_bytes([{', '.join(str(b.poison(r)) for r in registers)}], {SIZES[kind]})"
    values = f"joined([{', '.join(b.bits(r, kind) for r in registers)}])"
    b.emit(f"w.cta.store_{space}(w, {b.address(ins.operands[0])}, {values}, {poison}, {b.mask})")


_ORDER, _WHERE = f".relaxed|acquire|release|acq_rel? {_SCOPE}", ".shared|shared::cta|global?"
_REDUCTIONS = (
    ".add .u32|s32|u64|f32|f64",
    ".min|max .u32|s32|u64|s64",
    ".and|or|xor .b32|b64",
    ".inc|dec .u32",
)


@op(*(f"atom {_ORDER} {_WHERE} {what}" for what in (*_REDUCTIONS, ".exch .b32|b64")), effects=True)
def atom(b: Block, ins: Instruction, *parts: str) -> None:
    _order(b, ins)
    *_, how, kind = ins.opcode.split(".")
    target, address, value = ins.operands
    call = f"w.cta.atomic(w, {_space(ins)!r}, {how!r}, {b.address(address)}, {b.read(value, kind)}, {b.mask})"
    b.emit(f"v = {call}")
    b.store(target, kind, "v")


@op(*(f"red .relaxed|release? {_SCOPE} {_WHERE} {what}" for what in _REDUCTIONS), targets=0, effects=True)
def red(b: Block, ins: Instruction, *parts: str) -> None:
    _order(b, ins)
    *_, how, kind = ins.opcode.split(".")
    address, value = ins.operands
    b.emit(f"w.cta.atomic(w, {_space(ins)!r}, {how!r}, {b.address(address)}, {b.read(value, kind)}, {b.mask})")


def _order(b: Block, ins: Instruction) -> None:
    """Flags in shared memory that order other accesses (PTX ISA, memory consistency model) are not modelled.

    Barriers alone carry order here, so with tracking what such a flag guards would be called a race.
    """
    parts = ins.opcode.split(".")
    order = next((part for part in ("acquire", "release", "acq_rel") if part in parts), None)
    if not b.tracked or order is None or _space(ins) == "global":
        return
    if _space(ins) == "shared":
        raise UnknownInstruction(
            f"{ins.opcode}: .{order} on shared memory is not modelled where accesses are judged (track); "
            "barriers and mbarriers are",
            line=ins.line,
        )
    address = next(operand for operand in ins.operands if str(operand).startswith("["))
    b.emit(f"w.cta.unordered(w, {b.address(address)}, {b.mask}, {order!r})")


def _registers(ins: Instruction, operand: Operand) -> tuple[str, ...]:
    """PTX ISA, Vectors: as many as the opcode says, of at most 16 bytes, in global memory 32."""
    registers = operand if isinstance(operand, tuple) else (operand,)
    *_, vector, kind = ins.opcode.split(".")
    count = int(vector[1:]) if vector in ("v2", "v4", "v8") else 1
    if len(registers) != count or count * SIZES[kind] > (16 if _space(ins) == "shared" else 32):
        raise ValueError(f"{len(registers)} registers of .{kind} for .{vector}")
    return registers


def _space(ins: Instruction) -> str:
    """The state space is the part right after the semantics; without one the address is generic."""
    parts = ins.opcode.split(".")
    if "global" in parts:
        return "global"
    return "shared" if any(part.startswith("shared") for part in parts) else "generic"
