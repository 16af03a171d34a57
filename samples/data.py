"""What the sample pipeline is trained on, in words: coloured shapes that move straight over grey backgrounds.

A clip is a `Spec`: one or more `MovingShape`s over a background. This module draws specs, words them, and says which
combinations training never sees; `wanfp4.samples.render` turns specs into pixels. No torch here: the checker's worker
processes import it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SHAPES = ("circle", "square", "triangle", "star", "cross")
COLOURS = {  # RGB in [0, 1]; hues at least 25° apart
    "red": (0.90, 0.12, 0.12),
    "orange": (0.98, 0.55, 0.08),
    "yellow": (0.95, 0.90, 0.12),
    "green": (0.12, 0.72, 0.20),
    "cyan": (0.10, 0.80, 0.85),
    "blue": (0.15, 0.25, 0.90),
    "purple": (0.55, 0.15, 0.80),
    "pink": (0.98, 0.40, 0.70),
}
COLOUR_NAMES = tuple(COLOURS)
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}  # (x, y), y points down
DIRECTION_NAMES = tuple(DIRECTIONS)
BACKGROUNDS = ("black", "gray", "white", "striped", "checkered", "gradient")

PAIRS = 0.6  # share of training clips with two objects

# Regular polygons and stars as (corners, outer radius, inner radius, rotation); circle and cross have formulas.
_POLYGONS = {
    "square": (4, 1.253, 1.253 * math.cos(math.pi / 4), math.pi / 4),
    "triangle": (3, 1.30, 0.65, 0.0),
    "star": (5, 1.35, 0.58, 0.0),
}
EXTENT = 1.35  # no shape reaches farther than this many radii from its centre


@dataclass(frozen=True, order=True)
class MovingShape:
    """An object of a clip: a name of `SHAPES`, of `COLOURS` and of `DIRECTIONS`."""

    shape: str
    colour: str
    direction: str

    def __str__(self) -> str:
        return f"{self.colour} {self.shape} moving {self.direction}"


@dataclass(frozen=True)
class Spec:
    """What a clip shows: its objects and a name of `BACKGROUNDS`."""

    objects: tuple[MovingShape, ...]
    background: str


@dataclass(frozen=True)
class Size:
    """Frames and pixels of a clip."""

    frames: int
    height: int
    width: int


DEFAULT = Size(33, 112, 144)  # latent 9 × 14 × 18, 9 · 7 · 9 = 567 tokens: not a multiple of 32
LONG = Size(81, 160, 160)  # latent 21 × 20 × 20, 2,100 tokens


def held_out(thing: MovingShape) -> bool:
    """One combination in seven is never shown in training; every pair of attributes still is."""
    shape, colour = SHAPES.index(thing.shape), COLOUR_NAMES.index(thing.colour)
    return (shape + 2 * colour + 3 * DIRECTION_NAMES.index(thing.direction)) % 7 == 0


_ALL = [MovingShape(s, c, d) for s in SHAPES for c in COLOUR_NAMES for d in DIRECTION_NAMES]
TRAINING = tuple(thing for thing in _ALL if not held_out(thing))
HELD_OUT = tuple(thing for thing in _ALL if held_out(thing))


def hue_gap(first: str, second: str) -> int:
    """Steps between two colours around the circle of `COLOURS`, 0 to 4."""
    gap = abs(COLOUR_NAMES.index(first) - COLOUR_NAMES.index(second))
    return min(gap, len(COLOUR_NAMES) - gap)


def random_spec(
    rng: random.Random,
    combinations: Sequence[MovingShape] = TRAINING,
    *,
    pairs: float = PAIRS,
    objects: int | None = None,
) -> Spec:
    """A spec of one object, or of two with probability `pairs`; or of exactly `objects`.

    Colours of one clip are at least two steps apart on the hue circle, so an eye (and the checker) can tell them apart.
    """
    count = objects if objects is not None else 1 + (rng.random() < pairs)
    things = [rng.choice(combinations)]
    while len(things) < count:
        another = rng.choice(combinations)
        if all(hue_gap(another.colour, thing.colour) >= 2 for thing in things):
            things.append(another)
    return Spec(tuple(things), rng.choice(BACKGROUNDS))


_WAYS = {
    "left": ("left", "left", "to the left", "leftward", "towards the left"),
    "right": ("right", "right", "to the right", "rightward", "towards the right"),
    "up": ("up", "up", "upward", "to the top", "towards the top"),
    "down": ("down", "down", "downward", "to the bottom", "towards the bottom"),
}
_GERUNDS = ("moving", "moving", "drifting", "sliding", "gliding", "going")
_VERBS = ("moves", "moves", "drifts", "slides", "glides", "goes")
_BACKGROUND = ("on a {}", "over a {}", "in front of a {}", "{}")
_LEADS = ("", "", "", "a video of ", "a clip of ", "an animation of ")
_ONE = ("a", "a", "a", "the", "one", "a single")  # a lone object may be counted in words
_OF_SEVERAL = ("a", "a", "a", "the", "one")
_TWO = ("", "", "", "two shapes : ", "two objects : ")
_JOINS = (" and ", " and ", " while ")


def _phrase(rng: random.Random, thing: MovingShape, gerund: bool, articles: Sequence[str]) -> str:
    way = rng.choice(_WAYS[thing.direction])
    if rng.random() < 0.85:
        article = rng.choice(articles)
        noun = f"{'an' if article == 'a' and thing.colour == 'orange' else article} {thing.colour} {thing.shape}"
    else:
        noun = f"{rng.choice(articles)} {thing.shape} that is {thing.colour}"
    if gerund:
        return f"{noun} {rng.choice(_GERUNDS)} {way}"
    return f"{noun} {rng.choice(_VERBS)} {way}" if rng.random() < 0.7 else f"{noun} is {rng.choice(_GERUNDS)} {way}"


def caption(rng: random.Random, spec: Spec, *, background: bool | None = None) -> str:
    """One of many wordings of a spec, lower case, tokens apart; `background`: whether to name it (None: mostly)."""
    objects = list(spec.objects)
    rng.shuffle(objects)
    lead = rng.choice(_LEADS)
    counted = rng.choice(_TWO) if len(objects) == 2 else ""
    gerund = bool(lead or counted) or rng.random() < 0.5
    articles = _ONE if len(objects) == 1 else _OF_SEVERAL
    text = lead + counted + rng.choice(_JOINS).join(_phrase(rng, thing, gerund, articles) for thing in objects)
    if rng.random() < 0.6 if background is None else background:
        name = "grey" if spec.background == "gray" and rng.random() < 0.3 else spec.background
        named = f"{name} background"
        if not lead and rng.random() < 0.2:
            return f"on a {named} , {text}"
        text += rng.choice((" ", " , ")) + rng.choice(_BACKGROUND).format(named)
    return text


def prompt_of(spec: Spec, *, background: bool = False) -> str:
    """The plainest wording: "a red circle moving right and an orange star moving up"."""
    text = " and ".join(f"{'an' if t.colour == 'orange' else 'a'} {t}" for t in spec.objects)
    return f"{text} on a {spec.background} background" if background else text


def vocabulary() -> list[str]:
    """Every word and sign that captions can hold, sorted."""
    words = {
        *SHAPES,
        *COLOUR_NAMES,
        *BACKGROUNDS,
        *_GERUNDS,
        *_VERBS,
        "background",
        "grey",
        "an",
        "that",
        "is",
        ",",
        ".",
    }
    for texts in (*_WAYS.values(), _BACKGROUND, _LEADS, _ONE, _TWO, _JOINS):
        words |= {word for text in texts for word in text.replace("{}", "").split()}
    return sorted(words)


def shape_distance(shape: str, x: Any, y: Any, xp: Any) -> Any:
    """Signed distance, in radii and negative inside, of points (x, y) to the unit shape; y points down.

    `xp` is the module the arrays belong to, `torch` or `numpy`. Polygons: distance to the line of the nearest edge,
    after folding the plane onto one corner; exact near edges, too small in magnitude beyond corners.
    """
    if shape == "circle":
        return xp.sqrt(x * x + y * y) - 1.0
    if shape == "cross":
        ax, ay = xp.abs(x), xp.abs(y)
        upright = xp.maximum(ax - 0.40, ay - 1.15)
        return xp.minimum(xp.maximum(ax - 1.15, ay - 0.40), upright)
    corners, outer, inner, turn = _POLYGONS[shape]
    half = math.pi / corners
    rho = xp.sqrt(x * x + y * y)
    theta = xp.abs(xp.remainder(xp.arctan2(x, -y) + turn + half, 2 * half) - half)
    ex, ey = inner * math.cos(half) - outer, inner * math.sin(half)  # the edge, from outer corner to inner corner
    return ((rho * xp.cos(theta) - outer) * ey - rho * xp.sin(theta) * ex) / math.hypot(ex, ey)
