"""Floating-point arithmetic (PTX ISA: floating-point and half-precision instructions), in FP32 and pairs of FP32."""

from __future__ import annotations

from wanfp4.simulator.grammar import op
from wanfp4.simulator.ptx import Instruction
from wanfp4.simulator.translate import Block

_ROUNDING = ".rn|rz|rm|rp?"


def _reads(b: Block, ins: Instruction, kind: str) -> str:
    return ", ".join(b.read(operand, kind) for operand in ins.operands[1:])


@op(*(f"{name} {_ROUNDING} .ftz? .sat? .f32" for name in ("add", "sub", "mul")), "fma .rn|rz|rm|rp .ftz? .sat? .f32")
def arithmetic(b: Block, ins: Instruction, rounding: str, ftz: str, sat: str) -> None:
    name = f"{ins.opcode.split('.')[0]}_f32"
    modes = f"{(rounding or 'rn')!r}, {bool(ftz)}, {bool(sat)}"
    b.store(ins.operands[0], "f32", f"{name}({_reads(b, ins, 'f32')}, {modes})")


@op("fma .rn|rz|rm|rp .sat? .f32 .f16|bf16")
def mixed_fma(b: Block, ins: Instruction, rounding: str, sat: str, kind: str) -> None:
    """PTX ISA, mixed precision fma: the factors are 16 bits wide, one rounding of the exact sum."""
    first, second = (f"from_{kind}({b.read(operand, 'b16')})" for operand in ins.operands[1:3])
    addend = b.read(ins.operands[3], "f32")
    b.store(ins.operands[0], "f32", f"fma_f32({first}, {second}, {addend}, {rounding!r}, False, {bool(sat)})")


@op(f"add {_ROUNDING} .sat? .f32 .f16|bf16", f"sub {_ROUNDING} .sat? .f32 .f16|bf16")
def mixed_sum(b: Block, ins: Instruction, rounding: str, sat: str, kind: str) -> None:
    """PTX ISA, mixed precision add and sub: the first operand is 16 bits wide."""
    first, second = f"from_{kind}({b.read(ins.operands[1], 'b16')})", b.read(ins.operands[2], "f32")
    b.store(
        ins.operands[0], "f32", f"{ins.opcode[:3]}_f32({first}, {second}, {(rounding or 'rn')!r}, False, {bool(sat)})"
    )


@op("mad .rn|rz|rm|rp .ftz? .sat? .f32")
def mad(b: Block, ins: Instruction, rounding: str, ftz: str, sat: str) -> None:
    """The same as fma from sm_20 on."""
    b.store(ins.operands[0], "f32", f"fma_f32({_reads(b, ins, 'f32')}, {rounding!r}, {bool(ftz)}, {bool(sat)})")


@op(
    *(f"{name} {_ROUNDING} .ftz? .f32x2" for name in ("add", "sub", "mul")),
    "fma .rn|rz|rm|rp .ftz? .f32x2",
    uses=False,
)
def pairs(b: Block, ins: Instruction, rounding: str, ftz: str) -> None:
    """The compiler fills a half that it does not need with anything, so an undefined half stays one."""
    poisons = [p for p in map(b.poison, ins.operands[1:]) if p]
    text = f"{ins.opcode.split('.')[0]}_f32x2({_reads(b, ins, 'b64')}, {(rounding or 'rn')!r}, {bool(ftz)})"
    b.write(ins.operands[0], text, f"spread({', '.join(poisons)})" if poisons else None)


@op("min .ftz? .NaN? .xorsign? .abs? .f32", "max .ftz? .NaN? .xorsign? .abs? .f32")
def extreme(b: Block, ins: Instruction, ftz: str, nan: str, xorsign: str, magnitude: str) -> None:
    name = f"{ins.opcode.split('.')[0]}_f32"
    modes = f"ftz={bool(ftz)}, nan={bool(nan)}, magnitude={bool(magnitude)}, xorsign={bool(xorsign)}"
    b.store(ins.operands[0], "f32", f"{name}({_reads(b, ins, 'f32')}, {modes})")


@op("neg .ftz? .f32", "abs .ftz? .f32")
def sign(b: Block, ins: Instruction, ftz: str) -> None:
    b.store(ins.operands[0], "f32", f"{ins.opcode[:3]}_f32({_reads(b, ins, 'f32')}, {bool(ftz)})")


@op("div .rn|rz|rm|rp|full|approx .ftz? .f32")
def div(b: Block, ins: Instruction, mode: str, ftz: str) -> None:
    b.store(ins.operands[0], "f32", f"div_f32({_reads(b, ins, 'f32')}, {mode!r}, {bool(ftz)})")


@op("rcp .approx|rn|rz|rm|rp .ftz? .f32", "sqrt .approx|rn|rz|rm|rp .ftz? .f32")
def root(b: Block, ins: Instruction, mode: str, ftz: str) -> None:
    name = f"{ins.opcode.split('.')[0]}_f32"
    b.store(ins.operands[0], "f32", f"{name}({_reads(b, ins, 'f32')}, {mode!r}, {bool(ftz)})")


@op(*(f"{name}.approx .ftz? .f32" for name in ("ex2", "lg2", "rsqrt", "sin", "cos")), "tanh.approx.f32")
def function(b: Block, ins: Instruction, ftz: str = "") -> None:
    """Rounded correctly; the hardware's last bits may differ."""
    name = ins.opcode.split(".")[0]
    b.store(
        ins.operands[0],
        "f32",
        f"{name}_f32({_reads(b, ins, 'f32')}{'' if name == 'tanh' else f', {bool(ftz)}'})",
    )


@op("testp .finite|infinite|number|notanumber .f32")
def testp(b: Block, ins: Instruction, what: str) -> None:
    text = b.read(ins.operands[1], "f32")
    test = {"finite": "np.isfinite({})", "infinite": "np.isinf({})", "number": "~np.isnan({})"}.get(
        what, "np.isnan({})"
    )
    b.write(ins.operands[0], test.format(text))


@op("copysign .f32")
def copysign(b: Block, ins: Instruction) -> None:
    """PTX ISA, copysign: the sign of the first operand on the second."""
    sign_of, value = (b.read(operand, "f32") for operand in ins.operands[1:])
    b.store(ins.operands[0], "f32", f"np.copysign({value}, {sign_of})")
