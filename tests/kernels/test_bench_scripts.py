"""The scripts in kernels/bench at toy sizes: they run, and tell figures that are there."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "kernels" / "bench"


def run(script, *args, cwd):
    command = [sys.executable, str(FOLDER / script), *map(str, args)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def test_cost_of_a_map(tmp_path):
    done = run("map_cost.py", "--size", "5x32x32", "--heads", 1, "--policy", "nvfp4", "--rounds", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    plain, mapped, ratio = (float(x) for x in re.findall(r"(\d+\.\d+)", line))
    assert line.startswith("1 heads, 8 tokens, nvfp4")
    assert ratio == pytest.approx(mapped / plain, abs=0.02)


@pytest.mark.slow
def test_a_pipeline_of_another_size(tmp_path):
    done = run(
        "real_size.py", "-o", "out", "--model", "tiny", "--size", "5x32x32", "--steps", 1, "--rounds", 1,
        "--policy", "nvfp4/reference", "--way", "plain", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = json.loads((tmp_path / "out" / "real-size.json").read_text())
    assert set(made["ways"]) == {"plain"}
    assert all(row["step"] > 0 for row in made["ways"]["plain"].values())
    assert list(made["ways"]["plain"]) == ["own attention", "nvfp4/reference"]
    assert (tmp_path / "out" / "map-nvfp4-reference" / "map.json").is_file()


@pytest.mark.parametrize("script", ["map_cost.py", "real_size.py"])
def test_a_wrong_size_is_one_sentence(script, tmp_path):
    done = run(script, "--size", "5x32", *(["-o", "out"] if script == "real_size.py" else []), cwd=tmp_path)
    assert done.returncode == 2
    assert "a size is frames x height x width" in done.stderr
    assert "Traceback" not in done.stderr
