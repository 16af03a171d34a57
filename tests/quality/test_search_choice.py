"""The search on a model whose errors are known: it finds the best policy, and corrects itself where it was wrong."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from search_cases import ACCURATE, FAST, grid_of, steps_of

from wanfp4.policy import EXACT, get_policy
from wanfp4.processors.pipelines import Settings
from wanfp4.quality import knapsack, search_pages
from wanfp4.quality import search as module
from wanfp4.quality.cells import Sensitivities, metric
from wanfp4.quality.pages import figure
from wanfp4.quality.search_report import SearchReport
from wanfp4.quality.targets import SHARE, Target


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
