"""The rules of the torch operators under autograd, autocast and vmap."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from dilkit.op import kernels
from dilkit.op._facts import undispatched, want_gradient
from dilkit.op.schema import asking_for, asks_for_backends, backward_op, forward_op, with_learned_bias, without_dropout
from dilkit.op.through_lse import through_lse
from dilkit.op.zero_keys import check_sink, sink_gradient
from dilkit.selector import requested_backends

F = TypeVar("F", bound=Callable[..., Any])

_CALL = 5
"""Which argument of the forward operator is the text."""
_SINK = 6
"""Which is the sink; it, and those after it, are left out where there are none."""
_BIAS = 11
"""Which is the weights of the bias; its positions follow."""
_TRAILING = (None,) * 8
"""What the sink and the arguments after it are where they are left out."""
AUTOGRAD = torch._C.DispatchKey.AutogradOther
"""The key that stands for all of autograd's, which are excluded together."""
AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


class Differentiable(torch.autograd.Function):
    """The forward operator with its gradient. `torch.library.register_autograd` would take 40 microseconds more a call."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        if any(ctx.needs_input_grad[_BIAS : _BIAS + 2]):
            inputs = _learning(*inputs)
        out, lse = kernels.forward(*inputs) if undispatched(inputs) else _below_autograd(forward_op, *inputs)
        query, key, value, mask, ctx.scale, call, *others = inputs
        sink, cu_seqlens, ctx.max_seqlen, seed, places, bias, positions, layout = (*others, *_TRAILING)[: len(_TRAILING)]
        # While torch.compile traces, the backends would become part of the graph, and of its cache on disk.
        ctx.call = call if isinstance(out, (FakeTensor, FunctionalTensor)) else _with_backends(call)
        ctx.set_materialize_grads(False)
        ctx.inputs = len(inputs)
        ctx.save_for_backward(query, key, value, mask, sink, cu_seqlens, out, lse, seed, places, bias, positions, layout)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        query, key, value, mask, sink, cu_seqlens, out, lse, *dropout, bias, positions, layout = ctx.saved_tensors
        packed, scores = (cu_seqlens, ctx.max_seqlen), (bias, positions, layout)
        learned = bias is not None and ctx.needs_input_grad[_BIAS]
        dquery = dkey = dvalue = dsink = dbias = None
        if any(ctx.needs_input_grad[:3]) or learned:
            saved = query, key, value, out, lse, mask, ctx.scale, ctx.call
            dquery, dkey, dvalue, dbias = gradients(dout, dlse, saved, _needed(*packed, *dropout, *scores))
        if sink is not None and ctx.needs_input_grad[_SINK]:
            check_sink(sink, query)
            dsink = sink_gradient(sink, out, lse, dout, dlse)
        trailing = dsink, None, None, None, None, dbias if learned else None, None, None
        return (dquery, dkey, dvalue, None, None, None, *trailing)[: ctx.inputs]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        raise RuntimeError(
            "dilated_attention has no forward-mode derivative (jvp); use reverse mode: torch.autograd.grad or .backward()"
        )


_record: Callable[..., tuple[Tensor, Tensor]] = super(torch.autograd.Function, Differentiable).apply
"""`Differentiable.apply` without what torch does there for transforms."""


def undispatched_forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    """The kernel of the forward operator, and its gradient recorded if one is wanted: what the dispatcher would come to."""
    if not torch.is_grad_enabled():
        return kernels.forward(*inputs)
    if want_gradient(inputs) and not torch._C._dispatch_tls_is_dispatch_key_excluded(AUTOGRAD):
        return _record(*inputs)
    with torch._C._AutoDispatchBelowAutograd():
        return kernels.forward(*inputs)


def _learning(*inputs: Any) -> tuple[Any, ...]:
    """`inputs` of which the bias requires a gradient, with a call that says so.

    It does not where the weights as they were seen required none: inside vmap, or while a graph was traced without gradients.
    Raises ValueError where the positions require one, which was not seen there either.
    """
    positions = (*inputs, None)[_BIAS + 1]
    if positions is not None and positions.requires_grad:
        raise ValueError("coordinates of the bias require a gradient, which they do not have; pass coordinates.detach()")
    return *inputs[:_CALL], with_learned_bias(inputs[_CALL]), *inputs[_CALL + 1 :]


class DifferentiableOnce(torch.autograd.Function):
    """The backward operator, which has no gradient of its own."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dquery, dkey, dvalue, dbias = _below_autograd(backward_op, *inputs)
        return dquery, dkey, dvalue, dbias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            "dilated_attention can be differentiated once only: double backward (create_graph=True) is not supported"
        )


def _below_autograd(op: Any, *inputs: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*inputs)


def autograd(op: Any, function: Any) -> Callable[..., Any]:
    """The implementation of `op` under the Autograd key: it records `function` if a gradient is wanted, else it calls `op`."""

    def kernel(*inputs: Any) -> Any:
        if not (torch.is_grad_enabled() and want_gradient(inputs)) and forward_ad._current_level < 0:
            return _below_autograd(op, *inputs)
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                "dilated_attention does not support torch.func.grad, vjp and jvp; use torch.autograd.grad or .backward()"
            )
        return function.apply(*inputs)

    return kernel


def _needed(*further: Any) -> tuple[Any, ...]:
    """Arguments of the backward operator after `call`, without the last ones that are None."""
    last = max((at for at, x in enumerate(further) if x is not None), default=-1)
    return further[: last + 1]


def _with_backends(call: str) -> str:
    """`call` with the backends that the forward pass asks for: its backward pass may run in another thread, outside of
    `use_backend`."""
    names = () if asks_for_backends(call) else requested_backends()
    return asking_for(call, ",".join(names)) if names else call


def gradients(
    dout: Tensor | None, dlse: Tensor | None, saved: tuple[Any, ...], further: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value and bias. `saved`, `further`: the arguments of the backward operator from `query` to `call`,
    and those after it."""
    dquery = dkey = dvalue = dbias = None
    if dout is not None:
        inputs = dout, *saved, *further
        once = not torch.is_grad_enabled() and undispatched(inputs)
        dquery, dkey, dvalue, dbias = kernels.backward(*inputs) if once else backward_op(*inputs)
    if dlse is not None:
        query, key, _, _, lse, mask, scale, call = saved
        through = _differentiate_lse(dlse, query, key, lse, mask, scale, call, further)
        dquery, dkey, dbias = (
            its if mine is None else mine + its for mine, its in zip((dquery, dkey, dbias), through, strict=True)
        )
    return dquery, dkey, dvalue, dbias


def _differentiate_lse(
    dlse: Tensor,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
    call: str,
    further: tuple[Any, ...],
) -> tuple[Tensor, ...]:
    """Gradients of query, key and bias through `lse`, `dlse` and `lse` `(batch, heads, seq)`. Dropout leaves `lse` as it is."""
    further = (*further[:2], None, None, *further[4:]) if further else ()
    call, value = without_dropout(call), key.new_zeros(()).expand(key.shape)

    def backward(dout: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        dquery, dkey, _, dbias = backward_op(dout, query, key, value, out, lse, mask, scale, call, *further)
        return dquery, dkey, dbias

    with without_autocast(query.device.type):
        by_row = dlse.transpose(1, 2), lse.transpose(1, 2)
        return through_lse(*by_row, query, key, scale, query.shape[1], lambda largest: largest, backward)


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """No autocast in a backend's matmuls, so that dtypes are the forward's. Other devices than these have none."""
    return torch.autocast(device, enabled=False) if device in AUTOCAST_KEYS else contextlib.nullcontext()


def vmap(
    info: Any,
    in_dims: tuple[Any, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    call: str,
    sink: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    dropout_seed: Tensor | None = None,
    dropout_places: Tensor | None = None,
    bias: Tensor | None = None,
    positions: Tensor | None = None,
    block_layout: Tensor | None = None,
) -> Any:
    """The vmap rule: the mapped dimension becomes part of the batch. Packed, or with a sink, weights or positions for each of its
    elements, they are calls."""
    if dropout_seed is not None:
        raise RuntimeError(
            "dilated_attention does not support vmap with dropout_p > 0: which weights are dropped depends on their place in the "
            "batch; make the mapped dimension a part of the batch, or use dropout_p=0"
        )
    if block_layout is not None:
        raise RuntimeError("dilated_attention does not support vmap with a block_layout; make the mapped dimension a batch")
    given = query, key, value, mask
    dims = (*in_dims, *_TRAILING)
    by_element = sink, cu_seqlens, bias, positions
    at_element = dims[_SINK], dims[_SINK + 1], dims[_BIAS], dims[_BIAS + 1]
    mapped = any(x is not None and dim is not None for x, dim in zip(by_element, at_element, strict=True))
    if cu_seqlens is not None or positions is not None or mapped:
        at = [*in_dims[:4], *at_element]
        parts = [_elements(x, dim, info.batch_size) for x, dim in zip((*given, *by_element), at, strict=True)]
        found = [
            forward_op(*tensors, scale, call, own, cu, max_seqlen, None, None, weights, placed)
            for *tensors, own, cu, weights, placed in zip(*parts, strict=True)
        ]
        return tuple(torch.stack(results) for results in zip(*found, strict=True)), (0, 0)

    def joined(x: Tensor | None, dim: int | None) -> Tensor | None:
        if x is None:
            return None
        return (x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    tensors = [joined(x, dim) for x, dim in zip(given, in_dims, strict=False)]
    batch = query.shape[0 if in_dims[0] is None else int(in_dims[0] == 0)]
    out, lse = forward_op(*tensors, scale, call, sink, None, None, None, None, bias)
    return tuple(x.unflatten(0, (info.batch_size, batch)) for x in (out, lse)), (0, 0)


def _elements(x: Tensor | None, dim: int | None, size: int) -> list[Any]:
    """What each of `size` elements of a mapped dimension gets of `x`."""
    return [x] * size if x is None or dim is None else list(x.unbind(dim))


def in_given_dtypes(function: F) -> F:
    """`function`, which computes in the dtypes of its tensors, and of which an autocast takes nothing away."""

    @functools.wraps(function)
    def kept(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._is_any_autocast_enabled():
            return function(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for device in filter(torch.is_autocast_enabled, AUTOCAST_KEYS):
                stack.enter_context(without_autocast(device))
            return function(*args, **kwargs)

    return cast(F, kept)


def autocast_forward(device: str) -> Callable[..., Any]:
    """The autocast rule of the forward operator: it computes in the autocast dtype; fp64 stays fp64, as elsewhere in torch."""

    def kernel(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Any:
        double = any(x.dtype == torch.float64 for x in (query, key, value))
        dtype = torch.float64 if double else torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return forward_op(query.to(dtype), key.to(dtype), value.to(dtype), *options)

    return kernel


def autocast_backward(device: str) -> Callable[..., Any]:
    """The autocast rule of the backward operator: no autocast in a backend's matmuls, so that dtypes are the forward's."""

    def kernel(*inputs: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return backward_op(*inputs)

    return kernel
