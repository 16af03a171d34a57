"""The SM100 backend on the simulator: the public functions, their host code and every kernel, against the reference."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import generate, tiny_pipeline
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import wanfp4
from wanfp4 import simulator
from wanfp4.errors import BackendError, PolicyError, UnsupportedInputError
from wanfp4.kernels import dispatch, reference
from wanfp4.kernels.blackwell import backend, cache
from wanfp4.policy import Guard, Policy, get_policy, policies
from wanfp4.simulator import calls
from wanfp4.simulator.launch import Interceptor, Launch

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own

SUPPORTED = [
    "wan-fast",
    "wan-fast-14b",
    "wan-two-piece",
    "wan-two-piece-nv",
    "direct-p-fast",
    "direct-p-accurate",
    "direct-p-exp2",
]
MULTIPROCESSORS = 3  # fewer than some tests have jobs, so that a CTA works on several


@pytest.fixture(scope="module")
def kernels() -> cache.Kernels:
    return cache.Kernels("sm_100a")


@pytest.fixture(scope="module")
def device() -> Iterator[simulator.Device]:
    """One for all tests: it translates a kernel's PTX only once."""
    with simulator.device("sm_100a", seed=1, track=True) as gpu:
        yield gpu


@pytest.fixture
def gpu(device: simulator.Device, kernels: cache.Kernels, monkeypatch: pytest.MonkeyPatch) -> simulator.Device:
    """Let the dispatcher believe that CPU tensors are on a B200. What the backend allocates is full of NaN."""

    def empty(*shape: Any, **options: Any) -> torch.Tensor:
        new = torch.empty(*shape, **options)
        new.view(torch.uint8).fill_(0xFF)
        device.register(new)
        return new

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *how: Any) -> backend.Launched:
        device.register(q=q, k=k, v=v)
        return backend.run_on(target, q, k, v, *how)

    target = backend.Target(kernels, MULTIPROCESSORS, empty)
    monkeypatch.setattr(backend, "run", run)
    sm100, *others = dispatch.backends()
    believing = dataclasses.replace(sm100, missing=lambda: None, refuses=lambda n, _: backend.limits(n))
    monkeypatch.setattr(dispatch, "_BACKENDS", (believing, *others))
    return device


def draw(
    queries: int,
    keys: int | None = None,
    *,
    batch: int = 1,
    heads: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    sigma: float = 1.0,
) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(queries + (keys or 0))
    shapes = ((queries, sigma), (keys or queries, 1), (keys or queries, 1))
    return [(torch.randn(batch, n, heads, 128, generator=g) * s).to(dtype) for n, s in shapes]


def check(qkv: list[torch.Tensor], policy: Policy, lse: bool = False) -> dispatch.Outcome:
    """Run a policy on the simulator, and compare with the reference's float32 output rounded to the output's type.

    The reference adds scores and outputs in another order. So a few outputs fall on the other side of a rounding, or,
    where a score is within that of a threshold, have another code of P.
    """
    q, k, v = qkv
    before = [t.clone() for t in qkv]
    found = dispatch.run(q, k, v, policy.numerics, guard=policy.guard, return_lse=lse)
    assert found.backend == "sm100"
    numerics, scale = policy.numerics, 128**-0.5
    if policy.guard is not None:
        guarded = reference.sampled_logit(q, k, scale) > policy.guard.logit_limit
        numerics = policy.guard.apply(numerics) if guarded else numerics
        assert found.flag is not None
        assert found.flag.tolist() == [int(guarded)]
    wanted = reference.attention(q, k, v.float(), numerics, scale=scale, return_lse=True)
    assert found.out.dtype == v.dtype
    assert found.out.shape == q.shape
    assert found.out.is_contiguous()
    error = found.out.float() - wanted.out.to(v.dtype).float()
    assert error.norm() <= 1e-3 * wanted.out.norm()
    assert (error.abs() > 1e-7 * wanted.out.abs().max()).float().mean() <= 0.005
    if lse:
        assert found.lse is not None
        assert wanted.lse is not None
        torch.testing.assert_close(found.lse, wanted.lse, rtol=1e-6, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(before, qkv, strict=True))
    return found


def test_supported_presets() -> None:
    assert [name for name, p in policies().items() if backend.limits(p.numerics) is None] == SUPPORTED


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_supported_preset(gpu: simulator.Device, name: str) -> None:
    check(draw(33, 200), get_policy(name), lse=True)


@pytest.mark.parametrize("tokens", [1, 31, 129])
def test_lengths(gpu: simulator.Device, tokens: int) -> None:
    check(draw(tokens), get_policy("wan-fast"), lse=True)


@pytest.mark.slow
def test_several_tiles(gpu: simulator.Device) -> None:
    check(draw(640), get_policy("direct-p-fast"))


def test_batch_and_heads_on_few_multiprocessors(gpu: simulator.Device) -> None:
    check(draw(40, 70, batch=2, heads=2), get_policy("direct-p-fast"))
    assert gpu.report().grid == (MULTIPROCESSORS, 1, 1)


def test_fp16(gpu: simulator.Device) -> None:
    check(draw(33, 140, dtype=torch.float16), get_policy("direct-p-fast"))


def test_strides(gpu: simulator.Device) -> None:
    """Heads before tokens, one tensor for all three, broadcast heads, and rows that no 16-byte load can start at."""
    policy = get_policy("direct-p-fast")
    together = torch.randn(2, 2, 40, 3, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, k, v = (together[:, :, :, i].transpose(1, 2) for i in range(3))
    assert not q.is_contiguous()
    check([q, k, v], policy)
    check([q[:1], k[:1, :, :1].expand(-1, -1, 2, -1), v[:1]], policy)
    odd = torch.randn(1, 20, 1, 385, generator=torch.Generator().manual_seed(1)).bfloat16()
    check([odd[..., i : i + 128] for i in (1, 129, 257)], policy)
    turned = torch.randn(1, 128, 1, 20, generator=torch.Generator().manual_seed(2)).bfloat16().transpose(1, 3)
    check([turned] * 3, policy)


def test_what_can_be_read_in_place_is(gpu: simulator.Device) -> None:
    whole = torch.zeros(2, 3, 40, 256, dtype=torch.bfloat16)
    for x in (whole[..., :128], whole[..., 128:].transpose(1, 2), whole[:1, :, :1, :128].expand(2, 3, 40, 128)):
        assert backend._readable(x, torch.empty) is x
    shifted = torch.zeros(129, dtype=torch.bfloat16)[1:].view(1, 1, 1, 128)
    for x in (whole[..., 1:129], whole.transpose(2, 3)[:, :, :128], shifted):
        copy = backend._readable(x, torch.empty)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0
        assert torch.equal(copy, x)


def test_guard_decides_on_the_device(gpu: simulator.Device) -> None:
    """The same call just above and just below the limit: order of keys, row reference and flag follow."""
    q, k, v = draw(70, 200, sigma=8.0)
    base = get_policy("wan-fast")
    largest = reference.sampled_logit(q, k, 128**-0.5)
    for limit, guarded in ((largest * 1.001, 0), (largest * 0.999, 1)):
        found = check([q, k, v], base.with_(name="mine", guard=Guard(110, 16, logit_limit=limit)), lse=True)
        assert found.notes == {"guard_decisions_on_device": 1}
        assert found.flag is not None
        assert found.flag.item() == guarded


def test_guard_in_octaves(gpu: simulator.Device) -> None:
    q, k, v = draw(20, 150, sigma=8.0)
    guard = Guard(10.4, 16, margin_unit="log2", logit_limit=1.0)  # whole octaves would cancel
    check([q, k, v], get_policy("wan-fast").with_(name="mine", guard=guard), lse=True)


def test_without_a_guard_nothing_is_sampled(gpu: simulator.Device) -> None:
    q, k, v = draw(20, 40, sigma=100.0)
    found = check([q, k, v], get_policy("wan-fast").with_(name="mine", guard=None))
    assert found.flag is None
    assert found.notes == {}


def test_smoothed_keys_and_values(gpu: simulator.Device) -> None:
    """Means are added in another order than torch's, so some codes of K and V differ, by one step."""
    q, k, v = draw(40, 200)
    offset = torch.randn(128, generator=torch.Generator().manual_seed(0))
    k, v = k + 3 * offset, v - 2 * offset
    qkv = [t.bfloat16() for t in (q, k, v)]
    numerics = dataclasses.replace(get_policy("direct-p-exp2").numerics, smooth_k=True, smooth_v=True)
    found = dispatch.run(*qkv, numerics, backend="sm100").out.float()
    wanted = reference.attention(qkv[0], qkv[1], qkv[2].float(), numerics, scale=128**-0.5).out
    plain = dataclasses.replace(numerics, smooth_k=False, smooth_v=False)
    other = reference.attention(qkv[0], qkv[1], qkv[2].float(), plain, scale=128**-0.5).out
    assert (found - wanted).norm() <= 0.1 * (other - wanted).norm()


def test_public_attention_takes_it_first(gpu: simulator.Device) -> None:
    q, k, v = draw(20, 40)
    out, lse = wanfp4.attention(q, k, v, "direct-p-fast", return_lse=True, scale=0.05)
    numerics = get_policy("direct-p-fast").numerics
    wanted = reference.attention(q, k, v, numerics, scale=0.05, return_lse=True)
    assert (out.float() - wanted.out.float()).norm() <= 1e-3 * wanted.out.float().norm()
    torch.testing.assert_close(lse, wanted.lse, rtol=1e-6, atol=1e-5)
    assert dispatch.select(get_policy("sage3").numerics, q.device).name == "reference"


@pytest.mark.slow
def test_a_patched_pipeline(gpu: simulator.Device) -> None:
    """A whole denoising run on the simulator, and what its receipt says of the guard."""
    results, receipts = [], []
    for name in ("sm100", "reference"):
        pipe = tiny_pipeline(dtype=torch.bfloat16)
        with wanfp4.patch(pipe, "wan-fast", backend=name, strict=True) as handle:
            results.append(generate(pipe, steps=1).float())
            receipts.append(handle.receipt())
    assert (results[0] - results[1]).norm() <= 0.01 * results[1].norm()
    (line,) = receipts[0].summary()
    assert line.endswith("wan-fast on sm100, 4 calls, 4 guard decisions on device")
    assert receipts[0].entries[0].ran.numerics == receipts[1].entries[0].ran.numerics


def launches(kernels: cache.Kernels, call: tuple[Any, ...], stream: int = 0) -> tuple[list[Launch], list[int]]:
    """What a call launches, and into which streams; nothing runs."""
    caught: list[Launch] = []
    streams: list[int] = []
    config = calls.CONFIG

    class Seen:
        size = config.size

        def unpack(self, data: bytes) -> tuple[Any, ...]:
            values = config.unpack(data)
            streams.append(values[7])
            return values

    with pytest.MonkeyPatch.context() as patch, Interceptor("sm_100a", caught.append, line_info=False):
        patch.setattr(calls, "CONFIG", Seen())
        backend.run_on(backend.Target(kernels, 148), *call, stream)
    return caught, streams


def test_launches(kernels: cache.Kernels) -> None:
    """How many, how large, and all on the stream that was asked for."""
    policy = get_policy("wan-fast")
    q, k, v = (torch.zeros(2, n, 12, 128, dtype=torch.bfloat16) for n in (300, 1000, 1000))
    stream = 0x7FFF12345678
    found, streams = launches(kernels, (q, k, v, policy.numerics, policy.guard, 0.1, False), stream)
    assert [launch.grid[0] for launch in found] == [24 * 8, 24 * 3, 24 * 8, 24 * 8, 24 * 2]  # guard, Q, K, V, forward
    assert streams == [stream] * 5
    found, _ = launches(kernels, (q.repeat(1, 20, 1, 1), k, v, policy.numerics, None, 0.1, False))
    assert [launch.grid[0] for launch in found] == [24 * 47, 24 * 8, 24 * 8, 148]
    smooth = dataclasses.replace(policy.numerics, smooth_k=True, smooth_v=True)
    found, streams = launches(kernels, (q, k, v, smooth, policy.guard, 0.1, False), stream)
    assert [launch.grid[0] for launch in found] == [24 * 8, *[24 * 2, 24] * 2, 24 * 3, 24 * 8, 24 * 8, 24 * 2]
    assert streams == [stream] * 9


def test_nothing_waits_for_the_device(kernels: cache.Kernels) -> None:
    """All that PyTorch is asked for is memory, and to set the flag to 0."""
    asked: list[str] = []

    class Ask(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(function.name().removeprefix("aten::"))
            return function(*args, **(kwargs or {}))

    policy = get_policy("wan-fast")
    qkv = draw(40, 70)
    with Ask():
        launches(kernels, (*qkv, policy.numerics, policy.guard, 0.1, True))
    assert asked.count("zero_") == 1
    assert set(asked) <= {"empty.memory_format", "zero_", "detach"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"qk": "exact"}, "its Q and K are NVFP4, folded or not, and these numerics ask for 'exact'"),
        ({"v": "nvfp4"}, "both 'mxfp4-direct' or both 'nvfp4', and these numerics ask for 'mxfp4-direct' and 'nvfp4'"),
        ({"denominator": "exact"}, "its denominator is summed from P's codes"),
        ({"smooth_q": True}, "it does not smooth Q"),
        ({"global_scale": True}, "no global scale"),
    ],
)
def test_numerics_it_does_not_compute(changes: dict[str, Any], why: str) -> None:
    found = backend.limits(dataclasses.replace(get_policy("wan-fast").numerics, **changes))
    assert found is not None
    assert why in found


def test_nvfp4_needs_the_row_maximum() -> None:
    numerics = dataclasses.replace(get_policy("wan-two-piece-nv").numerics, row_reference="anchor128")
    assert "relative to the row's maximum, and these numerics ask for 'anchor128'" in str(backend.limits(numerics))
    assert "round nothing" in str(backend.limits(get_policy("bf16").numerics))


def test_calls_it_declines(gpu: simulator.Device) -> None:
    """A named backend says why; without a name, the next one takes the call."""
    policy = get_policy("wan-fast")
    q, k, v = draw(20, 40)
    cases: list[tuple[list[torch.Tensor], dict[str, Any], str]] = [
        ([q.float(), k.float(), v.float()], {}, "found torch.float32: cast them"),
        ([q, k, v.half()], {}, "found torch.bfloat16, torch.bfloat16 and torch.float16"),
        ([q, k, v], {"scale": 0.0}, "softmax scale is a number from 1e-20 to 1e20; found 0.0"),
        ([q, k, v], {"scale": float("inf")}, "softmax scale is a number from 1e-20 to 1e20; found inf"),
        ([q, k, v], {"scale": 1e-30}, "softmax scale is a number from 1e-20 to 1e20; found 1e-30"),
    ]
    for qkv, options, why in cases:
        with pytest.raises(UnsupportedInputError, match=f"backend 'sm100' does not take this call: .*{why}"):
            dispatch.run(*qkv, policy.numerics, guard=policy.guard, backend="sm100", **options)
        if options.get("scale") != float("inf"):
            found = dispatch.run(*qkv, policy.numerics, guard=policy.guard, **options)
            assert found.backend == "reference"
            assert found.out.dtype == qkv[2].dtype
    anchored = dataclasses.replace(policy.numerics, row_reference="anchor32")
    with pytest.raises(UnsupportedInputError, match="guards 'shiftless' numerics only, and these have 'anchor32'"):
        dispatch.run(q, k, v, anchored, guard=policy.guard, backend="sm100")
    smooth = dataclasses.replace(policy.numerics, smooth_k=True)
    with pytest.raises(UnsupportedInputError, match="with smooth_k it gives no log-sum-exp"):
        dispatch.run(q, k, v, smooth, backend="sm100", return_lse=True)
    huge = torch.zeros(1, 1, 1, 128, dtype=torch.bfloat16).expand(2**13, 2**18, 2**7, 128)
    assert "its grids end at 2^31 tiles" in str(backend.declines(huge, huge, huge, policy.numerics, None, 0.1, False))


def test_guard_that_changes_nothing_is_no_guard(gpu: simulator.Device) -> None:
    """Guards are for Direct-P: with NVFP4 P, and where the numerics are the guard's own, there is nothing to decide."""
    nv = get_policy("wan-two-piece-nv").numerics
    assert not backend.guarding(nv, Guard())
    assert not backend.guarding(Guard().apply(get_policy("wan-fast").numerics), Guard())
    assert backend.guarding(get_policy("wan-fast").numerics, Guard())
    assert not backend.guarding(get_policy("wan-fast").numerics, None)


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each state of a machine gets a sentence with what was found and what is needed."""
    q, k, v = draw(4)
    with pytest.raises(BackendError, match=r"backend 'sm100' cannot run this on cpu: .+"):
        wanfp4.attention(q, k, v, backend="sm100")

    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in versions:
            raise backend.importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(backend.importlib.metadata, "version", version)
    assert "nvidia-cutlass-dsl is not installed, and it needs 4.8.1 or later: pip install" in str(
        backend.not_installed()
    )
    versions["nvidia-cutlass-dsl"] = "4.7.0"
    assert "nvidia-cutlass-dsl 4.7.0 is installed, and it needs 4.8.1 or later" in str(backend.not_installed())
    for enough in ("4.8.1", "4.10.0.dev3", "5.0"):
        versions["nvidia-cutlass-dsl"] = enough
        assert backend.not_installed() is None
    monkeypatch.setattr(backend.sys, "platform", "win32")
    assert "runs on Linux; this is win32" in str(backend.not_installed())


def test_gpus_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [("H100", (9, 0)), ("B200", (10, 0)), ("Thor", (10, 1)), ("B300", (10, 3))]
    monkeypatch.setattr(backend, "_not_installed", lambda: None)
    monkeypatch.setattr(backend, "_wrong_gpu", backend._wrong_gpu.__wrapped__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no CUDA device, and it needs a GPU of compute capability 10.0 or 10.3" in str(backend.missing())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert backend.missing() is None  # asking would initialise CUDA
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: gpus[i][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: gpus[i][1])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert backend.missing() is None
    numerics = get_policy("wan-fast").numerics
    assert backend.refuses(numerics, torch.device("cuda:1")) is None
    assert backend.refuses(numerics, torch.device("cuda:3")) is None
    for i, (name, (major, minor)) in ((0, gpus[0]), (2, gpus[2])):
        why = f"{name} has compute capability {major}.{minor}, and it needs a GPU of compute capability 10.0 or 10.3"
        assert why in str(backend.refuses(numerics, torch.device(f"cuda:{i}")))
    assert "the tensors are on cpu" in str(backend.refuses(numerics, torch.device("cpu")))
    assert "does not smooth Q" in str(
        backend.refuses(dataclasses.replace(numerics, smooth_q=True), torch.device("cuda:1"))
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "H100 has compute capability 9.0" in str(backend.missing())


def test_limit_is_compared_as_a_float64() -> None:
    assert backend._float_below(60.0) == 60.0
    for x in (60.1, 0.1, 1 / 3, 1e6 - 0.01):
        below = torch.tensor(backend._float_below(x))
        assert below.item() <= x
        assert torch.nextafter(below, torch.tensor(torch.inf)).item() > x


def test_kernels_of_presets() -> None:
    wanted = backend.preset_kernels(["wan-fast"])
    assert sorted(kernel.kind for kernel in wanted) == sorted(
        # for BF16 and FP16: a guard, Q, K in the guard's order, V, the forward with and without LSE
        ["guard", "quantize-qk", "quantize-qk", "quantize-v", "forward", "forward"] * 2
    )
    assert len({kernel.symbol for kernel in backend.preset_kernels()}) == len(backend.preset_kernels())
    assert set(wanted) <= set(backend.preset_kernels())
    with pytest.raises(PolicyError, match="unknown policy 'wan'; presets are bf16, wan-fast"):
        backend.preset_kernels(["wan"])
    with pytest.raises(PolicyError, match="policy 'mxfp8-token-block' has no SM100 kernels: its Q and K are NVFP4"):
        backend.preset_kernels(["mxfp8-token-block"])


def test_importing_it_imports_no_cutlass() -> None:
    code = (
        "import sys, wanfp4.kernels.dispatch as d; d.backends()[0].missing();"
        "print([m for m in sys.modules if m.split('.')[0] == 'cutlass'])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
