"""The SM100 quantisers on the simulator: every byte of every record against `formats`; and what the cubins hold."""

import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cutlass import cute
from cutlass.cute.runtime import from_dlpack

from wanfp4 import simulator
from wanfp4.errors import UnsupportedInputError
from wanfp4.kernels import formats
from wanfp4.kernels.blackwell import quantize as sm100
from wanfp4.kernels.blackwell import quantize_ops as ops
from wanfp4.kernels.blackwell.quantize import QuantizerOptions
from wanfp4.kernels.reference import key_order
from wanfp4.simulator import arithmetic
from wanfp4.simulator.launch import Interceptor

BF16, FP16 = torch.bfloat16, torch.float16
FOLDED = QuantizerOptions("qk", "nvfp4-folded", BF16)
UNFOLDED = QuantizerOptions("qk", "nvfp4", BF16)
DIRECT = QuantizerOptions("v", "mxfp4-direct", BF16)
NVFP4_V = QuantizerOptions("v", "nvfp4", BF16)
LENGTHS = (1, 31, 33, 127, 128, 129, 255, 640)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own


def variant(options: QuantizerOptions, **changes: Any) -> QuantizerOptions:
    return QuantizerOptions(
        **{name: changes.get(name, getattr(options, name)) for name in ("operand", "format", "dtype", "anchor", "mean")}
    )


def records(x: torch.Tensor, options: QuantizerOptions, mean: torch.Tensor | None = None) -> torch.Tensor:
    """The records that x [B, S, H, 128] should become, laid out from what `formats` says."""
    batch, tokens, heads, _ = x.shape
    tiles, rows = -(-tokens // 128), batch * heads
    values = x.transpose(1, 2).flatten(0, 1).float()
    if options.anchor:
        values = values[:, key_order(tokens, f"anchor{options.anchor}", x.device)]
    if mean is not None:
        values = values - mean[:, None]
    count = 4 * options.pages
    codes = torch.zeros(rows, tiles * 128, 128, dtype=torch.uint8)
    if options.operand == "qk":
        rounded = formats.quantize_nvfp4(values, fold=options.format == "nvfp4-folded")
        scales = torch.zeros(rows, tiles * 128, count, dtype=torch.uint8)
        scales[:, :tokens] = rounded.scales
        scales = scales.unflatten(1, (tiles, 128))
        codes[:, :tokens] = rounded.codes
        codes = codes.unflatten(1, (tiles, 128))
    else:
        quantizer = formats.quantize_nvfp4 if options.format == "nvfp4" else formats.quantize_mxfp4_direct
        rounded = quantizer(values, dim=1)
        scales = torch.zeros(rows, tiles * count, 128, dtype=torch.uint8)
        scales[:, : rounded.scales.shape[1]] = rounded.scales
        scales = scales.unflatten(1, (tiles, count)).transpose(2, 3)
        codes[:, :tokens] = rounded.codes
        codes = codes.unflatten(1, (tiles, 128)).transpose(2, 3)
    out = torch.zeros(rows, tiles, 8192 + 512 * options.pages, dtype=torch.uint8)
    place = torch.arange(8192)
    out[..., place ^ ((place >> 3) & 0x30)] = formats.pack_e2m1(codes).flatten(2)
    row, k = torch.arange(128)[:, None], torch.arange(count)
    out[..., (8192 + k // 4 * 512 + row % 32 * 16 + row // 32 * 4 + k % 4).flatten()] = scales.flatten(2)
    return out


def run(
    x: torch.Tensor, options: QuantizerOptions, mean: torch.Tensor | None = None, *, seed: int | None = 1
) -> torch.Tensor:
    """The records that the kernel makes, from poisoned ones, judged by the strictest rules."""
    out = torch.full(sm100.record_shape(x, options), 0xA5, dtype=torch.uint8)
    with simulator.device("sm_100a", seed=seed, track=True, ordering="isa") as gpu:
        gpu.register(x=x, records=out)
        if mean is not None:
            gpu.register(mean=mean)
        assert sm100.quantize(x, options, mean=mean, records=out) is out
    return out


def check(x: torch.Tensor, options: QuantizerOptions, mean: torch.Tensor | None = None, **how: Any) -> None:
    before = x.clone()
    found, wanted = run(x, options, mean, **how), records(x, options, mean)
    different = (found != wanted).nonzero()
    assert len(different) == 0, f"{len(different)} bytes differ, first at {different[0].tolist()}"
    assert torch.equal(x.view(torch.int16), before.view(torch.int16))


def normal(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ties(tokens: int, dtype: torch.dtype, operand: str) -> torch.Tensor:
    """[1, tokens, 2, 128] whose blocks have E4M3 scales s exactly, full of values t·s halfway between codes."""
    generator = torch.Generator().manual_seed(tokens)
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.5, 4.0])
    pick = halfway[torch.randint(9, (2, tokens, 128), generator=generator)]
    sign = torch.randint(2, pick.shape, generator=generator) * 2 - 1
    mantissa = torch.randint(8, 16, (2, tokens, 128), generator=generator)
    scale = mantissa * 2.0 ** torch.randint(-8, 3, mantissa.shape, generator=generator)
    x = pick * sign
    if operand == "qk":  # one scale for dims 16k and 64 + 16k, and an element of 6 in each block
        scale = scale[..., :64:16].repeat_interleave(16, -1).repeat(1, 1, 2)
        x[..., ::16] = 6
    else:
        scale = scale[:, ::16].repeat_interleave(16, 1)[:, :tokens]
        x[:, ::16] = 6
    return (x * scale).to(dtype).transpose(0, 1)[None].contiguous()


def extremes(tokens: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """[1, tokens, 2, 128] with blocks of zeros, both zeros, subnormals, tiny, huge, infinite and NaN values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, tokens, 2, 128, generator=generator).to(dtype)
    limits = torch.finfo(dtype)
    magnitudes = torch.tensor([limits.max, limits.tiny, limits.smallest_normal * limits.eps, 2.0**-9, 2.0**-10, 448.0])
    blocks = torch.randint(16, (1, -(-tokens // 16), 2, 8), generator=generator)
    blocks = blocks.repeat_interleave(16, 1)[:, :tokens].repeat_interleave(16, 3)
    for i, magnitude in enumerate(magnitudes.to(dtype)):
        scaled = (x.float() * magnitude.float()).clamp(-limits.max, limits.max).to(dtype)
        x = torch.where(blocks == i, scaled, x)
    x = torch.where(blocks == 6, torch.zeros((), dtype=dtype).copysign(x), x)
    for value, place in ((torch.inf, 7), (-torch.inf, 8), (torch.nan, 9)):
        hit = (blocks == place) & (torch.rand(x.shape, generator=generator) < 0.02)
        x = torch.where(hit, torch.tensor(value, dtype=dtype), x)
    return x


@pytest.mark.parametrize("options", [FOLDED, UNFOLDED, DIRECT, NVFP4_V], ids=lambda o: o.format + "-" + o.operand)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_every_length(options: QuantizerOptions, tokens: int) -> None:
    """With as many batches and heads as keep it short; one compiled kernel serves all."""
    batch, heads = (1, 1) if tokens > 256 else (2, 1) if tokens > 100 else (2, 3)
    check(normal(batch, tokens, heads, 128, seed=tokens), options)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("options", [FOLDED, UNFOLDED, DIRECT, NVFP4_V], ids=lambda o: o.format + "-" + o.operand)
def test_ties_and_special_values(options: QuantizerOptions, dtype: torch.dtype) -> None:
    options = variant(options, dtype=dtype)
    check(ties(70, dtype, options.operand), options)
    check(extremes(130, dtype), options)


@pytest.mark.parametrize("options", [UNFOLDED, DIRECT, NVFP4_V], ids=lambda o: o.format + "-" + o.operand)
def test_every_amplitude(options: QuantizerOptions) -> None:
    """BF16 from its smallest subnormal to its largest, in each octave the values next to where rounding turns."""
    mantissas = torch.tensor([1, 1.25, 1.4921875, 1.5, 1.75, 1.9921875], dtype=torch.float64)
    top = (2.0 ** torch.arange(-133, 128, dtype=torch.float64)[:, None] * mantissas).flatten()
    top = top.clamp(max=torch.finfo(BF16).max)
    if options.operand == "v":  # a dim has one amplitude
        top = torch.nn.functional.pad(top, (0, -len(top) % 128)).view(1, 1, -1, 128)
        x = torch.cat((top, -top / 3, top / 6), 1)
    else:  # a block of a token has one
        top = torch.nn.functional.pad(top, (0, -len(top) % 8)).view(1, -1, 1, 8)
        x = top.repeat_interleave(16, 3) * torch.linspace(-1, 0.9, 16, dtype=torch.float64).repeat(8)
    check(x.to(BF16), options)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("options", [FOLDED, UNFOLDED, DIRECT, NVFP4_V], ids=lambda o: o.format + "-" + o.operand)
@pytest.mark.parametrize("anchor", [0, 32, 128])
def test_permuted_and_less_a_mean(options: QuantizerOptions, dtype: torch.dtype, anchor: int) -> None:
    """A mean of a few units in the last place moves ties to the neighbouring float32 values."""
    options = variant(options, dtype=dtype, anchor=anchor, mean=True)
    x = normal(1, 150, 2, 128, dtype=dtype, seed=anchor)
    check(x, options, x.float().mean(1).flatten(0, 1))
    x = ties(33, dtype, options.operand)
    ulps = torch.randint(-3, 4, (2, 128), generator=torch.Generator().manual_seed(anchor))
    check(x, options, ulps * 2.0**-24 * x[0, 0].abs().float().clamp(min=2.0**-9))


def test_small_candidates_and_their_ties() -> None:
    """Below .75 a candidate wins only where E4M3 saturates or is subnormal: the path that is else skipped.

    In the first rows two candidates, .625 and .75, have equal errors, less than the start's.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.full((640, 32), 2240.0)
    for i in range(32):
        rows[i, i:], rows[32 + i, i:] = 1152.0, 0.0
    rows[:32, 0], rows[32:64, 0] = 3328.0, 3264.0
    for some, low, high, unit, largest in (
        (slice(64, 352), 2100, 9000, 32, 3000),
        (slice(352, 640), 2.0**-8, 0.1, 2.0**-12, 1.0),
    ):
        count = rows[some].shape[0]
        top = (torch.rand(count, 1, generator=generator) * (high - low) + low).div(unit).round() * unit
        two = (torch.rand(count, 2, generator=generator) * top.clamp(max=largest)).div(unit).round() * unit
        rows[some] = two.gather(1, torch.randint(2, (count, 32), generator=generator))
        rows[some, :1] = top
    halves = rows.unflatten(0, (160, 4)).unflatten(2, (2, 16))  # [token, scale, half, dim]
    x = halves.transpose(1, 2).reshape(1, 160, 1, 128).to(BF16)
    base = formats.divide(x.float().reshape(160, 2, 4, 16).abs().amax((1, 3)), 6.0)
    chosen = formats.decode_e4m3(formats.quantize_nvfp4(x[0, :, 0], fold=True).scales)
    assert ((chosen < 0.7 * base) & (chosen != formats.round_e4m3(base))).sum() > 50
    check(x, FOLDED)


@cute.kernel
def error_kernel(x: cute.Tensor, scale: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    pairs = [(x[thread, 2 * i], x[thread, 2 * i + 1]) for i in range(16)]
    out[thread], _ = ops.try_scale(pairs, scale[thread])


@cute.jit
def error_of(x: cute.Tensor, scale: cute.Tensor, out: cute.Tensor):
    error_kernel(x, scale, out).launch(grid=(1, 1, 1), block=(x.shape[0], 1, 1))


def test_the_sum_of_squares_has_the_order_of_formats() -> None:
    """To the bit: which of two scales with nearly equal errors wins depends on it."""
    x = torch.randn(512, 32, generator=torch.Generator().manual_seed(0))
    scale = formats.round_e4m3(x.abs().amax(1) / 6)
    out = torch.full((512,), torch.nan)
    with simulator.device("sm_100a") as gpu:
        gpu.register(x=x, scale=scale, out=out)
        tensors = [from_dlpack(t) for t in (x, scale, out)]
        cute.compile(error_of, *tensors)(*tensors)
    wide = scale[:, None]
    e = (x - wide * formats.round_e2m1(x / wide)).square().unflatten(1, (2, 16))
    e = e[:, 0] + e[:, 1]
    for width in (8, 4, 2, 1):
        e = e[:, :width] + e[:, width:]
    assert torch.equal(out, e[:, 0])


@pytest.mark.parametrize("anchor", [32, 128])
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 127, 128, 129, 255, 256, 640])
def test_order_of_keys(anchor: int, tokens: int) -> None:
    """K and V stand in the same order, whatever the length leaves for tokens that are no anchors."""
    x = normal(1, tokens, 1, 128, seed=tokens)
    for options in (UNFOLDED, DIRECT):
        check(x, variant(options, anchor=anchor))


@pytest.mark.parametrize("options", [UNFOLDED, DIRECT], ids=lambda o: o.format)
def test_an_order_that_a_flag_decides(options: QuantizerOptions) -> None:
    x = normal(1, 200, 1, 128)
    guarded = QuantizerOptions(options.operand, options.format, BF16, anchor=128, guarded=True)
    for value, same in ((0, options), (1, variant(options, anchor=128))):
        flag = torch.tensor([value], dtype=torch.int32)
        out = torch.full(sm100.record_shape(x, guarded), 0xA5, dtype=torch.uint8)
        with simulator.device("sm_100a", seed=1, track=True, ordering="isa") as gpu:
            gpu.register(x=x, records=out, flag=flag)
            sm100.launch_quantizer(sm100.quantizer_function(guarded), x, out, None, 0, flag.data_ptr())
        assert torch.equal(out, records(x, same))


@pytest.mark.parametrize("options", [FOLDED, DIRECT], ids=lambda o: o.format)
def test_strides(options: QuantizerOptions) -> None:
    """Heads before tokens, every second token, a slice of a wider projection, one head for all."""
    base = normal(2, 2, 70, 128)
    check(base.transpose(1, 2), options)
    check(normal(1, 140, 2, 128)[:, ::2], options)
    check(normal(1, 40, 2, 384)[..., 128:256], options)
    check(normal(2, 40, 1, 128).expand(2, 40, 3, 128), options)


def test_addresses_beyond_32_bits() -> None:
    """Tokens more than 2^31 elements apart, in memory of which only their rows are ever touched."""
    step = 2**31 + 8
    x = torch.empty(step + 128, dtype=BF16).as_strided((1, 2, 1, 128), (step, step, 128, 1))
    x.copy_(normal(1, 2, 1, 128))
    for options in (UNFOLDED, DIRECT):
        check(x, options)


@pytest.mark.parametrize("options", [FOLDED, NVFP4_V], ids=lambda o: o.format)
def test_seeds_leave_the_same_bytes(options: QuantizerOptions) -> None:
    options = variant(options, anchor=32)
    x = normal(1, 100, 1, 128)
    for seed in (None, 0, 2, 3):
        check(x, options, seed=seed)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("batch", "tokens", "heads"), [(1, 1, 1), (2, 33, 2), (1, 513, 2), (1, 1100, 1)])
def test_means(dtype: torch.dtype, batch: int, tokens: int, heads: int) -> None:
    """Right to float32's rounding, the same under every seed, and equal to the order that is promised."""
    x = normal(batch, heads, tokens, 128, dtype=dtype).transpose(1, 2)
    found = []
    for seed in (None, 1, 2):
        mean = torch.full((batch * heads, 128), torch.nan)
        workspace = torch.full((sm100.mean_workspace(x),), torch.nan)
        with simulator.device("sm_100a", seed=seed, track=True, ordering="isa") as gpu:
            gpu.register(x=x, mean=mean, workspace=workspace)
            sm100.launch_mean(sm100.mean_function(dtype), x, workspace, mean, 0)
        found.append(mean)
    assert all(torch.equal(found[0], mean) for mean in found[1:])
    flat = x.transpose(1, 2).flatten(0, 1)
    assert (found[0] - flat.double().mean(1)).abs().max() < 2e-7 * max(1, flat.abs().max())
    short = -tokens % 512
    rows = torch.nn.functional.pad(flat.float(), (0, 0, 0, short)).unflatten(1, (-1, 32, 16))
    total = torch.zeros(batch * heads, 128)
    for chunk in rows.unbind(1):
        sums = torch.zeros(batch * heads, 16, 128)
        for step in chunk.unbind(1):
            sums = sums + step
        joined = sums[:, 0]
        for i in range(1, 16):
            joined = joined + sums[:, i]
        total = total + joined
    assert torch.equal(found[0], formats.divide(total, float(tokens)))


def test_the_two_part_reciprocal_gives_the_codes_of_a_division() -> None:
    """Every mantissa of a scale, every threshold, 200 neighbouring float32 values on both sides, and any result that a
    reciprocal right to two units in the last place may have."""
    with np.errstate(all="ignore"):
        for mantissa in range(8, 16):
            scale = np.float32(mantissa / 8)
            middle = np.float32(1) / scale
            for off in range(-5, 0):
                inverse = (middle.view(np.int32) + np.int32(off)).view(np.float32)
                rest = arithmetic.fma_f32(np.array([-scale]), np.array([inverse]), np.array([1], np.float32)) * inverse
                assert rest[0] > 0
                for halfway in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0):
                    bits = np.float32(halfway * scale).view(np.int32) + np.arange(-200, 201, dtype=np.int32)
                    x = bits.view(np.float32)
                    y = arithmetic.fma_f32(x, np.full_like(x, inverse), x * rest)
                    codes = formats.encode_e2m1(torch.from_numpy(y))
                    assert torch.equal(codes, formats.encode_e2m1(torch.from_numpy(x / scale)))


def test_a_sixth_is_the_division_by_six() -> None:
    """All float32 mantissas: the quotient is IEEE's."""
    amax = (np.arange(2**23, dtype=np.int32) + 0x3F800000).view(np.float32)
    sixth = np.float32(1 / 6)
    with np.errstate(all="ignore"):
        for part in np.split(amax, 16):
            first = part * sixth
            rest = arithmetic.fma_f32(first, np.full_like(part, -6), part)
            assert np.array_equal(arithmetic.fma_f32(rest, np.full_like(part, sixth), first), part / np.float32(6))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("p", "nvfp4", BF16), "'qk' and 'v'"),
        (("v", "nvfp4-folded", BF16), "'mxfp4-direct' and 'nvfp4'"),
        (("qk", "mxfp4-direct", BF16), "'nvfp4' and 'nvfp4-folded'"),
        (("qk", "nvfp4", torch.float32), "torch.float32"),
        (("qk", "nvfp4", BF16, 64), "0, 32 and 128"),
        (("qk", "nvfp4", BF16, 0, False, True), "32 or 128 is needed"),
    ],
)
def test_options_that_do_not_exist(arguments: Any, message: str) -> None:
    with pytest.raises(UnsupportedInputError, match=message):
        QuantizerOptions(*arguments)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(1, 4, 2, 64, dtype=BF16), r"\[1, 4, 2, 64\]"),
        (torch.zeros(1, 0, 2, 128, dtype=BF16), r"\[1, 0, 2, 128\]"),
        (torch.zeros(4, 2, 128, dtype=BF16), r"\[4, 2, 128\]"),
        (torch.zeros(1, 4, 2, 128), "torch.float32"),
        (torch.zeros(1, 4, 2, 256, dtype=BF16)[..., ::2], "stride 2"),
        (torch.zeros(200, dtype=BF16).as_strided((1, 4, 2, 128), (8, 1, 8, 1)), "multiples of 8"),
        (torch.zeros(1, 4, 2, 132, dtype=BF16)[..., :128], "multiples of 8"),
        (torch.zeros(1, 4, 2, 136, dtype=BF16)[..., 1:129], "byte 2 of 16"),
    ],
)
def test_inputs_that_are_refused(x: torch.Tensor, message: str) -> None:
    with pytest.raises(UnsupportedInputError, match=message):
        sm100.quantize(x, FOLDED)


def test_a_mean_goes_with_its_option() -> None:
    with pytest.raises(UnsupportedInputError, match="mean=True"):
        sm100.quantize(normal(1, 4, 1, 128), FOLDED, mean=torch.zeros(1, 128))


def tool(name: str) -> str:
    path = Path(sysconfig.get_path("platlib"), "nvidia", "cu13", "bin", name)
    if not path.exists():
        pytest.skip(f"needs nvidia-cuda-{name}")
    return str(path)


def listing(cubin: Path) -> list[str]:
    """SASS instructions of all kernels, without predicates."""
    done = subprocess.run([tool("nvdisasm"), "-c", cubin], capture_output=True, text=True, check=True)
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*(.*?) *;", done.stdout)
    return [line for line in found if line != "NOP"]


CASES = [
    (FOLDED, 128, 760),
    (variant(FOLDED, dtype=FP16, anchor=128, mean=True), 128, 950),
    (UNFOLDED, 80, 330),
    (DIRECT, 85, 550),
    (variant(DIRECT, anchor=32, mean=True), 85, 850),
    (NVFP4_V, 85, 580),
]


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize(("options", "registers", "length"), CASES)
def test_what_the_compiler_makes(
    options: QuantizerOptions, registers: int, length: int, arch: str, tmp_path: Path
) -> None:
    """Registers for four blocks of 128 threads or three of 256, nothing spilled, no more code than known."""
    with Interceptor(arch, lambda launch: None, keep=tmp_path):
        sm100.compile_quantizer(options)
    (cubin,) = tmp_path.glob("*.cubin")
    done = subprocess.run(
        [tool("cuobjdump"), "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
    )
    (usage,) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", done.stdout)
    assert int(usage[0]) <= registers
    assert usage[1] == usage[3] == "0"
    code = listing(cubin)
    assert not [line for line in code if line.startswith(("LDL", "STL"))]
    assert len(code) <= length
    if options.format == "nvfp4-folded":
        # Three places try a scale, each with 16 squares and 15 packed sums: none were joined.
        squares = [line for line in code if re.match(r"FFMA2 .*RZ", line)]
        assert len(squares) == 3 * 16
        assert sum(line.startswith("FADD2") for line in code) == 3 * 15
