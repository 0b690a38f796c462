"""Single calls, several at once, and settings."""

import os
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from fuzz.calls import Call, computed, tensors_of
from fuzz.checks import in_threads, require, require_right, require_same

from dilkit import dilated_attention, plan
from dilkit.testing.poison import poisoned_memory


def call(world, call: dict[str, Any]):
    one = Call.from_data(call)
    tensors = tensors_of(one)
    with poisoned_memory() if one.way in ("function", "operator") else nullcontext():
        found = computed(one, tensors)
    require_right(one, tensors, found)


def again(world, call: dict[str, Any], threads: int):
    """Call twice, with other threads and an empty cache: the same bits by the CPU kernel."""
    one = replace(Call.from_data(call), backend="native")
    tensors = tensors_of(one)
    first, before = computed(one, tensors), torch.get_num_threads()
    torch.set_num_threads(threads)
    plan.cache_clear()
    second = computed(one, tensors)
    torch.set_num_threads(before)
    require_same(first, second, f"with {before} and {threads} threads")


def empty(world, call: dict[str, Any], batch: bool):
    one = Call.from_data(call)
    qkv = [x.detach().narrow(0 if batch else 1, 0, 0).requires_grad_() for x in tensors_of(one).qkv]
    out = dilated_attention(*qkv, one.case.pattern, backend=one.backend)
    out.sum().backward()
    require(out.shape == qkv[0].shape and all(x.grad is not None and x.grad.shape == x.shape for x in qkv), "shapes differ")


def together(world, calls: list[dict[str, Any]], clears: int):
    """Each call in a thread of its own, while another thread clears the cache."""
    each = [Call.from_data(call) for call in calls]
    given = [tensors_of(one) for one in each]
    jobs = [lambda one=one, x=x: computed(one, x) for one, x in zip(each, given, strict=True)]
    found = in_threads([*jobs, lambda: [plan.cache_clear() for _ in range(clears)]])
    for one, tensors, result in zip(each, given, found, strict=False):
        require_right(one, tensors, result)


def set_to(world, name: str, value: str):
    if name == "threads":
        torch.set_num_threads(int(value))
    else:
        os.environ[name] = value


def clear(world):
    plan.cache_clear()
    info = plan.cache_info()
    require(info.entries == info.bytes == 0, f"the cache is not empty: {info}")
