"""Token orders on tensors: moving tokens along a dimension, with its gradient, in plain calls and in compiled ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import dilkit
from dilkit.device import capturing
from dilkit.op.schema import library
from dilkit.orders.checks import check_tokens

if TYPE_CHECKING:
    from dilkit.orders.token_order import TokenOrder

library.define("reorder(Tensor x, int dim, str order, bool inverse) -> Tensor")
reorder_op: Callable[[Tensor, int, str, bool], Tensor] = torch.ops.dilkit.reorder.default


def moved(x: Tensor, dim: int, order: TokenOrder, inverse: bool) -> Tensor:
    """Return `x.index_select(dim, perm)`, with `rank` in place of `perm` if `inverse`. Raises as `TokenOrder.apply`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}; a torch.Tensor or a numpy.ndarray is needed")
    if x.layout is not torch.strided or x.is_nested:
        raise TypeError(f"x has layout {x.layout}; a plain tensor, torch.strided, is needed (x.to_dense())")
    check_tokens(x, dim, order)
    if torch.compiler.is_compiling():
        if order.text is not None:  # the table of a grid is looked up when the graph runs
            return reorder_op(x, dim, order.text, inverse)
        perm = torch.as_tensor(order.perm, dtype=torch.int64, device=x.device)  # an input of the graph
        return torch.empty_like(x).index_copy(dim, perm, x) if inverse else x.index_select(dim, perm)
    to = _index(order, x, inverse)
    if torch.is_grad_enabled() and x.requires_grad:
        return _move(x, dim, to, _index(order, x, not inverse))
    return _select(x, dim, to)


def _select(x: Tensor, dim: int, to: Tensor) -> Tensor:
    """Return `x.index_select(dim, to)`. A single sequence's rows are moved as a matrix's, which is faster on CPUs."""
    lead = x.shape[: dim % x.dim()]
    if x.device.type != "cpu" or lead.numel() != 1 or not x.is_contiguous() or x.numel() == 0:
        return x.index_select(dim, to)
    return x.view(len(to), -1).index_select(0, to).view(x.shape)


def index_of(order: TokenOrder, device: torch.device, inverse: bool) -> Tensor:
    """Return `perm` or `rank` on a device: on the CPU a view of the array, elsewhere a copy that is kept in the cache."""
    if device.type == "cpu":
        return _tensor(order, device, inverse)
    kept: Tensor = order.kept(("index", device, inverse), partial(_tensor, order, device, inverse))
    if capturing(device):
        _CAPTURED[id(kept)] = kept
    return kept


_CAPTURED: dict[int, Tensor] = {}
"""Tables that CUDA graphs read. They are kept for ever, because the end of a graph cannot be observed."""


def _index(order: TokenOrder, x: Tensor, inverse: bool) -> Tensor:
    if type(x) is not Tensor or torch._C._are_functorch_transforms_active():
        # A table made for a fake tensor may be fake itself, so it is not kept. vmap of older torch needs 64 bits.
        return _tensor(order, x.device, inverse).long()
    return index_of(order, x.device, inverse)


def _tensor(order: TokenOrder, device: torch.device, inverse: bool) -> Tensor:
    array = (order.rank if inverse else order.perm).view()
    array.setflags(write=True)  # torch warns of read-only memory, even if nothing writes to it
    with torch.inference_mode(False):  # a tensor made in inference mode could not be used for training later
        return torch.from_numpy(array).to(device)


class _Moved(torch.autograd.Function):
    """`index_select` of a permutation. Its gradient selects by the inverse; torch's own gradient adds rows one by one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dim: int, to: Tensor, back: Tensor) -> Tensor:
        return _select(x, dim, to)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.dim, to, back = inputs
        ctx.save_for_backward(to, back)
        ctx.save_for_forward(to)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        to, back = ctx.saved_tensors
        return _move(grad, ctx.dim, back, to), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return tangent.index_select(ctx.dim, ctx.saved_tensors[0])


_move: Callable[[Tensor, int, Tensor, Tensor], Tensor] = _Moved.apply


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.dim, ctx.order, ctx.inverse = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return reorder_op(grad, ctx.dim, ctx.order, not ctx.inverse), None, None, None


def _vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, dim: int, order: str, inverse: bool) -> tuple[Tensor, int]:
    return reorder_op(x.movedim(in_dims[0], 0), dim + 1 if dim >= 0 else dim, order, inverse), 0


library.impl(
    "reorder",
    lambda x, dim, order, inverse: _select(x, dim, index_of(dilkit.TokenOrder.from_text(order), x.device, inverse)),
    "CompositeExplicitAutograd",
)
torch.library.register_autograd("dilkit::reorder", _backward, setup_context=_setup_context, lib=library)
torch.library.register_fake("dilkit::reorder", lambda x, *_: x.new_empty(x.shape), lib=library)
torch.library.register_vmap("dilkit::reorder", _vmap, lib=library)
