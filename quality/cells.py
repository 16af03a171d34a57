"""Cells of a policy search: groups of layers × ranges of the noise level, and the policies made of them.

An assignment is an integer array [bins, groups]: 0 is the pipeline's own attention, c > 0 the candidate c − 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wanfp4.errors import PolicyError, SettingsError
from wanfp4.policy import EXACT, Numerics, Policy, Rule
from wanfp4.quality.record import Step

Floats = npt.NDArray[np.float64]
Assignment = npt.NDArray[np.int64]

MOST_GROUPS = 12


@dataclass(frozen=True)
class Bin:
    """Neighbouring steps of one expert, and the range of noise levels they stand for.

    The ranges of an expert's bins cover [0, 1]; edges lie midway between steps, so that other numbers of steps fall
    into them. `expert` is None where the model has one.
    """

    expert: str | None
    steps: tuple[int, ...]
    sigma: tuple[float, float]


def bins_of(steps: Sequence[Step], count: int) -> tuple[Bin, ...]:
    """About `count` bins of equal numbers of steps, none across a change of expert; at least one for each expert."""
    names = list(dict.fromkeys(step.expert for step in steps))
    found = []
    for name in names:
        own = [step for step in steps if step.expert == name]
        parts = np.array_split(np.arange(len(own)), min(len(own), max(1, round(count * len(own) / len(steps)))))
        edges = [1.0]
        edges += [round((own[p[0] - 1].sigma + own[p[0]].sigma) / 2, 6) for p in parts[1:]]
        edges.append(0.0)
        for i, part in enumerate(parts):
            inside = tuple(own[j].index for j in part)
            found.append(Bin(name if len(names) > 1 else None, inside, (edges[i + 1], edges[i])))
    return tuple(found)


def groups_of(layers: int, count: int | None) -> tuple[tuple[int, ...], ...]:
    """`count` groups of neighbouring layers, as equal as can be; by default each layer, or 12 groups if there are more.

    Raises SettingsError for a count that is not from 1 to the number of layers.
    """
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= layers):
        raise SettingsError(f"groups must be a whole number from 1 to {layers}, the model's layers, not {count!r}")
    parts = np.array_split(np.arange(layers), count or min(layers, MOST_GROUPS))
    return tuple(tuple(int(layer) for layer in part) for part in parts)


@dataclass(frozen=True)
class Grid:
    """All cells. Candidates are policies without rules, `costs` their time over BF16's, `shares` what is in 4 bits."""

    bins: tuple[Bin, ...]
    groups: tuple[tuple[int, ...], ...]
    candidates: tuple[Policy, ...]
    costs: tuple[float, ...]
    shares: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.bins), len(self.groups)

    def weights(self) -> Floats:
        """[bins, groups]: share of a run's self-attention in each cell. All layers and steps cost the same in BF16."""
        counts = np.outer([len(b.steps) for b in self.bins], [len(g) for g in self.groups]).astype(np.float64)
        shares: Floats = counts / counts.sum()
        return shares

    def time(self, chosen: Assignment) -> float:
        """Time of all self-attention over BF16's."""
        return float((self.weights() * np.array([1.0, *self.costs])[chosen]).sum())

    def share(self, chosen: Assignment) -> float:
        """Share of all self-attention's multiply-adds in 4 bits."""
        return float((self.weights() * np.array([0.0, *self.shares])[chosen]).sum())

    def uniform(self, choice: int) -> Assignment:
        return np.full(self.shape, choice, np.int64)

    def label(self, choice: int) -> str:
        return self.candidates[choice - 1].name if choice else "bf16"

    def policy(self, chosen: Assignment, name: str, description: str = "") -> Policy:
        """The policy that runs `chosen`: its most frequent choice everywhere, and rules for the other cells."""
        totals = [float(self.weights()[chosen == c].sum()) for c in range(len(self.candidates) + 1)]
        base = int(np.argmax(totals))
        rules: list[Rule] = []
        for choice in range(len(self.candidates) + 1):
            if choice == base:
                continue
            run: list[Bin] = []
            layers: tuple[int, ...] = ()
            for i, one in enumerate(self.bins):
                here = tuple(n for g, group in enumerate(self.groups) for n in group if chosen[i, g] == choice)
                if run and (here != layers or run[-1].expert != one.expert):
                    rules += self._rule(choice, layers, run)
                    run = []
                run, layers = [*run, one], here
            rules += self._rule(choice, layers, run)
        used = [p for c, p in enumerate(self.candidates, 1) if (chosen == c).any()]
        guard = next((p.guard for p in used if p.guard is not None and p.numerics.p == "mxfp4-direct"), None)
        tokens = self.candidates[0].min_tokens
        return Policy(name, self._numerics(base), tuple(rules), guard, tokens, description)

    def _rule(self, choice: int, layers: tuple[int, ...], run: Sequence[Bin]) -> list[Rule]:
        if not layers:
            return []
        sigma = (run[-1].sigma[0], run[0].sigma[1])
        everywhere = len(layers) == sum(map(len, self.groups))
        return [
            Rule(
                self._numerics(choice),
                None if everywhere else layers,
                None if sigma == (0.0, 1.0) else sigma,
                run[0].expert,
            )
        ]

    def _numerics(self, choice: int) -> Numerics:
        return self.candidates[choice - 1].numerics if choice else EXACT


def check_candidates(candidates: Sequence[Policy]) -> None:
    """Raise PolicyError for candidates that one policy cannot hold side by side."""
    for policy in candidates:
        if policy.rules:
            raise PolicyError(
                f"policy {policy.name!r} has rules of its own; a search makes them, so give plain policies"
            )
        if policy.numerics.is_exact:
            raise PolicyError(f"policy {policy.name!r} rounds nothing; the pipeline's own attention is always a choice")
    direct = [policy for policy in candidates if policy.numerics.p == "mxfp4-direct"]
    for one, other, field in (
        *((direct[0], policy, "guard") for policy in direct[1:]),
        *((candidates[0], policy, "min_tokens") for policy in candidates[1:]),
    ):
        if getattr(one, field) != getattr(other, field):
            raise PolicyError(f"{one.name!r} and {other.name!r} have different {field}, and a policy has one for all")


def check_length(candidates: Sequence[Policy], tokens: int) -> None:
    """Raise SettingsError for a candidate that keeps the pipeline's own attention at `tokens`, a clip's length: every
    one of its figures would be BF16's."""
    for policy in candidates:
        if policy.min_tokens > tokens:
            raise SettingsError(
                f"policy {policy.name!r} has min_tokens={policy.min_tokens} and these settings make {tokens} attention "
                "tokens, so it would run BF16 in every cell; take a larger or longer clip, or lower its min_tokens"
            )


class Sensitivities:
    """Teacher-forced velocity errors of single columns: squares [choices, groups, runs, steps], choice 0 all zero."""

    def __init__(self, grid: Grid, squares: Floats) -> None:
        self.grid = grid
        self.squares = squares
        self._bin = np.zeros(squares.shape[3], np.int64)  # of each step
        for i, one in enumerate(grid.bins):
            self._bin[list(one.steps)] = i

    def predict(self, chosen: Assignment) -> Floats:
        """[runs, steps] relative L2 of the velocity: the root of the cells' summed squares."""
        _, groups, _, steps = self.squares.shape
        # [groups, steps, runs]; one expression, as the knapsack asks for thousands of these.
        cells = self.squares[chosen[self._bin].T, np.arange(groups)[:, None], :, np.arange(steps)]
        root: Floats = np.sqrt(cells.sum(axis=0).T)
        return root

    def damage(self, weights: Floats | None = None, *, worst: bool = False) -> Floats:
        """[bins, groups, choices]: squares, mean over runs; summed over a bin's steps, or its `worst` step's.

        weights  [runs, steps], 1 everywhere if None.
        """
        squares = self.squares if weights is None else self.squares * weights
        mean = squares.mean(axis=2)  # [choices, groups, steps]
        columns = [
            mean[..., list(b.steps)].max(axis=-1) if worst else mean[..., list(b.steps)].sum(axis=-1)
            for b in self.grid.bins
        ]
        found: Floats = np.transpose(np.array(columns), (0, 2, 1))
        return found


def finite(values: Floats) -> bool:
    return bool(np.isfinite(values).all())


def metric(values: Floats, name: str) -> float:
    """A figure of [runs, steps] relative L2, as `wanfp4.quality.budget.METRICS` defines it; NaN stays NaN.

    velocity       the worst step's median over runs.
    velocity-mean  the mean over a run's steps, median over runs.
    """
    if not finite(values):
        return math.nan
    if name == "velocity":
        return float(np.median(values, axis=0).max())
    return float(np.median(values.mean(axis=1)))
