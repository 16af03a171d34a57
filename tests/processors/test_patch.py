"""`patch` changes what it says, puts back the very same objects, and refuses clearly what it cannot do."""

import gc
import logging
import weakref

import pytest
import torch
from diffusers import DDPMPipeline, UNet2DModel
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
from diffusers.models.transformers import transformer_wan
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from tiny import generate, tiny_pipeline, tiny_scheduler, tiny_transformer, tiny_vae

import wanfp4
from wanfp4.errors import BackendError, FallbackError, ModelError, PolicyError, UnsupportedInputError
from wanfp4.kernels import dispatch
from wanfp4.processors.wan import Wan4BitAttnProcessor


def attentions(model, cross=False):
    return [m for _, m in model.named_modules() if type(m).__name__ == "WanAttention" and m.is_cross_attention is cross]


def state(model):
    """Everything of a transformer that a patch may touch, by identity."""
    return (
        [(m, m.processor) for m in attentions(model) + attentions(model, cross=True)],
        dict(vars(model).items()),
        dict(model._forward_pre_hooks),
        dict(model._forward_hooks),
    )


@pytest.fixture(scope="module")
def plain():
    """Latents of the unpatched tiny pipeline."""
    return generate(tiny_pipeline())


def test_bf16_policy_is_bit_identical(plain):
    pipe = tiny_pipeline()
    with wanfp4.patch(pipe, "bf16") as handle:
        assert torch.equal(generate(pipe), plain)
    (entry,) = handle.receipt().entries
    assert entry.calls == 2 * 2 * 2  # layers, steps, branches
    assert entry.ran.reason == "policy 'bf16'"
    assert not entry.ran.fallback


def test_bf16_policy_is_bit_identical_in_bfloat16():
    expected = generate(tiny_pipeline(dtype=torch.bfloat16))
    pipe = tiny_pipeline(dtype=torch.bfloat16)
    wanfp4.patch(pipe, "bf16")
    assert torch.equal(generate(pipe), expected)


def test_four_bits_change_the_result_a_little_and_are_what_dispatch_computes(plain):
    pipe = tiny_pipeline()
    with wanfp4.patch(pipe, "wan-fast") as handle:
        latents = generate(pipe)
    error = ((latents - plain).norm() / plain.norm()).item()
    assert 1e-5 < error < 0.05
    (entry,) = handle.receipt().entries
    assert (entry.ran.name, entry.ran.backend, entry.ran.emulated) == ("wan-fast", "reference", True)
    assert (entry.layers, entry.steps, entry.branches) == ((0, 1), (0, 1), ("cond", "uncond"))


def test_a_named_backend_runs_exact_attention_of_a_policy_that_rounds_nothing(plain):
    """The noise floor of a drift report: other code, same mathematics."""
    pipe = tiny_pipeline()
    with wanfp4.patch(pipe, "bf16", backend="reference") as handle:
        latents = generate(pipe)
    (entry,) = handle.receipt().entries
    assert entry.ran.backend == "reference"
    assert not entry.ran.emulated
    assert not torch.equal(latents, plain)
    assert ((latents - plain).norm() / plain.norm()).item() < 1e-5


def test_a_named_backend_leaves_bf16_rules_to_the_pipeline():
    pipe = tiny_pipeline()
    policy = wanfp4.policies()["wan-fast"].with_(rules=(wanfp4.Rule("bf16", layers=(0,)),))
    with wanfp4.patch(pipe, policy, backend="reference") as handle:
        generate(pipe, steps=1)
    assert {e.layers: e.ran.backend for e in handle.receipt().entries} == {(0,): "pipeline", (1,): "reference"}


def test_restore_puts_back_the_very_same_objects(plain):
    pipe = tiny_pipeline(dual=True)
    before = state(pipe.transformer), state(pipe.transformer_2)
    handle = wanfp4.patch(pipe)
    assert all(type(m.processor) is Wan4BitAttnProcessor for m in attentions(pipe.transformer))
    assert "cache_context" in vars(pipe.transformer)
    handle.restore()
    after = state(pipe.transformer), state(pipe.transformer_2)
    for (old_processors, *old), (new_processors, *new) in zip(before, after, strict=True):
        assert all(a is b for (_, a), (_, b) in zip(old_processors, new_processors, strict=True))
        assert old == new
    assert not handle.active
    single = tiny_pipeline()
    wanfp4.patch(single).restore()
    assert torch.equal(generate(single), plain)


def test_a_cache_context_that_was_the_instances_own_comes_back():
    model = tiny_transformer()
    mine = model.cache_context
    model.cache_context = mine
    wanfp4.patch(model).restore()
    assert vars(model)["cache_context"] is mine


def test_restore_twice_does_nothing():
    pipe = tiny_pipeline()
    first = wanfp4.patch(pipe)
    first.restore()
    second = wanfp4.patch(pipe)
    first.restore()
    assert second.active
    assert all(type(m.processor) is Wan4BitAttnProcessor for m in attentions(pipe.transformer))


def test_patching_a_patched_pipeline_leaves_one_patch_and_the_first_originals(plain):
    pipe = tiny_pipeline()
    processors = [m.processor for m in attentions(pipe.transformer)]
    first = wanfp4.patch(pipe, "wan-fast")
    hooks = len(pipe.transformer._forward_pre_hooks), len(pipe.transformer._forward_hooks)
    second = wanfp4.patch(pipe, "bf16")
    assert (first.active, second.active) == (False, True)
    assert hooks == (len(pipe.transformer._forward_pre_hooks), len(pipe.transformer._forward_hooks))
    assert all(m.processor.original is p for m, p in zip(attentions(pipe.transformer), processors, strict=True))
    assert torch.equal(generate(pipe), plain)
    assert first.receipt().calls == 0
    assert second.receipt().calls == 8
    first.restore()
    assert second.active
    second.restore()
    assert all(m.processor is p for m, p in zip(attentions(pipe.transformer), processors, strict=True))


def test_the_handle_may_be_dropped():
    pipe = tiny_pipeline()
    wanfp4.patch(pipe)
    gc.collect()
    generate(pipe, steps=1)
    handle = wanfp4.patch(pipe)  # finds and restores the patch nobody holds
    handle.restore()
    assert all(type(m.processor) is WanAttnProcessor for m in attentions(pipe.transformer))


def test_a_patch_does_not_keep_pipeline_or_model_alive():
    pipe = tiny_pipeline()
    handle = wanfp4.patch(pipe)
    generate(pipe, steps=1)
    handle.restore()
    gone = weakref.ref(pipe), weakref.ref(pipe.transformer)
    del pipe
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert handle.receipt().calls == 4


def test_context_manager_restores_after_an_error():
    pipe = tiny_pipeline()
    with pytest.raises(KeyboardInterrupt), wanfp4.patch(pipe) as handle:
        raise KeyboardInterrupt
    assert not handle.active
    assert all(type(m.processor) is WanAttnProcessor for m in attentions(pipe.transformer))
    assert repr(handle) == "<Patch of WanPipeline: wan-fast on any backend, restored>"


def test_receipt_survives_restore_and_reset_forgets():
    pipe = tiny_pipeline()
    with wanfp4.patch(pipe) as handle:
        generate(pipe, steps=1)
        handle.reset()
        assert handle.receipt().entries == ()
        generate(pipe, steps=1)
    assert handle.receipt().calls == 4
    assert handle.receipt().policy is handle.policy
    assert handle.receipt().pipeline == "WanPipeline"


def test_cross_attention_is_never_touched():
    pipe = tiny_pipeline()
    before = [m.processor for m in attentions(pipe.transformer, cross=True)]
    with wanfp4.patch(pipe):
        generate(pipe, steps=1)
        now = [m.processor for m in attentions(pipe.transformer, cross=True)]
        assert len(now) == 2
        assert all(a is b for a, b in zip(before, now, strict=True))


def test_both_experts_run_patched_on_their_side_of_the_boundary():
    pipe = tiny_pipeline(dual=True)
    with wanfp4.patch(pipe) as handle:
        generate(pipe, steps=4)
    entries = {e.expert: e for e in handle.receipt().entries}
    assert entries["transformer"].steps == (0, 1)
    assert entries["transformer_2"].steps == (2, 3)
    assert entries["transformer"].sigma[0] >= 0.875 > entries["transformer_2"].sigma[1]


@pytest.mark.parametrize(("missing", "ratio"), [("transformer", 1.0), ("transformer_2", None)])
def test_either_expert_may_be_missing(missing, ratio):
    pipe = tiny_pipeline(dual=True)
    setattr(pipe, missing, None)
    pipe.register_to_config(boundary_ratio=ratio)
    with wanfp4.patch(pipe) as handle:
        generate(pipe, steps=2, guidance=1.0)
    (entry,) = handle.receipt().entries
    assert {entry.expert, missing} == {"transformer", "transformer_2"}
    assert entry.calls == 4


def test_rules_by_expert():
    pipe = tiny_pipeline(dual=True)
    policy = wanfp4.policies()["wan-fast"].with_(rules=(wanfp4.Rule("bf16", expert="transformer_2"),))
    with wanfp4.patch(pipe, policy) as handle:
        generate(pipe, steps=4)
    assert {e.expert: e.ran.backend for e in handle.receipt().entries} == {
        "transformer": "reference",
        "transformer_2": "pipeline",
    }


def test_a_bare_transformer_can_be_patched():
    model = tiny_transformer()
    with wanfp4.patch(model) as handle, torch.no_grad():
        model(torch.randn(1, 16, 3, 10, 14), torch.tensor([500]), torch.randn(1, 32, 32))
    (entry,) = handle.receipt().entries
    assert (entry.expert, entry.layers, entry.sigma) == ("transformer", (0, 1), (0.5, 0.5))


def test_state_dict_and_parameters_are_untouched():
    pipe = tiny_pipeline()
    model = pipe.transformer
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    modules = [name for name, _ in model.named_modules()]
    with wanfp4.patch(pipe):
        assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
        assert [name for name, _ in model.named_modules()] == modules


def test_weights_on_meta_are_not_touched():
    """As offloading leaves them outside of forward."""
    pipe = tiny_pipeline()
    pipe.transformer.to("meta")
    with wanfp4.patch(pipe):
        assert {p.device.type for p in pipe.transformer.parameters()} == {"meta"}


def test_saving_a_patched_pipeline_gives_the_same_files(tmp_path):
    pipe = tiny_pipeline()
    pipe.transformer.save_pretrained(tmp_path / "plain")
    with wanfp4.patch(pipe):
        pipe.transformer.save_pretrained(tmp_path / "patched")
    names = sorted(p.name for p in (tmp_path / "plain").iterdir())
    assert len(names) == 2
    for name in names:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "patched" / name).read_bytes()


def test_two_pipelines_with_different_policies_stay_apart():
    one, two = tiny_pipeline(), tiny_pipeline(seed=1)
    expected = {}
    for name, pipe, policy in (("one", one, "wan-fast"), ("two", two, "nvfp4")):
        with wanfp4.patch(pipe, policy):
            expected[name] = generate(pipe)
    first, second = wanfp4.patch(one, "wan-fast"), wanfp4.patch(two, "nvfp4")
    assert torch.equal(generate(two), expected["two"])
    assert torch.equal(generate(one), expected["one"])
    assert {e.ran.name for e in first.receipt().entries} == {"wan-fast"}
    assert {e.ran.name for e in second.receipt().entries} == {"nvfp4"}
    assert first.receipt().calls == second.receipt().calls == 8
    first.restore()
    assert torch.equal(generate(two), expected["two"])


def test_no_global_state_changes():
    def everything():
        return (
            Registry._active_backend,
            dict(Registry._backends),
            dict(vars(transformer_wan)),
            dict(vars(transformer_wan.WanAttention)),
            dict(vars(WanAttnProcessor)),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
        )

    before = everything()
    pipe = tiny_pipeline()
    with wanfp4.patch(pipe):
        generate(pipe, steps=1)
        assert everything() == before
    assert everything() == before


class Mine:
    """A custom processor: what a user, or another accelerator, may have put in."""

    _attention_backend = None
    _parallel_config = None

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def test_custom_processors_are_left_alone_with_a_reason(caplog):
    pipe = tiny_pipeline()
    attention = pipe.transformer.blocks[1].attn1
    mine = Mine(attention.processor)
    attention.set_processor(mine)
    with caplog.at_level(logging.WARNING, "wanfp4"), wanfp4.patch(pipe) as handle:
        assert attention.processor is mine
        generate(pipe, steps=1)
    assert [e.layers for e in handle.receipt().entries] == [(0,)]
    (left,) = handle.receipt().unpatched
    assert (left.expert, left.module) == ("transformer", "blocks.1.attn1")
    assert "Mine" in left.reason
    assert "blocks.1.attn1" in caplog.text
    assert "not patched" in handle.receipt().summary()[-1]


def test_strict_refuses_to_leave_an_attention_alone_and_changes_nothing():
    pipe = tiny_pipeline()
    attention = pipe.transformer.blocks[1].attn1
    attention.set_processor(Mine(attention.processor))
    before = state(pipe.transformer)
    with pytest.raises(FallbackError, match=r"blocks\.1\.attn1: it has a processor of its own, Mine"):
        wanfp4.patch(pipe, strict=True)
    assert state(pipe.transformer) == before


def test_restore_leaves_a_processor_that_somebody_set_since(caplog):
    pipe = tiny_pipeline()
    expected = generate(pipe)
    first, second = attentions(pipe.transformer)
    original = second.processor
    handle = wanfp4.patch(pipe)
    mine = Mine(first.processor)  # wraps ours
    first.set_processor(mine)
    with caplog.at_level(logging.WARNING, "wanfp4"):
        handle.restore()
    assert first.processor is mine
    assert second.processor is original
    assert "blocks.0.attn1 has had a new processor since it was patched, Mine" in caplog.text
    calls = handle.receipt().calls
    assert torch.equal(generate(pipe), expected)  # what it wraps is the pipeline's own attention now
    assert handle.receipt().calls == calls


def test_restore_leaves_a_cache_context_that_somebody_set_since(caplog):
    pipe = tiny_pipeline()
    handle = wanfp4.patch(pipe)
    theirs = pipe.transformer.cache_context
    pipe.transformer.cache_context = wrapper = lambda *a, **k: theirs(*a, **k)
    with caplog.at_level(logging.WARNING, "wanfp4"):
        handle.restore()
    assert pipe.transformer.cache_context is wrapper
    assert "new cache_context" in caplog.text
    generate(pipe, steps=1)


def test_emulation_says_once_that_it_brings_no_speed(caplog):
    pipe = tiny_pipeline()
    with caplog.at_level(logging.INFO, "wanfp4"), wanfp4.patch(pipe):
        generate(pipe)
        generate(pipe)
    said = [r for r in caplog.records if "brings no speed" in r.message]
    assert [(r.name, r.levelname) for r in said] == [("wanfp4", "WARNING")]
    caplog.clear()
    with caplog.at_level(logging.INFO, "wanfp4"), wanfp4.patch(pipe, backend="reference"):
        generate(pipe)
    assert [r.levelname for r in caplog.records if "brings no speed" in r.message] == ["INFO"]


@pytest.fixture
def no_four_bits(monkeypatch):
    """A machine on which only exact attention can run."""
    only = tuple(b for b in dispatch.backends() if b.name == "sdpa")
    monkeypatch.setattr(dispatch, "_BACKENDS", only)


@pytest.mark.usefixtures("no_four_bits")
def test_a_backend_that_cannot_run_is_a_fallback_with_its_reason(plain, caplog):
    pipe = tiny_pipeline()
    with caplog.at_level(logging.WARNING, "wanfp4"), wanfp4.patch(pipe) as handle:
        assert torch.equal(generate(pipe), plain)
    (entry,) = handle.receipt().fallbacks
    assert entry.calls == 8
    assert "sdpa: it rounds nothing" in entry.ran.reason
    assert len([r for r in caplog.records if "falls back" in r.message]) == 1


@pytest.mark.usefixtures("no_four_bits")
def test_strict_turns_it_into_an_error():
    pipe = tiny_pipeline()
    with pytest.raises(FallbackError, match="sdpa: it rounds nothing"):
        wanfp4.patch(pipe, strict=True)
    assert all(type(m.processor) is WanAttnProcessor for m in attentions(pipe.transformer))


def test_strict_turns_a_fallback_that_shows_only_while_running_into_an_error(monkeypatch):
    pipe = tiny_pipeline()
    handle = wanfp4.patch(pipe, strict=True)
    only = tuple(b for b in dispatch.backends() if b.name == "sdpa")
    monkeypatch.setattr(dispatch, "_BACKENDS", only)
    with pytest.raises(
        FallbackError, match="strict: transformer blocks layer 0 would run the pipeline's own attention"
    ):
        generate(pipe)
    assert handle.receipt().calls == 0


def test_strict_accepts_what_the_policy_asks_for():
    pipe = tiny_pipeline()
    rules = (wanfp4.Rule("bf16", layers=(0,)), wanfp4.Rule("bf16", sigma=(0.9, 1.0)))
    policy = wanfp4.policies()["wan-fast"].with_(rules=rules)
    with wanfp4.patch(pipe, policy, strict=True) as handle:
        generate(pipe)
    assert handle.receipt().fallbacks == ()
    assert {e.ran.backend for e in handle.receipt().entries} == {"pipeline", "reference"}
    short = wanfp4.policies()["wan-fast"].with_(min_tokens=10_000)
    with wanfp4.patch(pipe, short, strict=True) as handle:
        generate(pipe, steps=1)
    (entry,) = handle.receipt().entries
    assert entry.ran.reason == "105 tokens, fewer than min_tokens=10000"


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"policy": "wan-slow"}, PolicyError, "unknown policy 'wan-slow'; presets are bf16, "),
        ({"backend": "warp"}, BackendError, "unknown backend 'warp'; this version has .*reference"),
        ({"backend": "sdpa"}, BackendError, "backend 'sdpa' cannot run this on .*: it rounds nothing"),
    ],
)
def test_bad_arguments_are_refused_before_anything_changes(arguments, error, says):
    pipe = tiny_pipeline()
    earlier = wanfp4.patch(pipe, "bf16")
    before = state(pipe.transformer)
    with pytest.raises(error, match=says):
        wanfp4.patch(pipe, **arguments)
    assert earlier.active
    assert state(pipe.transformer) == before


def test_head_dim_64_is_refused():
    pipe = tiny_pipeline(head_dim=64)
    with pytest.raises(
        UnsupportedInputError, match=r"needs head_dim 128; transformer blocks\.0\.attn1 has head_dim 64"
    ):
        wanfp4.patch(pipe)


def test_pipelines_without_a_wan_transformer_are_refused_with_what_they_hold():
    unet = UNet2DModel(
        sample_size=8,
        block_out_channels=(32,),
        layers_per_block=1,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    )
    with pytest.raises(ModelError, match=r"DDPMPipeline holds no Wan transformer .*unet: UNet2DModel"):
        wanfp4.patch(DDPMPipeline(unet, tiny_scheduler()))
    with pytest.raises(ModelError, match="AutoencoderKLWan holds no Wan transformer"):
        wanfp4.patch(tiny_vae())
    with pytest.raises(ModelError, match="found str"):
        wanfp4.patch("Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
    empty = tiny_pipeline()
    empty.transformer = None
    with pytest.raises(ModelError, match="its models are"):
        wanfp4.patch(empty)


@pytest.mark.parametrize(
    ("rule", "dead"),
    [
        (wanfp4.Rule("bf16", layers=(50,)), True),
        (wanfp4.Rule("bf16", layers=(-3,)), True),
        (wanfp4.Rule("bf16", expert="transformer_2", sigma=(0.0, 0.5)), True),
        (wanfp4.Rule("bf16", layers=(0, 50)), False),
        (wanfp4.Rule("bf16", layers=(-1,), sigma=(0.9, 1.0)), False),
    ],
)
def test_a_rule_that_names_no_layer_of_the_model_is_said(rule, dead, caplog):
    pipe = tiny_pipeline()
    with (
        caplog.at_level(logging.WARNING, logger="wanfp4"),
        wanfp4.patch(pipe, wanfp4.Policy("mine", "wan-fast", rules=(rule,))),
    ):
        pass
    assert ("rules[0] of policy 'mine' names no layer of this pipeline" in caplog.text) == dead
