"""Moving values between registers (PTX ISA: data movement). Poison moves along."""

from __future__ import annotations

from wanfp4.simulator.grammar import op
from wanfp4.simulator.ops.sources import constant
from wanfp4.simulator.ptx import SIZES, Instruction
from wanfp4.simulator.translate import Block


@op("mov .pred|b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64", uses=False)
def mov(b: Block, ins: Instruction, kind: str) -> None:
    target, source = ins.operands
    if isinstance(source, tuple):
        _pack(b, target, source, kind)
    elif isinstance(target, tuple):
        _unpack(b, target, source, kind)
    else:
        b.store(target, _bits(kind), b.bits(source, kind), b.poison(source))


def _bits(kind: str) -> str:
    return kind if kind == "pred" else "b" + kind[1:]


def _pack(b: Block, target: str | tuple[str, ...], source: tuple[str, ...], kind: str) -> None:
    size = SIZES[kind] // len(source)
    values = [b.read(part, f"b{8 * size}") for part in source]
    poisons = [b.poison(part) for part in source]
    poison = f"packed([{', '.join(map(str, poisons))}], {size})" if any(poisons) else None
    joined = (
        f"pair({', '.join(values)})"
        if len(values) == 2
        else f"column(joined([{', '.join(values)}]), 0, UINT{8 * SIZES[kind]})"
    )
    b.write(target, joined, poison)


def _unpack(b: Block, target: tuple[str, ...], source: str | tuple[str, ...], kind: str) -> None:
    size = SIZES[kind] // len(target)
    poison = b.poison(source)
    if poison:
        b.emit(f"e = {poison}")
    b.emit(f"v = np.ascontiguousarray({b.read(source, _bits(kind))}).view(UINT{8 * size})")
    for i, part in enumerate(target):
        b.store(part, f"b{8 * size}", f"v[{i}::{len(target)}]", f"unpacked(e, {i}, {size})" if poison else None)


@op("prmt .b32 .f4e|b4e|rc8|ecl|ecr|rc16?", uses=False)
def prmt(b: Block, ins: Instruction, mode: str) -> None:
    target, first, second, selector = ins.operands
    b.use(selector)
    if mode:
        b.use(first, second)
    poisons = b.poison(first), b.poison(second)
    text = ", ".join(b.read(part, "b32") for part in (first, second, selector))
    b.emit(f"s = {b.read(selector, 'b32')}")
    poison = f"permuted({poisons[0]}, {poisons[1]}, s)" if any(poisons) else None
    b.write(target, f"prmt({text}, {mode!r})" if mode else f"prmt({text})", poison)


@op("and .pred|b16|b32|b64", uses=False)
def and_(b: Block, ins: Instruction, kind: str) -> None:
    """A constant that clears undefined bytes defines them."""
    target, first, second = ins.operands
    poison = None
    for value, other in ((first, second), (second, first)):
        mask = constant(b, other, kind)
        if mask is not None:
            found = b.poison(value)
            poison = f"kept({found}, {mask})" if found else None
            break
    else:
        b.use(first, second)
    b.store(target, kind, f"{b.read(first, kind)} & {b.read(second, kind)}", poison)


@op("or .pred|b16|b32|b64", "xor .pred|b16|b32|b64", uses=False)
def or_(b: Block, ins: Instruction, kind: str) -> None:
    """Undefined bytes stay where they are: packing by shift and or is a move."""
    target, first, second = ins.operands
    if kind == "pred":
        b.use(first, second)
    poisons = [p for p in (b.poison(first), b.poison(second)) if p]
    symbol = "|" if ins.opcode.startswith("or") else "^"
    text = f"{b.read(first, kind)} {symbol} {b.read(second, kind)}"
    b.store(target, kind, text, f"union({', '.join(poisons)})" if poisons else None)


@op("shl .b16|b32|b64", "shr .b16|b32|b64|u16|u32|u64|s16|s32|s64", uses=False)
def shift(b: Block, ins: Instruction, kind: str) -> None:
    """Undefined bits move along, to all bytes that they come to; by an amount that is no constant, to all bytes."""
    target, value, count = ins.operands
    b.use(count)
    left = ins.opcode.startswith("shl")
    constant = not b.is_register(count) and str(count)[0] != "%"
    found, poison = b.poison(value), None
    if found and constant:
        amount = min(int(b.immediate(str(count), "u32")), 8 * SIZES[kind])
        signed = kind[0] == "s"
        poison = f"shifted({found}, {amount if left else -amount}, {SIZES[kind]}{', True' if signed else ''})"
    elif found:
        poison = f"spoiled({found})"
    name = "shift_left" if left else "shift_right"
    b.store(target, kind, f"{name}({b.read(value, kind)}, {b.read(count, 'u32')})", poison)


@op("cvta .to? .shared|global|param .u64", uses=False)
def cvta(b: Block, ins: Instruction, to: str, space: str) -> None:
    """Generic addresses of shared memory lie in a window of their own; global ones are what they are."""
    text = b.read(ins.operands[1], "u64")
    if space == "shared":
        text = f"({text} & UINT64(0xFFFFFFFF))" if to else f"({text} | SHARED_WINDOW)"
    b.write(ins.operands[0], text, b.poison(ins.operands[1]))


@op("mapa .shared::cluster? .u32|u64")
def mapa(b: Block, ins: Instruction, space: str, kind: str) -> None:
    """Clusters have one CTA here: the address of rank 0 is the address itself."""
    rank = b.uniform(ins.operands[2], "u32")
    b.emit(f"if {rank} != 0: raise ProtocolError(f'mapa to CTA {{{rank}}} of a cluster of one')")
    b.store(ins.operands[0], kind, b.read(ins.operands[1], kind))


_EVICT = "L2::evict_first|L2::evict_unchanged"


@op(f"createpolicy.fractional .L2::evict_last|L2::evict_normal|{_EVICT} .{_EVICT}? .b64")
def createpolicy(b: Block, ins: Instruction, *parts: str) -> None:
    """A hint for a cache that is not modelled."""
    b.write(ins.operands[0], "np.zeros(32, UINT64)")
