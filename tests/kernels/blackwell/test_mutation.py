"""Every synchronisation of the SM100 forward kernel is needed, or it is known why not."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from sm100_cases import Problem, options_of, run

from wanfp4.policy import get_policy
from wanfp4.simulator.mutate import Experiment, Recorder, Verdict

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # the compiler's own

FAST = get_policy("wan-fast").numerics


def experiment(ordering: str) -> Experiment:
    """Two heads on one CTA, a ring of two slots that comes round, a ragged tail, and rows that have to be rescaled."""
    problem = Problem((1, 2, 200, 300), FAST)
    problem.k[:, 140:] *= 100
    with Recorder("sm_100a", track=True) as gpu:
        run(gpu, problem, options_of(FAST, out="bf16", slots=2, in_order=ordering == "pipe"), grid=1)
    return Experiment(gpu.launches[-1], seeds=(None, 1), ordering=ordering)


def unexplained(verdicts: list[Verdict]) -> list[str]:
    return [str(verdict) for verdict in verdicts if not verdict.explained]


@pytest.mark.parametrize(("ordering", "start"), [("pipe", 0), ("isa", 2)])
def test_a_sample_of_them(ordering: str, start: int) -> None:
    trial = experiment(ordering)
    verdicts = trial.run([site for site in trial.sites() if trial.executed[site.block]][start::6])
    assert unexplained(verdicts) == []
    judged = [verdict for verdict in verdicts if verdict.reason != "granted"]  # "pipe" asks for no tcgen05.fence
    assert sum(verdict.caught for verdict in judged) >= 0.7 * len(judged) > 5


@pytest.mark.slow
def test_all_with_the_strict_ordering() -> None:
    trial = experiment("isa")
    verdicts = trial.run([site for site in trial.sites() if trial.executed[site.block]])
    assert unexplained(verdicts) == []
    for verdict in verdicts:
        if not verdict.caught:
            print(verdict)
    assert sum(verdict.caught for verdict in verdicts) >= 0.8 * len(verdicts)
