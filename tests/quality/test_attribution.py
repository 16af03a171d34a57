"""Attribution: a part that makes the error is named, levers that help are, and what is not legal is said."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wanfp4.kernels import reference
from wanfp4.policy import EXACT, Classifier, Numerics, get_policy, policies
from wanfp4.processors.session import Call, Site
from wanfp4.quality import shadow
from wanfp4.quality.attribution import (
    BASE,
    LEVERS,
    NAMES,
    NONE,
    PARTS,
    Attributed,
    attribute,
    sentence,
    summarise,
    variants,
)
from wanfp4.quality.shadow import Place
from wanfp4.receipt import Ran


def call(q, k, v, numerics, layer=0):
    ran = Ran("some policy", numerics.label, "reference")
    return Call("transformer", Site("blocks", layer, 4), 0, 0.5, "cond", q, k, v, v, numerics, ran, lambda: v)


def tensors(seed=0, tokens=200, heads=2):
    return torch.randn(3, 1, tokens, heads, 128, generator=torch.Generator().manual_seed(seed)).unbind(0)


def by_name(numerics):
    return {variant.name: variant for variant in variants(numerics)}


@pytest.mark.parametrize("name", policies())
def test_every_preset_has_every_variant_or_a_reason(name):
    numerics = get_policy(name).numerics
    found = variants(numerics)
    assert tuple(variant.name for variant in found) == NAMES[1:]
    for variant in found:
        if variant.numerics is None:
            assert variant.note
        else:
            assert variant.numerics != numerics
    assert numerics.is_exact == all(variant.numerics is None for variant in found if variant.name in PARTS)


def test_one_thing_is_changed_at_a_time():
    base = get_policy("wan-fast").numerics
    changed = by_name(base)
    assert changed["Q and K exact"].numerics == dataclasses.replace(base, qk="exact")
    assert changed["classifier exp2"].numerics == dataclasses.replace(base, classifier=Classifier())
    assert changed["V exact"].numerics == dataclasses.replace(base, v="exact")
    assert changed["smooth K"].numerics == dataclasses.replace(base, smooth_k=True)
    assert changed["smooth V"].numerics == dataclasses.replace(base, smooth_v=True)
    assert changed["row maximum"].numerics == dataclasses.replace(base, row_reference="rowmax")
    assert changed["P exact"].numerics == Numerics(qk="nvfp4-folded", v="mxfp4-direct")
    assert "row reference rowmax" in changed["P exact"].note
    assert changed["row peak 2688"].numerics is None
    assert "two-level" in changed["row peak 2688"].note


def test_what_contradicts_itself_is_said_to():
    """A tensor scale of NVFP4 operands has none left once Q and K are exact: it goes with them."""
    base = Numerics(qk="nvfp4", p="fp8", v="fp8", global_scale=True)
    assert by_name(base)["Q and K exact"].numerics == Numerics(p="fp8", v="fp8")
    sage = by_name(get_policy("sage3").numerics)
    assert sage["smooth K"].note == "K is smoothed already"
    assert sage["row peak 2688"].note == "the row peak is 2688 already"
    assert sage["Q and K exact"].numerics.smooth_q is False
    exact_but_v = by_name(Numerics(v="fp8"))
    assert exact_but_v["smooth K"].numerics is None
    assert exact_but_v["classifier exp2"].note == "P in exact has no classifier"


def test_errors_are_those_of_float64_softmax():
    q, k, v = tensors()
    numerics = get_policy("nvfp4").numerics
    found = attribute(call(q, k, v, numerics))
    qd, kd, vd = (t.double().transpose(1, 2) for t in (q, k, v))
    exact = ((qd @ kd.transpose(-1, -2) / 128**0.5).softmax(-1) @ vd).transpose(1, 2)

    def error(n):
        out = reference.attention(q, k, v, n, scale=128**-0.5).out
        return float((out.double() - exact).norm() / exact.norm())

    assert list(found.rel_l2) == list(NAMES)
    assert found.rel_l2[BASE] == pytest.approx(error(numerics), rel=1e-4)
    for variant in variants(numerics):
        if variant.numerics is None:
            assert found.rel_l2[variant.name] is None
        else:
            assert found.rel_l2[variant.name] == pytest.approx(error(variant.numerics), rel=1e-4)


def test_a_sample_of_query_blocks_is_enough():
    q, k, v = tensors(tokens=1500)
    whole = attribute(call(q, k, v, get_policy("sage3").numerics), blocks=99)
    part = attribute(call(q, k, v, get_policy("sage3").numerics), blocks=2)
    assert part.rel_l2[BASE] == pytest.approx(whole.rel_l2[BASE], rel=0.05)
    assert part.rel_l2["Q and K exact"] == pytest.approx(whole.rel_l2["Q and K exact"], rel=0.05)


GLOBAL = dataclasses.replace(get_policy("nvfp4").numerics, global_scale=True)


@pytest.mark.parametrize("numerics", [get_policy("wan-fast").numerics, get_policy("sage3").numerics, GLOBAL])
def test_heads_by_themselves_give_what_they_give_together(monkeypatch, numerics):
    """A scale of the whole tensor spans heads, which differ in size here."""
    q, k, v = (t * torch.tensor([0.2, 1.0, 5.0])[:, None] for t in tensors(heads=3))
    found = {}
    for limit in (1, 200 * 128 * 2, 2**30):
        monkeypatch.setattr(shadow, "_CPU_ELEMENTS", limit)
        found[limit] = {n: e for n, e in attribute(call(q, k, v, numerics)).rel_l2.items() if e is not None}
    first, *others = found.values()
    for other in others:
        assert other == pytest.approx(first, rel=1e-6)
    exact, out = (reference.attention(q, k, v, n, scale=128**-0.5).out for n in (EXACT, numerics))
    assert first[BASE] == pytest.approx(float((out - exact).norm() / exact.norm()), rel=1e-4)


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside have held at once; views of what was given hold none."""

    def __init__(self, given):
        super().__init__()
        self.given = {t.untyped_storage().data_ptr() for t in (given.q, given.k, given.v)}
        self.alive, self.bytes = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                storage = tensor.untyped_storage()
                if storage.data_ptr() in self.given:
                    continue
                self.alive[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {at: one for at, one in self.alive.items() if not one[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self.alive.values()))
        return made


@pytest.mark.parametrize("name", ["wan-fast", "nvfp4", "sage3", "fp8-direct"])
def test_memory_does_not_grow_with_heads(name):
    """At Wan's sizes float32 copies of all heads would be a multiple of what the model itself takes."""
    tokens = 1024
    inputs = {n: [t.bfloat16() for t in tensors(tokens=tokens, heads=n)] for n in (1, 2, 8)}

    def peak(heads, numerics):
        given = call(*inputs[heads], numerics)
        with Peak(given) as found:
            attribute(given)
        return found.bytes

    peaks = {heads: peak(heads, get_policy(name).numerics) for heads in (1, 2, 8)}
    one_head = tokens * 128 * 4
    assert peaks[8] < 1.1 * peaks[2] + 8 * 256 * 128 * 2  # the sampled queries of all heads, in BF16
    assert one_head < peaks[2] < 36 * one_head
    assert peak(8, GLOBAL) > 2 * 8 * one_head, "a scale that spans heads needs them all, and the measure sees it"


# Inputs made so that one part, and one lever, is to blame.


def with_offset_keys():
    """Every key has the same large offset: exact softmax does not see it, rounding does. K smoothing takes it away."""
    q, k, v = tensors(1)
    return q, k + 12.0, v


def with_offset_values():
    """Values with a large mean: their rounding errors are as large as the mean. V smoothing takes it away."""
    q, k, v = tensors(2)
    return q, k, 0.05 * v + torch.linspace(-1, 1, 128) + 0.37


def with_offset_queries():
    """Every query has the same offset in a few channels, and keys that hardly have them."""
    q, k, v = tensors(3)
    q = q + 20.0 * (torch.arange(128) % 16 == 0)
    return q, k * torch.where(torch.arange(128) % 16 == 0, 0.05, 1.0), v


@pytest.mark.parametrize(
    ("make", "part", "lever"),
    [
        (with_offset_keys, "Q and K exact", "smooth K"),
        (with_offset_values, "V exact", "smooth V"),
        (with_offset_queries, "Q and K exact", "smooth Q"),
    ],
)
def test_the_part_and_the_lever_to_blame_are_named(make, part, lever):
    numerics = get_policy("nvfp4").numerics
    runs = [[attribute(call(*make(), numerics, layer)) for layer in range(2)] for _ in range(1)]
    found = summarise(runs, [0])
    errors = found["overall"]
    single = [name for name in LEVERS if name in errors and name != "smooth K and V"]
    assert min(PARTS, key=lambda n: errors[n]["rel_l2"] if n in errors else math.inf) == part
    assert min(single, key=lambda n: errors[n]["rel_l2"]) == lever
    assert errors[lever]["rel_l2"] < 0.8 * errors[BASE]["rel_l2"]
    assert lever.split()[1] in found["sentence"]
    assert "smooth" in found["sentence"]


def test_for_flat_rows_the_affine_map_is_the_largest_term():
    """docs/numerics.md: on N(0, 1) data P dominates, and the classifier is most of it."""
    q, k, v = tensors(4, tokens=600)
    found = attribute(call(q, k, v, get_policy("wan-fast").numerics)).rel_l2
    assert found["P exact"] < found["classifier exp2"] < 0.8 * found[BASE]
    assert found["V exact"] > 0.85 * found[BASE]


def test_the_summary_pairs_runs_and_says_what_does_not_apply():
    numerics = get_policy("wan-fast").numerics
    runs = [[attribute(call(*tensors(i), numerics, layer)) for layer in range(3)] for i in range(4)]
    found = summarise(runs, [0, 0, 1, 1])
    assert json.loads(json.dumps(found)) == found
    assert found["calls"] == 12
    assert [one["layer"] for one in found["layers"]] == [0, 1, 2]
    change = found["overall"]["classifier exp2"]["change"]
    per_run = [np.median([c.rel_l2["classifier exp2"] / c.rel_l2[BASE] - 1 for c in run]) for run in runs]
    assert change["median"] == pytest.approx(np.median(per_run), rel=1e-6)
    assert change["runs"] == 4
    assert change["low"] <= change["median"] <= change["high"] < 0
    assert found["overall"][BASE]["change"]["median"] == 0
    assert [n["name"] for n in found["not_applicable"]] == ["row peak 2688"]
    assert [n["name"] for n in found["notes"]] == ["P exact"]


def test_several_numerics_share_a_table():
    calls = [
        attribute(call(*tensors(0), get_policy(name).numerics, i)) for i, name in enumerate(["nvfp4", "nvfp4-fp8"])
    ]
    found = summarise([calls], [0])
    assert found["layers"][1]["rel_l2"]["row peak 2688"] is None
    assert found["broken"] == {}
    assert {n["numerics"] for n in found["not_applicable"]} == {
        get_policy(n).numerics.label for n in ("nvfp4", "nvfp4-fp8")
    }


def test_nothing_to_attribute():
    assert summarise([[], []], [0, 1])["sentence"] == NONE
    exact = attribute(call(*tensors(), EXACT))
    assert exact.rel_l2[BASE] == 0


# NaN is a broken result, and is not the same as a variant that does not apply.


def made_up(errors, layer=0):
    """A call with these errors: "*" of all that apply to wan-fast and are not named."""
    numerics = get_policy("wan-fast").numerics
    applies = {BASE, *(name for name, variant in by_name(numerics).items() if variant.numerics is not None)}
    known = {name: errors.get(name, errors["*"]) if name in applies else None for name in NAMES}
    return Attributed(Place("transformer", "blocks", layer, 0, "cond"), numerics, known)


WHOLE, BROKEN = {"*": 0.1}, {"*": math.nan}


@pytest.mark.parametrize(("whole", "broken"), [(0, 2), (2, 7), (7, 2), (8, 1)])
def test_broken_calls_are_counted_and_leave_no_median(whole, broken):
    calls = [made_up(BROKEN if i < broken else WHOLE, i) for i in range(whole + broken)]
    for runs, prompts in (([calls], [0]), ([calls[::2], calls[1::2]], [0, 1])):
        found = summarise(runs, prompts)
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        assert found["sentence"] == (
            f"In {broken} of {whole + broken} sampled calls the result holds NaN or infinity, so there is no median "
            "error to attribute."
        )
        assert {one["rel_l2"] for one in found["overall"].values()} == {"NaN"}
        assert found["broken"] == dict.fromkeys(found["names"], broken)
        assert found["layers"][0]["rel_l2"][BASE] == "NaN"
        assert found["layers"][-1]["rel_l2"][BASE] == (0.1 if whole else "NaN")
        assert "row peak 2688" not in found["names"]


def test_what_heals_a_broken_policy_is_named():
    found = summarise([[made_up({BASE: math.nan, "*": math.nan, "P exact": 0.05, "row maximum": 0.1})]], [0])
    assert (
        "In 1 of 1 sampled calls the result holds NaN or infinity (with P exact or row maximum in none)"
        in (found["sentence"])
    )
    assert "nan" not in found["sentence"]
    assert found["overall"]["P exact"]["change"]["median"] == "NaN"


@pytest.mark.parametrize("base", [0.1, 0.0])
def test_a_variant_that_breaks_is_said_and_never_helps_most(base):
    calls = [made_up({BASE: base, "*": base, "smooth K": base / 2}, i) for i in range(4)]
    calls.append(made_up({BASE: base, "*": base, "smooth K": math.nan, "V exact": math.nan}, 4))
    found = summarise([calls], [0])
    assert found["broken"] == {"V exact": 1, "smooth K": 1}
    assert found["overall"]["smooth K"]["rel_l2"] == found["overall"]["smooth K"]["change"]["median"] == "NaN"
    said = found["sentence"]
    assert "nan" not in said
    assert said.endswith("with V exact or smooth K some calls give NaN or infinity.")
    assert "is smooth K" not in said


def test_a_call_with_nan_is_broken_in_every_variant():
    q, k, v = tensors()
    v[0, 3, 1, 5] = math.nan
    found = attribute(call(q, k, v, get_policy("wan-fast").numerics)).rel_l2
    assert {name for name, error in found.items() if error is None} == {"row peak 2688"}
    assert all(math.isnan(error) for error in found.values() if error is not None)


def test_the_sentence_does_not_praise_what_the_spread_hides():
    def one(median, low, high, left):
        return {"rel_l2": left, "change": {"median": median, "low": low, "high": high}}

    base = one(0, 0, 0, 0.1)
    assert "No lever helps" in sentence({BASE: base, "smooth K": one(-0.01, -0.03, 0.02, 0.099)})
    assert "No lever helps" in sentence({BASE: base, "smooth K": one(0.05, 0.04, 0.06, 0.105)})
    sure = sentence({BASE: base, "smooth K": one(-0.08, -0.1, -0.06, 0.092), "V exact": one(-0.3, -0.3, -0.2, 0.07)})
    assert "smooth K: it takes the error of a call from 0.1 to 0.092" in sure
    assert "−10.0\u00a0% to −6.0\u00a0%" in sure
    assert "rounding V: without it 0.07 would be left" in sure
    alone = sentence({BASE: base, "smooth K": one(-0.08, "NaN", "NaN", 0.092)})
    assert "one run, so without an interval" in alone
