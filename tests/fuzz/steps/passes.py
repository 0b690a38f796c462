"""Backward passes of earlier forward passes."""

from dataclasses import dataclass
from typing import Any

import torch
from fuzz.calls import Call, attend, leaves, results, saved, tensors_of
from fuzz.checks import DOES_NOT_FIT, in_threads, require_raises, require_right
from torch import Tensor

from dilkit.testing.tensors import Tensors

MOST_PENDING = 4


@dataclass
class Pending:
    call: Call
    tensors: Tensors
    inputs: list[Tensor]
    outputs: tuple[Tensor, Tensor | None]


def forward(world, call: dict[str, Any]):
    one = Call.from_data(call)
    tensors = tensors_of(one)
    inputs = leaves(one, tensors)
    with saved(one.hooks):
        outputs = attend(one, *inputs[:3], tensors.mask, *inputs[3:])
    world.pending = [*world.pending, Pending(one, tensors, inputs, outputs)][-MOST_PENDING:]


def backward(world, at: int, after: str, which: int):
    """The backward pass of one that waits, after something was done to a tensor that it uses."""
    if not world.pending:
        return
    one = world.pending.pop(at % len(world.pending))
    used = [*one.inputs[:3], one.outputs[0], *(() if one.tensors.mask is None else (one.tensors.mask,))]
    target = used[which % len(used)]
    plain = one.call.hooks == "none" and one.call.way in ("function", "operator") and any(one.call.wants)
    if after == "in place" and plain and target.is_contiguous():
        with torch.no_grad():
            target.zero_()
        require_raises(lambda: _gradients(one), (RuntimeError,), "modified by an inplace operation")
    elif after == "memory gone" and plain and not target.is_neg():  # torch itself copies one that is negated, and dies
        target.untyped_storage().resize_(0)
        require_raises(lambda: _gradients(one), DOES_NOT_FIT, "beyond the 0 bytes of its storage")
    elif after == "behind autograd" and target.is_contiguous():
        target.data.zero_()
        _gradients(one)  # of other numbers than the forward pass had
    else:
        found = in_threads([lambda: _gradients(one)])[0] if after == "other thread" else _gradients(one)
        require_right(one.call, one.tensors, found)


def _gradients(one: Pending):
    return results(one.call, one.tensors, one.outputs, one.inputs)
