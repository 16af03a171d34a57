"""Second training stage: the transformer and its text encoder, by flow matching on the VAE's latents.

x = (1 − σ)·z + σ·ε, and the model learns the velocity ε − z. Clips are drawn and encoded once, before the first step;
a step takes posterior samples of random ones, a random wording of each (none for one in ten, for classifier-free
guidance), and noise levels spread evenly over a distribution that favours the high ones, where the number of objects
and their places are decided. One batch in ten is of long clips.
"""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from wanfp4.errors import ModelError
from wanfp4.quality.files import replacing
from wanfp4.samples import loop, models, whole_clip
from wanfp4.samples.data import DEFAULT, HELD_OUT, LONG, TRAINING, MovingShape, Size, caption, random_spec
from wanfp4.samples.loop import Average, Json, step_random, warm_up_and_decay
from wanfp4.samples.optim import Muon
from wanfp4.samples.render import draw_scenes, render
from wanfp4.samples.vae_stage import save_weights

VALIDATION_SIGMAS = (0.95, 0.85, 0.7, 0.5, 0.3, 0.1)


@dataclass(frozen=True)
class TransformerSettings:
    """Everything that the trained weights follow from, but for the VAE and the device."""

    steps: int = 12440
    seed: int = 0
    batch: int = 192
    clips: int = 20480  # drawn and encoded once
    long_batch: int = 52  # as many tokens as a batch of default clips
    long_clips: int = 1536  # 0: train on default clips only
    long_every: int = 10  # steps
    phrasings: int = 6  # wordings of each clip
    rate: float = 1e-3  # AdamW: everything but the blocks' matrices
    muon_rate: float = 3e-3  # the blocks' matrices
    weight_decay: float = 0.01  # of those
    warm_up: int = 200
    decay: float = 0.35
    drop: float = 0.1  # captions replaced by the empty one
    shift: float = 3.0  # flow shift of the noise levels trained on
    uniform: float = 0.2  # share of noise levels drawn evenly, before the shift; the rest is logit-normal
    first_frame: float = 2.0  # weight of the first latent frame, which stands for one frame where others stand for four
    average: float = 0.999
    validate_every: int = 1000
    size: tuple[int, int, int] = (DEFAULT.frames, DEFAULT.height, DEFAULT.width)
    long_size: tuple[int, int, int] = (LONG.frames, LONG.height, LONG.width)
    model: Mapping[str, Any] | None = None  # changes to `models.build_transformer`, for tests


@dataclass(frozen=True)
class LatentPool:
    """Encoded clips: the posterior's mean and deviation [N, 16, t, h, w], FP16; caption ids [N, phrasings, tokens]."""

    mean: Tensor
    deviation: Tensor
    ids: Tensor

    def __len__(self) -> int:
        return len(self.mean)


@torch.no_grad()
def encode_pool(
    vae: Any,
    tokenizer: Any,
    clips: int,
    size: Size,
    seed: str,
    device: torch.device,
    *,
    combinations: Sequence[MovingShape] = TRAINING,
    phrasings: int = 6,
    batch: int = 64,
) -> LatentPool:
    """Draw `clips` clips, word each `phrasings` times, and encode them in BF16."""
    rng = random.Random(seed)
    specs = [random_spec(rng, combinations) for _ in range(clips)]
    ids = models.tokenise(tokenizer, [caption(rng, spec) for spec in specs for _ in range(phrasings)])
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    shape = (clips, models.LATENT_CHANNELS, (size.frames - 1) // 4 + 1, size.height // 8, size.width // 8)
    mean = torch.empty(shape, dtype=torch.float16, device=device)
    deviation = torch.empty_like(mean)
    for i in range(0, clips, batch):
        video = render(draw_scenes(specs[i : i + batch], size, generator), device)
        with models.mixed_precision(device):
            m, log_variance = whole_clip.encode(vae, video)
        mean[i : i + batch], deviation[i : i + batch] = m, (0.5 * log_variance.float()).exp()
    return LatentPool(mean, deviation, ids.view(clips, phrasings, -1).to(device))


class TransformerStage:
    """Trains transformer and text encoder; see `wanfp4.samples.loop.Stage`.

    `vae` is that of the first stage, with its latent statistics. `cache` is a folder for the encoded clips, which a
    resumed run on the same machine then need not make again.
    """

    name = "transformer"

    def __init__(
        self,
        settings: TransformerSettings,
        vae: Any,
        device: torch.device | str,
        *,
        compiled: bool = False,
        cache: Path | None = None,
    ) -> None:
        self.options = settings
        self.settings: Json = json.loads(json.dumps(asdict(settings)))
        self.steps = settings.steps
        self.device = torch.device(device)
        self.tokenizer = models.build_tokenizer()
        vae = vae.to(self.device)
        self.mean = torch.tensor(vae.config.latents_mean, device=self.device).view(1, -1, 1, 1, 1)
        self.deviation = torch.tensor(vae.config.latents_std, device=self.device).view(1, -1, 1, 1, 1)
        self.pools = self._pools(vae, cache)

        self.transformer, self.text_encoder = self._modules()
        self.transformer.train()
        self.text_encoder.train()
        parameters = [*self.transformer.parameters(), *self.text_encoder.parameters()]
        matrices = [p for n, p in self.transformer.named_parameters() if p.ndim == 2 and n.startswith("blocks.")]
        others = [p for p in parameters if not any(p is m for m in matrices)]
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (
                torch.optim.AdamW(
                    others, lr=settings.rate, betas=(0.9, 0.98), weight_decay=0.0, fused=self.device.type == "cuda"
                ),
                settings.rate,
            ),
            (Muon(matrices, lr=settings.muon_rate, weight_decay=settings.weight_decay), settings.muon_rate),
        ]
        self.average = Average(parameters, settings.average)
        self.generator = torch.Generator(self.device)
        self.padding = models.PadCountCrossAttention(self.device)
        turning = models.TrainingSelfAttention(self.device, self.transformer.config.attention_head_dim)
        for block in self.transformer.blocks:
            block.attn1.set_processor(turning)
            block.attn2.set_processor(self.padding)
            if compiled:
                block.compile(dynamic=False)
        self.empty = models.tokenise(self.tokenizer, [""]).to(self.device)
        self.warm_from = 0
        self.recorded: dict[torch.Size, RecordedStep] | None = {} if compiled and self.device.type == "cuda" else None

    def _modules(self) -> tuple[Any, Any]:
        transformer = models.build_transformer(self.options.seed, **(self.options.model or {}))
        text_encoder = models.build_text_encoder(len(self.tokenizer), self.options.seed)
        return transformer.to(self.device), text_encoder.to(self.device)

    def _pools(self, vae: Any, cache: Path | None) -> dict[str, LatentPool]:
        """The clips to train on and, of held-out combinations, to validate on."""
        o = self.options
        key = json.dumps([self.settings[n] for n in ("seed", "clips", "long_clips", "phrasings", "size", "long_size")])
        if cache is not None and (path := cache / "pools.pt").is_file():
            saved = torch.load(path, map_location=self.device, weights_only=True)
            if saved["key"] == key:
                return {name: LatentPool(*tensors) for name, tensors in saved["pools"].items()}
        wanted = {
            "train": (o.clips, Size(*o.size), TRAINING, 64),
            "long": (o.long_clips, Size(*o.long_size), TRAINING, 16),
            "validation": (o.batch, Size(*o.size), HELD_OUT, 64),
        }
        pools = {
            name: encode_pool(
                vae,
                self.tokenizer,
                clips,
                size,
                f"{o.seed} {name} clips",
                self.device,
                combinations=combinations,
                phrasings=o.phrasings,
                batch=batch,
            )
            for name, (clips, size, combinations, batch) in wanted.items()
            if clips
        }
        if cache is not None:
            with replacing(cache / "pools.pt") as temporary:
                tensors = {name: (p.mean, p.deviation, p.ids) for name, p in pools.items()}
                torch.save({"key": key, "pools": tensors}, temporary)
        return pools

    def step(self, index: int) -> Mapping[str, Tensor]:
        """One optimisation step; returns the loss, and every so often the validation loss by noise level."""
        o = self.options
        rng = step_random(o.seed, self.name, index)
        self.generator.manual_seed(rng.getrandbits(62))
        factor = warm_up_and_decay(index, o.steps, o.warm_up, o.decay)
        factor *= min(1.0, (index - self.warm_from + 1) / o.warm_up) if self.warm_from else 1.0
        for optimizer, rate in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        long = "long" in self.pools and index % o.long_every == o.long_every - 1
        pool, batch = (self.pools["long"], o.long_batch) if long else (self.pools["train"], o.batch)
        self.padding.pad_to(
            models.PIPELINE_TEXT_TOKENS
            if rng.random() < 0.6
            else rng.randint(models.TEXT_TOKENS, models.PIPELINE_TEXT_TOKENS)
        )
        rows = torch.randint(len(pool), (batch,), generator=self.generator, device=self.device)
        wording = torch.randint(pool.ids.shape[1], (batch,), generator=self.generator, device=self.device)
        ids = torch.where(self._uniform(batch, 1) < o.drop, self.empty, pool.ids[rows, wording])
        loss = self._gradients(pool, rows, ids, self._sigmas(batch))
        torch.nn.utils.clip_grad_norm_(self.average.parameters, 1.0)
        for optimizer, _ in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.average.update(index)
        figures = {"long loss" if long else "loss": loss.detach()}
        if (index + 1) % o.validate_every == 0 or index + 1 == self.steps:
            figures |= self._validate()
        return figures

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.device)

    def _sigmas(self, batch: int) -> Tensor:
        """Noise levels [batch], stratified: one from each of `batch` equally likely ranges."""
        order = torch.randperm(batch, generator=self.generator, device=self.device)
        u = (order + self._uniform(batch)) / batch
        normal = torch.sigmoid(math.sqrt(2) * torch.erfinv((2 * u - 1).clamp(-0.9999, 0.9999)))
        u = torch.where(self._uniform(batch) < self.options.uniform, u, normal)
        return self.options.shift * u / (1 + (self.options.shift - 1) * u)

    def _gradients(self, pool: LatentPool, rows: Tensor, ids: Tensor, sigma: Tensor) -> Tensor:
        """Forward and backward; returns the mean loss.

        Hundreds of small kernels take longer to launch than to run, so the transformer's are recorded as a CUDA graph.
        """
        if self.recorded is None:
            loss = self._loss(pool, rows, ids, sigma).mean()
            loss.backward()
            return loss.detach()
        noisy, target = self._noised(pool, rows, sigma)
        with models.mixed_precision(self.device):
            text = models.encode_text(self.text_encoder, ids)
        if noisy.shape not in self.recorded:
            try:
                self.recorded[noisy.shape] = RecordedStep(
                    lambda *inputs: self._objective(*inputs, recorded=True).mean(),
                    (noisy, target, sigma, text.detach()),
                    list(self.transformer.parameters()),
                )
            except RuntimeError as error:
                warnings.warn(f"the step cannot be recorded as a CUDA graph and is slower: {error}", stacklevel=2)
                self.recorded = None
                return self._gradients(pool, rows, ids, sigma)
        loss, text_gradient = self.recorded[noisy.shape](noisy, target, sigma, text.detach())
        text.backward(text_gradient.to(text.dtype))
        return loss

    def _loss(self, pool: LatentPool, rows: Tensor, ids: Tensor, sigma: Tensor) -> Tensor:
        """Mean squared error of the velocity for each of the clips `rows`."""
        noisy, target = self._noised(pool, rows, sigma)
        with models.mixed_precision(self.device):
            text = models.encode_text(self.text_encoder, ids)
        return self._objective(noisy, target, sigma, text)

    def _noised(self, pool: LatentPool, rows: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Noisy latents of the clips `rows`, and the velocity to be found."""
        shape = (len(rows), *pool.mean.shape[1:])
        noise, posterior = (torch.randn(shape, generator=self.generator, device=self.device) for _ in range(2))
        z = (pool.mean[rows].float() + pool.deviation[rows].float() * posterior - self.mean) / self.deviation
        s = sigma.view(-1, 1, 1, 1, 1)
        return (1 - s) * z + s * noise, noise - z

    def _objective(
        self, noisy: Tensor, target: Tensor, sigma: Tensor, text: Tensor, *, recorded: bool = False
    ) -> Tensor:
        """Mean squared error of the velocity for each clip."""
        with models.mixed_precision(self.device, recorded=recorded):
            predicted = models.velocity(self.transformer, noisy, sigma, text)
        error = (predicted.float() - target).square().mean((1, 3, 4))  # [B, t]
        weight = torch.ones(error.shape[1], device=self.device)
        weight[:1] = self.options.first_frame
        return (error * weight).sum(1) / weight.sum()

    def _validate(self) -> dict[str, Tensor]:
        """Loss on held-out clips with the weights as they are, at fixed noise levels and with the same noise each time.

        Gradients stay enabled, although unused: without them the compiled blocks would be compiled again.
        """
        pool, out = self.pools["validation"], {}
        rows = torch.arange(len(pool), device=self.device)
        self.padding.pad_to(models.PIPELINE_TEXT_TOKENS)
        for sigma in VALIDATION_SIGMAS:
            self.generator.manual_seed(5)
            levels = torch.full((len(pool),), sigma, device=self.device)
            out[f"{loop.HELD_OUT}{sigma}"] = self._loss(pool, rows, pool.ids[:, 0], levels).mean().detach()
        return out

    def check(self, row: Json) -> None:
        """Nothing beyond finite losses, which the loop checks."""

    def state(self) -> Json:
        """Weights, averages and optimiser states."""
        return {
            "transformer": self.transformer.state_dict(),
            "text_encoder": self.text_encoder.state_dict(),
            "average": self.average.values,
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "warm_from": self.warm_from,
        }

    def load(self, state: Json) -> None:
        """The counterpart of `state`."""
        self.transformer.load_state_dict(state["transformer"])
        self.text_encoder.load_state_dict(state["text_encoder"])
        self.average.load(state["average"])
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.warm_from = state["warm_from"]

    def start_from(self, folder: Path, step: int) -> None:
        """Go on from averaged weights (`transformer.safetensors`, `text_encoder.safetensors`) as if at `step`.

        The optimisers begin anew, with a warm-up. Raises ModelError when a file is missing or does not fit.
        """
        for name, module in (("transformer", self.transformer), ("text_encoder", self.text_encoder)):
            load_weights(module, folder / f"{name}.safetensors")
        self.average.load([p.detach() for p in self.average.parameters])
        self.warm_from = step

    def averaged(self) -> tuple[Any, Any]:
        """Transformer and text encoder with the averaged weights, float32, as diffusers makes them."""
        transformer, text_encoder = self._modules()
        self.average.copy_to([*transformer.parameters(), *text_encoder.parameters()])
        return transformer.eval(), text_encoder.eval()

    def save_averages(self, folder: Path) -> None:
        """Write `transformer.safetensors` and `text_encoder.safetensors`, BF16."""
        transformer, text_encoder = self.averaged()
        save_weights(transformer, folder / "transformer.safetensors")
        save_weights(text_encoder, folder / "text_encoder.safetensors")


class RecordedStep:
    """Forward and backward of `function(*inputs)`, a scalar, as a CUDA graph. The last input gets its gradient back.

    Parameters' gradients are the graph's own tensors; a call puts them in place, so several graphs can take turns.
    """

    def __init__(
        self, function: Callable[..., Tensor], inputs: Sequence[Tensor], parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        self.parameters = parameters
        self.inputs = [x.detach().clone() for x in inputs]
        self.inputs[-1].requires_grad_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles and chooses algorithms, which must not happen while recording
            for _ in range(3):
                self._clear()
                function(*self.inputs).backward()
        torch.cuda.current_stream().wait_stream(stream)
        self._clear()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = function(*self.inputs)
            self.loss.backward()
        self.gradients = [p.grad for p in parameters]
        last = self.inputs[-1].grad
        assert last is not None
        self.last_gradient = last
        self._clear()

    def _clear(self) -> None:
        for tensor in (*self.parameters, self.inputs[-1]):
            tensor.grad = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and the gradient of the last input."""
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.data.copy_(given)
        self.graph.replay()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return self.loss.detach().clone(), self.last_gradient


def load_weights(module: torch.nn.Module, path: Path) -> None:
    """Load what `save_weights` wrote into a module. Raises ModelError when it is missing or does not fit."""
    if not path.is_file():
        raise ModelError(f"{str(path)!r} is missing")
    try:
        missing, unexpected = module.load_state_dict(load_file(path), strict=False)
    except Exception as error:
        raise ModelError(f"{str(path)!r} does not fit {type(module).__name__}: {error}") from error
    if unexpected or set(missing) - {"encoder.embed_tokens.weight"}:
        raise ModelError(f"{str(path)!r} does not fit {type(module).__name__}: {[*missing, *unexpected][:3]}")
