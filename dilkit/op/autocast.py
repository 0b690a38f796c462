"""Autocast: no backend computes under one, so that dtypes are those of its tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])

AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
"""Dispatch keys of autocast by device; other devices have none."""


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context without autocast, so that a backend's matmuls keep the forward's dtypes."""
    return torch.autocast(device, enabled=False) if device in AUTOCAST_KEYS else contextlib.nullcontext()


def in_given_dtypes(function: F) -> F:
    """Return `function`, computed in the dtypes of its tensors, without autocast."""

    @functools.wraps(function)
    def kept(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._is_any_autocast_enabled():
            return function(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for device in filter(torch.is_autocast_enabled, AUTOCAST_KEYS):
                stack.enter_context(without_autocast(device))
            return function(*args, **kwargs)

    return cast(F, kept)
