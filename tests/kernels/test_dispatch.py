"""The public `attention`, the choice of backends, and refusals that say what was found and what is needed."""

import dataclasses

import pytest
import torch

import wanfp4
from wanfp4.errors import BackendError, PolicyError, UnsupportedInputError
from wanfp4.kernels import dispatch, reference
from wanfp4.policy import EXACT, Guard, policies


def draw(tokens=70, keys=None, heads=2, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, heads, 128, generator=g).to(dtype) for n in (tokens, keys or tokens, keys or tokens)]


@pytest.mark.parametrize("name", list(policies()))
def test_every_policy_runs_and_keeps_shape_and_dtype(name):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        q, k, v = draw(33, 70, dtype=dtype)
        out, lse = wanfp4.attention(q, k, v, name, return_lse=True)
        assert (out.shape, out.dtype) == (q.shape, dtype)
        assert (lse.shape, lse.dtype) == ((1, 2, 33), torch.float32)
        assert torch.equal(out, wanfp4.attention(q, k, v, policies()[name]))


def test_bf16_is_pytorchs_own_attention():
    q, k, v = draw()
    truth = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    assert torch.equal(wanfp4.attention(q, k, v, "bf16"), truth)
    again = wanfp4.attention(q, k, v, "bf16", backend="reference")  # the noise floor: another exact implementation
    assert 0 < (again - truth).float().norm() / truth.float().norm() < 0.01


def test_scale_is_respected():
    q, k, v = draw()
    a = wanfp4.attention(q, k, v, "wan-fast", scale=0.05)
    b = wanfp4.attention(q, k, v, "wan-fast")
    assert not torch.equal(a, b)
    flat = wanfp4.attention(q, k, v.float(), "bf16", scale=0.0)
    assert torch.allclose(flat, v.float().mean(1, keepdim=True).expand_as(flat), atol=1e-5)


def test_fastest_that_can_run_is_taken():
    cpu = torch.device("cpu")
    assert dispatch.select(EXACT, cpu).name == "sdpa"
    assert dispatch.select(policies()["wan-fast"].numerics, cpu).name == "reference"
    assert dispatch.select(EXACT, cpu, "reference").name == "reference"


def test_emulation_on_the_gpu_comes_before_the_reference(monkeypatch):
    ready = [
        dataclasses.replace(b, missing=lambda: None, refuses=lambda *_: None) if b.name == "triton" else b
        for b in dispatch.backends()
    ]
    monkeypatch.setattr(dispatch, "_BACKENDS", tuple(ready))
    assert dispatch.select(policies()["wan-fast"].numerics, torch.device("cpu")).name == "triton"


def test_named_backend_runs_or_says_why_not():
    q, k, v = draw()
    with pytest.raises(BackendError, match=r"'cutlass'; .* has sm100, sm90, sm89, sdpa, triton, reference"):
        wanfp4.attention(q, k, v, backend="cutlass")
    with pytest.raises(BackendError, match="backend 'sdpa' cannot run this on cpu: it rounds nothing"):
        wanfp4.attention(q, k, v, backend="sdpa")


def test_no_backend_lists_every_reason(monkeypatch):
    broken = [dataclasses.replace(b, missing=lambda: "its library is not installed") for b in dispatch.backends()]
    monkeypatch.setattr(dispatch, "_BACKENDS", tuple(broken))
    with pytest.raises(
        BackendError, match=r"sdpa: its library is not installed; triton: its library.*; reference: its"
    ):
        wanfp4.attention(*draw())


def test_guard_acts_when_sampled_logits_exceed_the_limit():
    q, k, v = draw(300)
    policy = policies()["wan-fast"].with_(guard=Guard(110, 16, logit_limit=40.0))
    quiet = dispatch.run(q, k, v, policy.numerics, guard=policy.guard)
    assert quiet.notes == {}
    loud = dispatch.run(q * 30, k, v, policy.numerics, guard=policy.guard)
    assert loud.notes["guarded"] == 1
    expected = reference.attention(q * 30, k, v, policy.guard.apply(policy.numerics), scale=128**-0.5)
    assert torch.equal(loud.out, expected.out)
    never = dispatch.run(q * 30, k, v, policy.numerics, guard=None)
    assert "guarded" not in never.notes
    assert never.notes["rows_shifted"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[..., :64], k[..., :64], v[..., :64]), "head_dim 64; 4-bit attention needs head_dim 128"),
        (lambda q, k, v: (q[0], k, v), r"q must be \[batch, tokens, heads, 128\]; found shape"),
        (lambda q, k, v: (q.double(), k, v), "q must be bfloat16, float16 or float32; found torch.float64"),
        (lambda q, k, v: (q, k[:, :5], v), "must agree"),
        (lambda q, k, v: (q, k[:, :, :1], v[:, :, :1]), "must agree in batch and heads"),
        (lambda q, k, v: (q, k[:, :0], v[:, :0]), "k is empty"),
        (lambda q, k, v: (q.float().requires_grad_(), k, v), "no backward pass"),
        (lambda q, k, v: (q, k.to("meta"), v), "on one device; found cpu, meta, cpu"),
    ],
)
def test_inputs_that_cannot_be_taken(change, message):
    with pytest.raises(UnsupportedInputError, match=message):
        wanfp4.attention(*change(*draw()))


def test_mask_and_unknown_policy():
    q, k, v = draw()
    with pytest.raises(UnsupportedInputError, match="takes no attn_mask"):
        wanfp4.attention(q, k, v, attn_mask=torch.ones(70, 70))
    with pytest.raises(PolicyError, match="unknown policy 'fast'; presets are"):
        wanfp4.attention(q, k, v, policy="fast")


def test_gradients_are_fine_under_no_grad():
    q, k, v = draw(dtype=torch.float32)
    q.requires_grad_()
    with torch.no_grad():
        assert wanfp4.attention(q, k, v).isfinite().all()


def test_autocast_does_not_reach_the_reference():
    q, k, v = draw(dtype=torch.float32)
    plain = wanfp4.attention(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(wanfp4.attention(q, k, v), plain)
