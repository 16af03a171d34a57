"""Integer, bit and warp instructions against Python's integers."""

import itertools

import numpy as np
import pytest

from wanfp4.simulator import integers


def u32(*values):
    return np.array(values, np.uint32)


def random_ints(dtype, n=300, seed=13):
    info = np.iinfo(dtype)
    rng = np.random.default_rng(seed)
    x = rng.integers(info.min, info.max, n, dtype=dtype, endpoint=True)
    return np.concatenate((x, np.array([0, 1, info.max, info.min, info.max - 1], dtype)))


INTEGERS = [np.int32, np.uint32, np.int64, np.uint64, np.int16, np.uint16]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_shifts(dtype):
    a, info = random_ints(dtype), np.iinfo(dtype)
    for count in (0, 1, 7, info.bits - 1, info.bits, info.bits + 1, 2**31, 2**32 - 1):
        b = np.full(a.shape, count, np.uint32)
        clamped = min(count, info.bits)
        wrap = np.array([(int(v) << clamped) & (2**info.bits - 1) for v in a], np.uint64).astype(f"u{info.bits // 8}")
        assert (integers.shift_left(a, b).view(wrap.dtype) == wrap).all()
        assert integers.shift_right(a, b).tolist() == [int(v) >> clamped for v in a]


def test_funnel_shift():
    a, b = random_ints(np.uint32, seed=14), random_ints(np.uint32, seed=15)
    for count, left, wrap in itertools.product((0, 1, 31, 32, 33, 40), (False, True), (False, True)):
        n = count & 31 if wrap else min(count, 32)
        both = [int(y) << 32 | int(x) for x, y in zip(a, b, strict=True)]
        want = [(v << n >> 32 if left else v >> n) & 0xFFFFFFFF for v in both]
        assert integers.funnel_shift(a, b, np.full(a.shape, count, np.uint32), left, wrap).tolist() == want


@pytest.mark.parametrize("dtype", INTEGERS)
def test_products(dtype):
    a, b, bits = random_ints(dtype, seed=16), random_ints(dtype, seed=17), np.iinfo(dtype).bits
    high = [int(x) * int(y) >> bits for x, y in zip(a, b, strict=True)]
    assert integers.mul_hi(a, b).tolist() == high
    assert (integers.mad_hi(a, b, a) == integers.mul_hi(a, b) + a).all()
    if bits < 64:
        assert integers.mul_wide(a, b).tolist() == [int(x) * int(y) for x, y in zip(a, b, strict=True)]
        wide = integers.mul_wide(a, b)
        assert (integers.mad_wide(a, b, wide) == wide + wide).all()


def test_other_integer_arithmetic():
    a, b = random_ints(np.int32, seed=18), random_ints(np.int32, seed=19)
    low, high = -(2**31), 2**31 - 1
    assert integers.add_sat_s32(a, b).tolist() == [
        min(max(int(x) + int(y), low), high) for x, y in zip(a, b, strict=True)
    ]
    assert integers.sub_sat_s32(a, b).tolist() == [
        min(max(int(x) - int(y), low), high) for x, y in zip(a, b, strict=True)
    ]
    small = (a >> 8).astype(np.int32)
    assert (integers.sad(small, small[::-1], a) == a + np.abs(small - small[::-1])).all()
    for dtype in (np.int32, np.uint32):
        x, y = random_ints(dtype, seed=20), random_ints(dtype, seed=21)
        sign = [int(v & 0xFFFFFF) - (2**24 if dtype is np.int32 and v & 0x800000 else 0) for v in x.tolist()]
        other = [int(v & 0xFFFFFF) - (2**24 if dtype is np.int32 and v & 0x800000 else 0) for v in y.tolist()]
        product = [p * q for p, q in zip(sign, other, strict=True)]
        assert (integers.mul24(x, y).view(np.uint32) == np.array([p & 0xFFFFFFFF for p in product], np.uint32)).all()
        upper = np.array([p >> 16 & 0xFFFFFFFF for p in product], np.uint32)
        assert (integers.mul24(x, y, hi=True).view(np.uint32) == upper).all()
    for dtype in INTEGERS:
        x, y = random_ints(dtype, seed=22), random_ints(dtype, seed=23)
        y[::3] = y[::3] % 7 + dtype(1)
        bits = np.iinfo(dtype).bits
        for p, q, d, r in zip(
            *(v.tolist() for v in (x, y, integers.div_int(x, y), integers.rem_int(x, y))), strict=True
        ):
            if q == 0:
                assert d in (-1, 2**bits - 1)
                continue
            want = abs(p) // abs(q) * (1 if (p < 0) == (q < 0) else -1)
            assert d == want or (want == 2 ** (bits - 1) and d == -want)  # smallest / −1 wraps
            assert r == p - want * q


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
def test_bit_fields(dtype):
    a, b = random_ints(dtype, seed=24), random_ints(dtype, seed=25)
    bits, signed = np.iinfo(dtype).bits, np.iinfo(dtype).min < 0
    unsigned = np.dtype(f"u{bits // 8}")
    places = (0, 1, 5, bits - 1, bits, 64, 200, 256 + 3)
    for start, length in itertools.product(places, places):
        pos, size = start & 255, length & 255
        got = integers.bfe(a, np.full(a.shape, start, np.uint32), np.full(a.shape, length, np.uint32)).tolist()
        insert = integers.bfi(
            a.view(unsigned), b.view(unsigned), np.full(a.shape, start, np.uint32), np.full(a.shape, length, np.uint32)
        )
        assert integers.bfe(a, start, length).tolist() == got
        assert (integers.bfi(a.view(unsigned), b.view(unsigned), start, length) == insert).all()
        for v, w, g, f in zip(a.tolist(), b.tolist(), got, insert.tolist(), strict=True):
            sign = 0 if not signed or size == 0 else v >> min(pos + size - 1, bits - 1) & 1  # the ISA's loop
            field = sum((v >> (pos + i) & 1 if i < size and pos + i < bits else sign) << i for i in range(bits))
            assert g & (2**bits - 1) == field
            filled = w & (2**bits - 1)
            for i in range(min(size, max(bits - pos, 0))):
                filled = filled & ~(1 << (pos + i)) | (v >> i & 1) << (pos + i)
            assert f == filled


def test_logic_and_counts():
    a, b, c = (random_ints(np.uint32, 100, seed) for seed in (26, 27, 28))
    for table in range(256):
        got = integers.lop3(a, b, c, table).tolist()
        for x, y, z, g in list(zip(a.tolist(), b.tolist(), c.tolist(), got, strict=True))[:3]:
            rows = [x >> i & 1 for i in range(32)], [y >> i & 1 for i in range(32)], [z >> i & 1 for i in range(32)]
            assert g == sum(
                (table >> (4 * p + 2 * q + r) & 1) << i for i, (p, q, r) in enumerate(zip(*rows, strict=True))
            )
    assert (integers.lop3(a, b, c, 0xF0) == a).all()
    assert (integers.lop3(a, b, c, 0x96) == a ^ b ^ c).all()
    for dtype in (np.uint32, np.uint64):
        x, bits = random_ints(dtype, seed=29), np.iinfo(dtype).bits
        assert integers.popc(x).tolist() == [v.bit_count() for v in x.tolist()]
        assert integers.clz(x).tolist() == [bits - v.bit_length() for v in x.tolist()]
        assert integers.brev(x).tolist() == [int(f"{v:0{bits}b}"[::-1], 2) for v in x.tolist()]
        top = [v.bit_length() - 1 if v else 0xFFFFFFFF for v in x.tolist()]
        assert integers.bfind(x).tolist() == top
        assert integers.bfind(x, shiftamt=True).tolist() == [bits - 1 - t if t != 0xFFFFFFFF else t for t in top]
    signed = np.array([0, -1, 1, -2, -(2**31), 2**31 - 1], np.int32)
    assert integers.bfind(signed).tolist() == [0xFFFFFFFF, 0xFFFFFFFF, 0, 0, 30, 30]


def test_prmt():
    a, b, c = (random_ints(np.uint32, 200, seed) for seed in (30, 31, 32))

    def byte(x, y, nibble):
        value = (y << 32 | x) >> 8 * (nibble & 7) & 255
        return (255 if value & 128 else 0) if nibble & 8 else value

    def permute(x, y, selector):
        return sum(byte(x, y, selector >> 4 * i & 15) << 8 * i for i in range(4))

    got = integers.prmt(a, b, c).tolist()
    assert got == [permute(x, y, z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    for selector in (0x3210, 0x7654, 0x1234, 0xFEDC, 0x8123, 0x5410):
        assert integers.prmt(a, b, selector).tolist() == [
            permute(x, y, selector) for x, y in zip(a.tolist(), b.tolist(), strict=True)
        ]
    picks = {
        "f4e": lambda n, i: n + i,
        "b4e": lambda n, i: (n - i) % 8,
        "rc8": lambda n, i: n,
        "ecl": max,
        "ecr": min,
        "rc16": lambda n, i: 2 * (n & 1) + i % 2,
    }
    for mode, pick in picks.items():
        want = [
            sum(byte(x, y, pick(z & 3, i)) << 8 * i for i in range(4))
            for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
        ]
        assert integers.prmt(a, b, c, mode).tolist() == want
        assert integers.prmt(a, b, int(c[0]), mode)[0] == want[0]


@pytest.mark.parametrize(("a_signed", "b_signed"), [(False, False), (False, True), (True, False), (True, True)])
def test_dot_products(a_signed, b_signed):
    a, b, c = (random_ints(np.uint32, 200, seed) for seed in (33, 34, 35))

    def parts(x, bits, signed):
        values = [x >> i & (2**bits - 1) for i in range(0, 32, bits)]
        return [v - (2**bits if signed and v >> (bits - 1) else 0) for v in values]

    def want(x, y, z, width, first):
        dot = sum(p * q for p, q in zip(parts(x, width, a_signed), parts(y, 8, b_signed)[first:], strict=False))
        return (dot + z) & 0xFFFFFFFF

    triples = list(zip(a.tolist(), b.tolist(), c.tolist(), strict=True))
    assert integers.dp4a(a, b, c, a_signed, b_signed).tolist() == [want(*t, 8, 0) for t in triples]
    for hi in (False, True):
        assert integers.dp2a(a, b, c, a_signed, b_signed, hi).tolist() == [want(*t, 16, 2 * hi) for t in triples]


def test_warp_reductions_and_votes():
    x = random_ints(np.int32, 27, 36)
    mask = np.arange(32) % 3 == 0
    live = [int(v) for v in x[mask]]
    assert (integers.redux("max", x, mask) == max(live)).all()
    assert (integers.redux("min", x) == x.min()).all()
    assert (integers.redux("add", x, mask) == np.array(sum(live) & 0xFFFFFFFF, np.uint32).view(np.int32)).all()
    u = x.view(np.uint32)
    assert (integers.redux("xor", u) == np.bitwise_xor.reduce(u)).all()
    assert (integers.redux("and", u) == np.bitwise_and.reduce(u)).all()
    assert (integers.redux("or", u) == np.bitwise_or.reduce(u)).all()
    y = np.linspace(-3, 2, 32).astype(np.float32)
    assert (integers.redux("max", y) == 2).all()
    assert (integers.redux("max", y, magnitude=True) == 3).all()
    y[5] = np.nan
    assert (integers.redux("min", y) == -3).all()
    assert (integers.redux("min", y, nan=True).view(np.uint32) == 0x7FFFFFFF).all()
    p = x > 0
    assert int(integers.ballot(p, mask)[0]) == sum(1 << i for i in range(32) if p[i] and mask[i])
    assert integers.vote("any", p).all() == p.any()
    assert integers.vote("all", p).all() == p.all()
    assert integers.vote("uni", mask, mask).all()
    assert not integers.vote("uni", mask).any()
    values = (np.arange(32) % 5).astype(np.uint32)
    assert int(integers.match_any(values)[7]) == sum(1 << i for i in range(32) if i % 5 == 2)
    groups, agree = integers.match_all(values, values == 2)
    assert agree.all()
    assert int(groups[0]) == sum(1 << i for i in range(32) if i % 5 == 2)
    assert not integers.match_all(values)[1].any()


@pytest.mark.parametrize("mode", ["idx", "up", "down", "bfly"])
def test_shfl(mode):
    rng = np.random.default_rng(37)
    for b, c in [
        (1, 31),
        (4, 31),
        (3, 0x181F),
        (16, 0),
        (5, 0x1C03),
        (1, 0),
        *rng.integers(0, 2**13, (20, 2)).tolist(),
    ]:
        source, inside = integers.shfl_source(mode, b, c)
        arrays = integers.shfl_source(mode, np.full(32, b, np.uint32), np.full(32, c, np.uint32))
        assert (arrays[0] == source).all()
        assert (arrays[1] == inside).all()
        segment, clamp, offset = c >> 8 & 31, c & 31, b & 31
        for lane in range(32):
            top = (lane & segment) | (clamp & ~segment)
            j = {"up": lane - offset, "down": lane + offset, "bfly": lane ^ offset}.get(
                mode, (lane & segment) | (offset & ~segment)
            )
            good = j >= top if mode == "up" else j <= top
            assert inside[lane] == good
            assert source[lane] == (j if good else lane)


def test_packs():
    low, high = u32(1, 2), u32(3, 4)
    assert (integers.pack64(low, high) == [3 << 32 | 1, 4 << 32 | 2]).all()
    assert [x.tolist() for x in integers.unpack64(integers.pack64(low, high))] == [[1, 2], [3, 4]]
    parts = [np.array([i, 16 * i], np.uint8) for i in range(4)]
    assert (integers.pack32(parts) == [0x03020100, 0x30201000]).all()
    assert [x.tolist() for x in integers.unpack(integers.pack32(parts), np.uint8)] == [p.tolist() for p in parts]
    assert [x.tolist() for x in integers.unpack(integers.pack64(low, high), np.uint32)] == [[1, 2], [3, 4]]
