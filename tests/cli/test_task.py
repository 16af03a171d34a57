"""`wanfp4 drift --task` as a person runs it, and its tables against counts made by hand."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
from tiny import FRAMES, HEIGHT, WIDTH, tiny_pipeline

from wanfp4.cli import task as module
from wanfp4.policy import get_policy, policies
from wanfp4.processors import pipelines
from wanfp4.quality.task_pages import task_html, task_lines, task_markdown
from wanfp4.samples import task as samples
from wanfp4.samples.checker import Found, Verdict
from wanfp4.samples.data import vocabulary
from wanfp4.samples.models import build_tokenizer
from wanfp4.samples.task import Answers, Judges, make_tasks

SIZE = ("--height", HEIGHT, "--width", WIDTH, "--frames", FRAMES, "--steps", 1, "--dtype", "fp32", "--device", "cpu")
ROWS = ("reference", "noise floor")
PAGES = ["task.html", "task.json", "task.md"]


@pytest.fixture(scope="module")
def worded(tmp_path_factory):
    """The tiny random model with the sample's tokenizer: it knows the words of the tasks, and draws nothing."""
    pipe, folder = tiny_pipeline(), tmp_path_factory.mktemp("models") / "worded"
    pipe.tokenizer = build_tokenizer()
    pipe.text_encoder.resize_token_embeddings(len(pipe.tokenizer))
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture
def drift(run, worded, monkeypatch):
    """`wanfp4 drift --task` on that model, into out/; the checker runs in this process."""
    monkeypatch.setattr(samples, "Judges", partial(Judges, 0))
    return lambda *args: run("drift", "--task", "--model", worded, "-o", "out", *SIZE, *args)


def read(folder="out"):
    return json.loads(Path(folder, "task.json").read_text())


@pytest.mark.slow
def test_the_bundled_pipeline_judged_through_two_policies(run, tmp_path):
    get_policy("nvfp4").with_(name="mine").to_json(tmp_path / "mine.json")
    result = run("drift", "--task", "--clips", 2, "--steps", 3, "--policies", f"wan-fast,{tmp_path / 'mine.json'}",
                 "--seeds", 5, "--batch", 2, "--device", "cpu", "-o", "out")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in Path("out").iterdir()) == PAGES
    data = read()
    assert data["complete"]
    assert [row["name"] for row in data["rows"]] == data["planned"] == [*ROWS, "wan-fast", "mine"]
    assert data["model"]["model"] == "bundled"
    assert (data["model"]["dtype"], data["tasks"]["seed"], data["batch"]) == ("bfloat16", 5, 2)
    tasks = make_tasks(2, seed=5)
    assert [(t["prompt"], t["seed"]) for t in data["tasks"]["list"]] == [(t.prompt, t.seed) for t in tasks]
    own, floor, fast, _ = data["rows"]
    assert own["receipt"] is None
    calls = 8 * 3 * 2  # layers × steps × branches; both clips in one call
    assert floor["backend"] == {"requested": "reference", "calls": {"reference": calls}, "emulated": False}
    assert fast["backend"] == {"requested": None, "calls": {"reference": calls}, "emulated": True}
    assert any("wan-fast on reference (emulated)" in line for line in fast["receipt"]["summary"])
    # Three steps are enough for the trained model to draw one object, and the checker to see a colour.
    assert own["table"]["one"]["colour"] == {**own["table"]["one"]["colour"], "right": 1, "of": 1}
    assert [row["agreement"]["of"] for row in data["rows"][1:]] == [2, 2, 2]
    lines = result.stdout.splitlines()
    assert lines[:3] == [f"out/{page}" for page in ("task.html", "task.md", "task.json")]
    assert [re.split(r"  +", line)[0] for line in lines[5:]] == ["BF16", "noise floor", "wan-fast", "mine"]
    assert "clip/s" in result.stderr


def test_every_preset_and_the_noise_floor_without_policies(drift, monkeypatch):
    monkeypatch.setattr(samples, "answer", lambda pipe, tasks, settings, **given: unseen(tasks))
    result = drift("--clips", 1)
    assert result.exit_code == 0, result.output
    rounding = [name for name in policies() if name != "bf16"]
    assert len(rounding) == 13
    assert [row["name"] for row in read()["rows"]] == [*ROWS, *rounding]


def test_clips_of_two_objects_alone(drift, monkeypatch):
    monkeypatch.setattr(samples, "answer", lambda pipe, tasks, settings, **given: unseen(tasks))
    result = drift("--clips", 3, "--pairs", 1, "--policies", "nvfp4")
    assert result.exit_code == 0, result.output
    data = read()
    assert (data["tasks"]["one"], data["tasks"]["two"]) == (0, 3)
    assert list(data["rows"][0]["table"])[:1] == ["two"]
    assert "of one object and 3 of two" in Path("out", "task.md").read_text()
    assert "two objects: shape" in result.stdout
    for shown in (result.stdout, *(Path("out", page).read_text() for page in ("task.md", "task.html"))):
        assert not re.search("one object(: shape|</th>)", shown, re.IGNORECASE)


def unseen(tasks):
    return Answers("", tasks, [Verdict((), 0)] * len(tasks), 0.0)


def interrupt_after(monkeypatch, rows, error=KeyboardInterrupt):
    """Let `answer` fail in the row after the first `rows`; gives the list of what it was called for."""
    original, called = samples.answer, []

    def answer(*args, policy, **given):
        called.append(None if policy is None else policy.name)
        if len(called) > rows:
            raise error
        return original(*args, policy=policy, **given)

    monkeypatch.setattr(samples, "answer", answer)
    return called


def stable(rows):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def test_an_interrupted_table_says_so_and_goes_on(drift, monkeypatch):
    args = ("--clips", 2, "--policies", "wan-fast,nvfp4")
    with monkeypatch.context() as patched:
        interrupt_after(patched, 3)
        result = drift(*args)
    assert result.exit_code == 130
    assert "stopped early: what has finished is in 'out'; the same command goes on" in result.stderr
    assert "Traceback" not in result.output
    assert sorted(path.name for path in Path("out").iterdir()) == PAGES
    data = read()
    assert not data["complete"]
    assert [row["name"] for row in data["rows"]] == [*ROWS, "wan-fast"]
    for page in ("task.md", "task.html"):
        assert "3 of 4 rows are finished; missing: nvfp4." in Path("out", page).read_text()
    with monkeypatch.context() as patched:
        called = interrupt_after(patched, 9)
        result = drift(*args)
    assert result.exit_code == 0, result.output
    assert called == ["nvfp4"]
    assert "going on with 'out': 3 of 4 rows are finished" in result.stderr
    assert "Partial" not in result.stdout + Path("out", "task.md").read_text()
    whole = drift(*args, "-o", "whole")
    assert whole.exit_code == 0, whole.output
    assert stable(read()["rows"]) == stable(read("whole")["rows"])


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (("--clips", 3), "tasks"),
        (("--seeds", 1), "tasks"),
        (("--steps", 2), "settings"),
        (("--dtype", "bf16"), "model, weights or dtype"),
        (("--batch", 1), "batch"),
        (("--policies", "nvfp4"), "policies"),
        (("--backend", "reference"), "backend"),
    ],
)
def test_an_unfinished_table_of_something_else_is_kept(drift, monkeypatch, other, named):
    args = ("--clips", 2, "--policies", "wan-fast,nvfp4", "--batch", 2)
    called = interrupt_after(monkeypatch, 3)
    assert drift(*args).exit_code == 130
    before = Path("out", "task.json").read_bytes()
    called.clear()
    result = drift(*args, *other)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(f"error: 'out' holds an unfinished table of other {named};")
    assert not called
    assert Path("out", "task.json").read_bytes() == before
    interrupt_after(monkeypatch, 1)  # of three more allowed: the first row replaces the earlier table
    assert drift(*args, *other, "--force").exit_code == 130
    assert [row["name"] for row in read()["rows"]] == ["reference"]


def test_weights_trained_anew_are_another_model(drift, worded, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        interrupt_after(patched, 1)
        assert drift("--clips", 1, "--policies", "nvfp4").exit_code == 130
    pipe = pipelines.load_pipeline(worded, device="cpu", dtype="fp32")
    pipe.transformer.proj_out.bias.data[0] += 1
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *a, **k: pipe)
    result = drift("--clips", 1, "--policies", "nvfp4")
    assert result.exit_code == 2
    assert "of other model, weights or dtype" in result.stderr


def test_a_finished_table_is_kept_unless_forced(drift, monkeypatch):
    monkeypatch.setattr(samples, "answer", lambda pipe, tasks, settings, **given: unseen(tasks))
    assert drift("--clips", 1, "--policies", "nvfp4").exit_code == 0
    result = drift("--clips", 2, "--policies", "nvfp4")
    assert result.exit_code == 2
    assert "'out' holds a finished table" in result.stderr
    assert drift("--clips", 2, "--policies", "nvfp4", "--force").exit_code == 0
    assert read()["tasks"]["clips"] == 2
    Path("out", "task.json").write_text('{"mine": 1}')
    result = drift("--clips", 2, "--policies", "nvfp4")
    assert result.exit_code == 2
    assert "is not a task table of this version" in result.stderr


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_job_that_dies_in_its_first_row_leaves_nothing(drift, monkeypatch, error):
    interrupt_after(monkeypatch, 0, error)
    result = drift("--clips", 1)
    assert result.exit_code == (130 if error is KeyboardInterrupt else 1)
    assert "stopped early" not in result.stderr
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--prompt", "a red circle"), "--prompt does not go with --task"),
        (("--prompts", "prompts.txt"), "--prompts does not go with --task"),
        (("--budget", "0.1"), "--budget does not go with --task"),
        (("--fps", "8"), "--fps does not go with --task"),
        (("--guidance-2", "3"), "--guidance-2 does not go with --task"),
        (("--offload", "model"), "--offload does not go with --task"),
        (("--seeds", "0,1"), "--task takes one seed"),
        (("--seeds", "-1"), "seed must be a whole number from 0"),
        (("--policies", "wan-fats"), "unknown policy 'wan-fats'"),
        (("--policies", ","), "at least one policy"),
        (("--backend", "sdpa"), "backend 'sdpa' cannot run this"),
        (("--height", "81"), "height 81 is not a multiple of 16"),
        (("--device", "abacus"), "unknown device 'abacus'"),
        (("-o", "/proc/wanfp4"), "cannot write into '/proc/wanfp4'"),
    ],
)
def test_bad_input_is_one_sentence_before_the_model_loads(refused, worded, monkeypatch, args, words):
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *a, **k: pytest.fail("the model was loaded"))
    said = refused("drift", "--task", "--model", worded, *SIZE, *args)
    assert words in said


@pytest.mark.parametrize("option", ["--clips", "--pairs", "--batch"])
def test_what_is_for_task_alone(refused, option):
    assert f"{option} is for --task alone" in refused("drift", option, 1)


def test_a_policy_file_is_not_written_over(refused, worded):
    get_policy("nvfp4").with_(name="mine").to_json("task.json")
    said = refused("drift", "--task", "--model", worded, *SIZE, "--policies", "task.json", "-o", ".", "--force")
    assert "would be written over" in said


def test_a_model_of_other_words_is_refused_before_it_loads(refused, tiny_model, monkeypatch):
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *a, **k: pytest.fail("the model was loaded"))
    said = refused("drift", "--task", "--model", tiny_model, *SIZE)
    known = tiny_pipeline().tokenizer.get_vocab()
    lacking = [word for word in vocabulary() if word not in known]
    assert f"lacks {len(lacking)} of them: {', '.join(lacking[:5])}, …" in said


def test_a_broken_tokenizer_is_a_sentence(refused, copy_of_tiny):
    (copy_of_tiny / "tokenizer" / "tokenizer.json").write_text("{}")
    assert "cannot load the tokenizer of" in refused("drift", "--task", "--model", copy_of_tiny, *SIZE)


# Tables by hand: ten tasks, of one object each but for the last three.

TASKS = make_tasks(10)


def drawn(task, *, shape=True, colour=True, twin=False):
    """A verdict: as asked, or with the first object's shape or colour not clear, or with one object too many."""
    found = [Found(o.shape, o.colour, o.direction, 0.9, (0.0, 0.0), 500.0, 1.0) for o in task.spec.objects]
    first = found[0]
    found[0] = Found(
        first.shape if shape else None, first.colour if colour else None, first.direction, 0.9, (0.0, 0.0), 500.0, 1.0
    )
    return Verdict(tuple(found), len(found) + twin)


def table_of(*wrong_by_row):
    """Rows of a table; each is {task index: what is wrong with its clip}."""
    rows, names = [], [*ROWS, "first", "second", "third"]
    for name, wrong in zip(names, wrong_by_row, strict=False):
        verdicts = [drawn(task, **wrong.get(i, {})) for i, task in enumerate(TASKS)]
        rows.append(module._row(name, Answers(name, TASKS, verdicts, 1.25), None, rows))
    module._adjust(rows)
    return rows


NO_SHAPE, NO_COLOUR, TWIN = {"shape": False}, {"colour": False}, {"twin": True}
HAND = (
    {0: NO_SHAPE, 8: NO_SHAPE},  # reference: tasks 0 and 8 wrong
    {0: TWIN},  # noise floor: 0 wrong in another way, 8 right
    {0: NO_SHAPE, 8: NO_SHAPE},  # first: the same
    dict.fromkeys(range(8), NO_COLOUR),  # second: 0 to 7 wrong, 8 right
    {0: NO_SHAPE, 8: NO_SHAPE, 9: TWIN},  # third: one more
)


def test_rows_against_counts_by_hand():
    reference, floor, first, second, third = table_of(*HAND)

    def counts(row, group):
        return [(row["table"][group][a]["right"], row["table"][group][a]["of"]) for a in (*module_attributes, "all")]

    module_attributes = ("shape", "colour", "direction", "count")
    assert counts(reference, "one") == [(6, 7), (7, 7), (7, 7), (7, 7), (6, 7)]
    assert counts(reference, "two") == [(5, 6), (6, 6), (6, 6), (3, 3), (2, 3)]
    assert counts(second, "one") == [(7, 7), (0, 7), (7, 7), (7, 7), (0, 7)]
    assert counts(second, "two") == [(6, 6), (5, 6), (6, 6), (3, 3), (2, 3)]
    assert counts(third, "two") == [(5, 6), (6, 6), (6, 6), (2, 3), (1, 3)]
    assert [row["as_asked"]["right"] for row in (reference, floor, first, second, third)] == [8, 9, 8, 2, 7]
    # Alike: all but 0 and 8; all; only 9; all but 9.
    assert [row["agreement"]["right"] for row in (floor, first, second, third)] == [8, 10, 1, 9]
    assert "agreement" not in reference
    # Lost by the second: 1 to 7; gained: 8. Exact: 2 · (1 + 8) / 2⁸. Holm: times 3, 2, 1, and never falling.
    paired = [row["paired"] for row in (floor, first, second, third)]
    assert paired == [
        {"lost": 0, "gained": 1, "p": 1.0, "adjusted": 1.0},
        {"lost": 0, "gained": 0, "p": 1.0, "adjusted": 1.0},
        {"lost": 7, "gained": 1, "p": pytest.approx(18 / 256, abs=1e-6), "adjusted": pytest.approx(54 / 256, abs=1e-6)},
        {"lost": 1, "gained": 0, "p": 1.0, "adjusted": 1.0},
    ]
    assert [m["seed"] for m in third["mistakes"]] == [TASKS[i].seed for i in (0, 8, 9)]


@pytest.fixture(scope="module")
def data(worded):
    """A header as the command makes it, without rows."""
    pipe = tiny_pipeline()
    info = pipelines.inspect_model(worded)
    settings = info.settings(height=HEIGHT, width=WIDTH, frames=FRAMES, steps=1)
    device = pipelines.pick_device("cpu")
    return module._header(pipe, info, "my|model", settings, TASKS, 0, 2, None, False, device, [*ROWS, "first"])


def test_pages_say_what_the_rows_say(data):
    # Lost: all seven of one object and no other; 2 / 2⁷ is 0.0156.
    rows = table_of({}, {3: TWIN}, dict.fromkeys(range(7), NO_COLOUR))
    finished = {**data, "rows": rows, "complete": True}
    page, text, lines = task_html(finished), task_markdown(finished), task_lines(finished)
    [row] = [line for line in text.splitlines() if line.startswith("| first |")]
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "first", "100.0 (64.6–100.0)", "0.0 (0.0–35.4)", "100.0 (64.6–100.0)", "100.0 (64.6–100.0)",
        "100.0 (61.0–100.0)", "100.0 (61.0–100.0)", "100.0 (61.0–100.0)", "100.0 (43.9–100.0)",
        "30.0 (10.8–60.3)", "30.0 (10.8–60.3)", "7 / 0", "0.016",
    ]  # fmt: skip
    header, rule, *_ = [line for line in text.splitlines() if line.startswith("|")]
    assert header.count("|") == rule.count("|") == row.count("|")
    assert "- first loses 7 and gains 0 of 10 clips: worse, beyond what chance does (p 0.016)." in text
    assert "It loses 1 and gains 0 of 10 clips, a difference inside noise (p 1)" in text
    assert "my\\|model" in text
    assert "7 clips of one object and 3 of two" in text
    assert lines[3].split() == [
        "first", "100.0", "0.0", "100.0", "100.0", "100.0", "100.0", "100.0", "100.0", "30.0", "30.0", "7/0", "0.016",
        "the", "pipeline",
    ]  # fmt: skip
    assert lines[1].startswith("FP32 ")
    assert "worse, beyond what chance does (p 0.016)" in page
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    assert "prefers-color-scheme: dark" in page
    assert "Partial" not in page + text


def test_a_difference_inside_noise_is_called_that(data):
    text = task_markdown({**data, "rows": table_of({}, {}, {0: NO_SHAPE, 1: NO_SHAPE}), "complete": True})
    assert "- Inside noise, which is not the same as equal: first." in text
    assert "It gets exactly the same clips right, and shows what FP32 shows in 10 of 10." in text


def test_the_gain_of_a_policy_is_not_called_a_loss(data):
    rows = table_of(dict.fromkeys(range(7), NO_SHAPE), {}, {})
    text = task_markdown({**data, "rows": rows, "complete": True})
    assert "- first loses 0 and gains 7 of 10 clips: better, beyond what chance does (p 0.016)." in text


def test_prompts_and_names_are_text_in_the_page(data):
    rows = table_of({0: NO_SHAPE}, {}, {})
    rows[0]["mistakes"][0]["prompt"] = "<script>alert(1)</script>"
    rows[2]["name"] = "<b>"
    page = task_html({**data, "rows": rows, "planned": [*ROWS, "<b>"], "complete": True})
    assert "<script>alert" not in page
    assert "<b>" not in page
