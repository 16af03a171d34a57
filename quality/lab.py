"""The parts of the quality lab's page: a drift report and the results beside it, checked to belong together.

A map, a task table, timings and a search say something of a drift report's policies when they are of the same model and
of policies that are defined alike. Everything else that differs is told, not refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wanfp4.errors import SettingsError, Wanfp4Error
from wanfp4.quality.aggregate import Json
from wanfp4.quality.comparison import differences
from wanfp4.quality.maps import AttentionMap
from wanfp4.quality.plan import FLOOR, REFERENCE
from wanfp4.quality.report import media_of
from wanfp4.quality.results import (
    BENCH,
    DAMAGE,
    DRIFT,
    MAP,
    SEARCH,
    TASK,
    Result,
    changed_by_hand,
    listing,
    read_result,
)


@dataclass(frozen=True)
class Part:
    """A result as it was given: what it is, where, and its JSON values."""

    result: Result
    path: Path
    data: Json

    @property
    def name(self) -> str:
        """What and where, for a sentence."""
        return f"{self.result.what} {str(self.path)!r}"

    @property
    def complete(self) -> bool:
        """False while its job is unfinished; timings are written once, at the end."""
        return bool(self.data.get("complete", self.result is BENCH))


@dataclass(frozen=True)
class Lab:
    """Everything that the page is made of; `notes` are sentences on what differs between the parts."""

    report: Part
    files: Mapping[str, bytes]
    maps: tuple[Part, ...] = ()
    task: Part | None = None
    bench: Part | None = None
    search: Part | None = None
    notes: tuple[str, ...] = ()

    @property
    def parts(self) -> list[Part]:
        """All of them, the report first."""
        others = (self.task, self.bench, self.search)
        return [self.report, *self.maps, *(part for part in others if part is not None)]


def read_lab(
    report: str | Path,
    maps: Sequence[str | Path] = (),
    task: str | Path | None = None,
    bench: str | Path | None = None,
    search: str | Path | None = None,
) -> Lab:
    """Read a drift report and what is to stand beside it, each as its folder or its JSON file, finished or not.

    Raises SettingsError for what is no such result, a report without a finished run, another model, other weights, and
    policies that share a name and not their constants; OutputError for clips that cannot be read.
    """
    drift = _part(report, DRIFT)
    beside = [_map(path) for path in maps]
    others = {r: _part(p, r) for p, r in ((task, TASK), (bench, BENCH), (search, SEARCH)) if p is not None}
    parts = [*beside, *others.values()]
    known: dict[str, tuple[Json, Part]] = {}
    notes: list[str] = []
    with _readable(drift):
        if not any(section["runs"] for section in drift.data["policies"]):
            raise SettingsError(f"no policy of the {drift.name} has finished a run yet: run its job again")
        _check_policies(drift, known)
        files = media_of(drift.data, listing(drift.path, DRIFT).parent)
    for part in parts:
        with _readable(part):
            if part.result is not BENCH:
                _check_model(drift, part)
            _check_policies(part, known)
            notes += _notes(drift, part)
    return Lab(
        drift,
        files,
        tuple(beside),
        others.get(TASK),
        others.get(BENCH),
        others.get(SEARCH),
        tuple(dict.fromkeys(notes)),
    )


def _part(path: str | Path, result: Result) -> Part:
    return Part(result, Path(path), read_result(path, result))


def _map(path: str | Path) -> Part:
    """A map with its summary as this version makes it from the figures: an earlier one's may lack something."""
    part = _part(path, MAP)
    with _readable(part):
        return dataclasses.replace(part, data=AttentionMap(part.data).to_dict())


@contextlib.contextmanager
def _readable(part: Part) -> Iterator[None]:
    """What a damaged part makes Python raise becomes a sentence that names the part."""
    try:
        yield
    except Wanfp4Error:
        raise
    except DAMAGE as error:
        raise changed_by_hand(part.path, part.result, error) from None


def policies_of(part: Part) -> Iterator[tuple[str, Json]]:
    """Name and definition of every policy that a part has figures of."""
    data = part.data
    if part.result is DRIFT:
        yield from ((section["name"], section["policy"]) for section in data["policies"])
    elif part.result is MAP:
        yield data["policy"]["name"], data["policy"]
    elif part.result is TASK:
        yield from ((row["name"], row["policy"]) for row in data["rows"] if row["name"] not in (REFERENCE, FLOOR))
    elif part.result is BENCH:
        yield from ((policy["name"], policy) for policy in data["policies"])
    else:
        yield from ((one["name"], one["policy"]) for one in data["candidates"])


def _check_policies(part: Part, known: dict[str, tuple[Json, Part]]) -> None:
    """Raise SettingsError when a part has a policy of a known name with other constants; else add it to `known`."""
    for name, policy in policies_of(part):
        definition, first = known.setdefault(name, (policy, part))
        # The words of a description may change with a version; what is computed does not.
        found = [d for d in differences(definition, policy) if d["what"] != "description"]
        if found:
            one = found[0]
            raise SettingsError(
                f"the {part.name} and the {first.name} have different policies {name!r}: {one['what']} is "
                f"{one['B']!r} in one and {one['A']!r} in the other; measure both with one, or rename it"
            )


def _check_model(drift: Part, part: Part) -> None:
    """Raise SettingsError when a part is of another model than the report.

    Weights tell by their digest, which holds their dtype, too. Where one of the two has none the names have to do.
    """
    ours, theirs = drift.data["model"], part.data["model"]
    if ours["dtype"] != theirs["dtype"]:
        found = f"in {theirs['dtype']}, the {drift.name} in {ours['dtype']}"
    elif theirs.get("weights") is not None and ours.get("weights") is not None:
        if theirs["weights"] == ours["weights"]:
            return
        found = f"of other weights (sha256 {theirs['weights'][:16]}…) than the {drift.name} ({ours['weights'][:16]}…)"
    elif theirs["model"] != ours["model"]:
        found = f"of the model {theirs['model']!r}, the {drift.name} of {ours['model']!r}"
    else:
        return
    raise SettingsError(f"the {part.name} is {found}; a page is of one model")


def _notes(drift: Part, part: Part) -> list[str]:
    """What differs between a part and the report and is no reason to refuse it."""
    data, name = part.data, part.name[0].upper() + part.name[1:]
    said = []
    if found := [*_circumstances(drift.data, data)]:
        said.append(f"{name}: {'; '.join(found)}.")
    if part.result is not BENCH and data["model"].get("weights") is None:
        said.append(f"{name} has no digest of its weights: only the model's name tells that it is the report's.")
    measured = {section["name"]: section for section in drift.data["policies"]}
    if alone := [policy for policy, _ in policies_of(part) if policy not in measured]:
        said.append(f"{name} also has {', '.join(alone)}, not in the drift report and so not in the table.")
    if part.result is TASK:
        for row in data["rows"]:
            section = measured.get(row["name"])
            if section is not None and section["runs"] and _ran(row) != _ran(section):
                said.append(f"{row['name']} ran on {_ran(row)} in the task and on {_ran(section)} in the drift report.")
    return said


def _ran(section: Mapping[str, Any]) -> str:
    return ", ".join(sorted(section["backend"]["calls"])) or "nothing"


def _circumstances(ours: Json, theirs: Json) -> Iterator[str]:
    """Settings, scheduler, prompts, device and versions that differ, in words."""
    if "settings" in theirs:
        yield from _differing(ours["settings"], theirs["settings"], ours["settings"])
        yield from _differing(ours, theirs, ["scheduler"])
    if "prompts" in theirs and (ours["prompts"], ours["seeds"]) != (theirs["prompts"], theirs["seeds"]):
        yield "other prompts or seeds than the report"
    if machine_of(ours) != machine_of(theirs):
        yield f"on {machine_of(theirs)}, the report's on {machine_of(ours)}"
    # Timings list more packages than reports do.
    shared = [name for name in ours["versions"] if name in theirs["versions"]]
    yield from _differing(ours["versions"], theirs["versions"], shared)


def machine_of(data: Json) -> str:
    """Where a result was measured: the card's name, or the kind of device with the processor's."""
    machine = data["machine"]
    return str(machine["name"]) if machine["device"] == "cuda" else f"{machine['device']}, {machine['name']}"


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any], names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if ours.get(name) != theirs.get(name):
            yield f"{name} {_plain(theirs.get(name))}, the report's {_plain(ours.get(name))}"


def _plain(value: Any) -> str:
    return "none" if value is None else str(value)
