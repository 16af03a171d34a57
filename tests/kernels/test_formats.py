"""Every format against ml_dtypes, an independent implementation, and against its definition."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wanfp4.kernels import formats as f

FINITE = st.floats(-(2.0**100), 2.0**100, width=32)


def ml(x, dtype):
    return np.asarray(x, np.float32).astype(dtype)


def between(values):
    """Every code's value, every midpoint between neighbours, and the floats next to each midpoint."""
    values = np.sort(np.unique(np.asarray(values, np.float32)))
    middle = ((values[:-1].astype(np.float64) + values[1:]) / 2).astype(np.float32)
    near = [np.nextafter(middle, np.float32(s) * np.inf, dtype=np.float32) for s in (-1, 1)]
    return torch.from_numpy(np.concatenate([values, middle, *near]))


def test_e2m1_every_code_decodes_as_ml_dtypes():
    codes = np.arange(16, dtype=np.uint8)
    truth = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    mine = f.decode_e2m1(torch.from_numpy(codes)).numpy()
    assert (mine.view(np.uint32) == truth.view(np.uint32)).all()  # the sign of zero included
    assert (f.encode_e2m1(torch.from_numpy(truth)).numpy() == codes).all()


def test_e2m1_ties_neighbours_and_saturation_as_ml_dtypes():
    x = between(f.decode_e2m1(torch.arange(16)).numpy())
    x = torch.cat([x, torch.tensor([6.01, 7, 1e30, -7, -1e30])])
    # ml_dtypes saturates nothing above 6 to NaN here: float4 has neither NaN nor infinity.
    truth = ml(x.numpy(), ml_dtypes.float4_e2m1fn)
    assert (f.encode_e2m1(x).numpy() == truth.view(np.uint8)).all()
    assert (f.round_e2m1(x).numpy() == truth.astype(np.float32)).all()


@pytest.mark.parametrize(
    ("x", "value"), [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (6.5, 6), (1e9, 6)]
)
def test_e2m1_ties_as_the_contract_states_them(x, value):
    assert f.round_e2m1(torch.tensor([x, -x])).tolist() == [value, -value]


def test_e2m1_special_values():
    x = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 0.0])
    assert f.round_e2m1(x).tolist() == [6, -6, 6, 0, 0]
    assert f.encode_e2m1(x).tolist() == [7, 15, 7, 8, 0]


@given(st.lists(FINITE, min_size=1, max_size=64))
def test_e2m1_any_float_as_ml_dtypes(values):
    x = torch.tensor(values, dtype=torch.float32)
    assert (f.encode_e2m1(x).numpy() == ml(x.numpy(), ml_dtypes.float4_e2m1fn).view(np.uint8)).all()


def test_e4m3_every_code_tie_and_neighbour():
    codes = np.arange(256, dtype=np.uint8)
    truth = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    mine = f.decode_e4m3(torch.from_numpy(codes)).numpy()
    assert np.array_equal(mine, truth, equal_nan=True)
    x = between(truth[np.isfinite(truth)])
    assert (f.encode_e4m3(x).numpy() == ml(x.numpy(), ml_dtypes.float8_e4m3fn).view(np.uint8)).all()


def test_e4m3_special_values():
    x = torch.tensor([math.inf, -math.inf, 1e9, 448.0, 465.0, 2.0**-10, 2.0**-9, math.nan])
    assert f.round_e4m3(x[:-1]).tolist() == [448, -448, 448, 448, 448, 0, 2.0**-9]
    assert f.round_e4m3(x[-1:]).isnan().all()
    assert f.encode_e4m3(x[-1:]).tolist() == [0x7F]


def test_e8m0_every_code():
    codes = np.arange(256, dtype=np.uint8)
    truth = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    mine = f.decode_e8m0(torch.from_numpy(codes))
    assert np.array_equal(mine.numpy(), truth, equal_nan=True)
    assert (f.encode_e8m0(torch.arange(-127, 128).float()).numpy() == codes[:255]).all()
    assert f.encode_e8m0(torch.tensor([-math.inf, -500, 128, math.inf, math.nan])).tolist() == [0, 0, 254, 254, 255]


@given(st.integers(1, 9), st.integers(0, 3), st.data())
def test_pack_and_unpack(length, rows, data):
    codes = torch.tensor(data.draw(st.lists(st.integers(0, 15), min_size=rows * length, max_size=rows * length)))
    codes = codes.to(torch.uint8).reshape(rows, length)
    packed = f.pack_e2m1(codes)
    assert packed.shape == (rows, (length + 1) // 2)
    assert torch.equal(f.unpack_e2m1(packed, length), codes)


def test_pack_puts_the_even_element_in_the_low_nibble():
    assert f.pack_e2m1(torch.tensor([1, 2, 3], dtype=torch.uint8)).tolist() == [0x21, 0x03]
    truth = np.array([1, 2, 3, 4], np.uint8).view(ml_dtypes.float4_e2m1fn)
    assert f.unpack_e2m1(f.pack_e2m1(torch.from_numpy(truth.view(np.uint8)))).tolist() == [1, 2, 3, 4]


def test_direct_exponent_is_the_nearest_power_with_midpoint_one_and_a_half():
    codes = np.arange(1, 0x7F80, dtype=np.uint16)  # every positive finite BF16 value
    x = torch.from_numpy(codes.view(ml_dtypes.bfloat16).astype(np.float32))
    truth = np.floor(np.log2(x.numpy().astype(np.float64)) + 0.41504)
    assert (f.direct_exponent(x).numpy() == truth).all()
    assert f.direct_exponent(torch.tensor([1.0, 1.4999, 1.5, 2.0, 2.9999, 3.0])).tolist() == [0, 0, 1, 1, 1, 2]
    special = f.direct_exponent(torch.tensor([0.0, math.inf, math.nan]))
    assert special[:2].tolist() == [-math.inf, math.inf]
    assert special[2].isnan()


BLOCK_FORMATS = {
    "nvfp4": lambda x: f.quantize_nvfp4(x),
    "nvfp4 along tokens": lambda x: f.quantize_nvfp4(x, dim=-2),
    "nvfp4 folded": lambda x: f.quantize_nvfp4(x, fold=True),
    "nvfp4 global": lambda x: f.quantize_nvfp4(x, global_scale=True),
    "nvfp4 folded global": lambda x: f.quantize_nvfp4(x, fold=True, global_scale=True),
    "mxfp4-direct": lambda x: f.quantize_mxfp4_direct(x),
    "mxfp4-direct along tokens": lambda x: f.quantize_mxfp4_direct(x, dim=-2),
    "mxfp4": lambda x: f.quantize_mxfp4(x),
    "mxfp8-token-block": lambda x: f.quantize_mxfp8_token_block(x),
}


@pytest.fixture(params=list(BLOCK_FORMATS))
def quantize(request):
    return BLOCK_FORMATS[request.param]


@settings(max_examples=15)
@given(tokens=st.integers(1, 70), size=st.sampled_from([1e-6, 1.0, 3e4]), seed=st.integers(0, 99))
def test_block_formats_shapes_range_and_idempotence(tokens, size, seed):
    x = torch.randn(2, tokens, 128, generator=torch.Generator().manual_seed(seed)) * size
    x = x.bfloat16().float()
    before = x.clone()
    for quantize in BLOCK_FORMATS.values():
        rounded = quantize(x)
        y = rounded.dequantize()
        assert torch.equal(x, before)
        assert y.shape == x.shape
        assert rounded.codes.shape == x.shape
        assert y.isfinite().all()
        assert torch.equal(rounded.values().bfloat16().float(), rounded.values())  # exact in BF16
        if size == 1.0:
            assert (y - x).norm() < 0.2 * x.norm()


def test_nvfp4_against_a_loop_over_blocks():
    x = torch.randn(5, 128) * 3
    x[1, :16] = 0
    x[2, :16] *= 1e-4  # the scale underflows, so the block is 0
    rounded = f.quantize_nvfp4(x)
    for row in range(5):
        for b in range(8):
            block = x[row, 16 * b : 16 * b + 16].numpy()
            s = ml(np.abs(block).max() / np.float32(6), ml_dtypes.float8_e4m3fn)
            assert rounded.scales[row, b].item() == s.view(np.uint8).item()
            s = s.astype(np.float32)
            value = s * ml(block / s, ml_dtypes.float4_e2m1fn).astype(np.float32) if s > 0 else np.zeros(16)
            assert (rounded.dequantize()[row, 16 * b : 16 * b + 16].numpy() == value).all()


def test_global_scale_uses_the_whole_range_of_e4m3():
    x = torch.randn(4, 128) * 1e-5  # far below E4M3's range: without a tensor scale everything is 0
    assert f.quantize_nvfp4(x).dequantize().abs().max() == 0
    rounded = f.quantize_nvfp4(x, global_scale=True)
    assert f.decode_e4m3(rounded.scales).max() == 448
    assert (rounded.dequantize() - x).norm() < 0.12 * x.norm()


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e30, 1e-38])
def test_folded_scales_do_not_depend_on_how_many_are_tried_at_once(monkeypatch, scale):
    x = torch.randn(60, 128, generator=torch.Generator().manual_seed(0)) * scale
    x[3], x[4, 5], x[6, 7], x[8] = 0, math.nan, math.inf, x[8] * 1e-6
    made = []
    for limit in (0, 10**9):
        monkeypatch.setattr(f, "_FOLD_CPU", limit)
        made.append(f.quantize_nvfp4(x, fold=True))
    assert torch.equal(made[0].scales, made[1].scales)
    assert torch.equal(made[0].codes, made[1].codes)


def test_folding_never_loses_to_its_own_start_and_shares_scales():
    x = torch.randn(64, 128)
    rounded = f.quantize_nvfp4(x, fold=True)
    assert rounded.scales.shape == (64, 4)
    scale = rounded.scale_values().reshape(64, 8, 16)
    assert torch.equal(scale[:, :4], scale[:, 4:])
    start = f.round_e4m3(x.reshape(64, 2, 4, 16).abs().amax((1, 3)) / 6)[:, None, :, None]
    plain = start * f.round_e2m1(x.reshape(64, 2, 4, 16) / start)
    error = (rounded.dequantize() - x).reshape(64, 2, 4, 16).square().sum((1, 3))
    assert (error <= (plain - x.reshape(64, 2, 4, 16)).square().sum((1, 3)) + 1e-6).all()
    with pytest.raises(ValueError, match="128 elements"):
        f.quantize_nvfp4(torch.randn(4, 64), fold=True)


def test_mxfp4_direct_and_ocp_are_different_grids():
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = 1.0, 0.5
    direct, ocp = f.quantize_mxfp4_direct(x), f.quantize_mxfp4(x)
    assert (direct.scales.item(), ocp.scales.item()) == (127, 125)  # 2^0, and 2^(0-2)
    assert (direct.codes[0, 0].item(), ocp.codes[0, 0].item()) == (7, 6)  # 6/6, and 4·2^-2
    assert direct.dequantize()[0, :2].tolist() == [1.0, 0.5]
    x[0, 0] = 1.49  # direct: α stays 1 and the value saturates at α; OCP: 1.5
    assert f.quantize_mxfp4_direct(x).dequantize()[0, 0] == 1.0
    assert f.quantize_mxfp4(x).dequantize()[0, 0] == 1.5


def test_ocp_mxfp4_against_ml_dtypes():
    x = torch.randn(50, 64) * torch.logspace(-9, 9, 50)[:, None]
    rounded = f.quantize_mxfp4(x)
    blocks = x.numpy().reshape(50, 2, 32)
    scale = np.exp2(np.floor(np.log2(np.abs(blocks).max(-1).astype(np.float64))) - 2).astype(np.float32)
    assert (ml(scale, ml_dtypes.float8_e8m0fnu).view(np.uint8) == rounded.scales.numpy()).all()
    value = ml(blocks / scale[..., None], ml_dtypes.float4_e2m1fn).astype(np.float32) * scale[..., None]
    assert (rounded.dequantize().numpy().reshape(blocks.shape) == value).all()


def test_token_block_exponent_is_the_smallest_that_saturates_nothing():
    for amax, exponent in ((448.0, 0), (449.0, 1), (224.0, -1), (1.0, -8), (2.0**-130, -127)):
        x = torch.zeros(3, 128)
        x[1, 5] = amax
        rounded = f.quantize_mxfp8_token_block(x)
        assert rounded.scales.shape == (1, 1)
        assert rounded.scales.item() == exponent + 127
    x = torch.randn(70, 128)
    rounded = f.quantize_mxfp8_token_block(x)
    assert rounded.scales.shape == (3, 1)
    scale = f.decode_e8m0(rounded.scales).repeat_interleave(32, 0)[:70]
    assert (
        rounded.dequantize().numpy()
        == (ml((x / scale).numpy(), ml_dtypes.float8_e4m3fn).astype(np.float32) * scale.numpy())
    ).all()


def test_zero_blocks_decode_to_zero(quantize):
    y = quantize(torch.zeros(2, 40, 128)).dequantize()
    assert torch.equal(y, torch.zeros(2, 40, 128))


def test_a_nan_poisons_its_block_and_nothing_else(quantize):
    x = torch.ones(1, 64, 128)
    x[0, 40, 70] = math.nan
    rounded = quantize(x)
    bad = rounded.dequantize().isnan()
    assert bad[0, 40, 70]
    assert torch.equal(bad, rounded.scale_values().isnan() | rounded.factor.isnan())
    # A tensor-wide scale carries the NaN to the whole tensor; block scales keep it inside the block.
    assert bad.all() == rounded.factor.isnan()


def test_infinities_saturate(quantize):
    x = torch.ones(1, 32, 128)
    x[0, 3, 9], x[0, 3, 10] = math.inf, -math.inf
    rounded = quantize(x)
    y = rounded.dequantize()
    if rounded.format == "nvfp4" and rounded.factor != 1:
        assert y[0, 3, 9].isnan()  # a tensor-wide scale of infinity has no finite reading: NaN, not a wrong number
    else:
        # The code saturates; 6·2^127 is beyond float32, so the E8M0 formats decode to the infinity they were given.
        assert not y.isnan().any()
        assert y[0, 3, 9] == y.max() == -y[0, 3, 10]
        assert y.max() > 1
