"""The torch operators behind `dilated_attention`: `dilkit::dilated_attention` and its backward.

Selection and kernel launch happen inside the operators, so that `torch.compile(fullgraph=True)` sees two opaque calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dilkit.op import boundary, kernels
from dilkit.op import rules as op_rules
from dilkit.op._facts import undispatched
from dilkit.op.schema import backward_op, decode_call, encode_call, forward_op, library, scores_asked

__all__ = ["attend", "backward_op", "encode_call", "forward_op"]


def attend(*inputs: Any) -> tuple[Tensor, Tensor]:
    """`forward_op`, without torch's dispatcher where it has nothing to do: for small problems it takes longer than the kernel."""
    if torch.compiler.is_compiling() or not undispatched(inputs):
        results: tuple[Tensor, Tensor] = forward_op(*inputs)
        return results
    return op_rules.undispatched_forward(*inputs)


def _backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel of the backward operator, whose schema has a gradient of the bias in every call: an empty one for none."""
    dquery, dkey, dvalue, dbias = kernels.backward(*inputs)
    return dquery, dkey, dvalue, dquery.new_empty(0, dtype=boundary.lse_dtype(dquery.dtype)) if dbias is None else dbias


def _fake_backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, mask: Any, scale: float, call: str, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    form, heads = scores_asked(call)[1], query.shape[2]
    dbias = lse.new_empty((heads, form.entries) if form is not None and form.learned else (0,))
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), dbias


library.impl("dilated_attention", kernels.forward, "CompositeExplicitAutograd")
library.impl("dilated_attention_backward", _backward, "CompositeExplicitAutograd")
library.impl("dilated_attention", op_rules.autograd(forward_op, op_rules.Differentiable), "Autograd")
library.impl("dilated_attention_backward", op_rules.autograd(backward_op, op_rules.DifferentiableOnce), "Autograd")
for _device, _dispatch_key in op_rules.AUTOCAST_KEYS.items():
    library.impl("dilated_attention", op_rules.autocast_forward(_device), _dispatch_key)
    library.impl("dilated_attention_backward", op_rules.autocast_backward(_device), _dispatch_key)
torch.library.register_fake("dilkit::dilated_attention", lambda query, *_: boundary.empty_outputs(query), lib=library)
torch.library.register_fake("dilkit::dilated_attention_backward", _fake_backward, lib=library)
torch.library.register_vmap("dilkit::dilated_attention", op_rules.vmap, lib=library)


@register_flop_formula(forward_op.overloadpacket)
def forward_flops(query: Any, key: Any, value: Any, mask: Any, scale: float, call: str, *_: Any, **__: Any) -> int:
    """Return the nominal FLOPs of a call with tensors of these shapes."""
    pattern, is_causal, _requires_grad = decode_call(call)
    batch, seq, heads, head_dim = query
    seq = min(seq, pattern.max_seq)
    return pattern.flops(seq, heads, head_dim, batch=batch, kv_heads=key[2], is_causal=is_causal)


@register_flop_formula(backward_op.overloadpacket)
def backward_flops(
    dout: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, mask: Any, scale: float, call: str, *_: Any, **__: Any
) -> int:
    """Return those of the backward pass of such a call."""
    return forward_flops(query, key, value, mask, scale, call) * 5 // 2
