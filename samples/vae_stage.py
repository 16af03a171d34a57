"""First training stage: the VAE.

Two phases. The first 60 % of the steps minimise a weighted squared error with neither posterior noise nor KL: that is
where colour is learned. (L1 against mostly grey pixels, and KL from the start, ended in a VAE that decodes everything
grey, a minimum that more steps do not leave.) The rest adds L1, posterior noise and a small KL while the rate decays.
The windows are 64 × 64 pixels and all frames of a clip: trained on fewer, brightness drifts over the frames.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from wanfp4.errors import ModelError
from wanfp4.quality.files import write
from wanfp4.samples import models, whole_clip
from wanfp4.samples.data import DEFAULT, HELD_OUT, Size, random_spec
from wanfp4.samples.loop import Average, Json, TrainingError, step_random, warm_up_and_decay
from wanfp4.samples.optim import Muon
from wanfp4.samples.render import clip_pool, draw_scenes, render, windows

GATE_STEP, GATE_CHROMA = 500, 0.8


@dataclass(frozen=True)
class VaeSettings:
    """Everything that the trained weights follow from, but for the device.

    chroma error is the share of the colour differences within clips that reconstruction loses; see `GATE_CHROMA`.
    """

    steps: int = 6800
    seed: int = 0
    batch: int = 12
    window: int = 64  # pixels
    clips: int = 8192  # drawn once
    rate: float = 1e-3  # AdamW: biases, gains, narrow kernels
    muon_rate: float = 3e-3  # kernels with at least 32 channels on both sides
    warm_up: int = 100
    decay: float = 0.4  # share of the steps that is the second phase
    kl: float = 1e-5
    object_weight: float = 5.0
    average: float = 0.998
    frames: int = DEFAULT.frames
    height: int = DEFAULT.height
    width: int = DEFAULT.width
    validation_clips: int = 48
    model: Mapping[str, Any] | None = None  # changes to `models.build_vae`, for tests


class VaeStage:
    """Trains a VAE; see `wanfp4.samples.loop.Stage`."""

    name = "vae"

    def __init__(self, settings: VaeSettings, device: torch.device | str, *, compiled: bool = False) -> None:
        self.options = settings
        self.settings: Json = json.loads(json.dumps(asdict(settings)))
        self.steps = settings.steps
        self.device = torch.device(device)
        self.vae = models.build_vae(settings.seed, **(settings.model or {})).to(self.device)
        parameters = list(self.vae.parameters())
        kernels = [p for p in parameters if p.ndim >= 4 and min(p.shape[:2]) >= 32]
        others = [p for p in parameters if not any(p is k for k in kernels)]
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (
                torch.optim.AdamW(
                    others, lr=settings.rate, betas=(0.9, 0.99), weight_decay=0.0, fused=self.device.type == "cuda"
                ),
                settings.rate,
            )
        ]
        if kernels:
            self.optimizers.append((Muon(kernels, lr=settings.muon_rate), settings.muon_rate))
        self.average = Average(parameters, settings.average)
        self.size = Size(settings.frames, settings.height, settings.width)
        rng = random.Random(f"{settings.seed} vae clips")
        specs = [random_spec(rng) for _ in range(settings.clips)]
        self.pool = clip_pool(specs, self.size, rng.getrandbits(62), self.device)
        self.generator = torch.Generator(self.device)
        self._loss = torch.compile(self._plain_loss, dynamic=False) if compiled else self._plain_loss

    def _plain_loss(self, x: Tensor, weight: Tensor, noise: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        """`second` is 0 or 1, the phase: as a tensor it needs no second compilation."""
        with models.mixed_precision(self.device):
            mean, log_variance = (t.float() for t in whole_clip.encode(self.vae, x))
            decoded = whole_clip.decode(self.vae, mean + second * noise * (0.5 * log_variance).exp())
        error = decoded.float() - x
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        loss = (error.square() * weight).mean() + second * ((error.abs() * weight).mean() + self.options.kl * kl)
        chroma = (error - error.mean(1, keepdim=True)).square().mean()
        return loss, error.square().mean(), chroma / (x - x.mean(1, keepdim=True)).square().mean(), kl

    def step(self, index: int) -> Mapping[str, Tensor]:
        """One optimisation step; returns loss, PSNR of the batch in dB, chroma error and KL."""
        o = self.options
        rng = step_random(o.seed, self.name, index)
        self.generator.manual_seed(rng.getrandbits(62))
        factor = warm_up_and_decay(index, o.steps, o.warm_up, o.decay)
        for optimizer, rate in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        x = windows(self.pool, rng, o.batch, o.window)
        weight = 1 + (o.object_weight - 1) * ((x.amax(1, keepdim=True) - x.amin(1, keepdim=True)) > 0.5)
        latent = (o.batch, models.LATENT_CHANNELS, (o.frames - 1) // 4 + 1, o.window // 8, o.window // 8)
        noise = torch.randn(latent, generator=self.generator, device=self.device)
        # Not torch.tensor, which copies from the host and waits for the device.
        second = torch.full((), float(index >= o.steps * (1 - o.decay)), device=self.device)
        loss, mse, chroma, kl = self._loss(x, weight, noise, second)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.average.parameters, 1.0)
        for optimizer, _ in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.average.update(index)
        return {"loss": loss, "psnr": -10 * (mse.detach() / 4).log10(), "chroma": chroma, "kl": kl}

    def check(self, row: Json) -> None:
        """The gate: a run whose colours are not coming by step 500 never learns them."""
        if row["step"] == GATE_STEP and row["chroma"] >= GATE_CHROMA:
            raise TrainingError(
                f"the VAE does not learn colour: {100 * row['chroma']:.0f} % of the chroma error is left at step "
                f"{GATE_STEP}, and below {100 * GATE_CHROMA:.0f} % is needed. Another --seed may do"
            )

    def state(self) -> Json:
        """Weights, averages and optimiser states."""
        return {
            "vae": self.vae.state_dict(),
            "average": self.average.values,
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
        }

    def load(self, state: Json) -> None:
        """The counterpart of `state`."""
        self.vae.load_state_dict(state["vae"])
        self.average.load(state["average"])
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def averaged(self) -> Any:
        """A VAE with the averaged weights rounded to BF16, in float32."""
        vae = models.build_vae(self.options.seed, **(self.options.model or {})).to(self.device)
        self.average.copy_to(vae.parameters())
        return models.round_to_bf16(vae).eval()

    def finish(self, folder: Path) -> Json:
        """Write `vae.safetensors` (BF16, latent statistics in its metadata); returns PSNR on held-out clips, in dB."""
        vae, clips = self.averaged(), self.options.validation_clips
        mean, deviation = latent_statistics(vae, self.pool[: min(2048, len(self.pool))])
        save_vae(
            vae,
            folder / "vae.safetensors",
            {**(self.options.model or {}), "latents_mean": mean, "latents_std": deviation},
        )
        values = held_out_psnr(vae, self.size, clips)
        half = held_out_psnr(models.to_bf16(vae), self.size, clips)
        return {
            "clips": clips,
            "psnr_median": round(values[len(values) // 2], 2),
            "psnr_minimum": round(values[0], 2),
            "psnr_median_bf16": round(half[len(half) // 2], 2),
            "psnr_minimum_bf16": round(half[0], 2),
        }


@torch.no_grad()
def latent_statistics(vae: Any, pool: Tensor, batch: int = 32) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each latent channel over clips uint8 [N, 3, T, H, W], posterior noise included."""
    total = torch.zeros(3, models.LATENT_CHANNELS, dtype=torch.float64, device=pool.device)
    count = 0
    for i in range(0, len(pool), batch):
        clips = pool[i : i + batch].float().div_(127.5).sub_(1)
        with models.mixed_precision(pool.device):
            mean, log_variance = whole_clip.encode(vae, clips)
        mean, variance = mean.double(), log_variance.double().exp()
        total += torch.stack([mean.sum((0, 2, 3, 4)), mean.square().sum((0, 2, 3, 4)), variance.sum((0, 2, 3, 4))])
        count += mean.numel() // models.LATENT_CHANNELS
    first, second, noise = total / count
    return first.tolist(), (second - first.square() + noise).sqrt().tolist()


@torch.no_grad()
def held_out_psnr(vae: Any, size: Size, clips: int, batch: int = 8) -> list[float]:
    """Per-clip PSNR in dB, sorted, through diffusers' own encode and decode, on combinations training never shows."""
    rng, generator, out = random.Random("psnr"), torch.Generator().manual_seed(777), []
    for _ in range(0, clips, batch):
        specs = [random_spec(rng, HELD_OUT) for _ in range(batch)]
        x = render(draw_scenes(specs, size, generator), vae.device)
        y = vae.decode(vae.encode(x.to(vae.dtype)).latent_dist.mode()).sample.float()
        out += (-10 * torch.log10(((x - y) / 2).square().mean((1, 2, 3, 4)))).tolist()
    return sorted(out)


def save_vae(vae: Any, path: Path, config: Json) -> None:
    """Weights in BF16, and what `load_vae` needs of the configuration, as one safetensors file."""
    save_weights(vae, path, {"config": json.dumps(config)})


def load_vae(path: Path) -> Any:
    """The VAE of a file of `save_vae` or of a diffusers folder, float32 on the CPU.

    Raises ModelError when there is none, or the file is another.
    """
    if path.is_dir():
        from wanfp4.processors.pipelines import load_vae as load_folder

        return load_folder(path, device="cpu", dtype="fp32").eval()
    if not path.is_file():
        raise ModelError(f"{str(path)!r} is missing: train the VAE first")
    try:
        with safe_open(path, "pt") as file:
            config = json.loads(file.metadata()["config"])
        vae = models.build_vae(**config)
        vae.load_state_dict(load_file(path))
    except Exception as error:
        raise ModelError(f"{str(path)!r} is not a VAE of this training: {error}") from error
    return vae.eval()


def save_weights(module: torch.nn.Module, path: Path, metadata: dict[str, str] | None = None) -> None:
    """A module's state in BF16 as one safetensors file; UMT5 lists its embedding twice, and it is written once."""
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in module.state_dict().items()
        if name != "encoder.embed_tokens.weight"
    }
    write(path, save(tensors, metadata))
