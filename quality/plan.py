"""What a measuring job will do, checked as a whole before anything slow starts."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wanfp4.errors import SettingsError
from wanfp4.kernels import dispatch
from wanfp4.policy import Policy, get_policy
from wanfp4.processors.pipelines import ModelInfo, Settings, check_seed
from wanfp4.quality.budget import check_budget

# Names of a report's own rows.
REFERENCE, FLOOR = "reference", "noise floor"

DEFAULT_SEEDS = (0, 1)

# Arguments of a pipeline's call that a job sets, with those of `wanfp4.drift` that they follow from.
_OWN_ARGUMENTS = {
    "prompt": "prompts",
    "prompt_embeds": "prompts",
    "negative_prompt": "settings.negative",
    "negative_prompt_embeds": "settings.negative",
    "negative": "settings.negative",
    "height": "settings.height",
    "width": "settings.width",
    "num_frames": "settings.frames",
    "num_inference_steps": "steps",
    "guidance_scale": "settings.guidance",
    "guidance_scale_2": "settings.guidance_2",
    "generator": "seeds",
    "latents": "seeds",
    "seed": "seeds",
    "num_videos_per_prompt": "prompts and seeds",
    "output_type": None,
    "return_dict": None,
}


@dataclass(frozen=True)
class Plan:
    """A checked job; `make_plan` makes them."""

    policies: tuple[Policy, ...]
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: Settings
    budget: dict[str, float]

    @property
    def runs(self) -> int:
        """Denoising runs: the reference once, the noise floor and every policy twice, for each prompt and seed."""
        return len(self.prompts) * len(self.seeds) * (3 + 2 * len(self.policies))


def make_plan(
    info: ModelInfo,
    policies: Sequence[str | Path | Policy] | str | Path | Policy,
    prompts: Sequence[str] | str,
    seeds: Sequence[int] | int,
    steps: int | None = None,
    *,
    settings: Settings | None = None,
    budget: Mapping[str, float] | None = None,
) -> Plan:
    """Arguments as those of `wanfp4.drift`. Raises ModelError, PolicyError and SettingsError as it says."""
    info.check_text_to_video()
    info.check_attention()
    chosen = settings or info.settings()
    if steps is not None:
        chosen = dataclasses.replace(chosen, steps=steps)
    info.check(chosen)
    return Plan(
        _policies(_several("policies", policies, (str, Path, Policy))),
        _prompts(_several("prompts", prompts, str), info.prompt),
        _seeds(_several("seeds", seeds, int)),
        chosen,
        check_budget(budget or {}),
    )


def check_backend(policies: Sequence[Policy], backend: str | None, device: torch.device) -> None:
    """Raise BackendError now for what `wanfp4.patch` would raise once the weights are loaded."""
    for policy in policies if backend is not None else ():
        for numerics in policy.rounding or (policy.numerics,):
            dispatch.select(numerics, device, backend)


def check_call(pipe: Any, call: Iterable[str]) -> None:
    """Raise SettingsError for arguments of the pipeline's call that the job sets itself, or that the call has not."""
    known = inspect.signature(type(pipe).__call__).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for name in call:
        if name in _OWN_ARGUMENTS:
            instead = _OWN_ARGUMENTS[name]
            raise SettingsError(f"the job sets {name!r} itself: {f'give {instead}' if instead else 'leave it out'}")
        if name not in known and not anything:
            raise SettingsError(f"neither the job nor the call of {type(pipe).__name__} has an argument {name!r}")


def _several(name: str, given: Any, one: type | tuple[type, ...]) -> list[Any]:
    """The values given, or the one value; SettingsError for what is neither."""
    if isinstance(given, one):
        return [given]
    try:
        return list(given)
    except TypeError:
        raise SettingsError(f"{name} must be one or a list of them, not {given!r}") from None


def _policies(given: Sequence[str | Path | Policy]) -> tuple[Policy, ...]:
    chosen = tuple(get_policy(policy) for policy in given)
    if not chosen:
        raise SettingsError("at least one policy is needed, to compare with the pipeline's own attention")
    names = [policy.name for policy in chosen]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SettingsError(f"policies are told apart by their names, and {', '.join(twice)} is given more than once")
    if taken := sorted({REFERENCE, FLOOR} & set(names)):
        raise SettingsError(f"{taken[0]!r} is the name of a row that every report has; give the policy another one")
    return chosen


def _prompts(given: Sequence[str], example: str | None) -> tuple[str, ...]:
    if not given and example is not None:
        return (example,)
    if not given:
        raise SettingsError("at least one prompt is needed")
    for prompt in given:
        if not isinstance(prompt, str) or not prompt.strip():
            raise SettingsError(f"a prompt must be a text that is not empty, not {prompt!r}")
    if twice := sorted({prompt for prompt in given if list(given).count(prompt) > 1}):
        raise SettingsError(f"prompt {twice[0]!r} is given more than once")
    return tuple(given)


def _seeds(given: Sequence[int]) -> tuple[int, ...]:
    if not given:
        raise SettingsError("at least one seed is needed")
    for seed in given:
        check_seed(seed)
    if twice := sorted({seed for seed in given if list(given).count(seed) > 1}):
        raise SettingsError(f"seed {twice[0]} is given more than once")
    return tuple(given)
