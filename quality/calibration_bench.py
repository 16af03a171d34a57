"""Recorded attention calls to try numerics on: the error of each call, by the torch reference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wanfp4.kernels import reference
from wanfp4.policy import EXACT, Classifier, Guard, Numerics
from wanfp4.quality.metrics import rel_l2
from wanfp4.quality.recording import Recorded


@dataclass(frozen=True)
class Choice:
    """What a fit chooses: numerics, and the guard beside them."""

    numerics: Numerics
    guard: Guard | None


@dataclass(frozen=True)
class Errors:
    """Relative L2 of calls [calls], with the run that each belongs to; runs and layers in order of appearance."""

    values: tuple[float, ...]
    calls: tuple[Recorded, ...]

    @property
    def mean(self) -> float:
        """What a fit makes small: the mean over calls. Infinity when one is NaN, which must never win."""
        total = math.fsum(self.values) / len(self.values) if self.values else math.nan
        return math.inf if math.isnan(total) else total

    @property
    def prompts(self) -> list[int]:
        """The prompt of each run."""
        return [prompt for prompt, _ in self._runs()]

    def per_run(self, layer: tuple[str, int] | None = None) -> list[float]:
        """Mean over each run's calls, of one (expert, layer) if given; NaN for a run that has none of it."""
        groups: dict[tuple[int, int], list[float]] = {run: [] for run in self._runs()}
        for call, value in zip(self.calls, self.values, strict=True):
            if layer in (None, (call.expert, call.layer)):
                groups[call.prompt, call.seed].append(value)
        return [math.fsum(group) / len(group) if group else math.nan for group in groups.values()]

    def layers(self) -> list[tuple[str, int]]:
        return sorted({(call.expert, call.layer) for call in self.calls})

    def _runs(self) -> list[tuple[int, int]]:
        return list(dict.fromkeys((call.prompt, call.seed) for call in self.calls))


class Bench:
    """Recorded calls to try numerics on.

    Memory: for two rounding schemes each, the logits of the recorded rows and V in float32: about three times what the
    recorded calls take.
    """

    def __init__(self, calls: Sequence[Recorded]) -> None:
        self.calls = tuple(calls)
        self._exact = [_reference(call, EXACT) for call in calls]
        self._known: dict[tuple[int, Numerics], float] = {}
        self._prepared: dict[Numerics, dict[int, _Prepared]] = {}

    def errors(self, choice: Choice) -> Errors:
        """The error of every call, guarded where the guard would."""
        return Errors(tuple(self._error(i, _numerics(call, choice)) for i, call in enumerate(self.calls)), self.calls)

    def _error(self, i: int, numerics: Numerics) -> float:
        if (i, numerics) not in self._known:
            out = self._prepare(i, numerics).output(numerics)
            self._known[i, numerics] = rel_l2(out, self._exact[i])
        return self._known[i, numerics]

    def _prepare(self, i: int, numerics: Numerics) -> _Prepared:
        """What does not depend on the classifier, of the last two schemes: a guard makes two of one."""
        scheme = dataclasses.replace(numerics, classifier=Classifier())
        kept = self._prepared.pop(scheme, {})
        self._prepared[scheme] = kept
        while len(self._prepared) > 2:
            del self._prepared[next(iter(self._prepared))]
        if i not in kept:
            kept[i] = _Prepared(self.calls[i], numerics)
        return kept[i]


class _Prepared:
    """One call up to its logits, and nothing that they replace: Q and K are not kept.

    `output` is `reference.attention` from there on, for other classifiers.
    """

    @torch.no_grad()
    def __init__(self, call: Recorded, numerics: Numerics) -> None:
        q, k, v = _operands(call)
        scale = 1 / math.sqrt(q.shape[-1])
        operands = reference.prepare(q, k, v, numerics, scale)
        self.v, self.v_scale, self.v_mean = operands.v, operands.v_scale, operands.v_mean
        self.z = reference.logits(operands, slice(0, 1), slice(0, q.shape[1]))
        self.m = reference.row_reference(self.z, numerics, scale)

    @torch.no_grad()
    def output(self, numerics: Numerics) -> Tensor:
        """[1, rows, 128] float32."""
        weights = reference.probabilities(self.z, self.m, numerics)
        out = weights.weight @ self.v * self.v_scale / weights.total.unsqueeze(-1)
        return out if self.v_mean is None else out + self.v_mean


def _operands(call: Recorded) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (t.float()[None, :, None] for t in (call.q, call.k, call.v))
    return q, k, v


@torch.no_grad()
def _reference(call: Recorded, numerics: Numerics) -> Tensor:
    """[1, rows, 128] float32."""
    q, k, v = _operands(call)
    return reference.attention(q, k, v, numerics, scale=1 / math.sqrt(q.shape[-1])).out[:, :, 0]


def _numerics(call: Recorded, choice: Choice) -> Numerics:
    guarded = choice.guard is not None and call.largest > choice.guard.logit_limit
    return choice.guard.apply(choice.numerics) if guarded and choice.guard is not None else choice.numerics
