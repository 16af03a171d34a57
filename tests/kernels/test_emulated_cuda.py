"""The backend "triton" on a GPU, against the reference on the same GPU, at real sizes."""

import dataclasses
import importlib.util
import math
from pathlib import Path

import pytest
import torch
from emulated_cases import ALL, FAST, POLICIES, SCALE, check, draw, rel_l2

import wanfp4
from wanfp4.kernels import dispatch, emulated, formats, reference
from wanfp4.policy import Guard, policies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [(1, 1), (33, 200), (300, 129), (640, 1), (1024, 4096), (4096, 1000)]


def on_gpu(*tensors):
    return tuple(t.cuda() for t in tensors)


def runs_here(numerics):
    """Direct-P has kernels of its own where this backend has none for it."""
    return emulated.refuses(numerics, torch.device("cuda")) is None


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_the_reference(name, shape):
    if not runs_here(ALL[name]):
        assert "sm100" in emulated.refuses(ALL[name], torch.device("cuda"))
        return
    q, k, v = on_gpu(*draw(*shape, batch=2, heads=3, sharpness=1.5, seed=sum(shape)))
    v = v if ALL[name].v == "exact" else v.float()
    check(emulated.run(q, k, v, ALL[name], None, SCALE, True), q, k, v, ALL[name])


@pytest.mark.parametrize("name", list(ALL))
def test_every_configuration_gives_the_same(name):
    numerics = ALL[name]
    if not runs_here(numerics):
        return
    q, k, v = on_gpu(*draw(513, 1111, heads=2))
    v = v if numerics.v == "exact" else v.float()
    for config in emulated.configs(numerics, torch.cuda.get_device_capability()):
        check(emulated.run(q, k, v, numerics, None, SCALE, True, config), q, k, v, numerics)


@pytest.mark.parametrize("name", list(ALL))
def test_operands_and_codes(name):
    """Operands bit for bit; codes of P, with V the identity, but for few that the order of additions moves."""
    numerics = ALL[name]
    q, k, v = on_gpu(*draw(2048, 128, heads=4, sharpness=3.0))
    mine = emulated.quantize(q, k, v, numerics, None, SCALE, True)
    truth = reference.prepare(q, k, v, numerics, SCALE)
    for letter, smoothed in (("q", numerics.smooth_q), ("k", numerics.smooth_k)):
        same = (getattr(mine, letter).float() == getattr(truth, letter)).float().mean().item()
        assert same == 1 if not smoothed else same > 0.999, f"{letter}: {same} are the reference's"
    if not runs_here(numerics):
        return
    one_hot = torch.eye(128, device="cuda")[None, :, None].expand(1, 128, 4, 128)
    numerics = dataclasses.replace(numerics, v="bf16", smooth_v=False)
    found = emulated.run(q, k, one_hot, numerics, None, SCALE, True)
    wanted = reference.attention(q, k, one_hot, numerics, scale=SCALE, return_lse=True)
    # Weights, not quotients: one code moved would move the row's sum, and all of the row with it.
    weights = found.out * (found.lse - wanted.lse).exp().transpose(1, 2)[..., None]
    off = ((weights - wanted.out).abs() > 1e-4 * wanted.out.abs() + 1e-9).float().mean().item()
    # BF16's P has boundaries 32 times as dense as E4M3's.
    limit = 5e-3 if numerics.p == "bf16" else 5e-4 if "fp8" in numerics.p else 1e-4
    print(f"{name}: {off:.1e} of the codes differ, the limit is {limit:.0e}")
    assert off < limit


def test_quotients_and_roundings_are_those_of_ieee_754():
    path = Path(__file__).with_name("emulated_arithmetic.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    arithmetic = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(arithmetic)
    x, scale = arithmetic.cases("cuda")
    assert torch.equal(arithmetic.quotients(x, scale), x / scale)
    x = arithmetic.numbers("cuda")
    assert torch.equal(arithmetic.rounded_e4m3(x, 1.0), formats.round_e4m3(x))


@pytest.mark.parametrize("name", list(POLICIES))
def test_wan_length_memory_and_determinism(name):
    """256 queries against Wan's 32,760 keys, then a whole call: the same bytes twice, 1.5 times Q, K and V at most."""
    numerics = POLICIES[name]
    if not runs_here(numerics):
        return
    q, k, v = on_gpu(*draw(256, 32_760, heads=2))
    check(emulated.run(q, k, v.float(), numerics, None, SCALE, True), q, k, v.float(), numerics)
    q, k, v = (torch.randn(1, 32_760, 12, 128, device="cuda").bfloat16() for _ in range(3))
    emulated.run(q[:, :128], k, v, numerics, None, SCALE, False)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first = emulated.run(q, k, v, numerics, None, SCALE, False).out
    assert torch.cuda.max_memory_allocated() - before <= 1.5 * 6 * q.numel()
    assert torch.equal(first, emulated.run(q, k, v, numerics, None, SCALE, False).out)


def test_offsets_beyond_two_to_the_31():
    """Heads of a tensor with more than 2^31 elements."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    whole = torch.empty(1, 17_000_000, 1, 128, dtype=torch.bfloat16, device="cuda")
    tail = whole[:, -300:]
    tail.normal_()
    strided = torch.as_strided(whole, (1, 300, 2, 128), (0, 128, whole.numel() - 300 * 128, 1))
    strided.normal_()
    numerics = POLICIES["nvfp4"]
    check(emulated.run(strided, strided, strided, numerics, None, SCALE, True), strided, strided, strided, numerics)


def test_guard_without_a_word_from_the_device():
    if not runs_here(FAST):
        return
    guard = Guard(110, 16, logit_limit=40.0)
    q, k, v = on_gpu(*draw(1000, 1500, heads=4))
    for factor in (1.0, 30.0):
        emulated.run(q, k, v.float(), FAST, guard, SCALE, True)  # compiled before nobody may wait
        torch.cuda.set_sync_debug_mode("error")
        try:
            mine = emulated.run(q * factor, k, v.float(), FAST, guard, SCALE, True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        guarded = reference.sampled_logit(q * factor, k, SCALE) > guard.logit_limit
        assert mine.flag.item() == guarded == (factor > 1)
        check(mine, q * factor, k, v.float(), guard.apply(FAST) if guarded else FAST)


@pytest.mark.parametrize("name", ["wan-fast", "wan-two-piece", "guarded, raw margin", "direct, rowmax", "nvfp4"])
@pytest.mark.parametrize("size", [30, 300, 1000])
def test_logits_that_climb_through_the_range(name, size):
    if not runs_here(ALL[name]):
        return
    g = torch.Generator().manual_seed(size)
    direction = torch.zeros(128)
    direction[:16] = 0.25 * 2 ** torch.arange(0, 1, 1 / 16)
    direction /= direction.norm()
    k = torch.linspace(-1, 1, 3000)[:, None] * direction * math.sqrt(128) + 0.1 * torch.randn(3000, 128, generator=g)
    q = direction * size + 0.02 * torch.randn(300, 128, generator=g)
    q, k = (t.bfloat16()[None, :, None].cuda() for t in (q, k))
    v = torch.randn(1, 3000, 1, 128, generator=g).cuda()
    check(emulated.run(q, k, v, ALL[name], None, SCALE, True), q, k, v, ALL[name], limit=2e-2)


@pytest.mark.parametrize("name", list(ALL))
def test_nan_reaches_the_output(name):
    if not runs_here(ALL[name]):
        return
    q, k, v = on_gpu(*draw(40, 300))
    q[0, 2, 0, 7] = math.nan
    out = emulated.run(q, k, v, ALL[name], None, SCALE, False).out[0, :, 0]
    assert out[2].isnan().all()
    if not ALL[name].smooth_q and ALL[name].qk != "mxfp8-token-block":
        assert out[3:].isfinite().all()
    q[0, 2, 0, 7], k[0, 30, 0, 3] = 0, math.nan
    assert emulated.run(q, k, v, ALL[name], None, SCALE, False).out.isnan().all()


@pytest.mark.parametrize("name", list(policies()))
def test_the_dispatcher_takes_it(name):
    q, k, v = on_gpu(*draw(300, 300, heads=2))
    policy = policies()[name]
    if policy.numerics.is_exact or torch.cuda.get_device_capability()[0] in (10, 11):
        return
    outcome = dispatch.run(q, k, v, policy.numerics, guard=policy.guard)
    fp8 = policy.numerics.qk == "mxfp8-token-block" and torch.cuda.get_device_capability() >= (8, 9)
    assert outcome.backend in ({"sm90", "sm89"} if fp8 else {"triton"})
    assert rel_l2(outcome.out, wanfp4.attention(q, k, v, name, backend="reference")) < (1e-2 if fp8 else 5e-3)
