"""Every instruction on registers, through PTX: in a whole warp, guarded, in branches, loops and after early returns."""

import cases
import pytest
from lanes import Batch, batches

BATCHES = {
    f"{family} {index}, {batch[0].opcode}…": batch
    for family, make in cases.FAMILIES.items()
    for index, batch in enumerate(batches(make()))
}


@pytest.mark.parametrize("name", BATCHES)
def test_registers(name):
    Batch(BATCHES[name]).check()
