"""One rule for medians, of tables as of a few numbers: NaN stays NaN, and infinities are numbers."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanfp4.quality import map_pages, metrics
from wanfp4.quality.intervals import interval
from wanfp4.quality.maps import AttentionMap
from wanfp4.quality.medians import badness, median, medians
from wanfp4.quality.shadow import FIGURES

ANY = st.floats(width=32)  # halves and sums of these are exact


@given(st.lists(ANY, min_size=1, max_size=9))
def test_every_median_follows_the_rule(values):
    found = median(values)
    if any(math.isnan(v) for v in values):
        expected = math.nan
    else:
        low, high = statistics.median_low(values), statistics.median_high(values)
        expected = low if low == high else (low + high) / 2
    assert found == pytest.approx(expected, rel=1e-15, abs=0, nan_ok=True)
    assert float(medians(values)) == pytest.approx(expected, rel=1e-15, abs=0, nan_ok=True)
    for other in (metrics.spread(values)["median"], interval(values).median):
        assert other == pytest.approx(expected, rel=1e-15, abs=0, nan_ok=True)
    assert map_pages._medians([[v] for v in values])[0] == pytest.approx(expected, rel=1e-15, abs=0, nan_ok=True)
    runs = [{"prompt": 0, "figures": {name: [v] for name in FIGURES}} for v in values]
    found = AttentionMap({"cells": [["transformer", "blocks", 0, 0, ""]], "ran": ["x"], "runs": runs})
    assert [*found.medians("rel_l2").values()] == pytest.approx([expected], rel=1e-15, abs=0, nan_ok=True)


def test_columns_are_by_themselves_and_nothing_has_no_median():
    table = np.array([[1.0, math.nan, math.inf], [2.0, 1.0, math.inf], [4.0, 2.0, -math.inf], [3.0, 0.0, math.inf]])
    assert medians(table) == pytest.approx([2.5, math.nan, math.inf], nan_ok=True)
    assert medians(np.zeros((0, 2))) == pytest.approx([math.nan] * 2, nan_ok=True)
    assert math.isnan(median([]))


def test_nan_is_the_worst():
    assert sorted([0.5, "NaN", 2, math.nan, 0.1], key=badness) == [
        0.1,
        0.5,
        2,
        "NaN",
        pytest.approx(math.nan, nan_ok=True),
    ]
    assert badness("Infinity") == badness("NaN") == math.inf
