"""`wanfp4 bench`: how long attention takes with each policy and backend, alone and in a whole denoising step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from wanfp4.cli import common
from wanfp4.errors import OutputError, SettingsError, brief
from wanfp4.policy import Policy, get_policy, policies
from wanfp4.quality.results import BENCH


def bench(
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="SxH", help="Tokens x heads of attention alone, repeatable. Default: Wan's own shapes."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE", help="A preset or a policy's .json file; repeatable. Default: all presets."),
    ] = None,
    backend: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Who computes it; repeatable. Default: the fastest.")
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Also time a step of a random-weight model: 1.3b, 14b or tiny."),
    ] = None,
    size: Annotated[
        str, typer.Option(metavar="FxHxW", help="Frames, height and width of --step's video.")
    ] = "81x480x832",
    layers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Blocks of --step's model; all if left out.")
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=2, help="Rounds in which each variant has its turn.")] = 15,
    peers: Annotated[bool, typer.Option(help="Whether PyTorch's attention and other packages are timed.")] = True,
    hub: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Also time a kernel of the Hugging Face Hub: flash-attn2, flash-attn3, flash-attn4 or sageattention; "
            "repeatable. Downloads and runs it; needs the package kernels.",
        ),
    ] = None,
    device: common.DeviceOption = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write JSON.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an earlier file.")] = False,
) -> None:
    """Time attention, and a whole denoising step, beside what PyTorch and other packages take."""
    from wanfp4.kernels.blackwell import verify
    from wanfp4.processors import bench as work
    from wanfp4.processors import environment
    from wanfp4.processors.pipelines import pick_device
    from wanfp4.quality import files

    place = pick_device(device)
    shapes = [verify.parse_timing(text) for text in shape or ()]
    video = parse_size(size)
    if step is not None and step not in work.MODELS:
        raise SettingsError(f"there is no model {step!r} to build; {', '.join(work.MODELS)} are known")
    unknown = [name for name in hub or () if name not in work.HUB]
    if unknown:
        raise SettingsError(f"--hub knows {', '.join(work.HUB)}, not {unknown[0]!r}")
    if not shapes and step is None:
        if place.type != "cuda":
            raise SettingsError("Wan's own shapes take hours without a GPU; name one with --shape, like 256x2")
        shapes = [(32_760, 12), (75_600, 40)]
    if json_file is not None:
        files.writable_folder(json_file.absolute().parent)
        if json_file.exists() and not force:
            raise OutputError(f"{str(json_file)!r} exists; choose another --json, or --force to overwrite it")
    pairs = chosen(policy, backend, place)
    report: dict[str, Any] = {
        "kind": BENCH.kind,
        "schema": BENCH.schema,
        "created": common.now(),
        "command": common.command_line(),
        "versions": {**environment.versions(), **more_versions()},
        "machine": environment.machine(place),
        "policies": [each.to_dict() for each in dict.fromkeys(p for p, _ in pairs)],
        "attention": [],
        "steps": [],
    }
    for tokens, heads in shapes:
        common.note(f"timing attention of {tokens:,} tokens × {heads} heads")
        try:
            row = work.attention(pairs, tokens, heads, place, rounds, peers=peers, hub=hub or ())
        except RuntimeError as error:  # out of memory, most likely: the other shapes still count
            row = {"tokens": tokens, "heads": heads, "error": brief(error), "times": {}}
        report["attention"].append(row)
        typer.echo("\n".join(lines(f"attention, {tokens:,} tokens × {heads} heads", row)))
    if step is not None:
        common.note(f"timing a step of {step} with random weights, {size}")
        row = work.step(step, pairs, video, place, rounds, layers=layers)
        report["steps"].append(row)
        title = f"step of {step}, {row['layers']} blocks, random weights, {row['tokens']:,} tokens"
        typer.echo("\n".join(lines(title, row)))
    if json_file is not None:
        files.write(json_file, json.dumps(report, indent=2) + "\n")


def chosen(names: Sequence[str] | None, backends: Sequence[str] | None, device: Any) -> list[tuple[Policy, str | None]]:
    """Policies and who runs them. What is named must exist; a named backend takes, of the presets, those it can run.

    Raises PolicyError and BackendError.
    """
    from wanfp4.kernels import dispatch

    wanted = [get_policy(name) for name in names] if names else [p for p in policies().values() if p.rounding]
    pairs: list[tuple[Policy, str | None]] = []
    everyone: Sequence[str | None] = backends or (None,)
    for backend in everyone:
        for policy in wanted:
            if backend is not None:
                if names is None:
                    known = {b.name: b for b in dispatch.backends()}
                    if backend in known and known[backend].why_not(policy.numerics, device):
                        continue
                dispatch.select(policy.numerics, device, backend)
            pairs.append((policy, backend))
    return pairs


def parse_size(text: str) -> tuple[int, int, int]:
    """ "81x480x832" → frames, height, width. Raises SettingsError."""
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) != 3 or not all(part.strip().isdigit() and int(part) for part in parts):
        raise SettingsError(f"a size is frames x height x width, like 81x480x832, not {text!r}")
    frames, height, width = map(int, parts)
    return frames, height, width


def more_versions() -> dict[str, str]:
    """Of what only attention depends on."""
    import importlib.metadata

    import torch

    found = {"cuda of torch": str(torch.version.cuda)}
    for distribution in (
        "triton",
        "nvidia-cudnn-cu12",
        "nvidia-cudnn-cu13",
        "flash-attn-4",
        "sageattention",
        "kernels",
    ):
        try:
            found[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def lines(title: str, row: dict[str, Any]) -> list[str]:
    """A table of one measurement."""
    if "error" in row:
        return [title, f"  not timed: {row['error']}"]
    table = [title]
    width = max(map(len, row["times"]), default=0)
    for name, times in row["times"].items():
        if "error" in times:
            table.append(f"  {name:<{width}}  {times['error']}")
            continue
        cells = [f"{times['median'] * 1e3:10.3f} ms"]
        if "speed" in times:
            cells.append(f"{times['speed']:5.2f} × {times['baseline']}")
        if "tflops" in times:
            cells.append(f"{times['tflops']:7.1f} TFLOP/s")
        if times.get("extra_memory") is not None:
            cells.append(f"{times['extra_memory'] / row['input_bytes']:.2f} × Q, K, V more memory")
        if times.get("memory") is not None:
            cells.append(f"{times['memory'] / 2**30:.1f} GiB")
        if "backend" in times:
            cells.append(times["backend"])
        table.append(f"  {name:<{width}}  {'  '.join(cells)}")
    return table
