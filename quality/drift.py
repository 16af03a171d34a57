"""Measure what policies cost: every policy against the pipeline's own attention, step by step.

For each prompt and seed, from the same noise:

1. the reference, the pipeline as it is, whose trajectory is kept in memory;
2. the noise floor: nothing rounded to 4 bits either, but another attention implementation (exact tiled FP32 attention);
3. each policy.

2 and 3 run twice, free and teacher-forced, and are compared with the reference as they go; only the reference is ever
held as a whole. docs/drift.md defines every figure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from wanfp4.errors import ModelError, Wanfp4Error
from wanfp4.policy import Policy, get_policy
from wanfp4.processors.patch import patch
from wanfp4.processors.pipelines import Settings, decode_latents, generate_latents, info_of, shifted
from wanfp4.quality import metrics
from wanfp4.quality.aggregate import Json, number, per_step, series, summary
from wanfp4.quality.files import output_folder
from wanfp4.quality.jobs import attention_of, header, log_above_bar, quiet, said_once, weights_digest
from wanfp4.quality.metrics import Clip, Distance, distance
from wanfp4.quality.plan import DEFAULT_SEEDS, FLOOR, REFERENCE, Plan, check_call, make_plan
from wanfp4.quality.record import Seen, Trajectory, watching
from wanfp4.quality.report import REPORT_KIND, SCHEMA_VERSION, DriftReport
from wanfp4.quality.video import encode_jpeg, encode_mp4, strip

log = logging.getLogger("wanfp4")

FLOOR_BACKEND = "reference"


def drift(
    pipe: Any,
    policies: Sequence[str | Path | Policy] = ("wan-fast",),
    prompts: Sequence[str] | str = (),
    seeds: Sequence[int] | int = DEFAULT_SEEDS,
    steps: int | None = None,
    *,
    settings: Settings | None = None,
    backend: str | None = None,
    strict: bool = False,
    budget: Mapping[str, float] | None = None,
    progress: bool = True,
    partial: str | Path | None = None,
    model: str | None = None,
    command: str | None = None,
    **call: Any,
) -> DriftReport:
    """Compare `policies` with the attention of `pipe`, an unpatched diffusers text-to-video pipeline.

    prompts   one or several; the model's example prompt when none is given and it has one.
    seeds     of the initial noise, drawn on the CPU; two by default, the fewest that show a spread.
    settings  size, steps, guidance, …; the model's defaults when None. `steps` overrides the one in it.
    backend, strict   as in `wanfp4.patch`.
    budget    limits to judge the policies by, as {"velocity": 0.1}; see `wanfp4.quality.budget.METRICS`.
    progress  a bar on stderr, over all steps of the whole job.
    partial   a folder that gets the report after every finished policy of a prompt and seed, marked incomplete, so that
              a failure or Ctrl-C loses little. `DriftReport.save` writes the finished one. An earlier report in it is
              removed when the first row, the noise floor's, is there; a folder made for nothing goes again.
    model, command    how the report names the model, and the command that makes it again.
    call      more arguments for the pipeline's call, none of those that a job sets itself.

    Time: (3 + 2 · policies) runs for each prompt and seed. Memory: 2 · steps + 1 latents in float32, two decoded clips,
    and the compressed clips of all runs.

    Raises PolicyError, BackendError, SettingsError, ModelError, OutputError before the first step; FallbackError with
    `strict`.
    """
    info = info_of(pipe)
    plan = make_plan(info, policies, prompts, seeds, steps, settings=settings, budget=budget)
    check_call(pipe, call)
    attention = attention_of(pipe, info)
    for policy in plan.policies:
        with patch(pipe, policy, backend, strict=strict):
            pass  # raises here what would otherwise be raised after the reference run

    known = header(REPORT_KIND, SCHEMA_VERSION, pipe, info, plan, backend, strict, call, model, command)
    known["model"]["weights"] = weights_digest(pipe)
    report = DriftReport(known, budget=plan.budget)
    report.data["reference"]["attention"] = attention
    report.add_section(FLOOR, _floor_policy(), FLOOR_BACKEND, floor=True)
    for policy in plan.policies:
        report.add_section(policy.name, policy, backend)
    with contextlib.nullcontext() if partial is None else output_folder(partial) as folder:
        try:
            _compare_all(pipe, plan, report, call, strict, progress, folder)
        except BaseException:
            # Ctrl-C too: the figures are in report.json already, the pages are what is missing.
            if folder is not None and report.data["noise_floor"]["runs"]:
                report.save(folder)
                log.warning("stopped early: what has finished is in %s, marked incomplete", folder)
            raise
    report.finish()
    return report


def _compare_all(
    pipe: Any,
    plan: Plan,
    report: DriftReport,
    call: Mapping[str, Any],
    strict: bool,
    progress: bool,
    folder: Path | None,
) -> None:
    """Every run of the job; the report so far goes into `folder` after each policy of a prompt and seed."""
    steps = plan.runs * plan.settings.steps
    with (
        shifted(pipe, plan.settings.shift),
        quiet(pipe),
        said_once(),
        tqdm(total=steps, unit="step", disable=not progress, dynamic_ncols=True) as bar,
        log_above_bar(),
    ):
        for p, prompt in enumerate(plan.prompts):
            for seed in plan.seeds:
                job = _Job(pipe, plan.settings, prompt, p, seed, bar, call)
                reference, clip = job.reference(report)
                report.set_steps(reference.steps)
                for section in (report.data["noise_floor"], *report.policies):
                    job.compare(report, section, reference, clip, strict)
                    if folder is not None:
                        report.save(folder, pages=False)


@dataclasses.dataclass
class _Job:
    """One prompt and seed."""

    pipe: Any
    settings: Settings
    prompt: str
    prompt_index: int
    seed: int
    bar: Any
    call: Mapping[str, Any]

    def reference(self, report: DriftReport) -> tuple[Trajectory, Clip]:
        trajectory = Trajectory()
        latents, seconds = self._run(REFERENCE, trajectory.add)
        if bad := metrics.nonfinite_frames(latents):
            raise ModelError(
                f"the pipeline's own attention gives NaN or infinity in {len(bad)} latent frames for prompt "
                f"{self.prompt!r}, seed {self.seed}: there is nothing to compare with"
            )
        clip = decode_latents(self.pipe, latents)
        run = {
            "prompt": self.prompt_index,
            "seed": self.seed,
            "wall_seconds": {"free_running": number(seconds)},
            "frames": {"black": metrics.black_frames(clip), "flicker": number(metrics.flicker(clip))},
            "files": self._files(report, REFERENCE, clip),
        }
        report.data["reference"]["runs"].append(run)
        return trajectory, clip

    def compare(self, report: DriftReport, section: Json, reference: Trajectory, clip: Clip, strict: bool) -> None:
        """Both runs of one policy, and their figures added to its section."""
        free, forced = _Comparison(reference), _Comparison(reference)
        with patch(
            self.pipe, Policy.from_dict(section["policy"]), section["backend"]["requested"], strict=strict
        ) as handle:
            latents, free_seconds = self._run(section["name"], free)
            free_receipt = handle.receipt()
            handle.reset()
            _, forced_seconds = self._run(f"{section['name']}, teacher-forced", forced, forced=reference)
            forced_receipt = handle.receipt()
        free.check_complete()
        nan = metrics.nonfinite_frames(latents)
        run: Json = {
            "prompt": self.prompt_index,
            "seed": self.seed,
            "wall_seconds": {"free_running": number(free_seconds), "teacher_forced": number(forced_seconds)},
            "teacher_forced": {"velocity": series(forced.velocity)},
            "free_running": {
                "velocity": series(free.velocity),
                "latent": series(free.latent),
                "x0": series(free.x0),
            },
            "latent_frames_nan": nan,
            "frames": None,
            "files": None,
            "receipt": {
                "free_running": report.add_receipt(section, free_receipt),
                "teacher_forced": report.add_receipt(section, forced_receipt),
            },
        }
        if not nan:  # a VAE turns one NaN into a clip of them
            decoded = decode_latents(self.pipe, latents)
            black, reference_black = metrics.black_frames(decoded), set(metrics.black_frames(clip))
            run["frames"] = {
                "psnr": number(metrics.psnr(decoded, clip)),
                "ssim": number(metrics.ssim(decoded, clip)),
                "flicker": number(metrics.flicker(decoded)),
                "flicker_ratio": number(metrics.flicker_ratio(decoded, clip)),
                "black": black,
                "black_new": [i for i in black if i not in reference_black],
            }
            run["files"] = self._files(report, section["name"], decoded)
        section["runs"].append(run)
        section["per_step"] = per_step(section["runs"])
        floor = report.data["noise_floor"]
        section["summary"] = summary(section["runs"], None if section is floor else floor["summary"])

    def _run(self, what: str, observer: Any, forced: Trajectory | None = None) -> tuple[Tensor, float]:
        """Latents and wall time of one run, each step seen by `observer`."""

        def seen(step: Seen) -> None:
            observer(step)
            self.bar.update()

        self.bar.set_description(f"prompt {self.prompt_index + 1}, seed {self.seed}: {what}")
        started = time.perf_counter()
        with watching(self.pipe, seen, forced=forced):
            latents = generate_latents(self.pipe, self.prompt, self.settings, self.seed, **self.call)
        return latents.detach().to("cpu", torch.float32), time.perf_counter() - started

    def _files(self, report: DriftReport, name: str, clip: Clip) -> Json:
        stem = f"p{self.prompt_index}-s{self.seed}-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}"
        taken = {file.lower() for file in report.files}  # some file systems make no difference between A and a
        while f"videos/{stem}.mp4".lower() in taken:
            stem += "-2"
        return {
            "video": report.add_file(f"videos/{stem}.mp4", encode_mp4(clip, self.settings.fps)),
            "strip": report.add_file(f"strips/{stem}.jpg", encode_jpeg(strip(clip))),
        }


class _Comparison:
    """Distances of a run to the reference, step by step; the run's own latents are not kept."""

    def __init__(self, reference: Trajectory) -> None:
        self.reference = reference
        self.velocity: list[Distance] = []
        self.latent: list[Distance] = []
        self.x0: list[Distance] = []

    def __call__(self, seen: Seen) -> None:
        index = seen.step.index
        right = self.reference.seen[index] if index < len(self.reference.seen) else None
        if right is None or right.step != seen.step:
            raise Wanfp4Error(f"step {index + 1} is not the reference's: {seen.step}")
        if index == 0 and not torch.equal(seen.sample, right.sample):
            raise Wanfp4Error("the run did not start from the reference's noise, so nothing could be compared")
        self.velocity.append(distance(seen.velocity, right.velocity))
        self.latent.append(distance(seen.next_sample, right.next_sample))
        self.x0.append(distance(seen.x0, right.x0))

    def check_complete(self) -> None:
        if len(self.velocity) != len(self.reference.seen):
            raise Wanfp4Error(f"the run ended after {len(self.velocity)} steps of {len(self.reference.seen)}")


def _floor_policy() -> Policy:
    text = "Nothing is rounded to 4 bits: exact tiled FP32 attention in place of the pipeline's own implementation."
    return get_policy("bf16").with_(description=text)
