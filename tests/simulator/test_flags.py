"""Ordered accesses of shared memory run where nothing is judged; test_operands.py has that tracking refuses them."""

import numpy as np
import pytest
from effects import FLAGS
from programs import aligned, run


@pytest.mark.parametrize("options", [{}, {"seed": 1}])
def test_they_do_what_their_plain_forms_do(options):
    out = aligned(np.zeros((32, 4), np.uint32))
    run(FLAGS, out, **options)
    thread = np.arange(32)
    after = np.where(thread + 5 >= 20, 0, thread + 6)  # PTX ISA, atom.inc
    np.testing.assert_array_equal(out, np.stack([thread, thread + 5, thread + 5, after], 1))
