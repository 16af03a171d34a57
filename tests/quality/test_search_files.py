"""A search writes over its own files alone, and its folder says which policy is of which target."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanfp4.errors import OutputError
from wanfp4.quality.results import DRIFT, SEARCH
from wanfp4.quality.search_files import CURRENT, PAGES, SUPERSEDED, claim, left, policy_file, settle

LABELS = ("share-0.8", "share-0.6", "velocity-0.3")


def searched(folder, targets, found=None, *, force=False, complete=True, text="first"):
    """What a search leaves in `folder`: `found` are the targets with a policy; those of `targets` after them have none
    or, in one that was stopped, no result yet."""
    found = targets if found is None else found
    data = {"kind": SEARCH.kind, "targets": list(targets), "complete": complete}
    data["files"] = claim(folder, targets, force=force)
    data["results"] = [
        {"label": label, "text": f"words of {label}", "policy": f"{label}, {text}" if label in found else None}
        for label in targets
        if complete or label in found
    ]
    policies = settle(folder, data)
    (folder / SEARCH.file).write_text(json.dumps(data))
    for name, policy in policies.items():
        (folder / name).write_text(policy)
    for page in DRIFT.pages:
        (folder / page).write_text("a search")
    return data


def files(folder):
    return {path.name: path.read_text() for path in sorted(folder.glob("policy*.json"))}


def test_a_folders_only_target_is_policy_json_and_others_do_not_take_its_place(tmp_path):
    searched(tmp_path, ["share-0.8"])
    assert files(tmp_path) == {"policy.json": "share-0.8, first"}
    data = searched(tmp_path, ["share-0.6"], text="second")
    assert files(tmp_path) == {"policy.json": "share-0.8, first", "policy-share-0.6.json": "share-0.6, second"}
    assert left(data) == "Of an earlier search, and not what is reported here: policy.json (words of share-0.8)."
    data = searched(tmp_path, ["share-0.6", "share-0.8"], text="third")
    assert files(tmp_path) == {"policy.json": "share-0.8, third", "policy-share-0.6.json": "share-0.6, third"}
    assert left(data) is None


def test_several_targets_are_named_by_them_and_stay_so(tmp_path):
    searched(tmp_path, ["share-0.8", "share-0.6"])
    searched(tmp_path, ["share-0.8"], text="second")
    assert files(tmp_path) == {
        "policy-share-0.6.json": "share-0.6, first",
        "policy-share-0.8.json": "share-0.8, second",
    }


def test_a_target_that_has_no_policy_any_more_has_no_file(tmp_path):
    searched(tmp_path, ["share-0.8", "share-0.6"])
    searched(tmp_path, ["share-0.8"], found=[])
    assert list(files(tmp_path)) == ["policy-share-0.6.json"]


def test_a_stopped_search_says_that_the_policies_are_of_an_earlier_one(tmp_path):
    searched(tmp_path, ["share-0.8"])
    data = searched(tmp_path, ["share-0.8"], found=[], complete=False)
    assert files(tmp_path) == {"policy.json": "share-0.8, first"}
    assert "policy.json (words of share-0.8)" in left(data)


def test_begun_anew_takes_the_old_files_away_when_it_is_complete(tmp_path):
    searched(tmp_path, ["share-0.8", "share-0.6"])
    for again in range(2):
        searched(tmp_path, ["velocity-0.3"], found=[], force=not again, complete=False)
        assert list(files(tmp_path)) == ["policy-share-0.6.json", "policy-share-0.8.json"]
    searched(tmp_path, ["velocity-0.3"], force=True, text="second")
    assert files(tmp_path) == {"policy.json": "velocity-0.3, second"}


def test_what_begun_anew_supersedes_stays_superseded_when_it_goes_on(tmp_path):
    searched(tmp_path, ["share-0.8", "share-0.6"])
    searched(tmp_path, ["velocity-0.3"], found=[], force=True, complete=False)
    searched(tmp_path, ["velocity-0.3"], text="second")
    assert files(tmp_path) == {"policy.json": "velocity-0.3, second"}


def test_an_older_searchs_files_are_known_by_its_targets(tmp_path):
    data = searched(tmp_path, ["share-0.8", "share-0.6"])
    del data["files"]
    (tmp_path / SEARCH.file).write_text(json.dumps(data))
    assert [one["file"] for one in claim(tmp_path, ["share-0.8"], force=False)] == list(reversed([*files(tmp_path)]))
    searched(tmp_path, ["share-0.8"], force=True, text="second")
    assert files(tmp_path) == {"policy.json": "share-0.8, second"}


@pytest.mark.parametrize("name", [*DRIFT.pages, SEARCH.file, "policy.json"])
def test_files_of_others_are_refused(tmp_path, name):
    if name != SEARCH.file:
        (tmp_path / name).write_text("mine")
        with pytest.raises(OutputError, match=f"holds {name}, which no search has written"):
            claim(tmp_path, ["share-0.8"], force=False)
        assert claim(tmp_path, ["share-0.8"], force=True) == []
        assert (tmp_path / name).read_text() == "mine"
    assert claim(tmp_path / "new", ["share-0.8"], force=False) == []


@pytest.mark.parametrize("first", [True, False])
def test_a_drift_report_is_refused_whichever_was_first(tmp_path, first):
    if first:
        searched(tmp_path, ["share-0.8"])
    (tmp_path / DRIFT.file).write_text("{}")
    with pytest.raises(OutputError, match=r"drift report.*report.html and report.md"):
        claim(tmp_path, ["share-0.8"], force=False)


def test_a_list_that_was_changed_by_hand_names_no_file_elsewhere(tmp_path):
    outside = tmp_path / "mine.json"
    outside.write_text("mine")
    folder = tmp_path / "search"
    folder.mkdir()
    data = searched(folder, ["share-0.8"])
    data["files"][0]["file"] = "../mine.json"
    (folder / SEARCH.file).write_text(json.dumps(data))
    searched(folder, ["share-0.6"], force=True)
    assert outside.read_text() == "mine"


calls = st.lists(
    st.tuples(
        st.lists(st.sampled_from(LABELS), min_size=1, unique=True), st.sets(st.sampled_from(LABELS)), st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)  # fmt: skip


@given(calls)
def test_after_any_searches_the_list_is_what_is_there(calls):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "mine.json").write_text("mine")
        last = {}
        for i, (targets, found, force, complete) in enumerate(calls):
            data = searched(
                folder, targets, [t for t in targets if t in found], force=force, complete=complete, text=str(i)
            )
            last |= {label: f"{label}, {i}" for label in targets if label in found}
            listed = {one["file"]: one for one in data["files"]}
            assert len(listed) == len(data["files"])
            assert set(listed) == set(files(folder))
            for file, text in files(folder).items():
                assert text == last[listed[file]["target"]] or listed[file]["status"] == SUPERSEDED
            for label in targets:
                if label in found:
                    assert (folder / policy_file(data, label)).read_text() == f"{label}, {i}"
                    assert listed[policy_file(data, label)]["status"] == CURRENT
                elif complete:
                    assert label not in {one["target"] for one in data["files"]}
            if force and complete:
                assert all(one["status"] == CURRENT for one in data["files"])
        assert (folder / "mine.json").read_text() == "mine"
        assert {path.name for path in folder.iterdir()} == {"mine.json", *PAGES, *files(folder)}
