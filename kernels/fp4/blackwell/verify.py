"""What the first owner of a GPU runs: does a backend compute what the reference computes, and how fast is it?

Numerics: every case of a matrix of shapes, strides, dtypes and logits, twice, against the torch reference on the same
device. Outputs must be those of the reference but for rare codes that the order of additions decides, and the second
run must give the same bytes as the first, or there is a race. Timings: medians over interleaved rounds, so that clocks
and temperature are the same for all contenders.
"""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from wanfp4.errors import BackendError, SettingsError, brief
from wanfp4.kernels import dispatch
from wanfp4.policy import Guard, Numerics, Policy

HEAD_DIM = 128
SCALE = 1 / math.sqrt(HEAD_DIM)

# A row is off when its relative L2 error exceeds one unit in the last place of BF16. Rows are off where the order of
# additions decides a code of P: seldom on N(0,1) data, more often on sharp logits, whose rounding errors are larger.
ROW_LIMIT = 2.0**-7
ROWS_OFF = {1: 0.002, 30: 0.02, 300: 0.05}  # the largest share, by sharpness; one row is always allowed
LSE_LIMIT = 1e-5  # of the larger of 1 and |LSE|; as many rows as may be off may exceed it, where a code has flipped
LSE_FLIPPED = 1e-2  # which one code of P moves it by, at most
EXACT_ROW_LIMIT = 2.0**-5  # for policies that round nothing, whose P is BF16 on tensor cores


@dataclass(frozen=True)
class Case:
    """Inputs of one attention call, from N(0,1).

    strides    "contiguous"; "packed": q, k, v are slices of one tensor; "heads first": [B, H, S, D], transposed views
    sharpness  factor of q, so of the logits
    """

    queries: int
    keys: int
    batch: int = 1
    heads: int = 1
    dtype: str = "bf16"
    strides: str = "contiguous"
    sharpness: int = 1

    @property
    def label(self) -> str:
        """A few words for people."""
        parts = [f"{self.queries} × {self.keys}"]
        if self.batch * self.heads > 1:
            parts.append(f"B {self.batch}, H {self.heads}")
        if self.dtype != "bf16":
            parts.append(self.dtype)
        if self.strides != "contiguous":
            parts.append(self.strides)
        if self.sharpness > 1:
            parts.append(f"logits × {self.sharpness}")
        return ", ".join(parts)

    def tensors(self, seed: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, S, H, 128]: the same on every device."""
        generator = torch.Generator("cpu").manual_seed(seed)
        dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[self.dtype]
        made = []
        for tokens, factor in ((self.queries, self.sharpness), (self.keys, 1), (self.keys, 1)):
            x = torch.randn(self.batch, tokens, self.heads, HEAD_DIM, generator=generator) * factor
            made.append(x.to(dtype).to(device))
        if self.strides == "heads first":
            made = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in made]
        elif self.strides == "packed":
            tokens = max(self.queries, self.keys)
            whole = torch.zeros(self.batch, tokens, 3, self.heads, HEAD_DIM, dtype=dtype, device=device)
            for i, x in enumerate(made):
                whole[:, : x.shape[1], i] = x
            made = [whole[:, : x.shape[1], i] for i, x in enumerate(made)]
        q, k, v = made
        return q, k, v


CASES = (
    *(Case(tokens, tokens) for tokens in (1, 31, 33, 127, 128, 129, 255, 640)),
    Case(1, 640),
    Case(640, 1),
    Case(33, 200),
    Case(300, 129),
    Case(129, 255, batch=2, heads=3),
    Case(255, 129, heads=12),
    Case(129, 255, batch=2, heads=3, strides="packed"),
    Case(255, 255, batch=2, heads=3, strides="heads first"),
    Case(255, 640, dtype="f16"),
    Case(255, 640, sharpness=30),
    Case(255, 640, sharpness=300),
)
# Besides, where there is a GPU: Wan's number of keys, and more work than multiprocessors.
LARGE_CASES = (Case(256, 32_760), Case(2048, 2048, batch=2, heads=40))
# For the simulator, which takes about a second for one.
SMALL_CASES = (
    Case(1, 1),
    Case(33, 33),
    Case(129, 129),
    Case(33, 200),
    Case(40, 70, batch=2, heads=2, strides="packed"),
    Case(70, 40, heads=2, strides="heads first"),
    Case(31, 127, dtype="f16"),
    Case(33, 255, sharpness=30),
    Case(33, 255, sharpness=300),
)

# Tokens × heads: the grid of arXiv 2609.04105, and Wan2.1's 480 × 832 (1.3B) and 720 × 1280 (14B) at 81 frames.
TIMINGS = (*((s, h) for s in (8192, 16384, 32768) for h in (12, 24, 40)), (32_760, 12), (75_600, 40))

Call = Callable[[Tensor, Tensor, Tensor, Numerics, Guard | None, bool], dispatch.Outcome]


def dispatched(backend: str) -> Call:
    """Calls of a backend by its name."""

    def call(
        q: Tensor, k: Tensor, v: Tensor, numerics: Numerics, guard: Guard | None, return_lse: bool
    ) -> dispatch.Outcome:
        return dispatch.run(q, k, v, numerics, guard=guard, backend=backend, return_lse=return_lse)

    return call


@contextlib.contextmanager
def simulated(arch: str, multiprocessors: int = 3) -> Iterator[Call]:
    """Calls of the SM100 backend on the simulator, on CPU tensors. Every call draws another order of events.

    With few multiprocessors a CTA works on several tiles, as it does on long sequences.
    """
    from wanfp4 import simulator
    from wanfp4.kernels.blackwell import backend, cache

    with simulator.device(arch, seed=0, track=True, line_info=False) as gpu:

        def empty(*shape: Any, **options: Any) -> Tensor:
            new = torch.empty(*shape, **options)
            new.view(torch.uint8).fill_(0xFF)  # NaN, for whoever reads what nobody wrote
            gpu.register(new)
            return new

        target = backend.Target(cache.Kernels(arch), multiprocessors, empty)

        def call(
            q: Tensor, k: Tensor, v: Tensor, numerics: Numerics, guard: Guard | None, return_lse: bool
        ) -> dispatch.Outcome:
            gpu.seed = (gpu.seed or 0) + 1
            gpu.register(q=q, k=k, v=v)
            done = backend.run_on(target, q, k, v, numerics, guard, SCALE, return_lse)
            return dispatch.Outcome(done.out, done.lse, "sm100", {}, done.flag)

        yield call


def unsupported(policy: Policy, backend: str, device: torch.device, *, simulate: bool = False) -> str | None:
    """Why a backend does not compute a policy's numerics on a device, or None. Raises BackendError for no such name.

    On the simulator that is only what no device would change.
    """
    if simulate:
        from wanfp4.kernels.blackwell import backend as sm100

        return sm100.not_installed() or sm100.limits(policy.numerics)
    known = {b.name: b for b in dispatch.backends()}
    if backend not in known:
        raise BackendError(f"unknown backend {backend!r}; this version has {', '.join(known)}")
    return known[backend].why_not(policy.numerics, device)


def check(call: Call, policy: Policy, case: Case, device: torch.device, seed: int = 0) -> dict[str, Any]:
    """One case under a policy's numerics and guard, as plain JSON values; `faults` says in sentences what is wrong.

    rel_l2       against the reference's float32 output, rounded to the output's dtype
    rows_off     share of rows whose own relative L2 error is over `ROW_LIMIT`
    lse_error    largest |difference| / max(1, |LSE|) of the rows that are not off
    guarded      whether the guard took effect; None where there is none to decide
    """
    started = time.perf_counter()
    row: dict[str, Any] = {"policy": policy.name, "case": case.label, "seed": seed}
    q, k, v = case.tensors(seed, device)
    faults = []
    try:
        first = call(q, k, v, policy.numerics, policy.guard, True)
        second = call(q, k, v, policy.numerics, policy.guard, True)
        wanted = dispatch.run(
            q, k, v.float(), policy.numerics, guard=policy.guard, backend="reference", return_lse=True
        )
    except Exception as error:  # noqa: BLE001 - whatever goes wrong belongs into the receipt, and the rest still counts
        return {**row, "faults": [f"it failed: {brief(error)}"], "seconds": time.perf_counter() - started}
    assert first.lse is not None
    assert second.lse is not None
    assert wanted.lse is not None
    target = wanted.out.to(v.dtype).double()
    distance, size = (first.out.double() - target).norm(dim=-1), target.norm(dim=-1)
    finite = bool(first.out.isfinite().all() and first.lse.isfinite().all())
    off = ~(distance <= (EXACT_ROW_LIMIT if policy.numerics.is_exact else ROW_LIMIT) * size)
    lse_error = (first.lse - wanted.lse).abs() / wanted.lse.abs().clamp(min=1)
    share = float(off.float().mean())
    moved = float((lse_error > LSE_LIMIT).float().mean())
    row |= {
        "rel_l2": float(distance.norm() / size.norm()),
        "rows_off": share,
        "lse_error": float(lse_error.max()),
        "lse_moved": moved,
        "repeatable": torch.equal(first.out, second.out) and torch.equal(first.lse, second.lse),
        "guarded": None if first.flag is None else bool(first.flag.item()),
    }
    if not finite:
        faults.append("NaN or infinity in the output")
    if int(off.sum()) > 1 and share > ROWS_OFF[case.sharpness]:
        faults.append(f"{share:.2%} of the rows are off, over {ROWS_OFF[case.sharpness]:.1%}")
    if moved > ROWS_OFF[case.sharpness] and int((lse_error > LSE_LIMIT).sum()) > 1:
        faults.append(f"the log-sum-exp of {moved:.2%} of the rows is off by more than {LSE_LIMIT:.0e}")
    if not row["lse_error"] <= LSE_FLIPPED:
        faults.append(f"log-sum-exp is off by {row['lse_error']:.1e}, over {LSE_FLIPPED:.0e}")
    if not row["repeatable"]:
        faults.append("a second run gave other bytes")
    if row["guarded"] is not None and row["guarded"] is not bool(wanted.notes.get("guarded")):
        faults.append(f"the guard decided {row['guarded']}, and the reference otherwise")
    return {**json_values(row), "faults": faults, "seconds": time.perf_counter() - started}


def json_values(row: dict[str, Any]) -> dict[str, Any]:
    """NaN and infinity have no JSON: they become text."""
    return {k: str(x) if isinstance(x, float) and not math.isfinite(x) else x for k, x in row.items()}


class Clock(Protocol):
    """Times calls. `seconds` waits for what was started by all `start` and `stop` before, and gives their distances."""

    name: str

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def seconds(self) -> list[float]: ...


class HostClock:
    """Of calls that return when they are done."""

    name = "host"

    def __init__(self) -> None:
        self._times: list[float] = []

    def start(self) -> None:
        """Before a call."""
        self._times.append(time.perf_counter())

    def stop(self) -> None:
        """After it."""
        self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of each call since the last time."""
        times, self._times = self._times, []
        return [after - before for before, after in zip(times[::2], times[1::2], strict=True)]


class CudaClock:
    """Of what calls put on the current stream, by events on it."""

    name = "CUDA events"

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def start(self) -> None:
        """Before a call."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    stop = start

    def seconds(self) -> list[float]:
        """Of each call since the last time."""
        torch.cuda.synchronize()
        events, self._events = self._events, []
        return [a.elapsed_time(b) / 1000 for a, b in zip(events[::2], events[1::2], strict=True)]


def interleaved(
    contenders: dict[str, Callable[[], object]], clock: Clock, rounds: int = 15, warm_up: int = 3
) -> dict[str, dict[str, Any]]:
    """Seconds of each contender over rounds in which each has its turn; one that cannot run has only an `error`.

    median, low, high  quartiles; host  median seconds until the call returned, for a clock that does not wait
    """
    found: dict[str, dict[str, Any]] = {}
    ready: dict[str, Callable[[], object]] = {}
    for name, call in contenders.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says at length why a backend of SDPA cannot run
                for _ in range(warm_up):
                    clock.start()
                    call()
                    clock.stop()
                clock.seconds()
            ready[name] = call
        except Exception as error:  # noqa: BLE001 - a contender that cannot run is a result
            clock.stop()
            clock.seconds()
            found[name] = {"error": brief(error)}
    host: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(rounds):
        for name, call in ready.items():
            before = time.perf_counter()
            clock.start()
            call()
            clock.stop()
            host[name].append(time.perf_counter() - before)
    seconds = clock.seconds()
    for index, name in enumerate(ready):
        low, median, high = statistics.quantiles(seconds[index :: len(ready)], n=4, method="inclusive")
        found[name] = {"median": median, "low": low, "high": high, "host": statistics.median(host[name])}
    return {name: found[name] for name in contenders}


def sdpa_contenders(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    """PyTorch's attention on [B, S, H, D] tensors: its own choice, cuDNN's and flash's."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def sdpa() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def chosen(backend: SDPBackend) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with sdpa_kernel(backend):
                return sdpa()

        return call

    return {
        "sdpa": sdpa,
        "sdpa cudnn": chosen(SDPBackend.CUDNN_ATTENTION),
        "sdpa flash": chosen(SDPBackend.FLASH_ATTENTION),
    }


def measure(
    call: Call, chosen: Sequence[Policy], tokens: int, heads: int, device: torch.device, rounds: int = 15
) -> dict[str, Any]:
    """Timings of policies beside SDPA for q, k, v [1, tokens, heads, 128] in BF16, as plain JSON values.

    `tflops` counts 4·S²·H·128 operations whatever is computed; `speedup` is over the fastest SDPA of this shape;
    `kernels` are seconds of each kernel in one more call, by the profiler.
    """
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(1, tokens, heads, HEAD_DIM, device=device, generator=generator).bfloat16() for _ in range(3))
    contenders: dict[str, Callable[[], object]] = {}
    for policy in chosen:
        contenders[policy.name] = functools.partial(call, q, k, v, policy.numerics, policy.guard, False)
    contenders |= sdpa_contenders(q, k, v)
    clock: Clock = CudaClock() if device.type == "cuda" else HostClock()
    times = interleaved(contenders, clock, rounds)
    operations = 4 * tokens * tokens * heads * HEAD_DIM
    baseline = min((t["median"] for n, t in times.items() if n.startswith("sdpa") and "median" in t), default=None)
    for name, row in times.items():
        if "median" in row:
            row["tflops"] = operations / row["median"] / 1e12
            row["speedup"] = baseline / row["median"] if baseline else None
            if not name.startswith("sdpa"):
                try:
                    row["kernels"] = kernel_times(contenders[name], device)
                except RuntimeError as error:  # profiling needs rights that not every machine gives
                    row["kernels_error"] = brief(error)
    return {"tokens": tokens, "heads": heads, "clock": clock.name, "rounds": rounds, "gpu": smi(device), "times": times}


def kernel_times(call: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Seconds of each kernel (on the CPU: of each operation) that a call launches, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        call()
        if cuda:
            torch.cuda.synchronize()
    unit = "self_device_time_total" if cuda else "self_cpu_time_total"
    times = {event.key: getattr(event, unit) / 1e6 for event in profiler.key_averages()}
    return dict(sorted(((n, t) for n, t in times.items() if t > 0), key=lambda item: -item[1])[:12])


SMI_FIELDS = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)


def smi(device: torch.device) -> dict[str, str] | None:
    """What `nvidia-smi` says of the device now; None for other devices, or where there is no such program."""
    program = shutil.which("nvidia-smi")
    if device.type != "cuda" or program is None:
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return query_smi(program, uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")


def query_smi(program: str, uuid: str) -> dict[str, str] | None:
    """`SMI_FIELDS` of a device; None when the program fails."""
    query = [program, "-i", uuid, f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(SMI_FIELDS, values, strict=True)) if len(values) == len(SMI_FIELDS) else None


def parse_timing(text: str) -> tuple[int, int]:
    """ "32760x12" → tokens and heads. Raises SettingsError."""
    tokens, _, heads = text.lower().replace("×", "x").partition("x")
    if not (tokens.strip().isdigit() and heads.strip().isdigit() and int(tokens) and int(heads)):
        raise SettingsError(f"a timing is tokens x heads, like 32760x12, not {text!r}")
    return int(tokens), int(heads)
