"""Files that are either whole or not there."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from wanfp4.errors import OutputError


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary file beside `path`, with its suffix; it becomes `path` when the block ends well.

    When the block raises, Ctrl-C included, it is removed and an earlier `path` stays as it was. Missing parent folders
    are made. Raises OutputError when the file cannot be written.
    """
    path = Path(path)
    temporary: Path | None = None
    try:
        if path.is_dir():
            raise OutputError(f"cannot write {str(path)!r}: it is a folder, and a file name is needed")
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not tempfile's: those are readable by their owner only, and the name would keep that.
        candidate = path.with_name(f".{path.stem}.{secrets.token_hex(6)}{path.suffix}")
        candidate.open("xb").close()
        temporary = candidate
        yield temporary
        os.replace(temporary, path)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def write(path: str | Path, content: str | bytes) -> Path:
    """`content` as the whole of `path` (text as UTF-8), atomically; returns the path. Raises OutputError."""
    path = Path(path)
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return path


@contextlib.contextmanager
def output_folder(path: str | Path) -> Iterator[Path]:
    """`writable_folder`; when the block raises, the folders that this made go again unless something is in them."""
    path = Path(path)
    made = [folder for folder in (path, *path.parents) if not os.path.exists(folder)]
    try:
        yield writable_folder(path)
    except BaseException:
        for folder in made:
            with contextlib.suppress(OSError):  # it holds something
                folder.rmdir()
        raise


def writable_folder(path: str | Path) -> Path:
    """The folder `path`, made if need be. Raises OutputError when files cannot be made in it."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except FileExistsError:
        raise OutputError(f"cannot write into {str(path)!r}: it is a file, and a folder is needed") from None
    except OSError as error:
        raise OutputError(f"cannot write into {str(path)!r}: {error.strerror or error}") from error
    return path
