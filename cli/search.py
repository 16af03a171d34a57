"""`wanfp4 search`: the cheapest policy inside a drift budget, per layer and noise level, verified on held-out runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wanfp4.cli import common
from wanfp4.cli.latents import refuse_inputs

if TYPE_CHECKING:
    from wanfp4.quality.search_report import SearchReport


def search(
    budget: Annotated[
        list[str] | None,
        typer.Option(
            "--budget",
            metavar="[METRIC=]LIMIT",
            help="Find the fastest policy whose drift stays below; repeat it for several. Metrics: velocity (the worst "
            "step, meant by a number alone), velocity-mean (over steps).",
        ),
    ] = None,
    share: Annotated[
        list[float] | None,
        typer.Option(
            "--share",
            metavar="X",
            help="Find the least drift with at least this share of attention in 4 bits, as 0.8; repeatable.",
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            "--policies",
            metavar="A,B",
            help="What each cell may run besides BF16. Default: wan-fast,fp8-direct; wan-fast for shares alone.",
        ),
    ] = None,
    prompt: common.PromptOption = None,
    prompts: common.PromptsOption = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Seeds of the noise to search on, separated by commas. Default: 0,1."),
    ] = None,
    verify_prompts: Annotated[
        Path | None,
        typer.Option("--verify-prompts", metavar="FILE", help="Prompts to verify with; default: those searched on."),
    ] = None,
    verify_seeds: Annotated[
        str | None,
        typer.Option(
            "--verify-seeds", metavar="N,N", help="Seeds to verify with; default: as many new ones as --seeds."
        ),
    ] = None,
    groups: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Groups of neighbouring layers; default: each layer, 12 groups in deeper models."
        ),
    ] = None,
    bins: Annotated[int, typer.Option(metavar="N", help="Ranges of the noise level, of equal numbers of steps.")] = 5,
    checks: Annotated[
        int, typer.Option(metavar="N", help="Random policies that show how well the prediction holds.")
    ] = 8,
    rounds: Annotated[
        int, typer.Option(metavar="N", help="How often at most a policy is verified and the aim corrected.")
    ] = 4,
    times: Annotated[
        Path | None,
        typer.Option("--times", metavar="FILE", help="Costs from wanfp4 bench --json; default: a model on paper."),
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
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where policy.json and the report go.")
    ] = Path("policy-search"),
    force: Annotated[
        bool, typer.Option("--force", help="Begin anew instead of going on with what is in the folder.")
    ] = False,
) -> None:
    """Find the cheapest policy inside a drift budget.

    Measures what each candidate costs in each layer and at each noise level, chooses for every cell by a knapsack, and
    verifies the policy on runs it was not made from; where the drift exceeds the budget, it backs off. Baselines (all
    BF16, all fast, first and last steps in BF16) are measured in the same way. Ctrl-C loses nothing: the same command
    goes on, and other targets in the same folder use what was measured.

    \b
    wanfp4 search --budget 0.3                          fastest, worst step's velocity off by 30 % at most
    wanfp4 search --share 0.8 --share 0.6 -o search     least drift with so much of attention in 4 bits
    wanfp4 search --budget velocity-mean=0.1 --policies wan-two-piece,nvfp4,fp8-direct --times bench.json
    wanfp4 generate "a red circle moving right" --policy policy-search/policy.json

    Exit code 3: a target has no policy that was verified to keep it.
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

    from wanfp4.quality import targets as aims
    from wanfp4.quality.budget import parse_budget
    from wanfp4.quality.cells import check_candidates, check_length, groups_of
    from wanfp4.quality.costs import measured, share_in_4_bits
    from wanfp4.quality.plan import check_backend, make_plan
    from wanfp4.quality.search import search as find

    targets = aims.check_targets(parse_budget(budget or []), share or [])
    names = [n.strip() for n in policies.split(",") if n.strip()] if policies else aims.candidates_for(targets)
    plan = make_plan(
        job.info, names, common.several_prompts(prompt, prompts), common.several_seeds(seeds), settings=job.settings
    )
    check_candidates(plan.policies)
    check_length(plan.policies, job.info.tokens(plan.settings))
    check_backend(plan.policies, backend, job.device)
    aims.check_reachable(targets, [share_in_4_bits(p.numerics) for p in plan.policies])
    aims.check_counts(bins=bins, rounds=rounds, checks=checks)
    groups_of(job.info.experts[0].layers, groups)
    others = common.several_prompts(None, verify_prompts)
    other_seeds = None if verify_seeds is None else common.several_seeds(verify_seeds, "--verify-seeds")
    aims.check_held_out(plan.prompts, plan.seeds, others, other_seeds)
    if times is not None:
        measured(plan.policies, times, backend, job.info.tokens(plan.settings))

    from wanfp4.quality.files import output_folder
    from wanfp4.quality.search_files import PAGES, claim, possible

    inputs = [Path(n) for n in names] + [p for p in (prompts, verify_prompts, times) if p is not None]
    labels = [target.label for target in targets]
    written = [one["file"] for one in claim(output, labels, force=force)]
    for name in (*possible(labels), *written):
        refuse_inputs(output / name, inputs)
    with output_folder(output):
        pipe = job.pipeline([*plan.prompts, *others])
        report = find(
            pipe,
            plan.policies,
            plan.prompts,
            plan.seeds,
            settings=plan.settings,
            budget={t.kind: t.limit for t in targets if t.kind != aims.SHARE},
            shares=[t.limit for t in targets if t.kind == aims.SHARE],
            verify_prompts=others,
            verify_seeds=other_seeds,
            groups=groups,
            bins=bins,
            checks=checks,
            rounds=rounds,
            times=times,
            backend=backend,
            strict=strict,
            folder=output,
            force=force,
            model=job.named,
            command=common.command_line(),
        )
    found = [str(output / name) for name in (*report.policies, *PAGES)]
    for line in (*found, "", *_lines(report)):
        typer.echo(line)
    if not report.passed:
        raise typer.Exit(common.OVER_BUDGET)


def _lines(report: SearchReport) -> list[str]:
    from wanfp4.quality.search_files import left
    from wanfp4.quality.search_pages import readings

    data = report.to_dict()
    return [*readings(data), *filter(None, [left(data)])]
