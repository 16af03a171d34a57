"""What the backends that need a GPU say where there is none, or another one."""

from __future__ import annotations

from collections.abc import Callable

import torch


def no_gpu(needed: str, wrong_gpu: Callable[[int], str | None]) -> str | None:
    """Why no CUDA device of this machine will do, or None. `needed` says what would, `wrong_gpu` why a device does not.

    CUDA is not initialised for this: as long as nothing else has done so, devices are not looked at.
    """
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        return f"PyTorch {torch.__version__} ({built}) finds no CUDA device, and it needs {needed}"
    if not torch.cuda.is_initialized():
        return None
    others = [wrong_gpu(i) for i in range(torch.cuda.device_count())]
    return None if None in others else others[0]


def unfit(index: int, needed: str, fits: Callable[[tuple[int, int]], bool]) -> str | None:
    """Why CUDA device `index` will not do, whose compute capability must be one that `fits`, or None."""
    major, minor = torch.cuda.get_device_capability(index)
    if fits((major, minor)):
        return None
    return f"{torch.cuda.get_device_name(index)} has compute capability {major}.{minor}, and it needs {needed}"


def wrong_device(device: torch.device, needed: str, wrong_gpu: Callable[[int], str | None]) -> str | None:
    """Why kernels cannot run on tensors of this device, or None."""
    if device.type != "cuda":
        return f"the tensors are on {device}, and it needs {needed}"
    return wrong_gpu(torch.cuda.current_device() if device.index is None else device.index)
