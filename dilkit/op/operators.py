"""The torch operators behind `dilated_attention`, and what they do under autograd, autocast, tracing and vmap.

Selection and kernel launch happen inside the operators, so that `torch.compile(fullgraph=True)` sees two opaque calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from dilkit.op import boundary
from dilkit.op._facts import tensor_key, want_gradient
from dilkit.op.attend import Differentiable, attend, compute, compute_gradients, differentiate, learning
from dilkit.op.autocast import AUTOCAST_KEYS
from dilkit.op.call_options import backward_call, decode, flat, forward_arguments, forward_call, unflat
from dilkit.op.prepared_call import prepare
from dilkit.op.schema import GRADIENTS, TENSORS, backward_op, forward_op, library

__all__ = ["attend", "backward_op", "differentiate", "forward_op"]

_BATCHED = 4
"""So many tensors come first whose mapped dimension becomes a part of the batch: query, key, value and the mask."""
_SHARED = ("bias", "sink")
"""Others that a whole batch may share."""


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs, options = forward_call(*arguments)
    return compute(prepare(inputs, options, tensor_key(inputs)), inputs, options)


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Run the backward operator, whose schema has all gradients in every call: empty ones for none."""
    dout, inputs, out, lse, options = backward_call(*arguments)
    results = compute_gradients(dout, inputs, out, lse, options)
    gradients = dict(zip(("query", "key", "value", *inputs.learned), results, strict=True))
    return tuple(gradients[name] if name in gradients else lse.new_empty(0) for name in GRADIENTS)


def _fake_forward(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    _check_meta((query, *others[:3]), others)
    return boundary.empty_outputs(query)


def _check_meta(tensors: tuple[Tensor | None, ...], others: tuple[Any, ...]) -> None:
    kinds = {x.is_meta for x in tensors if x is not None}
    if len(kinds) > 1 or (kinds == {False} and any(isinstance(x, Tensor) and x.is_meta for x in others)):
        raise ValueError("only some tensors of the call are on device meta; saved_tensors_hooks must give back what was packed")


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    dout, inputs, out, lse, _ = backward_call(*arguments)
    _check_meta((dout, *inputs[:4], out, lse), arguments)
    tensors = dict(zip(TENSORS, flat(inputs), strict=True))
    wanted = [tensors[name] if name in ("query", "key", "value", *inputs.learned) else None for name in GRADIENTS]
    return tuple(lse.new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted)


class DifferentiableOnce(torch.autograd.Function):
    """The backward operator, which has no gradient of its own."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(backward_op(*inputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError("dilated_attention can be differentiated once only: create_graph=True is not supported")


def autograd(op: Any, record: Callable[..., Any]) -> Callable[..., Any]:
    """Return the implementation of `op` under the Autograd key: `record` if a gradient is wanted, else `op` below autograd."""

    def kernel(*inputs: Any) -> Any:
        if not (torch.is_grad_enabled() and want_gradient(inputs)) and forward_ad._current_level < 0:
            with torch._C._AutoDispatchBelowAutograd():
                return op(*inputs)
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError("dilated_attention does not support torch.func.grad, vjp and jvp; use torch.autograd.grad")
        return record(*inputs)

    return kernel


def _record_forward(*arguments: Any) -> Any:
    inputs, options = forward_call(*arguments)
    return Differentiable.apply(None, learning(inputs, options), *flat(inputs))  # type: ignore[no-untyped-call]


def _autocast(op: Any, count: int, device: str) -> Callable[..., Any]:
    """Return the autocast rule of `op`: its first `count` tensors take autocast's dtype, or fp64, and within none holds."""

    def kernel(*arguments: Any) -> Any:
        double = any(x.dtype == torch.float64 for x in arguments[:count])
        dtype = torch.float64 if double else torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return op(*(x.to(dtype) for x in arguments[:count]), *arguments[count:])

    return kernel


def _vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    """Map the call: fold the mapped dimension into the batch, or call element by element where tensors do not allow it."""
    inputs, options = forward_call(*arguments)
    tensors, size = flat(inputs), info.batch_size
    dims = (*in_dims[:4], *in_dims[6:7], *in_dims[8:], *(None,) * len(TENSORS))  # without scale, text and max_seqlen
    if inputs.dropout is not None:
        reason = "it goes by the place in the batch; make the mapped dimension a part of the batch"
        raise RuntimeError(f"dilated_attention does not support vmap with dropout_p > 0: {reason}, or use dropout_p=0")
    if inputs.given is not None:
        name = "a block_layout" if inputs.intervals is None else "intervals"
        raise RuntimeError(f"dilated_attention does not support vmap with {name}; make the mapped dimension a batch")

    def call(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        results: tuple[Tensor, Tensor] = forward_op(*forward_arguments(unflat(tensors, options), options))
        return results

    shared = _SHARED if options.bias is None or not options.bias.by_query else _SHARED[1:]
    others = [(x, name in shared and dim is None) for name, x, dim in zip(TENSORS, tensors, dims, strict=False)][_BATCHED:]
    if not all(is_shared for x, is_shared in others if x is not None):
        elements = [[x] * size if x is None or dim is None else x.unbind(dim) for x, dim in zip(tensors, dims, strict=False)]
        results = [call(*element) for element in zip(*elements, strict=True)]
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0, 0)

    def joined(x: Tensor | None, dim: int | None) -> Tensor | None:
        if x is None:
            return None
        return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    batch = inputs.query.shape[0 if dims[0] is None else int(dims[0] == 0)]
    out, lse = call(*map(joined, tensors[:_BATCHED], dims), *tensors[_BATCHED:])
    return tuple(x.unflatten(0, (size, batch)) for x in (out, lse)), (0, 0)  # type: ignore[no-untyped-call]


library.impl("dilated_attention", _forward, "CompositeExplicitAutograd")
library.impl("dilated_attention_backward", _backward, "CompositeExplicitAutograd")
library.impl("dilated_attention", autograd(forward_op, _record_forward), "Autograd")
library.impl("dilated_attention_backward", autograd(backward_op, DifferentiableOnce.apply), "Autograd")
for _device, _dispatch_key in AUTOCAST_KEYS.items():
    library.impl("dilated_attention", _autocast(forward_op, 3, _device), _dispatch_key)
    library.impl("dilated_attention_backward", _autocast(backward_op, 0, _device), _dispatch_key)
torch.library.register_fake("dilkit::dilated_attention", _fake_forward, lib=library)
torch.library.register_fake("dilkit::dilated_attention_backward", _fake_backward, lib=library)
torch.library.register_vmap("dilkit::dilated_attention", _vmap, lib=library)


@register_flop_formula(forward_op.overloadpacket)
def forward_flops(query: Any, key: Any, value: Any, mask: Any, scale: float, text: str, *_: Any, **__: Any) -> int:
    """Return the nominal FLOPs of a call with tensors of these shapes."""
    options = decode(text)
    batch, queries, heads, head_dim = query
    seq = min(key[1], options.pattern.max_seq)
    flops = options.pattern.flops(seq, heads, head_dim, batch=batch, kv_heads=key[2], is_causal=options.is_causal)
    return flops if queries == key[1] else flops * queries // max(seq, 1)


@register_flop_formula(backward_op.overloadpacket)
def backward_flops(
    dout: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, mask: Any, scale: float, text: str, *_: Any, **__: Any
) -> int:
    return forward_flops(query, key, value, mask, scale, text) * 5 // 2
