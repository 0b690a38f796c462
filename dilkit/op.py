"""The torch operators behind `dilated_attention`: `dilkit::dilated_attention` and its backward.

Selection and kernel launch happen inside the operators, so that `torch.compile(fullgraph=True)` sees two opaque calls.
The pattern travels as JSON text: further kinds of branches need no new schema.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dilkit import registry
from dilkit.backend import Backend
from dilkit.device import probe
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.selector import requested_backends, select

_library = torch.library.Library("dilkit", "DEF")
_library.define(
    "dilated_attention(Tensor query, Tensor key, Tensor value, "
    "Tensor? key_padding_mask, float scale, str call) -> (Tensor, Tensor)"
)
_library.define(
    "dilated_attention_backward(Tensor dout, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    "Tensor? key_padding_mask, float scale, str call) -> (Tensor, Tensor, Tensor)"
)
AUTOCAST_DEVICES = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_FORMAT = "1"
"""The first letter of every call: change it with `encode_call` and with what autograd does here, because torch.compile keeps
whole graphs on disk and finds them again by such constants."""

forward_op = torch.ops.dilkit.dilated_attention.default
backward_op = torch.ops.dilkit.dilated_attention_backward.default


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


def encode_call(pattern: Pattern, is_causal: bool, requires_grad: bool, backend: str) -> str:
    """What an operator is told besides tensors and scale, as one text: every schema argument costs microseconds a call."""
    return f"{_FORMAT}{is_causal:d}{requires_grad:d}{backend};{pattern.to_json()}"


def _choose(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, call: str) -> tuple[Backend, Problem]:
    asked = call[3 : call.index(";")]
    requested = requested_backends(asked.split(",") if asked else None)
    return _chosen(
        requested, registry.generation(), query.shape, key.shape[2], query.dtype, query.device, mask is not None, scale, call
    )


@lru_cache(maxsize=4096)
def _chosen(
    requested: tuple[str, ...],
    generation: int,
    shape: torch.Size,
    kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    masked: bool,
    scale: float,
    call: str,
) -> tuple[Backend, Problem]:
    problem = Problem(
        pattern=Pattern.from_json(call.partition(";")[2]),
        batch=shape[0],
        seq=shape[1],
        heads=shape[2],
        kv_heads=kv_heads,
        head_dim=shape[3],
        dtype=str(dtype).removeprefix("torch."),
        device=probe(device.type, device.index or 0),
        is_causal=call[1] == "1",
        key_padding_mask=masked,
        requires_grad=call[2] == "1",
        scale=scale,
    )
    return select(problem, requested), problem


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of `lse` for tensors of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _empty_outputs(query: Tensor) -> tuple[Tensor, Tensor]:
    batch, seq, heads, head_dim = query.shape
    return query.new_empty(batch, seq, heads, head_dim), query.new_empty(batch, heads, seq, dtype=lse_dtype(query.dtype))


def _fake_backward(dout: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


class _Differentiable(torch.autograd.Function):
    """The forward operator with its gradient. `torch.library.register_autograd` does the same for 40 microseconds a call more."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        out, lse = _below_autograd(forward_op, *inputs)
        query, key, value, mask, ctx.scale, call = inputs
        # The backward may run in another thread and outside `use_backend`: it is told what the forward was told.
        # Not so while torch.compile traces: what holds then would be baked into the graph, and into its cache on disk.
        traced = type(out) is not Tensor
        flags, asked, pattern = call[:3], call[3 : call.index(";")], call[call.index(";") :]
        ctx.call = call if traced else flags + (asked or ",".join(requested_backends())) + pattern
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, mask, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        query, key, value, mask, out, lse = ctx.saved_tensors
        dquery = dkey = dvalue = None
        if dout is not None:
            dout = dout if dout.stride(-1) == 1 else dout.contiguous()
            dquery, dkey, dvalue = backward_op(dout, query, key, value, out, lse, mask, ctx.scale, ctx.call)
        if dlse is not None:
            by_query, by_key = _differentiate_lse(dlse, query, key, lse, mask, ctx.scale, ctx.call)
            dquery = by_query if dquery is None else dquery + by_query
            dkey = by_key if dkey is None else dkey + by_key
        return dquery, dkey, dvalue, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        raise RuntimeError(
            "dilated_attention has no forward-mode derivative (jvp); use reverse mode: torch.autograd.grad or .backward()"
        )


class _Once(torch.autograd.Function):
    """The backward operator, which has no gradient of its own."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        dquery, dkey, dvalue = _below_autograd(backward_op, *inputs)
        return dquery, dkey, dvalue

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            "dilated_attention can be differentiated once only: double backward (create_graph=True) is not supported"
        )


def _below_autograd(op: Any, *inputs: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*inputs)


def _autograd_kernel(op: Any, function: Any) -> Callable[..., Any]:
    """What `op` does where autograd looks on: record `function` if a gradient is wanted, else nothing."""

    def kernel(*inputs: Any) -> Any:
        recorded = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        if not recorded and forward_ad._current_level < 0:
            return _below_autograd(op, *inputs)
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                "dilated_attention does not support torch.func.grad, vjp and jvp; use torch.autograd.grad or .backward()"
            )
        return function.apply(*inputs)

    return kernel


def _differentiate_lse(
    dlse: Tensor, query: Tensor, key: Tensor, lse: Tensor, mask: Tensor | None, scale: float, call: str
) -> tuple[Tensor, Tensor]:
    """Gradients through `lse`, from the two passes that every backend has.

        dq_i = scale * dlse_i * sum_j P_ij k_j      dk_j = scale * sum_i P_ij dlse_i q_i

    The first sum is attention with the keys as values; the second is that attention's dvalue for dout = scale * dlse * q.
    """
    weight = scale * dlse.masked_fill(lse == -math.inf, 0.0).transpose(1, 2).unsqueeze(-1)
    with torch.autocast(query.device.type, enabled=False):  # as in `_autocast_backward`
        mean_key, _ = forward_op(query, key, key, mask, scale, call)
        dout = (weight * query).to(query.dtype).contiguous()
        _, _, dkey = backward_op(dout, query, key, key, mean_key, lse, mask, scale, call)
    return (weight * mean_key).to(query.dtype), dkey


def _vmap(
    info: Any, in_dims: tuple[Any, ...], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, call: str
) -> Any:
    """The mapped dimension joins the batch."""

    def joined(x: Tensor | None, dim: int | None) -> Tensor | None:
        if x is None:
            return None
        return (x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    tensors = [joined(x, dim) for x, dim in zip((query, key, value, mask), in_dims, strict=False)]
    batch = query.shape[0 if in_dims[0] is None else int(in_dims[0] == 0)]
    out, lse = forward_op(*tensors, scale, call)
    return tuple(x.unflatten(0, (info.batch_size, batch)) for x in (out, lse)), (0, 0)


def _autocast_kernel(device: str) -> Callable[..., Any]:
    """Under autocast the operator computes in the autocast dtype, whichever that is; fp64 stays fp64, as elsewhere in torch."""

    def kernel(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Any:
        double = any(x.dtype == torch.float64 for x in (query, key, value))
        dtype = torch.float64 if double else torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return forward_op(query.to(dtype), key.to(dtype), value.to(dtype), *options)

    return kernel


def _autocast_backward(device: str) -> Callable[..., Any]:
    """Autocast must not reach the matmuls of a backend: its dtypes are the forward's, wherever `.backward()` is called."""

    def kernel(*inputs: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return backward_op(*inputs)

    return kernel


_library.impl("dilated_attention", _forward, "CompositeExplicitAutograd")
_library.impl("dilated_attention_backward", _backward, "CompositeExplicitAutograd")
_library.impl("dilated_attention", _autograd_kernel(forward_op, _Differentiable), "Autograd")
_library.impl("dilated_attention_backward", _autograd_kernel(backward_op, _Once), "Autograd")
for _device, _dispatch_key in AUTOCAST_DEVICES.items():
    _library.impl("dilated_attention", _autocast_kernel(_device), _dispatch_key)
    _library.impl("dilated_attention_backward", _autocast_backward(_device), _dispatch_key)
torch.library.register_fake("dilkit::dilated_attention", lambda query, *_: _empty_outputs(query), lib=_library)
torch.library.register_fake("dilkit::dilated_attention_backward", _fake_backward, lib=_library)
torch.library.register_vmap("dilkit::dilated_attention", _vmap, lib=_library)
