"""The processor and its operator: projections and RoPE are those of diffusers, in every state a model may be in."""

import contextlib

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
from diffusers.models.transformers import transformer_wan
from peft import LoraConfig
from tiny import TEXT_DIM, TOKENS, tiny_transformer

import wanfp4
from wanfp4.errors import BackendError, UnsupportedInputError
from wanfp4.kernels import dispatch, ops
from wanfp4.processors import session
from wanfp4.processors.wan import Wan4BitAttnProcessor, rotate


def inputs(model, *, batch=1, text=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, model.config.in_channels, 3, 10, 14)
    return {
        "hidden_states": torch.randn(shape, generator=generator),
        "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": torch.randn(batch, text, TEXT_DIM, generator=generator),
        "return_dict": False,
    }


@torch.no_grad()
def forward(model, **changes):
    (out,) = model(**(inputs(model) | changes))
    return out


@pytest.fixture
def seen(monkeypatch):
    """The q, k, v that reach the kernels, call by call."""
    calls = []
    run = dispatch.run

    def spy(q, k, v, *args, **kwargs):
        calls.append((q, k, v))
        return run(q, k, v, *args, **kwargs)

    monkeypatch.setattr(dispatch, "run", spy)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_turns_interleaved_pairs_and_writes_nothing(dtype):
    x = torch.randn(1, 7, 2, 128).to(dtype)
    before = x.clone()
    angles = torch.rand(1, 7, 1, 64, dtype=torch.float64) * 6
    turned = torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
    cos, sin = (f(angles).repeat_interleave(2, -1).float() for f in (torch.cos, torch.sin))
    out = rotate(x, cos, sin)
    assert out.dtype == dtype
    torch.testing.assert_close(out, torch.view_as_real(turned).flatten(-2).to(dtype))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_q_k_v_reach_attention_as_in_diffusers(monkeypatch, dtype):
    """Bit for bit: projections, normalisation over all heads, RoPE, layout."""
    calls = []

    def spy(q, k, v, *args, **kwargs):
        calls.append([t.clone() for t in (q, k, v)])
        return dispatch_attention_fn(q, k, v, *args, **kwargs)

    monkeypatch.setattr(transformer_wan, "dispatch_attention_fn", spy)
    monkeypatch.setattr(session, "dispatch_attention_fn", spy)
    model = tiny_transformer(dtype=dtype)
    arguments = {name: inputs(model)[name].to(dtype) for name in ("hidden_states", "encoder_hidden_states")}
    plain = forward(model, **arguments)
    with wanfp4.patch(model, "bf16"):
        assert torch.equal(forward(model, **arguments), plain)
    before, after = calls[:4], calls[4:]  # self- and cross-attention of two layers
    assert len(after) == 4
    for old, new in zip(before, after, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
    assert before[0][0].shape == (1, TOKENS, 2, 128)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("order", ["fuse, then patch", "patch, then fuse"])
def test_fused_projections(order, batch, seen):
    """`fuse_qkv_projections` makes V a non-contiguous view, and refuses processors whose class says "Added"."""
    fused = tiny_transformer()
    fused.fuse_qkv_projections()
    expected = forward(fused, **inputs(fused, batch=batch))
    model = tiny_transformer()
    if order == "fuse, then patch":
        model.fuse_qkv_projections()
    with wanfp4.patch(model, "bf16"):
        if order == "patch, then fuse":
            model.fuse_qkv_projections()
        assert torch.equal(forward(model, **inputs(model, batch=batch)), expected)
    with wanfp4.patch(model, "wan-fast"):
        out = forward(model, **inputs(model, batch=batch))
    assert [v.is_contiguous() for _, _, v in seen] == [False, False]
    assert 0 < ((out - expected).norm() / expected.norm()).item() < 0.1
    model.unfuse_qkv_projections()
    plain = tiny_transformer()
    assert torch.equal(forward(model, **inputs(model)), forward(plain, **inputs(plain)))


def test_lora_stays_active():
    model = tiny_transformer()
    plain = forward(model)
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"], init_lora_weights="gaussian"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    expected = forward(model)
    assert not torch.equal(plain, expected)
    with wanfp4.patch(model, "bf16"):
        assert torch.equal(forward(model), expected)
        model.disable_adapters()
        assert torch.equal(forward(model), plain)
        model.enable_adapters()
        assert torch.equal(forward(model, attention_kwargs={"scale": 0.0}), plain)


def test_lora_added_after_the_patch_is_active():
    lora = LoraConfig(r=4, target_modules=["to_q"], init_lora_weights=False)
    torch.manual_seed(1)
    model = tiny_transformer()
    wanfp4.patch(model, "bf16")
    plain = forward(model)
    model.add_adapter(lora)
    assert not torch.equal(forward(model), plain)


def test_the_attention_backend_set_before_the_patch_is_kept(monkeypatch):
    """In the calls that stay with the pipeline's own attention."""
    used = []

    def math_attention(query, key, value, **kwargs):
        used.append(query.shape)
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    monkeypatch.setitem(Registry._backends, AttentionBackendName._NATIVE_MATH, math_attention)
    monkeypatch.setattr(Registry, "_active_backend", Registry._active_backend)  # set_attention_backend leaks it
    model = tiny_transformer()
    for module in (block.attn1 for block in model.blocks):
        module.set_attention_backend("_native_math")
    policy = wanfp4.policies()["wan-fast"].with_(rules=(wanfp4.Rule("bf16", layers=(0,)),))
    with wanfp4.patch(model, policy) as handle:
        forward(model)
    assert used == [(1, TOKENS, 2, 128)]
    assert {e.layers: e.ran.backend for e in handle.receipt().entries} == {
        (0,): "pipeline/_native_math",
        (1,): "reference",
    }


def test_the_attention_backend_set_on_a_patched_model_is_used_and_carried_over(monkeypatch):
    monkeypatch.setattr(Registry, "_active_backend", Registry._active_backend)  # set_attention_backend leaks it
    model = tiny_transformer()
    handle = wanfp4.patch(model, "bf16")
    model.set_attention_backend("_native_math")
    forward(model)
    assert [e.ran.backend for e in handle.receipt().entries] == ["pipeline/_native_math"]
    handle.restore()
    assert [b.attn1.processor._attention_backend for b in model.blocks] == [AttentionBackendName._NATIVE_MATH] * 2


def test_context_parallelism_is_refused_at_patch_time():
    model = tiny_transformer()
    model.blocks[1].attn1.processor._parallel_config = object()
    with pytest.raises(BackendError, match=r"transformer blocks\.1\.attn1: context parallelism is enabled"):
        wanfp4.patch(model)
    assert not isinstance(model.blocks[0].attn1.processor, Wan4BitAttnProcessor)


def test_context_parallelism_enabled_on_a_patched_model_is_refused_at_the_call():
    model = tiny_transformer()
    handle = wanfp4.patch(model)
    config = object()
    for block in model.blocks:  # as enable_parallelism does
        block.attn1.processor._parallel_config = config
    with pytest.raises(BackendError, match="context parallelism is enabled"):
        forward(model)
    with pytest.raises(BackendError, match="context parallelism is enabled"):
        wanfp4.patch(model)
    handle.restore()
    assert [b.attn1.processor._parallel_config for b in model.blocks] == [config] * 2


def test_gradients_are_refused():
    model = tiny_transformer()
    for policy in ("wan-fast", "bf16"):
        with wanfp4.patch(model, policy):
            with pytest.raises(UnsupportedInputError, match=r"no backward pass.*run under torch\.no_grad\(\)"):
                model(**inputs(model))
            with torch.inference_mode():
                model(**inputs(model))
    model.requires_grad_(False)
    with wanfp4.patch(model):
        model(**inputs(model))  # nothing requires gradients, so none are lost


def test_a_mask_is_refused():
    model = tiny_transformer(layers=1)
    attention = model.blocks[0].attn1
    x, mask = torch.randn(1, 9, 256), torch.ones(9, 9, dtype=torch.bool)
    with wanfp4.patch(model), torch.no_grad():
        with pytest.raises(UnsupportedInputError, match=r"no attention_mask; found one of shape \[9, 9\]"):
            attention(x, attention_mask=mask)
        with pytest.raises(UnsupportedInputError, match="found encoder_hidden_states"):
            attention(x, encoder_hidden_states=x)
        attention(x)


def test_text_that_diffusers_would_split_from_image_tokens_at_the_wrong_place_is_refused():
    model = tiny_transformer(image_dim=16, added_kv_proj_dim=256)
    image = torch.randn(1, 5, 16)
    with wanfp4.patch(model) as handle:
        for text in (32, 226, 600):
            arguments = inputs(model, text=text)
            with pytest.raises(UnsupportedInputError, match=f"at 512 text tokens; found {text}"):
                forward(model, **arguments, encoder_hidden_states_image=image)
        with pytest.raises(UnsupportedInputError, match="found 32"), torch.no_grad():
            model(arguments["hidden_states"], arguments["timestep"], arguments["encoder_hidden_states"][:, :32])
        assert handle.receipt().calls == 0
        forward(model, **inputs(model, text=512), encoder_hidden_states_image=image)
    assert handle.receipt().calls == 2
    forward(model, **inputs(model, text=600), encoder_hidden_states_image=image)  # restored: diffusers' own business


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # RMSNorm on the CPU
def test_autocast():
    model = tiny_transformer()
    with torch.autocast("cpu", torch.bfloat16):
        expected = forward(model)
        with wanfp4.patch(model, "bf16"):
            assert torch.equal(forward(model), expected)
        with wanfp4.patch(model, "wan-fast"):
            out = forward(model)
    assert out.dtype == expected.dtype
    assert 0 < ((out - expected).norm() / expected.norm()).item() < 0.1


@contextlib.contextmanager
def sites(policy, **arguments):
    """The operator's site tensors of a patched model."""
    model = tiny_transformer()
    with wanfp4.patch(model, policy, **arguments) as handle:
        yield [block.attn1.processor.site for block in model.blocks], handle


def qkv(*dtypes, tokens=70, grad=False):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, tokens, 2, 128, generator=generator).to(d).requires_grad_(grad) for d in dtypes]


def test_mixed_dtypes_of_cuda_autocast():
    """There, q and k come out of norm and RoPE in float32 beside a bfloat16 v; diffusers returns q's type."""
    q, k, v = qkv(torch.float32, torch.float32, torch.bfloat16)
    for policy in ("wan-fast", "nvfp4", "direct-p-accurate"):
        with sites(policy) as ((site, _), _):
            out = ops.attention(q, k, v, site)
        expected = dispatch.run(q, k, v, wanfp4.policies()[policy].numerics, guard=wanfp4.policies()[policy].guard).out
        assert out.dtype == torch.float32
        assert torch.equal(out, expected.float())


def test_autocast_does_not_reach_the_numerics():
    """float32 products of the reference would be rounded to bfloat16 under autocast."""
    q, k, v = qkv(*[torch.bfloat16] * 3)
    with sites("nvfp4") as ((site, _), _):
        expected = ops.attention(q, k, v, site)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(ops.attention(q, k, v, site), expected)


def test_the_operator_keeps_torchs_rules():
    """Fake tensors, strides, no aliasing, no mutation."""
    layouts = {
        "contiguous": lambda t: t,
        "heads first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        "a third of a fused projection": lambda t: torch.cat([t, t, t], -1)[..., 128:256],
    }
    for policy in ("bf16", "wan-fast"):
        with sites(policy) as ((site, _), _):
            for layout in layouts.values():
                q, k, v = (layout(t) for t in qkv(*[torch.bfloat16] * 3))
                before = [t.clone() for t in (q, k, v)]
                torch.library.opcheck(
                    ops.attention,
                    (q, k, v, site),
                    test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
                )
                assert ops.attention(q, k, v, site).is_contiguous()
                assert all(torch.equal(a, b) for a, b in zip((q, k, v), before, strict=True))


def test_the_operator_is_kept_out_of_cuda_graphs():
    """A graph would replay one step's kernels at every step."""
    assert torch.Tag.cudagraph_unsafe in torch.ops.wanfp4.attention.default.tags


def test_a_site_whose_patch_is_gone_says_so():
    q, k, v = qkv(*[torch.float32] * 3)
    with pytest.raises(BackendError, match="a patch that no longer exists"):
        ops.attention(q, k, v, ops.make_site(2**40, 0, 0))


def test_patching_in_inference_mode_works_outside_of_it():
    model = tiny_transformer()
    with torch.inference_mode():
        wanfp4.patch(model)
    assert not model.blocks[0].attn1.processor.site.is_inference()
    forward(model)


def test_sites_stay_on_the_cpu_whatever_the_default_device():
    model = tiny_transformer()
    with torch.device("meta"):
        wanfp4.patch(model)
    assert model.blocks[0].attn1.processor.site.device.type == "cpu"


def test_guard_runs_and_shows_in_the_receipt():
    """Logits that a sample finds extreme: the guard's numerics run, and the receipt says on which layers."""
    model = tiny_transformer(layers=3)
    for norm in (model.blocks[1].attn1.norm_q, model.blocks[1].attn1.norm_k):
        norm.weight.data.fill_(8.0)  # logits reach 64 times their ordinary size
    with wanfp4.patch(model) as handle:
        forward(model)
    assert {e.layers: e.ran.guarded for e in handle.receipt().entries} == {(0, 2): False, (1,): True}


def test_weights_stored_in_eight_bits_between_calls():
    """Layerwise casting swaps a linear's weights inside its call, as quantised linears compute inside theirs."""
    model = tiny_transformer()
    plain = forward(model)
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    expected = forward(model)
    assert not torch.equal(expected, plain)
    with wanfp4.patch(model, "bf16"):
        assert model.blocks[0].attn1.to_q.weight.dtype == torch.float8_e4m3fn
        assert torch.equal(forward(model), expected)
    with wanfp4.patch(model):
        assert 0 < ((forward(model) - expected).norm() / expected.norm()).item() < 0.1
