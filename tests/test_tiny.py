"""The test pipeline itself: deterministic, prompt and self-attention matter, video comes out."""

import torch
from tiny import FRAMES, HEIGHT, TOKENS, WIDTH, generate, tiny_pipeline


def test_latents_are_repeatable_and_depend_on_prompt_and_seed():
    first = generate(tiny_pipeline())
    assert first.shape == (1, 16, 3, 10, 14)
    assert torch.isfinite(first).all()
    assert torch.equal(first, generate(tiny_pipeline()))
    assert not torch.equal(first, generate(tiny_pipeline(), "a blue star moving left"))
    assert not torch.equal(first, generate(tiny_pipeline(), seed=1))


def test_two_experts_take_part():
    pipe = tiny_pipeline(dual=True)
    ran = []
    for name in ("transformer", "transformer_2"):
        getattr(pipe, name).register_forward_pre_hook(lambda module, args, name=name: ran.append(name))
    generate(pipe, steps=4)
    assert ran == ["transformer"] * 4 + ["transformer_2"] * 4  # two steps each, two branches a step


def test_token_count_is_not_a_multiple_of_32():
    pipe = tiny_pipeline()
    seen = []
    pipe.transformer.blocks[0].attn1.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    generate(pipe, steps=1, guidance=1.0)
    assert seen == [TOKENS]
    assert TOKENS % 32


def test_video_decodes_to_the_size_asked_for():
    pipe = tiny_pipeline()
    latents = generate(pipe, steps=1, guidance=1.0)
    with torch.no_grad():
        video = pipe.vae.decode(latents).sample
    assert video.shape == (1, 3, FRAMES, HEIGHT, WIDTH)
