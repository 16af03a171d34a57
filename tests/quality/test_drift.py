"""Drift: known errors are found where they were put, nothing where nothing was, and failures lose little."""

import dataclasses
import inspect
import itertools
import json
import logging
import math
from contextlib import contextmanager

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from tiny import FRAMES, HEIGHT, WIDTH, tiny_pipeline

import wanfp4
from wanfp4.errors import FallbackError, ModelError, PolicyError, SettingsError, Wanfp4Error
from wanfp4.kernels import dispatch
from wanfp4.policy import get_policy
from wanfp4.processors.patch import patch
from wanfp4.processors.pipelines import Settings
from wanfp4.quality import drift as module
from wanfp4.quality import plan
from wanfp4.quality.report import DriftReport

SETTINGS = Settings(HEIGHT, WIDTH, FRAMES, 3, 4.0)
PROMPT = "a red circle moving right"
WAYS = (
    ("teacher_forced", "velocity"),
    ("free_running", "velocity"),
    ("free_running", "latent"),
    ("free_running", "x0"),
)


def drift(pipe, policies=("wan-fast",), prompts=(PROMPT,), seeds=(0,), **changes):
    given = {"settings": SETTINGS, "progress": False, "max_sequence_length": 32} | changes
    return wanfp4.drift(pipe, policies, prompts, seeds, **given)


@contextmanager
def tampered(monkeypatch, hook, policy="wan-fast"):
    """`policy` becomes exact attention with a forward hook on the transformers: hook(step, output) -> output."""

    @contextmanager
    def fake(pipe, chosen, backend=None, *, strict=False):
        with patch(pipe, "bf16", backend, strict=strict) as handle:
            handles = []
            for transformer in (pipe.transformer, pipe.transformer_2) if chosen.name == policy else ():
                if transformer is not None:
                    handles.append(
                        transformer.register_forward_hook(
                            lambda m, a, out: (hook(pipe.scheduler.step_index or 0, out[0]),)
                        )
                    )
            yield handle
            for one in handles:
                one.remove()

    with monkeypatch.context() as inside:
        inside.setattr(module, "patch", fake)
        yield


@pytest.fixture(scope="module")
def report() -> DriftReport:
    """Two prompts and two seeds through both experts of a tiny Wan2.2."""
    return drift(
        tiny_pipeline(dual=True),
        ["bf16", "wan-fast", get_policy("nvfp4").with_(name="my nvfp4/2")],
        [PROMPT, "a blue <script>alert(1)</script> star | square"],
        [0, 7],
        budget={"velocity": 1e-4, "psnr": 10},
    )


@pytest.mark.parametrize("scheduler", ["unipc", "euler"])
def test_nothing_rounded_is_no_drift_at_all(scheduler):
    pipe = tiny_pipeline()
    if scheduler == "euler":
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    section = drift(pipe, ["bf16"]).policies[0]
    run = section["runs"][0]
    for way, quantity in WAYS:
        assert run[way][quantity]["rel_l2"] == [0, 0, 0]
        assert run[way][quantity]["cosine"] == pytest.approx([1, 1, 1])
    assert run["frames"]["psnr"] == "Infinity"
    assert run["frames"]["ssim"] == run["frames"]["flicker_ratio"] == 1
    assert section["backend"] == {"requested": None, "calls": {"pipeline": 24}, "emulated": False}


def test_the_noise_floor_is_small_but_there(report):
    floor, wan = report.data["noise_floor"], report.policies[1]
    assert 0 < floor["summary"]["velocity"]["median"] < 1e-5
    assert floor["backend"]["requested"] == "reference"
    assert list(floor["backend"]["calls"]) == ["reference"]
    assert not floor["backend"]["emulated"]
    assert wan["summary"]["velocity"]["median"] > 100 * floor["summary"]["velocity"]["median"]
    assert wan["summary"]["over_floor"] == pytest.approx(
        wan["summary"]["velocity"]["median"] / floor["summary"]["velocity"]["median"], rel=1e-6
    )


@pytest.mark.parametrize("scheduler", ["unipc", "euler"])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_velocity_error_is_found_at_its_step_with_its_size(monkeypatch, scheduler, where):
    pipe = tiny_pipeline()
    if scheduler == "euler":
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    with tampered(monkeypatch, lambda step, out: out * 1.25 if step == where else out):
        run = drift(pipe).policies[0]["runs"][0]
    forced = run["teacher_forced"]["velocity"]
    assert forced["rel_l2"] == pytest.approx([0.25 if i == where else 0 for i in range(3)], abs=1e-6)
    assert forced["cosine"] == pytest.approx([1, 1, 1])
    free = run["free_running"]
    assert free["velocity"]["rel_l2"][: where + 1] == pytest.approx(forced["rel_l2"][: where + 1], abs=1e-6)
    assert all(v > 1e-4 for v in free["latent"]["rel_l2"][where:])
    assert free["latent"]["rel_l2"][:where] == [0] * where
    assert free["x0"]["rel_l2"][:where] == [0] * where
    assert all(v > 1e-4 for v in free["velocity"]["rel_l2"][where + 1 :])


def test_an_error_of_one_latent_frame_does_not_hide(monkeypatch):
    def freeze(step, out):
        out = out.clone()
        out[:, :, 1] = 0
        return out

    with tampered(monkeypatch, freeze):
        section = drift(tiny_pipeline()).policies[0]
    run = section["runs"][0]
    for frames in run["teacher_forced"]["velocity"]["rel_l2_frames"]:
        assert frames == pytest.approx([0, 1, 0], abs=1e-6)
    for frames in run["teacher_forced"]["velocity"]["cosine_frames"]:
        assert frames == pytest.approx([1, 0, 1])
    assert section["summary"]["worst_latent_frame"]["frame"] == 1


def test_the_experts_and_noise_levels_are_on_the_axis(report):
    steps = report.data["steps"]
    assert [s["step"] for s in steps] == [1, 2, 3]
    assert [s["expert"] for s in steps] == ["transformer", "transformer_2", "transformer_2"]
    assert [s["sigma"] for s in steps] == sorted((s["sigma"] for s in steps), reverse=True)
    assert all(s["sigma"] == pytest.approx(s["timestep"] / 1000, abs=2e-3) for s in steps)


def test_an_error_in_one_expert_shows_in_its_steps_only(monkeypatch):
    pipe = tiny_pipeline(dual=True)
    with tampered(monkeypatch, lambda step, out: out * 1.5 if pipe._current_timestep < 875 else out):
        forced = drift(pipe).policies[0]["runs"][0]["teacher_forced"]["velocity"]
    assert forced["rel_l2"] == pytest.approx([0, 0.5, 0.5], abs=1e-6)


def test_the_shift_asked_for_is_used_and_taken_back():
    pipe = tiny_pipeline(shift=3.0)
    scheduler = pipe.scheduler
    shifted = drift(pipe, ["bf16"], settings=dataclasses.replace(SETTINGS, shift=12.0)).data["steps"]
    plain = drift(pipe, ["bf16"]).data["steps"]
    assert shifted[1]["sigma"] > plain[1]["sigma"] + 0.05
    assert pipe.scheduler is scheduler


@pytest.mark.parametrize("bar", [{"disable": False, "desc": "mine"}, None])
def test_the_pipeline_is_as_before(bar, capfd):
    pipe = tiny_pipeline()
    if bar is None:
        del pipe._progress_bar_config
    else:
        pipe.set_progress_bar_config(**bar)
    processors = [id(block.attn1.processor) for block in pipe.transformer.blocks]
    state = {k: v for k, v in vars(pipe).items() if k.startswith("_progress")}
    drift(pipe)
    assert [id(block.attn1.processor) for block in pipe.transformer.blocks] == processors
    assert {k: v for k, v in vars(pipe).items() if k.startswith("_progress")} == state
    assert "mine" not in capfd.readouterr().err
    assert "step" not in vars(pipe.scheduler)
    assert "cache_context" not in vars(pipe.transformer)


def test_every_prompt_and_seed_has_a_run_in_every_row(report):
    pairs = list(itertools.product([0, 1], [0, 7]))
    for section in (report.data["reference"], report.data["noise_floor"], *report.policies):
        assert [(r["prompt"], r["seed"]) for r in section["runs"]] == pairs
    velocities = [json.dumps(r["teacher_forced"]) for r in report.policies[1]["runs"]]
    assert len(set(velocities)) == 4
    assert report.complete


def test_summaries_are_medians_and_spreads_of_the_runs(report):
    section = report.policies[1]
    stacked = torch.tensor([r["teacher_forced"]["velocity"]["rel_l2"] for r in section["runs"]], dtype=torch.float64)
    per_step = section["per_step"]["teacher_forced"]["velocity"]["rel_l2"]
    assert per_step["median"] == pytest.approx(stacked.quantile(0.5, dim=0).tolist(), rel=1e-6)
    assert per_step["min"] == pytest.approx(stacked.amin(0).tolist(), rel=1e-6)
    assert per_step["max"] == pytest.approx(stacked.amax(0).tolist(), rel=1e-6)
    summary = section["summary"]
    typical = stacked.median(dim=1).values
    assert summary["velocity"]["median"] == pytest.approx(typical.quantile(0.5).item(), rel=1e-6)
    assert (summary["velocity"]["min"], summary["velocity"]["max"]) == pytest.approx(
        (typical.min().item(), typical.max().item()), rel=1e-6
    )
    worst = max(range(3), key=lambda i: per_step["median"][i])
    assert summary["velocity_worst"]["step"] == worst + 1
    assert summary["velocity_worst"]["median"] == per_step["median"][worst]
    assert [a["step"] for a in summary["after"]] == [1, 3]
    assert (
        summary["after"][-1]["rel_l2"]["median"]
        == section["per_step"]["free_running"]["latent"]["rel_l2"]["median"][-1]
    )
    assert summary["psnr"]["min"] == min(r["frames"]["psnr"] for r in section["runs"])


def test_receipts_say_what_ran(report):
    section = report.policies[1]
    assert section["backend"]["emulated"]
    assert list(section["backend"]["calls"]) == ["reference"]
    # Two layers, two branches, three steps, two ways of running, four pairs.
    assert section["backend"]["calls"]["reference"] == 2 * 2 * 3 * 2 * 4
    assert section["fallbacks"] == {}
    kept = section["receipts"][section["runs"][0]["receipt"]["free_running"]]
    assert {(e["expert"], tuple(e["layers"])) for e in kept["entries"]} == {
        ("transformer", (0, 1)),
        ("transformer_2", (0, 1)),
    }
    assert section["policy"] == get_policy("wan-fast").to_dict()


def test_fallbacks_and_their_reasons_are_in_the_report(monkeypatch):
    def reluctant(backend):
        refuses = lambda numerics, device: None if numerics.is_exact else "not on a Tuesday"  # noqa: E731
        return dataclasses.replace(backend, refuses=refuses) if not backend.native else backend

    monkeypatch.setattr(dispatch, "_BACKENDS", tuple(reluctant(b) for b in dispatch.backends()))
    section = drift(tiny_pipeline()).policies[0]
    assert sum(section["fallbacks"].values()) == 24
    assert "not on a Tuesday" in next(iter(section["fallbacks"]))
    with pytest.raises(FallbackError, match="not on a Tuesday"):
        drift(tiny_pipeline(), strict=True)


def test_a_model_that_breaks_is_seen_and_not_decoded(monkeypatch):
    with tampered(monkeypatch, lambda step, out: out * math.nan if step == 1 else out):
        report = drift(tiny_pipeline(), ["bf16", "wan-fast"], budget={"velocity": 1e9, "nan-frames": 0})
    broken = report.policies[1]
    run = broken["runs"][0]
    assert run["teacher_forced"]["velocity"]["rel_l2"] == [0, "NaN", 0]
    assert run["free_running"]["latent"]["rel_l2"] == [0, "NaN", "NaN"]
    assert run["latent_frames_nan"] == [0, 1, 2]
    assert run["frames"] is run["files"] is None
    assert broken["summary"]["velocity_worst"]["step"] == 2
    assert broken["summary"]["psnr"]["median"] == "NaN"
    assert [(v.policy, v.metric) for v in report.check({"velocity": 1e9, "nan-frames": 0, "psnr": 1})] == [
        ("wan-fast", "velocity"),
        ("wan-fast", "nan-frames"),
        ("wan-fast", "psnr"),
    ]


def test_a_reference_that_breaks_is_an_error():
    pipe = tiny_pipeline()
    torch.nn.init.constant_(pipe.transformer.proj_out.bias, math.nan)
    with pytest.raises(ModelError, match="own attention gives NaN"):
        drift(pipe)


def test_runs_that_start_from_other_noise_are_refused(monkeypatch):
    seeds = itertools.count()
    original = module.generate_latents
    monkeypatch.setattr(
        module,
        "generate_latents",
        lambda pipe, prompt, settings, seed, **k: original(pipe, prompt, settings, next(seeds), **k),
    )
    with pytest.raises(Wanfp4Error, match="did not start from the reference's noise"):
        drift(tiny_pipeline())


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_failure_keeps_what_has_finished(monkeypatch, tmp_path, error):
    original, calls = module.generate_latents, itertools.count()

    def fail(*args, **kwargs):
        if next(calls) == 6:  # reference, floor twice, bf16 twice, then wan-fast's second run
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(module, "generate_latents", fail)
    with pytest.raises(type(error)):
        drift(tiny_pipeline(), ["bf16", "wan-fast"], partial=tmp_path)
    kept = DriftReport.load(tmp_path)
    assert not kept.complete
    assert [len(s["runs"]) for s in (kept.data["noise_floor"], *kept.policies)] == [1, 1, 0]
    assert kept.policies[0]["summary"]["velocity"]["median"] == 0
    for run in (*kept.data["reference"]["runs"], *kept.policies[0]["runs"]):
        assert (tmp_path / run["files"]["video"]).stat().st_size > 1000
    assert "Incomplete" in (tmp_path / "report.html").read_text()
    assert "Incomplete" in (tmp_path / "report.md").read_text()
    assert not list(tmp_path.rglob(".*"))


def test_the_report_is_valid_after_every_policy(monkeypatch, tmp_path):
    seen = []
    original = DriftReport.save

    def save(self, folder, **kwargs):
        original(self, folder, **kwargs)
        kept = DriftReport.load(folder)
        seen.append((kept.complete, [len(s["runs"]) for s in (kept.data["noise_floor"], *kept.policies)]))
        return folder

    monkeypatch.setattr(DriftReport, "save", save)
    report = drift(tiny_pipeline(), ["bf16"], seeds=[0, 1], partial=tmp_path)
    report.save(tmp_path)
    assert seen == [(False, [1, 0]), (False, [1, 1]), (False, [2, 1]), (False, [2, 2]), (True, [2, 2])]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"policies": ["wan-fats"]}, PolicyError, "unknown policy 'wan-fats'"),
        ({"policies": []}, SettingsError, "at least one policy"),
        ({"policies": ["nvfp4", "nvfp4"]}, SettingsError, "nvfp4 is given more than once"),
        (
            {"policies": [get_policy("nvfp4").with_(name="noise floor")]},
            SettingsError,
            "'noise floor' is the name of a row",
        ),
        ({"prompts": []}, SettingsError, "at least one prompt"),
        ({"prompts": [" "]}, SettingsError, "not empty"),
        ({"prompts": ["a", "a"]}, SettingsError, "'a' is given more than once"),
        ({"seeds": []}, SettingsError, "at least one seed"),
        ({"seeds": [1, 1]}, SettingsError, "seed 1 is given more than once"),
        ({"seeds": [-1]}, SettingsError, "seed must be"),
        ({"seeds": 0.5}, SettingsError, "seeds must be one or a list of them, not 0.5"),
        ({"seeds": None}, SettingsError, "seeds must be one or a list of them, not None"),
        ({"seeds": "01"}, SettingsError, "seed must be"),
        ({"prompts": 5}, SettingsError, "prompts must be one or a list of them, not 5"),
        ({"policies": 5}, SettingsError, "policies must be one or a list of them, not 5"),
        ({"output_type": "np"}, SettingsError, "the job sets 'output_type' itself: leave it out$"),
        ({"height": 80}, SettingsError, "the job sets 'height' itself: give settings.height$"),
        ({"negative": "blur"}, SettingsError, "the job sets 'negative' itself: give settings.negative$"),
        ({"guidance_scale_2": 3.0}, SettingsError, "the job sets 'guidance_scale_2' itself: give settings.guidance_2$"),
        ({"latents": torch.zeros(1)}, SettingsError, "the job sets 'latents' itself: give seeds$"),
        ({"seed": 3}, SettingsError, "the job sets 'seed' itself: give seeds$"),
        ({"guidence": 3}, SettingsError, "neither the job nor the call of WanPipeline has an argument 'guidence'$"),
        ({"settings": Settings(81, WIDTH, FRAMES)}, SettingsError, "height 81 is not a multiple of 16"),
        ({"steps": 0}, SettingsError, "steps must be"),
        ({"budget": {"speed": 1}}, SettingsError, "no budget metric 'speed'"),
        ({"backend": "sdpa"}, wanfp4.Wanfp4Error, "'sdpa' cannot run"),
    ],
)
def test_bad_input_is_a_sentence_before_the_first_step(monkeypatch, changes, error, words):
    monkeypatch.setattr(module, "generate_latents", lambda *a, **k: pytest.fail("a run started"))
    with pytest.raises(error, match=words):
        drift(tiny_pipeline(), **changes)


def test_every_argument_that_generating_sets_is_refused(monkeypatch):
    """What the pipeline's call really gets, so that one more there cannot be forgotten here."""
    pipe = tiny_pipeline(dual=True)
    got = {}
    original = type(pipe).__call__

    def call(self, **kwargs):
        got.update(kwargs)
        return original(self, **kwargs)

    monkeypatch.setattr(type(pipe), "__call__", call)
    module.generate_latents(pipe, PROMPT, dataclasses.replace(SETTINGS, steps=1), 0, max_sequence_length=32)
    monkeypatch.undo()
    for name in got.keys() - {"max_sequence_length"}:
        with pytest.raises(SettingsError, match=f"the job sets '{name}' itself"):
            plan.check_call(pipe, [name])
    plan.check_call(pipe, ["max_sequence_length", "attention_kwargs"])


def test_the_seeds_by_default_are_the_commands():
    from wanfp4.cli.common import several_seeds
    from wanfp4.cli.drift import drift as command

    by_default = inspect.signature(wanfp4.drift).parameters["seeds"].default
    assert tuple(several_seeds(inspect.signature(command).parameters["seeds"].default)) == by_default == (0, 1)


def test_a_job_that_dies_before_its_first_row_leaves_no_folder(monkeypatch, tmp_path):
    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(module, "generate_latents", fail)
    (tmp_path / "there").mkdir()
    for partial in ("there", "new/below"):
        with pytest.raises(RuntimeError):
            drift(tiny_pipeline(), partial=tmp_path / partial)
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_an_earlier_report_goes_with_the_first_row(monkeypatch, tmp_path):
    drift(tiny_pipeline(), "wan-fast", steps=1).save(tmp_path)
    before = {path.name for path in tmp_path.rglob("*")}
    seen = []
    original = module.generate_latents

    def look(*args, **kwargs):
        seen.append({path.name for path in tmp_path.rglob("*")})
        return original(*args, **kwargs)

    monkeypatch.setattr(module, "generate_latents", look)
    drift(tiny_pipeline(), "bf16", steps=1, partial=tmp_path)
    # The reference and the noise floor twice, then bf16 twice.
    assert seen[:3] == [before] * 3
    assert seen[3] == seen[4] == {
        "report.json", "videos", "strips", "p0-s0-reference.mp4", "p0-s0-reference.jpg", "p0-s0-noise-floor.mp4",
        "p0-s0-noise-floor.jpg",
    }  # fmt: skip
    assert not any("wan-fast" in path.name for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("configured", [True, False])
def test_log_lines_come_once(monkeypatch, capfd, tmp_path, configured):
    """With a root handler, as logging.basicConfig sets one, and without any logging set up."""
    import sys

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("mine: %(message)s"))
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler] if configured else [])
    original = module.decode_latents

    def decode(*args):
        module.log.warning("something to know")
        return original(*args)

    monkeypatch.setattr(module, "decode_latents", decode)
    drift(tiny_pipeline(), "bf16", steps=1, progress=True)
    err = capfd.readouterr().err
    assert err.count("something to know") == 1
    assert ("mine: something to know" in err) is configured
    assert module.log.handlers == []


def test_a_patched_pipeline_is_refused():
    pipe = tiny_pipeline()
    with patch(pipe, "bf16"), pytest.raises(ModelError, match="the pipeline is patched"):
        drift(pipe)


def test_names_that_make_the_same_file_name_keep_their_clips():
    policies = [get_policy(p).with_(name=n) for p, n in (("nvfp4", "noise-floor"), ("sage3", "a/b"), ("bf16", "A b"))]
    report = drift(tiny_pipeline(), policies, steps=1)
    sections = (report.data["reference"], report.data["noise_floor"], *report.policies)
    names = [name for s in sections for run in s["runs"] for name in run["files"].values()]
    assert len({name.lower() for name in names}) == len(report.files) == 2 * 5


def test_one_of_each_needs_no_list():
    report = drift(tiny_pipeline(), "bf16", PROMPT, 3, steps=1)
    assert (report.data["prompts"], report.data["seeds"], len(report.data["steps"])) == ([PROMPT], [3], 1)


def test_the_progress_bar_counts_every_step(capfd):
    drift(tiny_pipeline(), "bf16", progress=True, steps=2)
    err = capfd.readouterr().err
    assert "10/10" in err
    assert "bf16, teacher-forced" in err
