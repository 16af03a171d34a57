"""Which files of a folder are a search's: it writes over those, removes them once they are superseded, and touches no
others.

search.json lists the policies that searches of the folder have written, `files`: the name, the target and its words,
and a status. A `CURRENT` one is of the search that search.json is of, an `EARLIER` one of another target or of a search
that has not come so far again, and a `SUPERSEDED` one, of before --force, goes when the new search is complete.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from wanfp4.errors import OutputError
from wanfp4.quality.aggregate import Json
from wanfp4.quality.results import DRIFT, SEARCH, refuse_pages

PAGES = ("report.html", "report.md", "search.json")
ALONE = "policy.json"
CURRENT, EARLIER, SUPERSEDED = "current", "earlier", "superseded"


def policy_file(data: Json, label: str) -> str:
    """What a target's policy is saved as: as before; policy.json if it is the folder's only one; else by its target."""
    others = [one for one in data.get("files", ()) if one["status"] != SUPERSEDED]
    known = next((one["file"] for one in others if one["target"] == label), None)
    alone = len(data["targets"]) == 1 and not others
    return str(known or (ALONE if alone else _by_target(label)))


def possible(labels: Sequence[str]) -> tuple[str, ...]:
    """All that a search of these targets may write into a folder of its own."""
    return (*PAGES, ALONE, *map(_by_target, labels))


def _by_target(label: str) -> str:
    return f"policy-{label}.json"


def claim(folder: Path, targets: Sequence[str], *, force: bool) -> list[Json]:
    """`files` of a search of `targets`, labels, that begins in `folder`.

    Raises OutputError, unless `force`, where it would write over a file that no search has written.
    """
    listing = folder / SEARCH.file
    files = _written(listing)
    for one in files:
        one["status"] = SUPERSEDED if force or one["status"] == SUPERSEDED else EARLIER
    if force:
        return files
    refuse_pages(folder, SEARCH, DRIFT)
    known = {one["file"] for one in files} | ({*PAGES} if listing.is_file() else set())
    state = {"targets": list(targets), "files": files}
    wanted = (*PAGES, *(policy_file(state, label) for label in targets))
    if lost := [name for name in wanted if name not in known and (folder / name).exists()]:
        raise OutputError(
            f"{str(folder)!r} holds {' and '.join(lost)}, which no search has written and this one would write over; "
            "choose another folder, or add --force"
        )
    return files


def settle(folder: Path, data: Json) -> dict[str, Json]:
    """Remove what is superseded and bring `data["files"]` up to date; the policies to write, by the name of their file.

    Raises OutputError.
    """
    results = {result["label"]: result for result in data["results"]}
    names = {label: policy_file(data, label) for label in results}
    found = {names[label]: result for label, result in results.items() if result["policy"] is not None}
    kept = []
    for one in data.get("files", ()):
        if one["file"] in found:
            continue
        if data["complete"] if one["status"] == SUPERSEDED else one["target"] in results:
            try:
                (folder / one["file"]).unlink(missing_ok=True)
            except OSError as error:
                raise OutputError(f"cannot remove {str(folder / one['file'])!r}: {error.strerror or error}") from error
        else:
            kept.append(one)
    data["files"] = kept + [
        {"file": name, "target": result["label"], "text": result["text"], "status": CURRENT}
        for name, result in found.items()
    ]
    return {name: result["policy"] for name, result in found.items()}


def left(data: Json) -> str | None:
    """The folder's policies that are not of this search, in a sentence."""
    earlier = [f"{one['file']} ({one['text']})" for one in data.get("files", ()) if one["status"] != CURRENT]
    if not earlier:
        return None
    return f"Of an earlier search, and not what is reported here: {', '.join(earlier)}."


def _written(listing: Path) -> list[Json]:
    """The policies that a search.json says were written, whatever version it is of; none when it cannot be read."""
    try:
        data = json.loads(listing.read_text(encoding="utf-8"))
        if data["kind"] != SEARCH.kind:
            return []
        if "files" in data:
            found = [{key: str(one[key]) for key in ("file", "target", "text", "status")} for one in data["files"]]
        else:  # of a version without the list, which named files by the targets of one call
            names = {"targets": data["targets"]}
            found = [
                {
                    "file": policy_file(names, one["label"]),
                    "target": one["label"],
                    "text": one["text"],
                    "status": EARLIER,
                }
                for one in data["results"]
                if one["policy"] is not None
            ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    # A file that was changed by hand is not to name one elsewhere.
    return [one for one in found if Path(one["file"]).name == one["file"] and (listing.parent / one["file"]).is_file()]
