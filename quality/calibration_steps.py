"""What a calibration tries, step by step, and when a change is worth it. docs/calibration.md has the table."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from wanfp4.errors import PolicyError
from wanfp4.kernels.blackwell import backend as sm100
from wanfp4.policy import Classifier, Guard, guarding
from wanfp4.quality.aggregate import Json, number
from wanfp4.quality.calibration_bench import Bench, Choice
from wanfp4.quality.intervals import LOWER, Comparison, compare

# The coarse grids of the classifiers' coefficients; the search goes on from the best point in steps of half a cell.
AFFINE_GRID = {"A": (1.0, 1.2, 1.4, 1.6, 1.8, 2.0), "B": (0.35, 0.65, 0.95, 1.25, 1.55)}
TWO_PIECE_GRID = {
    "A": (0.25, 0.5, 0.75),
    "B": (0.75, 1.0, 1.25),
    "A2": (1.8, 2.2, 2.6),
    "B2": (-1.6, -0.8, 0.0),
}
HALVINGS = 3
# A smaller gain of the median call is no reason for a change.
LEAST_GAIN = 0.005
# Margins of an anchor that are tried for Direct-P, in octaves. A block's codes depend on where the row's maximum lies
# between two powers of two, so fractions matter, and whole octaves only move exponents.
MARGINS = (0.0, 0.25, 0.5, 0.75)
PEAKS = (1.0, 16.0, 64.0, 256.0, 1024.0, 2688.0)
# Shares of the fit half's calls that a guard with a lower limit would take.
GUARDED_SHARES = (0.25, 0.5, 1.0)
# A policy has one guard for all its numerics.
SHARED = "the base's rules have it, too, and their calls were not measured"


class Stage:
    """One thing that is chosen: candidates tried, the best of them, and whether it is worth a change.

    shared  the guard is that of rules, too, whose calls are not on the bench: it stays.
    """

    def __init__(self, title: str, bench: Bench, before: Choice, bar: Any, *, shared: bool = False) -> None:
        self.title = title
        self.bench = bench
        self.before = before
        self.bar = bar
        self.shared = shared
        self.tried: dict[Choice, tuple[str, float]] = {}
        self.left_out: list[tuple[str, str]] = []
        self.note = ""
        self.comparison: Comparison | None = None
        self.kept = False
        self.best = before
        self.score(describe(before, title), before)

    def score(self, label: str, choice: Choice) -> float:
        """The error of a candidate; each is computed once."""
        if choice not in self.tried:
            self.tried[choice] = label, self.bench.errors(choice).mean
            self.bar.set_description(self.title)
            self.bar.update()
        return self.tried[choice][1]

    def try_(self, guard: Guard | None, **fields: Any) -> float:
        """The error with some numerics changed; infinity for what is not legal, or leaves the Blackwell kernels."""
        try:
            numerics = dataclasses.replace(self.before.numerics, **fields)
        except PolicyError as error:
            self._leave_out(fields, str(error))
            return math.inf
        choice = Choice(numerics, guard)
        lost = off_blackwell(choice)
        if lost is not None and off_blackwell(self.before) is None:
            self._leave_out(fields, f"the Blackwell kernels compute the base and not this: {lost}")
            return math.inf
        return self.score(describe(choice, self.title), choice)

    def decide(self) -> Choice:
        """The best candidate if it is better than what was there, with an interval that says so."""
        self.best = min(self.tried, key=lambda choice: self.tried[choice][1])
        if self.best != self.before:
            better, worse = self.bench.errors(self.best), self.bench.errors(self.before)
            change = [b / a - 1 if a else 0.0 for a, b in zip(worse.values, better.values, strict=True)]
            prompts = [call.prompt for call in self.bench.calls]
            self.comparison = compare(change, [0.0] * len(change), prompts, floor=LEAST_GAIN)
            self.kept = self.comparison.verdict == LOWER
        return self.best if self.kept else self.before

    def to_dict(self) -> Json:
        return {
            "title": self.title,
            "note": self.note,
            "before": self.tried[self.before][0],
            "best": self.tried[self.best][0],
            "kept": self.kept,
            "error_before": number(self.tried[self.before][1]),
            "error_best": number(self.tried[self.best][1]),
            "comparison": None if self.comparison is None else self.comparison.to_dict(),
            "candidates": [{"what": label, "error": number(error)} for label, error in self.tried.values()],
            "left_out": [{"what": what, "why": why} for what, why in dict.fromkeys(self.left_out)],
        }

    def _leave_out(self, fields: Mapping[str, Any], why: str) -> None:
        what = ", ".join(f"{k} {v.label if isinstance(v, Classifier) else v}" for k, v in fields.items())
        self.left_out.append((what, why))


def off_blackwell(choice: Choice) -> str | None:
    """Why the Blackwell kernels do not compute a choice, or None."""
    lost = sm100.limits(choice.numerics)
    n, guard = choice.numerics, choice.guard
    if lost is None and guard is not None and n.p == "mxfp4-direct" and n.row_reference != "shiftless":
        return f"they guard 'shiftless' numerics only, and these have {n.row_reference!r}"
    return lost


SMOOTH_K, SMOOTH_V, ROW_REFERENCE, GUARD, PEAK, COEFFICIENTS = (
    "smooth-k",
    "smooth-v",
    "row-reference",
    "guard",
    "row-peak",
    "classifier",
)


def describe(choice: Choice, title: str) -> str:
    """A candidate in the words of its stage."""
    n, guard = choice.numerics, choice.guard
    if title in (SMOOTH_K, SMOOTH_V):
        return "yes" if (n.smooth_k if title == SMOOTH_K else n.smooth_v) else "no"
    guarded = "no guard" if guard is None else f"guard above {guard.logit_limit:.4g}"
    if title == ROW_REFERENCE:
        margin = f" + {n.margin:g} ({n.margin_unit})" if n.row_reference.startswith("anchor") else ""
        return f"{n.row_reference}{margin}, {guarded}"
    if title == GUARD:
        return guarded
    return f"{n.p_peak:g}" if title == PEAK else n.classifier.label


def _smooth_k(stage: Stage) -> None:
    n = stage.before.numerics
    if n.qk == "exact":
        stage.note = "K is exact"
        return
    stage.try_(stage.before.guard, smooth_k=not n.smooth_k)


def _smooth_v(stage: Stage) -> None:
    n = stage.before.numerics
    if n.v == "exact":
        stage.note = "V is exact"
        return
    stage.try_(stage.before.guard, smooth_v=not n.smooth_v)


def _row_reference(stage: Stage) -> None:
    n, guard = stage.before.numerics, stage.before.guard
    if n.p in ("exact", "bf16"):
        stage.note = f"P in {n.p} does not depend on it"
        return
    guards = guarding(n, guard)
    if guards and stage.shared:
        stage.note = f"any other would do without the guard; {SHARED}"
        return
    # What a guard sets is an anchor, and an anchor needs none. One that does nothing here is not this step's matter.
    left = None if guards else guard
    margins = MARGINS if n.p == "mxfp4-direct" else (0.0,)
    for anchor in ("anchor32", "anchor128"):
        for margin in margins:
            stage.try_(left, row_reference=anchor, margin=margin, margin_unit="log2")
        if guard is not None and n.p == "mxfp4-direct":
            stage.try_(left, row_reference=anchor, margin=guard.margin, margin_unit=guard.margin_unit)
    stage.try_(left, row_reference="rowmax", margin=0.0)


def _guard(stage: Stage) -> None:
    n, guard = stage.before.numerics, stage.before.guard
    if guard is None or n.p != "mxfp4-direct":
        stage.note = "there is none" if guard is None else f"P in {n.p} has nothing to guard"
        return
    if stage.shared:
        stage.note = SHARED
        return
    # Without one a model would be unguarded against logits that the recording does not hold, so that is not tried.
    logits = sorted(call.largest for call in stage.bench.calls)
    for share in GUARDED_SHARES:
        limit = 0.0 if share == 1 else float(f"{np.quantile(logits, 1 - share):.3g}")
        if limit < guard.logit_limit:
            stage.try_(dataclasses.replace(guard, logit_limit=limit))


def _peak(stage: Stage) -> None:
    if stage.before.numerics.p != "nvfp4":
        stage.note = f"P in {stage.before.numerics.p} has no two-level scales"
        return
    for peak in PEAKS:
        stage.try_(stage.before.guard, p_peak=peak)


def _coefficients(stage: Stage) -> None:
    old = stage.before.numerics.classifier
    if old.kind == "exp2":
        stage.note = "exp2 has no coefficients"
        return
    grid = TWO_PIECE_GRID if old.kind == "two-piece" else AFFINE_GRID

    def score(point: tuple[float, ...]) -> float:
        values: dict[str, Any] = dict(zip(grid, point, strict=True))
        try:
            classifier = dataclasses.replace(old, **values)
        except PolicyError as error:
            stage.left_out.append((", ".join(f"{n} {v:g}" for n, v in values.items()), str(error)))
            return math.inf
        return stage.try_(stage.before.guard, classifier=classifier)

    points = [tuple(getattr(old, n) for n in grid), *itertools.product(*grid.values())]
    search(score, points, [(axis[1] - axis[0]) / 2 for axis in grid.values()])


STEPS: dict[str, Callable[[Stage], None]] = {
    SMOOTH_K: _smooth_k,
    SMOOTH_V: _smooth_v,
    ROW_REFERENCE: _row_reference,
    GUARD: _guard,
    PEAK: _peak,
    COEFFICIENTS: _coefficients,
}


def search(
    score: Callable[[tuple[float, ...]], float],
    points: Iterable[tuple[float, ...]],
    steps: Sequence[float],
    halvings: int = HALVINGS,
) -> tuple[float, ...]:
    """The best of `points`, improved by coordinate search: a step up or down along each axis while that helps, then
    half the step, `halvings` times. Codes make the error a function with small steps of its own, so no derivatives."""
    best = min(points, key=score)
    least = score(best)
    for halving in range(halvings + 1):
        moved = True
        while moved:
            moved = False
            for axis, step in enumerate(steps):
                for sign in (1, -1):
                    value = round(best[axis] + sign * step / 2**halving, 6)
                    trial = (*best[:axis], value, *best[axis + 1 :])
                    error = score(trial)
                    if error < least:
                        best, least, moved = trial, error, True
                        break
    return best
