"""How good is a sample pipeline? Held-out prompts judged by the checker, and its VAE on held-out clips.

python -m wanfp4.samples.evaluate MODEL --clips 200 --json out.json --sheet out.png
python -m wanfp4.samples.evaluate MODEL --guidance 2,3,4 --steps 10,20   a sweep
python -m wanfp4.samples.evaluate MODEL --vae --clips 300                only the VAE, and the checker itself

All of it with the pipeline's own attention; `wanfp4 drift --task` judges 4-bit policies by the same tasks.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from tqdm import tqdm

from wanfp4.cli.common import Command, DeviceOption, DtypeOption, quiet_libraries
from wanfp4.errors import SettingsError
from wanfp4.quality.files import replacing, write
from wanfp4.samples import bundled
from wanfp4.samples.data import DEFAULT, HELD_OUT, Size, random_spec
from wanfp4.samples.task import Answers, Json, Judges, Task, answer, default_batch, lines, make_tasks, mistakes, table

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(cls=Command)
def evaluate(
    model: Annotated[Path | None, typer.Argument(help="Pipeline folder; the bundled one by default.")] = None,
    clips: Annotated[int, typer.Option(min=1, help="How many clips, of one and two objects.")] = 200,
    pairs: Annotated[float, typer.Option(min=0, max=1, help="Share of clips with two objects.")] = 0.3,
    seed: Annotated[int, typer.Option(help="Of prompts and noise.")] = 0,
    guidance: Annotated[str, typer.Option(metavar="X,X", help="Guidance scales; several make a sweep.")] = "",
    shift: Annotated[str, typer.Option(metavar="X,X", help="Flow shifts; several make a sweep.")] = "",
    steps: Annotated[str, typer.Option(metavar="N,N", help="Step counts; several make a sweep.")] = "",
    size: Annotated[str, typer.Option(metavar="FxHxW", help="Frames, height, width; the model's by default.")] = "",
    vae: Annotated[bool, typer.Option("--vae", help="Judge the VAE and the checker, and generate nothing.")] = False,
    batch: Annotated[int | None, typer.Option(min=1, help="Clips made at a time; by device if not given.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Checker processes; by the number of cores.")] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="All figures.")] = None,
    sheet: Annotated[Path | None, typer.Option(metavar="PNG", help="Frames of the first clips, with verdicts.")] = None,
    sheet_clips: Annotated[int, typer.Option(min=1, help="How many clips the sheet shows.")] = 48,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Judge a sample pipeline by what it draws for held-out prompts."""
    from wanfp4.processors.pipelines import inspect_model, load_pipeline, load_vae, pick_device

    folder = model or bundled()
    place = pick_device(device)
    wanted = _size(size)
    if vae:
        report = vae_report(load_vae(folder, device=place, dtype=dtype), clips, wanted or DEFAULT, seed, workers, sheet)
        _finish(report, json_file)
        return
    info = inspect_model(folder)
    sweep = [
        info.settings(
            guidance=g,
            shift=s,
            steps=n,
            **({} if wanted is None else {"frames": wanted.frames, "height": wanted.height, "width": wanted.width}),
        )
        for g, s, n in itertools.product(_floats(guidance), _floats(shift), _ints(steps))
    ]
    for settings in sweep:
        info.check(settings)
    with quiet_libraries():
        pipe = load_pipeline(folder, device=place, dtype=dtype)
    tasks = make_tasks(clips, pairs=pairs, seed=seed)
    batch = batch or default_batch(place)
    report = {"model": str(folder), "clips": clips, "pairs": pairs, "seed": seed, "runs": []}
    with Judges(workers) as judges, tqdm(total=len(tasks) * len(sweep), unit="clip", dynamic_ncols=True) as bar:
        for settings in sweep:
            keep = settings is sweep[0] and sheet is not None
            answers = answer(pipe, tasks, settings, judges=judges, batch=batch, keep=keep, done=bar.update)
            run: Json = {
                "settings": settings.to_dict(),
                "seconds": round(answers.seconds, 1),
                "table": table(answers),
                "mistakes": mistakes(answers),
            }
            report["runs"].append(run)
            if json_file is not None:  # what is finished survives an interruption
                write(json_file, json.dumps(report, indent=1) + "\n")
            label = f"guidance {settings.guidance:g}, shift {settings.shift:g}, steps {settings.steps}"
            for line in lines(label, run["table"]):
                bar.write(line)
            bar.write(f"  {len(tasks)} clips in {answers.seconds:.1f} s")
            if answers.clips and sheet is not None:
                write_sheet(sheet, answers, sheet_clips)
    _finish(report, json_file)


def vae_report(
    vae: Any,
    clips: int = 200,
    size: Size = DEFAULT,
    seed: int = 0,
    workers: int | None = None,
    sheet: Path | None = None,
    batch: int = 8,
) -> Json:
    """A VAE on held-out clips of one and two objects, through diffusers' own encode and decode.

    PSNR per clip in dB (pixels in [0, 1]), and the checker's rates on the clips as drawn and as decoded.
    """
    import torch

    from wanfp4.samples.render import draw_scenes, render, to_uint8

    rng, generator = random.Random(f"vae {seed}"), torch.Generator().manual_seed(seed)
    specs = [random_spec(rng, HELD_OUT, objects=1 + i % 2) for i in range(clips)]
    tasks = [Task(spec, "", 0) for spec in specs]
    psnr: list[float] = []
    futures: dict[str, list[Any]] = {"drawn": [], "decoded": []}
    kept: dict[str, list[Any]] = {"drawn": [], "decoded": []}
    with Judges(workers) as judges, torch.no_grad():
        for i in range(0, clips, batch):
            truth = render(draw_scenes(specs[i : i + batch], size, generator), vae.device)
            latent = vae.encode(truth.to(vae.dtype)).latent_dist.mode()
            decoded = vae.decode(latent, return_dict=False)[0].float()
            error = ((decoded - truth) / 2).square().mean((1, 2, 3, 4))
            psnr += (-10 * torch.log10(error)).tolist()
            for name, video in (("drawn", truth), ("decoded", decoded)):
                frames = list(to_uint8(video).cpu().numpy())
                futures[name] += [judges.submit(clip) for clip in frames]
                kept[name] += frames if sheet is not None and i < 48 else []
        answers = {
            name: Answers(name, tasks, [future.result() for future in found], 0.0, kept[name])
            for name, found in futures.items()
        }
    if sheet is not None:
        write_sheet(sheet, answers["decoded"], 48)
    report: Json = {
        "clips": clips,
        "dtype": str(vae.dtype).removeprefix("torch."),
        "psnr": {"median": round(float(np.median(psnr)), 2), "minimum": round(min(psnr), 2)},
    }
    typer.echo(
        f"VAE ({report['dtype']}), {clips} clips: PSNR median {np.median(psnr):.2f} dB, minimum {min(psnr):.2f} dB"
    )
    for name, found in answers.items():
        report[name] = {"table": table(found), "mistakes": mistakes(found)}
        for line in lines(f"checker on {name} clips", report[name]["table"]):
            typer.echo(line)
    return report


def write_sheet(path: Path, answers: Answers, clips: int, columns: int = 3, frames: int = 5) -> None:
    """A PNG of `clips` clips, both kinds of task among them: evenly spaced frames under prompt and verdict.

    `answers` must have kept its clips (the first of them are enough). Raises OutputError.
    """
    from PIL import Image, ImageDraw

    available = range(len(answers.clips))
    several = [i for i in available if len(answers.tasks[i].spec.objects) > 1]
    single = [i for i in available if i not in set(several)]
    double = min(len(several), max(clips // 3, clips - len(single)))
    chosen = single[: clips - double] + several[:double]
    if not chosen:
        raise SettingsError("a contact sheet needs clips, and none were kept")
    judgements = answers.judgements
    cells = []
    for i in chosen:
        clip, task = answers.clips[i], answers.tasks[i]
        strip = np.concatenate([clip[f] for f in np.linspace(0, len(clip) - 1, frames).round().astype(int)], axis=1)
        band = Image.new("RGB", (strip.shape[1], 26), "white")
        text = ImageDraw.Draw(band)
        text.text((2, 1), task.prompt or " and ".join(map(str, task.spec.objects)), fill="black")
        text.text((2, 13), str(answers.verdicts[i]), fill="green" if judgements[i].right else "red")
        cells.append(np.concatenate([np.asarray(band), strip]))
    grid = _grid(cells, columns)
    with replacing(path) as temporary:
        Image.fromarray(grid).save(temporary)


def _grid(cells: Sequence[npt.NDArray[np.uint8]], columns: int) -> npt.NDArray[np.uint8]:
    padded = [np.pad(cell, ((0, 4), (0, 4), (0, 0)), constant_values=255) for cell in cells]
    padded += [np.full_like(padded[0], 255)] * (-len(padded) % columns)
    rows = len(padded) // columns
    grid = [np.concatenate(padded[c * rows : (c + 1) * rows]) for c in range(columns)]
    return np.concatenate(grid, axis=1)


def _finish(report: Json, json_file: Path | None) -> None:
    if json_file is not None:
        write(json_file, json.dumps(report, indent=1) + "\n")
        typer.echo(str(json_file))


def _size(text: str) -> Size | None:
    if not text:
        return None
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise SettingsError(f"--size must be FRAMESxHEIGHTxWIDTH, as 33x112x144; not {text!r}")
    return Size(*map(int, parts))


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _floats(text: str) -> list[float] | list[None]:
    try:
        return [float(part) for part in _names(text)] or [None]
    except ValueError:
        raise SettingsError(f"numbers separated by commas are needed, as 2,3,4; not {text!r}") from None


def _ints(text: str) -> list[int] | list[None]:
    try:
        return [int(part) for part in _names(text)] or [None]
    except ValueError:
        raise SettingsError(f"whole numbers separated by commas are needed, as 10,20; not {text!r}") from None


if __name__ == "__main__":
    app()
