"""A drift report: plain JSON values, the clips and strips that belong to it, and the files it is saved as."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wanfp4.errors import OutputError, Wanfp4Error
from wanfp4.quality.aggregate import Json, number
from wanfp4.quality.budget import Violation, check_budget, verdict, violations
from wanfp4.quality.files import writable_folder, write
from wanfp4.quality.pages import html_page, markdown_page
from wanfp4.quality.results import DRIFT

if TYPE_CHECKING:
    from wanfp4.policy import Policy
    from wanfp4.quality.record import Step
    from wanfp4.receipt import Receipt

REPORT_KIND, SCHEMA_VERSION = DRIFT.kind, DRIFT.schema

# Names as reports give them to their clips and strips: nothing else that an old report.json lists is ever removed.
_MEDIA_NAME = re.compile(r"(videos/p\d+-s\d+-[A-Za-z0-9._-]+\.mp4|strips/p\d+-s\d+-[A-Za-z0-9._-]+\.jpg)")


class DriftReport:
    """What `wanfp4.drift` found. `data` holds every figure (docs/drift.md), `files` the clips and strips by file name.

    A policy's section has its name, constants, backends, receipts, runs, figures per step and summary; a reader must
    let sections hold keys that it does not know, as later versions add some.
    """

    def __init__(self, header: Json, *, budget: Mapping[str, float] | None = None) -> None:
        self.data: Json = {**header, "reference": {"attention": "", "runs": []}, "noise_floor": None, "policies": []}
        self.files: dict[str, bytes] = {}
        self.budget = check_budget(budget or {})
        self._written: dict[Path, set[str]] = {}

    @property
    def complete(self) -> bool:
        """False while runs are missing."""
        return bool(self.data["complete"])

    @property
    def policies(self) -> list[Json]:
        """The sections of the policies, in the order asked for."""
        return list(self.data["policies"])

    def add_section(self, name: str, policy: Policy, backend: str | None, *, floor: bool = False) -> Json:
        section: Json = {
            "name": name,
            "policy": policy.to_dict(),
            "numerics": policy.numerics.label,
            "backend": {"requested": backend, "calls": {}, "emulated": False},
            "fallbacks": {},
            "unpatched": {},
            "receipts": [],
            "runs": [],
            "per_step": {},
            "summary": {},
        }
        if floor:
            self.data["noise_floor"] = section
        else:
            self.data["policies"].append(section)
        return section

    def add_receipt(self, section: Json, receipt: Receipt) -> int:
        """Keep what a run's receipt says; the index of it in the section, where receipts that agree are kept once."""
        backend, fallbacks = section["backend"], section["fallbacks"]
        for entry in receipt.entries:
            backend["calls"][entry.ran.backend] = backend["calls"].get(entry.ran.backend, 0) + entry.calls
            backend["emulated"] = backend["emulated"] or entry.ran.emulated
        for entry in receipt.fallbacks:
            reason = entry.ran.reason or "no reason given"
            fallbacks[reason] = fallbacks.get(reason, 0) + entry.calls
        section["unpatched"] = {f"{u.expert}.{u.module}": u.reason for u in receipt.unpatched}
        kept = {**receipt.to_dict(), "summary": receipt.summary()}
        del kept["policy"]  # the section has it
        if kept not in section["receipts"]:
            section["receipts"].append(kept)
        return int(section["receipts"].index(kept))

    def add_file(self, name: str, content: bytes) -> str:
        """Keep a file of the report under its name in the report's folder; returns the name."""
        self.files[name] = content
        return name

    def set_steps(self, steps: Sequence[Step]) -> None:
        self.data["steps"] = steps_of(steps)

    def finish(self) -> None:
        self.data["complete"] = True

    def check(self, budget: Mapping[str, float]) -> list[Violation]:
        """Every limit that a policy exceeds, as {"velocity": 0.1}; see `wanfp4.quality.budget.METRICS`.

        Raises SettingsError for a metric that does not exist.
        """
        return violations(self.data["policies"], budget)

    def to_dict(self) -> Json:
        """What report.json holds: a copy, plain JSON values."""
        return {**copy.deepcopy(self.data), "budget": verdict(self.data["policies"], self.budget)}

    def to_json(self) -> str:
        """What report.json holds, as text."""
        return json_text(self.to_dict())

    def save(self, folder: str | Path, *, pages: bool = True) -> Path:
        """Write report.json, videos/, strips/ and, with `pages`, report.html and report.md; returns the folder.

        Each file appears whole or not at all, report.json after the clips it names. An earlier report in the folder is
        removed first: its pages, and the clips and strips that its report.json names. Raises OutputError.
        """
        folder = writable_folder(folder)
        if folder.resolve() not in self._written:
            _remove_earlier(folder)
        written = self._written.setdefault(folder.resolve(), set())
        for name, content in self.files.items():
            if name not in written:
                write(folder / name, content)
                written.add(name)
        data = self.to_dict()
        if pages:
            write(folder / "report.html", html_page(data, self.files))
            write(folder / "report.md", markdown_page(data))
        write(folder / "report.json", self.to_json())
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> DriftReport:
        """The report in a folder, with those of its clips and strips that are still there.

        Raises Wanfp4Error when there is none, or one of another schema.
        """
        folder = Path(folder)
        path = folder / "report.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise Wanfp4Error(f"cannot read a drift report from {str(folder)!r}: {error}") from None
        kind, schema = (data.get("kind"), data.get("schema")) if isinstance(data, dict) else (None, None)
        if (kind, schema) != (REPORT_KIND, SCHEMA_VERSION):
            needed = f"{REPORT_KIND!r} and schema {SCHEMA_VERSION}"
            raise Wanfp4Error(f"{path} has kind {kind!r} and schema {schema!r}; needed are {needed}")
        judged = data.pop("budget")
        limits = {name: limit["limit"] for name, limit in judged["limits"].items()} if judged else {}
        report = cls({}, budget=limits)
        report.data = data
        report.files = media_of(data, folder)
        report._written[folder.resolve()] = set(report.files)
        return report

    def _named_files(self) -> list[str]:
        return named_files(self.data)


def media_of(data: Json, folder: Path) -> dict[str, bytes]:
    """The clips and strips that a report's values name, those that are still in its folder. Raises OutputError."""
    files = {}
    for name in named_files(data):
        if not _MEDIA_NAME.fullmatch(name):
            continue  # whoever wrote that, it is no clip or strip of a report
        try:
            files[name] = (folder / name).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise OutputError(f"cannot read {str(folder / name)!r}: {error.strerror}") from None
    return files


def steps_of(steps: Sequence[Step]) -> list[Json]:
    """The steps of a run as reports list them."""
    return [
        {"step": s.index + 1, "sigma": number(s.sigma), "timestep": number(s.timestep), "expert": s.expert}
        for s in steps
    ]


def json_text(data: Json) -> str:
    """JSON text; lists of numbers stand on one line."""
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    # A line break cannot be inside a JSON string, so this meets nothing but lists of plain values.
    return re.sub(r"\[\n[^\[\]{}]*?\]", lambda found: re.sub(r"\n\s*", " ", found[0]), text) + "\n"


def named_files(data: Json) -> list[str]:
    """The clips and strips of a report's values, relative to its folder."""
    sections = [data["reference"], data["noise_floor"], *data["policies"]]
    return [name for s in sections for run in s["runs"] for name in (run["files"] or {}).values()]


def _remove_earlier(folder: Path) -> None:
    """Remove the report in `folder` with what belongs to it, or nothing if report.json is not a drift report's.

    Otherwise clips of policies that the next report does not have would stay, and finished pages beside an unfinished
    report.json. Raises OutputError when something cannot be removed.
    """
    listing = folder / "report.json"
    try:
        data = json.loads(listing.read_text(encoding="utf-8"))
        if data["kind"] != REPORT_KIND:
            return
        named = [name for name in named_files(data) if isinstance(name, str) and _MEDIA_NAME.fullmatch(name)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return
    # Through a link, videos/ may be a place that other things share.
    media = [folder / name for name in named]
    media = [p for p in media if p.is_file() and not p.is_symlink() and not p.parent.is_symlink()]
    try:
        # The list goes last: what an interruption leaves is still on it.
        for path in (*media, *(folder / page for page in DRIFT.pages), listing):
            path.unlink(missing_ok=True)
        for parent in {path.parent for path in media}:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
    except OSError as error:
        raise OutputError(f"cannot remove the earlier report in {str(folder)!r}: {error.strerror or error}") from error
