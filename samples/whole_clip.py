"""Wan's VAE on a whole clip in one pass, for training: the same function as diffusers', as 2-D convolutions.

diffusers encodes 1 + 4 + 4 + … frames, decodes one latent frame at a time, and carries a cache of features between
those chunks. On a whole clip that comes to: causal convolutions with zeros before the first frame, and temporal
resampling that the first frame bypasses. A causal convolution over three frames is here one 2-D convolution over the
stacked channels of three neighbouring frames, so frames stay in the batch from beginning to end and every kernel is a
2-D one. Nothing of diffusers is changed; its modules are walked and only their parameters used.

For VAEs without residual up and down blocks (`is_residual` false): Wan2.1's.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanAttentionBlock,
    WanCausalConv3d,
    WanResample,
    WanResidualBlock,
    patchify,
    unpatchify,
)
from torch import Tensor
from torch.nn import functional

from wanfp4.errors import UnsupportedInputError


def encode(vae: Any, video: Tensor) -> tuple[Tensor, Tensor]:
    """Posterior mean and log variance, each [B, z, 1 + (T − 1)/4, H/8, W/8], of clips [B, 3, T, H, W] in [-1, 1].

    Equals `vae.encode(video).latent_dist`. Raises UnsupportedInputError for other layouts than Wan2.1's.
    """
    _check(vae)
    if vae.config.patch_size:
        video = patchify(video, vae.config.patch_size)
    x, frames = _fold(video)
    encoder = vae.encoder
    x = _convolve(encoder.conv_in, x, frames)
    for layer in encoder.down_blocks:
        x, frames = _layer(layer, x, frames)
    x = _head(encoder, _middle(encoder.mid_block, x, frames), frames)
    mean, log_variance = _unfold(_convolve(vae.quant_conv, x, frames), frames).chunk(2, 1)
    return mean, log_variance.clamp(-30, 20)


def decode(vae: Any, latent: Tensor) -> Tensor:
    """Clips [B, 3, 4 · (t − 1) + 1, 8h, 8w] of latents [B, z, t, h, w].

    Equals `vae.decode(latent)`, except that values are not clamped to [-1, 1]: gradients must pass.
    """
    _check(vae)
    x, frames = _fold(latent)
    decoder = vae.decoder
    x = _convolve(decoder.conv_in, _convolve(vae.post_quant_conv, x, frames), frames)
    x = _middle(decoder.mid_block, x, frames)
    for block in decoder.up_blocks:
        for layer in (*block.resnets, *(block.upsamplers or ())):
            x, frames = _layer(layer, x, frames)
    video = _unfold(_head(decoder, x, frames), frames)
    if vae.config.patch_size:
        video = unpatchify(video.contiguous(), vae.config.patch_size)
    return video


def _check(vae: Any) -> None:
    if vae.config.is_residual:
        raise UnsupportedInputError(
            "whole-clip passes know Wan2.1's VAE layout; this one has is_residual=True (Wan2.2)"
        )


def _fold(x: Tensor) -> tuple[Tensor, int]:
    """[B, C, T, H, W] to [B·T, C, H, W] in channels-last layout, and T."""
    x, frames = x.permute(0, 2, 1, 3, 4).flatten(0, 1), x.shape[2]
    return x.contiguous(memory_format=torch.channels_last), frames


def _unfold(x: Tensor, frames: int) -> Tensor:
    clip: Tensor = x.unflatten(0, (-1, frames))
    return clip.permute(0, 2, 1, 3, 4)


def _convolve(conv: WanCausalConv3d, x: Tensor, frames: int) -> Tensor:
    """A causal convolution of stride 1: each frame sees itself and the ones before, zeros before the first."""
    taps = conv.kernel_size[0]
    padding = (conv._padding[2], conv._padding[0])
    if taps == 1:
        return functional.conv2d(x, conv.weight[:, :, 0], conv.bias, padding=padding)
    before = functional.pad(x.unflatten(0, (-1, frames)), (0, 0, 0, 0, 0, 0, taps - 1, 0))
    return _stacked(conv, [before[:, i : i + frames] for i in range(taps)], padding)


def _stacked(conv: WanCausalConv3d, taps: list[Tensor], padding: tuple[int, int]) -> Tensor:
    """The convolution whose n-th kernel slice meets taps[n], each [B, T, C, H, W]."""
    stacked = torch.cat([tap.flatten(0, 1) for tap in taps], 1)
    weight = conv.weight.transpose(1, 2).flatten(1, 2)  # [out, taps · in, kernel height, kernel width]
    return functional.conv2d(stacked, weight, conv.bias, padding=padding)


def _layer(layer: Any, x: Tensor, frames: int) -> tuple[Tensor, int]:
    if isinstance(layer, WanResample):
        return _resample(layer, x, frames)
    if isinstance(layer, WanResidualBlock):
        return _residual(layer, x, frames), frames
    return _attention(layer, x), frames


def _residual(block: WanResidualBlock, x: Tensor, frames: int) -> Tensor:
    shortcut = x if isinstance(block.conv_shortcut, torch.nn.Identity) else _convolve(block.conv_shortcut, x, frames)
    x = _convolve(block.conv1, block.nonlinearity(_normalise(block.norm1, x)), frames)
    x = block.dropout(block.nonlinearity(_normalise(block.norm2, x)))
    return _convolve(block.conv2, x, frames) + shortcut


def _normalise(norm: Any, x: Tensor) -> Tensor:
    gamma = norm.gamma.view(1, -1, 1, 1)
    scaled: Tensor = functional.normalize(x.float(), dim=1).to(x.dtype) * norm.scale * gamma + norm.bias
    return scaled


def _attention(block: WanAttentionBlock, x: Tensor) -> Tensor:
    """It attends within frames, so each frame may pass as a clip of its own."""
    attended: Tensor = block(x[:, :, None])
    return attended[:, :, 0]


def _middle(block: Any, x: Tensor, frames: int) -> Tensor:
    x = _residual(block.resnets[0], x, frames)
    for attention, residual in zip(block.attentions, block.resnets[1:], strict=True):
        x = _residual(residual, x if attention is None else _attention(attention, x), frames)
    return x


def _head(coder: Any, x: Tensor, frames: int) -> Tensor:
    return _convolve(coder.conv_out, coder.nonlinearity(_normalise(coder.norm_out, x)), frames)


def _resample(layer: WanResample, x: Tensor, frames: int) -> tuple[Tensor, int]:
    if layer.mode == "upsample3d" and frames > 1:
        clip = x.unflatten(0, (-1, frames))
        rest = clip[:, 1:].flatten(0, 1)
        doubled = _convolve(layer.time_conv, rest, frames - 1).unflatten(0, (-1, frames - 1))
        pairs = doubled.unflatten(2, (2, -1)).flatten(1, 2)  # [B, 2 · (T − 1), C, H, W]: two frames for one
        frames = 2 * frames - 1
        x = torch.cat([clip[:, :1], pairs], 1).flatten(0, 1)
    x = layer.resample(x)
    if layer.mode == "downsample3d" and frames > 1:
        clip = x.unflatten(0, (-1, frames))
        after = [clip[:, i : frames - 2 + i : 2] for i in range(3)]
        halved = _stacked(layer.time_conv, after, (0, 0)).unflatten(0, (-1, (frames - 1) // 2))
        frames = 1 + (frames - 1) // 2
        x = torch.cat([clip[:, :1], halved], 1).flatten(0, 1)
    return x, frames
