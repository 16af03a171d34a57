"""What a search is made of: knapsack, cells, costs and targets, each against what trying everything finds."""

import itertools
import json
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_cases import ACCURATE, FAST, grid_of

from wanfp4.errors import PolicyError, SettingsError
from wanfp4.policy import EXACT, Policy, get_policy, policies
from wanfp4.quality import costs, knapsack
from wanfp4.quality.cells import Sensitivities, check_candidates, groups_of
from wanfp4.quality.knapsack import frontier
from wanfp4.quality.targets import check_held_out, check_targets

# The knapsack

tables = st.integers(1, 5).flatmap(
    lambda cells: st.lists(
        st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12)), min_size=1, max_size=3),
        min_size=cells,
        max_size=cells,
    )
)


@given(tables)
def test_the_frontier_is_what_trying_everything_finds(table):
    costs_of = [[c / 7 for c, _ in cell] for cell in table]
    damages = [[d / 5 for _, d in cell] for cell in table]
    found = frontier(costs_of, damages)
    everything = [
        tuple(sum(cell[j][what] for cell, j in zip(table, picks, strict=True)) for what in (0, 1))
        for picks in itertools.product(*(range(len(cell)) for cell in table))
    ]
    best = sorted({p for p in everything if not any(o != p and o[0] <= p[0] and o[1] <= p[1] for o in everything)})
    assert found.exact
    assert found.cost == pytest.approx([c / 7 for c, _ in best])
    assert found.damage == pytest.approx([d / 5 for _, d in best])
    for point in range(len(found)):
        picks = found.choices(point)
        assert sum(costs_of[i][j] for i, j in enumerate(picks)) == pytest.approx(found.cost[point])
        assert sum(damages[i][j] for i, j in enumerate(picks)) == pytest.approx(found.damage[point])


def test_a_choice_that_broke_is_never_made():
    found = frontier([[1, 0], [1, 0]], [[0, math.inf], [0, math.nan]])
    assert [found.choices(i) for i in range(len(found))] == [[0, 0]]


@pytest.mark.parametrize(
    ("cost", "damage"),
    [([], []), ([[1]], [[1, 2]]), ([[-1]], [[1]]), ([[math.nan]], [[1]]), ([[1]], [[math.inf]]), ([[1]], [[-1]])],
)
def test_tables_that_make_no_sense_are_refused(cost, damage):
    with pytest.raises(ValueError, match=r"costs|choice"):
        frontier(cost, damage)


def test_thinned_frontiers_stay_close(monkeypatch):
    generator = np.random.default_rng(3)
    cost = generator.random((12, 3))
    damage = (1 - cost) ** 2 * (1 + 0.01 * generator.random((12, 3)))
    exact = frontier(cost.tolist(), damage.tolist())
    monkeypatch.setattr(knapsack, "MOST_POINTS", 200)
    thinned = frontier(cost.tolist(), damage.tolist())
    assert exact.exact
    assert not thinned.exact
    assert len(thinned) < len(exact)
    for limit in np.linspace(exact.damage[-1] * 1.1, exact.damage[0], 7):
        cheapest = exact.cost[exact.damage <= limit].min()
        near = thinned.cost[thinned.damage <= limit].min()
        assert cheapest <= near <= cheapest + 12 / 200 * (exact.cost[-1] - exact.cost[0])


# Cells and policies


@given(st.data())
def test_a_policy_runs_what_was_assigned(data):
    switch = data.draw(st.sampled_from([None, 3]))
    grid = grid_of(
        steps=7, layers=5, bins=data.draw(st.integers(1, 7)), groups=data.draw(st.integers(1, 5)), switch=switch
    )
    cells = math.prod(grid.shape)
    chosen = np.array(data.draw(st.lists(st.integers(0, 2), min_size=cells, max_size=cells))).reshape(grid.shape)
    policy = Policy.from_json(grid.policy(chosen, "made").to_json())
    numerics = [EXACT, FAST.numerics, ACCURATE.numerics]
    sigmas = [3 * t / (1 + 2 * t) for t in np.linspace(1, 0.05, 7)]
    for b, one in enumerate(grid.bins):
        for step in one.steps:
            expert = one.expert or "transformer"
            for g, group in enumerate(grid.groups):
                for layer in group:
                    ran = policy.resolve(layer=layer, num_layers=5, sigma=sigmas[step], expert=expert, tokens=99)
                    assert ran.numerics == numerics[chosen[b, g]]
    assert policy.guard == (FAST.guard if (chosen == 1).any() else None)


@given(st.data())
def test_a_prediction_adds_the_squares_of_the_cells(data):
    steps, layers = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    switch = data.draw(st.sampled_from([None, steps // 2]))
    grid = grid_of(
        steps, layers, data.draw(st.integers(1, steps)), data.draw(st.integers(1, layers)), switch or None,
    )  # fmt: skip
    runs = data.draw(st.integers(1, 3))
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    squares = generator.lognormal(-3, 2, (3, len(grid.groups), runs, steps))
    squares[0] = 0
    squares[2, 0, 0, steps - 1] = math.inf
    chosen = generator.integers(3, size=grid.shape)
    found = Sensitivities(grid, squares).predict(chosen)
    assert found.shape == (runs, steps)
    for r, (b, one) in itertools.product(range(runs), enumerate(grid.bins)):
        for step in one.steps:
            total = sum(squares[chosen[b, g], g, r, step] for g in range(len(grid.groups)))
            assert found[r, step] == pytest.approx(math.sqrt(total), rel=1e-12)


def test_other_numbers_of_steps_fall_into_the_same_ranges():
    grid = grid_of(steps=9, bins=4, switch=4)
    chosen = np.array([[b % 3] * 4 for b in range(4)])
    policy = grid.policy(chosen, "made")
    known = [EXACT, FAST.numerics, ACCURATE.numerics]
    for expert in ("transformer", "transformer_2"):
        own = [b for b in range(4) if grid.bins[b].expert == expert]
        for sigma in np.linspace(0, 1, 101):
            ran = policy.resolve(layer=0, num_layers=4, sigma=float(sigma), expert=expert, tokens=99)
            inside = [b for b in own if grid.bins[b].sigma[0] <= sigma <= grid.bins[b].sigma[1]]
            assert ran.numerics in [known[b % 3] for b in inside]
            assert inside


def test_bins_have_equal_numbers_of_steps_and_end_at_a_change_of_expert():
    assert [len(b.steps) for b in grid_of(steps=10, bins=5).bins] == [2] * 5
    assert [len(b.steps) for b in grid_of(steps=11, bins=3).bins] == [4, 4, 3]
    dual = grid_of(steps=10, bins=5, switch=2).bins
    assert (dual[0].expert, len(dual[0].steps)) == ("transformer", 2)
    assert all(b.expert == "transformer_2" for b in dual[1:])
    assert sum(len(b.steps) for b in dual) == 10
    assert dual[0].sigma == (0.0, 1.0)
    assert len(grid_of(steps=2, bins=5).bins) == 2


def test_groups():
    assert groups_of(3, None) == ((0,), (1,), (2,))
    assert [len(g) for g in groups_of(40, None)] == [4, 4, 4, 4, 3, 3, 3, 3, 3, 3, 3, 3]
    assert groups_of(5, 2) == ((0, 1, 2), (3, 4))
    for count in (0, 6, True, 1.5):
        with pytest.raises(SettingsError, match="from 1 to 5"):
            groups_of(5, count)


def test_time_and_share_weigh_steps_and_layers():
    grid = grid_of(steps=3, layers=3, bins=2, groups=2)  # bins of 2 and 1 steps, groups of 2 and 1 layers
    chosen = np.array([[1, 0], [0, 2]])
    assert grid.share(chosen) == pytest.approx(4 / 9)
    assert grid.time(chosen) == pytest.approx((4 * grid.costs[0] + 1 * grid.costs[1] + 4) / 9)


def test_candidates_that_one_policy_cannot_hold_are_refused():
    check_candidates([FAST, ACCURATE, get_policy("nvfp4")])
    with pytest.raises(PolicyError, match="different guard"):
        check_candidates([FAST, get_policy("direct-p-fast")])
    with pytest.raises(PolicyError, match="different min_tokens"):
        check_candidates([FAST, ACCURATE.with_(min_tokens=5)])
    with pytest.raises(PolicyError, match="rules of its own"):
        check_candidates([Policy("mine", FAST.numerics, rules=[{"numerics": "bf16", "layers": [0]}])])
    with pytest.raises(PolicyError, match="rounds nothing"):
        check_candidates([get_policy("bf16")])


# Costs


def test_modelled_costs_follow_bits_and_exponentials():
    found = {name: costs.modelled(policy.numerics) for name, policy in policies().items()}
    assert found["bf16"] == 1
    assert found["wan-fast"] == found["wan-two-piece"] == pytest.approx(354 / 1024)
    assert found["fp8-direct"] == 0.5
    assert found["nvfp4"] == found["mxfp8-token-block"] == pytest.approx(113 / 128)
    assert all(0 < cost <= 1 for cost in found.values())
    shares = {name: costs.share_in_4_bits(policy.numerics) for name, policy in policies().items()}
    assert shares["wan-fast"] == shares["nvfp4"] == shares["sage3"] == 1
    assert shares["nvfp4-fp8"] == shares["nvfp4-bf16"] == 0.5
    assert shares["bf16"] == shares["fp8-direct"] == 0


def bench(tmp_path, **changes):
    def row(tokens, fast):
        times = {"wan-fast": {"median": fast}, "wan-fast / triton": {"median": 3.0}, "sdpa": {"median": 2.0}}
        return {"tokens": tokens, "heads": 12, "times": {**times, "nvfp4": {"error": "no"}}}

    path = tmp_path / "bench.json"
    data = {"kind": "wanfp4 bench", "machine": {"name": "a GPU"}, "attention": [row(100, 9.0), row(1000, 1.0)]}
    path.write_text(json.dumps({**data, **changes}))
    return path


def test_measured_costs_are_of_the_nearest_shape_and_the_named_backend(tmp_path):
    path = bench(tmp_path)
    found, where = costs.measured([FAST], path, None, 700)
    assert found == [0.5]
    assert "a GPU" in where
    assert "1000 tokens" in where
    assert costs.measured([FAST], path, None, 150)[0] == [1.5]  # triton's 3 beats 9
    assert costs.measured([FAST], path, "triton", 700)[0] == [1.5]


@pytest.mark.parametrize(
    ("changes", "policy", "said"),
    [
        ({"kind": "other"}, "wan-fast", "its kind is 'other'"),
        ({"attention": []}, "wan-fast", "no times of attention"),
        ({"attention": [{"tokens": 9, "heads": 1, "times": {"own": {"median": 1.0}}}]}, "wan-fast", "no time of BF16"),
        ({}, "nvfp4", "has no time of 'nvfp4'; it has wan-fast, wan-fast / triton, sdpa"),
        ({"attention": 3}, "wan-fast", "cannot read times"),
    ],
)  # fmt: skip
def test_times_that_are_not_there_are_named(tmp_path, changes, policy, said):
    with pytest.raises(SettingsError, match=re.escape(said)):
        costs.measured([get_policy(policy)], bench(tmp_path, **changes), None, 100)


# Targets


def test_targets():
    found = check_targets({"velocity": 0.3, "velocity-mean": 0.1}, [0.8])
    assert [t.label for t in found] == ["share-0.8", "velocity-0.3", "velocity-mean-0.1"]


@pytest.mark.parametrize(
    ("budget", "shares", "said"),
    [
        ({}, [], "needs a target"),
        ({}, [0], "above 0 and at most 1"),
        ({}, [1.5], "above 0 and at most 1"),
        ({}, [0.8, 0.8], "share-0.8 is given more than once"),
        ({}, [0.8, 0.80000001], "share-0.8 is given more than once"),
        ({"psnr": 20.0}, [], "a search can aim at velocity and velocity-mean"),
        ({"speed": 1.0}, [], "no budget metric 'speed'"),
        ({"velocity": 0.0}, [], "must be above 0"),
    ],
)
def test_targets_that_cannot_be_are_refused(budget, shares, said):
    with pytest.raises(SettingsError, match=re.escape(said)):
        check_targets(budget, shares)


def test_held_out_runs_are_never_those_searched_on():
    assert check_held_out(["a"], [0, 3], [], None) == ([("a", 0), ("a", 3)], [("a", 4), ("a", 5)])
    assert check_held_out(["a"], [0], ["b"], [0]) == ([("a", 0)], [("b", 0)])
    with pytest.raises(SettingsError, match="judged by what it was made from"):
        check_held_out(["a"], [0], [], [0])
    for prompts, seeds, said in (
        ([], [], "one or more"),
        ([], [2, 2], "each given once"),
        ([], [-1], "seed"),
        (["b", "b"], [1], "more than once"),
        ([" "], [1], "not empty"),
    ):
        with pytest.raises(SettingsError, match=said):
            check_held_out(["a"], [0], prompts, seeds)
