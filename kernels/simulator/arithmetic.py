"""Floating-point arithmetic of PTX on arrays of lanes, exactly rounded.

Arrays may have any length (a warp has 32 lanes) and are never written to; results may be views of arguments. Packed
`.f32x2` operands are uint64 arrays, low half first. `rounding` is "rn", "rz", "rm" or "rp".

NumPy warns where a float overflows or a NaN is made; the machine runs everything under `np.errstate(all="ignore")`.

Single-precision results follow IEEE 754 (PTX ISA, "Floating-Point Instructions"): subnormals are kept, `.ftz` flushes
subnormal operands and results to zeros of their sign, `.sat` clamps to [0, 1] and turns NaN into +0. The payload of a
NaN is unspecified there; only min and max promise the canonical 0x7FFFFFFF, which is what they give here.

The `.approx` functions give the correctly rounded result (it goes through float64, so up to one case in 2^28 may be the
other neighbour). Hardware may differ from it in the last bits; the ISA only bounds the error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U64 = NDArray[np.uint64]
Bools = NDArray[np.bool_]

# Zero-dimensional arrays: cheaper operands than NumPy scalars.
_LOW_28 = np.array(0x0FFFFFFF, np.uint64)
_SIGN = np.array(0x80000000, np.uint32)
_MAGNITUDE = np.array(0x7FFFFFFF, np.uint32)
_MIN_NORMAL = np.array(2.0**-126, np.float32)
_ZERO = np.array(0, np.float32)
_ONE = np.array(1, np.float32)
_INF = np.array(np.inf, np.float32)
_NAN = np.array(0x7FFFFFFF, np.uint32).view(np.float32)  # the canonical NaN
_MIN_EX2 = np.array(-126, np.float32)


def flush(x: F32) -> F32:
    """`.ftz`: subnormals become zeros of the same sign."""
    tiny = np.abs(x) < _MIN_NORMAL
    if not np.count_nonzero(tiny):
        return x
    bits = x.view(np.uint32)
    return np.where(tiny, bits & _SIGN, bits).view(np.float32)


def _finish(x: F32, ftz: bool, sat: bool) -> F32:
    """`.ftz` and `.sat` of a result. Tininess is judged after rounding."""
    if ftz:
        x = flush(x)
    if sat:
        x = np.fmin(np.fmax(x, _ZERO), _ONE) + _ZERO  # fmax drops NaN, the sum a negative zero
    return x


def sum_error(s: F64, p: F64, c: F64) -> F64:
    """p + c − s exactly, where s is the rounded sum (Knuth's TwoSum); NaN where s is not finite."""
    t = s - p
    return (p - (s - t)) + (c - t)


def _to_odd(s: F64, p: F64, c: F64) -> F64:
    """p + c rounded to odd: inexact sums get an odd last bit, so that rounding once more to float32 is exact."""
    error = sum_error(s, p, c)
    inexact = (error < 0) | (error > 0)
    if not np.count_nonzero(inexact):
        return s
    bits = s.view(np.int64)
    even = (bits & 1) == 0
    step = np.where((error > 0) == (s > 0), 1, -1)  # the odd neighbour lies on the error's side
    return np.where(inexact & even, bits + step, bits).view(np.float64)


def directed(near: F32, residual: F64, rounding: str) -> F32:
    """Turns the nearest float32 into the one of a directed rounding; `residual` has the sign of exact − near."""
    if rounding in ("rm", "rz"):
        down = residual < 0 if rounding == "rm" else (residual < 0) & (near > 0)
        if np.count_nonzero(down):
            near = np.where(down, np.nextafter(near, -_INF), near)
    if rounding in ("rp", "rz"):
        up = residual > 0 if rounding == "rp" else (residual > 0) & (near < 0)
        if np.count_nonzero(up):
            near = np.where(up, np.nextafter(near, _INF), near)
    return near


def round_sum(p: F64, c: F64, rounding: str) -> F32:
    """p + c in float32 with one rounding. Both must be exact in float64, and the sum must not overflow there.

    To nearest, rounding twice (through float64) goes wrong only if the float64 sum is the middle of two float32
    values without being exact. Such middles have 28 zero low bits, subnormal results included, so looking for those
    bits finds the few sums that need care.
    """
    s = p + c
    if rounding == "rn":
        if np.count_nonzero(s.view(np.uint64) & _LOW_28) != s.size:
            s = _to_odd(s, p, c)
        return s.astype(np.float32)
    near = s.astype(np.float32)
    residual = s - near.astype(np.float64)
    if np.count_nonzero(residual) != s.size:  # |s − near| is at least a last bit of s, more than the error of s, or 0
        residual = np.where(residual == 0, sum_error(s, p, c), residual)
    result = directed(near, residual, rounding)
    if rounding == "rm" and np.count_nonzero(s) != s.size:  # IEEE 754: x − x is −0 when rounding down
        negative = (s == 0) & (np.signbit(p) | np.signbit(c))
        result = np.where(negative, -_ZERO, result)
    return result


def add_f32(a: F32, b: F32, rounding: str = "rn", ftz: bool = False, sat: bool = False) -> F32:
    """PTX ISA, add (floating point)."""
    if ftz:
        a, b = flush(a), flush(b)
    r = a + b if rounding == "rn" else round_sum(a.astype(np.float64), b.astype(np.float64), rounding)
    return _finish(r, ftz, sat) if ftz or sat else r


def sub_f32(a: F32, b: F32, rounding: str = "rn", ftz: bool = False, sat: bool = False) -> F32:
    """PTX ISA, sub (floating point)."""
    if ftz:
        a, b = flush(a), flush(b)
    r = a - b if rounding == "rn" else round_sum(a.astype(np.float64), -b.astype(np.float64), rounding)
    return _finish(r, ftz, sat) if ftz or sat else r


def mul_f32(a: F32, b: F32, rounding: str = "rn", ftz: bool = False, sat: bool = False) -> F32:
    """PTX ISA, mul (floating point)."""
    if ftz:
        a, b = flush(a), flush(b)
    r = a * b
    if rounding != "rn":
        r = directed(r, a.astype(np.float64) * b.astype(np.float64) - r, rounding)
    return _finish(r, ftz, sat) if ftz or sat else r


def fma_f32(a: F32, b: F32, c: F32, rounding: str = "rn", ftz: bool = False, sat: bool = False) -> F32:
    """PTX ISA, fma: a·b + c with a single rounding. (mad.f32 is the same instruction on sm_20 and later.)"""
    if ftz:
        a, b, c = flush(a), flush(b), flush(c)
    product = a.astype(np.float64)
    product *= b.astype(np.float64)
    r = round_sum(product, c.astype(np.float64), rounding)
    return _finish(r, ftz, sat) if ftz or sat else r


def add_f32x2(a: U64, b: U64, rounding: str = "rn", ftz: bool = False) -> U64:
    """PTX ISA, add.f32x2."""
    return add_f32(a.view(np.float32), b.view(np.float32), rounding, ftz).view(np.uint64)


def sub_f32x2(a: U64, b: U64, rounding: str = "rn", ftz: bool = False) -> U64:
    """PTX ISA, sub.f32x2."""
    return sub_f32(a.view(np.float32), b.view(np.float32), rounding, ftz).view(np.uint64)


def mul_f32x2(a: U64, b: U64, rounding: str = "rn", ftz: bool = False) -> U64:
    """PTX ISA, mul.f32x2."""
    return mul_f32(a.view(np.float32), b.view(np.float32), rounding, ftz).view(np.uint64)


def fma_f32x2(a: U64, b: U64, c: U64, rounding: str = "rn", ftz: bool = False) -> U64:
    """PTX ISA, fma.f32x2."""
    return fma_f32(a.view(np.float32), b.view(np.float32), c.view(np.float32), rounding, ftz).view(np.uint64)


def div_f32(a: F32, b: F32, mode: str = "rn", ftz: bool = False) -> F32:
    """PTX ISA, div (floating point): a rounding, "full" or "approx" (both to nearest here).

    "approx" gives 0 for 2^126 < |b| < 2^128, and NaN there if a is infinite.
    """
    if ftz:
        a, b = flush(a), flush(b)
    r = a / b
    if mode == "approx":
        large = np.abs(b) > np.float32(2.0**126)
        large &= b * _ZERO == 0
        r = np.where(large, a * _ZERO * np.sign(b), r)
    elif mode not in ("rn", "full"):
        b64 = b.astype(np.float64)
        r = directed(r, (a.astype(np.float64) - r * b64) * np.sign(b64), mode)
    return flush(r) if ftz else r


def rcp_f32(x: F32, mode: str = "approx", ftz: bool = False) -> F32:
    """PTX ISA, rcp.approx.f32 and rcp.rnd.f32."""
    return div_f32(np.ones_like(x), x, "rn" if mode == "approx" else mode, ftz)


def sqrt_f32(x: F32, mode: str = "approx", ftz: bool = False) -> F32:
    """PTX ISA, sqrt.approx.f32 and sqrt.rnd.f32."""
    if ftz:
        x = flush(x)
    r = np.sqrt(x)
    if mode in ("approx", "rn"):
        return r
    root = r.astype(np.float64)
    return directed(r, x.astype(np.float64) - root * root, mode)


def rsqrt_f32(x: F32, ftz: bool = False) -> F32:
    """PTX ISA, rsqrt.approx.f32: −0 gives −inf, negative values NaN."""
    if ftz:
        x = flush(x)
    return (1 / np.sqrt(x.astype(np.float64))).astype(np.float32)


def ex2_f32(x: F32, ftz: bool = False) -> F32:
    """PTX ISA, ex2.approx.f32. With `.ftz`, results below 2^−126 are +0; a subnormal operand gives 1 either way."""
    y = np.exp2(x.astype(np.float64)).astype(np.float32)
    if ftz:
        y *= x >= _MIN_EX2  # the largest float32 below −126 already gives a subnormal
    return y


def lg2_f32(x: F32, ftz: bool = False) -> F32:
    """PTX ISA, lg2.approx.f32: zeros (and subnormals under `.ftz`) give −inf, negative values NaN."""
    if ftz:
        x = flush(x)
    return _finish(np.log2(x.astype(np.float64)).astype(np.float32), ftz, False)


def tanh_f32(x: F32) -> F32:
    """PTX ISA, tanh.approx.f32 (subnormals supported)."""
    return np.tanh(x.astype(np.float64)).astype(np.float32)


def sin_f32(x: F32, ftz: bool = False) -> F32:
    """PTX ISA, sin.approx.f32; infinities give NaN."""
    if ftz:
        x = flush(x)
    return _finish(np.sin(x.astype(np.float64)).astype(np.float32), ftz, False)


def cos_f32(x: F32, ftz: bool = False) -> F32:
    """PTX ISA, cos.approx.f32; infinities give NaN. (No result is subnormal.)"""
    return np.cos(x.astype(np.float64)).astype(np.float32)


def neg_f32(x: F32, ftz: bool = False) -> F32:
    """PTX ISA, neg (floating point)."""
    return -(flush(x) if ftz else x)


def abs_f32(x: F32, ftz: bool = False) -> F32:
    """PTX ISA, abs (floating point)."""
    return np.abs(flush(x) if ftz else x)


def max_f32(
    a: F32,
    b: F32,
    c: F32 | None = None,
    ftz: bool = False,
    nan: bool = False,
    magnitude: bool = False,
    xorsign: bool = False,
) -> F32:
    """PTX ISA, max (floating point), of two or three operands.

    A NaN operand loses, with `nan` (`.NaN`) it wins; the result is the canonical NaN then, and if all are NaN. +0 is
    above −0. `magnitude` is `.abs`, `xorsign` is `.xorsign.abs`: the larger magnitude, its sign the xor of both signs.
    """
    return _extreme(np.maximum if nan else np.fmax, False, a, b, c, ftz, magnitude, xorsign)


def min_f32(
    a: F32,
    b: F32,
    c: F32 | None = None,
    ftz: bool = False,
    nan: bool = False,
    magnitude: bool = False,
    xorsign: bool = False,
) -> F32:
    """PTX ISA, min (floating point), of two or three operands; NaN and zeros as in `max_f32`."""
    return _extreme(np.minimum if nan else np.fmin, True, a, b, c, ftz, magnitude, xorsign)


def _extreme(
    pick: Callable[[F32, F32], F32],
    smallest: bool,
    a: F32,
    b: F32,
    c: F32 | None,
    ftz: bool,
    magnitude: bool,
    xorsign: bool,
) -> F32:
    if ftz or magnitude or xorsign:
        signs = (a.view(np.uint32) ^ b.view(np.uint32)) & _SIGN
        operands = [flush(x) if ftz else x for x in (a, b, c) if x is not None]
        if magnitude or xorsign:
            operands = [np.abs(x) for x in operands]
        r = settle_extreme(pick, smallest, operands)
        if xorsign:
            bits = r.view(np.uint32)
            r = np.where(np.isnan(r), bits, (bits & _MAGNITUDE) | signs).view(np.float32)
        return r
    r = pick(a, b)
    if c is not None:
        r = pick(r, c)
    zeros, numbers = r.size - np.count_nonzero(r), np.count_nonzero(r == r) == r.size
    if numbers and not zeros:
        return r
    operands = [a, b] if c is None else [a, b, c]
    if not numbers or any(np.count_nonzero(x == x) != x.size for x in operands):
        return settle_extreme(pick, smallest, operands)
    # No operand lies beyond a result of zero: it is −0 if all signs are set (max) or any sign is (min).
    join = np.bitwise_or if smallest else np.bitwise_and
    signs = a.view(np.uint32)
    for x in operands[1:]:
        signs = join(signs, x.view(np.uint32))
    return np.where(r == 0, (signs & _SIGN).view(np.float32), r)


def settle_extreme(pick: Callable[[F32, F32], F32], smallest: bool, operands: list[F32]) -> F32:
    """The extreme of `operands` with the signs of zeros and the NaN that the ISA asks for."""
    r = operands[0]
    for x in operands[1:]:
        r = pick(r, x)
    wanted = np.zeros(r.shape, np.bool_)  # a zero of the sign that wins is among the operands
    for x in operands:
        wanted |= (x == 0) & (np.signbit(x) == smallest)
    zero = np.where(wanted == smallest, -_ZERO, _ZERO)
    return np.where(np.isnan(r), _NAN, np.where(r == 0, zero, r))


_ORDERED: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_NEGATED = {"neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}  # true for NaN too


def compare_float(op: str, a: NDArray[Any], b: NDArray[Any], ftz: bool = False) -> Bools:
    """PTX ISA, "Floating Point Comparisons": the comparison of setp and set, on arrays of any float type.

    eq, ne, lt, le, gt, ge are false where an operand is NaN, equ, neu, ltu, leu, gtu, geu true; num, nan ask for it.
    """
    if ftz:
        a, b = flush(a), flush(b)
    if op in _ORDERED:
        result = _ORDERED[op](a, b)
    elif op in _NEGATED:
        result = ~_ORDERED[_NEGATED[op]](a, b)
    elif op == "ne":
        result = (a < b) | (a > b)
    elif op == "equ":
        result = ~((a < b) | (a > b))
    elif op in ("num", "nan"):
        result = ((a == a) & (b == b)) == (op == "num")
    else:
        raise KeyError(op)
    answer: Bools = result
    return answer
