"""Tasks, tables, sheets and attention statistics."""

import json
import math
from pathlib import Path
from typing import Any

import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from tiny import FRAMES, HEIGHT, WIDTH, generate, tiny_pipeline
from typer.testing import CliRunner

from wanfp4.errors import SettingsError
from wanfp4.processors.model_info import Settings
from wanfp4.samples import bundled, evaluate, statistics
from wanfp4.samples.checker import Found, Verdict
from wanfp4.samples.data import BACKGROUNDS, DEFAULT, HELD_OUT, Spec, vocabulary
from wanfp4.samples.render import draw_scenes, render, to_uint8
from wanfp4.samples.task import Answers, Judges, Task, agreement, answer, make_tasks, mistakes, table, wilson

SETTINGS = Settings(height=HEIGHT, width=WIDTH, frames=FRAMES, steps=2, guidance=4.0, shift=3.0)


def found(task: Task) -> Verdict:
    """The verdict on a clip that shows what was asked for."""
    objects = [Found(t.shape, t.colour, t.direction, 0.9, (0.0, 0.0), 500.0, 1.0) for t in task.spec.objects]
    return Verdict(tuple(objects), len(objects))


def test_tasks_are_held_out_balanced_and_follow_from_the_seed() -> None:
    tasks = make_tasks(200, pairs=0.3)
    assert tasks == make_tasks(200, pairs=0.3)
    assert tasks != make_tasks(200, pairs=0.3, seed=1)
    assert len({task.seed for task in tasks}) == 200
    objects = [thing for task in tasks for thing in task.spec.objects]
    assert set(objects) == set(HELD_OUT)
    singles = [task.spec for task in tasks if len(task.spec.objects) == 1]
    assert len(singles) == 140
    assert {singles.count(s) for s in singles} <= set(range(1, 8))
    counts = [sum(s.objects[0] == thing for s in singles) for thing in HELD_OUT]
    assert max(counts) - min(counts) <= 1
    assert {s.background for s in singles} == set(BACKGROUNDS)
    assert {word for task in tasks for word in task.prompt.split()} <= set(vocabulary())
    assert "a red circle moving left" in {" ".join(task.prompt.split()[:5]) for task in tasks}


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    # Published values: Newcombe 1998, Statistics in Medicine 17, table I (method 3).
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals(right: int, of: int, low: float, high: float) -> None:
    assert wilson(right, of) == pytest.approx((low, high), abs=5e-5)


def test_the_table_counts_objects_and_clips() -> None:
    tasks = make_tasks(20, pairs=0.5)
    verdicts = [found(task) for task in tasks]
    assert all(
        f["rate"] == 1 for key in ("one", "two") for f in table(Answers("a", tasks, verdicts, 0.0))[key].values()
    )
    twin = verdicts[0]
    verdicts[0] = Verdict(twin.objects * 2, 2)
    wrong = verdicts[-1].objects
    verdicts[-1] = Verdict((wrong[0],), 1)
    answers = Answers("a", tasks, verdicts, 0.0)
    figures = table(answers)
    assert [figures["one"][a]["right"] for a in ("shape", "colour", "direction", "count", "all")] == [10, 10, 10, 9, 9]
    assert [figures["two"][a]["right"] for a in ("shape", "colour", "direction", "count", "all")] == [19, 19, 19, 9, 9]
    assert figures["two"]["shape"]["of"] == 20
    assert sum(f["of"] for f in figures["by_shape"].values()) == 10
    assert [m["seed"] for m in mistakes(answers)] == [tasks[0].seed, tasks[-1].seed]
    assert agreement(answers.shown, Answers("b", tasks, [found(task) for task in tasks], 0.0).shown)["right"] == 18


def test_worker_processes_give_the_same_verdicts() -> None:
    specs = [Spec((HELD_OUT[0],), "black"), Spec(HELD_OUT[1:2], "striped")]
    clips = list(to_uint8(render(draw_scenes(specs, DEFAULT, torch.Generator().manual_seed(0)))).numpy())
    with Judges(0) as here, Judges(1) as there:
        assert there.workers == 1
        assert [here.submit(c).result() for c in clips] == [there.submit(c).result() for c in clips]


def test_answers_of_a_pipeline_patched_and_not() -> None:
    pipe = tiny_pipeline()
    tasks = make_tasks(3, pairs=0.34)
    heard: list[int] = []
    with Judges(0) as judges:
        own = answer(pipe, tasks, SETTINGS, judges=judges, batch=2, keep=True, done=heard.append)
        exact = answer(pipe, tasks, SETTINGS, judges=judges, policy="bf16", backend="reference", batch=3, keep=True)
        rough = answer(pipe, tasks, SETTINGS, judges=judges, policy="nvfp4", batch=1, keep=True)
    assert sum(heard) == 3
    assert [c.shape for c in own.clips] == [(FRAMES, HEIGHT, WIDTH, 3)] * 3
    for a, b, c in zip(own.clips, exact.clips, rough.clips, strict=True):
        assert np.abs(a.astype(int) - b).max() <= 2
        assert (a != c).any()
    assert own.receipt is None
    assert exact.receipt is not None
    assert exact.receipt.calls == 2 * 2 * 2  # layers × steps × branches, the batch in one
    assert {entry.ran.backend for entry in exact.receipt.entries} == {"reference"}
    assert rough.receipt is not None
    assert rough.receipt.policy.name == "nvfp4"
    assert all(type(block.attn1.processor).__name__ == "WanAttnProcessor" for block in pipe.transformer.blocks)


def test_wrong_settings_are_an_error_before_anything_runs() -> None:
    with Judges(0) as judges, pytest.raises(SettingsError, match="multiple"):
        answer(tiny_pipeline(), make_tasks(1), Settings(height=50, width=64, frames=5), judges=judges)


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(evaluate.app, [str(a) for a in arguments])


def test_the_command_judges_the_bundled_pipeline(tmp_path: Path) -> None:
    result = run(
        "--clips", 4, "--pairs", 0.5, "--steps", "2,1", "--size", "5x48x64", "--workers", 0, "--device", "cpu",
        "--json", tmp_path / "out.json", "--sheet", tmp_path / "out.png",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out.json").read_text())
    assert [r["settings"]["steps"] for r in report["runs"]] == [2, 1]
    assert report["runs"][0]["table"]["two"]["shape"]["of"] == 4
    image = imageio.imread(tmp_path / "out.png")
    assert image.shape == (2 * (48 + 26 + 4), 3 * (5 * 64 + 4), 3)
    assert "one object (2 clips)" in result.output
    assert "two objects (2 clips)" in result.output


def test_the_command_judges_vae_and_checker(tmp_path: Path) -> None:
    result = run("--vae", "--clips", 4, "--workers", 0, "--device", "cpu", "--json", tmp_path / "vae.json")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "vae.json").read_text())
    assert report["psnr"]["minimum"] > 28
    for name in ("drawn", "decoded"):
        assert report[name]["table"]["one"]["all"]["rate"] == report[name]["table"]["two"]["all"]["rate"] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--size", "3x4"], "--size must be FRAMESxHEIGHTxWIDTH"),
        (["--size", "33x100x144"], "height 100 is not a multiple of 16"),
        (["--guidance", "much"], "numbers separated by commas"),
        (["--steps", "2.5"], "whole numbers separated by commas"),
        (["nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], said: str) -> None:
    result = run(*arguments, "--device", "cpu")
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")


def test_statistics_of_known_attention() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 64, 2, 128) for _ in range(3))
    k[..., 0] *= 30
    v += 3
    figures = statistics.describe(q, k, v)
    logits = torch.einsum("bshd,bthd->bhst", q, k) / math.sqrt(128)
    p = logits.softmax(-1)
    assert figures["logit_std"] == pytest.approx(float(logits.std(-1).mean()), rel=1e-5)
    assert figures["largest_logit"] == pytest.approx(float(logits.abs().max()), rel=1e-5)
    assert figures["entropy"] == pytest.approx(float(-(p * p.log()).sum(-1).mean() / math.log(64)), rel=1e-4)
    assert 25 < figures["k_outlier"] < 35
    assert figures["v_mean_energy"] == pytest.approx(0.9, abs=0.01)
    even = statistics.describe(torch.zeros_like(q), k, v)
    assert even["entropy"] == pytest.approx(1)
    normal = statistics.normal_statistics((3, 567, 2, 128))
    assert normal["logit_std"] == pytest.approx(1.0, abs=0.03)
    assert normal["k_mean_energy"] < 0.003


def test_statistics_see_the_prompts_branch_at_the_steps_asked_for_and_change_nothing() -> None:
    pipe = tiny_pipeline()
    processors = [block.attn1.processor for block in pipe.transformer.blocks]
    prompts = ["a red circle moving right", "a blue star moving up"]
    rows = statistics.attention_statistics(pipe, prompts, SETTINGS, [1])
    assert [(row["step"], row["layer"]) for row in rows] == [(1, 0), (1, 1)]
    assert [block.attn1.processor for block in pipe.transformer.blocks] == processors
    assert not pipe.transformer._forward_pre_hooks
    folded = statistics.by_layer([*rows, {**rows[0], "largest_logit": 99.0, "entropy": 0.0}])
    assert folded[0]["largest_logit"] == 99
    assert folded[0]["entropy"] == pytest.approx(rows[0]["entropy"] / 2, abs=1e-4)
    with pytest.raises(SettingsError, match="steps go from 0 to 1"):
        statistics.attention_statistics(pipe, prompts, SETTINGS, [2])
    plain = generate(pipe)
    with statistics.spying(pipe.transformer, [0, 1], 2) as spied:
        assert torch.equal(generate(pipe), plain)
    assert len(spied) == 2 * 2


def test_the_statistics_command(tmp_path: Path) -> None:
    model = tiny_pipeline()
    model.save_pretrained(tmp_path / "tiny")
    (tmp_path / "tiny" / "wanfp4_defaults.json").write_text(
        (bundled() / "wanfp4_defaults.json").read_text().replace("112", "48").replace("144", "64").replace("33", "5")
    )
    arguments = [str(tmp_path / "tiny"), "--steps", "3", "--device", "cpu", "--json", str(tmp_path / "out.json")]
    result = CliRunner().invoke(statistics.app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out.json").read_text())
    assert [row["layer"] for row in report["layers"]] == [0, 1, "N(0,1)"]
    assert "k_outlier" in result.output
    bad = CliRunner().invoke(statistics.app, ["--steps", "x"])
    assert bad.exit_code == 2
    assert "whole numbers" in bad.stderr
