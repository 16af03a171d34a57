"""Conversions against ml_dtypes, for all codes and around all ties, and against brute force."""

import math

import ml_dtypes
import numpy as np
import pytest

from wanfp4.simulator import conversions


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


def f32(*values):
    return np.array(values, np.float32)


def same(a, b):
    """Equal bit by bit, except that any NaN equals any NaN."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    wrong = (a.view(np.uint32) != b.view(np.uint32)) & ~(np.isnan(a) & np.isnan(b))
    assert not wrong.any(), (a[wrong][:5], b[wrong][:5])


def random_bits(n, seed):
    """Random bit patterns, finite: all exponents, subnormals included."""
    x = np.random.default_rng(seed).integers(0, 2**32, 2 * n, dtype=np.uint64).astype(np.uint32).view(np.float32)
    return x[np.isfinite(x)][:n]


def interesting():
    """All upper halves of float32 with low halves around ties of every format."""
    high = np.arange(65536, dtype=np.uint32) << 16
    return np.concatenate([high | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(np.float32)


SMALL = {
    "e2m1": (ml_dtypes.float4_e2m1fn, 6.0, 7),
    "e2m3": (ml_dtypes.float6_e2m3fn, 7.5, 31),
    "e3m2": (ml_dtypes.float6_e3m2fn, 28.0, 31),
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0, 0x7F),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0, 0x7F),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_formats(name):
    dtype, largest, nan = SMALL[name]
    x = interesting()
    want = np.clip(x, -largest, largest).astype(dtype).view(np.uint8)
    want = np.where(np.isnan(x), nan, want)
    assert (conversions.encode(x, name) == want).all()
    relu = np.where(np.signbit(x) & ~np.isnan(x), 0, want)
    assert (conversions.encode(x, name, relu=True) == relu).all()
    table = getattr(conversions, name.upper())
    codes = np.arange(len(table), dtype=np.uint8)
    same(table, codes.view(dtype).astype(np.float32))
    back = conversions.encode(table, name)  # every finite code survives
    finite = np.isfinite(table)
    assert (back[finite] == codes[finite]).all()


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("relu", [False, True])
def test_packing_order(name, relu):
    """d[upper] = a, d[lower] = b (PTX ISA, cvt), and back through f16x2."""
    a, b = f32(1.5, -2, np.nan, 0.1, -0.0), f32(-3, 4, 1, -100, np.inf)
    packed = getattr(conversions, f"to_{name}x2")(a, b, relu)
    width = 4 if name == "e2m1" else 8
    assert packed.dtype == (np.uint8 if width == 4 else np.uint16)
    high, low = conversions.encode(a, name, relu), conversions.encode(b, name, relu)
    assert (packed == high.astype(np.uint16) << width | low).all()
    wide = getattr(conversions, f"{name}x2_to_f16x2")(packed)
    table = getattr(conversions, name.upper())
    upper, lower = conversions.halves(wide, "f16")
    same(upper, table[high])
    same(lower, table[low])
    clamped = getattr(conversions, f"{name}x2_to_f16x2")(packed, relu=True)
    same(conversions.halves(clamped, "f16")[1], np.where(np.signbit(table[low]), np.float32(0), table[low]))


def test_ue8m0():
    x = np.concatenate(
        (
            np.abs(random_bits(4000, 10)),
            np.ldexp(f32(1), np.arange(-149, 128)),
            f32(0, 2.0**-127, 3 * 2.0**-128, np.inf),
        )
    )
    values = conversions.UE8M0.astype(np.float64)
    up = (conversions.to_ue8m0x2(x, x, "rp") & 0xFF).astype(int)
    down = (conversions.to_ue8m0x2(x, x, "rz") & 0xFF).astype(int)
    for v, u, d in zip(x.astype(np.float64), up, down, strict=True):
        assert u == min(next((c for c in range(255) if values[c] >= v), 254), 254)
        assert d == max((c for c in range(255) if values[c] <= v), default=0)
    both = conversions.to_ue8m0x2(f32(np.nan, -3, 1), f32(2, 2, -np.nan), "rp")
    assert (both == [0xFF80, 0x8180, 0x7FFF]).all()
    assert (conversions.to_ue8m0x2(-x, -x, "rz") & 0xFF == down).all()
    codes = np.arange(255, dtype=np.uint16)
    high, low = conversions.halves(conversions.ue8m0x2_to_bf16x2(codes | 255 << 8), "bf16")
    same(low, conversions.UE8M0[:255])
    assert np.isnan(high).all()
    same(conversions.UE8M0, np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32))


def test_bf16():
    x = interesting()
    want = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    want = np.where(np.isnan(x), 0x7FFF, want)
    assert (conversions.to_bf16(x) == want).all()
    finite = np.where((want & 0x7FFF) == 0x7F80, want - 1, want)
    assert (conversions.to_bf16(x, satfinite=True) == finite).all()
    assert (conversions.to_bf16(x, relu=True) == np.where(np.signbit(x) & ~np.isnan(x), 0, want)).all()
    cut = np.where(np.isnan(x), 0x7FFF, x.view(np.uint32) >> 16)
    assert (conversions.to_bf16(x, "rz") == cut).all()
    same(
        conversions.from_bf16(want.astype(np.uint16)),
        want.astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32),
    )
    packed = conversions.to_bf16x2(f32(1, np.nan), f32(-2, 3))
    assert (packed == [0x3F80C000, 0x7FFF4040]).all()


def test_f16():
    halves = np.arange(65536, dtype=np.uint16)
    values = conversions.from_f16(halves)
    back = conversions.to_f16(values)
    assert (back == np.where(np.isnan(values), 0x7FFF, halves)).all()
    finite = values[: 0x7BFF + 1].astype(np.float64)  # ascending
    middle = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    low = np.arange(0x7BFF, dtype=np.uint16)
    assert (conversions.to_f16(middle) == low + (low & 1)).all()  # ties to even
    above, below = np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(0))
    assert (conversions.to_f16(above) == low + 1).all()
    assert (conversions.to_f16(below) == low).all()
    for x in (middle, above, below):
        assert (conversions.to_f16(x, "rz") == low).all()
        assert (conversions.to_f16(-x, "rz") == low | 0x8000).all()
    edge = f32(65519.99, 65520, 1e9, -1e9, np.inf, np.nan)
    assert (conversions.to_f16(edge) == [0x7BFF, 0x7C00, 0x7C00, 0xFC00, 0x7C00, 0x7FFF]).all()
    assert (conversions.to_f16(edge, "rz") == [0x7BFF, 0x7BFF, 0x7BFF, 0xFBFF, 0x7C00, 0x7FFF]).all()
    assert (conversions.to_f16(edge, satfinite=True) == [0x7BFF, 0x7BFF, 0x7BFF, 0xFBFF, 0x7BFF, 0x7FFF]).all()
    assert (conversions.to_f16(edge, relu=True) == [0x7BFF, 0x7C00, 0x7C00, 0, 0x7C00, 0x7FFF]).all()
    assert (conversions.to_f16x2(f32(1), f32(-2)) == 0x3C00C000).all()


def test_tf32():
    x = f32(1 + 2.0**-11, 1 + 3 * 2.0**-11, -(1 + 2.0**-11), np.inf, np.nan, 3e38)
    assert (
        conversions.to_tf32(x, "rna").view(np.float32)[:3] == f32(1 + 2.0**-10, 1 + 2 * 2.0**-10, -(1 + 2.0**-10))
    ).all()
    assert (conversions.to_tf32(x, "rn").view(np.float32)[:3] == f32(1, 1 + 2 * 2.0**-10, -1)).all()
    assert (conversions.to_tf32(x, "rz").view(np.float32)[:3] == f32(1, 1 + 2.0**-10, -1)).all()
    assert (conversions.to_tf32(x, "rn", relu=True, satfinite=True)[2:5] == [0, 0x7F7FE000, 0x7FFFFFFF]).all()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_float_to_int(dtype):
    x = np.concatenate(
        (
            random_bits(500, 11),
            f32(0.5, 1.5, -0.5, -1.5, 2.0**31, -(2.0**31), 2.0**63, 2.0**64, 127.5, 255.5, np.inf, -np.inf),
        )
    )
    info = np.iinfo(dtype)
    rounds = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
    for mode, function in rounds.items():
        got = conversions.float_to_int(x, mode, dtype)
        assert got.dtype == dtype
        for v, g in zip(x.tolist(), got.tolist(), strict=True):
            want = (info.max if v > 0 else info.min) if math.isinf(v) else min(max(function(v), info.min), info.max)
            assert g == want, (mode, v)
    wide = info.bits == 64
    nan = {True: 1 << 63 if info.min == 0 else info.min, False: 0}[wide]
    assert conversions.float_to_int(f32(np.nan), "rni", dtype)[0] == nan
    of_double = 1 << (info.bits - 1) if info.min == 0 else info.min
    assert conversions.float_to_int(np.array([np.nan]), "rni", dtype)[0] == of_double
    assert conversions.float_to_int(f32(1e-40), "rpi", dtype, ftz=True)[0] == 0


def test_other_casts():
    assert (conversions.int_to_int(np.array([300, -300, 5], np.int32), np.uint8) == [44, 212, 5]).all()
    assert (conversions.int_to_int(np.array([300, -300, 5], np.int32), np.uint8, sat=True) == [255, 0, 5]).all()
    assert (conversions.int_to_int(np.array([300, -300, 5], np.int32), np.int8, sat=True) == [127, -128, 5]).all()
    assert (conversions.int_to_int(np.array([-1], np.int32), np.int64) == -1).all()
    assert (conversions.int_to_int(np.array([2**32 - 1], np.uint32), np.int32, sat=True) == 2**31 - 1).all()
    same(conversions.round_f32(f32(0.5, 1.5, -2.5, 1e30), "rni"), f32(0, 2, -2, 1e30))
    same(conversions.round_f32(f32(-0.5, 1.2), "rpi", sat=True), f32(0, 1))
