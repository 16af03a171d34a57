"""Which part of a policy makes its error, and which change would take some of it away.

The same q, k, v go through variants of the numerics that differ in one thing: one part exact, or one lever added.
Everything runs on the reference, in float32, for a sample of query rows; what the error is measured against is exact
attention of the same rows, so that neither a backend's nor the pipeline's own rounding is in it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wanfp4.errors import PolicyError
from wanfp4.kernels import reference
from wanfp4.policy import EXACT, Classifier, Numerics
from wanfp4.processors.session import Call
from wanfp4.quality.aggregate import Json, number
from wanfp4.quality.intervals import interval
from wanfp4.quality.metrics import from_sums, spread
from wanfp4.quality.shadow import Place, elements, error_sums, query_blocks

BASE = "as it is"
NONE = "Nothing was rounded in the sampled calls, so there is no error to attribute."
PART, LEVER = "part", "lever"
# Sampled query rows of a call: so many blocks of 128 tokens.
BLOCKS = 2
# Two-level scales of NVFP4 P: the row reference becomes the largest value that the format has (SageAttention3).
LARGEST_PEAK = 2688.0


@dataclass(frozen=True)
class Variant:
    """A change of numerics: `kind` is `PART` (one part exact) or `LEVER` (one thing added).

    numerics  None where it does not apply, with the reason in `note`; otherwise `note` says what else had to change.
    """

    name: str
    kind: str
    numerics: Numerics | None
    note: str = ""


def variants(numerics: Numerics) -> list[Variant]:
    """Every variant of `numerics`, those that do not apply included; names and order are always the same."""
    return [_variant(numerics, name, kind, change) for name, kind, change in _CHANGES]


# A change gives the fields to replace with a note, or why it does not apply.
_Change = Callable[[Numerics], tuple[dict[str, Any], str] | str]


def _variant(numerics: Numerics, name: str, kind: str, change: _Change) -> Variant:
    answer = change(numerics)
    if isinstance(answer, str):
        return Variant(name, kind, None, answer)
    fields, note = answer
    try:
        return Variant(name, kind, dataclasses.replace(numerics, **fields), note)
    except PolicyError as error:
        return Variant(name, kind, None, f"not legal: {error}")


def _qk_exact(n: Numerics) -> tuple[dict[str, Any], str] | str:
    if n.qk == "exact":
        return "Q and K are exact already"
    # Where nothing is rounded, smoothing changes nothing; the tensor scale needs NVFP4 operands.
    scaled = n.global_scale and n.v == "nvfp4"
    return {"qk": "exact", "smooth_k": False, "smooth_q": False, "global_scale": scaled}, ""


def _classifier_exp2(n: Numerics) -> tuple[dict[str, Any], str] | str:
    if n.p not in ("mxfp4-direct", "nvfp4"):
        return f"P in {n.p} has no classifier"
    return "it is exp2 already" if n.classifier.kind == "exp2" else ({"classifier": Classifier()}, "")


def _p_exact(n: Numerics) -> tuple[dict[str, Any], str] | str:
    if n.p == "exact":
        return "P is exact already"
    note = ""
    if n.row_reference != "rowmax":
        note = f"with row reference rowmax: {n.row_reference} changes nothing where P is exact"
    fields = {"p": "exact", "classifier": Classifier(), "row_reference": "rowmax", "margin": 0.0}
    return {**fields, "stored_shift": 0, "p_peak": 1.0, "denominator": "exact"}, note


def _v_exact(n: Numerics) -> tuple[dict[str, Any], str] | str:
    if n.v == "exact":
        return "V is exact already"
    scaled = n.global_scale and n.qk.startswith("nvfp4")
    return {"v": "exact", "smooth_v": False, "global_scale": scaled}, ""


def _smooth_k(n: Numerics) -> tuple[dict[str, Any], str] | str:
    if n.qk == "exact":
        return "Q and K are exact, so there is nothing to smooth"
    return "K is smoothed already" if n.smooth_k else ({"smooth_k": True}, "")


def _smooth_q(n: Numerics) -> tuple[dict[str, Any], str] | str:
    if n.qk == "exact":
        return "Q and K are exact, so there is nothing to smooth"
    return "Q is smoothed already" if n.smooth_q else ({"smooth_q": True}, "")


def _smooth_v(n: Numerics) -> tuple[dict[str, Any], str] | str:
    if n.v == "exact":
        return "V is exact, so there is nothing to smooth"
    return "V is smoothed already" if n.smooth_v else ({"smooth_v": True}, "")


def _all_smoothing(n: Numerics) -> tuple[dict[str, Any], str] | str:
    if n.qk == "exact" or n.v == "exact":
        return "K and V are not both rounded"
    if n.smooth_k or n.smooth_v:
        return "one of them is smoothed already"
    return {"smooth_k": True, "smooth_v": True}, ""


def _rowmax(n: Numerics) -> tuple[dict[str, Any], str] | str:
    if n.row_reference == "rowmax":
        return "it is the row maximum already"
    return {"row_reference": "rowmax", "margin": 0.0}, ""


def _anchor(n: Numerics) -> tuple[dict[str, Any], str] | str:
    if n.row_reference == "anchor128" and not n.margin:
        return "it is anchor128 without a margin already"
    return {"row_reference": "anchor128", "margin": 0.0}, ""


def _peak(n: Numerics) -> tuple[dict[str, Any], str] | str:
    if n.p != "nvfp4":
        return f"P in {n.p} has no two-level scales"
    if n.p_peak >= LARGEST_PEAK:
        return f"the row peak is {n.p_peak:g} already"
    return {"p_peak": LARGEST_PEAK}, ""


_CHANGES: tuple[tuple[str, str, _Change], ...] = (
    ("Q and K exact", PART, _qk_exact),
    ("classifier exp2", PART, _classifier_exp2),
    ("P exact", PART, _p_exact),
    ("V exact", PART, _v_exact),
    ("smooth K", LEVER, _smooth_k),
    ("smooth Q", LEVER, _smooth_q),
    ("smooth V", LEVER, _smooth_v),
    ("smooth K and V", LEVER, _all_smoothing),
    ("row maximum", LEVER, _rowmax),
    ("anchor128", LEVER, _anchor),
    ("row peak 2688", LEVER, _peak),
)
PARTS = tuple(name for name, kind, _ in _CHANGES if kind == PART)
LEVERS = tuple(name for name, kind, _ in _CHANGES if kind == LEVER)
NAMES = (BASE, *PARTS, *LEVERS)
# What a part is the cause of an error as.
_CAUSES = {
    "Q and K exact": "rounding Q and K",
    "classifier exp2": "the classifier",
    "P exact": "rounding P, the classifier included",
    "V exact": "rounding V",
}


@dataclass(frozen=True)
class Attributed:
    """One call: relative L2 of every one of `NAMES`.

    None where a variant does not apply to `numerics`; NaN where its result, or the exact one, holds NaN or infinity.
    """

    place: Place
    numerics: Numerics
    rel_l2: dict[str, float | None]


@torch.no_grad()
def attribute(call: Call, *, blocks: int = BLOCKS) -> Attributed:
    """Errors of a call's numerics and of all variants, for the queries of `blocks` evenly spaced 128-token blocks.

    Memory: float32 copies and roundings of some heads at a time, as many as `shadow.elements` allows, one at least. Of
    all heads only for numerics with a `global_scale`, which spans them.
    """
    tried = {variant.name: variant.numerics for variant in variants(call.numerics)}
    # Variants that agree are computed once.
    every = dict.fromkeys(n for n in (call.numerics, *tried.values()) if n is not None)
    index = torch.tensor(query_blocks(call.q.shape[1], blocks), device=call.q.device)
    batch, keys, heads, width = call.k.shape
    step = max(1, elements(call.k.device) // (batch * max(keys * width, len(index) * keys)))
    groups = [slice(start, start + step) for start in range(0, heads, step)]
    with torch.autocast(call.q.device.type, enabled=False):
        errors = {
            **_errors(call, index, groups, [n for n in every if not n.global_scale]),
            **_errors(call, index, [slice(heads)], [n for n in every if n.global_scale]),
        }
    found = {name: None if n is None else errors[n] for name, n in tried.items()}
    place = Place(call.expert, call.site.blocks, call.site.layer, call.step or 0, call.branch)
    return Attributed(place, call.numerics, {BASE: errors[call.numerics], **found})


def _errors(call: Call, index: Tensor, groups: Iterable[slice], tried: Sequence[Numerics]) -> dict[Numerics, float]:
    """Relative L2 of each numerics over all heads, from sums over groups of them."""
    if not tried:
        return {}
    rows = call.q.index_select(1, index)
    sums: dict[Numerics, Tensor] = {}
    for heads in groups:
        q, k, v = (t[:, :, heads].float() for t in (rows, call.k, call.v))
        exact = _attention(q, k, v, EXACT)
        for n in tried:
            here = error_sums(_attention(q, k, v, n), exact).sum(1)
            sums[n] = sums[n] + here if n in sums else here
    return {n: float(from_sums(*total.to("cpu", torch.float64))[1]) for n, total in sums.items()}


def _attention(q: Tensor, k: Tensor, v: Tensor, numerics: Numerics) -> Tensor:
    return reference.attention(q, k, v, numerics, scale=1 / math.sqrt(q.shape[-1])).out


def summarise(runs: Sequence[Sequence[Attributed]], prompts: Sequence[int]) -> Json:
    """The attribution section of a map: `runs` as recorded, `prompts` the prompt of each.

    Errors are medians over calls: NaN where one of them is, None where the variant applies to none. A change is the
    median over a run's calls of error / error as it is − 1, with its interval over runs. Variants that apply to no call
    are in `not_applicable` only, with the reason for each numerics.
    """
    calls = [call for run in runs for call in run]
    if not calls:
        return {
            "calls": 0,
            "broken": {},
            "names": [],
            "overall": {},
            "layers": [],
            "notes": [],
            "not_applicable": [],
            "sentence": NONE,
        }
    names = [n for n in NAMES if any(call.rel_l2[n] is not None for call in calls)]
    overall: Json = {}
    for name in names:
        per_run = [_change(run, name) for run in runs]
        used = [(p, c) for p, c in zip(prompts, per_run, strict=True) if c is not None]
        change = interval([c for _, c in used], [p for p, _ in used])
        overall[name] = {"rel_l2": _median(calls, name), "change": change.to_dict()}
    layers = []
    for where in dict.fromkeys(call.place[:3] for call in calls):
        here = [call for call in calls if call.place[:3] == where]
        errors = {name: _median(here, name) for name in names}
        layers.append({"expert": where[0], "blocks": where[1], "layer": where[2], "calls": len(here), "rel_l2": errors})
    notes: list[Json] = []
    missing: list[Json] = []
    for numerics in dict.fromkeys(call.numerics for call in calls):
        for variant in variants(numerics):
            if variant.note:
                said = {"name": variant.name, "numerics": numerics.label, "note": variant.note}
                (missing if variant.numerics is None else notes).append(said)
    broken = {name: sum(math.isnan(error) for error in _known(calls, name)) for name in names}
    return {
        "calls": len(calls),
        "broken": {name: count for name, count in broken.items() if count},
        "names": names,
        "overall": overall,
        "layers": layers,
        "notes": notes,
        "not_applicable": missing,
        "sentence": sentence(overall, broken.get(BASE, 0), len(calls)),
    }


def sentence(overall: Mapping[str, Any], broken: int = 0, calls: int = 0) -> str:
    """Which lever helps most and which part makes most of the error, in words; of `calls`, how many are `broken`."""

    def left(name: str) -> float:
        return float(overall[name]["rel_l2"])

    def change(name: str) -> float:
        return float(overall[name]["change"]["median"])

    # Of two infinite errors the change is NaN.
    bad = [name for name in overall if name != BASE and (math.isnan(left(name)) or math.isnan(change(name)))]
    if broken:
        whole = [name for name in overall if name != BASE and not math.isnan(left(name))]
        healed = f" (with {_listed(whole)} in none)" if whole else ""
        return (
            f"In {broken} of {calls} sampled calls the result holds NaN or infinity{healed}, so there is no median "
            "error to attribute."
        )
    levers = [name for name in LEVERS if name in overall and name not in bad]
    parts = [name for name in PARTS if name in overall and name not in bad]
    said = []
    if levers:
        lever = min(levers, key=change)
        spread = overall[lever]["change"]
        if float(spread["high"]) < 0 or (float(spread["median"]) < 0 and math.isnan(float(spread["high"]))):
            sure = (
                "one run, so without an interval"
                if math.isnan(float(spread["high"]))
                else f"95\u00a0% interval {_percent(spread['low'])} to {_percent(spread['high'])}"
            )
            said.append(
                f"The lever that helps most is {lever}: it takes the error of a call from {left(BASE):.3g} to "
                f"{left(lever):.3g} ({_percent(spread['median'])}, {sure})"
            )
        else:
            said.append(
                f"No lever helps beyond the spread of these runs; the best is {lever}, {_percent(change(lever))}"
            )
    if parts:
        part = min(parts, key=change)
        said.append(
            f"the largest part of the error comes from {_CAUSES[part]}: without it {left(part):.3g} would be left"
        )
    if bad:
        said.append(f"with {_listed(bad)} some calls give NaN or infinity")
    text = "; ".join(said)
    return f"{text[0].upper()}{text[1:]}." if said else NONE


def _listed(names: Sequence[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _percent(share: float | str) -> str:
    return f"{100 * float(share):+.1f}\u00a0%".replace("-", "\u2212")


def _known(calls: Sequence[Attributed], name: str) -> list[float]:
    """Errors of the calls that a variant applies to."""
    return [error for call in calls if (error := call.rel_l2[name]) is not None]


def _median(calls: Sequence[Attributed], name: str) -> float | str | None:
    values = _known(calls, name)
    return number(spread(values)["median"]) if values else None


def _change(run: Sequence[Attributed], name: str) -> float | None:
    ratios = []
    for call in run:
        error, base = call.rel_l2[name], call.rel_l2[BASE]
        if error is not None and base is not None:
            # Nothing to change where nothing is wrong; but NaN stays NaN.
            ratios.append(error / base - 1 if base else 0.0 * error)
    return spread(ratios)["median"] if ratios else None
