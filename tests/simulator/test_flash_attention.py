"""flash-attn-4's SM100 forward, a kernel nobody here wrote, runs right on the simulator."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch

cutlass = pytest.importorskip("cutlass")
cute = pytest.importorskip("cutlass.cute")

from cuda.bindings import driver  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

from wanfp4 import simulator  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own


class Attention:
    """One problem on BF16 inputs; the kernel is compiled once a head_dim and mask, its lengths are run-time values."""

    def __init__(self, queries: int, keys: int, heads: int, dim: int, causal: bool) -> None:
        generator = torch.Generator().manual_seed(queries + keys + heads + dim)
        shapes = [(queries, heads), (keys, heads), (keys, heads)]
        self.inputs = [torch.randn(1, s, h, dim, generator=generator).to(torch.bfloat16) for s, h in shapes]
        self.dim, self.causal = dim, causal
        q, k, v = (x[0].double().transpose(0, 1) for x in self.inputs)
        logits = q @ k.transpose(1, 2) / math.sqrt(dim)
        if causal:
            below = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
            logits = logits.masked_fill(~below, -math.inf)
        self.want, self.want_lse = torch.softmax(logits, -1) @ v, torch.logsumexp(logits, -1)

    def run(self, gpu: simulator.Device, forward: Any, compiled: dict[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [H, Sq, D] and LSE [H, Sq], from poisoned outputs."""
        q, k, v = (x.clone() for x in self.inputs)
        out, lse = torch.full_like(q, math.nan), torch.full((1, q.shape[2], q.shape[1]), math.nan)
        gpu.register(q=q, k=k, v=v, out=out, lse=lse)
        tensors = [
            from_dlpack(x, assumed_align=16).mark_layout_dynamic(leading_dim=x.ndim - 1) for x in (q, k, v, out, lse)
        ]
        arguments = (*tensors, 1 / math.sqrt(self.dim))
        key = self.dim, self.causal
        if key not in compiled:
            kernel = forward(self.dim, is_causal=self.causal, is_static_persistent=False)
            compiled[key] = cute.compile(kernel, *arguments, stream=driver.CUstream(0))
        compiled[key](*arguments, stream=driver.CUstream(0))
        return out[0].transpose(0, 1), lse[0]

    def check(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """BF16 rounding of P and of the output explains a relative error of 2.4e-3."""
        assert ((out.double() - self.want).norm() / self.want.norm()) < 3e-3
        assert (lse.double() - self.want_lse).abs().max() < 5e-5


@pytest.fixture(scope="module")
def compiled() -> dict[Any, Any]:
    """By head_dim and mask: a function compiled under one device can be launched under another."""
    return {}


SHAPES = [
    (256, 256, 1, 128, False),
    (300, 333, 2, 128, False),
    (1, 129, 1, 128, False),
    (256, 640, 1, 64, False),
    (300, 333, 1, 128, True),
]


def runs(
    forward: Any, compiled: dict[Any, Any], shape: tuple[int, int, int, int, bool], seeds: Iterable[int | None]
) -> None:
    """Plain, then tracked under each seed: never a finding, and always the same bytes."""
    problem = Attention(*shape)
    with simulator.device("sm_100a", line_info=False) as gpu:
        first = problem.run(gpu, forward, compiled)
        problem.check(*first)
        gpu.track = True
        for gpu.seed in seeds:
            out, lse = problem.run(gpu, forward, compiled)
            assert torch.equal(out.view(torch.int16), first[0].view(torch.int16)), gpu.seed
            assert torch.equal(lse, first[1]), gpu.seed


@pytest.mark.parametrize("shape", SHAPES)
def test_it_runs_right_and_is_not_accused(
    flash_attention_forward: Any, compiled: dict[Any, Any], shape: tuple[int, int, int, int, bool]
) -> None:
    """Unseeded and under ten seeds."""
    runs(flash_attention_forward, compiled, shape, (None, *range(10)))


@pytest.mark.slow
def test_one_cta_over_wans_keys(flash_attention_forward: Any) -> None:
    problem = Attention(256, 32760, 1, 128, False)
    with simulator.device("sm_100a", track=True) as gpu:
        out, lse = problem.run(gpu, flash_attention_forward, {})
        report = gpu.report()
    problem.check(out, lse)
    assert report.instructions > 2_000_000
    assert report.mma == {"f16": 2 * 8 * 2 * 256}  # QK and PV, 8 of depth 16 each, two query tiles, 256 key tiles
    assert report.tma["bytes in"] == 2 * 128 * (2 * 128 + 2 * 32768)
    assert report.tensor_columns == 512


def test_the_strict_ordering_finds_what_it_leaves_to_the_hardware(flash_attention_forward: Any) -> None:
    """Its tensor-core operations of different warps have no tcgen05.fence between them, which the ISA asks for."""
    problem = Attention(256, 256, 1, 128, False)
    with (
        simulator.device("sm_100a", track=True, ordering="isa") as gpu,
        pytest.raises(simulator.RaceError, match=r"tcgen05\.fence") as found,
    ):
        problem.run(gpu, flash_attention_forward, {})
    assert found.value.place is not None
    assert found.value.place.source is not None
    assert "flash_fwd_sm100.py" in found.value.place.source
