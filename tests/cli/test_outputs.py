"""What `generate` and `decode` write, and what they must not write over or leave behind."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import safetensors.torch
from safetensors import SafetensorError

import wanfp4
from wanfp4.errors import OutputError
from wanfp4.processors import pipelines


@pytest.fixture
def no_loading(monkeypatch):
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *a, **k: pytest.fail("weights were loaded"))


def mine(path="mine.json"):
    wanfp4.policies()["nvfp4"].with_(name="mine").to_json(path)
    return Path(path).read_bytes()


def test_existing_files_are_only_overwritten_by_force(run, refused, tiny_model):
    Path("a.json").write_text("mine")
    assert "exists" in refused("generate", "a red circle", "--model", tiny_model, "-o", "a.mp4")
    assert Path("a.json").read_text() == "mine"
    assert run("generate", "a red circle", "--model", tiny_model, "-o", "a.mp4", "--steps", 1, "--force").exit_code == 0
    assert json.loads(Path("a.json").read_text())["prompt"] == "a red circle"


@pytest.mark.parametrize("more", [(), ("--force",), ("--dry-run",), ("--force", "--dry-run")])
@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_the_policy_file_is_never_written_over(refused, tiny_model, no_loading, link, more):
    before = mine("policy.json" if link else "mine.json")
    if link:
        link("policy.json", "mine.json")
    for policy in ("mine.json", "policy.json" if link else f"{Path.cwd()}/mine.json"):
        args = ("generate", "a red circle", "--model", tiny_model, "--policy", policy, "-o", "mine.mp4", *more)
        assert f"'mine.json' would be written over {policy!r}, which this command reads" in refused(*args)
    assert Path("mine.json").read_bytes() == before


@pytest.mark.parametrize("name", ["c-02.mp4", "c-01.json", "c-02.latents.safetensors"])
def test_the_prompts_file_is_never_written_over(refused, tiny_model, no_loading, name):
    Path(name).write_text("a red circle\na blue square\n")
    error = refused("generate", "--prompts", name, "--model", tiny_model, "-o", "c.mp4", "--force")
    assert f"{name!r} would be written over {name!r}" in error
    assert Path(name).read_text() == "a red circle\na blue square\n"


@pytest.mark.parametrize("page", ["report.json", "report.html", "report.md"])
def test_drift_never_writes_over_what_it_reads(refused, tiny_model, no_loading, page):
    Path("r").mkdir()
    Path("r", page).write_text("a red circle\n")
    error = refused("drift", "--prompts", f"r/{page}", "--model", tiny_model, "-o", "r", "--force")
    assert f"'r/{page}' would be written over 'r/{page}'" in error
    before = mine("r/report.json")
    error = refused("drift", "--policies", "nvfp4, r/report.json", "--model", tiny_model, "-o", "r", "--force")
    assert "'r/report.json' would be written over" in error
    assert Path("r/report.json").read_bytes() == before


@pytest.mark.parametrize("name", ["model_index", "wanfp4_defaults", "transformer/config", "tokenizer/tokenizer"])
def test_the_models_own_files_are_never_written_over(refused, run, tiny_model, copy_of_tiny, no_loading, name):
    before = (copy_of_tiny / f"{name}.json").read_bytes()
    args = ("--model", copy_of_tiny, "-o", copy_of_tiny / f"{name}.mp4", "--force")
    assert "which this command reads" in refused("generate", "a red circle", *args)
    assert (copy_of_tiny / f"{name}.json").read_bytes() == before


def test_decode_never_writes_over_its_latents(run, refused, tiny_model):
    run("generate", "a red circle", "--model", tiny_model, "--steps", 1, "--keep-latents", "-o", "a.mp4")
    for name in ("b.mp4", "b.json"):
        shutil.copy("a.latents.safetensors", name)
        assert f"{name!r} would be written over" in refused("decode", name, "-o", "b.mp4", "--force")
        assert Path(name).read_bytes() == Path("a.latents.safetensors").read_bytes()
        Path(name).unlink()


def test_a_folder_that_is_a_file_is_refused_before_the_model_loads(refused, tiny_model, monkeypatch):
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *a, **k: pytest.fail("weights were loaded"))
    Path("file").write_text("")
    assert "'file': it is a file, and a folder is needed" in refused(
        "generate", "a red circle", "--model", tiny_model, "-o", "file/a.mp4"
    )
    assert f"cannot write into 'file/b': '{Path.cwd()}/file' is a file" in refused(
        "generate", "a red circle", "--model", tiny_model, "-o", "file/b/a.mp4", "--dry-run"
    )
    Path("folder.mp4").mkdir()
    assert "it is a folder" in refused("generate", "a red circle", "--model", tiny_model, "-o", "folder.mp4")


@pytest.mark.parametrize(
    "name", ["/proc/x.mp4", "/proc/a/b/x.mp4", "/sys/x.mp4", f"{'x' * 300}.mp4", f"{'x' * 300}/a.mp4"]
)
@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_places_where_no_file_can_be_are_refused(refused, tiny_model, no_loading, name, more):
    assert "cannot write" in refused("generate", "a red circle", "--model", tiny_model, "-o", name, *more)


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder"])
@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_missing_weights_are_an_error_before_anything_is_made(refused, copy_of_tiny, part, more):
    for weights in (copy_of_tiny / part).glob("*.safetensors"):
        weights.unlink()
    error = refused("generate", "a red circle", "--model", copy_of_tiny, "-o", "new/a.mp4", *more)
    assert f"{copy_of_tiny} is incomplete: {part}: no weights in {part}/" in error


def test_latents_survive_a_failed_write(run, tiny_model, monkeypatch):
    def full(*args):
        raise OutputError("cannot write 'a.mp4': No space left on device")

    monkeypatch.setattr("wanfp4.quality.video.write_mp4", full)
    result = run("generate", "a red circle", "--model", tiny_model, "-o", "a.mp4")
    assert result.exit_code == 2
    assert "error: cannot write 'a.mp4': No space left on device" in result.stderr
    assert "wanfp4 decode a.latents.safetensors -o a.mp4" in result.stderr
    assert sorted(p.name for p in Path.cwd().iterdir()) == ["a.latents.safetensors"]


def test_a_disk_that_is_full_before_the_latents_are_saved_is_one_sentence(run, tiny_model, monkeypatch):
    def full(tensors, filename, metadata):
        Path(filename).write_bytes(b"half of it")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    result = run("generate", "a red circle", "--model", tiny_model, "--steps", 1, "-o", "new/a.mp4")
    assert result.exit_code == 2
    said = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert said[0].startswith("error: cannot write 'new/a.latents.safetensors': ")
    assert "No space left on device" in said[0]
    assert "not a message of wanfp4's own" not in result.stderr
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "code"),
    [(KeyboardInterrupt(), 130), (SystemExit(128 + signal.SIGTERM), 143), (OutputError("no"), 2), (MemoryError(), 1)],
)
def test_a_run_that_fails_leaves_none_of_the_folders_it_made(run, tiny_model, monkeypatch, fault, code):
    def failing(*args):
        raise fault

    monkeypatch.setattr(pipelines, "generate_latents", failing)
    Path("there").mkdir()
    result = run("generate", "a red circle", "--model", tiny_model, "-o", "there/new/deep/a.mp4")
    assert result.exit_code == code
    assert [str(p) for p in Path().rglob("*")] == ["there"]


def test_decode_that_fails_leaves_none_of_the_folders_it_made(run, refused, tiny_model):
    run("generate", "a red circle", "--model", tiny_model, "--steps", 1, "--keep-latents", "-o", "a.mp4")
    args = ("decode", "a.latents.safetensors", "-o", "new/deep/b.mp4")
    assert "there is no folder 'gone'" in refused(*args, "--model", "gone")
    assert run(*args).exit_code == 0
    assert json.loads(Path("new/deep/b.json").read_text())["output"]["file"] == "b.mp4"


def test_a_policys_name_breaks_no_line_of_drifts_table(run, tiny_model):
    policy = {**wanfp4.policies()["nvfp4"].to_dict(), "name": "a\n\tb\x1b"}
    Path("mine.json").write_text(json.dumps(policy))
    args = ("--prompt", "a red circle", "--seeds", 0, "--steps", 1, "--budget", "velocity=0")
    result = run("drift", "--policies", "mine.json", "--model", tiny_model, *args, "-o", "report")
    assert result.exit_code == 3, result.stderr
    assert len([line for line in result.stdout.splitlines() if line.startswith("a b ")]) == 1
    assert all(line.isprintable() for line in result.stdout.splitlines())
    over = [line for line in result.stderr.splitlines() if line.startswith("over budget: ")]
    assert len(over) == 1
    assert over[0].isprintable()
