"""What a search found: plain JSON values, the policies, and the files that they are saved as."""

from __future__ import annotations

import copy
import json
from pathlib import Path

from wanfp4.errors import Wanfp4Error
from wanfp4.policy import Policy
from wanfp4.quality.aggregate import Json
from wanfp4.quality.files import writable_folder, write
from wanfp4.quality.report import json_text
from wanfp4.quality.results import SEARCH
from wanfp4.quality.search_files import policy_file, settle

KIND, SCHEMA = SEARCH.kind, SEARCH.schema


class SearchReport:
    """`data` holds every figure (docs/search.md)."""

    def __init__(self, data: Json) -> None:
        self.data = data

    @property
    def complete(self) -> bool:
        """False while something is still to be measured."""
        return bool(self.data["complete"])

    @property
    def passed(self) -> bool:
        """True when every target has a policy that was verified to keep it."""
        return self.complete and all(result["kept"] for result in self.data["results"])

    @property
    def policies(self) -> dict[str, Policy]:
        """The policies found, by the name of the file that each is saved as."""
        return {
            policy_file(self.data, result["label"]): Policy.from_dict(result["policy"])
            for result in self.data["results"]
            if result["policy"] is not None
        }

    def to_dict(self) -> Json:
        """What search.json holds: a copy, plain JSON values."""
        return copy.deepcopy(self.data)

    def save(self, folder: str | Path, *, pages: bool = True) -> Path:
        """Write search.json and, with `pages`, the policies, report.html and report.md; returns the folder.

        Of an earlier search of the folder, a policy's file goes when its target has no policy any more, and with
        --force when this search is complete. Raises OutputError.
        """
        from wanfp4.quality.search_pages import search_html, search_markdown

        folder = writable_folder(folder)
        policies = settle(folder, self.data) if pages else {}
        write(folder / SEARCH.file, json_text(self.data))  # first, so that no policy is there that it does not list
        for name, policy in policies.items():
            write(folder / name, Policy.from_dict(policy).to_json())
        if pages:
            write(folder / "report.html", search_html(self.data))
            write(folder / "report.md", search_markdown(self.data))
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> SearchReport:
        """The search in a folder. Raises Wanfp4Error when there is none, or one of another schema."""
        path = Path(folder) / SEARCH.file
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise Wanfp4Error(f"cannot read a search from {str(folder)!r}: {error}") from None
        kind, schema = (data.get("kind"), data.get("schema")) if isinstance(data, dict) else (None, None)
        if (kind, schema) != (KIND, SCHEMA):
            raise Wanfp4Error(f"{path} has kind {kind!r} and schema {schema!r}; {KIND!r} and {SCHEMA} are needed")
        return cls(data)
