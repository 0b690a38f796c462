"""Backends of others that were written for dilkit 0.2: they take tensors one by one, in a method for each way of calling."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from dilkit.backend import Backend
from dilkit.inputs import Inputs
from dilkit.problem import Problem

Forward: TypeAlias = Callable[[Inputs, Problem], tuple[Tensor, Tensor]]
Backward: TypeAlias = Callable[[Tensor, Inputs, Tensor, Tensor, Problem], tuple[Tensor, ...]]


class Methods(NamedTuple):
    """`forward` and `backward` of a backend, as `Backend` has them."""

    forward: Forward
    backward: Backward


def methods_of(backend: Backend) -> Methods:
    """The methods of a backend; those of an older one are given the tensors one by one, with a warning for each class."""
    if not _is_older(type(backend)):
        return Methods(backend.forward, backend.backward)
    return Methods(_older_forward(backend), _older_backward(backend))


@lru_cache(maxsize=64)
def _is_older(cls: type[Backend]) -> bool:
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = [one for one in inspect.signature(cls.forward).parameters.values() if one.kind in named]
    if len(given) <= 3:  # self, inputs, problem
        return False
    warnings.warn(
        f"{cls.__module__}.{cls.__qualname__}.forward takes query, key and value one by one, as backends of dilkit 0.2 did; a "
        "later version will give it `inputs` and `problem` alone (docs/migrating.md)",
        DeprecationWarning,
        stacklevel=2,
    )
    return True


def _older_forward(backend: Any) -> Forward:
    def forward(inputs: Inputs, problem: Problem) -> Any:
        options = {} if inputs.dropout is None else dict(dropout=inputs.dropout)
        if inputs.cache_seqlens is not None:
            return backend.forward_last(*inputs[:3], problem, inputs.cache_seqlens)
        if inputs.cu_seqlens is not None:
            return backend.forward_varlen(*inputs[:3], problem, inputs.cu_seqlens, **options)
        return backend.forward(*inputs[:3], problem, inputs.key_padding_mask, **options)

    return forward


def _older_backward(backend: Any) -> Backward:
    def backward(dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, problem: Problem) -> Any:
        options = {} if inputs.dropout is None else dict(dropout=inputs.dropout)
        if inputs.cu_seqlens is not None:
            return backend.backward_varlen(dout, *inputs[:3], out, lse, problem, inputs.cu_seqlens, **options)
        return backend.backward(dout, *inputs[:3], out, lse, problem, inputs.key_padding_mask, **options)

    return backward
