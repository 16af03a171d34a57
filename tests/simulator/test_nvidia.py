"""NVIDIA's own CuTe DSL examples on the simulator, from a local checkout of NVIDIA/cutlass that WANFP4_CUTLASS names.

They are not on PyPI and not copied here, so without the variable nothing runs; docs/simulator-proof.md has the figures.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

cutlass = pytest.importorskip("cutlass")
cute = pytest.importorskip("cutlass.cute")

from cuda.bindings import driver  # noqa: E402
from cutlass.cute.runtime import from_dlpack, make_ptr  # noqa: E402

from wanfp4 import simulator  # noqa: E402
from wanfp4.simulator import conversions  # noqa: E402

CHECKOUT = os.environ.get("WANFP4_CUTLASS", "")
EXAMPLES = Path(CHECKOUT) / "examples/python/CuTeDSL"
SEEDS = int(os.environ.get("WANFP4_SEEDS", "10"))
pytestmark = [
    pytest.mark.skipif(not CHECKOUT, reason="WANFP4_CUTLASS names no checkout of NVIDIA/cutlass"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module", autouse=True)
def _examples() -> Iterator[None]:
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


def example(name: str) -> Any:
    """A module of the examples."""
    return importlib.import_module(f"cute.blackwell.{name}")


def aligned(size: int) -> Any:
    """Bytes at a multiple of 256."""
    raw = np.zeros(size + 256, np.uint8)
    return raw[-raw.ctypes.data % 256 :][:size]


def scale_pages(table: Any) -> Any:
    """Codes [rows, K / block] in 128 × 4 pages: byte (row % 32) · 16 + (row // 32 % 4) · 4 + k % 4 of a page."""
    rows, count = table.shape
    return np.ascontiguousarray(table.reshape(rows // 128, 4, 32, count // 4, 4).transpose(0, 3, 2, 1, 4)).reshape(-1)


def values(codes: Any, rows: int, depth: int) -> Any:
    """Packed E2M1, the low nibble first."""
    return conversions.E2M1[np.stack([codes & 15, codes >> 4], 1)].reshape(rows, depth).astype(np.float64)


def judged(launch: Any, output: Any, report: Any) -> None:
    """`launch()` fills `output`: unseeded, then under every seed, with tracking; then without. Always the same bytes.

    `report` receives the device, once it has run.
    """
    with simulator.device("sm_100a", track=True) as gpu:
        results = []
        for seed in (None, *range(SEEDS)):
            gpu.seed = seed
            output[:] = 255
            launch(gpu)
            results.append(output.copy())
        report(gpu.report())
        gpu.track = False
        output[:] = 255
        launch(gpu)
        results.append(output.copy())
    assert all((result == results[0]).all() for result in results)


def block_scaled(m: int, n: int, k: int, block: int, scale: str, out_bytes: int) -> tuple[list[Any], Any]:
    """Buffers A, B, their scales, C; and the exact product, float64."""
    rng = np.random.default_rng(0)
    sizes = (m * k // 2, n * k // 2, m * k // block, n * k // block, m * n * out_bytes)
    buffers = [aligned(size) for size in sizes]
    for buffer in buffers[:2]:
        buffer[:] = rng.integers(0, 256, buffer.size)
    low, high = (40, 72) if scale == "e4m3" else (122, 132)
    tables = [rng.integers(low, high, (rows, k // block)).astype(np.uint8) for rows in (m, n)]
    for buffer, table in zip(buffers[2:4], tables, strict=True):
        buffer[:] = scale_pages(table)
    decode = conversions.UE4M3 if scale == "e4m3" else conversions.UE8M0
    sides = [
        values(codes, rows, k) * np.repeat(decode[table].astype(np.float64), block, axis=1)
        for codes, table, rows in zip(buffers[:2], tables, (m, n), strict=True)
    ]
    return buffers, sides[0] @ sides[1].T


@pytest.mark.parametrize("shape", [(256, 512, 1280), (128, 256, 256)])
def test_nvfp4_gemm_0(shape: tuple[int, int, int]) -> None:
    tutorial = example("tutorial.tutorial_gemm.nvfp4_gemm_0")
    m, n, k = shape
    buffers, want = block_scaled(m, n, k, 16, "e4m3", 2)
    types = (tutorial.ab_dtype, tutorial.ab_dtype, tutorial.sf_dtype, tutorial.sf_dtype, tutorial.c_dtype)
    pointers = [
        make_ptr(kind, buffer.ctypes.data, cute.AddressSpace.gmem, assumed_align=32)
        for kind, buffer in zip(types, buffers, strict=True)
    ]
    arguments = (*pointers, (*shape, 1), driver.CUstream(0))
    compiled: list[Any] = []

    def launch(gpu: Any) -> None:
        if not compiled:
            gpu.register(*buffers)
            compiled.append(cute.compile(tutorial.Sm100BlockScaledDenseGemmKernel(), *arguments))
        compiled[0](*arguments)

    judged(launch, buffers[4], print)
    got = buffers[4].view(np.float16).reshape(m, n)
    assert (got == want.astype(np.float16)).all()


@pytest.mark.parametrize(
    ("shape", "block", "scale", "tile"),
    [
        ((256, 512, 1024), 16, "e4m3", 192),
        ((256, 512, 1024), 16, "e8m0", 256),
        ((256, 512, 1024), 32, "e8m0", 64),
        ((256, 512, 1024), 32, "e8m0", 128),
        ((256, 512, 1024), 32, "e8m0", 256),
    ],
)
def test_dense_blockscaled_gemm_persistent(shape: tuple[int, int, int], block: int, scale: str, tile: int) -> None:
    module = example("kernel.blockscaled_gemm.dense_blockscaled_gemm_persistent")
    m, n, k = (shape[0], 384, 512) if tile == 192 else shape
    buffers, want = block_scaled(m, n, k, block, scale, 4)
    fp4, kind = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN if scale == "e4m3" else cutlass.Float8E8M0FNU
    stream = driver.CUstream(0)
    pointers = [
        make_ptr(t, b.ctypes.data, cute.AddressSpace.gmem, assumed_align=16 if t in (fp4, cutlass.Float32) else 32)
        for t, b in zip((fp4, fp4, kind, kind, cutlass.Float32), buffers, strict=True)
    ]
    compiled: list[Any] = []

    def launch(gpu: Any) -> None:
        if not compiled:
            gpu.register(*buffers)
            gemm = module.Sm100BlockScaledPersistentDenseGemmKernel(block, (128, tile), (1, 1))
            compiled.append(module.scaled_mm(gemm, fp4, fp4, cutlass.Float32, kind, "k", "k", "n", 2, stream))
        compiled[0](*pointers, (m, n, k, 1), stream)

    judged(launch, buffers[4], print)
    got = buffers[4].view(np.float32).reshape(m, n).astype(np.float64)
    assert np.abs(got - want).max() <= 4e-7 * np.abs(want).max()


def test_fp16_gemm_0() -> None:
    tutorial = example("tutorial.tutorial_gemm.fp16_gemm_0")
    m, n, k = 256, 512, 320
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, k, generator=generator).to(torch.float16) for rows in (m, n))
    c = torch.zeros(m, n, dtype=torch.float16)
    registered: list[bool] = []

    def wrap(t: Any) -> Any:
        tensor = from_dlpack(t, assumed_align=32).mark_layout_dynamic(leading_dim=1)
        return tensor.mark_compact_shape_dynamic(mode=1, divisibility=t.shape[1])

    def launch(gpu: Any) -> None:
        if not registered:
            gpu.register(a=a, b=b, c=c)
            registered.append(True)
        tutorial.host_function(wrap(a), wrap(b), wrap(c), no_cache=True)

    judged(launch, c.numpy().view(np.uint8), print)
    want = a.double() @ b.double().T
    assert ((c.double() - want).abs() <= want.abs() * 2**-11 + 2**-10).all()


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "dim"), [(256, 640, 2, 128), (300, 333, 1, 128), (200, 130, 1, 64)]
)
def test_fmha(queries: int, keys: int, heads: int, dim: int) -> None:
    fmha = example("kernel.attention.fmha.fmha")
    generator = torch.Generator().manual_seed(0)
    shapes = (queries, keys, keys, queries)
    q, k, v, o = (torch.randn(1, s, heads, 1, dim, generator=generator).to(torch.bfloat16) for s in shapes)

    def wrap(t: Any) -> Any:
        tensor = from_dlpack(t, assumed_align=16)
        tensor.element_type = cutlass.BFloat16
        return tensor

    scale = dim**-0.5
    masks = fmha.fmha_utils.MaskEnum
    mask = masks.RESIDUAL_MASK if keys % 128 else masks.WINDOW_MASK
    f32 = cutlass.Float32
    kernel = fmha.BlackwellFusedMultiHeadAttentionForward(f32, f32, (128, 128), dim, False, mask, False, False, True)
    problem = (1, queries, queries, keys, heads, heads, dim, dim)
    scales = (scale * math.log2(math.e), scale, 1.0)
    arguments = [*map(wrap, (q, k, v, o)), problem, *[None] * 4, *scales, *[None] * 5, driver.CUstream(0), False]
    compiled: list[Any] = []

    def launch(gpu: Any) -> None:
        if not compiled:
            gpu.register(q=q, k=k, v=v, o=o)
            compiled.append(cute.compile(kernel, *arguments, options="--opt-level=2"))
        compiled[0](*arguments)

    judged(launch, o.view(torch.uint8).numpy().reshape(-1), print)
    qd, kd, vd = (t[0, :, :, 0].double().transpose(0, 1) for t in (q, k, v))
    want = torch.softmax(qd @ kd.transpose(1, 2) * scale, -1) @ vd
    got = o[0, :, :, 0].double().transpose(0, 1)
    assert ((got - want).norm() / want.norm()) < 3e-3
