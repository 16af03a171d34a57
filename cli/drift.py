"""`wanfp4 drift`: policies against BF16, step by step, as a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wanfp4.cli import common
from wanfp4.cli.latents import refuse_inputs
from wanfp4.cli.task import CLIPS, PAIRS, refuse_others, task_table
from wanfp4.errors import SettingsError
from wanfp4.quality.results import DRIFT, SEARCH, refuse_pages

if TYPE_CHECKING:
    from wanfp4.quality.report import DriftReport


def drift(
    policies: Annotated[
        str | None,
        typer.Option(
            "--policies",
            metavar="A,B",
            help="Presets or policy .json files, separated by commas. Default: wan-fast; every preset with --task.",
        ),
    ] = None,
    prompt: common.PromptOption = None,
    prompts: common.PromptsOption = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Seeds of the noise, separated by commas; several show the spread. Default: 0,1; 0 with --task.",
        ),
    ] = None,
    model: common.ModelOption = None,
    backend: common.BackendOption = None,
    height: common.HeightOption = None,
    width: common.WidthOption = None,
    frames: common.FramesOption = None,
    steps: common.StepsOption = None,
    guidance: common.GuidanceOption = None,
    guidance_2: common.Guidance2Option = None,
    shift: common.ShiftOption = None,
    negative: common.NegativeOption = None,
    fps: common.FpsOption = None,
    device: common.DeviceOption = "auto",
    dtype: common.DtypeOption = "auto",
    offload: common.OffloadOption = "none",
    strict: common.StrictOption = False,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            "--budget",
            metavar="[METRIC=]LIMIT",
            help="Exit with 3 when a policy exceeds it; repeat it for several. "
            "Metrics: velocity (meant by a number alone), velocity-median, velocity-mean, floor-ratio, latent, "
            "latent-frame, psnr, ssim, flicker, black-frames, nan-frames.",
        ),
    ] = None,
    task: Annotated[
        bool,
        typer.Option(
            "--task", help="Instead: is what the sample pipeline draws still what was asked? Goes on where it stopped."
        ),
    ] = False,
    clips: Annotated[
        int | None, typer.Option(min=1, metavar="N", help=f"Tasks of --task, one clip each; default: {CLIPS}.")
    ] = None,
    pairs: Annotated[
        float | None,
        typer.Option(min=0, max=1, metavar="X", help=f"Share of --task's clips with two objects; default: {PAIRS}."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Clips of --task made at a time; by device if not given.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the report goes.")] = Path(
        "drift-report"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace a finished report, its clips included.")] = False,
) -> None:
    """Measure what policies cost in quality, against the pipeline's own attention.

    Every policy runs from the same noise as the reference, twice for each prompt and seed: free, and teacher-forced on
    the reference's own latents. The report says how far velocity, latent and clip are off, beside the noise floor.

    \b
    wanfp4 drift                                        the default policy on the bundled model
    wanfp4 drift --policies wan-fast,nvfp4 --seeds 0,1,2 -o report
    wanfp4 drift --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --prompts prompts.txt --steps 20
    wanfp4 drift --budget 0.1 --budget psnr=25          fails in CI when the policy got worse
    wanfp4 drift --task --device cuda -o task           does the sample pipeline still draw what was asked?
    """
    refuse_others(
        task,
        {"--clips": clips, "--pairs": pairs, "--batch": batch},
        {
            "--prompt": prompt,
            "--prompts": prompts,
            "--budget": budget,
            "--fps": fps,
            "--guidance-2": guidance_2,
            "--offload": None if offload == "none" else offload,
        },
    )
    job = common.job(
        model,
        device=device,
        dtype=dtype,
        offload=offload,
        height=height,
        width=width,
        frames=frames,
        steps=steps,
        guidance=guidance,
        guidance_2=guidance_2,
        shift=shift,
        fps=fps,
        negative=negative,
    )

    from wanfp4.quality.budget import parse_budget
    from wanfp4.quality.plan import check_backend, make_plan

    if task:
        task_table(
            None if policies is None else _names(policies),
            _one_seed(seeds),
            named=job.named,
            source=job.source,
            info=job.info,
            settings=job.settings,
            clips=clips,
            pairs=pairs,
            batch=batch,
            backend=backend,
            strict=strict,
            device=job.device,
            dtype=dtype,
            output=output,
            force=force,
        )
        return
    names = _names("wan-fast" if policies is None else policies)
    plan = make_plan(
        job.info,
        names,
        common.several_prompts(prompt, prompts),
        common.several_seeds(seeds),
        settings=job.settings,
        budget=parse_budget(budget or []),
    )
    check_backend(plan.policies, backend, job.device)
    inputs = [*map(Path, names), *([prompts] if prompts is not None else [])]
    for page in DRIFT.files:
        refuse_inputs(output / page, inputs)
    common.refuse_finished(output / "report.json", "report", force)
    if not force and not (output / DRIFT.file).is_file():
        refuse_pages(output, DRIFT, SEARCH)

    from wanfp4.quality.drift import drift as measure
    from wanfp4.quality.files import output_folder

    with output_folder(output):
        pipe = job.pipeline(plan.prompts)
        report = measure(
            pipe,
            plan.policies,
            plan.prompts,
            plan.seeds,
            settings=plan.settings,
            backend=backend,
            strict=strict,
            budget=plan.budget,
            partial=output,
            model=job.named,
            command=common.command_line(),
        )
        report.save(output)
    for line in (*(str(output / page) for page in DRIFT.files), "", *_table(report)):
        typer.echo(line)
    violations = report.check(plan.budget)
    for violation in violations:
        common.note(f"over budget: {violation}")
    if violations:
        raise typer.Exit(common.OVER_BUDGET)


def _names(policies: str) -> list[str]:
    return [name.strip() for name in policies.split(",") if name.strip()]


def _one_seed(text: str | None) -> int:
    seeds = [0] if text is None else common.several_seeds(text)
    if len(seeds) != 1:
        raise SettingsError(f"--task takes one seed, which all its prompts and noise follow from; not {text!r}")
    return seeds[0]


def _table(report: DriftReport) -> list[str]:
    from wanfp4.quality.pages import figure, fixed, psnr, ratio

    rows = [("policy", "velocity", "worst step", "× floor", "latent, last step", "PSNR", "SSIM", "ran on")]
    sections: list[dict[str, Any]] = [report.data["noise_floor"], *report.policies]
    for section in sections:
        s, ran = section["summary"], ", ".join(section["backend"]["calls"])
        rows.append(
            (
                common.one_line(section["name"]),
                figure(s["velocity"]["median"]),
                figure(s["velocity_worst"]["median"]),
                ratio(s.get("over_floor", 1)),
                figure(s["after"][-1]["rel_l2"]["median"]),
                psnr(s["psnr"]["median"]),
                fixed(s["ssim"]["median"]),
                ran + (" (emulated)" if section["backend"]["emulated"] else ""),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
