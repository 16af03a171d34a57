"""What a run depends on beside its settings: versions, and the machine. For receipts, reports and `wanfp4 doctor`."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import torch

import wanfp4

PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "safetensors",
    "numpy",
    "scikit-image",
    "imageio-ffmpeg",
    "typer",
)


def versions() -> dict[str, str]:
    """Versions of wanfp4, Python and the packages that decide what a run gives."""
    return {
        "wanfp4": wanfp4.__version__,
        "python": platform.python_version(),
        **{name: _installed(name) for name in PACKAGES},
    }


def _installed(name: str) -> str:
    """Packages copied onto a path, or left out by someone who needs no video, have no metadata."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def machine(device: torch.device) -> dict[str, Any]:
    """The device that ran, as plain JSON values."""
    common = {"device": device.type, "threads": torch.get_num_threads(), "system": platform.system()}
    if device.type != "cuda":
        return {**common, "name": f"{platform.machine()}, {os.cpu_count()} cores"}
    major, minor = torch.cuda.get_device_capability(device)
    return {**common, "name": torch.cuda.get_device_name(device), "compute_capability": f"{major}.{minor}"}
