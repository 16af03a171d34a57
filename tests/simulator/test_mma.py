"""tcgen05.mma and cp against float64 NumPy. Operands are laid out by formulas of their own, not by descriptors.py."""

import itertools
from fractions import Fraction
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from wanfp4.simulator.findings import BoundsError, DescriptorError, ProtocolError, UnknownInstruction
from wanfp4.simulator.judge import Action
from wanfp4.simulator.memory import SharedMemory
from wanfp4.simulator.mma import copy_scales, mma
from wanfp4.simulator.tensor_memory import TensorMemory

FORMATS = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
TYPE_CODES = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1}
LAYOUTS = {"none": 0, "128 of 32": 1, "128": 2, "64": 4, "32": 6}
PITCH = {"128": 128, "64": 64, "32": 32}
A_AT, B_AT, SCALES_AT = 0x2000, 0x12000, 0x22000  # multiples of 1024


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def cta():
    acting = Action("tcgen05.mma", 1, 0)
    shared, tensor = SharedMemory(0x24000, track=False), TensorMemory(track=False)
    shared.acting = tensor.acting = acting
    tensor.alloc(512, 1, 0)
    return SimpleNamespace(shared=shared, tensor=tensor, isa=True)


def descriptor(start, layout="none", lbo=16, sbo=1024):
    return start >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | 1 << 46 | LAYOUTS[layout] << 61


def plain_idesc(a_type, b_type, n, a_mn=False, b_mn=False, negate=(0, 0)):
    flags = negate[0] << 13 | negate[1] << 14 | a_mn << 15 | b_mn << 16
    return 1 << 4 | TYPE_CODES[a_type] << 7 | TYPE_CODES[b_type] << 10 | flags | n >> 3 << 17 | 8 << 24


def scaled_idesc(n, ue8m0, a_id=0, b_id=0, types=(1, 1)):
    return b_id << 4 | types[0] << 7 | types[1] << 10 | n >> 3 << 17 | ue8m0 << 23 | 1 << 27 | a_id << 29


def put_k_major(cta, at, raw, layout, step):
    """Bytes [rows, 32] as K bytes 32·step, … of a tile as wide as the swizzle; returns the descriptor of that step."""
    rows = np.arange(len(raw))[:, None]
    byte = np.arange(32)[None, :] + 32 * step
    chunk, rest = byte // 16, byte % 16
    if layout == "none":  # 8x16-byte core matrices, rows of them next to each other, then K
        sbo, lbo = 128, 128 * (len(raw) // 8)
        cta.shared.data[at + rows // 8 * sbo + rows % 8 * 16 + chunk * lbo + rest] = raw
        return descriptor(at + 2 * step * lbo, layout, lbo, sbo)
    phase = {"128": rows % 8, "64": rows // 2 % 4, "32": rows // 4 % 2}[layout]
    pitch = PITCH[layout]
    cta.shared.data[at + rows * pitch + (chunk ^ phase) * 16 + rest] = raw
    return descriptor(at + 32 * step, layout, 16, 8 * pitch)


def put_mn_major(cta, at, values, layout):
    """An array [rows, K] with its rows contiguous in memory; returns the descriptor."""
    rows, depth = values.shape
    size = values.dtype.itemsize
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(rows, depth, size)
    r, k, i = np.arange(rows)[:, None, None], np.arange(depth)[None, :, None], np.arange(size)[None, None, :]
    if layout == "none":
        per = 16 // size
        sbo, lbo = 128, 128 * -(-rows // per)
        cta.shared.data[at + r // per * sbo + k // 8 * lbo + k % 8 * 16 + r % per * size + i] = raw
        return descriptor(at, layout, lbo, sbo)
    deep, atom = (4, 32) if layout == "128 of 32" else (8, 16)
    pitch = 128 if layout == "128 of 32" else PITCH[layout]
    per = pitch // size
    sbo = 2 * pitch * deep  # a gap between K groups, then blocks of rows
    lbo = sbo * (depth // deep)
    phase = {"128 of 32": k % 4, "128": k % 8, "64": k // 2 % 4, "32": k // 4 % 2}[layout]
    byte = r % per * size + i
    cta.shared.data[
        at + r // per * lbo + k // deep * sbo + k % deep * pitch + (byte // atom ^ phase) * atom + byte % atom
    ] = raw
    return descriptor(at, layout, lbo, sbo)


def numbers(rng, shape, element):
    """Small multiples of 1/4: exact in every format, and so are their sums."""
    return (rng.integers(-6, 7, shape) / 4).astype(FORMATS[element])


def raw_bytes(values):
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)


def result(cta, d, n):
    return cta.tensor.cells[:, d : d + n].view(np.float32)


KINDS = [
    ("f16", "f16", "f16"),
    ("f16", "bf16", "bf16"),
    ("tf32", "tf32", "tf32"),
    ("f8f6f4", "e4m3", "e5m2"),
    ("f8f6f4", "e5m2", "e4m3"),
]
K = {"f16": 16, "tf32": 8, "f8f6f4": 32}


@pytest.mark.parametrize(("kind", "a_type", "b_type"), KINDS)
@pytest.mark.parametrize("layout", ["none", "32", "64", "128"])
def test_k_major(cta, kind, a_type, b_type, layout):
    rng = np.random.default_rng(0)
    for n, step in itertools.product((8, 72, 256), range({"none": 2, "32": 1, "64": 2, "128": 4}[layout])):
        a, b = numbers(rng, (128, K[kind]), a_type), numbers(rng, (n, K[kind]), b_type)
        desc_a = put_k_major(cta, A_AT, raw_bytes(a), layout, step)
        desc_b = put_k_major(cta, B_AT, raw_bytes(b), layout, step)
        idesc = plain_idesc(a_type, b_type, n)
        product = a.astype(np.float64) @ b.astype(np.float64).T
        mma(cta, kind, 64, desc_a, False, desc_b, idesc, False)
        assert (result(cta, 64, n) == product).all()
        mma(cta, kind, 64, desc_a, False, desc_b, idesc, True)
        assert (result(cta, 64, n) == 2 * product).all()


@pytest.mark.parametrize(("kind", "a_type", "b_type"), KINDS)
@pytest.mark.parametrize("layout", ["none", "32", "64", "128", "128 of 32"])
def test_mn_major(cta, kind, a_type, b_type, layout):
    rng = np.random.default_rng(1)
    for a_mn, b_mn, n in [(True, False, 64), (False, True, 16), (True, True, 144), (False, True, 256)]:
        a, b = numbers(rng, (128, K[kind]), a_type), numbers(rng, (n, K[kind]), b_type)
        if (kind == "tf32") != (layout == "128 of 32"):
            with pytest.raises(
                DescriptorError, match=r"MN-major operands of \d+-bit elements do not have this swizzle"
            ):
                mma(
                    cta,
                    kind,
                    0,
                    descriptor(A_AT, layout),
                    False,
                    descriptor(B_AT, layout),
                    plain_idesc(a_type, b_type, n, True, True),
                    False,
                )
            return
        desc_a = put_mn_major(cta, A_AT, a, layout) if a_mn else put_k_major(cta, A_AT, raw_bytes(a), "32", 0)
        desc_b = put_mn_major(cta, B_AT, b, layout) if b_mn else put_k_major(cta, B_AT, raw_bytes(b), "32", 0)
        mma(cta, kind, 0, desc_a, False, desc_b, plain_idesc(a_type, b_type, n, a_mn, b_mn), False)
        assert (result(cta, 0, n) == a.astype(np.float64) @ b.astype(np.float64).T).all()


def test_tf32_ignores_the_low_bits(cta):
    rng = np.random.default_rng(12)
    a, b = (rng.standard_normal((rows, 8)).astype(np.float32) for rows in (128, 8))
    desc_a, desc_b = put_k_major(cta, A_AT, raw_bytes(a), "32", 0), put_k_major(cta, B_AT, raw_bytes(b), "32", 0)
    mma(cta, "tf32", 0, desc_a, False, desc_b, plain_idesc("tf32", "tf32", 8), False)
    cut_a, cut_b = ((x.view(np.uint32) >> 13 << 13).view(np.float32).astype(np.float64) for x in (a, b))
    assert (result(cta, 0, 8) == (cut_a @ cut_b.T).astype(np.float32)).all()


def test_mn_major_step_inside_an_atom(cta):
    """A tile of 32 rows that starts at row 32 of 64-row atoms."""
    rng = np.random.default_rng(2)
    a, b = numbers(rng, (128, 16), "bf16"), numbers(rng, (64, 16), "bf16")
    desc_a, desc_b = put_k_major(cta, A_AT, raw_bytes(a), "32", 0), put_mn_major(cta, B_AT, b, "128")
    mma(cta, "f16", 0, desc_a, False, desc_b + (64 >> 4), plain_idesc("bf16", "bf16", 32, b_mn=True), False)
    assert (result(cta, 0, 32) == a.astype(np.float64) @ b[32:].astype(np.float64).T).all()
    with pytest.raises(DescriptorError, match="do not fit"):
        mma(cta, "f16", 0, desc_a, False, desc_b + (64 >> 4), plain_idesc("bf16", "bf16", 64, b_mn=True), False)


@pytest.mark.parametrize(("kind", "a_type", "b_type"), KINDS)
def test_a_in_tensor_memory(cta, kind, a_type, b_type):
    """Lane = row, 32 bytes of K in eight columns, first element in the lowest bits."""
    rng = np.random.default_rng(3)
    a, b = numbers(rng, (128, K[kind]), a_type), numbers(rng, (128, K[kind]), b_type)
    cta.tensor.cells[:, 200:208] = raw_bytes(a).view("<u4")
    desc_b = put_k_major(cta, B_AT, raw_bytes(b), "128", 2)
    mma(cta, kind, 0, 200, True, desc_b, plain_idesc(a_type, b_type, 128), False)
    assert (result(cta, 0, 128) == a.astype(np.float64) @ b.astype(np.float64).T).all()
    with pytest.raises(DescriptorError, match="cannot be transposed"):
        mma(cta, kind, 0, 200, True, desc_b, plain_idesc(a_type, b_type, 128, a_mn=True), False)
    with pytest.raises(ProtocolError, match="D, columns 100-227, overlaps A"):
        mma(cta, kind, 100, 200, True, desc_b, plain_idesc(a_type, b_type, 128), False)


def test_negation_and_disabled_lanes(cta):
    rng = np.random.default_rng(4)
    a, b = numbers(rng, (128, 16), "f16"), numbers(rng, (64, 16), "f16")
    desc_a, desc_b = put_k_major(cta, A_AT, raw_bytes(a), "128", 0), put_k_major(cta, B_AT, raw_bytes(b), "128", 0)
    product = a.astype(np.float64) @ b.astype(np.float64).T
    for negate in itertools.product((0, 1), repeat=2):
        mma(cta, "f16", 0, desc_a, False, desc_b, plain_idesc("f16", "f16", 64, negate=negate), False)
        assert (result(cta, 0, 64) == (-1) ** sum(negate) * product).all()
    before = rng.integers(-9, 9, (128, 64)).astype(np.float32)
    keep = rng.random(128) < 0.3
    for accumulate in (False, True):
        cta.tensor.cells[:, :64] = before.view(np.uint32)
        mma(cta, "f16", 0, desc_a, False, desc_b, plain_idesc("f16", "f16", 64), accumulate, keep_lanes=keep)
        assert (result(cta, 0, 64) == np.where(keep[:, None], before, product + accumulate * before)).all()
    cta.tensor.cells[:, :64] = before.view(np.uint32)
    mma(cta, "f16", 0, desc_a, False, desc_b, plain_idesc("f16", "f16", 64), True, keep_lanes=np.ones(128, bool))
    assert (result(cta, 0, 64) == before).all()


def test_special_values_and_rounding(cta):
    a, b = np.zeros((128, 16), np.float16), np.zeros((8, 16), np.float16)
    a[:, 0] = 1
    a[0, 0], a[1, 0], a[2, 1] = np.inf, np.nan, np.inf  # row 2: infinity times zero
    b[:, 0] = 1
    a[3, :4] = 4096, 1, 2.0**-12, 2.0**-24  # 2^24 + 1 + …: just above a tie
    b[1, :4] = 4096, 1, 1, 1
    idesc = plain_idesc("f16", "f16", 8)
    descs = put_k_major(cta, A_AT, raw_bytes(a), "32", 0), put_k_major(cta, B_AT, raw_bytes(b), "32", 0)
    mma(cta, "f16", 0, descs[0], False, descs[1], idesc, False)
    got = result(cta, 0, 8)
    assert np.isposinf(got[0]).all()
    assert (cta.tensor.cells[1:3, 0] == 0x7FFFFFFF).all()
    assert got[3, 1] == 2.0**24 + 2
    mma(cta, "f16", 16, descs[0], False, descs[1], idesc, False, accumulation="truncated")
    cut = result(cta, 16, 8)
    assert cut[3, 1] == 2.0**24
    assert (got[4:] == cut[4:]).all()
    assert (cta.tensor.cells[:3, :8] == cta.tensor.cells[:3, 16:24]).all()


@pytest.mark.parametrize("element", ["e4m3", "f16", "bf16"])
def test_what_the_order_of_a_sum_can_change(cta, element):
    """E4M3 sums are exact in float64 whatever cancels; those of wider formats are float64 sums, as mma.py says."""
    big = {"e4m3": 448.0, "f16": 65504.0, "bf16": 2.0**100}[element]
    small = {"e4m3": 2.0**-9, "f16": 2.0**-14, "bf16": 1.0}[element]
    k = 32 if element == "e4m3" else 16
    kind = "f8f6f4" if element == "e4m3" else "f16"
    places = list(itertools.permutations(range(0, k, 3), 3))[:128]
    a, b = np.zeros((128, k)), np.ones((8, k))
    for row, (x, y, z) in zip(a, places, strict=False):
        row[[x, y, z]] = big, small, -big
    b[1:] = {"e4m3": 448.0, "f16": 1.0, "bf16": 1.0}[element]
    a, b = a.astype(FORMATS[element]), b.astype(FORMATS[element])
    descs = put_k_major(cta, A_AT, raw_bytes(a), "32", 0), put_k_major(cta, B_AT, raw_bytes(b), "32", 0)
    mma(cta, kind, 0, descs[0], False, descs[1], plain_idesc(element, element, 8), False)
    got = result(cta, 0, 8)[: len(places), 1]
    want = small * (448.0 if element == "e4m3" else 1.0)
    if element == "bf16":  # 2^100 + 1 − 2^100: what is within 2^−52 of the largest term is left to the order
        assert set(got) <= {0.0, want}
    else:
        assert (got == want).all()


# ---- block scaling ----
def scale_page(scales):
    """[rows <= 128, 4] bytes as one 512-byte page: row r, block k at (r % 32)·16 + (r // 32)·4 + k."""
    page = np.full((32, 4, 4), 0xFF, np.uint8)  # NaN wherever the MMA must not look
    for r, row in enumerate(scales):
        page[r % 32, r // 32] = row
    return page.reshape(-1)


def load_scales(cta, taddr, scales, at=SCALES_AT):
    for first in range(0, len(scales), 128):
        cta.shared.data[at : at + 512] = scale_page(scales[first : first + 128])
        copy_scales(cta, taddr + first // 32, descriptor(at, "none", 16, 128))


def scale_values(scales, ue8m0):
    if ue8m0:
        return scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    return (scales & 127).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def code_values(codes):
    return codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def pack_codes(codes):
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)


FP4 = [
    ("mxf4nvf4", 16, False, 0),
    ("mxf4nvf4", 16, True, 0),
    ("mxf4nvf4", 32, True, 0),
    ("mxf4nvf4", 32, True, 2),
    ("mxf4", 32, True, 0),
    ("mxf4", 32, True, 2),
]


@pytest.mark.parametrize(("kind", "block", "ue8m0", "scale_id"), FP4)
@pytest.mark.parametrize("a_in_tmem", [False, True])
def test_fp4(cta, kind, block, ue8m0, scale_id, a_in_tmem):
    rng = np.random.default_rng(5)
    count = 64 // block
    for n, (layout, step), b_id in itertools.product(
        (8, 64, 72, 128, 192, 256), [("128", 3), ("64", 1)], {scale_id, 0}
    ):
        a, b = rng.integers(0, 16, (128, 64)), rng.integers(0, 16, (n, 64))
        low, high = (110, 140) if ue8m0 else (0, 256)
        sa, sb = (rng.integers(low, high, (rows, 4)).astype(np.uint8) for rows in (128, n))
        if not ue8m0:
            for s in (sa, sb):
                s[(s & 127) == 127] = 0x80
        load_scales(cta, 256, sa)
        load_scales(cta, 260, sb)
        desc_b = put_k_major(cta, B_AT, pack_codes(b), layout, step)
        if a_in_tmem:
            cta.tensor.cells[:, 400:408] = pack_codes(a).view("<u4")
            left = 400
        else:
            left = put_k_major(cta, A_AT, pack_codes(a), layout, step)
        idesc = scaled_idesc(n, ue8m0, scale_id, b_id)
        mma(cta, kind, 0, left, a_in_tmem, desc_b, idesc, False, None, 256, 260, block)
        used_a, used_b = (
            np.repeat(scale_values(s, ue8m0)[:, i : i + count], block, 1) for s, i in ((sa, scale_id), (sb, b_id))
        )
        want = (code_values(a) * used_a) @ (code_values(b) * used_b).T
        assert (result(cta, 0, n) == want.astype(np.float32)).all()
        # CuTe's addresses carry the id in their top bits.
        before = rng.standard_normal((128, n)).astype(np.float32)
        cta.tensor.cells[:, :n] = before.view(np.uint32)
        mma(cta, kind, 0, left, a_in_tmem, desc_b, idesc, True, None, 256 | scale_id << 30, 260 | b_id << 30, block)
        assert (result(cta, 0, n) == (want + before).astype(np.float32)).all()


def test_the_order_of_codes_matters_between_a_and_b(cta):
    """Negative control: swapping the nibbles of A alone gives other results."""
    rng = np.random.default_rng(6)
    a, b = rng.integers(0, 16, (128, 64)), rng.integers(0, 16, (128, 64))
    ones = np.full((128, 4), 127, np.uint8)
    load_scales(cta, 256, ones)
    swapped = a.reshape(128, 32, 2)[:, :, ::-1].reshape(128, 64)
    desc_b = put_k_major(cta, B_AT, pack_codes(b), "64", 0)
    outs = []
    for codes in (a, swapped):
        cta.tensor.cells[:, 400:408] = pack_codes(codes).view("<u4")
        mma(cta, "mxf4nvf4", 0, 400, True, desc_b, scaled_idesc(128, True), False, None, 256, 256, 32)
        outs.append(result(cta, 0, 128).copy())
    assert (outs[0] == code_values(a) @ code_values(b).T).all()
    assert (outs[0] != outs[1]).mean() > 0.9


@pytest.mark.parametrize("ids", [(0, 0), (1, 3), (3, 2), (2, 1)])
@pytest.mark.parametrize("types", [("e4m3", "e4m3"), ("e5m2", "e4m3")])
def test_mxf8(cta, ids, types):
    rng = np.random.default_rng(7)
    for n, a_mn, b_mn in [(64, False, False), (128, True, True), (48, False, True)]:
        a, b = numbers(rng, (128, 32), types[0]), numbers(rng, (n, 32), types[1])
        sa, sb = (rng.integers(110, 140, (rows, 4)).astype(np.uint8) for rows in (128, n))
        load_scales(cta, 256, sa)
        load_scales(cta, 260, sb)
        desc_a = put_mn_major(cta, A_AT, a, "128") if a_mn else put_k_major(cta, A_AT, raw_bytes(a), "128", 1)
        desc_b = put_mn_major(cta, B_AT, b, "64") if b_mn else put_k_major(cta, B_AT, raw_bytes(b), "128", 1)
        idesc = scaled_idesc(n, True, *ids, types=[TYPE_CODES[t] for t in types]) | a_mn << 15 | b_mn << 16
        mma(cta, "mxf8f6f4", 0, desc_a, False, desc_b, idesc, False, None, 256, 260, 32)
        want = (a.astype(np.float64) * scale_values(sa, True)[:, ids[0], None]) @ (
            b.astype(np.float64) * scale_values(sb, True)[:, ids[1], None]
        ).T
        assert (result(cta, 0, n) == want).all()


def test_nan_scales(cta):
    codes = np.zeros((128, 64), np.uint8)  # even zeros become NaN
    desc = put_k_major(cta, A_AT, pack_codes(codes), "64", 0)
    for ue8m0, block, byte in ((False, 16, 0x7F), (False, 16, 0xFF), (True, 32, 0xFF)):
        sa, sb = np.full((128, 4), 60, np.uint8), np.full((128, 4), 60, np.uint8)
        sa[5, 1] = sb[70, 0] = byte
        load_scales(cta, 256, sa)
        load_scales(cta, 260, sb)
        mma(cta, "mxf4nvf4", 0, desc, False, desc, scaled_idesc(128, ue8m0), False, None, 256, 260, block)
        nan = np.isnan(result(cta, 0, 128))
        want = np.zeros((128, 128), bool)
        want[5], want[:, 70] = True, True
        assert (nan == want).all()


def test_scales_must_agree_in_all_lane_quarters(cta):
    desc = put_k_major(cta, A_AT, np.zeros((128, 32), np.uint8), "64", 0)
    load_scales(cta, 256, np.full((128, 4), 127, np.uint8))
    idesc = scaled_idesc(128, True, 2, 2)
    cta.tensor.cells[70, 257] ^= 0x0000FF00  # an unused byte: bytes 2 and 3 are read
    mma(cta, "mxf4", 0, desc, False, desc, idesc, False, None, 256, 256, 32)
    cta.tensor.cells[70, 257] ^= 0x01000000
    with pytest.raises(
        ProtocolError, match="scales of A, row 38, byte 3: 0x7f in lane 6, 0x7e in lane 70 of column 257"
    ):
        mma(cta, "mxf4", 0, desc, False, desc, idesc, False, None, 256, 260, 32)
    load_scales(cta, 260, np.full((8, 4), 127, np.uint8))
    load_scales(cta, 264, np.full((128, 4), 127, np.uint8))
    mma(cta, "mxf4nvf4", 0, desc, False, desc, scaled_idesc(8, True, 0, 0), False, None, 264, 260, 32)
    cta.tensor.cells[96 + 7, 260] ^= 1  # N 8 reads eight lanes of every quarter
    with pytest.raises(
        ProtocolError, match="scales of B, row 7, byte 0: 0x7f in lane 7, 0x7e in lane 103 of column 260"
    ):
        mma(cta, "mxf4nvf4", 0, desc, False, desc, scaled_idesc(8, True, 0, 0), False, None, 264, 260, 32)
    with pytest.raises(ProtocolError, match=r"D, columns 0-127, overlaps the scales of B, from column 124 on"):
        mma(cta, "mxf4", 0, desc, False, desc, scaled_idesc(128, True), False, None, 264, 124, 32)
    with pytest.raises(DescriptorError, match="scales of B at 0x40000104: id 1, the descriptor says 2"):
        mma(cta, "mxf4", 0, desc, False, desc, idesc, False, None, 260, 260 | 1 << 30, 32)
    with pytest.raises(ProtocolError, match="the lane must be 0"):
        mma(cta, "mxf4", 0, desc, False, desc, idesc, False, None, 260 | 32 << 16, 260, 32)
    with pytest.raises(DescriptorError, match="no addresses of scale factors"):
        mma(cta, "mxf4", 0, desc, False, desc, idesc, False, block=32)


def test_addresses(cta):
    desc = put_k_major(cta, A_AT, np.zeros((128, 32), np.uint8), "64", 0)
    idesc = plain_idesc("f16", "f16", 256)
    with pytest.raises(BoundsError):
        mma(cta, "f16", 384, desc, False, desc, idesc, False)
    with pytest.raises(ProtocolError, match="D at tensor memory 0x200000: the lane must be 0"):
        mma(cta, "f16", 32 << 16, desc, False, desc, idesc, False)
    with pytest.raises(
        DescriptorError, match=r"B, 256 rows, reaches up to .*shared-memory descriptor .* 64-byte swizzle"
    ):
        mma(cta, "f16", 0, desc, False, descriptor(0x24000, "64", 16, 512), idesc, False)
    cta.tensor.dealloc(0, 512, 1, 0)
    with pytest.raises(BoundsError, match="deallocated"):
        mma(cta, "f16", 0, desc, False, desc, idesc, False)


def test_copies(cta):
    rng = np.random.default_rng(8)
    data = rng.integers(0, 256, (128, 32)).astype(np.uint8)
    cta.shared.data[SCALES_AT : SCALES_AT + 512] = data[:32, :16].reshape(-1)
    copy_scales(cta, 7, 0x0000400800010000 | SCALES_AT >> 4)
    assert (cta.tensor.cells[:, 7:11].reshape(4, 32, 4) == np.ascontiguousarray(data[:32, :16]).view("<u4")).all()
    for shape in ("4x256b", "128x128b", "128x256b"):
        with pytest.raises(UnknownInstruction, match=shape):
            copy_scales(cta, 0, descriptor(SCALES_AT), shape)
    with pytest.raises(DescriptorError, match=r"tcgen05.cp.32x128b.warpx4 reaches up to"):
        copy_scales(cta, 0, descriptor(0x24300, "none", 16, 128))


# ---- truncated accumulation ----
def split(x, smallest):
    """Significand and exponent of a rational as its format encodes it."""
    if x == 0:
        return Fraction(0), -126
    e = abs(x).numerator.bit_length() - abs(x).denominator.bit_length()
    e -= Fraction(2) ** e > abs(x)
    e = max(e, smallest)
    return x / Fraction(2) ** e, e


def cut_sum(parts, bits):
    """Significand, exponent pairs: aligned to the largest exponent, cut, added, cut to float32."""
    top = max(e for _, e in parts)
    total = sum(Fraction(int(s * Fraction(2) ** (bits + e - top))) for s, e in parts) * Fraction(2) ** (top - bits)
    s, e = split(total, -126)
    return float(Fraction(int(s * 2**23), 2**23) * Fraction(2) ** e)


@pytest.mark.parametrize(
    ("kind", "element", "smallest"), [("f16", "f16", -14), ("f16", "bf16", -126), ("f8f6f4", "e4m3", -6)]
)
def test_truncated(cta, kind, element, smallest):
    rng = np.random.default_rng(9)
    a, b = (
        np.ldexp(rng.standard_normal((rows, K[kind])), rng.integers(-9, 6, (rows, K[kind]))).astype(FORMATS[element])
        for rows in (128, 8)
    )
    before = np.ldexp(rng.standard_normal((128, 8)), rng.integers(-9, 12, (128, 8))).astype(np.float32)
    descs = put_k_major(cta, A_AT, raw_bytes(a), "32", 0), put_k_major(cta, B_AT, raw_bytes(b), "32", 0)
    outs = {}
    for accumulation in ("exact", "truncated"):
        cta.tensor.cells[:, :8] = before.view(np.uint32)
        mma(cta, kind, 0, descs[0], False, descs[1], plain_idesc(element, element, 8), True, accumulation=accumulation)
        outs[accumulation] = result(cta, 0, 8).copy()
    differs = 0
    for m, n in itertools.product(range(0, 128, 5), range(8)):
        pairs = [
            (split(Fraction(float(x)), smallest), split(Fraction(float(y)), smallest))
            for x, y in zip(a[m], b[n], strict=True)
        ]
        parts = [(s * t, e + f) for (s, e), (t, f) in pairs] + [split(Fraction(float(before[m, n])), -126)]
        assert outs["truncated"][m, n] == cut_sum(parts, 25)
        exact = sum(s * Fraction(2) ** e for s, e in parts)
        assert outs["exact"][m, n] == np.float32(float(exact))
        differs += outs["truncated"][m, n] != outs["exact"][m, n]
    assert differs > 20
    assert np.abs(outs["exact"] - outs["truncated"]).max() <= 1e-6 * np.abs(outs["exact"]).max()


@pytest.mark.parametrize(("block", "ue8m0"), [(16, False), (32, True)])
def test_truncated_fp4(cta, block, ue8m0):
    rng = np.random.default_rng(10)
    a, b = rng.integers(0, 16, (128, 64)), rng.integers(0, 16, (8, 64))
    sa, sb = (rng.integers(100 if ue8m0 else 0, 127, (rows, 4)).astype(np.uint8) for rows in (128, 8))
    before = np.ldexp(rng.standard_normal((128, 8)), rng.integers(-30, 12, (128, 8))).astype(np.float32)
    load_scales(cta, 256, sa)
    load_scales(cta, 260, sb)
    descs = put_k_major(cta, A_AT, pack_codes(a), "32", 0), put_k_major(cta, B_AT, pack_codes(b), "32", 0)
    cta.tensor.cells[:, :8] = before.view(np.uint32)
    idesc = scaled_idesc(8, ue8m0)
    mma(cta, "mxf4nvf4", 0, descs[0], False, descs[1], idesc, True, None, 256, 260, block, accumulation="truncated")
    x, y = code_values(a), code_values(b)
    values_a, values_b = scale_values(sa, ue8m0), scale_values(sb, ue8m0)
    smallest = -127 if ue8m0 else -6
    for m, n in itertools.product(range(0, 128, 3), range(8)):
        parts = [split(Fraction(float(before[m, n])), -126)]
        for first in range(0, 64, 16):
            s, e = split(Fraction(values_a[m, first // block]), smallest)
            t, f = split(Fraction(values_b[n, first // block]), smallest)
            parts.append((Fraction(float(x[m, first : first + 16] @ y[n, first : first + 16])) * s * t, e + f))
        assert result(cta, 0, 8)[m, n] == cut_sum(parts, 35)


def test_unknown_accumulation(cta):
    desc = put_k_major(cta, A_AT, np.zeros((128, 32), np.uint8), "64", 0)
    with pytest.raises(KeyError):
        mma(cta, "f16", 0, desc, False, desc, plain_idesc("f16", "f16", 8), False, accumulation="fast")
