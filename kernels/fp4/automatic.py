"""The policy "auto": attention on hardware made for 4 or 8 bits where a device has it, else the pipeline's own."""

from __future__ import annotations

from typing import NamedTuple

import torch

from wanfp4.kernels import dispatch
from wanfp4.policy import Policy, policies

AUTO = "auto"

# Who is asked, in this order, the preset it is asked for, and what has to be known about its speed.
CANDIDATES = (
    ("sm100", "wan-fast", "nobody has timed it on hardware yet"),
    ("sm90", "fp8-direct", None),
    ("sm89", "fp8-direct", "nobody has timed it on such a card yet"),
)


class Choice(NamedTuple):
    """The policy that "auto" stands for on a device, and why, in a sentence."""

    policy: Policy
    why: str


def automatic(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Choice:
    """What "auto" stands for on `device`, for a model in `dtype`."""
    known = {backend.name: backend for backend in dispatch.backends()}
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    own = f"auto is 'bf16' here, the pipeline's own attention: nothing is faster on {where}"
    if device.type != "cuda":
        return Choice(policies()["bf16"], f"{own}, where there are no tensor cores for 4 or 8 bits")
    reasons: list[str] = []
    for name, preset, caveat in CANDIDATES:
        policy, backend = policies()[preset], known[name]
        one = torch.empty(1, 1, 1, dispatch.HEAD_DIM, dtype=dtype, device="meta")
        why_not = backend.why_not(policy.numerics, device) or backend.declines(
            one, one, one, policy.numerics, policy.guard, 1.0, False
        )
        if why_not is None:
            why = f"auto is {preset!r} here: the backend {name!r} runs it on {where}"
            return Choice(policy, "; ".join([why, *([caveat] if caveat else []), *reasons]))
        reasons.append(f"{name}: {why_not}")
    return Choice(policies()["bf16"], "; ".join([own, *reasons]))
