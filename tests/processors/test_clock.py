"""Where a run is: step and noise level reach the policy however a pipeline tells them; an unknown one shows."""

import pytest
import torch
from diffusers import FirstBlockCacheConfig, FlowMatchEulerDiscreteScheduler
from tiny import TEXT_DIM, generate, tiny_pipeline, tiny_scheduler, tiny_transformer

import wanfp4
from wanfp4.errors import FallbackError
from wanfp4.processors.session import Clock

RULED = wanfp4.policies()["wan-fast"].with_(
    rules=(wanfp4.Rule("bf16", sigma=(0.9, 1.0)), wanfp4.Rule("nvfp4", sigma=(0.0, 0.6)))
)


def what_ran(handle):
    """{sigma of each step: name of what ran}, from a receipt."""
    sigmas = {}
    for entry in handle.receipt().entries:
        for step in entry.steps:
            (name,) = {e.ran.name for e in handle.receipt().at(step=step)}
            sigmas[step] = name
    return sigmas


@torch.no_grad()
def forward(model, timestep, text=32):
    return model(torch.randn(1, 16, 3, 10, 14), timestep, torch.randn(1, text, TEXT_DIM), return_dict=False)[0]


def test_sigma_rules_choose_by_noise_level_and_agree_between_4_and_8_steps():
    by_sigma = {}
    for steps in (4, 8):
        pipe = tiny_pipeline()
        with wanfp4.patch(pipe, RULED) as handle:
            generate(pipe, steps=steps)
        sigmas = [float(s) for s in pipe.scheduler.sigmas[:steps]]
        ran = what_ran(handle)
        assert sorted(ran) == list(range(steps))
        for step, sigma in enumerate(sigmas):
            expected = "exact" if sigma >= 0.9 else "nvfp4" if sigma <= 0.6 else "wan-fast"
            assert ran[step] == expected
            by_sigma.setdefault(round(sigma, 3), set()).add(ran[step])
        assert set(ran.values()) == {"exact", "nvfp4", "wan-fast"}
    assert all(len(names) == 1 for names in by_sigma.values())
    assert len(by_sigma) < 4 + 8  # some noise levels occur in both runs


def test_layer_rules_first_match_wins_and_negative_layers_count_from_the_end():
    pipe = tiny_pipeline(layers=4)
    rules = (wanfp4.Rule("bf16", layers=(-1,)), wanfp4.Rule("nvfp4", layers=(0, 3)))
    with wanfp4.patch(pipe, wanfp4.policies()["wan-fast"].with_(rules=rules)) as handle:
        generate(pipe, steps=1)
    assert {e.layers: (e.ran.name, e.ran.reason) for e in handle.receipt().entries} == {
        (0,): ("nvfp4", None),
        (1, 2): ("wan-fast", None),
        (3,): ("exact", "rules[0]"),
    }


def test_rules_change_what_is_computed_not_only_the_receipt():
    pipe = tiny_pipeline()
    plain = generate(pipe)
    results = {}
    for name, rules in {
        "none": (),
        "first layer": (wanfp4.Rule("bf16", layers=(0,)),),
        "all layers": (wanfp4.Rule("bf16", layers=(0, 1)),),
        "all sigmas": (wanfp4.Rule("bf16", sigma=(0, 1)),),
    }.items():
        with wanfp4.patch(pipe, wanfp4.policies()["wan-fast"].with_(rules=rules)):
            results[name] = generate(pipe)
    assert torch.equal(results["all layers"], plain)
    assert torch.equal(results["all sigmas"], plain)
    assert len({tuple(r.flatten().tolist()) for r in results.values()}) == 3


def test_min_tokens():
    pipe = tiny_pipeline()
    for least, name in ((105, "wan-fast"), (106, "exact")):
        with wanfp4.patch(pipe, wanfp4.policies()["wan-fast"].with_(min_tokens=least)) as handle:
            generate(pipe, steps=1)
        (entry,) = handle.receipt().entries
        assert entry.ran.name == name
        assert not entry.ran.fallback


def test_steps_of_a_second_run_start_at_zero_again():
    pipe = tiny_pipeline()
    with wanfp4.patch(pipe) as handle:
        generate(pipe, steps=3)
        generate(pipe, steps=2)
    entries = {e.steps: e.calls for e in handle.receipt().entries}
    assert entries == {(0, 1, 2): 2 * 2 * 3 + 2 * 2 * 2}


@pytest.mark.parametrize("scheduler", [tiny_scheduler(), FlowMatchEulerDiscreteScheduler(shift=3.0)])
def test_a_pipeline_that_names_only_the_branch_gives_the_same_steps_and_sigmas(scheduler):
    receipts = []
    for tells in (True, False):
        pipe = tiny_pipeline()
        pipe.scheduler = scheduler
        handle = wanfp4.patch(pipe, RULED)
        if not tells:
            own = pipe.transformer.cache_context
            pipe.transformer.cache_context = lambda name, own=own, **kwargs: own(name)
        for steps in (5, 3):
            generate(pipe, steps=steps)
        receipts.append(handle.receipt().to_dict()["entries"])
    assert receipts[0] == receipts[1]


def test_direct_calls_tell_sigma_by_timestep_and_count_steps_by_its_changes():
    model = tiny_transformer(layers=1)
    with wanfp4.patch(model, RULED) as handle:
        for t in (950, 950, 700, 300, 990, 990):
            forward(model, torch.tensor([t]))
    assert [(e.steps, e.sigma, e.ran.name, e.calls) for e in handle.receipt().entries] == [
        ((0,), (0.95, 0.99), "exact", 4),  # 990 after 300: a new run
        ((1,), (0.7, 0.7), "wan-fast", 1),
        ((2,), (0.3, 0.3), "nvfp4", 1),
    ]
    assert handle.receipt().entries[0].branches == ("",)


def test_two_dimensional_timesteps_count_by_their_largest():
    """Wan2.2 TI2V-5B gives every token a timestep, 0 to those of a given image."""
    model = tiny_transformer(layers=1)
    timestep = torch.full((1, 105), 700.0)
    timestep[:, :35] = 0
    with wanfp4.patch(model, RULED) as handle:
        forward(model, timestep)
    assert handle.receipt().entries[0].sigma == (0.7, 0.7)


def test_wan22_5b_pipeline_with_expanded_timesteps():
    pipe = tiny_pipeline()
    pipe.register_to_config(expand_timesteps=True)
    with wanfp4.patch(pipe, RULED, strict=True) as handle:
        generate(pipe, steps=4)
    assert set(what_ran(handle).values()) == {"exact", "nvfp4", "wan-fast"}


def test_a_timestep_tensor_that_is_written_in_place_is_read_again():
    model = tiny_transformer(layers=1)
    timestep = torch.tensor([900])
    with wanfp4.patch(model) as handle:
        forward(model, timestep)
        timestep.fill_(100)
        forward(model, timestep)
    assert handle.receipt().entries[0].steps == (0, 1)
    assert handle.receipt().entries[0].sigma == (0.1, 0.9)


def test_step_caches_skip_calls_and_steps_stay_right():
    """First-block cache: after the first step only block 0 runs, at every step."""
    pipe = tiny_pipeline(layers=3)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=10.0))
    cached = generate(pipe, steps=4)
    for names_only in (False, True):
        pipe.transformer._reset_stateful_cache()
        with wanfp4.patch(pipe, "bf16") as handle:
            if names_only:
                own = pipe.transformer.cache_context
                pipe.transformer.cache_context = lambda name, own=own, **kwargs: own(name)
            assert torch.equal(generate(pipe, steps=4), cached)
            if names_only:
                pipe.transformer.cache_context = own
        assert {e.layers: e.steps for e in handle.receipt().entries} == {(0,): (0, 1, 2, 3), (1, 2): (0,)}


def test_a_step_cache_enabled_on_a_patched_pipeline_works():
    pipe = tiny_pipeline(layers=3)
    with wanfp4.patch(pipe, "bf16") as handle:
        pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=10.0))
        generate(pipe, steps=3)
    assert {e.layers: e.steps for e in handle.receipt().entries} == {(0,): (0, 1, 2), (1, 2): (0,)}


def test_unknown_sigma_is_a_fallback_where_a_rule_asks_for_it():
    model = tiny_transformer()
    attention = model.blocks[1].attn1  # called alone: nobody tells where the run is
    x = torch.randn(1, 40, 256)
    with wanfp4.patch(model, RULED) as handle, torch.no_grad():
        attention(x)
    (entry,) = handle.receipt().fallbacks
    assert (entry.steps, entry.sigma) == ((None,), None)
    assert entry.ran.reason == "rules[0] asks for sigma, which this pipeline does not tell"
    with wanfp4.patch(model, RULED, strict=True), torch.no_grad(), pytest.raises(FallbackError, match="asks for sigma"):
        attention(x)
    elsewhere = wanfp4.policies()["wan-fast"].with_(rules=(wanfp4.Rule("bf16", sigma=(0, 1), layers=(0,)),))
    with wanfp4.patch(model, elsewhere, strict=True) as handle, torch.no_grad():
        attention(x)  # the rule is about another layer
    assert handle.receipt().entries[0].ran.name == "wan-fast"


def test_an_interrupted_run_leaves_nothing_behind():
    """diffusers keeps `_current_timestep` after an exception; a later direct call is judged by its own timestep."""
    pipe = tiny_pipeline()

    def stop(pipe, step, timestep, kwargs):
        raise KeyboardInterrupt

    with wanfp4.patch(pipe, RULED) as handle:
        with pytest.raises(KeyboardInterrupt):
            generate(pipe, steps=4, callback_on_step_end=stop)
        handle.reset()
        forward(pipe.transformer, torch.tensor([300]))
    assert handle.receipt().entries[0].sigma == (0.3, 0.3)
    assert handle.receipt().entries[0].branches == ("",)


def test_clock_prefers_context_then_the_calls_timestep_then_the_pipelines():
    class Pipe:
        scheduler = None
        _current_timestep = torch.tensor(800)

    pipe = Pipe()
    clock = Clock(pipe)
    assert clock.now() == (0, 0.8, "")
    clock.before_forward(torch.nn.Identity(), (), {"timestep": torch.tensor([600.0])})
    assert clock.now() == (1, 0.6, "")
    with clock.context("cond", 7, 0.5):
        assert clock.now() == (7, 0.5, "cond")
        with clock.context("uncond", None, None):
            assert clock.now() == (0, 0.6, "uncond")  # the level rose: a new run
        assert clock.now() == (7, 0.5, "cond")
    clock.after_forward(torch.nn.Identity(), (), None)
    assert clock.now() == (0, 0.8, "")
    del pipe
    assert Clock(None).now() == (None, None, "")
