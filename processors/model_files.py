"""The files of a model, in a folder or on the Hugging Face Hub: where they are, what is missing, which is broken."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from wanfp4.errors import ModelError


def from_folder(folder: Path, name: str) -> Path:
    """`name` in `folder`. Raises ModelError that says what is there when it is not."""
    path = folder / name
    if path.is_file():
        return path
    if name == "model_index.json":
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise ModelError(f"{folder} is not a diffusers model: it has no model_index.json (found {found})")
    raise ModelError(f"{folder} is incomplete: model_index.json names {Path(name).parent}, but {name} is missing")


def from_hub(repo: str, name: str) -> Path:
    """`name` of a Hub id, from the local cache or downloaded. Raises ModelError that says why there is none."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(hf_hub_download(repo, name))
    except GatedRepoError:
        raise ModelError(f"{repo} on the Hugging Face Hub asks for access first; log in with `hf auth login`") from None
    except RepositoryNotFoundError:
        raise ModelError(f"{repo!r} is neither a folder here nor a model on the Hugging Face Hub") from None
    except RemoteEntryNotFoundError:
        raise ModelError(f"{repo} on the Hugging Face Hub has no {name}, so it is not a diffusers Wan model") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        why = (
            "the Hub is not asked, as HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set"
            if constants.HF_HUB_OFFLINE
            else f"the Hub cannot be reached ({type(error).__name__})"
        )
        raise ModelError(
            f"{repo!r} is not a folder here, is not in the local cache of the Hugging Face Hub, and {why}"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelError that names the file and its fault."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    # RecursionError: brackets without end. ValueError: no JSON, no UTF-8, or a whole number of thousands of digits.
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(data).__name__}")
    return data


def absent_weights(folder: Path, parts: Iterable[str]) -> tuple[str, ...]:
    """Those of `parts` whose weights `folder` does not hold in full, each with what was found.

    Raises ModelError for a list of weight files that is none.
    """
    absent = []
    for name in parts:
        part = folder / name
        shards: set[str] = set()
        for listing in sorted(part.glob("*.index.json")):
            listed = read_json(listing).get("weight_map", {})
            if not isinstance(listed, dict) or not all(isinstance(shard, str) for shard in listed.values()):
                raise ModelError(f"{listing}: weight_map must map tensors to file names")
            shards.update(listed.values())
        missing = sorted(shard for shard in shards if not (part / shard).is_file())
        if missing:
            absent.append(f"{name}: {len(missing)} of {len(shards)} weight files are missing ({missing[0]} …)")
        elif not any(part.glob("*.safetensors")) and not any(part.glob("*.bin")):
            absent.append(f"{name}: no weights in {name}/")
    return tuple(absent)


def broken_file(folder: Path) -> str | None:
    """The first file of a model that cannot be read, with its fault; None when each one is well formed.

    For an error message after loading failed: diffusers' own often does not say which part it was about.
    """
    from safetensors import SafetensorError, safe_open
    from tokenizers import Tokenizer

    for path in sorted(folder.glob("*/*")):
        name = path.relative_to(folder)
        try:
            if path.name == "tokenizer.json":
                Tokenizer.from_file(str(path))
            elif path.suffix == ".json":
                read_json(path)
            elif path.suffix == ".safetensors":
                with safe_open(path, framework="pt"):
                    pass
        except ModelError as error:
            return str(error)
        except SafetensorError as error:
            return f"{name} holds no weights: {error}"
        except Exception as error:  # noqa: BLE001 tokenizers raises nothing narrower
            return f"{name} is broken: {error}"
    return None
