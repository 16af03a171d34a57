"""The quality lab's one page, from what `read_lab` found: nothing is measured anew. Words and markup: lab.html.j2."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

import wanfp4
from wanfp4.errors import OutputError, SettingsError, Wanfp4Error
from wanfp4.kernels import dispatch
from wanfp4.policy import Policy
from wanfp4.quality import map_pages, pages, search_pages, task_pages
from wanfp4.quality.aggregate import Json
from wanfp4.quality.attribution import LEVERS, PARTS
from wanfp4.quality.costs import share_in_4_bits
from wanfp4.quality.files import write
from wanfp4.quality.intervals import few
from wanfp4.quality.lab import Lab, Part, machine_of, policies_of
from wanfp4.quality.pages import figure, percent, ratio
from wanfp4.quality.plan import FLOOR, REFERENCE
from wanfp4.quality.report import named_files
from wanfp4.quality.results import BENCH, DAMAGE, owned, refuse_own
from wanfp4.quality.task_pages import SIGNIFICANT

# A page that opens at once and can be mailed, clips included.
LIMIT = 5_000_000

# Of a report's charts the two that a decision needs: what the policy itself costs, and where the clip goes.
CHARTS = [chart for chart in pages.CHARTS if chart[:2] in (("teacher_forced", "velocity"), ("free_running", "latent"))]

# A verdict names no more policies than this one by one; the table has them all.
NAMED = 3

# What a speed is a multiple of, by the name that timings give it.
BASELINES = {
    "sdpa cudnn": "cuDNN's BF16 attention",
    "sdpa": "PyTorch's BF16 attention",
    "own": "the model's own attention",
}


def save_page(lab: Lab, output: str | Path, *, force: bool = False) -> Path:
    """Write the page; returns its path.

    Raises OutputError, also for a file that is there without `force`, and for one that belongs to a part in any case.
    """
    output = Path(output)
    check_output(lab, output)
    if output.exists() and not force:
        raise OutputError(f"{str(output)!r} exists; choose another file, or add --force")
    return write(output, lab_html(lab))


def check_output(lab: Lab, output: Path) -> None:
    """Raise OutputError when writing `output` would replace what a part is made of, or its own page."""
    for part in lab.parts:
        media = named_files(part.data) if part is lab.report else []
        refuse_own(output, owned(part.path, part.result, media), f"the {part.name}")


def lab_html(lab: Lab) -> str:
    """The whole page, self-contained, of at most `LIMIT` bytes: clips that do not fit are left out, and told.

    Raises SettingsError when the parts are too large for that without any clip, or damaged.
    """
    try:
        known = _context(lab)
        template = pages.environment().get_template("lab.html.j2")
        data, room = lab.report.data, {"strip": pages.STRIP_BYTES, "video": pages.VIDEO_BYTES}
        while True:
            html = template.render(**known, **_clips(pages.clips_of(data, lab.files, room)))
            excess = len(html.encode()) - LIMIT
            if excess <= 0:
                return html
            held = sum(room.values())
            if not held:
                size = f"{(LIMIT + excess) / 1e6:.1f} MB of at most {LIMIT / 1e6:.0f}"
                raise SettingsError(f"without any clip the page would have {size}; give fewer maps")
            # What is in the way now may be less than there is room for.
            held = min(held, sum(map(len, lab.files.values())))
            room = {kind: max(0, int(share * (held - excess))) for kind, share in (("strip", 1 / 3), ("video", 2 / 3))}
    except Wanfp4Error:
        raise
    except (*DAMAGE, jinja2.UndefinedError) as error:
        given = ", ".join(part.name for part in lab.parts)
        raise SettingsError(f"something lacks in what was given ({error!r}), or was changed by hand: {given}") from None


def verdict(lab: Lab) -> list[str]:
    """What somebody who decides needs, in sentences: budget, drift, task, speed, and what is missing."""
    report, names = lab.report.data, [section["name"] for section in lab.report.data["policies"]]
    columns = speeds(lab.bench.data) if lab.bench else []
    said = [_budget(report), _drift(report), _task(lab.task.data, names) if lab.task else "No task table was given."]
    least = next((section["name"] for section in _ranked(report)), None)
    said.append(_speed(lab.bench.data, columns, names, least) if lab.bench else "No speed was given.")
    if unfinished := [part.name for part in lab.parts if not part.complete]:
        said.append(f"Unfinished, so this is of what there is so far: {', '.join(unfinished)}.")
    return said


def _budget(report: Json) -> str:
    judged, found = report["budget"], pages.budget_verdict(report)
    if found is None:
        return "No budget was set."
    limits = ", ".join(f"{name} {_bound(limit)}" for name, limit in judged["limits"].items())
    if not judged["violations"]:
        return f"{found}: {limits}."
    by_policy: dict[str, list[str]] = {}
    for v in judged["violations"]:
        text = f"{v['metric']} {figure(v['value'], 4)}, {_bound(judged['limits'][v['metric']])}"
        by_policy.setdefault(v["policy"], []).append(text)
    if len(by_policy) > NAMED:
        return f"{found} by {len(by_policy)} of {len(report['policies'])} policies: {limits}."
    exceeding = [f"{name} ({'; '.join(texts)})" for name, texts in by_policy.items()]
    return f"{found} by {_listed(exceeding)}."


def _bound(limit: Mapping[str, Any]) -> str:
    return f"{'at least' if limit['at_least'] else 'at most'} {limit['limit']:g}"


def _drift(report: Json) -> str:
    """Which policy costs least, and of 4-bit ones which, if that is another."""
    ranked = [s for s in _ranked(report) if math.isfinite(_error(s))]
    if not ranked:
        return "No policy that rounds anything has a finite drift."
    best, others = ranked[0], len(ranked) - 1
    text = f"{best['name']}{f' drifts least of {others + 1} policies' if others else ''}: velocity {_off(best)}"
    if others:
        text += _close(best, ranked[1:])
    four = [s for s in ranked if share_in_4_bits(Policy.from_dict(s["policy"]).numerics) > 0]
    if four and four[0] is not best:
        text += f"; of those in 4 bits {four[0]['name']}, {_off(four[0])}{_close(four[0], four[1:])}"
    if others and pages.summary_intervals(best)["velocity"] is None:
        text += "; of a single run, so nothing says how sure that is"
    if broken := [s["name"] for s in _ranked(report) if not math.isfinite(_error(s))]:
        text += f"; {_listed(broken)} gave NaN or infinity"
    return text + "."


def _ranked(report: Json) -> list[Json]:
    """The policies that round, as far as they have runs, least drift first."""
    rounding = [s for s in report["policies"] if s["runs"] and Policy.from_dict(s["policy"]).rounding]
    return sorted(rounding, key=lambda s: math.inf if math.isnan(_error(s)) else _error(s))


def _error(section: Json) -> float:
    return float(section["summary"]["velocity"]["median"])


def _off(section: Json) -> str:
    between = pages.between(pages.summary_intervals(section)["velocity"], lambda v: figure(100 * float(v), 3))
    floor = float(section["summary"]["over_floor"])
    over = "inside the noise floor" if floor <= 1 else f"{ratio(floor)} times the noise floor"
    return f"off by {percent(_error(section))}{f' (95 %: {between})' if between else ''}, {over}"


def _close(best: Json, others: Sequence[Json]) -> str:
    """Which others may be as good: those whose intervals meet the best one's."""
    mine = pages.summary_intervals(best)["velocity"]
    if mine is None:
        return ""
    near = []
    for section in others:
        one = pages.summary_intervals(section)["velocity"]
        if one is None or one["low"] <= mine["high"]:
            near.append(section["name"])
    if not near:
        return ""
    return (
        f" (the interval of {near[0]} meets it)" if len(near) == 1 else f" (the intervals of {_listed(near)} meet it)"
    )


def _task(task: Json, names: Sequence[str]) -> str:
    """What the paired comparison with the pipeline's own attention says of the report's policies."""
    known = task_pages.context(task)
    rows = [row for row in known["policies"] if row["name"] in names]
    if not rows:
        return "The task table has no finished row of these policies."
    clips, own, compared = task["tasks"]["clips"], known["own"], len(known["policies"])
    worse = [row for row in rows if _differs(row) and row["paired"]["lost"] > row["paired"]["gained"]]
    if worse:
        return f"On the task {'; '.join(row['name'] + ' ' + task_pages.reading(row) for row in worse)}."
    # The most uneven split there can be, by the test that a row's p is of, adjusted for the number of policies.
    if compared * 2.0 ** (1 - clips) >= SIGNIFICANT:
        few = "clip of the task is" if clips == 1 else "clips of the task are"
        return f"{clips} {few} too few to tell a policy from {own}."
    if len(rows) < len(names) or len(rows) == 1:
        none = f"{_listed([row['name'] for row in rows])} {'is' if len(rows) == 1 else 'are'} not"
    else:
        none = f"none of {len(rows)} policies is"
    return f"On the task {none} worse than {own} beyond chance, in {pages.count(clips, 'clip')}."


def _differs(row: Json) -> bool:
    return bool(row["paired"]["adjusted"] < SIGNIFICANT)


def _speed(bench: Json, columns: Sequence[Json], names: Sequence[str], least: str | None) -> str:
    """The fastest policy on hardware made for its formats; times of emulation are called that."""
    where = machine_of(bench)
    timed = [
        (column, name, cell)
        for column in columns
        for name in names
        for cell in column["cells"].get(name, ())
        if cell["speed"] is not None
    ]
    if not timed:
        return "The timings have no speed of these policies."
    native = [one for one in timed if one[2]["native"]]
    if not native:
        low, high = (f(cell["speed"] for _, _, cell in timed) for f in (min, max))
        backends = _listed(sorted({cell["backend"] or "an unnamed backend" for _, _, cell in timed}))
        emulated = all(cell["native"] is False for _, _, cell in timed)
        what = "emulation, which says nothing of the speed of hardware" if emulated else "backends that may emulate"
        return f"The times given are of {what}: {low:.2g} to {high:.2g} times BF16 with {backends} on {where}."
    column, name, cell = max(native, key=lambda one: one[2]["speed"])
    text = f"{name} is fastest: {times(cell['speed'])} times {column['over']} at {column['title']}"
    text += f" ({cell['backend']} on {where})"
    if least is not None and least != name and (mine := column["cells"].get(least)):
        ran = f"{mine[0]['backend'] or 'backend not told'}{', emulated' if mine[0]['native'] is False else ''}"
        text += f"; {least}, which drifts least, has {times(mine[0]['speed'])} ({ran})"
    return f"{text}."


def speeds(bench: Json) -> list[Json]:
    """A column for each attention shape and each model step that was timed.

    `cells` has for each policy what ran it, fastest first: `speed` over the baseline (None without one), `seconds`,
    `backend` (None where timings do not tell) and `native` (False for emulation, None for a backend unknown here).
    """
    native: dict[str | None, bool] = {backend.name: backend.native for backend in dispatch.backends()}
    found = []
    for row in [*bench["attention"], *bench["steps"]]:
        timed = {name: one for name, one in row["times"].items() if "median" in one}
        base = next((one["baseline"] for one in timed.values() if "baseline" in one), None)
        cells: dict[str, list[Json]] = {}
        for policy in bench["policies"]:
            for name, one in timed.items():
                if name == policy["name"] or name.startswith(f"{policy['name']} / "):
                    backend = one.get("backend") or name.removeprefix(policy["name"]).removeprefix(" / ") or None
                    cell = {"speed": one.get("speed"), "seconds": one["median"], "backend": backend}
                    cells.setdefault(policy["name"], []).append({**cell, "native": native.get(backend)})
        tokens = f"{row['tokens']:,} tokens"
        attention = f"{tokens} × {pages.count(row.get('heads', 0), 'head')}"
        size = attention if "heads" in row else f"a step of {row['model']}, {tokens}"
        found.append(
            {
                "title": size,
                "over": None if base is None else BASELINES.get(base, base),
                "base": None if base is None else timed[base]["median"],
                "cells": {name: sorted(some, key=lambda one: one["seconds"]) for name, some in cells.items()},
                "error": row.get("error"),
                "gpu": row.get("gpu"),
            }
        )
    return found


def times(speed: float) -> str:
    """Two decimals, or two significant digits of what would lose them."""
    return f"{speed:.2f}" if speed >= 0.1 else figure(speed, 2)


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 1 else f"{figure(1e3 * seconds)} ms"


def _context(lab: Lab) -> Json:
    """All that the template needs but the clips."""
    report = lab.report.data
    shared = pages.context(report)
    sections = pages.table_rows(report)
    task = None if lab.task is None else {"r": lab.task.data, **task_pages.context(lab.task.data)}
    columns = speeds(lab.bench.data) if lab.bench else []
    said = verdict(lab)
    return {
        **shared,
        "r": report,
        "lab": lab,
        "said": said,
        "tone": _tone(lab),
        "own": task_pages.DTYPES.get(report["model"]["dtype"], report["model"]["dtype"]),
        "sections": sections,
        "rows": [_reference_row(task), *(_row(section, task, columns) for section in sections)],
        "columns": columns,
        "timed_on": machine_of(lab.bench.data) if lab.bench else None,
        "milliseconds": milliseconds,
        "times": times,
        "few": few([run["prompt"] for run in sections[0]["runs"]]),
        "charts": [pages.chart(report, *chart) for chart in CHARTS],
        "maps": [_map(part) for part in lab.maps],
        "task": task,
        "search": None if lab.search is None else {"r": lab.search.data, **search_pages.context(lab.search.data)},
        "made_of": [_summary(part) for part in lab.parts],
        "version": wanfp4.__version__,
    }


def _tone(lab: Lab) -> str:
    judged = lab.report.data["budget"]
    if judged and not judged["passed"]:
        return "bad"
    return "good" if judged and lab.report.complete else ""


def _reference_row(task: Json | None) -> Json:
    return {"section": None, "task": _task_row(REFERENCE, task), "speeds": []}


def _row(section: Json, task: Json | None, columns: Sequence[Json]) -> Json:
    """A row of the table: a section of the report with its row of the task and its cells of the timings."""
    of_floor = section["index"] is None
    return {
        "section": section,
        "task": _task_row(FLOOR if of_floor else section["name"], task),
        "speeds": [[] if of_floor else column["cells"].get(section["name"], []) for column in columns],
    }


def _task_row(name: str, task: Json | None) -> Json | None:
    return next((row for row in task["r"]["rows"] if row["name"] == name), None) if task else None


def _map(part: Part) -> Json:
    """What the template shows of a map: one guidance branch, the worse one, layer by step."""
    data = part.data
    branches = list(dict.fromkeys(branch for *_, branch in data["cells"]))
    attribution = data["attribution"]
    return {
        **map_pages.context(data),
        "r": data,
        "part": part,
        "grids": map_pages.grids_of(data) if data["cells"] else None,
        "branches": branches,
        "branch": map_pages.worst_branch(data) if branches else None,
        "kinds": {**dict.fromkeys(PARTS, "made exact"), **dict.fromkeys(LEVERS, "lever")},
        "attributed": bool(attribution and attribution["names"]),
    }


def _clips(groups: Sequence[Json]) -> Json:
    """The groups with what they hold; what did not fit into the page is counted."""
    shown, left_out = [], 0
    for group in groups:
        clips = []
        for clip in group["clips"]:
            held = {kind: _held(clip[kind]) for kind in ("strip", "video")}
            left_out += sum(clip[kind] is not None and held[kind] is None for kind in held)
            clips.append({**clip, **held})
        if any(clip["strip"] or clip["video"] or clip["nan"] for clip in clips):
            shown.append({**group, "clips": clips})
    return {"clips": shown, "left_out": left_out}


def _held(source: str | None) -> Markup | None:
    """A data URL; None for a file's name. Markup, as escaping megabytes of base64 takes its time."""
    return Markup(source) if source is not None and source.startswith("data:") else None


def _summary(part: Part) -> str:
    """A part in a few words: what, of what, when."""
    data, when = part.data, f"{part.data['created'][:10]}{'' if part.complete else ', unfinished'}"
    if part.result is BENCH:
        return f"timings on {machine_of(data)}, {when}"
    of = {
        "drift report": lambda: f"of {pages.count(len(data['prompts']) * len(data['seeds']), 'run')} a policy",
        "map": lambda: f"of {data['policy']['name']}",
        "task table": lambda: f"of {pages.count(data['tasks']['clips'], 'clip')}",
        "search": lambda: f"among {', '.join(name for name, _ in policies_of(part))}",
    }
    return f"{part.result.what} {of[part.result.what]()}, on {machine_of(data)}, {when}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
