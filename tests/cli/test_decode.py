"""`wanfp4 decode`: what it takes, what it refuses, which model it loads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from wanfp4.cli import common
from wanfp4.processors import pipelines
from wanfp4.samples import bundled


@pytest.fixture
def latents(run, tiny_model):
    """Change the receipt of kept latents by a function, or put another in its place; gives the file's name."""
    result = run("generate", "a red circle", "--model", tiny_model, "--steps", 1, "--keep-latents", "-o", "a.mp4")
    assert result.exit_code == 0, result.stderr
    with safe_open("a.latents.safetensors", framework="pt") as file:
        tensor, receipt = file.get_tensor("latents"), json.loads(file.metadata()["wanfp4"])

    def write(change=lambda receipt: None, tensor=tensor):
        changed = json.loads(json.dumps(receipt))
        text = change(changed)
        save_file({"latents": tensor}, "b.latents.safetensors", {"wanfp4": text or json.dumps(changed)})
        return "b.latents.safetensors"

    return write


def test_decode_refuses_what_it_cannot_decode(run, refused, tiny_model):
    run("generate", "a red circle", "--model", tiny_model, "--keep-latents", "-o", "a.mp4")
    assert "there is no file 'b.safetensors'" in refused("decode", "b.safetensors")
    assert "'a.mp4' exists" in refused("decode", "a.latents.safetensors")
    weights = tiny_model / "vae/diffusion_pytorch_model.safetensors"
    assert "holds no latents of `wanfp4 generate`" in refused("decode", weights, "-o", "b.mp4")
    assert "cannot read latents from 'a.json'" in refused("decode", "a.json", "-o", "b.mp4")
    assert "there is no folder 'gone'" in refused("decode", "a.latents.safetensors", "-o", "b.mp4", "--model", "gone")
    assert "fps must be" in refused("decode", "a.latents.safetensors", "-o", "b.mp4", "--fps", 0)
    assert run("decode", "a.latents.safetensors", "-o", "b.mp4", "--fps", 4).exit_code == 0
    assert json.loads(Path("b.json").read_text())["output"]["fps"] == 4


BROKEN = {
    "no model": (lambda r: r.pop("model"), "lacks model.model, which decoding needs"),
    "model of text": (lambda r: r.update(model="x") or None, "lacks model.model"),
    "nameless model": (lambda r: r["model"].pop("model") and None, "lacks model.model"),
    "no dtype": (lambda r: r.pop("dtype") and None, "lacks dtype"),
    "no settings": (lambda r: r.pop("settings") and None, "lacks settings"),
    "settings of a list": (lambda r: r.update(settings=[1]), "lacks settings"),
    "unknown setting": (lambda r: r["settings"].update(hight=3), "holds settings that this version cannot use"),
    "bad setting": (lambda r: r["settings"].update(fps="many"), "cannot use: fps must be a whole number"),
    "unknown dtype": (lambda r: r.update(dtype="int4"), "unknown dtype 'int4'"),
    "other schema": (lambda r: r.update(schema=2), "has schema 2"),
    "other kind": (lambda r: r.update(kind="x"), "holds no latents of"),
    "no JSON": (lambda r: "{", "cannot read latents"),
    "nested": (lambda r: "[" * 100_000, "cannot read latents"),
    "a list": (lambda r: "[]", "holds no latents of"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_latents_with_a_receipt_that_lacks_something_are_refused_in_a_sentence(refused, latents, case):
    change, sentence = BROKEN[case]
    name = latents(lambda r: text if isinstance(text := change(r), str) else None)
    assert sentence in refused("decode", name, "-o", "c.mp4")


def test_the_bundled_model_has_one_name_for_receipts_on_every_machine(tmp_path, monkeypatch):
    place = str(bundled())
    for given in (None, "bundled", place, place + "/"):
        assert common.named_model(given) == ("bundled", place)
    for given in ("./bundled", "bundled/", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", str(tmp_path)):
        assert common.named_model(given) == (given, given)
    monkeypatch.chdir(bundled().parent)
    assert common.named_model(bundled().name) == ("bundled", place)


def test_latents_of_the_bundled_model_hold_no_path_and_decode_anywhere(run, latents):
    for model in ((), ("--model", "bundled"), ("--model", bundled())):
        size = ("--height", 16, "--width", 16, "--frames", 1, "--steps", 1)
        result = run("generate", "a red circle", *size, *model, "--keep-latents", "--force", "-o", "own.mp4")
        assert result.exit_code == 0, result.stderr
        with safe_open("own.latents.safetensors", framework="pt") as file:
            kept = json.loads(file.metadata()["wanfp4"])
        for receipt in (kept, json.loads(Path("own.json").read_text())):
            del receipt["command"]  # what the user typed
            assert receipt["model"]["model"] == "bundled"
            assert str(bundled().parent) not in json.dumps(receipt)
    assert run("decode", "own.latents.safetensors", "-o", "late.mp4").exit_code == 0
    assert Path("late.mp4").read_bytes() == Path("own.mp4").read_bytes()
    assert run("decode", latents(), "--model", "bundled", "-o", "other.mp4").exit_code == 0


def test_latents_of_another_vae_are_refused(refused, latents):
    name = latents(tensor=torch.zeros(1, 48, 1, 2, 2))
    assert "latents must be [1, 16, frames, height, width]" in refused("decode", name, "-o", "c.mp4")


def test_an_error_of_another_library_keeps_its_useful_part(run, latents, monkeypatch):
    def lines(*args):
        raise RuntimeError("Error(s) in loading:\n\n\tsize mismatch for x.\n\tmore")

    monkeypatch.setattr(pipelines, "decode_with_vae", lines)
    said = run("decode", latents(), "-o", "c.mp4").stderr
    assert "error: RuntimeError: Error(s) in loading: size mismatch for x.\n" in said
