"""Instruction semantics by family; importing them fills `wanfp4.simulator.grammar.RULES`."""

from wanfp4.simulator.ops import (  # noqa: F401
    barriers,
    bulk,
    control,
    conversions,
    data,
    floats,
    integers,
    loads,
    tensor,
)
