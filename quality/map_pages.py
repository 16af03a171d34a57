"""map.html and map.md from a map's JSON values (`AttentionMap.to_dict`); the words and markup are in the templates."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from wanfp4.quality.aggregate import Json
from wanfp4.quality.attribution import BASE
from wanfp4.quality.intervals import few
from wanfp4.quality.medians import badness, median
from wanfp4.quality.pages import cosine, environment, figure, percent, ratio
from wanfp4.quality.shadow import FIGURES


@dataclass(frozen=True)
class Shown:
    """How a figure looks on a page: the unit or range a heading gives, one sentence on it, which end is shaded."""

    unit: str
    meaning: str
    shade: str = "high"  # "high", or "low" for figures whose small values are the bad ones


SHOWN = {
    "rel_l2": Shown(
        "no unit",
        "‖policy − own‖ / ‖own‖ of the attention output over all tokens and heads, own being the pipeline's own "
        "attention on the same q, k, v. 0 is equal.",
    ),
    "cosine": Shown("−1 to 1", "⟨policy, own⟩ / (‖policy‖·‖own‖) of the attention output; 1 is one direction.", "low"),
    "floor": Shown(
        "no unit",
        "The same relative L2, of the pipeline's own attention against exact float32 attention of the sampled rows: "
        "what its own rounding and order of sums make. Errors of this height say nothing about a policy.",
    ),
    "unexplained": Shown(
        "no unit",
        "Relative L2 of the policy's result against what the reference makes of the same numerics, in sampled rows: "
        "the part of the error that is no choice of the policy. Above 4096 keys it holds some rounding of Q and K.",
    ),
    "zero_codes": Shown("share", "Share of P's entries that the format rounds to 0; in a sample of rows."),
    "clipped": Shown(
        "share", "Share of P's entries larger than the largest value that their block can hold; in a sample of rows."
    ),
    "largest_logit": Shown("natural units", "Largest |q·k/√D| over all keys; in a sample of rows."),
    "logit_std": Shown(
        "natural units", "Spread of the logits: the root of a row's variance over keys, averaged over sampled rows."
    ),
    "entropy": Shown(
        "nats",
        "−Σ p·ln p of a row's exact probabilities, mean over sampled rows: 0 looks at one key, ln(keys) at all alike.",
        "low",
    ),
}
assert list(SHOWN) == list(FIGURES)

# Beyond this many cells the page shows no heads: it would no longer open at once. map.json has them.
MOST_CELLS = 400_000


def map_html(data: Json) -> str:
    """The whole page, self-contained."""
    grids = grids_of(data)
    return (
        environment()
        .get_template("map.html.j2")
        .render(
            r=data,
            grids=grids,
            embedded=Markup(_script_json({"grids": grids["cells"], "heads": grids["heads"], "shown": _shown()})),
            **context(data),
        )
    )


def map_markdown(data: Json) -> str:
    """The short form, for a pull request."""
    return environment().get_template("map.md.j2").render(r=data, **context(data))


def value(name: str, x: float | str | None, digits: int = 3) -> str:
    """A figure of `SHOWN` as pages write it; shares as per cent without the sign, "–" for what was not measured."""
    if x is None:
        return "–"
    if not math.isfinite(float(x)):
        return "NaN" if math.isnan(float(x)) else "infinite"
    if name == "cosine":
        return cosine(x)
    number = float(x) * (100 if name in ("zero_codes", "clipped") else 1)
    if abs(number) >= 100 or number == 0:
        return f"{number:.0f}"
    return f"{number:#.{digits}g}".rstrip(".")  # with the zeros at the end, so that columns line up


def spread(name: str, one: Mapping[str, Any] | None) -> str:
    """The interval of a figure, or an empty text for a single run."""
    if one is None or math.isnan(float(one["low"])):
        return ""
    low, high = value(name, one["low"], 2), value(name, one["high"], 2)
    return "" if low == high else f"{low} to {high}"


def readings(data: Json) -> list[str]:
    """What the map says, in sentences."""
    s = data["summary"]
    if not data["runs"]:
        return ["No run has finished yet."]
    error = s["overall"]["rel_l2"]
    between = spread("rel_l2", error)
    over = s["over_floor"]
    floor = "" if over is None else f", {ratio(figure(over, 2))} times what the pipeline's own rounding makes"
    if over is not None and float(over) <= 1:
        floor = ": inside the noise floor, what the pipeline's own rounding makes"
    said = [f"The median call is off by {percent(error['median'])}{f' ({between})' if between else ''}{floor}."]
    broken = sum(any(run["figures"]["rel_l2"][i] == "NaN" for run in data["runs"]) for i in range(len(data["cells"])))
    if broken:
        some = f"In {broken} of {len(data['cells'])} cells the policy gave NaN or infinity in a run."
        said = [some] if error["median"] == "NaN" else [some, *said]
    layers = [one for one in s["layers"] if "rel_l2" in one]
    if len(layers) > 1:
        ordered = sorted(layers, key=lambda one: badness(one["rel_l2"]["median"]))
        best, worst = ordered[0], ordered[-1]
        said.append(
            f"By layer it goes from {value('rel_l2', best['rel_l2']['median'])} ({_layer(best, data)}) to "
            f"{value('rel_l2', worst['rel_l2']['median'])} ({_layer(worst, data)})."
        )
    if count := s["standing_out"]:
        more = {1: "", 2: " One more place stands out."}.get(count, f" {count - 1} more places stand out.")
        said.append(f"Most suspicious: {s['suspects'][0]['text']}.{more}")
    else:
        said.append("No layer, step or cell stands out from what its row and column let expect.")
    if data["attribution"]:
        said.append(data["attribution"]["sentence"])
    return said


def context(data: Json) -> Json:
    """What templates need of a map beside its own values."""
    finished = sum(run["complete"] for run in data["runs"])
    return {
        "pairs": len(data["prompts"]) * len(data["seeds"]),
        "finished": finished,
        "readings": readings(data),
        "figures": FIGURES,
        "shown": SHOWN,
        "value": value,
        "spread_of": spread,
        "layer_name": lambda one: _layer(one, data),
        "dual": len({cell[0] for cell in data["cells"]}) > 1,
        "base": BASE,
        "own": data["attention"],
        "standing_out": [one for one in data["summary"]["suspects"] if one["stands_out"]],
        "few": few([run["prompt"] for run in data["runs"]]),
        "fallbacks": sum(run["receipt"]["fallbacks"] for run in data["runs"]),
    }


def _layer(one: Mapping[str, Any], data: Json) -> str:
    name = f"layer {one['layer']}" if one["blocks"] == "blocks" else f"{one['blocks']} {one['layer']}"
    return name if len({cell[0] for cell in data["cells"]}) == 1 else f"{one['expert']} {name}"


def grids_of(data: Json) -> Json:
    """Formatted medians over runs, as tables: layers × steps for each figure and branch, and layers × heads.

    cells  {figure: {branch: [layers][steps]}}; heads the same as {figure: {"": [layers][heads]}}, or None.
    """
    places = data["cells"]
    rows = list(dict.fromkeys((blocks, layer) for _, blocks, layer, _, _ in places))
    steps = sorted({step for _, _, _, step, _ in places})
    branches = list(dict.fromkeys(branch for *_, branch in places))
    at = {(blocks, layer, step, branch): i for i, (_, blocks, layer, step, branch) in enumerate(places)}
    cells: Json = {}
    for name in FIGURES:
        middle = _medians([run["figures"][name] for run in data["runs"]])
        cells[name] = {
            branch: [
                [value(name, middle[at[key]] if (key := (*row, step, branch)) in at else None, 2) for step in steps]
                for row in rows
            ]
            for branch in branches
        }
    heads = None
    if data["per_head"] and data["runs"] and len(places) * data["heads"] * len(data["runs"]) <= MOST_CELLS:
        heads = {name: {"": _of_heads(data, name)} for name in FIGURES}
    by_head = list(dict.fromkeys((e, b, n) for e, b, n, _, _ in places))
    return {
        "rows": [{"blocks": blocks, "layer": layer} for blocks, layer in rows],
        "head_rows": [{"expert": e, "blocks": b, "layer": n} for e, b, n in by_head],
        "steps": steps,
        "branches": branches,
        "cells": cells,
        "heads": heads,
        "shade": shade,
    }


def worst_branch(data: Json) -> str:
    """The guidance branch whose median cell is off the most, NaN being worst; the first of equals."""
    middle = _medians([run["figures"]["rel_l2"] for run in data["runs"]])
    by_branch: dict[str, list[int]] = {}
    for i, (*_, branch) in enumerate(data["cells"]):
        by_branch.setdefault(branch, []).append(i)
    errors = {branch: _medians([[middle[i]] for i in _counted(data, of)])[0] for branch, of in by_branch.items()}
    return max(errors, key=lambda branch: -1.0 if (error := errors[branch]) is None else badness(error))


def _of_heads(data: Json, name: str) -> list[list[str]]:
    """[layers][heads] medians over runs, steps and branches."""
    table = []
    for where in dict.fromkeys(tuple(cell[:3]) for cell in data["cells"]):
        index = _counted(data, [i for i, cell in enumerate(data["cells"]) if tuple(cell[:3]) == where])
        values = [run["heads"][name][i] for run in data["runs"] for i in index if run["heads"][name][i] is not None]
        table.append([value(name, x, 2) for x in _medians(values)])
    return table


def _counted(data: Json, cells: Sequence[int]) -> Sequence[int]:
    """Those of some cells that medians are of: without calls in the pipeline's own attention, unless all are."""
    return [i for i in cells if data["ran"][i] != "exact"] or cells


def _medians(rows: Sequence[Sequence[Any]]) -> list[float | None]:
    """Medians of columns; None where no row has a figure, NaN where one of them is NaN."""
    known = ([float(v) for v in column if v is not None] for column in zip(*rows, strict=True))
    return [median(column) if column else None for column in known]


def shade(text: str, table: Sequence[Sequence[str]], name: str) -> str:
    """How much of a cell's colour shows, from the figures as written: 0 % to 100 % between the ends of `table`."""
    numbers = [x for row in table for cell in row if math.isfinite(x := _number(cell))]
    x = _number(text)
    if text == "–" or not numbers:
        return "0%"
    if not math.isfinite(x):
        return "100%"
    low, high = min(numbers), max(numbers)
    share = (x - low) / (high - low) if high > low else 0.0
    return f"{100 * (1 - share if SHOWN[name].shade == 'low' and high > low else share):.0f}%"


def _number(text: str) -> float:
    """What a cell's text says; NaN for no figure."""
    try:
        return float(text.removeprefix("> "))
    except ValueError:
        return math.nan


def _shown() -> Json:
    return {
        name: {"title": title, "unit": _unit(name), "meaning": SHOWN[name].meaning, "shade": SHOWN[name].shade}
        for name, title in FIGURES.items()
    }


def _unit(name: str) -> str:
    return "per cent" if SHOWN[name].unit == "share" else SHOWN[name].unit


def _script_json(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
