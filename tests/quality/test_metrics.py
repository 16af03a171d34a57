"""Metrics against NumPy and scikit-image, and what must hold for any input."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from wanfp4.quality import metrics

SHAPE = (1, 4, 3, 5, 6)


def latent(seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def clip(seed: int, shape: tuple[int, ...] = (5, 24, 20, 3)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def test_cosine_and_relative_l2_are_those_of_numpy():
    a, b = latent(0), latent(1)
    x, y = (t.numpy().astype(np.float64).ravel() for t in (a, b))
    assert metrics.cosine(a, b) == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y), abs=1e-12)
    assert metrics.rel_l2(a, b) == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(y), rel=1e-12)


def test_relative_l2_divides_by_the_reference():
    b = latent(0)
    assert metrics.rel_l2(3 * b, b) == pytest.approx(2)
    assert metrics.rel_l2(b, 3 * b) == pytest.approx(2 / 3)


def test_frames_are_compared_one_by_one():
    b = latent(0)
    a = b.clone()
    a[:, :, 1] = 0  # a frame that went black
    found = metrics.distance(a, b)
    assert found.rel_l2_frames == (0, 1, 0)
    assert found.cosine_frames == pytest.approx((1, 0, 1))
    assert 0 < found.rel_l2 < 1
    x, y = (t[:, :, 2].double().numpy().ravel() for t in (2 * a + 1, b))
    other = metrics.distance(2 * a + 1, b)
    assert other.rel_l2_frames[2] == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(y))
    assert other.cosine_frames[2] == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y))


def test_sums_run_in_float64():
    b = torch.full((1, 1, 1, 1, 2**20), 1e-3)
    a = b * (1 + 2**-20)
    assert metrics.rel_l2(a, b) == pytest.approx(2**-20, rel=0.2)
    big = torch.full((1, 1, 1, 1, 4), 3e38)  # its square is infinite in float32
    assert metrics.cosine(big, big) == pytest.approx(1)


def test_zero_reference():
    zero, one = torch.zeros(SHAPE), latent(0)
    assert (metrics.cosine(zero, zero), metrics.rel_l2(zero, zero)) == (1, 0)
    assert (metrics.cosine(one, zero), metrics.rel_l2(one, zero)) == (0, math.inf)
    assert (metrics.cosine(zero, one), metrics.rel_l2(zero, one)) == (0, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_nan_and_infinity_never_look_healthy(bad, which):
    pair = [latent(0), latent(1)]
    pair[which][0, 0, 2, 0, 0] = bad
    found = metrics.distance(*pair)
    assert math.isnan(found.cosine)
    assert math.isnan(found.rel_l2)
    assert [math.isnan(v) for v in found.rel_l2_frames] == [False, False, True]
    assert [math.isnan(v) for v in found.cosine_frames] == [False, False, True]
    assert metrics.nonfinite_frames(pair[which]) == [2]
    assert metrics.nonfinite_frames(pair[1 - which]) == []


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(1e-6, 1e6), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_properties_of_distances(seed, factor, dtype):
    a, b = latent(seed), latent(seed + 1).to(dtype)
    assert metrics.rel_l2(b, b) == 0
    assert metrics.cosine(b, b) == pytest.approx(1, abs=1e-12)
    assert -1 <= metrics.cosine(a, b) <= 1
    assert metrics.rel_l2(a, b) >= 0
    scaled = factor * a.double(), factor * b.double()
    assert metrics.cosine(*scaled) == pytest.approx(metrics.cosine(a, b), abs=1e-9)
    assert metrics.rel_l2(*scaled) == pytest.approx(metrics.rel_l2(a, b), rel=1e-9)
    # ‖a − b‖² = ‖a‖² + ‖b‖² − 2‖a‖‖b‖·cosine ties the two together.
    r = float(a.double().norm() / b.double().norm())
    expected = math.sqrt(max(0.0, 1 + r * r - 2 * r * metrics.cosine(a, b)))
    assert metrics.rel_l2(a, b) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="shapes differ"):
        metrics.rel_l2(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="batch, channels, frames"):
        metrics.distance(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="differ in shape"):
        metrics.psnr(clip(0), clip(0)[:2])
    with pytest.raises(ValueError, match="uint8"):
        metrics.ssim(clip(0).astype(np.float32), clip(0))


def test_psnr_and_ssim_are_those_of_scikit_image():
    a, b = clip(0), clip(1)
    near = np.clip(a.astype(int) + np.random.default_rng(2).integers(-9, 10, a.shape), 0, 255).astype(np.uint8)
    for x in (b, near):
        assert metrics.psnr(x, a) == pytest.approx(peak_signal_noise_ratio(a, x, data_range=255), rel=1e-12)
        each = [structural_similarity(a[i], x[i], channel_axis=-1, data_range=255) for i in range(len(a))]
        assert metrics.ssim(x, a) == pytest.approx(np.mean(each), rel=1e-12)
    assert metrics.ssim(near, a) > metrics.ssim(b, a)
    assert metrics.psnr(a, a) == math.inf
    assert metrics.ssim(a, a) == pytest.approx(1)


def test_ssim_of_frames_smaller_than_its_window_is_nan():
    tiny = clip(0, (2, 6, 20, 3))
    assert math.isnan(metrics.ssim(tiny, tiny))


def test_flicker_is_the_mean_step_between_frames():
    frames = np.zeros((4, 8, 8, 3), np.uint8)
    frames[1], frames[2], frames[3] = 10, 4, 4
    assert metrics.flicker(frames) == pytest.approx((10 + 6 + 0) / 3)
    assert metrics.flicker_ratio(frames // 2, frames) == pytest.approx(0.5)
    assert metrics.flicker_ratio(frames * 0, frames) == 0  # frozen
    assert metrics.flicker_ratio(frames, frames * 0) == math.inf
    assert metrics.flicker_ratio(frames * 0, frames * 0) == 1
    assert math.isnan(metrics.flicker_ratio(frames[:1], frames[:1]))


def test_flicker_does_not_wrap_around():
    frames = np.stack([np.full((8, 8, 3), v, np.uint8) for v in (0, 255, 0)])
    assert metrics.flicker(frames) == 255


def test_black_frames():
    frames = np.zeros((4, 10, 10, 3), np.uint8)
    frames[1] = 60  # 23 % luma
    frames[2] = 25  # 9.8 %
    frames[3, 0, :3] = 255  # 3 % of the pixels are white
    assert metrics.black_frames(frames) == [0, 2]
    frames[3, 0, 1:3] = 0  # one pixel in a hundred
    assert metrics.black_frames(frames) == [0, 2, 3]


def test_spread():
    assert metrics.spread([3, 1, 2]) == {"median": 2, "min": 1, "max": 3}
    assert metrics.spread([1, 2]) == {"median": 1.5, "min": 1, "max": 2}
    assert metrics.spread([math.inf, 1, math.inf]) == {"median": math.inf, "min": 1, "max": math.inf}
    assert metrics.spread([math.inf, 1])["median"] == math.inf
    assert all(math.isnan(v) for v in metrics.spread([1, math.nan]).values())
    assert all(math.isnan(v) for v in metrics.spread([]).values())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=9))
def test_spread_is_numpys(values):
    found = metrics.spread(values)
    assert found["median"] == pytest.approx(np.median(values))
    assert (found["min"], found["max"]) == (min(values), max(values))
