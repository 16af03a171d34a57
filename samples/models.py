"""The parts of the sample pipeline, and a forward pass of its transformer made for training.

All parts are classes of diffusers and transformers; nothing in them is changed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers import models as tokenizer_models
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from wanfp4.samples.data import vocabulary

TEXT_TOKENS = 40  # in training; the longest caption has 32 with its end, so the last one is always padding
PIPELINE_TEXT_TOKENS = 512  # what WanPipeline pads to by default, with zeros and no mask
LATENT_CHANNELS = 16
PAD, END = 0, 1


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator for a block, which modules are initialised from; its state comes back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Word level, lower case, split at spaces and signs, `</s>` at the end; words it does not know become `<unk>`."""
    words = ["<pad>", "</s>", "<unk>", *vocabulary()]
    tokenizer = Tokenizer(tokenizer_models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=PIPELINE_TEXT_TOKENS,
    )


def build_text_encoder(words: int, seed: int = 0) -> UMT5EncoderModel:
    """A two-layer UMT5 encoder, 0.34 M parameters, for a vocabulary of `words` entries."""
    with seeded(seed):
        return UMT5EncoderModel(
            UMT5Config(
                vocab_size=words,
                d_model=128,
                d_kv=32,
                d_ff=256,
                num_layers=2,
                num_heads=4,
                relative_attention_num_buckets=16,
                relative_attention_max_distance=32,
                dropout_rate=0.0,
                pad_token_id=PAD,
                eos_token_id=END,
                is_encoder_decoder=False,
                use_cache=False,
            )
        )


def build_vae(seed: int = 0, **changes: Any) -> AutoencoderKLWan:
    """Wan's VAE, 4 × 8 × 8 compression, 2.56 M parameters. `changes` are for smaller ones in tests.

    2 × 2 pixel patches take the place of a full-resolution level, as Wan2.2 does it within the same class: half the
    work of Wan2.1's own levels, and it learns faster per step.
    """
    config: dict[str, Any] = {
        "base_dim": 32,
        "dim_mult": [1, 2, 2],
        "temperal_downsample": [True, True],
        "num_res_blocks": 1,
        "patch_size": 2,
        "in_channels": 12,
        "out_channels": 12,
        "z_dim": LATENT_CHANNELS,
        "latents_mean": [0.0] * LATENT_CHANNELS,
        "latents_std": [1.0] * LATENT_CHANNELS,
    }
    with seeded(seed):
        vae = AutoencoderKLWan(**config | changes)
    with torch.no_grad():
        # As initialised the posterior's deviation is 1 and drowns means of 0.1 to 0.3.
        vae.quant_conv.bias[LATENT_CHANNELS:] = -5.0
    return vae


def build_transformer(seed: int = 0, **changes: Any) -> WanTransformer3DModel:
    """Wan2.1's transformer, 8 layers of 2 heads × 128, 8.05 M parameters. `changes` are for smaller ones in tests."""
    config: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 128,
        "num_layers": 8,
        "ffn_dim": 768,
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "text_dim": 128,
        "freq_dim": 256,
        "rope_max_seq_len": 256,
    }
    with seeded(seed):
        transformer = WanTransformer3DModel(**config | changes)
        for module in transformer.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
    nn.init.zeros_(transformer.condition_embedder.time_proj.weight)  # gates start near zero, as in adaLN-zero
    nn.init.zeros_(transformer.proj_out.weight)
    return transformer


def build_scheduler(shift: float = 3.0) -> UniPCMultistepScheduler:
    """UniPC on flow-matching velocities, as Wan2.1 ships it."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=shift
    )


def build_pipeline(tokenizer: Any, text_encoder: Any, vae: Any, transformer: Any, shift: float = 3.0) -> WanPipeline:
    """The whole pipeline from its parts."""
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=vae,
        transformer=transformer,
        scheduler=build_scheduler(shift),
    )


def mixed_precision(device: torch.device, *, recorded: bool = False) -> torch.autocast:
    """BF16 products on accelerators; nothing on a CPU, which is slower in BF16 and exact to repeat in FP32.

    `recorded`: within a CUDA graph, whose weights must be converted anew in every replay.
    """
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type != "cpu", cache_enabled=not recorded)


def to_bf16(module: Any) -> Any:
    """All parameters in BF16, in place, also those that diffusers would load in FP32; returns the module."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return module


def round_to_bf16(module: Any) -> Any:
    """All parameters rounded to BF16 values, in place; dtypes stay. Returns the module."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).to(parameter.dtype)
    return module


def tokenise(tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """Token ids [N, TEXT_TOKENS], padded with `PAD`. Raises ValueError where a text leaves no room for padding."""
    ids: Tensor = tokenizer(
        list(texts), padding="max_length", max_length=TEXT_TOKENS, truncation=True, return_tensors="pt"
    ).input_ids
    if (ids[:, -1] != PAD).any():
        longest = texts[int((ids != PAD).sum(1).argmax())]
        raise ValueError(f"captions may have {TEXT_TOKENS - 2} tokens; too long is {longest!r}")
    return ids


def encode_text(text_encoder: Any, ids: Tensor) -> Tensor:
    """Embeddings [B, TEXT_TOKENS, width] as WanPipeline makes them: zeros in place of padding."""
    mask = ids != PAD
    embeddings: Tensor = text_encoder(ids, mask.long()).last_hidden_state
    return embeddings * mask[..., None]


class PadCountCrossAttention:
    """Cross-attention to `total` text tokens of which all after the caption are the same padding, at the cost of few.

    WanPipeline pads embeddings with zeros to 512 tokens and masks none of them, so some 490 identical keys take part in
    every softmax and have to in training. n keys with one logit z and one value weigh as much as one with z + ln n:
    the last of the tokens given is padding and stands for all the rest.
    """

    _attention_backend = None
    _parallel_config = None

    def __init__(self, device: torch.device | str, tokens: int = TEXT_TOKENS) -> None:
        self.bias = torch.zeros(tokens, device=device)  # changed in place: a compiled graph keeps reading it
        self.pad_to(PIPELINE_TEXT_TOKENS)

    def pad_to(self, total: int) -> None:
        """From now on the text counts as padded to `total` tokens."""
        self.bias[-1] = math.log(total - (len(self.bias) - 1))

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        key = attn.norm_k(attn.to_k(encoder_hidden_states)).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        value = attn.to_v(encoder_hidden_states).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        logits = (query @ key.transpose(-1, -2)).float() / math.sqrt(query.shape[-1]) + self.bias
        out = (logits.softmax(-1).to(value.dtype) @ value).transpose(1, 2).flatten(2, 3)
        result: Tensor = attn.to_out[1](attn.to_out[0](out))
        return result


class TrainingSelfAttention:
    """diffusers' self-attention without interleaved writes, which the compiler turns into slow kernels.

    The rotation of pairs (x₁, x₂) is x · cos + (x P) · sin, where the matrix P makes (−x₂, x₁) of them.
    """

    _attention_backend = None
    _parallel_config = None

    def __init__(self, device: torch.device | str, head_dim: int) -> None:
        self.turn = torch.zeros(head_dim, head_dim, device=device)
        even = torch.arange(0, head_dim, 2)
        self.turn[even + 1, even], self.turn[even, even + 1] = -1, 1

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        value = attn.to_v(hidden_states).unflatten(2, (attn.heads, -1))
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1)).to(value.dtype)
        key = attn.norm_k(attn.to_k(hidden_states)).unflatten(2, (attn.heads, -1)).to(value.dtype)
        if rotary_emb is not None:
            cos, sin = (freqs.float() for freqs in rotary_emb)
            turn = self.turn.to(value.dtype)
            query, key = ((x * cos + (x @ turn) * sin).to(value.dtype) for x in (query, key))
        out = functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value)))
        result: Tensor = attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2, 3)))
        return result


def velocity(transformer: Any, latents: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
    """The transformer's output for noisy latents [B, C, T, H, W], noise levels [B] and embeddings [B, tokens, width].

    Equals its own `forward` with timesteps 1000 · sigma. The patch embedding is a matrix product here, because 3-D
    convolutions of so few channels are slow to differentiate in BF16.
    """
    batch, channels, frames, height, width = latents.shape
    _, p, q = transformer.config.patch_size
    rotary = transformer.rope(latents)
    patches = latents.view(batch, channels, frames, height // p, p, width // q, q).permute(0, 2, 3, 5, 1, 4, 6)
    embedding = transformer.patch_embedding
    x = functional.linear(patches.flatten(4).flatten(1, 3), embedding.weight.flatten(1), embedding.bias)
    temb, modulation, text, _ = transformer.condition_embedder(1000 * sigma, text)
    modulation = modulation.unflatten(1, (6, -1))
    for block in transformer.blocks:
        x = block(x, text, modulation, rotary)
    shift, scale = (transformer.scale_shift_table + temb.unsqueeze(1)).chunk(2, dim=1)
    x = transformer.proj_out((transformer.norm_out(x.float()) * (1 + scale) + shift).type_as(x))
    x = x.view(batch, frames, height // p, width // q, p, q, channels)
    output: Tensor = x.permute(0, 6, 1, 2, 4, 3, 5)
    return output.reshape(latents.shape)
