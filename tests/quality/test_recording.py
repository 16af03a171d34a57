"""Recordings hold what the model computed, are bounded and resumable, and mix nothing."""

import dataclasses
import json
import math

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
from safetensors import safe_open
from tiny import FRAMES, HEIGHT, TOKENS, WIDTH, tiny_pipeline

from wanfp4.errors import ModelError, SettingsError, Wanfp4Error
from wanfp4.kernels import reference
from wanfp4.processors.patch import patch
from wanfp4.processors.pipelines import Settings, generate_latents
from wanfp4.quality import recording
from wanfp4.quality.recording import FIT, HELD_OUT, load_recording, picks, record

SETTINGS = Settings(height=HEIGHT, width=WIDTH, frames=FRAMES, steps=3, guidance=4.0)
PROMPTS = ["a red circle", "a blue star", "a green square"]
SCALE = 1 / math.sqrt(128)


def recorded(pipe, folder, prompts=PROMPTS, seeds=(5,), **changes):
    options = {"settings": SETTINGS, "progress": False, "max_sequence_length": 32} | changes
    return record(pipe, prompts, list(seeds), folder=folder, **options)


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipeline(dtype=torch.bfloat16)


def same_calls(a, b):
    assert [(vars(x) | dict.fromkeys("qkv")) for x in a] == [(vars(x) | dict.fromkeys("qkv")) for x in b]
    return all(torch.equal(getattr(x, n), getattr(y, n)) for x, y in zip(a, b, strict=True) for n in "qkv")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_recorded_tensors_are_what_the_model_computed(tmp_path, dtype):
    pipe = tiny_pipeline(dtype=dtype, dual=dtype == torch.float32)
    found = recorded(pipe, tmp_path / "r", PROMPTS[:2], calls=10, rows=20)
    seen = {}

    def keep(call):
        seen[call.expert, call.site.layer, call.step, call.branch] = (call.q.clone(), call.k.clone(), call.v.clone())

    for half, prompt in ((FIT, PROMPTS[0]), (HELD_OUT, PROMPTS[1])):
        with patch(pipe, "bf16") as handle, handle.observing(keep):
            generate_latents(pipe, prompt, SETTINGS, 5, max_sequence_length=32)
        calls = found.calls(half)
        assert len(calls) == 10
        assert len({(c.layer, c.step, c.branch, c.head) for c in calls}) == 10
        assert {c.layer for c in calls} == {0, 1}
        for c in calls:
            q, k, v = (t[0, :, c.head].bfloat16() for t in seen[c.expert, c.layer, c.step, c.branch])
            assert c.rows[0] == 0
            assert c.rows[-1] == TOKENS - 1
            assert len(c.rows) == 20
            assert torch.equal(c.q, q[list(c.rows)])
            assert torch.equal(c.k, k)
            assert torch.equal(c.v, v)
            whole = seen[c.expert, c.layer, c.step, c.branch]
            assert c.largest == pytest.approx(reference.sampled_logit(whole[0], whole[1], SCALE))
            assert 0 < c.sigma <= 1
            assert (c.tokens, c.num_layers) == (TOKENS, 2)
    if dtype == torch.float32:
        assert {c.expert for c in found.calls(FIT)} == {"transformer", "transformer_2"}


def test_the_file_says_where_its_tensors_come_from(pipe, tmp_path):
    found = recorded(pipe, tmp_path, calls=4)
    assert found.complete
    assert [(r["prompt"], r["half"], r["calls"]) for r in found.data["runs"]] == [
        (0, "fit", 4),
        (1, "held-out", 4),
        (2, "fit", 4),
    ]
    with safe_open(tmp_path / found.data["runs"][1]["file"], "pt") as file:
        said = file.metadata()
        assert file.get_tensor("3.k").dtype == torch.bfloat16
    assert said["weights"] == found.data["model"]["weights"]
    call = json.loads(said["calls"])[0]
    assert (call["prompt"], call["seed"]) == (1, 5)
    assert {"layer", "step", "sigma", "branch", "head", "expert", "tokens"} <= set(call)
    assert same_calls(load_recording(tmp_path).calls(FIT), found.calls(FIT))


def test_both_halves_are_sampled_at_the_same_places(pipe, tmp_path):
    found = recorded(pipe, tmp_path, [*PROMPTS, "a white star"], calls=5)
    places = {half: [(c.layer, c.step, c.branch, c.head) for c in found.calls(half)] for half in (FIT, HELD_OUT)}
    assert places[FIT] == places[HELD_OUT]
    assert len(set(places[FIT])) == 10, "a second run of a half goes on where the first ended"


def test_the_sample_is_deterministic_and_covers_every_layer():
    order = picks(30, 50, 2, 12)
    assert order == picks(30, 50, 2, 12)
    assert len(set(order)) == 30 * 50 * 2 * 12
    first = order[:300]
    assert sorted(p.layer for p in first) == sorted(list(range(30)) * 10)
    for name, values in (("step", 50), ("branch", 2), ("head", 12)):
        assert len({getattr(p, name) for p in first}) > 0.9 * values


def test_without_guidance_there_is_one_branch(pipe, tmp_path):
    settings = dataclasses.replace(SETTINGS, guidance=1.0)
    found = recorded(pipe, tmp_path, calls=1000, settings=settings)
    assert {c.branch for c in found.calls(FIT)} == {"cond"}
    assert len(found.calls(HELD_OUT)) == 2 * 3 * 2, "layers, steps, heads: all there are"


def test_the_size_is_bounded(pipe, tmp_path):
    found = recorded(pipe, tmp_path, PROMPTS[:2], calls=1000, limit_mb=1)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert 0.8e6 < size <= 1e6
    assert len(found.calls(FIT)) == len(found.calls(HELD_OUT)) > 5


def test_what_does_not_fit_is_refused_before_anything_runs(pipe, tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "generate_latents", None)
    with pytest.raises(SettingsError, match=r"of 105 tokens takes 0.1 MB, and 20 runs need one each: .* to 2 MB"):
        recorded(pipe, tmp_path / "r", PROMPTS[:2], seeds=range(10), limit_mb=1)
    with pytest.raises(SettingsError, match="at least two prompts"):
        recorded(pipe, tmp_path / "r", PROMPTS[:1])
    with pytest.raises(SettingsError, match="rows must be a whole number from 1, not 0"):
        recorded(pipe, tmp_path / "r", rows=0)
    with patch(pipe), pytest.raises(ModelError, match="is patched"):
        recorded(pipe, tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.fixture
def counted(monkeypatch):
    """Prompts that ran; the second one is interrupted after its first step while `stop` is set."""
    ran = {"prompts": [], "stop": True}

    def generate(pipe, prompt, *args, **kwargs):
        ran["prompts"].append(prompt)

        def interrupt(*_):
            raise KeyboardInterrupt

        if ran["stop"] and prompt == PROMPTS[1]:
            kwargs["callback_on_step_end"] = interrupt
        return generate_latents(pipe, prompt, *args, **kwargs)

    monkeypatch.setattr(recording, "generate_latents", generate)
    return ran


def test_an_interrupted_recording_keeps_what_is_there_and_goes_on(pipe, tmp_path, counted):
    folder = tmp_path / "r"
    with pytest.raises(KeyboardInterrupt):
        recorded(pipe, folder, calls=24)
    kept = load_recording(folder)
    assert not kept.complete
    assert [run["complete"] for run in kept.data["runs"]] == [True, False]
    assert {c.step for c in kept.calls(HELD_OUT)} == {0}
    before = (folder / kept.data["runs"][0]["file"]).stat().st_mtime_ns
    counted.update(stop=False, prompts=[])

    resumed = recorded(pipe, folder, calls=24)
    assert counted["prompts"] == PROMPTS[1:]
    assert resumed.complete
    assert (folder / kept.data["runs"][0]["file"]).stat().st_mtime_ns == before
    straight = recorded(pipe, tmp_path / "straight", calls=24)
    for half in (FIT, HELD_OUT):
        assert same_calls(resumed.calls(half), straight.calls(half))

    counted.update(prompts=[])
    assert recorded(pipe, folder, calls=24).complete
    assert counted["prompts"] == [], "a finished recording is not made again"


def test_another_recording_is_not_written_over(pipe, tmp_path):
    first = recorded(pipe, tmp_path, calls=2)
    with pytest.raises(SettingsError, match="holds a recording of other seeds, --calls; give the same to go on"):
        recorded(pipe, tmp_path, seeds=(6,), calls=3)
    with pytest.raises(SettingsError, match="of other model"):
        recorded(tiny_pipeline(dtype=torch.bfloat16, seed=9), tmp_path, calls=2)
    again = recorded(pipe, tmp_path, PROMPTS[:2], seeds=(6,), calls=2, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [recording.MANIFEST, *(run["file"] for run in again.data["runs"])]
    )
    assert first.data["seeds"] != load_recording(tmp_path).data["seeds"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("attention", "attention of the pipeline's own"),
        ("machine", "machine"),
        ("versions", "versions"),
        ("name", None),
        ("threads", None),
    ],
)
def test_a_recording_is_of_one_attention_machine_and_version(tmp_path, counted, monkeypatch, change, words):
    """recording.json says once what all runs were made with, so no other run goes into it."""
    pipe = tiny_pipeline(dtype=torch.bfloat16)
    with pytest.raises(KeyboardInterrupt):
        recorded(pipe, tmp_path, calls=2, model="here")
    counted.update(stop=False, prompts=[])
    before = (tmp_path / recording.MANIFEST).read_bytes()
    if change == "attention":
        monkeypatch.setattr(Registry, "_active_backend", Registry._active_backend)  # set_attention_backend leaks it
        pipe.transformer.set_attention_backend("_native_math")
    if change == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    if change in ("machine", "versions"):
        monkeypatch.setattr("wanfp4.quality.jobs." + change, lambda *_: {"name": "another", "torch": "9.9"})
    options = {"calls": 2, "model": "elsewhere" if change == "name" else "here"}
    if words is None:
        assert recorded(pipe, tmp_path, **options).complete
        assert counted["prompts"] == PROMPTS[1:]
        return
    with pytest.raises(SettingsError, match=f"holds a recording of other {words}; give the same to go on"):
        recorded(pipe, tmp_path, **options)
    assert counted["prompts"] == []
    assert (tmp_path / recording.MANIFEST).read_bytes() == before


def test_files_that_do_not_belong_are_refused(pipe, tmp_path):
    found = recorded(pipe, tmp_path, PROMPTS[:2], calls=2)
    recorded(tiny_pipeline(dtype=torch.bfloat16, seed=9), tmp_path / "other", PROMPTS[:2], calls=2)
    file = found.data["runs"][0]["file"]
    (tmp_path / file).write_bytes((tmp_path / "other" / file).read_bytes())
    with pytest.raises(Wanfp4Error, match="is of other weights"):
        found.calls(FIT)
    (tmp_path / file).write_bytes(b"no tensors")
    with pytest.raises(Wanfp4Error, match="cannot read the recorded run"):
        found.calls(FIT)
    assert load_recording(tmp_path / recording.MANIFEST).folder == load_recording(tmp_path).folder == tmp_path
    with pytest.raises(SettingsError, match=r"cannot read .*; needed is a recording's folder or recording\.json"):
        load_recording(tmp_path / "nowhere")
    (tmp_path / recording.MANIFEST).write_text('{"kind": "wanfp4 drift report", "schema": 1}')
    with pytest.raises(SettingsError, match="has kind 'wanfp4 drift report'"):
        load_recording(tmp_path)
