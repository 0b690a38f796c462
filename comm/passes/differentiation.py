"""Backward passes over ranks have no derivative: a second one is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def differentiable_once(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """`backward` of an autograd function, whose results raise where they are differentiated again.

    torch's `once_differentiable` takes the results for constants if no gradient that comes in has a graph, though they depend on
    what the forward pass saved: a penalty on gradients would be left out without a word.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        return tuple(_constant(x) if isinstance(x, Tensor) else x for x in results)

    return once


def _constant(x: Tensor) -> Tensor:
    """Return a view whose gradient is refused."""

    def refuse(gradient: Tensor) -> None:
        raise RuntimeError(
            "attention over ranks can be differentiated once only: double backward (create_graph=True) is not supported"
        )

    view = x.detach().requires_grad_().view_as(x)
    view.register_hook(refuse)  # type: ignore[no-untyped-call]
    return view
