"""Runs the SM100 forward kernel on the simulator, on records laid out here from what `formats` says."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver
from cutlass import Float32, Int32, Int64, cute
from torch import Tensor
from torch.nn.functional import pad

from wanfp4 import simulator
from wanfp4.kernels import formats, reference
from wanfp4.kernels.blackwell.forward import Forward, Options
from wanfp4.policy import Numerics
from wanfp4.simulator.machine import CTA

SCALE = 1 / math.sqrt(128)
_compiled: dict[Options, Any] = {}


def options_of(numerics: Numerics, **changes: Any) -> Options:
    """The kernel's options for Direct-P or NVFP4 numerics, with float32 output and LSE unless said otherwise."""
    c = numerics.classifier
    given = {
        "classifier": c.kind,
        "A": c.A,
        "B": c.B,
        "A2": c.A2,
        "B2": c.B2,
        "density": c.density,
        "row_reference": numerics.row_reference,
        "p": numerics.p,
        "p_peak": numerics.p_peak,
        "folded": numerics.qk == "nvfp4-folded",
        "out": "f32",
        "lse": True,
    }
    return Options(**given | changes)


def _aligned(data: Any) -> Any:
    raw = np.zeros(data.nbytes + 1024, np.uint8)
    out = raw[-raw.ctypes.data % 1024 :][: data.nbytes]
    out[:] = data.reshape(-1).view(np.uint8)
    return out


def _tile(codes: Any) -> Any:
    """Codes [128, 128], the second index contiguous, packed and swizzled."""
    place = np.arange(8192)
    out = np.zeros(8192, np.uint8)
    out[place ^ ((place >> 3) & 0x30)] = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8).reshape(-1)
    return out


def _pages(scales: Any) -> Any:
    """Scale bytes [128, 4 n] as n pages."""
    row, k = np.meshgrid(np.arange(128), np.arange(scales.shape[1]), indexing="ij")
    out = np.zeros(scales.shape[1] // 4 * 512, np.uint8)
    out[k // 4 * 512 + row % 32 * 16 + row // 32 * 4 + k % 4] = scales
    return out


def _records(codes: Any, scales: Any) -> Any:
    """Codes and scales [h, tiles, 128, …] → records [h, tiles, bytes]."""
    heads, tiles = codes.shape[:2]
    joined = [[np.concatenate([_tile(codes[h, t]), _pages(scales[h, t])]) for t in range(tiles)] for h in range(heads)]
    return _aligned(np.array(joined))


def qk_records(x: Tensor, numerics: Numerics) -> Any:
    """Of q or k [h, S, 128], rounded; tokens beyond S are zeros."""
    x = pad(x, (0, 0, 0, -x.shape[1] % 128))
    rounded = formats.quantize_nvfp4(x, fold=numerics.qk == "nvfp4-folded")
    return _records(*(t.unflatten(1, (-1, 128)).numpy() for t in (rounded.codes, rounded.scales)))


def v_records(v: Tensor, numerics: Numerics) -> Any:
    """Of v [h, S, 128]."""
    v = pad(v, (0, 0, 0, -v.shape[1] % 128))
    quantize = formats.quantize_nvfp4 if numerics.v == "nvfp4" else formats.quantize_mxfp4_direct
    rounded = quantize(v, dim=1)
    blocks = 8 if numerics.v == "nvfp4" else 4
    codes = rounded.codes.transpose(1, 2).unflatten(2, (-1, 128)).transpose(1, 2)
    scales = rounded.scales.transpose(1, 2).unflatten(2, (-1, blocks)).transpose(1, 2)
    return _records(codes.contiguous().numpy(), scales.contiguous().numpy())


@dataclass
class Problem:
    """q, k, v ~ N(0, 1) in BF16 but for factors, and what the reference makes of them."""

    shape: tuple[int, int, int, int]  # batch, heads, queries, keys
    numerics: Numerics
    sharpness: float = 1.0
    offset: float = 0.0  # added to every logit, about
    seed: int = 0
    q: Tensor = field(init=False)
    k: Tensor = field(init=False)
    v: Tensor = field(init=False)

    def __post_init__(self) -> None:
        batch, heads, queries, keys = self.shape
        generator = torch.Generator().manual_seed(self.seed + queries + keys)

        def normal(tokens: int) -> Tensor:
            return torch.randn(batch, tokens, heads, 128, generator=generator)

        self.q = normal(queries) * self.sharpness
        self.k, self.v = normal(keys), normal(keys)
        if self.offset:  # channel 0 of q is 8, so k's adds offset to every logit
            self.q[..., 0], self.k[..., 0] = 8.0, self.offset / SCALE / 8
        self.q, self.k, self.v = (t.bfloat16() for t in (self.q, self.k, self.v))

    def want(self) -> reference.Result:
        """Output float32 and LSE."""
        return reference.attention(self.q, self.k, self.v.float(), self.numerics, scale=SCALE, return_lse=True)

    @property
    def margin(self) -> float:
        """Octaves."""
        return self.numerics.margin * (SCALE if self.numerics.margin_unit == "raw" else 1.0)


def run(
    gpu: simulator.Device,
    problem: Problem,
    options: Options,
    *,
    grid: int | None = None,
    guard: Any = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [B, Sq, H, 128] and LSE [B, H, Sq] of the kernel, from poisoned outputs; into `out` if given."""
    batch, heads, queries, keys = problem.shape
    q, k, v = (t.transpose(1, 2).flatten(0, 1).float() for t in (problem.q, problem.k, problem.v))
    order = reference.key_order(keys, problem.numerics.row_reference, k.device)
    if order is not None:
        k, v = k[:, order], v[:, order]
    q_, k_, v_ = qk_records(q, problem.numerics), qk_records(k, problem.numerics), v_records(v, problem.numerics)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[options.out]
    lse = torch.full((batch, heads, queries), math.nan)
    if out is None:
        out = torch.empty(problem.q.shape, dtype=dtype)
    out.fill_(math.nan)
    gpu.register(q=q_, k=k_, v=v_, out=out, lse=lse)
    if guard is not None:
        gpu.register(guard=guard)
    pairs = (-(-queries // 128) + 1) // 2
    arguments = (
        *(Int64(x.ctypes.data) for x in (q_, k_, v_)),
        *(Int64(x.data_ptr()) for x in (out, lse)),
        Int64(0),
        Int64(0 if guard is None else guard.ctypes.data),
        *(Int32(n) for n in (batch * heads, heads, queries, keys)),
        *(Int64(n) for n in out.stride()[:3]),
        Float32(SCALE * math.log2(math.e)),
        Float32(problem.margin),
        Int32(grid or batch * heads * pairs),
        driver.CUstream(0),
    )
    if options not in _compiled:
        _compiled[options] = cute.compile(Forward(options), *arguments)
    _compiled[options](*arguments)
    return out, lse


class Watched:
    """While active, keeps the codes and scale words that softmax threads publish, by CTA and warp, in their order.

    codes   [32 rows, 16 or 8 words]; scales [32 rows, 4 bytes] of a page.
    """

    def __init__(self, monkeypatch: Any) -> None:
        self.codes: dict[Any, list[Any]] = {}
        self.scales: dict[Any, list[Any]] = {}
        store, shared = CTA.tmem_store, CTA.store_shared

        def tmem_store(cta: Any, w: Any, address: int, shape: str, values: Any, poison: Any) -> None:
            if len(values) in (8, 16) and address & 127 in (64, 72):  # all codes of a tile, or half of them
                self._keep(self.codes, cta, w, np.stack(values, 1))
            store(cta, w, address, shape, values, poison)

        def store_shared(cta: Any, w: Any, address: Any, values: Any, poison: Any, m: Any) -> None:
            if values.shape[1] == 4 and len(set(address.tolist())) == 32:  # a word of each row; barriers' words are one
                self._keep(self.scales, cta, w, values.copy())
            shared(cta, w, address, values, poison, m)

        monkeypatch.setattr(CTA, "tmem_store", tmem_store)
        monkeypatch.setattr(CTA, "store_shared", store_shared)

    @staticmethod
    def _keep(where: dict[Any, list[Any]], cta: Any, w: Any, values: Any) -> None:
        where.setdefault((cta.block[0], w.index), []).append(values)

    def tiles(self, what: dict[Any, list[Any]], cta: int, stage: int) -> Any:
        """[128 rows, published tiles, …] of one CTA's stage."""
        warps = [np.stack(what[cta, 4 * stage + i], 1) for i in range(4)]
        return np.concatenate(warps)
