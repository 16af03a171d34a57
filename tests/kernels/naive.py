"""A second, independent statement of the numerics: one row at a time, NumPy float32 and ml_dtypes casts, no torch.

It shares no code with wanfp4.kernels, so that an error would have to be made twice. Slow, for small shapes.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from wanfp4.policy import Numerics

F32 = np.float32


def e2m1(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -6, 6).astype(F32).astype(ml_dtypes.float4_e2m1fn).astype(F32)


def e4m3(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -448, 448).astype(F32).astype(ml_dtypes.float8_e4m3fn).astype(F32)


def nvfp4_row(x: np.ndarray) -> np.ndarray:
    out = np.zeros_like(x)
    for i in range(0, len(x), 16):
        s = e4m3(np.abs(x[i : i + 16]).max() / F32(6))
        out[i : i + 16] = 0 if s == 0 else s * e2m1(x[i : i + 16] / s)
    return out


def folded_row(x: np.ndarray) -> np.ndarray:
    out = np.zeros_like(x)
    for b in range(4):
        at = np.r_[16 * b : 16 * b + 16, 64 + 16 * b : 64 + 16 * b + 16]
        base = np.abs(x[at]).max() / F32(6)
        best = None
        for c in (1.0, 0.25, 0.3125, 0.375, 0.4375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.125, 1.25):
            s = e4m3(base * F32(c))
            value = np.zeros(32, F32) if s == 0 else s * e2m1(x[at] / s)
            error = ((x[at] - value).astype(np.float64) ** 2).sum()
            if best is None or error < best[0]:
                best = (error, value)
        assert best is not None
        out[at] = best[1]
    return out


def direct_row(x: np.ndarray) -> np.ndarray:
    out = np.zeros_like(x)
    for i in range(0, len(x), 32):
        amax = np.abs(x[i : i + 32]).max()
        if amax > 0:
            alpha = F32(2.0 ** math.floor(math.log2(amax) + 0.41504))
            out[i : i + 32] = alpha * e2m1(6 * x[i : i + 32] / alpha) / F32(6)
    return out


def mx8_exponent(amax: float) -> float:
    return 2.0 ** math.ceil(math.log2(amax / 448)) if amax > 0 else 2.0**-127


def token_block(x: np.ndarray) -> np.ndarray:
    out = np.zeros_like(x)
    for i in range(0, len(x), 32):
        s = F32(mx8_exponent(float(np.abs(x[i : i + 32]).max())))
        out[i : i + 32] = s * e4m3(x[i : i + 32] / s)
    return out


def classify(x: np.ndarray, numerics: Numerics, block: int) -> np.ndarray:
    c = numerics.classifier
    affine = F32(c.A) * x + F32(c.B)
    if c.kind == "affine":
        return affine
    if c.kind == "two-piece":
        return np.maximum(affine, F32(c.A2) * x + F32(c.B2))
    exact = np.exp2(x)
    if c.kind == "exp2":
        return exact
    o = block % 4
    pairs = {1: {o, o + 8, 4, 12}, 4: set(range(16))}.get(c.density)
    if pairs is None:
        pairs = {o, o + 8, 4, 12, (o + 2) % 4, 6, 8 + (o + 2) % 4, 14}
    lane = np.array([i // 2 in pairs for i in range(len(x))])
    return np.where(lane, exact, affine)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, numerics: Numerics, scale: float) -> np.ndarray:
    """One head: q [Sq, D], k and v [Sk, D] float32 → [Sq, D] float64."""
    keys = len(k)
    if numerics.row_reference.startswith("anchor"):
        n = min(keys, int(numerics.row_reference[6:]))
        first = [round(i * (keys - 1) / max(n - 1, 1)) for i in range(n)]
        order = first + [i for i in range(keys) if i not in set(first)]
        k, v = k[order], v[order]
    bias = np.zeros((len(q), keys))
    if numerics.smooth_k:
        k = k - k.mean(0, dtype=np.float64).astype(F32)
    if numerics.smooth_q:
        for i in range(0, len(q), 128):
            mean = q[i : i + 128].mean(0, dtype=np.float64).astype(F32)
            bias[i : i + 128] = scale * (mean.astype(np.float64) @ k.T.astype(np.float64))
            q = np.concatenate([q[:i], q[i : i + 128] - mean, q[i + 128 :]])
    v_mean = v.mean(0, dtype=np.float64).astype(F32) if numerics.smooth_v else F32(0)
    v = (v - v_mean).astype(F32)
    row = {"nvfp4": nvfp4_row, "nvfp4-folded": folded_row}
    if numerics.qk == "mxfp8-token-block":
        q, k = token_block(q), token_block(k)
    elif numerics.qk != "exact":
        q, k = (np.stack([row[numerics.qk](r) for r in t]) for t in (q, k))
    if numerics.v == "mxfp4-direct":
        v = np.stack([direct_row(c) for c in v.T]).T
    elif numerics.v == "nvfp4":
        v = np.stack([nvfp4_row(c) for c in v.T]).T
    elif numerics.v == "mxfp8-token-block":
        v = token_block(v)
    elif numerics.v == "fp8":
        gain = F32(448) / np.abs(v).max()
        v = e4m3(v * gain) / gain
    elif numerics.v == "bf16":
        v = v.astype(ml_dtypes.bfloat16).astype(F32)
    z = scale * (q.astype(np.float64) @ k.T.astype(np.float64)) + bias
    out = np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        out[i] = _row(z[i], v.astype(np.float64), numerics, scale) + v_mean
    return out


def _octaves_out_of_range(z: np.ndarray, numerics: Numerics, scale: float) -> int:
    """How far an anchored row must move so that its largest probability fits NVFP4 or E4M3, but is not lost in it."""
    if numerics.p not in ("nvfp4", "fp8", "fp8-direct") or not numerics.row_reference.startswith("anchor"):
        return 0
    anchor = z[: int(numerics.row_reference[6:])].max() + numerics.margin * math.log(2) * scale
    top = (z.max() - anchor) / math.log(2)
    room = math.log2((2688 if numerics.p == "nvfp4" else 448) / numerics.p_peak)
    return max(0, math.ceil(top - room)) + min(0, math.floor(top) + 4)


def _row(z: np.ndarray, v: np.ndarray, numerics: Numerics, scale: float) -> np.ndarray:
    number, total, m = np.zeros(v.shape[1]), 0.0, -math.inf
    peak = numerics.p_peak * 2.0 ** -_octaves_out_of_range(z, numerics, scale)
    for start in range(0, len(z), 128):
        tile = slice(start, min(start + 128, len(z)))
        if numerics.row_reference == "shiftless":
            new = 0.0
        elif numerics.row_reference == "rowmax":
            new = max(m, z[tile].max())
        else:
            new = z[: int(numerics.row_reference[6:])].max()
            new += numerics.margin * math.log(2) * (scale if numerics.margin_unit == "raw" else 1.0)
        if start and new != m:
            number, total = number * math.exp(m - new), total * math.exp(m - new)
        m = new
        t = ((z[tile] - m) / math.log(2)).astype(F32)
        weight = np.zeros(len(t))
        if numerics.p == "mxfp4-direct":
            for b in range(0, len(t), 32):
                block = t[b : b + 32]
                e = math.floor(block.max() + 0.41504)
                u = classify(block - F32(e) + F32(math.log2(6)), numerics, (start + b) // 32)
                weight[b : b + 32] = 2.0**e * e2m1(np.maximum(u, 0)) / 6
        else:
            p = peak * np.exp2(t.astype(np.float64))
            if numerics.p == "nvfp4":
                for b in range(0, len(t), 16):
                    s = e4m3(p[b : b + 16].max() / 6)
                    if s > 0:
                        x = (np.log2(p[b : b + 16]) - math.log2(s)).astype(F32)
                        weight[b : b + 16] = s * e2m1(np.maximum(classify(x, numerics, 0), 0))
            elif numerics.p == "fp8":
                weight = e4m3(p).astype(np.float64)
            elif numerics.p == "fp8-direct":
                octaves = (t + F32(math.log2(peak))).astype(F32)
                codes = np.clip(np.rint(8 * octaves + 56), 0, 126).astype(np.uint8)
                weight = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
            elif numerics.p == "mxfp8":
                for b in range(0, len(t), 32):
                    s = mx8_exponent(float(p[b : b + 32].max()))
                    weight[b : b + 32] = s * e4m3(p[b : b + 32] / s)
            elif numerics.p == "bf16":
                weight = p.astype(ml_dtypes.bfloat16).astype(np.float64)
            else:
                weight = p
        exact = np.exp2(t.astype(np.float64)) * (1 if numerics.p == "mxfp4-direct" else peak)
        number += weight @ v[tile]
        total += (weight if numerics.denominator == "codes" else exact).sum()
    return number / total
