"""The bundled sample pipeline: a small trained text-to-video model of Wan2.1's architecture, 21 MB."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def bundled() -> Path:
    """Folder of the bundled pipeline in diffusers layout; its README.md says what it can draw."""
    return Path(str(files(__name__) / "pipeline"))
