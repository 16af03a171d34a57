"""What one patch decides while the model runs: where the run is, what each attention computes, what is recorded."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor

from wanfp4.errors import BackendError, FallbackError
from wanfp4.kernels import dispatch, ops
from wanfp4.policy import EXACT, Numerics, Policy, policies
from wanfp4.processors.wan import Wan4BitAttnProcessor
from wanfp4.receipt import PIPELINE, Ledger, Ran

log = logging.getLogger("wanfp4")

# Wan's transformers are trained on timestep = 1000·sigma; used where no scheduler says otherwise.
TRAIN_TIMESTEPS = 1000


@dataclass(frozen=True)
class Site:
    """One self-attention: its block list, its layer in the policy's counting, and of how many layers."""

    blocks: str
    layer: int
    num_layers: int


@dataclass(frozen=True)
class Call:
    """One self-attention call that has just run, as an observer sees it.

    expert, site  where: the component's name, and the place in it.
    step, sigma, branch  when, as `Clock.now` tells it.
    q, k, v, out  [B, S, H, D]. They belong to the model: an observer copies what it keeps, and writes to none.
    numerics      what was computed, the guard's changes in it.
    ran           the receipt's words for it.
    own           computes the pipeline's own attention of the same q, k, v; `out` itself where that is what ran.
    """

    expert: str
    site: Site
    step: int | None
    sigma: float | None
    branch: str
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    numerics: Numerics
    ran: Ran
    own: Callable[[], Tensor]


# What it returns goes on in the model in place of `out`; None leaves `out`.
Observer = Callable[[Call], Tensor | None]


class Clock:
    """Where a denoising run is: step, noise level, branch.

    WanPipeline tells all three in `cache_context`; other pipelines tell the branch there, or nothing. Then the noise
    level is that of the timestep the transformer was called with, or, where torch.compile hides that call, of the
    pipeline's current timestep. Steps that nobody numbers are counted by changes of the noise level, never by calls,
    because step caches skip calls; a level that rises starts a new run.
    """

    def __init__(self, pipe: Any = None) -> None:
        self._pipe = None if pipe is None else weakref.ref(pipe)
        self._context: tuple[str, int | None, float | None] | None = None
        self._timestep: Any = None  # of the forward that is running
        self._resolved: tuple[Any, float] | None = None
        self._last: float | None = None
        self._step = 0

    @contextmanager
    def context(self, branch: str, step: int | None, sigma: float | None) -> Iterator[None]:
        """For the duration of a `cache_context`."""
        before, self._context = self._context, (branch, step, sigma)
        try:
            yield
        finally:
            self._context = before

    def before_forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Forward pre-hook of a transformer; a compiled one must not see it."""
        if not torch.compiler.is_compiling():
            self._timestep = kwargs["timestep"] if "timestep" in kwargs else args[1] if len(args) > 1 else None
            self._resolved = None

    def after_forward(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook: a later compiled call must not find this call's timestep."""
        if not torch.compiler.is_compiling():
            self._timestep = None

    def now(self) -> tuple[int | None, float | None, str]:
        """Step (from 0), sigma in [0, 1] and branch; None, None and "" where unknown."""
        branch, step, sigma = self._context or ("", None, None)
        if sigma is None:
            pipe = None if self._pipe is None else self._pipe()
            timestep = self._timestep if self._timestep is not None else getattr(pipe, "_current_timestep", None)
            if timestep is not None:
                if self._resolved is None or self._resolved[0] is not timestep:  # reading it waits for the device
                    self._resolved = timestep, _sigma_of(timestep, getattr(pipe, "scheduler", None))
                sigma = self._resolved[1]
        if step is not None:
            self._step = step
        elif sigma is None:
            return None, None, branch
        elif self._last is not None and sigma != self._last:
            self._step = self._step + 1 if sigma < self._last else 0
        if sigma is not None:
            self._last = sigma
        return self._step, sigma, branch


def _sigma_of(timestep: Any, scheduler: Any) -> float:
    """Noise level of a timestep: a number, or a tensor whose largest counts (Wan2.2 5B gives known tokens 0).

    A scheduler that holds the timestep knows the level exactly (timesteps may be rounded to integers); otherwise it is
    timestep / num_train_timesteps.
    """
    value = float(timestep.max()) if isinstance(timestep, Tensor) else float(timestep)
    timesteps, sigmas = getattr(scheduler, "timesteps", None), getattr(scheduler, "sigmas", None)
    if isinstance(timesteps, Tensor) and isinstance(sigmas, Tensor) and timesteps.ndim == sigmas.ndim == 1:
        found = (timesteps.detach().cpu().double() == value).nonzero()
        if len(found) and int(found[0]) < len(sigmas) and 0 <= float(sigmas[int(found[0])]) <= 1:
            return float(sigmas[int(found[0])])
    total = getattr(getattr(scheduler, "config", None), "num_train_timesteps", None) or TRAIN_TIMESTEPS
    return min(max(value / total, 0.0), 1.0)


class Session:
    """One patch: decides and records every attention call of it. `wanfp4.kernels.ops` calls `run`.

    experts  names of the patched components, by expert number.
    sites    of each expert; `processors` has the processor of each site, set when they are made.
    """

    def __init__(
        self,
        policy: Policy,
        backend: str | None,
        strict: bool,
        clock: Clock,
        experts: list[str],
        sites: list[list[Site]],
    ) -> None:
        self.policy = policy
        self.backend = backend
        self.strict = strict
        self.clock = clock
        self.experts = experts
        self.sites = sites
        self.processors: list[list[Wan4BitAttnProcessor]] = []
        self.ledger = Ledger()
        self.active = True
        self.observer: Observer | None = None
        self.number = ops.register(self)
        rules = [rule.numerics for rule in policy.rules]
        # A policy that rounds nothing has one use for a named backend: to run exact attention there (drift's noise
        # floor). In any other policy "bf16" means the pipeline's own attention, whichever backend runs the rest.
        self._exact_backend = None if policy.rounding else backend
        names = {preset.numerics: name for name, preset in reversed(policies().items())}
        self._names = {n: names.get(n, f"{policy.name}, rule") for n in rules} | {policy.numerics: policy.name}
        self._said: set[str] = set()

    def run(self, q: Tensor, k: Tensor, v: Tensor, expert: int, site: int) -> Tensor:
        """One attention call, q, k, v [B, S, H, 128].

        Raises BackendError when the named backend cannot run it, FallbackError when the session is strict and the
        pipeline's own attention would run where the policy asks for 4-bit attention.
        """
        processor = self.processors[expert][site]
        if not self.active:  # restored, but somebody still calls the processor: a wrapper around it, say
            return _pipeline_attention(q, k, v, processor)
        place = self.sites[expert][site]
        step, sigma, branch = self.clock.now()
        numerics, reason, fallback = self.policy.resolve(
            layer=place.layer,
            num_layers=place.num_layers,
            sigma=sigma,
            expert=self.experts[expert],
            tokens=q.shape[1],
        )
        backend = self.backend
        if numerics.is_exact:
            backend = self._exact_backend
        elif backend is None:
            try:
                dispatch.select(numerics, q.device)
            except BackendError as error:
                fallback, reason = True, str(error)
        notes: Mapping[str, int] = {}
        computed = EXACT
        if fallback:
            where = f"{self.experts[expert]} {place.blocks} layer {place.layer}"
            if self.strict:
                raise FallbackError(f"strict: {where} would run the pipeline's own attention: {reason}")
            self._say(
                f"fallback: {reason}",
                logging.WARNING,
                "%s falls back to the pipeline's own attention: %s",
                where,
                reason,
            )
        if fallback or (numerics.is_exact and backend is None):
            out = _pipeline_attention(q, k, v, processor)
            own = processor._attention_backend
            name = PIPELINE if own is None else f"{PIPELINE}/{getattr(own, 'value', own)}"
            ran = Ran("exact", EXACT.label, name, reason=reason, fallback=fallback)
        else:
            outcome = dispatch.run(q, k, v, numerics, guard=self.policy.guard, backend=backend)
            out, computed = outcome.out, numerics
            if self.observer is not None and self.policy.guard is not None and _guarded(outcome):
                computed = self.policy.guard.apply(numerics)
            emulated = not numerics.is_exact and not _is_native(outcome.backend)
            notes = {name: count for name, count in outcome.notes.items() if name != "guarded"}
            ran = Ran(
                self._names.get(numerics, self.policy.name),
                numerics.label,
                outcome.backend,
                emulated=emulated,
                guarded=bool(outcome.notes.get("guarded")),
                reason=reason,
            )
            if emulated:
                self._say(
                    f"emulated: {outcome.backend}",
                    logging.INFO if self.backend else logging.WARNING,
                    "backend %r emulates %s: it shows quality and brings no speed",
                    outcome.backend,
                    ran.name,
                )
        self.ledger.add(
            ran,
            expert=self.experts[expert],
            blocks=place.blocks,
            layer=place.layer,
            step=step,
            branch=branch,
            sigma=sigma,
            notes=notes,
        )
        if self.observer is None:
            return out

        def pipelines_own() -> Tensor:
            return out if ran.backend.split("/")[0] == PIPELINE else _pipeline_attention(q, k, v, processor)

        seen = Call(self.experts[expert], place, step, sigma, branch, q, k, v, out, computed, ran, pipelines_own)
        instead = self.observer(seen)
        return out if instead is None else instead

    def _say(self, key: str, level: int, message: str, *args: object) -> None:
        if key not in self._said:
            self._said.add(key)
            log.log(level, message, *args)


def _pipeline_attention(q: Tensor, k: Tensor, v: Tensor, processor: Wan4BitAttnProcessor) -> Tensor:
    """The call that diffusers' own Wan processor makes."""
    out: Tensor = dispatch_attention_fn(
        q,
        k,
        v,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        backend=processor._attention_backend,
        parallel_config=None,
    )
    return out


def _guarded(outcome: dispatch.Outcome) -> bool:
    """Whether the guard changed this call's numerics; asking a backend that decides on the device waits for it."""
    return bool(outcome.notes.get("guarded")) or (outcome.flag is not None and bool(outcome.flag.item()))


def _is_native(name: str) -> bool:
    return any(backend.native for backend in dispatch.backends() if backend.name == name)
