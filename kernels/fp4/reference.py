"""The readable torch reference: what every policy computes. docs/numerics.md is its text, this file its meaning.

Fast backends are judged against this one, and this one against published tables (tests/kernels/test_operator.py).
Products of 4-bit and 8-bit operands are exact in float32, so plain float32 matrix products reproduce a block-scaled
MMA up to the order of accumulation. Queries are processed in tiles, so memory grows with the tokens, not their square.

Notation: z are logits (after the softmax scale), m_i is row i's reference, t = (z − m_i)·log2 e, so that 2^t is the
unnormalised probability p. Weights are what multiplies V, and L their sum: O = Σ weight·V / L.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from wanfp4.kernels import formats
from wanfp4.policy import Classifier, Numerics

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)
LOG2_6 = math.log2(6)

# Direct-P rounds a block's amplitude to the nearest power of two: e = floor(g + 0.41504), whose midpoint is 1.5.
DIRECT_ROUNDING = 0.41504

# Online softmax tile: the running row maximum is updated once per 128 keys, and a backend must do the same, because
# codes depend on it. 128 is also what the Q smoothing blocks count.
TILE = 128

# Where the largest stored E8M0 byte of a row may lie. 208 leaves 2^46 of headroom for Σ α·q·v in float32; 32 keeps
# 31 octaves below the row's maximum. Rows outside are moved by a whole number of octaves, which cancels exactly.
STORED_TOP = 208
STORED_BOTTOM = 32

# The largest scaled probability that each of the other formats can hold.
_LARGEST = {"nvfp4": formats.E2M1_MAX * formats.E4M3_MAX, "fp8": formats.E4M3_MAX, "fp8-direct": formats.E4M3_MAX}

_TILE_ELEMENTS = 2**22  # logits held at once: 16 MiB for each float32 temporary


@dataclass(frozen=True)
class Result:
    """out [B, Sq, H, D] in v's dtype; lse [B, H, Sq] float32 or None; rows whose exponents were moved into range."""

    out: Tensor
    lse: Tensor | None
    rows_shifted: int


@dataclass(frozen=True)
class Operands:
    """Rounded operands, float32, heads folded into the first dimension.

    q        [B·H, Sq, D] codes times scales.
    k, v     [B·H, Sk, D], keys in physical order (`order` says which token stands where; None when not permuted).
    qk_scale factor of q·k: the softmax scale `scale` and the formats' own factors.
    v_scale  factor of the weighted sum of v.
    q_mean   [B·H, ⌈Sq/128⌉, D] subtracted from q, with `k_full` [B·H, Sk, D] the unrounded keys it still multiplies.
    v_mean   [B·H, 1, D] subtracted from v, or None.
    lse_shift [B·H, Sq] what K smoothing took from every logit of a row, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    qk_scale: Tensor
    v_scale: Tensor
    order: Tensor | None = None
    q_mean: Tensor | None = None
    k_full: Tensor | None = None
    v_mean: Tensor | None = None
    lse_shift: Tensor | None = None


@dataclass(frozen=True)
class Weights:
    """P of one tile of rows.

    weight    [h, r, Sk] float32: rounded probabilities in units of `unit`.
    total     [h, r] denominator in the same units.
    codes     [h, r, n, block] rounded values of the payload (E2M1 or E4M3 values), padding included; None for formats
              without blocks.
    scales    [h, r, n] uint8 scale bytes as stored, or None.
    log2_unit [h, r] float32: a weight w stands for the probability w·2^log2_unit relative to the row reference.
    shifted   [h, r] bool: rows whose exponents were moved into range.
    """

    weight: Tensor
    total: Tensor
    codes: Tensor | None
    scales: Tensor | None
    log2_unit: Tensor
    shifted: Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, numerics: Numerics, *, scale: float, return_lse: bool = False) -> Result:
    """Non-causal attention with `numerics`: q [B, Sq, H, D], k and v [B, Sk, H, D] → [B, Sq, H, D] in v's dtype.

    The inputs are never written to. NaN in an operand reaches every output that it should reach.
    """
    batch, queries, heads, _ = q.shape
    operands = prepare(q, k, v, numerics, scale)
    out = torch.empty(batch * heads, queries, v.shape[-1], dtype=torch.float32, device=q.device)
    lse = torch.empty(batch * heads, queries, dtype=torch.float32, device=q.device) if return_lse else None
    rows_shifted = 0
    for head, row in tiles(batch * heads, queries, k.shape[1]):
        z = logits(operands, head, row)
        reference = row_reference(z, numerics, scale)
        weights = probabilities(z, reference, numerics)
        o = weights.weight @ operands.v[head] * operands.v_scale / weights.total.unsqueeze(-1)
        out[head, row] = o if operands.v_mean is None else o + operands.v_mean[head]
        rows_shifted += int(weights.shifted.sum())
        if lse is not None:
            lse[head, row] = reference[..., -1] + LN_2 * (weights.total.log2() + weights.log2_unit)
            if operands.lse_shift is not None:
                lse[head, row] += operands.lse_shift[head, row]
    shaped = out.unflatten(0, (batch, heads)).transpose(1, 2).to(v.dtype)
    return Result(shaped, None if lse is None else lse.unflatten(0, (batch, heads)), rows_shifted)


def tiles(heads: int, queries: int, keys: int) -> Iterator[tuple[slice, slice]]:
    """Slices of heads and query rows, each with at most about `_TILE_ELEMENTS` logits."""
    head_step = max(1, min(heads, _TILE_ELEMENTS // (queries * keys)))
    row_step = min(queries, max(16, _TILE_ELEMENTS // (head_step * keys)))
    for h in range(0, heads, head_step):
        for r in range(0, queries, row_step):
            yield slice(h, min(h + head_step, heads)), slice(r, min(r + row_step, queries))


def prepare(q: Tensor, k: Tensor, v: Tensor, numerics: Numerics, scale: float) -> Operands:
    """Permute, smooth and round the operands."""
    q, k, v = (t.transpose(1, 2).flatten(0, 1).float() for t in (q, k, v))
    order = key_order(k.shape[1], numerics.row_reference, k.device)
    if order is not None:
        k, v = k[:, order], v[:, order]
    lse_shift = q_mean = k_full = v_mean = None
    if numerics.smooth_k:
        k_mean = k.mean(1, keepdim=True)
        lse_shift = (q @ k_mean.transpose(1, 2)).squeeze(-1) * scale
        k = k - k_mean
    if numerics.smooth_q:
        k_full = k
        q_mean = _block_means(q)
        q = q - q_mean.repeat_interleave(TILE, 1)[:, : q.shape[1]]
    if numerics.smooth_v:
        v_mean = v.mean(1, keepdim=True)
        v = v - v_mean
    q, q_factor = _round_qk(q, numerics)
    k, k_factor = _round_qk(k, numerics)
    v, v_factor = _round_v(v, numerics)
    return Operands(q, k, v, scale, scale * q_factor * k_factor, v_factor, order, q_mean, k_full, v_mean, lse_shift)


@functools.lru_cache(maxsize=16)  # a copy to a GPU waits for all that is queued there
def key_order(keys: int, row_reference: str, device: torch.device) -> Tensor | None:
    """Physical order of the keys: for `anchorN`, N tokens at round(linspace(0, S − 1, N)) first, then the others."""
    if not row_reference.startswith("anchor"):
        return None
    count = min(keys, int(row_reference.removeprefix("anchor")))
    first = [round(i * (keys - 1) / max(count - 1, 1)) for i in range(count)]
    is_first = torch.zeros(keys, dtype=torch.bool)
    is_first[first] = True
    return torch.argsort(~is_first, stable=True).to(device)


def _block_means(q: Tensor) -> Tensor:
    """[h, ⌈S/128⌉, D] means of 128-token blocks; the last block is the mean of what it has."""
    short = -q.shape[1] % TILE
    sums: Tensor = pad(q, (0, 0, 0, short)).unflatten(1, (-1, TILE)).sum(2)
    counts = torch.full((sums.shape[1], 1), TILE, device=q.device)
    counts[-1] = TILE - short
    return sums / counts


def _round_qk(x: Tensor, numerics: Numerics) -> tuple[Tensor, Tensor]:
    if numerics.qk == "exact":
        return x, torch.ones((), device=x.device)
    if numerics.qk == "mxfp8-token-block":
        rounded = formats.quantize_mxfp8_token_block(x)
    else:
        rounded = formats.quantize_nvfp4(x, fold=numerics.qk == "nvfp4-folded", global_scale=numerics.global_scale)
    return rounded.values(), rounded.factor


def _round_v(v: Tensor, numerics: Numerics) -> tuple[Tensor, Tensor]:
    one = torch.ones((), device=v.device)
    if numerics.v == "exact":
        return v, one
    if numerics.v == "bf16":
        return v.bfloat16().float(), one
    if numerics.v == "fp8":
        # One scale per head, a power of two would waste up to half of E4M3's range.
        gain = formats.E4M3_MAX / v.abs().amax((1, 2), keepdim=True).clamp(min=2.0**-100)
        return formats.round_e4m3(v * gain) / gain, one
    if numerics.v == "mxfp8-token-block":
        rounded = formats.quantize_mxfp8_token_block(v)
    elif numerics.v == "nvfp4":
        rounded = formats.quantize_nvfp4(v, dim=1, global_scale=numerics.global_scale)
    else:
        rounded = formats.quantize_mxfp4_direct(v, dim=1)
    return rounded.values(), rounded.factor


def logits(operands: Operands, head: slice, row: slice) -> Tensor:
    """z [h, r, Sk] of one tile from the rounded operands, the smoothed-away part of Q added back in float32."""
    z = operands.q[head, row] @ operands.k[head].transpose(1, 2) * operands.qk_scale
    if operands.q_mean is not None and operands.k_full is not None:
        block = torch.arange(operands.q.shape[1], device=z.device)[row] // TILE
        means = operands.q_mean[head][:, block]
        z = z + means @ operands.k_full[head].transpose(1, 2) * operands.scale
    return z


def row_reference(z: Tensor, numerics: Numerics, scale: float) -> Tensor:
    """m [h, r, 1] of one tile, or for `rowmax` [h, r, ⌈Sk/128⌉]: the running maximum after each 128 keys."""
    if numerics.row_reference == "shiftless":
        return z.new_zeros(*z.shape[:2], 1)
    if numerics.row_reference == "rowmax":
        short = -z.shape[-1] % TILE
        tile_max: Tensor = pad(z, (0, short), value=-torch.inf).unflatten(-1, (-1, TILE)).amax(-1)
        return tile_max.cummax(-1).values
    anchor = z[..., : numerics.anchors].amax(-1, keepdim=True)
    octaves = numerics.margin * (scale if numerics.margin_unit == "raw" else 1.0)
    return anchor + octaves * LN_2


def probabilities(z: Tensor, reference: Tensor, numerics: Numerics) -> Weights:
    """Round P. `z` [h, r, Sk] natural logits, `reference` from `row_reference`."""
    keys = z.shape[-1]
    if reference.shape[-1] == 1:
        m, rescale = reference, None
    else:
        m = reference.repeat_interleave(TILE, -1)[..., :keys]
        # What the online softmax multiplies earlier tiles with when a larger maximum turns up.
        rescale = torch.exp(m - reference[..., -1:])
    t = (z - m) * LOG2_E
    return (_direct if numerics.p == "mxfp4-direct" else _scaled)(t, numerics, rescale)


def _total(weight: Tensor, log2_p: Tensor, numerics: Numerics, rescale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights [h, r, Sk], rescaled where the reference moved, and their denominator; `log2_p` is what was rounded."""
    if rescale is not None:
        weight = weight * rescale
    if numerics.denominator == "codes":
        return weight, weight.sum(-1)
    exact = torch.exp2(log2_p)
    return weight, (exact if rescale is None else exact * rescale).sum(-1)


def _direct(t: Tensor, numerics: Numerics, rescale: Tensor | None = None) -> Weights:
    """Direct-P: MXFP4 codes straight from scores. t [h, r, Sk] in octaves."""
    keys = t.shape[-1]
    blocks = pad(t, (0, -keys % 32), value=-torch.inf).unflatten(-1, (-1, 32))
    e = torch.floor(blocks.amax(-1) + DIRECT_ROUNDING)
    x = blocks - e.unsqueeze(-1) + LOG2_6
    codes = formats.round_e2m1(classify(x, numerics.classifier).clamp(min=0))

    stored = e + 127 - numerics.stored_shift
    top = stored.amax(-1)
    shift = (top - STORED_TOP).clamp(min=0) + (top - STORED_BOTTOM).clamp(max=0)
    scales = formats.encode_e8m0((stored - shift.unsqueeze(-1)).clamp(min=1) - 127)
    weight = (codes * formats.decode_e8m0(scales).unsqueeze(-1)).flatten(-2)[..., :keys]
    # weight = 6p·2^-(L + shift): the codes' grid is α·q/6.
    log2_unit = shift + numerics.stored_shift - LOG2_6
    weight, total = _total(weight, t - log2_unit.unsqueeze(-1), numerics, rescale)
    return Weights(weight, total, codes, scales, log2_unit, shift != 0)


def classify(x: Tensor, classifier: Classifier) -> Tensor:
    """u(x), what E2M1 rounds, for block-relative scores x in octaves [h, r, n, 32 or 16]; 2^x is the exact value."""
    if classifier.kind == "exp2":
        return torch.exp2(x)
    u = x * classifier.A + classifier.B
    if classifier.kind == "two-piece":
        return torch.maximum(u, x * classifier.A2 + classifier.B2)
    if classifier.kind == "mix":
        return torch.where(mix_lanes(x.shape[-2], classifier.density, x.device), torch.exp2(x), u)
    return u


@functools.lru_cache(maxsize=16)
def mix_lanes(blocks: int, density: int, device: torch.device) -> Tensor:
    """[blocks, 32] bool: the lanes that take exp2, of 16 pairs those that fit the block's place o in its 128 keys."""
    lanes = torch.zeros(4, 16, dtype=torch.bool)
    for o in range(4):
        pairs = {o, o + 8, 4, 12}
        if density >= 2:
            pairs |= {(o + 2) & 3, 6, 8 + ((o + 2) & 3), 14}
        lanes[o, sorted(range(16) if density == 4 else pairs)] = True
    return lanes.repeat_interleave(2, 1).repeat(-(-blocks // 4), 1)[:blocks].to(device)


def _scaled(t: Tensor, numerics: Numerics, rescale: Tensor | None = None) -> Weights:
    """P in the formats that scale probabilities: NVFP4, E4M3, E4M3 with block exponents, BF16, or unrounded."""
    keys = t.shape[-1]
    top = t.amax(-1) + math.log2(numerics.p_peak)
    # An anchored row may exceed the format's range, or start far below it: move it by whole octaves.
    largest = math.log2(_LARGEST.get(numerics.p, 2.0**60))
    shift = torch.ceil(top - largest).clamp(min=0) + torch.floor(top - math.log2(numerics.p_peak) + 4).clamp(max=0)
    log2_unit = shift - math.log2(numerics.p_peak)
    s = t - log2_unit.unsqueeze(-1)  # log2 of the scaled probability
    codes = scales = None
    if numerics.p == "nvfp4":
        blocks = pad(s, (0, -keys % 16), value=-torch.inf).unflatten(-1, (-1, 16))
        scales = formats.encode_e4m3(formats.divide(torch.exp2(blocks.amax(-1)), formats.E2M1_MAX))
        scale = formats.decode_e4m3(scales).unsqueeze(-1)
        x = torch.where(scale == 0, -torch.inf, blocks - scale.log2())
        codes = formats.round_e2m1(classify(x, numerics.classifier).clamp(min=0))
        weight = (codes * scale).flatten(-2)[..., :keys]
    elif numerics.p == "mxfp8":
        rounded = _mxfp8(pad(torch.exp2(s), (0, -keys % 32)).unflatten(-1, (-1, 32)))
        codes, scales, weight = rounded[0], rounded[1], rounded[2].flatten(-2)[..., :keys]
    elif numerics.p == "fp8-direct":
        weight = formats.decode_e4m3(_direct_e4m3(s))
    else:
        weight = torch.exp2(s)
        if numerics.p == "fp8":
            weight = formats.round_e4m3(weight)
        elif numerics.p == "bf16":
            weight = weight.bfloat16().float()
    weight, total = _total(weight, s, numerics, rescale)
    return Weights(weight, total, codes, scales, log2_unit, shift != 0)


def _direct_e4m3(s: Tensor) -> Tensor:
    """E4M3 bytes for 2^s: eight an octave, 56 at 2^0, so that no exponential is needed. Octaves are exact, and between
    them 2^f is taken for 1 + f. Below 2^-6, where E4M3 is linear, the bytes go on falling to 0 at 2^-7 as they do
    above. NaN becomes 0x7F."""
    bytes_ = (8 * s + 56).round().clamp(0, 126)
    return torch.where(s.isnan(), 127, bytes_).to(torch.uint8)


def _mxfp8(p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E4M3 values, UE8M0 bytes and products of p [h, r, n, 32]: one exponent per row and 32 keys, amax ≤ 448·2^e."""
    scales = formats.encode_e8m0(formats.e4m3_exponent(p.amax(-1)))
    scale = formats.decode_e8m0(scales).unsqueeze(-1)
    codes = formats.round_e4m3(p / scale)
    return codes, scales, codes * scale


def exact_lse(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """[B, H, Sq] float32 log-sum-exp of the unrounded logits."""
    batch, queries, heads, _ = q.shape
    q, k = (t.transpose(1, 2).flatten(0, 1).float() for t in (q, k))
    out = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    flat = out.view(-1, queries)
    for head, row in tiles(batch * heads, queries, k.shape[1]):
        flat[head, row] = (q[head, row] @ k[head].transpose(1, 2) * scale).logsumexp(-1)
    return out


def sampled_logit(q: Tensor, k: Tensor, scale: float, samples: int = 128) -> float:
    """The largest |logit| of up to `samples` × `samples` evenly spaced queries and keys, over all batches and heads."""

    def pick(t: Tensor) -> Tensor:
        count = min(samples, t.shape[1])
        index = [round(i * (t.shape[1] - 1) / max(count - 1, 1)) for i in range(count)]
        return t[:, index].transpose(1, 2).float()

    return float((pick(q) @ pick(k).transpose(-1, -2)).abs().max() * scale)
