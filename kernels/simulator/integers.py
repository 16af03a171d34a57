"""Integer, bit and warp instructions of PTX on arrays of lanes.

The arrays have the instruction's own type (int32 for .s32, …) and any length, a warp has 32 lanes; bit patterns are
uint32 or uint64. Nothing is written in place. add, sub, mul.lo and mad.lo are NumPy's + and *, which wrap. Section
names are those of the PTX ISA.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wanfp4.simulator.arithmetic import F32, Bools, settle_extreme
from wanfp4.simulator.conversions import int_to_int

Ints = NDArray[Any]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

_WIDER: dict[Any, Any] = {
    np.dtype(np.int16): np.int32,
    np.dtype(np.uint16): np.uint32,
    np.dtype(np.int32): np.int64,
    np.dtype(np.uint32): np.uint64,
}


def _bits(a: Ints) -> int:
    return a.dtype.itemsize * 8


def shift_left(a: Ints, b: U32) -> Ints:
    """shl: amounts above the register's width are clamped to it, which leaves 0."""
    bits = _bits(a)
    inside = b < bits
    if np.count_nonzero(inside) == b.size:
        return np.asarray(a << b.astype(a.dtype))
    return np.asarray(np.where(inside, a << np.where(inside, b, 0).astype(a.dtype), a.dtype.type(0)))


def shift_right(a: Ints, b: U32) -> Ints:
    """shr: fills with the sign of signed types; amounts are clamped to the register's width."""
    bits = _bits(a)
    inside = b < bits
    if np.count_nonzero(inside) == b.size:
        return np.asarray(a >> b.astype(a.dtype))
    shifted = np.asarray(a >> np.minimum(b, np.uint32(bits - 1)).astype(a.dtype))
    return shifted if a.dtype.kind == "i" else np.where(inside, shifted, a.dtype.type(0))


def funnel_shift(a: U32, b: U32, c: U32, left: bool, wrap: bool) -> U32:
    """shf.{l,r}.{clamp,wrap}.b32: the upper ("l") or lower half of the 64 bits b:a shifted by c."""
    both = (b.astype(np.uint64) << np.uint64(32)) | a
    amount = (c & np.uint32(31) if wrap else np.minimum(c, np.uint32(32))).astype(np.uint64)
    shifted: U64 = (both << amount) >> np.uint64(32) if left else both >> amount
    return shifted.astype(np.uint32)


def mul_wide(a: Ints, b: Ints) -> Ints:
    """mul.wide: the full product, twice as wide."""
    wide = _WIDER[a.dtype]
    product: Ints = a.astype(wide) * b.astype(wide)
    return product


def mul_hi(a: Ints, b: Ints) -> Ints:
    """mul.hi: the upper half of the full product."""
    if a.dtype.itemsize < 8:
        upper: Ints = (mul_wide(a, b) >> _WIDER[a.dtype](_bits(a))).astype(a.dtype)
        return upper
    x, y, low = a.view(np.uint64), b.view(np.uint64), np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    x0, x1, y0, y1 = x & low, x >> half, y & low, y >> half
    middle = x1 * y0 + ((x0 * y0) >> half)
    carry = x0 * y1 + (middle & low)
    high: U64 = x1 * y1 + (middle >> half) + (carry >> half)
    if a.dtype.kind == "i":  # the unsigned product counts negative operands 2^64 too high
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    result: Ints = high.view(a.dtype)
    return result


def mad_hi(a: Ints, b: Ints, c: Ints) -> Ints:
    """mad.hi."""
    total: Ints = mul_hi(a, b) + c
    return total


def mad_wide(a: Ints, b: Ints, c: Ints) -> Ints:
    """mad.wide: c is as wide as the product."""
    total: Ints = mul_wide(a, b) + c
    return total


def mul24(a: Ints, b: Ints, hi: bool = False) -> Ints:
    """mul24.{lo,hi}: bits 0–31 or 16–47 of the 48-bit product of the lower 24 bits."""
    wide = _WIDER[a.dtype]
    x, y = ((v.astype(wide) << wide(40)) >> wide(40) for v in (a, b))
    product: Ints = x * y
    return (product >> wide(16) if hi else product).astype(a.dtype)


def add_sat_s32(a: NDArray[np.int32], b: NDArray[np.int32]) -> NDArray[np.int32]:
    """add.sat.s32."""
    return int_to_int(a.astype(np.int64) + b, np.int32, sat=True)


def sub_sat_s32(a: NDArray[np.int32], b: NDArray[np.int32]) -> NDArray[np.int32]:
    """sub.sat.s32."""
    return int_to_int(a.astype(np.int64) - b, np.int32, sat=True)


def sad(a: Ints, b: Ints, c: Ints) -> Ints:
    """sad: c + |a − b|."""
    total: Ints = c + np.where(a < b, b - a, a - b)
    return total


def div_int(a: Ints, b: Ints) -> Ints:
    """div of integers, rounded toward zero. Division by zero, unspecified in the ISA, gives all ones."""
    zero = b == 0
    divisor = np.where(zero, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        quotient = a // divisor
    else:
        unsigned = np.dtype(f"u{a.dtype.itemsize}")
        size = (np.abs(a).view(unsigned) // np.abs(divisor).view(unsigned)).view(a.dtype)  # |smallest| wraps rightly
        quotient = np.where((a < 0) != (b < 0), -size, size)
    return np.where(zero, ~a.dtype.type(0), quotient)


def rem_int(a: Ints, b: Ints) -> Ints:
    """rem of integers: the sign of the dividend. By zero, unspecified in the ISA, gives the dividend."""
    zero = b == 0
    return np.where(zero, a, a - div_int(a, b) * b)


def bfe(a: Ints, start: U32 | int, length: U32 | int) -> Ints:
    """bfe.{u32,s32,u64,s64}: bits from `start` on, `length` of them (the low bytes of both), extended.

    Plain ints, where both are the same in all lanes, are faster; the same holds for `bfi`.
    """
    bits = _bits(a)
    if isinstance(start, int) and isinstance(length, int):
        low, count = min(start & 0xFF, bits), length & 0xFF
        if count == 0 or (low == bits and a.dtype.kind == "u"):
            return np.zeros_like(a)
        low = min(low, bits - 1)
        cut = max(bits - low - count, 0)  # a field that reaches beyond the register is extended by the shift alone
        field: Ints = (a << a.dtype.type(cut)) >> a.dtype.type(cut + low)
        return field
    first, count_of = _low_bytes(a, start, length)
    field = shift_right(a, first)
    cut_by = np.where(count_of < bits, bits - count_of.astype(np.int64), 0)
    cut_by = np.where(first.astype(np.int64) + count_of >= bits, 0, cut_by).astype(np.uint32)
    field = shift_right(shift_left(field, cut_by), cut_by)
    return np.where(count_of == 0, a.dtype.type(0), field)


def _low_bytes(a: Ints, start: U32 | int, length: U32 | int) -> tuple[U32, U32]:
    start, length = (np.broadcast_to(np.asarray(x, np.uint32), a.shape) for x in (start, length))
    return start & np.uint32(0xFF), length & np.uint32(0xFF)


def bfi(a: Ints, b: Ints, start: U32 | int, length: U32 | int) -> Ints:
    """bfi.{b32,b64}: b with `length` bits from `start` on replaced by the low bits of a."""
    bits = _bits(a)
    if isinstance(start, int) and isinstance(length, int):
        low, count = start & 0xFF, length & 0xFF
        if low >= bits:
            return b
        mask_value = ((1 << count) - 1) << low & ((1 << bits) - 1)
        replaced: Ints = (b & a.dtype.type(((1 << bits) - 1) ^ mask_value)) | (
            (a << a.dtype.type(low)) & a.dtype.type(mask_value)
        )
        return replaced
    first, count_of = _low_bytes(a, start, length)
    ones = np.full_like(a, ~a.dtype.type(0))
    mask = shift_left(~shift_left(ones, count_of), first)
    merged: Ints = (b & ~mask) | (shift_left(a, first) & mask)
    return merged


@lru_cache(maxsize=256)
def _minterms(table: int) -> tuple[bool, tuple[int, ...]]:
    """The rows of a truth table with a 1, or with a 0 if those are fewer (True)."""
    invert = table.bit_count() > 4
    return invert, tuple(row for row in range(8) if (table >> row & 1) != invert)


def lop3(a: Ints, b: Ints, c: Ints, table: int) -> Ints:
    """lop3.b32: bit 4a + 2b + c of `table`."""
    invert, rows = _minterms(table & 0xFF)
    result = np.zeros_like(a)
    for row in rows:
        result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return ~result if invert else result


def popc(a: Ints) -> U32:
    """popc.{b32,b64}."""
    return np.bitwise_count(a).astype(np.uint32)


def clz(a: Ints) -> U32:
    """clz.{b32,b64}: leading zeros, 32 or 64 for zero."""
    if a.dtype.itemsize == 8:
        high = clz((a >> np.uint64(32)).astype(np.uint32))
        return np.where(high == 32, 32 + clz(a.astype(np.uint32)), high)
    return (32 - np.frexp(a.astype(np.float64))[1]).astype(np.uint32)


_REVERSED = np.array([int(f"{byte:08b}"[::-1], 2) for byte in range(256)], np.uint8)


def brev(a: Ints) -> Ints:
    """brev.{b32,b64}: the bits in reverse order."""
    return _REVERSED[a.byteswap().view(np.uint8)].view(a.dtype)


def bfind(a: Ints, shiftamt: bool = False) -> U32:
    """bfind{.shiftamt}: position of the most significant bit that differs from the sign (unsigned: is 1).

    `shiftamt` counts the left shift that takes it to the top. 0xFFFFFFFF if there is none.
    """
    pattern = a.view(f"u{a.dtype.itemsize}")
    if a.dtype.kind == "i":
        pattern = np.where(a < 0, ~pattern, pattern)
    zeros = clz(pattern)
    place = zeros if shiftamt else np.uint32(_bits(a) - 1) - zeros
    return np.where(pattern == 0, np.uint32(0xFFFFFFFF), place)


# Byte selectors of the special prmt modes by the low two bits of c, highest byte first as the ISA's table has them.
_PRMT_MODES = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}
_NIBBLES = np.array([0, 4, 8, 12])
_SEVEN, _SIGN_BITS = np.array(7), np.array(0x8888, np.uint32)


@lru_cache(maxsize=1024)
def _picks(selector: int) -> tuple[NDArray[np.intp], NDArray[np.bool_] | None]:
    """Byte numbers 0–7 for the four result bytes, and which are sign replications (None: none)."""
    nibbles = np.array([selector >> shift & 15 for shift in (0, 4, 8, 12)])
    replicate = nibbles >= 8
    return nibbles & 7, replicate if replicate.any() else None


@lru_cache(maxsize=16)
def _rows_of_eight(count: int) -> I64:
    return (8 * np.arange(count))[:, None]


def prmt(a: U32, b: U32, selector: U32 | int, mode: str = "") -> U32:
    """prmt.b32{.mode}: four of the eight bytes b:a, one per nibble of the selector, whose top bit replicates the sign.

    `selector` may be a plain int if it is the same in all lanes, which is faster.
    """
    pool = np.empty((a.size, 2), np.uint32)
    pool[:, 0] = a
    pool[:, 1] = b
    source = pool.view(np.uint8)
    if mode:
        table = _PRMT_MODES[mode]
        if isinstance(selector, int):
            selector = table[selector & 3]
        else:
            selector = np.array(table, np.uint32)[selector & np.uint32(3)]
    if isinstance(selector, int):
        picks, replicate = _picks(selector & 0xFFFF)
        out = source.take(picks, axis=1)
        if replicate is not None:
            out = np.where(replicate, np.where(out & 128, np.uint8(255), np.uint8(0)), out)
    else:
        nibbles = selector.astype(np.intp)[:, None] >> _NIBBLES
        out = source.reshape(-1).take((nibbles & _SEVEN) + _rows_of_eight(a.size))
        if np.count_nonzero(selector & _SIGN_BITS):
            out = np.where(nibbles & 8, np.where(out & 128, np.uint8(255), np.uint8(0)), out)
    return out.view(np.uint32).reshape(-1)


def _quarters(a: U32, signed: bool) -> NDArray[np.int32]:
    return np.ascontiguousarray(a).view(np.int8 if signed else np.uint8).reshape(-1, 4).astype(np.int32)


def dp4a(a: U32, b: U32, c: U32, a_signed: bool, b_signed: bool) -> U32:
    """dp4a: c + the dot product of four bytes of each; wraps."""
    product = _quarters(a, a_signed) * _quarters(b, b_signed)
    total: U32 = product.sum(1, np.int32).view(np.uint32) + c
    return total


def dp2a(a: U32, b: U32, c: U32, a_signed: bool, b_signed: bool, hi: bool) -> U32:
    """dp2a.{lo,hi}: c + the dot product of a's two halves with the lower or upper two bytes of b; wraps."""
    words = np.ascontiguousarray(a).view(np.int16 if a_signed else np.uint16).reshape(-1, 2).astype(np.int64)
    quarters = _quarters(b, b_signed)[:, 2:] if hi else _quarters(b, b_signed)[:, :2]
    total: U32 = (words * quarters).sum(1).astype(np.uint32) + c
    return total


def redux(op: str, x: Ints, mask: Bools | None = None, magnitude: bool = False, nan: bool = False) -> Ints:
    """redux.sync: add, min, max, and, or, xor over the lanes of `mask`; every lane gets the result.

    float32 has min and max only, with `.abs` (`magnitude`) and `.NaN` (`nan`) as in min.f32.
    """
    live = x if mask is None else x[mask]
    if x.dtype == np.float32:
        return np.full(x.size, _redux_f32(op, np.abs(live) if magnitude else live, nan), np.float32)
    functions: dict[str, Any] = {"add": np.add, "min": np.minimum, "max": np.maximum}
    functions |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    return np.full(x.size, functions[op].reduce(live), x.dtype)


def _redux_f32(op: str, live: F32, nan: bool) -> np.float32:
    function = {("min", False): np.fmin, ("min", True): np.minimum, ("max", False): np.fmax, ("max", True): np.maximum}
    result: np.float32 = settle_extreme(function[op, nan], op == "min", list(live.reshape(-1, 1)))[0]
    return result


def ballot(p: Bools, mask: Bools | None = None) -> U32:
    """vote.sync.ballot.b32: bit l is lane l's predicate, 0 outside of `mask`."""
    packed = np.packbits(p if mask is None else p & mask, bitorder="little")
    return np.full(p.size, int.from_bytes(packed.tobytes(), "little"), np.uint32)


def vote(mode: str, p: Bools, mask: Bools | None = None) -> Bools:
    """vote.sync.{all,any,uni}.pred over the lanes of `mask`."""
    live = p if mask is None else p[mask]
    result = {"all": live.all(), "any": live.any(), "uni": live.all() or not live.any()}[mode]
    return np.full(p.size, result)


def match_any(x: Ints, mask: Bools | None = None) -> U32:
    """match.any.sync: the lanes of `mask` that hold the same value."""
    same = x[:, None] == x[None, :]
    if mask is not None:
        same &= mask[None, :]
    return np.packbits(same, axis=1, bitorder="little").view(np.uint32).reshape(-1)


def match_all(x: Ints, mask: Bools | None = None) -> tuple[U32, Bools]:
    """match.all.sync: all lanes of `mask` and true if they hold the same value, else 0 and false."""
    live = np.ones(x.size, np.bool_) if mask is None else mask
    same = bool((x[live] == x[live][0]).all())
    return (ballot(live) if same else np.zeros(x.size, np.uint32)), np.full(x.size, same)


def shfl_source(mode: str, b: U32 | int, c: U32 | int) -> tuple[I64, Bools]:
    """shfl.sync.{up,down,bfly,idx}: the lane that each lane reads from, and whether it lies in range (else its own).

    b is the lane or offset, c the clamp value and segment mask; ints if uniform, which is faster.
    """
    if isinstance(b, int) and isinstance(c, int):
        return _shfl_uniform(mode, b, c)
    return _shfl(mode, np.asarray(b, np.int64), np.asarray(c, np.int64))


@lru_cache(maxsize=4096)
def _shfl_uniform(mode: str, b: int, c: int) -> tuple[I64, Bools]:
    source, inside = _shfl(mode, np.asarray(b, np.int64), np.asarray(c, np.int64))
    source.flags.writeable = inside.flags.writeable = False
    return source, inside


def _shfl(mode: str, b: I64, c: I64) -> tuple[I64, Bools]:
    lane = np.arange(32)
    b, clamp, segment = b & 31, c & 31, c >> 8 & 31
    low, high = lane & segment, (lane & segment) | (clamp & ~segment)
    if mode == "up":
        source = lane - b
        inside = source >= high
    elif mode in ("down", "bfly", "idx"):
        source = {"down": lane + b, "bfly": lane ^ b, "idx": low | (b & ~segment)}[mode]
        inside = source <= high
    else:
        raise KeyError(mode)
    return np.where(inside, source, lane), inside


def pack64(low: U32, high: U32) -> U64:
    """mov.b64 d, {low, high}."""
    both = np.empty(2 * low.size, np.uint32)
    both[0::2] = low
    both[1::2] = high
    return both.view(np.uint64)


def unpack64(x: U64) -> tuple[U32, U32]:
    """mov.b64 {low, high}, x; both are views."""
    both = np.ascontiguousarray(x).view(np.uint32)
    return both[0::2], both[1::2]


def pack32(parts: list[Ints]) -> U32:
    """mov.b32 d, {…}: two 16-bit or four 8-bit registers, lowest first."""
    both = np.empty((parts[0].size, len(parts)), parts[0].dtype)
    for i, part in enumerate(parts):
        both[:, i] = part
    return both.view(np.uint32).reshape(-1)


def unpack(x: Ints, dtype: type[np.unsignedinteger[Any]]) -> list[Ints]:
    """mov {…}, x: the parts of type `dtype`, lowest first; views."""
    parts = np.ascontiguousarray(x).view(dtype)
    count = x.dtype.itemsize // parts.dtype.itemsize
    return [parts[i::count] for i in range(count)]
