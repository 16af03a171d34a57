"""Conversions between number formats (PTX ISA: cvt)."""

from __future__ import annotations

from wanfp4.simulator.grammar import op
from wanfp4.simulator.ops.sources import extended, source_bytes
from wanfp4.simulator.ptx import SIZES, Instruction
from wanfp4.simulator.translate import NAMES, Block

_INTEGERS = ".u8|u16|u32|u64|s8|s16|s32|s64"
_NARROW = ".e2m1x2|e2m3x2|e3m2x2|e4m3x2|e5m2x2"


@op(f"cvt.rn.satfinite .relu? {_NARROW} .f32|f16x2|bf16x2")
def narrow(b: Block, ins: Instruction, relu: str, to: str, source: str) -> None:
    """Two values to one byte each (E2M1: half a byte); the first goes to the upper half."""
    if source == "f32":
        reads = ", ".join(b.read(operand, "f32") for operand in ins.operands[1:])
    else:
        reads = f"*halves({b.read(ins.operands[1], 'b32')}, {source.removesuffix('x2')!r})"
    b.store(ins.operands[0], "b8" if to == "e2m1x2" else "b16", f"to_{to}({reads}, {bool(relu)})")


@op("cvt .rp|rz .satfinite? .ue8m0x2.f32")
def ue8m0(b: Block, ins: Instruction, rounding: str, satfinite: str) -> None:
    """Saturates with or without `.satfinite`; the ISA gives no other result for magnitudes above 2^127."""
    reads = ", ".join(b.read(operand, "f32") for operand in ins.operands[1:])
    b.store(ins.operands[0], "b16", f"to_ue8m0x2({reads}, {rounding!r})")


@op("cvt .rn|rz .relu? .satfinite? .f16x2|bf16x2 .f32")
def half_pairs(b: Block, ins: Instruction, rounding: str, relu: str, satfinite: str, to: str) -> None:
    reads = ", ".join(b.read(operand, "f32") for operand in ins.operands[1:])
    b.store(ins.operands[0], "b32", f"to_{to}({reads}, {rounding!r}, {bool(relu)}, {bool(satfinite)})")


@op("cvt .rn|rz .relu? .satfinite? .bf16|f16 .f32")
def half(b: Block, ins: Instruction, rounding: str, relu: str, satfinite: str, to: str) -> None:
    text = f"to_{to}({b.read(ins.operands[1], 'f32')}, {rounding!r}, {bool(relu)}, {bool(satfinite)})"
    b.store(ins.operands[0], "b16", text)


@op("cvt .ftz? .f32.f16", "cvt.f32.bf16")
def widen(b: Block, ins: Instruction, ftz: str = "") -> None:
    """Subnormals of f16 are normal in f32, so there is nothing to flush; those of bf16 are not."""
    b.store(ins.operands[0], "f32", f"from_{ins.opcode.rpartition('.')[2]}({b.read(ins.operands[1], 'b16')})")


@op("cvt.rn .relu? .f16x2 .e2m1x2|e2m3x2|e3m2x2|e4m3x2|e5m2x2")
def wide_pairs(b: Block, ins: Instruction, relu: str, source: str) -> None:
    read = b.read(ins.operands[1], "b8" if source == "e2m1x2" else "b16")
    b.store(ins.operands[0], "b32", f"{source}_to_f16x2({read}, {bool(relu)})")


@op("cvt.rn.bf16x2.ue8m0x2")
def ue8m0_wide(b: Block, ins: Instruction) -> None:
    b.store(ins.operands[0], "b32", f"ue8m0x2_to_bf16x2({b.read(ins.operands[1], 'b16')})")


@op(
    f"cvt .rni|rzi|rmi|rpi .sat? {_INTEGERS} .f16|f64",
    f"cvt .rni|rzi|rmi|rpi .ftz? .sat? {_INTEGERS} .f32",
)
def to_integer(b: Block, ins: Instruction, rounding: str, *parts: str) -> None:
    """PTX ISA, cvt: from floating point it saturates with or without `.sat`."""
    *_, to, source = ins.opcode.split(".")
    text = f"float_to_int({b.read(ins.operands[1], source)}, {rounding!r}, {NAMES[to]}, {'ftz' in parts})"
    b.store(ins.operands[0], to, text)


@op(f"cvt .rn|rz|rm|rp .f32|f64 {_INTEGERS}")
def from_integer(b: Block, ins: Instruction, rounding: str, to: str, source: str) -> None:
    b.store(ins.operands[0], to, f"int_to_float({b.read(ins.operands[1], source)}, {rounding!r}, {NAMES[to]})")


@op(f"cvt.sat {_INTEGERS} {_INTEGERS}")
def saturated(b: Block, ins: Instruction, to: str, source: str) -> None:
    b.store(ins.operands[0], to, f"int_to_int({b.read(ins.operands[1], source)}, {NAMES[to]}, True)")


@op(f"cvt {_INTEGERS} {_INTEGERS}", uses=False)
def integers(b: Block, ins: Instruction, to: str, source: str) -> None:
    """It cuts or extends, so undefined bytes move: bytes that are cut do not matter, copies of the sign do."""
    target, value = ins.operands
    found, poison = b.poison(value), None
    if found and b.is_register(target):
        bits = extended(range(8 * SIZES[source]), 8 * SIZES[to], source[0] == "s")
        bits = extended(bits, 8 * b.size(str(target)), to[0] == "s")
        poison = f"gathered({found}, {source_bytes(bits)!r})"
    b.store(target, to, f"int_to_int({b.read(value, source)}, {NAMES[to]}, False)", poison)


@op("cvt .rni|rzi|rmi|rpi .ftz? .sat? .f32.f32")
def round_float(b: Block, ins: Instruction, rounding: str, ftz: str, sat: str) -> None:
    text = f"round_f32({b.read(ins.operands[1], 'f32')}, {rounding!r}, {bool(ftz)}, {bool(sat)})"
    b.store(ins.operands[0], "f32", text)


@op("cvt .ftz? .sat? .f32.f32")
def clamp_float(b: Block, ins: Instruction, ftz: str, sat: str) -> None:
    text = b.read(ins.operands[1], "f32")
    text = f"flush({text})" if ftz else text
    if sat:  # PTX ISA, cvt: NaN becomes +0
        text = f"np.where({text} > 0, np.minimum({text}, FLOAT32(1)), FLOAT32(0))"
    b.store(ins.operands[0], "f32", text)


@op("cvt.f64.f32")
def to_double(b: Block, ins: Instruction) -> None:
    b.store(ins.operands[0], "f64", f"{b.read(ins.operands[1], 'f32')}.astype(FLOAT64)")


@op("cvt .rn|rz|rm|rp .ftz? .sat? .f32.f64")
def from_double(b: Block, ins: Instruction, rounding: str, ftz: str, sat: str) -> None:
    b.store(
        ins.operands[0], "f32", f"f64_to_f32({b.read(ins.operands[1], 'f64')}, {rounding!r}, {bool(ftz)}, {bool(sat)})"
    )
