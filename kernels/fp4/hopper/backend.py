"""The backend "sm90": attention in E4M3 on Hopper's tensor cores, faster than BF16. Importing it imports no triton.

An attention call is, in stream order: the token means of K and V where they are smoothed, Q, K and V to E4M3 (Triton,
one launch each), and the forward kernel of attention.cu. That one is CUDA C++, compiled by NVRTC at the first call.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
import importlib.util
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wanfp4.errors import BackendError, brief
from wanfp4.kernels import emulated
from wanfp4.kernels.devices import no_gpu, unfit, wrong_device
from wanfp4.policy import Guard, Numerics

TILE = 128
V_ROWS = 136
CAPABILITY = (9, 0)
PEAK = 256.0
INSTALL = 'pip install "wanfp4[hopper]"'
_NEEDED_GPU = "a GPU of compute capability 9.0 (H100, H200, GH200)"


@dataclass(frozen=True)
class Build:
    """What attention.cu is compiled for.

    direct    bytes of P straight from scores, not from an exponential
    groups    consumer warpgroups, of 64 queries each: 2 or 3
    stages    tiles of K and of V that are on their way
    overlap   the next tile's scores are computed beside P·V
    """

    direct: bool
    groups: int = 2
    stages: int = 4
    overlap: bool = True

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC's command line, architecture included."""
        names = (("DIRECT", self.direct), ("GROUPS", self.groups), ("STAGES", self.stages))
        defines = [f"-D{name}={int(value)}" for name, value in (*names, ("OVERLAP", self.overlap))]
        return ("--gpu-architecture=sm_90a", "--std=c++17", f"-DPEAK={math.log2(PEAK)}f", *defines)

    @property
    def threads(self) -> int:
        """Of a block."""
        return 128 * (self.groups + 1)

    @property
    def queries(self) -> int:
        """Of a block."""
        return 64 * self.groups

    @property
    def shared_memory(self) -> int:
        """Bytes of dynamic shared memory: Q, the stages, and the barriers."""
        return self.queries * TILE + self.stages * (TILE * TILE + V_ROWS * TILE) + 8 * (1 + 4 * self.stages)


# The first is what runs: kernels/bench/attention.py times all.
BUILDS = {
    True: (Build(True), Build(True, overlap=False), Build(True, groups=3, overlap=False), Build(True, stages=3)),
    False: (Build(False, groups=3, overlap=False), Build(False), Build(False, overlap=False), Build(False, stages=3)),
}


# Who takes what


@functools.cache
def not_installed() -> str | None:
    """Why kernels cannot be compiled from this installation, or None."""
    why = emulated.not_installed()
    if why:
        return why
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return f"cuda-bindings is not installed, which compiles and launches its kernel: {INSTALL}"
    try:
        _nvrtc()
    except Exception as error:  # noqa: BLE001 - whatever the loader raises, there is no compiler
        return f"NVIDIA's run-time compiler NVRTC cannot be loaded ({brief(error)}): {INSTALL}"
    return None


def missing() -> str | None:
    """Why this machine cannot run the kernels, or None. CUDA is not initialised for this: as long as nothing else has
    done so, a GPU of another kind is not noticed here but by `refuses`."""
    return no_gpu(_NEEDED_GPU, wrong_gpu) or not_installed() or _old_driver()


@functools.cache
def _old_driver() -> str | None:
    """Why the driver cannot load what NVRTC compiles, or None."""
    compiler = _check(_nvrtc().nvrtcVersion())[0]
    found = _check(_driver().cuDriverGetVersion()) // 1000
    if found >= compiler:
        return None
    return f"the driver is for CUDA {found}, and NVRTC {compiler} compiles for CUDA {compiler}: update the driver"


@functools.cache
def wrong_gpu(index: int) -> str | None:
    """Why CUDA device `index` cannot run the kernels, or None."""
    return unfit(index, _NEEDED_GPU, lambda capability: capability == CAPABILITY)


def refuses(numerics: Numerics, device: torch.device) -> str | None:
    """Why the kernels do not compute these numerics on this device, or None."""
    return wrong_device(device, _NEEDED_GPU, wrong_gpu) or limits(numerics)


@functools.lru_cache(256)
def limits(numerics: Numerics) -> str | None:
    """Why the kernels do not compute these numerics on any device, or None."""
    n = numerics
    if n.qk != "mxfp8-token-block" or n.v != "mxfp8-token-block":
        return f"its Q, K and V are 'mxfp8-token-block', and these numerics ask for {n.qk!r} and {n.v!r}"
    if n.p not in ("mxfp8", "fp8", "fp8-direct"):
        return f"its P is E4M3, and these numerics ask for {n.p!r}"
    if n.p_peak != (1 if n.p == "mxfp8" else PEAK):
        wanted = "1 for 'mxfp8'" if n.p == "mxfp8" else f"{PEAK:g}"
        return f"its P's peak is {wanted}, and these numerics ask for {n.p_peak:g}"
    if n.denominator != "codes":
        return f"its denominator is summed from P's codes, and these numerics ask for {n.denominator!r}"
    if n.margin:
        return f"its anchors have no margin, and these numerics ask for {n.margin:g}"
    if n.row_reference != "anchor128":
        return f"its P is relative to the largest of 128 anchors, and these numerics ask for {n.row_reference!r}"
    if n.smooth_q:
        return "it does not smooth Q"
    return None


def declines(
    q: Tensor, k: Tensor, v: Tensor, numerics: Numerics, guard: Guard | None, scale: float, return_lse: bool
) -> str | None:
    """Why the kernels do not take this call, though they compute its numerics, or None."""
    if v.dtype != torch.bfloat16:
        return f"it writes bfloat16, and v is {v.dtype}"
    if not (math.isfinite(scale) and scale > 0):
        return f"its softmax scale is a positive number; found {scale}"
    if return_lse and numerics.smooth_k:
        return "with smooth_k it gives no log-sum-exp"
    for name, t in (("q", q), ("k", k)):
        batch, tokens, heads, _ = t.shape
        if tokens >= 2**31 - TILE or batch * heads * -(-tokens // TILE) >= 2**31:
            return f"its grids end at 2^31 tiles of {TILE} tokens of a head; {name} is {list(t.shape)}"
    return None


# Running


class Images(NamedTuple):
    """Q, K and V as attention.cu copies them, and the numbers that go with them; `quantize.quantize` says how."""

    q: Tensor
    k: Tensor
    v: Tensor
    octaves: Tensor
    meta: Tensor
    v_mean: Tensor | None


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    numerics: Numerics,
    scale: float,
    return_lse: bool,
    build: Build | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Queue an attention call that `limits` and `declines` have nothing against: out [B, Sq, H, 128] BF16 and
    lse [B, H, Sq] or None."""
    build = build or BUILDS[numerics.p == "fp8-direct"][0]
    with torch.cuda.device(q.device):
        function = _function(torch.cuda.current_device(), build)  # first: it says that a graph cannot be captured yet
        images = quantize(q, k, v, numerics, scale)
        return _multiply(function, images, q, k, return_lse, build)


def quantize(q: Tensor, k: Tensor, v: Tensor, numerics: Numerics, scale: float, *, image: bool = True) -> Images:
    """Round the operands: to images of shared memory, or to plain tiles."""
    from wanfp4.kernels.hopper import quantize as kernels

    batch, queries, heads, _ = q.shape
    keys, device = k.shape[1], q.device
    flat, q_tiles, k_tiles = batch * heads, -(-queries // TILE), -(-keys // TILE)

    def mean(x: Tensor) -> Tensor:
        return x.mean(1, dtype=torch.float32).reshape(flat, TILE)

    def bytes_of(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=device)

    images = Images(
        q=bytes_of(flat, q_tiles, TILE, TILE),
        k=bytes_of(flat, k_tiles, TILE, TILE),
        v=bytes_of(flat, k_tiles, V_ROWS, TILE),
        octaves=torch.empty(flat, q_tiles, 4, device=device),
        meta=torch.empty(flat, k_tiles, 16, device=device),
        v_mean=mean(v) if numerics.smooth_v else None,
    )
    k_mean = mean(k) if numerics.smooth_k else None
    for kind, x, out, numbers, its_mean, factor in (
        ("q", q, images.q, images.octaves, None, scale * emulated.LOG2_E),
        ("k", k, images.k, images.meta, k_mean, 1.0),
        ("v", v, images.v, images.meta, images.v_mean, 1.0),
    ):
        kernels.quantize[(flat * -(-x.shape[1] // TILE),)](
            x, out, numbers, its_mean, *x.stride(), heads, x.shape[1], factor,
            KIND=kind, ANCHORS=0 if kind == "q" else TILE, MEAN=its_mean is not None, IMAGE=image, num_warps=8,
        )  # fmt: skip
    return images


def multiply(images: Images, q: Tensor, k: Tensor, return_lse: bool, build: Build) -> tuple[Tensor, Tensor | None]:
    """The forward kernel over rounded operands, on the current device."""
    return _multiply(_function(torch.cuda.current_device(), build), images, q, k, return_lse, build)


def _multiply(
    function: Any, images: Images, q: Tensor, k: Tensor, return_lse: bool, build: Build
) -> tuple[Tensor, Tensor | None]:
    batch, queries, heads, _ = q.shape
    keys, flat = k.shape[1], q.shape[0] * q.shape[2]
    out = torch.empty(batch, queries, heads, TILE, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(batch, heads, queries, device=q.device) if return_lse else None
    addresses = [
        0 if t is None else t.data_ptr()
        for t in (images.q, images.k, images.v, images.octaves, images.meta, images.v_mean, out, lse)
    ]
    values = (*addresses, heads, queries, keys, *out.stride()[:3])
    types = (*(ctypes.c_void_p,) * 8, *(ctypes.c_int,) * 3, *(ctypes.c_longlong,) * 3)
    driver = _driver()
    stream = torch.cuda.current_stream().cuda_stream
    grid = flat * -(-queries // build.queries)
    launch = (function, grid, 1, 1, build.threads, 1, 1, build.shared_memory, stream, (values, types), 0)
    _check(driver.cuLaunchKernel(*launch))
    return out, lse


# Compiling


def source() -> str:
    """The CUDA C++ of the forward kernel."""
    return (importlib.resources.files(__package__) / "attention.cu").read_text(encoding="utf-8")


@functools.cache
def compiled(build: Build) -> bytes:
    """The kernel's cubin. Raises BackendError with the compiler's words."""
    nvrtc = _nvrtc()
    program = _check(nvrtc.nvrtcCreateProgram(source().encode(), b"attention.cu", 0, [], []))
    options = [option.encode() for option in build.options]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    log = _buffer(_check(nvrtc.nvrtcGetProgramLogSize(program)))
    _check(nvrtc.nvrtcGetProgramLog(program, log))
    if int(failed):
        raise BackendError(f"NVRTC cannot compile the kernel of the backend 'sm90': {log.decode().strip(chr(0))}")
    size = _check(nvrtc.nvrtcGetCUBINSize(program))
    cubin = _buffer(size)
    _check(nvrtc.nvrtcGetCUBIN(program, cubin))
    _check(nvrtc.nvrtcDestroyProgram(program))
    return cubin[:size]


def _buffer(size: int) -> bytes:
    """Bytes that NVRTC may write to. Python has only one object for each single byte, which all code shares."""
    return bytes(size + 1)


@functools.cache
def _function(device: int, build: Build) -> Any:
    """The kernel, loaded into the device's context, which is current. The module stays for the process's life."""
    if torch.cuda.is_current_stream_capturing():
        raise BackendError("the first call compiles the kernel: make one before capturing a CUDA graph")
    driver = _driver()
    torch.cuda.current_stream().synchronize()  # there is a context now
    module = _check(driver.cuModuleLoadData(compiled(build)))
    function = _check(driver.cuModuleGetFunction(module, b"forward"))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _check(driver.cuFuncSetAttribute(function, attribute, build.shared_memory))
    return function


def _check(result: tuple[Any, ...]) -> Any:
    """What a driver's or NVRTC's function gave. Raises BackendError when it failed."""
    error, *values = result
    if int(error):
        raise BackendError(f"the backend 'sm90' got {error!r} from CUDA")
    return values[0] if len(values) == 1 else tuple(values)


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


@functools.cache
def _nvrtc() -> Any:
    from cuda.bindings import nvrtc

    _check(nvrtc.nvrtcVersion())  # loads the library
    return nvrtc
