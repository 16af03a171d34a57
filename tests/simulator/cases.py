"""What instructions on registers must give, lane by lane, in plain Python: exact integers and rationals.

A `Case` is an opcode, the types of its operands, and a function of one lane's operands. Integers come as Python ints
(unsigned for .b types), floats as Python floats, predicates as bools. The function returns the same; None says that the
ISA leaves the value open.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")
ROUNDINGS = ("rn", "rz", "rm", "rp")


@dataclass(frozen=True)
class Case:
    """`outs` and `ins`: types, with the pool of values to draw from after a colon ("u32:count").

    `text` stands for the instruction, {0}, {1}… for its operands, results first. Several are parted by semicolons.
    `slack`: how many units in the last place a float32 result may be off.
    """

    opcode: str
    outs: tuple[str, ...]
    ins: tuple[str, ...]
    truth: Callable[..., Any]
    text: str = ""
    slack: int = 0

    @property
    def template(self) -> str:
        count = len(self.outs) + len(self.ins)
        return self.text or f"{self.opcode} {', '.join(f'{{{i}}}' for i in range(count))}"


def bits_of(kind: str) -> int:
    """Width of a type."""
    return 1 if kind == "pred" else {"f16x2": 32, "bf16x2": 32, "f32x2": 64, "bf16": 16}.get(kind) or int(kind[1:])


def wrap(value: int, kind: str) -> int:
    """An integer modulo the type."""
    bits = bits_of(kind)
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value


def trunc_div(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def clamp(value: int, kind: str) -> int:
    bits = bits_of(kind)
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)
    return min(max(value, low), high)


def binary(name: str, kind: str) -> Callable[..., int]:
    bits = bits_of(kind)
    plain: dict[str, Callable[..., int]] = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul.lo": lambda a, b: a * b,
        "mad.lo": lambda a, b, c: a * b + c,
        "mul.hi": lambda a, b: a * b >> bits,
        "mad.hi": lambda a, b, c: (a * b >> bits) + c,
        "div": trunc_div,
        "rem": lambda a, b: a - b * trunc_div(a, b),
        "min": min,
        "max": max,
        "sad": lambda a, b, c: c + abs(a - b),
        "neg": lambda a: -a,
        "abs": abs,
    }
    return plain[name]


def integer_cases() -> Iterator[Case]:
    for kind in INTEGERS:
        for name in ("add", "sub", "mul.lo", "mul.hi", "min", "max", "mad.lo", "mad.hi", "sad"):
            operands = 3 if name[:3] in ("mad", "sad") else 2
            yield Case(f"{name}.{kind}", (kind,), (kind,) * operands, binary(name, kind))
        for name in ("div", "rem"):
            yield Case(f"{name}.{kind}", (kind,), (kind, f"{kind}:divisor"), binary(name, kind))
        if kind[0] == "s":
            yield Case(f"neg.{kind}", (kind,), (kind,), lambda a: -a)
            yield Case(f"abs.{kind}", (kind,), (kind,), abs)
        if "64" not in kind:
            wide = f"{kind[0]}{2 * bits_of(kind)}"
            yield Case(f"mul.wide.{kind}", (wide,), (kind, kind), lambda a, b: a * b)
            yield Case(f"mad.wide.{kind}", (wide,), (kind, kind, wide), lambda a, b, c: a * b + c)
    for name, function in (("add", lambda a, b: a + b), ("sub", lambda a, b: a - b)):
        yield Case(f"{name}.sat.s32", ("s32",), ("s32", "s32"), lambda a, b, f=function: clamp(f(a, b), "s32"))
    for kind, part in itertools.product(("u32", "s32"), ("lo", "hi")):
        narrow = f"{kind[0]}24"
        yield Case(
            f"mul24.{part}.{kind}",
            (kind,),
            (kind, kind),
            lambda a, b, n=narrow, s=16 * (part == "hi"): wrap(a, n) * wrap(b, n) >> s,
        )
    for first, second in itertools.product(("u32", "s32"), repeat=2):
        yield Case(f"dp4a.{first}.{second}", ("b32",), ("b32", "b32", "b32"), dot(first, second, 4, False))
        for part in ("lo", "hi"):
            yield Case(f"dp2a.{part}.{first}.{second}", ("b32",), ("b32",) * 3, dot(first, second, 2, part == "hi"))


def dot(first: str, second: str, count: int, high: bool) -> Callable[[int, int, int], int]:
    size = 32 // count

    def truth(a: int, b: int, c: int) -> int:
        b = b >> 16 if high else b
        return c + sum(
            wrap(a >> (size * i), f"{first[0]}{size}") * wrap(b >> (8 * i), f"{second[0]}8") for i in range(count)
        )

    return truth


def bit_cases() -> Iterator[Case]:
    for kind in ("pred", "b16", "b32", "b64"):
        yield Case(f"and.{kind}", (kind,), (kind, kind), lambda a, b: a & b)
        yield Case(f"or.{kind}", (kind,), (kind, kind), lambda a, b: a | b)
        yield Case(f"xor.{kind}", (kind,), (kind, kind), lambda a, b: a ^ b)
        yield Case(f"not.{kind}", (kind,), (kind,), (lambda a: not a) if kind == "pred" else lambda a: ~a)
    for kind in ("b16", "b32", "b64"):
        yield Case(f"cnot.{kind}", (kind,), (kind,), lambda a: int(a == 0))
        yield Case(f"shl.{kind}", (kind,), (kind, "u32:count"), lambda a, n: a << min(n, 64))
    for kind in ("b16", "b32", "b64", *INTEGERS):
        yield Case(f"shr.{kind}", (kind,), (kind, "u32:count"), lambda a, n: a >> n)
        for count in (8, 16, 5):
            yield Case(f"shr.{kind}", (kind,), (kind,), lambda a, n=count: a >> n, f"shr.{kind} {{0}}, {{1}}, {count}")
    for way, mode in itertools.product("lr", ("clamp", "wrap")):

        def funnel(a: int, b: int, n: int, left: bool = way == "l", cut: bool = mode == "clamp") -> int:
            n = min(n, 32) if cut else n & 31
            both = b << 32 | a
            return both << n >> 32 if left else both >> n

        yield Case(f"shf.{way}.{mode}.b32", ("b32",), ("b32", "b32", "u32:count"), funnel)
    for kind in ("u32", "s32", "u64", "s64"):
        bits = bits_of(kind)

        def field(a: int, start: int, length: int, kind: str = kind, bits: int = bits) -> int:
            start, length = start & 255, length & 255
            # PTX ISA, bfe: beyond the register the field is filled with the sign
            top = min(start + length - 1, bits - 1)
            sign = kind[0] == "s" and length > 0 and a >> top & 1
            found = [a >> (start + i) & 1 if start + i < bits else sign for i in range(length)]
            found += [sign] * (bits - length)
            return sum(bit << i for i, bit in enumerate(found[:bits]))

        yield Case(f"bfe.{kind}", (kind,), (kind, "u32:count", "u32:count"), field)
        for shiftamt in ("", ".shiftamt"):

            def find(a: int, bits: int = bits, shift: bool = bool(shiftamt)) -> int:
                a = ~a if a < 0 else a
                return -1 if a == 0 else bits - a.bit_length() if shift else a.bit_length() - 1

            yield Case(f"bfind{shiftamt}.{kind}", ("u32",), (kind,), find)
    for kind in ("b32", "b64"):
        bits = bits_of(kind)

        def insert(a: int, b: int, start: int, length: int, bits: int = bits) -> int:
            for i in range(length & 255):
                place = (start & 255) + i
                if place < bits:
                    b = b & ~(1 << place) | (a >> i & 1) << place
            return b

        yield Case(f"bfi.{kind}", (kind,), (kind, kind, "u32:count", "u32:count"), insert)
        yield Case(f"popc.{kind}", ("u32",), (kind,), int.bit_count)
        yield Case(f"clz.{kind}", ("u32",), (kind,), lambda a, bits=bits: bits - a.bit_length())
        yield Case(f"brev.{kind}", (kind,), (kind,), lambda a, bits=bits: int(f"{a:0{bits}b}"[::-1], 2))
    for table in (0x00, 0x80, 0xE8, 0x96, 0xCA, 0x1B, 0xFE, 0xFF):

        def logic(a: int, b: int, c: int, table: int = table) -> int:
            rows = (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1) for i in range(32))
            return sum((table >> row & 1) << i for i, row in enumerate(rows))

        yield Case("lop3.b32", ("b32",), ("b32",) * 3, logic, f"lop3.b32 {{0}}, {{1}}, {{2}}, {{3}}, {table:#x}")
    modes = {
        "f4e": lambda s: [s + i for i in range(4)],
        "b4e": lambda s: [(s - i) % 8 for i in range(4)],
        "rc8": lambda s: [s] * 4,
        "ecl": lambda s: [max(s, i) for i in range(4)],
        "ecr": lambda s: [min(s, i) for i in range(4)],
        "rc16": lambda s: [2 * (s & 1), 2 * (s & 1) + 1] * 2,
    }

    def permute(a: int, b: int, selector: int) -> int:
        both, out = b << 32 | a, 0
        for i in range(4):
            nibble = selector >> (4 * i) & 15
            byte = both >> (8 * (nibble & 7)) & 255
            out |= ((255 if byte & 128 else 0) if nibble & 8 else byte) << (8 * i)
        return out

    yield Case("prmt.b32", ("b32",), ("b32",) * 3, permute)
    yield Case(
        "prmt.b32", ("b32",), ("b32", "b32"), lambda a, b: permute(a, b, 0x5410), "prmt.b32 {0}, {1}, {2}, 0x5410"
    )
    for mode, pick in modes.items():
        yield Case(
            f"prmt.b32.{mode}",
            ("b32",),
            ("b32",) * 3,
            lambda a, b, s, pick=pick: permute(a, b, sum(n << (4 * i) for i, n in enumerate(pick(s & 3)))),
        )


def move_cases() -> Iterator[Case]:
    for kind in ("pred", "b16", "b32", "b64", *INTEGERS, "f32", "f64"):
        yield Case(f"mov.{kind}", (kind,), (kind,), lambda a: a)
        if kind != "pred":
            yield Case(f"selp.{kind}", (kind,), (kind, kind, "pred"), lambda a, b, p: a if p else b)
    for whole, part, count in (("b32", "b16", 2), ("b64", "b32", 2), ("b64", "b16", 4)):
        size = bits_of(part)
        names = ", ".join(f"{{{i}}}" for i in range(1, count + 1))
        yield Case(
            f"mov.{whole}",
            (whole,),
            (part,) * count,
            lambda *parts, size=size: sum(x << (size * i) for i, x in enumerate(parts)),
            f"mov.{whole} {{0}}, {{{{{names}}}}}",
        )
        names = ", ".join(f"{{{i}}}" for i in range(count))
        yield Case(
            f"mov.{whole}",
            (part,) * count,
            (whole,),
            lambda x, size=size, count=count: tuple(x >> (size * i) & ((1 << size) - 1) for i in range(count)),
            f"mov.{whole} {{{{{names}}}}}, {{{count}}}",
        )
    yield Case("mov.b64", ("b32",), ("b64",), lambda x: x >> 32, "mov.b64 {{_, {0}}}, {1}")
    constants = {
        "b32": ("-1", "0x80000000", "0f3F800000"),
        "s16": ("-3",),
        "b64": ("-2", "0d3FF0000000000000"),
        "pred": ("1",),
    }
    values = {"0f3F800000": 0x3F800000, "0d3FF0000000000000": 0x3FF0000000000000}
    for kind, texts in constants.items():
        for text in texts:
            value = values[text] if text in values else int(text, 0)
            yield Case(
                f"mov.{kind}",
                (kind,),
                (),
                lambda v=bool(value) if kind == "pred" else value: v,
                f"mov.{kind} {{0}}, {text}",
            )
    yield Case("mov.f64", ("f64",), (), lambda: -2.5, "mov.f64 {0}, 0dC004000000000000")
    yield Case("mov.f32", ("f32",), (), lambda: -2.5, "mov.f32 {0}, 0fC0200000")
    yield Case("cvta.global.u64", ("u64",), ("u64",), lambda a: a)
    yield Case("cvta.to.global.u64", ("u64",), ("u64",), lambda a: a)
    for space, kind in itertools.product(("", ".shared::cluster"), ("u32", "u64")):
        yield Case(f"mapa{space}.{kind}", (kind,), (kind,), lambda a: a, f"mapa{space}.{kind} {{0}}, {{1}}, 0")
    for first in ("evict_last", "evict_normal", "evict_first", "evict_unchanged"):
        for second in ("", ".L2::evict_first", ".L2::evict_unchanged"):
            opcode = f"createpolicy.fractional.L2::{first}{second}.b64"
            yield Case(opcode, ("b64",), (), lambda: None, f"{opcode} {{0}}, 0f3F800000")


# ---- comparisons ----

_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def compare(how: str, kind: str, ftz: bool = False) -> Callable[[Any, Any], bool]:
    def truth(a: Any, b: Any) -> bool:
        if kind[0] != "f":
            return _ORDER[_UNSIGNED.get(how, how)](a, b)
        if ftz:
            a, b = flushed(a), flushed(b)
        unordered = math.isnan(a) or math.isnan(b)
        if how in ("num", "nan"):
            return unordered == (how == "nan")
        if unordered:
            return how.endswith("u")
        return _ORDER[how.removesuffix("u")](a, b)

    return truth


def compare_cases() -> Iterator[Case]:
    for kind in ("b16", "b32", "b64", *INTEGERS, "f32", "f64"):
        names = ["eq", "ne"] if kind[0] == "b" else list(_ORDER)
        names += list(_UNSIGNED) if kind[0] == "u" else []
        if kind[0] == "f":
            names += [f"{name}u" for name in _ORDER] + ["num", "nan"]
        for how, ftz in itertools.product(names, ("", ".ftz") if kind == "f32" else ("",)):
            truth = compare(how, kind, bool(ftz))
            yield Case(f"setp.{how}{ftz}.{kind}", ("pred",), (kind, kind), truth)
            if how in ("eq", "ltu", "hi", "gt"):
                yield Case(
                    f"setp.{how}{ftz}.{kind}",
                    ("pred", "pred"),
                    (kind, kind),
                    lambda a, b, truth=truth: (truth(a, b), not truth(a, b)),
                    f"setp.{how}{ftz}.{kind} {{0}}|{{1}}, {{2}}, {{3}}",
                )
        for how, ftz in itertools.product(names, ("", ".ftz") if kind == "f32" else ("",)):
            every = ("and", "or", "xor")
            for combine in every if how in ("eq", "ne", "lt") else every[len(how + kind + ftz) % 3 :][:1]:
                both = {"and": lambda x, p: x and p, "or": lambda x, p: x or p, "xor": lambda x, p: x != p}[combine]
                truth = compare(how, kind, bool(ftz))
                opcode = f"setp.{how}.{combine}{ftz}.{kind}"
                yield Case(
                    opcode,
                    ("pred",),
                    (kind, kind, "pred"),
                    lambda a, b, p, f=truth, both=both: both(f(a, b), not p),
                    f"{opcode} {{0}}, {{1}}, {{2}}, !{{3}}",
                )
                yield Case(
                    opcode,
                    ("pred", "pred"),
                    (kind, kind, "pred"),
                    lambda a, b, p, f=truth, both=both: (both(f(a, b), p), both(not f(a, b), p)),
                    f"{opcode} {{0}}|{{1}}, {{2}}, {{3}}, {{4}}",
                )


# ---- floats ----


def flushed(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x


def nearest(
    x: Fraction, mode: str, zero: float = 0.0, mantissa: int = 24, smallest: int = -149, top: int = 128
) -> float:
    """A rational in a binary format: mantissa bits, exponents of its smallest number and of what is too large."""
    if x == 0:
        return zero
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    unit = Fraction(2) ** max(exponent - mantissa + 1, smallest)
    whole, rest = divmod(size / unit, 1)
    away = {"rm": x < 0, "rp": x > 0, "rz": False}.get(mode)
    up = (
        bool(rest) and away
        if away is not None
        else rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1)
    )
    size = (whole + up) * unit
    if size >= Fraction(2) ** top:
        inward = mode == "rz" or (mode == "rm" and x > 0) or (mode == "rp" and x < 0)
        size = Fraction(2) ** top - Fraction(2) ** (top - mantissa) if inward else math.inf
    return math.copysign(float(size), x)


def settled(value: float, ftz: bool, sat: bool) -> float:
    value = flushed(value) if ftz else value
    if sat:
        return 0.0 if not value > 0 else min(value, 1.0)
    return value


def exactly(name: str, mode: str, ftz: bool = False, sat: bool = False) -> Callable[..., float]:
    """add, sub, mul, fma of float32 with one rounding (IEEE 754; zeros that cancel are −0 only when rounding down)."""

    def truth(*operands: float) -> float:
        a, b, *rest = map(flushed, operands) if ftz else operands
        b = -b if name == "sub" else b
        terms = [(a, b)] if name in ("mul", "fma") else [(a, 1.0), (b, 1.0)]
        terms += [(c, 1.0) for c in rest]
        if not all(map(math.isfinite, operands)):
            return settled(sum(x * y for x, y in terms), ftz, sat)
        signs = {math.copysign(1, x) * math.copysign(1, y) for x, y in terms}
        negative = signs == {-1.0} or (len(signs) == 2 and mode == "rm")
        exact = sum((Fraction(x) * Fraction(y) for x, y in terms), Fraction(0))
        return settled(nearest(exact, mode, -0.0 if negative else 0.0), ftz, sat)

    return truth


def extreme(name: str, ftz: str, nan: str, magnitude: str, xorsign: str) -> Callable[..., float]:
    def truth(*operands: float) -> float:
        values = [flushed(x) if ftz else x for x in operands]
        if nan and any(map(math.isnan, values)):
            return math.nan
        sign = math.prod(math.copysign(1, x) for x in operands)
        values = [abs(x) if magnitude else x for x in values if not math.isnan(x)]
        if not values:
            return math.nan
        pick = min if name == "min" else max
        found = pick(values, key=lambda x: (x, math.copysign(1, x)))
        return math.copysign(found, sign) if xorsign else found

    return truth


def divided(mode: str, ftz: str) -> Callable[[float, float], float]:
    def truth(a: float, b: float) -> float:
        if ftz:
            a, b = flushed(a), flushed(b)
        if mode == "approx" and 2.0**126 < abs(b) < 2.0**128:
            return math.copysign(0.0, math.copysign(1, a) * math.copysign(1, b)) if math.isfinite(a) else math.nan
        if math.isnan(a) or math.isnan(b) or (math.isinf(a) and math.isinf(b)) or (a == 0 and b == 0):
            return math.nan
        sign = math.copysign(1, a) * math.copysign(1, b)
        if math.isinf(a) or b == 0:
            return sign * math.inf
        if math.isinf(b) or a == 0:
            return math.copysign(0.0, sign)
        rounding = mode if mode in ROUNDINGS else "rn"
        result = nearest(Fraction(a) / Fraction(b), rounding)
        return flushed(result) if ftz else result

    return truth


def root(mode: str, ftz: str) -> Callable[[float], float]:
    def truth(x: float) -> float:
        x = flushed(x) if ftz else x
        if math.isnan(x) or x < 0:
            return math.nan
        if x == 0 or math.isinf(x):
            return x
        # 80 bits of the root, and a sticky one below
        value = Fraction(x) * 4**200
        whole = math.isqrt(int(value))
        exact = Fraction(whole) + (Fraction(1, 2) if whole * whole != value else 0)
        return nearest(exact / 2**200, mode if mode in ROUNDINGS else "rn")

    return truth


def function(name: str, ftz: str) -> Callable[[float], float]:
    """In double precision, then rounded; the ISA bounds the error of these, it does not fix the last bits."""

    def truth(x: float) -> float:
        x = flushed(x) if ftz else x
        with np.errstate(all="ignore"):
            y = {
                "ex2": np.exp2,
                "lg2": np.log2,
                "rsqrt": lambda v: 1 / np.sqrt(v),
                "sin": np.sin,
                "cos": np.cos,
                "tanh": np.tanh,
            }[name](np.float64(x))
            result = float(np.float32(y))
        if name == "rsqrt" and x == 0:
            result = math.copysign(math.inf, x)
        return flushed(result) if ftz else result

    return truth


def pairwise(function: Callable[..., float]) -> Callable[..., int]:
    def truth(*operands: int) -> int | None:
        halves = []
        for shift in (0, 32):
            value = function(*(as_float(x >> shift & 0xFFFFFFFF) for x in operands))
            if math.isnan(value):
                return None  # any payload will do
            halves.append(as_bits(value))
        return halves[1] << 32 | halves[0]

    return truth


def as_float(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def as_bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def float_cases() -> Iterator[Case]:
    flags = ("", ".ftz"), ("", ".sat")
    for name, mode, ftz, sat in itertools.product(("add", "sub", "mul"), ("", *ROUNDINGS), *flags):
        rounding = f".{mode}" if mode else ""
        yield Case(
            f"{name}{rounding}{ftz}{sat}.f32",
            ("f32",),
            ("f32", "f32"),
            exactly(name, mode or "rn", bool(ftz), bool(sat)),
        )
        if not sat:
            truth = pairwise(exactly(name, mode or "rn", bool(ftz)))
            yield Case(f"{name}{rounding}{ftz}.f32x2", ("f32x2",), ("f32x2", "f32x2"), truth)
    for mode, ftz, sat in itertools.product(ROUNDINGS, *flags):
        truth = exactly("fma", mode, bool(ftz), bool(sat))
        yield Case(f"fma.{mode}{ftz}{sat}.f32", ("f32",), ("f32",) * 3, truth)
        yield Case(f"mad.{mode}{ftz}{sat}.f32", ("f32",), ("f32",) * 3, truth)
        if not sat:
            yield Case(f"fma.{mode}{ftz}.f32x2", ("f32x2",), ("f32x2",) * 3, pairwise(truth))
    for name, ftz, nan in itertools.product(("min", "max"), ("", ".ftz"), ("", ".NaN")):
        for sign, magnitude in (("", ""), (".xorsign", ".abs")):
            truth = extreme(name, ftz, nan, magnitude, sign)
            yield Case(f"{name}{ftz}{nan}{sign}{magnitude}.f32", ("f32",), ("f32", "f32"), truth)
        for magnitude in ("", ".abs"):
            truth = extreme(name, ftz, nan, magnitude, "")
            yield Case(f"{name}{ftz}{nan}{magnitude}.f32", ("f32",), ("f32",) * 3, truth)
    for kind, mode, sat in itertools.product(("f16", "bf16"), ROUNDINGS, ("", ".sat")):
        for name in ("add", "sub"):
            rounding = "" if (mode, kind) == ("rn", "f16") else f".{mode}"
            truth = exactly(name, mode, False, bool(sat))
            mixed = lambda a, b, f=truth, k=kind: f(shown(a, k), b)  # noqa: E731
            yield Case(f"{name}{rounding}{sat}.f32.{kind}", ("f32",), (kind, "f32"), mixed)
        truth = exactly("fma", mode, False, bool(sat))
        mixed = lambda a, b, c, f=truth, k=kind: f(shown(a, k), shown(b, k), c)  # noqa: E731
        yield Case(f"fma.{mode}{sat}.f32.{kind}", ("f32",), (kind, kind, "f32"), mixed)
    for ftz in ("", ".ftz"):
        cut = flushed if ftz else float
        yield Case(f"neg{ftz}.f32", ("f32",), ("f32",), lambda x, cut=cut: -cut(x))
        yield Case(f"abs{ftz}.f32", ("f32",), ("f32",), lambda x, cut=cut: abs(cut(x)))
        for mode in (*ROUNDINGS, "full", "approx"):
            yield Case(
                f"div.{mode}{ftz}.f32", ("f32",), ("f32", "f32"), divided(mode, ftz), slack=2 * (mode not in ROUNDINGS)
            )
        for mode in (*ROUNDINGS, "approx"):
            one = divided(mode if mode != "approx" else "rn", ftz)
            yield Case(f"rcp.{mode}{ftz}.f32", ("f32",), ("f32",), lambda x, f=one: f(1.0, x), slack=mode == "approx")
            yield Case(f"sqrt.{mode}{ftz}.f32", ("f32",), ("f32",), root(mode, ftz), slack=mode == "approx")
        for name in ("ex2", "lg2", "rsqrt", "sin", "cos"):
            yield Case(f"{name}.approx{ftz}.f32", ("f32",), ("f32:moderate",), function(name, ftz), slack=2)
    yield Case("tanh.approx.f32", ("f32",), ("f32:moderate",), function("tanh", ""), slack=2)
    tests = {
        "finite": math.isfinite,
        "infinite": math.isinf,
        "number": lambda x: not math.isnan(x),
        "notanumber": math.isnan,
    }
    for name, test in tests.items():
        yield Case(f"testp.{name}.f32", ("pred",), ("f32",), test)
    yield Case("copysign.f32", ("f32",), ("f32", "f32"), lambda a, b: math.copysign(b, a))


# ---- conversions ----

SMALL: dict[str, tuple[Any, float]] = {
    "e2m1": (ml_dtypes.float4_e2m1fn, 6.0),
    "e2m3": (ml_dtypes.float6_e2m3fn, 7.5),
    "e3m2": (ml_dtypes.float6_e3m2fn, 28.0),
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0),
}


def code(x: float, name: str, relu: bool) -> int:
    """`.rn.satfinite`: nearest, NaN to the format's NaN, or its largest value where it has none."""
    kind, top = SMALL[name]
    if math.isnan(x):
        return {"e4m3": 0x7F, "e5m2": 0x7F}.get(name, {"e2m1": 7, "e2m3": 31, "e3m2": 31}.get(name, 0))
    if relu and not x > 0:
        return 0
    return int(np.array(max(-top, min(top, x))).astype(np.float32).astype(kind).view(np.uint8))


def shown(bits: int, kind: str) -> float:
    """The value of a code."""
    if kind == "f16":
        return float(np.uint16(bits).view(np.float16))
    if kind == "bf16":
        return as_float(bits << 16)
    return float(np.array(bits, np.uint8).view(SMALL[kind][0]).astype(np.float32))


def halved(x: float, kind: str, mode: str, relu: bool, satfinite: bool) -> int:
    """float32 → f16 or bf16 bits."""
    if math.isnan(x):
        return 0x7FFF
    top = 16 if kind == "f16" else 128
    mantissa, smallest = (11, -24) if kind == "f16" else (8, -133)
    limit = 2.0**top - 2.0 ** (top - mantissa)
    value = x if math.isinf(x) else nearest(Fraction(x), mode, x, mantissa, smallest, top)
    if satfinite:
        value = max(-limit, min(limit, value))
    if relu and math.copysign(1, value) < 0:
        value = 0.0
    return int(np.float16(value).view(np.uint16)) if kind == "f16" else as_bits(value) >> 16


def power(x: float, up: bool) -> int:
    """UE8M0."""
    if math.isnan(x):
        return 255
    if math.isinf(x):
        return 254
    exponent = -127 if x == 0 else math.frexp(abs(x))[1] - 1
    exponent += up and x != 0 and abs(x) > 2.0**exponent
    return min(max(exponent, -127), 127) + 127


def pairs(function: Callable[[float], int], bits: int) -> Callable[[float, float], int]:
    return lambda a, b: function(a) << bits | function(b)


def whole(x: float, rounding: str, ftz: bool = False) -> float:
    x = flushed(x) if ftz else x
    if not math.isfinite(x):
        return x
    below = math.floor(x)
    if rounding == "rni":
        rest = Fraction(x) - below
        result = below + (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and below % 2 == 1))
    else:
        result = {"rzi": math.trunc(x), "rmi": below, "rpi": math.ceil(x)}[rounding]
    return math.copysign(float(result), x)


def integral(x: float, rounding: str, kind: str, source: str, ftz: bool) -> int:
    if math.isnan(x):  # PTX ISA, cvt: 0, or the integer indefinite of 64-bit destinations and f64 sources
        wide = bits_of(kind) == 64 or source == "f64"
        return (1 << (bits_of(kind) - 1)) if wide else 0
    if math.isinf(x):
        return clamp(int(math.copysign(1 << 70, x)), kind)
    return clamp(int(whole(x, rounding, ftz)), kind)


def conversion_cases() -> Iterator[Case]:
    for name, relu in itertools.product(SMALL, ("", ".relu")):
        bits = 4 if name == "e2m1" else 8
        narrow = pairs(lambda x, n=name, r=bool(relu): code(x, n, r), bits)
        out, byte = ("b32", True) if name == "e2m1" else ("b16", False)
        for source in ("f32", "f16x2", "bf16x2"):
            opcode = f"cvt.rn.satfinite{relu}.{name}x2.{source}"
            if source == "f32":
                ins: tuple[str, ...] = ("f32:small", "f32:small")
                truth: Callable[..., Any] = narrow
            else:
                ins = (source,)
                truth = lambda x, f=narrow, k=source[:-2]: f(shown(x >> 16, k), shown(x & 0xFFFF, k))  # noqa: E731
            text = f"{opcode} {', '.join(f'{{{i}}}' for i in range(1 + len(ins)))}"
            if byte:  # to a .b8 register, which only mov takes on
                text = text.replace("{0}", "%b0") + "; mov.b32 {0}, {{%b0, %b1, %b1, %b1}}"
            yield Case(opcode, (out,), ins, truth, text)
        opcode = f"cvt.rn{relu}.f16x2.{name}x2"
        mask = (1 << bits) - 1 if name in ("e2m1", "e4m3", "e5m2") else 63

        def widen(x: int, n: str = name, b: int = bits, m: int = mask, r: bool = bool(relu)) -> int:
            return halved(shown(x >> b & m, n), "f16", "rn", r, False) << 16 | halved(
                shown(x & m, n), "f16", "rn", r, False
            )

        text = "mov.b32 {{%b0, _, _, _}}, {1}; " + f"{opcode} {{0}}, %b0" if byte else ""
        yield Case(opcode, ("f16x2",), ("b32" if byte else "b16",), widen, text)
    for mode in ("rp", "rz"):
        for sat in ("", ".satfinite"):
            truth = pairs(lambda x, up=mode == "rp": power(x, up), 8)
            yield Case(f"cvt.{mode}{sat}.ue8m0x2.f32", ("b16",), ("f32", "f32"), truth)

    def scale(x: int) -> int:
        return 0x7FFF if x == 255 else as_bits(2.0 ** (x - 127)) >> 16

    yield Case("cvt.rn.bf16x2.ue8m0x2", ("bf16x2",), ("b16",), lambda x: scale(x >> 8) << 16 | scale(x & 255))
    for kind, mode, relu, sat in itertools.product(("f16", "bf16"), ("rn", "rz"), ("", ".relu"), ("", ".satfinite")):
        one = lambda x, k=kind, m=mode, r=bool(relu), s=bool(sat): halved(x, k, m, r, s)  # noqa: E731
        yield Case(f"cvt.{mode}{relu}{sat}.{kind}.f32", (kind,), ("f32:half",), one)
        yield Case(f"cvt.{mode}{relu}{sat}.{kind}x2.f32", (f"{kind}x2",), ("f32:half", "f32:half"), pairs(one, 16))
    for kind in ("f16", "bf16"):
        yield Case(f"cvt.f32.{kind}", ("f32",), (kind,), lambda x, k=kind: shown(x, k))
    yield Case("cvt.ftz.f32.f16", ("f32",), ("f16",), lambda x: flushed(shown(x, "f16")))
    yield Case("cvt.f64.f32", ("f64",), ("f32",), float)
    for mode, ftz, sat in itertools.product(ROUNDINGS, ("", ".ftz"), ("", ".sat")):

        def single(x: float, mode: str = mode, ftz: bool = bool(ftz), sat: bool = bool(sat)) -> float:
            value = nearest(Fraction(x), mode, x) if math.isfinite(x) else x
            return settled(value, ftz, sat)

        yield Case(f"cvt.{mode}{ftz}{sat}.f32.f64", ("f32",), ("f64",), single)
    for ftz, sat in itertools.product(("", ".ftz"), ("", ".sat")):
        yield Case(f"cvt{ftz}{sat}.f32.f32", ("f32",), ("f32",), lambda x, f=bool(ftz), s=bool(sat): settled(x, f, s))
        for mode in ("rni", "rzi", "rmi", "rpi"):
            yield Case(
                f"cvt.{mode}{ftz}{sat}.f32.f32",
                ("f32",),
                ("f32:half",),
                lambda x, m=mode, f=bool(ftz), s=bool(sat): settled(whole(x, m, f), f, s),
            )
            for kind in ("u8", "s8", *INTEGERS):
                yield Case(
                    f"cvt.{mode}{ftz}{sat}.{kind}.f32",
                    (kind,),
                    ("f32:half",),
                    lambda x, m=mode, k=kind, f=bool(ftz): integral(x, m, k, "f32", f),
                )
    for mode, sat, kind in itertools.product(("rni", "rzi", "rmi", "rpi"), ("", ".sat"), ("u8", "s8", *INTEGERS)):
        opcode = f"cvt.{mode}{sat}.{kind}"
        yield Case(f"{opcode}.f64", (kind,), ("f64",), lambda x, m=mode, k=kind: integral(x, m, k, "f64", False))
        yield Case(
            f"{opcode}.f16", (kind,), ("f16",), lambda x, m=mode, k=kind: integral(shown(x, "f16"), m, k, "f16", False)
        )
    for mode, kind in itertools.product(ROUNDINGS, ("u8", "s8", *INTEGERS)):
        yield Case(f"cvt.{mode}.f32.{kind}", ("f32",), (kind,), lambda x, m=mode: nearest(Fraction(x), m))
        yield Case(
            f"cvt.{mode}.f64.{kind}", ("f64",), (kind,), lambda x, m=mode: nearest(Fraction(x), m, 0.0, 53, -1074, 1024)
        )
    for to, source in itertools.product(("u8", "s8", *INTEGERS), repeat=2):
        yield Case(f"cvt.{to}.{source}", (to,), (source,), lambda x: x)
        if clamp(-1, source) < clamp(-1, to) or clamp(1 << 64, source) > clamp(1 << 64, to):  # .sat is for these only
            yield Case(f"cvt.sat.{to}.{source}", (to,), (source,), lambda x, k=to: clamp(x, k))


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "integers": integer_cases,
    "bits": bit_cases,
    "moves": move_cases,
    "comparisons": compare_cases,
    "floats": float_cases,
    "conversions": conversion_cases,
}
