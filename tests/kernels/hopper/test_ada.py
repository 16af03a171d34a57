"""The backend "sm89": in Triton's interpreter against the reference, and compiled for the GPUs it is for."""

import dataclasses
import math
import re
import subprocess
from pathlib import Path

import pytest
import torch
from emulated_cases import SCALE, draw, rel_l2
from interpreter import Interpreter

from wanfp4.kernels import reference
from wanfp4.kernels.hopper import ada
from wanfp4.policy import policies

triton = pytest.importorskip("triton", reason="triton runs on Linux")

POLICIES = {"fp8-direct": policies()["fp8-direct"].numerics}
POLICIES["K and V smoothed"] = dataclasses.replace(POLICIES["fp8-direct"], smooth_k=True, smooth_v=True)


@pytest.fixture(scope="module")
def interpreter():
    child = Interpreter()
    yield child
    child.close()


def check(interpreter, q, k, v, numerics, limit=0.003):
    lse = not numerics.smooth_k
    out, mine = interpreter.call("wanfp4.kernels.hopper.ada:run", q, k, v, numerics, SCALE, lse)
    wanted = reference.attention(q, k, v.float(), numerics, scale=SCALE, return_lse=True)
    assert out.dtype == torch.bfloat16
    assert rel_l2(out, wanted.out) < limit
    if lse:
        # A reference that rises on the way leaves E4M3's subnormals of earlier tiles as they were rounded.
        assert (mine - wanted.lse).abs().median() < 5e-4
        assert (mine - wanted.lse).abs().max() < 0.02


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("shape", [(1, 1), (70, 300), (130, 128), (65, 129)], ids=str)
def test_agrees_with_the_reference(interpreter, name, shape):
    check(interpreter, *draw(*shape, heads=2, sharpness=2.0, seed=sum(shape)), POLICIES[name])


def test_rows_whose_reference_must_rise(interpreter):
    """A key that is no anchor, far above all anchors: scores of 40 to 200 octaves."""
    q, k, v = draw(30, 400, heads=1)
    k[:, 202] = 8 * q[:, 5]
    order = reference.key_order(400, "anchor128", q.device)
    assert (order == 202).nonzero().item() >= 128
    # Other rows' scores of that key are large, too, and one byte of P more or less there is the whole difference.
    check(interpreter, q, k, v, POLICIES["fp8-direct"], limit=0.01)


@pytest.mark.parametrize("octaves", [3, 6, 8])
def test_v_whose_blocks_differ_by_octaves(interpreter, octaves):
    """Keys whose V is small count in the denominator as others do."""
    q, k, v = draw(64, 640, heads=2)
    v[:, torch.arange(640) // 32 % 2 == 1] *= 2.0**-octaves
    order = reference.key_order(640, "anchor128", v.device)
    shuffled = torch.empty_like(v)
    shuffled[:, order] = v  # so that the blocks are those of the kernel
    check(interpreter, q, k, shuffled, POLICIES["fp8-direct"], limit=0.01)
    shuffled[:, 100:400] = 0
    check(interpreter, q, k, shuffled, POLICIES["fp8-direct"], limit=0.01)


@pytest.mark.parametrize("keys", [1, 70, 128, 300])
def test_zeros_everywhere(interpreter, keys):
    q, k, v = draw(5, keys, heads=1)
    for tensors in ((q * 0, k, v), (q, k * 0, v), (q * 0, k * 0, v), (q, k, v * 0)):
        check(interpreter, *tensors, POLICIES["fp8-direct"]) if tensors[2].any() else None
        out = interpreter.call("wanfp4.kernels.hopper.ada:run", *tensors, POLICIES["fp8-direct"], SCALE, False)[0]
        assert out.isfinite().all()


def test_nan_reaches_the_output(interpreter):
    q, k, v = draw(40, 300)

    def out():
        numerics = POLICIES["fp8-direct"]
        return interpreter.call("wanfp4.kernels.hopper.ada:run", q, k, v, numerics, SCALE, False)[0][0, :, 0]

    for tensor, token in ((k, 0), (k, 30), (k, 299), (v, 30)):
        before = tensor[0, token].clone()
        tensor[0, token, 0, 3] = math.nan
        assert out().isnan().any(1).all()
        tensor[0, token] = before
    q[0, 2, 0, 7] = math.nan
    assert out()[2].isnan().all()
    assert out()[32:].isfinite().all()


class Recorder:
    """Takes a kernel's place and keeps its launch."""

    def __init__(self):
        self.launch = None

    def __getitem__(self, grid):
        def call(*args, **kwargs):
            self.launch = (args, kwargs)

        return call


@pytest.mark.parametrize("arch", [89, 90, 120])
def test_it_compiles_for_fp8_tensor_cores(arch, monkeypatch, tmp_path):
    from wanfp4.kernels.hopper import ada_forward, quantize

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, recorder = ada_forward.forward, Recorder()
    monkeypatch.setattr(ada_forward, "forward", recorder)
    monkeypatch.setattr(quantize, "quantize", Recorder())
    ada._run(*draw(200, 300, heads=2), POLICIES["fp8-direct"], SCALE, False)
    args, kwargs = recorder.launch
    options = {k: v for k, v in kwargs.items() if k not in kernel.arg_names}
    if arch == 90:
        options["num_warps"], kwargs = 8, kwargs | {"BM": 128}
    given = dict(zip(kernel.arg_names, args, strict=False)) | {k: v for k, v in kwargs.items() if k not in options}
    signature, constants, attributes = {}, {}, {}
    kinds = {torch.uint8: "*u8", torch.float32: "*fp32", torch.bfloat16: "*bf16"}
    for place, parameter in enumerate(kernel.arg_names):
        value = given[parameter]
        if kernel.params[place].is_constexpr or value is None:
            signature[parameter], constants[parameter] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter], attributes[(place,)] = kinds[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[parameter] = "i32"
    source = triton.compiler.ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", arch, 32), options=options)
    assert made.metadata.shared <= (227 if arch == 90 else 99) * 1024
    product = "wgmma.mma_async.sync.aligned" if arch == 90 else "mma.sync.aligned.m16n8k32"
    assert re.search(rf"{re.escape(product)}[\w.]*\.f32\.e4m3\.e4m3", made.asm["ptx"])
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([program, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    assert int(re.search(r"STACK:(\d+)", usage)[1]) <= 64


def test_what_it_needs_is_said():
    if not torch.cuda.is_available():
        assert "a GPU of compute capability 8.9 or 12 (RTX 40, L4, L40S, RTX 50)" in ada.missing()
    assert "the tensors are on cpu" in ada.refuses(POLICIES["fp8-direct"], torch.device("cpu"))
    other = policies()["mxfp8-token-block"].numerics
    assert "its P is 'fp8-direct', and these numerics ask for 'mxfp8'" in ada.limits(other)


@pytest.mark.parametrize(
    ("capability", "taken"), [((8, 6), False), ((8, 9), True), ((9, 0), False), ((10, 0), False), ((12, 0), True)]
)
def test_the_gpus_it_is_for(monkeypatch, capability, taken):
    """Hopper has a faster kernel, and for Blackwell's data-centre GPUs Triton does not compile this one."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "some GPU")
    assert (ada.wrong_gpu.__wrapped__(0) is None) is taken
