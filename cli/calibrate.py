"""`wanfp4 calibrate`: record a model's attention inputs, and fit a policy's constants to them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wanfp4.cli import common
from wanfp4.cli.latents import refuse_inputs
from wanfp4.errors import OutputError, SettingsError

app = typer.Typer(
    help="Fit a policy's constants to a model: record attention inputs, then fit.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)


@app.command()
def record(
    prompts: common.PromptsOption = None,
    prompt: common.PromptOption = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Seeds of the noise, separated by commas. Default: 0,1."),
    ] = None,
    model: common.ModelOption = None,
    height: common.HeightOption = None,
    width: common.WidthOption = None,
    frames: common.FramesOption = None,
    steps: common.StepsOption = None,
    guidance: common.GuidanceOption = None,
    guidance_2: common.Guidance2Option = None,
    shift: common.ShiftOption = None,
    negative: common.NegativeOption = None,
    device: common.DeviceOption = "auto",
    dtype: common.DtypeOption = "auto",
    offload: common.OffloadOption = "none",
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="Query rows kept of each recorded call.")] = 64,
    calls: Annotated[int, typer.Option(min=1, metavar="N", help="Calls recorded of each run, a head each.")] = 48,
    limit: Annotated[
        int, typer.Option(min=1, metavar="MB", help="Size of the recording; fewer calls are kept where it is full.")
    ] = 256,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the recording goes.")] = Path(
        "recording"
    ),
    force: Annotated[bool, typer.Option("--force", help="Start anew where FOLDER has another recording.")] = False,
) -> None:
    """Record q, k, v of a bounded sample of attention calls, with the pipeline's own attention.

    Prompts number 1, 3, 5, … are for fitting, 2, 4, 6, … are held out. Takes one run for each prompt and seed; goes on
    where it was stopped.

    \b
    wanfp4 calibrate record --prompts prompts.txt --seeds 0 --steps 10 -o recording
    wanfp4 calibrate record --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --prompts prompts.txt --limit 1000
    """
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
        negative=negative,
    )

    from wanfp4.quality.plan import make_plan

    given = common.several_prompts(prompt, prompts)
    if not given:
        raise SettingsError("prompts are needed, two or more: --prompts FILE, or --prompt for each")
    plan = make_plan(job.info, ["bf16"], given, common.several_seeds(seeds), settings=job.settings)

    from wanfp4.quality import recording
    from wanfp4.quality.files import output_folder

    recording.plan_picks(job.info, plan, rows, calls, limit)
    with output_folder(output):
        pipe = job.pipeline(plan.prompts)
        found = recording.record(
            pipe,
            plan.prompts,
            plan.seeds,
            folder=output,
            settings=plan.settings,
            rows=rows,
            calls=calls,
            limit_mb=limit,
            force=force,
            model=job.named,
            command=common.command_line(),
        )
    runs = found.data["runs"]
    typer.echo(str(output / recording.MANIFEST))
    size = sum(run["bytes"] for run in runs) / 1e6
    typer.echo(f"{sum(run['calls'] for run in runs)} calls of {len(runs)} runs, {size:.1f} MB")


@app.command()
def fit(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What `calibrate record` wrote.")],
    base: Annotated[
        str, typer.Option("--base", metavar="NAME", help="Preset or policy .json file to start from.")
    ] = "wan-fast",
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="What reports call the policy; by default the file's name.")
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STEP",
            help="Leave as the base has it: smooth-k, smooth-v, row-reference, guard, row-peak or classifier; may be "
            "repeated.",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where the policy goes.")] = Path(
        "fitted.json"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
) -> None:
    """Fit a policy's constants to a recording, by the error of the attention output.

    Writes the policy, NAME.report.md and NAME.fit.json with everything that was tried. The held-out half only reports.

    \b
    wanfp4 calibrate fit recording --base wan-two-piece -o mine.json
    wanfp4 calibrate fit recording --keep row-reference  no anchor, which takes time on Blackwell
    wanfp4 drift --policies wan-two-piece,mine.json
    """
    from wanfp4.quality import calibration
    from wanfp4.quality.files import writable_folder
    from wanfp4.quality.recording import load_recording

    files = calibration.outputs(output)
    start = calibration.check_base(base)
    chosen = calibration.check_name(output.stem if name is None else name)
    kept = calibration.check_keep(keep or ())
    for path in files:
        refuse_inputs(path, [Path(base), folder, folder / "recording.json"])
        if path.exists() and not force:
            raise OutputError(f"{str(path)!r} exists; choose another --output, or add --force")
    found = load_recording(folder)
    writable_folder(output.parent)
    result = calibration.fit(found, start, chosen, keep=kept, command=common.command_line())
    for path in result.save(output):
        typer.echo(str(path))
    typer.echo("")
    for line in result.verdict:
        typer.echo(line)
