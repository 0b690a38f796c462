"""Marks for `torch.compile`, which do not import it and so spare half of the time until a program's first call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
COMPILER = "torch._dynamo"


def assume_constant_result(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, whose result `torch.compile` takes for a constant: `torch.compiler`'s own mark imports the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def not_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, at which `torch.compile` breaks its graph: what is exchanged cannot be traced."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling() and COMPILER not in sys.modules:
            return function(*args, **kwargs)
        disabled: Callable[P, R] = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return call
