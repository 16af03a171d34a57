"""Number formats of PTX and the cvt instruction, bit-exact (PTX ISA, "Data Movement and Conversion Instructions: cvt").

Functions take arrays of any length and return new arrays. Destinations of two elements (`…x2`) take the source of
their upper half first, as the instruction does. A packed source goes through `halves`, which is exact:
`cvt.rn.satfinite.e2m1x2.f16x2 d, a` is `to_e2m1x2(*halves(a, "f16"))`.

`.satfinite` turns what lies beyond the largest finite value, infinities included, into that value. NaN becomes the
canonical NaN of the destination (all bits but the sign set), or the largest value where the format has none (E2M1,
E2M3, E3M2). `.relu` turns negative results into +0, −0 included.

Not here: stochastic rounding (`.rs`), whose random-bit layout the ISA only draws, and `.s2f6x2`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from wanfp4.simulator.arithmetic import F32, F64, directed, flush, round_sum, sum_error
from wanfp4.simulator.findings import UnknownInstruction

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]


def _magnitudes(exponent_bits: int, mantissa_bits: int, bias: int) -> F64:
    """Values of all codes without sign, specials read as if they were numbers."""
    code = np.arange(1 << (exponent_bits + mantissa_bits))
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
    values: F64 = np.ldexp(fraction, np.maximum(exponent, 1) - bias)
    return values


def _signed(magnitudes: F64) -> F32:
    return np.concatenate((magnitudes, -magnitudes)).astype(np.float32)


_E4M3 = _magnitudes(4, 3, 7)
_E4M3[127] = np.nan
_E5M2 = _magnitudes(5, 2, 15)
_E5M2[124:] = [np.inf, np.nan, np.nan, np.nan]

# float32 value of every code.
E2M1: F32 = _signed(_magnitudes(2, 1, 1))
E2M3: F32 = _signed(_magnitudes(2, 3, 1))
E3M2: F32 = _signed(_magnitudes(3, 2, 3))
E4M3: F32 = _signed(_E4M3)
E5M2: F32 = _signed(_E5M2)
UE4M3: F32 = np.concatenate((_E4M3, _E4M3)).astype(np.float32)  # the sign bit is ignored
UE8M0: F32 = np.append(2.0 ** (np.arange(255) - 127.0), np.nan).astype(np.float32)


class _Encoder:
    """float32 → codes of a small format: nearest, ties to even, saturating.

    The float32 bits are looked up among the bit patterns at which the code changes, which is exact by construction.
    """

    def __init__(self, values: F32, largest: int, nan: int, relu: bool) -> None:
        """`values` are those of all codes, `largest` the code of the largest finite one, `nan` the code for NaN."""
        finite = values[: largest + 1].astype(np.float64)
        middles = ((finite[1:] + finite[:-1]) / 2).astype(np.float32).view(np.uint32)
        even = np.arange(largest) % 2 == 0  # the middle itself belongs to the even code, the lower one here
        up = [*(middles + even), 0x7F800001]
        codes = [*range(largest + 1), nan]
        sign = len(values) // 2
        negative = [0 if relu else code | sign for code in codes[:-1]]
        self.breaks = np.array([*up, 0x80000000, *(b | 0x80000000 for b in up)], np.uint32)
        self.codes = np.array([*codes, *negative, nan], np.uint8)

    def __call__(self, x: F32) -> U8:
        codes: U8 = self.codes[self.breaks.searchsorted(x.view(np.uint32), "right")]
        return codes


_FORMATS = {"e2m1": (E2M1, 7, 7), "e2m3": (E2M3, 31, 31), "e3m2": (E3M2, 31, 31), "e4m3": (E4M3, 126, 127)}
_FORMATS["e5m2"] = (E5M2, 123, 127)
_ENCODERS = {(name, relu): _Encoder(*args, relu) for name, args in _FORMATS.items() for relu in (False, True)}


def encode(x: F32, name: str, relu: bool = False) -> U8:
    """Codes of `x` in "e2m1", "e2m3", "e3m2", "e4m3" or "e5m2": `.rn.satfinite`."""
    return _ENCODERS[name, relu](x)


_LOW_E2M1 = {relu: _ENCODERS["e2m1", relu].codes for relu in (False, True)}
_HIGH_E2M1 = {relu: _LOW_E2M1[relu] << np.uint8(4) for relu in (False, True)}
_E2M1_BREAKS = _ENCODERS["e2m1", False].breaks


def to_e2m1x2(a: F32, b: F32, relu: bool = False) -> U8:
    """cvt.rn.satfinite{.relu}.e2m1x2.f32: a to bits 4–7, b to bits 0–3."""
    high = _HIGH_E2M1[relu][_E2M1_BREAKS.searchsorted(a.view(np.uint32), "right")]
    low = _LOW_E2M1[relu][_E2M1_BREAKS.searchsorted(b.view(np.uint32), "right")]
    packed: U8 = high | low
    return packed


def _interleave(a: F32, b: F32) -> F32:
    both = np.empty(2 * a.size, np.float32)
    both[0::2] = b
    both[1::2] = a
    return both


def to_e2m3x2(a: F32, b: F32, relu: bool = False) -> U16:
    """cvt.rn.satfinite{.relu}.e2m3x2.f32: a to bits 8–13, b to bits 0–5, zeros between."""
    return _ENCODERS["e2m3", relu](_interleave(a, b)).view(np.uint16)


def to_e3m2x2(a: F32, b: F32, relu: bool = False) -> U16:
    """cvt.rn.satfinite{.relu}.e3m2x2.f32: a to bits 8–13, b to bits 0–5, zeros between."""
    return _ENCODERS["e3m2", relu](_interleave(a, b)).view(np.uint16)


def to_e4m3x2(a: F32, b: F32, relu: bool = False) -> U16:
    """cvt.rn.satfinite{.relu}.e4m3x2.f32."""
    return _ENCODERS["e4m3", relu](_interleave(a, b)).view(np.uint16)


def to_e5m2x2(a: F32, b: F32, relu: bool = False) -> U16:
    """cvt.rn.satfinite{.relu}.e5m2x2.f32."""
    return _ENCODERS["e5m2", relu](_interleave(a, b)).view(np.uint16)


def _ue8m0_breaks(rounding: str) -> U32:
    powers = UE8M0[:255].view(np.uint32)  # of bytes 0–254
    up = powers[:254] + np.uint32(1) if rounding == "rp" else powers[1:]
    up = np.append(up, np.uint32(0x7F800001))
    return np.concatenate((up, np.array([0x80000000], np.uint32), up | np.uint32(0x80000000)))


_UE8M0_BREAKS = {rounding: _ue8m0_breaks(rounding) for rounding in ("rp", "rz")}
_UE8M0_CODES: U8 = np.tile(np.arange(256), 2).astype(np.uint8)  # 254 steps and NaN, then the same for the other sign


def to_ue8m0x2(a: F32, b: F32, rounding: str) -> U16:
    """cvt.{rp,rz}.satfinite.ue8m0x2.f32: the power of two at or above ("rp") or at or below ("rz") the magnitude.

    The sign is ignored, as the format has none; values below 2^−127 become 2^−127 (byte 0), NaN 255, the rest at most
    254.
    """
    bits = _interleave(a, b).view(np.uint32)
    return _UE8M0_CODES[_UE8M0_BREAKS[rounding].searchsorted(bits, "right")].view(np.uint16)


_SHIFT_16 = np.array(16, np.uint32)
_ONE = np.array(1, np.uint32)
_HALF_BF16 = np.array(0x7FFF, np.uint32)


def to_bf16(x: F32, rounding: str = "rn", relu: bool = False, satfinite: bool = False) -> U16:
    """cvt.{rn,rz}{.relu}{.satfinite}.bf16.f32 as bits. NaN gives 0x7FFF."""
    bits = x.view(np.uint32)
    if rounding == "rn":
        word = bits >> _SHIFT_16
        word &= _ONE
        word += _HALF_BF16
        word += bits
    elif rounding == "rz":
        word = np.ascontiguousarray(bits)
    else:
        raise KeyError(rounding)
    code = word.view(np.uint16)[1::2]
    if satfinite:
        code = np.where((code & 0x7FFF) == 0x7F80, code - np.uint16(1), code)
    return _finish_half(code, x, relu)


def to_f16(x: F32, rounding: str = "rn", relu: bool = False, satfinite: bool = False) -> U16:
    """cvt.{rn,rz}{.relu}{.satfinite}.f16.f32 as bits. NaN gives 0x7FFF; without satfinite, overflow to nearest gives
    infinity."""
    half = x.astype(np.float16)
    code = half.view(np.uint16)
    if rounding == "rz":
        code = code - (np.abs(half.astype(np.float32)) > np.abs(x)).astype(np.uint16)
    elif rounding != "rn":
        raise KeyError(rounding)
    if satfinite:
        code = np.where((code & 0x7FFF) == 0x7C00, code - np.uint16(1), code)
    return _finish_half(code, x, relu)


def _finish_half(code: U16, x: F32, relu: bool) -> U16:
    """The canonical NaN, and `.relu`."""
    if relu:
        code = np.where(code >> 15 != 0, np.uint16(0), code)
    number = x == x
    if np.count_nonzero(number) != x.size:
        code = np.where(number, code, np.uint16(0x7FFF))
    return code


def to_bf16x2(a: F32, b: F32, rounding: str = "rn", relu: bool = False, satfinite: bool = False) -> U32:
    """cvt.{rn,rz}{.relu}{.satfinite}.bf16x2.f32."""
    code = to_bf16(_interleave(a, b), rounding, relu, satfinite)
    return np.ascontiguousarray(code).view(np.uint32)


def to_f16x2(a: F32, b: F32, rounding: str = "rn", relu: bool = False, satfinite: bool = False) -> U32:
    """cvt.{rn,rz}{.relu}{.satfinite}.f16x2.f32."""
    return to_f16(_interleave(a, b), rounding, relu, satfinite).view(np.uint32)


def to_tf32(x: F32, rounding: str, relu: bool = False, satfinite: bool = False) -> U32:
    """cvt.{rn,rz,rna}{.relu}{.satfinite}.tf32.f32: float32 bits whose 13 low bits are zero (NaN: 0x7FFFFFFF)."""
    bits = x.view(np.uint32)
    if rounding == "rn":
        bits = bits + (((bits >> np.uint32(13)) & _ONE) + np.uint32(0xFFF))
    elif rounding == "rna":
        bits = bits + np.uint32(0x1000)
    elif rounding != "rz":
        raise KeyError(rounding)
    bits = bits & np.uint32(0xFFFFE000)
    if satfinite:
        bits = np.where((bits & 0x7FFFFFFF) == 0x7F800000, bits - np.uint32(0x2000), bits)
    if relu:
        bits = np.where(bits >> 31 != 0, np.uint32(0), bits)
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), bits)


def from_bf16(code: U16) -> F32:
    """cvt.f32.bf16 of bits."""
    return (code.astype(np.uint32) << _SHIFT_16).view(np.float32)


def from_f16(code: U16) -> F32:
    """cvt.f32.f16 of bits."""
    return code.view(np.float16).astype(np.float32)


def halves(x: U32, kind: str) -> tuple[F32, F32]:
    """The upper and the lower element of f16x2 ("f16") or bf16x2 ("bf16") as float32, exactly."""
    if kind == "bf16":
        return (x & 0xFFFF0000).view(np.float32), (x << _SHIFT_16).view(np.float32)
    both = np.ascontiguousarray(x).view(np.float16).astype(np.float32)
    return both[1::2], both[0::2]


def _f16_codes(values: F32, relu: bool) -> U16:
    return to_f16(values, relu=relu)


_NAMES = {"e2m1": E2M1, "e2m3": E2M3, "e3m2": E3M2, "e4m3": E4M3, "e5m2": E5M2}
with np.errstate(invalid="ignore"):
    _TO_F16 = {(name, relu): _f16_codes(v, relu) for name, v in _NAMES.items() for relu in (False, True)}


def e2m1x2_to_f16x2(x: U8, relu: bool = False) -> U32:
    """cvt.rn{.relu}.f16x2.e2m1x2."""
    table = _TO_F16["e2m1", relu].astype(np.uint32)
    packed: U32 = (table[x >> 4] << _SHIFT_16) | table[x & 15]
    return packed


def _bytes_to_f16x2(x: U16, name: str, relu: bool) -> U32:
    codes = np.ascontiguousarray(x).view(np.uint8)
    if name in ("e2m3", "e3m2"):  # bits 6 and 7 of each byte are not looked at
        codes = codes & np.uint8(63)
    packed: U32 = _TO_F16[name, relu][codes].view(np.uint32)
    return packed


def e2m3x2_to_f16x2(x: U16, relu: bool = False) -> U32:
    """cvt.rn{.relu}.f16x2.e2m3x2."""
    return _bytes_to_f16x2(x, "e2m3", relu)


def e3m2x2_to_f16x2(x: U16, relu: bool = False) -> U32:
    """cvt.rn{.relu}.f16x2.e3m2x2."""
    return _bytes_to_f16x2(x, "e3m2", relu)


def e4m3x2_to_f16x2(x: U16, relu: bool = False) -> U32:
    """cvt.rn{.relu}.f16x2.e4m3x2."""
    return _bytes_to_f16x2(x, "e4m3", relu)


def e5m2x2_to_f16x2(x: U16, relu: bool = False) -> U32:
    """cvt.rn{.relu}.f16x2.e5m2x2."""
    return _bytes_to_f16x2(x, "e5m2", relu)


def ue8m0x2_to_bf16x2(x: U16) -> U32:
    """cvt.rn.bf16x2.ue8m0x2: byte 0 is the subnormal 2^−127, 255 NaN."""
    return np.ascontiguousarray(to_bf16(UE8M0[np.ascontiguousarray(x).view(np.uint8)])).view(np.uint32)


_ROUND = {"n": np.rint, "z": np.trunc, "m": np.floor, "p": np.ceil}


def float_to_int(x: NDArray[Any], rounding: str, dtype: type[np.integer[Any]], ftz: bool = False) -> NDArray[Any]:
    """cvt.{rni,rzi,rmi,rpi}{.ftz}.dtype from f16, f32 or f64 (`x` a NumPy float array), saturating.

    NaN gives 0, but 2^(bits − 1) (for signed types the smallest value) if the source is f64 or the destination has 64
    bits.
    """
    info = np.iinfo(dtype)
    nan_bit = x.dtype == np.float64 or info.bits == 64
    if ftz:
        x = flush(x)
    whole = _ROUND[rounding[1]](x.astype(np.float64))
    if not nan_bit:
        inside = np.clip(whole, float(info.min), float(info.max))
        return np.where(whole == whole, inside, 0.0).astype(dtype)
    nan = int(info.min) if info.min else 1 << (info.bits - 1)
    # The limits as float64: 2^63 − 1 and 2^64 − 1 round up, so what reaches the upper one saturates before the cast.
    above, below = whole >= float(info.max), whole <= float(info.min)
    inside = ~(above | below) & (whole == whole)
    out = np.where(inside, whole, 0).astype(dtype)
    out = np.where(above, dtype(info.max), np.where(below, dtype(info.min), out))
    return np.where(np.isnan(whole), dtype(nan), out)


def int_to_float(x: NDArray[Any], rounding: str, dtype: type[np.floating[Any]] = np.float32) -> NDArray[Any]:
    """cvt.{rn,rz,rm,rp}.{f32,f64} from an integer array; f16 (`np.float16`) only to nearest."""
    if rounding == "rn":
        return np.asarray(x.astype(dtype))
    if dtype is np.float16:
        raise UnknownInstruction(f"cvt.{rounding}.f16 from an integer is not modelled")
    if x.dtype.itemsize < 8:
        exact = x.astype(np.float64)
        near = exact.astype(np.float32)
        return exact if dtype is np.float64 else directed(near, exact - near, rounding)
    low = x & x.dtype.type(0xFFFFFFFF)
    upper, lower = (x - low).astype(np.float64), low.astype(np.float64)  # both exact
    if dtype is np.float32:
        return round_sum(upper, lower, rounding)
    double = upper + lower
    error = sum_error(double, upper, lower)
    inward = (rounding == "rz") & (x < 0)  # then up, and for the rest down
    down = (error < 0) & ~inward if rounding != "rp" else np.zeros(x.shape, np.bool_)
    up = (error > 0) & (inward | (rounding == "rp"))
    stepped: F64 = np.where(down, np.nextafter(double, -np.inf), np.where(up, np.nextafter(double, np.inf), double))
    return stepped


def int_to_int(x: NDArray[Any], dtype: type[np.integer[Any]], sat: bool = False) -> NDArray[Any]:
    """cvt{.sat} between integers: extends by the source's sign or truncates; `.sat` clamps to the range of dtype."""
    if sat:
        low = max(int(np.iinfo(x.dtype).min), int(np.iinfo(dtype).min))
        high = min(int(np.iinfo(x.dtype).max), int(np.iinfo(dtype).max))
        x = np.clip(x, x.dtype.type(low), x.dtype.type(high))
    return np.asarray(x.astype(dtype))


def round_f32(x: F32, rounding: str, ftz: bool = False, sat: bool = False) -> F32:
    """cvt.{rni,rzi,rmi,rpi}{.ftz}{.sat}.f32.f32: to a whole number, kept as float32."""
    if ftz:
        x = flush(x)
    r: F32 = _ROUND[rounding[1]](x)
    return np.fmin(np.fmax(r, np.float32(0)), np.float32(1)) + np.float32(0) if sat else r


def f64_to_f32(x: F64, rounding: str = "rn", ftz: bool = False, sat: bool = False) -> F32:
    """cvt.rnd{.ftz}{.sat}.f32.f64."""
    near = x.astype(np.float32)
    r = directed(near, x - near, rounding)
    if ftz:
        r = flush(r)
    return np.fmin(np.fmax(r, np.float32(0)), np.float32(1)) + np.float32(0) if sat else r
