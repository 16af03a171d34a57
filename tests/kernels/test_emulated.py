"""The backend "triton" against the reference: the same kernels in Triton's interpreter, in a process of their own."""

import dataclasses
import math

import pytest
import torch
from emulated_cases import ALL, EXTRA, FAST, POLICIES, SCALE, UNFOLDED, check, draw, rel_l2
from interpreter import Interpreter

from wanfp4.kernels import dispatch, emulated, formats, reference
from wanfp4.policy import Guard, Numerics, policies


@pytest.fixture(scope="session")
def interpreter():
    child = Interpreter()
    yield child
    child.close()


def run(interpreter, q, k, v, numerics, guard=None, scale=SCALE, config=None):
    assert emulated.limits(numerics) is None
    done = interpreter.call("wanfp4.kernels.emulated:run", q, k, v, numerics, guard, scale, True, config)
    return emulated.Launched(*done)


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, (130, 300)) for name in ALL] + [(name, shape) for name in POLICIES for shape in ((1, 1), (5, 31))],
    ids=str,
)
def test_agrees_with_the_reference(interpreter, name, shape):
    dtype = torch.bfloat16
    q, k, v = draw(*shape, sharpness=2.0, seed=sum(shape), dtype=dtype)
    v = v if ALL[name].v == "exact" else v.float()  # so that the output's rounding hides nothing
    check(run(interpreter, q, k, v, ALL[name]), q, k, v, ALL[name])


@pytest.mark.parametrize("name", ["wan-fast", "direct-p-accurate", "sage3", "nvfp4-fp8", "mxfp8-token-block"])
@pytest.mark.parametrize("config", [emulated.Config(64, 64, 4, 2), emulated.Config(64, 128, 4, 2, tma=False)], ids=str)
def test_other_tiles(interpreter, name, config):
    if config.keys != 128 and ALL[name].row_reference == "rowmax":
        config = dataclasses.replace(config, keys=128)
    q, k, v = draw(70, 300, heads=2, sharpness=2.0)
    check(run(interpreter, q, k, v.float(), ALL[name], config=config), q, k, v.float(), ALL[name])


def test_every_device_has_configurations_that_keep_the_contract():
    for numerics in ALL.values():
        for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
            for config in emulated.configs(numerics, capability):
                assert 128 % config.queries == 0
                assert config.keys == 128 or (config.keys == 64 and numerics.row_reference != "rowmax")
                assert not config.tma or capability >= (9, 0)


@pytest.mark.parametrize("name", list(ALL))
def test_operands_are_bit_for_bit_those_of_the_reference(interpreter, name):
    numerics = ALL[name]
    q, k, v = draw(130, 200, batch=2, heads=2, seed=3)
    q[0, 3], k[0, 40:60] = 0, 0  # blocks of zeros
    v[:, :33] *= 2.0**-9  # E4M3 scales that underflow
    given = interpreter.call("wanfp4.kernels.emulated:quantize", q, k, v, numerics, None, SCALE, True)
    mine = emulated.Rounded(*given)
    truth = reference.prepare(q, k, v, numerics, SCALE)
    gain = 1.0 if mine.v_gain is None else mine.v_gain[:, None, None]
    smoothed = {"q": numerics.smooth_q, "k": numerics.smooth_k, "v": numerics.smooth_v}
    for letter, wanted in (("q", truth.q), ("k", truth.k), ("v", truth.v)):
        found = getattr(mine, letter).float()[:, : wanted.shape[1]] / (gain if letter == "v" else 1.0)
        same = (found == wanted).float().mean()
        # A mean's additions come in another order, and a value near a rounding boundary may fall to its other side.
        assert same == 1 if not smoothed[letter] else same > 0.999, letter
        assert (getattr(mine, letter)[:, wanted.shape[1] :] == 0).all()
    if truth.lse_shift is not None:
        assert torch.allclose(mine.lse_shift[:, :130], truth.lse_shift, atol=1e-5)


def test_quotients_are_those_of_ieee_division(interpreter):
    x, scale = interpreter.call("emulated_arithmetic:cases")
    assert x.numel() > 400_000
    assert torch.equal(interpreter.call("emulated_arithmetic:quotients", x, scale), x / scale)
    zeros = torch.zeros(3)
    assert torch.equal(
        interpreter.call("emulated_arithmetic:quotients", torch.tensor([0.0, 1.0, 2.0**100]), zeros), zeros
    )


@pytest.mark.parametrize("unit", [1.0, 2.0**-20, 2.0**15])
def test_e4m3_is_rounded_as_formats_does_it(interpreter, unit):
    """Also next to powers of two, where a row's largest probability is."""
    x = interpreter.call("emulated_arithmetic:numbers")
    assert torch.equal(
        interpreter.call("emulated_arithmetic:rounded_e4m3", x * unit, unit), formats.round_e4m3(x) * unit
    )


@pytest.mark.parametrize("name", list(ALL))
def test_codes_of_p(interpreter, name):
    """With V the identity, the output's columns are the row's own normalised weights."""
    numerics = dataclasses.replace(ALL[name], v="bf16", smooth_v=False)
    q, k, _ = draw(128, 128, sharpness=3.0, seed=9)
    v = torch.eye(128)[None, :, None]
    mine = run(interpreter, q, k, v, numerics).out[0, :, 0]
    truth = reference.attention(q, k, v, numerics, scale=SCALE).out[0, :, 0]
    off = (mine - truth).abs() > 1e-5 * truth.abs() + 1e-9
    # BF16's P has boundaries 32 times as dense as E4M3's, E2M1's are rarer still.
    assert off.float().mean() < (2e-3 if numerics.p == "bf16" else 3e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["wan-fast", "sage3", "nvfp4-bf16", "mxfp8-token-block"])
def test_dtypes_heads_and_batches(interpreter, name, dtype):
    q, k, v = draw(140, 70, batch=2, heads=3, dtype=dtype)
    check(run(interpreter, q, k, v, ALL[name]), q, k, v, ALL[name])


@pytest.mark.parametrize("name", ["wan-fast", "guarded, raw margin", "fast, K, Q and V smoothed", "nvfp4-fp8"])
def test_strides_do_not_matter_and_inputs_stay(interpreter, name):
    q, k, v = draw(40, 50, batch=2, heads=2)
    whole = torch.zeros(2, 50, 3, 2, 256, dtype=torch.bfloat16)
    strided = []
    for i, t in enumerate((q, k, v)):
        whole[:, : t.shape[1], i, :, ::2] = t
        strided.append(whole[:, : t.shape[1], i, :, ::2])
    before = [t.clone() for t in strided]
    a, b = (run(interpreter, *tensors, ALL[name]) for tensors in ((q, k, v), strided))
    assert torch.equal(a.out, b.out)
    assert torch.equal(a.lse, b.lse)
    assert all(torch.equal(x, y) for x, y in zip(strided, before, strict=True))


@pytest.mark.parametrize(
    "name",
    [
        "wan-fast", "direct-p-exp2", "wan-two-piece", "guarded, log2 margin", "nvfp4", "sage3", "mxfp8-token-block",
        "fp8-direct", "nvfp4, anchored",
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [30, 300, 1000])
@pytest.mark.parametrize("sign", [1, -1, 0], ids=["all high", "all low", "both"])
def test_extreme_logits(interpreter, name, size, sign):
    """Rows whose logits lie near ±size, or climb from −size to size, so that rows must be rescaled on the way."""
    g = torch.Generator().manual_seed(size)
    keys = 300
    direction = torch.zeros(128)
    direction[:16] = 0.25 * 2 ** torch.arange(0, 1, 1 / 16)
    direction = direction / direction.norm()
    along = torch.full((keys,), float(sign)) if sign else torch.linspace(-1, 1, keys)
    k = along[:, None] * direction * math.sqrt(128) + 0.1 * torch.randn(keys, 128, generator=g)
    q = (direction * size + 0.02 * torch.randn(40, 128, generator=g)).bfloat16()[None, :, None]
    k = k.bfloat16()[None, :, None]
    v = torch.randn(1, keys, 1, 128, generator=g)
    # All rows are much the same, so a code at a boundary is wrong in many; float32 errors grow with the scores.
    check(run(interpreter, q, k, v, ALL[name]), q, k, v, ALL[name], limit=5e-3 if size < 1000 else 2e-2)


def test_a_row_is_rescaled_when_a_later_block_passes_the_ceiling(interpreter):
    """Scores 400 octaves above the first tile's, in one row of many, and only in the last whole tile."""
    q, k, v = draw(64, 400, dtype=torch.float32)
    k[:, 300] = 0
    k[0, 300, 0, 5] = 40.0
    q[0, 7, 0, 5] = 100.0
    mine = run(interpreter, q, k, v, FAST)
    check(mine, q, k, v, FAST)
    assert rel_l2(mine.out[0, 7, 0], reference.attention(q, k, v, FAST, scale=SCALE).out[0, 7, 0]) < 1e-5


@pytest.mark.parametrize("name", [*POLICIES, "direct, rowmax", "fast, K, Q and V smoothed", "mix density 4"])
def test_nan_reaches_the_output(interpreter, name):
    q, k, v = draw(5, 40)
    q[0, 2, 0, 7] = math.nan
    out = run(interpreter, q, k, v, ALL[name]).out[0, :, 0]
    assert out[2].isnan().all()
    if not ALL[name].smooth_q and ALL[name].qk != "mxfp8-token-block":  # one mean, one exponent for several rows
        assert out[[0, 1, 3, 4]].isfinite().all()
    q[0, 2, 0, 7], k[0, 30, 0, 3] = 0, math.nan
    assert run(interpreter, q, k, v, ALL[name]).out.isnan().any()
    k[0, 30, 0, 3], v[0, 11, 0, 9] = 0, math.nan
    out = run(interpreter, q, k, v, ALL[name]).out[0, :, 0]
    assert out[:, 9].isnan().all()


def test_guard_is_decided_as_in_the_reference(interpreter):
    q, k, v = draw(140, 300, batch=2, heads=2)
    guard = Guard(110, 16, logit_limit=40.0)
    for factor, guarded in ((1.0, 0), (30.0, 1)):
        loud = q.clone()
        loud[1, 77, 1] *= factor  # one head of one batch decides for all
        loud[1, ::3, 1] *= factor
        assert (reference.sampled_logit(loud, k, SCALE) > guard.logit_limit) == bool(guarded)
        mine = run(interpreter, loud, k, v.float(), UNFOLDED, guard)
        assert mine.flag.tolist() == [guarded]
        check(mine, loud, k, v.float(), guard.apply(UNFOLDED) if guarded else UNFOLDED)
    assert run(interpreter, q, k, v, ALL["direct-p-exp2"]).flag is None


def test_anchor_order_is_that_of_the_reference(interpreter):
    """Against `reference.key_order` where rounding is delicate and where there are fewer keys than anchors."""
    for keys in (1, 31, 33, 127, 129, 1000):
        q, k, v = draw(1, keys)
        for name in ("direct-p-accurate", "guarded, raw margin"):
            given = interpreter.call("wanfp4.kernels.emulated:quantize", q, k, v, ALL[name], None, SCALE, False)
            assert torch.equal(given[1][:, :keys].float(), reference.prepare(q, k, v, ALL[name], SCALE).k)


def test_smoothed_queries_in_groups_of_heads(interpreter):
    """What Q smoothing adds back is made for as many heads at a time as its memory allows."""
    q, k, v = draw(300, 260, heads=3)
    numerics = POLICIES["sage3"]
    done = interpreter.call("emulated_cases:run_head_by_head", q, k, v.float(), numerics, None, SCALE, True)
    check(emulated.Launched(*done), q, k, v.float(), numerics)
    assert torch.equal(done[0], run(interpreter, q, k, v.float(), numerics).out)


@pytest.mark.parametrize(
    ("heads", "queries", "keys"), [(12, 32_760, 32_760), (40, 75_600, 75_600), (5, 300, 1000), (1, 10**6, 10**4)]
)
def test_groups_of_heads_keep_their_memory(heads, queries, keys):
    blocks, padded = -(-queries // 128), -(-keys // 128) * 128
    launches = emulated.groups(heads, blocks, blocks * 128, padded)
    assert [head for first, count in launches for head in range(first, first + count)] == list(range(heads))
    largest = max(count for _, count in launches)
    operands = heads * (blocks * 128 + 2 * padded) * 256
    assert largest * blocks * padded * 4 <= max(0.16 * operands, 2**25) or largest == 1
    assert launches[0][1] == largest, "the first group's buffer is that of all"


def test_the_dispatcher_runs_it_where_triton_interprets(interpreter):
    q, k, v = draw(33, 70)
    guard = policies()["wan-fast"].guard
    outcome = interpreter.call("wanfp4.kernels.dispatch:run", q, k, v, FAST, guard=guard, backend="triton")
    assert outcome.backend == "triton"
    assert outcome.notes == {"guard_decisions_on_device": 1}
    assert outcome.flag.tolist() == [0]
    assert not next(b for b in dispatch.backends() if b.name == "triton").native


def test_missing_says_what_is_found_and_needed(monkeypatch):
    emulated.not_installed.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(emulated.importlib.metadata, "version", lambda name: "3.1.0")
            assert emulated.missing() == "triton 3.1.0 is installed, and it needs 3.6 or later"
        emulated.not_installed.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(emulated.sys, "platform", "darwin")
            assert "runs on Linux; this is darwin" in emulated.missing()
        emulated.not_installed.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(emulated.importlib.metadata, "version", absent)
            assert "triton is not installed" in emulated.missing()
    finally:
        emulated.not_installed.cache_clear()
    if not torch.cuda.is_available():
        assert "finds no CUDA device, and it needs a GPU of compute capability 8.0" in emulated.missing()
    assert "the tensors are on cpu" in emulated.refuses(FAST, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
    emulated.wrong_gpu.cache_clear()
    assert emulated.missing().startswith("Tesla T4 has compute capability 7.5, and it needs a GPU of compute")
    assert emulated.refuses(FAST, torch.device("cuda:0")).startswith("Tesla T4 has compute capability 7.5")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    emulated.wrong_gpu.cache_clear()
    assert emulated.missing() is None
    assert "'sm100' runs that" in emulated.refuses(FAST, torch.device("cuda:0"))
    assert emulated.refuses(POLICIES["nvfp4"], torch.device("cuda:0")) is None
    emulated.wrong_gpu.cache_clear()


def absent(name):
    raise emulated.importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("numerics", "reason"),
    [
        (Numerics(), "round nothing"),
        (Numerics(qk="nvfp4"), "multiplies P in BF16 at most"),
        (Numerics(p="bf16", smooth_k=True), "smoothed ones that are not rounded"),
        (Numerics(qk="nvfp4", p="bf16", smooth_v=True), "a smoothed one that is not rounded"),
        (Numerics(qk="nvfp4", p="bf16", v="bf16", global_scale=True), "no global scale"),
    ],
)
def test_numerics_that_are_refused(numerics, reason):
    assert reason in emulated.limits(numerics)


def test_calls_that_are_declined():
    q, k, v = draw(3, 4)
    declines = emulated.declines
    assert "positive number; found 0" in declines(q, k, v, FAST, None, 0.0, False)
    assert "leave q, which is torch.float16, unrounded" in declines(
        q.half(), k, v, EXTRA["P alone"], None, SCALE, False
    )
    assert "guards 'shiftless' numerics only" in declines(q, k, v, ALL["direct-p-exp2"], Guard(110, 16), SCALE, False)
    assert declines(q, k, v, FAST, Guard(110, 16), SCALE, True) is None
    huge = torch.empty(1, 1, 1, 128).expand(2**12, 2**19, 1, 128)
    assert "in 32 bits" in declines(huge, k, v, FAST, None, SCALE, False)
