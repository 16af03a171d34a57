"""report.html and report.md from a report's JSON values; the words and markup are in the templates."""

from __future__ import annotations

import base64
import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from wanfp4.quality.aggregate import FRAME_FIGURES, Json
from wanfp4.quality.intervals import INSIDE_FLOOR, intervals
from wanfp4.quality.medians import median
from wanfp4.quality.plots import DASHES, SERIES_COLOURS, Curve, step_chart

# Beyond these sums the page links to the files beside it instead of holding them. As base64 they make 5 MB: a page that
# opens at once and can be mailed.
STRIP_BYTES = 1_250_000
VIDEO_BYTES = 2_500_000

CHARTS = (
    (
        "teacher_forced",
        "velocity",
        "Velocity, teacher-forced",
        "Each step starts from the reference's own latent, so nothing adds up: this is what the policy itself costs.",
    ),
    (
        "free_running",
        "velocity",
        "Velocity, free-running",
        "Each step starts from the policy's own latent, so earlier steps' drift is in it.",
    ),
    ("free_running", "latent", "Latent, free-running", "The latent after each step."),
    (
        "free_running",
        "x0",
        "Predicted clean latent x0, free-running",
        "x0 = x_t − σ·v: the clip that the model believes in at each step.",
    ),
)


def html_page(data: Json, files: Mapping[str, bytes]) -> str:
    """The whole page, self-contained as far as its media fit; `data` as `DriftReport.to_dict` gives it."""
    sections = table_rows(data)
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            r=data,
            sections=sections,
            charts=[chart(data, *one) for one in CHARTS] if sections else [],
            clips=clips_of(data, files),
            **context(data),
        )
    )


def markdown_page(data: Json) -> str:
    """The short form for a pull request."""
    return environment().get_template("report.md.j2").render(r=data, sections=table_rows(data), **context(data))


def context(data: Json) -> Json:
    """What templates need of a report beside its own values."""
    experts = [step["expert"] for step in data["steps"]]
    switch = [i for i in range(1, len(experts)) if experts[i] != experts[i - 1]]
    pairs = len(data["prompts"]) * len(data["seeds"])
    sections = [s for s in (data["noise_floor"], *data["policies"]) if s]
    return {
        "pairs": pairs,
        "finished": min((len(s["runs"]) for s in sections), default=0),
        "over": ("" if data["complete"] else "the finished of ") + count(pairs, "prompt and seed pair"),
        "verdict": budget_verdict(data),
        "switch": [(i, experts[i - 1], experts[i]) for i in switch],
        "emulated": [s["name"] for s in data["policies"] if s["backend"]["emulated"]],
        "readings": {s["name"]: reading(s, data) for s in data["policies"] if s["runs"]},
        "intervals": {s["name"]: summary_intervals(s) for s in sections if s["runs"]},
        "inside": {s["name"]: inside_floor(s, data["noise_floor"]) for s in data["policies"] if s["runs"]},
        "inside_floor": INSIDE_FLOOR,
        "violations": {v["policy"]: True for v in (data["budget"] or {}).get("violations", [])},
    }


def budget_verdict(data: Json) -> str | None:
    """The budget's verdict in words; None without a budget."""
    if not data["budget"]:
        return None
    if not data["budget"]["passed"]:
        return "Budget exceeded"
    if not any(section["runs"] for section in data["policies"]):
        return "Budget not judged yet"
    return "Within budget" if data["complete"] else "Within budget so far"


def table_rows(data: Json) -> list[Json]:
    """Rows of every table and lines of every chart: the noise floor, then the policies, as far as they have runs."""
    floor = data["noise_floor"]
    rows = [{**floor, "colour": "var(--floor)", "dash": "floor", "index": None}] if floor and floor["runs"] else []
    for i, section in enumerate(data["policies"]):
        if section["runs"]:
            dash = i // SERIES_COLOURS % len(DASHES)
            rows.append(
                {**section, "colour": f"var(--series-{i % SERIES_COLOURS})", "dash": f"dash-{dash}", "index": i}
            )
    return rows


def curves(data: Json, way: str, quantity: str) -> list[Curve]:
    """A line for the noise floor and each policy, with smallest and largest over runs: relative L2 by step."""
    found = []
    for section in table_rows(data):
        rel = {k: [float(v) for v in values] for k, values in section["per_step"][way][quantity]["rel_l2"].items()}
        found.append(Curve(section["name"], section["index"], rel["median"], rel["min"], rel["max"]))
    return found


def chart(data: Json, way: str, quantity: str, title: str, explanation: str) -> Json:
    """One of `CHARTS`: title, explanation, the labels that are zero throughout, and the SVG."""
    shown = curves(data, way, quantity)
    lines = "; ".join(f"{c.label} from {rel_l2(c.median[0])} to {rel_l2(c.median[-1])}" for c in shown)
    described = f"{title}: relative L2 against the step, medians of the first and the last step: {lines}."
    return {
        "title": title,
        "explanation": explanation,
        "zero": [curve.label for curve in shown if all(v == 0 for v in curve.high)],
        "svg": step_chart(shown, data["steps"], "relative L2", described),
    }


def clips_of(data: Json, files: Mapping[str, bytes], room: Mapping[str, int] | None = None) -> list[Json]:
    """Strips and players, a group for each prompt and seed, the reference first.

    `room` is how many bytes of "strip" and of "video" become data URLs; what does not fit is its file's name.
    """
    rows = [("reference", data["reference"]), *((s["name"], s) for s in (data["noise_floor"], *data["policies"]) if s)]
    left = dict(room or {"strip": STRIP_BYTES, "video": VIDEO_BYTES})
    groups = []
    for p, prompt in enumerate(data["prompts"]):
        for seed in data["seeds"]:
            clips = []
            for name, section in rows:
                run = next((r for r in section["runs"] if (r["prompt"], r["seed"]) == (p, seed)), None)
                if run is None:
                    continue
                clip: Json = {"name": name, "frames": run["frames"], "nan": run.get("latent_frames_nan")}
                for kind, mime in (("strip", "image/jpeg"), ("video", "video/mp4")):
                    file = (run["files"] or {}).get(kind)
                    clip[kind] = _source(file, mime, files, left, kind) if file else None
                clips.append(clip)
            if clips:
                groups.append({"prompt": prompt, "seed": seed, "clips": clips})
    return groups


def _source(name: str, mime: str, files: Mapping[str, bytes], room: dict[str, int], kind: str) -> str:
    content = files.get(name)
    if content is None or len(content) > room[kind]:
        return name
    room[kind] -= len(content)
    return f"data:{mime};base64,{base64.b64encode(content).decode('ascii')}"


def reading(section: Json, data: Json) -> str:
    """One section in words."""
    s, steps = section["summary"], len(data["steps"])
    last = s["after"][-1]
    compared = [quantity["rel_l2"]["max"] for way in section["per_step"].values() for quantity in way.values()]
    if all(float(value) == 0 for values in compared for value in values):
        return "not a single value of velocity or latent differs from the reference."
    over = f", {ratio(s['over_floor'])} times the noise floor," if math.isfinite(float(s["over_floor"])) else ""
    parts = [
        f"on the reference's own latents its velocity is off by {percent(s['velocity']['median'])} at the median step"
        f"{over} and {percent(s['velocity_worst']['median'])} at the worst (step {s['velocity_worst']['step']})",
        f"running free, its latent after {count(steps, 'step')} is {percent(last['rel_l2']['median'])} "
        f"away (cosine {cosine(last['cosine']['median'])})",
    ]
    if nan := s["latent_frames_nan"]:
        held = "holds" if nan == 1 else "hold"
        parts.append(f"{count(nan, 'latent frame')} {held} NaN or infinity: the policy broke the model")
    else:
        new = s["frames_black_new"]
        black = f"{count(new, 'frame')} turned black" if new else "no frame turned black"
        similar = f"PSNR {psnr(s['psnr']['median'])}, SSIM {fixed(s['ssim']['median'])}"
        parts.append(f"decoded: {similar}, and {black}")
    return "; ".join(parts) + "."


def summary_intervals(section: Json) -> Json:
    """95 % bootstrap intervals, low and high, of what the drift tables show of a section, by the summary's names.

    `after` holds one for each checkpoint. None for a single run, and where a run has NaN. The worst step and frame have
    none: they are picked from the runs that an interval would be made of.
    """
    runs = section["runs"]
    checkpoints = [at["step"] - 1 for at in section["summary"]["after"]]
    rows = []
    for run in runs:
        velocity, latent = run["teacher_forced"]["velocity"]["rel_l2"], run["free_running"]["latent"]["rel_l2"]
        rows.append(
            [
                median(map(float, velocity)),
                *(run["frames"][key] if run["frames"] else "NaN" for key in FRAME_FIGURES),
                *(latent[at] for at in checkpoints),
            ]
        )
    table = [[float(v) for v in row] for row in rows]
    found = [i.to_dict() if i.known else None for i in intervals(table, [run["prompt"] for run in runs])]
    names = ("velocity", *FRAME_FIGURES)
    return {**dict(zip(names, found, strict=False)), "after": found[len(names) :]}


def inside_floor(section: Json, floor: Json) -> Json:
    """Which figures of a policy are no larger than the noise floor's own: `velocity`, and `after` by checkpoint."""
    mine, other = section["summary"], floor["summary"]

    def no_larger(a: Json, b: Json) -> bool:
        return float(a["median"]) <= float(b["median"])

    return {
        "velocity": no_larger(mine["velocity"], other["velocity"]),
        "after": [no_larger(a["rel_l2"], b["rel_l2"]) for a, b in zip(mine["after"], other["after"], strict=True)],
    }


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def figure(value: float | str, digits: int = 3) -> str:
    """Three significant digits by default."""
    value = float(value)
    return str(value) if not math.isfinite(value) else f"{value:.{digits}g}"


rel_l2 = figure


def cosine(value: float | str) -> str:
    value = float(value)
    if value == 1 or not math.isfinite(value):
        return f"{value:g}"
    return "> 0.99999" if value >= 0.999995 else f"{value:.5f}"


def percent(value: float | str) -> str:
    return f"{figure(100 * float(value))}\u00a0%"


def ratio(value: float | str) -> str:
    value = float(value)
    return f"{value:,.0f}" if 1000 <= value < math.inf else figure(value)


def fixed(value: float | str) -> str:
    """Three decimals, for figures around 1."""
    value = float(value)
    return f"{value:.3f}" if math.isfinite(value) else str(value)


def psnr(value: float | str) -> str:
    value = float(value)
    return "infinite" if value == math.inf else f"{value:.1f} dB"


def between(interval: Mapping[str, Any] | None, form: Callable[[Any], str]) -> str:
    """`low to high` of an interval, or an empty text where there is none, or nothing that the digits would show."""
    if interval is None:
        return ""
    low, high = form(interval["low"]), form(interval["high"])
    return "" if low == high else f"{low} to {high}"


def spread(value: Mapping[str, Any], form: Callable[[Any], str]) -> str:
    """`median (min to max)`, or the median alone where all runs agree."""
    median, low, high = (form(value[k]) for k in ("median", "min", "max"))
    return median if low == high else f"{median} ({low} to {high})"


def markdown(text: object) -> str:
    """Text that Markdown, GitHub's above all, shows as it is, in a table cell too."""
    return re.sub(r"([\\`*_{}\[\]<>|#~&])", r"\\\1", " ".join(str(text).split()))


def heat(value: float | str, rows: Sequence[Json]) -> str:
    """Share of a cell's shading: the value against the largest finite one of all rows; full for NaN and infinity."""
    finite = [float(v) for row in rows for v in row["summary"]["latent_frames"]["median"] if math.isfinite(float(v))]
    top = max(finite, default=0.0)
    if not math.isfinite(float(value)):
        return "100%"
    return f"{100 * float(value) / top if top else 0:.0f}%"


@functools.cache
def environment() -> jinja2.Environment:
    """The templates beside this file, with the filters above."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=jinja2.select_autoescape(enabled_extensions=("html.j2",)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        count=count,
        figure=figure,
        cosine=cosine,
        percent=percent,
        psnr=psnr,
        ratio=ratio,
        fixed=fixed,
        heat=heat,
        md=markdown,
        json=lambda value: json.dumps(value, indent=1, ensure_ascii=False),
        between_rel=lambda value: between(value, lambda v: figure(v, 2)),
        between_psnr=lambda value: between(value, psnr),
        between_fixed=lambda value: between(value, fixed),
        spread_rel=lambda value: spread(value, rel_l2),
        spread_cos=lambda value: spread(value, cosine),
        spread_psnr=lambda value: spread(value, psnr),
        spread_fixed=lambda value: spread(value, fixed),
    )
    return environment
