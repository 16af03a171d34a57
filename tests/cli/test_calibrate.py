"""`wanfp4 calibrate`: record, stop, go on, fit; and what is refused."""

import json
from pathlib import Path

import pytest
import torch

from wanfp4.policy import get_policy
from wanfp4.quality import recording
from wanfp4.quality.recording import load_recording


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("# both halves\na red circle\na blue star\na green square\na white star\n")
    return path


def test_record_then_fit(run, tiny_model, prompts):
    options = ("--model", tiny_model, "--prompts", prompts, "--seeds", "0", "--calls", "3", "--rows", "16", "-o", "rec")
    made = run("calibrate", "record", *options)
    assert made.exit_code == 0, made.output
    lines = made.stdout.splitlines()
    assert lines[0] == "rec/recording.json"
    assert lines[1].startswith("12 calls of 4 runs, ")
    data = json.loads(Path("rec/recording.json").read_text())
    assert data["prompts"] == ["a red circle", "a blue star", "a green square", "a white star"]
    assert data["settings"]["steps"] == 2
    assert data["command"].startswith("wanfp4")

    fitted = run("calibrate", "fit", "rec", "--base", "wan-fast", "-o", "out/mine.json")
    assert fitted.exit_code == 0, fitted.output
    lines = fitted.stdout.splitlines()
    assert lines[:3] == ["out/mine.json", "out/mine.fit.json", "out/mine.report.md"]
    assert "relative L2" in "".join(lines[4:])
    policy = get_policy("out/mine.json")
    assert policy.name == "mine"
    assert policy.description.startswith("wan-fast fitted to ")

    first = Path("out/mine.json").read_text()
    again = run("calibrate", "fit", "rec", "--base", "wan-fast", "-o", "out/mine.json", "--force")
    assert again.exit_code == 0, again.output
    assert Path("out/mine.json").read_text() == first
    used = run("generate", "a red circle", "--model", tiny_model, "--policy", "out/mine.json", "-o", "clip.mp4")
    assert used.exit_code == 0, used.output


def test_ctrl_c_keeps_what_is_there_and_the_same_command_goes_on(run, tiny_model, prompts, monkeypatch):
    command = ("calibrate", "record", "--model", tiny_model, "--prompts", prompts, "--seeds", "0", "--calls", "8")
    own, runs = recording.generate_latents, []

    def interrupted(pipe, prompt, *args, **kwargs):
        runs.append(prompt)
        if len(runs) == 2:
            raise KeyboardInterrupt
        return own(pipe, prompt, *args, **kwargs)

    monkeypatch.setattr(recording, "generate_latents", interrupted)
    stopped = run(*command)
    assert stopped.exit_code == 130
    assert "Traceback" not in stopped.output
    kept = load_recording("recording")
    assert not kept.complete
    assert [run["prompt"] for run in kept.data["runs"]] == [0]
    assert run(*command).exit_code == 0
    assert runs == ["a red circle", "a blue star", "a blue star", "a green square", "a white star"]
    done = load_recording("recording")
    assert done.complete
    assert all(call.q.dtype == torch.bfloat16 for call in done.calls("fit"))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--prompt", "a red circle"), "at least two prompts are needed"),
        ((), "prompts are needed, two or more"),
        (("--prompt", "a", "--prompt", "b", "--seeds", "x"), "--seeds must be whole numbers"),
        (("--prompt", "a", "--prompt", "b", "--height", "81"), "height 81 is not a multiple of 16"),
        (
            ("--prompt", "a", "--prompt", "b", "--limit", "1", "--seeds", ",".join(map(str, range(9)))),
            "raise the limit",
        ),
        (("--prompt", "a", "--prompt", "b", "-o", "/proc/wanfp4"), "cannot write into '/proc/wanfp4'"),
        (("--prompts", "/nowhere/prompts.txt"), "cannot read prompts"),
    ],
)
def test_recordings_that_cannot_be_made_are_refused_before_the_model_loads(
    refused, tiny_model, monkeypatch, args, words
):
    from wanfp4.processors import pipelines

    monkeypatch.setattr(pipelines, "load_pipeline", None)
    assert words in refused("calibrate", "record", "--model", tiny_model, *args)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("nowhere",), 2, "needed is a recording's folder or recording.json"),
        (("nowhere", "--base", "sage3"), 2, "smooths Q"),
        (("nowhere", "--base", "bf16"), 2, "nothing to fit"),
        (("nowhere", "-o", "policy.txt"), 2, "must end in .json"),
        (("nowhere", "-o", "nvfp4.json"), 2, "'nvfp4' is the name of a preset"),
        (("nowhere", "--keep", "margin"), 2, "there is no step 'margin' to keep"),
        (("nowhere", "--name", "bf16"), 2, "'bf16' is the name of a preset"),
    ],
)
def test_fits_that_cannot_be_made_are_refused(refused, args, code, words):
    assert words in refused("calibrate", "fit", *args, code=code)


@pytest.mark.parametrize("given", ["r", "r/recording.json"])
def test_a_recording_is_not_written_over_by_what_is_fitted_to_it(refused, given):
    Path("r").mkdir()
    Path("r/recording.json").write_text("{}")
    assert "which this command reads" in refused("calibrate", "fit", given, "-o", "r/recording.json", "--force")
    assert Path("r/recording.json").read_text() == "{}"


def test_a_policy_that_is_there_is_not_written_over(refused, run, tmp_path):
    get_policy("wan-fast").with_(name="base").to_json("base.json")
    assert "'base.json' exists" not in refused("calibrate", "fit", "r", "--base", "base.json", "-o", "base.json")
    assert "which this command reads" in refused(
        "calibrate", "fit", "r", "--base", "base.json", "-o", "base.json", "--force"
    )
    get_policy("wan-fast").with_(name="other").to_json("other.json")
    assert "'other.json' exists" in refused("calibrate", "fit", "r", "-o", "other.json")
