"""Policies: frozen, serialisable descriptions of what attention computes, and where in a model.

`Numerics` says how one attention is computed: the formats of Q, K, P and V, the classifier that turns scores into
codes, the row reference, smoothing. `Policy` adds where: rules by layer, sigma and expert, a minimum length, a guard
for layers with extreme logits. Neither says on what hardware; that is a backend's business (`wanfp4.kernels.dispatch`).

Everything is validated when it is made, so a `Policy` that exists can be run by the reference.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from wanfp4 import checks
from wanfp4.errors import PolicyError

SCHEMA_VERSION = 1

QK_FORMATS = ("exact", "nvfp4", "nvfp4-folded", "mxfp8-token-block")
P_FORMATS = ("exact", "bf16", "mxfp4-direct", "nvfp4", "fp8", "fp8-direct", "mxfp8")
V_FORMATS = ("exact", "bf16", "mxfp4-direct", "nvfp4", "fp8", "mxfp8-token-block")
CLASSIFIERS = ("exp2", "affine", "mix", "two-piece")
ROW_REFERENCES = ("shiftless", "anchor32", "anchor128", "rowmax")
MARGIN_UNITS = ("raw", "log2")
DENOMINATORS = ("codes", "exact")
EXPERTS = ("transformer", "transformer_2")
MAX_STORED_SHIFT = 64


@dataclass(frozen=True)
class Classifier:
    """How a block-relative score x (2^x = 6·p/α for the block amplitude α) becomes the value u that E2M1 rounds.

    `exp2`       u = 2^x: one exponential per element.
    `affine`     u = A·x + B: one fused multiply-add, no exponential (arXiv 2609.04105, Direct-P).
    `mix`        exp2 on fixed lanes of every 32-key block, affine elsewhere; `density` 1, 2 or 4 pairs per quarter.
    `two-piece`  u = max(A·x + B, A2·x + B2): no exponential, close to exp2 in accuracy.
    """

    kind: str = "exp2"
    A: float = 0.0
    B: float = 0.0
    A2: float = 0.0
    B2: float = 0.0
    density: int = 0

    def __post_init__(self) -> None:
        checks.choose("classifier", "kind", self.kind, CLASSIFIERS)
        for name in ("A", "B", "A2", "B2"):
            checks.number("classifier", name, getattr(self, name), -16, 16)
        checks.choose("classifier", "density", self.density, (1, 2, 4) if self.kind == "mix" else (0,))
        used = {"exp2": (), "affine": ("A", "B"), "mix": ("A", "B"), "two-piece": ("A", "B", "A2", "B2")}[self.kind]
        for name in ("A", "B", "A2", "B2"):
            if name not in used and getattr(self, name) != 0:
                raise PolicyError(f"classifier.{name} has no meaning for kind {self.kind!r}; leave it 0")
        slopes = [getattr(self, name) for name in ("A", "A2") if name in used]
        if any(slope <= 0 for slope in slopes):
            raise PolicyError(f"classifier slopes must be positive, or larger scores get smaller codes; found {slopes}")
        # A block's largest score has x >= log2(6) - 0.41504 - 1 ulp; if its code were 0, a whole row could vanish.
        if self.kind != "exp2" and self.at(math.log2(6) - 0.4151) <= 0.25:
            raise PolicyError(f"classifier {self.label} gives code 0 to a block's largest score; raise A or B")

    def at(self, x: float) -> float:
        """u(x) for one score: the affine part for `mix`."""
        if self.kind == "exp2":
            return float(2.0**x)
        first = self.A * x + self.B
        return max(first, self.A2 * x + self.B2) if self.kind == "two-piece" else first

    @property
    def label(self) -> str:
        if self.kind == "exp2":
            return "exp2"
        if self.kind == "affine":
            return f"affine({self.A:g}, {self.B:g})"
        if self.kind == "mix":
            return f"mix({self.A:g}, {self.B:g}, density {self.density})"
        return f"two-piece({self.A:g}, {self.B:g}, {self.A2:g}, {self.B2:g})"


@dataclass(frozen=True)
class Numerics:
    """How one attention is computed. docs/numerics.md defines every field; the torch reference implements them.

    qk             operands of Q·Kᵀ: `exact` (as given), `nvfp4`, `nvfp4-folded` (K64), `mxfp8-token-block`.
    p, v           probabilities and values: `exact`, `bf16`, `mxfp4-direct`, `nvfp4`, `fp8`, `fp8-direct` and `mxfp8`
                   (P), `mxfp8-token-block` (V).
    classifier     score to code, for `mxfp4-direct` and `nvfp4` P.
    row_reference  what is subtracted from a row's scores: 0, the maximum over an anchor of sampled keys, or the running
                   row maximum; `margin` is added to it, in raw accumulator units (M·ln 2/√D) or in octaves (`log2`).
    stored_shift   L: the stored E8M0 byte of P is the working byte minus L, headroom for FP32 accumulation.
    p_peak         what a row's reference probability (1) is scaled to before rounding, for formats with range limits.
    denominator    `codes`: summed from the same rounded codes as the numerator; `exact`: from the unrounded values.
    smooth_k/q/v   subtract K's token mean, Q's 128-token block means, V's token mean (added back where it is due).
    global_scale   NVFP4 operands of Q, K and V get one FP32 scale per tensor, so that the largest block scale is 448.
    """

    qk: str = "exact"
    p: str = "exact"
    v: str = "exact"
    classifier: Classifier = field(default_factory=Classifier)
    row_reference: str = "rowmax"
    margin: float = 0.0
    margin_unit: str = "raw"
    stored_shift: int = 0
    p_peak: float = 1.0
    denominator: str = "exact"
    smooth_k: bool = False
    smooth_q: bool = False
    smooth_v: bool = False
    global_scale: bool = False

    def __post_init__(self) -> None:
        classifier: object = self.classifier  # a JSON object when the policy comes from a file
        if not isinstance(classifier, Classifier):
            object.__setattr__(self, "classifier", checks.build(Classifier, classifier, "numerics.classifier"))
        for name, allowed in (
            ("qk", QK_FORMATS),
            ("p", P_FORMATS),
            ("v", V_FORMATS),
            ("row_reference", ROW_REFERENCES),
            ("margin_unit", MARGIN_UNITS),
            ("denominator", DENOMINATORS),
        ):
            checks.choose("numerics", name, getattr(self, name), allowed)
        checks.number("numerics", "margin", self.margin, 0, 126)
        checks.number("numerics", "stored_shift", self.stored_shift, 0, MAX_STORED_SHIFT, whole=True)
        checks.number("numerics", "p_peak", self.p_peak, 2**-8, 2688)
        for name in ("smooth_k", "smooth_q", "smooth_v", "global_scale"):
            checks.flag("numerics", name, getattr(self, name))
        direct = self.p == "mxfp4-direct"
        if self.classifier.kind != "exp2" and self.p not in ("mxfp4-direct", "nvfp4"):
            raise PolicyError(f"classifier {self.classifier.label} makes 4-bit codes, but numerics.p is {self.p!r}")
        if self.classifier.kind == "mix" and not direct:
            raise PolicyError("classifier 'mix' is defined on the 32-key blocks of p='mxfp4-direct' only")
        if not direct and self.row_reference == "shiftless":
            raise PolicyError(
                f"row_reference 'shiftless' needs p='mxfp4-direct', whose E8M0 block scales carry the magnitude; "
                f"p={self.p!r} needs 'anchor32', 'anchor128' or 'rowmax'"
            )
        if not direct and self.stored_shift:
            raise PolicyError(f"stored_shift shifts E8M0 bytes of p='mxfp4-direct'; with p={self.p!r} it must be 0")
        if direct and self.p_peak != 1:
            raise PolicyError("p_peak has no meaning for p='mxfp4-direct' (powers of two cancel); leave it 1")
        if self.global_scale and not {"nvfp4", "nvfp4-folded"} & {self.qk, self.v}:
            raise PolicyError(f"global_scale scales NVFP4 operands; qk is {self.qk!r} and v is {self.v!r}")
        if self.margin and not self.row_reference.startswith("anchor"):
            raise PolicyError(f"margin belongs to an anchor; row_reference is {self.row_reference!r}")
        if self.p in ("exact", "bf16") and self.denominator == "codes":
            raise PolicyError(f"denominator 'codes' needs rounded codes; numerics.p is {self.p!r}")

    @property
    def is_exact(self) -> bool:
        """True when nothing is rounded or smoothed: the pipeline's own attention."""
        smooth = self.smooth_k or self.smooth_q or self.smooth_v
        return self.qk == self.p == self.v == "exact" and self.row_reference == "rowmax" and not smooth

    @property
    def anchors(self) -> int:
        """How many evenly spaced keys stand first and give the row reference; 0 without anchors."""
        return int(self.row_reference.removeprefix("anchor")) if self.row_reference.startswith("anchor") else 0

    @property
    def label(self) -> str:
        """Short text for receipts, without the policy's name."""
        if self.is_exact:
            return "exact"
        smooth = "".join(c for c, on in zip("KQV", (self.smooth_k, self.smooth_q, self.smooth_v), strict=True) if on)
        parts = [f"QK {self.qk}", f"P {self.p}", f"V {self.v}"]
        if self.p in ("mxfp4-direct", "nvfp4"):
            parts.append(self.classifier.label)
        parts.append(self.row_reference)
        return ", ".join(parts + ([f"smooth {smooth}"] if smooth else []))


EXACT = Numerics()


@dataclass(frozen=True)
class Guard:
    """The paper's Algorithm 3, for layers whose logits are extreme: anchor128 plus a margin, and a stored shift.

    A call is guarded when a sample of its logits exceeds `logit_limit` in magnitude (natural units, after 1/√D).
    `margin` is M and `stored_shift` L of arXiv 2609.04105; `margin_unit` as in `Numerics`. M + L must not exceed 126.
    """

    margin: float = 110.0
    stored_shift: int = 16
    margin_unit: str = "raw"
    logit_limit: float = 60.0

    def __post_init__(self) -> None:
        checks.number("guard", "margin", self.margin, 0, 126)
        checks.number("guard", "stored_shift", self.stored_shift, 0, MAX_STORED_SHIFT, whole=True)
        checks.choose("guard", "margin_unit", self.margin_unit, MARGIN_UNITS)
        checks.number("guard", "logit_limit", self.logit_limit, 0, 1e6)
        if self.margin + self.stored_shift > 126:
            raise PolicyError(
                f"guard: margin + stored_shift must be at most 126, found {self.margin:g} + {self.stored_shift}"
            )

    def apply(self, numerics: Numerics) -> Numerics:
        """`numerics` as a guarded call computes it; only Direct-P has scale bytes to guard, others come back as is."""
        if numerics.p != "mxfp4-direct":
            return numerics
        return dataclasses.replace(
            numerics,
            row_reference="anchor128",
            margin=self.margin,
            margin_unit=self.margin_unit,
            stored_shift=self.stored_shift,
        )


def guarded(numerics: Numerics, guard: Guard | None) -> Numerics:
    """What a call computes where its guard, if it has one, takes effect."""
    return numerics if guard is None else guard.apply(numerics)


def guarding(numerics: Numerics, guard: Guard | None) -> bool:
    """Whether a call's guard has something to decide."""
    return guarded(numerics, guard) != numerics


@dataclass(frozen=True)
class Rule:
    """Other numerics for a part of the model or of the noise schedule. A condition that is None always holds.

    numerics  a `Numerics`, or a preset's name ("bf16" keeps the pipeline's own attention).
    layers    transformer block indices; negative ones count from the end.
    sigma     (low, high), both included, in [0, 1]: the noise level, not the step, so that 20 and 50 steps agree.
    expert    "transformer" (high noise in Wan2.2) or "transformer_2".
    """

    numerics: Numerics
    layers: tuple[int, ...] | None = None
    sigma: tuple[float, float] | None = None
    expert: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "numerics", _numerics(self.numerics, "rule.numerics"))
        if self.layers is not None:
            layers = checks.sequence("rule", "layers", self.layers)
            for layer in layers:
                checks.number("rule", "layers", layer, -10_000, 10_000, whole=True)
            if not layers:
                raise PolicyError("rule.layers is empty, so the rule can never apply; leave it out to mean every layer")
            object.__setattr__(self, "layers", layers)
        if self.sigma is not None:
            sigma = checks.sequence("rule", "sigma", self.sigma)
            if len(sigma) != 2:
                raise PolicyError(f"rule.sigma must be two numbers (low, high), not {self.sigma!r}")
            for value in sigma:
                checks.number("rule", "sigma", value, 0, 1)
            if sigma[0] > sigma[1]:
                raise PolicyError(f"rule.sigma has low > high: {sigma[0]:g} > {sigma[1]:g}")
            object.__setattr__(self, "sigma", (float(sigma[0]), float(sigma[1])))
        if self.expert is not None:
            checks.choose("rule", "expert", self.expert, EXPERTS)

    def matches(self, layer: int, num_layers: int, sigma: float | None, expert: str) -> bool:
        if self.layers is not None and layer not in {n + num_layers if n < 0 else n for n in self.layers}:
            return False
        if self.expert is not None and expert != self.expert:
            return False
        return self.sigma is None or (sigma is not None and self.sigma[0] <= sigma <= self.sigma[1])


class Resolution(NamedTuple):
    """What one attention call computes, why it is the pipeline's own attention where it is, and whether that is a
    fallback rather than the policy's wish."""

    numerics: Numerics
    reason: str | None
    fallback: bool = False


@dataclass(frozen=True)
class Policy:
    """What a model's self-attention computes. Use a preset by name, or build one and pass it anywhere a name goes.

    name         for reports and receipts.
    numerics     what runs where no rule applies.
    rules        the first that matches wins.
    guard        for layers with extreme logits; None never guards.
    min_tokens   shorter sequences keep the pipeline's own attention.
    description  one sentence for people.
    """

    name: str
    numerics: Numerics = EXACT
    rules: tuple[Rule, ...] = ()
    guard: Guard | None = None
    min_tokens: int = 0
    description: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise PolicyError(f"policy.name must be a text that is not empty, not {self.name!r}")
        if not isinstance(self.description, str):
            raise PolicyError(f"policy.description must be a text, not {self.description!r}")
        object.__setattr__(self, "numerics", _numerics(self.numerics, "policy.numerics"))
        rules = tuple(
            r if isinstance(r, Rule) else checks.build(Rule, r, f"policy.rules[{i}]")
            for i, r in enumerate(checks.sequence("policy", "rules", self.rules))
        )
        object.__setattr__(self, "rules", rules)
        guard: object = self.guard  # a JSON object when the policy comes from a file
        if guard is not None and not isinstance(guard, Guard):
            object.__setattr__(self, "guard", checks.build(Guard, guard, "policy.guard"))
        checks.number("policy", "min_tokens", self.min_tokens, 0, 2**40, whole=True)

    @property
    def rounding(self) -> tuple[Numerics, ...]:
        """The numerics of the policy and its rules that a backend must run: those that are not exact."""
        return tuple(n for n in (self.numerics, *(rule.numerics for rule in self.rules)) if not n.is_exact)

    def resolve(
        self, *, layer: int, num_layers: int, sigma: float | None, expert: str = "transformer", tokens: int
    ) -> Resolution:
        """What one attention call computes; `sigma` is None where the pipeline does not tell it."""
        if tokens < self.min_tokens:
            return Resolution(EXACT, f"{tokens} tokens, fewer than min_tokens={self.min_tokens}")
        for i, rule in enumerate(self.rules):
            if rule.sigma is not None and sigma is None and rule.matches(layer, num_layers, rule.sigma[0], expert):
                return Resolution(EXACT, f"rules[{i}] asks for sigma, which this pipeline does not tell", fallback=True)
            if rule.matches(layer, num_layers, sigma, expert):
                return Resolution(rule.numerics, f"rules[{i}]" if rule.numerics.is_exact else None)
        return Resolution(self.numerics, f"policy {self.name!r}" if self.numerics.is_exact else None)

    def with_(self, **changes: Any) -> Policy:
        """A copy with fields of the policy changed: `policy.with_(name="mine", min_tokens=1024)`."""
        names = [f.name for f in dataclasses.fields(self)]
        unknown = sorted(set(changes) - set(names))
        if unknown:
            raise PolicyError(f"policy has no field {', '.join(map(repr, unknown))}; its fields are {', '.join(names)}")
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The policy as plain JSON values, every constant spelt out, with the schema version."""
        return {"schema": SCHEMA_VERSION, **json.loads(json.dumps(dataclasses.asdict(self)))}

    def to_json(self, path: str | Path | None = None) -> str:
        """JSON text; also written to `path` when one is given."""
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_dict(cls, data: object) -> Policy:
        """Inverse of `to_dict`. Raises `PolicyError` on unknown names, fields, values or a schema it does not know."""
        if not isinstance(data, Mapping):
            raise PolicyError(f"a policy must be a JSON object, not {type(data).__name__}")
        data = dict(data)
        version = data.pop("schema", None)
        if version != SCHEMA_VERSION:
            raise PolicyError(f"policy has schema {version!r}; this version of wanfp4 reads schema {SCHEMA_VERSION}")
        if "name" not in data:
            raise PolicyError("policy has no field 'name'")
        return checks.build(cls, data, "policy")

    @classmethod
    def from_json(cls, source: str | Path) -> Policy:
        """From JSON text, or from a file when `source` is a path or a text that does not start with a brace."""
        text = str(source)
        if isinstance(source, Path) or not text.lstrip().startswith("{"):
            try:
                text = Path(source).read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                raise PolicyError(f"cannot read policy file {str(source)!r}: {error}") from None
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PolicyError(f"policy is not JSON: {error}") from None
        return cls.from_dict(data)


def _numerics(value: object, where: str) -> Numerics:
    if isinstance(value, Numerics):
        return value
    if isinstance(value, str):
        return get_policy(value).numerics
    return checks.build(Numerics, value, where)


def policies() -> dict[str, Policy]:
    """The named presets, in the order of the documentation; a new dict each time."""
    from wanfp4.presets import presets  # presets are policies, so that module needs this one first

    return {policy.name: policy for policy in presets()}


def get_policy(policy: str | Path | Policy) -> Policy:
    """A `Policy` from itself, a preset's name, or the path of a JSON file (anything that ends in .json).

    Raises PolicyError, also for a policy with a preset's name and other numerics: receipts and reports go by the name.
    """
    known = policies()
    if isinstance(policy, str) and policy in known:
        return known[policy]
    if isinstance(policy, Path) or (isinstance(policy, str) and policy.endswith(".json")):
        policy = Policy.from_json(Path(policy))
    if not isinstance(policy, Policy):
        hint = "'auto' is for patch and generate; " if policy == "auto" else ""
        raise PolicyError(f"unknown policy {policy!r}; {hint}presets are {', '.join(known)}; a path must end in .json")
    if policy.name in known and policy.numerics != known[policy.name].numerics:
        raise PolicyError(f"policy {policy.name!r} has other numerics than the preset of that name; give it a new name")
    return policy
