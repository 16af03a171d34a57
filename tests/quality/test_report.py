"""Reports: what is in report.json, and that the pages stand alone, escape what they show and can be read by anyone."""

import copy
import dataclasses
import itertools
import json
import math
import re
import xml.etree.ElementTree as ET

import imageio.v3 as imageio
import numpy as np
import pytest
from page import Page
from tiny import FRAMES, HEIGHT, WIDTH, tiny_pipeline
from typer.testing import CliRunner

import wanfp4
from wanfp4.cli.main import app
from wanfp4.errors import OutputError, SettingsError, Wanfp4Error
from wanfp4.policy import get_policy
from wanfp4.processors.pipelines import Settings
from wanfp4.quality import aggregate, budget, pages
from wanfp4.quality.jobs import weights_digest
from wanfp4.quality.plot_files import save_plots
from wanfp4.quality.report import DriftReport

EVIL = 'a <script>alert("1")</script> star | *square* & `circle`'
POLICY = "my <b>nvfp4</b>/2"


@pytest.fixture(scope="module")
def report() -> DriftReport:
    return wanfp4.drift(
        tiny_pipeline(dual=True),
        ["bf16", "wan-fast", get_policy("nvfp4").with_(name=POLICY)],
        ["a red circle moving right", EVIL],
        [0, 7],
        settings=Settings(HEIGHT, WIDTH, FRAMES, 2, 4.0),
        budget={"velocity": 1e-4, "psnr": 10},
        progress=False,
        model='models/<i>"tiny"</i>',
        command="wanfp4 drift --prompt '<u>`x`</u>'",
        max_sequence_length=32,
    )


@pytest.fixture(scope="module")
def folder(report, tmp_path_factory):
    return report.save(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def html(folder) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html) -> Page:
    return Page(html)


def test_report_json_has_everything_to_run_it_again(folder, report):
    data = json.loads((folder / "report.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert set(data) == {
        "kind", "schema", "complete", "created", "command", "versions", "machine", "model", "scheduler", "settings",
        "prompts", "seeds", "backend", "strict", "call", "steps", "reference", "noise_floor", "policies", "budget",
    }  # fmt: skip
    assert (data["kind"], data["schema"], data["complete"]) == ("wanfp4 drift report", 1, True)
    assert data["versions"].keys() >= {"wanfp4", "torch", "diffusers", "python"}
    assert data["versions"]["wanfp4"] == wanfp4.__version__
    assert Settings(**data["settings"]) == Settings(HEIGHT, WIDTH, FRAMES, 2, 4.0)
    assert data["model"]["tokens"] == 105
    assert data["model"]["weights"] == weights_digest(tiny_pipeline(dual=True))
    assert data["model"]["weights"] != weights_digest(tiny_pipeline())
    assert data["call"] == {"max_sequence_length": 32}
    assert data["reference"]["attention"] == "pipeline"
    for section in (data["noise_floor"], *data["policies"]):
        assert set(section) == {
            "name", "policy", "numerics", "backend", "fallbacks", "unpatched", "receipts", "runs", "per_step",
            "summary",
        }  # fmt: skip
        assert wanfp4.Policy.from_dict(section["policy"]).to_dict() == section["policy"]
        for run in section["runs"]:
            assert set(run) == {
                "prompt", "seed", "wall_seconds", "teacher_forced", "free_running", "latent_frames_nan", "frames",
                "files", "receipt",
            }  # fmt: skip
            for way, quantities in aggregate.QUANTITIES.items():
                assert set(run[way]) == set(quantities)
                for series in run[way].values():
                    assert set(series) == {"cosine", "rel_l2", "cosine_frames", "rel_l2_frames"}
                    assert [len(v) for v in series.values()] == [2, 2, 2, 2]
                    assert all(len(frames) == 3 for frames in series["rel_l2_frames"])
            for name in run["files"].values():
                assert (folder / name).is_file()
    assert data == report.to_dict()


def test_number_lists_stand_on_one_line(folder):
    text = (folder / "report.json").read_text(encoding="utf-8")
    assert re.search(r'"rel_l2": \[ [\d.e-]+, [\d.e-]+ \]', text)
    assert json.dumps(EVIL) in text


def test_reports_round_trip(report, folder, tmp_path):
    again = DriftReport.load(folder)
    assert again.to_dict() == report.to_dict()
    assert again.files == report.files
    again.save(tmp_path)
    for name in ("report.json", "report.md"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    assert sorted(p.name for p in tmp_path.rglob("*.mp4")) == sorted(p.name for p in folder.rglob("*.mp4"))
    assert again.check({"velocity": 1e-4}) == report.check({"velocity": 1e-4})


def test_to_dict_is_a_copy(report):
    report.to_dict()["policies"][0]["runs"].clear()
    assert report.policies[0]["runs"]


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot read"), ("{", "cannot read"), ('{"kind": "x"}', "kind 'x'"), ("[]", "kind None")],
)
def test_what_is_no_report_is_a_sentence(tmp_path, content, words):
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    with pytest.raises(Wanfp4Error, match=words):
        DriftReport.load(tmp_path)


def test_a_report_of_another_schema_is_refused(report, tmp_path):
    (tmp_path / "report.json").write_text(json.dumps({**report.to_dict(), "schema": 2}))
    with pytest.raises(Wanfp4Error, match="schema 2; needed are"):
        DriftReport.load(tmp_path)


def test_readers_let_sections_hold_more(report, tmp_path):
    """A later version adds layer × step maps; this one must still show such a report."""
    data = report.to_dict()
    data["policies"][0]["layers"] = {"anything": [1]}
    (tmp_path / "report.json").write_text(json.dumps(data))
    again = DriftReport.load(tmp_path)
    again.save(tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["policies"][0]["layers"] == {"anything": [1]}


def test_saving_where_nothing_can_be_written_is_a_sentence(report, tmp_path):
    (tmp_path / "file").write_text("x")
    for bad in (tmp_path / "file", tmp_path / "file" / "below", "/proc/wanfp4"):
        with pytest.raises(OutputError, match="cannot write into"):
            report.save(bad)


def test_numbers_json_has_no_word_for():
    assert [aggregate.number(v) for v in (math.nan, math.inf, -math.inf, 1 / 3)] == [
        "NaN", "Infinity", "-Infinity", 0.33333333,
    ]  # fmt: skip
    assert math.isnan(float(aggregate.number(math.nan)))
    assert float(aggregate.number(-math.inf)) == -math.inf


def test_the_page_needs_nothing_from_outside(html, page):
    for attributes in (a for _, a in page.tags):
        for name in ("src", "href", "xlink:href", "data", "poster", "srcset", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:image/jpeg;base64,", "data:video/mp4;base64,", "#")), value
        assert "@import" not in (attributes.get("style") or "")
    assert page.all("link", "iframe", "object", "embed", "base", "form") == []
    style = "".join(page.text["style"])
    assert "url(" not in style
    assert "@import" not in style
    assert all("http" not in script for script in page.text["script"])
    assert len(page.all("video")) == len(page.all("img")) == 5 * 4


def test_large_media_are_linked_not_held(report, monkeypatch, tmp_path):
    monkeypatch.setattr(pages, "VIDEO_BYTES", 25_000)
    monkeypatch.setattr(pages, "STRIP_BYTES", 0)
    report.save(tmp_path)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    sources = [a["src"] for a in page.all("video")]
    assert 1 <= sum(s.startswith("data:") for s in sources) <= 4
    linked = [s for s in (*sources, *(a["src"] for a in page.all("img"))) if not s.startswith("data:")]
    assert len(linked) > 30
    for name in linked:
        assert (tmp_path / name).is_file()


def test_nothing_that_was_typed_becomes_markup(html, page):
    assert page.all("u") == page.all("i") == page.all("b") == []
    assert len(page.all("script")) == 1
    assert "alert(" not in "".join(page.text["script"])
    text = "".join(t for kind, parts in page.text.items() for t in parts if kind != "script")
    for typed in (EVIL, POLICY, 'models/<i>"tiny"</i>', "wanfp4 drift --prompt '<u>`x`</u>'"):
        assert typed in text
    assert any(EVIL in (a.get("alt") or "") for a in page.all("img"))


def test_the_page_can_be_read_by_anyone(page):
    assert page.all("html") == [{"lang": "en"}]
    headings = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(headings))
    assert all(a.get("scope") in ("row", "col", "colgroup") for a in page.all("th"))
    assert all(a.get("alt") for a in page.all("img"))
    assert all(a.get("aria-label") for a in page.all("video"))
    assert all(a.get("aria-label") or a.get("aria-hidden") == "true" for a in page.all("svg"))
    assert all("controls" in a for a in page.all("video"))
    ids = [a["id"] for _, a in page.tags if "id" in a and a.get("id") and not a["id"].startswith(("m", "p", "figure"))]
    sections = [a["aria-labelledby"] for a in page.all("section")]
    assert sections
    assert set(sections) <= set(ids)


def test_ids_that_are_used_are_there_once(page):
    ids = [a["id"] for _, a in page.tags if a.get("id")]
    used = {a["xlink:href"][1:] for a in page.all("use")} | {a["aria-labelledby"] for a in page.all("section")}
    assert used
    assert all(ids.count(name) == 1 for name in used)


def test_light_and_dark(html):
    assert "prefers-color-scheme: dark" in html
    for svg in re.findall(r'<svg role="img".*?</svg>', html, re.DOTALL):
        assert not re.search(r"(fill|stroke): #", svg)
        assert "var(--series-0)" in svg or "currentColor" in svg


def test_curves_have_a_line_for_each_row_and_the_expert_switch(report):
    chart = pages.chart(report.to_dict(), *pages.CHARTS[0])
    assert chart["zero"] == ["bf16"]
    for colour in ("var(--floor)", "var(--series-1)", "var(--series-2)"):
        assert colour in chart["svg"]
    assert "transformer_2" in chart["svg"]
    assert "wan-fast from" in chart["svg"]
    assert "noise level" in chart["svg"]


def test_charts_leave_matplotlib_as_it_was(report, folder, tmp_path):
    import matplotlib as mpl

    before, backend = copy.deepcopy(dict(mpl.rcParams)), mpl.get_backend(auto_select=False)
    pages.html_page(report.to_dict(), report.files)
    save_plots(folder, tmp_path)
    assert dict(mpl.rcParams) == before
    assert mpl.get_backend(auto_select=False) == backend


PLOTS = ["velocity-teacher-forced", "velocity-free-running", "latent-free-running", "x0-free-running"]


def saved_plots(*args):
    return CliRunner().invoke(app, ["report", "plots", *map(str, args)])


def test_plots_as_svg_need_no_page(folder, tmp_path):
    result = saved_plots(folder, "-o", tmp_path / "figures")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [str(tmp_path / "figures" / f"{name}.svg") for name in PLOTS]
    for name in PLOTS:
        content = (tmp_path / "figures" / f"{name}.svg").read_text(encoding="utf-8")
        texts = [t.text for t in ET.fromstring(content).iter("{http://www.w3.org/2000/svg}text")]
        for shown in ("noise floor", "bf16 (zero)", "wan-fast", POLICY, "step", "→ transformer_2"):
            assert shown in texts
        assert "#fe10" not in content
        assert "#fe00" not in content
        assert "var(--" not in content
        for colour in ("#c2410c", "#0f7a5a", "#7d8590"):  # two policies that are not zero, and the floor
            assert colour in content
    again = save_plots(folder / "report.json", tmp_path / "again")
    assert [p.read_bytes() for p in again] == [(tmp_path / "figures" / p.name).read_bytes() for p in again]


def test_plots_as_png_are_on_white(folder, tmp_path):
    files = save_plots(folder, tmp_path, "png")
    assert [path.name for path in files] == [f"{name}.png" for name in PLOTS]
    for path in files:
        image = imageio.imread(path)[..., :3]
        assert image.shape == (1050, 1800, 3)
        assert (image[:3] == 255).all()
        assert 0.5 < np.mean((image == 255).all(axis=-1)) < 0.99
        for colour in ((0xC2, 0x41, 0x0C), (0x0F, 0x7A, 0x5A)):
            assert (image == colour).all(axis=-1).sum() > 500


@pytest.mark.parametrize("name", ["$x^{$", "_hidden", "a\x1b<b>&"])
def test_a_policys_name_in_a_legend_is_its_name(folder, tmp_path, name):
    data = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    data["policies"][1]["name"] = name
    (tmp_path / "report.json").write_text(json.dumps(data))
    root = ET.fromstring(save_plots(tmp_path, tmp_path)[0].read_text(encoding="utf-8"))
    texts = [(t.text or "").strip("\u200b") for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert name.replace("\x1b", " ") in texts


def test_plots_that_cannot_be_made_are_one_sentence(folder, report, tmp_path):
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "report.json").write_text(json.dumps({**report.to_dict(), "complete": False}))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "report.json").write_text(json.dumps({**report.to_dict(), "steps": 7}))
    for source, option, words in (
        (folder, ("--format", "pdf"), "svg or png, not 'pdf'"),
        (tmp_path / "nowhere", (), "needed is a drift report's folder"),
        (tmp_path / "unfinished", (), "is unfinished"),
        (tmp_path / "damaged", (), "lacks something"),
    ):
        result = saved_plots(source, "-o", tmp_path / "figures", *option)
        assert result.exit_code == 2
        assert words in result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert not (tmp_path / "figures").exists()


def test_the_page_says_what_the_figures_are(page, report):
    text = " ".join(" ".join("".join(parts).split()) for parts in page.text.values())
    summary = report.policies[1]["summary"]
    assert pages.figure(summary["velocity"]["median"]) in text
    assert "Budget exceeded" in text
    assert "emulated" in text
    assert "not a single value of velocity or latent differs" in text
    assert "figures are those of hardware with these formats, up to the order of accumulation" in text
    assert "Medians over 4 prompt and seed pairs, smallest to largest below" in text
    assert "max_sequence_length 32" in text
    assert "layer and step, counted from 0" in text
    assert "transformer layers 0-1, step 0:" in text
    for term in ("teacher-forced", "noise floor", "relative L2", "flicker ratio", "black frame"):
        assert term in text


def test_intervals_stand_beside_medians_of_several_runs(report, page):
    data = report.to_dict()
    section = data["policies"][1]
    found = pages.summary_intervals(section)
    assert len(found["after"]) == len(section["summary"]["after"])
    shown = [(found[key], section["summary"][key]) for key in ("velocity", *aggregate.FRAME_FIGURES)]
    shown += [(i, at["rel_l2"]) for i, at in zip(found["after"], section["summary"]["after"], strict=True)]
    for interval, spread in shown:
        assert interval["runs"] == 4
        assert interval["median"] == pytest.approx(spread["median"])
        assert spread["min"] <= interval["low"] <= spread["median"] <= interval["high"] <= spread["max"]
    said = f"95 %: {pages.between(found['velocity'], lambda v: pages.figure(v, 2))}"
    assert said in page.text["span"]
    assert f", {said}" in pages.markdown_page(data)


def test_a_single_run_has_no_interval(report):
    data = report.to_dict()
    for section in (data["noise_floor"], *data["policies"]):
        section["runs"] = section["runs"][:1]
    data["prompts"], data["seeds"] = data["prompts"][:1], data["seeds"][:1]
    found = pages.summary_intervals(data["policies"][1])
    assert {key: value for key, value in found.items() if key != "after"} == dict.fromkeys(found.keys() - {"after"})
    assert set(found["after"]) == {None}
    assert "95 %:" not in pages.markdown_page(data)
    assert "95 %:" not in pages.html_page(data, {})


def test_what_is_no_larger_than_the_noise_floor_is_called_that(report):
    data = report.to_dict()
    floor, exact, fast = data["noise_floor"], data["policies"][0], data["policies"][1]
    assert pages.inside_floor(exact, floor) == {"velocity": True, "after": [True, True]}
    assert pages.inside_floor(fast, floor) == {"velocity": False, "after": [False, False]}
    assert pages.markdown_page(data).count("inside the noise floor") == 3
    fast["summary"]["velocity"]["median"] = floor["summary"]["velocity"]["median"]
    assert pages.markdown_page(data).count("inside the noise floor") == 4
    fast["summary"]["velocity"]["median"] = "NaN"
    assert not pages.inside_floor(fast, floor)["velocity"]


def test_markdown_is_a_table_and_a_verdict(folder):
    text = (folder / "report.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 4
    # A policy's name cannot break out of its cell: unescaped bars only are cell borders.
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert "**Budget exceeded**" in text
    assert "hardware with these formats, up to the order of accumulation, without its speed" in text
    assert r"my \<b\>nvfp4\</b\>/2" in text
    assert "wan-fast: velocity is" in text.replace("\\", "")
    assert "<script>" not in text
    assert len(text) < 4000


def test_a_report_with_nan_renders(report):
    data = report.to_dict()
    section = data["policies"][1]
    for run in section["runs"]:
        run["free_running"]["latent"]["rel_l2"][-1] = "NaN"
        run["free_running"]["latent"]["rel_l2_frames"][-1] = ["NaN"] * 3
        run["teacher_forced"]["velocity"]["rel_l2"] = ["NaN", "Infinity"]
        run.update(latent_frames_nan=[0, 1, 2], frames=None, files=None)
    section["per_step"] = aggregate.per_step(section["runs"])
    section["summary"] = aggregate.summary(section["runs"], data["noise_floor"]["summary"])
    page = Page(pages.html_page(data, report.files))
    text = " ".join(t for parts in page.text.values() for t in parts)
    assert "the policy broke the model" in text
    assert "no clip, NaN or infinity in 3 latent frames" in text
    assert "NaN" in pages.markdown_page(data)


def test_a_report_without_any_run_renders(report):
    empty = DriftReport({k: v for k, v in report.data.items() if k not in ("reference", "noise_floor", "policies")})
    empty.data.update(complete=False, steps=[])
    empty.add_section("noise floor", get_policy("bf16"), "reference", floor=True)
    empty.add_section("wan-fast", get_policy("wan-fast"), None)
    assert "No policy has finished" in pages.html_page(empty.to_dict(), {})
    assert "No run has finished" in pages.markdown_page(empty.to_dict())
    empty.budget = {"velocity": 1.0}
    for text in (pages.html_page(empty.to_dict(), {}), pages.markdown_page(empty.to_dict())):
        assert "Budget not judged yet" in text
        assert "Within budget" not in text


def test_an_unfinished_report_does_not_claim_runs_that_are_missing(report):
    data = report.to_dict()
    data["complete"] = False
    for section in data["policies"]:
        section["runs"] = section["runs"][:3]
    data["budget"].update(passed=True, violations=[])
    html, markdown = pages.html_page(data, report.files), pages.markdown_page(data)
    assert "3 of 4 prompt and seed pairs are finished for every policy" in html
    assert html.count("over the finished of 4 prompt and seed pairs") == 3
    assert "Medians over the finished runs of 2 prompts × 2 seeds" in markdown
    for text in (html, markdown):
        assert "Within budget so far" in text


def test_a_difference_in_a_single_run_and_step_is_told(report):
    data = report.to_dict()
    section = data["policies"][0]
    assert pages.reading(section, data).startswith("not a single value")
    section["per_step"]["free_running"]["x0"]["rel_l2"]["max"][0] = 1e-7
    assert pages.reading(section, data).startswith("on the reference's own latents")


def test_the_ratio_to_the_floor_stands_beside_the_figure_it_is_of(report):
    section = report.policies[1]
    s = section["summary"]
    said = (
        f"{pages.percent(s['velocity']['median'])} at the median step, {pages.ratio(s['over_floor'])} times the noise "
        f"floor, and {pages.percent(s['velocity_worst']['median'])} at the worst"
    )
    assert said in pages.reading(section, report.to_dict())


def _one_policy(report, index):
    """The report as if that had been the only policy."""
    data = report.to_dict()
    data["policies"] = [data["policies"][index]]
    del data["budget"]
    one = DriftReport({})
    one.data = data
    one.files = {name: report.files[name] for name in one._named_files()}
    return one


def test_a_report_replaces_an_earlier_one_whole(report, tmp_path):
    report.save(tmp_path)
    for mine in ("notes.txt", "videos/mine.mp4", "videos/p0-s0-mine.mp4", "strips/p0-s0-mine.jpg"):
        (tmp_path / mine).write_text("keep")
    later = _one_policy(report, 0)
    later.save(tmp_path, pages=False)
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    mine = {"notes.txt", "videos/mine.mp4", "videos/p0-s0-mine.mp4", "strips/p0-s0-mine.jpg"}
    assert found == {"report.json", *later.files, *mine}
    assert len(later.files) == 2 * 3 * 4
    # A report's own further saves remove nothing, a loaded one's neither.
    DriftReport.load(tmp_path).save(tmp_path)
    assert {name for name in later.files if not (tmp_path / name).is_file()} == set()


def test_folders_of_an_earlier_report_go_when_nothing_is_left_in_them(report, tmp_path):
    report.save(tmp_path)
    later = _one_policy(report, 0)
    later.files = {}
    later.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json", "report.md"]


@pytest.mark.parametrize(
    "name",
    [
        "../outside.mp4", "{tmp}/outside.mp4", "notes.txt", "videos/../../outside.mp4", "linked/p0-s0-a.mp4",
        "videos/p0-s0-folder.mp4", "videos/p0-s0-link.mp4", "strips/p0-s0-shared.jpg", 7, None,
    ],
)  # fmt: skip
def test_nothing_is_removed_that_a_report_did_not_make(report, tmp_path, name):
    folder = tmp_path / "report"
    shared = tmp_path / "shared"
    shared.mkdir()
    (folder / "videos" / "p0-s0-folder.mp4").mkdir(parents=True)
    for file in (tmp_path / "outside.mp4", folder / "notes.txt", shared / "p0-s0-a.mp4", shared / "p0-s0-shared.jpg"):
        file.write_text("keep")
    (folder / "linked").symlink_to(shared)
    (folder / "strips").symlink_to(shared)
    (folder / "videos" / "p0-s0-link.mp4").symlink_to(tmp_path / "outside.mp4")
    before = sorted(tmp_path.rglob("*"))
    data = report.to_dict()
    data["reference"]["runs"][0]["files"]["video"] = name.format(tmp=tmp_path) if isinstance(name, str) else name
    (folder / "report.json").write_text(json.dumps(data))
    later = _one_policy(report, 0)
    later.files = {}
    later.save(folder, pages=False)
    assert sorted(path for path in tmp_path.rglob("*") if path.name != "report.json") == before


@pytest.mark.parametrize(
    "listing", ["no json", "[]", "{}", '{"kind": "another tool"}', '{"kind": "wanfp4 drift report"}']
)
def test_pages_beside_another_report_json_are_let_be(report, tmp_path, listing):
    (tmp_path / "report.json").write_text(listing)
    (tmp_path / "report.html").write_text("theirs")
    (tmp_path / "videos").mkdir()
    _one_policy(report, 0).save(tmp_path, pages=False)
    assert (tmp_path / "report.html").read_text() == "theirs"


def test_budgets_are_judged_for_every_policy(report):
    found = report.check({"velocity": 1e-4, "psnr": 1e3, "black-frames": 0, "nan-frames": 0, "floor-ratio": 1e9})
    assert [(v.policy, v.metric) for v in found] == [
        ("wan-fast", "velocity"),
        ("wan-fast", "psnr"),
        (POLICY, "velocity"),
        (POLICY, "psnr"),
    ]
    worst = report.policies[1]["summary"]["velocity_worst"]["median"]
    assert found[0].value == worst
    assert found[0].limit == 1e-4
    assert str(found[0]).startswith(f"wan-fast: velocity is {worst:.4g}, the budget is at most 0.0001 (")
    assert "at least 1000 dB" in str(found[1])
    assert report.check({"velocity": worst, "ssim": 0.5}) == []


def test_every_budget_metric_can_be_judged(report):
    for name, metric in budget.METRICS.items():
        for section in report.policies:
            assert not math.isnan(metric.of(section["summary"])), name
        beyond = math.inf if metric.at_least else -math.inf
        with pytest.raises(SettingsError, match="finite"):
            report.check({name: beyond})
        limit = 1e12 if metric.at_least else -1.0
        failed = {v.policy for v in report.check({name: limit})}
        # Equal clips have infinite PSNR, which is above any limit.
        assert failed == {"bf16", "wan-fast", POLICY} - ({"bf16"} if name == "psnr" else set())


def test_the_verdict_is_in_the_report(report):
    judged = report.to_dict()["budget"]
    assert not judged["passed"]
    assert {v["policy"] for v in judged["violations"]} == {"wan-fast", POLICY}
    assert set(judged["violations"][0]) == {f.name for f in dataclasses.fields(budget.Violation)}
    assert judged["limits"]["psnr"] == {"limit": 10, "at_least": True, "meaning": budget.METRICS["psnr"].meaning}


def test_budgets_are_parsed():
    assert budget.parse_budget(["0.1"]) == {"velocity": 0.1}
    assert budget.parse_budget(["velocity=0.1", " psnr = 25"]) == {"velocity": 0.1, "psnr": 25}
    assert budget.parse_budget([]) == {}
    for bad, words in (
        (["speed=1"], "no budget metric 'speed'; the metrics are velocity, velocity-median,"),
        (["velocity=fast"], "must be METRIC=LIMIT"),
        (["velocity"], "must be METRIC=LIMIT"),
        (["velocity="], "must be METRIC=LIMIT"),
        (["velocity=nan"], "finite"),
        (["0.1", "velocity=0.2"], "given twice"),
    ):
        with pytest.raises(SettingsError, match=words):
            budget.parse_budget(bad)
