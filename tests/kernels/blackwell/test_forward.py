"""The SM100 forward kernel on the simulator, tracked, against the reference: codes, scales, outputs, LSE."""

from __future__ import annotations

import dataclasses
import mmap
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from sm100_cases import SCALE, Problem, Watched, options_of, run

from wanfp4 import simulator
from wanfp4.kernels import formats, reference
from wanfp4.policy import Numerics, get_policy
from wanfp4.simulator.machine import CTA

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # the compiler's own


def numerics(name: str, **changes: Any) -> Numerics:
    return dataclasses.replace(get_policy(name).numerics, **changes)


FAST = numerics("wan-fast")
ALL = {
    "wan-fast": FAST,
    "direct-p-fast": numerics("direct-p-fast"),
    "wan-two-piece": numerics("wan-two-piece"),
    "wan-two-piece-nv": numerics("wan-two-piece-nv"),
    "direct-p-accurate": numerics("direct-p-accurate"),
    "direct-p-exp2": numerics("direct-p-exp2"),
    "mix, density 2": numerics(
        "direct-p-accurate", classifier=dataclasses.replace(numerics("direct-p-accurate").classifier, density=2)
    ),
    "mix, density 4": numerics(
        "direct-p-accurate", classifier=dataclasses.replace(numerics("direct-p-accurate").classifier, density=4)
    ),
    "guarded": get_policy("wan-fast").guard.apply(FAST),  # type: ignore[union-attr]
    "rowmax": numerics("wan-fast", row_reference="rowmax"),
    "exp2, NVFP4": numerics(
        "wan-two-piece-nv", classifier=dataclasses.replace(FAST.classifier, kind="exp2", A=0.0, B=0.0)
    ),
}


def check(problem: Problem, out: torch.Tensor, lse: torch.Tensor, flips: float = 0.02) -> None:
    """Rows agree within the reordering of sums: 1e-5.

    The share `flips` may not: where a code lies on a rounding boundary, reordering decides, and one code is some
    percent of a row.
    """
    want = problem.want()
    assert want.lse is not None
    assert out.isfinite().all()
    error = (out - want.out).norm(dim=-1) / want.out.norm(dim=-1)
    assert error.median() <= 1e-6
    assert (error > 1e-5).float().mean() <= flips
    assert error.max() <= 0.1
    assert ((lse - want.lse).abs() <= 1e-5 * want.lse.abs().clamp(min=1)).float().mean() >= 0.98


@pytest.mark.parametrize("name", ALL)
def test_every_policy(name: str) -> None:
    problem = Problem((1, 1, 256, 640), ALL[name])
    with simulator.device("sm_100a", track=True, line_info=False) as gpu:
        for gpu.seed in (None, 1):
            check(problem, *run(gpu, problem, options_of(ALL[name])))


@pytest.mark.parametrize("name", ALL)
def test_codes_and_scales_are_the_references(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where no code of a row falls to the other side of a boundary, its output differs by reordering alone."""
    problem = Problem((1, 1, 256, 500), ALL[name])
    watched = Watched(monkeypatch)
    with simulator.device("sm_100a", track=True, line_info=False) as gpu:
        out, _ = run(gpu, problem, options_of(ALL[name]))
    exact = problem.want().out
    error = ((out - exact).norm(dim=-1) / exact.norm(dim=-1))[0, :, 0]
    operands = reference.prepare(problem.q, problem.k, problem.v, problem.numerics, SCALE)
    z = reference.logits(operands, slice(0, 1), slice(0, 256))
    wanted = reference.probabilities(z, reference.row_reference(z, problem.numerics, SCALE), problem.numerics)
    assert wanted.codes is not None
    assert wanted.scales is not None
    direct = problem.numerics.p == "mxfp4-direct"
    for stage in range(2):
        rows = slice(128 * stage, 128 * stage + 128)
        words = watched.tiles(watched.codes, 0, stage).reshape(128, -1)  # [128, 4 · 16] words
        nibbles = (words[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(128, -1)
        want = formats.encode_e2m1(wanted.codes[0, rows]).flatten(1).numpy()[:, :500]
        different = nibbles[:, :500] != want
        assert different.mean() < (5e-5 if direct else 2e-4)  # on a boundary
        assert (np.abs(nibbles[:, :500].astype(int) - want)[different] <= 1).all()
        if direct:  # NVFP4 blocks beyond the end have scale 0, and any codes
            assert not nibbles[:, 500:].any()
        same = torch.from_numpy(~different.any(1))
        scales = watched.tiles(watched.scales, 0, stage).reshape(128, -1).astype(int)
        stored = wanted.scales[0, rows].numpy().astype(int)
        scales = scales[:, : stored.shape[1]]
        if direct:  # the kernel moves a row by whole octaves of its own choice
            moved = scales - stored
            assert (moved == moved[:, :1]).all()
        else:
            assert (scales != stored).mean() < 1e-3
            same &= torch.from_numpy((scales == stored).all(1))
        assert error[rows][same].max() <= 1e-5


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1),
        (1, 1, 31, 33),
        (1, 1, 129, 127),
        (2, 1, 128, 129),
        (1, 3, 255, 31),
        (2, 2, 300, 255),
        (1, 1, 640, 1),
    ],
)
def test_every_length(shape: tuple[int, int, int, int]) -> None:
    problem = Problem(shape, FAST)
    with simulator.device("sm_100a", track=True, line_info=False) as gpu:
        for gpu.seed in (None, 1, 2):
            check(problem, *run(gpu, problem, options_of(FAST)))


def test_one_cta_does_several_jobs() -> None:
    problem = Problem((2, 3, 300, 200), FAST)
    with simulator.device("sm_100a", track=True, line_info=False) as gpu:
        for gpu.seed in (None, 1):
            check(problem, *run(gpu, problem, options_of(FAST), grid=2))


@pytest.mark.parametrize("sharpness", [30.0, 90.0, 300.0, 1000.0])
@pytest.mark.parametrize(
    "name", ["wan-fast", "wan-two-piece", "direct-p-exp2", "guarded", "rowmax", "wan-two-piece-nv"]
)
def test_extreme_logits(name: str, sharpness: float) -> None:
    problem = Problem((1, 1, 128, 384), ALL[name], sharpness=sharpness)
    with simulator.device("sm_100a", track=True, line_info=False) as gpu:
        check(problem, *run(gpu, problem, options_of(ALL[name])))


def test_every_output_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []
    store = CTA.store_global

    def count(cta: Any, w: Any, address: Any, values: Any, poison: Any, m: Any) -> None:
        live = address if m is None else address[m]
        written.append((live[:, None] + np.arange(0, values.shape[1], 4, dtype=np.uint64)).reshape(-1))
        store(cta, w, address, values, poison, m)

    monkeypatch.setattr(CTA, "store_global", count)
    problem = Problem((2, 2, 300, 140), FAST)
    with simulator.device("sm_100a", track=True, line_info=False) as gpu:
        out, lse = run(gpu, problem, options_of(FAST), grid=3)
    words = np.concatenate(written)
    assert len(words) == out.numel() + lse.numel()
    assert len(np.unique(words)) == len(words)


def test_offsets_have_64_bits() -> None:
    """Heads and batches more than 2^31 elements apart."""
    apart = 2**31 + 2**10
    no_reserve = 0x4000  # MAP_NORESERVE, which Python 3.11's mmap does not name: only touched pages take memory
    memory = mmap.mmap(-1, 2 * 4 * apart, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    whole = torch.from_numpy(np.frombuffer(memory, np.uint16)).view(torch.bfloat16)
    problem = Problem((2, 2, 40, 50), FAST)
    out = whole.as_strided((2, 40, 2, 128), (2 * apart, 128, apart, 1))
    with simulator.device("sm_100a", track=True, line_info=False) as gpu:
        run(gpu, problem, options_of(FAST, out="bf16"), out=out)
    want = problem.want().out.bfloat16()
    assert (out == want).float().mean() > 0.999


def test_logits_may_be_as_low_as_the_formats_allow() -> None:
    problem = Problem((1, 1, 32, 40), FAST)
    problem.q[..., 0], problem.k[..., 0] = 100.0, -1000.0
    with simulator.device("sm_100a", track=True, line_info=False) as gpu:
        out, lse = run(gpu, problem, options_of(FAST))
    want = problem.want()
    assert want.lse is not None
    assert want.lse.max() < -8000
    assert out.isfinite().all()
    assert ((lse - want.lse).abs() <= 1e-4 * want.lse.abs()).all()


@pytest.mark.parametrize("offset", [-1000.0, -90.0, 90.0, 1000.0])
def test_all_logits_far_from_zero(offset: float) -> None:
    problem = Problem((1, 1, 128, 300), FAST, offset=offset)
    with simulator.device("sm_100a", track=True, line_info=False) as gpu:
        check(problem, *run(gpu, problem, options_of(FAST)), flips=0.1)  # float32 has 1e-4 octaves at 1443


def test_a_later_tile_may_be_a_thousand_octaves_larger() -> None:
    """The first tile sets the row's exponents; what comes later may pass any range."""
    problem = Problem((1, 1, 128, 512), FAST)
    problem.k[:, 200:] *= 400
    with simulator.device("sm_100a", track=True, line_info=False) as gpu:
        for gpu.seed in (None, 1):
            check(problem, *run(gpu, problem, options_of(FAST)))


@pytest.mark.parametrize("flag", [0, 1])
def test_the_guard_is_a_flag_in_memory(flag: int) -> None:
    guarded = get_policy("wan-fast").guard.apply(FAST)  # type: ignore[union-attr]
    problem = Problem((1, 1, 128, 300), guarded if flag else FAST, sharpness=40)
    options = options_of(FAST, row_reference="guarded")
    with simulator.device("sm_100a", track=True, line_info=False) as gpu:
        check(problem, *run(gpu, problem, options, guard=np.full(1, flag, np.int32)))


@pytest.mark.parametrize("name", ["wan-fast", "wan-two-piece-nv"])
def test_nan_reaches_what_it_should(name: str) -> None:
    problem = Problem((1, 1, 128, 160), ALL[name])
    problem.q[0, 5, 0, 3] = torch.nan
    with simulator.device("sm_100a", track=True, line_info=False) as gpu:
        out, lse = run(gpu, problem, options_of(ALL[name]))
        assert out[0, 5].isnan().all()
        assert lse[0, 0, 5].isnan()
        others = torch.arange(128) != 5
        assert out[0, others].isfinite().all()
        problem.k[0, 150, 0, 7] = torch.nan  # every query sees the key
        out, _ = run(gpu, problem, options_of(ALL[name]))
        assert out.isnan().all()


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_outputs_are_rounded_once(name: str) -> None:
    problem = Problem((1, 2, 130, 100), FAST)
    dtype = torch.bfloat16 if name == "bf16" else torch.float16
    with simulator.device("sm_100a", track=True, line_info=False) as gpu:
        out, _ = run(gpu, problem, options_of(FAST, out=name))
    want = problem.want().out.to(dtype)
    assert (out == want).float().mean() > 0.999


@pytest.mark.parametrize("name", ["wan-fast", "wan-two-piece-nv", "rowmax"])
def test_nothing_beyond_the_isa_but_the_tensor_cores_order(name: str) -> None:
    """With `in_order=False` the strict ordering finds nothing; with it, that scores overwrite a P still being read."""
    problem = Problem((1, 2, 256, 300), ALL[name])
    with simulator.device("sm_100a", track=True, line_info=False, ordering="isa") as gpu:
        for gpu.seed in (None, 1, 2):
            check(problem, *run(gpu, problem, options_of(ALL[name], in_order=False)))
        gpu.seed = None
        with pytest.raises(simulator.RaceError, match=r"tcgen05.mma .* overwrites tensor memory .* tcgen05.mma"):
            run(gpu, problem, options_of(ALL[name]))


@pytest.mark.slow
def test_wans_own_keys() -> None:
    problem = Problem((1, 1, 256, 32760), FAST)
    with simulator.device("sm_100a", track=True, line_info=False) as gpu:
        check(problem, *run(gpu, problem, options_of(FAST)))
        report = gpu.report()
    assert report.tensor_columns == 512
    assert sum(report.mma.values()) == 2 * 4 * 256  # two for scores and two for values a tile and stage


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["wan-fast", "direct-p-fast", "wan-two-piece", "direct-p-accurate", "wan-two-piece-nv"]
)
def test_operator_error_is_the_references(name: str) -> None:
    """Rows of the operator table, at 128 queries and 1024 keys: relative error against exact attention."""
    problem = Problem((1, 1, 128, 1024), ALL[name])
    with simulator.device("sm_100a", track=True, line_info=False) as gpu:
        out, _ = run(gpu, problem, options_of(ALL[name]))
    q, k, v = (t.transpose(1, 2).double() for t in (problem.q, problem.k, problem.v))
    exact = (torch.softmax(q @ k.transpose(2, 3) * SCALE, -1) @ v).transpose(1, 2)

    def error(x: torch.Tensor) -> float:
        return float((x.double() - exact).norm() / exact.norm())

    assert abs(error(out) - error(problem.want().out)) < 1e-5
