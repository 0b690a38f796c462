"""Calls, forward and backward, one at a time or several at once, and the settings that they run under."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from fuzz.calls import Call, computed, tensors_of
from fuzz.checks import in_threads, require, require_right, require_same

from dilkit import dilated_attention, plan
from dilkit.testing.poison import poisoned_memory


def call(world: Any, call: dict[str, Any]) -> None:
    one = Call.from_data(call)
    tensors = tensors_of(one)
    with poisoned_memory() if one.way in ("function", "operator") else nullcontext():
        found = computed(one, tensors)
    require_right(one, tensors, found)


def again(world: Any, call: dict[str, Any], threads: int) -> None:
    """Call twice, with other threads and an empty cache: the same bits by the CPU kernel."""
    one = replace(Call.from_data(call), backend="native")
    tensors = tensors_of(one)
    first, before = computed(one, tensors), torch.get_num_threads()
    torch.set_num_threads(threads)
    plan.cache_clear()
    second = computed(one, tensors)
    torch.set_num_threads(before)
    require_same(first, second, f"with {before} and {threads} threads")


def empty(world: Any, call: dict[str, Any], batch: bool) -> None:
    """No sequences, or none with a token: nothing, and gradients of nothing."""
    one = Call.from_data(call)
    qkv = [x.detach().narrow(0 if batch else 1, 0, 0).requires_grad_() for x in tensors_of(one).qkv]
    out = dilated_attention(*qkv, one.case.pattern, backend=one.backend)
    out.sum().backward()
    require(out.shape == qkv[0].shape and all(x.grad is not None and x.grad.shape == x.shape for x in qkv), "shapes differ")


def together(world: Any, calls: list[dict[str, Any]], clears: int) -> None:
    """Each call in a thread of its own, while another thread clears the cache."""
    each = [Call.from_data(call) for call in calls]
    given = [tensors_of(one) for one in each]
    jobs = [lambda one=one, x=x: computed(one, x) for one, x in zip(each, given, strict=True)]
    found = in_threads([*jobs, lambda: [plan.cache_clear() for _ in range(clears)]])
    for one, tensors, result in zip(each, given, found, strict=False):
        require_right(one, tensors, result)


def set_to(world: Any, name: str, value: str) -> None:
    if name == "threads":
        torch.set_num_threads(int(value))
    else:
        os.environ[name] = value


def clear(world: Any) -> None:
    plan.cache_clear()
    info = plan.cache_info()
    require(info.entries == info.bytes == 0, f"the cache is not empty: {info}")
