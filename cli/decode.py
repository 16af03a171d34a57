"""`wanfp4 decode`: an mp4 from the latents that `wanfp4 generate` kept."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import typer

from wanfp4.cli import common
from wanfp4.cli.latents import SUFFIX, check_finite, check_outputs, configs, load_latents, write_clip
from wanfp4.processors.model_info import Settings


def decode(
    latents: Annotated[Path, typer.Argument(metavar="FILE", help="A file that ends in .latents.safetensors.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The mp4; beside the latents by default.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR|ID", help="Whose VAE decodes; by default the model that made the latents."),
    ] = None,
    fps: common.FpsOption = None,
    device: common.DeviceOption = "auto",
    dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="auto, bf16, fp16 or fp32; by default as the latents were made.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Decode latents that `wanfp4 generate` kept into an mp4 with a receipt."""
    tensor, receipt = load_latents(latents)
    _, source = common.named_model(model or receipt["model"]["model"])
    video = output if output is not None else latents.with_name(latents.name.removesuffix(SUFFIX) + ".mp4")
    settings = Settings(**receipt["settings"])
    if fps is not None:
        settings = dataclasses.replace(settings, fps=fps)
        receipt["settings"] = settings.to_dict()
    check_finite(tensor)
    check_outputs(video, force=force, inputs=[latents, *configs(source)])

    from wanfp4.processors.pipelines import decode_with_vae, load_vae
    from wanfp4.quality.files import output_folder

    with output_folder(video.parent):
        with common.quiet_libraries():
            vae = load_vae(source, device=device, dtype=dtype or receipt["dtype"])
        started = time.perf_counter()
        frames = decode_with_vae(vae, tensor)
        write_clip(video, frames, settings.fps, receipt, time.perf_counter() - started)
    typer.echo(str(video))
