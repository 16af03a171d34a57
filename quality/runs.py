"""Runs of a policy search: each policy once for each prompt and seed, remembered, so that a stopped job goes on.

What is measured is what docs/drift.md defines: the velocity of every step, teacher-forced, and, where asked for, that
and the last latent of a free run.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wanfp4.errors import BackendError, ModelError, OutputError
from wanfp4.policy import Policy
from wanfp4.processors.patch import Patch, patch
from wanfp4.processors.pipelines import Settings, generate_latents
from wanfp4.quality import metrics
from wanfp4.quality.aggregate import Json, number, numbers
from wanfp4.quality.record import Seen, Step, Trajectory, watching
from wanfp4.quality.report import steps_of
from wanfp4.receipt import Receipt

# Entries of the first velocity that tell whether a reference is the one of an earlier session, and how close they have
# to be: a model's own rounding makes a few thousandths, another model or prompt makes 1. The digest of weights, which a
# search compares first, knows neither the tokenizer nor, under sequential offloading, the values of weights.
_MARKS, _MARK_TOLERANCE = 16, 0.05

HELD_BYTES = 2**30

Pair = tuple[str, int]  # prompt and seed


def digest(policy: Policy, backend: str | None) -> str:
    """Names what is computed, whatever it is called."""
    content = {key: value for key, value in policy.to_dict().items() if key not in ("name", "description")}
    return hashlib.sha256(json.dumps([content, backend], sort_keys=True).encode()).hexdigest()[:16]


def velocities_of(entries: Sequence[Json]) -> Any:
    """[runs, steps] teacher-forced relative L2 of what `Runs.measure` gave."""
    return np.array([[float(v) for v in entry["velocity"]] for entry in entries])


class Runs:
    """Measures policies on a pipeline, and remembers every figure in `state`, plain JSON values.

    state   {"references": […], "measured": […]}, kept by the caller; what is in it is not measured again.
    saved   called after every new figure, if given.
    """

    def __init__(
        self,
        pipe: Any,
        settings: Settings,
        call: Mapping[str, Any],
        strict: bool,
        state: Json,
        bar: Any,
        saved: Callable[[], object] | None,
    ) -> None:
        self.pipe = pipe
        self.settings = settings
        self.call = call
        self.strict = strict
        self.state = state
        self.bar = bar
        self.saved = saved
        self._memo: dict[tuple[str, str, int], Json] = {
            (m["digest"], m["prompt"], m["seed"]): m for m in state["measured"]
        }
        self._met: set[tuple[str, str, int]] = set()
        self._references: dict[Pair, Trajectory] = {}
        self._made: set[Pair] = set()

    def steps(self, pair: Pair) -> list[Step]:
        """The steps of a run, without the model if an earlier session knew them."""
        if not self.state["steps"]:
            self.state["steps"] = steps_of(self.reference(pair).steps)
        return [Step(s["step"] - 1, float(s["sigma"]), float(s["timestep"]), s["expert"]) for s in self.state["steps"]]

    def expect(self, runs: int) -> None:
        """More denoising runs to come, for the bar."""
        self.bar.total = (self.bar.total or 0) + runs * self.settings.steps
        self.bar.refresh()

    def met(self, policy: Policy, backend: str | None, pair: Pair) -> bool:
        """Whether this session has asked for it: its steps are on the bar."""
        return (digest(policy, backend), *pair) in self._met

    def measure(self, policy: Policy, backend: str | None, pair: Pair, *, free: bool = False) -> Json:
        """What `policy` does for one prompt and seed, measured now unless it is known.

        `velocity` is the teacher-forced relative L2 of each step; `free` None or `velocity` and `latent` of a free run,
        the latter after the last step. Raises BackendError when the policy fell back to the pipeline's own attention:
        what was to be measured did not run.
        """
        key = (digest(policy, backend), *pair)
        entry = self._memo.get(key)
        if entry is not None and (entry["free"] is not None or not free):
            if key not in self._met:  # of an earlier session
                self._met.add(key)
                self.bar.update(self.settings.steps * (2 if free else 1))
            return entry
        self._met.add(key)
        reference = self.reference(pair)
        started = time.perf_counter()
        with patch(self.pipe, policy, backend, strict=self.strict) as handle:
            if entry is None:
                forced = self._run(policy.name, pair, reference, forced=True)[0]
                receipt = _checked(policy, handle)
                entry = self._keep(
                    key,
                    {
                        "digest": key[0],
                        "name": policy.name,
                        "prompt": pair[0],
                        "seed": pair[1],
                        "backend": sorted({e.ran.backend for e in receipt.entries}),
                        "emulated": any(e.ran.emulated for e in receipt.entries),
                        "receipt": receipt.summary(),
                        "velocity": numbers(forced),
                        "free": None,
                        "seconds": number(time.perf_counter() - started),
                    },
                )
            if free:
                velocity, latent = self._run(f"{policy.name}, free", pair, reference, forced=False)
                _checked(policy, handle)
                entry = self._keep(key, {**entry, "free": {"velocity": numbers(velocity), "latent": number(latent)}})
        return entry

    def _keep(self, key: tuple[str, str, int], entry: Json) -> Json:
        """Remember a run that has just finished: a run that is stopped after it loses only itself."""
        if key in self._memo:
            self.state["measured"].remove(self._memo[key])
        self._memo[key] = entry
        self.state["measured"].append(entry)
        if self.saved is not None:
            self.saved()
        return entry

    def velocities(self, policy: Policy, backend: str | None, pairs: list[Pair], *, free: bool = False) -> Any:
        """[pairs, steps] teacher-forced relative L2."""
        return velocities_of([self.measure(policy, backend, pair, free=free) for pair in pairs])

    def reference(self, pair: Pair) -> Trajectory:
        """The pipeline's own run. Those last used are held, up to a gigabyte, and one at least.

        Raises ModelError when it is not finite, OutputError when it is not that of an earlier session.
        """
        if pair in self._references:
            self._references[pair] = self._references.pop(pair)  # now the one last used
            return self._references[pair]
        if pair in self._made:
            self.expect(1)
        self._made.add(pair)
        trajectory = Trajectory()
        self.bar.set_description(f"{_short(pair)}: reference")

        def seen(step: Seen) -> None:
            trajectory.add(step)
            self.bar.update()

        with watching(self.pipe, seen):
            generate_latents(self.pipe, pair[0], self.settings, pair[1], **self.call)
        if not torch.isfinite(trajectory.seen[-1].next_sample).all():
            raise ModelError(
                f"the pipeline's own attention gives NaN or infinity for prompt {pair[0]!r}, seed {pair[1]}: there is "
                "nothing to compare with"
            )
        self._check(pair, trajectory)
        size = sum(_bytes(t) for t in (trajectory, *self._references.values()))
        while self._references and size > HELD_BYTES:
            size -= _bytes(self._references.pop(next(iter(self._references))))
        self._references[pair] = trajectory
        return trajectory

    def _check(self, pair: Pair, trajectory: Trajectory) -> None:
        velocity = trajectory.seen[0].velocity.flatten()
        at = np.linspace(0, len(velocity) - 1, _MARKS).round().astype(int)
        marks = numbers([float(x) for x in velocity[at]])
        known = next((r for r in self.state["references"] if (r["prompt"], r["seed"]) == pair), None)
        if known is None:
            self.state["references"].append({"prompt": pair[0], "seed": pair[1], "marks": marks})
            return
        now, then = (torch.tensor([float(m) for m in values]) for values in (marks, known["marks"]))
        if not metrics.rel_l2(now, then) <= _MARK_TOLERANCE:
            raise OutputError(
                f"the pipeline's own run of prompt {pair[0]!r}, seed {pair[1]} is not the one that the folder's "
                "figures were measured against: the model changed; choose another folder, or add --force"
            )

    def _run(self, what: str, pair: Pair, reference: Trajectory, *, forced: bool) -> tuple[list[float], float]:
        """Relative L2 of each step's velocity, and of the last latent."""
        velocity: list[float] = []
        last: list[Tensor] = []

        def seen(step: Seen) -> None:
            velocity.append(metrics.rel_l2(step.velocity, reference.seen[step.step.index].velocity))
            last[:] = [step.next_sample]
            self.bar.update()

        self.bar.set_description(f"{_short(pair)}: {what}")
        with watching(self.pipe, seen, forced=reference if forced else None):
            generate_latents(self.pipe, pair[0], self.settings, pair[1], **self.call)
        return velocity, metrics.rel_l2(last[0], reference.seen[-1].next_sample)


def _checked(policy: Policy, handle: Patch) -> Receipt:
    """What has run. Raises BackendError when some of it was the pipeline's own attention in the policy's place."""
    receipt = handle.receipt()
    if receipt.fallbacks:
        first = receipt.fallbacks[0]
        raise BackendError(
            f"policy {policy.name!r} fell back to the pipeline's own attention in {first.expert}: {first.ran.reason}; "
            "a search needs candidates that run here"
        )
    return receipt


def _bytes(trajectory: Trajectory) -> int:
    latents = {id(t): t for s in trajectory.seen for t in (s.sample, s.velocity, s.next_sample)}
    return sum(t.nbytes for t in latents.values())


def _short(pair: Pair) -> str:
    return f"{pair[0][:20]}{'…' if len(pair[0]) > 20 else ''}, seed {pair[1]}"
