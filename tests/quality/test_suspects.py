"""Damage is named where it was put, and nothing where there is none."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from map_cases import LAYERS, mapped
from tiny import tiny_pipeline

from wanfp4.kernels import dispatch
from wanfp4.quality import map_pages
from wanfp4.quality import maps as module
from wanfp4.quality import suspects as suspects_module
from wanfp4.quality.maps import AttentionMap
from wanfp4.quality.shadow import FIGURES, Place
from wanfp4.quality.suspects import polish, suspects


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipeline(layers=LAYERS)


@pytest.fixture(scope="module")
def whole(pipe):
    return mapped(pipe, prompts=["a red circle", "a blue star"], seeds=[0, 1], per_head=True, attribution=True)


# Injected damage. `where` says which calls are damaged; everything else is as always.


def damaged_map(monkeypatch, pipe, damage, where, **options):
    from wanfp4.processors.session import Session

    original_run, original = Session.run, dispatch.run
    now = {}

    def remember(self, q, k, v, expert, site):
        step, _, branch = self.clock.now()
        now.update(layer=self.sites[expert][site].layer, step=step, branch=branch)
        return original_run(self, q, k, v, expert, site)

    def run(q, k, v, numerics, **rest):
        if not where(**now):
            return original(q, k, v, numerics, **rest)
        return damage(original, q, k, v, numerics, rest)

    monkeypatch.setattr(Session, "run", remember)
    monkeypatch.setattr(dispatch, "run", run)
    return mapped(pipe, per_head=True, **options)


def permuted_v(head):
    """One head's values belong to other tokens."""

    def damage(original, q, k, v, numerics, rest):
        v = v.clone()
        v[:, :, head] = v[:, torch.randperm(v.shape[1], generator=torch.Generator().manual_seed(1)), head]
        return original(q, k, v, numerics, **rest)

    return damage


def broken_scale(original, q, k, v, numerics, rest):
    """The block scales of V in every other block of 32 tokens are four times too large."""
    v = v.clone()
    for start in range(0, v.shape[1], 64):
        v[:, start : start + 32] *= 4
    return original(q, k, v, numerics, **rest)


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (2, 1), (3, 0)])
def test_one_heads_permuted_v_in_one_layer_is_named(monkeypatch, pipe, layer, head):
    found = damaged_map(monkeypatch, pipe, permuted_v(head), lambda **at: at["layer"] == layer)
    worst = found.suspects()[0]
    assert worst.stands_out
    assert (worst.kind, worst.layer, worst.head, worst.step) == ("layer", layer, head, None)
    assert f"layer {layer}, head {head}, all steps" in str(worst)
    assert [one.stands_out for one in found.suspects()][1:] == [False] * 9
    assert f"Most suspicious: transformer, layer {layer}, head {head}" in " ".join(module_readings(found))


@pytest.mark.parametrize("step", [0, 2, 3])
def test_one_step_with_a_broken_scale_is_named(monkeypatch, pipe, step):
    found = damaged_map(monkeypatch, pipe, broken_scale, lambda **at: at["step"] == step)
    worst = found.suspects()[0]
    assert worst.stands_out
    assert (worst.kind, worst.layer, worst.head, worst.step) == ("step", None, None, step)
    assert f"step {step + 1}, all layers" in str(worst)
    assert not any(one.stands_out for one in found.suspects()[1:])


@pytest.mark.parametrize(("layer", "step"), [(1, 0), (2, 3), (0, 1)])
def test_one_layer_at_one_step_with_a_broken_scale_is_named(monkeypatch, pipe, layer, step):
    found = damaged_map(monkeypatch, pipe, broken_scale, lambda **at: (at["layer"], at["step"]) == (layer, step))
    worst = found.suspects()[0]
    assert worst.stands_out
    assert (worst.kind, worst.layer, worst.head, worst.step) == ("cell", layer, None, step)
    assert worst.branches == ()


def test_one_head_at_one_step_in_one_branch_is_named(monkeypatch, pipe):
    def where(layer, step, branch):
        return (layer, step, branch) == (3, 1, "uncond")

    found = damaged_map(monkeypatch, pipe, permuted_v(1), where)
    worst = found.suspects()[0]
    assert worst.stands_out
    assert (worst.kind, worst.layer, worst.head, worst.step, worst.branches) == ("cell", 3, 1, 1, ("uncond",))
    assert "uncond only" in str(worst)


def test_damage_is_found_in_a_free_run_too(monkeypatch, pipe):
    found = damaged_map(monkeypatch, pipe, permuted_v(0), lambda **at: at["layer"] == 1, forced=False)
    worst = found.suspects()[0]
    assert (worst.kind, worst.layer, worst.head) == ("layer", 1, 0)


def test_nan_is_the_worst_there_is_and_never_averaged_away(monkeypatch, pipe):
    def nan(original, q, k, v, numerics, rest):
        outcome = original(q, k, v, numerics, **rest)
        outcome.out[:, 5] = math.nan
        return outcome

    found = damaged_map(monkeypatch, pipe, nan, lambda **at: (at["layer"], at["step"]) == (2, 1), seeds=[0, 1])
    worst = found.suspects()[0]
    assert (worst.kind, worst.layer, worst.step) == ("cell", 2, 1)
    assert math.isnan(found.medians("rel_l2")[Place("transformer", "blocks", 2, 1, "cond")])
    data = found.to_dict()
    assert data["summary"]["layers"][2]["rel_l2"]["median"] == "NaN"
    assert ">NaN<" in module.map_html(data)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    # No figure is made up for it.
    assert str(worst) == "transformer, layer 2, step 2: the result holds NaN or infinity"
    assert data["summary"]["suspects"][0]["error"] == "NaN"
    assert "<td>NaN or infinity</td>" in module.map_html(data)
    assert "e+03" not in " ".join(map_pages.readings(data))


@pytest.mark.parametrize("damage", [math.nan, math.inf, 5e6])
def test_a_suspects_error_is_the_error_that_it_has(damage):
    """Scores take NaN for a large error; what is said is what was found."""
    layers, steps = range(6), range(6)
    cells = {Place("transformer", "blocks", n, s, ""): 0.1 + 0.001 * (7 * n + 5 * s) % 0.02
             for n in layers for s in steps}  # fmt: skip

    def found(where):
        first = suspects({place: damage if where(place) else value for place, value in cells.items()})[0]
        assert first.stands_out
        assert first.error == damage or (math.isnan(first.error) and math.isnan(damage))
        assert first.usual == pytest.approx(0.11, abs=0.02)
        return first

    cell, layer, step = (
        found(where) for where in (lambda p: p[2:4] == (2, 3), lambda p: p.layer == 1, lambda p: p.step == 4)
    )
    assert (cell.kind, layer.kind, step.kind) == ("cell", "layer", "step")
    if math.isnan(damage):
        assert str(cell).endswith("layer 2, step 4: the result holds NaN or infinity")
        assert str(layer).endswith("layer 1, all steps: half of the results or more hold NaN or infinity")
    else:
        assert f"relative L2 {damage:.3g}" in str(cell)
    # A layer that is broken now and then is not said to be broken throughout.
    part = suspects({p: damage if p.layer == 1 and p.step in (0, 3) else v for p, v in cells.items()}, keep=None)
    assert all(one.kind == "cell" for one in part if one.error == damage or math.isnan(one.error))


def test_all_places_that_stand_out_are_counted():
    """Ten are listed; twenty-five damaged cells are twenty-five."""
    layers, steps = 12, 25
    cells = [["transformer", "blocks", n, s, "cond"] for s in range(steps) for n in range(layers)]
    errors = [0.3 if (s % layers, s) == (n, s) else 0.1 for _, _, n, s, _ in cells]
    figures = {name: [0.01] * len(cells) for name in FIGURES} | {"rel_l2": errors}
    run = {"prompt": 0, "seed": 0, "complete": True, "figures": figures, "heads": None}
    found = AttentionMap({"cells": cells, "ran": ["wan-fast"] * len(cells), "heads": 2, "per_head": False,
                          "runs": [run], "attribution": None, "complete": True})  # fmt: skip
    summary = json.loads(json.dumps(found.to_dict()))["summary"]
    assert len(summary["suspects"]) == 10
    assert summary["standing_out"] == steps
    assert sum(one.stands_out for one in found.suspects(None)) == steps
    assert map_pages.readings(found.to_dict())[-1].endswith(f"{steps - 1} more places stand out.")


def test_nothing_is_unexplained_where_nothing_is_damaged(whole):
    assert (whole.values("unexplained") < 1e-4).all()


def test_places_overlap_when_one_holds_the_other():
    one = suspects_module.Suspect("layer", "transformer", "blocks", 2, 1, None, (), 1.0, 0.1, 9.0)
    step = suspects_module.Suspect("step", "transformer", None, None, None, 3, (), 1.0, 0.1, 9.0)
    cell = dataclasses.replace(one, kind="cell", step=3)
    assert one.overlaps(cell)
    assert cell.overlaps(one)
    assert step.overlaps(cell)
    assert not step.overlaps(one)
    assert not one.overlaps(dataclasses.replace(one, head=0))
    assert one.overlaps(dataclasses.replace(one, head=None))
    assert not one.overlaps(dataclasses.replace(one, expert="transformer_2"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "where", "named"),
    [
        (0, {"layer": 4}, ("layer", 4, 0, None)),
        (1, {"layer": 0}, ("layer", 0, 1, None)),
        (None, {"step": 2}, ("step", None, None, 2)),
        (None, {"layer": 6, "step": 1}, ("cell", 6, None, 1)),
    ],
)
def test_damage_in_the_bundled_pipeline_is_named_whatever_its_layers_are_like(monkeypatch, damage, where, named):
    """Errors of trained layers differ by themselves; what is not explained by the numerics does not."""
    from wanfp4.processors.pipelines import info_of, load_pipeline
    from wanfp4.samples import bundled

    pipe = load_pipeline(bundled(), device="cpu")
    how = broken_scale if damage is None else permuted_v(damage)
    found = damaged_map(
        monkeypatch, pipe, how, lambda **at: where.items() <= at.items(),
        settings=dataclasses.replace(info_of(pipe).settings(), steps=3), max_sequence_length=512,
    )  # fmt: skip
    worst, *rest = found.suspects()
    assert worst.stands_out
    assert worst.figure == "unexplained"
    assert (worst.kind, worst.layer, worst.head, worst.step) == named
    assert not any(one.stands_out for one in rest if one.figure == "unexplained")


def test_polishing_finds_effects_exactly():
    rows, columns = np.array([0.0, 1.0, -2.0, 0.5, 0.0]), np.array([0.3, 0.0, -0.1])
    table = 2.0 + rows[:, None] + columns
    table[3, 1] += 5
    table[0, 0] = math.nan
    overall, by_row, by_column, rest = polish(table)
    assert overall == pytest.approx(2)
    assert by_row == pytest.approx(rows)
    assert by_column == pytest.approx(columns)
    assert rest[3, 1] == pytest.approx(5)
    rest[3, 1] = 0
    assert np.nan_to_num(rest) == pytest.approx(np.zeros((5, 3)))


def test_an_error_that_drifts_along_the_schedule_is_no_suspect():
    cells = {Place("transformer", "blocks", layer, step, "cond"): 0.1 * 1.15**step * (1 + 0.2 * (layer % 3))
             for layer in range(8) for step in range(20)}  # fmt: skip
    assert not any(one.stands_out for one in suspects(cells))
    broken = {p: v * (3 if p.step == 19 else 1) for p, v in cells.items()}
    [first, *rest] = suspects(broken)
    assert (first.kind, first.step, first.stands_out) == ("step", 19, True)
    assert not any(one.stands_out for one in rest if one.kind != "step")


def test_maps_of_exact_attention_have_no_suspects():
    cells = {Place("transformer", "blocks", layer, step, ""): 0.0 for layer in range(3) for step in range(3)}
    assert not any(one.stands_out for one in suspects(cells))


def test_suspects_are_json(monkeypatch, pipe):
    found = damaged_map(monkeypatch, pipe, permuted_v(1), lambda **at: at["layer"] == 1)
    one = found.to_dict()["summary"]["suspects"][0]
    assert json.loads(json.dumps(one)) == one
    assert set(one) == {*(f.name for f in dataclasses.fields(suspects_module.Suspect)), "stands_out", "where", "text"}


def module_readings(found):
    from wanfp4.quality.map_pages import readings

    return readings(found.to_dict())
