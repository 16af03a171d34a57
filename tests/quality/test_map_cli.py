"""`wanfp4 map` as a person runs it, and its page as anyone reads it."""

import json
import re
from html.parser import HTMLParser

import pytest
from tiny import FRAMES, HEIGHT, WIDTH, tiny_pipeline
from typer.testing import CliRunner

from wanfp4.cli.main import app
from wanfp4.policy import get_policy
from wanfp4.processors import pipelines
from wanfp4.processors.pipelines import Settings
from wanfp4.quality import maps as module
from wanfp4.quality.map_pages import map_html, map_markdown, value
from wanfp4.quality.maps import AttentionMap, attention_map
from wanfp4.quality.shadow import FIGURES

SIZE = ("--height", str(HEIGHT), "--width", str(WIDTH), "--frames", str(FRAMES), "--steps", "2", "--dtype", "fp32")
EVIL = 'a <script>alert("1")</script> star | *square* & `circle`'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline().save_pretrained(folder)
    return str(folder)


def run(*args):
    return CliRunner().invoke(app, ["map", *map(str, args)])


def plain(text: str) -> str:
    return " ".join(text.split())


def test_a_map_with_everything(model, tmp_path):
    out = tmp_path / "out"
    result = run("--model", model, "--policy", "nvfp4", "--prompt", "a red circle", "--prompt", "a blue star",
                 "--seeds", "3,4", "--per-head", "--attribution", "--rows", "16", "-o", out, *SIZE)  # fmt: skip
    assert result.exit_code == 0, result.output
    data = json.loads((out / "map.json").read_text())
    assert data["complete"]
    assert (data["prompts"], data["seeds"], data["rows"]) == (["a red circle", "a blue star"], [3, 4], 16)
    assert data["policy"]["name"] == "nvfp4"
    assert data["forced"] is True
    assert data["command"].startswith("wanfp4")
    lines = result.stdout.splitlines()
    assert lines[:3] == [str(out / name) for name in ("map.html", "map.md", "map.json")]
    assert lines[4].startswith("The median call is off by")
    assert "lever" in lines[-1]
    assert AttentionMap.load(out).heads("entropy").shape == (4, 8, 2)


def test_free_runs_and_policy_files(model, tmp_path):
    get_policy("wan-fast").with_(name="mine").to_json(tmp_path / "mine.json")
    result = run("--model", model, "--policy", tmp_path / "mine.json", "--prompt", "a red circle", "--seeds", "0",
                 "--free", "-o", tmp_path / "out", *SIZE)  # fmt: skip
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "out" / "map.json").read_text())
    assert (data["policy"]["name"], data["forced"], data["attribution"]) == ("mine", False, None)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--policy", "wan-fats"), 2, "unknown policy 'wan-fats'; presets are bf16,"),
        (("--seeds", "0,one"), 2, "--seeds must be whole numbers"),
        (("--height", "81"), 2, "height 81 is not a multiple of 16: take 80 or 96"),
        (("--backend", "sdpa"), 2, "backend 'sdpa' cannot run this"),
        (("--device", "abacus"), 2, "unknown device 'abacus'"),
        (("--prompts", "/nowhere/prompts.txt"), 2, "give --prompt or --prompts FILE, not both"),
        (("--rows", "0"), 2, "Invalid value for '--rows'"),
        (("-o", "/proc/wanfp4"), 2, "cannot write into '/proc/wanfp4'"),
        (("--model", "/nowhere"), 2, "there is no folder '/nowhere'"),
    ],
)
def test_bad_input_is_one_sentence_before_the_model_loads(monkeypatch, model, tmp_path, args, code, words):
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *a, **k: pytest.fail("the model was loaded"))
    result = run("--model", model, "--prompt", "a red circle", *SIZE, "-o", tmp_path / "out", *args)
    assert result.exit_code == code
    assert words in plain(result.stderr)
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert not (tmp_path / "out").exists()


def test_a_policy_file_in_the_place_of_a_page_is_not_written_over(model, tmp_path):
    get_policy("wan-fast").with_(name="mine").to_json(tmp_path / "map.json")
    before = (tmp_path / "map.json").read_bytes()
    result = run("--model", model, "--policy", tmp_path / "map.json", "--prompt", "a red circle", "--force",
                 "-o", tmp_path, *SIZE)  # fmt: skip
    assert result.exit_code == 2
    assert (tmp_path / "map.json").read_bytes() == before


def test_a_finished_map_is_not_overwritten_unasked(model, tmp_path):
    args = ("--model", model, "--prompt", "a red circle", "--seeds", "0", "-o", tmp_path, *SIZE)
    assert run(*args).exit_code == 0
    before = (tmp_path / "map.json").read_bytes()
    result = run(*args)
    assert result.exit_code == 2
    assert "holds a finished map" in result.stderr
    assert (tmp_path / "map.json").read_bytes() == before
    assert run(*args, "--force").exit_code == 0


def test_ctrl_c_keeps_what_has_finished(monkeypatch, model, tmp_path):
    original, calls = module.generate_latents, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(module, "generate_latents", interrupted)
    result = run("--model", model, "--prompt", "a red circle", "-o", tmp_path / "out", *SIZE)
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    data = json.loads((tmp_path / "out" / "map.json").read_text())
    assert not data["complete"]
    assert len(data["runs"]) == 1
    assert "Incomplete" in (tmp_path / "out" / "map.html").read_text()
    monkeypatch.undo()
    assert run("--model", model, "--prompt", "a red circle", "-o", tmp_path / "out", *SIZE).exit_code == 0


# The page.


@pytest.fixture(scope="module")
def data():
    found = attention_map(
        tiny_pipeline(dual=True, layers=3),
        get_policy("wan-fast").with_(name="my <b>fast</b>", description="x"),
        ["a red circle moving right", EVIL],
        [0],
        settings=Settings(HEIGHT, WIDTH, FRAMES, 5, 4.0),
        per_head=True,
        attribution=True,
        progress=False,
        model='models/<i>"tiny"</i>',
        command="wanfp4 map --prompt '<u>`x`</u>'",
        max_sequence_length=32,
    )
    return found.to_dict()


class Page(HTMLParser):
    VOID = frozenset({"meta", "br", "link", "input"})

    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.rows, self.texts = [], [], [], {}
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, text):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(text)
        if {"td", "th"} & set(self.open) and "tr" in self.open:
            self.rows[-1][-1] += text

    def all(self, *names):
        return [attributes for tag, attributes in self.tags if tag in names]


@pytest.fixture(scope="module")
def page(data):
    return Page(map_html(data))


def test_the_page_stands_alone(data):
    html = map_html(data)
    assert not re.search(r"""(src|href)=["'](?!#)""", html)
    assert not re.search(r"@import|url\(|https?:", html)
    assert len(html) < 200_000


def test_the_page_escapes_what_it_shows(data, page):
    html = map_html(data)
    for raw in ("<script>alert", "<b>fast", "<i>", "<u>"):
        assert raw not in html
    assert "".join(page.texts["dd"]).count('a <script>alert("1")</script>') == 1


def test_a_broken_attribution_shows_nan_and_no_change(data):
    """And what does not apply to a layer is a dash, not NaN."""
    applied = data["attribution"]["names"]
    broken = {"rel_l2": "NaN", "change": {"median": "NaN", "low": "NaN", "high": "NaN", "runs": 2, "level": 0.95}}
    layers = [{**one, "rel_l2": {n: None if n == applied[1] else "NaN" for n in applied}}
              for one in data["attribution"]["layers"]]  # fmt: skip
    overall = data["attribution"]["overall"] | {applied[0]: broken, applied[2]: broken}
    changed = {**data, "attribution": {**data["attribution"], "overall": overall, "layers": layers}}
    html = map_html(changed)
    assert not re.search(r"nan", re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL))
    rows = Page(html).rows
    heading = next(row for row in rows if row[1:] == applied)
    at = rows.index(heading)
    assert rows[at + 1][1] == rows[at + 1][3] == "NaN"
    assert "%" in rows[at + 1][4]
    assert rows[at + 2][1:4] == ["NaN", "–", "NaN"]
    text = map_markdown(changed)
    assert "| all | NaN | " in text
    assert not re.search(r"\bnan\b", text)


def test_few_prompts_are_told_beside_the_attribution(data):
    assert "With 2 prompts the intervals are less than 95 % sure" in map_html(data)
    assert "With 2 prompts the intervals are less than 95 % sure" in map_markdown(data)
    enough = {**data, "runs": [{**data["runs"][0], "prompt": p} for p in range(6)]}
    for text in (map_html(enough), map_markdown(enough)):
        assert "less than 95 % sure" not in text


def test_every_map_is_a_table_with_headings_for_all(data, page):
    tables = {t["id"]: t for t in page.all("table") if "id" in t}
    assert set(tables) == {"steps", "heads"}
    assert all(th.get("scope") in ("col", "row", "colgroup") for th in page.all("th"))
    assert all(region["tabindex"] == "0" and region["aria-label"] for region in page.all("div") if "role" in region
               and region["role"] == "region")  # fmt: skip
    labelled = {label["for"] for label in page.all("label")}
    assert (
        labelled == {select["id"] for select in page.all("select")} == {"steps-figure", "steps-branch", "heads-figure"}
    )
    described = [t["aria-describedby"] for t in tables.values()]
    assert set(described) <= {tag.get("id") for _, tag in page.tags}
    layer_rows = [row for row in page.rows if row and row[0] == "layer 1" and len(row) == 6]
    assert len(layer_rows) == 1
    medians = AttentionMap({**data}).medians("rel_l2")
    shown = [value("rel_l2", v, 2) for place, v in medians.items() if place.layer == 1 and place.branch == "cond"]
    assert layer_rows[0][1:] == shown


def test_the_expert_boundary_is_marked_and_named(page):
    text = " ".join("".join(part) for part in page.texts.values())
    assert "high noise" in text
    assert "low noise" in text
    assert sum(1 for _, tag in page.tags if tag.get("class") == "expert") == 1 + 3


def test_the_scripts_figures_are_the_tables(data):
    html = map_html(data)
    embedded = json.loads(re.search(r'id="figures">(.*?)</script>', html, re.DOTALL)[1])
    assert set(embedded["grids"]) == set(embedded["heads"]) == set(embedded["shown"]) == set(FIGURES)
    medians = AttentionMap({**data}).medians("entropy")
    for branch in ("cond", "uncond"):
        flat = [cell for row in embedded["grids"]["entropy"][branch] for cell in row]
        expected = {value("entropy", v, 2) for place, v in medians.items() if place.branch == branch}
        assert set(flat) == expected


def test_the_markdown_escapes_and_has_a_row_per_layer(data):
    text = map_markdown(data)
    assert "<b>" not in text.replace("\\<b\\>", "")
    rows = [line for line in text.splitlines() if line.startswith("| transformer")]
    assert len(rows) == 2 * 6
    widths = {line.count(" | ") for line in rows[:6]}
    assert widths == {len(FIGURES)}
    assert "Again: `wanfp4 map" in text


def test_figures_as_pages_write_them():
    assert value("rel_l2", 0.1) == "0.100"
    assert value("rel_l2", 0.1, 2) == "0.10"
    assert value("largest_logit", 560.4, 2) == "560"
    assert value("largest_logit", 18.2, 2) == "18"
    assert value("zero_codes", 0.5, 2) == "50"
    assert value("zero_codes", 0.0) == "0"
    assert value("rel_l2", "NaN") == "NaN"
    assert value("rel_l2", "Infinity") == "infinite"
    assert value("rel_l2", None) == "–"
    assert value("cosine", 0.99999999) == "> 0.99999"
