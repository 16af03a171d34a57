"""A search finds the best policy there is, corrects itself where it predicted wrongly, and goes on where it stopped."""

import dataclasses
import io
import itertools
import json
import math
import re
from collections import Counter

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import FRAMES, HEIGHT, WIDTH, generate, tiny_pipeline

from wanfp4.errors import BackendError, ModelError, OutputError, PolicyError, SettingsError, Wanfp4Error
from wanfp4.policy import EXACT, Guard, Policy, get_policy, policies
from wanfp4.processors.patch import patch
from wanfp4.processors.pipelines import Settings, info_of
from wanfp4.quality import costs, knapsack, search_pages
from wanfp4.quality import runs as runs_module
from wanfp4.quality import search as module
from wanfp4.quality.cells import Grid, Sensitivities, bins_of, check_candidates, groups_of, metric
from wanfp4.quality.knapsack import frontier
from wanfp4.quality.pages import figure
from wanfp4.quality.record import Step
from wanfp4.quality.runs import Runs, digest
from wanfp4.quality.search import search
from wanfp4.quality.search_report import SearchReport
from wanfp4.quality.targets import SHARE, Target, check_held_out, check_targets

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


# The search on a model whose errors are known


class Known:
    """Stands in for `Runs`: the velocity error of a policy is the root of the summed squares of its cells, exactly.

    wrong   factor on the error of held-out runs, which the prediction cannot know.
    """

    def __init__(self, layers, steps, *, seed=0, wrong=1.0, scale=1.0):
        generator = np.random.default_rng(seed)
        self.table = {
            FAST.numerics: scale * generator.lognormal(-3, 1, (layers, steps)),
            ACCURATE.numerics: scale * generator.lognormal(-5, 1, (layers, steps)),
            EXACT: np.zeros((layers, steps)),
        }
        self.layers, self.count, self.wrong = layers, steps, wrong
        self.sigmas = [3 * t / (1 + 2 * t) for t in np.linspace(1, 0.05, steps)]
        self.settings = Settings(steps=steps)
        self.asked = []

    def steps(self, pair):
        return steps_of(self.sigmas)

    def expect(self, runs):
        pass

    def met(self, policy, backend, pair):
        return False

    def measure(self, policy, backend, pair, *, free=False):
        self.asked.append((policy, pair))
        squares = np.zeros(self.count)
        for step, layer in itertools.product(range(self.count), range(self.layers)):
            ran = policy.resolve(layer=layer, num_layers=self.layers, sigma=self.sigmas[step], tokens=99).numerics
            squares[step] += self.table[ran][layer, step] ** 2
        velocity = np.sqrt(squares) * (self.wrong if pair[1] > 0 else 1.0)
        return {
            "velocity": list(velocity),
            "free": {"latent": 0.5},
            "backend": ["known"],
            "emulated": True,
            "receipt": [],
        }

    def velocities(self, policy, backend, pairs, *, free=False):
        return np.array([self.measure(policy, backend, pair)["velocity"] for pair in pairs])


def solved(known, targets, *, bins=3, checks=4, rounds=4, held_out=3, candidates=(FAST, ACCURATE)):
    data = {
        "steps": [{}] * known.count, "targets": [t.label for t in targets], "bins": [], "sensitivities": [],
        "additivity": None, "results": [], "measured": [],
    }  # fmt: skip
    report = SearchReport(data)
    grid = dataclasses.replace(grid_of(known.count, known.layers, candidates=candidates), bins=())
    pairs, others = [("a", 0), ("b", 0)], [("a", s) for s in range(1, held_out + 1)]
    job = module.Job(known, grid, None, pairs, others, bins, checks, rounds, report)
    job.run(targets)
    return job, data


def everything(grid):
    for picks in itertools.product(range(len(grid.candidates) + 1), repeat=math.prod(grid.shape)):
        yield np.array(picks).reshape(grid.shape)


def test_errors_that_add_in_squares_are_predicted_exactly():
    _, data = solved(Known(4, 6), [Target(SHARE, 0.5)], checks=6)
    for point in data["additivity"]["points"]:
        assert point["measured"] == pytest.approx(point["predicted"], rel=1e-6)
    assert data["additivity"]["ratio"] == pytest.approx(1, rel=1e-6)
    assert data["additivity"]["error"] == pytest.approx(0, abs=1e-6)
    assert len({p["predicted"] for p in data["additivity"]["points"] if p["kind"] == "random"}) == 6


@pytest.mark.parametrize("seed", range(6))
def test_a_share_is_kept_at_the_least_damage(seed):
    known = Known(3, 4, seed=seed)
    job, data = solved(known, [Target(SHARE, 0.5)], bins=2, checks=0)
    [result] = data["results"]
    grid = job.grid
    kept = [c for c in everything(grid) if grid.share(c) >= 0.5 - 1e-9]
    best = min(metric(job.known.predict(c), "velocity-mean") for c in kept)
    least_squares = min(kept, key=lambda c: float((job.known.predict(c) ** 2).mean()))
    labels = {"bf16": 0, "wan-fast": 1, "fp8-direct": 2}
    chosen = np.array([[labels[name] for name in row] for row in result["chosen"]])
    found = metric(job.known.predict(chosen), "velocity-mean")
    assert found <= metric(job.known.predict(least_squares), "velocity-mean") + 1e-12
    assert found == pytest.approx(best)
    assert result["kept"]
    assert float(result["searched"]["share"]) >= 0.5


@pytest.mark.parametrize("kind", ["velocity", "velocity-mean"])
def test_a_budget_is_kept_by_the_fastest(kind):
    known = Known(3, 4, seed=1)
    for fraction in (0.15, 0.4, 0.8):
        free = solved(known, [Target(SHARE, 1.0)], bins=2)[0]
        limit = fraction * metric(free.known.predict(free.grid.uniform(1)), kind)
        job, data = solved(known, [Target(kind, limit)], bins=2)
        [result] = data["results"]
        keep = [c for c in everything(job.grid) if metric(job.known.predict(c), kind) <= limit]
        fastest = min(job.grid.time(c) for c in keep)
        assert result["kept"]
        row = result["searched"]
        assert float(row["velocity"] if kind == "velocity" else row["velocity_mean"]["median"]) <= limit
        # For the worst step of a range, squares are bounded by the sum of each layer's worst: close, on the safe side.
        allowed = 0.12 if kind == "velocity" else 0
        assert fastest - 1e-6 <= float(result["searched"]["time"]) <= fastest + allowed + 1e-6


def test_a_wrong_prediction_is_corrected():
    known = Known(4, 6, wrong=1.6)
    free = solved(Known(4, 6), [Target(SHARE, 1.0)])[0]
    limit = 0.5 * metric(free.known.predict(free.grid.uniform(1)), "velocity-mean")
    _, data = solved(known, [Target("velocity-mean", limit)], bins=6)
    [result] = data["results"]
    first, second = result["rounds"][:2]
    assert not first["kept"]
    assert first["measured"] == pytest.approx(1.6 * first["predicted"])
    assert first["measured"] > limit
    assert second["goal"] == pytest.approx(0.99 * limit / 1.6)
    assert second["kept"]
    assert result["kept"]
    assert float(result["searched"]["velocity_mean"]["median"]) <= limit
    assert float(result["searched"]["time"]) == min(one["time"] for one in result["rounds"] if one["kept"])


def test_a_prediction_that_was_too_careful_is_used():
    free = solved(Known(4, 6), [Target(SHARE, 1.0)])[0]
    limit = 0.4 * metric(free.known.predict(free.grid.uniform(1)), "velocity-mean")
    _, data = solved(Known(4, 6, wrong=0.6), [Target("velocity-mean", limit)], bins=6)
    [result] = data["results"]
    assert result["rounds"][0]["kept"]
    assert float(result["searched"]["time"]) < result["rounds"][0]["time"]
    assert float(result["searched"]["velocity_mean"]["median"]) <= limit


class Scattered(Known):
    """Every run has its own noise on every step, so the worst step is another one in each."""

    def measure(self, policy, backend, pair, *, free=False):
        entry = super().measure(policy, backend, pair)
        generator = np.random.default_rng([*pair[0].encode(), pair[1]])
        return {**entry, "velocity": list(np.array(entry["velocity"]) * generator.lognormal(0, 0.4, self.count))}


def test_a_worst_step_budget_is_told_by_the_figure_that_is_judged():
    free = solved(Scattered(4, 8), [Target(SHARE, 1.0)])[0]
    limit = 0.5 * metric(free.known.predict(free.grid.uniform(1)), "velocity")
    _, data = solved(Scattered(4, 8), [Target("velocity", limit)], held_out=5)
    [result] = data["results"]
    row = result["searched"]
    judged, worst = float(row["velocity"]), float(row["velocity_worst"]["median"])
    assert judged <= limit
    assert worst > 1.05 * judged
    assert f"{figure(judged)} at the worst step" in search_pages.reading(result)
    assert figure(worst) not in search_pages.reading(result)
    usual = next(one for one in result["baselines"] if one["kind"] == "first-last")
    assert f"{figure(usual['velocity'])} at the worst step" in search_pages.reading(result)


@pytest.mark.parametrize("target", [Target(SHARE, 0.5), Target("velocity", 0.2), Target("velocity-mean", 0.1)])
def test_a_choice_from_thinned_sums_is_told(monkeypatch, target):
    _, data = solved(Known(4, 6), [target])
    assert all(one["exact"] for one in data["results"][0]["rounds"])
    assert "a little better may exist" not in search_pages.reading(data["results"][0])
    monkeypatch.setattr(knapsack, "MOST_POINTS", 3)
    _, data = solved(Known(4, 6), [target])
    assert not any(one["exact"] for one in data["results"][0]["rounds"])
    assert "a little better may exist" in search_pages.reading(data["results"][0])


def test_no_policy_where_none_keeps_the_budget():
    _, data = solved(Known(3, 4), [Target("velocity", 1e-9)])
    [result] = data["results"]
    assert not result["kept"]
    assert result["policy"] is None
    assert result["rounds"] == []
    assert "no policy but BF16" in search_pages.reading(result)
    _, data = solved(Known(3, 4, wrong=30), [Target("velocity", 0.5)], rounds=1)
    [result] = data["results"]
    assert not result["kept"]
    assert len(result["rounds"]) == 1
    assert "in 1 round;" in search_pages.reading(result)


def test_a_candidate_that_breaks_somewhere_is_not_used_there():
    known = Known(3, 4)
    known.table[FAST.numerics][1, 2] = math.nan
    _, data = solved(known, [Target(SHARE, 0.6)], bins=4, checks=0)
    [result] = data["results"]
    assert result["chosen"][2][1] != "wan-fast"
    assert result["kept"]


def test_baselines_keep_as_many_steps_in_bf16_as_the_share_allows():
    job, data = solved(Known(4, 10), [Target(SHARE, 0.6)], bins=5)
    [result] = data["results"]
    kinds = [row["kind"] for row in result["baselines"]]
    assert kinds[:3] == ["floor", "all", "all"]
    usual = next(row for row in result["baselines"] if row["kind"] == "first-last")
    assert usual["name"] == "wan-fast, BF16 in the first 2 and the last 2 steps"
    assert usual["share"] == pytest.approx(0.6)
    assert usual["share"] <= result["searched"]["share"]
    assert usual["per_step"][:2] == usual["per_step"][-2:] == [0, 0]
    assert all(v > 0 for v in usual["per_step"][2:-2])
    best = [row for row in result["baselines"] if row["kind"] == "first-last, best split"]
    splits = [
        metric(
            Sensitivities(job.rivals.by_step, job.known.squares).predict(job.rivals._first_last(1, 4 - n, n, 10)),
            "velocity-mean",
        )
        for n in range(5)
    ]
    if best:
        assert best[0]["velocity_mean"]["median"] == pytest.approx(min(splits), rel=1e-6)
    else:
        assert splits[2] == min(splits)
    assert result["searched"]["velocity_mean"]["median"] < usual["velocity_mean"]["median"]
    assert usual["against"]["verdict"] == "lower"
    assert usual["against"]["intervals_apart"]


@pytest.mark.parametrize("names", [("wan-fast",), ("fp8-direct",), ("wan-fast", "fp8-direct", "nvfp4-fp8")])
def test_the_number_of_baselines_is_what_the_documentation_says(names):
    candidates = tuple(get_policy(name) for name in names)
    counts = set()
    for seed, fraction in itertools.product(range(3), (0.2, 0.5, 0.9, 1.1)):
        known = Known(3, 8, seed=seed)
        half = np.random.default_rng(seed).lognormal(-4, 1, (3, 8))
        known.table |= {policy.numerics: half for policy in candidates if policy.numerics not in known.table}
        free = solved(known, [Target("velocity-mean", 9.0)], candidates=candidates, rounds=1)[0]
        worst = max(metric(free.known.predict(free.grid.uniform(c + 1)), "velocity-mean") for c in range(len(names)))
        _, data = solved(known, [Target("velocity-mean", fraction * worst)], candidates=candidates)
        counts.add(len(data["results"][0]["baselines"]))
    assert min(counts) == 1 + len(names)
    assert 1 + len(names) < max(counts) <= 1 + 3 * len(names)


def test_a_policy_of_all_fast_has_no_first_and_last_steps_beside_it():
    _, data = solved(Known(4, 6), [Target(SHARE, 1.0)])
    assert [row["kind"] for row in data["results"][0]["baselines"]] == ["floor", "all", "all"]


# The search on a pipeline

STEPS = 3


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipeline()


def searched(pipe, **options):
    options = {
        "policies": ["wan-fast"], "prompts": ["a red circle"], "seeds": [0], "shares": [0.5], "bins": 3, "checks": 2,
        "settings": Settings(HEIGHT, WIDTH, FRAMES, STEPS, 4.0), "progress": False, "max_sequence_length": 32,
        **options,
    }  # fmt: skip
    return search(pipe, options.pop("policies"), options.pop("prompts"), options.pop("seeds"), **options)


@pytest.fixture(scope="module")
def whole(pipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    return searched(pipe, folder=folder, budget={"velocity-mean": 1.0}), folder


def test_end_to_end(pipe, whole):
    report, folder = whole
    assert report.passed
    assert set(report.policies) == {"policy-share-0.5.json", "policy-velocity-mean-1.json"}
    first, second = report.data["results"]
    assert first["searched"]["share"] >= 0.5
    assert second["searched"]["share"] == 1  # an easy budget takes the fastest everywhere
    errors = [float(p["measured"]) / float(p["predicted"]) for p in report.data["additivity"]["points"]]
    assert all(0.5 < error < 2 for error in errors)
    floor = first["baselines"][0]
    assert floor["kind"] == "floor"
    assert 0 < float(floor["velocity_mean"]["median"]) < 1e-4
    assert SearchReport.load(folder).to_dict() == report.to_dict()
    # The policy file is what a pipeline runs, and what the report says of its share is what a receipt counts.
    policy = get_policy(folder / "policy-share-0.5.json")
    with patch(pipe, policy) as handle:
        generate(pipe, steps=STEPS)
    entries = handle.receipt().entries
    share = sum(e.calls for e in entries if e.ran.name == "wan-fast") / sum(e.calls for e in entries)
    assert share == pytest.approx(float(first["searched"]["share"]))


def test_single_columns_are_what_their_policy_does_alone(pipe, whole):
    report, _ = whole
    grid = Grid(
        bins_of(steps_of([float(s["sigma"]) for s in report.data["steps"]]), 3), ((0,), (1,)), (FAST,), (0.3,), (1.0,)
    )
    chosen = grid.uniform(0)
    chosen[:, 1] = 1
    key = digest(grid.policy(chosen, "another name"), None)
    [found] = [m for m in report.data["measured"] if m["digest"] == key and m["seed"] == 0]
    assert found["name"] == "wan-fast in layer 1"
    entry = next(s for s in report.data["sensitivities"] if s["group"] == 1)
    assert entry["rel_l2"] == found["velocity"]  # bins of one step, one run


class Stop(KeyboardInterrupt):
    pass


@pytest.mark.parametrize("after", [1, 4, 9])
def test_a_search_that_was_stopped_goes_on_and_ends_the_same(pipe, whole, tmp_path, monkeypatch, after):
    report, _ = whole
    original, count = Runs._run, itertools.count()

    def run(self, *args, **kwargs):
        if next(count) == after:
            raise Stop
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Runs, "_run", run)
    folder = tmp_path / "search"
    with pytest.raises(Stop):
        searched(pipe, folder=folder, budget={"velocity-mean": 1.0})
    left = SearchReport.load(folder)
    assert not left.complete
    assert "Incomplete" in (folder / "report.html").read_text()
    monkeypatch.setattr(Runs, "_run", original)
    again = searched(pipe, folder=folder, budget={"velocity-mean": 1.0})
    assert again.data["results"] == report.data["results"]
    assert again.data["additivity"] == report.data["additivity"]
    assert len(again.data["measured"]) == len(report.data["measured"])


def test_a_free_run_that_is_stopped_does_not_take_the_forced_run_with_it(pipe, tmp_path, monkeypatch):
    original, done = Runs._run, []

    def run(self, what, *args, **kwargs):
        if what.endswith(", free"):
            raise Stop
        done.append(what)
        return original(self, what, *args, **kwargs)

    monkeypatch.setattr(Runs, "_run", run)
    with pytest.raises(Stop):
        searched(pipe, folder=tmp_path)
    assert [m["name"] for m in SearchReport.load(tmp_path).data["measured"]] == done

    again = []
    monkeypatch.setattr(Runs, "_run", lambda self, what, *a, **k: again.append(what) or original(self, what, *a, **k))
    report = searched(pipe, folder=tmp_path)
    assert again[0] == f"{done[-1]}, free"
    assert not set(done) & set(again)
    keys = [(m["digest"], m["prompt"], m["seed"]) for m in report.data["measured"]]
    assert len(keys) == len(set(keys))


def test_policies_of_earlier_searches_stay_and_are_told_until_one_begins_anew(pipe, tmp_path, monkeypatch):
    searched(pipe, folder=tmp_path, shares=[0.8, 0.5], checks=0)
    names = ["policy-share-0.5.json", "policy-share-0.8.json"]
    before = [(tmp_path / name).read_text() for name in names]
    original, count = Runs._run, itertools.count()

    def run(self, *args, **kwargs):
        if next(count) == 2:
            raise Stop
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Runs, "_run", run)
    with pytest.raises(Stop):
        searched(pipe, folder=tmp_path, prompts=["a blue star"], checks=0)
    monkeypatch.setattr(Runs, "_run", original)
    assert [(tmp_path / name).read_text() for name in names] == before
    for page in ("report.html", "report.md"):
        said = (tmp_path / page).read_text()
        assert "Of an earlier search, and not what is reported here" in said
        assert "policy-share-0.5.json" in said
    report = searched(pipe, folder=tmp_path, checks=0, force=True)
    assert [path.name for path in tmp_path.glob("policy*")] == ["policy.json"] == list(report.policies)
    assert "Of an earlier search" not in (tmp_path / "report.html").read_text()


def test_another_target_uses_what_was_measured(pipe, whole, monkeypatch):
    report, folder = whole
    measured = []
    original = Runs._run
    monkeypatch.setattr(
        Runs, "_run", lambda self, what, *a, **k: measured.append(what) or original(self, what, *a, **k)
    )
    again = searched(pipe, folder=folder, budget={"velocity-mean": 1.0})
    assert measured == []
    assert again.data["results"] == report.data["results"]


def test_nothing_is_mixed_with_another_model_or_settings(pipe, whole, tmp_path):
    _, folder = whole
    with pytest.raises(OutputError, match="another settings"):
        searched(pipe, folder=folder, steps=2)
    other = tiny_pipeline(seed=5)
    before = (folder / "search.json").read_text()
    for shares in ([0.5], [0.3]):  # whether anything is to be measured or not
        with pytest.raises(OutputError, match="another model"):
            searched(other, folder=folder, shares=shares)
    nearly = tiny_pipeline()
    with torch.no_grad():
        nearly.transformer.blocks[0].attn1.to_q.weight[0, 0] *= 1.01
    with pytest.raises(OutputError, match="another model"):
        searched(nearly, folder=folder)
    attended = tiny_pipeline()
    attended.transformer.set_attention_backend("_native_math")
    with pytest.raises(OutputError, match="another attention of its own"):
        searched(attended, folder=folder)
    assert (folder / "search.json").read_text() == before
    (tmp_path / "search.json").write_text("{}")
    with pytest.raises(OutputError, match="not a search of this version"):
        searched(pipe, folder=tmp_path)


def test_what_the_weights_do_not_say_is_seen_in_the_reference(pipe, whole, monkeypatch):
    _, folder = whole
    before = (folder / "search.json").read_text()
    other = tiny_pipeline()
    monkeypatch.setattr(tiny, "VOCABULARY", " ".join(reversed(tiny.VOCABULARY.split())))
    other.tokenizer = tiny.tiny_tokenizer()
    with pytest.raises(OutputError, match="the model changed"):
        searched(other, folder=folder, shares=[0.3])
    assert (folder / "search.json").read_text() == before


def test_the_same_weights_go_on_from_another_place(pipe, whole, monkeypatch):
    report, folder = whole
    again = tiny_pipeline()
    again.register_to_config(_name_or_path="/elsewhere/wan")
    monkeypatch.setattr(Runs, "_run", lambda *a, **k: pytest.fail("measured again"))
    found = searched(again, folder=folder, budget={"velocity-mean": 1.0}, model="./wan")
    assert found.data["results"] == report.data["results"]
    assert found.data["model"]["model"] == "./wan"


def test_an_earlier_search_that_does_not_know_its_weights_is_refused(pipe, whole, tmp_path):
    data = whole[0].to_dict()
    del data["model"]["weights"]
    (tmp_path / "search.json").write_text(json.dumps(data))
    with pytest.raises(OutputError, match=r"did not keep the weights' digest.*--force"):
        searched(pipe, folder=tmp_path)
    assert json.loads((tmp_path / "search.json").read_text()) == data


def test_nothing_stays_patched(pipe, whole):
    with pytest.raises(ModelError, match="the pipeline is patched"), patch(pipe, "wan-fast"):
        searched(pipe)
    assert "step" not in vars(pipe.scheduler)


def test_a_fallback_is_no_result(pipe, monkeypatch):
    from wanfp4.processors import session

    def refuse(numerics, device, name=None):
        raise BackendError("nothing can run it")

    monkeypatch.setattr(session.dispatch, "select", refuse)
    with pytest.raises(BackendError, match=r"fell back to the pipeline's own attention.*nothing can run it"):
        searched(pipe)


@pytest.mark.parametrize("candidates", [1, 2])
def test_a_candidate_that_keeps_bf16_at_this_length_is_refused(pipe, tmp_path, candidates):
    tokens = info_of(pipe).tokens(Settings(HEIGHT, WIDTH, FRAMES, STEPS, 4.0))
    made = [FAST, ACCURATE][:candidates]
    too_long = [p.with_(min_tokens=tokens + 1) for p in made]
    with pytest.raises(SettingsError, match=rf"min_tokens={tokens + 1} .* {tokens} attention tokens"):
        searched(pipe, policies=too_long, folder=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    report = searched(pipe, policies=[p.with_(min_tokens=tokens) for p in made], checks=0, bins=1)
    assert all(float(one["rel_l2"][0]) > 0 for one in report.data["sensitivities"])


def test_trajectories_are_held_within_bounds(pipe, monkeypatch):
    state = {"steps": [], "references": [], "measured": []}
    bar = module.tqdm(disable=True)
    runs = Runs(pipe, Settings(HEIGHT, WIDTH, FRAMES, 2, 1.0), {"max_sequence_length": 32}, False, state, bar, None)
    first = runs.reference(("a red circle", 0))
    assert runs.reference(("a red circle", 0)) is first
    monkeypatch.setattr(runs_module, "HELD_BYTES", 1)
    runs.reference(("a red circle", 1))
    assert list(runs._references) == [("a red circle", 1)]
    again = runs.reference(("a red circle", 0))
    assert again is not first
    assert torch.equal(again.seen[-1].velocity, first.seen[-1].velocity)


@pytest.mark.parametrize(
    ("targets", "most"),
    # What a share's policy is held against is known with it; a budget's only when the last round is over.
    [({"shares": [0.5, 0.8]}, 1), ({"shares": [0.8], "budget": {"velocity-mean": 1.0}}, 2)],
)
def test_a_reference_is_made_once_for_all_policies_where_one_alone_fits(pipe, monkeypatch, targets, most):
    made, original = Counter(), Runs._check
    monkeypatch.setattr(Runs, "_check", lambda self, pair, *a: made.update([pair]) or original(self, pair, *a))
    monkeypatch.setattr(runs_module, "HELD_BYTES", 1)
    report = searched(pipe, seeds=[0, 1], verify_seeds=[2, 3, 4], rounds=1, **targets)
    assert len(report.data["measured"]) > 15
    assert {pair: made[pair] for pair in made if pair[1] < 2} == {("a red circle", seed): 1 for seed in (0, 1)}
    assert set(made) == {("a red circle", seed) for seed in range(5)}
    assert max(made.values()) <= most


def test_the_bar_ends_at_its_total(pipe, monkeypatch):
    bars = []
    bar_class = module.tqdm

    def make(**options):
        bars.append(bar_class(**options | {"disable": False, "file": io.StringIO()}))
        return bars[-1]

    monkeypatch.setattr(module, "tqdm", make)
    monkeypatch.setattr(runs_module, "HELD_BYTES", 1)
    made, original = Counter(), Runs._check
    monkeypatch.setattr(Runs, "_check", lambda self, pair, *a: made.update([pair]) or original(self, pair, *a))
    searched(pipe, seeds=[0, 1], shares=[0.6], budget={"velocity": 0.005, "velocity-mean": 1e-9}, checks=1)
    assert max(made.values()) > 1
    assert bars[0].n == bars[0].total


def test_the_guard_goes_with_the_candidates():
    guarded = FAST.with_(name="mine", guard=Guard(100, 10))
    grid = grid_of(candidates=(guarded, ACCURATE))
    assert grid.policy(grid.uniform(1), "x").guard == Guard(100, 10)
    assert grid.policy(grid.uniform(2), "x").guard is None


# Pages


def test_pages(whole):
    report, folder = whole
    html, markdown = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    assert html.startswith("<!doctype html>")
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", html)
    assert 'role="img" aria-label="Predicted against measured' in html
    assert 'role="img" aria-label="Velocity error by step. searched-share-0.5: ' in html
    assert html.count("<h1>") == 1
    assert "color-scheme" in html
    for scroll in re.findall(r'<div class="scroll"[^>]*>', html):
        assert 'tabindex="0"' in scroll
        assert "aria-label" in scroll
    identifiers = re.findall(r'\bid="([^"]+)"', html)
    assert len(identifiers) == len(set(identifiers))
    assert set(re.findall(r'aria-labelledby="([^"]+)"', html)) <= set(identifiers)
    assert f"weights sha256 {report.data['model']['weights'][:16]}, its own attention" in html
    for result in report.data["results"]:
        assert result["text"][1:] in html
        for row in (result["searched"], *result["baselines"]):
            assert search_pages.versus(row) in markdown
            assert row["name"] in html
    assert len(html) < 500_000


def test_pages_show_the_figure_that_a_budget_judges(whole):
    data = whole[0].to_dict()
    for i, row in enumerate(row for one in data["results"] for row in (one["searched"], *one["baselines"])):
        row["velocity"] = 0.7001 + i / 1000
    html, markdown = search_pages.search_html(data), search_pages.search_markdown(data)
    for i in range(2 + sum(len(one["baselines"]) for one in data["results"])):
        assert f"<td>{figure(0.7001 + i / 1000)}</td>" in html
        assert f"| {figure(0.7001 + i / 1000)} |" in markdown
    for page in (html, markdown.replace("velocity, ", "Velocity, ")):
        assert "Velocity, worst step" in page
        assert "Velocity, each run's worst step" in page
    [table] = re.findall(r"<table>\n<thead><tr><th scope=.col.>Policy.*?</table>", html, re.DOTALL)[:1]
    cells = [len(re.findall(r"<t[hd]\b", row)) for row in re.findall(r"<tr>.*?</tr>", table)]
    assert cells == [8] * (2 + len(data["results"][0]["baselines"]))
    of_policies = markdown.split("| policy |")[1].split("\n\n")[0]
    assert {line.count("|") for line in of_policies.splitlines()[1:]} == {9}


@pytest.mark.parametrize(
    ("prompts", "seeds", "said"),
    [
        (1, 1, None),
        (1, 4, "one prompt, so intervals and verdicts are of that prompt alone. With 4 runs"),
        (2, 4, "with 2 prompts the intervals are less than 95 % sure"),
        (5, 2, "with 5 prompts the intervals are less than 95 % sure"),
        (6, 1, None),
    ],
)
def test_pages_say_when_prompts_are_too_few_for_verdicts(whole, prompts, seeds, said):
    data = whole[0].to_dict()
    data["held_out"] = [{"prompt": f"prompt {p}", "seed": s} for p in range(prompts) for s in range(seeds)]
    hint = [text for text in search_pages.readings(data) if text.startswith("Of the held-out runs:")]
    if said is None:
        assert not hint
        return
    assert said in hint[0]
    assert hint[0] in search_pages.search_html(data)
    assert hint[0] in search_pages.search_markdown(data)
    data["results"] = []
    assert not any(text.startswith("Of the held-out") for text in search_pages.readings(data))


def test_what_is_no_search_is_not_loaded(tmp_path):
    with pytest.raises(Wanfp4Error, match="cannot read a search"):
        SearchReport.load(tmp_path)
    (tmp_path / "search.json").write_text('{"kind": "other", "schema": 1}')
    with pytest.raises(Wanfp4Error, match="kind 'other'"):
        SearchReport.load(tmp_path)
