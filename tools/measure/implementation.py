"""An implementation of attention that is measured: a backend, a baseline or a peer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilkit import registry, selector
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.testing.accuracy import Results, differentiated
from dilkit.testing.tensors import Tensors

BACKWARD_FLOPS = 2.5
"""Nominal FLOPs of a backward pass in units of the forward pass."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention.

    Attributes:
        computed: returns the pattern whose attention is really computed; `computes` names the function in words.
        quadratic: True if the work grows with `seq**2` whatever the pattern.
        checked: implementation that is compared with the oracle in place of this one, whose function the oracle does not know.
        prepared_bytes: returns the size of what is made for a problem once, such as a mask of all pairs.
        with_lse: function that is checked in place of `attend`, and returns `lse` too.
    """

    name: str
    summary: str
    attend: Callable[[Tensors, Problem], Tensor]
    refusals: Callable[[Problem], tuple[str, ...]] = lambda problem: ()
    computed: Callable[[Pattern], Pattern] = lambda pattern: pattern
    quadratic: bool = False
    computes: str = "the attention of the pattern"
    checked: Implementation | None = None
    prepared_bytes: Callable[[Problem], int] = lambda problem: 0
    with_lse: Callable[[Tensors, Problem], tuple[Tensor, Tensor]] | None = None

    def once(self, inputs: Tensors, problem: Problem) -> Any:
        """Make one whole call: forward, and backward too where the problem asks for gradients."""
        if not problem.requires_grad:
            with torch.no_grad():
                return self.attend(inputs, problem)
        leaves = [*inputs.qkv]
        if inputs.bias is not None:
            leaves.append(inputs.bias.weights.detach().requires_grad_())
            inputs = replace(inputs, bias=inputs.bias.with_weights(leaves[-1]))
        return torch.autograd.grad(self.attend(inputs, problem), leaves, inputs.dout)

    def results(self, inputs: Tensors, problem: Problem) -> Results:
        """Return the results of one whole call by name, for checks."""

        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **bias: Any) -> tuple[Tensor, Tensor]:
            detached = replace(inputs, query=query, key=key, value=value, **bias)
            return self.with_lse(detached, problem) if self.with_lse else (self.attend(detached, problem), query.new_zeros(0))

        with torch.set_grad_enabled(problem.requires_grad):
            results = differentiated(attend, inputs, problem.requires_grad)
        return {name: x for name, x in results.items() if x.numel()}

    def flops(self, problem: Problem) -> float:
        """Return nominal FLOPs of one whole call of what it computes."""
        forward = replace(problem, pattern=self.computed(problem.pattern)).flops()
        return forward * (1 + BACKWARD_FLOPS * problem.requires_grad)


def backend_implementations(names: Sequence[str] | None = None) -> list[Implementation]:
    """Return the backends of these names, in this order; all known ones, broken ones too, when None."""
    return [_from_backend(name) for name in (registry.list_backends() if names is None else names)]


def automatic() -> Implementation:
    """Return the automatic choice: a call that names no backend."""
    return Implementation("automatic", "the automatic choice", partial(_attend, None))


def _attend(backend: str | None, inputs: Tensors, problem: Problem) -> Tensor:
    from dilkit.attention import dilated_attention

    attend: Any = dilated_attention
    options = dict(is_causal=problem.is_causal, key_padding_mask=inputs.mask, backend=backend)
    out: Tensor = attend(inputs.query, inputs.key, inputs.value, problem.pattern, **options)
    return out


def _from_backend(name: str) -> Implementation:
    from dilkit.backends.reference import Reference

    backend = registry.backends()[name]

    def refusals(problem: Problem) -> tuple[str, ...]:
        (decision,) = selector.trace(problem, {name: registry.backends()[name]}).decisions
        return () if decision.verdict == "picked" else decision.reasons

    summary = getattr(backend, "summary", "")
    return Implementation(name, summary, partial(_attend, name), refusals, quadratic=isinstance(backend, Reference))
