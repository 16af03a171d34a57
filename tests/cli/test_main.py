"""The command as a process: start-up, exit codes, Ctrl-C, what goes to which stream."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import wanfp4

# One thread: these processes run beside other tests.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}


def wanfp4_process(*args, cwd, **kwargs):
    # Where tests run in the background Ctrl-C is ignored, which children would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-m", "wanfp4", *map(str, args)]
    return subprocess.Popen(command, cwd=cwd, env=ENVIRONMENT, stdout=-1, stderr=-1, text=True, **kwargs)


def finish(process):
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_help_and_version_load_no_heavy_library(tmp_path):
    code = (
        "import sys, wanfp4.cli.main\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'imageio', 'skimage', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=ENVIRONMENT)
    returncode, out, _ = finish(wanfp4_process("--help", cwd=tmp_path))
    assert returncode == 0
    for command in ("generate", "drift", "decode", "policies", "doctor"):
        assert f"\n  {command} " in out
    assert finish(wanfp4_process("--version", cwd=tmp_path)) == (0, f"wanfp4 {wanfp4.__version__}\n", "")


@pytest.mark.parametrize(
    "args", [("generate", "a", "--bogus"), ("generate", "a", "--steps", "many"), ("generat",), ("policies", "show")]
)
def test_usage_errors_exit_with_2_and_name_the_way_to_help(tmp_path, args):
    returncode, out, err = finish(wanfp4_process(*args, cwd=tmp_path))
    assert returncode == 2
    assert out == ""
    assert "Error: " in err
    assert "--help" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("generate", "a red circle", "--height", "100"), "height 100 is not a multiple of 16: take 96 or 112"),
        (("generate", "a red circle", "--policy", "x"), "unknown policy 'x'; presets are bf16"),
        (("generate", "a red circle", "--model", "nowhere"), "there is no folder 'nowhere'"),
        (("generate", "a red circle", "-o", "file/a.mp4"), "cannot write into 'file'"),
        (("policies", "show", "x"), "unknown policy 'x'"),
        (("policies", "explain", "file.json"), "cannot read policy file"),
    ],
)
def test_bad_input_exits_with_2_and_one_sentence(tmp_path, args, sentence):
    (tmp_path / "file").write_text("")
    returncode, out, err = finish(wanfp4_process(*args, cwd=tmp_path))
    assert returncode == 2
    assert out == ""
    assert err.startswith("error: ")
    assert sentence in err
    assert len(err.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_generate_from_a_shell(tmp_path, tiny_model):
    args = ("generate", "a red circle", "--model", tiny_model, "-o", "a.mp4")
    returncode, out, err = finish(wanfp4_process(*args, cwd=tmp_path))
    assert (returncode, out) == (0, "a.mp4\n"), err
    assert "Warning" not in err
    assert json.loads((tmp_path / "a.json").read_text())["command"].startswith("wanfp4 generate 'a red circle' --model")


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_denoising_leaves_no_file(tmp_path, tiny_model, sent, code):
    args = ("generate", "a red circle", "--model", tiny_model, "--steps", 1000, "-o", "a.mp4")
    process = wanfp4_process(*args, cwd=tmp_path)
    seen = ""
    while "/1000" not in seen:
        character = process.stderr.read(1)
        assert character, f"it ended before it denoised: {seen}"
        seen += character
    time.sleep(0.2)
    process.send_signal(sent)
    returncode, out, err = finish(process)
    assert returncode == code
    assert out == ""
    assert "Traceback" not in seen + err
    assert ("interrupted" in err) == (sent == signal.SIGINT)
    assert list(Path(tmp_path).iterdir()) == []
