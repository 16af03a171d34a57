"""What the backends that need a GPU say where there is none."""

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
