"""What a policy search aims at, checked before anything slow starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wanfp4.errors import SettingsError
from wanfp4.processors.pipelines import check_seed
from wanfp4.quality.budget import check_budget
from wanfp4.quality.runs import Pair

DEFAULT_POLICIES = ("wan-fast", "fp8-direct")
BUDGETS = ("velocity", "velocity-mean")
SHARE = "share"


@dataclass(frozen=True)
class Target:
    """What a policy has to keep: `share` of attention in 4 bits at least, or one of `BUDGETS` at most."""

    kind: str
    limit: float

    @property
    def label(self) -> str:
        return f"{self.kind}-{self.limit:g}"

    @property
    def text(self) -> str:
        if self.kind == SHARE:
            return f"at least {100 * self.limit:g} % of attention in 4 bits"
        return f"{self.kind} at most {self.limit:g}"


def check_targets(budget: Mapping[str, float], shares: Sequence[float]) -> tuple[Target, ...]:
    """Targets in the order given, shares first. Raises SettingsError for none, and for what a search cannot aim at."""
    targets = []
    for share in shares:
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise SettingsError(f"a share of attention in 4 bits must be above 0 and at most 1, not {share!r}")
        targets.append(Target(SHARE, float(share)))
    for name, limit in check_budget(budget).items():
        if name not in BUDGETS:
            raise SettingsError(
                f"a search can aim at {' and '.join(BUDGETS)}, which follow from single layers and steps; limit {name} "
                "with wanfp4 drift --budget"
            )
        targets.append(Target(name, limit))
    if low := next((t for t in targets if t.limit <= 0), None):
        raise SettingsError(f"a budget must be above 0, not {low.limit:g} for {low.kind}: only BF16 has none")
    if not targets:
        raise SettingsError("a search needs a target: a budget, as velocity=0.3, or a share of attention in 4 bits")
    labels = [target.label for target in targets]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise SettingsError(f"target {twice} is given more than once; targets are told apart by six digits")
    return tuple(targets)


def check_held_out(
    prompts: Sequence[str], seeds: Sequence[int], verify_prompts: Sequence[str], verify_seeds: Sequence[int] | None
) -> tuple[list[Pair], list[Pair]]:
    """Prompt and seed of the runs that are searched on, and of those that verify: none is in both.

    Without prompts to verify on, they are the same; without seeds, as many as for the search, counted on from its
    largest. Raises SettingsError when a run would be in both, and for seeds and prompts
    that are none or come twice.
    """
    if verify_seeds is None:
        verify_seeds = [max(seeds) + 1 + i for i in range(len(seeds))]
    for seed in verify_seeds:
        check_seed(seed)
    if blank := [text for text in verify_prompts if not isinstance(text, str) or not text.strip()]:
        raise SettingsError(f"a prompt to verify with must be a text that is not empty, not {blank[0]!r}")
    if not verify_seeds or len(set(verify_seeds)) < len(verify_seeds):
        raise SettingsError(f"seeds to verify with must be one or more, each given once; found {list(verify_seeds)}")
    if twice := sorted({text for text in verify_prompts if list(verify_prompts).count(text) > 1}):
        raise SettingsError(f"prompt {twice[0]!r} to verify with is given more than once")
    search = [(p, s) for p in prompts for s in seeds]
    held_out = [(p, s) for p in (verify_prompts or prompts) for s in verify_seeds]
    if both := sorted(set(search) & set(held_out)):
        raise SettingsError(
            f"prompt {both[0][0]!r} with seed {both[0][1]} is searched on and to verify with: a policy would be judged "
            "by what it was made from; give other prompts or seeds to one of them"
        )
    return search, held_out


def candidates_for(targets: Sequence[Target]) -> tuple[str, ...]:
    """Candidates when none are named: for shares, what is not in 4 bits is best left in BF16."""
    return DEFAULT_POLICIES[:1] if all(target.kind == SHARE for target in targets) else DEFAULT_POLICIES


def check_counts(*, bins: int, rounds: int, checks: int) -> None:
    for name, value, low in (("bins", bins, 1), ("rounds", rounds, 1), ("checks", checks, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise SettingsError(f"{name} must be a whole number from {low}, not {value!r}")


def check_reachable(targets: Sequence[Target], shares: Sequence[float]) -> None:
    """Raise SettingsError for a share that the candidates cannot reach."""
    for target in targets:
        if target.kind == SHARE and target.limit > max(shares):
            raise SettingsError(
                f"{target.text} is out of reach: the candidates have at most {100 * max(shares):g} % in 4 bits"
            )
