"""The task that the sample pipeline is judged by: draw what a prompt says, and have the checker read it back.

    tasks = make_tasks(200)
    with Judges() as judges:
        answers = answer(pipe, tasks, settings, judges=judges)               the pipeline's own attention
        fast = answer(pipe, tasks, settings, policy="wan-fast", judges=judges)
    table(answers), agreement(fast.shown, answers.shown), paired(fast.right, answers.right)

Every object of a task is a combination of shape, colour and direction that training never showed.
"""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanfp4.policy import Policy
from wanfp4.samples.checker import Clip, Judgement, Verdict, analyse, judge
from wanfp4.samples.data import BACKGROUNDS, HELD_OUT, Spec, caption, prompt_of, random_spec

if TYPE_CHECKING:
    import torch

    from wanfp4.processors.model_info import Settings
    from wanfp4.receipt import Receipt

Json = dict[str, Any]

ATTRIBUTES = ("shape", "colour", "direction", "count")


@dataclass(frozen=True)
class Task:
    """A prompt, the seed of its noise, and what the clip should show."""

    spec: Spec
    prompt: str
    seed: int


def make_tasks(clips: int = 200, *, pairs: float = 0.3, seed: int = 0) -> list[Task]:
    """`clips` tasks, a share of `pairs` of two objects, the rest of one: every held-out combination equally often.

    Half the prompts are plain ("a red circle moving right"), half paraphrases of the training grammar. `seed` draws
    prompts and noise.
    """
    rng = random.Random(f"tasks {seed}")
    double = round(clips * pairs)
    specs = []
    for i in range(clips - double):
        if i % len(HELD_OUT) == 0:
            order = rng.sample(HELD_OUT, len(HELD_OUT))
        specs.append(Spec((order[i % len(HELD_OUT)],), BACKGROUNDS[i % len(BACKGROUNDS)]))
    specs += [random_spec(rng, HELD_OUT, objects=2) for _ in range(double)]
    plain = [i % 2 == 0 for i in range(clips)]
    prompts = [
        prompt_of(s, background=rng.random() < 0.5) if p else caption(rng, s) for s, p in zip(specs, plain, strict=True)
    ]
    return [Task(s, p, rng.getrandbits(31)) for s, p in zip(specs, prompts, strict=True)]


class Judges:
    """Runs the checker in worker processes, so that it reads clips while the next are made; `workers=0` for none."""

    def __init__(self, workers: int | None = None) -> None:
        cores = os.cpu_count() or 1
        self.workers = workers if workers is not None else min(8, cores - 1)
        # Ctrl-C goes to the whole group of processes: this one deals with it, and the workers end with it.
        self._pool = (
            ProcessPoolExecutor(
                self.workers,
                mp_context=get_context("spawn"),
                initializer=signal.signal,
                initargs=(signal.SIGINT, signal.SIG_IGN),
            )
            if self.workers
            else None
        )

    def submit(self, clip: Clip) -> Future[Verdict]:
        """The verdict on a clip, sooner or later."""
        if self._pool is not None:
            return self._pool.submit(analyse, clip)
        done: Future[Verdict] = Future()
        done.set_result(analyse(clip))
        return done

    def __enter__(self) -> Judges:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Answers:
    """What a pipeline made of tasks. `clips` are uint8 [T, H, W, 3]; `receipt` says what a policy ran, None without."""

    name: str
    tasks: Sequence[Task]
    verdicts: Sequence[Verdict]
    seconds: float
    clips: Sequence[Clip] = field(repr=False, default=())
    receipt: Receipt | None = None

    @property
    def judgements(self) -> list[Judgement]:
        return [judge(v, t.spec.objects) for v, t in zip(self.verdicts, self.tasks, strict=True)]

    @property
    def right(self) -> list[bool]:
        """For each task, whether everything is as asked."""
        return [judgement.right for judgement in self.judgements]

    @property
    def shown(self) -> list[str]:
        """For each task, what the clip shows, in words that are equal when two clips agree."""
        return [", ".join((str(v.count), *map(" ".join, v.answers))) for v in self.verdicts]


def default_batch(device: torch.device) -> int:
    """How many clips are made at a time unless told."""
    return 64 if device.type == "cuda" else 2


def generate(
    pipe: Any,
    tasks: Sequence[Task],
    settings: Settings,
    *,
    batch: int = 1,
    done: Callable[[int], None] = lambda n: None,
) -> Iterator[Clip]:
    """The clips of `tasks`, uint8 [T, H, W, 3], made `batch` at a time; noise is drawn on the CPU, task by task.

    `done(n)` hears of every finished clip. Raises SettingsError for settings the model cannot make.
    """
    import torch

    from wanfp4.processors.pipelines import decode_latents, info_of, shifted

    info_of(pipe).check(settings)
    pipe.set_progress_bar_config(disable=True)
    with shifted(pipe, settings.shift):
        for i in range(0, len(tasks), batch):
            part = tasks[i : i + batch]
            latents = pipe(
                prompt=[task.prompt for task in part],
                negative_prompt=[settings.negative or ""] * len(part),
                height=settings.height,
                width=settings.width,
                num_frames=settings.frames,
                num_inference_steps=settings.steps,
                guidance_scale=settings.guidance,
                generator=[torch.Generator("cpu").manual_seed(task.seed) for task in part],
                output_type="latent",
            ).frames
            for latent in latents:
                yield decode_latents(pipe, latent[None])
                done(1)


def answer(
    pipe: Any,
    tasks: Sequence[Task],
    settings: Settings,
    *,
    judges: Judges,
    policy: str | Path | Policy | None = None,
    backend: str | None = None,
    strict: bool = False,
    batch: int = 1,
    keep: bool = False,
    done: Callable[[int], None] = lambda n: None,
) -> Answers:
    """Generate and read back all tasks; with `policy`, through `wanfp4.patch`, restored afterwards. `keep` keeps clips.

    Raises what `wanfp4.patch` raises, and SettingsError.
    """
    from wanfp4.policy import get_policy
    from wanfp4.processors.patch import patch

    started, futures, clips = time.perf_counter(), [], []
    chosen = None if policy is None else get_policy(policy)
    handle = None if chosen is None else patch(pipe, chosen, backend, strict=strict)
    try:
        for clip in generate(pipe, tasks, settings, batch=batch, done=done):
            futures.append(judges.submit(clip))
            if keep:
                clips.append(clip)
    finally:
        if handle is not None:
            handle.restore()
    receipt = None if handle is None else handle.receipt()
    verdicts = [future.result() for future in futures]
    name = "the pipeline's own attention" if chosen is None else chosen.name
    return Answers(name, tasks, verdicts, time.perf_counter() - started, clips, receipt)


def wilson(right: int, of: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of a rate, 95 % by default (Wilson 1927); (0, 1) when there is nothing to count."""
    if not of:
        return 0.0, 1.0
    rate, squared = right / of, z * z / of
    centre = (rate + squared / 2) / (1 + squared)
    half = z * math.sqrt(rate * (1 - rate) / of + squared / (4 * of)) / (1 + squared)
    return max(0.0, centre - half), min(1.0, centre + half)


def rate(marks: Sequence[bool]) -> Json:
    """How many marks are right: counts, share and 95 % interval."""
    right = sum(marks)
    low, high = wilson(right, len(marks))
    share = round(right / len(marks), 4) if marks else None
    return {"right": right, "of": len(marks), "rate": share, "low": round(low, 4), "high": round(high, 4)}


def table(answers: Answers) -> Json:
    """Rates for one and for two objects: shape, colour and direction per object, count and "all" per clip.

    The intervals take objects of one clip as independent. `by_shape` and `by_background` are whole clips of one object.
    """
    out: Json = {}
    judged = list(zip(answers.tasks, answers.judgements, strict=True))
    for name, number in (("one", 1), ("two", 2)):
        rows = [(task, j) for task, j in judged if len(task.spec.objects) == number]
        if not rows:
            continue
        marks = {a: [m for _, j in rows for m in getattr(j, a)] for a in ("shape", "colour", "direction")}
        marks |= {"count": [j.count for _, j in rows], "all": [j.right for _, j in rows]}
        out[name] = {key: rate(values) for key, values in marks.items()}
    single = [(task.spec, j.right) for task, j in judged if len(task.spec.objects) == 1]
    groups: dict[str, dict[str, list[bool]]] = {"by_shape": {}, "by_background": {}}
    for spec, right in single:
        groups["by_shape"].setdefault(spec.objects[0].shape, []).append(right)
        groups["by_background"].setdefault(spec.background, []).append(right)
    for group, rows_of in groups.items():
        out[group] = {key: rate(values) for key, values in sorted(rows_of.items())}
    return out


def agreement(shown: Sequence[str], reference: Sequence[str]) -> Json:
    """How often two pipelines show the same (`Answers.shown`): equal objects and equal count."""
    return rate([a == b for a, b in zip(shown, reference, strict=True)])


def paired(right: Sequence[bool], reference: Sequence[bool]) -> Json:
    """Is one better than the other at the same tasks (`Answers.right`)? Only tasks that one alone gets right tell.

    lost    tasks that the reference gets right and this one does not.
    gained  the other way round.
    p       exact two-sided McNemar test (McNemar 1947): how likely so uneven a split or a more uneven one is if both
            are equally good, so that each such task falls either way like a coin. 1 when there is none.
    """
    from scipy.stats import binomtest

    pairs = list(zip(right, reference, strict=True))
    lost, gained = sum(b and not a for a, b in pairs), sum(a and not b for a, b in pairs)
    p = float(binomtest(lost, lost + gained).pvalue) if lost + gained else 1.0
    return {"lost": lost, "gained": gained, "p": float(f"{p:.6g}")}


def holm(values: Sequence[float]) -> list[float]:
    """p-values of several tests at once, adjusted (Holm 1979): below 0.05 in at most one family of twenty by chance."""
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, i in enumerate(sorted(range(len(values)), key=lambda i: values[i])):
        largest = max(largest, min(1.0, (len(values) - rank) * values[i]))
        adjusted[i] = float(f"{largest:.6g}")
    return adjusted


def mistakes(answers: Answers) -> list[Json]:
    """The tasks whose clip is not as asked, with what the checker saw."""
    rows = zip(answers.tasks, answers.verdicts, answers.judgements, strict=True)
    return [
        {"prompt": t.prompt, "seed": t.seed, "asked": [str(o) for o in t.spec.objects], "shown": str(v)}
        for t, v, j in rows
        if not j.right
    ]


def lines(name: str, figures: Json) -> list[str]:
    """A table of `table` as text, one line for one object and one for two."""
    out = []
    for key in ("one", "two"):
        if key in figures:
            cells = [
                f"{attribute} {100 * f['rate']:.1f} % [{100 * f['low']:.1f}, {100 * f['high']:.1f}]"
                for attribute, f in figures[key].items()
            ]
            out.append(
                f"{name}, {key} object{'s' if key == 'two' else ''} ({figures[key]['all']['of']} clips): "
                + ", ".join(cells)
            )
    return out
