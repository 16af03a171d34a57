"""The backend "sm90" without a GPU: what it takes and says, and that its kernel compiles to code that fits."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_pipeline

from wanfp4.errors import BackendError, PolicyError
from wanfp4.kernels import automatic, dispatch
from wanfp4.kernels.hopper import backend
from wanfp4.policy import Numerics, get_policy, policies
from wanfp4.processors.patch import patch

PRESETS = {name: policy.numerics for name, policy in policies().items()}
TAKEN = ("mxfp8-token-block", "fp8-direct")
CUDA = torch.device("cuda")

linux = pytest.mark.skipif(sys.platform != "linux", reason="NVRTC of the test extra is for Linux")


@pytest.mark.parametrize("name", PRESETS)
def test_it_takes_the_fp8_presets_and_no_other(name):
    assert (backend.limits(PRESETS[name]) is None) is (name in TAKEN)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"p_peak": 32.0}, "its P's peak is 256, and these numerics ask for 32"),
        ({"p": "mxfp8", "p_peak": 3.0}, "its P's peak is 1 for 'mxfp8', and these numerics ask for 3"),
        ({"denominator": "exact"}, "its denominator is summed from P's codes, and these numerics ask for 'exact'"),
        ({"row_reference": "rowmax"}, "largest of 128 anchors, and these numerics ask for 'rowmax'"),
        ({"margin": 3.0}, "its anchors have no margin, and these numerics ask for 3"),
        ({"smooth_q": True}, "it does not smooth Q"),
        (
            {"v": "fp8"},
            "its Q, K and V are 'mxfp8-token-block', and these numerics ask for 'mxfp8-token-block' and 'fp8'",
        ),
        ({"p": "bf16", "denominator": "exact"}, "its P is E4M3, and these numerics ask for 'bf16'"),
    ],
)
def test_what_it_does_not_compute_it_says(change, words):
    assert words in backend.limits(dataclasses.replace(PRESETS["fp8-direct"], **change))


def tensors(dtype=torch.bfloat16):
    return (torch.empty(1, 4, 1, 128, dtype=dtype, device="meta"),) * 3


@pytest.mark.parametrize(
    ("dtype", "change", "scale", "lse", "words"),
    [
        (torch.float16, {}, 0.1, False, "it writes bfloat16, and v is torch.float16"),
        (torch.bfloat16, {}, 0.0, False, "its softmax scale is a positive number; found 0.0"),
        (torch.bfloat16, {}, float("inf"), False, "its softmax scale is a positive number; found inf"),
        (torch.bfloat16, {"smooth_k": True}, 0.1, True, "with smooth_k it gives no log-sum-exp"),
    ],
)
def test_calls_it_declines(dtype, change, scale, lse, words):
    numerics = dataclasses.replace(PRESETS["fp8-direct"], **change)
    assert words in backend.declines(*tensors(dtype), numerics, None, scale, lse)


def test_a_call_it_takes():
    assert backend.declines(*tensors(), PRESETS["fp8-direct"], None, 0.1, True) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_without_a_gpu_it_says_what_it_needs():
    assert "a GPU of compute capability 9.0 (H100, H200, GH200)" in backend.missing()
    with pytest.raises(BackendError, match=r"backend 'sm90' cannot run this on cpu: .*finds no CUDA device"):
        dispatch.select(PRESETS["fp8-direct"], torch.device("cpu"), "sm90")


def test_another_gpu_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA L4")
    backend.wrong_gpu.cache_clear()
    try:
        assert "NVIDIA L4 has compute capability 8.9, and it needs a GPU of" in backend.wrong_gpu(0)
    finally:
        backend.wrong_gpu.cache_clear()


@linux
def test_what_is_not_installed_is_said(monkeypatch):
    assert backend.not_installed() is None
    backend.not_installed.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr("importlib.util.find_spec", lambda name: None)
            assert "cuda-bindings is not installed" in backend.not_installed()
        backend.not_installed.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(backend, "_nvrtc", lambda: (_ for _ in ()).throw(RuntimeError("no such file")))
            assert "NVRTC cannot be loaded (RuntimeError: no such file): pip install" in backend.not_installed()
    finally:
        backend.not_installed.cache_clear()


@linux
def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_words(monkeypatch):
    monkeypatch.setattr(backend, "source", lambda: "int main( {")
    with pytest.raises(BackendError, match=r"NVRTC cannot compile the kernel of the backend 'sm90': .*error"):
        backend.compiled.__wrapped__(backend.Build(True))


@linux
def test_compiling_leaves_pythons_own_bytes_alone():
    """An empty log is one byte, and NVRTC writes to it: Python shares its single-byte objects with all code."""
    backend.compiled.__wrapped__(backend.Build(True))
    assert bytes([32]) == bytearray([32])
    assert bytearray([32]) == b" "


@linux
@pytest.mark.parametrize("build", [b for builds in backend.BUILDS.values() for b in builds], ids=str)
def test_it_compiles_to_code_that_fits(build, tmp_path):
    """What runs spills nothing to speak of, fits into shared memory, and has FP8 products and no others."""
    cubin = tmp_path / "attention.cubin"
    cubin.write_bytes(backend.compiled(build))
    usage = _tool("cuobjdump", "-res-usage", cubin)
    assert int(re.search(r"REG:(\d+)", usage)[1]) <= 65536 // build.threads
    assert int(re.search(r"STACK:(\d+)", usage)[1]) <= 64
    assert build.shared_memory <= 227 * 1024
    code = _tool("nvdisasm", "-c", cubin)
    assert len(re.findall(r"\bQGMMA\.64x128x32\.F32\.E4M3\.E4M3", code)) >= 8
    assert len(re.findall(r"\bQGMMA\.64x136x32\.F32\.E4M3\.E4M3", code)) >= 4
    assert not re.findall(r"\bHGMMA", code)
    # Without exponentials there is one for each row that is raised, and the logarithm's.
    assert (len(re.findall(r"\bMUFU\.EX2", code)) < 16) is build.direct


def _tool(name, *arguments):
    folder = Path(sys.executable).parent
    found = next((p for p in folder.parent.rglob(f"bin/{name}") if p.is_file()), None)
    assert found, f"{name} comes with the test extra"
    return subprocess.run([found, *map(str, arguments)], capture_output=True, text=True, check=True).stdout


@linux
@pytest.mark.parametrize(("driver", "words"), [(12080, "the driver is for CUDA 12, and NVRTC 13"), (13000, None)])
def test_a_driver_that_is_too_old_is_said(monkeypatch, driver, words):
    monkeypatch.setattr(backend, "_driver", lambda: SimpleNamespace(cuDriverGetVersion=lambda: (0, driver)))
    monkeypatch.setattr(backend, "_nvrtc", lambda: SimpleNamespace(nvrtcVersion=lambda: (0, 13, 0)))
    found = backend._old_driver.__wrapped__()
    assert found is None if words is None else words in found


# The policy "auto"


def stand_in(monkeypatch, taken):
    """Backends that take everything, if they are in `taken`, or nothing; what they decline stays."""
    known = tuple(
        dataclasses.replace(b, missing=lambda: None, refuses=lambda n, d, why=why: why)
        for b, why in ((b, None if b.name in taken else "not here") for b in dispatch.backends())
    )
    monkeypatch.setattr(dispatch, "backends", lambda: known)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")


@pytest.mark.parametrize(
    ("taken", "policy", "words"),
    [
        ({"sm100", "sm90"}, "wan-fast", "the backend 'sm100' runs it on some GPU; nobody has timed it on hardware yet"),
        ({"sm90"}, "fp8-direct", "auto is 'fp8-direct' here: the backend 'sm90' runs it on some GPU; sm100: not here"),
        ({"sm89"}, "fp8-direct", "nobody has timed it on such a card yet; sm100: not here; sm90: not here"),
        ({"triton"}, "bf16", "nothing is faster on some GPU; sm100: not here; sm90: not here"),
    ],
)
def test_auto_takes_what_runs_fast_and_says_why(monkeypatch, taken, policy, words):
    stand_in(monkeypatch, taken)
    choice = automatic.automatic(CUDA)
    assert choice.policy == policies()[policy]
    assert words in choice.why


def test_auto_knows_that_fp8_needs_a_bf16_model(monkeypatch):
    stand_in(monkeypatch, {"sm90"})
    choice = automatic.automatic(CUDA, torch.float16)
    assert choice.policy.name == "bf16"
    assert "sm90: it writes bfloat16, and v is torch.float16" in choice.why


def test_auto_without_a_gpu_is_the_pipelines_own_attention():
    choice = automatic.automatic(torch.device("cpu"))
    assert choice.policy.numerics == Numerics()
    assert "nothing is faster on cpu, where there are no tensor cores for 4 or 8 bits" in choice.why


def test_a_pipeline_patched_with_auto_says_what_and_why(monkeypatch):
    pipe = tiny_pipeline()
    with patch(pipe, "auto") as handle:
        assert handle.policy.name == "bf16"
        assert "nothing is faster on " in handle.why
    with patch(pipe, "bf16") as handle:
        assert handle.why is None
    with pytest.raises(BackendError, match="policy 'auto' chooses the backend, too; name a policy, or leave"):
        patch(pipe, "auto", backend="triton")
    with pytest.raises(PolicyError, match="unknown policy 'auto'; 'auto' is for patch and generate"):
        get_policy("auto")
