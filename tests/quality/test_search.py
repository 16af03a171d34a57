"""The search on a pipeline: it goes on where it stopped, mixes nothing, and says what it found."""

import io
import itertools
import json
import re
from collections import Counter

import pytest
import tiny
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
from search_cases import ACCURATE, FAST, grid_of, steps_of
from tiny import FRAMES, HEIGHT, WIDTH, generate, tiny_pipeline

from wanfp4.errors import BackendError, ModelError, OutputError, SettingsError, Wanfp4Error
from wanfp4.policy import Guard, get_policy
from wanfp4.processors.patch import patch
from wanfp4.processors.pipelines import Settings, info_of
from wanfp4.quality import runs as runs_module
from wanfp4.quality import search as module
from wanfp4.quality import search_pages
from wanfp4.quality.cells import Grid, bins_of
from wanfp4.quality.pages import figure
from wanfp4.quality.runs import Runs, digest
from wanfp4.quality.search import search
from wanfp4.quality.search_report import SearchReport

STEPS = 3


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipeline()


def searched(pipe, **options):
    options = {
        "policies": ["wan-fast"], "prompts": ["a red circle"], "seeds": [0], "shares": [0.5], "bins": 3, "checks": 2,
        "settings": Settings(HEIGHT, WIDTH, FRAMES, STEPS, 4.0), "progress": False, "max_sequence_length": 32,
        **options,
    }  # fmt: skip
    return search(pipe, options.pop("policies"), options.pop("prompts"), options.pop("seeds"), **options)


@pytest.fixture(scope="module")
def whole(pipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    return searched(pipe, folder=folder, budget={"velocity-mean": 1.0}), folder


def test_end_to_end(pipe, whole):
    report, folder = whole
    assert report.passed
    assert set(report.policies) == {"policy-share-0.5.json", "policy-velocity-mean-1.json"}
    first, second = report.data["results"]
    assert first["searched"]["share"] >= 0.5
    assert second["searched"]["share"] == 1  # an easy budget takes the fastest everywhere
    errors = [float(p["measured"]) / float(p["predicted"]) for p in report.data["additivity"]["points"]]
    assert all(0.5 < error < 2 for error in errors)
    floor = first["baselines"][0]
    assert floor["kind"] == "floor"
    assert 0 < float(floor["velocity_mean"]["median"]) < 1e-4
    assert SearchReport.load(folder).to_dict() == report.to_dict()
    # The policy file is what a pipeline runs, and what the report says of its share is what a receipt counts.
    policy = get_policy(folder / "policy-share-0.5.json")
    with patch(pipe, policy) as handle:
        generate(pipe, steps=STEPS)
    entries = handle.receipt().entries
    share = sum(e.calls for e in entries if e.ran.name == "wan-fast") / sum(e.calls for e in entries)
    assert share == pytest.approx(float(first["searched"]["share"]))


def test_single_columns_are_what_their_policy_does_alone(pipe, whole):
    report, _ = whole
    grid = Grid(
        bins_of(steps_of([float(s["sigma"]) for s in report.data["steps"]]), 3), ((0,), (1,)), (FAST,), (0.3,), (1.0,)
    )
    chosen = grid.uniform(0)
    chosen[:, 1] = 1
    key = digest(grid.policy(chosen, "another name"), None)
    [found] = [m for m in report.data["measured"] if m["digest"] == key and m["seed"] == 0]
    assert found["name"] == "wan-fast in layer 1"
    entry = next(s for s in report.data["sensitivities"] if s["group"] == 1)
    assert entry["rel_l2"] == found["velocity"]  # bins of one step, one run


class Stop(KeyboardInterrupt):
    pass


@pytest.mark.parametrize("after", [1, 4, 9])
def test_a_search_that_was_stopped_goes_on_and_ends_the_same(pipe, whole, tmp_path, monkeypatch, after):
    report, _ = whole
    original, count = Runs._run, itertools.count()

    def run(self, *args, **kwargs):
        if next(count) == after:
            raise Stop
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Runs, "_run", run)
    folder = tmp_path / "search"
    with pytest.raises(Stop):
        searched(pipe, folder=folder, budget={"velocity-mean": 1.0})
    left = SearchReport.load(folder)
    assert not left.complete
    assert "Incomplete" in (folder / "report.html").read_text()
    monkeypatch.setattr(Runs, "_run", original)
    again = searched(pipe, folder=folder, budget={"velocity-mean": 1.0})
    assert again.data["results"] == report.data["results"]
    assert again.data["additivity"] == report.data["additivity"]
    assert len(again.data["measured"]) == len(report.data["measured"])


def test_a_free_run_that_is_stopped_does_not_take_the_forced_run_with_it(pipe, tmp_path, monkeypatch):
    original, done = Runs._run, []

    def run(self, what, *args, **kwargs):
        if what.endswith(", free"):
            raise Stop
        done.append(what)
        return original(self, what, *args, **kwargs)

    monkeypatch.setattr(Runs, "_run", run)
    with pytest.raises(Stop):
        searched(pipe, folder=tmp_path)
    assert [m["name"] for m in SearchReport.load(tmp_path).data["measured"]] == done

    again = []
    monkeypatch.setattr(Runs, "_run", lambda self, what, *a, **k: again.append(what) or original(self, what, *a, **k))
    report = searched(pipe, folder=tmp_path)
    assert again[0] == f"{done[-1]}, free"
    assert not set(done) & set(again)
    keys = [(m["digest"], m["prompt"], m["seed"]) for m in report.data["measured"]]
    assert len(keys) == len(set(keys))


def test_policies_of_earlier_searches_stay_and_are_told_until_one_begins_anew(pipe, tmp_path, monkeypatch):
    searched(pipe, folder=tmp_path, shares=[0.8, 0.5], checks=0)
    names = ["policy-share-0.5.json", "policy-share-0.8.json"]
    before = [(tmp_path / name).read_text() for name in names]
    original, count = Runs._run, itertools.count()

    def run(self, *args, **kwargs):
        if next(count) == 2:
            raise Stop
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Runs, "_run", run)
    with pytest.raises(Stop):
        searched(pipe, folder=tmp_path, prompts=["a blue star"], checks=0)
    monkeypatch.setattr(Runs, "_run", original)
    assert [(tmp_path / name).read_text() for name in names] == before
    for page in ("report.html", "report.md"):
        said = (tmp_path / page).read_text()
        assert "Of an earlier search, and not what is reported here" in said
        assert "policy-share-0.5.json" in said
    report = searched(pipe, folder=tmp_path, checks=0, force=True)
    assert [path.name for path in tmp_path.glob("policy*")] == ["policy.json"] == list(report.policies)
    assert "Of an earlier search" not in (tmp_path / "report.html").read_text()


def test_another_target_uses_what_was_measured(pipe, whole, monkeypatch):
    report, folder = whole
    measured = []
    original = Runs._run
    monkeypatch.setattr(
        Runs, "_run", lambda self, what, *a, **k: measured.append(what) or original(self, what, *a, **k)
    )
    again = searched(pipe, folder=folder, budget={"velocity-mean": 1.0})
    assert measured == []
    assert again.data["results"] == report.data["results"]


def test_nothing_is_mixed_with_another_model_or_settings(pipe, whole, tmp_path, monkeypatch):
    _, folder = whole
    with pytest.raises(OutputError, match="another settings"):
        searched(pipe, folder=folder, steps=2)
    other = tiny_pipeline(seed=5)
    before = (folder / "search.json").read_text()
    for shares in ([0.5], [0.3]):  # whether anything is to be measured or not
        with pytest.raises(OutputError, match="another model"):
            searched(other, folder=folder, shares=shares)
    nearly = tiny_pipeline()
    with torch.no_grad():
        nearly.transformer.blocks[0].attn1.to_q.weight[0, 0] *= 1.01
    with pytest.raises(OutputError, match="another model"):
        searched(nearly, folder=folder)
    attended = tiny_pipeline()
    monkeypatch.setattr(Registry, "_active_backend", Registry._active_backend)  # set_attention_backend leaks it
    attended.transformer.set_attention_backend("_native_math")
    with pytest.raises(OutputError, match="another attention of its own"):
        searched(attended, folder=folder)
    assert (folder / "search.json").read_text() == before
    (tmp_path / "search.json").write_text("{}")
    with pytest.raises(OutputError, match="not a search of this version"):
        searched(pipe, folder=tmp_path)


def test_what_the_weights_do_not_say_is_seen_in_the_reference(pipe, whole, monkeypatch):
    _, folder = whole
    before = (folder / "search.json").read_text()
    other = tiny_pipeline()
    monkeypatch.setattr(tiny, "VOCABULARY", " ".join(reversed(tiny.VOCABULARY.split())))
    other.tokenizer = tiny.tiny_tokenizer()
    with pytest.raises(OutputError, match="the model changed"):
        searched(other, folder=folder, shares=[0.3])
    assert (folder / "search.json").read_text() == before


def test_the_same_weights_go_on_from_another_place(pipe, whole, monkeypatch):
    report, folder = whole
    again = tiny_pipeline()
    again.register_to_config(_name_or_path="/elsewhere/wan")
    monkeypatch.setattr(Runs, "_run", lambda *a, **k: pytest.fail("measured again"))
    found = searched(again, folder=folder, budget={"velocity-mean": 1.0}, model="./wan")
    assert found.data["results"] == report.data["results"]
    assert found.data["model"]["model"] == "./wan"


def test_an_earlier_search_that_does_not_know_its_weights_is_refused(pipe, whole, tmp_path):
    data = whole[0].to_dict()
    del data["model"]["weights"]
    (tmp_path / "search.json").write_text(json.dumps(data))
    with pytest.raises(OutputError, match=r"did not keep the weights' digest.*--force"):
        searched(pipe, folder=tmp_path)
    assert json.loads((tmp_path / "search.json").read_text()) == data


def test_nothing_stays_patched(pipe, whole):
    with pytest.raises(ModelError, match="the pipeline is patched"), patch(pipe, "wan-fast"):
        searched(pipe)
    assert "step" not in vars(pipe.scheduler)


def test_a_fallback_is_no_result(pipe, monkeypatch):
    from wanfp4.processors import session

    def refuse(numerics, device, name=None):
        raise BackendError("nothing can run it")

    monkeypatch.setattr(session.dispatch, "select", refuse)
    with pytest.raises(BackendError, match=r"fell back to the pipeline's own attention.*nothing can run it"):
        searched(pipe)


@pytest.mark.parametrize("candidates", [1, 2])
def test_a_candidate_that_keeps_bf16_at_this_length_is_refused(pipe, tmp_path, candidates):
    tokens = info_of(pipe).tokens(Settings(HEIGHT, WIDTH, FRAMES, STEPS, 4.0))
    made = [FAST, ACCURATE][:candidates]
    too_long = [p.with_(min_tokens=tokens + 1) for p in made]
    with pytest.raises(SettingsError, match=rf"min_tokens={tokens + 1} .* {tokens} attention tokens"):
        searched(pipe, policies=too_long, folder=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    report = searched(pipe, policies=[p.with_(min_tokens=tokens) for p in made], checks=0, bins=1)
    assert all(float(one["rel_l2"][0]) > 0 for one in report.data["sensitivities"])


def test_trajectories_are_held_within_bounds(pipe, monkeypatch):
    state = {"steps": [], "references": [], "measured": []}
    bar = module.tqdm(disable=True)
    runs = Runs(pipe, Settings(HEIGHT, WIDTH, FRAMES, 2, 1.0), {"max_sequence_length": 32}, False, state, bar, None)
    first = runs.reference(("a red circle", 0))
    assert runs.reference(("a red circle", 0)) is first
    monkeypatch.setattr(runs_module, "HELD_BYTES", 1)
    runs.reference(("a red circle", 1))
    assert list(runs._references) == [("a red circle", 1)]
    again = runs.reference(("a red circle", 0))
    assert again is not first
    assert torch.equal(again.seen[-1].velocity, first.seen[-1].velocity)


@pytest.mark.parametrize(
    ("targets", "most"),
    # What a share's policy is held against is known with it; a budget's only when the last round is over.
    [({"shares": [0.5, 0.8]}, 1), ({"shares": [0.8], "budget": {"velocity-mean": 1.0}}, 2)],
)
def test_a_reference_is_made_once_for_all_policies_where_one_alone_fits(pipe, monkeypatch, targets, most):
    made, original = Counter(), Runs._check
    monkeypatch.setattr(Runs, "_check", lambda self, pair, *a: made.update([pair]) or original(self, pair, *a))
    monkeypatch.setattr(runs_module, "HELD_BYTES", 1)
    report = searched(pipe, seeds=[0, 1], verify_seeds=[2, 3, 4], rounds=1, **targets)
    assert len(report.data["measured"]) > 15
    assert {pair: made[pair] for pair in made if pair[1] < 2} == {("a red circle", seed): 1 for seed in (0, 1)}
    assert set(made) == {("a red circle", seed) for seed in range(5)}
    assert max(made.values()) <= most


def test_the_bar_ends_at_its_total(pipe, monkeypatch):
    bars = []
    bar_class = module.tqdm

    def make(**options):
        bars.append(bar_class(**options | {"disable": False, "file": io.StringIO()}))
        return bars[-1]

    monkeypatch.setattr(module, "tqdm", make)
    monkeypatch.setattr(runs_module, "HELD_BYTES", 1)
    made, original = Counter(), Runs._check
    monkeypatch.setattr(Runs, "_check", lambda self, pair, *a: made.update([pair]) or original(self, pair, *a))
    searched(pipe, seeds=[0, 1], shares=[0.6], budget={"velocity": 0.005, "velocity-mean": 1e-9}, checks=1)
    assert max(made.values()) > 1
    assert bars[0].n == bars[0].total


def test_the_guard_goes_with_the_candidates():
    guarded = FAST.with_(name="mine", guard=Guard(100, 10))
    grid = grid_of(candidates=(guarded, ACCURATE))
    assert grid.policy(grid.uniform(1), "x").guard == Guard(100, 10)
    assert grid.policy(grid.uniform(2), "x").guard is None


# Pages


def test_pages(whole):
    report, folder = whole
    html, markdown = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    assert html.startswith("<!doctype html>")
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", html)
    assert 'role="img" aria-label="Predicted against measured' in html
    assert 'role="img" aria-label="Velocity error by step. searched-share-0.5: ' in html
    assert html.count("<h1>") == 1
    assert "color-scheme" in html
    for scroll in re.findall(r'<div class="scroll"[^>]*>', html):
        assert 'tabindex="0"' in scroll
        assert "aria-label" in scroll
    identifiers = re.findall(r'\bid="([^"]+)"', html)
    assert len(identifiers) == len(set(identifiers))
    assert set(re.findall(r'aria-labelledby="([^"]+)"', html)) <= set(identifiers)
    assert f"weights sha256 {report.data['model']['weights'][:16]}, its own attention" in html
    for result in report.data["results"]:
        assert result["text"][1:] in html
        for row in (result["searched"], *result["baselines"]):
            assert search_pages.versus(row) in markdown
            assert row["name"] in html
    assert len(html) < 500_000


def test_pages_show_the_figure_that_a_budget_judges(whole):
    data = whole[0].to_dict()
    for i, row in enumerate(row for one in data["results"] for row in (one["searched"], *one["baselines"])):
        row["velocity"] = 0.7001 + i / 1000
    html, markdown = search_pages.search_html(data), search_pages.search_markdown(data)
    for i in range(2 + sum(len(one["baselines"]) for one in data["results"])):
        assert f"<td>{figure(0.7001 + i / 1000)}</td>" in html
        assert f"| {figure(0.7001 + i / 1000)} |" in markdown
    for page in (html, markdown.replace("velocity, ", "Velocity, ")):
        assert "Velocity, worst step" in page
        assert "Velocity, each run's worst step" in page
    [table] = re.findall(r"<table>\n<thead><tr><th scope=.col.>Policy.*?</table>", html, re.DOTALL)[:1]
    cells = [len(re.findall(r"<t[hd]\b", row)) for row in re.findall(r"<tr>.*?</tr>", table)]
    assert cells == [8] * (2 + len(data["results"][0]["baselines"]))
    of_policies = markdown.split("| policy |")[1].split("\n\n")[0]
    assert {line.count("|") for line in of_policies.splitlines()[1:]} == {9}


@pytest.mark.parametrize(
    ("prompts", "seeds", "said"),
    [
        (1, 1, None),
        (1, 4, "one prompt, so intervals and verdicts are of that prompt alone. With 4 runs"),
        (2, 4, "with 2 prompts the intervals are less than 95 % sure"),
        (5, 2, "with 5 prompts the intervals are less than 95 % sure"),
        (6, 1, None),
    ],
)
def test_pages_say_when_prompts_are_too_few_for_verdicts(whole, prompts, seeds, said):
    data = whole[0].to_dict()
    data["held_out"] = [{"prompt": f"prompt {p}", "seed": s} for p in range(prompts) for s in range(seeds)]
    hint = [text for text in search_pages.readings(data) if text.startswith("Of the held-out runs:")]
    if said is None:
        assert not hint
        return
    assert said in hint[0]
    assert hint[0] in search_pages.search_html(data)
    assert hint[0] in search_pages.search_markdown(data)
    data["results"] = []
    assert not any(text.startswith("Of the held-out") for text in search_pages.readings(data))


def test_what_is_no_search_is_not_loaded(tmp_path):
    with pytest.raises(Wanfp4Error, match="cannot read a search"):
        SearchReport.load(tmp_path)
    (tmp_path / "search.json").write_text('{"kind": "other", "schema": 1}')
    with pytest.raises(Wanfp4Error, match="kind 'other'"):
        SearchReport.load(tmp_path)
