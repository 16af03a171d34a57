"""Recordings hold what the model computed; fits find known optima, and look at the fit half only."""

import dataclasses
import gc
import itertools
import json
import math

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
from safetensors import safe_open
from tiny import FRAMES, HEIGHT, TOKENS, WIDTH, tiny_pipeline

from wanfp4.errors import ModelError, PolicyError, SettingsError, Wanfp4Error
from wanfp4.kernels import reference
from wanfp4.policy import Classifier, Guard, Numerics, Policy, Rule, get_policy, guarding, policies
from wanfp4.processors.patch import patch
from wanfp4.processors.pipelines import Settings, generate_latents
from wanfp4.quality import calibration, calibration_steps, recording
from wanfp4.quality.calibration import fit
from wanfp4.quality.calibration_bench import Bench, Choice
from wanfp4.quality.calibration_pages import fit_markdown
from wanfp4.quality.metrics import rel_l2
from wanfp4.quality.recording import FIT, HELD_OUT, Recorded, Recording, load_recording, picks, record

SETTINGS = Settings(height=HEIGHT, width=WIDTH, frames=FRAMES, steps=3, guidance=4.0)
PROMPTS = ["a red circle", "a blue star", "a green square"]
SCALE = 1 / math.sqrt(128)


def recorded(pipe, folder, prompts=PROMPTS, seeds=(5,), **changes):
    options = {"settings": SETTINGS, "progress": False, "max_sequence_length": 32} | changes
    return record(pipe, prompts, list(seeds), folder=folder, **options)


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipeline(dtype=torch.bfloat16)


def same_calls(a, b):
    assert [(vars(x) | dict.fromkeys("qkv")) for x in a] == [(vars(x) | dict.fromkeys("qkv")) for x in b]
    return all(torch.equal(getattr(x, n), getattr(y, n)) for x, y in zip(a, b, strict=True) for n in "qkv")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_recorded_tensors_are_what_the_model_computed(tmp_path, dtype):
    pipe = tiny_pipeline(dtype=dtype, dual=dtype == torch.float32)
    found = recorded(pipe, tmp_path / "r", PROMPTS[:2], calls=10, rows=20)
    seen = {}

    def keep(call):
        seen[call.expert, call.site.layer, call.step, call.branch] = (call.q.clone(), call.k.clone(), call.v.clone())

    for half, prompt in ((FIT, PROMPTS[0]), (HELD_OUT, PROMPTS[1])):
        with patch(pipe, "bf16") as handle, handle.observing(keep):
            generate_latents(pipe, prompt, SETTINGS, 5, max_sequence_length=32)
        calls = found.calls(half)
        assert len(calls) == 10
        assert len({(c.layer, c.step, c.branch, c.head) for c in calls}) == 10
        assert {c.layer for c in calls} == {0, 1}
        for c in calls:
            q, k, v = (t[0, :, c.head].bfloat16() for t in seen[c.expert, c.layer, c.step, c.branch])
            assert c.rows[0] == 0
            assert c.rows[-1] == TOKENS - 1
            assert len(c.rows) == 20
            assert torch.equal(c.q, q[list(c.rows)])
            assert torch.equal(c.k, k)
            assert torch.equal(c.v, v)
            whole = seen[c.expert, c.layer, c.step, c.branch]
            assert c.largest == pytest.approx(reference.sampled_logit(whole[0], whole[1], SCALE))
            assert 0 < c.sigma <= 1
            assert (c.tokens, c.num_layers) == (TOKENS, 2)
    if dtype == torch.float32:
        assert {c.expert for c in found.calls(FIT)} == {"transformer", "transformer_2"}


def test_the_file_says_where_its_tensors_come_from(pipe, tmp_path):
    found = recorded(pipe, tmp_path, calls=4)
    assert found.complete
    assert [(r["prompt"], r["half"], r["calls"]) for r in found.data["runs"]] == [
        (0, "fit", 4),
        (1, "held-out", 4),
        (2, "fit", 4),
    ]
    with safe_open(tmp_path / found.data["runs"][1]["file"], "pt") as file:
        said = file.metadata()
        assert file.get_tensor("3.k").dtype == torch.bfloat16
    assert said["weights"] == found.data["model"]["weights"]
    call = json.loads(said["calls"])[0]
    assert (call["prompt"], call["seed"]) == (1, 5)
    assert {"layer", "step", "sigma", "branch", "head", "expert", "tokens"} <= set(call)
    assert same_calls(load_recording(tmp_path).calls(FIT), found.calls(FIT))


def test_both_halves_are_sampled_at_the_same_places(pipe, tmp_path):
    found = recorded(pipe, tmp_path, [*PROMPTS, "a white star"], calls=5)
    places = {half: [(c.layer, c.step, c.branch, c.head) for c in found.calls(half)] for half in (FIT, HELD_OUT)}
    assert places[FIT] == places[HELD_OUT]
    assert len(set(places[FIT])) == 10, "a second run of a half goes on where the first ended"


def test_the_sample_is_deterministic_and_covers_every_layer():
    order = picks(30, 50, 2, 12)
    assert order == picks(30, 50, 2, 12)
    assert len(set(order)) == 30 * 50 * 2 * 12
    first = order[:300]
    assert sorted(p.layer for p in first) == sorted(list(range(30)) * 10)
    for name, values in (("step", 50), ("branch", 2), ("head", 12)):
        assert len({getattr(p, name) for p in first}) > 0.9 * values


def test_without_guidance_there_is_one_branch(pipe, tmp_path):
    settings = dataclasses.replace(SETTINGS, guidance=1.0)
    found = recorded(pipe, tmp_path, calls=1000, settings=settings)
    assert {c.branch for c in found.calls(FIT)} == {"cond"}
    assert len(found.calls(HELD_OUT)) == 2 * 3 * 2, "layers, steps, heads: all there are"


def test_the_size_is_bounded(pipe, tmp_path):
    found = recorded(pipe, tmp_path, PROMPTS[:2], calls=1000, limit_mb=1)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert 0.8e6 < size <= 1e6
    assert len(found.calls(FIT)) == len(found.calls(HELD_OUT)) > 5


def test_what_does_not_fit_is_refused_before_anything_runs(pipe, tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "generate_latents", None)
    with pytest.raises(SettingsError, match=r"of 105 tokens takes 0.1 MB, and 20 runs need one each: .* to 2 MB"):
        recorded(pipe, tmp_path / "r", PROMPTS[:2], seeds=range(10), limit_mb=1)
    with pytest.raises(SettingsError, match="at least two prompts"):
        recorded(pipe, tmp_path / "r", PROMPTS[:1])
    with pytest.raises(SettingsError, match="rows must be a whole number from 1, not 0"):
        recorded(pipe, tmp_path / "r", rows=0)
    with patch(pipe), pytest.raises(ModelError, match="is patched"):
        recorded(pipe, tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.fixture
def counted(monkeypatch):
    """Prompts that ran; the second one is interrupted after its first step while `stop` is set."""
    ran = {"prompts": [], "stop": True}

    def generate(pipe, prompt, *args, **kwargs):
        ran["prompts"].append(prompt)

        def interrupt(*_):
            raise KeyboardInterrupt

        if ran["stop"] and prompt == PROMPTS[1]:
            kwargs["callback_on_step_end"] = interrupt
        return generate_latents(pipe, prompt, *args, **kwargs)

    monkeypatch.setattr(recording, "generate_latents", generate)
    return ran


def test_an_interrupted_recording_keeps_what_is_there_and_goes_on(pipe, tmp_path, counted):
    folder = tmp_path / "r"
    with pytest.raises(KeyboardInterrupt):
        recorded(pipe, folder, calls=24)
    kept = load_recording(folder)
    assert not kept.complete
    assert [run["complete"] for run in kept.data["runs"]] == [True, False]
    assert {c.step for c in kept.calls(HELD_OUT)} == {0}
    before = (folder / kept.data["runs"][0]["file"]).stat().st_mtime_ns
    counted.update(stop=False, prompts=[])

    resumed = recorded(pipe, folder, calls=24)
    assert counted["prompts"] == PROMPTS[1:]
    assert resumed.complete
    assert (folder / kept.data["runs"][0]["file"]).stat().st_mtime_ns == before
    straight = recorded(pipe, tmp_path / "straight", calls=24)
    for half in (FIT, HELD_OUT):
        assert same_calls(resumed.calls(half), straight.calls(half))

    counted.update(prompts=[])
    assert recorded(pipe, folder, calls=24).complete
    assert counted["prompts"] == [], "a finished recording is not made again"


def test_another_recording_is_not_written_over(pipe, tmp_path):
    first = recorded(pipe, tmp_path, calls=2)
    with pytest.raises(SettingsError, match="holds a recording of other seeds, --calls; give the same to go on"):
        recorded(pipe, tmp_path, seeds=(6,), calls=3)
    with pytest.raises(SettingsError, match="of other model"):
        recorded(tiny_pipeline(dtype=torch.bfloat16, seed=9), tmp_path, calls=2)
    again = recorded(pipe, tmp_path, PROMPTS[:2], seeds=(6,), calls=2, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [recording.MANIFEST, *(run["file"] for run in again.data["runs"])]
    )
    assert first.data["seeds"] != load_recording(tmp_path).data["seeds"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("attention", "attention of the pipeline's own"),
        ("machine", "machine"),
        ("versions", "versions"),
        ("name", None),
        ("threads", None),
    ],
)
def test_a_recording_is_of_one_attention_machine_and_version(tmp_path, counted, monkeypatch, change, words):
    """recording.json says once what all runs were made with, so no other run goes into it."""
    pipe = tiny_pipeline(dtype=torch.bfloat16)
    with pytest.raises(KeyboardInterrupt):
        recorded(pipe, tmp_path, calls=2, model="here")
    counted.update(stop=False, prompts=[])
    before = (tmp_path / recording.MANIFEST).read_bytes()
    if change == "attention":
        monkeypatch.setattr(Registry, "_active_backend", Registry._active_backend)  # set_attention_backend leaks it
        pipe.transformer.set_attention_backend("_native_math")
    if change == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    if change in ("machine", "versions"):
        monkeypatch.setattr("wanfp4.quality.jobs." + change, lambda *_: {"name": "another", "torch": "9.9"})
    options = {"calls": 2, "model": "elsewhere" if change == "name" else "here"}
    if words is None:
        assert recorded(pipe, tmp_path, **options).complete
        assert counted["prompts"] == PROMPTS[1:]
        return
    with pytest.raises(SettingsError, match=f"holds a recording of other {words}; give the same to go on"):
        recorded(pipe, tmp_path, **options)
    assert counted["prompts"] == []
    assert (tmp_path / recording.MANIFEST).read_bytes() == before


def test_files_that_do_not_belong_are_refused(pipe, tmp_path):
    found = recorded(pipe, tmp_path, PROMPTS[:2], calls=2)
    recorded(tiny_pipeline(dtype=torch.bfloat16, seed=9), tmp_path / "other", PROMPTS[:2], calls=2)
    file = found.data["runs"][0]["file"]
    (tmp_path / file).write_bytes((tmp_path / "other" / file).read_bytes())
    with pytest.raises(Wanfp4Error, match="is of other weights"):
        found.calls(FIT)
    (tmp_path / file).write_bytes(b"no tensors")
    with pytest.raises(Wanfp4Error, match="cannot read the recorded run"):
        found.calls(FIT)
    assert load_recording(tmp_path / recording.MANIFEST).folder == load_recording(tmp_path).folder == tmp_path
    with pytest.raises(SettingsError, match=r"cannot read .*; needed is a recording's folder or recording\.json"):
        load_recording(tmp_path / "nowhere")
    (tmp_path / recording.MANIFEST).write_text('{"kind": "wanfp4 drift report", "schema": 1}')
    with pytest.raises(SettingsError, match="has kind 'wanfp4 drift report'"):
        load_recording(tmp_path)


class InMemory(Recording):
    """A recording whose calls are made up: `make(generator)` gives q, k, v of one call."""

    def __init__(self, make, prompts=4, calls=2, largest=5.0, held_out=None):
        self.made, self.asked = [], []
        for prompt, i in itertools.product(range(prompts), range(calls)):
            generator = torch.Generator().manual_seed(1000 * prompt + i)
            q, k, v = (held_out if held_out is not None and prompt % 2 else make)(generator)
            self.made.append(
                Recorded(
                    prompt,
                    0,
                    "transformer",
                    i % 3,
                    3,
                    i,
                    0.5,
                    "cond",
                    0,
                    len(k),
                    tuple(range(len(q))),
                    largest,
                    q.bfloat16(),
                    k.bfloat16(),
                    v.bfloat16(),
                )
            )
        model = {"model": "made up", "weights": "0" * 64, "dtype": "bfloat16", "tokens": len(k)}
        runs = [{"prompt": p, "seed": 0} for p in range(prompts)]
        known = {"created": "", "model": model, "scheduler": "none", "settings": SETTINGS.to_dict(), "seeds": [0],
                 "prompts": [f"prompt {p}" for p in range(prompts)], "rows": 64, "calls": calls, "complete": True,
                 "attention": "pipeline", "runs": runs}  # fmt: skip
        super().__init__(None, known)

    def calls(self, half):
        self.asked.append(half)
        return [c for c in self.made if recording.half_of(c.prompt) == half]


def normal(generator, k_mean=0.0, v_mean=0.0, keys=256, rows=32):
    q, k, v = (torch.randn(n, 128, generator=generator) for n in (rows, keys, keys))
    direction = torch.randn(128, generator=torch.Generator().manual_seed(1))
    return q, k - k.mean(0) + k_mean * direction, v - v.mean(0) + v_mean * direction


def test_a_bench_computes_what_the_reference_does():
    made = InMemory(normal, prompts=2)
    bench = Bench(made.made)
    names = [n for n, p in policies().items() if not p.numerics.smooth_q and not p.numerics.is_exact]
    variants = [Choice(get_policy(n).numerics, None) for n in names]
    smooth = dataclasses.replace(get_policy("wan-fast").numerics, smooth_k=True, smooth_v=True)
    variants += [Choice(smooth, None), Choice(get_policy("wan-fast").numerics, Guard(logit_limit=4.0))]
    for choice in variants:
        numerics = choice.numerics if choice.guard is None else choice.guard.apply(choice.numerics)
        for error, call in zip(bench.errors(choice).values, made.made, strict=True):
            q, k, v = (t.float()[None, :, None] for t in (call.q, call.k, call.v))
            out, exact = (reference.attention(q, k, v, n, scale=SCALE).out for n in (numerics, Numerics()))
            assert error == pytest.approx(rel_l2(out, exact), rel=1e-5)
            assert error > 0.01


def held():
    """Bytes of all tensors that are alive."""
    gc.collect()
    tensors = (t for t in gc.get_objects() if type(t) is torch.Tensor and t.layout == torch.strided)
    storages = (t.untyped_storage() for t in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("name", [n for n, p in policies().items() if not p.numerics.smooth_q])
def test_a_bench_holds_three_times_what_the_recording_takes(name):
    """Of the two schemes that a guard makes: logits of the recorded rows and V, in float32."""
    made = InMemory(lambda g: normal(g, keys=1024, rows=64), prompts=2)
    reference.key_order(1024, "anchor128", torch.device("cpu"))  # what the reference itself keeps
    size = sum(t.nbytes for call in made.made for t in (call.q, call.k, call.v))
    numerics, guard = get_policy(name).numerics, Guard(logit_limit=4.0)
    reference.attention(*(t.float()[None, :, None] for t in (made.made[0].q, made.made[0].k, made.made[0].v)),
                        guard.apply(numerics), scale=SCALE)  # fmt: skip
    before = held()
    bench = Bench(made.made)
    bench.errors(Choice(numerics, None))
    bench.errors(Choice(numerics, guard))
    schemes = len({numerics, guard.apply(numerics)})
    assert held() - before <= 1.55 * schemes * size
    assert len(bench._prepared) == schemes


def test_coefficients_are_as_good_as_those_of_an_exhaustive_grid():
    made = InMemory(normal, prompts=4, calls=2)
    bad = get_policy("wan-fast").with_(
        name="bad",
        guard=None,
        numerics=dataclasses.replace(get_policy("wan-fast").numerics, classifier=Classifier("affine", 1.0, 1.55)),
    )
    found = fit(made, bad, progress=False)
    assert found.data["stages"][-1]["kept"]
    n = found.policy.numerics
    bench = Bench(made.calls(FIT))
    fitted = bench.errors(Choice(n, None)).mean
    tried = {}
    for a, b in itertools.product([1.0 + 0.05 * i for i in range(21)], [0.3 + 0.05 * i for i in range(27)]):
        try:
            classifier = Classifier("affine", a, b)
        except PolicyError:
            continue
        tried[a, b] = bench.errors(Choice(dataclasses.replace(n, classifier=classifier), None)).mean
    assert fitted <= min(tried.values()) * 1.005
    assert bench.errors(Choice(bad.numerics, None)).mean > 1.05 * fitted


@pytest.mark.parametrize(
    ("k_mean", "v_mean", "chosen"), [(3.0, 0.0, (True, False)), (0.0, 2.0, (False, True)), (0.0, 0.0, (False, False))]
)
def test_smoothing_is_chosen_where_there_is_a_mean_to_take_away(k_mean, v_mean, chosen):
    found = fit(InMemory(lambda g: normal(g, k_mean, v_mean), calls=6), "nvfp4", progress=False)
    assert (found.policy.numerics.smooth_k, found.policy.numerics.smooth_v) == chosen
    assert tuple(stage["kept"] for stage in found.data["stages"][:2]) == chosen
    if any(chosen):
        held = found.data["halves"][HELD_OUT]
        assert held["fitted"]["median"] < 0.9 * held["base"]["median"]
        assert held["verdict"] == "lower"


def test_the_held_out_half_never_takes_part_in_the_choice():
    plain = InMemory(normal)
    other = InMemory(normal, held_out=lambda g: normal(g, k_mean=5.0, v_mean=5.0))
    a, b = fit(plain, "wan-two-piece", progress=False), fit(other, "wan-two-piece", progress=False)
    assert a.data["stages"] == b.data["stages"]
    assert (a.policy.numerics, a.policy.guard) == (b.policy.numerics, b.policy.guard)
    assert a.data["halves"][FIT] == b.data["halves"][FIT]
    assert a.data["halves"][HELD_OUT] != b.data["halves"][HELD_OUT]
    assert plain.asked == [FIT, HELD_OUT]


def test_a_fit_is_deterministic():
    a, b = (fit(InMemory(normal, calls=1), "wan-two-piece-nv", progress=False) for _ in range(2))
    assert a.data == b.data
    assert a.policy == b.policy


def test_a_gain_without_an_interval_is_not_kept():
    found = fit(InMemory(lambda g: normal(g, k_mean=3.0), prompts=2, calls=1), "nvfp4", progress=False)
    stage = found.data["stages"][0]
    assert stage["error_best"] < 0.9 * stage["error_before"]
    assert not stage["kept"]
    assert found.policy.numerics == get_policy("nvfp4").numerics
    assert found.verdict[0] == "No change to nvfp4 is worth it on this model: fitted has its constants."


def test_a_guard_may_become_stricter_and_is_never_given_up():
    steep = lambda g: (20 * normal(g)[0], *normal(g)[1:])  # noqa: E731
    found = fit(InMemory(steep, calls=4), "wan-fast", progress=False)
    [stage] = [s for s in found.data["stages"] if s["title"] == "guard"]
    assert [c["what"] for c in stage["candidates"]] == ["guard above 60", "guard above 5", "guard above 0"]
    errors = [c["error"] for c in stage["candidates"]]
    assert errors[0] == errors[1], "no call exceeds 5, so neither limit guards one"
    assert errors[2] != errors[0]


def test_what_the_blackwell_kernels_compute_stays_so():
    found = fit(InMemory(normal, calls=1), "wan-two-piece-nv", progress=False)
    [stage] = [s for s in found.data["stages"] if s["title"] == "row-reference"]
    assert len(stage["candidates"]) == 1
    assert all("NVFP4 P is relative to the row's maximum" in one["why"] for one in stage["left_out"])
    assert found.data["off_blackwell"] is None
    free = fit(InMemory(normal, calls=1), "nvfp4", progress=False)
    [stage] = [s for s in free.data["stages"] if s["title"] == "row-reference"]
    assert len(stage["candidates"]) > 1


def test_steps_can_be_left_out():
    steep = InMemory(lambda g: normal(g, k_mean=3.0), calls=4)
    whole = fit(steep, "nvfp4", progress=False).policy.numerics
    assert (whole.smooth_k, whole.row_reference) != (False, "rowmax")
    part = fit(steep, "nvfp4", keep=["smooth-k", "row-reference"], progress=False)
    assert (part.policy.numerics.smooth_k, part.policy.numerics.row_reference) == (False, "rowmax")
    assert [s["note"] for s in part.data["stages"]][:3:2] == ["kept, as asked"] * 2
    with pytest.raises(SettingsError, match="there is no step 'margin' to keep; the steps are smooth-k, smooth-v, row"):
        fit(steep, keep=["margin"], progress=False)
    with pytest.raises(SettingsError, match="every step is kept"):
        fit(steep, keep=list(calibration_steps.STEPS), progress=False)


def test_calls_that_rules_send_elsewhere_do_not_count():
    made = InMemory(normal, calls=3)
    base = get_policy("wan-fast").with_(name="ruled", rules=[Rule("bf16", layers=(0, -1))])
    found = fit(made, base, progress=False)
    assert [row["layer"] for row in found.data["halves"][HELD_OUT]["layers"]] == [1]
    assert found.policy.rules == base.rules
    everything = get_policy("wan-fast").with_(name="short", min_tokens=1000)
    made.folder = "made-up"
    with pytest.raises(Wanfp4Error, match="the fit half of 'made-up' has no call that 'short' rounds"):
        fit(made, everything, progress=False)


DIRECT = Rule(get_policy("direct-p-fast").numerics, layers=(1,))


@pytest.mark.parametrize(
    ("base", "rule", "stays"),
    [
        ("wan-fast", DIRECT, True),
        ("wan-two-piece", DIRECT, True),
        ("nvfp4", DIRECT, True),
        ("wan-fast", Rule("bf16", layers=(1,)), False),
        ("wan-fast", Rule("nvfp4", layers=(1,)), False),
        ("wan-fast", None, False),
    ],
)
def test_a_guard_that_rules_have_too_stays_theirs(base, rule, stays):
    """Calls of a rule are not measured, so nothing that is found without them may take their guard or its limit."""
    made = InMemory(normal, prompts=10, calls=6, largest=50.0)
    guard = Guard(logit_limit=60.0)
    policy = get_policy(base).with_(name="ruled", guard=guard, rules=[] if rule is None else [rule])
    found = fit(made, policy, progress=False, keep=["classifier", "smooth-k", "smooth-v"])
    stages = {stage["title"]: stage for stage in found.data["stages"]}
    direct = policy.numerics.p == "mxfp4-direct"
    if stays:
        assert found.policy.guard == guard
        assert guarding(found.policy.rules[0].numerics, found.policy.guard)
    else:
        assert found.policy.guard != guard, "an anchor is better on these calls"
    if direct:
        for title in ("row-reference", "guard"):
            assert ("the base's rules have it, too, and their calls were not" in stages[title]["note"]) == stays
        assert (len(stages["row-reference"]["candidates"]) == 1) == stays
    else:
        tried = [candidate["what"] for candidate in stages["row-reference"]["candidates"]]
        assert len(tried) > 1, "no guard has anything to do with its own row reference"
        assert all("guard above 60" in what for what in tried)
    if stays and direct:
        assert "too, and their calls were not measured" in fit_markdown(found.data)


def test_broken_calls_are_named():
    made = InMemory(normal)
    made.made[0].k[3, 4] = math.nan
    with pytest.raises(Wanfp4Error, match="holds NaN or infinity: prompt 0, seed 0, transformer layer 0, step 0"):
        fit(made, progress=False)


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("bf16", "rounds nothing outside its rules"),
        ("sage3", "smooths Q, over blocks of 128 tokens; a recording has single query rows"),
        ("fp8-direct", "shares exponents of Q among 32 tokens"),
        (Policy("g", dataclasses.replace(get_policy("nvfp4").numerics, global_scale=True)), "over all heads"),
        ("wan-fats", "unknown policy 'wan-fats'"),
    ],
)
def test_bases_that_a_recording_cannot_judge_are_refused(base, words):
    with pytest.raises(PolicyError, match=words):
        fit(InMemory(normal), base, progress=False)


def test_a_fit_to_part_of_a_recording_says_so_and_a_worse_one_warns():
    made = InMemory(lambda g: normal(g, k_mean=3.0), held_out=normal)
    made.data["complete"] = False
    found = fit(made, "nvfp4", progress=False)
    assert found.verdict[-1] == "The recording is incomplete: runs of it are missing."
    assert "The recording is incomplete" in fit_markdown(found.data)
    found.data["halves"][HELD_OUT]["verdict"] = "higher"
    assert found.verdict[0].endswith("HIGHER on held-out prompts: use nvfp4.")


@pytest.mark.parametrize(
    ("prompts", "words"), [(4, "With 2 prompts the intervals"), (10, "With 5 prompts the intervals"), (12, None)]
)
def test_few_prompts_are_told_with_the_verdict(prompts, words):
    found = fit(InMemory(lambda g: normal(g, k_mean=3.0), prompts=prompts, calls=6), "nvfp4",
                keep=["row-reference", "row-peak"], progress=False)  # fmt: skip
    assert found.data["stages"][0]["kept"]
    told = [line for line in found.verdict if "less than 95 % sure" in line]
    page = fit_markdown(found.data)
    if words is None:
        assert not told
        assert "less than 95 % sure" not in page
    else:
        assert told[0].startswith(words)
        assert f"Of the fit half: {words}" in page
        assert f"Of the held-out half: {words}" in page


def test_a_fitted_policy_is_written_with_its_evidence(tmp_path):
    found = fit(InMemory(lambda g: normal(g, k_mean=3.0)), "nvfp4", "mine", progress=False)
    paths = found.save(tmp_path / "mine.json")
    assert [p.name for p in paths] == ["mine.json", "mine.fit.json", "mine.report.md"]
    policy = get_policy(paths[0])
    assert policy == found.policy
    assert policy.numerics.smooth_k
    assert "smooth-k yes" in policy.description
    assert "weights 000000000000" in policy.description
    data = json.loads(paths[1].read_text())
    assert data == found.data
    assert [stage["title"] for stage in data["stages"]] == [
        "smooth-k",
        "smooth-v",
        "row-reference",
        "guard",
        "row-peak",
        "classifier",
    ]
    assert [c["what"] for c in data["stages"][0]["candidates"]] == ["no", "yes"]
    assert len(data["stages"][4]["candidates"]) == len(calibration_steps.PEAKS)
    page = paths[2].read_text()
    assert "smooth-k no → yes" in page
    assert "lower on held-out prompts, too" in page
    assert "exp2 has no coefficients" in page
    with pytest.raises(SettingsError, match=r"must end in \.json, not 'mine.yaml'"):
        calibration.outputs("mine.yaml")
    with pytest.raises(PolicyError, match="'nvfp4' is the name of a preset"):
        fit(InMemory(normal), "nvfp4", "nvfp4", progress=False)


def test_search_finds_a_minimum_off_the_grid_and_between_its_steps():
    asked = []

    def bowl(point):
        asked.append(point)
        return (point[0] - 1.37) ** 2 + 3 * (point[1] + 0.42) ** 2

    best = calibration_steps.search(bowl, itertools.product((0.0, 0.4, 0.8), (-1.0, 0.0)), [0.2, 0.5])
    assert best[0] == pytest.approx(1.37, abs=0.03)
    assert best[1] == pytest.approx(-0.42, abs=0.07)
    assert len(asked) < 100
