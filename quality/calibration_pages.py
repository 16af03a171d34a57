"""What a calibration found, in words and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from wanfp4.quality.intervals import HIGHER, LOWER
from wanfp4.quality.pages import markdown

Json = Mapping[str, Any]


def verdict(data: Json) -> list[str]:
    """What came of a fit: the held-out half first, then what was changed."""
    missing = [] if data["recording"]["complete"] else ["The recording is incomplete: runs of it are missing."]
    held = data["halves"]["held-out"]
    kept = [stage for stage in data["stages"] if stage["kept"]]
    base, name = data["base"]["name"], data["policy"]["name"]
    if not kept:
        first = f"No change to {base} is worth it on this model: {name} has its constants."
        return [first, f"Its relative L2 on held-out prompts is {_spread(held['base'])}.", *missing]
    how = {
        LOWER: "lower on held-out prompts, too",
        HIGHER: f"HIGHER on held-out prompts: use {base}",
    }.get(held["verdict"], "not told apart on held-out prompts by these runs")
    return [
        f"{name} against {base}: relative L2 {_number(held['fitted']['median'])} against "
        f"{_number(held['base']['median'])}, {_change(held['change'])}: {how}.",
        *([held["few"]] if held["few"] else []),
        "Changed: " + "; ".join(f"{s['title']} {s['before']} → {s['best']}" for s in kept) + ".",
        *missing,
    ]


def fit_markdown(data: Json) -> str:
    """report.md of a calibration."""
    source, base, policy = data["recording"], data["base"]["name"], data["policy"]["name"]
    halves = data["halves"]
    lines = [
        f"# Calibration: {markdown(policy)} from {markdown(base)}",
        "",
        *(markdown(line) for line in verdict(data)),
        "",
        "Error of a call: relative L2 of the attention output, by the torch reference, against exact attention of the "
        "same unrounded q, k, v. Medians over runs of a run's mean over calls, with 95 % bootstrap intervals over "
        "prompts and seeds.",
        "",
        f"| half | prompts, runs, calls | {markdown(base)} | {markdown(policy)} | change | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for name, half in halves.items():
        counts = f"{half['prompts']}, {half['runs']}, {half['calls']}"
        figures = (_spread(half["base"]), _spread(half["fitted"]), _change(half["change"]), half["verdict"])
        lines.append(f"| {name} | {counts} | {' | '.join(figures)} |")
    lines += [
        "",
        "The fit half chose the constants, so its figures are too good; the held-out half was read afterwards.",
        *(f"Of the {name} half: {half['few']}" for name, half in halves.items() if half["few"]),
        "",
        "## What was chosen",
        "",
        "Errors are means of relative L2 over the calls of the fit half, changes those of the median call. A change is "
        "kept when it gains half a percent and its interval, over prompts and calls, is below 0.",
        "",
        "| | before | error | best of | tried | error | change | kept |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for stage in data["stages"]:
        compared, best = stage["comparison"], stage["best"]
        cells = (
            stage["before"],
            _number(stage["error_before"]),
            f"– ({stage['note']})" if stage["note"] else best,
            str(len(stage["candidates"])),
            _number(stage["error_best"]),
            "–" if compared is None else _change(compared["difference"]),
            "yes" if stage["kept"] else "no",
        )
        lines.append(f"| {stage['title']} | {' | '.join(cells)} |")
    lines += [
        "",
        "## Layers, held-out half",
        "",
        f"| layer | calls | {markdown(base)} | {markdown(policy)} | change |",
        "|---|---|---|---|---|",
    ]
    for layer in halves["held-out"]["layers"]:
        by_layer = (_spread(layer["base"]), _spread(layer["fitted"]), _change(layer["change"]))
        lines.append(f"| {layer['expert']} {layer['layer']} | {layer['calls']} | {' | '.join(by_layer)} |")
    model, settings = source["model"], source["settings"]
    off = data["off_blackwell"]
    lines += [
        "",
        "## Where it comes from",
        "",
        f"- model {markdown(model['model'])}, {model['dtype']}, weights `{model['weights']}`",
        f"- {model['tokens']} tokens, {settings['steps']} steps, guidance {settings['guidance']:g}, "
        f"scheduler {source['scheduler']}; {source['rows']} query rows of a call, all keys; made {source['created']}",
        f"- seeds {', '.join(map(str, source['seeds']))}; prompts to fit:",
        *(f"    - {markdown(source['prompts'][i])}" for i in source["fit_prompts"]),
        "- prompts held out:",
        *(f"    - {markdown(source['prompts'][i])}" for i in source["held_out_prompts"]),
        f"- on Blackwell: {'the kernels compute it' if off is None else 'by emulation only; ' + off}",
        f"- wanfp4 {data['versions']['wanfp4']}, PyTorch {data['versions']['torch']}",
        *([f"- made by `{data['command']}`"] if data["command"] else []),
    ]
    left_out = [(stage["title"], one) for stage in data["stages"] for one in stage["left_out"]]
    if left_out:
        reasons = dict.fromkeys((title, one["why"]) for title, one in left_out)
        lines += ["", "Candidates that were left out:", ""]
        lines += [f"- {title}: {why}" for title, why in reasons]
    return "\n".join(lines) + "\n"


def _number(value: float | str) -> str:
    return f"{float(value):.4f}"


def _spread(one: Json) -> str:
    middle = _number(one["median"])
    if math.isnan(float(one["low"])):
        return f"{middle} (one run)" if one["runs"] == 1 else middle
    return f"{middle} ({_number(one['low'])} to {_number(one['high'])})".replace("-", "−")


def _change(one: Json) -> str:
    def percent(value: float | str) -> str:
        return f"{100 * float(value):+.1f}".replace("-", "−")

    if math.isnan(float(one["low"])):
        return f"{percent(one['median'])} % (one value, so without an interval)"
    return f"{percent(one['median'])} % (95 % interval {percent(one['low'])} to {percent(one['high'])})"
