"""The tensor core and its memory (PTX ISA: tcgen05 instructions), for one CTA at a time (`cta_group::1`)."""

from __future__ import annotations

from wanfp4.simulator.grammar import op
from wanfp4.simulator.ops.places import shared
from wanfp4.simulator.ptx import Instruction, Operand
from wanfp4.simulator.translate import Block

_GROUP = ".cta_group::1"


@op(f"tcgen05.alloc {_GROUP} .sync .aligned .shared::cta? .b32", targets=0, effects=True)
def alloc(b: Block, ins: Instruction, space: str) -> None:
    b.emit(f"whole({b.mask})")
    b.emit(f"w.cta.tmem_alloc(w, {shared(b, ins.operands[0], space)}, {b.uniform(ins.operands[1], 'u32')})")


@op(f"tcgen05.dealloc {_GROUP} .sync .aligned .b32", targets=0, effects=True)
def dealloc(b: Block, ins: Instruction) -> None:
    b.emit(f"whole({b.mask})")
    b.emit(f"w.cta.tmem_dealloc(w, {b.uniform(ins.operands[0], 'b32')}, {b.uniform(ins.operands[1], 'u32')})")


@op(f"tcgen05.relinquish_alloc_permit {_GROUP} .sync .aligned", targets=0, effects=True)
def relinquish(b: Block, ins: Instruction) -> None:
    b.emit(f"whole({b.mask})")
    b.emit("w.cta.tmem_relinquish(w)")


_COUNTS = ".x1|x2|x4|x8|x16|x32|x64|x128"


@op(f"tcgen05.ld .sync .aligned .32x32b {_COUNTS} .b32", uses=False, effects=True)
def ld(b: Block, ins: Instruction, count: str) -> None:
    registers = _list(ins.operands[0], count)
    b.use(ins.operands[1])
    b.emit(f"whole({b.mask})")
    slots = [b.code.slots[name] for name in registers]
    b.emit(f"v, e = w.cta.tmem_load(w, {b.lead(b.address(ins.operands[1]))}, '32x32b', {len(slots)})")
    b.emit(f"{''.join(f'R[{slot}], ' for slot in slots)}= v")
    if b.tracked:
        b.emit(f"w.loaded({tuple(slots)!r}, e)")
        b.clean.difference_update(slots)


@op(f"tcgen05.st .sync .aligned .32x32b {_COUNTS} .b32", targets=0, uses=False, effects=True)
def st(b: Block, ins: Instruction, count: str) -> None:
    registers = _list(ins.operands[1], count)
    b.use(ins.operands[0])
    b.emit(f"whole({b.mask})")
    values = ", ".join(b.read(name, "u32") for name in registers)
    poison = "None"
    if any(b.poison(name) for name in registers):
        poison = f"[{', '.join(str(b.poison(name)) for name in registers)}]"
    b.emit(f"w.cta.tmem_store(w, {b.lead(b.address(ins.operands[0]))}, '32x32b', [{values}], {poison})")


def _list(operand: Operand, count: str) -> tuple[str, ...]:
    names = operand if isinstance(operand, tuple) else (operand,)
    if len(names) != int(count[1:]):
        raise ValueError(f"{len(names)} registers for {count}")
    return names


@op("tcgen05.wait::ld .sync .aligned", "tcgen05.wait::st .sync .aligned", targets=0, effects=True)
def wait(b: Block, ins: Instruction) -> None:
    b.emit(f"whole({b.mask})")
    b.emit(f"w.cta.wait_{'ld' if '::ld' in ins.opcode else 'st'}(w)")
    b.clean.clear()


@op("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync", targets=0, effects=True)
def fence(b: Block, ins: Instruction) -> None:
    b.emit(f"w.cta.fence_{'before' if 'before' in ins.opcode else 'after'}(w)")


@op(
    f"tcgen05.commit {_GROUP} .mbarrier::arrive::one .shared::cluster? .b64",
    targets=0,
    effects=True,
)
def commit(b: Block, ins: Instruction, space: str) -> None:
    b.emit(f"one({b.mask})")
    b.emit(f"w.cta.commit(w, {shared(b, ins.operands[0], space)})")


@op(f"tcgen05.cp {_GROUP} .32x128b .warpx4", targets=0, effects=True)
def cp(b: Block, ins: Instruction) -> None:
    b.emit(f"one({b.mask})")
    target, source = b.lead(b.address(ins.operands[0])), b.uniform(ins.operands[1], "u64")
    b.emit(f"w.cta.copy_scales(w, {target}, {source}, '32x128b.warpx4')")


# PTX ISA, tcgen05.mma: A may stay in the collector buffer. To fill it or let it go changes no result; to use it would.
_COLLECTOR = ".collector::a::discard|collector::a::fill?"


@op(f"tcgen05.mma {_GROUP} .kind::f16|kind::tf32|kind::f8f6f4 {_COLLECTOR}", targets=0, effects=True)
def mma(b: Block, ins: Instruction, kind: str, collector: str) -> None:
    d, a, b_, idesc, *rest = ins.operands
    b.emit(f"one({b.mask})")
    keep = "None"
    if isinstance(rest[0], tuple):
        keep = f"lane_bits([{', '.join(b.uniform(x, 'u32') for x in rest[0])}])"
        rest = rest[1:]
    if len(rest) != 1:
        raise ValueError("scale-input-d is not modelled")
    b.emit(f"w.cta.mma(w, {_first(b, kind, d, a, b_, idesc)}, bool({b.uniform(rest[0], 'pred')}), keep_lanes={keep})")


@op(
    f"tcgen05.mma {_GROUP} .kind::mxf8f6f4|kind::mxf4|kind::mxf4nvf4 .block_scale "
    f".scale_vec::1X|scale_vec::2X|scale_vec::4X|block16|block32? {_COLLECTOR}",
    targets=0,
    effects=True,
)
def mma_block_scaled(b: Block, ins: Instruction, kind: str, vector: str, collector: str) -> None:
    """PTX ISA, tcgen05.mma: mxf8f6f4 and mxf4 have one scale for 32 elements; mxf4nvf4 must say which of two."""
    d, a, b_, idesc, sfa, sfb, accumulate = ins.operands
    blocks = {
        "kind::mxf8f6f4": {"": 32, "scale_vec::1X": 32, "block32": 32},
        "kind::mxf4": {"": 32, "scale_vec::2X": 32, "block32": 32},
    }
    block = blocks.get(kind, {"scale_vec::2X": 32, "block32": 32, "scale_vec::4X": 16, "block16": 16})[vector]
    b.emit(f"one({b.mask})")
    scales = f"sfa={b.lead(b.address(sfa))}, sfb={b.lead(b.address(sfb))}, block={block}"
    b.emit(f"w.cta.mma(w, {_first(b, kind, d, a, b_, idesc)}, bool({b.uniform(accumulate, 'pred')}), {scales})")


def _first(b: Block, kind: str, d: Operand, a: Operand, b_: Operand, idesc: Operand) -> str:
    inside = str(a).startswith("[")
    left = b.lead(b.address(a)) if inside else b.uniform(a, "u64")
    return (
        f"{kind.removeprefix('kind::')!r}, {b.lead(b.address(d))}, {left}, {inside}, {b.uniform(b_, 'u64')}, "
        f"{b.uniform(idesc, 'u32')}"
    )
