"""Latents on disk, and the way from latents to an mp4 with its receipt: `generate` and `decode` share it."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanfp4.errors import OutputError, SettingsError, Wanfp4Error
from wanfp4.processors.model_info import Settings

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

KIND, SCHEMA = "wanfp4-clip", 1
SUFFIX = ".latents.safetensors"
TIMINGS_NOTE = (
    "Wall clock of this one run on this machine, in seconds, first-call costs included. Emulated 4-bit attention is "
    "slower than BF16; no figure here says anything about hardware that has FP4 units."
)


def latents_path(video: Path) -> Path:
    """Where the latents of `video` are kept until it is written."""
    return video.with_name(video.stem + SUFFIX)


def receipt_path(video: Path) -> Path:
    """The JSON receipt beside `video`."""
    return video.with_suffix(".json")


def check_outputs(video: Path, *others: Path, force: bool, inputs: Iterable[Path] = ()) -> None:
    """Raise OutputError unless `video`, its receipt and `others` can be written; nothing on disk changes.

    Existing files need `force`; the files that the command reads, its `inputs`, are never overwritten.
    """
    if video.suffix.lower() != ".mp4":
        raise OutputError(f"the output must be a file name that ends in .mp4, not {str(video)!r}")
    inputs = tuple(inputs)
    for path in (video, receipt_path(video), *others):
        try:
            refuse_inputs(path, inputs)
            if path.is_dir():
                raise OutputError(f"cannot write {str(path)!r}: it is a folder, and a file name is needed")
            if path.exists() and not force:
                raise OutputError(f"{str(path)!r} exists; choose another --output, or --force to overwrite it")
            _try_folder(path)
        except OutputError:
            raise
        except OSError as error:
            raise OutputError(f"cannot write {str(path)!r}: {error.strerror or error}") from None


def configs(model: str) -> list[Path]:
    """The JSON files of a model folder, which a receipt could have the name of; none for a Hub id."""
    folder = Path(model).expanduser()
    return [*folder.glob("*.json"), *folder.glob("*/*.json")]


def refuse_inputs(path: Path, inputs: Iterable[Path]) -> None:
    """Raise OutputError when writing `path` would overwrite one of `inputs`."""
    for given in inputs:
        if path.exists() and given.exists() and path.samefile(given):
            raise OutputError(
                f"{str(path)!r} would be written over {str(given)!r}, which this command reads; choose another --output"
            )


def _try_folder(path: Path) -> None:
    """Make and drop a file in the nearest folder that exists: permissions alone say little, for root and for /proc."""
    folder = path.parent.absolute()
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    if not nearest.is_dir():
        what = "it" if nearest == folder else repr(str(nearest))
        raise OutputError(f"cannot write into {str(path.parent)!r}: {what} is a file, and a folder is needed")
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise OutputError(
            f"cannot write into {str(path.parent)!r}: no file can be made in {str(nearest)!r} ({error.strerror})"
        ) from None


def save_latents(path: Path, latents: Tensor, receipt: dict[str, Any]) -> None:
    """Latents [1, C, F, h, w] as safetensors, with the receipt so far as metadata; whole or not at all.

    Raises OutputError, for a full disk too.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from wanfp4.quality.files import replacing

    with replacing(path) as temporary:
        try:
            save_file({"latents": latents.detach().contiguous().cpu()}, temporary, {"wanfp4": json.dumps(receipt)})
        except SafetensorError as error:  # which is no OSError, even where the system refused
            raise OutputError(f"cannot write {str(path)!r}: {error}") from error


def load_latents(path: Path) -> tuple[Tensor, dict[str, Any]]:
    """What `save_latents` wrote. Raises SettingsError for a file that is missing, broken or of another kind.

    The receipt has a model's name, a dtype and settings that make sense; the rest of it is for people.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise SettingsError(f"there is no file {str(path)!r}")
    try:
        with safe_open(path, framework="pt") as file:
            receipt = json.loads((file.metadata() or {}).get("wanfp4", "null"))
            latents: Tensor | None = file.get_tensor("latents") if "latents" in file.keys() else None  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"cannot read latents from {str(path)!r}: {error}") from None
    if latents is None or not isinstance(receipt, dict) or receipt.get("kind") != KIND:
        raise SettingsError(f"{str(path)!r} holds no latents of `wanfp4 generate`")
    if receipt.get("schema") != SCHEMA:
        raise SettingsError(f"{str(path)!r} has schema {receipt.get('schema')!r}; this version reads schema {SCHEMA}")
    model = receipt.get("model")
    for name, value, kind in (
        ("model.model", model.get("model") if isinstance(model, dict) else None, str),
        ("dtype", receipt.get("dtype"), str),
        ("settings", receipt.get("settings"), dict),
    ):
        if not isinstance(value, kind):
            raise SettingsError(f"the receipt in {str(path)!r} lacks {name}, which decoding needs")
    try:
        Settings(**receipt["settings"])
    except (SettingsError, TypeError) as error:
        raise SettingsError(
            f"the receipt in {str(path)!r} holds settings that this version cannot use: {error}"
        ) from None
    return latents, receipt


def check_finite(latents: Tensor) -> None:
    """Raise Wanfp4Error when there is nothing to decode."""
    bad = int((~latents.isfinite()).sum())
    if bad:
        raise Wanfp4Error(
            f"{bad} of {latents.numel()} latent values are NaN or infinite, so there is no video to show "
            "(--dtype fp16 overflows on some models; bf16 and fp32 do not)"
        )


def write_clip(
    video: Path, frames: np.ndarray[Any, np.dtype[np.uint8]], fps: int, receipt: dict[str, Any], decode_seconds: float
) -> None:
    """The mp4 and, beside it, its receipt; each appears whole or not at all."""
    from wanfp4.quality.files import write
    from wanfp4.quality.video import write_mp4

    started = time.perf_counter()
    write_mp4(video, frames, fps)
    seconds = {"decode": round(decode_seconds, 3), "write_mp4": round(time.perf_counter() - started, 3)}
    count, height, width = frames.shape[:3]
    finished = {
        **receipt,
        "timings": {**receipt.get("timings", {}), **seconds, "note": TIMINGS_NOTE},
        "output": {"file": video.name, "frames": count, "height": height, "width": width, "fps": fps},
    }
    write(receipt_path(video), json.dumps(finished, indent=2) + "\n")
