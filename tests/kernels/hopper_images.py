"""Images that the quantisers of the backend "sm90" write: made, and read back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Image(NamedTuple):
    """bytes [B·H, tiles, rows, 128] and the numbers beside them."""

    bytes: Tensor
    numbers: Tensor


def quantized(x: Tensor, kind: str, mean: Tensor | None = None) -> Image:
    """One operand of `backend.quantize`, from x [B, S, H, 128], with the anchors of K and V in front."""
    from wanfp4.kernels.hopper import quantize

    batch, tokens, heads, _ = x.shape
    flat, tiles = batch * heads, -(-tokens // 128)
    out = torch.full((flat, tiles, 136 if kind == "v" else 128, 128), 0xAA, dtype=torch.uint8, device=x.device)
    numbers = torch.full((flat, tiles, 4 if kind == "q" else 16), -1.0, device=x.device)
    quantize.quantize[(flat * tiles,)](
        x, out, numbers, mean, *x.stride(), heads, tokens, 1.0,
        KIND=kind, ANCHORS=0 if kind == "q" else 128, MEAN=mean is not None, IMAGE=True,
    )  # fmt: skip
    return Image(out, numbers)


def images_of(image: Image, what: str) -> Tensor:
    """Float32 values [B·H, padded, 128] of "q", "k" or "v", or [B·H, padded] of the "ones" beside V."""
    rows = torch.arange(image.bytes.shape[-2], device=image.bytes.device)
    place = (torch.arange(8, device=rows.device) ^ (rows[:, None] & 7))[..., None]
    chunks = image.bytes.unflatten(-1, (8, 16))
    plain = torch.gather(chunks, -2, place.expand(*chunks.shape[:-3], -1, -1, 16)).flatten(-2)
    values = plain.view(torch.float8_e4m3fn).float()
    if what in "qk":
        return (values.unflatten(2, (4, 32)) * image.numbers[:, :, :4, None, None]).flatten(1, 3)
    # What wgmma takes for key 4t + i of 16 is the score of key 2t + (i & 1) + 8·(i >> 1).
    i = torch.arange(128, device=rows.device)
    key = (i & ~15) + ((i >> 2) & 3) * 2 + (i & 1) + ((i >> 1) & 1) * 8
    ordered = torch.empty_like(values)
    ordered[..., key] = values
    if what == "ones":
        assert (ordered[:, :, 128:] == ordered[:, :, 128:129]).all()
        return ordered[:, :, 128].flatten(1)
    scale = image.numbers[:, :, 4:8].exp2() * image.numbers[:, :, 8:9]
    tokens = ordered[:, :, :128].transpose(-1, -2)
    return (tokens.unflatten(2, (4, 32)) * scale[..., None, None]).flatten(1, 3)
