"""`wanfp4 verify`: what is right passes, what is wrong is named, and every line but CUDA's own runs on the CPU."""

import dataclasses
import json
import types
from pathlib import Path

import pytest
import torch

from wanfp4.errors import SettingsError
from wanfp4.kernels import dispatch
from wanfp4.kernels.blackwell import backend as sm100
from wanfp4.kernels.blackwell import verify as work

CPU = torch.device("cpu")
CASES = (work.Case(33, 70), work.Case(40, 31, batch=2, heads=2, strides="packed"), work.Case(20, 64, sharpness=300))


@pytest.fixture
def few_cases(monkeypatch):
    monkeypatch.setattr(work, "CASES", CASES)
    monkeypatch.setattr(work, "SMALL_CASES", CASES[:1])


def receipt(path="wanfp4-verify.json"):
    return json.loads(Path(path).read_text())


def stand_in(monkeypatch, change=lambda outcome, calls: outcome, why=None):
    """A backend "sm100" that runs here: the reference, changed by `change(outcome, number of the call)`."""
    calls = []

    def run(*arguments):
        calls.append(arguments)
        outcome = dispatch._reference(*arguments)
        flag = torch.tensor([outcome.notes.get("guarded", 0)], dtype=torch.int32)
        return change(dataclasses.replace(outcome, backend="sm100", flag=flag), len(calls))

    real, *others = dispatch.backends()
    made = dataclasses.replace(real, run=run, missing=lambda: why, refuses=lambda n, _: sm100.limits(n))
    monkeypatch.setattr(dispatch, "_BACKENDS", (made, *others))
    return calls


def test_a_backend_that_is_right(run, monkeypatch, few_cases):
    calls = stand_in(monkeypatch)
    result = run("verify", "--policy", "wan-fast", "--policy", "direct-p-exp2", "--timing", "64x2", "--rounds", "3")
    assert result.exit_code == 0, result.output
    made = receipt()
    assert made["complete"] is True
    assert made["faults"] == []
    assert made["backend"] == "sm100"
    assert made["simulated"] is None
    assert [policy["name"] for policy in made["policies"]] == ["wan-fast", "direct-p-exp2"]
    assert made["versions"]["torch"] == torch.__version__
    assert "cuda of torch" in made["versions"]
    assert made["machine"]["device"] == "cpu"

    rows = made["numerics"]
    assert [(row["policy"], row["case"]) for row in rows] == [
        (name, case.label) for name in ("wan-fast", "direct-p-exp2") for case in CASES
    ]
    assert all(row["rows_off"] == 0 and row["repeatable"] for row in rows)
    assert [row["guarded"] for row in rows[:3]] == [False, False, True]

    [timing] = made["timings"]
    assert (timing["tokens"], timing["heads"], timing["clock"]) == (64, 2, "host")
    assert list(timing["times"]) == ["wan-fast", "direct-p-exp2", "sdpa", "sdpa cudnn", "sdpa flash"]
    ours, sdpa = timing["times"]["wan-fast"], timing["times"]["sdpa"]
    assert ours["low"] <= ours["median"] <= ours["high"]
    assert ours["tflops"] == pytest.approx(4 * 64 * 64 * 2 * 128 / ours["median"] / 1e12)
    medians = [t["median"] for name, t in timing["times"].items() if name.startswith("sdpa") and "median" in t]
    assert ours["speedup"] == pytest.approx(min(medians) / ours["median"])
    assert sdpa["host"] == pytest.approx(sdpa["median"], rel=0.5)
    assert ours["kernels"]
    assert "kernels" not in sdpa
    assert "error" in timing["times"]["sdpa cudnn"]  # there is no cuDNN on a CPU

    # Two runs a case; three to warm up, three rounds and one for the profiler.
    assert len(calls) == 2 * (2 * len(CASES) + 3 + 3 + 1)
    assert "wan-fast, 33 × 70: ok" in result.stderr
    assert "timing 64 tokens × 2 heads" in result.stderr
    assert "the receipt is wanfp4-verify.json; please send it back" in result.stderr
    assert "  wan-fast: 3 of 3 ok, largest rel-L2 0.0e+00" in result.stdout
    assert "Everything is as it should be." in result.stdout


def nudged(outcome, share):
    """Rows from the first on, that share of them, a few per cent larger."""
    out = outcome.out.clone()
    out[:, : max(1, round(share * out.shape[1]))] *= 1.05
    return dataclasses.replace(outcome, out=out)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda o, n: nudged(o, 1.0), "100.00% of the rows are off, over 0.2%"),
        (lambda o, n: nudged(o, 0.1), "of the rows are off, over 0.2%"),
        (lambda o, n: dataclasses.replace(o, out=o.out * torch.nan), "NaN or infinity in the output"),
        (lambda o, n: dataclasses.replace(o, lse=o.lse + 1e-3), "the log-sum-exp of 100.00% of the rows is off by"),
        (lambda o, n: dataclasses.replace(o, lse=o.lse + 0.1), ", over 1e-02"),
        (lambda o, n: dataclasses.replace(o, lse=o.lse + n % 2 * 1e-6), "a second run gave other bytes"),
        (lambda o, n: dataclasses.replace(o, flag=1 - o.flag), "the guard decided True, and the reference otherwise"),
    ],
)
def test_what_is_wrong_is_named(run, monkeypatch, few_cases, change, fault):
    stand_in(monkeypatch, change)
    result = run("verify", "--policy", "wan-fast", "--no-timings")
    assert result.exit_code == 1
    assert any(fault in line and line.startswith("wan-fast, ") for line in receipt()["faults"])
    assert fault in result.stdout
    assert "Something is wrong:" in result.stdout
    assert receipt()["complete"] is True


def test_one_row_may_be_off(run, monkeypatch, few_cases):
    """A code that the order of additions decides moves a row; that is no fault, and it is told."""

    def one(outcome, _):
        out = outcome.out.clone()
        out[0, 0, 0] *= 1.05
        return dataclasses.replace(outcome, out=out)

    stand_in(monkeypatch, one)
    assert run("verify", "--policy", "direct-p-fast").exit_code == 0
    assert [row["rows_off"] > 0 for row in receipt()["numerics"]] == [True] * len(CASES)


def test_a_case_that_fails_leaves_the_others(run, monkeypatch, few_cases):
    def broken(outcome, number):
        if number == 1:
            raise RuntimeError("CUDA error: an illegal memory access")
        return outcome

    stand_in(monkeypatch, broken)
    result = run("verify", "--policy", "direct-p-fast")
    assert result.exit_code == 1
    fault = "direct-p-fast, 33 × 70: it failed: RuntimeError: CUDA error: an illegal memory access"
    assert receipt()["faults"] == [fault]
    assert "direct-p-fast: 2 of 3 ok" in result.stdout
    assert "nothing is timed on cpu unless --timing asks for it" in result.stderr


def test_a_timing_that_fails_leaves_the_others(run, monkeypatch, few_cases):
    stand_in(monkeypatch)
    measure = work.measure

    def scarce(call, chosen, tokens, *rest):
        if tokens > 100:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB.")
        return measure(call, chosen, tokens, *rest)

    monkeypatch.setattr(work, "measure", scarce)
    monkeypatch.setattr(work, "kernel_times", lambda *_: (_ for _ in ()).throw(RuntimeError("no rights to profile")))
    timings = ("--timing", "128x1", "--timing", "64x1")
    result = run("verify", "--policy", "direct-p-fast", *timings, "--rounds", "2", "--json", "receipts/one.json")
    assert result.exit_code == 0, result.output
    first, second = receipt("receipts/one.json")["timings"]
    assert first["error"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 7 GiB."
    assert "not timed: OutOfMemoryError" in result.stdout
    assert second["times"]["direct-p-fast"]["kernels_error"] == "RuntimeError: no rights to profile"
    assert " TFLOP/s, " in result.stdout


def test_what_was_found_survives_an_interruption(run, monkeypatch, few_cases):
    def interrupted(outcome, number):
        if number > 2 * len(CASES):
            raise KeyboardInterrupt
        return outcome

    stand_in(monkeypatch, interrupted)
    result = run("verify", "--policy", "direct-p-fast", "--policy", "direct-p-exp2")
    assert result.exit_code == 130
    assert receipt()["complete"] is False
    assert len(receipt()["numerics"]) == len(CASES)


def test_the_reference_verifies_itself_and_sdpa_what_it_runs(run, few_cases):
    assert run("verify", "--backend", "reference", "--policy", "nvfp4-fp8", "--device", "cpu").exit_code == 0
    result = run("verify", "--backend", "sdpa", "--json", "sdpa.json", "--no-timings")
    assert result.exit_code == 0, result.output
    made = receipt("sdpa.json")
    assert {row["policy"] for row in made["numerics"]} == {"bf16"}
    assert "rounds nothing" in made["left_out"]["wan-fast"]


def test_what_cannot_be_verified_is_one_sentence(refused, monkeypatch):
    without = refused("verify")
    assert "'sm100' can run no policy here: " in without
    assert "--simulate runs its kernels on the simulator" in without
    assert "unknown backend 'sm70'" in refused("verify", "--backend", "sm70")
    assert "'sdpa' cannot run policy 'wan-fast'" in refused("verify", "--backend", "sdpa", "--policy", "wan-fast")
    assert "the simulator runs the backend 'sm100'" in refused("verify", "--simulate", "--backend", "reference")
    assert "'sm_90' is not simulated" in refused("verify", "--simulate", "--arch", "sm_90")
    assert "'sm100' cannot run policy 'sage3'" in refused("verify", "--simulate", "--policy", "sage3")
    Path("wanfp4-verify.json").write_text("{}")
    assert "exists; choose another --json" in refused("verify", "--backend", "reference")


def test_timings_are_tokens_by_heads(run, refused, monkeypatch, few_cases):
    assert work.parse_timing("32760x12") == (32_760, 12)
    assert work.parse_timing("75600×40") == (75_600, 40)
    for text in ("32760", "x12", "0x12", "12x", "ax2"):
        with pytest.raises(SettingsError, match="a timing is tokens x heads"):
            work.parse_timing(text)
    stand_in(monkeypatch)
    assert "a timing is tokens x heads" in refused("verify", "--timing", "many")
    assert (75_600, 40) in work.TIMINGS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
def test_on_the_simulator(run, few_cases):
    """The kernels themselves, on the order of events of two seeds, without timings."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    result = run("verify", "--simulate", "--policy", "direct-p-fast", "--arch", "sm_103a")
    assert result.exit_code == 0, result.output
    made = receipt()
    assert made["simulated"] == "sm_103a"
    assert made["timings"] == []
    assert [row["case"] for row in made["numerics"]] == [CASES[0].label]
    assert made["numerics"][0]["repeatable"] is True
    assert "direct-p-fast: 1 of 1 ok" in result.stdout
    assert "sm100 on simulated sm_103a" in result.stdout


# Inputs


def test_inputs_are_what_their_case_says():
    plain = work.Case(5, 7, batch=2, heads=3).tensors(0, CPU)
    for strides in ("packed", "heads first"):
        tensors = work.Case(5, 7, batch=2, heads=3, strides=strides).tensors(0, CPU)
        for x, y in zip(plain, tensors, strict=True):
            assert torch.equal(x, y)
            assert not y.is_contiguous()
            assert y.stride(-1) == 1
    sharp = work.Case(5, 7, batch=2, heads=3, sharpness=30).tensors(0, CPU)
    torch.testing.assert_close(sharp[0].float(), plain[0].float() * 30, rtol=1e-2, atol=0)
    assert torch.equal(sharp[1], plain[1])
    half = work.Case(5, 7, dtype="f16").tensors(1, CPU)
    assert {x.dtype for x in half} == {torch.float16}
    assert not torch.equal(half[0], work.Case(5, 7, dtype="f16").tensors(2, CPU)[0])
    label = work.Case(5, 7, batch=2, heads=3, dtype="f16", strides="packed", sharpness=30).label
    assert label == "5 × 7, B 2, H 3, f16, packed, logits × 30"


def test_the_matrix_has_what_the_issue_asks_for():
    lengths = {case.queries for case in work.CASES if case.queries == case.keys}
    assert {1, 31, 33, 127, 129, 255, 640} <= lengths
    assert any(case.queries != case.keys for case in work.CASES)
    assert any(case.batch > 1 and case.heads > 1 for case in work.CASES)
    assert {case.strides for case in work.CASES} == {"contiguous", "packed", "heads first"}
    assert {case.sharpness for case in work.CASES} == {1, 30, 300}
    assert {case.dtype for case in work.CASES} == {"bf16", "f16"}
    for small in work.SMALL_CASES:
        assert small.batch * small.heads * -(-small.queries // 128) * -(-small.keys // 128) <= 4


# Clocks, and what only a GPU has


def test_contenders_take_turns():
    order = []

    def fails():
        raise RuntimeError("no such kernel")

    times = work.interleaved(
        {"a": lambda: order.append("a"), "x": fails, "b": lambda: order.append("b")}, work.HostClock(), 4, 2
    )
    assert "".join(order) == "aa" + "bb" + "abababab"
    assert times["x"] == {"error": "RuntimeError: no such kernel"}
    assert list(times) == ["a", "x", "b"]


def test_medians_belong_to_their_contenders():
    class Counter(work.HostClock):
        """A call lasts as long as the number that it leaves behind."""

        def __init__(self):
            super().__init__()
            self.now = 0

        def start(self):
            self._times.append(self.now)

        stop = start

    clock = Counter()

    def lasts(*seconds):
        left = list(seconds)
        return lambda: setattr(clock, "now", clock.now + left.pop(0))

    times = work.interleaved({"a": lasts(9, 1, 2, 3, 4, 50), "b": lasts(9, 70, 60, 70, 80, 70)}, clock, 5, 1)
    assert (times["a"]["low"], times["a"]["median"], times["a"]["high"]) == (2, 3, 4)
    assert times["b"]["median"] == 70


def test_cuda_events_are_read_in_pairs(monkeypatch):
    class Event:
        """Recorded one millisecond after another."""

        count = 0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            Event.count += 1
            self.at = Event.count**2

        def elapsed_time(self, end):
            return float(end.at - self.at)

    waited = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(1))
    clock = work.CudaClock()
    for _ in range(2):
        clock.start()
        clock.stop()
    assert waited == []
    assert clock.seconds() == [pytest.approx(0.003), pytest.approx(0.007)]  # 2² − 1², 4² − 3²
    assert waited == [1]
    assert clock.seconds() == []


def test_nvidia_smi_is_asked_for_the_device(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    values = ["NVIDIA B200", "590.1", "1,665 MHz", "1965 MHz", "3996 MHz", "800 W", "1000 W", "55"]
    program.write_text(
        f"#!/bin/sh\necho \"$@\" > {tmp_path}/asked\necho '{', '.join(v.replace(',', '') for v in values)}'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="12ab"))
    found = work.smi(torch.device("cuda", 0))
    assert found["name"] == "NVIDIA B200"
    assert found["clocks.sm"] == "1665 MHz"
    assert found["temperature.gpu"] == "55"
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("-i GPU-12ab --query-gpu=name,driver_version,clocks.sm,")
    program.write_text("#!/bin/sh\nexit 9\n")
    assert work.query_smi(str(program), "GPU-1") is None
    program.write_text("#!/bin/sh\necho one, two\n")
    assert work.query_smi(str(program), "GPU-1") is None
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert work.smi(torch.device("cuda", 0)) is None
    assert work.smi(CPU) is None


def test_numbers_without_a_json_form_become_text():
    assert work.json_values({"a": float("nan"), "b": 1.5, "c": None}) == {"a": "nan", "b": 1.5, "c": None}
