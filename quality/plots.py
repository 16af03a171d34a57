"""Curves over denoising steps: as inline SVG that takes its colours from the page's CSS, and as files for papers.

Only matplotlib's object interface is used; its global state stays as it was. Text stays text, in the page's font.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

SERIES_COLOURS = 6
# Beyond six policies the colours come round again with another dash, so that no two curves look alike.
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))

# Colours that matplotlib writes and this module turns into CSS, so that one SVG serves light and dark pages.
_TEXT, _GRID, _FLOOR = "#fe1001", "#fe1002", "#fe1003"
_CSS = {_TEXT: "currentColor", _GRID: "var(--rule)", _FLOOR: "var(--floor)"}
_CSS.update({f"#fe00{i:02x}": f"var(--series-{i})" for i in range(SERIES_COLOURS)})


# What stands for each of them on white paper: the light page's colours (style.html.j2).
_PAPER = {_TEXT: "#1b1f24", _GRID: "#d5d9de", _FLOOR: "#7d8590"}
_PAPER.update(
    {
        f"#fe00{i:02x}": colour
        for i, colour in enumerate(("#0b62c4", "#c2410c", "#0f7a5a", "#8b3fc7", "#a3182f", "#7a6400"))
    }
)
FORMATS = ("svg", "png")
# Of a PNG: a column of 3.5 inches then has 900 pixels and more.
DPI = 300


@dataclass(frozen=True)
class Curve:
    """One line, with the smallest and largest over runs around it. `index` picks the colour, None is the floor's."""

    label: str
    index: int | None
    median: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def step_chart(curves: Sequence[Curve], steps: Sequence[Mapping[str, Any]], ylabel: str, description: str) -> str:
    """An <svg> of `curves` over `steps` (step, sigma and expert of each), log scale.

    Figures that a log scale cannot show (zero, NaN, infinity) leave a gap. `description` is read to those who cannot
    see the chart.
    """
    # rc_context puts every setting back; there is no argument for these two.
    with mpl.rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = _step_figure(curves, steps, ylabel)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True)
    return _inline(buffer.getvalue(), description)


def step_file(curves: Sequence[Curve], steps: Sequence[Mapping[str, Any]], ylabel: str, kind: str) -> bytes:
    """The content of an image file of `step_chart`'s curves with their legend, on white; `kind` is one of FORMATS.

    Text of an SVG stays text, in the font of whoever shows it. The same curves give the same bytes.
    """
    # The salt makes the ids that an SVG refers to by.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "wanfp4", "font.family": "sans-serif"}):
        figure = _step_figure(curves, steps, ylabel, _PAPER, legend=True)
        buffer = io.BytesIO()
        plain = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(buffer, format=kind, dpi=DPI, facecolor="white", metadata=plain)
    return buffer.getvalue()


def _step_figure(
    curves: Sequence[Curve],
    steps: Sequence[Mapping[str, Any]],
    ylabel: str,
    colours: Mapping[str, str] | None = None,
    *,
    legend: bool = False,
) -> Figure:
    """The chart in colours that stand for CSS, or in what `colours` has for them."""

    def painted(colour: str) -> str:
        return colour if colours is None else colours[colour]

    figure = Figure(figsize=(6.0, 3.5), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    x = range(1, len(steps) + 1)
    for curve in curves:
        colour = painted(_FLOOR if curve.index is None else f"#fe00{curve.index % SERIES_COLOURS:02x}")
        dash = (0, (2, 2)) if curve.index is None else DASHES[curve.index // SERIES_COLOURS % len(DASHES)]
        line, low, high = (_drawable(v) for v in (curve.median, curve.low, curve.high))
        label = _literal(curve.label)
        if not _seen(curve.median):
            label += " (zero)" if all(v == 0 for v in curve.median) else " (NaN or infinite)"
        axes.plot(x, line, color=colour, linestyle=dash, linewidth=1.6, marker="o", markersize=2.6, label=label)
        if list(curve.low) != list(curve.high):
            axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    visible = any(_seen(curve.median) for curve in curves)
    _dress(axes, steps, ylabel, painted(_TEXT), painted(_GRID), visible=visible)
    if legend:
        figure.legend(loc="outside lower center", ncols=3, frameon=False, labelcolor=painted(_TEXT), fontsize=9)
    return figure


def _literal(label: str) -> str:
    """A policy's name as a legend shows it: no mathematics between dollar signs, none left out for a leading _."""
    shown = "".join(c if c.isprintable() else " " for c in label).replace("$", r"\$")  # control characters end XML
    return f"\u200b{shown}" if shown.startswith("_") else shown


@dataclass(frozen=True)
class Dot:
    """A point of a scatter; `index` picks colour, shape and the legend's text."""

    x: float
    y: float
    index: int


def scatter_chart(dots: Sequence[Dot], legend: Sequence[str], xlabel: str, ylabel: str, description: str) -> str:
    """An <svg> of points around the line where both are equal; `description` is read to those who cannot see it."""
    with mpl.rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(5.0, 4.2), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        top = 1.08 * max((v for dot in dots for v in (dot.x, dot.y)), default=1.0) or 1.0
        axes.plot([0, top], [0, top], color=_FLOOR, linewidth=1, linestyle=(0, (4, 3)))
        for index, text in enumerate(legend):
            chosen = [dot for dot in dots if dot.index == index]
            if chosen:
                axes.scatter(
                    [dot.x for dot in chosen],
                    [dot.y for dot in chosen],
                    s=30,
                    marker="os^D"[index % 4],
                    color=f"#fe00{index % SERIES_COLOURS:02x}",
                    label=text,
                )
        axes.set_xlim(0, top)
        axes.set_ylim(0, top)
        axes.set_xlabel(xlabel, color=_TEXT)
        axes.set_ylabel(ylabel, color=_TEXT)
        axes.tick_params(color=_GRID, labelcolor=_TEXT, labelsize=9)
        for name, spine in axes.spines.items():
            spine.set_color(_GRID)
            spine.set_visible(name in ("left", "bottom"))
        axes.grid(True, color=_GRID, linewidth=0.6)
        axes.legend(loc="upper left", frameon=False, labelcolor=_TEXT, fontsize=9)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True)
    return _inline(buffer.getvalue(), description)


def _drawable(values: Sequence[float]) -> list[float]:
    return [v if math.isfinite(v) and v > 0 else math.nan for v in values]


def _seen(values: Sequence[float]) -> bool:
    return not all(math.isnan(v) for v in _drawable(values))


def _dress(axes: Axes, steps: Sequence[Mapping[str, Any]], ylabel: str, text: str, grid: str, *, visible: bool) -> None:
    count = len(steps)
    if visible:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=8))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_yticks([])
        axes.text(
            0.5, 0.5, "nothing above zero to show", transform=axes.transAxes, ha="center", va="center", color=text
        )
    axes.set_xlim(0.5, count + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    axes.set_xlabel("step", color=text)
    axes.set_ylabel(ylabel, color=text)
    shown = sorted({round(1 + i * (count - 1) / 5) for i in range(6)})
    sigma = axes.secondary_xaxis("top")
    sigma.set_xticks(shown, [f"{float(steps[i - 1]['sigma']):.2f}" for i in shown])
    sigma.set_xlabel("noise level σ", color=text)
    for i in range(1, count):
        if steps[i]["expert"] != steps[i - 1]["expert"]:
            axes.axvline(i + 0.5, color=text, linewidth=0.8, linestyle=(0, (4, 3)))
            axes.annotate(
                f"→ {steps[i]['expert']}",
                (i + 0.5, 1),
                xycoords=("data", "axes fraction"),
                xytext=(3, -9),
                textcoords="offset points",
                fontsize=8,
                color=text,
            )
    for part in (axes, sigma):
        part.tick_params(which="both", color=grid, labelcolor=text, labelsize=9)
        for spine in part.spines.values():
            spine.set_color(grid)
    axes.spines["right"].set_visible(False)
    axes.grid(True, which="major", color=grid, linewidth=0.6)


def _inline(svg: str, description: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # The size comes from the page; the viewBox keeps the proportions.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{escape(description)}"', 1)
    # Matplotlib names its groups alike in every figure, and a page has several; what is referred to is unique.
    used = set(re.findall(r"#([\w-]+)", svg))
    svg = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", svg)
    # One pass: the replacements must not be replaced again.
    return re.sub("|".join(_CSS), lambda found: _CSS[found[0]], svg)
