"""report.html and report.md of a search, from its JSON values; the words and markup are in the templates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from wanfp4.quality.aggregate import Json
from wanfp4.quality.intervals import few
from wanfp4.quality.map_pages import spread
from wanfp4.quality.medians import badness
from wanfp4.quality.pages import count, environment, figure, percent
from wanfp4.quality.plots import SERIES_COLOURS, Curve, Dot, scatter_chart, step_chart
from wanfp4.quality.search_files import left, policy_file

KINDS = {
    "searched": "searched",
    "floor": "noise floor",
    "all": "baseline",
    "first-last": "baseline of the same share or time",
    "first-last, best split": "the same steps, split as predicted best",
}


def search_html(data: Json) -> str:
    """The whole page, self-contained."""
    return (
        environment()
        .get_template("search.html.j2")
        .render(r=data, scatter=_scatter(data), charts=[_chart(one, data) for one in data["results"]], **context(data))
    )


def search_markdown(data: Json) -> str:
    """The short form, for a pull request."""
    return environment().get_template("search.md.j2").render(r=data, **context(data))


def readings(data: Json) -> list[str]:
    """What the search found, in sentences, target by target; how well its prediction holds; how sure verdicts are."""
    said = [(text := reading(result))[0].upper() + text[1:] for result in data["results"]]
    added = data["additivity"]
    if added is not None and added["ratio"] is not None:
        randoms = sum(p["kind"] == "random" for p in added["points"])
        said.append(
            f"Squares of single errors predict {randoms} random policies with a median error of "
            f"{percent(added['error'])}, {percent(added['largest'])} at most; what is measured is "
            f"{figure(added['ratio'])} times what is predicted."
        )
    judged = any("against" in row for result in data["results"] for row in result["baselines"])
    if judged and (hint := few([run["prompt"] for run in data["held_out"]])):
        said.append(f"Of the held-out runs: {hint[0].lower()}{hint[1:]}")
    if not data["complete"]:
        said.append("Incomplete: the same search goes on from what is here.")
    return said


def reading(result: Mapping[str, Any]) -> str:
    """One target in words."""
    if not result["kept"]:
        if not result["rounds"]:
            return f"{result['text']}: no policy but BF16 is predicted to keep it."
        closest = min(result["rounds"], key=lambda one: badness(one["measured"]))
        return (
            f"{result['text']}: no policy was verified to keep it in {count(len(result['rounds']), 'round')}; the "
            f"closest had {figure(closest['measured'])}."
        )
    row = result["searched"]
    text = (
        f"{result['text']}: {percent(row['share'])} of attention in 4 bits at {figure(row['time'])} of BF16's "
        f"attention time, with a velocity off by {_off(result, row)}, on held-out runs"
    )
    rivals = [one for one in result["baselines"] if one["kind"].startswith("first-last")]
    for one in rivals[:1]:
        text += f"; {one['name']}: {_off(result, one)}, where {versus(one)}"
    if not all(one.get("exact", True) for one in result["rounds"]):  # a file of an earlier version does not say
        text += ". There were too many sums of times to keep them all, so a policy a little better may exist"
    return text + "."


def _off(result: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """The error of a row, first that which its target judges."""
    mean = f"{_with_interval(row['velocity_mean'])}, mean over steps"
    return f"{figure(row['velocity'])} at the worst step and {mean}" if result["kind"] == "velocity" else mean


def versus(row: Mapping[str, Any]) -> str:
    """The searched policy against a baseline, in words."""
    if "against" not in row:
        return ""
    against = row["against"]
    verdict = {"lower": "the searched policy is lower", "higher": "the searched policy is higher"}.get(
        against["verdict"], against["verdict"]
    )
    apart = "intervals do not overlap" if against["intervals_apart"] else "intervals overlap"
    return f"{verdict}, {apart}"


def _with_interval(one: Mapping[str, Any]) -> str:
    middle = figure(one["median"])
    if not math.isfinite(float(one["low"])):
        return middle
    return f"{middle} ({figure(one['low'])} to {figure(one['high'])})"


def context(data: Json) -> Json:
    """What templates need of a search beside its own values."""
    names = [one["name"] for one in data["candidates"]]
    emulated = any(row["emulated"] for result in data["results"] for row in _rows(result))
    return {
        "readings": readings(data),
        "left": left(data),
        "policy_file": lambda result: policy_file(data, result["label"]),
        "passed": data["complete"] and all(result["kept"] for result in data["results"]),
        "rows": _rows,
        "kinds": KINDS,
        "versus": versus,
        "with_interval": _with_interval,
        "spread_of": spread,
        "group_name": lambda g: _group(data["groups"][g]),
        "bin_name": _bin,
        "colour": lambda name: f"var(--series-{names.index(name) % 6})" if name in names else "transparent",
        "sensitivity": _sensitivity(data),
        "shade": _shade,
        "emulated": emulated,
        "search_runs": len(data["prompts"]) * len(data["seeds"]),
    }


def _rows(result: Mapping[str, Any]) -> list[Json]:
    """The searched policy, if there is one, and its baselines."""
    return [row for row in (result["searched"], *result["baselines"]) if row is not None]


def _group(layers: Sequence[int]) -> str:
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"


def _bin(one: Mapping[str, Any]) -> str:
    first, last = one["steps"][0], one["steps"][-1]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return steps if one["expert"] is None else f"{steps}, {one['expert']}"


def _sensitivity(data: Json) -> dict[str, list[list[Any]]]:
    """Of each candidate [groups][bins], as measured."""
    table: dict[str, list[list[Any]]] = {}
    for one in data["sensitivities"]:
        table.setdefault(one["candidate"], []).append(one["rel_l2"])
    return table


def _shade(value: float | str, table: Sequence[Sequence[float | str]]) -> str:
    """0 % to 100 % of the table's largest finite figure."""
    top = max((float(x) for row in table for x in row if math.isfinite(float(x))), default=0.0)
    if not math.isfinite(float(value)):
        return "100%"
    return f"{100 * float(value) / top if top else 0:.0f}%"


def _chart(result: Mapping[str, Any], data: Json) -> Json | None:
    """The error of every step: the searched policy, all fast, first and last steps in BF16."""
    if result["searched"] is None:
        return None
    shown = [row for row in _rows(result) if row["kind"] != "floor"][:SERIES_COLOURS]
    curves = []
    for i, row in enumerate(shown):
        values = [float(v) for v in row["per_step"]]
        curves.append(Curve(row["name"], i, values, values, values))
    listed = "; ".join(f"{c.label}: {', '.join(figure(v) for v in c.median)}" for c in curves)
    return {
        "svg": step_chart(curves, data["steps"], "relative L2", f"Velocity error by step. {listed}."),
        "legend": [{"name": c.label, "colour": f"var(--series-{c.index})"} for c in curves],
    }


def _scatter(data: Json) -> str | None:
    if data["additivity"] is None:
        return None
    points = [p for p in data["additivity"]["points"] if math.isfinite(float(p["measured"]))]
    if not points:
        return None
    dots = [Dot(float(p["predicted"]), float(p["measured"]), 1 if p["kind"] == "verified" else 0) for p in points]
    listed = "; ".join(
        f"{p['name']}: {figure(p['predicted'])} predicted, {figure(p['measured'])} measured" for p in points
    )
    legend = ["random, on the runs searched on", "searched, on held-out runs"]
    described = f"Predicted against measured velocity error. {listed}."
    return scatter_chart(dots, legend, "predicted", "measured", described)
