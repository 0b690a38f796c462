"""Calls that have query, key and value alone, around torch's dispatcher: of small problems all else takes longer than the kernel.

dilated_attention   --- plain_facts --->          forward    what the cache has for these facts, then the backend
autograd            --- facts_undispatched --->   backward   the same, with dout and what the forward pass saved
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dilkit.inputs import Inputs
from dilkit.op import boundary
from dilkit.op._facts import facts_undispatched
from dilkit.op.prepared_call import PreparedCall, prepare
from dilkit.op.rules import AUTOGRAD, gradients, undispatched_forward


def forward(query: Tensor, key: Tensor, value: Tensor, scale: float, call: str, facts: bytes) -> tuple[Tensor, Tensor]:
    """`(out, lse)`, and their gradient recorded if `call` says that one is wanted; `facts`: those of `plain_facts`."""
    prepared = prepare(boundary.INPUTS, (query, key, value), facts, scale, call)
    if not prepared.is_plain:
        return undispatched_forward(query, key, value, None, scale, call)
    if prepared.problem.requires_grad and not torch._C._dispatch_tls_is_dispatch_key_excluded(AUTOGRAD):
        return _record(query, key, value, prepared)
    return _compute(query, key, value, prepared)


def _compute(query: Tensor, key: Tensor, value: Tensor, prepared: PreparedCall) -> tuple[Tensor, Tensor]:
    boundary.check_room(boundary.INPUTS, (query, key, value), prepared.admission.spans)
    return prepared.backend.forward(Inputs(query, key, value), prepared.problem)


class DifferentiableAlone(torch.autograd.Function):
    """`dilkit.op.rules.Differentiable` of such a call."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, prepared: PreparedCall) -> tuple[Tensor, Tensor]:
        out, lse = _compute(query, key, value, prepared)
        ctx.prepared = prepared
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        scale, call = ctx.prepared.problem.scale, ctx.prepared.backward_call
        if dout is not None and dlse is None and not torch.is_grad_enabled():
            tensors = dout, *saved
            facts = facts_undispatched(tensors)
            prepared = None if facts is None else prepare(boundary.SAVED, tensors, facts, scale, call)
            if prepared is not None and prepared.is_plain:
                boundary.check_room(boundary.SAVED, tensors, prepared.admission.spans)
                query, key, value, out, lse = saved
                return *prepared.backend.backward(dout, Inputs(query, key, value), out, lse, prepared.problem), None
        return *gradients(dout, dlse, (*saved, None, scale, call), ())[:3], None


_record: Callable[..., tuple[Tensor, Tensor]] = super(torch.autograd.Function, DifferentiableAlone).apply
"""`DifferentiableAlone.apply` without what torch does there for transforms."""
