"""`wanfp4 inspect`: figures of the compiler on stdout and as JSON, a sentence where it cannot work."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from wanfp4.kernels.blackwell import backend, sass
from wanfp4.kernels.blackwell import inspect as figures
from wanfp4.policy import get_policy, policies

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own


def column(text, row, name):
    """The cell of a table that stands under `name`, right-aligned, in the row that begins with `row`."""
    lines = text.splitlines()
    header = next(line for line in lines if name in map(str.strip, line.split("  ")))
    end = header.index(f"  {name}") + 2 + len(name)
    below = lines[lines.index(header) :]
    return next(line for line in below if line.strip().startswith(row))[:end].split()[-1]


@pytest.mark.slow
def test_figures_are_shown_kept_and_written(run):
    result = run("inspect", "--policy", "direct-p-fast", "--json", "out/figures.json", "--keep", "code")
    assert result.exit_code == 0, result.output
    report = json.loads(Path("out/figures.json").read_text())
    assert report["arch"] == "sm_100a"
    assert report["faults"] == []
    names = ["direct-p-fast", "quantise Q, K: nvfp4-folded", "quantise V: mxfp4-direct"]
    assert [row["kernel"] for row in report["kernels"]] == names
    assert all(row["policies"] == ["direct-p-fast"] for row in report["kernels"])
    [forward, *_] = report["kernels"]
    loop = forward["loop"]
    assert loop["slots_per_pair"] * loop["pairs"] == sum(loop["slots"].values()) == loop["slots_per_tile"]
    assert loop["exponentials_per_tile"] == 0
    assert loop["cycles"]["issue"] == loop["slots_per_tile"]
    assert loop["cycles"]["tensor core"] == 256

    # The same figures for people.
    assert column(result.stdout, "direct-p-fast", "registers") == "/".join(map(str, forward["setmaxnreg"]))
    assert column(result.stdout, "direct-p-fast", "shared") == f"{forward['dynamic_shared']:,}"
    assert column(result.stdout, "direct-p-fast", "all") == f"{loop['slots_per_pair']:.2f}"
    assert column(result.stdout, "direct-p-fast", "MUFU.EX2") == "0"
    assert column(result.stdout, "direct-p-fast", "most") == str(max(round(c) for c in loop["cycles"].values()))
    assert "a model on paper, not a measurement" in result.stdout
    assert "FMA 128, ALU 64, conversion 57, MUFU 16, dp4a 64" in result.stdout
    assert re.search(r"\d+ UTCOMMA\.4X", result.stdout)

    # flash-attn-4 is installed where tests run.
    peer = report["peer"]
    assert peer["loop"]["cycles"]["tensor core"] == 1024
    assert column(result.stdout, "flash-attn-4", "all") == f"{peer['loop']['slots_per_pair']:.2f}"
    assert len(list(Path("code").glob("*.sass"))) == len(list(Path("code").glob("*.cubin"))) == 4

    assert "compiling 1 of 3: direct-p-fast" in result.stderr
    assert "compiling" not in result.stdout


def test_without_a_policy_every_preset_is_there_or_named(run, compiled_nothing):
    result = run("inspect", "--arch", "sm_103a", "--json", "figures.json")
    report = json.loads(Path("figures.json").read_text())
    users = {name for row in report["kernels"] for name in row["policies"]}
    assert users | set(report["left_out"]) == set(policies())
    assert not users & set(report["left_out"])
    assert {"bf16", "sage3", "mxfp8-token-block"} <= set(report["left_out"])
    assert "No kernel for bf16: it computes 4-bit attention, and these numerics round nothing." in result.stdout
    assert "flash-attn-4 is not installed" in result.stdout
    assert "MUFU 32" in result.stdout
    # A kernel that two policies share is there once.
    assert [row["policies"] for row in report["kernels"] if row["loop"]].count(["wan-fast", "wan-fast-14b"]) == 1


LOOP = figures.SoftmaxLoop(64, dict.fromkeys(sass.PIPES, 32), 0, {"MUFU.EX2": 3}, 5, 6, None)
FIGURES = figures.KernelFigures("kernel", 384, 168, (224, 56), 0, 0, 0, 0, 1024, 512, 100, {"UTCOMMA": 2}, LOOP)


@pytest.fixture
def compiled_nothing(monkeypatch):
    """Figures as if they came from the compiler, which is not run; the tests may change them."""
    made = {"forward": FIGURES}

    def answer(self, kernel):
        return [
            made["forward"] if kernel.kind == "forward" else dataclasses.replace(FIGURES, loop=None, tensor_core={})
        ]

    monkeypatch.setattr(figures.Compiler, "figures", answer)
    monkeypatch.setattr(figures.Compiler, "flash_attention", lambda self: None)
    return made


def test_a_kernel_that_spills_fails(run, compiled_nothing):
    compiled_nothing["forward"] = dataclasses.replace(FIGURES, spills=4, stack=16)
    result = run("inspect", "--policy", "direct-p-fast")
    assert result.exit_code == 1
    assert "Over the limits:\n  direct-p-fast: 4 spills, 16 bytes of stack, 0 of local memory" in result.stdout


def test_rules_of_a_policy_need_kernels_too(run, refused, compiled_nothing):
    base = get_policy("direct-p-fast")
    base.with_(name="mine", rules=[{"numerics": "direct-p-exp2", "layers": [0]}, {"numerics": "bf16"}]).to_json(
        "mine.json"
    )
    result = run("inspect", "--policy", "mine.json", "--json", "figures.json")
    assert result.exit_code == 0, result.output
    assert len([row for row in json.loads(Path("figures.json").read_text())["kernels"] if row["loop"]]) == 2
    base.with_(name="other", rules=[{"numerics": "nvfp4-fp8", "layers": [0]}]).to_json("other.json")
    assert "policy 'other' has no SM100 kernels: its P and V are" in refused("inspect", "--policy", "other.json")


def test_what_cannot_be_inspected_is_one_sentence(refused, monkeypatch, tmp_path):
    assert "policy 'sage3' has no SM100 kernels: " in refused("inspect", "--policy", "sage3")
    assert "policy 'bf16' has no SM100 kernels: it computes 4-bit" in refused("inspect", "--policy", "bf16")
    assert "unknown policy 'fast'" in refused("inspect", "--policy", "fast")
    assert "'sm_90a' is no architecture" in refused("inspect", "--arch", "sm_90a")
    (tmp_path / "file").write_text("")
    assert "it is a file" in refused("inspect", "--json", str(tmp_path / "file" / "figures.json"))

    monkeypatch.setattr(sass.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert 'pip install "wanfp4[inspect]"' in refused("inspect", "--policy", "direct-p-fast", code=1)
    monkeypatch.setattr(backend, "not_installed", lambda: "nvidia-cutlass-dsl is not installed")
    assert "nvidia-cutlass-dsl is not installed" in refused("inspect", "--policy", "direct-p-fast", code=1)
