"""Policies: validation that lists what exists, JSON both ways, rules that survive a change of steps."""

import contextlib
import dataclasses
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanfp4.errors import PolicyError
from wanfp4.policy import (
    CLASSIFIERS,
    EXACT,
    P_FORMATS,
    QK_FORMATS,
    SCHEMA_VERSION,
    Classifier,
    Guard,
    Numerics,
    Policy,
    Rule,
    get_policy,
    policies,
)

PRESETS = list(policies())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_json(name):
    policy = policies()[name]
    assert policy.name == name
    assert policy.description
    assert Policy.from_json(policy.to_json()) == policy
    assert json.loads(policy.to_json())["schema"] == SCHEMA_VERSION


def test_wan_constants():
    """The mission's numbers, spelt out once more where nobody can change them by accident."""
    fast = policies()["wan-fast"]
    assert (fast.numerics.classifier.A, fast.numerics.classifier.B) == (1.60, 0.95)
    assert (fast.guard.margin, fast.guard.stored_shift) == (110, 16)
    big = policies()["wan-fast-14b"]
    assert big.numerics == fast.numerics
    assert (big.guard.margin, big.guard.stored_shift) == (112, 14)


@st.composite
def any_policy(draw):
    rules = draw(
        st.lists(
            st.builds(
                Rule,
                numerics=st.sampled_from(PRESETS),
                layers=st.none() | st.lists(st.integers(-40, 39), min_size=1, max_size=4).map(tuple),
                sigma=st.none() | st.tuples(st.floats(0, 0.5), st.floats(0.5, 1)),
                expert=st.sampled_from([None, "transformer", "transformer_2"]),
            ),
            max_size=3,
        )
    )
    return Policy(
        name=draw(st.text(min_size=1).filter(str.strip)),
        numerics=draw(st.sampled_from(PRESETS)),
        rules=tuple(rules),
        guard=draw(st.none() | st.builds(Guard, margin=st.floats(0, 100), logit_limit=st.floats(0, 500))),
        min_tokens=draw(st.integers(0, 10**6)),
    )


@given(any_policy())
def test_any_policy_survives_json(policy):
    assert Policy.from_json(policy.to_json()) == policy


def test_json_files(tmp_path):
    path = tmp_path / "mine.json"
    policies()["wan-fast"].with_(name="mine").to_json(path)
    assert get_policy(path).name == get_policy(str(path)).name == Policy.from_json(str(path)).name == "mine"
    with pytest.raises(PolicyError, match=r"cannot read policy file .*absent\.json"):
        get_policy(str(tmp_path / "absent.json"))
    path.write_text("{not json")
    with pytest.raises(PolicyError, match="not JSON"):
        get_policy(path)


def test_presets_by_name_inside_json():
    policy = Policy.from_dict(
        {"schema": 1, "name": "mine", "numerics": "wan-fast", "rules": [{"numerics": "bf16", "sigma": [0.9, 1]}]}
    )
    assert policy.numerics == policies()["wan-fast"].numerics
    assert policy.rules == (Rule(EXACT, sigma=(0.9, 1.0)),)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: get_policy("wan-fats"), "unknown policy 'wan-fats'; presets are bf16, wan-fast"),
        (lambda: Policy.from_dict({"schema": 2, "name": "x"}), "schema 2; this version of wanfp4 reads schema 1"),
        (lambda: Policy.from_dict({"name": "x"}), "schema None"),
        (lambda: Policy.from_dict({"schema": 1}), "no field 'name'"),
        (lambda: Policy.from_dict([]), "must be a JSON object, not list"),
        (lambda: Policy.from_dict({"schema": 1, "name": "x", "layers": 3}), "no field 'layers'; its fields are name"),
        (
            lambda: Policy.from_dict({"schema": 1, "name": "x", "numerics": {"qk": "nvfp4", "pv": 1}}),
            "policy.numerics has no field 'pv'; its fields are qk, p, v",
        ),
        (
            lambda: Policy.from_dict({"schema": 1, "name": "x", "rules": [{"numerics": "bf16", "steps": [0, 3]}]}),
            r"policy.rules\[0\] has no field 'steps'; its fields are numerics, layers, sigma, expert",
        ),
        (lambda: Policy.from_dict({"schema": 1, "name": "x", "guard": {"M": 3}}), "policy.guard has no field 'M'"),
        (lambda: Policy(""), "policy.name must be"),
        (lambda: Policy("x", min_tokens=-1), "min_tokens must be a whole number from 0"),
        (lambda: Policy("x", min_tokens=True), "min_tokens must be a whole number"),
        (lambda: Numerics(qk="int4"), f"qk='int4' does not exist; choose from {', '.join(QK_FORMATS)}"),
        (lambda: Numerics(p="fp4"), f"choose from {', '.join(P_FORMATS)}"),
        (lambda: Numerics(smooth_k=1), "smooth_k must be true or false"),
        (lambda: Numerics(qk="nvfp4", p="nvfp4", v="nvfp4", row_reference="shiftless"), "'shiftless' needs"),
        (lambda: Numerics(p="fp8", stored_shift=4), "stored_shift shifts E8M0 bytes"),
        (lambda: Numerics(p="fp8", classifier=Classifier("affine", 1, 1)), "makes 4-bit codes"),
        (lambda: Numerics(p="nvfp4", classifier=Classifier("mix", 1.6, 0.9, density=1)), "32-key blocks"),
        (lambda: Numerics(p="mxfp4-direct", p_peak=256), "p_peak has no meaning"),
        (lambda: Numerics(p="fp8", margin=3), "margin belongs to an anchor"),
        (lambda: Numerics(qk="nvfp4", p="bf16", denominator="codes"), "needs rounded codes"),
        (lambda: Numerics(global_scale=True), "global_scale scales NVFP4 operands; qk is 'exact'"),
        (lambda: Numerics(denominator="codes"), "needs rounded codes"),
        (lambda: Guard(10, 100), "guard.stored_shift must be a whole number from 0 to 64"),
        (lambda: get_policy(policies()["wan-fast"].with_(numerics="nvfp4")), "other numerics than the preset of that"),
        (lambda: Policy("x", rules=5), "policy.rules must be a list, not 5"),
        (lambda: Classifier("cubic"), f"choose from {', '.join(CLASSIFIERS)}"),
        (lambda: Classifier("exp2", A=1.0), "classifier.A has no meaning"),
        (lambda: Classifier("affine", A=-1, B=9), "slopes must be positive"),
        (lambda: Classifier("affine", A=0.1, B=-2), "code 0 to a block's largest score"),
        (lambda: Classifier("mix", 1.6, 0.9, density=3), "choose from 1, 2, 4"),
        (lambda: Classifier("affine", A=float("nan")), "must be a number"),
        (lambda: Guard(112, 16), "at most 126, found 112 \\+ 16"),
        (lambda: Guard(margin_unit="nats"), "choose from raw, log2"),
        (lambda: Rule("bf16", sigma=(0.9, 0.1)), "low > high"),
        (lambda: Rule("bf16", sigma=(0.9,)), "two numbers"),
        (lambda: Rule("bf16", sigma=(0, 1000)), "from 0 to 1, not 1000"),
        (lambda: Rule("bf16", layers=()), "never apply"),
        (lambda: Rule("bf16", layers=(1.5,)), "whole number"),
        (lambda: Rule("bf16", expert="refiner"), "choose from transformer, transformer_2"),
        (lambda: policies()["wan-fast"].with_(steps=3), "no field 'steps'"),
    ],
)
def test_errors_say_what_exists(make, message):
    with pytest.raises(PolicyError, match=message):
        make()


JUNK = (None, 5, "text", True, [], {}, [3], {"x": 1}, [[]], 1e400)


def every_place(value):
    """Every place of a policy file at which junk may stand: each field of each object, and each list's items."""
    yield ()
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for rest in every_place(value[key]):
            yield (key, *rest)


@pytest.mark.parametrize("junk", JUNK, ids=str)
def test_junk_anywhere_in_a_file_is_a_policy_error(junk):
    """Never another exception: the file is the user's, and the sentence must say what is wrong with it."""
    whole = Policy("mine", "wan-fast", (Rule("bf16", (0, -1), (0.5, 1.0), "transformer"),), Guard()).to_dict()
    for place in every_place(whole):
        data = json.loads(json.dumps(whole))
        if place:
            holder = data
            for key in place[:-1]:
                holder = holder[key]
            holder[place[-1]] = junk
        else:
            data = junk
        with contextlib.suppress(PolicyError):
            Policy.from_dict(data)


@pytest.mark.parametrize("field", ["name", "numerics"])
def test_missing_fields_are_named(field):
    data = {"schema": 1, "name": "mine", "rules": [{"numerics": "bf16"}]}
    del (data if field == "name" else data["rules"][0])[field]
    with pytest.raises(PolicyError, match=f"field '{field}'"):
        Policy.from_dict(data)


def test_a_byte_order_mark_is_not_part_of_a_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(policies()["nvfp4"].with_(name="mine").to_json(), encoding="utf-8-sig")
    assert get_policy(path).name == "mine"


@given(st.floats(0, 126), st.integers(0, 126), st.sampled_from(["raw", "log2"]))
def test_a_guard_that_exists_can_be_applied(margin, shift, unit):
    try:
        guard = Guard(margin, shift, unit)
    except PolicyError:
        return
    for policy in policies().values():
        guard.apply(policy.numerics)


def test_policies_are_frozen():
    for thing in (policies()["wan-fast"], EXACT, Guard(), Classifier(), Rule("bf16")):
        field = dataclasses.fields(thing)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, field, 1)
    mine = policies()
    mine.clear()
    assert policies()


def resolve(policy, **where):
    return policy.resolve(**({"layer": 0, "num_layers": 8, "sigma": 0.5, "tokens": 567} | where))


def test_first_matching_rule_wins():
    policy = Policy(
        "mine",
        "wan-fast",
        rules=(
            Rule("bf16", layers=(0, -1)),
            Rule("nvfp4", sigma=(0.8, 1.0), expert="transformer_2"),
            Rule("wan-two-piece", sigma=(0.8, 1.0)),
        ),
        min_tokens=500,
    )
    preset = {name: p.numerics for name, p in policies().items()}
    assert resolve(policy) == (EXACT, "rules[0]", False)
    assert resolve(policy, layer=7) == (EXACT, "rules[0]", False)
    assert resolve(policy, layer=3) == (preset["wan-fast"], None, False)
    assert resolve(policy, layer=3, sigma=0.8) == (preset["wan-two-piece"], None, False)
    assert resolve(policy, layer=3, sigma=0.9, expert="transformer_2") == (preset["nvfp4"], None, False)
    assert resolve(policy, layer=3, tokens=499) == (EXACT, "499 tokens, fewer than min_tokens=500", False)
    unknown = resolve(policy, layer=3, sigma=None)
    assert unknown.numerics is EXACT
    assert unknown.fallback
    assert unknown.reason == "rules[2] asks for sigma, which this pipeline does not tell"
    assert not resolve(policy, layer=0, sigma=None).fallback  # an earlier rule decides without it


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
def test_sigma_rules_survive_a_change_of_steps(shift):
    """At every noise level that both schedules visit, 20 and 50 steps get the same numerics."""

    def sigmas(steps):
        linear = [1 - i / steps for i in range(steps)]
        return [shift * s / (1 + (shift - 1) * s) for s in linear]

    policy = Policy("mine", "wan-fast", rules=(Rule("bf16", sigma=(0.9, 1.0)), Rule("bf16", sigma=(0.0, 0.15))))
    kept = {n: [s for s in sigmas(n) if resolve(policy, sigma=s)[0].is_exact] for n in (20, 50)}
    for n, chosen in kept.items():
        assert chosen == [s for s in sigmas(n) if s >= 0.9 or s <= 0.15]
    assert len(kept[50]) / 50 == pytest.approx(len(kept[20]) / 20, abs=0.06)


def test_guard_changes_only_direct_p():
    fast = policies()["wan-fast"].numerics
    guarded = Guard(112, 14).apply(fast)
    assert (guarded.row_reference, guarded.margin, guarded.stored_shift) == ("anchor128", 112, 14)
    assert guarded.classifier == fast.classifier
    assert Guard().apply(policies()["nvfp4"].numerics) == policies()["nvfp4"].numerics


def test_import_is_cheap():
    code = "import sys, wanfp4; wanfp4.policies(); assert not {'torch', 'diffusers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
