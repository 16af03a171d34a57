"""Maps of the tiny pipeline, for the tests of maps and of what they name."""

from tiny import FRAMES, HEIGHT, WIDTH

from wanfp4.processors.pipelines import Settings
from wanfp4.quality.maps import attention_map

LAYERS, STEPS = 4, 4


def settings(steps=STEPS, guidance=4.0):
    return Settings(HEIGHT, WIDTH, FRAMES, steps, guidance)


def mapped(pipe, policy="wan-fast", prompts=("a red circle moving right",), seeds=(0,), **options):
    options = {"settings": settings(), "progress": False, "max_sequence_length": 32, **options}
    return attention_map(pipe, policy, prompts, seeds, **options)
