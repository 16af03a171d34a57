"""Figures of shadow attention against independent float64 arithmetic: NumPy, the rules of tests/kernels/naive.py."""

import dataclasses
import math

import naive
import numpy as np
import pytest
import torch

from wanfp4.kernels import dispatch
from wanfp4.policy import EXACT, Numerics, get_policy, policies
from wanfp4.processors.session import Call, Site
from wanfp4.quality import shadow
from wanfp4.quality.shadow import FIGURES, Place, Shadow, query_blocks, spaced
from wanfp4.receipt import Ran

SCALE = 1 / math.sqrt(128)


def call(q, k, v, numerics, *, out=None, own=None, layer=0, step=0, branch="cond"):
    """A call as a patch hands it on; the policy's result and the pipeline's own are computed unless given."""
    out = dispatch.run(q, k, v, numerics, backend="reference").out if out is None else out
    own = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2) \
        if own is None else own  # fmt: skip
    ran = Ran("some policy", numerics.label, "reference", emulated=True)
    return Call("transformer", Site("blocks", layer, 4), step, 0.5, branch, q, k, v, out, numerics, ran, lambda: own)


def tensors(seed, tokens, heads=2, batch=1, sharpness=1.5):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, batch, tokens, heads, 128, generator=generator)
    return q * sharpness, k + 0.3, v


def record(one, **options):
    watcher = Shadow(**options)
    given = watcher(one)
    [found] = watcher.take()
    assert watcher.take() == []
    return found, given


def head(t, h, b=0):
    return t[b, :, h].double().numpy()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["wan-fast", "nvfp4", "nvfp4-bf16"])
def test_every_figure_equals_float64_arithmetic(name, batch):
    """105 tokens: all rows are sampled, so nothing is estimated."""
    q, k, v = tensors(3, 105, batch=batch)
    numerics = get_policy(name).numerics
    out = dispatch.run(q, k, v, numerics, backend="reference").out
    own = torch.randn(q.shape, generator=torch.Generator().manual_seed(0))
    found, _ = record(call(q, k, v, numerics, out=out, own=own), rows=105)
    assert found.place == Place("transformer", "blocks", 0, 0, "cond")
    assert list(found.figures) == list(found.heads) == list(FIGURES)

    each = {name: [] for name in ("e", "b", "ab", "aa", "f", "x", "largest", "variance", "entropy")}
    for h in range(2):
        rows = {name: [] for name in each}
        for b in range(batch):
            a, r = head(out, h, b), head(own, h, b)
            z = head(q, h, b) @ head(k, h, b).T * SCALE
            p = np.exp(z - z.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            exact = p @ head(v, h, b)
            rows["e"].append(((a - r) ** 2).sum())
            rows["b"].append((r**2).sum())
            rows["ab"].append((a * r).sum())
            rows["aa"].append((a**2).sum())
            rows["f"].append(((r - exact) ** 2).sum())
            rows["x"].append((exact**2).sum())
            rows["largest"].append(np.abs(z).max())
            rows["variance"].append(z.var(1).mean())
            rows["entropy"].append(-(p * np.log(p)).sum(1).mean())
        for key, values in rows.items():
            each[key].append(max(values) if key == "largest" else np.mean(values))
    e, b, ab, aa, f, x = (np.array(each[name]) for name in ("e", "b", "ab", "aa", "f", "x"))
    expected = {
        "rel_l2": (np.sqrt(e.sum() / b.sum()), np.sqrt(e / b)),
        "cosine": (ab.sum() / np.sqrt(aa.sum() * b.sum()), ab / np.sqrt(aa * b)),
        "floor": (np.sqrt(f.sum() / x.sum()), np.sqrt(f / x)),
        "largest_logit": (max(each["largest"]), each["largest"]),
        "logit_std": (np.sqrt(np.mean(each["variance"])), np.sqrt(each["variance"])),
        "entropy": (np.mean(each["entropy"]), each["entropy"]),
    }
    for figure, (whole, heads) in expected.items():
        assert found.figures[figure] == pytest.approx(whole, rel=2e-5), figure
        assert found.heads[figure] == pytest.approx(list(heads), rel=2e-5), figure


# The naive rules know these formats of P.
KNOWN = ("mxfp4-direct", "nvfp4", "fp8", "fp8-direct", "mxfp8")
FORMATS = [n for n, policy in policies().items() if policy.numerics.p in KNOWN]


@pytest.mark.parametrize("name", FORMATS)
def test_zero_codes_are_those_of_the_naive_rules(name):
    """With the identity for V, attention's output is P itself: an entry is 0 where its code is."""
    numerics = dataclasses.replace(get_policy(name).numerics, smooth_v=False)
    q, k, v = tensors(5, 300, sharpness=3)
    found, _ = record(call(q, k, v, numerics), rows=24)
    rows = spaced(24, 300)
    shares = []
    for h in range(2):
        one = [head(t, h).astype(np.float32) for t in (q, k)]
        p = naive.attention(*one, np.eye(300, dtype=np.float32), dataclasses.replace(numerics, v="exact"), SCALE)
        shares.append((p[rows] == 0).mean())
    assert found.heads["zero_codes"] == pytest.approx(shares, abs=2e-3)
    assert found.figures["zero_codes"] == pytest.approx(np.mean(shares), abs=2e-3)
    if numerics.p in ("mxfp4-direct", "nvfp4"):
        assert np.mean(shares) > 0.1


def test_clipped_direct_p_is_what_exceeds_its_blocks_amplitude():
    numerics = get_policy("wan-fast").numerics
    q, k, v = tensors(7, 290, sharpness=2)
    found, _ = record(call(q, k, v, numerics), rows=290)
    for h in range(2):
        q4, k4 = (np.stack([naive.folded_row(r) for r in head(t, h).astype(np.float32)]) for t in (q, k))
        t = (q4.astype(np.float64) @ k4.T * SCALE) * math.log2(math.e)
        clipped = 0
        for row in t:
            for start in range(0, 290, 32):
                block = row[start : start + 32]
                clipped += (block > math.floor(block.max() + 0.41504)).sum()
        assert found.heads["clipped"][h] == pytest.approx(clipped / t.size, abs=1e-4)
        assert clipped > 100


def test_clipped_nvfp4_is_what_exceeds_six_times_its_blocks_scale():
    numerics = get_policy("nvfp4").numerics
    q, k, v = tensors(8, 120, sharpness=2)
    found, _ = record(call(q, k, v, numerics), rows=120)
    for h in range(2):
        q4, k4 = (np.stack([naive.nvfp4_row(r) for r in head(t, h).astype(np.float32)]) for t in (q, k))
        z = q4.astype(np.float64) @ k4.T * SCALE
        p = np.exp(z - z.max(1, keepdims=True))
        clipped = 0
        for row in p:
            for start in range(0, 120, 16):
                block = row[start : start + 16]
                scale = float(naive.e4m3(np.float32(block.max() / 6)))
                clipped += (block > 6 * scale * 1.0001).sum() if scale > 0 else 0
        assert found.heads["clipped"][h] == pytest.approx(clipped / p.size, abs=1e-3)
        assert clipped > 50


@pytest.mark.parametrize("name", policies())
def test_what_the_reference_ran_is_explained_and_what_it_did_not_is_not(name):
    numerics = get_policy(name).numerics
    one = call(*tensors(6, 300), numerics)
    found, _ = record(one, rows=40)
    assert found.figures["unexplained"] < 1e-5
    out = one.out.clone()
    out[:, :, 1] += 0.1 * out[:, :, 1].norm() / 300**0.5 / 128**0.5 * torch.ones(128)
    off, _ = record(dataclasses.replace(one, out=out), rows=300)
    exact = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (one.q, one.k, one.v)))
    expected = float((out - one.out)[:, :, 1].norm() / exact[:, 1].norm())
    assert off.heads["unexplained"][1] == pytest.approx(expected, rel=1e-3)
    assert off.heads["unexplained"][0] < 1e-5


def test_formats_that_round_no_codes_have_neither_zeros_nor_clipping():
    q, k, v = tensors(9, 64)
    found, _ = record(call(q, k, v, EXACT), rows=64)
    assert (found.figures["zero_codes"], found.figures["clipped"]) == (0, 0)
    assert found.figures["rel_l2"] < 1e-6


@pytest.mark.parametrize("name", ["wan-two-piece", "nvfp4", "direct-p-accurate", "sage3"])
def test_a_sample_of_rows_and_keys_estimates_the_whole(name, monkeypatch):
    numerics = get_policy(name).numerics
    q, k, v = tensors(11, 1500, sharpness=2)
    whole, _ = record(call(q, k, v, numerics), rows=1500)
    for cached in (shadow._indices, shadow._key_indices):
        cached.cache_clear()
        monkeypatch.setattr(shadow, cached.__name__, cached.__wrapped__)
    monkeypatch.setattr(shadow, "QUERY_BLOCKS", 3)
    monkeypatch.setattr(shadow, "KEY_TILES", 4)
    part, _ = record(call(q, k, v, numerics), rows=96)
    assert part.figures["rel_l2"] == whole.figures["rel_l2"]
    for figure in ("zero_codes", "clipped"):
        assert part.figures[figure] == pytest.approx(whole.figures[figure], rel=0.15), figure
    for figure in ("logit_std", "entropy"):
        assert part.figures[figure] == pytest.approx(whole.figures[figure], rel=0.05), figure
    assert 0 < part.figures["largest_logit"] <= whole.figures["largest_logit"]


def test_calls_evaluated_together_have_the_figures_of_each_alone(monkeypatch):
    calls = [call(*tensors(i, 140), get_policy(name).numerics, layer=i) for i, name in
             enumerate(["wan-fast", "nvfp4", "wan-fast", "wan-fast", "bf16"])]  # fmt: skip
    alone = [record(one)[0] for one in calls]
    for limit in (1, 2**30):
        monkeypatch.setattr(shadow, "_PENDING_BYTES", limit)
        watcher = Shadow()
        for one in calls:
            watcher(one)
        together = watcher.take()
        assert [r.place for r in together] == [r.place for r in alone]
        for a, b in zip(together, alone, strict=True):
            assert a.figures == pytest.approx(b.figures, rel=1e-6, abs=1e-9)


def test_chunks_change_nothing(monkeypatch):
    one = call(*tensors(2, 200, heads=3), get_policy("wan-fast").numerics)
    whole, _ = record(one)
    monkeypatch.setattr(shadow, "_ELEMENTS", 1000)
    monkeypatch.setattr(shadow, "_CPU_ELEMENTS", 1)
    chunked, _ = record(one)
    assert chunked.figures == pytest.approx(whole.figures, rel=1e-6)


def test_what_goes_on_is_the_pipelines_own_or_the_policys():
    one = call(*tensors(1, 64), get_policy("nvfp4").numerics)
    assert record(one, forced=True)[1] is one.own()
    assert record(one, forced=False)[1] is None


def test_samples_do_not_see_what_the_model_writes_later():
    q, k, v = tensors(1, 64)
    one = call(q, k, v, get_policy("nvfp4").numerics)
    expected, _ = record(one)
    watcher = Shadow()
    watcher(one)
    for t in (q, k, v, one.out, one.own()):
        t.zero_()
    assert watcher.take()[0].figures == expected.figures


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_result_is_never_a_healthy_figure(bad):
    q, k, v = tensors(1, 64)
    out = v.clone()
    out[0, 3, 1, 5] = bad
    found, _ = record(call(q, k, v, get_policy("nvfp4").numerics, out=out))
    assert math.isnan(found.figures["rel_l2"])
    assert [math.isnan(x) for x in found.heads["rel_l2"]] == [False, True]


def test_samples_are_even_and_keep_whole_blocks():
    assert spaced(3, 9) == [0, 4, 8]
    assert spaced(9, 3) == [0, 1, 2]
    assert spaced(1, 5) == [0]
    assert query_blocks(300, 16) == list(range(300))
    assert query_blocks(1000, 2) == [*range(128), *range(896, 1000)]


def test_numerics_without_a_preset_work_too():
    numerics = Numerics(qk="nvfp4", p="mxfp4-direct", v="bf16", row_reference="anchor128", margin=2.0,
                        margin_unit="log2", smooth_q=True, smooth_k=True, global_scale=True)  # fmt: skip
    found, _ = record(call(*tensors(4, 260), numerics))
    assert all(math.isfinite(value) for value in found.figures.values())


@pytest.mark.parametrize("keys", [1, 4096, 8192, 8195, 20_001])
def test_long_sums_in_parts_are_the_product(keys):
    g = torch.Generator().manual_seed(keys)
    p, v = torch.rand(2, 3, keys, generator=g), torch.randn(2, keys, 4, generator=g)
    exact = p.double() @ v.double()
    assert (shadow._weighted(p, v) - exact).norm() < 1e-5 * exact.norm()
