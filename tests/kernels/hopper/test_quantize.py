"""The quantisers of the backend "sm90" in Triton's interpreter: their images hold what formats.py rounds."""

import pytest
import torch
from hopper_images import images_of
from interpreter import Interpreter

from wanfp4.kernels import formats, reference

pytest.importorskip("triton", reason="triton runs on Linux")


@pytest.fixture(scope="module")
def interpreter():
    child = Interpreter()
    yield child
    child.close()


def draw(tokens, seed=0, spread=3):
    """x [1, S, 2, 128] whose tokens' magnitudes differ by powers of two, so that exponents do."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(1, tokens, 2, 128, generator=g)
    return (x * torch.randint(-spread, spread + 1, (1, tokens, 1, 1), generator=g).float().exp2()).bfloat16()


def truth(x, anchors):
    """Values [B·H, padded, 128] in the anchors' order."""
    flat = x.transpose(1, 2).flatten(0, 1).float()
    if anchors:
        order = reference.key_order(x.shape[1], f"anchor{anchors}", x.device)
        flat = flat[:, order]
    rounded = formats.quantize_mxfp8_token_block(flat)
    return torch.nn.functional.pad(rounded.dequantize(), (0, 0, 0, -x.shape[1] % 128))


@pytest.mark.parametrize("tokens", [1, 100, 128, 129, 300])
@pytest.mark.parametrize("kind", ["q", "k", "v"])
def test_images_hold_the_rounded_values(interpreter, kind, tokens):
    x = draw(tokens)
    image = interpreter.call("hopper_images:quantized", x, kind)
    assert torch.equal(images_of(image, kind), truth(x, 0 if kind == "q" else 128))


def test_a_strided_input(interpreter):
    x = draw(200)
    strided = torch.zeros(1, 200, 2, 256, dtype=torch.bfloat16)[..., ::2].copy_(x)
    for kind in "qkv":
        one, other = (interpreter.call("hopper_images:quantized", t, kind) for t in (x, strided))
        assert torch.equal(images_of(one, kind), images_of(other, kind))


def test_the_ones_undo_the_exponents_of_v_and_end_with_the_keys(interpreter):
    image = interpreter.call("hopper_images:quantized", draw(300), "v")
    ones = images_of(image, "ones")
    assert ((ones > 0).sum(-1) == 300).all()
    behind = image.numbers[..., 4:8]
    assert behind.max() == 0
    assert behind.min() >= -3
    kept = ones.unflatten(-1, (-1, 32))[:, :9]
    assert torch.equal(kept, (-behind.flatten(1)[:, :9, None]).exp2().expand_as(kept))


def test_exponents_far_apart_keep_what_e4m3_holds(interpreter):
    """Blocks more than three octaves below their tile's largest use E4M3's own exponents."""
    x = draw(128, spread=0)
    x[:, :32] *= 2.0**12
    image = interpreter.call("hopper_images:quantized", x, "v")
    flat = x.transpose(1, 2).flatten(0, 1).float()
    order = reference.key_order(128, "anchor128", x.device)
    assert torch.equal(order, torch.arange(128))
    top = formats.e4m3_exponent(flat[:, :32].abs().amax((1, 2)))
    step = (top - 3 - 9).exp2()[:, None, None]
    assert ((images_of(image, "v") - flat)[:, 32:].abs() <= torch.maximum(step / 2, flat[:, 32:].abs() / 16)).all()


@pytest.mark.parametrize("kind", ["q", "k", "v"])
def test_zeros(interpreter, kind):
    image = interpreter.call("hopper_images:quantized", torch.zeros(1, 200, 1, 128).bfloat16(), kind)
    assert torch.equal(images_of(image, kind), torch.zeros(1, 256, 128))
    if kind != "v":
        assert (image.numbers[..., :4] == 1).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(interpreter, bad):
    x = draw(300)
    x[0, 40, 0, 3] = bad
    assert interpreter.call("hopper_images:quantized", x, "q").numbers[0].isnan().any()
    for kind in "kv":
        image = interpreter.call("hopper_images:quantized", x, kind)
        if kind == "k":
            assert image.numbers[0, :, 9].isnan().sum() == 1
            assert (image.numbers[1, :, 9] == 0).all()
        else:
            assert images_of(image, "v")[0].isnan().any()
        assert images_of(image, kind)[1].isfinite().all()


def test_smoothing_subtracts_the_mean(interpreter):
    x = draw(200)
    mean = x.mean(1, dtype=torch.float32).reshape(2, 128)
    image = interpreter.call("hopper_images:quantized", x, "k", mean)
    shifted = (x.float() - mean[None, None].reshape(1, 1, 2, 128)).to(torch.float32)
    assert torch.equal(images_of(image, "k"), truth(shifted, 128))
