"""One call at a time, forward and backward."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from fuzz.calls import Call, computed, tensors_of
from fuzz.checks import require, require_right, require_same

from dilkit import dilated_attention, plan
from dilkit.testing.poison import poisoned_memory


def call(world: Any, call: dict[str, Any]) -> None:
    """A call against the oracle."""
    one = Call.from_data(call)
    tensors = tensors_of(one)
    with poisoned_memory() if one.way in ("function", "operator") else nullcontext():
        found = computed(one, tensors)
    require_right(one, tensors, found)


def again(world: Any, call: dict[str, Any], threads: int) -> None:
    """The same call twice, with another number of threads and an empty cache: the same bits by the CPU kernel."""
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
