"""Where an attention map stands out: cells, layers, heads and steps ranked by how far they are from what is usual.

The error of a cell is taken as a product, (usual) × (layer) × (step): log e = μ + r + c + residual, fitted by Tukey's
median polish, which a few damaged rows or columns do not pull. Three kinds of culprit then show in three places: a
layer or head that is wrong at every step in r, a step that is wrong in every layer in c, one cell in the residual.
Steps are held against their neighbours, because errors drift along the noise schedule.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from wanfp4.quality.aggregate import Json, number
from wanfp4.quality.shadow import Place

# Scores take errors outside for as good, or as bad, as these: 0 of a call that nothing was rounded in, NaN of a broken
# one.
SMALLEST, LARGEST = 1e-8, 1e3
# What a backend may differ from the reference: output rounded to 16 bits, another order of sums, codes on a boundary.
TOLERATED = 0.02
# A deviation counts in units of what is usual among its like, but of no less than 5 %.
LEAST_SPREAD = math.log(1.05)
# What stands out: so many of those units, and at least half as large again as usual.
SCORE, FACTOR = 5.0, 1.5

Floats = npt.NDArray[np.float64]
_T = TypeVar("_T")
Cells = Mapping[Place, _T]
_Errors = list[list[float | None]]


@dataclass(frozen=True)
class Suspect:
    """A place whose error is larger than usual.

    kind   "layer" (all its steps), "step" (all its layers) or "cell" (one layer and step); with `head` that head alone.
    figure the figure that stands out: "unexplained", or "rel_l2".
    error  its median there, NaN where half of the results or more are broken; `usual` is what the rest of the map lets
           expect.
    score  the deviation in units of the usual spread; larger is more suspicious.
    branches  in which it stands out.
    """

    kind: str
    expert: str
    blocks: str | None
    layer: int | None
    head: int | None
    step: int | None
    branches: tuple[str, ...]
    error: float
    usual: float
    score: float
    figure: str = "rel_l2"

    @property
    def factor(self) -> float:
        return (LARGEST if math.isnan(self.error) else self.error) / self.usual

    @property
    def stands_out(self) -> bool:
        return bool(self.score >= SCORE and self.factor >= FACTOR)  # figures may be NumPy's, which JSON has not

    def to_dict(self) -> Json:
        figures = {"error": number(self.error), "usual": number(self.usual), "score": number(self.score)}
        return {**vars(self), "branches": list(self.branches), **figures, "stands_out": self.stands_out}

    @property
    def where(self) -> str:
        """The place in words: steps counted from 1, layers and heads from 0."""
        parts = []
        if self.layer is not None:
            parts.append(f"layer {self.layer}" + ("" if self.blocks in (None, "blocks") else f" of {self.blocks}"))
        if self.head is not None:
            parts.append(f"head {self.head}")
        parts.append("all steps" if self.step is None else f"step {self.step + 1}")
        if self.kind == "step":
            parts.append("all layers")
        if len(self.branches) == 1 and self.branches[0]:
            parts.append(f"{self.branches[0]} only")
        return f"{self.expert}, {', '.join(parts)}"

    def __str__(self) -> str:
        if math.isnan(self.error):
            what = "the result holds" if self.kind == "cell" else "half of the results or more hold"
            return f"{self.where}: {what} NaN or infinity"
        if self.figure == "unexplained":  # as good as 0 elsewhere
            return f"{self.where}: the result is {self.error:.3g} off what the numerics make of the same q, k, v"
        times = "" if self.factor > 1e4 else f", {self.factor:.3g} times the usual {self.usual:.3g}"
        return f"{self.where}: relative L2 {self.error:.3g}{times}"

    def overlaps(self, other: Suspect) -> bool:
        """Whether one of the two places holds the other."""
        pairs = [(getattr(self, n), getattr(other, n)) for n in ("layer", "blocks", "head", "step")]
        wider = all(a is None or a == b for a, b in pairs) or all(b is None or a == b for a, b in pairs)
        return self.expert == other.expert and wider


def suspects(
    cells: Cells[float],
    heads: Cells[Sequence[float]] | None = None,
    *,
    keep: int | None = 10,
    figure: str = "rel_l2",
    least: float = SMALLEST,
) -> list[Suspect]:
    """The most suspicious places of a map, most suspicious first: `keep` of them, or all.

    cells  an error, `figure`, by (expert, blocks, layer, step, branch).
    heads  the same for each head; then layers and cells are named with the head that is to blame.
    least  errors below it are all as good.

    Needs three layers (or heads) and three steps of an expert to tell a cell from its row or column.
    """
    found: dict[tuple[Any, ...], list[Suspect]] = {}
    for expert, branch in dict.fromkeys((place[0], place[4]) for place in cells):
        here = {place: value for place, value in cells.items() if (place[0], place[4]) == (expert, branch)}
        for one in _of_branch(expert, branch, here, heads, least):
            found.setdefault((one.kind, one.expert, one.blocks, one.layer, one.head, one.step), []).append(one)
    merged = []
    for group in found.values():
        worst = max(group, key=lambda s: s.score)
        loud = [s.branches[0] for s in group if s.stands_out] or [worst.branches[0]]
        every = len({place[4] for place in cells if place[0] == worst.expert})
        named = tuple(loud) if len(loud) < every or every == 1 else ()
        merged.append(dataclasses.replace(worst, branches=named, figure=figure))
    merged = _whole_layers(merged)
    # A cell explains less than a layer or step that stands out as much: those first.
    order = {"step": 0, "layer": 1, "cell": 2}
    merged.sort(key=lambda s: (-round(s.score, 6), order[s.kind], s.head is None))
    return merged[:keep]


def _whole_layers(found: Sequence[Suspect]) -> list[Suspect]:
    """Where every head stands out, it is not a head that is to blame: one suspect without a head, the worst one's."""
    groups: dict[tuple[Any, ...], list[Suspect]] = {}
    for one in found:
        groups.setdefault((one.kind, one.expert, one.blocks, one.layer, one.step), []).append(one)
    out: list[Suspect] = []
    for group in groups.values():
        if group[0].head is not None and all(one.stands_out for one in group):
            out.append(dataclasses.replace(max(group, key=lambda s: s.score), head=None))
        else:
            out += group
    return out


def _of_branch(
    expert: str, branch: str, cells: Cells[float], heads: Cells[Sequence[float]] | None, least: float
) -> list[Suspect]:
    layers = list(dict.fromkeys((place[1], place[2]) for place in cells))
    steps = sorted({place[3] for place in cells})

    def table(value: Callable[[Place], float]) -> _Errors:
        """[layers][steps] of errors; None where the map has no cell."""
        places = [[Place(expert, *layer, step, branch) for step in steps] for layer in layers]
        return [[value(p) if p in cells else None for p in row] for row in places]

    def suspect(
        kind: str,
        row: tuple[str | None, int | None, int | None],
        step: int | None,
        there: Sequence[float | None],
        excess: float,
        score: float,
    ) -> Suspect:
        known = [error for error in there if error is not None]
        usual = math.exp(float(np.median([_log(error, least) for error in known])) - excess)
        return Suspect(kind, expert, *row, step, (branch,), _middle(known, least), usual, float(score))

    errors = table(lambda place: cells[place])
    _, by_layer, by_step, rest = polish(_logs(errors, least))
    sudden = _against_neighbours(by_step)
    found = [
        suspect("step", (None, None, None), steps[i], [row[i] for row in errors], sudden[i], score)
        for i, score in enumerate(_scores(sudden))
    ]
    rows: list[tuple[str, int, int | None]] = [(*layer, None) for layer in layers]
    if heads is not None:
        count = len(next(iter(heads.values())))
        of_heads = [table(lambda place, h=h: heads[place][h]) for h in range(count)]  # type: ignore[misc]
        errors = [of_heads[h][i] for i in range(len(layers)) for h in range(count)]
        rows = [(*layer, h) for layer in layers for h in range(count)]
        _, by_layer, _, rest = polish(_logs(errors, least))
    for i, score in enumerate(_scores(by_layer)):
        found.append(suspect("layer", rows[i], None, errors[i], by_layer[i], score))
    for (i, j), score in np.ndenumerate(_scores(rest)):
        if not math.isnan(score):
            found.append(suspect("cell", rows[i], steps[j], errors[i][j : j + 1], float(rest[i, j]), score))
    return found


def _logs(errors: _Errors, least: float) -> Floats:
    """NaN where there is no cell."""
    return np.array([[math.nan if error is None else _log(error, least) for error in row] for row in errors])


def _log(error: float, least: float) -> float:
    return math.log(LARGEST if math.isnan(error) else min(max(error, least), LARGEST))


def _middle(errors: Sequence[float], least: float) -> float:
    """The median, NaN being larger than everything; of two in the middle their geometric mean."""
    ordered = sorted(errors, key=lambda error: (math.isnan(error), error))
    if math.isnan(high := ordered[len(ordered) // 2]):
        return math.nan
    low = max(ordered[(len(ordered) - 1) // 2], least)
    high = max(high, least)
    return low if low == high else math.sqrt(low * high)


def polish(table: Floats, rounds: int = 10) -> tuple[float, Floats, Floats, Floats]:
    """Tukey's median polish of [rows, columns]: overall, row effects, column effects and residuals; they add up.

    NaN is a missing entry; no row and no column may be missing as a whole.
    """
    rest = table.copy()
    rows, columns = np.zeros(len(rest)), np.zeros(rest.shape[1])
    for _ in range(rounds):
        shift = np.nanmedian(rest, axis=1)
        rest, rows = rest - shift[:, None], rows + shift
        shift = np.nanmedian(rest, axis=0)
        rest, columns = rest - shift, columns + shift
    overall = float(np.median(rows) + np.median(columns))
    return overall, rows - np.median(rows), columns - np.median(columns), rest


def _against_neighbours(effects: Floats, reach: int = 2) -> Floats:
    """How far each effect is from the middle of up to `reach` neighbours on either side.

    Of an even number of neighbours the middle is all between the middle two: an effect in there is where it should be,
    and one damaged neighbour of two says nothing.
    """
    out = np.zeros_like(effects)
    for i, effect in enumerate(effects):
        around = np.sort([effects[j] for j in range(max(0, i - reach), min(len(effects), i + reach + 1)) if j != i])
        if len(around):
            low, high = around[(len(around) - 1) // 2], around[len(around) // 2]
            out[i] = effect - np.clip(effect, low, high)
    return out


def _scores(deviations: Floats) -> Floats:
    """Deviations from their median in robust standard deviations (1.4826 · MAD), of no less than `LEAST_SPREAD`."""
    centred = deviations - np.nanmedian(deviations)
    return centred / max(1.4826 * float(np.nanmedian(np.abs(centred))), LEAST_SPREAD)
