"""A Wan pipeline of diffusers' own classes, small enough for a unit test: seeded random weights, nothing downloaded.

    from tiny import generate, tiny_pipeline       tests/conftest.py makes this module importable
    pipe = tiny_pipeline(dual=True)
    latents = generate(pipe, steps=4)

The default clip (9 × 80 × 112) has 105 self-attention tokens: more than three blocks of 32, and not a multiple of one.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

FRAMES, HEIGHT, WIDTH = 9, 80, 112
TOKENS = 3 * 5 * 7
TEXT_DIM = 32
VOCABULARY = "a red green blue circle square star moving right left up down over black white background"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Word-level, lower case, `</s>` at the end, as UMT5's; words it does not know become `<unk>`."""
    words = ["<pad>", "</s>", "<unk>", *VOCABULARY.split()]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def tiny_text_encoder(seed: int = 0) -> UMT5EncoderModel:
    torch.manual_seed(seed)
    config = UMT5Config(
        vocab_size=len(VOCABULARY.split()) + 3,
        d_model=TEXT_DIM,
        d_kv=16,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        is_encoder_decoder=False,
        use_cache=False,
    )
    return UMT5EncoderModel(config).eval()


def tiny_transformer(
    *,
    layers: int = 2,
    heads: int = 2,
    head_dim: int = 128,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    cls: type = WanTransformer3DModel,
    **config: Any,
) -> Any:
    """A Wan transformer (or another of its family, `cls`) whose self-attention matters for its output."""
    torch.manual_seed(seed)
    settings = {
        "num_attention_heads": heads,
        "attention_head_dim": head_dim,
        "num_layers": layers,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": TEXT_DIM,
        "freq_dim": 32,
        "ffn_dim": 64,
        "rope_max_seq_len": 64,
    }
    model = cls(**(settings | config)).eval()
    if dtype != torch.float32:  # as from_pretrained(torch_dtype=…) does, which keeps some modules in float32
        kept = tuple(model._keep_in_fp32_modules)
        for name, parameter in model.named_parameters():
            if not any(part in kept for part in name.split(".")):
                parameter.data = parameter.data.to(dtype)
    return model


def tiny_vae(seed: int = 0) -> AutoencoderKLWan:
    """Wan2.1's layout, 4 × 8 × 8 compression; latents have 16 channels."""
    torch.manual_seed(seed)
    return AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1).eval()


def tiny_scheduler(shift: float = 3.0) -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=shift
    )


def tiny_pipeline(
    dual: bool = False,
    layers: int = 2,
    heads: int = 2,
    head_dim: int = 128,
    dtype: torch.dtype = torch.float32,
    *,
    seed: int = 0,
    shift: float = 3.0,
    boundary_ratio: float = 0.875,
    **config: Any,
) -> WanPipeline:
    """A text-to-video pipeline; `dual` gives two experts that differ, switched at `boundary_ratio` as in Wan2.2.

    `config` goes to the transformers. The transformers are in `dtype`; text encoder and VAE stay float32.
    """
    shape: dict[str, Any] = {"layers": layers, "heads": heads, "head_dim": head_dim, "dtype": dtype, **config}
    pipe = WanPipeline(
        tokenizer=tiny_tokenizer(),
        text_encoder=tiny_text_encoder(seed),
        vae=tiny_vae(seed),
        scheduler=tiny_scheduler(shift),
        transformer=tiny_transformer(seed=seed, **shape),
        transformer_2=tiny_transformer(seed=seed + 1, **shape) if dual else None,
        boundary_ratio=boundary_ratio if dual else None,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(
    pipe: WanPipeline,
    prompt: str = "a red circle moving right",
    *,
    steps: int = 2,
    seed: int = 0,
    guidance: float = 4.0,
    **changes: Any,
) -> torch.Tensor:
    """Latents [1, 16, 3, 10, 14] of the default clip; 32 text tokens unless `max_sequence_length` is given."""
    settings = {"frames": FRAMES, "height": HEIGHT, "width": WIDTH} | changes
    latents: torch.Tensor = pipe(
        prompt=prompt,
        negative_prompt="",
        num_frames=settings.pop("frames"),
        num_inference_steps=steps,
        guidance_scale=guidance,
        generator=torch.Generator("cpu").manual_seed(seed),
        output_type="latent",
        **({"max_sequence_length": 32} | settings),
    ).frames
    return latents
