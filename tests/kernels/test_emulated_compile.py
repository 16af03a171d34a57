"""The Triton kernels compile, for every architecture, to code that fits: no GPU is needed for that, and CI has none.

A call is made with recorders in the kernels' places; what it would launch is compiled with exactly those arguments.
"""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from emulated_cases import ALL, POLICIES, draw

from wanfp4.kernels import emulated
from wanfp4.policy import policies

triton = pytest.importorskip("triton", reason="triton runs on Linux")

SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}


EVERY_CONFIGURATION = ("wan-fast", "nvfp4", "nvfp4-fp8", "fast, K, Q and V smoothed", "direct, exact denominator")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


class Recorder:
    """Takes the place of a kernel and keeps its launches."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, []

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launches.append((args, kwargs))


def record(monkeypatch, numerics, guard, config, dtype=torch.bfloat16, shape=(200, 300, 2)):
    """Launches of one call: (kernel, arguments, keyword arguments)."""
    from wanfp4.kernels import emulated_forward, emulated_quantize

    recorders = []
    with monkeypatch.context() as patch:
        for module, names in (
            (emulated_quantize, ("quantize", "score_bias", "sample_logits")),
            (emulated_forward, ("forward",)),
        ):
            for name in names:
                recorders.append(Recorder(getattr(module, name)))
                patch.setattr(module, name, recorders[-1])
        queries, keys, heads = shape
        q, k, v = draw(queries, keys, heads=heads, dtype=dtype)
        emulated.run(q, k, v, numerics, guard, 128**-0.5, True, config)
    return [(r.kernel, *launch) for r in recorders for launch in r.launches]


def build(kernel, args, kwargs, arch):
    """The compiled kernel of a launch, specialised as triton does at run time."""
    signature, constants, attributes = {}, {}, {}
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    given = dict(zip(kernel.arg_names, args, strict=False)) | {n: v for n, v in kwargs.items() if n not in options}
    for place, name in enumerate(kernel.arg_names):
        value = given[name]
        if kernel.params[place].is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(place,)] = f"*{TYPES[value.dtype]}", [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif isinstance(value, int):
            special = not kernel.params[place].do_not_specialize
            if special and value == 1:
                signature[name], constants[name] = "constexpr", value
                continue
            signature[name] = "i32"
            if special and value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = f"tensordesc<bf16[{value.block_shape[0]},128]>"
    source = triton.compiler.ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", arch, 32), options=options)


def cuobjdump(compiled, folder, option):
    """What the tool that comes with triton says about a kernel."""
    cubin = Path(folder) / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([program, option, cubin], capture_output=True, text=True, check=True).stdout


def stack_bytes(compiled, folder):
    """Local memory of a thread: what registers did not hold."""
    return int(re.search(r"STACK:(\d+)", cuobjdump(compiled, folder, "-res-usage"))[1])


def largest_loop(compiled, folder):
    """Names of the instructions between the farthest jump back and where it leads."""
    lines = re.findall(
        r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);", cuobjdump(compiled, folder, "-sass")
    )
    code = [(int(offset, 16), name, operands) for offset, name, operands in lines]
    jumps = [(int(m[1], 16), at) for at, name, rest in code if name == "BRA" and (m := re.search(r"0x(\w+)", rest))]
    start, end = max((jump for jump in jumps if jump[0] <= jump[1]), key=lambda jump: jump[1] - jump[0])
    return [name for at, name, _ in code if start <= at <= end]


def different(names):
    """One policy for each numerics and guard."""
    return list({(policies()[n].numerics, policies()[n].guard): n for n in reversed(names)}.values())[::-1]


@pytest.mark.parametrize("name", different(list(POLICIES)))
def test_hopper_kernels_spill_nothing_and_use_its_tensor_cores(name, monkeypatch, tmp_path):
    policy = policies()[name]
    launches = record(monkeypatch, policy.numerics, policy.guard, emulated.configs(policy.numerics, (9, 0))[0])
    assert [kernel.__name__ for kernel, *_ in launches].count("quantize") == 3
    for kernel, args, kwargs in launches:
        compiled = build(kernel, args, kwargs, 90)
        assert compiled.metadata.shared <= SHARED[90]
        assert stack_bytes(compiled, tmp_path) == 0, kernel.__name__
        if kernel.__name__ == "forward":
            assert "wgmma.mma_async" in compiled.asm["ptx"]


@pytest.mark.parametrize("name", list(ALL))
def test_every_configuration_fits_hopper(name, monkeypatch):
    """Not only the presets': what is listed can be launched. One of each kind for all configurations."""
    first, *others = emulated.configs(ALL[name], (9, 0))
    for config in (first, *others) if name in EVERY_CONFIGURATION else (first,):
        launches = record(monkeypatch, ALL[name], None, config)
        kernel, args, kwargs = next(launch for launch in launches if launch[0].__name__ == "forward")
        needed = build(kernel, args, kwargs, 90).metadata.shared
        assert needed <= SHARED[90], f"{config} needs {needed} bytes of shared memory"


@pytest.mark.parametrize("name", ["wan-fast", "guarded, raw margin", "sage3", "direct-p-accurate"])
def test_one_token_and_one_head_compile(name, monkeypatch):
    """Triton makes a constant of a 1 that it is not told to leave alone, and constants have no methods of tensors."""
    guard = policies()[name].guard if name in POLICIES else None
    for kernel, args, kwargs in record(monkeypatch, ALL[name], guard, emulated.configs(ALL[name])[0], shape=(1, 1, 1)):
        build(kernel, args, kwargs, 90)


def test_the_folded_search_keeps_to_registers(monkeypatch, tmp_path):
    """No shared memory, no barrier and no shuffle in the loop over the candidates, and 13 instructions an element."""
    launches = record(monkeypatch, ALL["wan-fast"], None, emulated.configs(ALL["wan-fast"])[0])
    kernel, args, kwargs = next(launch for launch in launches if launch[0].__name__ == "quantize")
    loop = largest_loop(build(kernel, args, kwargs, 90), tmp_path)
    assert not {"LDS", "STS", "BAR", "SHFL"} & {name.partition(".")[0] for name in loop}
    assert len(loop) < 13 * 32


@pytest.mark.parametrize("name", ["wan-fast", "wan-two-piece-nv", "sage3", "mxfp8-token-block"])
@pytest.mark.parametrize("arch", [80, 86, 120])
def test_other_architectures(name, arch, monkeypatch, tmp_path):
    policy = policies()[name]
    config = emulated.configs(policy.numerics, divmod(arch, 10))[0]
    dtype = torch.float16 if arch == 80 else torch.float32
    for kernel, args, kwargs in record(monkeypatch, policy.numerics, policy.guard, config, dtype):
        compiled = build(kernel, args, kwargs, arch)
        assert compiled.metadata.shared <= SHARED[arch]
        if kernel.__name__ == "forward":
            assert "mma.sync" in compiled.asm["ptx"]
