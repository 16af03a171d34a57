"""Observers of a patch see every self-attention call as it ran, and may put another result in its place."""

import pytest
import torch
from tiny import TOKENS, generate, tiny_pipeline

import wanfp4
from wanfp4.policy import EXACT, Guard, get_policy
from wanfp4.processors.patch import patch


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipeline()


def test_every_call_is_seen_where_it_ran(pipe):
    seen = []
    with patch(pipe, "wan-fast") as handle:
        with handle.observing(lambda call: seen.append(call)):
            observed = generate(pipe, steps=2)
        again = generate(pipe, steps=2)
        assert handle.receipt().calls == 2 * len(seen)
    assert torch.equal(observed, again)
    places = [(call.step, call.branch, call.site.layer, call.expert) for call in seen]
    assert places == [(s, b, layer, "transformer") for s in (0, 1) for b in ("cond", "uncond") for layer in (0, 1)]
    assert [call.sigma for call in seen] == sorted((call.sigma for call in seen), reverse=True)
    for call in seen:
        assert call.q.shape == call.k.shape == call.v.shape == call.out.shape == (1, TOKENS, 2, 128)
        assert torch.equal(call.out, wanfp4.attention(call.q, call.k, call.v, "wan-fast"))
        q, k, v = (t.double().transpose(1, 2) for t in (call.q, call.k, call.v))
        exact = ((q @ k.transpose(-1, -2) / 128**0.5).softmax(-1) @ v).transpose(1, 2)
        torch.testing.assert_close(call.own().double(), exact, atol=1e-5, rtol=1e-5)
        assert call.numerics == get_policy("wan-fast").numerics


def test_what_an_observer_returns_goes_on_in_the_model(pipe):
    plain = generate(pipe, steps=2)
    with patch(pipe, "wan-fast") as handle, handle.observing(lambda call: call.own()):
        assert torch.equal(generate(pipe, steps=2), plain)
        assert handle.receipt().entries[0].ran.name == "wan-fast"


def test_the_observer_goes_with_the_block_even_on_an_error(pipe):
    def fail(call):
        raise RuntimeError("no")

    with patch(pipe, "wan-fast") as handle:
        with pytest.raises(RuntimeError, match="no"), handle.observing(fail):
            generate(pipe, steps=1)
        generate(pipe, steps=1)


def test_the_numerics_are_those_that_ran(pipe):
    seen = []
    guard = Guard(64, 8, logit_limit=0.0)
    policy = get_policy("wan-fast").with_(name="guarded", guard=guard, rules=[{"numerics": "bf16", "layers": [1]}])
    with patch(pipe, policy) as handle, handle.observing(lambda call: seen.append(call)):
        generate(pipe, steps=1)
    for call in seen:
        if call.site.layer == 1:
            assert call.numerics == EXACT
            assert call.own() is call.out
        else:
            assert call.numerics == guard.apply(policy.numerics) != policy.numerics
            assert call.ran.guarded
