"""Floating-point arithmetic against exact rationals."""

import itertools
import math
import operator
from fractions import Fraction

import numpy as np
import pytest

from wanfp4.simulator import arithmetic, conversions
from wanfp4.simulator.findings import UnknownInstruction

ROUNDINGS = ("rn", "rz", "rm", "rp")


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


def f32(*values):
    return np.array(values, np.float32)


def u32(*values):
    return np.array(values, np.uint32)


def same(a, b):
    """Equal bit by bit, except that any NaN equals any NaN."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    wrong = (a.view(np.uint32) != b.view(np.uint32)) & ~(np.isnan(a) & np.isnan(b))
    assert not wrong.any(), (a[wrong][:5], b[wrong][:5])


def nearest_float32(x: Fraction, mode: str, zero: float = 0.0) -> np.float32:
    """A rational rounded to float32; `zero` is what an exact zero becomes."""
    if x == 0:
        return np.float32(zero)
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    whole, rest = divmod(size / quantum, 1)
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1),
        "rz": False,
        "rm": rest > 0 and x < 0,
        "rp": rest > 0 and x > 0,
    }[mode]
    size = (whole + up) * quantum
    if size >= Fraction(2) ** 128:
        inward = mode == "rz" or (mode == "rm" and x > 0) or (mode == "rp" and x < 0)
        size = Fraction(float(np.finfo(np.float32).max)) if inward else math.inf
    return np.float32(math.copysign(float(size), x))


def random_bits(n, seed):
    """Random bit patterns, finite: all exponents, subnormals included."""
    x = np.random.default_rng(seed).integers(0, 2**32, 2 * n, dtype=np.uint64).astype(np.uint32).view(np.float32)
    return x[np.isfinite(x)][:n]


def fma_cases():
    """Random values of all sizes and of close exponents, sums that are nearly ties, and subnormal results."""
    rng = np.random.default_rng(1)
    parts = [[random_bits(2000, s) for s in (2, 3, 4)]]
    parts.append([np.ldexp(rng.standard_normal(2000), rng.integers(-3, 4, 2000)).astype(np.float32) for _ in range(3)])
    # 13 odd bits times 12 odd bits is often a middle of two float32; a tiny addend decides it.
    for shift, tiny in itertools.product((0, -74, -140), (0, 30, 31, 33, 45, 60)):
        a = np.ldexp(rng.integers(2**12, 2**13, 200) | 1, 0).astype(np.float32)
        b = np.ldexp((rng.integers(2**11, 2**12, 200) | 1).astype(np.float64), shift).astype(np.float32)
        c = np.ldexp(rng.choice([-1.0, 1.0], 200), shift + 24 - tiny) if tiny else np.zeros(200)
        parts.append([a, b, c.astype(np.float32)])
    return [np.concatenate([part[i] for part in parts]) for i in range(3)]


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_fma_rounds_once(rounding):
    a, b, c = fma_cases()
    got = arithmetic.fma_f32(a, b, c, rounding)
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    zero = a.astype(np.float64) * b + c  # signs of exact zeros, to nearest
    if rounding == "rm":
        zero = np.where(np.signbit(a) ^ np.signbit(b) | np.signbit(c), -0.0, 0.0)
    want = [nearest_float32(x, rounding, z) for x, z in zip(exact, zero, strict=True)]
    same(got, want)
    if rounding == "rn":  # the cases are hard enough: rounding through float64 fails some
        naive = (a.astype(np.float64) * b + c).astype(np.float32)
        hard = np.flatnonzero(naive != got)
        assert len(hard) > 100
        for i in hard:  # each is noticed by itself
            same(arithmetic.fma_f32(a[i : i + 1], b[i : i + 1], c[i : i + 1]), got[i : i + 1])


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "sqrt"])
def test_roundings(name, rounding):
    a, b = (
        np.concatenate((random_bits(1500, 5), f32(1, 3, 1e-45))),
        np.concatenate((random_bits(1500, 6), f32(3, 7, 2))),
    )
    close = np.abs(b).view(np.uint32) % 7 == 0  # operands of like size too
    b = np.where(close, np.ldexp(a, (b.view(np.uint32) % 50).astype(np.int32) - 25), b).astype(np.float32)
    b[b == 0] = 1
    keep = np.isfinite(b)
    a, b = a[keep], b[keep]
    x, y = [Fraction(float(v)) for v in a], [Fraction(float(v)) for v in b]
    if name == "sqrt":
        got = arithmetic.sqrt_f32(np.abs(a), rounding)
        for root, value in zip(got.tolist(), x, strict=True):  # neighbours bracket the root
            low, high = (Fraction(float(np.nextafter(np.float32(root), s))) for s in f32(-np.inf, np.inf))
            root, value = Fraction(root), abs(value)
            if rounding == "rn":
                assert ((low + root) / 2) ** 2 <= value <= ((high + root) / 2) ** 2
            elif rounding == "rp":
                assert max(low, 0) ** 2 < value <= root**2
            else:
                assert root**2 <= value < high**2
        return
    function = {
        "add": lambda p, q: p + q,
        "sub": lambda p, q: p - q,
        "mul": lambda p, q: p * q,
        "div": lambda p, q: p / q,
    }
    zero = {"add": a + b, "sub": a - b, "mul": a * b, "div": a / b}[name]
    if rounding == "rm" and name in ("add", "sub"):
        zero = np.where(np.signbit(a) | (np.signbit(b) ^ (name == "sub")), -0.0, 0.0)
    want = [nearest_float32(function[name](p, q), rounding, z) for p, q, z in zip(x, y, zero, strict=True)]
    same(getattr(arithmetic, f"{name}_f32")(a, b, rounding), want)


def test_special_values():
    inf, nan = np.inf, np.nan
    for rounding in ROUNDINGS:
        same(
            arithmetic.fma_f32(f32(inf, inf, 0, nan, 1), f32(1, 0, inf, 1, 1), f32(-1, 1, 1, 1, -inf), rounding),
            f32(inf, nan, nan, nan, -inf),
        )
        same(arithmetic.add_f32(f32(inf, inf, -inf), f32(-inf, 1, 1), rounding), f32(nan, inf, -inf))
        same(arithmetic.div_f32(f32(1, -1, 0, inf), f32(0, 0, 0, inf), rounding), f32(inf, -inf, nan, nan))
    assert np.signbit(arithmetic.add_f32(f32(2), f32(-2), "rm"))[0]
    assert not np.signbit(arithmetic.add_f32(f32(2), f32(-2), "rp"))[0]


def test_flush_and_saturate():
    tiny = f32(1e-39, -1e-39, 2.0**-126, -(2.0**-126), 0.0, -0.0)
    flushed = f32(0.0, -0.0, 2.0**-126, -(2.0**-126), 0.0, -0.0)
    same(arithmetic.flush(tiny), flushed)
    same(arithmetic.mul_f32(tiny, f32(*[1.0] * 6), ftz=True), flushed)
    same(arithmetic.mul_f32(f32(2.0**-100), f32(-(2.0**-30)), ftz=True), f32(-0.0))
    same(arithmetic.mul_f32(f32(2.0**-100), f32(-(2.0**-30))), f32(-(2.0**-130)))
    same(arithmetic.fma_f32(f32(1e-39), f32(2.0**100), f32(1), ftz=True), f32(1))
    same(arithmetic.add_f32(f32(0.25, 2, -1, np.nan, -0.0), f32(0.5, 0, 0, 0, -0.0), sat=True), f32(0.75, 1, 0, 0, 0))
    same(arithmetic.neg_f32(tiny, ftz=True), -flushed)
    same(arithmetic.abs_f32(tiny, ftz=True), np.abs(flushed))


def test_packed_pairs():
    a, b, c = (random_bits(64, s) for s in (7, 8, 9))
    wide = [x.view(np.uint64) for x in (a, b, c)]
    same(arithmetic.fma_f32x2(*wide).view(np.float32), arithmetic.fma_f32(a, b, c))
    same(arithmetic.add_f32x2(*wide[:2], "rm").view(np.float32), arithmetic.add_f32(a, b, "rm"))
    same(arithmetic.sub_f32x2(*wide[:2]).view(np.float32), a - b)
    same(arithmetic.mul_f32x2(*wide[:2], ftz=True).view(np.float32), arithmetic.mul_f32(a, b, ftz=True))


def test_exponentials_and_roots():
    whole = np.arange(-149, 128, dtype=np.float32)
    same(arithmetic.ex2_f32(whole), np.ldexp(np.float32(1), whole.astype(np.int32)))
    same(
        arithmetic.ex2_f32(whole, ftz=True), np.where(whole < -126, 0, np.ldexp(np.float32(1), whole.astype(np.int32)))
    )
    edge = f32(-126, np.nextafter(f32(-126), f32(-127))[0], -np.inf, np.inf, np.nan, 1e-40, -1e-40, 128, 127.99999)
    same(arithmetic.ex2_f32(edge, ftz=True)[:8], f32(2.0**-126, 0, 0, np.inf, np.nan, 1, 1, np.inf))
    same(arithmetic.lg2_f32(np.ldexp(np.float32(1), whole.astype(np.int32))), whole)
    same(
        arithmetic.lg2_f32(f32(0, -0.0, -1, np.inf, np.nan, 1e-40), ftz=True),
        f32(-np.inf, -np.inf, np.nan, np.inf, np.nan, -np.inf),
    )
    same(
        arithmetic.rcp_f32(f32(0, -0.0, np.inf, 1e-40, -1e-40, 2.0**127), ftz=True),
        f32(np.inf, -np.inf, 0, np.inf, -np.inf, 0),
    )
    same(arithmetic.rcp_f32(f32(3), "rp"), nearest_float32(Fraction(1, 3), "rp"))
    same(arithmetic.rsqrt_f32(f32(4, 0, -0.0, -1, np.inf)), f32(0.5, np.inf, -np.inf, np.nan, 0))
    same(arithmetic.tanh_f32(f32(0, -0.0, np.inf, -np.inf)), f32(0, -0.0, 1, -1))
    same(arithmetic.sin_f32(f32(0, np.inf)), f32(0, np.nan))
    same(arithmetic.cos_f32(f32(0, np.inf)), f32(1, np.nan))
    same(
        arithmetic.div_f32(f32(1, np.inf, 3), f32(2.0**127, 2.0**127, 2.0**126), "approx"),
        f32(0, np.nan, 3 * 2.0**-126),
    )
    # The correctly rounded exponential, by rational bounds of a short series.
    x = f32(0.3, -7.7, 55.123, -100.01)
    for value, got in zip(x, arithmetic.ex2_f32(x), strict=True):
        exact = Fraction(0)
        fraction, exponent = Fraction(float(value)) % 1, math.floor(float(value))
        ln2 = Fraction("0.693147180559945309417232121458176568075500134360255254120680009")
        term = Fraction(1)
        for i in range(1, 40):
            exact += term
            term = term * fraction * ln2 / i
        assert got == nearest_float32(exact * Fraction(2) ** exponent, "rn")


def test_min_max():
    values = f32(0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-40, -1e-40)
    a, b = (x.reshape(-1) for x in np.meshgrid(values, values))
    canonical = u32(0x7FFFFFFF).view(np.float32)[0]

    def key(x):
        return (x, not np.signbit(x))

    for op, function in (("max", arithmetic.max_f32), ("min", arithmetic.min_f32)):
        pick = {"max": max, "min": min}[op]
        for nan in (False, True):
            want = []
            for x, y in zip(a, b, strict=True):
                live = [v for v in (x, y) if not np.isnan(v)]
                want.append(canonical if not live or (nan and len(live) < 2) else pick(live, key=key))
            got = function(a, b, nan=nan)
            assert (got.view(np.uint32) == np.array(want, np.float32).view(np.uint32)).all()
            same(function(a, b, a[::-1], nan=nan), function(got, a[::-1], nan=nan))
            for i in range(len(a)):  # alone: NaN in other lanes must not matter
                same(function(a[i : i + 1], b[i : i + 1], nan=nan), got[i : i + 1])
    same(arithmetic.max_f32(f32(1e-40), f32(-1), ftz=True), f32(0))
    same(arithmetic.max_f32(f32(-5, 2), f32(3, -7), f32(1, 1), magnitude=True), f32(5, 7))
    same(arithmetic.min_f32(f32(-5, -2), f32(3, -7), xorsign=True), f32(-3, 2))


def test_comparisons():
    values = f32(1, 2, np.nan, 0.0, -0.0)
    a, b = (x.reshape(-1) for x in np.meshgrid(values, values))
    ordered = ~(np.isnan(a) | np.isnan(b))
    for op in ("eq", "ne", "lt", "le", "gt", "ge"):
        plain = getattr(operator, op)(a, b)
        assert (arithmetic.compare_float(op, a, b) == (plain & ordered)).all(), op
        assert (arithmetic.compare_float(f"{op}u", a, b) == (plain | ~ordered)).all(), op
    assert (arithmetic.compare_float("num", a, b) == ordered).all()
    assert (arithmetic.compare_float("nan", a, b) == ~ordered).all()
    assert arithmetic.compare_float("eq", f32(1e-40), f32(0), ftz=True).all()
    with pytest.raises(KeyError):
        arithmetic.compare_float("equal", a, b)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64, np.int16, np.uint8])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_int_to_float(dtype, rounding):
    info, rng = np.iinfo(dtype), np.random.default_rng(12)
    x = rng.integers(info.min, info.max, 500, dtype=dtype, endpoint=True)
    ties = [v for v in (2**24 + 1, 2**24 + 3, 2**31 - 1, 2**40 + 2**16, 2**40 + 2**16 + 1, 2**63 + 1) if v <= info.max]
    x = np.concatenate((x, x >> dtype(info.bits // 2), np.array([0, info.min, info.max, *ties], dtype)))
    got = conversions.int_to_float(x, rounding)
    same(got, [nearest_float32(Fraction(int(v)), rounding) for v in x])
    for v, double in zip(x.tolist(), conversions.int_to_float(x, rounding, np.float64), strict=True):
        low, high = (int(np.nextafter(double, side)) for side in (-np.inf, np.inf))
        near = int(double)
        if rounding == "rn":
            assert abs(near - v) <= min(abs(low - v), abs(high - v))
        elif rounding == "rm" or (rounding == "rz" and v >= 0):
            assert near <= v < max(high, near + 1)
        else:
            assert min(low, near - 1) < v <= near
    if rounding != "rn":
        with pytest.raises(UnknownInstruction):
            conversions.int_to_float(x, rounding, np.float16)


def test_double_to_single():
    x = np.array([1 + 2.0**-24, 1 + 3 * 2.0**-24, -(1 + 2.0**-30), 1e300, 1e-300])
    for rounding in ROUNDINGS:
        same(conversions.f64_to_f32(x, rounding), [nearest_float32(Fraction(v), rounding) for v in x.tolist()])
