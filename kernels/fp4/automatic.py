"""The policy "auto": what makes attention faster on a device with the least error, or the pipeline's own attention."""

from __future__ import annotations

from typing import NamedTuple

import torch

from wanfp4.kernels import dispatch
from wanfp4.policy import Policy, policies

AUTO = "auto"

# Who is asked, in this order. "fp8-direct" has a sixth of the error of "wan-fast": FP4 comes first where it is faster.
CANDIDATES = (("sm100", "wan-fast"), ("sm90", "fp8-direct"), ("sm89", "fp8-direct"))


class Choice(NamedTuple):
    """The policy that "auto" stands for on a device, and why, in a sentence."""

    policy: Policy
    why: str


def automatic(device: torch.device) -> Choice:
    """What "auto" stands for on `device`."""
    known = {backend.name: backend for backend in dispatch.backends()}
    reasons = []
    for name, preset in CANDIDATES:
        policy = policies()[preset]
        why_not = known[name].why_not(policy.numerics, device)
        if why_not is None:
            return Choice(policy, f"auto is {preset!r} here: the backend {name!r} runs it on {_called(device)}")
        reasons.append(f"{name}: {why_not}")
    why = f"auto is 'bf16' here, the pipeline's own attention: nothing is faster on {_called(device)}"
    return Choice(policies()["bf16"], f"{why}; {'; '.join(reasons)}")


def _called(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
