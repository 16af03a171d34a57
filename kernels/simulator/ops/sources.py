"""From which bytes of its operand each byte of a result comes, for instructions that move or drop bits.

Worked out bit by bit when a kernel is translated, so that undefined bytes move exactly as far as their bits do. Bits of
a result, the lowest first, are numbers of the operand's bits, None where a bit is zero whatever the operand holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from wanfp4.simulator.ptx import Operand
from wanfp4.simulator.translate import Block

Bits = Sequence[int | None]


def extended(bits: Bits, size: int, signed: bool) -> Bits:
    """Cut or extended to `size` bits, `signed`: with copies of the highest."""
    return [*bits, *([bits[-1] if signed else None] * size)][:size]


def field(size: int, start: int, length: int, signed: bool) -> Bits:
    """What bfe extracts of `size` bits (PTX ISA, bfe: the sign is bit min(start + length - 1, msb))."""
    sign = min(start + length - 1, size - 1) if signed and length else None
    return [start + i if i < length and start + i < size else sign for i in range(size)]


def inserted(size: int, start: int, length: int) -> tuple[Bits, Bits]:
    """What bfi keeps of its first operand and of its second, of `size` bits."""
    inside = [start <= i < start + length for i in range(size)]
    return [i - start if x else None for i, x in enumerate(inside)], [None if x else i for i, x in enumerate(inside)]


def source_bytes(bits: Bits) -> tuple[int, ...]:
    """For each byte of the result a mask of the bytes that it depends on; the operand of `runtime.gathered`."""
    masks = [0] * (len(bits) // 8)
    for i, bit in enumerate(bits):
        if bit is not None:
            masks[i // 8] |= 1 << bit // 8
    return tuple(masks)


def constant(b: Block, operand: Operand, kind: str) -> int | None:
    """The value of a constant operand; None of a register, a special one too."""
    if not isinstance(operand, str) or b.is_register(operand) or operand[0] in "%!":
        return None
    return int(b.immediate(operand, kind))


def matters(table: int, which: int, constants: Sequence[int | None]) -> int:
    """Of lop3: a mask of the bits in which the result can depend on operand `which`, constants being what they are."""
    mask = 0
    for bit in range(32):
        rows = [
            row
            for row in range(8)
            if all(c is None or row >> 2 - i & 1 == c >> bit & 1 for i, c in enumerate(constants))
        ]
        if any((table >> row ^ table >> (row ^ 4 >> which)) & 1 for row in rows):
            mask |= 1 << bit
    return mask
