"""`wanfp4 drift` as a person runs it."""

import json
import re

import pytest
from tiny import FRAMES, HEIGHT, WIDTH, tiny_pipeline
from typer.testing import CliRunner

from wanfp4.cli.main import app
from wanfp4.policy import get_policy
from wanfp4.processors import pipelines
from wanfp4.quality import drift as module
from wanfp4.quality.budget import METRICS

SIZE = ("--height", str(HEIGHT), "--width", str(WIDTH), "--frames", str(FRAMES), "--steps", "1", "--dtype", "fp32")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline().save_pretrained(folder)
    return str(folder)


def run(*args):
    return CliRunner().invoke(app, ["drift", *map(str, args)])


def plain(text: str) -> str:
    return " ".join(text.split())


def test_a_report_of_several_policies_and_seeds(model, tmp_path):
    get_policy("nvfp4").with_(name="mine").to_json(tmp_path / "mine.json")
    out = tmp_path / "out"
    result = run("--model", model, "--policies", f"wan-fast,{tmp_path / 'mine.json'}", "--prompt", "a red circle",
                 "--prompt", "a blue star", "--seeds", "3,4", "-o", out, *SIZE)  # fmt: skip
    assert result.exit_code == 0, result.output
    data = json.loads((out / "report.json").read_text())
    assert data["complete"]
    assert [p["name"] for p in data["policies"]] == ["wan-fast", "mine"]
    assert (data["prompts"], data["seeds"]) == (["a red circle", "a blue star"], [3, 4])
    assert data["model"]["model"] == model
    lines = result.stdout.splitlines()
    assert lines[:3] == [str(out / name) for name in ("report.html", "report.md", "report.json")]
    assert [line.split("  ")[0] for line in lines[4:]] == ["policy", "noise floor", "wan-fast", "mine"]
    assert "reference (emulated)" in lines[-1]
    assert all((out / name).is_file() for name in ("report.html", "report.md"))


def test_prompts_come_from_a_file(model, tmp_path):
    (tmp_path / "prompts.txt").write_text("# two\na red circle\n\na blue star\n")
    result = run("--model", model, "--policies", "bf16", "--prompts", tmp_path / "prompts.txt", "--seeds", "0",
                 "-o", tmp_path / "out", *SIZE)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out" / "report.json").read_text())["prompts"] == ["a red circle", "a blue star"]


def test_a_budget_that_is_exceeded_gives_3_and_a_sentence_each(model, tmp_path):
    args = ("--model", model, "--prompt", "a red circle", "--seeds", "0", *SIZE)
    result = run(*args, "--budget", "1e-9", "--budget", "psnr=500", "-o", tmp_path / "over")
    assert result.exit_code == 3
    said = [line for line in result.stderr.splitlines() if line.startswith("over budget: ")]
    assert [re.split(r"[: ]+", line)[2:4] for line in said] == [["wan-fast", "velocity"], ["wan-fast", "psnr"]]
    assert json.loads((tmp_path / "over" / "report.json").read_text())["budget"]["passed"] is False

    result = run(*args, "--budget", "velocity=10", "-o", tmp_path / "within")
    assert result.exit_code == 0, result.output
    assert "over budget" not in result.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--policies", "wan-fats"), "unknown policy 'wan-fats'; presets are bf16,"),
        (("--policies", ","), "at least one policy"),
        (("--budget", "speed=1"), "no budget metric 'speed'; the metrics are velocity,"),
        (("--seeds", "0,one"), "--seeds must be whole numbers"),
        (("--seeds", "-1"), "seed must be a whole number from 0"),
        (("--height", "81"), "height 81 is not a multiple of 16: take 80 or 96"),
        (("--frames", "8"), "frames 8 is not of the form 4k+1: take 5 or 9"),
        (("--backend", "sdpa"), "backend 'sdpa' cannot run this"),
        (("--backend", "magic"), "unknown backend 'magic'"),
        (("--device", "abacus"), "unknown device 'abacus'"),
        (("--dtype", "fp3"), "unknown dtype 'fp3'"),
        (("--prompts", "/nowhere/prompts.txt"), "give --prompt or --prompts FILE, not both"),
        (("--prompt", " "), "a prompt must be a text that is not empty"),
        (("-o", "/proc/wanfp4"), "cannot write into '/proc/wanfp4'"),
        (("--model", "/nowhere"), "there is no folder '/nowhere'"),
    ],
)
def test_bad_input_is_one_sentence_before_the_model_loads(monkeypatch, model, tmp_path, args, words):
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *a, **k: pytest.fail("the model was loaded"))
    result = run("--model", model, "--prompt", "a red circle", *SIZE, "-o", tmp_path / "out", *args)
    assert result.exit_code == 2
    assert words in plain(result.stderr)
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert not (tmp_path / "out").exists()


def test_no_prompt_and_no_example(monkeypatch, model, tmp_path):
    result = run("--model", model, *SIZE, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "at least one prompt" in plain(result.stderr)


def test_a_search_in_the_folder_keeps_its_pages(model, tmp_path):
    (tmp_path / "search.json").write_text("{}")
    (tmp_path / "report.html").write_text("the search's")
    result = run("--model", model, "--policies", "bf16", "--prompt", "a red circle", "-o", tmp_path, *SIZE)
    assert result.exit_code == 2
    assert "holds a search, whose report.html and report.md would be written over" in result.stderr
    assert (tmp_path / "report.html").read_text() == "the search's"


def test_a_finished_report_is_not_overwritten_unasked(monkeypatch, model, tmp_path):
    args = ("--model", model, "--policies", "bf16", "--prompt", "a red circle", "--seeds", "0", "-o", tmp_path, *SIZE)
    assert run(*args).exit_code == 0
    before = (tmp_path / "report.json").read_bytes()
    result = run(*args)
    assert result.exit_code == 2
    assert "holds a finished report" in result.stderr
    assert (tmp_path / "report.json").read_bytes() == before
    (tmp_path / "report.json").write_text('{"complete": false}')
    assert run(*args).exit_code == 0
    (tmp_path / "notes.txt").write_text("keep")
    again = [arg if arg != "bf16" else "wan-fast" for arg in args]
    assert run(*again, "--force").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "videos").iterdir()) == [
        "p0-s0-noise-floor.mp4", "p0-s0-reference.mp4", "p0-s0-wan-fast.mp4",
    ]  # fmt: skip
    assert (tmp_path / "notes.txt").read_text() == "keep"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize(("place", "name"), [(pipelines, "load_pipeline"), (module, "generate_latents")])
def test_a_job_that_dies_early_leaves_no_empty_folder(monkeypatch, model, tmp_path, place, name, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(place, name, fail)
    result = run("--model", model, "--prompt", "a red circle", "-o", tmp_path / "out" / "below", *SIZE)
    assert result.exit_code == (130 if error is KeyboardInterrupt else 1)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_keeps_what_has_finished(monkeypatch, model, tmp_path):
    original, calls = module.generate_latents, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(module, "generate_latents", interrupted)
    result = run("--model", model, "--prompt", "a red circle", "--seeds", "0", "-o", tmp_path / "out", *SIZE)
    assert result.exit_code == 130
    data = json.loads((tmp_path / "out" / "report.json").read_text())
    assert not data["complete"]
    assert len(data["noise_floor"]["runs"]) == 1
    assert "Traceback" not in result.output


def test_words_the_model_does_not_know_are_named(model, tmp_path):
    result = run("--model", model, "--policies", "bf16", "--prompt", "a purple circle", "--seeds", "0",
                 "-o", tmp_path / "out", *SIZE)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "does not know 'purple'" in result.stderr


def test_the_help_names_every_metric():
    text = plain(run("--help").stdout).replace("- ", "-")  # a line may end at a name's hyphen
    for name in METRICS:
        assert re.search(rf"[ ,]{name}[ ,.]", text), name
