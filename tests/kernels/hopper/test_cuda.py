"""The backend "sm90" on a Hopper GPU, against the reference on the same GPU.

The tensor core adds FP8 products with about 13 bits, so some scores fall on the other side of a rounding boundary than
the reference's: outputs agree within a tenth of what the policy itself costs.
"""

import dataclasses
import math

import pytest
import torch
from emulated_cases import SCALE, draw, rel_l2
from hopper_images import images_of, quantized

import wanfp4
from wanfp4.kernels import dispatch, reference
from wanfp4.kernels.hopper import ada, backend
from wanfp4.policy import policies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

POLICIES = {name: policies()[name].numerics for name in ("fp8-direct", "mxfp8-token-block")}
POLICIES["exp2, plain"] = dataclasses.replace(POLICIES["fp8-direct"], p="fp8")
POLICIES["K and V smoothed"] = dataclasses.replace(POLICIES["fp8-direct"], smooth_k=True, smooth_v=True)
SHAPES = [(1, 1), (33, 200), (300, 129), (640, 1), (128, 128), (1024, 4096), (4096, 1000), (191, 193)]


def on_gpu(*tensors):
    return tuple(t.cuda() for t in tensors)


def exact(q, k, v):
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=SCALE).transpose(1, 2)


def check(q, k, v, numerics, build=None, limit=0.12, farther=1.02):
    """Against the reference: within `limit` of the policy's own error, and at most `farther` as far from the truth."""
    lse = not numerics.smooth_k
    out, mine = backend.run(q, k, v, numerics, SCALE, lse, build)
    wanted = reference.attention(q, k, v.float(), numerics, scale=SCALE, return_lse=True)
    truth = exact(q, k, v)
    own = rel_l2(wanted.out, truth)
    found, error = rel_l2(out, wanted.out), rel_l2(out, truth)
    rounding = 0.002  # of the output, to BF16
    assert found < limit * own + rounding, (found, own)
    assert error < farther * own + rounding, (error, own)
    if lse:  # one byte of P is an eighth of an octave at most, and scores have the tensor core's 13 bits
        assert ((mine - wanted.lse).abs() < 0.13 + 2e-3 * wanted.lse.abs()).all(), (mine - wanted.lse).abs().max()
        assert (mine - wanted.lse).abs().mean() < 0.02


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_the_reference(name, shape):
    check(*on_gpu(*draw(*shape, batch=2, heads=3, seed=sum(shape))), POLICIES[name])


@pytest.mark.parametrize("build", [b for builds in backend.BUILDS.values() for b in builds], ids=str)
def test_every_build_gives_the_same(build):
    numerics = POLICIES["fp8-direct" if build.direct else "mxfp8-token-block"]
    check(*on_gpu(*draw(513, 1111, heads=2)), numerics, build)


@pytest.mark.parametrize("name", ["fp8-direct", "mxfp8-token-block"])
@pytest.mark.parametrize("sharpness", [0.1, 4.0, 12.0])
def test_flat_and_sharp_rows(name, sharpness):
    check(*on_gpu(*draw(640, 3000, heads=2, sharpness=sharpness)), POLICIES[name], limit=0.2)


@pytest.mark.parametrize("name", ["fp8-direct", "mxfp8-token-block"])
@pytest.mark.parametrize("size", [30, 300, 1000])
def test_logits_that_climb_through_the_range(name, size):
    """Rows' largest scores grow from tile to tile, far beyond what the anchors say."""
    g = torch.Generator().manual_seed(size)
    direction = torch.zeros(128)
    direction[:16] = 0.25 * 2 ** torch.arange(0, 1, 1 / 16)
    direction /= direction.norm()
    ramp = torch.linspace(-1, 1, 3000)
    ramp[reference.key_order(3000, "anchor128", ramp.device)[:128]] -= 1
    k = ramp[:, None] * direction * math.sqrt(128) + 0.1 * torch.randn(3000, 128, generator=g)
    q = direction * size + 0.02 * torch.randn(300, 128, generator=g)
    q, k = (t.bfloat16()[None, :, None].cuda() for t in (q, k))
    v = torch.randn(1, 3000, 1, 128, generator=g).bfloat16().cuda()
    check(q, k, v, POLICIES[name], limit=0.3)


@pytest.mark.parametrize("name", ["fp8-direct", "mxfp8-token-block"])
def test_one_key_far_above_the_anchors(name):
    """A key that is no anchor holds all the weight: the reference is raised by many octaves at once."""
    q, k, v = on_gpu(*draw(200, 2000, heads=2))
    k[:, 777] = 40 * q[:, 5]
    check(q, k, v, POLICIES[name], limit=0.3)


@pytest.mark.parametrize("name", ["fp8-direct", "mxfp8-token-block"])
@pytest.mark.parametrize("key", [0, 777], ids=["an anchor", "no anchor"])
@pytest.mark.parametrize("nats", [3, 6, 9, 10])
def test_an_attention_sink_leaves_the_others_their_weight(name, key, nats):
    """One key that all queries score so far above the others, which hold some or most of the weight together.

    At 10 nats they are at the end of fp8-direct's range, from which V's exponents take up to three octaves here."""
    q, k, v = draw(300, 4096, heads=2)
    direction = torch.nn.functional.normalize(torch.randn(128, generator=torch.Generator().manual_seed(1)), dim=0)
    q, k = (t.float() - (t.float() @ direction)[..., None] * direction for t in (q, k))
    q += 12 * direction
    k[:, key] = direction * nats / (12 * SCALE)
    check(*on_gpu(q.bfloat16(), k.bfloat16(), v), POLICIES[name], limit=0.7, farther=1.3)


@pytest.mark.parametrize("name", ["fp8-direct", "mxfp8-token-block"])
def test_v_whose_blocks_differ_by_octaves(name):
    q, k, v = on_gpu(*draw(300, 1000, heads=2))
    order = reference.key_order(1000, "anchor128", v.device)
    octaves = torch.randint(-8, 1, (32,), device="cuda").repeat_interleave(32)[:1000]  # of the kernel's own blocks
    v[:, order] *= (2.0**octaves)[None, :, None, None].bfloat16()
    check(q, k, v, POLICIES[name])


@pytest.mark.parametrize("name", ["fp8-direct", "mxfp8-token-block"])
@pytest.mark.parametrize("keys", [1, 70, 128, 300])
def test_zeros_everywhere(name, keys):
    q, k, v = on_gpu(*draw(5, keys))
    for tensors in ((q * 0, k, v), (q, k * 0, v), (q * 0, k * 0, v), (q, k, v * 0)):
        assert backend.run(*tensors, POLICIES[name], SCALE, False)[0].isfinite().all()
    assert rel_l2(backend.run(q * 0, k, v, POLICIES[name], SCALE, False)[0], exact(q * 0, k, v)) < 0.04


@pytest.mark.parametrize("kind", ["q", "k", "v"])
def test_operands_are_bit_exact(kind):
    """The hardware's conversion to E4M3 against formats.py, all of BF16's mantissas among the values."""
    from wanfp4.kernels import formats

    x = torch.randn(2, 1000, 3, 128, device="cuda").bfloat16() * 3
    flat = x.transpose(1, 2).flatten(0, 1).float()
    if kind != "q":
        flat = flat[:, reference.key_order(1000, "anchor128", flat.device)]
    truth = torch.nn.functional.pad(formats.quantize_mxfp8_token_block(flat).dequantize(), (0, 0, 0, 24))
    assert torch.equal(images_of(quantized(x, kind), kind), truth)


def test_strided_inputs():
    q, k, v = (torch.randn(2, 3, 500, 128, device="cuda").bfloat16().transpose(1, 2) for _ in range(3))
    numerics = POLICIES["fp8-direct"]
    strided = backend.run(q, k, v, numerics, SCALE, True)
    plain = backend.run(*(t.contiguous() for t in (q, k, v)), numerics, SCALE, True)
    assert torch.equal(strided[0], plain[0])
    assert torch.equal(strided[1], plain[1])


def test_determinism_and_memory_at_wans_length():
    q, k, v = (torch.randn(1, 32_760, 12, 128, device="cuda").bfloat16() for _ in range(3))
    numerics = POLICIES["fp8-direct"]
    backend.run(q[:, :128], k, v, numerics, SCALE, False)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first = backend.run(q, k, v, numerics, SCALE, False)[0]
    assert torch.cuda.max_memory_allocated() - before <= 0.95 * 6 * q.numel()
    for _ in range(5):
        assert torch.equal(first, backend.run(q, k, v, numerics, SCALE, False)[0])


def test_long_sums_keep_their_precision():
    """262,144 equal keys: what a sum in the tensor core's 13 bits would lose, sums over tiles in float32 keep."""
    q = torch.randn(1, 64, 1, 128, device="cuda").bfloat16()
    k = torch.zeros(1, 262_144, 1, 128, device="cuda").bfloat16()
    v = (1 + torch.rand(1, 262_144, 1, 128, device="cuda")).bfloat16()
    for name in ("fp8-direct", "mxfp8-token-block"):
        out, lse = backend.run(q, k, v, POLICIES[name], SCALE, True)
        assert rel_l2(out, v.double().mean(1, keepdim=True).expand(1, 64, 1, 128)) < 0.004
        assert (lse - math.log(262_144)).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["fp8-direct", "mxfp8-token-block"])
def test_nan_reaches_the_output(name):
    q, k, v = on_gpu(*draw(40, 300))
    numerics = POLICIES[name]
    for tensor, where in ((k, (0, 0)), (k, (0, 30)), (k, (0, 299)), (v, (0, 30)), (v, (0, 299))):
        before = tensor[where].clone()
        tensor[(*where, 0, 3)] = math.nan
        out = backend.run(q, k, v, numerics, SCALE, False)[0][0, :, 0]
        assert out.isnan().any(1).all()
        tensor[where] = before
    q[0, 2, 0, 7] = math.nan
    out = backend.run(q, k, v, numerics, SCALE, False)[0][0, :, 0]
    assert out[2].isnan().all()
    assert out[32:].isfinite().all()


def test_offsets_beyond_two_to_the_31():
    whole = torch.empty(1, 17_000_000, 1, 128, dtype=torch.bfloat16, device="cuda")
    strided = torch.as_strided(whole, (1, 300, 2, 128), (0, 128, whole.numel() - 300 * 128, 1))
    strided.normal_()
    check(strided, strided, strided, POLICIES["fp8-direct"])


def test_a_cuda_graph_repeats_it():
    q, k, v = on_gpu(*draw(300, 500, heads=2))
    numerics = POLICIES["fp8-direct"]
    want = backend.run(q, k, v, numerics, SCALE, False)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.run(q, k, v, numerics, SCALE, False)[0]
    out.zero_()
    graph.replay()
    assert torch.equal(out, want)


@pytest.mark.parametrize("name", ["fp8-direct", "mxfp8-token-block"])
def test_the_dispatcher_takes_it(name):
    q, k, v = on_gpu(*draw(300, 300, heads=2))
    assert dispatch.run(q, k, v, policies()[name].numerics).backend == "sm90"
    assert rel_l2(wanfp4.attention(q, k, v, name), wanfp4.attention(q, k, v, name, backend="reference")) < 0.01


def test_auto_is_fp8_here():
    from wanfp4.kernels.automatic import automatic

    assert automatic(torch.device("cuda")).policy.name == "fp8-direct"


@pytest.mark.parametrize("name", ["fp8-direct", "K and V smoothed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_triton_kernel_agrees_with_the_reference(name, shape):
    numerics = POLICIES[name]
    q, k, v = on_gpu(*draw(*shape, batch=2, heads=3, seed=sum(shape)))
    out, _ = ada.run(q, k, v, numerics, SCALE, True)
    wanted = reference.attention(q, k, v.float(), numerics, scale=SCALE).out
    own = rel_l2(wanted, exact(q, k, v))
    assert rel_l2(out, wanted) < 0.12 * own + 0.002, (rel_l2(out, wanted), own)
