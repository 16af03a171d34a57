"""The self-attention of a patched model as one opaque torch operator, `wanfp4::attention`.

torch.compile must not see policy, step or layer: a Python value that changes from layer to layer or step to step would
compile again and again. So the graph only holds this operator and a small CPU tensor that says which attention it is;
what to run is asked when the operator runs. One graph then serves every layer, step and rule.

The operator knows sessions (a session is one patch of one pipeline) by number and holds none of them alive.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch
from torch import Tensor

from wanfp4.errors import BackendError


class Session(Protocol):
    """Who decides what an attention call of a patched model runs."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, expert: int, site: int) -> Tensor:
        """Attention of q, k, v [B, S, H, D] at place `site` of expert number `expert`; any dtype and strides out."""
        ...


_sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def register(session: Session) -> int:
    """Number `session`; the number stays valid while somebody holds the session."""
    number = next(_numbers)
    _sessions[number] = session
    return number


def make_site(session: int, expert: int, site: int) -> Tensor:
    """The tensor [3] int64 on the CPU by which the operator finds its session, expert and site."""
    # Made in inference mode, or on a default device, it could not be used outside of it.
    with torch.inference_mode(False):
        return torch.tensor([session, expert, site], dtype=torch.int64, device="cpu")


# A CUDA graph would replay the kernels of one step at every step: rules by sigma and the receipt need Python each time.
@torch.library.custom_op("wanfp4::attention", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def attention(q: Tensor, k: Tensor, v: Tensor, site: Tensor) -> Tensor:
    """Self-attention of a patched model: q, k, v [B, S, H, D] to a contiguous [B, S, H, D] in q's dtype.

    Raises BackendError when the session of `site` is gone, and whatever the session raises.
    """
    number, expert, index = site.tolist()
    session = _sessions.get(number)
    if session is None:
        raise BackendError("this attention belongs to a patch that no longer exists; patch the pipeline again")
    return session.run(q, k, v, expert, index).to(q.dtype).contiguous()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, site: Tensor) -> Tensor:
    return q.new_empty(q.shape)
