"""What both training stages share: the loop, checkpoints, averaged weights, seeds, and curves.

A stage is a number of optimisation steps. Everything random in a step follows from (seed, stage, step) alone, so a run
that stops and resumes makes the same steps as one that does not: bit for bit on a CPU; on a GPU up to kernels that sum
in no fixed order.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from wanfp4.errors import OutputError, Wanfp4Error
from wanfp4.quality.files import replacing, write

Json = dict[str, Any]

HELD_OUT = "held-out at "  # figures that share a panel of the curves


class TrainingError(Wanfp4Error):
    """A run that does not learn, or a checkpoint that is not this run's."""


class Stage(Protocol):
    """What `run` trains."""

    name: str
    steps: int
    settings: Json

    def step(self, index: int) -> Mapping[str, Tensor]:
        """Optimisation step `index`, from 0; returns figures as 0-dimensional tensors, so the host need not wait."""

    def check(self, row: Json) -> None:
        """Raise TrainingError when a row of the history shows that the run is lost."""

    def state(self) -> Json:
        """Everything that a resumed run needs."""

    def load(self, state: Json) -> None:
        """Take over what `state` returned."""


def step_random(seed: int, stage: str, step: int) -> random.Random:
    """The source of everything random in one step."""
    return random.Random(f"{seed} {stage} {step}")


def warm_up_and_decay(step: int, steps: int, warm_up: int, decay: float, floor: float = 0.01) -> float:
    """Learning-rate factor: linear warm-up, constant, then linear down to `floor` over the last share `decay`."""
    done = step / steps
    return min(1.0, (step + 1) / warm_up) * (max(floor, min(1.0, (1 - done) / decay)) if decay else 1.0)


class Average:
    """An exponential moving average of parameters, faster at the beginning."""

    def __init__(self, parameters: Iterable[Tensor], limit: float) -> None:
        self.parameters = list(parameters)
        self.limit = limit
        self.values = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the parameters after step `step`, from 0."""
        keep = min(self.limit, (step + 1) / (step + 20))
        torch._foreach_lerp_(self.values, [p.detach() for p in self.parameters], 1 - keep)

    @torch.no_grad()
    def copy_to(self, parameters: Iterable[Tensor]) -> None:
        """Write the averages into parameters, those of another copy of the modules for example."""
        for p, value in zip(parameters, self.values, strict=True):
            p.copy_(value)

    @torch.no_grad()
    def load(self, values: Sequence[Tensor]) -> None:
        """Take over saved averages."""
        for mine, value in zip(self.values, values, strict=True):
            mine.copy_(value)


class History:
    """The figures of a run: `history.json` and `curves.png` in its folder, both stages together."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "history.json"
        try:
            self.data: Json = json.loads(self.path.read_text(encoding="utf-8")) if self.path.is_file() else {}
        except ValueError as error:
            raise OutputError(f"{str(self.path)!r} is not a history of wanfp4's training: {error}") from None

    def save(self, stage: str, **fields: Any) -> None:
        """Merge fields into a stage's record, and write both files."""
        self.data.setdefault(stage, {}).update(fields)
        write(self.path, json.dumps(self.data, indent=1) + "\n")
        draw_curves(self.data, self.path.with_name("curves.png"))


def checkpoint(folder: Path, stage: str) -> Path:
    """Where a stage's full state is kept: hundreds of MB, for this machine only."""
    return folder / "state" / f"{stage}.pt"


def run(
    stage: Stage,
    folder: Path,
    *,
    stop: Callable[[int], bool] = lambda step: False,
    every: int = 100,
    save_every: int = 2000,
    say: Callable[[str], None] = print,
    begin: int = 0,
) -> bool:
    """Train a stage to its last step, from its checkpoint in `folder` if there is one; True when it is done.

    stop   asked before every step, with its index; True saves and returns False.
    every  steps between rows of the history.
    begin  the first step where there is no checkpoint.

    Raises TrainingError (another run's checkpoint, loss not finite, what `stage.check` finds) and OutputError.
    """
    history, path = History(folder), checkpoint(folder, stage.name)
    record = history.data.get(stage.name, {}) if begin else {}
    rows, seconds, step = record.get("rows", []), record.get("seconds", 0.0), begin
    if path.is_file():
        saved = torch.load(path, map_location="cpu", weights_only=True)
        _same_run(stage, saved["settings"], saved["step"])
        stage.load(saved["state"])
        step, seconds, rows = saved["step"], saved["seconds"], saved["rows"]
        say(f"{stage.name}: resumed at step {step} of {stage.steps}, after {seconds:.0f} s")

    seen: dict[str, list[Tensor]] = {}
    started, first = time.perf_counter(), step
    timed_from, timed_at = step, started

    def save() -> None:
        total = seconds + time.perf_counter() - started
        full = {"settings": stage.settings, "step": step, "seconds": total, "rows": rows, "state": stage.state()}
        with replacing(path) as temporary:
            torch.save(full, temporary)
        history.save(
            stage.name, settings=stage.settings, steps=stage.steps, step=step, seconds=round(total, 1), rows=rows
        )

    while step < stage.steps:
        if stop(step):
            save()
            say(f"{stage.name}: stopped at step {step} of {stage.steps}; the same command goes on from here")
            return False
        figures = stage.step(step)
        for name, value in figures.items():
            seen.setdefault(name, []).append(value.detach())
        step += 1
        if step == first + 3:  # compilation happens in the first steps
            _wait(figures)
            timed_from, timed_at = step, time.perf_counter()
            say(f"{stage.name}: first steps took {timed_at - started:.1f} s")
        if step % every == 0 or step == stage.steps:
            means = {name: float(torch.stack(values).float().mean()) for name, values in seen.items()}
            now = time.perf_counter()
            rate = (step - timed_from) / max(now - timed_at, 1e-9) if step > timed_from else 0.0
            row = {"step": step, "seconds": round(seconds + now - started, 1), "rate": round(rate, 2)}
            row |= {name: round(value, 6) for name, value in means.items()}
            rows.append(row)
            seen = {}
            left = f", {(stage.steps - step) / rate:.0f} s to go" if rate else ""
            shown = " ".join(f"{name} {value:.4g}" for name, value in means.items())
            say(f"{stage.name} {step}/{stage.steps}: {shown}, {rate:.1f} steps/s{left}")
            if bad := [name for name, value in means.items() if not math.isfinite(value)]:
                raise TrainingError(f"{stage.name}: {', '.join(bad)} is not finite at step {step}")
            stage.check(row)
        if step % save_every == 0 and step < stage.steps:
            save()
    save()
    return True


def _same_run(stage: Stage, settings: Json, step: int) -> None:
    """The number of steps may change as long as the rate has not begun to fall; nothing else may."""
    names = sorted(set(settings) | set(stage.settings))
    different = [
        f"{name} is {stage.settings.get(name)!r}, and was {settings.get(name)!r}"
        for name in names
        if name != "steps" and settings.get(name) != stage.settings.get(name)
    ]
    if different:
        raise TrainingError(
            f"the checkpoint of {stage.name} was made with other settings: {'; '.join(different)}. "
            "Take another --out folder, or remove its state folder to begin again"
        )
    begin = min(stage.steps, settings["steps"]) * (1 - settings.get("decay", 0.0))
    if settings["steps"] != stage.steps and step > begin:
        raise TrainingError(
            f"{stage.name} is at step {step}, past step {begin:.0f} where its learning rate begins to fall: "
            f"--steps can no longer change from {settings['steps']} to {stage.steps}"
        )


def _wait(figures: Mapping[str, Tensor]) -> None:
    for value in figures.values():
        value.item()


def draw_curves(history: Json, path: Path) -> None:
    """The rows of all stages as a PNG: a panel for each figure, one for all held-out losses of a stage."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for stage, record in history.items():
        for row in record.get("rows") or []:
            for name in (n for n in row if n not in ("step", "seconds", "rate")):
                panel = f"{stage}: {'held-out loss' if name.startswith(HELD_OUT) else name}"
                panels.setdefault(panel, {}).setdefault(name, []).append((row["step"], row[name]))
    if not panels:
        return
    columns = min(4, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4 * columns, 3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (title, curves) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, columns, number)
        for name, points in curves.items():
            marker = "." if len(points) < 20 else ""
            axes.plot(*zip(*points, strict=True), linewidth=1, marker=marker, label=name.removeprefix(HELD_OUT))
        axes.set_title(title, fontsize=9)
        if "psnr" not in title and all(value > 0 for points in curves.values() for _, value in points):
            axes.set_yscale("log")
        if len(curves) > 1:
            axes.legend(title="noise level", fontsize=6, title_fontsize=6)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=90)
