"""The recorder sees what the loop does, changes nothing unless told to, and leaves no trace."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from tiny import generate, tiny_pipeline

from wanfp4.errors import Wanfp4Error
from wanfp4.quality.record import Trajectory, watching

SCHEDULERS = ("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler")


def pipeline(scheduler: str = SCHEDULERS[0], **config):
    pipe = tiny_pipeline(**config)
    if scheduler == "FlowMatchEulerDiscreteScheduler":
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return pipe


def record(pipe, forced=None, **changes) -> tuple[Trajectory, torch.Tensor]:
    trajectory = Trajectory()
    with watching(pipe, trajectory.add, forced=forced):
        latents = generate(pipe, **({"steps": 4} | changes))
    return trajectory, latents


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_watching_changes_nothing(scheduler):
    plain = generate(pipeline(scheduler), steps=4)
    trajectory, latents = record(pipeline(scheduler))
    assert torch.equal(latents, plain)
    assert len(trajectory.seen) == 4
    assert torch.equal(trajectory.seen[-1].next_sample, latents)
    assert [s.step.index for s in trajectory.seen] == [0, 1, 2, 3]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_samples_are_what_the_model_saw_and_velocities_what_it_said(scheduler):
    pipe = pipeline(scheduler)
    inputs, outputs = [], []
    pipe.transformer.register_forward_pre_hook(
        lambda m, a, k: inputs.append(k["hidden_states"].clone()), with_kwargs=True
    )
    pipe.transformer.register_forward_hook(lambda m, a, out: outputs.append(out[0].clone()))
    trajectory, _ = record(pipe, guidance=4.0)
    for i, seen in enumerate(trajectory.seen):
        assert torch.equal(seen.sample, inputs[2 * i])
        cond, uncond = outputs[2 * i], outputs[2 * i + 1]
        assert torch.equal(seen.velocity, uncond + 4.0 * (cond - uncond))
        if i:
            assert seen.sample is trajectory.seen[i - 1].next_sample  # shared, not held twice


def test_sigmas_and_timesteps_are_the_schedulers():
    pipe = pipeline()
    trajectory, _ = record(pipe)
    assert [s.sigma for s in trajectory.steps] == pytest.approx(pipe.scheduler.sigmas[:4].tolist())
    assert [s.timestep for s in trajectory.steps] == pipe.scheduler.timesteps.tolist()


def test_x0_is_the_schedulers_own_prediction():
    pipe = pipeline()
    predicted = []
    original = pipe.scheduler.convert_model_output
    pipe.scheduler.convert_model_output = lambda *a, **k: predicted.append(original(*a, **k)) or predicted[-1]
    trajectory, _ = record(pipe)
    for seen, x0 in zip(trajectory.seen, predicted, strict=True):
        torch.testing.assert_close(seen.x0, x0, rtol=1e-6, atol=1e-6)


def test_x0_is_where_euler_goes_in_one_step_to_sigma_0():
    trajectory, latents = record(pipeline(SCHEDULERS[1]))
    torch.testing.assert_close(trajectory.seen[-1].x0, latents, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_scheduler_is_as_before(scheduler):
    pipe = pipeline(scheduler)
    before = dict(vars(pipe.scheduler))
    with watching(pipe, lambda seen: None):
        assert "step" in vars(pipe.scheduler)
    assert vars(pipe.scheduler).keys() == before.keys()

    def own(*args, **kwargs):
        raise AssertionError

    pipe.scheduler.step = own  # somebody else's instance attribute comes back too, after an error as well
    with pytest.raises(ZeroDivisionError), watching(pipe, lambda seen: None):
        raise ZeroDivisionError
    assert pipe.scheduler.step is own
    del pipe.scheduler.step

    with pytest.raises(KeyboardInterrupt), watching(pipe, lambda seen: (_ for _ in ()).throw(KeyboardInterrupt)):
        generate(pipe)
    assert "step" not in vars(pipe.scheduler)


def test_experts_follow_the_boundary():
    pipe = pipeline(dual=True)
    ran = []
    for name in ("transformer", "transformer_2"):
        getattr(pipe, name).register_forward_pre_hook(lambda module, args, name=name: ran.append(name))
    trajectory, _ = record(pipe, guidance=1.0)
    assert [s.expert for s in trajectory.steps] == ran
    assert set(ran) == {"transformer", "transformer_2"}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_teacher_forcing_makes_every_step_see_the_reference(scheduler):
    reference, _ = record(pipeline(scheduler))
    other = pipeline(scheduler, seed=5)  # other weights, so other velocities everywhere
    free, _ = record(other)
    forced, latents = record(other, forced=reference)
    for i, (a, b) in enumerate(zip(reference.seen, forced.seen, strict=True)):
        assert torch.equal(a.sample, b.sample)
        assert not torch.equal(a.velocity, b.velocity)
        assert i == 0 or not torch.equal(free.seen[i].sample, b.sample)
    assert torch.equal(latents, reference.seen[-1].next_sample)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_forced_velocity_depends_on_nothing_but_that_step(scheduler):
    """What the scheduler remembers of the tested model's earlier steps must not reach the velocities."""
    reference, _ = record(pipeline(scheduler))
    other = pipeline(scheduler, seed=5)
    forced, _ = record(other, forced=reference)
    i, step = 2, reference.steps[2]
    embeds, negative = other.encode_prompt("a red circle moving right", "", True, max_sequence_length=32)
    with torch.no_grad():
        cond, uncond = (
            other.transformer(reference.seen[i].sample, torch.tensor([step.timestep]), e, return_dict=False)[0]
            for e in (embeds, negative)
        )
    torch.testing.assert_close(forced.seen[i].velocity, uncond + 4.0 * (cond - uncond), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_teacher_forcing_the_same_pipeline_gives_the_same_bits(scheduler):
    reference, _ = record(pipeline(scheduler))
    forced, _ = record(pipeline(scheduler), forced=reference)
    for a, b in zip(reference.seen, forced.seen, strict=True):
        assert torch.equal(a.velocity, b.velocity)


def test_teacher_forcing_in_bf16_keeps_the_references_bits():
    """Euler hands on latents in the model's dtype; the recorded float32 goes back into it without loss."""
    reference, _ = record(pipeline(SCHEDULERS[1], dtype=torch.bfloat16))
    forced, latents = record(pipeline(SCHEDULERS[1], dtype=torch.bfloat16), forced=reference)
    assert latents.dtype == torch.bfloat16
    for a, b in zip(reference.seen, forced.seen, strict=True):
        assert torch.equal(a.velocity, b.velocity)


def test_teacher_forcing_refuses_what_cannot_be_compared():
    reference, _ = record(pipeline())
    with pytest.raises(Wanfp4Error, match="reference's noise"):
        record(pipeline(), forced=reference, seed=1)
    with pytest.raises(Wanfp4Error, match="differs from the reference"):
        record(pipeline(), forced=reference, steps=5)
    with (
        pytest.raises(Wanfp4Error, match="ended after 2 steps"),
        watching(pipe := pipeline(), lambda s: None, forced=reference),
    ):
        generate(pipe, steps=4, callback_on_step_end=lambda p, i, t, k: setattr(p, "_interrupt", i == 1) or k)

    def meddle(pipe, index, timestep, kwargs):
        return {"latents": kwargs["latents"] + 1}

    with pytest.raises(Wanfp4Error, match="changes latents between steps"):
        record(pipeline(), forced=reference, callback_on_step_end=meddle)
