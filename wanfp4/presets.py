"""The named policies: Wan's defaults, the papers' operating points, and what they are compared with."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from wanfp4.policy import EXACT, Classifier, Guard, Numerics, Policy


def _direct(classifier: Classifier, **changes: Any) -> Numerics:
    """Direct-P on MXFP4 P and V: shiftless with L = 16 unless said otherwise."""
    base = Numerics(
        qk="nvfp4-folded",
        p="mxfp4-direct",
        v="mxfp4-direct",
        classifier=classifier,
        row_reference="shiftless",
        stored_shift=16,
        denominator="codes",
    )
    return dataclasses.replace(base, **changes)


@functools.cache
def presets() -> tuple[Policy, ...]:
    """All presets, in the order of docs/numerics.md, which holds their figures and sources."""
    wan = _direct(Classifier("affine", 1.60, 0.95))
    two_piece_nv = Numerics(
        qk="nvfp4-folded",
        p="nvfp4",
        v="nvfp4",
        classifier=Classifier("two-piece", 0.4, 1.1, 2.2, 0.0),
        p_peak=256.0,
        denominator="codes",
    )
    nvfp4 = Numerics(qk="nvfp4", p="nvfp4", v="nvfp4")
    mxfp8 = Numerics(
        qk="mxfp8-token-block", p="mxfp8", v="mxfp8-token-block", row_reference="anchor128", denominator="codes"
    )
    return (
        Policy("bf16", EXACT, description="The pipeline's own attention: the reference everything is compared with."),
        Policy(
            "wan-fast",
            wan,
            guard=Guard(110, 16),
            description="Direct-P with the constants tuned for Wan; guard values of Wan2.1 1.3B. The default.",
        ),
        Policy(
            "wan-fast-14b",
            wan,
            guard=Guard(112, 14),
            description="wan-fast with the guard values of Wan2.1 14B.",
        ),
        Policy(
            "wan-two-piece",
            _direct(Classifier("two-piece", 0.5, 1.0, 2.2, -0.8)),
            guard=Guard(110, 16),
            description="Direct-P with two affine pieces: the accuracy of an exponential without one.",
        ),
        Policy(
            "wan-two-piece-nv",
            two_piece_nv,
            description="Two affine pieces on NVFP4 P and V (E4M3 scales per 16): close to nvfp4, no exponential.",
        ),
        Policy(
            "direct-p-fast",
            _direct(Classifier("affine", 1.50, 1.20)),
            description="The paper's fastest policy: affine classifier, no row reference.",
        ),
        Policy(
            "direct-p-accurate",
            _direct(
                Classifier("mix", 1.65, 0.80, density=1),
                qk="nvfp4",
                row_reference="anchor32",
                margin=64.0,
                stored_shift=8,
            ),
            description="The paper's accurate policy: a quarter of the scores through exp2, a 32-key anchor.",
        ),
        Policy(
            "direct-p-exp2",
            _direct(Classifier("exp2"), row_reference="anchor32"),
            description="Direct-P formats with an exponential on every score: what the affine map gives up.",
        ),
        Policy("nvfp4", nvfp4, description="HAO AI Lab's NV/NV: NVFP4 Q, K, P and V, one scale level for P."),
        Policy(
            "sage3",
            dataclasses.replace(nvfp4, p_peak=2688.0, smooth_k=True, smooth_q=True),
            description="SageAttention3: K and Q smoothing, two-level P scales whose row peak is 448·6.",
        ),
        Policy(
            "nvfp4-fp8",
            Numerics(qk="nvfp4", p="fp8", v="fp8", p_peak=256.0),
            description="HAO AI Lab's NV/FP8: NVFP4 Q and K, E4M3 P and V.",
        ),
        Policy(
            "nvfp4-bf16",
            Numerics(qk="nvfp4", p="bf16", v="bf16"),
            description="NVFP4 Q and K, BF16 P and V: the error of Q and K rounding alone.",
        ),
        Policy(
            "mxfp8-token-block",
            mxfp8,
            description="E4M3 everywhere, one exponent per 32 tokens (after FLAMIA): the most accurate 8-bit policy.",
        ),
        Policy(
            "fp8-direct",
            dataclasses.replace(mxfp8, p="fp8-direct", p_peak=256.0),
            description="mxfp8-token-block with the bytes of P straight from scores, as Direct-P: no exponential.",
        ),
    )
