"""`wanfp4 drift --task`: does a policy still draw what the prompt says? A table of the bundled sample's task."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from wanfp4.cli import common
from wanfp4.cli.latents import refuse_inputs
from wanfp4.errors import ModelError, OutputError, SettingsError, brief
from wanfp4.quality.results import TASK, read_earlier

if TYPE_CHECKING:
    import torch

    from wanfp4.policy import Policy
    from wanfp4.processors.model_info import ModelInfo, Settings
    from wanfp4.samples.task import Answers, Task

Json = dict[str, Any]

CLIPS, PAIRS = 200, 0.3

# What has to be the same for finished rows to stand beside new ones, with how a sentence calls it.
_SAME = {
    "tasks": "tasks",
    "settings": "settings",
    "model": "model, weights or dtype",
    "machine": "device",
    "versions": "versions",
    "backend": "backend",
    "strict": "--strict",
    "batch": "batch",
}


def task_table(
    policies: Sequence[str] | None,
    seed: int,
    *,
    named: str,
    source: str,
    info: ModelInfo,
    settings: Settings,
    clips: int | None,
    pairs: float | None,
    batch: int | None,
    backend: str | None,
    strict: bool,
    device: torch.device,
    dtype: str,
    output: Path,
    force: bool,
) -> None:
    """Make the table in the folder `output`, or go on with an unfinished one; `policies` None for every 4-bit preset.

    Raises what `wanfp4 drift` raises, and ModelError for a model that does not know the words of the tasks.
    """
    from wanfp4.policy import policies as presets
    from wanfp4.processors import pipelines
    from wanfp4.processors.patch import patch
    from wanfp4.quality.drift import FLOOR_BACKEND
    from wanfp4.quality.files import output_folder
    from wanfp4.quality.plan import FLOOR, REFERENCE, check_backend, make_plan
    from wanfp4.samples.task import Judges, answer, default_batch, make_tasks

    tasks = make_tasks(CLIPS if clips is None else clips, pairs=PAIRS if pairs is None else pairs, seed=seed)
    chosen = [name for name, p in presets().items() if not p.numerics.is_exact] if policies is None else policies
    plan = make_plan(info, chosen, tasks[0].prompt, seed, settings=settings)
    check_backend(plan.policies, backend, device)
    for page in TASK.files:
        refuse_inputs(output / page, [Path(name) for name in chosen])
    earlier = None if force else _earlier(output)
    _check_words(source)

    with output_folder(output):
        with common.quiet_libraries():
            pipe = pipelines.load_pipeline(source, device=device, dtype=dtype)
        for policy in plan.policies:
            with patch(pipe, policy, backend, strict=strict):
                pass  # raises here what would otherwise be raised after the rows before it
        rows: list[tuple[str, Policy | None, str | None]] = [
            (REFERENCE, None, None),
            (FLOOR, presets()["bf16"], FLOOR_BACKEND),
            *((policy.name, policy, backend) for policy in plan.policies),
        ]
        batch = batch or default_batch(device)
        data = _header(pipe, info, named, settings, tasks, seed, batch, backend, strict, device, [r[0] for r in rows])
        if earlier is not None:
            data["rows"] = _finished(earlier, data, rows, output)
            if data["rows"]:
                common.note(f"going on with {str(output)!r}: {len(data['rows'])} of {len(rows)} rows are finished")
        with _progress(len(tasks) * len(rows), len(tasks) * len(data["rows"])) as bar, Judges() as judges:
            try:
                for name, row_policy, row_backend in rows[len(data["rows"]) :]:
                    bar.set_description(name)
                    answers = answer(
                        pipe,
                        tasks,
                        settings,
                        judges=judges,
                        policy=row_policy,
                        backend=row_backend,
                        strict=strict and row_policy is not None,
                        batch=batch,
                        done=bar.update,
                    )
                    data["rows"].append(_row(name, answers, row_backend, data["rows"]))
                    _adjust(data["rows"])
                    data["complete"] = len(data["rows"]) == len(rows)
                    _save(output, data)
            except BaseException:
                if data["rows"]:
                    bar.clear()
                    common.note(f"stopped early: what has finished is in {str(output)!r}; the same command goes on")
                raise
    _report(output, data)


def _report(output: Path, data: Json) -> None:
    from wanfp4.quality.task_pages import task_lines

    for line in (*(str(output / page) for page in TASK.files), "", *task_lines(data)):
        typer.echo(line)


@contextlib.contextmanager
def _progress(total: int, initial: int) -> Iterator[Any]:
    from tqdm import tqdm

    with tqdm(total=total, initial=initial, unit="clip", dynamic_ncols=True) as bar, common.progress_log():
        yield bar


def _check_words(source: str) -> None:
    """Raise ModelError unless the model's tokenizer has every word of the tasks as one of its own.

    Tokenizers that spell words in pieces, as UMT5's does, take any prompt; but a model that was not trained on these
    clips is not to be judged by a checker that knows nothing else.
    """
    from transformers import AutoTokenizer

    from wanfp4.samples.data import vocabulary

    try:
        known = AutoTokenizer.from_pretrained(source, subfolder="tokenizer").get_vocab()
    except Exception as error:  # whatever a tokenizer's files hold, its library fails in its own way
        raise ModelError(f"cannot load the tokenizer of {source}: {brief(error)}") from error
    words = vocabulary()
    missing = [word for word in words if word not in known]
    if missing:
        raise ModelError(
            f"--task is for models trained on the sample's clips, whose tokenizer has its {len(words)} words; "
            f"that of {source} lacks {len(missing)} of them: {', '.join(missing[:5])}{', …' if missing[5:] else ''}"
        )


def _header(
    pipe: Any,
    info: ModelInfo,
    named: str,
    settings: Settings,
    tasks: Sequence[Task],
    seed: int,
    batch: int,
    backend: str | None,
    strict: bool,
    device: torch.device,
    planned: list[str],
) -> Json:
    """Everything in task.json that is known before the first row."""
    from wanfp4.processors.environment import machine, versions
    from wanfp4.quality.jobs import weights_digest

    listed = [{"prompt": t.prompt, "seed": t.seed, "asked": [str(o) for o in t.spec.objects]} for t in tasks]
    several = sum(len(t.spec.objects) > 1 for t in tasks)
    model = json.loads(json.dumps(info.to_dict()))  # its tuples become the lists that a file gives back
    return {
        "kind": TASK.kind,
        "schema": TASK.schema,
        "complete": False,
        "created": common.now(),
        "command": common.command_line(),
        "versions": versions(),
        "machine": machine(device),
        "model": {
            **model,
            "model": named,
            "dtype": str(pipe.transformer.dtype).removeprefix("torch."),
            "tokens": info.tokens(settings),
            "weights": weights_digest(pipe),
        },
        "scheduler": type(pipe.scheduler).__name__,
        "settings": settings.to_dict(),
        "backend": backend,
        "strict": strict,
        "batch": batch,
        "tasks": {
            "clips": len(tasks),
            "one": len(tasks) - several,
            "two": several,
            "seed": seed,
            "digest": hashlib.sha256(json.dumps([asdict(t) for t in tasks]).encode()).hexdigest(),
            "list": listed,
        },
        "planned": planned,
        "rows": [],
    }


def _row(name: str, answers: Answers, backend: str | None, before: Sequence[Json]) -> Json:
    """A row of task.json; the first of `before` is the pipeline's own attention, which later rows are held against."""
    from wanfp4.samples.task import agreement, mistakes, paired, rate, table

    receipt = answers.receipt
    calls: dict[str, int] = {}
    fallbacks: dict[str, int] = {}
    for entry in receipt.entries if receipt is not None else ():
        calls[entry.ran.backend] = calls.get(entry.ran.backend, 0) + entry.calls
    for entry in receipt.fallbacks if receipt is not None else ():
        reason = entry.ran.reason or "no reason given"
        fallbacks[reason] = fallbacks.get(reason, 0) + entry.calls
    emulated = receipt is not None and any(entry.ran.emulated for entry in receipt.entries)
    kept = None if receipt is None else {**receipt.to_dict(), "summary": receipt.summary()}
    row: Json = {
        "name": name,
        "policy": None if receipt is None else receipt.policy.to_dict(),
        "numerics": None if receipt is None else receipt.policy.numerics.label,
        "backend": {"requested": backend, "calls": calls, "emulated": emulated},
        "fallbacks": fallbacks,
        "unpatched": {} if receipt is None else {f"{u.expert}.{u.module}": u.reason for u in receipt.unpatched},
        "receipt": None if kept is None else {key: value for key, value in kept.items() if key != "policy"},
        "seconds": round(answers.seconds, 1),
        "table": table(answers),
        "as_asked": rate(answers.right),
        "mistakes": mistakes(answers),
        "right": answers.right,
        "shown": answers.shown,
    }
    if before:
        own = before[0]
        row["agreement"] = agreement(answers.shown, own["shown"])
        row["paired"] = paired(answers.right, own["right"])
    return row


def _adjust(rows: Sequence[Json]) -> None:
    """p-values of the policies, adjusted for how many there are so far; the noise floor is a question of its own."""
    from wanfp4.samples.task import holm

    compared = [row["paired"] for row in rows[1:]]
    adjusted = [split["p"] for split in compared[:1]] + holm([split["p"] for split in compared[1:]])
    for split, p in zip(compared, adjusted, strict=True):
        split["adjusted"] = p


def _save(output: Path, data: Json) -> None:
    """All three files, each whole; task.json last, as it is what an interrupted job goes on from."""
    from wanfp4.quality.files import write
    from wanfp4.quality.report import json_text
    from wanfp4.quality.task_pages import task_html, task_markdown

    write(output / "task.html", task_html(data))
    write(output / "task.md", task_markdown(data))
    write(output / "task.json", json_text(data))


def _earlier(output: Path) -> Json | None:
    """The unfinished table in a folder. Raises OutputError for a finished one, and for a task.json that is none."""
    data = read_earlier(output, TASK)
    if data is not None and data["complete"]:
        raise OutputError(f"{str(output)!r} holds a finished table; choose another folder, or add --force")
    return data


def _finished(earlier: Json, data: Json, rows: Sequence[tuple[str, Policy | None, Any]], output: Path) -> list[Json]:
    """The rows of an unfinished table that the new one goes on from.

    Raises OutputError when it is of something else: going on would mix what cannot be compared, and starting again
    would lose it.
    """
    wrong = [words for key, words in _SAME.items() if _essence(key, earlier.get(key)) != _essence(key, data[key])]
    finished: list[Json] = earlier["rows"]
    asked = [(name, None if policy is None else policy.to_dict()) for name, policy, _ in rows]
    if [(row["name"], row["policy"]) for row in finished] != asked[: len(finished)]:
        wrong.append("policies")
    if wrong:
        raise OutputError(
            f"{str(output)!r} holds an unfinished table of other {', '.join(wrong)}; give the same to go on with it, "
            "choose another folder, or add --force"
        )
    return finished


def _essence(key: str, value: Any) -> Any:
    """The part of a header's value that has to agree: threads do not change what a clip shows."""
    return {k: v for k, v in value.items() if k != "threads"} if key == "machine" and value else value


def refuse_others(task: bool, only_task: dict[str, Any], never_task: dict[str, Any]) -> None:
    """Raise SettingsError for options that mean nothing with --task, or without it; None and () were not given."""
    for name, value in (never_task if task else only_task).items():
        if value is not None and value != []:
            with_or_without = "does not go with --task" if task else "is for --task alone"
            raise SettingsError(f"{name} {with_or_without}")
