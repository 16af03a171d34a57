"""Fits find known optima, and look at the fit half only."""

import dataclasses
import gc
import itertools
import json
import math

import pytest
import torch
from tiny import FRAMES, HEIGHT, WIDTH

from wanfp4.errors import PolicyError, SettingsError, Wanfp4Error
from wanfp4.kernels import reference
from wanfp4.policy import Classifier, Guard, Numerics, Policy, Rule, get_policy, guarding, policies
from wanfp4.processors.pipelines import Settings
from wanfp4.quality import calibration, calibration_steps, recording
from wanfp4.quality.calibration import fit
from wanfp4.quality.calibration_bench import Bench, Choice
from wanfp4.quality.calibration_pages import fit_markdown
from wanfp4.quality.metrics import rel_l2
from wanfp4.quality.recording import FIT, HELD_OUT, Recorded, Recording

SETTINGS = Settings(height=HEIGHT, width=WIDTH, frames=FRAMES, steps=3, guidance=4.0)
PROMPTS = ["a red circle", "a blue star", "a green square"]
SCALE = 1 / math.sqrt(128)


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
