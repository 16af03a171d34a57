"""Errors that wanfp4 raises on purpose. Each message says what was found and what is needed.

Wanfp4Error
├── PolicyError            a policy, field or value that does not exist or contradicts itself
├── BackendError           no backend, or not the named one, can run what was asked
│   └── FallbackError      `strict=True` and something would have run in BF16 instead
├── UnsupportedInputError  tensors or a call that 4-bit attention cannot take (mask, gradients, head_dim, …)
├── ModelError             a model folder or pipeline that is missing or is not a Wan pipeline
├── SettingsError          sizes, frame counts and the like that the model cannot make
└── OutputError            a file or folder that cannot be written
"""


class Wanfp4Error(Exception):
    """Base of every error raised on purpose."""


class PolicyError(Wanfp4Error, ValueError):
    """A policy, field or value that does not exist or contradicts itself."""


class BackendError(Wanfp4Error, RuntimeError):
    """No backend, or not the named one, can run what was asked."""


class FallbackError(BackendError):
    """`strict=True`, and something would have run in BF16 instead."""


class UnsupportedInputError(Wanfp4Error, ValueError):
    """Tensors or a call that 4-bit attention cannot take."""


class ModelError(Wanfp4Error, ValueError):
    """A model folder or pipeline that is missing or is not a Wan pipeline."""


class SettingsError(Wanfp4Error, ValueError):
    """Sizes, frame counts and the like that the model cannot make."""


class OutputError(Wanfp4Error, OSError):
    """A file or folder that cannot be written."""


def brief(error: BaseException) -> str:
    """An error of another library as one line: its class and first sentence. A line that ends in ":" leads the next."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    end = next((i for i, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    return ": ".join([type(error).__name__, " ".join(lines[: end + 1])]) if lines else type(error).__name__
