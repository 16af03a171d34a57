"""What a policy's attention costs in time, and how much of it is in 4 bits.

Costs are relative: the time of one self-attention over that of BF16 attention of the same shape. They come from
`wanfp4 bench --json`, or, without measurements, from a model on paper for Blackwell (B200), which docs/search.md
explains. Per tile of 128 queries × 128 keys of one head, in cycles of a multiprocessor:

    products       512 each for BF16 and FP32 operands, 256 for 8 bits, 128 for 4 bits (tensor core: 8192, 16384 and
                   32768 operations a cycle)
    exponentials   16384 scores at 16 a cycle, 113 of 128 of them on that unit, as flash-attn-4 divides them
    4-bit codes    354 to make the codes of P, counted on the compiled kernel (docs/sm100.md)

The largest of the three is the tile's time: they overlap. A model on paper knows no latency; times beat it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wanfp4.errors import SettingsError
from wanfp4.policy import Numerics, Policy
from wanfp4.quality.results import BENCH

MODEL = "model on paper for Blackwell (docs/search.md)"

_PRODUCT = {4: 128.0, 8: 256.0, 16: 512.0}
_EXPONENTIALS = 16384 / 16 * 113 / 128
_CODES = 354.0
_BF16 = max(2 * _PRODUCT[16], _EXPONENTIALS)
_BITS = {
    "exact": 16,
    "bf16": 16,
    "fp8": 8,
    "fp8-direct": 8,
    "mxfp8": 8,
    "mxfp8-token-block": 8,
    "nvfp4": 4,
    "nvfp4-folded": 4,
    "mxfp4-direct": 4,
}
BASELINES = ("sdpa cudnn", "sdpa", "bf16")


def product_bits(numerics: Numerics) -> tuple[int, int]:
    """Bits of the wider operand of Q·Kᵀ and of P·V: 4, 8 or 16 (for whatever is wider)."""
    return _BITS[numerics.qk], max(_BITS[numerics.p], _BITS[numerics.v])


def share_in_4_bits(numerics: Numerics) -> float:
    """Share of attention's multiply-adds whose operands both have 4 bits: 0, 0.5 or 1; its two products are alike."""
    return sum(bits == 4 for bits in product_bits(numerics)) / 2


def modelled(numerics: Numerics) -> float:
    """Time of a self-attention over BF16's, by the model on paper above."""
    if numerics.is_exact:
        return 1.0
    products = sum(_PRODUCT[bits] for bits in product_bits(numerics))
    if numerics.p == "fp8-direct" or numerics.classifier.kind in ("affine", "two-piece"):
        exponentials = 0.0
    else:
        exponentials = numerics.classifier.density / 4 if numerics.classifier.kind == "mix" else 1.0
    codes = _CODES if _BITS[numerics.p] == 4 else 0.0
    return max(products, exponentials * _EXPONENTIALS, codes) / _BF16


def measured(
    policies: Sequence[Policy], bench: str | Path, backend: str | None, tokens: int
) -> tuple[list[float], str]:
    """Times over BF16's from `wanfp4 bench --json`, of the shape nearest to `tokens`; and where from, in words.

    A row belongs to a policy by its name, with `backend` as bench writes it ("wan-fast / triton") if one is named.
    Raises SettingsError when the file is none, or lacks a policy or the BF16 attention to compare with.
    """
    try:
        data = json.loads(Path(bench).read_text(encoding="utf-8"))
        rows = [row for row in data["attention"] if row["times"]] if data["kind"] == BENCH.kind else None
        if rows is None:
            raise ValueError(f"its kind is {data['kind']!r}, not {BENCH.kind!r}")
        if not rows:
            raise ValueError("it has no times of attention; make some with wanfp4 bench --shape TOKENSxHEADS --json")
        row = min(rows, key=lambda one: abs(math.log(one["tokens"] / tokens)))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SettingsError(f"cannot read times from {str(bench)!r}: {error}") from None
    times: Mapping[str, Any] = row["times"]
    base = next((name for name in BASELINES if "median" in times.get(name, {})), None)
    where = f"{str(bench)!r}, {row['tokens']} tokens × {row['heads']} heads"
    if base is None:
        raise SettingsError(f"{where} has no time of BF16 attention ({', '.join(BASELINES)}) to compare with")
    found = []
    for policy in policies:
        names = [f"{policy.name} / {backend}"] if backend else [policy.name]
        names += [name for name in times if backend is None and name.startswith(f"{policy.name} / ")]
        known = [float(times[name]["median"]) for name in names if "median" in times.get(name, {})]
        if not known:
            has = ", ".join(name for name, one in times.items() if "median" in one)
            raise SettingsError(f"{where} has no time of {names[0]!r}; it has {has}")
        found.append(min(known) / float(times[base]["median"]))
    return (
        found,
        f"measured by wanfp4 bench on {data['machine'].get('name', 'an unnamed machine')}: {where}, over {base}",
    )
