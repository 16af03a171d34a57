"""The reference against an independent NumPy statement, against exact attention, and against its own invariances."""

import dataclasses
import math
import subprocess
import sys

import naive
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wanfp4.kernels import reference
from wanfp4.kernels.reference import LN_2, attention, exact_lse
from wanfp4.policy import Classifier, Guard, Numerics, policies

SCALE = 128**-0.5
ROUNDING = [name for name, policy in policies().items() if not policy.numerics.is_exact]
DIRECT = [name for name in ROUNDING if policies()[name].numerics.p == "mxfp4-direct"]
FAST = policies()["wan-fast"].numerics

EXTRA = {
    "fast, K, Q and V smoothed": dataclasses.replace(FAST, smooth_k=True, smooth_q=True, smooth_v=True),
    "two-piece-nv, K and V smoothed": dataclasses.replace(
        policies()["wan-two-piece-nv"].numerics, smooth_k=True, smooth_v=True
    ),
    "guarded, raw margin": Guard(110, 16).apply(FAST),
    "guarded, log2 margin": Guard(110, 16, margin_unit="log2").apply(FAST),
    "mix density 2": dataclasses.replace(FAST, classifier=Classifier("mix", 1.65, 0.8, density=2)),
    "mix density 4": dataclasses.replace(FAST, classifier=Classifier("mix", 1.65, 0.8, density=4)),
    "direct, rowmax": dataclasses.replace(FAST, row_reference="rowmax"),
    "direct, exact denominator": dataclasses.replace(FAST, denominator="exact"),
    "two-piece-nv, anchor128": dataclasses.replace(policies()["wan-two-piece-nv"].numerics, row_reference="anchor128"),
    "fp8, anchor32": dataclasses.replace(policies()["nvfp4-fp8"].numerics, row_reference="anchor32", margin=6.0),
    "P alone": Numerics(p="mxfp4-direct", classifier=FAST.classifier, denominator="codes"),
    "Q and K alone": Numerics(qk="nvfp4-folded"),
    "V alone": Numerics(v="mxfp4-direct"),
}
ALL = {name: policies()[name].numerics for name in ROUNDING} | EXTRA


def draw(queries, keys, *, batch=1, heads=1, sharpness=1.0, seed=0, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, queries, heads, 128, generator=g) * sharpness
    k, v = (torch.randn(batch, keys, heads, 128, generator=g) for _ in range(2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def exact(q, k, v, scale=SCALE):
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    return ((q @ k.transpose(-1, -2) * scale).softmax(-1) @ v).transpose(1, 2)


def rel_l2(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize("shape", [(3, 1), (5, 31), (2, 130), (130, 300)], ids=str)
def test_agrees_with_the_independent_statement(name, shape):
    q, k, v = draw(*shape, sharpness=2.0, seed=sum(shape))
    mine = attention(q, k, v.float(), ALL[name], scale=SCALE).out[0, :, 0]
    truth = naive.attention(*(t[0, :, 0].float().numpy() for t in (q, k, v)), ALL[name], SCALE)
    # float32 may put a score on the other side of a rounding boundary: rarely, so most rows agree to its precision.
    error = np.linalg.norm(mine.double().numpy() - truth, axis=1) / np.linalg.norm(truth, axis=1)
    assert np.median(error) < 2e-6
    assert error.max() < 0.05
    assert (error > 1e-4).mean() < 0.05


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize("size", [1, 30, 90, 300, 1000])
@pytest.mark.parametrize("sign", [1, -1, 0], ids=["all high", "all low", "both"])
def test_extreme_logits_are_never_silently_wrong(name, size, sign):
    """Rows whose logits lie near ±size (and spread by ±3, or evenly over ±size) keep the operator's usual error."""
    g = torch.Generator().manual_seed(size)
    keys = 200
    direction = torch.zeros(128)
    direction[:16] = 0.25 * 2 ** torch.arange(0, 1, 1 / 16)  # a unit-like vector that FP4 holds well
    direction = direction / direction.norm()
    along = torch.full((keys,), float(sign)) if sign else torch.linspace(-1, 1, keys)
    k = along[:, None] * direction * math.sqrt(128) + 0.1 * torch.randn(keys, 128, generator=g)
    q = (direction * size + 0.02 * torch.randn(40, 128, generator=g)).bfloat16()[None, :, None]
    k = k.bfloat16()[None, :, None]
    v = torch.randn(1, keys, 1, 128, generator=g).bfloat16()
    numerics = ALL[name]
    result = attention(q, k, v.float(), numerics, scale=SCALE, return_lse=True)
    assert result.out.isfinite().all()
    assert result.lse.isfinite().all()
    # Against the softmax of the rounded operands, so that only P and the range are judged: at these sizes the rounding
    # of Q and K alone moves logits by tens.
    operands = reference.prepare(q, k, v.float(), numerics, SCALE)
    z = reference.logits(operands, slice(None), slice(None)).double()
    truth = z.softmax(-1) @ (operands.v * operands.v_scale).double()
    truth = truth if operands.v_mean is None else truth + operands.v_mean
    assert rel_l2(result.out[0, :, 0], truth[0]) < 0.45
    lse = z.logsumexp(-1) if operands.lse_shift is None else z.logsumexp(-1) + operands.lse_shift
    assert (result.lse[0, 0] - lse[0]).abs().max() < 0.75  # Direct-P's codes sum to within e^±.75 of the truth


def test_rows_out_of_range_are_counted():
    q, k, v = draw(20, 64)
    quiet = attention(q, k, v, FAST, scale=SCALE)
    loud = attention(q * 400, k, v, FAST, scale=SCALE)
    assert quiet.rows_shifted == 0
    assert loud.rows_shifted == 20


def test_shifting_a_row_changes_nothing_but_the_range():
    """The same scores 100 octaves higher give the same weights, in other units."""
    t = torch.randint(-4000, 4000, (1, 9, 96)).float() / 256
    plain, shifted = (reference._direct(t + n, FAST) for n in (0, 200))
    assert not plain.shifted.any()
    assert shifted.shifted.all()
    assert torch.equal(plain.codes, shifted.codes)
    assert torch.equal(plain.weight / plain.total[..., None], shifted.weight / shifted.total[..., None])


@settings(max_examples=30)
@given(octaves=st.integers(-60, 60), name=st.sampled_from(DIRECT), seed=st.integers(0, 50))
def test_an_integer_row_shift_changes_no_code(octaves, name, seed):
    """Scores on a grid that float32 holds exactly, so that adding an integer number of octaves is exact too."""
    t = torch.randint(-2000, 2000, (1, 4, 70), generator=torch.Generator().manual_seed(seed)).float() / 128
    a, b = (reference._direct(t + n, policies()[name].numerics) for n in (0, octaves))
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(a.weight / a.total[..., None], b.weight / b.total[..., None])
    assert torch.allclose(a.total.log2() + a.log2_unit + octaves, b.total.log2() + b.log2_unit, atol=1e-4)


@pytest.mark.parametrize("unit", ["raw", "log2"])
def test_guard_margin_units(unit):
    """`raw` adds M·ln 2 to the accumulator before the softmax scale: M/√128 octaves; `log2` adds M octaves."""
    q, k, _ = draw(6, 256)
    z = (q[0, :, 0].float() @ k[0, :, 0].float().T * SCALE)[None]
    numerics = Guard(110, 16, margin_unit=unit).apply(FAST)
    m = reference.row_reference(z, numerics, SCALE)
    octaves = (m[..., 0] - z[..., :128].amax(-1)) / LN_2
    assert torch.allclose(
        octaves, torch.full_like(octaves, 110 / math.sqrt(128) if unit == "raw" else 110.0), atol=1e-4
    )


@pytest.mark.parametrize("unit", ["raw", "log2"])
def test_guarded_rows_with_a_late_peak(unit):
    """A key outside the anchor towers over it: the guard's row still finds it."""
    q, k, v = draw(16, 640)
    k[:, 5] = 9 * q[:, :1].mean(1) + 12 * q[:, 3]
    numerics = Guard(110, 16, margin_unit=unit).apply(FAST)
    result = attention(q, k, v.float(), numerics, scale=SCALE, return_lse=True)
    operands = reference.prepare(q, k, v.float(), numerics, SCALE)
    z = reference.logits(operands, slice(None), slice(None))
    assert z.max() - reference.row_reference(z, numerics, SCALE).min() > 20
    truth = z.softmax(-1) @ (operands.v * operands.v_scale)
    assert rel_l2(result.out[0, 3, 0], truth[0, 3]) < 0.02
    assert (result.lse[0, 0] - z.logsumexp(-1)[0]).abs().max() < 0.75


@settings(max_examples=20)
@given(keys=st.integers(1, 400), name=st.sampled_from(ROUNDING), seed=st.integers(0, 99))
def test_v_one_hot_returns_the_normalised_codes(keys, name, seed):
    """With V the identity (as far as 128 columns go), the output's columns are the row's own normalised weights."""
    numerics = policies()[name].numerics
    q, k, _ = draw(3, keys, seed=seed)
    v = torch.zeros(1, keys, 1, 128)
    chosen = torch.randperm(keys, generator=torch.Generator().manual_seed(seed))[:128]
    v[0, chosen, 0, torch.arange(len(chosen))] = 1.0
    out = attention(q, k, v, numerics, scale=SCALE).out[0, :, 0]
    operands = reference.prepare(q, k, v, numerics, SCALE)
    z = reference.logits(operands, slice(None), slice(None))
    weights = reference.probabilities(z, reference.row_reference(z, numerics, SCALE), numerics)
    share = (weights.weight / weights.total[..., None])[0]
    if operands.order is not None:
        share = share[:, torch.argsort(operands.order)]
    # NVFP4 cannot hold 1 exactly (6·E4M3(1/6) = 1.03125), hence the factor.
    one = (operands.v * operands.v_scale).amax()
    assert one == (1.03125 if numerics.v == "nvfp4" else 1.0)
    assert torch.allclose(out[:, : len(chosen)], share[:, chosen] * one, rtol=1e-5, atol=1e-7)
    assert (out[:, len(chosen) :] == 0).all()
    if numerics.denominator == "codes":
        assert torch.allclose(share.sum(-1), torch.ones(3), atol=1e-5)


@pytest.mark.parametrize("name", list(ALL))
def test_heads_and_batch_are_independent(name):
    q, k, v = draw(37, 70, batch=2, heads=3, seed=4)
    out = attention(q, k, v, ALL[name], scale=SCALE).out
    order = torch.tensor([2, 0, 1])
    moved = attention(*(t.flip(0)[:, :, order] for t in (q, k, v)), ALL[name], scale=SCALE).out
    assert rel_l2(moved, out.flip(0)[:, :, order]) < 1e-3
    alone = attention(q[1:, :, 2:], k[1:, :, 2:], v[1:, :, 2:], ALL[name], scale=SCALE).out
    assert rel_l2(alone, out[1:, :, 2:]) < 1e-3


@pytest.mark.parametrize("name", list(ALL))
def test_inputs_are_bit_unchanged_and_strides_do_not_matter(name):
    q, k, v = draw(40, 50, heads=2)
    strided = [torch.empty(1, 2, t.shape[1], 128, dtype=t.dtype).transpose(1, 2).copy_(t) for t in (q, k, v)]
    before = [t.clone() for t in strided]
    a = attention(q, k, v, ALL[name], scale=SCALE).out
    b = attention(*strided, ALL[name], scale=SCALE).out
    assert torch.equal(a, b)
    assert all(torch.equal(x, y) for x, y in zip(strided, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tiling_and_dtype(dtype, monkeypatch):
    q, k, v = draw(300, 333, heads=2, dtype=dtype)
    whole = attention(q, k, v, FAST, scale=SCALE, return_lse=True)
    monkeypatch.setattr(reference, "_TILE_ELEMENTS", 333 * 20)
    tiled = attention(q, k, v, FAST, scale=SCALE, return_lse=True)
    assert whole.out.dtype == dtype
    assert rel_l2(tiled.out, whole.out) < 1e-3
    assert torch.allclose(whole.lse, tiled.lse, atol=1e-3)


def test_smoothing_leaves_exact_softmax_unchanged():
    q, k, v = draw(300, 300, heads=2, dtype=torch.float32)
    k, q, v = k + 3 * torch.randn(128), q + torch.randn(128), v + 2
    plain = attention(q, k, v, Numerics(), scale=SCALE, return_lse=True)
    smooth = attention(q, k, v, Numerics(smooth_k=True, smooth_q=True, smooth_v=True), scale=SCALE, return_lse=True)
    assert rel_l2(smooth.out, plain.out) < 1e-5
    assert (smooth.lse - plain.lse).abs().max() < 1e-4
    assert rel_l2(plain.out, exact(q, k, v)) < 1e-5
    assert torch.allclose(plain.lse, exact_lse(q, k, SCALE), atol=1e-4)


def test_smoothing_helps_where_there_is_something_to_smooth():
    q, k, v = draw(256, 512, dtype=torch.float32)
    k, v = k + 6 * torch.randn(128), v + 3
    errors = {
        smooth: rel_l2(
            attention(q, k, v, dataclasses.replace(FAST, smooth_k=smooth, smooth_v=smooth), scale=SCALE).out,
            exact(q, k, v),
        )
        for smooth in (False, True)
    }
    assert errors[True] < 0.75 * errors[False]


def test_one_key_returns_its_value():
    q, k, v = draw(4, 1)
    for name in ROUNDING:
        out = attention(q, k, v.float(), policies()[name].numerics, scale=SCALE).out
        assert rel_l2(out, v.float().expand_as(out)) < 0.2, name


@pytest.mark.parametrize("name", list(ALL))
def test_nan_reaches_the_output(name):
    q, k, v = draw(5, 40)
    q[0, 2, 0, 7] = math.nan
    out = attention(q, k, v, ALL[name], scale=SCALE).out[0, :, 0]
    assert out[2].isnan().all()
    if not ALL[name].smooth_q and ALL[name].qk != "mxfp8-token-block":  # one mean, one exponent for several rows
        assert out[[0, 1, 3, 4]].isfinite().all()
    q[0, 2, 0, 7], k[0, 30, 0, 3] = 0, math.nan
    assert attention(q, k, v, ALL[name], scale=SCALE).out.isnan().any()


def test_anchor_order_moves_linspace_keys_to_the_front():
    order = reference.key_order(1000, "anchor32", torch.device("cpu"))
    assert sorted(order.tolist()) == list(range(1000))
    assert order[:32].tolist() == np.round(np.linspace(0, 999, 32)).astype(int).tolist()
    assert order[32:].tolist() == sorted(order[32:].tolist())
    assert reference.key_order(5, "anchor32", torch.device("cpu")).tolist() == [0, 1, 2, 3, 4]


def test_mix_lanes_density():
    for density, share in ((1, 0.25), (2, 0.5), (4, 1.0)):
        lanes = reference.mix_lanes(4, density, torch.device("cpu"))
        assert lanes.float().mean(1).tolist() == [share] * 4
    pairs = reference.mix_lanes(8, 1, torch.device("cpu"))[6, ::2].nonzero().flatten().tolist()
    assert pairs == [2, 4, 10, 12]  # block 6 is block 2 of its 128 keys


@pytest.mark.slow
def test_wan_length_fits_in_two_gib():
    """S = 32,760, one head, in its own process, so that the peak is this call's alone."""
    code = """
import resource, torch
from wanfp4.kernels.reference import attention
from wanfp4.policy import policies
torch.set_num_threads(2)
q, k, v = (torch.randn(1, 32760, 1, 128).bfloat16() for _ in range(3))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = attention(q, k, v, policies()["wan-fast"].numerics, scale=128**-0.5, return_lse=True)
assert out.out.isfinite().all()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 2.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", list(ALL))
def test_cuda_agrees_with_the_cpu(name):
    q, k, v = draw(300, 555, heads=2, batch=2)
    cpu = attention(q, k, v.float(), ALL[name], scale=SCALE, return_lse=True)
    gpu = attention(q.cuda(), k.cuda(), v.float().cuda(), ALL[name], scale=SCALE, return_lse=True)
    assert rel_l2(gpu.out.cpu(), cpu.out) < 2e-3
    assert (gpu.lse.cpu() - cpu.lse).abs().median() < 1e-5
