"""Two drift reports compared: pairing, verdicts, circumstances, and `wanfp4 report compare` as a person runs it."""

import copy
import json
import math

import pytest
from tiny import FRAMES, HEIGHT, WIDTH, tiny_pipeline
from typer.testing import CliRunner

import wanfp4
from wanfp4.cli.main import app
from wanfp4.errors import SettingsError
from wanfp4.processors.pipelines import Settings
from wanfp4.quality import comparison
from wanfp4.quality.comparison import compare_reports, differences
from wanfp4.quality.comparison_pages import markdown_text, text_lines
from wanfp4.quality.figures import figures
from wanfp4.quality.intervals import HIGHER, INSIDE_FLOOR, LOWER, NOT_TOLD_APART

PROMPTS = ["a red circle moving right", "a blue | star"]


@pytest.fixture(scope="module")
def measured():
    """A finished report's JSON values: two policies, two prompts, two seeds."""
    return wanfp4.drift(
        tiny_pipeline(),
        ["wan-fast", "nvfp4"],
        PROMPTS,
        [0, 7],
        settings=Settings(HEIGHT, WIDTH, FRAMES, 2, 4.0),
        progress=False,
        max_sequence_length=32,
    ).to_dict()


@pytest.fixture
def saved(measured, tmp_path):
    """Write a changed copy of the report into a folder of that name: `change` gets its JSON values."""

    def make(name, change=lambda data: None):
        data = copy.deepcopy(measured)
        change(data)
        folder = tmp_path / name
        folder.mkdir()
        (folder / "report.json").write_text(json.dumps(data), encoding="utf-8")
        return folder

    return make


def scaled(factors, policy=0):
    """Multiply the teacher-forced velocity errors of a policy's runs, one factor each."""

    def change(data):
        for run, factor in zip(data["policies"][policy]["runs"], factors, strict=True):
            series = run["teacher_forced"]["velocity"]
            series["rel_l2"] = [factor * v for v in series["rel_l2"]]

    return change


def row(found, key="velocity", policy=0):
    return next(f for f in found["policies"][policy]["figures"] if f["key"] == key)


def test_a_report_against_itself_differs_in_nothing(saved):
    found = compare_reports(saved("a"), saved("b") / "report.json")
    assert found["circumstances"] == []
    assert found["weights_known"]
    assert found["only"] == {"A": [], "B": []}
    assert len(found["pairs"]["both"]) == found["pairs"]["A"] == found["pairs"]["B"] == 4
    for policy in found["policies"]:
        assert policy["constants"] == []
        assert {f["verdict"] for f in policy["figures"]} == {INSIDE_FLOOR}
        assert {f["difference"]["median"] for f in policy["figures"]} == {0}


def test_the_figures_are_those_of_the_reports_summary(saved, measured):
    found = compare_reports(saved("a"), saved("b"))
    for shown, section in zip(found["policies"], measured["policies"], strict=True):
        s = section["summary"]
        expected = {
            "velocity": s["velocity"],
            "velocity_mean": s["velocity_mean"],
            "latent_1": s["after"][0]["rel_l2"],
            "latent_last": s["after"][-1]["rel_l2"],
            **{key: s[key] for key in ("psnr", "ssim", "flicker_ratio")},
        }
        medians = {f["key"]: f["A"]["median"] for f in shown["figures"]}
        assert {key: medians[key] for key in expected} == pytest.approx({k: v["median"] for k, v in expected.items()})
        assert set(medians) == {f.key for f in figures(2)}


@pytest.mark.parametrize(
    ("factors", "verdict"),
    [
        ((1.5, 1.6, 1.5, 1.7), HIGHER),
        ((0.5, 0.6, 0.5, 0.4), LOWER),
        ((0.2, 1.3, 3.0, 1.8), NOT_TOLD_APART),
        ((1 + 1e-12, 1 + 1e-12, 1 + 1e-12, 1 + 1e-12), INSIDE_FLOOR),
    ],
)
def test_verdicts(saved, factors, verdict):
    found = compare_reports(saved("a"), saved("b", scaled(factors)))
    one = row(found)
    assert one["verdict"] == verdict
    assert one["floor"] > 0
    if verdict in (HIGHER, LOWER):
        assert (one["difference"]["median"] > 0) == (verdict == HIGHER)
        assert one["difference"]["low"] <= one["difference"]["median"] <= one["difference"]["high"]
        mirrored = row(compare_reports(saved("c", scaled(factors)), saved("d")))
        assert mirrored["verdict"] == (LOWER if verdict == HIGHER else HIGHER)
    assert row(found, policy=1)["verdict"] == INSIDE_FLOOR


def test_a_difference_below_the_noise_floor_is_called_that(saved):
    """Higher in every run, so the interval leaves out zero; with a floor as large as the error it means nothing."""

    def floor_of_the_policys_size(data):
        for run, other in zip(data["noise_floor"]["runs"], data["policies"][0]["runs"], strict=True):
            run["teacher_forced"] = copy.deepcopy(other["teacher_forced"])

    def both(data):
        floor_of_the_policys_size(data)
        scaled([1.1] * 4)(data)

    one = row(compare_reports(saved("a", floor_of_the_policys_size), saved("b", both)))
    assert one["difference"]["low"] > 0
    # Two errors of one size that have nothing to do with each other: √2 times as large.
    assert one["floor"] == pytest.approx((math.sqrt(2) - 1) * one["A"]["median"], rel=0.05)
    assert one["verdict"] == INSIDE_FLOOR


def test_runs_are_paired_by_prompt_and_seed_not_by_position(saved):
    def other_order(data):
        """Prompts and runs in another order, with a seed more for each prompt; the figures of each run are kept."""
        data["prompts"].reverse()
        data["seeds"] = [7, 0, 9]
        for section in (data["reference"], data["noise_floor"], *data["policies"]):
            for run in section["runs"]:
                run["prompt"] = 1 - run["prompt"]
            section["runs"].reverse()
            section["runs"] += [{**copy.deepcopy(section["runs"][0]), "seed": 9, "prompt": p} for p in (0, 1)]

    def by_run(data):
        scaled((1, 2, 3, 4))(data)

    def both(data):
        by_run(data)
        other_order(data)

    found = compare_reports(saved("a", by_run), saved("b", both))
    assert (len(found["pairs"]["both"]), found["pairs"]["A"], found["pairs"]["B"]) == (4, 4, 6)
    assert row(found)["difference"] == {"median": 0.0, "low": 0.0, "high": 0.0, "runs": 4, "level": 0.95}


def test_what_differs_in_the_circumstances_is_listed(saved):
    def change(data):
        data["versions"]["torch"] = "9.9"
        data["machine"]["device"] = "cuda"
        data["settings"]["guidance"] = 5.0
        data["model"]["weights"] = "0" * 64
        data["policies"][0]["policy"]["numerics"]["margin"] = 3

    found = compare_reports(saved("a"), saved("b", change))
    assert {c["what"]: (c["B"], c["decisive"]) for c in found["circumstances"]} == {
        "versions.torch": ("9.9", False),
        "machine.device": ("cuda", False),
        "settings.guidance": (5.0, True),
        "model.weights": ("0" * 64, True),
    }
    assert [c["what"] for c in found["policies"][0]["constants"]] == ["numerics.margin"]
    assert found["policies"][1]["constants"] == []


def test_equal_weights_in_another_folder_are_one_model_and_unknown_ones_are_told(saved):
    def moved(data):
        data["model"]["model"] = "elsewhere"

    def earlier_version(data):
        del data["model"]["weights"]

    [found] = compare_reports(saved("a"), saved("b", moved))["circumstances"]
    assert (found["what"], found["decisive"]) == ("model.model", False)
    older = compare_reports(saved("c"), saved("d", earlier_version))
    assert [c["decisive"] for c in older["circumstances"]] == [False]
    assert not older["weights_known"]


def test_differences_of_json_values():
    assert differences({"a": 1, "b": {"c": [1], "d": None}}, {"a": 1, "b": {"c": [2], "e": 0}}) == [
        {"what": "b.c", "A": [1], "B": [2]},
        {"what": "b.e", "A": None, "B": 0},
    ]


def test_nan_and_infinity_get_no_wrong_verdict(saved):
    def broken(data):
        for run in data["policies"][0]["runs"]:
            run.update(frames=None, latent_frames_nan=[0, 2])
            run["teacher_forced"]["velocity"]["rel_l2"] = ["NaN", 0.1]

    def equal_clips(data):
        for run in data["policies"][1]["runs"]:
            run["frames"]["psnr"] = "Infinity"

    def both(data):
        broken(data)
        equal_clips(data)

    found = compare_reports(saved("a", equal_clips), saved("b", both))
    for key in ("velocity", "velocity_mean", "velocity_worst", "psnr", "ssim"):
        assert row(found, key)["verdict"] == comparison.NAN
    assert found["policies"][0]["counts"]["B"]["latent_frames_nan"] == 8
    assert row(found, "psnr", policy=1)["verdict"] == INSIDE_FLOOR
    one = row(compare_reports(saved("c", equal_clips), saved("d")), "psnr", policy=1)
    assert (one["A"]["median"], one["difference"]["median"]) == ("Infinity", "-Infinity")


@pytest.mark.parametrize("key", [figure.key for figure in figures(2)])
@pytest.mark.parametrize("lacking", ["a", "b", "ab"])
def test_without_a_noise_floor_there_is_no_verdict_whichever_report_lacks_it(saved, key, lacking):
    def no_floor(data):
        run = data["noise_floor"]["runs"][1]
        run["frames"] = None
        run["teacher_forced"]["velocity"]["rel_l2"][0] = "NaN"
        latent = run["free_running"]["latent"]
        latent["rel_l2"] = ["NaN", "NaN"]
        latent["rel_l2_frames"][-1][0] = "NaN"

    def worse(data):
        """Every figure of a policy: larger by a tenth, or infinite."""
        for run in data["policies"][0]["runs"]:
            for series in (run["teacher_forced"]["velocity"], run["free_running"]["latent"]):
                series["rel_l2"] = [1.1 * v for v in series["rel_l2"]]
            run["free_running"]["latent"]["rel_l2_frames"][-1] = [
                1.1 * v for v in run["free_running"]["latent"]["rel_l2_frames"][-1]
            ]
            for name in ("psnr", "ssim", "flicker_ratio"):
                run["frames"][name] *= 1.1
        for run in data["policies"][1]["runs"]:
            run["frames"]["psnr"] = "Infinity"

    def both(data):
        worse(data)
        no_floor(data)

    a = saved("a", no_floor) if "a" in lacking else saved("a")
    b = saved("b", both if "b" in lacking else worse)
    for one, other in ((a, b), (b, a)):
        found = compare_reports(one, other)
        assert row(found, key)["floor"] == "NaN"
        assert row(found, key)["verdict"] == comparison.FLOOR_NAN
        assert row(found, "psnr", policy=1)["verdict"] == comparison.FLOOR_NAN


def test_a_single_run_is_not_judged(saved):
    def one_run(data):
        data["prompts"], data["seeds"] = PROMPTS[:1], [0]
        for section in (data["reference"], data["noise_floor"], *data["policies"]):
            section["runs"] = section["runs"][:1]

    def worse(data):
        one_run(data)
        scaled([2])(data)

    found = compare_reports(saved("a", one_run), saved("b", worse))
    assert row(found)["verdict"] == NOT_TOLD_APART
    assert row(found)["difference"]["low"] == "NaN"


@pytest.mark.parametrize(
    ("prompts", "seeds", "words"),
    [
        (2, 1, "With 2 prompts the intervals are less than 95 % sure"),
        (2, 8, "With 2 prompts the intervals are less than 95 % sure"),
        (5, 8, "With 5 prompts the intervals are less than 95 % sure"),
        (1, 4, "With 4 runs the intervals are less than 95 % sure"),
        (1, 8, "All runs have one prompt"),
        (6, 1, None),
        (1, 1, None),
    ],
)
def test_few_prompts_are_told_however_many_seeds_there_are(saved, prompts, seeds, words):
    def more(data):
        data["prompts"], data["seeds"] = [f"prompt {p}" for p in range(prompts)], list(range(seeds))
        for section in (data["reference"], data["noise_floor"], *data["policies"]):
            section["runs"] = [{**section["runs"][0], "prompt": p, "seed": s} for p in range(prompts)
                               for s in range(seeds)]  # fmt: skip

    found = compare_reports(saved("a", more), saved("b", more))
    texts = ["\n".join(text_lines(found)), markdown_text(found)]
    for text in texts:
        if words is None:
            assert "less than 95 % sure" not in text
            assert "one prompt" not in text
        else:
            assert words in text


def run(*args):
    return CliRunner().invoke(app, ["report", "compare", *map(str, args)])


def test_the_command_prints_a_table_and_writes_both_files(saved, tmp_path):
    def change(data):
        scaled((1.5, 1.6, 1.5, 1.7))(data)
        data["versions"]["torch"] = "9.9"
        data["policies"][1]["name"] = "b\x1b[2Jad|name"

    a, b = saved("a"), saved("b", change)
    result = run(a, b, "-o", tmp_path / "c.md", "--json", tmp_path / "c.json")
    assert result.exit_code == 0, result.output
    assert "versions.torch" in result.stdout
    assert "With 2 prompts the intervals are less than 95 % sure" in result.stdout
    assert "in 50 % of cases, however many seeds there are" in result.stdout
    assert all(line.isprintable() for line in result.stdout.splitlines())
    [line] = [line for line in result.stdout.splitlines() if line.startswith("  velocity, median step")]
    assert line.endswith("higher in B")
    assert "Only in A, not compared: nvfp4" in result.stdout
    assert json.loads((tmp_path / "c.json").read_text()) == compare_reports(a, b)
    text = (tmp_path / "c.md").read_text(encoding="utf-8")
    assert "| velocity, median step |" in text
    assert r"ad\|name" in text
    assert run(a, b).stdout == result.stdout


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "needed is a drift report's folder or report.json"),
        ("{", "is no JSON"),
        ("[]", "has kind None"),
        ('{"kind": "wanfp4 map", "schema": 1}', "has kind 'wanfp4 map'"),
        ('{"kind": "wanfp4 drift report", "schema": 1, "complete": false}', "is unfinished"),
        ('{"kind": "wanfp4 drift report", "schema": 1, "complete": true}', "lacks something"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(saved, tmp_path, content, words):
    other = tmp_path / "other"
    other.mkdir()
    if content is not None:
        (other / "report.json").write_text(content)
    for pair in ((saved("a"), other), (other, saved("b"))):
        result = run(*pair, "-o", tmp_path / "c.md")
        assert result.exit_code == 2
        assert words in result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert result.stdout == ""
        assert not (tmp_path / "c.md").exists()


def test_nothing_in_common_is_said(saved):
    def renamed(data):
        for section in data["policies"]:
            section["name"] += "-2"

    def other_seeds(data):
        data["seeds"] = [1, 2]
        for section in (data["reference"], data["noise_floor"], *data["policies"]):
            for one in section["runs"]:
                one["seed"] += 100

    a = saved("a")
    with pytest.raises(SettingsError, match=r"no policy in common: .* has wan-fast, nvfp4, .* has wan-fast-2, nvfp4-2"):
        compare_reports(a, saved("b", renamed))
    with pytest.raises(SettingsError, match="no prompt and seed in common"):
        compare_reports(a, saved("c", other_seeds))


def one_policy(index, name=None):
    def change(data):
        data["policies"] = data["policies"][index : index + 1]
        data["policies"][0]["name"] = name or data["policies"][0]["name"]

    return change


def test_the_only_policies_of_two_reports_are_compared_whatever_their_names(saved):
    found = compare_reports(saved("a", one_policy(0)), saved("b", one_policy(1, "mine")))
    [policy] = found["policies"]
    assert policy["names"] == {"A": "wan-fast", "B": "mine"}
    assert "numerics.p" in {c["what"] for c in policy["constants"]}
    assert found["only"] == {"A": [], "B": []}
    same = compare_reports(saved("c", one_policy(0)), saved("d", one_policy(0, "mine")))["policies"][0]
    assert {f["verdict"] for f in same["figures"]} == {INSIDE_FLOOR}
    assert same["constants"] == []


def test_policies_of_different_names_are_paired_by_hand(saved):
    def renamed(data):
        data["policies"][0]["name"] = "min=e"

    a, b = saved("a"), saved("b", renamed)
    result = run(a, b, "--pair", "wan-fast=min=e")
    assert result.exit_code == 0, result.output
    assert "wan-fast in A, min=e in B, 4 runs in both" in result.stdout
    assert "Only in A, not compared: nvfp4" in result.stdout
    assert "Only in B, not compared: nvfp4" in result.stdout
    found = compare_reports(a, b, ["nvfp4=min=e", "nvfp4=nvfp4"])
    assert [p["names"]["B"] for p in found["policies"]] == ["min=e", "nvfp4"]
    assert found["only"] == {"A": ["wan-fast"], "B": []}
    for wrong in ("wan-fast", "wan-fast=nothing", "nothing=nvfp4", "="):
        result = run(a, b, "--pair", wrong)
        assert result.exit_code == 2
        assert f"--pair {wrong!r} must be a policy of A, = and a policy of B: " in result.stderr
        assert "has wan-fast, nvfp4, " in result.stderr


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize("option", ["-o", "--json"])
def test_a_report_is_never_written_over(saved, tmp_path, measured, option, force):
    """Neither its figures nor its pages, clips and strips, there or not, by whatever name."""
    a, b = saved("a"), saved("b")
    clips = [name for run in measured["policies"][1]["runs"] for name in run["files"].values()]
    assert len(clips) == 8
    named = ["report.json", "report.html", "report.md", clips[0], clips[-1]]
    for folder in (a, b):
        for name in named:
            (folder / name).parent.mkdir(exist_ok=True)
            if name not in ("report.json", "report.html"):
                (folder / name).write_text("own")
    (tmp_path / "link.md").hardlink_to(b / "report.md")
    (tmp_path / "folder").symlink_to(b)
    targets = [folder / name for folder in (a, b) for name in named]
    for target in (*targets, tmp_path / "link.md", tmp_path / "folder" / clips[0], a / "videos" / ".." / "report.html"):
        before = {path: path.read_bytes() for path in targets if path.exists()}
        result = run(a, b / "report.json", option, target, *force)
        assert result.exit_code == 2, target
        assert "which belongs to the report" in result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert {path: path.read_bytes() for path in targets if path.exists()} == before
    assert run(a, b, "-o", tmp_path / "c", "--json", tmp_path / "c").exit_code == 2
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("option", ["-o", "--json"])
def test_a_file_that_is_there_is_replaced_when_asked_only(saved, tmp_path, option):
    a, b = saved("a"), saved("b")
    notes = tmp_path / "notes.md"
    notes.write_text("mine")
    other = ("--json" if option == "-o" else "-o", tmp_path / "new")
    result = run(a, b, option, notes, *other)
    assert result.exit_code == 2
    assert "notes.md' exists; choose another file, or add --force" in result.stderr
    assert result.stdout == ""
    assert notes.read_text() == "mine"
    assert not (tmp_path / "new").exists()
    assert run(a, b, option, notes, *other, "--force").exit_code == 0
    assert notes.read_text() != "mine"
    assert (tmp_path / "new").exists()
    assert run(a, b, "-o", tmp_path / "fresh.md").exit_code == 0
