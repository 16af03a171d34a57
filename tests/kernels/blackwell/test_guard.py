"""The guard's kernel on the simulator: what it samples, what it finds, against `reference.sampled_logit`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from wanfp4 import simulator
from wanfp4.errors import UnsupportedInputError
from wanfp4.kernels.blackwell import guard
from wanfp4.kernels.blackwell.cache import Kernel, Kernels
from wanfp4.kernels.reference import sampled_logit

BF16, FP16 = torch.bfloat16, torch.float16
SCALE = 128**-0.5

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own


@pytest.fixture(scope="module")
def gpu() -> Iterator[simulator.Device]:
    with simulator.device("sm_100a", seed=1, track=True, ordering="isa") as device:
        yield device


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels("sm_100a")


def exceeds(
    gpu: simulator.Device, kernels: Kernels, q: torch.Tensor, k: torch.Tensor, limit: float, scale: float = SCALE
) -> int:
    flag = torch.zeros(1, dtype=torch.int32)
    gpu.register(q=q, k=k, flag=flag)
    (batch, queries, heads, _), keys = q.shape, k.shape[1]
    strides = (*q.stride()[:3], *k.stride()[:3])
    run = kernels.get(Kernel("guard", q.dtype))
    run(q.data_ptr(), k.data_ptr(), flag.data_ptr(), *strides, batch, heads, queries, keys, scale, limit, 0)
    return int(flag.item())


def draw(queries: int, keys: int, batch: int = 1, heads: int = 1, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(queries + keys)
    return [torch.randn(batch, n, heads, 128, generator=g).to(dtype) for n in (queries, keys)]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shape", [(1, 1), (17, 300), (1000, 40)])
def test_agrees_with_the_reference(
    gpu: simulator.Device, kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    q, k = draw(*shape, dtype=dtype)
    largest = sampled_logit(q, k, SCALE)
    assert exceeds(gpu, kernels, q, k, largest * (1 - 1e-5)) == 1
    assert exceeds(gpu, kernels, q, k, largest * (1 + 1e-5)) == 0


def test_every_batch_and_head_counts(gpu: simulator.Device, kernels: Kernels) -> None:
    """One loud pair of vectors, in any head of strided tensors, is found; elsewhere all is silent."""
    q, k = (torch.zeros(2, 3, 10, 256, dtype=BF16)[..., :128].transpose(1, 2) for _ in range(2))
    for batch, head in ((0, 0), (0, 2), (1, 0), (1, 2)):
        q[batch, 7, head, 100], k[batch, 3, head, 100] = 30.0, -20.0  # −600 · scale
        assert exceeds(gpu, kernels, q, k, 50.0) == 1
        q.zero_()
    q[1, 7, 2, 100] = 30.0
    assert exceeds(gpu, kernels, q, k, 54.0) == 0


def test_samples_are_those_of_the_reference(gpu: simulator.Device, kernels: Kernels) -> None:
    """A loud query or key is found exactly where it is one of 128 evenly spaced ones."""
    tokens = 1001
    sampled = {round(i * (tokens - 1) / 127) for i in range(128)}
    assert {0, 1000} <= sampled
    places = [0, 1, 7, 8, 9, 496, 500, 504, 505, 999, 1000]
    assert {place in sampled for place in places} == {True, False}
    quiet = torch.ones(1, 1, 1, 128, dtype=BF16)
    for place in places:
        loud = torch.zeros(1, tokens, 1, 128, dtype=BF16)
        loud[0, place] = 1.0
        wanted = int(place in sampled)
        assert int(sampled_logit(loud, quiet, SCALE) > 1) == wanted
        assert exceeds(gpu, kernels, quiet, loud, 1.0) == wanted
        if place in (0, 8, 9, 999, 1000):
            assert exceeds(gpu, kernels, loud, quiet, 1.0) == wanted


def test_every_channel_counts(gpu: simulator.Device, kernels: Kernels) -> None:
    for channel in range(0, 128, 9):
        q, k = (torch.zeros(1, 1, 1, 128, dtype=FP16) for _ in range(2))
        q[..., channel], k[..., channel] = 4.0, 4.0
        assert exceeds(gpu, kernels, q, k, 15.9, scale=1.0) == 1
        assert exceeds(gpu, kernels, q, k, 16.0, scale=1.0) == 0  # not above the limit


def test_infinity_exceeds_and_nan_does_not(gpu: simulator.Device, kernels: Kernels) -> None:
    """Also beside the places that a short sequence leaves empty."""
    for value, found in ((torch.inf, 1), (-torch.inf, 1), (torch.nan, 0)):
        q, k = torch.zeros(1, 3, 1, 128, dtype=BF16), torch.ones(1, 2, 1, 128, dtype=BF16)
        q[0, 2, 0, 5] = value
        assert exceeds(gpu, kernels, q, k, 1e6) == found
        assert exceeds(gpu, kernels, k, q, 1e6) == found


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(UnsupportedInputError, match=r"reads torch.bfloat16 and torch.float16, not torch.float32"):
        guard.SampleLogits(torch.float32)
