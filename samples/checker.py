"""How many objects does a clip show, and of which shape, colour and direction? Image analysis, no learned model.

Backgrounds are grey, so objects are the saturated pixels. Frame by frame: connected components of those, split where
one holds several hues or several bulges (touching objects), specks left out. Over frames: blobs that follow each other
are a track, and a track is an object.

    colour      hue nearest to the object's median pixel
    direction   straight-line fit through its centres
    shape       best overlap with drawn templates of the same area, frame by frame, as it is and with its stretch
                undone; thin and thick arms count, a stretch of more than `MAX_STRETCH` does not
    count       the most blobs that are visible together in at least a quarter of the frames: a twin counts, a
                flicker does not

NumPy and SciPy only, so worker processes start fast: about 0.05 s for a clip of 33 × 112 × 144.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import ndimage
from scipy.optimize import linear_sum_assignment

from wanfp4.samples.data import COLOUR_NAMES, COLOURS, SHAPES, MovingShape, shape_distance

Clip = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

SATURATED = 64  # largest minus smallest channel, of 255; the palest colour drawn has 0.5 · 255
MIN_AREA = 0.01  # of the shorter side squared: 40 % of the smallest object that is drawn
BULGE = 0.85  # a second core of a blob is as deep inside as this share of the deepest
SEEN_COUNT = 0.25  # share of frames in which so many blobs must be visible together
SEEN_CLEAR = 0.6  # share of frames below which an object's attributes are not read
# With the best template: below, the shape is none of ours. Arms leave more room for small faults than full shapes do.
MIN_OVERLAP = {"circle": 0.86, "square": 0.86, "triangle": 0.80, "star": 0.70, "cross": 0.70}
MAX_STRETCH = 1.45  # longer over shorter axis of a shape that is still one of ours, median over frames
MIN_TRAVEL = 0.08  # of the shorter side, over the clip
STRAIGHT = 2.0  # a direction is one of four if its axis moves this many times as much as the other
MAX_JUMP = 0.12  # of the shorter side, between neighbouring frames of a track
MAX_GAP = 4  # frames that a track may be invisible for

_HUES = np.array([colorsys.rgb_to_hsv(*COLOURS[name])[0] for name in COLOUR_NAMES])
_GRID = 48  # samples across a blob that is compared with templates
_HALF = 1.1  # half the width of that comparison, in square roots of the blob's area
_UNDO = (0.0, 0.5, 1.0)  # how much of a blob's stretch is undone before it is compared: noise has a stretch of its own
# Templates with thinner and thicker arms, in radii at each edge. Of other shapes these would be the same shape again.
_WEIGHTS = {"star": (-0.06, 0.0, 0.06), "cross": (-0.08, 0.0, 0.08)}


@dataclass(frozen=True)
class Found:
    """An object that a clip shows. None means that the clip does not say clearly.

    overlap  intersection over union with the best template, mean over frames.
    travel   (x, y) in pixels from the first to the last frame, along the fitted line; y points down.
    area     pixels, median over frames.  share  of the frames that show it.
    """

    shape: str | None
    colour: str | None
    direction: str | None
    overlap: float
    travel: tuple[float, float]
    area: float
    share: float

    @property
    def answer(self) -> tuple[str, str, str]:
        """(colour, shape, direction), "?" where not clear."""
        return (self.colour or "?", self.shape or "?", self.direction or "?")


@dataclass(frozen=True)
class Verdict:
    """What a clip shows: its objects, most visible first, and their number."""

    objects: tuple[Found, ...]
    count: int

    @property
    def answers(self) -> tuple[tuple[str, str, str], ...]:
        """What it shows, without measurements; two clips agree when theirs and their counts are equal."""
        return tuple(sorted(found.answer for found in self.objects))

    def __str__(self) -> str:
        shown = ", ".join(" ".join(found.answer) for found in self.objects)
        return f"{self.count}: {shown}" if shown else str(self.count)


@dataclass(frozen=True)
class Judgement:
    """A verdict against what was asked for: right or wrong for each object asked for, and for their number."""

    shape: tuple[bool, ...]
    colour: tuple[bool, ...]
    direction: tuple[bool, ...]
    count: bool

    @property
    def right(self) -> bool:
        """Everything is as asked."""
        return self.count and all(self.shape) and all(self.colour) and all(self.direction)


def judge(verdict: Verdict, asked: Sequence[MovingShape]) -> Judgement:
    """Compare with what was asked for, object by object; objects found are assigned so that most is right."""
    points = np.array([[_matches(found, thing) for found in verdict.objects] for thing in asked])
    points = points.reshape(len(asked), len(verdict.objects), 3)
    right = np.zeros((len(asked), 3), bool)
    for i, j in zip(*linear_sum_assignment(points.sum(-1), maximize=True), strict=True):
        right[i] = points[i, j]
    shape, colour, direction = (tuple(bool(v) for v in column) for column in right.T)
    return Judgement(shape, colour, direction, verdict.count == len(asked))


def _matches(found: Found, thing: MovingShape) -> tuple[bool, bool, bool]:
    return found.shape == thing.shape, found.colour == thing.colour, found.direction == thing.direction


def analyse(clip: Clip) -> Verdict:
    """What a clip, uint8 [T, H, W, 3], shows. Any size and length; raises ValueError for other arrays."""
    if clip.ndim != 4 or clip.shape[3] != 3 or clip.dtype != np.uint8 or not clip.size:
        raise ValueError(f"a clip must be uint8 [T, H, W, 3], not empty; found {clip.dtype} {list(clip.shape)}")
    frames, side = len(clip), min(clip.shape[1:3])
    blobs = _blobs(clip, MIN_AREA * side * side)
    per_frame = [len(found) for found in blobs]
    count = 0
    while sum(n > count for n in per_frame) >= SEEN_COUNT * frames:
        count += 1
    tracks = [track for track in _tracks(blobs, MAX_JUMP * side) if len(track) >= SEEN_COUNT * frames]
    found = [_describe(track, frames, side) for track in tracks]
    return Verdict(tuple(sorted(found, key=lambda f: (-f.share, -f.area))), count)


@dataclass
class _Blob:
    """One object in one frame. centre (y, x); hue an index of `COLOUR_NAMES`; pixel its median RGB."""

    frame: int
    centre: npt.NDArray[np.float64]
    area: float
    hue: int
    pixel: npt.NDArray[np.float64]
    overlaps: Floats  # with each of SHAPES
    stretch: float  # longer over shorter axis


def _blobs(clip: Clip, min_area: float) -> list[list[_Blob]]:
    """The blobs of each frame."""
    chroma = np.maximum(np.maximum(clip[..., 0], clip[..., 1]), clip[..., 2])
    chroma -= np.minimum(np.minimum(clip[..., 0], clip[..., 1]), clip[..., 2])
    in_plane = np.zeros((3, 3, 3), bool)
    in_plane[1] = ndimage.generate_binary_structure(2, 1)
    labels, _ = ndimage.label(chroma > SATURATED, in_plane)
    areas = np.bincount(labels.ravel())
    out: list[list[_Blob]] = [[] for _ in clip]
    for index, place in enumerate(ndimage.find_objects(labels), 1):
        if areas[index] < min_area:
            continue
        frame, rows, columns = place[0].start, place[1], place[2]
        mask = np.pad(labels[place][0] == index, 2)
        pixels = np.pad(clip[frame, rows, columns], ((2, 2), (2, 2), (0, 0)))
        strength = np.pad(chroma[frame, rows, columns], 2).astype(np.float32)
        corner = np.array([rows.start - 2, columns.start - 2])
        for part in _parts(mask, pixels, min_area):
            out[frame].append(_blob(frame, part, pixels, strength, corner))
    return out


def _parts(mask: Mask, pixels: Clip, min_area: float) -> Iterable[Mask]:
    """A component as single objects: split by hue, then into bulges."""
    hues = np.full(mask.shape, -1)
    hues[mask] = nearest_colour(pixels[mask])
    for group in _by_hue(mask, hues, min_area):
        labels, number = ndimage.label(group)
        for index in range(1, number + 1):
            piece = labels == index
            if piece.sum() >= min_area:
                yield from _bulges(piece, min_area)


def _by_hue(mask: Mask, hues: npt.NDArray[np.int_], min_area: float) -> list[Mask]:
    """`mask` by clearly different hues. Neighbours on the hue circle stay together: noise mixes them in one object."""
    number = len(COLOUR_NAMES)
    areas = np.bincount(hues[mask], minlength=number)
    leaders: list[int] = []
    for hue in np.argsort(-areas, kind="stable"):
        if areas[hue] >= min_area and all(min((hue - h) % number, (h - hue) % number) > 1 for h in leaders):
            leaders.append(int(hue))
    if len(leaders) < 2:
        return [mask]
    groups = []
    for leader in leaders:
        near = np.minimum((hues - leader) % number, (leader - hues) % number) <= 1
        groups.append(mask & near & (hues >= 0))
    return groups


def _bulges(mask: Mask, min_area: float) -> list[Mask]:
    """Touching objects of one colour have several places far from the edge; each pixel goes to the nearest of them."""
    depth = ndimage.distance_transform_edt(mask)
    cores, number = ndimage.label(depth >= BULGE * depth.max(), np.ones((3, 3)))
    if number < 2:
        return [mask]
    nearest = ndimage.distance_transform_edt(cores == 0, return_distances=False, return_indices=True)
    owner = cores[tuple(nearest)]
    parts = [mask & (owner == index) for index in range(1, number + 1)]
    return parts if all(part.sum() >= min_area for part in parts) else [mask]


def _blob(frame: int, part: Mask, pixels: Clip, strength: Floats, corner: npt.NDArray[np.int_]) -> _Blob:
    inside = ndimage.binary_erosion(part, iterations=2)
    if inside.sum() < 0.2 * part.sum():
        inside = part
    pixel = np.median(pixels[inside], axis=0)
    # Edges lie where the colour is half as strong as inside, whatever the colour.
    strength = np.where(part, strength / max(float(np.median(strength[inside])), 1.0), 0).astype(np.float32)
    solid = strength > 0.5
    area = float(solid.sum())
    places = np.argwhere(solid)
    centre = places.mean(0)
    spread, axes = np.linalg.eigh(np.cov(places.T, bias=True) + np.eye(2) / 12)  # a pixel is a square, not a point
    stretch = float(np.sqrt(spread[1] / spread[0]))
    overlaps = _overlaps(strength, centre, area, stretch, axes)
    hue = int(nearest_colour(pixel[None])[0])
    return _Blob(frame, centre + corner, area, hue, pixel, overlaps, stretch)


def nearest_colour(pixels: npt.NDArray[Any]) -> npt.NDArray[np.int_]:
    """Indices of `COLOUR_NAMES` by hue for RGB pixels [N, 3] of any scale."""
    rgb = pixels.astype(np.float32)
    largest, smallest = rgb.max(-1), rgb.min(-1)
    span = np.maximum(largest - smallest, 1e-6)
    red, green, blue = rgb[:, 0], rgb[:, 1], rgb[:, 2]
    hue = np.where(
        largest == red,
        ((green - blue) / span) % 6,
        np.where(largest == green, (blue - red) / span + 2, (red - green) / span + 4),
    )
    gap = np.abs(hue[:, None] / 6 - _HUES)
    nearest: npt.NDArray[np.int_] = np.minimum(gap, 1 - gap).argmin(-1)
    return nearest


@cache
def _templates() -> tuple[Floats, Floats, npt.NDArray[np.int_]]:
    """Drawn shapes of area 1 on the comparison grid, [templates, grid²], their areas in grid points, their shapes.

    Three sizes, nine positions, and what `_WEIGHTS` says.
    """
    fine = (np.arange(600) + 0.5) / 200 - 1.5
    fx, fy = np.meshgrid(fine, fine)
    x, y = _grid()
    drawn, kinds = [], []
    for kind, shape in enumerate(SHAPES):
        for weight in _WEIGHTS.get(shape, (0.0,)):
            radius = 1 / np.sqrt((shape_distance(shape, fx, fy, np) < weight).mean() * 9)
            for scale in (0.94, 1.0, 1.06):
                for dx in (-0.05, 0.0, 0.05):
                    for dy in (-0.05, 0.0, 0.05):
                        r = radius * scale
                        drawn.append((shape_distance(shape, (x - dx) / r, (y - dy) / r, np) < weight).ravel())
                        kinds.append(kind)
    bank = np.array(drawn, np.float32)
    return bank, bank.sum(1), np.array(kinds)


def _grid() -> tuple[Floats, Floats]:
    line = ((np.arange(_GRID) + 0.5) / _GRID * 2 - 1) * _HALF
    x, y = np.meshgrid(line, line)
    return x.astype(np.float32), y.astype(np.float32)


def _overlaps(
    strength: Floats, centre: npt.NDArray[np.float64], area: float, stretch: float, axes: npt.NDArray[np.float64]
) -> Floats:
    """Intersection over union of a blob with each shape's best template of its area and centre.

    All five shapes have equal second moments along every axis, so a blob's own tell how it was stretched, and along
    which of `axes` (columns, (y, x), the longer last); the best of undoing none, half or all of that counts.
    """
    x, y = _grid()
    points = np.stack([y.ravel(), x.ravel()]) * np.sqrt(area)
    samples = []
    for share in _UNDO:
        grow = stretch ** (share / 2)
        warp = axes @ np.diag([1 / grow, grow]) @ axes.T
        places = warp @ points + centre[:, None]
        samples.append(ndimage.map_coordinates(strength, places, order=1) > 0.5)
    sampled = np.array(samples, np.float32).T
    bank, sizes, kinds = _templates()
    common = bank @ sampled
    overlap = (common / (sizes[:, None] + sampled.sum(0) - common)).max(1)
    best: Floats = np.maximum.reduceat(overlap, np.flatnonzero(np.diff(kinds, prepend=-1)))
    return best


def _tracks(blobs: list[list[_Blob]], max_jump: float) -> list[list[_Blob]]:
    """Blobs that follow each other, nearest first; a track may be invisible for a few frames."""
    number = len(COLOUR_NAMES)
    tracks: list[list[_Blob]] = []
    for found in blobs:
        pairs = []
        for t, track in enumerate(tracks):
            last = track[-1]
            for b, blob in enumerate(found):
                gap = blob.frame - last.frame
                jump = float(np.hypot(*(blob.centre - last.centre)))
                turned = min((blob.hue - last.hue) % number, (last.hue - blob.hue) % number)
                if gap <= MAX_GAP + 1 and turned <= 1 and jump <= max_jump * gap:
                    pairs.append((jump, t, b))
        used_tracks, used_blobs = set(), set()
        for _, t, b in sorted(pairs):
            if t not in used_tracks and b not in used_blobs:
                used_tracks.add(t)
                used_blobs.add(b)
                tracks[t].append(found[b])
        tracks += [[blob] for b, blob in enumerate(found) if b not in used_blobs]
    return tracks


def _describe(track: list[_Blob], frames: int, side: int) -> Found:
    share = len(track) / frames
    times = np.array([blob.frame for blob in track])
    centres = np.array([blob.centre for blob in track])
    dy, dx = np.polyfit(times, centres, 1)[0] * (frames - 1) if len(track) > 1 else (0.0, 0.0)
    overlaps = np.array([blob.overlaps for blob in track])
    mean = overlaps.mean(0)
    best = int(mean.argmax())
    votes = float((overlaps.argmax(1) == best).mean())
    clear = share >= SEEN_CLEAR
    ours = (
        mean[best] >= MIN_OVERLAP[SHAPES[best]]
        and votes >= 0.5
        and np.median([b.stretch for b in track]) <= MAX_STRETCH
    )
    pixel = np.median([blob.pixel for blob in track], axis=0)
    return Found(
        shape=SHAPES[best] if clear and ours else None,
        colour=COLOUR_NAMES[int(nearest_colour(pixel[None])[0])] if clear else None,
        direction=_direction(float(dx), float(dy), MIN_TRAVEL * side) if clear else None,
        overlap=float(mean[best]),
        travel=(float(dx), float(dy)),
        area=float(np.median([blob.area for blob in track])),
        share=share,
    )


def _direction(dx: float, dy: float, least: float) -> str | None:
    long, short = max(abs(dx), abs(dy)), min(abs(dx), abs(dy))
    if long < least or long < STRAIGHT * short:
        return None
    if abs(dx) > abs(dy):
        return "right" if dx > 0 else "left"
    return "down" if dy > 0 else "up"
