"""`wanfp4 generate`: a prompt in, an mp4 and its receipt out."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from wanfp4.cli import common
from wanfp4.cli.latents import (
    KIND,
    SCHEMA,
    check_finite,
    check_outputs,
    configs,
    latents_path,
    save_latents,
    write_clip,
)
from wanfp4.errors import BackendError, OutputError, SettingsError
from wanfp4.policy import Policy, get_policy
from wanfp4.processors.model_info import ModelInfo, Settings, inspect_model


@dataclass(frozen=True)
class Plan:
    """A checked job: everything that is known before weights load."""

    model: str  # as the receipt has it
    source: str  # what loads: a folder or a Hub id
    info: ModelInfo
    settings: Settings
    policy: Policy
    backend: str | None
    strict: bool
    device: Any
    dtype: str
    offload: str
    seed: int
    clips: tuple[tuple[str, Path], ...]  # prompt and video

    def lines(self) -> list[str]:
        """The plan for people."""
        info, s = self.info, self.settings
        guidance = f"{s.guidance:g}" + (f" (low noise {s.guidance_2:g})" if s.guidance_2 is not None else "")
        shift = f"{s.shift:g}" if s.shift is not None else "the scheduler's own"
        lines = [f"model      {self.model}: {info.pipeline_class}, defaults of {info.source}"]
        for expert in info.experts:
            lines.append(f"           {expert.name}: {expert.layers} layers × {expert.heads} heads × {expert.head_dim}")
        for absent in info.offline:
            lines.append(f"           not on this disk: {absent}")
        lines += [
            f"clip       {s.frames} frames of {s.height} × {s.width} at {s.fps} fps, {info.tokens(s)} tokens",
            f"denoising  {s.steps} steps, guidance {guidance}, shift {shift}, {info.scheduler_class}, seed {self.seed}",
            *self._policy_lines(),
            f"runs on    {self.device}, dtype {self.dtype}, offload {self.offload}",
            f"backend    {self._backend_line()}",
        ]
        for prompt, video in self.clips:
            lines.append(f"output     {video}: {prompt}")
        # Line by line: a prompt, a name or a path may hold a line break of its own.
        return [line[:11] + common.one_line(line[11:]) for line in lines]

    def _policy_lines(self) -> list[str]:
        policy, tokens = self.policy, self.info.tokens(self.settings)
        lines = [f"policy     {policy.name}: {policy.numerics.label}"]
        for rule in policy.rules:
            where = [
                "" if rule.layers is None else f"layers {', '.join(map(str, rule.layers))}",
                "" if rule.sigma is None else f"sigma {rule.sigma[0]:g} to {rule.sigma[1]:g}",
                "" if rule.expert is None else rule.expert,
            ]
            lines.append(f"           {'; '.join(w for w in where if w) or 'everywhere'}: {rule.numerics.label}")
        if policy.guard is not None:
            limit, margin, stored = policy.guard.logit_limit, policy.guard.margin, policy.guard.stored_shift
            lines.append(f"           guard where logits exceed {limit:g}: M = {margin:g}, L = {stored}")
        if tokens < policy.min_tokens:
            lines.append(f"           never applies: {tokens} tokens, fewer than min_tokens={policy.min_tokens}")
        return lines

    def _backend_line(self) -> str:
        from wanfp4.kernels import dispatch

        wanted = self.policy.rounding
        if not wanted and self.backend is None:
            return "the pipeline's own attention"
        names: dict[str, None] = {}
        for numerics in wanted or (self.policy.numerics,):
            try:
                chosen = dispatch.select(numerics, self.device, self.backend)
            except BackendError as error:
                names[f"none; {error}"] = None
            else:
                emulated = not chosen.native and not numerics.is_exact
                names[chosen.name + (" (emulated: shows quality, brings no speed)" if emulated else "")] = None
        return ", ".join(names)


def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to show.", show_default=False)] = None,
    model: common.ModelOption = None,
    policy: Annotated[
        str, typer.Option(metavar="NAME|FILE|auto", help="A preset, or a policy's .json file; auto: the fastest here.")
    ] = "wan-fast",
    backend: common.BackendOption = None,
    height: common.HeightOption = None,
    width: common.WidthOption = None,
    frames: common.FramesOption = None,
    steps: common.StepsOption = None,
    guidance: common.GuidanceOption = None,
    guidance_2: common.Guidance2Option = None,
    shift: common.ShiftOption = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the noise, drawn on the CPU.")] = 0,
    negative: common.NegativeOption = None,
    fps: common.FpsOption = None,
    device: common.DeviceOption = "auto",
    dtype: common.DtypeOption = "auto",
    offload: common.OffloadOption = "none",
    prompts: common.PromptsOption = None,
    strict: common.StrictOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all but what is in the weights; print the plan.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The mp4; numbered when there are several prompts."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    keep_latents: Annotated[bool, typer.Option("--keep-latents", help="Keep the latents beside the mp4.")] = False,
) -> None:
    """Generate a video with 4-bit attention.

    Writes an mp4 and, beside it, a JSON receipt with everything needed to make it again. Sizes, steps and the like
    default to what the model was published with. The path of the mp4 goes to stdout, all else to stderr.
    """
    chosen = _policy(policy, device, dtype, backend)
    named, source = common.named_model(model)
    info = inspect_model(source)
    info.check_attention()
    info.check_text_to_video()
    settings = info.settings(
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
    info.check(settings)
    texts = common.collect_prompts(prompt, prompts, info.prompt)
    videos = _outputs(texts, output, chosen.name, seed)

    from wanfp4.processors import pipelines
    from wanfp4.quality.files import output_folder
    from wanfp4.quality.plan import check_backend

    pipelines.check_seed(seed)
    place = pipelines.pick_device(device)
    pipelines.check_dtype(dtype)
    pipelines.check_offload(offload, place)
    check_backend([chosen], backend, place)
    pipelines.require_weights(info)
    clips = tuple(zip(texts, videos, strict=True))
    plan = Plan(named, source, info, settings, chosen, backend, strict, place, dtype, offload, seed, clips)
    inputs = [Path(policy), *([prompts] if prompts is not None else []), *configs(source)]
    for video in videos:
        check_outputs(video, latents_path(video), force=force, inputs=inputs)
    if dry_run:
        for line in plan.lines():
            typer.echo(line)
        return
    with output_folder(videos[0].parent):  # all of them have it
        _run(plan, keep_latents)


def _policy(name: str, device: str, dtype: str, backend: str | None) -> Policy:
    """A policy, or what "auto" stands for on the device, which is said."""
    if name != "auto":
        return get_policy(name)
    from wanfp4.kernels.automatic import automatic
    from wanfp4.processors import pipelines

    if backend is not None:
        raise SettingsError("--policy auto chooses the backend, too: leave out --backend, or name a policy")
    pipelines.check_dtype(dtype)
    model_dtype = pipelines.DTYPES["bf16" if dtype == "auto" else dtype]
    chosen, why = automatic(pipelines.pick_device(device), model_dtype)
    common.note(why)
    return chosen


def _outputs(texts: list[str], output: Path | None, policy: str, seed: int) -> list[Path]:
    """One path a prompt. Raises OutputError when `output` cannot be numbered."""
    if output is not None and output.suffix.lower() != ".mp4":
        raise OutputError(f"--output must be a file name that ends in .mp4, not {str(output)!r}")
    if output is not None and len(texts) == 1:
        return [output]
    digits = max(2, len(str(len(texts))))
    numbers = [f"{i:0{digits}}" for i in range(1, len(texts) + 1)]
    if output is not None:
        return [output.with_name(f"{output.stem}-{n}{output.suffix}") for n in numbers]
    stems = [f"{_slug(text)}-{_slug(policy)}-seed{seed}.mp4" for text in texts]
    return [Path(stem if len(texts) == 1 else f"{n}-{stem}") for n, stem in zip(numbers, stems, strict=True)]


def _slug(text: str) -> str:
    """A file name's worth of `text`; prompts in other scripts keep their letters."""
    return re.sub(r"[^\w.]+", "-", text.lower()).strip("-.")[:60].rstrip("-.") or "clip"


def _run(plan: Plan, keep_latents: bool) -> None:
    from wanfp4.processors import pipelines
    from wanfp4.processors.patch import patch

    started = time.perf_counter()
    with common.quiet_libraries():
        pipe = pipelines.load_pipeline(plan.source, device=plan.device, dtype=plan.dtype, offload=plan.offload)
    load_seconds = time.perf_counter() - started
    common.warn_of_unknown_words(pipe, (text for text, _ in plan.clips))

    with common.progress_log(), patch(pipe, plan.policy, plan.backend, strict=plan.strict) as handle:
        for index, (text, video) in enumerate(plan.clips, 1):
            handle.reset()
            label = "denoising" if len(plan.clips) == 1 else f"denoising {index}/{len(plan.clips)}"
            pipe.set_progress_bar_config(desc=label, unit="step", dynamic_ncols=True)
            started = time.perf_counter()
            latents = pipelines.generate_latents(pipe, text, plan.settings, plan.seed)
            seconds = {"load_model": load_seconds, "denoise": time.perf_counter() - started}
            check_finite(latents)
            ran = handle.receipt()
            for line in ran.summary():
                common.note(line)
            receipt = _receipt(plan, pipe, text, ran.to_dict(), seconds)
            _finish(plan, pipe, latents, video, receipt, keep_latents)


def _finish(plan: Plan, pipe: Any, latents: Any, video: Path, receipt: dict[str, Any], keep_latents: bool) -> None:
    """Latents to disk, then the video; when that fails the latents stay, and the error says how to go on."""
    from wanfp4.processors.pipelines import decode_latents

    kept = latents_path(video)
    save_latents(kept, latents, receipt)
    try:
        started = time.perf_counter()
        frames = decode_latents(pipe, latents)
        write_clip(video, frames, plan.settings.fps, receipt, time.perf_counter() - started)
    except BaseException:
        common.note(f"The latents are safe; to make the video from them: {common.decode_command(kept, video)}")
        raise
    if not keep_latents:
        kept.unlink(missing_ok=True)
    typer.echo(str(video))


def _receipt(
    plan: Plan, pipe: Any, prompt: str, attention: dict[str, Any], seconds: dict[str, float]
) -> dict[str, Any]:
    """Everything to run it again, and what ran."""
    from wanfp4.processors import environment

    parts = {name: part for name, part in pipe.components.items() if hasattr(part, "dtype")}
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "created": common.now(),
        "command": common.command_line(),
        "prompt": prompt,
        "seed": plan.seed,
        "settings": plan.settings.to_dict(),
        "model": {**plan.info.to_dict(), "model": plan.model, "tokens": plan.info.tokens(plan.settings)},
        "dtype": plan.dtype,
        "dtypes": {name: str(part.dtype).removeprefix("torch.") for name, part in parts.items()},
        "offload": plan.offload,
        "machine": environment.machine(plan.device),
        "versions": environment.versions(),
        "attention": attention,
        "timings": {name: round(value, 3) for name, value in seconds.items()},
    }
