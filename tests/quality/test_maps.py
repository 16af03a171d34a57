"""Attention maps of whole runs: every call is in them, and figures are those of the runs."""

import itertools
import json

import numpy as np
import pytest
import torch
from map_cases import LAYERS, STEPS, mapped, settings
from tiny import generate, tiny_pipeline

from wanfp4.errors import FallbackError, ModelError, SettingsError, Wanfp4Error
from wanfp4.kernels import dispatch
from wanfp4.policy import Guard, get_policy
from wanfp4.processors.patch import patch
from wanfp4.quality import map_pages
from wanfp4.quality import maps as module
from wanfp4.quality.attribution import NAMES
from wanfp4.quality.maps import AttentionMap
from wanfp4.quality.shadow import FIGURES, Place


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipeline(layers=LAYERS)


@pytest.fixture(scope="module")
def whole(pipe):
    return mapped(pipe, prompts=["a red circle", "a blue star"], seeds=[0, 1], per_head=True, attribution=True)


def test_every_call_of_every_run_is_in_it(whole):
    places = list(itertools.product(range(STEPS), ("cond", "uncond"), range(LAYERS)))
    assert whole.places == [Place("transformer", "blocks", layer, step, branch) for step, branch, layer in places]
    for figure in FIGURES:
        assert whole.values(figure).shape == (4, len(places))
        assert whole.heads(figure).shape == (4, len(places), 2)
        assert np.isfinite(whole.values(figure)).all()
    assert whole.complete
    assert whole.prompts == [0, 0, 1, 1]
    assert [(run["prompt"], run["seed"], run["complete"]) for run in whole.data["runs"]] == [
        (0, 0, True), (0, 1, True), (1, 0, True), (1, 1, True),
    ]  # fmt: skip
    errors = whole.values("rel_l2")
    assert ((errors > 0.1) & (errors < 0.5)).all()
    assert (whole.values("floor") < 1e-5).all()
    assert whole.rounded().all()
    assert not whole.suspects()[0].stands_out


def test_teacher_forced_figures_are_those_of_the_unpatched_runs_own_tensors(pipe):
    found = mapped(pipe)
    kept = {}

    def keep(call):
        kept[call.step, call.branch, call.site.layer] = [t.clone() for t in (call.q, call.k, call.v)]

    with patch(pipe, "bf16") as handle, handle.observing(keep):
        generate(pipe, prompt="a red circle moving right", steps=STEPS)
    medians = found.medians("rel_l2")
    for (step, branch, layer), (q, k, v) in kept.items():
        out = dispatch.run(q, k, v, get_policy("wan-fast").numerics, guard=Guard(110, 16)).out.double()
        own = torch.nn.functional.scaled_dot_product_attention(*(t.double().transpose(1, 2) for t in (q, k, v)))
        expected = (out - own.transpose(1, 2)).norm() / own.norm()
        assert medians[Place("transformer", "blocks", layer, step, branch)] == pytest.approx(float(expected), rel=1e-4)


def test_the_first_call_is_alike_free_or_forced_and_later_ones_are_not(pipe):
    forced, free = mapped(pipe), mapped(pipe, forced=False)
    a, b = forced.values("rel_l2")[0], free.values("rel_l2")[0]
    assert a[0] == b[0]
    assert not np.allclose(a[1:], b[1:], rtol=1e-6)


def test_a_patched_pipeline_is_left_as_it_was(pipe):
    before = [block.attn1.processor for block in pipe.transformer.blocks]
    plain = generate(pipe, steps=2)
    mapped(pipe, settings=settings(1))
    assert [block.attn1.processor for block in pipe.transformer.blocks] == before
    assert "step" not in vars(pipe.scheduler)
    assert torch.equal(generate(pipe, steps=2), plain)


def test_layers_that_stay_in_16_bits_have_no_error_and_do_not_make_the_others_suspicious(pipe):
    policy = get_policy("wan-fast").with_(name="mixed", rules=[{"numerics": "bf16", "layers": [0]},
                                                               {"numerics": "bf16", "sigma": [0.0, 0.6]}])  # fmt: skip
    found = mapped(pipe, policy)
    on = found.rounded()
    errors = found.values("rel_l2")[0]
    assert 0 < on.sum() < len(on)
    assert (errors[~on] == 0).all()
    assert (errors[on] > 0.1).all()
    assert not any(on[i] for i, place in enumerate(found.places) if place.layer == 0)
    assert not found.suspects()[0].stands_out
    summary = found.to_dict()["summary"]
    assert summary["overall"]["rel_l2"]["median"] > 0.1
    assert summary["layers"][0]["rel_l2"]["median"] == 0


def test_calls_that_a_policy_leaves_alone_are_in_no_median(pipe):
    """A layer, step, head or branch of which half stays in 16 bits is not half as bad."""
    rules = [{"numerics": "bf16", "sigma": [0.6, 1.0]}, {"numerics": "bf16", "layers": [0]}]
    found = mapped(pipe, get_policy("wan-fast").with_(name="late", rules=rules), settings=settings(5), per_head=True)
    on, errors, heads = found.rounded(), found.values("rel_l2")[0], found.heads("rel_l2")[0]
    by_layer = [np.array([place.layer == n for place in found.places]) for n in range(LAYERS)]
    assert all(on[mask].mean() < 0.5 for mask in by_layer), "so that a median over all would be 0"
    data = found.to_dict()
    shown = map_pages.grids_of(data)["heads"]["rel_l2"][""]
    assert data["summary"]["layers"][0]["rel_l2"]["median"] == 0
    assert shown[0] == ["0", "0"]
    for n in range(1, LAYERS):
        here = by_layer[n] & on
        said = data["summary"]["layers"][n]["rel_l2"]["median"]
        assert said == pytest.approx(np.median(errors[here]), rel=1e-6)
        assert said > 0.1
        assert shown[n] == [map_pages.value("rel_l2", x, 2) for x in np.median(heads[here], axis=0)]
    assert "By layer it goes from 0" in " ".join(map_pages.readings(data))
    in_steps = [one["rel_l2"]["median"] > 0 for one in data["summary"]["steps"]]
    assert in_steps == [any(on[i] for i, p in enumerate(found.places) if p.step == s) for s in range(5)]
    # The worse branch is that of the calls that were rounded.
    for run in data["runs"]:
        run["figures"]["rel_l2"] = [
            (0.2 if cell[4] == "uncond" else 0.1) if o else 0.0
            for o, cell in zip(on, data["cells"], strict=True)
        ]  # fmt: skip
    assert map_pages.worst_branch(data) == "uncond"


def test_both_experts(tmp_path):
    found = mapped(tiny_pipeline(dual=True, layers=2), settings=settings(6))
    experts = {place.step: place.expert for place in found.places}
    assert list(experts.values()) == sorted(experts.values())
    assert set(experts.values()) == {"transformer", "transformer_2"}
    assert [step["expert"] for step in found.data["steps"]] == list(experts.values())


def test_without_guidance_there_is_one_branch(pipe):
    found = mapped(pipe, settings=settings(1, guidance=1.0))
    assert {place.branch for place in found.places} == {"cond"}


def test_the_summary_has_medians_and_intervals_over_runs(whole):
    data = whole.to_dict()
    typical = np.median(whole.values("rel_l2"), axis=1)
    overall = data["summary"]["overall"]["rel_l2"]
    assert overall["median"] == pytest.approx(np.median(typical), rel=1e-6)
    assert typical.min() <= overall["low"] <= overall["median"] <= overall["high"] <= typical.max() * 1.0001
    assert [one["layer"] for one in data["summary"]["layers"]] == list(range(LAYERS))
    for one in data["summary"]["layers"]:
        cells = [i for i, place in enumerate(whole.places) if place.layer == one["layer"]]
        per_run = np.median(whole.values("cosine")[:, cells], axis=1)
        assert one["cosine"]["median"] == pytest.approx(np.median(per_run), rel=1e-6)
    assert [one["step"] for one in data["summary"]["steps"]] == list(range(STEPS))


def test_attribution_is_of_three_steps_of_one_branch(whole):
    found = whole.data["attribution"]
    assert found["calls"] == 4 * 3 * LAYERS
    assert set(found["names"]) <= set(NAMES)
    assert [one["layer"] for one in found["layers"]] == list(range(LAYERS))
    assert found["overall"]["P exact"]["rel_l2"] < found["overall"]["as it is"]["rel_l2"]
    assert found["sentence"].endswith(".")


def test_a_map_is_read_back_as_it_was_written(whole, tmp_path):
    whole.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["map.html", "map.json", "map.md"]
    again = AttentionMap.load(tmp_path)
    assert again.to_dict() == AttentionMap.load(tmp_path / "map.json").to_dict() == whole.to_dict()
    assert json.loads((tmp_path / "map.json").read_text(), parse_constant=pytest.fail) == whole.to_dict()
    (tmp_path / "map.json").write_text('{"kind": "wanfp4 drift report", "schema": 1}')
    with pytest.raises(SettingsError, match="needed are 'wanfp4 attention map'"):
        AttentionMap.load(tmp_path)
    (tmp_path / "map.json").write_text("{")
    with pytest.raises(SettingsError, match=r"is no JSON file; needed is a map's folder or map\.json"):
        AttentionMap.load(tmp_path)
    with pytest.raises(SettingsError, match="cannot read"):
        AttentionMap.load(tmp_path / "nowhere")


def test_figures_that_are_not_there_are_named(pipe):
    found = mapped(pipe, settings=settings(1))
    with pytest.raises(ValueError, match="no figure 'psnr'; the figures are rel_l2,"):
        found.values("psnr")
    with pytest.raises(ValueError, match="per_head=True"):
        found.heads("rel_l2")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"prompts": []}, SettingsError, "at least one prompt"),
        ({"seeds": [-1]}, SettingsError, "seed must be"),
        ({"rows": 0}, SettingsError, "rows must be a whole number from 1, not 0"),
        ({"generator": None}, SettingsError, "the job sets 'generator' itself"),
        ({"strict": True, "policy": get_policy("wan-fast").with_(name="few", min_tokens=1), "backend": "sdpa"},
         Wanfp4Error, "cannot run this"),
    ],
)  # fmt: skip
def test_bad_input_is_a_sentence_before_the_first_step(monkeypatch, pipe, options, error, words):
    monkeypatch.setattr(module, "generate_latents", lambda *a, **k: pytest.fail("a run was started"))
    with pytest.raises(error, match=words):
        mapped(pipe, **options)


def test_a_pipeline_that_is_patched_already_is_refused(pipe):
    with patch(pipe, "nvfp4"), pytest.raises(ModelError, match=r"restore\(\) the patch first"):
        mapped(pipe)


def test_strict_is_passed_on(pipe, monkeypatch):
    policy = get_policy("wan-fast").with_(name="ruled", rules=[{"numerics": "nvfp4", "sigma": [0.0, 1.0]}])
    monkeypatch.setattr("wanfp4.processors.session.Clock.now", lambda self: (None, None, ""))
    with pytest.raises(FallbackError, match="strict"):
        mapped(pipe, policy, strict=True)


def test_ctrl_c_keeps_finished_runs_and_the_steps_of_the_unfinished_one(pipe, tmp_path, monkeypatch):
    original, calls = dispatch.run, itertools.count()
    fatal = 5 * 2 * LAYERS + 3  # in the second step of the second run
    monkeypatch.setattr(dispatch, "run", lambda *a, **k: _counted(original, calls, fatal, a, k))
    with pytest.raises(KeyboardInterrupt):
        mapped(pipe, seeds=[0, 1], partial=tmp_path / "out", per_head=True, attribution=True)
    found = AttentionMap.load(tmp_path / "out")
    assert not found.complete
    assert [run["complete"] for run in found.data["runs"]] == [True, False]
    errors = found.values("rel_l2")
    reached = [place.step < 1 for place in found.places]
    assert np.isfinite(errors[0]).all()
    assert (np.isfinite(errors[1]) == reached).all()
    assert np.isfinite(list(found.medians("rel_l2").values())).all()
    assert "Incomplete" in (tmp_path / "out" / "map.html").read_text()
    assert "Incomplete" in (tmp_path / "out" / "map.md").read_text()


def _counted(original, calls, fatal, args, options):
    if next(calls) == fatal:
        raise KeyboardInterrupt
    return original(*args, **options)


def test_ctrl_c_in_the_first_run_keeps_its_steps(pipe, tmp_path, monkeypatch):
    original, calls = dispatch.run, itertools.count()
    monkeypatch.setattr(dispatch, "run", lambda *a, **k: _counted(original, calls, 2 * LAYERS + 1, a, k))
    with pytest.raises(KeyboardInterrupt):
        mapped(pipe, partial=tmp_path / "out")
    found = AttentionMap.load(tmp_path / "out")
    assert {place.step for place in found.places} == {0}
    assert len(found.data["steps"]) == 1
    monkeypatch.setattr(dispatch, "run", lambda *a, **k: _counted(original, itertools.count(), 0, a, k))
    with pytest.raises(KeyboardInterrupt):
        mapped(pipe, partial=tmp_path / "none")
    assert not (tmp_path / "none").exists()
