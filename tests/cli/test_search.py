"""`wanfp4 search`: what it writes, how it ends, and what it refuses."""

import json
from pathlib import Path

import pytest

from wanfp4.cli import common
from wanfp4.policy import get_policy
from wanfp4.quality.search_report import SearchReport

QUICK = ("--seeds", "0", "--checks", "0", "--bins", "2", "--device", "cpu", "--policies", "wan-fast")


def test_a_policy_that_goes_on_from_and_runs_everywhere(run, tiny_model):
    command = ("search", "--share", "0.5", "--model", tiny_model, *QUICK, "-o", "found")
    result = run(*command)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0] == "found/policy.json"
    assert "At least 50 % of attention in 4 bits" in result.stdout
    report = SearchReport.load("found")
    assert report.passed
    assert report.data["model"]["model"] == str(tiny_model)
    assert get_policy("found/policy.json").to_dict() == report.data["results"][0]["policy"]
    made = run(
        "generate",
        "a red circle",
        "--model",
        tiny_model,
        "--policy",
        "found/policy.json",
        "--device",
        "cpu",
        "-o",
        "a.mp4",
    )
    assert made.exit_code == 0, made.output

    again = run(*command)
    assert again.exit_code == 0, again.output
    assert SearchReport.load("found").data["results"] == report.data["results"]

    # Another target in the same folder: what was measured is used, and no policy keeps it.
    strict = run("search", "--budget", "1e-9", "--model", tiny_model, *QUICK, "-o", "found")
    assert strict.exit_code == 3, strict.output
    assert "no policy but BF16" in strict.stdout
    assert not SearchReport.load("found").passed
    assert get_policy("found/policy.json").to_dict() == report.data["results"][0]["policy"]  # still there, and named
    assert "Of an earlier search, and not what is reported here: policy.json (at least 50 %" in strict.stdout

    other = run("search", "--share", "0.5", "--model", tiny_model, *QUICK, "--guidance", "2", "-o", "found")
    assert other.exit_code == 2
    assert "another settings" in other.stderr
    forced = run("search", "--share", "0.5", "--model", tiny_model, *QUICK, "--guidance", "2", "-o", "found", "--force")
    assert forced.exit_code == 0, forced.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "a search needs a target"),
        (("--budget", "psnr=20"), "a search can aim at velocity and velocity-mean"),
        (("--budget", "fast"), "must be METRIC=LIMIT"),
        (("--budget", "0"), "must be above 0"),
        (("--share", "1.2"), "above 0 and at most 1"),
        (("--share", "0.5", "--policies", "fp8-direct"), "out of reach: the candidates have at most 0 %"),
        (("--share", "0.5", "--policies", "bf16"), "rounds nothing"),
        (("--share", "0.5", "--policies", "slow"), "unknown policy 'slow'"),
        (("--share", "0.5", "--policies", "wan-fast,direct-p-fast"), "different guard"),
        (("--share", "0.5", "--groups", "3"), "from 1 to 2"),
        (("--share", "0.5", "--bins", "0"), "bins must be a whole number from 1"),
        (("--share", "0.5", "--rounds", "0"), "rounds must be a whole number from 1"),
        (("--share", "0.5", "--checks", "-1"), "checks must be a whole number from 0"),
        (("--share", "0.5", "--seeds", "3", "--verify-seeds", "3"), "judged by what it was made from"),
        (("--share", "0.5", "--seeds", "x"), "error: --seeds must be whole numbers separated by commas"),
        (("--share", "0.5", "--verify-seeds", "x"), "error: --verify-seeds must be whole numbers separated by commas"),
        (("--share", "0.5", "--times", "none.json"), "cannot read times from 'none.json'"),
        (("--share", "0.5", "--verify-prompts", "none.txt"), "cannot read prompts from 'none.txt'"),
        (("--share", "0.5", "--backend", "none"), "'none'"),
        (("--share", "0.5", "--steps", "0"), "steps must be"),
    ],
)
def test_usage_errors(refused, tiny_model, options, said):
    assert said in refused("search", "--model", tiny_model, "--device", "cpu", *options)


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_an_input_is_not_written_over_by_any_targets_policy(refused, tiny_model, force):
    Path("found").mkdir()
    kept = get_policy("nvfp4").with_(name="mine").to_json()
    Path("found/policy-share-0.5.json").write_text(kept)
    options = ("--share", "0.5", "--share", "0.3", "--policies", "found/policy-share-0.5.json", "-o", "found", *force)
    said = refused("search", "--model", tiny_model, "--device", "cpu", *options)
    assert "policy-share-0.5.json" in said
    assert Path("found/policy-share-0.5.json").read_text() == kept


def test_a_drift_report_in_the_folder_is_not_written_over(run, refused, tiny_model):
    options = ("--model", tiny_model, "--device", "cpu", "--policies", "wan-fast", "-o", "found")
    assert run("drift", *options, "--seeds", "0").exit_code == 0
    pages = [Path("found") / name for name in ("report.html", "report.md", "report.json")]
    before = [path.read_bytes() for path in pages]
    assert "holds a drift report" in refused("search", "--share", "0.5", *options)
    assert [path.read_bytes() for path in pages] == before


def test_a_candidate_for_longer_clips_is_refused_before_the_model_loads(refused, tiny_model, monkeypatch):
    monkeypatch.setattr(common.Job, "pipeline", lambda *a: pytest.fail("loaded"))
    Path("long.json").write_text(get_policy("wan-fast").with_(name="long", min_tokens=4096).to_json())
    said = refused("search", "--model", tiny_model, "--device", "cpu", "--budget", "0.3", "--policies", "long.json")
    assert "min_tokens=4096" in said
    assert "105 attention tokens" in said


def test_costs_from_a_bench(run, tiny_model, caplog):
    times = {"wan-fast": {"median": 1.0}, "sdpa": {"median": 0.5}}
    row = {"tokens": 105, "heads": 2, "times": times}
    Path("bench.json").write_text(
        json.dumps({"kind": "wanfp4 bench", "machine": {"name": "a CPU"}, "attention": [row]})
    )
    result = run("search", "--budget", "1", "--times", "bench.json", "--model", tiny_model, *QUICK)
    assert result.exit_code == 3, result.output  # slower than BF16, so BF16 is the fastest
    assert "no faster than BF16" in caplog.text
    assert SearchReport.load("policy-search").data["candidates"][0]["time"] == 2


def test_help_teaches(run):
    text = run("search", "--help").stdout
    for part in ("--budget", "--share", "policy-search/policy.json", "Exit code 3", "goes"):
        assert part in text
