"""The checker on clips whose content is known, and on clips that are wrong on purpose."""

import dataclasses
import math
import random
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from wanfp4.samples.checker import Found, Judgement, Verdict, analyse, judge
from wanfp4.samples.data import (
    BACKGROUNDS,
    DEFAULT,
    HELD_OUT,
    LONG,
    SHAPES,
    TRAINING,
    MovingShape,
    Size,
    Spec,
    random_spec,
    shape_distance,
)
from wanfp4.samples.render import Scenes, draw_scenes, render, to_uint8

ALL = HELD_OUT + TRAINING


def clips_of(scenes: Scenes) -> list[np.ndarray]:
    return list(to_uint8(render(scenes)).numpy())


def draw(specs: Sequence[Spec], size: Size = DEFAULT, seed: int = 0) -> list[np.ndarray]:
    return clips_of(draw_scenes(specs, size, torch.Generator().manual_seed(seed)))


def caught(clips: Sequence[np.ndarray], asked: Sequence[Sequence[MovingShape]]) -> float:
    return float(np.mean([not judge(analyse(c), a).right for c, a in zip(clips, asked, strict=True)]))


def test_reads_drawn_clips() -> None:
    rng = random.Random(0)
    specs = [random_spec(rng, ALL, objects=1 + i % 2) for i in range(80)]
    started = time.process_time()
    verdicts = [analyse(clip) for clip in draw(specs)]
    judged = [judge(v, s.objects) for v, s in zip(verdicts, specs, strict=True)]
    for attribute in ("shape", "colour", "direction"):
        assert np.mean([mark for j in judged for mark in getattr(j, attribute)]) >= 0.99
    assert np.mean([j.count for j in judged]) >= 0.99
    assert (time.process_time() - started) / len(specs) < 0.5  # drawing included; 0.05 s without, on an idle machine


def test_reads_long_clips_and_three_objects() -> None:
    rng = random.Random(1)
    specs = [random_spec(rng, ALL, objects=1 + i % 3) for i in range(6)]
    for clip, spec in zip(draw(specs, LONG), specs, strict=True):
        assert judge(analyse(clip), spec.objects).right, spec


def test_catches_twins_extra_and_missing_objects() -> None:
    rng = random.Random(2)
    singles = [rng.choice(ALL) for _ in range(40)]
    pairs = [random_spec(rng, ALL, objects=2) for _ in range(40)]
    grounds = [rng.choice(BACKGROUNDS) for _ in range(40)]
    scenes = draw_scenes(
        [Spec((t, t), g) for t, g in zip(singles, grounds, strict=True)], DEFAULT, torch.Generator().manual_seed(1)
    )
    twins = dataclasses.replace(scenes, radius=scenes.radius[:, :1].expand(-1, 2))
    assert caught(clips_of(twins), [(t,) for t in singles]) >= 0.98
    assert caught(draw(pairs), [p.objects[:1] for p in pairs]) >= 0.98
    assert caught(draw([Spec(p.objects[:1], p.background) for p in pairs]), [p.objects for p in pairs]) >= 0.98
    twice = [Spec((*p.objects, p.objects[i % 2]), p.background) for i, p in enumerate(pairs)]
    assert caught(draw(twice), [p.objects for p in pairs]) >= 0.98


@pytest.mark.parametrize("distance", [1.3, 1.6, 2.0])
def test_catches_twins_that_touch_or_overlap(distance: float) -> None:
    """`distance` between centres in radii: the two are one blob of one colour."""
    rng, generator = random.Random(3), torch.Generator().manual_seed(3)
    singles = [rng.choice(ALL) for _ in range(40)]
    scenes = draw_scenes([Spec((t, t), rng.choice(BACKGROUNDS)) for t in singles], DEFAULT, generator)
    radius = scenes.radius[:, :1].expand(-1, 2)
    angle = torch.rand(len(singles), generator=generator) * 2 * math.pi
    offset = torch.stack([angle.cos(), angle.sin()], -1)[:, None] * distance * radius[:, :1, None] / 2
    centre = torch.stack([scenes.centre[:, 0] + offset, scenes.centre[:, 0] - offset], 1)
    assert caught(clips_of(dataclasses.replace(scenes, radius=radius, centre=centre)), [(t,) for t in singles]) >= 0.95


@pytest.mark.parametrize(("field", "value"), [("shape", "square"), ("colour", "green"), ("direction", "left")])
def test_catches_each_wrong_attribute(field: str, value: str) -> None:
    thing = MovingShape("star", "red", "up")
    [clip] = draw([Spec((dataclasses.replace(thing, **{field: value}),), "striped")])
    verdict = judge(analyse(clip), [thing])
    assert {name: getattr(verdict, name)[0] for name in ("shape", "colour", "direction")} == {
        name: name != field for name in ("shape", "colour", "direction")
    }
    assert verdict.count


Outline = Callable[[np.ndarray, np.ndarray], np.ndarray]  # signed distance in radii of points (x, y), y down


def shape_read(outline: Outline, radius: float = 15.0) -> str:
    """The shape that the checker reads in a clip of one red thing of this outline, its edges soft and noisy.

    "?" for none, also when it takes one thing for several.
    """
    ys, xs = np.mgrid[:112, :144] + 0.5
    clip = np.full((7, 112, 144, 3), 120.0)
    for t, frame in enumerate(clip):
        alpha = np.clip(0.5 - outline((xs - 45.3 - 8.2 * t) / radius, (ys - 55.6) / radius) * radius / 1.3, 0, 1)
        frame += alpha[..., None] * (np.array([235, 30, 30]) - 120)
    clip += np.random.default_rng(0).normal(0, 2, clip.shape)
    verdict = analyse(clip.round().clip(0, 255).astype(np.uint8))
    return verdict.objects[0].answer[1] if verdict.count == 1 else "?"


def distorted(shape: str, *, stretch: float = 1.0, angle: float = 0.0, edge: float = 0.0) -> Outline:
    """A shape `stretch` times as long along `angle` as across, at equal area, its edges `edge` radii farther out."""

    def outline(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        c, s, grow = math.cos(angle), math.sin(angle), math.sqrt(stretch)
        along, across = (c * x + s * y) / grow, (c * y - s * x) * grow
        return np.asarray(shape_distance(shape, c * along - s * across, s * along + c * across, np) - edge)

    return outline


@pytest.mark.parametrize("shape", SHAPES)
def test_mild_distortion_leaves_a_shape_what_it_is(shape: str) -> None:
    for radius in (12.0, 18.0):
        for angle in (0.0, math.pi / 2, 0.7):
            assert shape_read(distorted(shape, stretch=1.35, angle=angle), radius) == shape
        for pixels in (-1.5, 1.5):
            assert shape_read(distorted(shape, edge=pixels / radius), radius) == shape
            assert shape_read(distorted(shape, stretch=1.25, edge=pixels / radius), radius) == shape


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_with_a_corner_melted_is_still_that_shape(shape: str) -> None:
    whole = distorted(shape)
    reach = {"circle": 1.0, "square": 1.253, "triangle": 1.3, "star": 1.35, "cross": 1.15}[shape]
    angle = math.pi / 4 if shape == "square" else -math.pi / 2
    tip = 0.7 * reach

    def melted(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.maximum(whole(x, y), x * math.cos(angle) + y * math.sin(angle) - tip)

    assert shape_read(melted) == shape


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_stretched_out_of_proportion_is_none(shape: str) -> None:
    for angle in (0.0, math.pi / 2):
        assert shape_read(distorted(shape, stretch=1.6, angle=angle)) == "?"


@pytest.mark.parametrize(
    "outline",
    [
        lambda x, y: np.maximum(np.hypot(x, y) - 1.2, y),  # half a disc
        lambda x, y: np.maximum(np.maximum(abs(x), abs(y)) - 1.1, np.minimum(x, -y)),  # an L
        lambda x, y: abs(np.hypot(x, y) - 0.9) - 0.25,  # a ring
        lambda x, y: np.maximum(abs(x) - 1.4, abs(y) - 0.6),  # a bar
        lambda x, y: np.minimum(
            np.maximum(abs(x) - 1.1, abs(y + 0.7) - 0.4), np.maximum(abs(x) - 0.4, abs(y) - 1.1)
        ),  # a T
        lambda x, y: (abs(x) + abs(y) - 1.25) / math.sqrt(2),  # a square on its corner
        lambda x, y: shape_distance("triangle", x, -y, np),  # a triangle on its tip
        lambda x, y: np.hypot(x, y) - 1 - 0.25 * np.cos(3 * np.arctan2(y, x)),  # three and five lobes
        lambda x, y: np.hypot(x, y) - 1 - 0.25 * np.cos(5 * np.arctan2(y, x)),
    ],
    ids=["half disc", "L", "ring", "bar", "T", "diamond", "tip down", "three lobes", "five lobes"],
)
def test_other_outlines_are_none_of_the_shapes(outline: Outline) -> None:
    assert shape_read(outline) == "?"


@pytest.mark.parametrize("asked", SHAPES)
def test_every_other_shape_is_wrong(asked: str) -> None:
    things = [MovingShape(shape, "cyan", "left") for shape in SHAPES]
    for thing, clip in zip(things, draw([Spec((thing,), "checkered") for thing in things], seed=4), strict=True):
        judged = judge(analyse(clip), [dataclasses.replace(thing, shape=asked)])
        assert judged.shape == (thing.shape == asked,)


def test_a_flicker_does_not_count_and_a_vanishing_object_is_not_read() -> None:
    thing = MovingShape("circle", "blue", "right")
    [clip], [empty] = draw([Spec((thing,), "black")]), [np.zeros((33, 112, 144, 3), np.uint8)]
    [pair] = draw([Spec((thing, dataclasses.replace(thing, colour="red")), "black")])
    flicker = np.concatenate([pair[:5], clip[5:]])
    assert judge(analyse(flicker), [thing]).count
    brief = np.concatenate([clip[:6], empty[6:]])
    assert analyse(brief) == Verdict((), 0)
    half = np.concatenate([clip[:16], empty[16:]])
    assert analyse(half).count == 1
    assert [f.answer for f in analyse(half).objects] == [("?", "?", "?")]


def test_specks_ghosts_and_noise_do_not_count() -> None:
    [clip] = draw([Spec((MovingShape("triangle", "green", "down"),), "gradient")])
    noisy = clip.astype(int) + np.random.default_rng(0).normal(0, 6, clip.shape)
    noisy[:, 4:9, 4:9] = (250, 20, 20)  # a speck
    noisy[:, 90:110, 2:22] += (25, -10, 5)  # a pale ghost
    verdict = analyse(noisy.round().clip(0, 255).astype(np.uint8))
    assert str(verdict) == "1: green triangle down"


def test_an_object_that_stands_still_or_moves_aslant_has_no_direction() -> None:
    scenes = draw_scenes(
        [Spec((MovingShape("cross", "pink", "up"),), "white")] * 2, DEFAULT, torch.Generator().manual_seed(0)
    )
    centre = scenes.centre.clone()
    centre[0, 0] = torch.tensor([70.0, 50.0])
    time_ = torch.linspace(0, 1, 33)
    centre[1, 0] = torch.stack([40 + 50 * time_, 30 + 45 * time_], -1)
    for clip in clips_of(dataclasses.replace(scenes, centre=centre)):
        assert [f.answer for f in analyse(clip).objects] == [("pink", "cross", "?")]


def test_judge_assigns_objects_so_that_most_is_right() -> None:
    def found(colour: str, shape: str, direction: str) -> Found:
        return Found(shape, colour, direction, 0.9, (0.0, 0.0), 500.0, 1.0)

    asked = [MovingShape("circle", "red", "up"), MovingShape("star", "blue", "left")]
    swapped = Verdict((found("blue", "star", "left"), found("red", "circle", "down")), 2)
    assert judge(swapped, asked) == Judgement((True, True), (True, True), (False, True), True)
    twin = Verdict((found("blue", "star", "left"), found("blue", "star", "left")), 2)
    assert judge(twin, asked) == Judgement((False, True), (False, True), (False, True), True)
    assert judge(Verdict((), 0), asked) == Judgement((False, False), (False, False), (False, False), False)


@pytest.mark.parametrize(
    "clip", [np.zeros((4, 8, 8), np.uint8), np.zeros((4, 8, 8, 3)), np.zeros((0, 8, 8, 3), np.uint8)]
)
def test_refuses_other_arrays(clip: np.ndarray) -> None:
    with pytest.raises(ValueError, match="uint8"):
        analyse(clip)
