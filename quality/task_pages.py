"""task.html, task.md and a text table from a task table's JSON values; the words and markup are in the templates.

`data` is what `wanfp4 drift --task` writes as task.json (docs/drift.md). Figures are per cent with 95 % intervals.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from wanfp4.quality.aggregate import Json
from wanfp4.quality.pages import environment, figure
from wanfp4.quality.plan import FLOOR, REFERENCE

# Keys of a row's table, with how a heading says them.
GROUPS = {"one": "one object", "two": "two objects"}
ATTRIBUTES = ("shape", "colour", "direction", "count")
# Differences that chance makes more often than this are called noise.
SIGNIFICANT = 0.05

DTYPES = {"bfloat16": "BF16", "float16": "FP16", "float32": "FP32"}


def task_html(data: Json) -> str:
    """The whole page, self-contained."""
    return environment().get_template("task.html.j2").render(r=data, **context(data))


def task_markdown(data: Json) -> str:
    """The table with what it needs to be understood, to paste into a README or a pull request."""
    return environment().get_template("task.md.j2").render(r=data, **context(data))


def task_lines(data: Json) -> list[str]:
    """The table in columns, for a terminal: rates in per cent, without intervals."""
    shared = context(data)
    heads = [f"{group}: {a}" if i == 0 else a for group in shared["groups"].values() for i, a in enumerate(ATTRIBUTES)]
    rows = [["", *heads, f"as {shared['own']}", "as asked", "lost/gained", "p", "ran on"]]
    for row in data["rows"]:
        marks = [percent(f) if f else "–" for f in shared["cells"](row)]
        agrees, split = row.get("agreement"), row.get("paired")
        rows.append(
            [
                shared["titles"][row["name"]],
                *marks,
                percent(agrees) if agrees else "–",
                percent(row["as_asked"]),
                f"{split['lost']}/{split['gained']}" if split else "–",
                p_value(split["adjusted"]) if split else "–",
                ran_on(row),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, *([shared["partial"]] if shared["partial"] else [])]


def cells(row: Json, groups: Iterable[str]) -> list[Json | None]:
    """The rates of a row in the order of the columns; None where there was nothing to count."""
    return [row["table"].get(group, {}).get(a) for group in groups for a in ATTRIBUTES]


def percent(rate: Json) -> str:
    return f"{100 * rate['right'] / rate['of']:.1f}"


def interval(rate: Json) -> str:
    return f"{100 * rate['low']:.1f}–{100 * rate['high']:.1f}"


def p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else "1" if p == 1 else figure(p, 2)


def ran_on(row: Json) -> str:
    calls = ", ".join(row["backend"]["calls"]) or "the pipeline"
    return calls + (" (emulated)" if row["backend"]["emulated"] else "")


def reading(row: Json) -> str:
    """What the paired comparison of a row with the pipeline's own attention says, in words."""
    split = row["paired"]
    if not split["lost"] + split["gained"]:
        return "gets exactly the same clips right"
    said = f"loses {split['lost']} and gains {split['gained']} of {row['as_asked']['of']} clips"
    if split["adjusted"] >= SIGNIFICANT:
        return f"{said}, a difference inside noise (p {p_value(split['adjusted'])})"
    way = "worse" if split["lost"] > split["gained"] else "better"
    return f"{said}: {way}, beyond what chance does (p {p_value(split['adjusted'])})"


def context(data: Json) -> Json:
    """What templates need of a task table beside its own values."""
    own = DTYPES.get(data["model"]["dtype"], data["model"]["dtype"])
    rows = data["rows"]
    groups = {name: title for name, title in GROUPS.items() if data["tasks"][name]}
    titles = {row["name"]: row["name"] for row in rows}
    titles[REFERENCE] = own
    return {
        "own": own,
        "titles": titles,
        "groups": groups,
        "attributes": ATTRIBUTES,
        "several": len(data["planned"]) > 3,
        "partial": _partial(data),
        "floor": next((row for row in rows if row["name"] == FLOOR), None),
        "policies": [row for row in rows if row["name"] not in (REFERENCE, FLOOR)],
        "inside": _inside(rows),
        "reading": reading,
        "cells": functools.partial(cells, groups=groups),
        "percent": percent,
        "interval": interval,
        "p_value": p_value,
        "ran_on": ran_on,
    }


def _partial(data: Json) -> str | None:
    """What is missing, in words; None when nothing is."""
    if data["complete"]:
        return None
    finished = {row["name"] for row in data["rows"]}
    missing = [name for name in data["planned"] if name not in finished]
    return f"Partial: {len(finished)} of {len(data['planned'])} rows are finished; missing: {', '.join(missing)}."


def _inside(rows: Sequence[Json]) -> list[str]:
    """Names of the policies whose difference from the pipeline's own attention is noise."""
    policies = [row for row in rows if row["name"] not in (REFERENCE, FLOOR)]
    return [row["name"] for row in policies if row["paired"]["adjusted"] >= SIGNIFICANT]
