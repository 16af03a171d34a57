"""The backend "triton" against the reference: the same kernels in Triton's interpreter, in a process of their own."""

import dataclasses

import pytest
import torch
from interpreter import Interpreter

from wanfp4.kernels import emulated, reference
from wanfp4.policy import Classifier, Guard, Numerics, policies

SCALE = 128**-0.5
POLICIES = {name: policy.numerics for name, policy in policies().items() if not policy.numerics.is_exact}
FAST = POLICIES["wan-fast"]
EXTRA = {
    "fast, K, Q and V smoothed": dataclasses.replace(FAST, smooth_k=True, smooth_q=True, smooth_v=True),
    "two-piece-nv, K and V smoothed": dataclasses.replace(POLICIES["wan-two-piece-nv"], smooth_k=True, smooth_v=True),
    "fp8, V smoothed": dataclasses.replace(POLICIES["nvfp4-fp8"], smooth_v=True),
    "fp8, high peak": dataclasses.replace(POLICIES["nvfp4-fp8"], p_peak=1000.0, denominator="codes"),
    "nvfp4, codes": dataclasses.replace(POLICIES["nvfp4"], denominator="codes"),
    "two-piece-nv, exact": dataclasses.replace(POLICIES["wan-two-piece-nv"], denominator="exact"),
    "mxfp8, exact": dataclasses.replace(POLICIES["mxfp8-token-block"], denominator="exact"),
    "guarded, raw margin": Guard(110, 16).apply(FAST),
    "guarded, log2 margin": Guard(110, 16, margin_unit="log2").apply(FAST),
    "mix density 2": dataclasses.replace(FAST, classifier=Classifier("mix", 1.65, 0.8, density=2)),
    "mix density 4": dataclasses.replace(FAST, classifier=Classifier("mix", 1.65, 0.8, density=4)),
    "affine beyond 7": dataclasses.replace(FAST, classifier=Classifier("affine", 2.5, 0.5)),
    "direct, rowmax": dataclasses.replace(FAST, row_reference="rowmax"),
    "direct, exact denominator": dataclasses.replace(FAST, denominator="exact"),
    "P alone": Numerics(p="mxfp4-direct", classifier=FAST.classifier, denominator="codes"),
    "bf16 V": dataclasses.replace(POLICIES["nvfp4-bf16"], v="exact"),
}
ALL = POLICIES | EXTRA


@pytest.fixture(scope="session")
def interpreter():
    child = Interpreter()
    yield child
    child.close()


def draw(queries, keys, *, batch=1, heads=1, sharpness=1.0, seed=0, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, queries, heads, 128, generator=g) * sharpness
    k, v = (torch.randn(batch, keys, heads, 128, generator=g) for _ in range(2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def rel_l2(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def run(interpreter, q, k, v, numerics, guard=None, scale=SCALE, config=None):
    assert emulated.limits(numerics) is None
    done = interpreter.call("wanfp4.kernels.emulated:run", q, k, v, numerics, guard, scale, True, config)
    return emulated.Launched(*done)


def check(mine, q, k, v, numerics, scale=SCALE, limit=2e-3):
    truth = reference.attention(q, k, v.float(), numerics, scale=scale, return_lse=True)
    out = truth.out.to(v.dtype)
    assert mine.out.shape == out.shape
    assert mine.out.dtype == v.dtype
    assert rel_l2(mine.out, out) < limit
    assert ((mine.lse - truth.lse).abs() / truth.lse.abs().clamp(min=1)).median() < 1e-5
    assert ((mine.lse - truth.lse).abs() / truth.lse.abs().clamp(min=1)).max() < 1e-3


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize("shape", [(1, 1), (5, 31), (130, 300)], ids=str)
def test_agrees_with_the_reference(interpreter, name, shape):
    dtype = torch.bfloat16
    q, k, v = draw(*shape, sharpness=2.0, seed=sum(shape), dtype=dtype)
    v = v if ALL[name].v == "exact" else v.float()  # so that the output's rounding hides nothing
    check(run(interpreter, q, k, v, ALL[name]), q, k, v, ALL[name])
