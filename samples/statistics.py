"""How sharp is the self-attention of a Wan pipeline, layer by layer, beside attention on N(0,1) inputs?

    python -m wanfp4.samples.statistics MODEL --json out.json

Query, key and value are looked at as they enter softmax(Q·Kᵀ/√d)·V, on the pipeline's own sampling trajectory, in the
branch that sees the prompt.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from torch import Tensor

from wanfp4.cli.common import Command, DeviceOption, DtypeOption, quiet_libraries
from wanfp4.errors import SettingsError
from wanfp4.processors.wan import rotate
from wanfp4.quality.files import write
from wanfp4.samples import bundled

if TYPE_CHECKING:
    from wanfp4.processors.model_info import Settings

PROMPTS = (
    "a red circle moving right on a white background",
    "a yellow star moving up on a black background",
    "a blue square moving left and a pink cross moving down",
)

Json = dict[str, Any]


def describe(query: Tensor, key: Tensor, value: Tensor) -> dict[str, float]:
    """Statistics of one attention call; query, key and value are [B, S, H, D].

    logit_std      standard deviation of a row's logits, mean over rows.
    largest_logit  in magnitude.
    entropy        of a row's softmax, as a share of ln S (1: attends evenly); mean over rows, and the lowest.
    k_mean_energy, v_mean_energy   share of K's, V's energy that is its mean over tokens: what smoothing takes out.
    k_outlier      largest channel of K over its median channel, in root mean squares over tokens; mean over heads, and
                   the largest.
    """
    q, k, v = (x.float().transpose(1, 2) for x in (query, key, value))
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1) / math.log(logits.shape[-1])
    channels = k.square().mean(2).sqrt()
    outlier = channels.amax(-1) / channels.median(-1).values
    figures = {
        "logit_std": logits.std(-1).mean(),
        "largest_logit": logits.abs().max(),
        "entropy": entropy.mean(),
        "lowest_entropy": entropy.min(),
        "k_mean_energy": k.mean(2).square().mean() / k.square().mean(),
        "v_mean_energy": v.mean(2).square().mean() / v.square().mean(),
        "k_outlier": outlier.mean(),
        "largest_k_outlier": outlier.max(),
    }
    return {name: float(figure) for name, figure in figures.items()}


class _Spy:
    """A processor that looks at Q, K and V, and leaves the attention to the one it stands in for."""

    def __init__(self, original: Any, layer: int, seen: list[Json], now: Json) -> None:
        self.original = original
        self.layer, self.seen, self.now = layer, seen, now
        self._attention_backend = getattr(original, "_attention_backend", None)
        self._parallel_config = getattr(original, "_parallel_config", None)

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        if self.now["wanted"]:
            query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
            parts = (query, key, attn.to_v(hidden_states))
            query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in parts)
            if rotary_emb is not None:
                query, key = rotate(query, *rotary_emb), rotate(key, *rotary_emb)
            self.seen.append({"step": self.now["step"], "layer": self.layer, **describe(query, key, value)})
        return self.original(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)


@contextlib.contextmanager
def spying(transformer: Any, steps: Sequence[int], branches: int) -> Iterator[list[Json]]:
    """Collect `describe` of every self-attention at `steps`, in the first of `branches` calls that each step makes.

    The transformer's own processors come back afterwards. Rows are {"step", "layer", …}.
    """
    seen: list[Json] = []
    now: Json = {"call": 0, "step": 0, "wanted": False}

    def count(*_: Any) -> None:
        now["step"], branch = divmod(now["call"], branches)
        now["wanted"] = branch == 0 and now["step"] in steps
        now["call"] += 1

    attentions = [block.attn1 for block in transformer.blocks]
    originals = [attention.processor for attention in attentions]
    hook = transformer.register_forward_pre_hook(count)
    try:
        for layer, attention in enumerate(attentions):
            attention.set_processor(_Spy(originals[layer], layer, seen, now))
        yield seen
    finally:
        hook.remove()
        for attention, original in zip(attentions, originals, strict=True):
            attention.set_processor(original)


def attention_statistics(
    pipe: Any, prompts: Sequence[str], settings: Settings, steps: Sequence[int] | None = None, seed: int = 0
) -> list[Json]:
    """Rows of `describe` by step and layer for a text-to-video pipeline with one transformer.

    steps  of the sampling, from 0; three spread over it by default. Raises SettingsError for steps that do not exist.
    """
    from wanfp4.processors.pipelines import info_of, shifted

    info_of(pipe).check(settings)
    last = settings.steps - 1
    steps = sorted({min(1, last), settings.steps // 2, max(last - 1, 0)} if steps is None else set(steps))
    if not all(0 <= step <= last for step in steps):
        raise SettingsError(f"steps go from 0 to {last}; asked for {', '.join(map(str, steps))}")
    branches = 2 if settings.guidance > 1 else 1
    pipe.set_progress_bar_config(disable=True)
    with shifted(pipe, settings.shift), spying(pipe.transformer, steps, branches) as rows:
        pipe(
            prompt=list(prompts),
            negative_prompt=[settings.negative or ""] * len(prompts),
            height=settings.height,
            width=settings.width,
            num_frames=settings.frames,
            num_inference_steps=settings.steps,
            guidance_scale=settings.guidance,
            generator=[torch.Generator("cpu").manual_seed(seed + i) for i in range(len(prompts))],
            output_type="latent",
        )
    return rows


def normal_statistics(shape: tuple[int, int, int, int], seed: int = 0) -> dict[str, float]:
    """`describe` of independent N(0,1) inputs [B, S, H, D], what attention benchmarks use."""
    generator = torch.Generator().manual_seed(seed)
    return describe(*(torch.randn(shape, generator=generator) for _ in range(3)))


def by_layer(rows: Sequence[Json]) -> list[Json]:
    """Over steps: means, and extremes where the name says so."""
    out = []
    for layer in sorted({row["layer"] for row in rows}):
        mine = [row for row in rows if row["layer"] == layer]
        figures = {}
        for name in (n for n in mine[0] if n not in ("step", "layer")):
            values = [row[name] for row in mine]
            extreme = max if name.startswith("largest") else min if name.startswith("lowest") else None
            figures[name] = round(extreme(values) if extreme else sum(values) / len(values), 4)
        out.append({"layer": layer, **figures})
    return out


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(cls=Command)
def statistics(
    model: Annotated[Path | None, typer.Argument(help="Pipeline folder; the bundled one by default.")] = None,
    steps: Annotated[
        str, typer.Option(metavar="N,N", help="Sampling steps to look at, from 0; three if not given.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Of the noise.")] = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="All figures.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Attention statistics of a sample pipeline, layer by layer."""
    from wanfp4.processors.pipelines import inspect_model, load_pipeline

    folder = model or bundled()
    try:
        wanted = [int(part) for part in steps.split(",") if part.strip()] or None
    except ValueError:
        raise SettingsError(f"--steps must be whole numbers separated by commas, as 1,10,18; not {steps!r}") from None
    info = inspect_model(folder)
    settings = info.settings()
    with quiet_libraries():
        pipe = load_pipeline(folder, device=device, dtype=dtype)
    rows = attention_statistics(pipe, PROMPTS, settings, wanted, seed)
    heads, tokens = pipe.transformer.config.num_attention_heads, info.tokens(settings)
    normal = normal_statistics((len(PROMPTS), tokens, heads, pipe.transformer.config.attention_head_dim))
    layers: list[Json] = [*by_layer(rows), {"layer": "N(0,1)", **{name: round(v, 4) for name, v in normal.items()}}]
    names = list(layers[0])
    typer.echo("  ".join(f"{name:>13}" for name in names))
    for row in layers:
        cells = (f"{row[name]:>13.3f}" if isinstance(row[name], float) else f"{row[name]:>13}" for name in names)
        typer.echo("  ".join(cells))
    if json_file is not None:
        report = {
            "model": str(folder),
            "settings": settings.to_dict(),
            "prompts": PROMPTS,
            "layers": layers,
            "rows": rows,
        }
        write(json_file, json.dumps(report, indent=1) + "\n")
        typer.echo(str(json_file))


if __name__ == "__main__":
    app()
