"""The truncated accumulation of Blackwell's tensor cores, as published (see mma.py).

P. Xie et al., "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores", arXiv 2511.10909. Their model
splits every number into a significand and an exponent as its format encodes it: subnormals keep the smallest exponent,
zero counts as exponent −126. A product has the sum of the exponents, even where its significand is 2 or more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wanfp4.simulator.descriptors import InstructionDescriptor

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

FRACTION_BITS, FRACTION_BITS_FP4 = 25, 35
_GROUP = 16  # elements of K whose codes the FP4 kinds add exactly
_MIN_EXPONENT = {"f16": -14, "bf16": -126, "tf32": -126, "e4m3": -6, "e5m2": -14, "ue4m3": -6, "ue8m0": -127}
_MIN_EXPONENT["f32"] = -126
_NAN = np.array(0x7FFFFFFF, np.uint32).view(np.float32)


def exponents(x: F64, element: str) -> I64:
    """Exponents e of x = significand · 2^e, the significand in [1, 2) or below 1 for subnormals; −126 for zeros."""
    exponent = np.frexp(x)[1].astype(np.int64) - 1
    return np.where(x == 0, -126, np.maximum(exponent, _MIN_EXPONENT[element]))


def truncated(
    left: F64,
    right: F64,
    before: F32 | None,
    inst: InstructionDescriptor,
    scale_a: F64 | None,
    scale_b: F64 | None,
) -> F32:
    """D [rows, N] from A [rows, K], B [N, K], the accumulator, and scales [rows or N, K / block]."""
    start = np.zeros((left.shape[0], right.shape[0])) if before is None else before.astype(np.float64)
    start_exponent = exponents(start, "f32")
    terms: list[F64] = []  # [rows, N] each, exact
    places: list[I64] = []  # and their exponents
    if inst.a_type == "e2m1" and scale_a is not None and scale_b is not None and inst.scale_type is not None:
        bits = FRACTION_BITS_FP4
        place_a, place_b = exponents(scale_a, inst.scale_type), exponents(scale_b, inst.scale_type)
        for first in range(0, inst.k, _GROUP):
            codes = left[:, first : first + _GROUP] @ right[:, first : first + _GROUP].T
            of = first // (inst.k // scale_a.shape[1])
            terms.append(codes * (scale_a[:, of, None] * scale_b[None, :, of]))
            places.append(place_a[:, of, None] + place_b[None, :, of])
    else:
        bits = FRACTION_BITS
        place_a, place_b = exponents(left, inst.a_type), exponents(right, inst.b_type)
        if scale_a is not None and scale_b is not None and inst.scale_type is not None:  # one UE8M0 scale a row
            left, right = left * scale_a, right * scale_b
            place_a = place_a + exponents(scale_a, inst.scale_type)
            place_b = place_b + exponents(scale_b, inst.scale_type)
        for k in range(inst.k):
            terms.append(left[:, k, None] * right[None, :, k])
            places.append(place_a[:, k, None] + place_b[None, :, k])
    top = start_exponent
    for place in places:
        top = np.maximum(top, place)
    # Multiples of the last bit kept are whole numbers below 2^53 in float64, so their sum is exact.
    unit = np.exp2((bits - top).astype(np.float64))
    total = np.trunc(start * unit)
    plain = start.copy()
    for term in terms:
        total += np.trunc(term * unit)
        plain += term
    result = _toward_zero(total * np.exp2((top - bits).astype(np.float64)))
    special = ~np.isfinite(plain)  # infinities and NaN follow IEEE 754
    return np.where(special, np.where(np.isnan(plain), _NAN, plain.astype(np.float32)), result)


def _toward_zero(x: F64) -> F32:
    """float32 of x, truncated; from 2^128 on infinite."""
    near = x.astype(np.float32)
    size = np.abs(x)
    over = (np.abs(near.astype(np.float64)) > size) & (size < 2.0**128)
    return np.where(over, np.nextafter(near, np.float32(0)), near)
