"""Train the sample pipeline on one GPU.

    python -m wanfp4.samples.train all --out out/run                     everything, then out/run/pipeline
    python -m wanfp4.samples.train all --out out/run --max-seconds 540   the same in stages; repeat until it is done
    python -m wanfp4.samples.train vae --out out/run                     one part at a time: vae, dit, export
    python -m wanfp4.samples.train dit --out out/run --resume-weights old --max-seconds 540
    python -m wanfp4.samples.train all --out out/run --settings my.json   {"vae": {"batch": 8}}

docs/sample.md explains the choices. Exit codes: 0 done, 10 stopped by --max-seconds with more to do, 1 a failed run,
2 bad input.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from wanfp4.cli.common import Commands, DeviceOption, quiet_libraries
from wanfp4.errors import ModelError, OutputError, SettingsError
from wanfp4.quality.files import writable_folder, write
from wanfp4.samples import bundled

if TYPE_CHECKING:
    from wanfp4.samples.transformer_stage import TransformerSettings
    from wanfp4.samples.vae_stage import VaeSettings

UNFINISHED = 10
FILE_LIMIT, FOLDER_LIMIT = 16 * 2**20, 24 * 10**6  # bytes

_STARTED = time.perf_counter()

_Settings = TypeVar("_Settings", "VaeSettings", "TransformerSettings")

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)

OutOption = Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Weights, history, checkpoints.")]
SeedOption = Annotated[int | None, typer.Option(help="Of weights, clips, captions and noise; 0 if not given.")]
SecondsOption = Annotated[
    float | None,
    typer.Option(min=1, help="Save and stop after this long; the same command goes on. Up to 30 s more to write."),
]
CompileOption = Annotated[
    bool | None, typer.Option("--compile/--no-compile", help="torch.compile; on for CUDA if not given.")
]
WeightsOption = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Go on from the averaged weights there, where no checkpoint exists."),
]
SettingsOption = Annotated[
    Path | None,
    typer.Option(
        "--settings",
        metavar="FILE",
        help='JSON with fields of VaeSettings under "vae" and of '
        'TransformerSettings under "transformer", in place of the defaults.',
    ),
]
StepsOption = Annotated[int | None, typer.Option(min=1, help="Optimisation steps in all.")]


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Train the sample pipeline."""


@app.command()
def vae(
    out: OutOption,
    steps: StepsOption = None,
    seed: SeedOption = None,
    max_seconds: SecondsOption = None,
    device: DeviceOption = "auto",
    compiled: CompileOption = None,
    settings: SettingsOption = None,
) -> None:
    """First stage: the VAE."""
    _exit_unless(_train_vae(_Job(out, max_seconds, device, compiled, settings), steps, seed))


@app.command()
def dit(
    out: OutOption,
    steps: StepsOption = None,
    seed: SeedOption = None,
    max_seconds: SecondsOption = None,
    device: DeviceOption = "auto",
    compiled: CompileOption = None,
    settings: SettingsOption = None,
    resume_weights: WeightsOption = None,
    given_vae: Annotated[
        Path | None,
        typer.Option(
            "--vae", metavar="FILE|FOLDER", help="A trained VAE, or a pipeline's; that of --out if not given."
        ),
    ] = None,
) -> None:
    """Second stage: the transformer and its text encoder."""
    _exit_unless(_train_dit(_Job(out, max_seconds, device, compiled, settings), steps, seed, resume_weights, given_vae))


@app.command()
def export(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where the trained weights are.")],
    to: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where the pipeline goes; the folder `pipeline` there if not given."),
    ] = None,
) -> None:
    """Put the trained weights together as a diffusers pipeline folder."""
    target = export_pipeline(out, to or out / "pipeline")
    typer.echo(str(target))


@app.command(name="all")
def everything(
    out: OutOption,
    vae_steps: StepsOption = None,
    dit_steps: StepsOption = None,
    seed: SeedOption = None,
    max_seconds: SecondsOption = None,
    device: DeviceOption = "auto",
    compiled: CompileOption = None,
    settings: SettingsOption = None,
) -> None:
    """Both stages and the export, as far as they are not done yet."""
    job = _Job(out, max_seconds, device, compiled, settings)
    _exit_unless(_train_vae(job, vae_steps, seed) and _train_dit(job, dit_steps, seed, None, None))
    typer.echo(str(export_pipeline(out, out / "pipeline")))


class _Job:
    """What the stages of one command share."""

    def __init__(
        self, out: Path, max_seconds: float | None, device: str, compiled: bool | None, settings: Path | None
    ) -> None:
        import torch

        from wanfp4.processors.pipelines import pick_device

        self.given = _read_settings(settings)
        self.out = writable_folder(out)
        self.device = pick_device(device)
        self.compiled = self.device.type == "cuda" if compiled is None else compiled
        self.max_seconds = max_seconds
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            torch._dynamo.config.suppress_errors = True  # what does not compile runs as it is, with a warning
            self.say(f"{torch.cuda.get_device_name(self.device)}, PyTorch {torch.__version__}")

    def remaining(self) -> float:
        """Seconds until --max-seconds."""
        return math.inf if self.max_seconds is None else self.max_seconds - (time.perf_counter() - _STARTED)

    def stop(self, step: int) -> bool:
        """For `loop.run`."""
        return self.remaining() <= 0

    def say(self, line: str) -> None:
        """To the terminal and to `log.txt`."""
        line = f"[{time.perf_counter() - _STARTED:6.1f} s] {line}"
        typer.echo(line)
        with (self.out / "log.txt").open("a", encoding="utf-8") as log:
            log.write(line + "\n")


def _read_settings(path: Path | None) -> dict[str, dict[str, Any]]:
    """Raises SettingsError when the file is not as `--settings` says."""
    if path is None:
        return {}
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"cannot read the settings {str(path)!r}: {error}") from None
    if not isinstance(given, dict) or set(given) - {"vae", "transformer"}:
        raise SettingsError(f'{str(path)!r} must hold an object with the keys "vae" and "transformer"')
    return given


def _chosen(kind: type[_Settings], given: dict[str, Any], **options: Any) -> _Settings:
    """The defaults, then `given`, then the options that are not None. Raises SettingsError for unknown names."""
    known = [field.name for field in dataclasses.fields(kind)]
    if unknown := sorted(set(given) - set(known)):
        raise SettingsError(f"{kind.__name__} has no {', '.join(unknown)}; it has {', '.join(known)}")
    return kind(**given | {name: value for name, value in options.items() if value is not None})


def _exit_unless(done: bool) -> None:
    if not done:
        raise typer.Exit(UNFINISHED)


def _finished(out: Path, stage: str, settings: _Settings) -> bool:
    """True when a stage with these settings is done, so its clips need not be drawn again to find out."""
    from wanfp4.samples.loop import History

    record = History(out).data.get(stage, {})
    wanted = json.loads(json.dumps(dataclasses.asdict(settings)))
    return "result" in record and record.get("settings") == wanted


def _train_vae(job: _Job, steps: int | None, seed: int | None) -> bool:
    import torch

    from wanfp4.samples.loop import History, run
    from wanfp4.samples.vae_stage import VaeSettings, VaeStage

    settings = _chosen(VaeSettings, job.given.get("vae", {}), steps=steps, seed=seed)
    if (job.out / "vae.safetensors").is_file() and _finished(job.out, "vae", settings):
        job.say("vae: done already")
        return True
    stage = VaeStage(settings, job.device, compiled=job.compiled)
    job.say(f"vae: {settings.clips} clips drawn")
    torch.backends.cudnn.benchmark = True  # every step has the same shapes; what follows does not
    done = run(stage, job.out, stop=job.stop, say=job.say)
    torch.backends.cudnn.benchmark = False
    if not done:
        return False
    result = stage.finish(job.out)
    job.say(f"vae: {json.dumps(result)}")
    History(job.out).save("vae", result=result)
    return True


def _train_dit(job: _Job, steps: int | None, seed: int | None, weights: Path | None, given_vae: Path | None) -> bool:
    from wanfp4.samples.loop import HELD_OUT, History, checkpoint, run
    from wanfp4.samples.transformer_stage import TransformerSettings, TransformerStage
    from wanfp4.samples.vae_stage import load_vae, save_vae

    settings = _chosen(TransformerSettings, job.given.get("transformer", {}), steps=steps, seed=seed)
    stored = job.out / "vae.safetensors"
    if given_vae is not None:
        module = load_vae(given_vae)
        save_vae(module, stored, {name: module.config[name] for name in ("latents_mean", "latents_std")})
    if (job.out / "transformer.safetensors").is_file() and _finished(job.out, "transformer", settings):
        job.say("transformer: done already")
        return True
    if job.remaining() < 60:  # drawing and encoding the clips takes about as long on a GPU
        job.say("transformer: not begun, the time is nearly up; the same command goes on from here")
        return False
    stage = TransformerStage(
        settings, load_vae(stored), job.device, compiled=job.compiled, cache=writable_folder(job.out / "state")
    )
    job.say("transformer: clips drawn and encoded")
    begin = 0
    if weights is not None and not checkpoint(job.out, stage.name).is_file():
        record = History(weights).data.get(stage.name, {})
        if "step" not in record:
            raise ModelError(f"{str(weights / 'history.json')!r} does not say at which step its weights are")
        begin = record["step"]
        stage.start_from(weights, begin)
        History(job.out).save(stage.name, rows=record["rows"], seconds=record["seconds"])
        job.say(f"transformer: goes on from the averaged weights of step {begin}")
    done = run(stage, job.out, stop=job.stop, say=job.say, begin=begin)
    stage.save_averages(job.out)
    if done:
        last: dict[str, Any] = History(job.out).data[stage.name]["rows"][-1]
        History(job.out).save(stage.name, result={k: v for k, v in last.items() if k.startswith(HELD_OUT)})
    return done


def export_pipeline(weights: Path, target: Path) -> Path:
    """Build the diffusers folder `target` from `vae`, `transformer` and `text_encoder` (.safetensors) in `weights`.

    Weights and configurations there are replaced; a README.md (model card) and wanfp4_defaults.json are kept where they
    exist. Returns the folder. Raises ModelError (weights missing or not fitting) and OutputError (cannot be written, or
    larger than 16 MiB a file and 24 MB together).
    """
    from wanfp4.samples import models
    from wanfp4.samples.loop import History
    from wanfp4.samples.transformer_stage import load_weights
    from wanfp4.samples.vae_stage import load_vae

    tokenizer = models.build_tokenizer()
    changes = History(weights).data.get("transformer", {}).get("settings", {}).get("model") or {}
    parts: dict[str, Any] = {
        "text_encoder": models.build_text_encoder(len(tokenizer)),
        "transformer": models.build_transformer(**changes),
    }
    for name, module in parts.items():
        load_weights(module, weights / f"{name}.safetensors")
    parts["vae"] = load_vae(weights / "vae.safetensors")
    parts = {name: models.to_bf16(module).eval() for name, module in parts.items()}
    pipe = models.build_pipeline(tokenizer, **parts)
    writable_folder(target)
    try:
        with quiet_libraries():
            pipe.save_pretrained(target, safe_serialization=True)
    except OSError as error:
        raise OutputError(f"cannot write the pipeline into {str(target)!r}: {error}") from error
    _name_tokenizer_class(target)
    for name in ("wanfp4_defaults.json", "README.md"):
        if not (target / name).exists():
            content = (bundled() / name).read_text(encoding="utf-8") if name.endswith("json") else _card(weights)
            write(target / name, content)
    files = [path for path in target.rglob("*") if path.is_file()]
    large = [path.name for path in files if path.stat().st_size > FILE_LIMIT]
    total = sum(path.stat().st_size for path in files)
    if large or total > FOLDER_LIMIT:
        raise OutputError(
            f"{str(target)!r} is {total / 1e6:.1f} MB, of at most {FOLDER_LIMIT / 1e6:.0f}; "
            f"files over 16 MiB: {', '.join(large) or 'none'}"
        )
    return target


def _name_tokenizer_class(target: Path) -> None:
    """transformers 5 names a class that version 4 does not have; the old name loads in both."""
    name = "PreTrainedTokenizerFast"
    index = json.loads((target / "model_index.json").read_text(encoding="utf-8"))
    index["tokenizer"] = ["transformers", name]
    write(target / "model_index.json", json.dumps(index, indent=2) + "\n")
    path = target / "tokenizer" / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = name
    write(path, json.dumps(config, indent=2) + "\n")


def _card(weights: Path) -> str:
    """A model card for pipelines that somebody else trains; the bundled one has its own."""
    from wanfp4.samples.loop import History

    lines = [
        "---",
        "license: apache-2.0",
        "pipeline_tag: text-to-video",
        "library_name: diffusers",
        "---",
        "",
        "# A wanfp4 sample pipeline",
        "",
        "Trained by `python -m wanfp4.samples.train` on drawn clips of moving shapes; it makes nothing else.",
        "`python -m wanfp4.samples.evaluate FOLDER` measures how well.",
    ]
    for stage, record in History(weights).data.items():
        lines += ["", f"{stage}: {record.get('step')} steps, {record.get('seconds')} s"]
        lines += [f"result: `{json.dumps(record['result'])}`"] if "result" in record else []
        lines += [f"settings: `{json.dumps(record['settings'])}`"] if "settings" in record else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    app()
