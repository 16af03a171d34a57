"""Results of finished jobs, read again: what each command writes, by the name and kind of its JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wanfp4.errors import OutputError, SettingsError

if TYPE_CHECKING:  # commands read this file before anything is worth loading torch for
    from wanfp4.quality.aggregate import Json


@dataclass(frozen=True)
class Result:
    """What a command leaves: `what` in words, the file that holds every figure, its kind and schema.

    pages   files that the command writes beside it.
    command what makes one.
    """

    what: str
    file: str
    kind: str
    schema: int
    pages: tuple[str, ...]
    command: str

    @property
    def files(self) -> tuple[str, ...]:
        """All that the command always writes, pages first."""
        return (*self.pages, self.file)

    @property
    def needed(self) -> str:
        """What has to be given, for a message."""
        if not self.file:
            return f"a file of {self.command}"
        article = "an" if self.what[0] in "aeiou" else "a"
        return f"{article} {self.what}'s folder or {self.file}"


DRIFT = Result("drift report", "report.json", "wanfp4 drift report", 1, ("report.html", "report.md"), "`wanfp4 drift`")
MAP = Result("map", "map.json", "wanfp4 attention map", 1, ("map.html", "map.md"), "`wanfp4 map`")
TASK = Result("task table", "task.json", "wanfp4 task table", 1, ("task.html", "task.md"), "`wanfp4 drift --task`")
BENCH = Result("timings", "", "wanfp4 bench", 1, (), "`wanfp4 bench --json`")
SEARCH = Result(
    "search", "search.json", "wanfp4 search", 1, ("report.html", "report.md", "policy.json"), "`wanfp4 search`"
)


def listing(path: str | Path, result: Result) -> Path:
    """The JSON file of a result that is given as its folder or as that file."""
    path = Path(path)
    return path / result.file if result.file and path.is_dir() else path


def read_result(path: str | Path, result: Result) -> Json:
    """The JSON values of a result, finished or not. Raises SettingsError for anything else."""
    file = listing(path, result)
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(
            f"cannot read {str(file)!r}: {error.strerror or error}; needed is {result.needed}"
        ) from None
    except ValueError:  # no JSON, or no UTF-8
        raise SettingsError(f"{str(file)!r} is no JSON file; needed is {result.needed}") from None
    kind, schema = (data.get("kind"), data.get("schema")) if isinstance(data, dict) else (None, None)
    if (kind, schema) != (result.kind, result.schema):
        needed = f"{result.kind!r} and schema {result.schema}"
        raise SettingsError(f"{str(file)!r} has kind {kind!r} and schema {schema!r}; needed are {needed}")
    return dict(data)


def read_earlier(folder: Path, result: Result) -> Json | None:
    """The JSON values of a result in a folder to go on with, None where there is none. Raises OutputError for a file of
    that name which is something else and would be lost."""
    path = folder / result.file
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        known = (data["kind"], data["schema"]) == (result.kind, result.schema)
    except (OSError, ValueError, TypeError, KeyError):
        known = False
    if not known:
        raise OutputError(
            f"{str(path)!r} is not a {result.what} of this version; choose another folder, or add --force"
        )
    return dict(data)


def owned(path: str | Path, result: Result, media: Iterable[str] = ()) -> list[Path]:
    """The files that a result consists of: its JSON, its pages, and `media`, named as from its folder."""
    file = listing(path, result)
    return [file, *(file.parent / name for name in (*result.pages, *media))]


def refuse_pages(folder: Path, mine: Result, other: Result) -> None:
    """Raise OutputError when `folder` holds an `other` result, whose pages a new one of `mine` would replace."""
    if (folder / other.file).is_file():
        shared = " and ".join(page for page in other.pages if page in mine.pages)
        raise OutputError(
            f"{str(folder)!r} holds a {other.what}, whose {shared} would be written over; choose another folder, "
            "or add --force"
        )


def refuse_own(output: str | Path, owned: Iterable[Path], owner: str) -> None:
    """Raise OutputError when `output` is one of the files that belong to `owner`, in words."""
    output = Path(output)
    for mine in owned:
        # By its name too, where it is missing; by the file, where that has other names.
        if output.resolve() == mine.resolve() or (output.exists() and mine.exists() and output.samefile(mine)):
            raise OutputError(
                f"{str(output)!r} would be written over {str(mine)!r}, which belongs to {owner}; choose another file"
            )


def changed_by_hand(path: str | Path, result: Result, error: Exception) -> SettingsError:
    """The error for a result that lacks what the command always writes."""
    return SettingsError(
        f"the {result.what} {str(path)!r} lacks something or was changed by hand ({error!r}); "
        f"needed is one as {result.command} writes it"
    )


# What reading such a result stumbles over.
DAMAGE = (KeyError, TypeError, ValueError, IndexError, AttributeError)
