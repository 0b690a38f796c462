"""Backward passes over ranks have no derivative: a second one is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def differentiable_once(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Make `backward` of an autograd function return results that raise where they are differentiated again.

    torch's `once_differentiable` takes the results for constants if no gradient that comes in has a graph, though they depend on
    what the forward pass saved: a penalty on gradients would be left out without a word.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        every: tuple[Any, ...] = _Refused.apply(len(results), *results, *ctx.saved_tensors, *grads)  # type: ignore[no-untyped-call]
        return every

    return once


class _Refused(torch.autograd.Function):
    """Results as they are, which depend on further tensors: the way from them to these has no derivative."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(
            "attention over ranks can be differentiated once only: double backward (create_graph=True) is not supported"
        )
