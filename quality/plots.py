"""Curves over denoising steps as inline SVG that takes its colours from the page's CSS.

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
        figure = Figure(figsize=(6.0, 3.5), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        x = range(1, len(steps) + 1)
        for curve in curves:
            colour = _FLOOR if curve.index is None else f"#fe00{curve.index % SERIES_COLOURS:02x}"
            dash = (0, (2, 2)) if curve.index is None else DASHES[curve.index // SERIES_COLOURS % len(DASHES)]
            line, low, high = (_drawable(v) for v in (curve.median, curve.low, curve.high))
            axes.plot(x, line, color=colour, linestyle=dash, linewidth=1.6, marker="o", markersize=2.6)
            if list(curve.low) != list(curve.high):
                axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        _dress(axes, steps, ylabel, visible=any(_seen(curve.median) for curve in curves))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True)
    return _inline(buffer.getvalue(), description)


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


def _dress(axes: Axes, steps: Sequence[Mapping[str, Any]], ylabel: str, *, visible: bool) -> None:
    count = len(steps)
    if visible:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=8))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_yticks([])
        axes.text(
            0.5, 0.5, "nothing above zero to show", transform=axes.transAxes, ha="center", va="center", color=_TEXT
        )
    axes.set_xlim(0.5, count + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    axes.set_xlabel("step", color=_TEXT)
    axes.set_ylabel(ylabel, color=_TEXT)
    shown = sorted({round(1 + i * (count - 1) / 5) for i in range(6)})
    sigma = axes.secondary_xaxis("top")
    sigma.set_xticks(shown, [f"{float(steps[i - 1]['sigma']):.2f}" for i in shown])
    sigma.set_xlabel("noise level σ", color=_TEXT)
    for i in range(1, count):
        if steps[i]["expert"] != steps[i - 1]["expert"]:
            axes.axvline(i + 0.5, color=_TEXT, linewidth=0.8, linestyle=(0, (4, 3)))
            axes.annotate(
                f"→ {steps[i]['expert']}",
                (i + 0.5, 1),
                xycoords=("data", "axes fraction"),
                xytext=(3, -9),
                textcoords="offset points",
                fontsize=8,
                color=_TEXT,
            )
    for part in (axes, sigma):
        part.tick_params(which="both", color=_GRID, labelcolor=_TEXT, labelsize=9)
        for spine in part.spines.values():
            spine.set_color(_GRID)
    axes.spines["right"].set_visible(False)
    axes.grid(True, which="major", color=_GRID, linewidth=0.6)


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
