"""`wanfp4 doctor`: says what is there, tests every preset, and fails when a figure is off."""

import dataclasses
import importlib.metadata
import json

import torch

from wanfp4.cli import doctor
from wanfp4.kernels import dispatch
from wanfp4.policy import policies


def test_everything_works_here_and_is_said(run):
    result = run("doctor")
    assert result.exit_code == 0, result.stdout
    for part in (
        f"torch {torch.__version__}",
        f"diffusers {importlib.metadata.version('diffusers')}",
        "sdpa: available, runs bf16;",
        "reference: available, runs every policy;",
        "Blackwell",
        "Triton",
        "runs by emulation",
        "Everything works.",
    ):
        assert part in result.stdout
    assert result.stdout.count("  ok") == len(policies())


def test_json_holds_a_figure_for_every_preset(run):
    result = run("doctor", "--json")
    report = json.loads(result.stdout)
    assert report["faults"] == []
    tests = {test["policy"]: test for test in report["self_test"]["policies"]}
    assert list(tests) == list(policies())
    assert all(abs(t["rel_l2"] - t["expected"]) <= report["self_test"]["tolerance"] for t in tests.values())
    assert report["devices"][0]["device"] == "cpu"
    assert report["versions"]["python"]


def test_a_backend_that_computes_something_else_fails(run, monkeypatch):
    def worse(q, k, v, numerics, *rest):
        outcome = honest.run(q, k, v, numerics, *rest)
        return dataclasses.replace(outcome, out=outcome.out * 1.02)

    sdpa, honest = (b for b in dispatch.backends() if b.name in ("sdpa", "reference"))
    monkeypatch.setattr(dispatch, "_BACKENDS", (sdpa, dataclasses.replace(honest, run=worse)))
    result = run("doctor")
    assert result.exit_code == 1
    assert "Something is wrong:" in result.stdout
    assert "policy mxfp8-token-block: rel-L2 0.05" in result.stdout


def test_nan_a_missing_backend_and_a_new_preset_are_faults(run, monkeypatch):
    def broken(q, k, v, numerics, *rest):
        return dispatch.Outcome(torch.full_like(v, torch.nan), None, "reference")

    sdpa, honest = (b for b in dispatch.backends() if b.name in ("sdpa", "reference"))
    monkeypatch.setattr(dispatch, "_BACKENDS", (sdpa, dataclasses.replace(honest, run=broken)))
    assert "wan-fast: gives NaN or infinity" in run("doctor").stdout
    monkeypatch.setattr(dispatch, "_BACKENDS", (sdpa, dataclasses.replace(honest, missing=lambda: "no such hardware")))
    result = run("doctor")
    assert result.exit_code == 1
    assert "reference: not available: no such hardware" in result.stdout
    assert "wan-fast: does not run: no backend can run" in result.stdout
    monkeypatch.setattr(doctor, "EXPECTED", {})
    assert "bf16: has no expected figure" in run("doctor").stdout


def test_missing_parts_are_faults(run, monkeypatch, copy_of_tiny):
    (copy_of_tiny / "vae/diffusion_pytorch_model.safetensors").unlink()
    monkeypatch.setattr("wanfp4.samples.bundled", lambda: copy_of_tiny)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "/nowhere/ffmpeg")
    result = run("doctor")
    assert result.exit_code == 1
    assert "bundled sample: vae: no weights in vae/" in result.stdout
    assert "ffmpeg: no ffmpeg, so no mp4 can be written" in result.stdout
