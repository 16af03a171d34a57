"""Every instruction, through PTX, against truths in Python and NumPy.

Instructions on registers run in a whole warp, guarded, in branches, loops and after early returns.
"""

import asynchronous
import cases
import effects
import pytest
from lanes import Batch, batches

BATCHES = {
    f"{family} {index}, {batch[0].opcode}": batch
    for family, make in cases.FAMILIES.items()
    for index, batch in enumerate(batches(make()))
}


@pytest.mark.parametrize("name", BATCHES)
def test_registers(name):
    Batch(BATCHES[name]).check()


PROGRAMS = {**effects.PROGRAMS, **asynchronous.PROGRAMS}


@pytest.mark.parametrize("name", PROGRAMS)
def test_memory_warps_and_barriers(name):
    PROGRAMS[name]().run()
