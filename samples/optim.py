"""Muon: momentum whose update is orthogonalised, for matrices and convolution kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks": a quintic whose fixed point is not
# exact, singular values end in about [0.7, 1.2], but which gets there in five steps.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, *, steps: int = 5, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Push the singular values of each matrix [N, rows, columns] towards 1, by Newton-Schulz iteration in `dtype`."""
    a, b, c = COEFFICIENTS
    x = matrices.to(dtype)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT.contiguous() if tall else x
    return result


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; kernels [out, in, …] count as matrices [out, in · …].

    The step is scaled by 0.2 · sqrt(max(rows, columns)), which gives it the root mean square of an Adam step (Liu et
    al. 2025, "Muon is scalable for LLM training"). Parameters of one shape are orthogonalised as a batch. All
    parameters need a gradient in every step.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0, steps: int = 5
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "steps": steps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step; `closure` is not supported."""
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for shape, params in by_shape.items():
                gradients = [p.grad for p in params if p.grad is not None]
                momenta = [self._momentum(p) for p in params]
                torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
                ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])
                matrices = torch.stack([update.reshape(shape[0], -1) for update in ahead])
                updates = orthogonalise(matrices, steps=group["steps"]).to(params[0].dtype)
                scale = group["lr"] * 0.2 * math.sqrt(max(matrices.shape[1:]))
                if group["weight_decay"]:
                    torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(params, [u.reshape(shape) for u in updates.unbind()], alpha=-scale)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum"]
        return momentum
