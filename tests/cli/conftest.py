"""A tiny model on disk, and the command in this process."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny import FRAMES, HEIGHT, WIDTH, tiny_pipeline
from typer.testing import CliRunner

from wanfp4.cli.main import app


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Folder of a random-weight Wan pipeline with two layers; its defaults are the tiny clip at two steps."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_pipeline(dtype=torch.bfloat16).save_pretrained(folder)
    defaults = {"height": HEIGHT, "width": WIDTH, "frames": FRAMES, "steps": 2, "guidance": 4.0, "fps": 8}
    (folder / "wanfp4_defaults.json").write_text(json.dumps({**defaults, "prompt": "a red circle"}))
    return folder


@pytest.fixture
def copy_of_tiny(tiny_model, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run `wanfp4 ARGS` in an empty working folder; the result has exit_code, stdout and stderr."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def invoke(*args):
        return CliRunner().invoke(app, [str(a) for a in args])

    return invoke


@pytest.fixture
def refused(run):
    """Run a command that must be refused: exit code 2, one sentence on stderr, nothing on stdout, no file made."""

    def invoke(*args, code=2):
        before = sorted(Path.cwd().rglob("*"))
        result = run(*args)
        assert result.exit_code == code, result.output
        assert result.stdout == ""
        errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, result.stderr
        assert "Traceback" not in result.stderr
        assert sorted(Path.cwd().rglob("*")) == before
        return errors[0]

    return invoke
