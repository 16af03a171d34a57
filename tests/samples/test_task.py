"""Paired statistics of tasks, and the checker's workers under Ctrl-C."""

import os
import signal

import numpy as np
import pytest

from wanfp4.samples.checker import Found, Verdict
from wanfp4.samples.task import Answers, Judges, agreement, holm, make_tasks, paired


@pytest.mark.parametrize(
    ("lost", "gained", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (0, 6, 2 / 64), (3, 1, 2 * (1 + 4) / 16), (4, 4, 1.0)],
)
def test_mcnemars_exact_test(lost: int, gained: int, p: float) -> None:
    both = [True] * 7 + [False] * 2
    right = [False] * lost + [True] * gained + both
    reference = [True] * lost + [False] * gained + both
    assert paired(right, reference) == {"lost": lost, "gained": gained, "p": pytest.approx(p, rel=1e-5)}
    with pytest.raises(ValueError, match="shorter"):
        paired(right, reference[1:])


def test_holms_adjustment() -> None:
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


def test_clips_agree_when_objects_and_count_do_in_any_order() -> None:
    tasks = make_tasks(4)
    red = Found("circle", "red", "left", 0.9, (1.0, 0.0), 500.0, 1.0)
    blue = Found("star", "blue", None, 0.8, (2.0, 0.0), 400.0, 0.9)
    first = Answers("a", tasks, [Verdict((red, blue), 2), Verdict((red,), 1), Verdict((red,), 1), Verdict((), 0)], 0.0)
    again = Answers("b", tasks, [Verdict((blue, red), 2), Verdict((red,), 2), Verdict((blue,), 1), Verdict((), 0)], 0.0)
    assert first.shown == ["2, blue star ?, red circle left", "1, red circle left", "1, red circle left", "0"]
    assert agreement(again.shown, first.shown)["right"] == 2


def test_ctrl_c_leaves_the_workers_to_their_owner() -> None:
    black = np.zeros((5, 16, 16, 3), np.uint8)
    with Judges(1) as judges:
        judges.submit(black).result()
        assert judges._pool is not None
        for worker in judges._pool._processes:
            os.kill(worker, signal.SIGINT)
        assert judges.submit(black).result() == Verdict((), 0)
