"""The attention processor that a patched Wan transformer's self-attention runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wanfp4.errors import BackendError, UnsupportedInputError
from wanfp4.kernels import ops

PARALLEL = (
    "context parallelism is enabled (enable_parallelism), and 4-bit attention here returns no log-sum-exp to combine "
    "its parts with; patch a pipeline without it"
)


class Wan4BitAttnProcessor:
    """Self-attention of Wan's transformers around the operator `wanfp4::attention`; one instance per attention.

    Projections, normalisation, RoPE and output are those of diffusers' `WanAttnProcessor`; only softmax(Q·Kᵀ)·V goes
    through the operator, which asks `session` what to run.

    It is a plain object, because buffers of an `nn.Module` would show in the model's state_dict, and its name has no
    "Added", which `fuse_qkv_projections` refuses. It holds no Python value that differs between layers or steps and is
    read in `__call__`: torch.compile would compile the block again for each.

    original  the processor this one replaces; its `_attention_backend` is kept for calls that stay with the pipeline's
              own attention, and `set_attention_backend` on a patched model still works.
    session   kept alive by the processors that need it.
    site      CPU int64 tensor: which attention this is (`ops.make_site`).
    """

    _attention_backend: Any = None
    _parallel_config: Any = None

    def __init__(self, original: Any, session: ops.Session, site: Tensor) -> None:
        self.original = original
        self.session = session
        self.site = site
        self._attention_backend = getattr(original, "_attention_backend", None)
        self._parallel_config = getattr(original, "_parallel_config", None)

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """hidden_states [B, S, heads · 128] to the same shape; rotary_emb is (cos, sin), each [1, S, 1, 128].

        Raises UnsupportedInputError (a mask, text to attend to, gradients) and BackendError (context parallelism, or
        what the backend says).
        """
        if attention_mask is not None:
            raise UnsupportedInputError(
                f"4-bit attention takes no attention_mask; found one of shape {list(attention_mask.shape)}"
            )
        if encoder_hidden_states is not None:
            raise UnsupportedInputError(
                "4-bit attention replaces self-attention; found encoder_hidden_states to attend to"
            )
        if self._parallel_config is not None:
            raise BackendError(PARALLEL)

        # The projections are called, never read: LoRA, offloading and quantised weights live in the call.
        if attn.fused_projections:
            query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            raise UnsupportedInputError(
                "4-bit attention has no backward pass, and its input requires gradients; run under torch.no_grad()"
            )
        # Wan normalises over all heads together, before they are split.
        query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in (attn.norm_q(query), attn.norm_k(key), value))
        if rotary_emb is not None:
            query, key = rotate(query, *rotary_emb), rotate(key, *rotary_emb)

        out = ops.attention(query, key, value, self.site).flatten(2, 3)
        result: Tensor = attn.to_out[1](attn.to_out[0](out))
        return result


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on interleaved pairs: x [B, S, H, D], cos and sin [1, S, 1, D] hold each angle's value twice.

    Computed in the precision that x and cos promote to, rounded once to x's dtype, as diffusers does: bit for bit.
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out
