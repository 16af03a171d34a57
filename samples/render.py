"""From specs to pixels: clips drawn from signed distance functions, on any device.

Every random quantity comes from a CPU generator, so a seed means the same clips on every device (up to float rounding);
only the pixels are computed on the device. A GPU draws thousands of clips a second.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wanfp4.samples.data import BACKGROUNDS, COLOURS, DIRECTIONS, EXTENT, SHAPES, Size, Spec, shape_distance

# Radii in pixels of a picture 112 pixels high, by the number of objects. Several have to pass each other, and below
# about 13 pixels, less than a token of 16 × 16, stars and crosses come out ragged.
RADII = {1: (15.0, 20.0), 2: (14.0, 16.5), 3: (9.5, 11.5)}
_REFERENCE_HEIGHT = 112
_TRIES = 128
_TOP_SPEED = 2.2  # pixels a frame, at that height; faster motion costs the VAE decibels


@dataclass(frozen=True)
class Scenes:
    """Everything that B clips of up to N objects need to be drawn; tensors on the CPU, lengths in pixels.

    centre [B, N, T, 2] (x, y), radius [B, N] (0: no such object), shape [B, N] indices of `SHAPES`, colour [B, N, 3],
    background [B] indices of `BACKGROUNDS`, look [B, 9] in [0, 1] (shades, periods and phases of backgrounds).
    """

    size: Size
    centre: Tensor
    radius: Tensor
    shape: Tensor
    colour: Tensor
    background: Tensor
    look: Tensor

    def __len__(self) -> int:
        return len(self.radius)


def draw_scenes(specs: Sequence[Spec], size: Size, generator: torch.Generator) -> Scenes:
    """Radius, path, exact colour and background of each clip. `generator` is a CPU generator.

    Paths stay inside the picture and cross most of it along the direction of motion. Objects of one clip keep apart
    for the whole clip wherever one of `_TRIES` draws allows it.
    """
    count = max(len(spec.objects) for spec in specs)
    present = torch.tensor([[i < len(spec.objects) for i in range(count)] for spec in specs])
    padded = [[*spec.objects, *[spec.objects[0]] * (count - len(spec.objects))] for spec in specs]
    way = torch.tensor([[DIRECTIONS[thing.direction] for thing in row] for row in padded], dtype=torch.float32)
    shape = torch.tensor([[SHAPES.index(thing.shape) for thing in row] for row in padded])
    colour = torch.tensor([[COLOURS[thing.colour] for thing in row] for row in padded])

    def uniform(*sizes: int) -> Tensor:
        return torch.rand(*sizes, generator=generator)

    scale = min(size.height, size.width) / _REFERENCE_HEIGHT
    limits = torch.tensor([RADII[min(len(spec.objects), max(RADII))] for spec in specs])[:, None] * scale
    radius = limits[..., 0] + (limits[..., 1] - limits[..., 0]) * uniform(len(specs), count)
    centre = _paths(way, radius, present, size, generator)
    colour = colour * (0.92 + 0.08 * uniform(len(specs), count, 1)) + 0.03 * (uniform(len(specs), count, 3) - 0.5)
    return Scenes(
        size,
        centre,
        radius * present,
        shape,
        colour.clamp(0, 1),
        torch.tensor([BACKGROUNDS.index(spec.background) for spec in specs]),
        uniform(len(specs), 9),
    )


def _paths(way: Tensor, radius: Tensor, present: Tensor, size: Size, generator: torch.Generator) -> Tensor:
    """Centres [B, N, T, 2] of objects that move along unit vectors `way` [B, N, 2]."""
    batch, count = radius.shape
    tries = _TRIES if count > 1 else 1
    picture = torch.tensor([size.width, size.height], dtype=torch.float32)
    margin = (EXTENT * radius + 1.5)[:, None, :, None]
    room = picture - 2 * margin  # [B, 1, N, 2]
    moves = way[:, None].abs() > 0
    alone = (present.sum(1) == 1)[:, None, None, None]

    def uniform() -> Tensor:
        return torch.rand(batch, tries, count, 2, generator=generator)

    shortest = torch.where(alone, 0.75, 0.60)
    limit = _TOP_SPEED * min(size.height, size.width) / _REFERENCE_HEIGHT * (size.frames - 1)
    reach = torch.where(moves, (room * (shortest + (1 - shortest) * uniform())).clamp(max=limit), torch.zeros(1))
    # Across its motion a lone object favours the middle: fewer places that it could be in are fewer places for a twin.
    first, second = uniform(), uniform()
    place = torch.where(alone & ~moves, (first + second) / 2, first)
    start = margin + (room - reach) * place
    start = torch.where(way[:, None] < 0, picture - start, start)
    travel = way[:, None] * reach  # [B, tries, N, 2]
    gap = torch.full((batch, tries), math.inf)
    for i in range(count):
        for j in range(i):
            clear = _closest(start[:, :, i] - start[:, :, j], travel[:, :, i] - travel[:, :, j])
            clear -= 1.25 * (radius[:, i] + radius[:, j])[:, None]
            both = (present[:, i] & present[:, j])[:, None]
            gap = torch.where(both, torch.minimum(gap, clear), gap)
    good = gap >= 0
    chosen = torch.where(good.any(1), good.int().argmax(1), gap.argmax(1))  # the first good draw, else the best
    rows = torch.arange(batch)
    time = torch.linspace(0, 1, size.frames)[:, None]
    return start[rows, chosen][:, :, None] + travel[rows, chosen][:, :, None] * time


def _closest(offset: Tensor, drift: Tensor) -> Tensor:
    """Smallest length of offset + t · drift, each [..., 2], for t in [0, 1]."""
    t = -(offset * drift).sum(-1) / drift.square().sum(-1).clamp(min=1e-9)
    distance: Tensor = torch.linalg.vector_norm(offset + t.clamp(0, 1)[..., None] * drift, dim=-1)
    return distance


@torch.no_grad()
def render(scenes: Scenes, device: torch.device | str = "cpu") -> Tensor:
    """Clips [B, 3, T, H, W] in [-1, 1], float32, on `device`; edges are 1.3 pixels soft."""
    size, batch = scenes.size, len(scenes)
    xs = torch.arange(size.width, device=device) + 0.5
    ys = torch.arange(size.height, device=device) + 0.5
    gy, gx = torch.meshgrid(ys, xs, indexing="ij")
    video = _backgrounds(scenes, gx, gy)[:, None, None].expand(batch, 3, size.frames, *gx.shape).clone()
    for slot in range(scenes.radius.shape[1]):
        for kind, name in enumerate(SHAPES):
            rows = torch.nonzero((scenes.shape[:, slot] == kind) & (scenes.radius[:, slot] > 0))[:, 0]
            if not len(rows):
                continue
            r = scenes.radius[rows, slot].to(device)[:, None, None, None]
            centre = scenes.centre[rows, slot].to(device)[..., None, None]  # [rows, T, 2, 1, 1]
            distance = shape_distance(name, (gx - centre[:, :, 0]) / r, (gy - centre[:, :, 1]) / r, torch)
            alpha = (0.5 - distance * r / 1.3).clamp_(0, 1)[:, None]
            paint = scenes.colour[rows, slot].to(device)[:, :, None, None, None]
            rows = rows.to(device)
            video[rows] = torch.lerp(video[rows], paint, alpha)
    return video.mul_(2).sub_(1)


def _backgrounds(scenes: Scenes, gx: Tensor, gy: Tensor) -> Tensor:
    """Grey values [B, H, W] in [0, 1]; the finest stripes and checks are 12 pixels wide."""
    size = scenes.size
    kind, look = scenes.background.to(gx.device), scenes.look.to(gx.device)
    look = look[:, :, None, None]
    scale = min(size.height, size.width) / _REFERENCE_HEIGHT
    low, high = 0.20 + 0.15 * look[:, 3], 0.60 + 0.20 * look[:, 4]
    period, phase_x, phase_y = scale * (24 + 14 * look[:, 5]), 2 * math.pi * look[:, 6], 2 * math.pi * look[:, 7]
    turned, reverse = look[:, 8] < 0.5, look[:, 6] < 0.5

    def wave(position: Tensor, phase: Tensor) -> Tensor:
        return (0.5 + 3.0 * torch.sin(2 * math.pi * position / period + phase)).clamp(0, 1)

    wave_x, wave_y = wave(gx, phase_x), wave(gy, phase_y)
    ramp = torch.where(turned, gx / size.width, gy / size.height)
    patterns = {
        "black": (0.02 + 0.08 * look[:, 0]).expand_as(ramp),
        "gray": (0.42 + 0.16 * look[:, 1]).expand_as(ramp),
        "white": (0.90 + 0.08 * look[:, 2]).expand_as(ramp),
        "striped": torch.lerp(low, high, torch.where(turned, wave_x, wave_y)),
        "checkered": torch.lerp(low, high, wave_x * (1 - wave_y) + wave_y * (1 - wave_x)),
        "gradient": torch.lerp(low, high, torch.where(reverse, 1 - ramp, ramp)),
    }
    stacked = torch.stack([patterns[name] for name in BACKGROUNDS], 1)
    return stacked.gather(1, kind[:, None, None, None].expand(-1, 1, *gx.shape))[:, 0]


def to_uint8(video: Tensor) -> Tensor:
    """Clips [B, 3, T, H, W] in [-1, 1] as uint8 [B, T, H, W, 3], rounded."""
    return ((video.float() + 1) * 127.5).round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 4, 1)


def clip_pool(specs: Sequence[Spec], size: Size, seed: int, device: torch.device | str, *, batch: int = 64) -> Tensor:
    """The clips of `specs` as uint8 [B, 3, T, H, W] on `device`."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.empty(len(specs), 3, size.frames, size.height, size.width, dtype=torch.uint8, device=device)
    for i in range(0, len(specs), batch):
        video = render(draw_scenes(specs[i : i + batch], size, generator), device)
        pool[i : i + batch] = video.add_(1).mul_(127.5).round_()
    return pool


def windows(pool: Tensor, rng: random.Random, batch: int, side: int) -> Tensor:
    """Random spatial windows, all frames, of random clips of a pool: float [batch, 3, T, side, side] in [-1, 1].

    Slices rather than an index tensor: that would make the host wait for the device in every step.
    """
    cut = []
    for _ in range(batch):
        y, x = rng.randrange(pool.shape[3] - side + 1), rng.randrange(pool.shape[4] - side + 1)
        cut.append(pool[rng.randrange(len(pool)), :, :, y : y + side, x : x + side])
    return torch.stack(cut).float().div_(127.5).sub_(1)
