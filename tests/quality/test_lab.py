"""The lab's one page: what it says is what the results say, and what does not belong together is refused."""

import copy
import itertools
import json
import os
import re
from html import unescape
from pathlib import Path

import pytest
import torch
from page import Page
from tiny import FRAMES, HEIGHT, WIDTH, tiny_pipeline
from typer.testing import CliRunner

import wanfp4
from wanfp4.cli import task as task_command
from wanfp4.cli.main import app
from wanfp4.policy import get_policy
from wanfp4.processors.pipelines import Settings
from wanfp4.quality import lab_page, map_pages, pages, results, task_pages
from wanfp4.quality.lab import read_lab
from wanfp4.quality.lab_page import lab_html, verdict
from wanfp4.quality.maps import AttentionMap
from wanfp4.samples.checker import Found, Verdict
from wanfp4.samples.task import Answers, make_tasks

EVIL = 'a <script>alert("1")</script> star & `circle`'
SETTINGS = Settings(HEIGHT, WIDTH, FRAMES, 2, 4.0)
OWN = {"prompts": ["a red circle moving right", EVIL], "seeds": [0, 7], "settings": SETTINGS, "progress": False}
TASKS = make_tasks(10)


@pytest.fixture(scope="module")
def measured():
    """A drift report, a map with attribution and a search, of one model."""
    pipe = tiny_pipeline(dual=True)
    report = wanfp4.drift(pipe, ["wan-fast", "nvfp4", "fp8-direct"], **OWN, budget={"velocity": 10}, model="tiny")
    found = wanfp4.attention_map(pipe, "wan-fast", **OWN, attribution=True, model="tiny", command="wanfp4 map <x>")
    return report, found.to_dict()


@pytest.fixture
def data(measured):
    """JSON values of every part, for a test to change."""
    report, found = measured
    drift = report.to_dict()
    return {"drift": drift, "map": copy.deepcopy(found), "task": task_of(drift), "bench": bench_of(drift)}


@pytest.fixture
def saved(data, measured, tmp_path):
    """Write the parts as they are now; gives `read_lab`'s arguments for those that are named."""

    def make(*names):
        drift = tmp_path / "drift"
        if not drift.exists():
            measured[0].save(drift, pages=False)
        (drift / "report.json").write_text(json.dumps(data["drift"]))
        for name in ("map", "task"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"{name}.json").write_text(json.dumps(data[name]))
        (tmp_path / "bench.json").write_text(json.dumps(data["bench"]))
        places = {"map": [tmp_path / "map"], "task": tmp_path / "task", "bench": tmp_path / "bench.json"}
        return {"report": drift, **{{"map": "maps"}.get(name, name): places[name] for name in names}}

    return make


@pytest.fixture
def lab(saved):
    return lambda *names: read_lab(**saved(*names))


ALL = ("map", "task", "bench")


def verdict_of(task, *, right=True):
    found = [Found(o.shape, o.colour, o.direction, 0.9, (0.0, 0.0), 500.0, 1.0) for o in task.spec.objects]
    return Verdict(tuple(found), len(found) + (not right))


def task_of(drift, wrong=((3,), (), (3,), range(7), ())):
    """A task table of the report's model: which of ten tasks each row gets wrong."""
    rows = []
    for name, bad in zip(("reference", "noise floor", "wan-fast", "nvfp4", "sage3"), wrong, strict=True):
        verdicts = [verdict_of(task, right=i not in bad) for i, task in enumerate(TASKS)]
        rows.append(task_command._row(name, Answers(name, TASKS, verdicts, 1.5), None, rows))
        if len(rows) > 2:
            rows[-1]["policy"] = get_policy(name).to_dict()
            rows[-1]["backend"]["calls"] = {"reference": 4}
    task_command._adjust(rows)
    shared = ("created", "versions", "machine", "model", "scheduler", "settings", "backend", "strict")
    return {
        **{key: copy.deepcopy(drift[key]) for key in shared},
        "kind": results.TASK.kind,
        "schema": results.TASK.schema,
        "complete": True,
        "command": "wanfp4 drift --task",
        "batch": 2,
        "tasks": {"clips": 10, "one": 7, "two": 3, "seed": 0, "digest": "0" * 64, "list": []},
        "planned": [row["name"] for row in rows],
        "rows": rows,
    }


def bench_of(drift, backends=("sm90", "triton")):
    """Timings by hand: a shape with both backends, and one that failed."""
    times = {
        "fp8-direct": {"median": 0.004, "backend": backends[0], "speed": 2.5, "baseline": "sdpa cudnn"},
        "wan-fast / triton": {"median": 0.0125, "backend": backends[1], "speed": 0.8, "baseline": "sdpa cudnn"},
        "nvfp4": {"error": "out of memory"},
        "sdpa cudnn": {"median": 0.010, "speed": 1.0, "baseline": "sdpa cudnn"},
    }
    return {
        "kind": "wanfp4 bench",
        "schema": results.BENCH.schema,
        "created": "2026-01-02T03:04:05+00:00",
        "command": "wanfp4 bench --shape 4096x12",
        "versions": {**drift["versions"], "triton": "3.6"},
        "machine": {"device": "cuda", "name": "NVIDIA H200", "threads": 1, "system": "Linux"},
        "policies": [get_policy(name).to_dict() for name in ("fp8-direct", "wan-fast", "nvfp4")],
        "attention": [
            {"tokens": 4096, "heads": 12, "gpu": {"clocks": "1980 MHz"}, "times": times},
            {"tokens": 9999999, "heads": 1, "gpu": None, "error": "RuntimeError: no memory", "times": {}},
        ],
        "steps": [],
    }


def text_of(page):
    return " ".join(" ".join("".join(parts).split()) for parts in page.text.values())


def one_line(text):
    return " ".join(text.split())


def plain(html):
    """What a page shows, in order: without tags, scripts and styles."""
    html = re.sub(r"<(script|style)\b.*?</\1>", "", html, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


def table(html, name="Table of policies"):
    """Rows of a table, cells as their text."""
    part = html[html.index(f'aria-label="{name}"') :]
    part = part[: part.index("</table>")]
    rows = re.findall(r"<tr\b.*?</tr>", part, re.DOTALL)
    return [[plain(cell) for cell in re.findall(r"<t[hd]\b.*?</t[hd]>", row, re.DOTALL)] for row in rows]


def test_the_page_stands_alone_and_can_be_read_by_anyone(lab):
    html = lab_html(lab(*ALL))
    page = Page(html)
    for _, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "data", "poster", "srcset", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:image/jpeg;base64,", "data:video/mp4;base64,", "#")), value
    assert page.all("link", "iframe", "object", "embed", "base", "form") == []
    style = "".join(page.text["style"])
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style
    assert "http" not in "".join(page.text["script"])
    assert page.all("html") == [{"lang": "en"}]
    headings = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(headings))
    assert len(page.all("img")) == len(page.all("video")) == 4 * 5
    assert all(a.get("alt") for a in page.all("img"))
    assert all(a.get("aria-label") and "controls" in a for a in page.all("video"))
    assert all(a.get("aria-label") or a.get("aria-hidden") == "true" for a in page.all("svg"))
    assert all(a.get("scope") in ("row", "col", "colgroup") for a in page.all("th"))
    regions = [a for a in page.all("div") if a.get("class") == "scroll"]
    assert len(regions) == len(page.all("table"))
    ids = [a["id"] for _, a in page.tags if a.get("id")]
    used = [a[key] for _, a in page.tags for key in ("aria-labelledby", "aria-describedby") if a.get(key)]
    used += [a["xlink:href"][1:] for a in page.all("use")]
    assert {ids.count(name) for name in used} == {1}
    assert all(a.get("tabindex") == "0" and (a.get("aria-label") or a.get("aria-labelledby")) for a in regions)


def test_nothing_that_was_typed_becomes_markup(lab):
    html = lab_html(lab(*ALL))
    page = Page(html)
    assert len(page.all("script")) == 1
    assert page.all("x") == []
    assert EVIL in plain(html)
    assert "wanfp4 map <x>" in plain(html)


def test_the_figures_are_those_of_the_results(lab, data):
    html = lab_html(lab(*ALL))
    first, second, own, floor, *policies = table(html)
    assert first[:3] == ["Policy", "Speed", "Velocity, teacher-forced"]
    assert second[:2] == ["4,096 tokens × 12 heads × cuDNN's BF16 attention", "9,999,999 tokens × 1 head"]
    assert own == ["FP32 the pipeline's own", "1 × 10 ms", "not timed", "compared with", "90.0 % 95 %: 59.6–98.2",
                   "–", "–", "pipeline"]  # fmt: skip
    assert floor[0] == "noise floor exact, another kernel"
    assert [row[0].split()[0] for row in policies] == ["wan-fast", "nvfp4", "fp8-direct"]
    for row, section in zip(
        [floor, *policies], [data["drift"]["noise_floor"], *data["drift"]["policies"]], strict=True
    ):
        s = section["summary"]
        interval = pages.summary_intervals(section)
        assert row[3].startswith(pages.figure(s["velocity"]["median"]))
        assert f"95 %: {pages.between(interval['velocity'], lambda v: pages.figure(v, 2))}" in row[3]
        assert row[4] == ("1" if row is floor else pages.ratio(s["over_floor"]))
        assert row[5].startswith(pages.figure(s["after"][-1]["rel_l2"]["median"]))
        assert row[6].startswith(pages.psnr(s["psnr"]["median"]))
    fast, nv, fp8 = policies
    assert fast[1] == "0.80 × 12.5 ms, triton emulated"
    assert fp8[1] == "2.50 × 4 ms, sm90"
    assert (nv[1], fast[2], floor[1]) == ("–", "–", "–")
    assert fast[7:10] == ["90.0 % 95 %: 59.6–98.2", "100.0 % 95 %: 72.2–100.0", "0 / 0 p 1"]
    lost = data["task"]["rows"][3]["paired"]
    assert (lost["lost"], lost["gained"]) == (6, 0)
    assert nv[9] == f"6 / 0 p {task_pages.p_value(lost['adjusted'])}"
    assert fp8[7:10] == ["–", "–", "–"]
    assert floor[9] == "0 / 1 p 1"
    assert "Not timed , 9,999,999 tokens × 1 head: RuntimeError: no memory" in plain(html)
    assert "timed on NVIDIA H200" in plain(html)


def test_the_map_is_that_of_the_worse_branch(lab, data):
    for run in data["map"]["runs"]:
        for i, (*_, branch) in enumerate(data["map"]["cells"]):
            if branch == "uncond":
                run["figures"]["rel_l2"][i] *= 3
    data["map"] = AttentionMap(data["map"]).to_dict()
    html = lab_html(lab("map"))
    shown = table(html, "Layer by step, wan-fast")
    grids = map_pages.grids_of(data["map"])
    assert [row[1:] for row in shown[1:]] == grids["cells"]["rel_l2"]["uncond"]
    text = plain(html)
    assert "Of the guidance branches (cond, uncond) this is uncond, which is off the most" in text
    for sentence in map_pages.readings(data["map"]):
        assert one_line(sentence) in text
    overall = data["map"]["attribution"]["overall"]
    for name in data["map"]["attribution"]["names"]:
        assert f"{name} {pages.figure(overall[name]['rel_l2'])}" in re.sub(r" (made exact|lever) ", " ", text)
    assert "σ 1.00" in shown[0][1]
    assert "With 2 prompts the intervals are less than 95 % sure" in text
    for run in data["map"]["runs"]:
        run["figures"]["rel_l2"] = ["NaN" if b == "cond" else v for v, (*_, b) in
                                    zip(run["figures"]["rel_l2"], data["map"]["cells"], strict=True)]  # fmt: skip
    assert map_pages.worst_branch(data["map"]) == "cond"


def test_curves_show_sigma_and_the_expert_boundary(lab):
    html = lab_html(lab())
    assert html.count('<svg role="img"') == 2
    assert html.count("→ transformer_2") == 2
    assert html.count("noise level σ") >= 2
    assert "transformer hands over to transformer_2 after step 1" in plain(html)


def test_a_report_alone_says_what_is_missing(lab):
    html, said = lab_html(lab()), verdict(lab())
    assert said[0] == "Within budget: velocity at most 10."
    assert said[2:] == ["No task table was given.", "No speed was given."]
    text = plain(html)
    for sentence in said:
        assert one_line(sentence) in text
    for absent in ("Speed", "as asked", "Where the error of", "What a search found"):
        assert absent not in text
    assert next(row[1] for row in table(html)[2:]) == "compared with"


def test_the_verdict_on_the_budget(lab, data):
    data["drift"]["budget"] = None
    assert verdict(lab())[0] == "No budget was set."
    limit = {"limit": 0.1, "at_least": False, "meaning": "worst step"}
    over = {"policy": "nvfp4", "metric": "velocity", "value": 0.23456, "limit": 0.1, "sentence": "it is"}
    data["drift"]["budget"] = {"limits": {"velocity": limit}, "passed": False, "violations": [over]}
    assert verdict(lab())[0] == "Budget exceeded by nvfp4 (velocity 0.2346, at most 0.1)."
    assert '<div class="verdict bad"' in lab_html(lab())
    section = data["drift"]["policies"][0]
    for i in range(4):
        data["drift"]["policies"].append({**section, "name": f"p{i}", "policy": {**section["policy"], "name": f"p{i}"}})
    data["drift"]["budget"]["violations"] = [{**over, "policy": f"p{i}"} for i in range(4)]
    assert verdict(lab())[0] == "Budget exceeded by 4 of 7 policies: velocity at most 0.1."


def drifts(data, **factors):
    """Make the velocity errors of each policy those of the noise floor times a factor, the same in every run."""
    floor = data["drift"]["noise_floor"]
    for section in data["drift"]["policies"]:
        for run, other in zip(section["runs"], floor["runs"], strict=True):
            values = other["teacher_forced"]["velocity"]["rel_l2"]
            run["teacher_forced"]["velocity"]["rel_l2"] = [
                factors[section["name"].replace("-", "_")] * v for v in values
            ]
        section["summary"] = pages_summary(section, floor)


def pages_summary(section, floor):
    from wanfp4.quality.aggregate import summary

    return summary(section["runs"], floor["summary"])


def test_the_verdict_on_the_drift(lab, data):
    drifts(data, wan_fast=4000, nvfp4=3000, fp8_direct=1000)
    said = verdict(lab())[1]
    assert said.startswith("fp8-direct drifts least of 3 policies: velocity off by ")
    assert "1,000 times the noise floor; of those in 4 bits nvfp4, off by " in said
    drifts(data, wan_fast=1000, nvfp4=1000.01, fp8_direct=99999)
    said = verdict(lab())[1]
    assert said.startswith("wan-fast drifts least of 3 policies")
    assert said.endswith("1,000 times the noise floor (the interval of nvfp4 meets it).")
    drifts(data, wan_fast=0.5, nvfp4=2, fp8_direct=3)
    assert "wan-fast drifts least" in verdict(lab())[1]
    assert "inside the noise floor" in verdict(lab())[1]
    for section in (data["drift"]["noise_floor"], *data["drift"]["policies"]):
        section["runs"] = section["runs"][:1]
    assert verdict(lab())[1].endswith("; of a single run, so nothing says how sure that is.")
    data["drift"]["policies"] = data["drift"]["policies"][:1]
    assert verdict(lab())[1].startswith("wan-fast: velocity off by ")


def test_a_policy_that_broke_the_model_is_not_the_best(lab, data):
    drifts(data, wan_fast=4000, nvfp4=float("nan"), fp8_direct=float("nan"))
    for section in data["drift"]["policies"][1:]:
        for run in section["runs"]:
            run["teacher_forced"]["velocity"]["rel_l2"] = ["NaN", "NaN"]
    said = verdict(lab())[1]
    assert said.startswith("wan-fast: velocity off by ")
    assert said.endswith("; nvfp4 and fp8-direct gave NaN or infinity.")
    assert [row[1] for row in table(lab_html(lab()))[5:]] == ["nan", "nan"]


def test_the_verdict_on_the_task(lab, data):
    # Lost: six of ten and none gained; 2 / 2⁶, and three policies: no difference beyond chance.
    said = verdict(lab("task"))[2]
    assert said == "On the task wan-fast and nvfp4 are not worse than FP32 beyond chance, in 10 clips."
    data["task"] = task_of(data["drift"], ((), (), (), range(9), ()))
    assert verdict(lab("task"))[2] == (
        "On the task nvfp4 loses 9 and gains 0 of 10 clips: worse, beyond what chance does (p 0.012)."
    )
    data["task"]["tasks"]["clips"] = 7
    assert "worse" in verdict(lab("task"))[2]
    data["task"] = task_of(data["drift"], ((), (), (), (), ()))
    data["task"]["tasks"]["clips"] = 6
    assert verdict(lab("task"))[2] == "6 clips of the task are too few to tell a policy from FP32."
    data["task"]["rows"] = data["task"]["rows"][:2]
    assert verdict(lab("task"))[2] == "The task table has no finished row of these policies."


def test_the_verdict_on_the_speed(lab, data):
    drifts(data, wan_fast=2, nvfp4=3, fp8_direct=4)
    assert verdict(lab("bench"))[3] == (
        "fp8-direct is fastest: 2.50 times cuDNN's BF16 attention at 4,096 tokens × 12 heads (sm90 on NVIDIA H200); "
        "wan-fast, which drifts least, has 0.80 (triton, emulated)."
    )
    data["bench"] = bench_of(data["drift"], ("reference", "triton"))
    assert verdict(lab("bench"))[3] == (
        "The times given are of emulation, which says nothing of the speed of hardware: 0.8 to 2.5 times BF16 with "
        "reference and triton on NVIDIA H200."
    )
    data["bench"]["attention"][0]["times"] = {"nvfp4": {"error": "out of memory"}}
    assert verdict(lab("bench"))[3] == "The timings have no speed of these policies."
    assert "not timed" in str(table(lab_html(lab("bench"))))


def test_a_whole_step_has_a_column(lab, data):
    times = {"own": {"median": 1.2, "speed": 1.0, "baseline": "own"},
             "nvfp4 / triton": {"median": 1.0, "speed": 1.2, "baseline": "own"}}  # fmt: skip
    data["bench"]["steps"] = [{"model": "1.3b", "layers": 30, "tokens": 32760, "gpu": None, "times": times}]
    rows = table(lab_html(lab("bench")))
    assert rows[1][2] == "a step of 1.3b, 32,760 tokens × the model's own attention"
    assert rows[2][3] == "1 × 1,200 ms"
    assert rows[5][3] == "1.20 × 1,000 ms, triton emulated"


def test_what_differs_without_forbidding_it_is_told(lab, data):
    data["map"]["settings"]["steps"] = 50
    data["task"]["machine"]["name"] = "another"
    data["bench"]["versions"]["torch"] = "9.9"
    data["task"]["rows"][2]["backend"]["calls"] = {"triton": 4}
    notes = " ".join(lab(*ALL).notes)
    assert "map': steps 50, the report's 2." in notes
    assert "task': on cpu, another, the report's on cpu, " in notes
    assert "torch 9.9, the report's" in notes
    assert "task' also has sage3, not in the drift report and so not in the table." in notes
    assert "wan-fast ran on triton in the task and on reference in the drift report." in notes
    text = plain(lab_html(lab(*ALL)))
    for note in lab(*ALL).notes:
        assert one_line(note) in text


def test_a_maps_summary_is_made_from_its_figures(lab, data):
    """As an earlier version's may lack something; what this version writes is the same."""
    assert lab("map").maps[0].data == data["map"]
    expected = plain(lab_html(lab("map")))
    data["map"]["summary"] = {}
    assert plain(lab_html(lab("map"))) == expected


def test_an_earlier_map_has_no_digest_and_is_told_by_name(lab, data):
    assert not lab("map").notes
    del data["map"]["model"]["weights"]
    [note] = lab("map").notes
    assert note.endswith("has no digest of its weights: only the model's name tells that it is the report's.")


def test_unfinished_parts_are_marked(lab, data):
    data["drift"]["complete"] = data["map"]["complete"] = data["task"]["complete"] = False
    data["task"]["planned"].append("nvfp4-fp8")
    for section in data["drift"]["policies"]:
        section["runs"] = section["runs"][:3]
    said, html = verdict(lab(*ALL)), lab_html(lab(*ALL))
    assert said[0].startswith("Within budget so far")
    assert [Path(path).name for path in re.findall(r"'([^']+)'", said[4])] == ["drift", "map", "task"]
    assert said[4].startswith("Unfinished, so this is of what there is so far: drift report ")
    assert html.count('<span class="tag">partial</span>') == 1 + 2 + 2
    assert "5 of 6 rows are finished; missing: nvfp4-fp8." in plain(html)
    assert '<div class="verdict "' in html


def run(*args):
    return CliRunner().invoke(app, ["report", "page", *map(str, args)])


def arguments(given):
    options = [("--map", m) for m in given.get("maps", [])]
    options += [(f"--{name}", given[name]) for name in ("task", "bench", "search") if name in given]
    return [given["report"], *itertools.chain(*options)]


def test_the_command_writes_the_page_and_says_the_verdict(saved, data, tmp_path):
    data["map"]["settings"]["steps"] = 3
    given = saved(*ALL)
    output = tmp_path / "new" / "lab.html"
    result = run(*arguments(given), "-o", output)
    assert result.exit_code == 0, result.output
    lab = read_lab(**given)
    assert result.stdout.splitlines() == [str(output), "", *(one_line(s) for s in (*verdict(lab), *lab.notes))]
    html = output.read_text(encoding="utf-8")
    assert plain(html) == plain(lab_html(lab))
    output.write_text("mine")
    result = run(*arguments(given), "-o", output)
    assert result.exit_code == 2
    assert "exists; choose another file, or add --force" in result.stderr
    assert output.read_text() == "mine"
    again = run(given["report"] / "report.json", "--map", given["maps"][0] / "map.json", "-o", output, "--force")
    assert again.exit_code == 0, again.output
    assert "verdict" in output.read_text(encoding="utf-8")


def other_weights(data):
    data["map"]["model"]["weights"] = "f" * 64


def other_name(data):
    data["map"]["model"].pop("weights")
    data["map"]["model"]["model"] = "elsewhere"


def other_dtype(data):
    data["task"]["model"].update(dtype="float16", weights="f" * 64)


def other_policy(data):
    data["map"]["policy"]["numerics"]["margin"] = 3


def other_row(data):
    data["task"]["rows"][3]["policy"]["min_tokens"] = 7


def other_timing(data):
    data["bench"]["policies"][1]["min_tokens"] = 7


def no_runs(data):
    for section in data["drift"]["policies"]:
        section["runs"] = []


def another_kind(data):
    data["task"]["kind"] = "wanfp4 generate"


def another_schema(data):
    data["bench"]["schema"] = 7


def damaged_map(data):
    del data["map"]["policy"]


def damaged_report(data):
    del data["drift"]["steps"]


def damaged_table(data):
    data["task"]["rows"][2]["as_asked"] = {"right": 3}


def no_object(data):
    data["bench"] = [1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_weights, r"the map '.*map' is of other weights \(sha256 ffff"),
        (other_name, r"the map '.*map' is of the model 'elsewhere', the drift report '.*drift' of 'tiny'"),
        (
            other_dtype,
            r"the task table '.*task' is in float16, the drift report '.*' in float32; a page is of one model",
        ),
        (
            other_policy,
            r"the map '.*' and the drift report '.*' have different policies 'wan-fast': numerics.margin is 3 ",
        ),
        (other_row, r"the task table '.*' and the drift report '.*' have different policies 'nvfp4': min_tokens is 7"),
        (
            other_timing,
            r"the timings '.*' and the drift report '.*' have different policies 'wan-fast': min_tokens is 7",
        ),
        (no_runs, r"no policy of the drift report '.*drift' has finished a run yet"),
        (another_kind, r"task.json' has kind 'wanfp4 generate' and schema 1; needed are 'wanfp4 task table'"),
        (another_schema, r"bench.json' has kind 'wanfp4 bench' and schema 7; needed are 'wanfp4 bench' and schema 1"),
        (damaged_map, r"the map '.*map' lacks something or was changed by hand \(KeyError\('policy'\)\)"),
        (damaged_report, r"something lacks in what was given \(KeyError\('steps'\)\), or was changed by hand: drift"),
        (damaged_table, r"something lacks in what was given"),
        (no_object, r"bench.json' has kind None"),
    ],
)
def test_what_does_not_belong_together_is_one_sentence(saved, data, tmp_path, change, words):
    change(data)
    result = run(*arguments(saved(*ALL)), "-o", tmp_path / "lab.html")
    assert result.exit_code == 2, result.output
    assert re.search(words, result.stderr), result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
    assert not (tmp_path / "lab.html").exists()


def test_a_folder_of_something_else_is_one_sentence(saved, tmp_path):
    given = saved(*ALL)
    (tmp_path / "text.json").write_text("{")
    for args, words in (
        ((tmp_path / "nowhere",), "needed is a drift report's folder or report.json"),
        ((given["maps"][0],), "needed is a drift report's folder or report.json"),
        ((given["report"], "--map", given["task"]), "needed is a map's folder or map.json"),
        ((given["report"], "--task", given["report"]), "needed is a task table's folder or task.json"),
        (
            (given["report"], "--bench", tmp_path / "text.json"),
            "is no JSON file; needed is a file of `wanfp4 bench --json`",
        ),
        ((given["report"], "--bench", tmp_path), "needed is a file of `wanfp4 bench --json`"),
        ((given["report"], "--search", given["report"]), "needed is a search's folder or search.json"),
    ):
        result = run(*args, "-o", tmp_path / "lab.html")
        assert result.exit_code == 2
        assert words in result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert not (tmp_path / "lab.html").exists()


@pytest.mark.parametrize(
    "name", ["drift/report.json", "map/map.json", "task/task.json", "bench.json", "drift/report.html", "a clip", "link"]
)
def test_what_the_page_is_made_of_is_never_written_over(saved, tmp_path, name):
    given = saved(*ALL)
    (tmp_path / "drift" / "report.html").write_text("the report's own page")
    (tmp_path / "link").symlink_to(tmp_path / "map" / "map.json")
    path = next(tmp_path.rglob("*.mp4")) if name == "a clip" else tmp_path / name
    before = path.read_bytes()
    result = run(*arguments(given), "-o", path, "--force")
    assert result.exit_code == 2
    assert "would be written over" in result.stderr
    assert path.read_bytes() == before


def test_a_page_never_has_more_than_5_mb(lab):
    found = lab(*ALL)
    small = len(lab_html(found))
    assert "did not fit" not in lab_html(found)
    sizes = {".jpg": 120_000, ".mp4": 240_000}
    large = {name: os.urandom(sizes[name[-4:]]) for name in found.files}
    html = lab_html(lab_page.Lab(found.report, large, found.maps, found.task, found.bench))
    assert 4_000_000 < len(html.encode()) <= lab_page.LIMIT == 5_000_000
    page = Page(html)
    shown = [*page.all("img"), *page.all("video")]
    assert all(a["src"].startswith("data:") for a in shown)
    [left_out] = re.findall(r"<strong>(\d+) files</strong> of clips and strips did not fit", html)
    assert len(shown) + int(left_out) == len(large)
    assert small < len(html)


def test_a_page_that_is_too_large_without_clips_is_refused(saved, data, monkeypatch, tmp_path):
    monkeypatch.setattr(lab_page, "LIMIT", 50_000)
    result = run(*arguments(saved("map")), "-o", tmp_path / "lab.html")
    assert result.exit_code == 2
    assert "without any clip the page would have 0." in result.stderr
    assert "give fewer maps" in result.stderr


def test_nothing_but_a_reports_own_clips_is_put_into_a_page(lab, data, tmp_path):
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    data["drift"]["reference"]["runs"][0]["files"] = {"strip": "../secret.mp4", "video": str(tmp_path / "secret.mp4")}
    found = lab()
    assert b"secret" not in found.files.values()
    assert len(Page(lab_html(found)).all("video")) == 4 * 5 - 1


def test_players_are_driven_together_and_only_here(lab, data):
    html = lab_html(lab())
    page = Page(html)
    assert html.count('<button type="button">Play together</button>') == 4
    assert [a["max"] for a in page.all("input")] == [str(FRAMES - 1)] * 4
    assert "Play these together" not in html
    own = pages.html_page(data["drift"], lab().files)
    assert own.count(">Play these together</button>") == 4
    assert Page(own).all("input") == []


def test_a_search_stands_beside(measured, saved, tmp_path):
    report = wanfp4.search(
        tiny_pipeline(dual=True), ["wan-fast"], [OWN["prompts"][0]], [0], settings=SETTINGS, shares=[0.5], bins=2,
        checks=1, verify_seeds=[1], progress=False, model="tiny",
    )  # fmt: skip
    report.save(tmp_path / "search")
    given = saved()
    lab = read_lab(given["report"], search=tmp_path / "search")
    text = plain(lab_html(lab))
    assert "What a search found" in text
    assert "At least 50 % of attention in 4 bits" in text
    for row in report.data["results"][0]["baselines"]:
        assert f"{row['name']} " in text
    data = report.to_dict()
    data["candidates"][0]["policy"]["numerics"]["margin"] = 3
    (tmp_path / "search" / "search.json").write_text(json.dumps(data))
    result = run(given["report"], "--search", tmp_path / "search", "-o", tmp_path / "lab.html")
    assert "have different policies 'wan-fast': numerics.margin is 3" in result.stderr


def test_reading_a_model_in_another_dtype_needs_no_digest():
    """The digest holds the dtype, so a model in another one is told before its weights are."""
    from wanfp4.quality.jobs import weights_digest

    assert weights_digest(tiny_pipeline()) != weights_digest(tiny_pipeline(dtype=torch.bfloat16))
