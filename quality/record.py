"""What a pipeline's denoising loop does, step by step, seen at the one place where everything meets: scheduler.step.

Every Wan pipeline hands `scheduler.step` the guided velocity v of a step, its timestep and the latent x_t that the
model saw, and takes the next latent back. `watching` stands in between on the scheduler instance, for the length of a
`with` block; nothing of the pipeline is changed for good, and no class or module of diffusers is touched.

Teacher forcing is the same seam used the other way: the scheduler's answer is replaced by the reference's own next
latent, so every step of the model under test sees exactly what the reference saw. A multistep scheduler (UniPC) keeps
velocities of earlier steps in its state, and under teacher forcing those are the tested model's; that state shapes
nothing but its answer, which is thrown away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wanfp4.errors import Wanfp4Error


@dataclass(frozen=True)
class Step:
    """A step of the noise schedule. `index` counts from 0; `sigma` in [0, 1] is the noise level that it starts at."""

    index: int
    sigma: float
    timestep: float
    expert: str


@dataclass(frozen=True)
class Seen:
    """One denoising step. Latents are [B, C, T, H, W], float32, on the CPU.

    sample       x_t, the latent that the model saw.
    velocity     v, the model's output after classifier-free guidance.
    next_sample  the latent that the loop goes on with.
    """

    step: Step
    sample: Tensor
    velocity: Tensor
    next_sample: Tensor

    @property
    def x0(self) -> Tensor:
        """The clean latent that this step predicts: x_t − σ·v (flow matching, x_t = (1 − σ)·x0 + σ·noise)."""
        return self.sample - self.step.sigma * self.velocity


@dataclass
class Trajectory:
    """All steps of one run, in order. Memory: 2·steps + 1 latents in float32."""

    seen: list[Seen] = field(default_factory=list)

    @property
    def steps(self) -> list[Step]:
        return [s.step for s in self.seen]

    def add(self, seen: Seen) -> None:
        """Append a step; a `sample` equal to the last step's `next_sample` shares its memory."""
        if self.seen and torch.equal(self.seen[-1].next_sample, seen.sample):
            seen = Seen(seen.step, self.seen[-1].next_sample, seen.velocity, seen.next_sample)
        self.seen.append(seen)


@contextlib.contextmanager
def watching(pipe: Any, observer: Callable[[Seen], None], *, forced: Trajectory | None = None) -> Iterator[None]:
    """Call `observer` for every denoising step of `pipe` inside the block; restore the scheduler afterwards.

    With `forced`, the loop goes on with that trajectory's next latent instead of the scheduler's.

    pipe must keep its scheduler object inside the block (set the flow shift before). Raises Wanfp4Error when a run has
    other steps than `forced`, or sees another latent than `forced` did: then nothing it gives could be compared.
    """
    scheduler = pipe.scheduler
    own = vars(scheduler).get("step")
    original = scheduler.step
    count = 0

    def step(model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        answer = original(model_output, timestep, sample, *args, **kwargs)
        following = answer[0]
        at = Step(count, _sigma(scheduler, count), float(timestep), _expert(pipe, timestep))
        x_t = _copy(sample)
        if forced is not None:
            right = _matching(forced, at, x_t)
            following = right.next_sample.to(following.device, following.dtype)
            answer = (following,) if isinstance(answer, tuple) else type(answer)(prev_sample=following)
        count += 1
        observer(Seen(at, x_t, _copy(model_output), _copy(following)))
        return answer

    scheduler.step = step
    try:
        yield
        if forced is not None and count != len(forced.seen):
            raise Wanfp4Error(f"the run ended after {count} steps, and the reference has {len(forced.seen)}")
    finally:
        if own is None:
            del scheduler.step
        else:
            scheduler.step = own


def _copy(latent: Tensor) -> Tensor:
    """A float32 copy on the CPU: float32 holds every BF16 and FP16 value exactly."""
    return latent.detach().to("cpu", torch.float32, copy=True)


def _sigma(scheduler: Any, count: int) -> float:
    """σ of the step just made: schedulers count steps themselves, and start late for video-to-video."""
    after = getattr(scheduler, "step_index", None)
    return float(scheduler.sigmas[count if after is None else after - 1])


def _expert(pipe: Any, timestep: Any) -> str:
    """Which transformer ran, by the rule of diffusers' Wan pipelines: the first one from boundary_ratio upwards."""
    ratio = getattr(pipe.config, "boundary_ratio", None)
    first = ratio is None or float(timestep) >= ratio * pipe.scheduler.config.num_train_timesteps
    return "transformer" if first else "transformer_2"


def _matching(forced: Trajectory, at: Step, sample: Tensor) -> Seen:
    if at.index >= len(forced.seen):
        raise Wanfp4Error(f"the run goes on after step {at.index}, where the reference ended")
    right = forced.seen[at.index]
    if right.step != at:
        raise Wanfp4Error(f"step {at.index + 1} differs from the reference's: {at} and {right.step}")
    if not torch.equal(right.sample, sample):
        what = "did not start from the reference's noise" if at.index == 0 else "changes latents between steps"
        raise Wanfp4Error(f"teacher forcing is not possible: the pipeline {what} (step {at.index + 1})")
    return right
