"""Backends, and which of them runs an attention call.

A backend runs numerics or says why it cannot; nothing here falls back silently. `attention` is the public function;
the Wan processor calls `run` with a policy's resolved numerics and keeps the reasons for its receipt.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wanfp4.errors import BackendError, UnsupportedInputError
from wanfp4.kernels import emulated, reference
from wanfp4.kernels.blackwell import backend as sm100
from wanfp4.kernels.hopper import ada as sm89
from wanfp4.kernels.hopper import backend as sm90
from wanfp4.policy import Guard, Numerics, Policy, get_policy, guarded, guarding

HEAD_DIM = 128


@dataclass(frozen=True)
class Outcome:
    """What one attention call gave.

    out      [B, Sq, H, D] in the dtype of v.
    lse      [B, H, Sq] float32, natural logarithm, or None when it was not asked for.
    backend  name of the backend that ran.
    notes    counts worth a line in a receipt: `guarded`, `rows_shifted` (rows whose exponents needed a shift), and
             `guard_decisions_on_device` where nobody waited to hear whether the call was guarded.
    flag     then an int32 tensor [1] on the device that will say so: 1 for guarded. Reading it waits.
    """

    out: Tensor
    lse: Tensor | None
    backend: str
    notes: dict[str, int] = field(default_factory=dict)
    flag: Tensor | None = None


def _takes_all(
    q: Tensor, k: Tensor, v: Tensor, numerics: Numerics, guard: Guard | None, scale: float, return_lse: bool
) -> str | None:
    return None


@dataclass(frozen=True)
class Backend:
    """One way to run attention, as data: who it is, whether it is there, what it takes, how it runs.

    missing   None when this machine can run it, else a sentence: what was found and what is needed.
    refuses   None when it takes these numerics on this device, else a sentence.
    declines  None when it takes these tensors with this guard and scale, too, else a sentence.
    native    True when it runs numerics on hardware made for their formats; emulation brings no speed.
    """

    name: str
    summary: str
    native: bool
    missing: Callable[[], str | None]
    refuses: Callable[[Numerics, torch.device], str | None]
    run: Callable[[Tensor, Tensor, Tensor, Numerics, Guard | None, float, bool], Outcome]
    declines: Callable[[Tensor, Tensor, Tensor, Numerics, Guard | None, float, bool], str | None] = _takes_all

    def why_not(self, numerics: Numerics, device: torch.device) -> str | None:
        return self.missing() or self.refuses(numerics, device)


def _sm100(
    q: Tensor, k: Tensor, v: Tensor, numerics: Numerics, guard: Guard | None, scale: float, return_lse: bool
) -> Outcome:
    done = sm100.run(q, k, v, numerics, guard, scale, return_lse)
    notes = {} if done.flag is None else {"guard_decisions_on_device": 1}
    return Outcome(done.out, done.lse, "sm100", notes, done.flag)


def _sm90(
    q: Tensor, k: Tensor, v: Tensor, numerics: Numerics, guard: Guard | None, scale: float, return_lse: bool
) -> Outcome:
    return Outcome(*sm90.run(q, k, v, numerics, scale, return_lse), "sm90")


def _sm89(
    q: Tensor, k: Tensor, v: Tensor, numerics: Numerics, guard: Guard | None, scale: float, return_lse: bool
) -> Outcome:
    return Outcome(*sm89.run(q, k, v, numerics, scale, return_lse), "sm89")


def _triton(
    q: Tensor, k: Tensor, v: Tensor, numerics: Numerics, guard: Guard | None, scale: float, return_lse: bool
) -> Outcome:
    done = emulated.run(q, k, v, numerics, guard, scale, return_lse)
    notes = {} if done.flag is None else {"guard_decisions_on_device": 1}
    return Outcome(done.out, done.lse, "triton", notes, done.flag)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, numerics: Numerics, guard: Guard | None, scale: float, return_lse: bool
) -> Outcome:
    q_, k_, v_ = (t.to(v.dtype).transpose(1, 2) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q_, k_, v_, scale=scale)
    lse = reference.exact_lse(q, k, scale) if return_lse else None
    return Outcome(out.transpose(1, 2), lse, "sdpa")


def _reference(
    q: Tensor, k: Tensor, v: Tensor, numerics: Numerics, guard: Guard | None, scale: float, return_lse: bool
) -> Outcome:
    notes: dict[str, int] = {}
    if guard is not None and guarding(numerics, guard) and reference.sampled_logit(q, k, scale) > guard.logit_limit:
        numerics = guarded(numerics, guard)
        notes["guarded"] = 1
    result = reference.attention(q, k, v, numerics, scale=scale, return_lse=return_lse)
    if result.rows_shifted:
        notes["rows_shifted"] = result.rows_shifted
    return Outcome(result.out, result.lse, "reference", notes)


_BACKENDS = (
    Backend(
        "sm100",
        "CuTe DSL kernels for Blackwell data-centre GPUs (B200, GB200, B300): NVFP4 Q and K, P and V in 4 bits",
        True,
        sm100.missing,
        sm100.refuses,
        _sm100,
        sm100.declines,
    ),
    Backend(
        "sm90",
        "CUDA C++ kernels for Hopper GPUs (H100, H200): Q, K, P and V in FP8, faster than BF16 attention",
        True,
        sm90.missing,
        sm90.refuses,
        _sm90,
        sm90.declines,
    ),
    Backend(
        "sm89",
        "Triton kernels for FP8 tensor cores from Ada on (RTX 40, L4, L40S, RTX 50): Q, K, P and V in FP8",
        True,
        sm89.missing,
        sm89.refuses,
        _sm89,
        sm90.declines,
    ),
    Backend(
        "sdpa",
        "PyTorch scaled_dot_product_attention, for numerics that round nothing",
        True,
        lambda: None,
        lambda numerics, device: (
            None if numerics.is_exact else f"it rounds nothing, and the policy asks for {numerics.label}"
        ),
        _sdpa,
    ),
    Backend(
        "triton",
        "Triton emulation on the BF16 tensor cores of any NVIDIA GPU since A100: the numerics, not the speed of FP4",
        False,
        emulated.missing,
        emulated.refuses,
        _triton,
        emulated.declines,
    ),
    Backend(
        "reference",
        "readable torch emulation of every policy, on any device; exact numerics, no speed",
        False,
        lambda: None,
        lambda numerics, device: None,
        _reference,
    ),
)


def backends() -> tuple[Backend, ...]:
    """All backends of this version, fastest first."""
    return _BACKENDS


def select(
    numerics: Numerics,
    device: torch.device,
    backend: str | None = None,
    *,
    call: tuple[Tensor, Tensor, Tensor, Numerics, Guard | None, float, bool] | None = None,
) -> Backend:
    """The fastest backend that can run `numerics` on `device`, or the named one; with `call`, what `Backend.run` would
    get, the fastest that takes that call, too.

    Raises BackendError with every backend's reason when none, or not the named one, can; UnsupportedInputError when the
    named one can, but does not take the call.
    """
    known = {b.name: b for b in backends()}
    if backend is not None:
        if backend not in known:
            raise BackendError(f"unknown backend {backend!r}; this version has {', '.join(known)}")
        why = known[backend].why_not(numerics, device)
        if why:
            raise BackendError(f"backend {backend!r} cannot run this on {device.type}: {why}")
        why = known[backend].declines(*call) if call is not None else None
        if why:
            raise UnsupportedInputError(f"backend {backend!r} does not take this call: {why}")
        return known[backend]
    reasons = []
    for candidate in known.values():
        why = candidate.why_not(numerics, device) or (candidate.declines(*call) if call is not None else None)
        if why is None:
            return candidate
        reasons.append(f"{candidate.name}: {why}")
    raise BackendError(f"no backend can run {numerics.label} on {device.type}; " + "; ".join(reasons))


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise UnsupportedInputError unless q [B, Sq, H, 128], k and v [B, Sk, H, 128] can be taken."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.ndim != 4:
            raise UnsupportedInputError(
                f"{name} must be [batch, tokens, heads, {HEAD_DIM}]; found shape {list(t.shape)}"
            )
        if t.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise UnsupportedInputError(f"{name} must be bfloat16, float16 or float32; found {t.dtype}")
        if t.shape[-1] != HEAD_DIM:
            raise UnsupportedInputError(f"{name} has head_dim {t.shape[-1]}; 4-bit attention needs head_dim {HEAD_DIM}")
        if 0 in t.shape:
            raise UnsupportedInputError(f"{name} is empty: shape {list(t.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or k.shape != v.shape:
        raise UnsupportedInputError(
            "q, k and v must agree in batch and heads, and k and v in tokens; found "
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    if not q.device == k.device == v.device:
        raise UnsupportedInputError(f"q, k and v must be on one device; found {q.device}, {k.device}, {v.device}")
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise UnsupportedInputError(
            "4-bit attention has no backward pass, and an input requires gradients; call it under torch.no_grad()"
        )


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    numerics: Numerics,
    *,
    guard: Guard | None = None,
    backend: str | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Outcome:
    """One attention call with fixed numerics; shapes as in `attention`. The inputs are never written to."""
    check_inputs(q, k, v)
    scale = scale if scale is not None else 1 / math.sqrt(q.shape[-1])
    call = (q, k, v, numerics, guard, scale, return_lse)
    chosen = select(numerics, q.device, backend, call=call)
    # Autocast would round the reference's float32 products to 16 bits.
    with torch.autocast(q.device.type, enabled=False):
        return chosen.run(*call)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: str | Policy = "wan-fast",
    backend: str | None = None,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Non-causal attention with a policy's numerics and guard (its rules need a model, so they do not apply here).

    q is [B, Sq, H, 128], k and v are [B, Sk, H, 128], bfloat16, float16 or float32; any lengths, any strides.
    Returns [B, Sq, H, 128] in v's dtype, with `return_lse` also the log-sum-exp [B, H, Sq] in float32. `scale` is
    1/√128 by default. `backend=None` takes the fastest that can run it.

    Raises UnsupportedInputError (mask, gradients, shapes, dtypes), PolicyError, BackendError.
    """
    if attn_mask is not None:
        raise UnsupportedInputError("4-bit attention takes no attn_mask; Wan's self-attention has none")
    chosen = get_policy(policy)
    outcome = run(q, k, v, chosen.numerics, guard=chosen.guard, backend=backend, scale=scale, return_lse=return_lse)
    if return_lse:
        assert outcome.lse is not None
        return outcome.out, outcome.lse
    return outcome.out
