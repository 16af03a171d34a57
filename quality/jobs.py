"""What every measuring job on a pipeline needs: its header, one progress bar, log lines that come once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import torch
from tqdm.contrib.logging import logging_redirect_tqdm

from wanfp4.errors import ModelError
from wanfp4.processors.environment import machine, versions
from wanfp4.processors.model_info import ModelInfo
from wanfp4.processors.wan import Wan4BitAttnProcessor
from wanfp4.quality.aggregate import Json, number
from wanfp4.quality.plan import Plan
from wanfp4.receipt import PIPELINE

log = logging.getLogger("wanfp4")


def attention_of(pipe: Any, info: ModelInfo) -> str:
    """The pipeline's own attention, as receipts name it. Raises ModelError when the pipeline is patched already."""
    names = set()
    for expert in info.experts:
        transformer = getattr(pipe, expert.name, None)
        for module in transformer.modules() if transformer is not None else ():
            processor = getattr(module, "processor", None)
            if isinstance(processor, Wan4BitAttnProcessor):
                raise ModelError(
                    "the pipeline is patched, and its own attention is compared with: restore() the patch first"
                )
            own = getattr(processor, "_attention_backend", None)
            names.add(PIPELINE if own is None else f"{PIPELINE}/{getattr(own, 'value', own)}")
    return ", ".join(sorted(names))


@contextlib.contextmanager
def quiet(pipe: Any) -> Iterator[None]:
    """Without the pipeline's own progress bar, which the job's bar replaces."""
    before = vars(pipe).get("_progress_bar_config")
    pipe.set_progress_bar_config(**{**(before or {}), "disable": True})
    try:
        yield
    finally:
        if before is None:
            del pipe._progress_bar_config
        else:
            pipe._progress_bar_config = before


@contextlib.contextmanager
def log_above_bar() -> Iterator[None]:
    """wanfp4's log lines on stderr above the bar, unless the caller's own logging has them: each would come twice."""
    if log.hasHandlers():
        yield
    else:
        with logging_redirect_tqdm([log]):
            yield


@contextlib.contextmanager
def said_once() -> Iterator[None]:
    """Every patch of a policy would log the same remarks again."""
    said: set[str] = set()

    def new(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        fresh = message not in said
        said.add(message)
        return fresh

    log.addFilter(new)
    try:
        yield
    finally:
        log.removeFilter(new)


def header(
    kind: str,
    schema: int,
    pipe: Any,
    info: ModelInfo,
    plan: Plan,
    backend: str | None,
    strict: bool,
    call: Mapping[str, Any],
    model: str | None,
    command: str | None,
) -> Json:
    """Everything in a report that is known before the first run."""
    described = json.loads(json.dumps(info.to_dict()))  # its tuples become the lists that a file gives back
    if model is not None:
        described["model"] = model
    transformer = next(t for t in (getattr(pipe, e.name, None) for e in info.experts) if t is not None)
    dtype = str(transformer.dtype).removeprefix("torch.")
    return {
        "kind": kind,
        "schema": schema,
        "complete": False,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "versions": versions(),
        "machine": machine(torch.device(pipe._execution_device)),
        "model": {**described, "dtype": dtype, "tokens": info.tokens(plan.settings)},
        "scheduler": type(pipe.scheduler).__name__,
        "settings": plan.settings.to_dict(),
        "prompts": list(plan.prompts),
        "seeds": list(plan.seeds),
        "backend": backend,
        "strict": strict,
        "call": {name: _plain(value) for name, value in call.items()},
        "steps": [],
    }


def essence(key: str, value: Any) -> Any:
    """What of a header's entry has to agree for a job to go on in its folder: not the threads of a machine, and of a
    model neither its name nor what its folder says of defaults, as the weights' digest says which it is and `settings`
    what was used."""
    left_out = {"machine": ("threads",), "model": ("model", "defaults", "source")}.get(key, ())
    return {k: v for k, v in value.items() if k not in left_out} if isinstance(value, dict) else value


def weights_digest(pipe: Any) -> str:
    """SHA-256 over all weights as they run: a model trained anew under the same name is another one."""
    digest = hashlib.sha256()
    for name, part in sorted(pipe.components.items()):
        if isinstance(part, torch.nn.Module):
            for key, tensor in part.state_dict().items():
                digest.update(f"{name}.{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
                if not tensor.is_meta:  # sequential offloading keeps the values elsewhere
                    plain = tensor.detach().cpu().contiguous().reshape(-1)
                    digest.update(plain.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """A JSON value for an argument: itself, or what Python prints of it."""
    if isinstance(value, float):
        return number(value)
    return value if isinstance(value, str | int | None) else repr(value)
