"""Operands that are places in shared memory (PTX ISA: state spaces, generic addressing)."""

from __future__ import annotations

from wanfp4.simulator.ptx import Operand
from wanfp4.simulator.translate import Block


def shared(b: Block, operand: Operand, space: str) -> str:
    """An expression for the one address in shared memory; without a state space the opcode takes a generic one."""
    text = b.lead(b.address(operand))
    return text if space else f"w.cta.shared_address(w, {text})"
