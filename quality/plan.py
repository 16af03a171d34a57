"""What a drift job will do, checked as a whole before anything slow starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from wanfp4.errors import SettingsError
from wanfp4.kernels import dispatch
from wanfp4.policy import Policy, get_policy
from wanfp4.processors.pipelines import ModelInfo, Settings, check_seed
from wanfp4.quality.budget import check_budget

# Names of a report's own rows.
REFERENCE, FLOOR = "reference", "noise floor"


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
        _policies([policies] if isinstance(policies, (str, Path, Policy)) else policies),
        _prompts([prompts] if isinstance(prompts, str) else prompts, info.prompt),
        _seeds([seeds] if isinstance(seeds, int) else seeds),
        chosen,
        check_budget(budget or {}),
    )


def check_backend(policies: Sequence[Policy], backend: str | None, device: torch.device) -> None:
    """Raise BackendError now for what `wanfp4.patch` would raise once the weights are loaded."""
    for policy in policies if backend is not None else ():
        wanted = [n for n in (policy.numerics, *(rule.numerics for rule in policy.rules)) if not n.is_exact]
        for numerics in wanted or [policy.numerics]:
            dispatch.select(numerics, device, backend)


def _policies(given: Sequence[str | Path | Policy]) -> tuple[Policy, ...]:
    chosen = tuple(get_policy(policy) for policy in given)
    if not chosen:
        raise SettingsError("drift needs at least one policy to compare with the pipeline's own attention")
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
        raise SettingsError("drift needs at least one prompt")
    for prompt in given:
        if not isinstance(prompt, str) or not prompt.strip():
            raise SettingsError(f"a prompt must be a text that is not empty, not {prompt!r}")
    if twice := sorted({prompt for prompt in given if list(given).count(prompt) > 1}):
        raise SettingsError(f"prompt {twice[0]!r} is given more than once")
    return tuple(given)


def _seeds(given: Sequence[int]) -> tuple[int, ...]:
    if not given:
        raise SettingsError("drift needs at least one seed")
    for seed in given:
        check_seed(seed)
    if twice := sorted({seed for seed in given if list(given).count(seed) > 1}):
        raise SettingsError(f"seed {twice[0]} is given more than once")
    return tuple(given)
