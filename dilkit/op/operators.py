"""The torch operators behind `dilated_attention`: `dilkit::dilated_attention` and its backward.

Selection and kernel launch happen inside the operators, so that `torch.compile(fullgraph=True)` sees two opaque calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilkit import plan
from dilkit.backend import Backend
from dilkit.device import probe
from dilkit.op import rules as op_rules
from dilkit.op.schema import backends_asked, backward_op, decode_call, encode_call, forward_op, library
from dilkit.problem import Problem
from dilkit.selector import requested_backends, select, state

__all__ = ["backward_op", "encode_call", "forward_op", "lse_dtype"]


def _forward(
    query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, scale: float, call: str
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of checked tensors; `call` as `encode_call` writes it."""
    chosen, problem = _choose(query, key, key_padding_mask, scale, call)
    if query.numel() == 0:
        return _empty_outputs(query)
    return chosen.forward(query, key, value, problem, key_padding_mask)


def _backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    key_padding_mask: Tensor | None,
    scale: float,
    call: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dquery, dkey, dvalue)` given the `out` and `lse` of the whole softmax."""
    if query.numel() == 0:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    chosen, problem = _choose(query, key, key_padding_mask, scale, call)
    return chosen.backward(dout, query, key, value, out, lse, problem, key_padding_mask)


@dataclass(frozen=True)
class PreparedCall:
    """What was chosen and worked out for calls with the same facts."""

    backend: Backend
    problem: Problem
    nbytes: int


def _choose(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, call: str) -> tuple[Backend, Problem]:
    """The backend that computes this call, and its problem: one look-up in the pattern cache by the facts of the call."""
    names = backends_asked(call)
    requested = requested_backends(names.split(",") if names else None)
    facts = requested, query.shape, key.shape[2], query.dtype, query.device, mask is not None, scale, call
    prepared = plan.cached(("call", state(), facts), _prepare, *facts)
    return prepared.backend, prepared.problem


def _prepare(
    requested: tuple[str, ...],
    shape: torch.Size,
    kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    has_mask: bool,
    scale: float,
    call: str,
) -> PreparedCall:
    pattern, is_causal, requires_grad = decode_call(call)
    problem = Problem(
        pattern=pattern,
        batch=shape[0],
        seq=shape[1],
        heads=shape[2],
        kv_heads=kv_heads,
        head_dim=shape[3],
        dtype=str(dtype).removeprefix("torch."),
        device=probe(device.type, device.index or 0),
        is_causal=is_causal,
        key_padding_mask=has_mask,
        requires_grad=requires_grad,
        scale=scale,
    )
    return PreparedCall(select(problem, requested), problem, nbytes=len(call))


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of `lse` for tensors of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _empty_outputs(query: Tensor) -> tuple[Tensor, Tensor]:
    batch, seq, heads, head_dim = query.shape
    return query.new_empty(batch, seq, heads, head_dim), query.new_empty(batch, heads, seq, dtype=lse_dtype(query.dtype))


def _fake_backward(dout: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


library.impl("dilated_attention", _forward, "CompositeExplicitAutograd")
library.impl("dilated_attention_backward", _backward, "CompositeExplicitAutograd")
library.impl("dilated_attention", op_rules.autograd(forward_op, op_rules.Differentiable), "Autograd")
library.impl("dilated_attention_backward", op_rules.autograd(backward_op, op_rules.DifferentiableOnce), "Autograd")
for _device, _dispatch_key in op_rules.AUTOCAST_KEYS.items():
    library.impl("dilated_attention", op_rules.autocast_forward(_device), _dispatch_key)
    library.impl("dilated_attention_backward", op_rules.autocast_backward(_device), _dispatch_key)
torch.library.register_fake("dilkit::dilated_attention", lambda query, *_: _empty_outputs(query), lib=library)
torch.library.register_fake("dilkit::dilated_attention_backward", _fake_backward, lib=library)
torch.library.register_vmap("dilkit::dilated_attention", op_rules.vmap, lib=library)
