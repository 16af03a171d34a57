"""Every diffusers pipeline of the Wan family is patched, bit-identical with "bf16", or left alone with a reason."""

import PIL.Image
import pytest
import torch
from diffusers import (
    ChronoEditPipeline,
    ChronoEditTransformer3DModel,
    LucyEditPipeline,
    WanAnimate2Transformer3DModel,
    WanAnimateTransformer3DModel,
    WanImageToVideoPipeline,
    WanVACEPipeline,
    WanVACETransformer3DModel,
    WanVideoToVideoPipeline,
)
from diffusers.modular_pipelines.wan import WanModularPipeline
from tiny import FRAMES, HEIGHT, TEXT_DIM, WIDTH, tiny_pipeline, tiny_transformer
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

import wanfp4
from wanfp4.errors import FallbackError, ModelError, UnsupportedInputError

FAST = wanfp4.policies()["wan-fast"]
IMAGE = PIL.Image.effect_noise((WIDTH, HEIGHT), 64).convert("RGB")
FRAMES_IN = [IMAGE] * FRAMES


def parts(**changes):
    """Tokenizer, text encoder, VAE and scheduler of the tiny pipeline, with other transformers."""
    made = dict(tiny_pipeline().components)
    del made["transformer"], made["transformer_2"]
    return made | changes


def image_encoder():
    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=16
    )
    return {
        "image_encoder": CLIPVisionModel(config).eval(),
        "image_processor": CLIPImageProcessor(size=32, crop_size=32),
    }


def image_to_video_21():
    """Wan2.1: image tokens in cross-attention."""
    transformer = tiny_transformer(in_channels=36, image_dim=32, added_kv_proj_dim=256)
    return WanImageToVideoPipeline(**parts(transformer=transformer), **image_encoder()), {"image": IMAGE}


def image_to_video_22():
    """Wan2.2 A14B: two experts, no image tokens."""
    experts = {f"transformer{s}": tiny_transformer(in_channels=36, seed=i) for i, s in enumerate(("", "_2"))}
    return WanImageToVideoPipeline(**parts(**experts), boundary_ratio=0.9), {"image": IMAGE}


def video_to_video():
    return WanVideoToVideoPipeline(**parts(transformer=tiny_transformer())), {"video": FRAMES_IN, "strength": 1.0}


def vace():
    transformer = tiny_transformer(layers=3, cls=WanVACETransformer3DModel, vace_layers=[0, 2], vace_in_channels=96)
    return WanVACEPipeline(**parts(transformer=transformer)), {"video": FRAMES_IN, "num_frames": FRAMES}


def lucy():
    return LucyEditPipeline(**parts(transformer=tiny_transformer(in_channels=32))), {"video": FRAMES_IN}


def chronoedit():
    transformer = tiny_transformer(
        in_channels=36, image_dim=32, added_kv_proj_dim=256, cls=ChronoEditTransformer3DModel, rope_temporal_skip_len=8
    )
    return ChronoEditPipeline(**parts(transformer=transformer), **image_encoder()), {"image": IMAGE}


PIPELINES = {
    "image to video, Wan2.1": image_to_video_21,
    "image to video, Wan2.2": image_to_video_22,
    "video to video": video_to_video,
    "VACE": vace,
    "Lucy Edit": lucy,
    "ChronoEdit": chronoedit,
}


def run(pipe, arguments):
    pipe.set_progress_bar_config(disable=True)
    if "image" in arguments:
        arguments = arguments | {"num_frames": FRAMES}
    return pipe(
        prompt="a red circle",
        negative_prompt="",
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=2,
        guidance_scale=4.0,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
        **arguments,
    ).frames


@pytest.mark.parametrize("name", PIPELINES)
def test_pipeline(name):
    """Bit-identical under "bf16", different under 4 bits, every step and noise level known, everything put back."""
    pipe, arguments = PIPELINES[name]()
    plain = run(pipe, arguments)
    rules = (wanfp4.Rule("bf16", sigma=(0.0, 0.0)),)  # asks for sigma, so not knowing it would be an error
    with wanfp4.patch(pipe, "bf16", strict=True) as exact:
        assert torch.equal(run(pipe, arguments), plain)
    with wanfp4.patch(pipe, FAST.with_(rules=rules), strict=True) as fast:
        changed = run(pipe, arguments)
    assert 0 < ((changed - plain).norm() / plain.norm()).item() < 0.1
    assert torch.equal(run(pipe, arguments), plain)
    sigmas = pipe.scheduler.sigmas
    for receipt in (exact.receipt(), fast.receipt()):
        assert receipt.unpatched == receipt.fallbacks == ()
        assert sorted({s for e in receipt.entries for s in e.steps}) == [0, 1]
        ends = [e.sigma for e in receipt.entries]
        assert min(low for low, _ in ends) == pytest.approx(float(sigmas[1]))
        assert max(high for _, high in ends) == pytest.approx(float(sigmas[0]))
    assert {e.ran.backend for e in fast.receipt().entries} == {"reference"}


def test_both_experts_of_image_to_video_run_patched():
    pipe, arguments = image_to_video_22()
    with wanfp4.patch(pipe) as handle:
        run(pipe, arguments)
    assert {e.expert: e.steps for e in handle.receipt().entries} == {"transformer": (0,), "transformer_2": (1,)}


def test_text_length_of_image_to_video():
    pipe, arguments = image_to_video_21()
    with wanfp4.patch(pipe), pytest.raises(UnsupportedInputError, match="found 256 \\(pass max_sequence_length=512\\)"):
        run(pipe, arguments | {"max_sequence_length": 256})
    pipe, arguments = image_to_video_22()  # no image tokens: any length
    with wanfp4.patch(pipe):
        run(pipe, arguments | {"max_sequence_length": 256})


def test_vace_blocks_count_as_the_layers_they_feed():
    pipe, arguments = vace()
    with wanfp4.patch(pipe, FAST.with_(rules=(wanfp4.Rule("bf16", layers=(-1,)),))) as handle:
        run(pipe, arguments)
    ran = {(e.blocks, e.layers): e.ran.name for e in handle.receipt().entries}
    assert ran == {
        ("blocks", (0, 1)): "wan-fast",
        ("blocks", (2,)): "exact",
        ("vace_blocks", (0,)): "wan-fast",
        ("vace_blocks", (2,)): "exact",
    }
    assert "transformer.vace_blocks layer 2" in handle.receipt().summary()[-1]


def test_animate_has_its_own_attention_classes():
    model = tiny_transformer(
        cls=WanAnimateTransformer3DModel,
        in_channels=36,
        latent_channels=16,
        image_dim=16,
        added_kv_proj_dim=256,
        motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16},
        motion_encoder_size=16,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=16,
        face_encoder_hidden_dim=16,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )
    generator = torch.Generator().manual_seed(0)

    def forward():
        generator.manual_seed(0)
        with torch.no_grad():
            return model(
                hidden_states=torch.randn(1, 36, 3, 10, 14, generator=generator),
                timestep=torch.tensor([400]),
                encoder_hidden_states=torch.randn(1, 512, TEXT_DIM, generator=generator),
                encoder_hidden_states_image=torch.randn(1, 5, 16, generator=generator),
                pose_hidden_states=torch.randn(1, 16, 2, 10, 14, generator=generator),
                face_pixel_values=torch.randn(1, 3, 5, 16, 16, generator=generator),
                return_dict=False,
            )[0]

    plain = forward()
    before = {name: m.processor for name, m in model.named_modules() if hasattr(m, "processor")}
    with wanfp4.patch(model, "bf16", strict=True):
        assert torch.equal(forward(), plain)
    with wanfp4.patch(model, strict=True) as handle:
        assert not torch.equal(forward(), plain)
        patched = {
            name for name, m in model.named_modules() if hasattr(m, "processor") and m.processor is not before[name]
        }
    assert patched == {"blocks.0.attn1", "blocks.1.attn1"}  # neither text, image nor face attention
    assert [e.sigma for e in handle.receipt().entries] == [(0.4, 0.4)]


def animate_2():
    torch.manual_seed(0)
    return WanAnimate2Transformer3DModel(
        in_dim=36, dim=256, ffn_dim=64, freq_dim=32, text_dim=TEXT_DIM, num_heads=2, num_layers=2
    )


def test_animate_2_is_left_alone_with_its_reason():
    model = animate_2()
    before = [m.processor for m in model.modules() if hasattr(m, "processor")]
    with wanfp4.patch(model) as handle:
        assert all(
            m is p
            for m, p in zip((m.processor for m in model.modules() if hasattr(m, "processor")), before, strict=True)
        )
    assert [(u.module, u.reason) for u in handle.receipt().unpatched] == [
        (f"blocks.{i}.self_attn", "WanAnimate2Attention attends to cached reference tokens through a block mask")
        for i in range(2)
    ]
    with pytest.raises(FallbackError, match="2 self-attentions would keep the pipeline's own attention"):
        wanfp4.patch(model, strict=True)


def test_modular_pipelines():
    pipe = WanModularPipeline()
    with pytest.raises(ModelError, match="WanModularPipeline holds no Wan transformer"):
        wanfp4.patch(pipe)
    pipe.update_components(**tiny_pipeline().components | {"transformer_2": None})
    plain = modular(pipe)
    with wanfp4.patch(pipe, "bf16", strict=True) as handle:
        assert torch.equal(modular(pipe), plain)
    assert {e.steps for e in handle.receipt().entries} == {(0, 1)}
    with wanfp4.patch(pipe, strict=True):
        assert not torch.equal(modular(pipe), plain)


def modular(pipe):
    return pipe(
        prompt="a red circle",
        negative_prompt="",
        height=HEIGHT,
        width=WIDTH,
        num_frames=FRAMES,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
        max_sequence_length=32,
        output="videos",
    )
