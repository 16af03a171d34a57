"""Bootstrap intervals cover what they should, and differences are only called one when they are."""

import math

import numpy as np
import pytest

from wanfp4.quality import intervals as module
from wanfp4.quality.intervals import (
    HIGHER,
    INSIDE_FLOOR,
    LOWER,
    NOT_TOLD_APART,
    compare,
    few,
    interval,
    intervals,
)


def test_the_median_is_that_of_the_values_and_lies_inside():
    found = interval([3.0, 1.0, 2.0, 10.0])
    assert found.median == 2.5
    assert 1 <= found.low <= 2.5 <= found.high <= 10
    assert found.runs == 4


def test_an_interval_of_95_per_cent_holds_the_true_median_about_so_often():
    generator = np.random.default_rng(1)
    samples = generator.lognormal(size=(25, 200))
    held = sum(found.low <= 1.0 <= found.high for found in intervals(samples))
    assert 0.88 <= held / 200 <= 0.99


def test_against_all_resamples_of_three_values():
    """27 equally likely draws with replacement: the smallest is the median in 7 of them, the largest in 7."""
    found = interval([1.0, 2.0, 3.0], level=0.4)
    assert (found.low, found.high) == (2.0, 2.0)
    found = interval([1.0, 2.0, 3.0], level=0.9)
    assert (found.low, found.high) == (1.0, 3.0)


def test_runs_of_one_prompt_are_drawn_together():
    """Four seeds that agree add nothing to what two prompts that differ say."""
    values, prompts = [1.0] * 4 + [2.0] * 4, [0] * 4 + [1] * 4
    clustered = interval(values, prompts)
    assert (clustered.low, clustered.high) == (1.0, 2.0)
    generator = np.random.default_rng(0)
    noisy = [base + generator.normal(0, 0.01) for base in (1, 2, 3, 4, 5) for _ in range(6)]
    alone = interval(noisy)
    together = interval(noisy, [i // 6 for i in range(30)])
    assert together.high - together.low > 1.2 * (alone.high - alone.low)


def test_one_run_has_a_median_and_no_interval():
    found = interval([0.25])
    assert found.median == 0.25
    assert not found.known
    assert found.to_dict() == {"median": 0.25, "low": "NaN", "high": "NaN", "runs": 1, "level": 0.95}


def test_the_same_figures_give_the_same_interval_and_another_seed_nearly_so():
    values = list(np.random.default_rng(3).normal(size=30))
    assert interval(values) == interval(values)
    assert interval(values, seed=1).low == pytest.approx(interval(values).low, abs=0.3)


def test_nan_and_infinity_stay():
    assert math.isnan(interval([1.0, math.nan, 2.0]).median)
    assert not interval([1.0, math.nan]).known
    assert interval([math.inf, math.inf, 1.0]).median == math.inf
    assert interval([math.inf] * 4).high == math.inf


def test_draws_are_made_once_for_runs_of_the_same_prompts(monkeypatch):
    """Tables of layers and steps ask for the same ones again; figures are those of fresh draws."""
    made = []
    original = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: made.append(seed) or original(seed))
    values, prompts = list(original(3).normal(size=8)), [0, 0, 1, 1, 1, 2, 3, 3]
    module._draws.cache_clear()
    first = interval(values, prompts)
    assert [interval(values, prompts), interval(values, list("aabbbcdd"))] == [first, first]
    assert made == [0]
    others = interval(values), interval(values, prompts, seed=1), interval(values, [0, 1, 1, 1, 0, 2, 3, 3])
    assert len(made) == 4
    module._draws.cache_clear()
    assert interval(values, prompts) == first
    assert interval(values) == others[0]
    assert interval(values, prompts, seed=1) == others[1]


@pytest.mark.parametrize(
    ("prompts", "seeds", "sure"), [(2, 1, False), (2, 4, False), (3, 4, False), (5, 2, False), (6, 4, True)]
)
def test_verdicts_where_nothing_differs_are_as_frequent_as_the_warning_says(prompts, seeds, sure):
    """Prompts that differ by more than seeds do: seeds do not make up for them."""
    generator, of_runs = np.random.default_rng(1), [p for p in range(prompts) for _ in range(seeds)]
    effects = generator.normal(size=(300, prompts, 1)) + generator.normal(0, 0.05, (300, prompts, seeds))
    verdicts = [compare(row.ravel(), np.zeros(len(of_runs)), of_runs).verdict for row in effects]
    wrong = 1 - verdicts.count(NOT_TOLD_APART) / 300
    chance = 2 ** (1 - prompts)
    assert wrong == pytest.approx(chance, abs=0.06)
    said = few(of_runs)
    assert (said is None) == sure
    if said is not None:
        assert f"With {prompts} prompts" in said
        assert f"in {100 * chance:.0f} % of cases, however many seeds" in said


def test_a_single_prompt_is_said_and_its_runs_are_counted():
    assert few([]) is None
    assert few(["a"]) is None
    assert "that prompt alone. With 2 runs" in few(["a", "a"])
    assert "in 50 % of cases. Take" in few(["a", "a"])
    assert few(["a"] * 6).endswith("of that prompt alone.")


@pytest.mark.parametrize(
    ("values", "prompts"), [([], None), ([1.0, 2.0], [0]), ([1.0], [0, 1])]
)  # fmt: skip
def test_nothing_to_judge_is_an_error(values, prompts):
    with pytest.raises(ValueError, match=r"figures of one run or more|as many prompts"):
        interval(values, prompts)


def test_differences():
    base = [0.10, 0.12, 0.11, 0.13, 0.10, 0.12]
    better = [x - 0.02 for x in base]
    assert compare(better, base).verdict == LOWER
    assert compare(base, better).verdict == HIGHER
    assert compare(better, base, floor=0.03).verdict == INSIDE_FLOOR
    assert compare(base, base).verdict == INSIDE_FLOOR
    mixed = [x + d for x, d in zip(base, (0.02, -0.02, 0.03, -0.01, -0.02, 0.01), strict=True)]
    assert compare(mixed, base).verdict == NOT_TOLD_APART
    assert compare([1.0], [2.0]).verdict == NOT_TOLD_APART
    assert compare([math.nan, 1.0], [2.0, 2.0]).verdict == NOT_TOLD_APART
    assert compare(better, base, floor=math.nan).verdict == NOT_TOLD_APART
    with pytest.raises(ValueError, match="paired figures"):
        compare([1.0], [1.0, 2.0])
    said = compare(better, base, floor=0.01).to_dict()
    assert said["difference"]["median"] == pytest.approx(-0.02)
    assert (said["verdict"], said["floor"]) == (LOWER, 0.01)
