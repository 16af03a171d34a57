"""`wanfp4 map`: the error of every self-attention call, by layer, step and head, and where it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wanfp4.cli import common
from wanfp4.cli.latents import refuse_inputs
from wanfp4.quality.results import MAP

if TYPE_CHECKING:
    from wanfp4.quality.maps import AttentionMap


def attention_map(
    policy: Annotated[str, typer.Option("--policy", metavar="NAME", help="Preset or policy .json file.")] = "wan-fast",
    prompt: common.PromptOption = None,
    prompts: common.PromptsOption = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Seeds of the noise, separated by commas. Default: 0,1."),
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
    device: common.DeviceOption = "auto",
    dtype: common.DtypeOption = "auto",
    offload: common.OffloadOption = "none",
    strict: common.StrictOption = False,
    free: Annotated[
        bool,
        typer.Option(
            "--free", help="Go on with the policy's results, as in use, instead of the pipeline's own at every call."
        ),
    ] = False,
    per_head: Annotated[bool, typer.Option("--per-head", help="Figures of every head, too.")] = False,
    attribution: Annotated[
        bool,
        typer.Option("--attribution", help="Which part of the policy makes the error, and which lever helps. Slower."),
    ] = False,
    rows: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Query rows of each call and head sampled for logits and codes."),
    ] = 64,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the map goes.")] = Path(
        "attention-map"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace a finished map.")] = False,
) -> None:
    """Map a policy's error by layer, step and guidance branch, against the pipeline's own attention.

    One run for each prompt and seed computes both attentions on the same q, k, v. The page has heat maps of the error,
    of lost and clipped codes and of the logits, and names the place that stands out.

    \b
    wanfp4 map                                          the default policy on the bundled model
    wanfp4 map --policy nvfp4 --per-head --attribution -o nvfp4-map
    wanfp4 map --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --prompts prompts.txt --steps 20
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

    from wanfp4.quality.plan import check_backend, make_plan

    plan = make_plan(
        job.info, policy, common.several_prompts(prompt, prompts), common.several_seeds(seeds), settings=job.settings
    )
    check_backend(plan.policies, backend, job.device)

    from wanfp4.quality.files import output_folder
    from wanfp4.quality.maps import attention_map as measure

    for page in MAP.files:
        refuse_inputs(output / page, [Path(policy), *([prompts] if prompts is not None else [])])
    common.refuse_finished(output / "map.json", "map", force)

    with output_folder(output):
        pipe = job.pipeline(plan.prompts)
        found = measure(
            pipe,
            plan.policies[0],
            plan.prompts,
            plan.seeds,
            settings=plan.settings,
            backend=backend,
            strict=strict,
            forced=not free,
            per_head=per_head,
            attribution=attribution,
            rows=rows,
            partial=output,
            model=job.named,
            command=common.command_line(),
        )
        found.save(output)
    for line in (*(str(output / page) for page in MAP.files), "", *_lines(found)):
        typer.echo(line)


def _lines(found: AttentionMap) -> list[str]:
    from wanfp4.quality.map_pages import readings

    return readings(found.to_dict())
