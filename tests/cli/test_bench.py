"""`wanfp4 bench`: tables and JSON of attention and of a step, at toy sizes on the CPU."""

import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from wanfp4.cli import bench as command
from wanfp4.errors import SettingsError
from wanfp4.kernels import dispatch
from wanfp4.policy import policies
from wanfp4.processors import bench as work

CPU = torch.device("cpu")


def test_attention_and_a_step(run):
    result = run(
        "bench", "--shape", "64x2", "--policy", "wan-fast", "--policy", "nvfp4", "--rounds", "3",
        "--step", "tiny", "--size", "9x64x64", "--json", "bench.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    made = json.loads(Path("bench.json").read_text())
    assert made["kind"] == "wanfp4 bench"
    assert made["versions"]["torch"] == torch.__version__
    assert made["machine"]["device"] == "cpu"
    assert [policy["name"] for policy in made["policies"]] == ["wan-fast", "nvfp4"]
    [attention] = made["attention"]
    assert list(attention["times"])[:5] == ["wan-fast", "nvfp4", "sdpa", "sdpa cudnn", "sdpa flash"]
    ours, sdpa = attention["times"]["wan-fast"], attention["times"]["sdpa"]
    assert ours["low"] <= ours["median"] <= ours["high"]
    assert ours["backend"] == "reference"
    assert ours["tflops"] == pytest.approx(4 * 64 * 64 * 2 * 128 / ours["median"] / 1e12)
    assert ours["speed"] == pytest.approx(sdpa["median"] / ours["median"])
    assert ours["baseline"] == "sdpa"  # there is no cuDNN on a CPU
    assert "error" in attention["times"]["sdpa cudnn"]
    assert attention["input_bytes"] == 3 * 64 * 2 * 128 * 2
    [step] = made["steps"]
    assert (step["model"], step["layers"], step["weights"], step["tokens"]) == ("tiny", 2, "random", 3 * 4 * 4)
    assert list(step["times"]) == ["own", "wan-fast", "nvfp4"]
    assert step["times"]["own"]["speed"] == 1
    assert step["times"]["nvfp4"]["speed"] == pytest.approx(
        step["times"]["own"]["median"] / step["times"]["nvfp4"]["median"]
    )
    assert "attention, 64 tokens × 2 heads" in result.stdout
    assert "step of tiny, 2 blocks, random weights, 48 tokens" in result.stdout
    assert "wan-fast" in result.stdout
    assert " ms " in result.stdout


def test_backends_are_named_and_compared(run):
    result = run(
        "bench", "--shape", "40x1", "--policy", "wan-fast", "--backend", "reference", "--no-peers", "--rounds", "2"
    )
    assert result.exit_code == 0, result.output
    assert "wan-fast / reference" in result.stdout
    assert "sdpa" not in result.stdout


def test_a_backend_without_policies_times_those_that_it_can_run():
    everything = command.chosen(None, ["reference"], CPU)
    assert [policy.name for policy, _ in everything] == [n for n, p in policies().items() if p.rounding]
    assert command.chosen(None, ["sdpa"], CPU) == []


def test_a_step_patches_and_restores(monkeypatch):
    used = []
    monkeypatch.setattr(dispatch, "run", spy(dispatch.run, used))
    row = work.step("tiny", [(policies()["nvfp4"], None)], (5, 32, 48), CPU, 2, layers=1)
    assert row["layers"] == 1
    assert used == ["QK nvfp4, P nvfp4, V nvfp4, exp2, rowmax"] * 3  # one to warm up, two rounds, one block


def spy(run, used):
    def called(q, k, v, numerics, **options):
        used.append(numerics.label)
        return run(q, k, v, numerics, **options)

    return called


def test_what_cannot_run_is_a_line(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(dispatch, "run", broken)
    row = work.step("tiny", [(policies()["nvfp4"], None)], (5, 32, 32), CPU, 2)
    assert row["times"]["nvfp4"] == {"error": "RuntimeError: out of memory"}
    assert row["times"]["own"]["median"] > 0
    assert any("out of memory" in line for line in command.lines("step", row))
    assert command.lines("title", {"error": "out of memory", "times": {}}) == ["title", "  not timed: out of memory"]


def test_table_of_memory():
    times = {"wan-fast": {"median": 0.5, "speed": 0.75, "baseline": "sdpa", "extra_memory": 150, "memory": 2**31}}
    [_, line] = command.lines("title", {"input_bytes": 100, "times": times})
    assert line == "  wan-fast     500.000 ms   0.75 × sdpa  1.50 × Q, K, V more memory  2.0 GiB"


def test_an_error_of_one_shape_leaves_the_others(run, monkeypatch):
    def attention(pairs, tokens, *rest, **options):
        if tokens == 64:
            raise RuntimeError("out of memory")
        return {"tokens": tokens, "times": {}}

    monkeypatch.setattr(work, "attention", attention)
    result = run("bench", "--shape", "64x2", "--shape", "32x2")
    assert result.exit_code == 0
    assert "not timed: RuntimeError: out of memory" in result.stdout
    assert "attention, 32 tokens × 2 heads" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "hours without a GPU"),
        (("--shape", "64"), "a timing is tokens x heads"),
        (("--shape", "64x1", "--policy", "nothing"), "unknown policy 'nothing'"),
        (("--shape", "64x1", "--backend", "nothing"), "unknown backend 'nothing'"),
        (("--shape", "64x1", "--policy", "wan-fast", "--backend", "sdpa"), "it rounds nothing"),
        (("--step", "5b"), "no model '5b'"),
        (("--step", "tiny", "--size", "9x64"), "frames x height x width"),
        (("--step", "tiny", "--size", "10x64x64"), "4k\\+1 frames of multiples of 16"),
    ],
)
def test_what_is_refused(refused, arguments, message):
    assert re.search(message, refused("bench", "--device", "cpu", *arguments))


def test_an_earlier_file_stays(run):
    Path("bench.json").write_text("mine")
    result = run("bench", "--shape", "8x1", "--json", "bench.json")
    assert result.exit_code == 2
    assert "exists" in result.stderr
    assert Path("bench.json").read_text() == "mine"


def test_models_are_those_of_wan():
    model = work.build(work.MODELS["tiny"], None, CPU)
    assert model.dtype == torch.bfloat16
    assert [block.attn1.heads for block in model.blocks] == [2, 2]
    assert work.MODELS["1.3b"] == work.Shape(12, 30, 8960)
    with pytest.raises(SettingsError, match="no model 'huge'"):
        work.step("huge", [], (5, 32, 32), CPU, 2)


def hub_of(monkeypatch, get_kernel):
    """The package `kernels` as far as bench knows it."""
    monkeypatch.setitem(sys.modules, "kernels", types.SimpleNamespace(get_kernel=get_kernel))


def test_kernels_of_the_hub_are_timed_beside(run, monkeypatch):
    asked = []

    def get_kernel(repository, *, version):
        asked.append((repository, version))

        def sageattn(q, k, v, tensor_layout):
            assert (tensor_layout, q.shape) == ("NHD", (1, 40, 1, 128))
            return q

        return types.SimpleNamespace(flash_attn_func=lambda q, k, v: v, sageattn=sageattn)

    hub_of(monkeypatch, get_kernel)
    result = run("bench", "--shape", "40x1", "--policy", "nvfp4", "--no-peers", "--rounds", 2,
                 "--hub", "flash-attn3", "--hub", "sageattention", "--json", "bench.json")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert asked == [("kernels-community/flash-attn3", 1), ("SageAttention/sage-attention", 3)]
    times = json.loads(Path("bench.json").read_text())["attention"][0]["times"]
    assert list(times) == ["nvfp4", "hub flash-attn3", "hub sageattention"]
    assert all(row["median"] > 0 for row in times.values())


def test_the_names_and_versions_of_the_hub_are_those_that_diffusers_takes():
    from diffusers.models import attention_dispatch as theirs

    known = {(c.repo_id, c.version, c.function_attr) for c in theirs._HUB_KERNELS_REGISTRY.values()}
    assert {row[:3] for row in work.HUB.values()} <= known


def test_the_hub_in_one_sentence(refused, monkeypatch):
    args = ("bench", "--shape", "40x1", "--policy", "nvfp4", "--hub")
    assert "--hub knows flash-attn2," in refused(*args, "flash-attn5")
    monkeypatch.setitem(sys.modules, "kernels", None)
    assert "pip install kernels" in refused(*args, "flash-attn3")

    def unreachable(repository, *, version):
        raise ConnectionError("no network\nat all")

    hub_of(monkeypatch, unreachable)
    said = refused(*args, "flash-attn3")
    assert "cannot get kernels-community/flash-attn3, version 1, from the Hub: " in said
    assert "no network" in said
