"""What each constant of a policy does and where it comes from, for `wanfp4 policies explain`."""

from __future__ import annotations

from dataclasses import dataclass

from wanfp4.policy import Classifier, Guard, Numerics, Policy, Rule, policies

PAPER = "arXiv 2609.04105 (Direct-P)"
PAPER_CODE = "the code published with arXiv 2609.04105"
HAO = "HAO AI Lab, flash-attention-fp4"
SAGE3 = "SageAttention3"
FLAMIA = "FLAMIA"
OURS = "this project"
EXACT = "no rounding"


@dataclass(frozen=True)
class Constant:
    """One field of a policy: its value, what it does, where the idea or the number comes from."""

    name: str
    value: str
    meaning: str
    source: str


_QK = {
    "exact": ("Q and K as they are.", EXACT),
    "nvfp4": (
        "Q and K as 4-bit E2M1 codes (0, .5, 1, 1.5, 2, 3, 4, 6 and a sign) with one 8-bit E4M3 scale per 16 values "
        "along the head dimension.",
        f"NVFP4; for attention {HAO}, {SAGE3}",
    ),
    "nvfp4-folded": (
        "NVFP4, but 16-value blocks b and b+4 of the 128 share a scale, so that both K=64 halves of a matrix product "
        "read the same scales. Of eleven candidates the scale with the least squared error over the 32 values wins.",
        f"{PAPER}; the candidates from {PAPER_CODE}",
    ),
    "mxfp8-token-block": (
        "Q and K as 8-bit E4M3 with one power-of-two exponent per 32 tokens × head dimension, for rows and columns.",
        FLAMIA,
    ),
}
_P = {
    "exact": ("Probabilities as they are.", EXACT),
    "bf16": ("Probabilities rounded to BF16.", "FastVideo, xDiT"),
    "mxfp4-direct": (
        "Probabilities as E2M1 codes made straight from the scores: a power-of-two amplitude per 32 keys, the nearest "
        "to the block's largest (arithmetic midpoint 1.5), on a grid of amplitude · code / 6. Not the OCP MXFP4 grid.",
        f"{PAPER}; the grid from {PAPER_CODE}",
    ),
    "nvfp4": ("Probabilities as E2M1 codes with one E4M3 scale per 16 keys.", f"NVFP4; {HAO}, {SAGE3}"),
    "fp8": ("Probabilities as 8-bit E4M3 without block scales.", HAO),
    "fp8-direct": (
        "Probabilities as E4M3 bytes straight from the scores: eight bytes are an octave, so a byte is a multiply-add "
        "and a rounding, no exponential.",
        f"{OURS}, after the principle of Direct-P: {PAPER}",
    ),
    "mxfp8": ("Probabilities as E4M3 with one power-of-two exponent per 32 keys.", FLAMIA),
}
_V = {
    "exact": ("V as it is.", EXACT),
    "bf16": ("V in BF16.", "FastVideo, xDiT"),
    "mxfp4-direct": ("V as E2M1 codes with a power-of-two amplitude per 32 keys, on P's grid.", PAPER),
    "nvfp4": ("V as E2M1 codes with one E4M3 scale per 16 keys.", f"NVFP4; {HAO}, {SAGE3}"),
    "fp8": ("V as 8-bit E4M3.", HAO),
    "mxfp8-token-block": ("V as E4M3 with one power-of-two exponent per 32 tokens × head dimension.", FLAMIA),
}
_CLASSIFIER = {
    "exp2": (
        "A score x becomes the value 2^x, which is then rounded: one exponential per element.",
        "the definition of softmax",
    ),
    "affine": (
        "A score x becomes A·x + B, then a code: one fused multiply-add instead of an exponential. The conversion to "
        "E2M1 clamps what is negative to 0.",
        PAPER,
    ),
    "mix": (
        "exp2 on fixed lanes of every 32 keys (a quarter of them per unit of density), A·x + B on the others.",
        f"{PAPER}; the lanes from {PAPER_CODE}",
    ),
    "two-piece": (
        "max(A·x + B, A2·x + B2): two multiply-adds and a maximum follow the exponential closely, without one.",
        OURS,
    ),
}
# Where the numbers of a classifier were found; a policy file may hold any others.
_COEFFICIENTS = {
    Classifier("affine", 1.50, 1.20): f"{PAPER}, its fastest setting",
    Classifier("affine", 1.60, 0.95): f"{PAPER}, tuned on Wan2.1",
    Classifier("mix", 1.65, 0.80, density=1): f"{PAPER}, its accurate setting",
    Classifier("two-piece", 0.5, 1.0, 2.2, -0.8): f"{OURS}: a coarse grid on Gaussian scores",
    Classifier("two-piece", 0.4, 1.1, 2.2, 0.0): f"{OURS}: a coarse grid on Gaussian scores",
}
_REFERENCE = {
    "shiftless": (
        "Nothing is subtracted from a row: the block exponents carry the magnitude, and no row maximum is computed. "
        "Rows whose exponents would leave the range are shifted by a whole number of octaves, which cancels exactly.",
        f"{PAPER}; the shift is {OURS}",
    ),
    "anchor32": ("The maximum over 32 evenly sampled keys stands in for the row maximum.", PAPER_CODE),
    "anchor128": ("The maximum over 128 evenly sampled keys stands in for the row maximum.", PAPER_CODE),
    "rowmax": ("The running maximum of the row, as in any FlashAttention.", "FlashAttention"),
}
_GUARDS = {
    (110.0, 16): f"{PAPER}, Algorithm 3, for Wan2.1 1.3B",
    (112.0, 14): f"{PAPER}, Algorithm 3, for Wan2.1 14B",
}


def explain(policy: Policy) -> list[Constant]:
    """Every constant of `policy` that takes part in what it computes."""
    constants = _numerics(policy.numerics, "")
    for i, rule in enumerate(policy.rules):
        constants.append(_rule(rule, i))
        constants += _numerics(rule.numerics, f"rules[{i}].")
    if policy.guard is not None:
        constants += _guard(policy.guard)
    if policy.min_tokens:
        meaning = "Shorter sequences keep the pipeline's own attention."
        constants.append(Constant("min_tokens", str(policy.min_tokens), meaning, _set_by(policy)))
    return constants


def _numerics(n: Numerics, prefix: str) -> list[Constant]:
    if n.is_exact:
        meaning = "Nothing is rounded: the pipeline's own attention runs."
        return [Constant(f"{prefix}numerics", "exact", meaning, EXACT)]
    found = [
        Constant(f"{prefix}{name}", value, *table[value])
        for name, value, table in (("qk", n.qk, _QK), ("p", n.p, _P), ("v", n.v, _V))
    ]
    if n.p in ("mxfp4-direct", "nvfp4"):
        meaning, source = _CLASSIFIER[n.classifier.kind]
        numbers = _COEFFICIENTS.get(n.classifier, "this policy")
        source = source if n.classifier.kind == "exp2" else f"{source}; the numbers: {numbers}"
        found.append(Constant(f"{prefix}classifier", n.classifier.label, meaning, source))
    found.append(Constant(f"{prefix}row_reference", n.row_reference, *_REFERENCE[n.row_reference]))
    if n.margin:
        found.append(Constant(f"{prefix}margin", f"{n.margin:g} ({n.margin_unit})", _margin(n.margin_unit), PAPER_CODE))
    if n.stored_shift:
        found.append(Constant(f"{prefix}stored_shift", str(n.stored_shift), _SHIFT, PAPER))
    if n.p_peak != 1:
        source = SAGE3 if n.p_peak == 2688 else OURS if n.classifier.kind == "two-piece" else HAO
        meaning = "The row's reference probability is scaled to this before rounding, to use the range of the scales."
        found.append(Constant(f"{prefix}p_peak", f"{n.p_peak:g}", meaning, source))
    if n.p not in ("exact", "bf16"):
        rounded = n.denominator == "codes"
        source = HAO if not rounded else PAPER if n.p == "mxfp4-direct" else f"{OURS}, after {PAPER}"
        meaning = (
            "The softmax denominator sums the same rounded codes as the numerator, so weights still add up to 1."
            if rounded
            else "The softmax denominator sums the probabilities before rounding."
        )
        found.append(Constant(f"{prefix}denominator", n.denominator, meaning, source))
    for name, on, meaning, source in (
        (
            "smooth_k",
            n.smooth_k,
            "K minus its mean over tokens: exact for softmax, and outlier channels shrink.",
            SAGE3,
        ),
        (
            "smooth_q",
            n.smooth_q,
            "Q minus the mean of each 128 tokens, whose product with K is added back in FP32.",
            SAGE3,
        ),
        ("smooth_v", n.smooth_v, "V minus its mean over tokens, added back to the output.", OURS),
        ("global_scale", n.global_scale, "One FP32 scale per tensor brings the largest block scale to 448.", "NVFP4"),
    ):
        if on:
            found.append(Constant(f"{prefix}{name}", "on", meaning, source))
    return found


_SHIFT = "The stored exponent byte of P is the working byte minus this: room for FP32 accumulation."


def _margin(unit: str) -> str:
    how = "M·ln 2/√128 after scaling" if unit == "raw" else "M octaves"
    return f"Added to the anchor ({how}), as a sampled maximum may be below the real one."


def _guard(guard: Guard) -> list[Constant]:
    known = _GUARDS.get((guard.margin, guard.stored_shift), "this policy")
    limit = "A call is guarded when a sample of its logits exceeds this in magnitude; no list of layers is kept."
    return [
        Constant("guard.margin", f"{guard.margin:g} ({guard.margin_unit})", _margin(guard.margin_unit), known),
        Constant("guard.stored_shift", str(guard.stored_shift), _SHIFT, known),
        Constant(
            "guard.logit_limit", f"{guard.logit_limit:g}", limit, f"{OURS}; {PAPER} finds ordinary layers below 60"
        ),
    ]


def _rule(rule: Rule, index: int) -> Constant:
    conditions = {"layers": rule.layers, "sigma": rule.sigma, "expert": rule.expert}
    value = ", ".join(f"{name} {value}" for name, value in conditions.items() if value is not None) or "always"
    return Constant(
        f"rules[{index}]", value, "Where it holds, other numerics run; the first rule that matches wins.", "this policy"
    )


def _set_by(policy: Policy) -> str:
    return OURS if policies().get(policy.name) == policy else "this policy"
