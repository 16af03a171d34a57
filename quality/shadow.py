"""Shadow attention: each self-attention call of a patched run against the pipeline's own attention on the same q, k, v.

`Shadow` is an observer of a patch (`Patch.observing`). docs/maps.md defines every figure. Relative L2 and cosine are of
the whole output; figures of logits and of P's codes are of a sample of query rows, evenly spaced and always the same.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from wanfp4.kernels import formats, reference
from wanfp4.policy import Numerics
from wanfp4.processors.session import Call
from wanfp4.quality.metrics import from_sums

# In the order that maps show them, with how a heading says them.
FIGURES = {
    "rel_l2": "relative L2",
    "cosine": "cosine",
    "floor": "noise floor",
    "unexplained": "unexplained",
    "zero_codes": "codes of 0",
    "clipped": "clipped",
    "largest_logit": "largest logit",
    "logit_std": "logit spread",
    "entropy": "entropy",
}

ROWS = 64
# Rounding costs more than multiplying: the sampled rows come from so many 128-token blocks of queries, and their codes
# are counted over so many tiles of 128 keys. Up to 2048 queries and 4096 keys these are all there are.
QUERY_BLOCKS, KEY_TILES = 16, 32

# Elements of each float32 temporary: 128 MiB; on a CPU what its caches hold.
_ELEMENTS, _CPU_ELEMENTS = 2**25, 2**18
# Samples wait until they hold this much and are then evaluated together: on a GPU a small model's attention takes less
# time than starting the many small kernels that its statistics need.
_PENDING_BYTES = 64 * 2**20

# What P's formats with a fixed range can hold, and those with block scales, in units of the scale.
_LARGEST = {"fp8": formats.E4M3_MAX, "fp8-direct": formats.E4M3_MAX}
_LARGEST_CODE = {"mxfp4-direct": formats.E2M1_MAX, "nvfp4": formats.E2M1_MAX, "mxfp8": formats.E4M3_MAX}
# Above this many octaves beyond the largest value an entry counts as clipped: float32 rounding is none.
_CLIPPED_OCTAVES = 1e-4


class Place(NamedTuple):
    """A self-attention at a moment of a run: `blocks` is the list of blocks that `layer` counts in, steps from 0."""

    expert: str
    blocks: str
    layer: int
    step: int
    branch: str


@dataclass(frozen=True)
class Record:
    """One call: its figures over all heads, and for each head; `ran` is the policy's or preset's name."""

    place: Place
    sigma: float | None
    ran: str
    figures: dict[str, float]
    heads: dict[str, list[float]]


@dataclass(frozen=True)
class _Sample:
    """What a call's statistics need, copied: heads folded into the first dimension, [B·H, …, D].

    q are whole 128-token blocks; `out` and `own` are the policy's and the pipeline's own output for those of its rows
    that are sampled.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    own: Tensor
    numerics: Numerics
    scale: float
    tokens: int


@dataclass(frozen=True)
class _Pending:
    place: Place
    sigma: float | None
    ran: str
    batch: int
    sums: Tensor  # [4, H]: ⟨a, b⟩, ‖a‖², ‖b‖², ‖a − b‖²
    sample: _Sample | None  # None once it is evaluated


class Shadow:
    """Records every call of a patch; `take` gives what has been recorded.

    forced  True: the model goes on with the pipeline's own attention, so that every call gets the q, k, v of an
            unpatched run and nothing adds up. False: it goes on with the policy's.
    rows    sampled query rows of each call and head.

    Memory: the pipeline's own output of one call, samples of less than 64 MiB (calls with more keys and values are
    evaluated at once, where they stand), about ten temporaries of up to 128 MiB each, and the figures. Figures stay on
    the device until `take`, so that no call waits for it.
    """

    def __init__(self, *, forced: bool = True, rows: int = ROWS) -> None:
        self.forced = forced
        self.rows = rows
        self._pending: list[_Pending] = []
        self._bytes = 0
        self._done: list[tuple[_Pending, dict[str, Tensor]]] = []

    @torch.no_grad()
    def __call__(self, call: Call) -> Tensor | None:
        own = call.own()
        device = call.q.device
        with torch.autocast(device.type, enabled=False):
            sample = _sample(call, own, self.rows, copy=call.k.nbytes + call.v.nbytes < _PENDING_BYTES)
            place = Place(call.expert, call.site.blocks, call.site.layer, call.step or 0, call.branch)
            sums = error_sums(call.out, own)
            self._pending.append(_Pending(place, call.sigma, call.ran.name, len(call.q), sums, sample))
            self._bytes += sum(t.nbytes for t in (sample.q, sample.k, sample.v))
        if self._bytes >= _PENDING_BYTES:
            self._flush()
        return own if self.forced else None

    def take(self) -> list[Record]:
        """The records since the last `take`, in the order of the calls."""
        self._flush()
        done, self._done = self._done, []
        return [_record(one, statistics) for one, statistics in done]

    @torch.no_grad()
    def _flush(self) -> None:
        pending, self._pending, self._bytes = self._pending, [], 0
        groups: dict[object, list[int]] = {}
        for i, one in enumerate(pending):
            s = one.sample
            assert s is not None
            groups.setdefault((s.numerics, s.tokens, s.k.shape, s.scale, s.q.dtype, s.q.device), []).append(i)
        done: dict[int, dict[str, Tensor]] = {}
        for members in groups.values():
            samples = [sample for i in members if (sample := pending[i].sample) is not None]
            with torch.autocast(samples[0].q.device.type, enabled=False):
                done.update(zip(members, _statistics(samples, self.rows), strict=True))
        self._done += [(dataclasses.replace(one, sample=None), done[i]) for i, one in enumerate(pending)]


def spaced(count: int, of: int) -> list[int]:
    """`count` of the indices 0 … of − 1, evenly spaced, the first and the last among them; all if there are no more."""
    count = min(count, of)
    return [round(i * (of - 1) / max(count - 1, 1)) for i in range(count)]


def elements(device: torch.device) -> int:
    """How many elements a temporary may have: heads are evaluated together as far as they fit."""
    return _CPU_ELEMENTS if device.type == "cpu" else _ELEMENTS


def query_blocks(tokens: int, blocks: int) -> list[int]:
    """Tokens of at most `blocks` evenly spaced blocks of 128: Q smoothing and token-block formats need whole ones."""
    tile = reference.TILE
    chosen = spaced(blocks, -(-tokens // tile))
    return [token for b in chosen for token in range(b * tile, min((b + 1) * tile, tokens))]


def error_sums(out: Tensor, own: Tensor) -> Tensor:
    """[4, H] float64 sums over batch and tokens of out, own [B, S, H, D]: ⟨a, b⟩, ‖a‖², ‖b‖², ‖a − b‖²."""
    batch, tokens, heads, width = own.shape
    precise = torch.float32 if own.device.type == "mps" else torch.float64  # MPS has no float64
    sums = torch.zeros(4, heads, dtype=precise, device=own.device)
    step = max(1, _ELEMENTS // (batch * heads * width))
    for start in range(0, tokens, step):
        a, b = (t[:, start : start + step].float() for t in (out, own))
        e = a - b
        for i, (x, y) in enumerate(((a, b), (a, a), (b, b), (e, e))):
            sums[i] += (x * y).sum((0, 1, 3), dtype=precise)
    return sums


@functools.lru_cache(maxsize=32)
def _indices(tokens: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens of the query blocks, and where the sampled rows are among them. Kept: making them waits for the device."""
    blocks = query_blocks(tokens, QUERY_BLOCKS)
    return torch.tensor(blocks, device=device), torch.tensor(spaced(rows, len(blocks)), device=device)


@functools.lru_cache(maxsize=32)
def _key_indices(keys: int, device: torch.device) -> Tensor:
    tile = reference.TILE
    chosen = spaced(KEY_TILES, -(-keys // tile))
    return torch.tensor([k for t in chosen for k in range(t * tile, min((t + 1) * tile, keys))], device=device)


def _sample(call: Call, own: Tensor, rows: int, *, copy: bool) -> _Sample:
    index, among = _indices(call.q.shape[1], rows, call.q.device)
    sampled = index[among]

    def folded(t: Tensor) -> Tensor:
        t = t.transpose(1, 2)
        # A sample that waits must be a copy: the model may write its next values where the call's stand.
        return (t.clone(memory_format=torch.contiguous_format) if copy else t).flatten(0, 1)

    return _Sample(
        folded(call.q.index_select(1, index)),
        folded(call.k),
        folded(call.v),
        folded(call.out.index_select(1, sampled)),
        folded(own.index_select(1, sampled)),
        call.numerics,
        1 / math.sqrt(call.q.shape[-1]),
        call.q.shape[1],
    )


def _statistics(samples: Sequence[_Sample], rows: int) -> list[dict[str, Tensor]]:
    """Figures of each sample, [B·H] float32; all samples have the same shapes and numerics."""
    first = samples[0]
    parts = [
        torch.cat([getattr(s, name) for s in samples]) if len(samples) > 1 else getattr(first, name)
        for name in ("q", "k", "v", "out", "own")
    ]
    q, k = parts[:2]
    index = _indices(first.tokens, rows, q.device)[1]
    limit = elements(q.device)
    rounded = (q.shape[1] + min(k.shape[1], KEY_TILES * reference.TILE)) * q.shape[2]
    step = max(1, limit // max(len(index) * k.shape[1], k.shape[1] * k.shape[2], rounded))
    chunks = []
    for h in range(0, len(q), step):
        q_, k_, v_, out_, own_ = (part[h : h + step].float() for part in parts)
        chunks.append(_head_statistics(q_, k_, v_, out_, own_, index, first.numerics, first.scale))
    table = torch.cat(chunks, 1)
    names = ("error", "size", "unexplained", "zero_codes", "clipped", "largest_logit", "variance", "entropy")
    each = len(first.q)
    return [{name: table[j, i * each : (i + 1) * each] for j, name in enumerate(names)} for i in range(len(samples))]


def _head_statistics(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, own: Tensor, rows: Tensor, numerics: Numerics, scale: float
) -> Tensor:
    """[8, h] float32: what `_statistics` names, over the sampled rows of each head.

    "error" and "size" are ‖own − exact‖² and ‖exact‖², where exact is float32 attention of the same rows, and
    "unexplained" is ‖out − emulated‖², where emulated is what the reference makes of the numerics.
    """
    z = q[:, rows] @ k.transpose(1, 2) * scale  # [h, r, Sk]
    top = z.amax(-1, keepdim=True)
    p = (z - top).exp_()
    total = p.sum(-1, keepdim=True)
    p /= total
    exact = _weighted(p, v)
    # −Σ p·ln p with ln p = (z − top) − ln total
    entropy = total.log().squeeze(-1) - (p * (z - top)).sum(-1)
    del p  # the codes' temporaries are as large
    emulated, zeros, clipped = emulate(z, q, rows, k, v, numerics, scale)
    return torch.stack(
        [
            (own - exact).square().sum((1, 2)),
            exact.square().sum((1, 2)),
            (out - (exact if emulated is None else emulated)).square().sum((1, 2)),
            zeros,
            clipped,
            z.abs().amax((1, 2)),
            z.var(-1, correction=0).mean(1),
            entropy.mean(-1),
        ]
    )


def emulate(
    z: Tensor, q: Tensor, rows: Tensor, k: Tensor, v: Tensor, numerics: Numerics, scale: float
) -> tuple[Tensor | None, Tensor, Tensor]:
    """What the reference makes of some rows: their output [h, r, D] (None where nothing is rounded), and the shares [h]
    of P's entries that the format rounds to 0, and that are larger than it can hold.

    z [h, r, Sk] unrounded logits of the `rows` of q [h, n·128, D]; k and v [h, Sk, D], all float32. Up to 4096 keys
    this is the reference. Beyond, only the keys of 32 tiles are rounded and counted; the others stand in z with their
    unrounded logits, so that a row's reference and range are right all the same.
    """
    none = torch.zeros(len(z), device=z.device)
    if numerics.is_exact:
        return None, none, none
    order = reference.key_order(k.shape[1], numerics.row_reference, k.device)
    if order is not None:
        k, v, z = k[:, order], v[:, order], z[..., order]
    if numerics.smooth_k:
        mean = k.mean(1, keepdim=True)
        k, z = k - mean, z - q[:, rows] @ mean.transpose(1, 2) * scale
    tile, count = reference.TILE, k.shape[1]
    keys = _key_indices(count, k.device)
    if numerics.qk != "exact":
        z = z.index_copy(-1, keys, _rounded_logits(q, rows, k[:, keys], numerics, scale))
    m = reference.row_reference(z, numerics, scale)
    weights = reference.probabilities(z, m, numerics)
    if m.shape[-1] > 1:
        m = m.repeat_interleave(tile, -1)[..., :count]
    v4 = v.transpose(0, 1).unsqueeze(0)
    rounding = Numerics(
        v=numerics.v, smooth_v=numerics.smooth_v, global_scale=numerics.global_scale and "nvfp4" in numerics.v
    )
    values = reference.prepare(v4[:, :1], v4[:, :1], v4, rounding, scale)
    out = _weighted(weights.weight, values.v) * values.v_scale / weights.total.unsqueeze(-1)
    if values.v_mean is not None:
        out = out + values.v_mean
    if numerics.p in ("exact", "bf16"):
        return out, none, none
    codes = weights.weight if weights.codes is None else weights.codes.flatten(-2)[..., :count]
    zeros = (codes.index_select(-1, keys) == 0).float().mean((1, 2))

    exact = (z - m) * reference.LOG2_E - weights.log2_unit.unsqueeze(-1)  # log2, in the units of the weights
    if numerics.p in _LARGEST_CODE and weights.scales is not None:
        decode = formats.decode_e4m3 if numerics.p == "nvfp4" else formats.decode_e8m0
        block = 16 if numerics.p == "nvfp4" else 32
        scales = decode(weights.scales)
        # A scale that is 0 makes its block 0: that is counted above, and is not clipping.
        largest = torch.where(scales == 0, torch.inf, scales * _LARGEST_CODE[numerics.p]).log2()
        beyond = exact > largest.repeat_interleave(block, -1)[..., :count] + _CLIPPED_OCTAVES
    else:
        beyond = exact > math.log2(_LARGEST.get(numerics.p, math.inf)) + _CLIPPED_OCTAVES
    return out, zeros, beyond.index_select(-1, keys).float().mean((1, 2))


def _weighted(p: Tensor, v: Tensor) -> Tensor:
    """p @ v for p [h, r, Sk] and v [h, Sk, D], long sums in parts: a product of few rows and columns and many keys
    occupies few of a GPU's processors."""
    parts = p.shape[-1] // 4096
    if parts < 2:
        return p @ v
    whole = p.shape[-1] // parts * parts
    split: Tensor = p[..., :whole].unflatten(-1, (parts, -1)).transpose(1, 2) @ v[:, :whole].unflatten(1, (parts, -1))
    return split.sum(1) + p[..., whole:] @ v[:, whole:]


def _rounded_logits(q: Tensor, rows: Tensor, k: Tensor, numerics: Numerics, scale: float) -> Tensor:
    """[h, r, keys] logits of the rounded operands: those that the reference makes of the same rows and keys."""
    rounding = Numerics(
        qk=numerics.qk,
        smooth_q=numerics.smooth_q,
        global_scale=numerics.global_scale and numerics.qk.startswith("nvfp4"),
    )
    k4 = k.transpose(0, 1).unsqueeze(0)
    if rounding.smooth_q or rounding.global_scale or rounding.qk == "mxfp8-token-block":
        operands = reference.prepare(q.transpose(0, 1).unsqueeze(0), k4, k4, rounding, scale)
        # `logits` indexes with whatever selects rows.
        return reference.logits(operands, slice(None), cast(slice, rows))
    # Each token is rounded by itself: queries and keys together take half as many kernels.
    both = torch.cat((q[:, rows].transpose(0, 1).unsqueeze(0), k4), 1)
    operands = reference.prepare(both[:, :1], both, both[:, :1], rounding, scale)
    q, k = operands.k.split((len(rows), k.shape[1]), 1)
    return q @ k.transpose(1, 2) * operands.qk_scale


def _record(one: _Pending, statistics: dict[str, Tensor]) -> Record:
    """Figures of one call. Errors add up over batch and heads, shares and moments are means, maxima are maxima."""
    sums = one.sums.to("cpu", torch.float64)
    s = {name: t.to("cpu", torch.float64).unflatten(0, (one.batch, -1)) for name, t in statistics.items()}  # [B, H]
    size = s["size"].sum(0)

    def figures(keep_heads: bool) -> dict[str, Tensor]:
        def over(t: Tensor, how: str = "sum") -> Tensor:
            return t if keep_heads else getattr(t, how)(-1)

        cosine, rel_l2 = from_sums(*(over(x) for x in sums))
        of_floor, unexplained = (
            from_sums(*(over(t) for t in (size, size, size, s[name].sum(0))))[1] for name in ("error", "unexplained")
        )
        return {
            "rel_l2": rel_l2,
            "cosine": cosine,
            "floor": of_floor,
            "unexplained": unexplained,
            "zero_codes": over(s["zero_codes"].mean(0), "mean"),
            "clipped": over(s["clipped"].mean(0), "mean"),
            "largest_logit": over(s["largest_logit"].amax(0), "amax"),
            "logit_std": over(s["variance"].mean(0), "mean").sqrt(),
            "entropy": over(s["entropy"].mean(0), "mean"),
        }

    return Record(
        one.place,
        one.sigma,
        one.ran,
        {name: float(value) for name, value in figures(False).items()},
        {name: [float(x) for x in value] for name, value in figures(True).items()},
    )
