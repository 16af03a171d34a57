"""A comparison of drift reports as lines for a terminal, and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from wanfp4.quality.aggregate import Json
from wanfp4.quality.intervals import HIGHER, LOWER, few
from wanfp4.quality.pages import count, figure, fixed, markdown

HEADINGS = ("figure", "A", "B", "B − A", "95 % interval", "floor", "verdict")

NOTES = (
    "Medians over the runs that both reports have, paired by prompt and seed. The interval is the 95 % bootstrap "
    "interval of the median of B − A over prompts and seeds, each by itself: of twenty figures without a difference, "
    "one seems to differ.",
    "Floor: what a mere change of kernel makes of the figure.",
    "Velocity (teacher-forced) and latent (free-running) are relative L2 against each report's own BF16 reference: "
    "lower is closer. PSNR and SSIM: higher is closer. Flicker ratio: 1 is equal.",
)


def text_lines(found: Json) -> list[str]:
    """For a terminal; names and prompts as they are, so printing them is the caller's care."""
    lines = [f"{side}: {found[side]['path']}, {_when(found[side])}" for side in ("A", "B")]
    lines += [_common(found), "", *_headed("What differs", found["circumstances"])]
    lines += ["", *warnings] if (warnings := _warnings(found)) else []
    for policy in found["policies"]:
        lines += ["", f"{policy['name']}, {count(policy['runs'], 'run')} in both", *_remarks(policy)]
        rows = [HEADINGS, *map(_row, policy["figures"])]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, *_alone(found), "", *NOTES]


def markdown_text(found: Json) -> str:
    """For a pull request."""
    lines = ["### Drift, A against B", ""]
    lines += [f"- **{side}**: {markdown(found[side]['path'])}, {_when(found[side])}" for side in ("A", "B")]
    lines += [f"- {_common(found)}", ""]
    if found["circumstances"]:
        lines += _table(("What differs", "A", "B"), [_circumstance(c) for c in found["circumstances"]])
    else:
        lines.append("Nothing differs in model, settings, versions, device and backend.")
    for warning in _warnings(found):
        lines += ["", f"**{warning}**"]
    for policy in found["policies"]:
        lines += ["", f"#### {markdown(policy['name'])}, {count(policy['runs'], 'run')} in both", ""]
        if remarks := _remarks(policy):
            lines += [*(f"- {markdown(remark)}" for remark in remarks), ""]
        lines += _table(HEADINGS, [_row(f) for f in policy["figures"]])
    lines += [markdown(line) for line in _alone(found)]
    return "\n".join([*lines, "", " ".join(NOTES)]) + "\n"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [headings, ["---"] * len(headings), *([markdown(cell) for cell in row] for row in rows)]
    return [f"| {' | '.join(row)} |" for row in cells]


def _when(report: Json) -> str:
    return f"{report['created'][:10]} {report['created'][11:16]} UTC"


def _common(found: Json) -> str:
    pairs = found["pairs"]
    return f"{count(len(pairs['both']), 'prompt and seed pair')} in both, of {pairs['A']} in A and {pairs['B']} in B"


def _warnings(found: Json) -> list[str]:
    names = dict.fromkeys(c["what"].split(".")[0] for c in found["circumstances"] if c["decisive"])
    said = []
    if names:
        listed = ", ".join(names)
        said.append(f"These differ: {listed}. So the differences below are not the policies' alone.")
    if not found["weights_known"]:
        said.append("Whether the weights are the same is not known: the digest of weights is not in both reports.")
    if hint := few([pair["prompt"] for pair in found["pairs"]["both"]]):
        said.append(hint)
    return said


def _headed(heading: str, circumstances: Sequence[Json]) -> list[str]:
    if not circumstances:
        return [f"{heading}: nothing in model, settings, versions, device and backend"]
    rows = [("", "A", "B"), *map(_circumstance, circumstances)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"{heading}:",
        *("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows),
    ]


def _circumstance(found: Json) -> tuple[str, str, str]:
    return found["what"], _plain(found["A"]), _plain(found["B"])


def _plain(value: Any) -> str:
    """A JSON value in a table's cell; null is what a report of that version or setting did not have."""
    if value is None:
        return "none or not recorded"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"


def _remarks(policy: Json) -> list[str]:
    remarks = [f"{c['what']}: {_plain(c['A'])} in A, {_plain(c['B'])} in B" for c in policy["constants"]]
    ran = policy["ran_on"]
    if ran["A"] != ran["B"]:
        remarks.append(f"ran on {', '.join(ran['A']) or 'nothing'} in A, on {', '.join(ran['B']) or 'nothing'} in B")
    for key, noun in (("frames_black_new", "frames turned black"), ("latent_frames_nan", "latent frames with NaN")):
        a, b = policy["counts"]["A"][key], policy["counts"]["B"][key]
        if a or b:
            remarks.append(f"{noun}: {a} in A, {b} in B")
    return remarks


def _row(found: Json) -> tuple[str, ...]:
    form = fixed if found["key"] in ("ssim", "flicker_ratio") else figure
    difference = found["difference"]
    verdict = f"{found['verdict']} in B" if found["verdict"] in (LOWER, HIGHER) else found["verdict"]
    return (
        found["label"],
        form(found["A"]["median"]),
        form(found["B"]["median"]),
        _signed(difference["median"]),
        _between(difference),
        figure(found["floor"], 2),
        verdict,
    )


def _between(interval: Mapping[str, Any]) -> str:
    if "NaN" in (interval["low"], interval["high"]):
        return "a single run has none" if interval["runs"] == 1 else "NaN"
    return f"{_signed(interval['low'])} to {_signed(interval['high'])}"


def _signed(value: float | str) -> str:
    text = figure(value, 3)
    return text if text.startswith("-") or text in ("0", "nan") else f"+{text}"


def _alone(found: Json) -> list[str]:
    return [
        line
        for side, names in found["only"].items()
        if names
        for line in ("", f"Only in {side}, not compared: {', '.join(names)}")
    ]
