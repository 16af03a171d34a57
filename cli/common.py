"""What the commands share: exit codes, errors as sentences, options, prompts, environment."""

from __future__ import annotations

import json
import logging
import shlex
import sys
import traceback
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from wanfp4.errors import (
    BackendError,
    ModelError,
    OutputError,
    PolicyError,
    SettingsError,
    UnsupportedInputError,
    Wanfp4Error,
    brief,
)

if TYPE_CHECKING:
    import torch

    from wanfp4.processors.model_info import ModelInfo, Settings

# The bundled model by a name that means the same on every machine.
BUNDLED = "bundled"
FAILURE, BAD_INPUT, OVER_BUDGET, INTERRUPTED = 1, 2, 3, 130
_BAD_INPUT = (PolicyError, SettingsError, ModelError, UnsupportedInputError, BackendError, OutputError)

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="DIR|ID", help=f"Diffusers Wan folder or Hub id; default: {BUNDLED}, the sample here."
    ),
]
BackendOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Who computes the attention; by default the fastest that can run it."),
]
HeightOption = Annotated[
    int | None, typer.Option(metavar="PIXELS", help="Frame height; the model's default if not given.")
]
WidthOption = Annotated[int | None, typer.Option(metavar="PIXELS", help="Frame width.")]
FramesOption = Annotated[int | None, typer.Option(metavar="N", help="Frames of the clip, 4k+1.")]
StepsOption = Annotated[int | None, typer.Option(metavar="N", help="Denoising steps.")]
GuidanceOption = Annotated[float | None, typer.Option(metavar="X", help="Classifier-free guidance; 1 or less is none.")]
Guidance2Option = Annotated[
    float | None,
    typer.Option("--guidance-2", metavar="X", help="Guidance of the low-noise expert (Wan2.2)."),
]
ShiftOption = Annotated[float | None, typer.Option(metavar="X", help="Flow shift of the noise schedule.")]
NegativeOption = Annotated[str | None, typer.Option(metavar="TEXT", help="Negative prompt.")]
FpsOption = Annotated[int | None, typer.Option(metavar="N", help="Frames per second of the file.")]
DeviceOption = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda, cuda:N or mps.")]
DtypeOption = Annotated[str, typer.Option(metavar="NAME", help="auto, bf16, fp16 or fp32.")]
OffloadOption = Annotated[
    str,
    typer.Option(metavar="HOW", help="Keep weights on the CPU until needed: none, model or sequential."),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option("--prompts", metavar="FILE", help="Prompts from a file, one a line; # starts a comment."),
]
PromptOption = Annotated[
    list[str] | None,
    typer.Option("--prompt", metavar="TEXT", help="What to show; repeat it for several. Default: the model's example."),
]
StrictOption = Annotated[bool, typer.Option("--strict", help="Fail where anything would fall back to BF16 attention.")]


def note(message: str) -> None:
    """A line for people, on stderr: stdout carries results only. What would break the line becomes a space."""
    typer.echo(_printable(message), err=True)


def one_line(text: str) -> str:
    """A prompt or a name for printing: line breaks, control characters and runs of spaces become one space."""
    return " ".join(_printable(text).split())


def _printable(text: str) -> str:
    # Zl, Zp: the line and paragraph separators. Other invisible characters stay: scripts and emoji are made with them.
    return "".join(" " if unicodedata.category(c) in ("Cc", "Zl", "Zp") else c for c in text)


@contextmanager
def sentences(ctx: Any, usage: str) -> Iterator[None]:
    """Exceptions of a command become one sentence on stderr and an exit code; `usage` says how to see the traceback."""
    debug = ctx.params.get("debug")
    try:
        yield
    except KeyboardInterrupt:
        note("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except Wanfp4Error as error:
        if debug:
            traceback.print_exc()
        note(f"error: {error}")
        raise typer.Exit(BAD_INPUT if isinstance(error, _BAD_INPUT) else FAILURE) from None
    except (typer.Exit, typer.Abort, SystemExit):
        raise
    except Exception as error:
        # Click's own usage errors print themselves; the class is vendored by Typer, so it is told by its method.
        if hasattr(error, "exit_code") and hasattr(error, "show"):
            raise
        if debug:
            traceback.print_exc()
        note(f"error: {brief(error)}")
        if not debug:
            note(f"This is not a message of wanfp4's own; `{ctx.command_path} {usage}` shows the traceback.")
        raise typer.Exit(FAILURE) from None


class Commands(TyperGroup):
    """The command group whose errors are sentences."""

    def invoke(self, ctx: Any) -> Any:
        with sentences(ctx, "--debug COMMAND …"):
            return super().invoke(ctx)


class Command(TyperCommand):
    """A command of its own whose errors are sentences."""

    def invoke(self, ctx: Any) -> Any:
        with sentences(ctx, "--debug …"):
            return super().invoke(ctx)


def command_line() -> str:
    """The command as a shell would take it again."""
    return shlex.join(["wanfp4", *sys.argv[1:]])


def decode_command(latents: Path, video: Path) -> str:
    """How to make `video` from kept latents."""
    return shlex.join(["wanfp4", "decode", str(latents), "-o", str(video)])


def named_model(model: str | None) -> tuple[str, str]:
    """What receipts and reports call a model, and the folder or Hub id to load it from.

    None, "bundled" and the bundled sample's own folder are "bundled"; a folder of that name is meant by "./bundled".
    """
    from wanfp4.samples import bundled

    folder = bundled()
    if model is None or model == BUNDLED or Path(model).expanduser().absolute() == folder.absolute():
        return BUNDLED, str(folder)
    return model, model


@dataclass(frozen=True)
class Job:
    """A model to run, checked as far as its configuration tells: what reports call it, where it is, how it is run."""

    named: str
    source: str
    info: ModelInfo
    settings: Settings
    device: torch.device
    dtype: str
    offload: str

    def pipeline(self, prompts: Iterable[str]) -> Any:
        """The loaded pipeline; words of `prompts` that its tokenizer does not know are warned of."""
        from wanfp4.processors import pipelines

        with quiet_libraries():
            pipe = pipelines.load_pipeline(self.source, device=self.device, dtype=self.dtype, offload=self.offload)
        warn_of_unknown_words(pipe, prompts)
        return pipe


def job(model: str | None, *, device: str, dtype: str, offload: str, **settings: Any) -> Job:
    """What --model, --device, --dtype, --offload and the options for `settings` ask for.

    Raises ModelError and SettingsError.
    """
    from wanfp4.processors.model_info import inspect_model

    named, source = named_model(model)
    info = inspect_model(source)
    chosen = info.settings(**settings)

    from wanfp4.processors import pipelines

    place = pipelines.pick_device(device)
    pipelines.check_dtype(dtype)
    pipelines.check_offload(offload, place)
    return Job(named, source, info, chosen, place, dtype, offload)


def collect_prompts(prompt: str | None, prompts: Path | None, example: str | None) -> list[str]:
    """The prompt given, or those of a file: one a line, empty lines and lines that start with # left out.

    Raises SettingsError when there are none, or both ways are used at once.
    """
    if prompt is not None and prompts is not None:
        raise SettingsError("give a prompt or --prompts FILE, not both")
    if prompts is None:
        if prompt is None or not prompt.strip():
            hint = f", for example {example!r}" if example else ""
            raise SettingsError(f"{'the prompt is empty' if prompt is not None else 'a prompt is needed'}{hint}")
        return [prompt.strip()]
    try:
        # -sig: editors on Windows begin a file with a byte order mark, which is no part of the first prompt.
        lines = prompts.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read prompts from {str(prompts)!r}: {error}") from None
    found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not found:
        raise SettingsError(f"{str(prompts)!r} holds no prompt: one a line, lines that start with # are comments")
    return found


def several_prompts(prompt: list[str] | None, prompts: Path | None) -> list[str]:
    """The prompts given, or those of a file; none when neither is there. Raises SettingsError for both at once."""
    if prompt and prompts is not None:
        raise SettingsError("give --prompt or --prompts FILE, not both")
    if prompts is not None:
        return collect_prompts(None, prompts, None)
    return [text.strip() for text in prompt or []]


def several_seeds(text: str | None, option: str = "--seeds") -> list[int]:
    """Seeds as 0,1,2; the default ones for None. Raises SettingsError, which names the `option`."""
    from wanfp4.quality.plan import DEFAULT_SEEDS

    if text is None:
        return list(DEFAULT_SEEDS)
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise SettingsError(f"{option} must be whole numbers separated by commas, as 0,1,2; not {text!r}") from None


def refuse_finished(listing: Path, what: str, force: bool) -> None:
    """Raise OutputError when the JSON file `listing` is of a finished `what`, which would be lost."""
    if not force and listing.is_file():
        try:
            finished = json.loads(listing.read_text(encoding="utf-8")).get("complete", True)
        except (OSError, ValueError, AttributeError):
            finished = True
        if finished:
            folder = str(listing.parent)
            raise OutputError(f"{folder!r} holds a finished {what}; choose another folder, or add --force")


def warn_of_unknown_words(pipe: Any, prompts: Iterable[str]) -> None:
    """Say on stderr which words of the prompts the model's tokenizer does not have."""
    from wanfp4.processors.pipelines import unknown_words

    for prompt in prompts:
        if unknown := unknown_words(pipe.tokenizer, prompt):
            note(f"warning: the model does not know {', '.join(map(repr, unknown))} in {prompt!r}")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Diffusers' and Transformers' loading bars off for a while. Their warnings stay: some tell of missing weights."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    silenced = [library for library in (diffusers_logging, transformers_logging) if library.is_progress_bar_enabled()]
    for library in silenced:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in silenced:
            library.enable_progress_bar()


@contextmanager
def progress_log() -> Iterator[None]:
    """wanfp4's own log lines on stderr, above a progress bar instead of inside it."""
    from tqdm.contrib.logging import logging_redirect_tqdm

    with logging_redirect_tqdm(loggers=[logging.getLogger("wanfp4")]):
        yield


def now() -> str:
    """Time of day in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
