"""Specs, captions and pixels."""

import random

import pytest
import torch

from wanfp4.samples.data import (
    BACKGROUNDS,
    COLOUR_NAMES,
    DEFAULT,
    DIRECTION_NAMES,
    DIRECTIONS,
    EXTENT,
    HELD_OUT,
    LONG,
    SHAPES,
    TRAINING,
    MovingShape,
    Size,
    Spec,
    caption,
    hue_gap,
    prompt_of,
    random_spec,
    vocabulary,
)
from wanfp4.samples.models import TEXT_TOKENS, build_tokenizer, tokenise
from wanfp4.samples.render import RADII, clip_pool, draw_scenes, render, to_uint8, windows

SMALL = Size(5, 48, 64)


def specs_of(seed: int, count: int, **options: object) -> list[Spec]:
    rng = random.Random(seed)
    return [random_spec(rng, **options) for _ in range(count)]


def test_combinations_are_split_and_every_pair_of_attributes_stays_in_training() -> None:
    assert len(TRAINING) == 137
    assert len(HELD_OUT) == 23
    assert not set(TRAINING) & set(HELD_OUT)
    assert {(t.shape, t.colour) for t in TRAINING} == {(s, c) for s in SHAPES for c in COLOUR_NAMES}
    assert {(t.shape, t.direction) for t in TRAINING} == {(s, d) for s in SHAPES for d in DIRECTION_NAMES}
    assert {(t.colour, t.direction) for t in TRAINING} == {(c, d) for c in COLOUR_NAMES for d in DIRECTION_NAMES}


def test_training_specs_never_hold_a_held_out_combination() -> None:
    seen = {thing for spec in specs_of(0, 4000) for thing in spec.objects}
    assert seen == set(TRAINING)


def test_two_objects_in_the_share_asked_for_and_with_hues_apart() -> None:
    specs = specs_of(1, 4000, pairs=0.18)
    assert 0.15 < sum(len(s.objects) == 2 for s in specs) / 4000 < 0.21
    for spec in specs_of(2, 500, objects=3):
        a, b, c = (t.colour for t in spec.objects)
        assert min(hue_gap(a, b), hue_gap(b, c), hue_gap(a, c)) >= 2


def test_captions_stay_in_the_vocabulary_and_leave_room_for_padding() -> None:
    rng, words = random.Random(3), set(vocabulary())
    captions = [caption(rng, spec) for spec in specs_of(3, 6000, pairs=0.5)]
    assert {word for text in captions for word in text.split()} <= words
    assert {word for text in captions for word in text.split()} >= words - {"."}
    tokens = tokenise(build_tokenizer(), captions)  # raises when one is too long
    assert int((tokens != 0).sum(1).max()) < TEXT_TOKENS
    assert not (tokens == build_tokenizer().unk_token_id).any()


def test_a_caption_names_its_objects_and_counts_them_only_when_it_may() -> None:
    rng = random.Random(4)
    for spec in specs_of(4, 1500, pairs=0.5):
        words = caption(rng, spec, background=True).split()
        assert all(thing.colour in words and thing.shape in words for thing in spec.objects)
        assert (spec.background in words) or (spec.background == "gray" and "grey" in words)
        if len(spec.objects) == 1:
            assert not {"two", "and", "while"} & set(words)
        else:
            assert "single" not in words
            assert {"and", "while"} & set(words)


def test_captions_and_specs_follow_from_the_seed() -> None:
    def draw(seed: int) -> list[str]:
        rng = random.Random(seed)
        return [caption(rng, random_spec(rng)) for _ in range(50)]

    assert draw(5) == draw(5)
    assert draw(5) != draw(6)


def test_the_plain_prompt() -> None:
    pair = (MovingShape("circle", "red", "right"), MovingShape("star", "orange", "up"))
    assert prompt_of(Spec(pair, "gray")) == "a red circle moving right and an orange star moving up"
    assert prompt_of(Spec(pair[:1], "white"), background=True) == "a red circle moving right on a white background"


def test_too_long_a_caption_is_refused() -> None:
    with pytest.raises(ValueError, match="38 tokens"):
        tokenise(build_tokenizer(), ["a red circle " * 20])


def test_clips_follow_from_the_seed() -> None:
    specs = specs_of(7, 6, pairs=0.5)
    first, again, other = (clip_pool(specs, SMALL, seed, "cpu", batch=4) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (6, 3, 5, 48, 64)
    assert first.dtype == torch.uint8


@pytest.mark.parametrize("size", [DEFAULT, LONG])
@pytest.mark.parametrize("objects", [1, 2, 3])
def test_objects_move_as_named_inside_the_picture_and_apart(objects: int, size: Size) -> None:
    specs = specs_of(8, 300, objects=objects)
    scenes = draw_scenes(specs, size, torch.Generator().manual_seed(0))
    reach = scenes.radius[..., None] * EXTENT
    assert (scenes.centre.amin(2) >= reach).all()
    assert (torch.tensor([size.width, size.height]) - scenes.centre.amax(2) >= reach).all()
    moved = scenes.centre[:, :, -1] - scenes.centre[:, :, 0]
    way = torch.tensor([[DIRECTIONS[t.direction] for t in s.objects] for s in specs], dtype=torch.float32)
    assert ((moved * way).sum(-1) >= 0.2 * min(size.height, size.width)).all()
    assert ((moved - (moved * way).sum(-1, keepdim=True) * way).abs() < 1e-3).all()
    low, high = (r * min(size.height, size.width) / 112 for r in RADII[objects])
    assert scenes.radius.min() >= low
    assert scenes.radius.max() <= high
    for i in range(objects):
        for j in range(i):
            distance = (scenes.centre[:, i] - scenes.centre[:, j]).norm(dim=-1).amin(-1)
            apart = distance >= 1.2 * (scenes.radius[:, i] + scenes.radius[:, j])
            assert apart.float().mean() >= (0.995 if objects == 2 else 0.97)  # they do not always find room


def test_backgrounds_are_grey_and_objects_have_their_colour() -> None:
    specs = [Spec((MovingShape("square", "green", "right"),), background) for background in BACKGROUNDS]
    scenes = draw_scenes(specs, DEFAULT, torch.Generator().manual_seed(0))
    clips = to_uint8(render(scenes)).int()
    chroma = clips.amax(-1) - clips.amin(-1)
    x, y = scenes.centre[:, 0, 0].round().long().T
    middle = clips[torch.arange(len(specs)), 0, y, x]
    assert ((middle - torch.tensor([31, 184, 51])).abs() <= 20).all()
    assert (chroma > 64).float().mean() < 0.1
    assert ((chroma > 2) & (chroma < 60)).float().mean() < 0.01  # soft edges only


def test_windows_are_cut_from_the_pool() -> None:
    pool = clip_pool(specs_of(9, 3), SMALL, 0, "cpu")
    cut = windows(pool, random.Random(0), 4, 16)
    assert cut.shape == (4, 3, 5, 16, 16)
    assert torch.equal(cut, windows(pool, random.Random(0), 4, 16))
    pixels = ((cut + 1) * 127.5).round().to(torch.uint8)
    spots = pool.unfold(3, 16, 1).unfold(4, 16, 1)  # [N, 3, T, y, x, 16, 16]
    for window in pixels:
        assert (spots == window[None, :, :, None, None]).all(6).all(5).all(2).all(1).any()
