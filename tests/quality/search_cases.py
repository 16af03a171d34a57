"""Steps, and grids of layers and noise levels, for the tests of the search."""

import numpy as np

from wanfp4.policy import get_policy
from wanfp4.quality import costs
from wanfp4.quality.cells import Grid, bins_of, groups_of
from wanfp4.quality.record import Step

FAST, ACCURATE = get_policy("wan-fast"), get_policy("fp8-direct")


def steps_of(sigmas, switch=None):
    return [
        Step(i, s, 1000 * s, "transformer_2" if switch is not None and i >= switch else "transformer")
        for i, s in enumerate(sigmas)
    ]


def grid_of(steps=10, layers=4, bins=5, groups=None, switch=None, candidates=(FAST, ACCURATE)):
    sigmas = [3 * t / (1 + 2 * t) for t in np.linspace(1, 0.05, steps)]
    return Grid(
        bins_of(steps_of(sigmas, switch), bins),
        groups_of(layers, groups),
        candidates,
        tuple(costs.modelled(p.numerics) for p in candidates),
        tuple(costs.share_in_4_bits(p.numerics) for p in candidates),
    )
