"""`wanfp4 policies`: the list is complete, JSON comes back as the same policy, every constant is explained."""

import dataclasses
import json
from pathlib import Path

import pytest

from wanfp4.cli.explain import explain
from wanfp4.policy import Classifier, Guard, Numerics, Policy, Rule, policies


def test_the_list_names_every_preset_with_its_numerics(run):
    for args in (("policies",), ("policies", "list")):
        result = run(*args)
        assert result.exit_code == 0
        rows = {line.split()[0]: line for line in result.stdout.splitlines() if line}
        for name, policy in policies().items():
            for part in (policy.numerics.qk, policy.numerics.p, policy.numerics.v):
                assert part in rows[name]


@pytest.mark.parametrize("name", policies())
def test_show_prints_json_that_is_the_policy(run, name):
    result = run("policies", "show", name)
    assert Policy.from_json(result.stdout) == policies()[name]
    Path("copy.json").write_text(result.stdout)
    assert run("policies", "show", "copy.json").stdout == result.stdout


@pytest.mark.parametrize("name", policies())
def test_explain_covers_every_field_that_is_not_at_its_default(run, name):
    policy = policies()[name]
    out = run("policies", "explain", name).stdout
    for field in dataclasses.fields(Numerics):
        value = getattr(policy.numerics, field.name)
        default = field.default_factory() if field.default is dataclasses.MISSING else field.default
        if value != default:
            assert f"\n{field.name} = " in out
    constants = explain(policy)
    assert all(c.meaning and c.source for c in constants)
    assert "this policy" not in {part for c in constants for part in c.source.split("; ")}


def test_explain_tells_where_numbers_come_from(run):
    out = " ".join(run("policies", "explain", "wan-fast").stdout.split())
    assert "classifier = affine(1.6, 0.95)" in out
    assert "tuned on Wan2.1" in out
    assert "guard.margin = 110 (raw)" in out
    assert "Algorithm 3, for Wan2.1 1.3B" in out


def test_explain_says_of_other_numbers_that_the_policy_set_them():
    base = policies()["wan-fast"]
    numerics = dataclasses.replace(base.numerics, classifier=Classifier("affine", 1.7, 0.9))
    rule = Rule("nvfp4", layers=(0, -1), sigma=(0.9, 1.0), expert="transformer")
    mine = Policy("mine", numerics, (rule,), Guard(100, 10), min_tokens=512)
    found = {c.name: c for c in explain(mine)}
    assert found["classifier"].source.endswith("the numbers: this policy")
    assert found["guard.margin"].source == "this policy"
    assert found["min_tokens"].value == "512"
    assert found["rules[0]"].value == "layers (0, -1), sigma (0.9, 1.0), expert transformer"
    assert found["rules[0].p"].value == "nvfp4"


def test_unknown_names_and_broken_files_are_refused(refused):
    assert "presets are bf16, wan-fast" in refused("policies", "explain", "none")
    Path("broken.json").write_text(json.dumps({"schema": 1, "name": "x", "colour": 1}))
    assert "has no field 'colour'; its fields are name, numerics" in refused("policies", "show", "broken.json")


@pytest.mark.parametrize("character", ["\n", "\r", "\x1b[2J", "\u2028"], ids=ascii)
def test_a_policys_own_words_break_no_line(run, character):
    policy = {**policies()["nvfp4"].to_dict(), "description": f"one{character}two", "name": f"a{character}b"}
    Path("mine.json").write_text(json.dumps(policy))
    out = run("policies", "explain", "mine.json").stdout
    assert "two" in out.splitlines()[0]
    assert all(line.isprintable() for line in out.splitlines())
    assert json.loads(run("policies", "show", "mine.json").stdout)["name"] == policy["name"]
