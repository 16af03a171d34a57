"""wanfp4: 4-bit attention for Wan video diffusion, and what it costs in quality.

    handle = wanfp4.patch(pipe, policy="wan-fast")      a diffusers Wan pipeline, in one line
    out = wanfp4.attention(q, k, v, policy="wan-fast")  [B, S, H, 128]
    report = wanfp4.drift(pipe, policies=["wan-fast"], prompts=["a red circle moving right"])

`import wanfp4` is cheap: torch and diffusers load when something needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from wanfp4.errors import Wanfp4Error
from wanfp4.policy import Classifier, Guard, Numerics, Policy, Rule, policies

if TYPE_CHECKING:
    from wanfp4.kernels.dispatch import attention
    from wanfp4.processors.patch import patch
    from wanfp4.quality.drift import drift
    from wanfp4.quality.maps import attention_map
    from wanfp4.quality.search import search

__version__ = "0.1.0"
__all__ = [
    "Classifier",
    "Guard",
    "Numerics",
    "Policy",
    "Rule",
    "Wanfp4Error",
    "attention",
    "attention_map",
    "drift",
    "patch",
    "policies",
    "search",
]

_LAZY = {
    "attention": "wanfp4.kernels.dispatch",
    "patch": "wanfp4.processors.patch",
    "drift": "wanfp4.quality.drift",
    "attention_map": "wanfp4.quality.maps",
    "search": "wanfp4.quality.search",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'wanfp4' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))
