"""An implementation of attention that is measured: a backend, a baseline or a peer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from dilkit import registry, selector
from dilkit.pattern import Pattern
from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from dilkit.testing.tensors import Tensors

BACKWARD_FLOPS = 2.5
"""Nominal FLOPs of a backward pass in units of the forward pass."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention.

    `attend(inputs, problem)` returns `out`; `refusals(problem)` why it cannot, empty when it can. `computed(pattern)` is the
    pattern whose attention it really computes, and `computes` says it in words. `quadratic`: its work grows with `seq**2`
    whatever the pattern. `checked` is compared with the oracle in its place, where the oracle does not know what it computes.
    `own_gradients(query, key, value, problem, rows)`, `out` and `lse` of the queries in `rows` in plain arithmetic, has the
    gradients that it computes, where they are not those of the attention.
    """

    name: str
    kind: str
    summary: str
    attend: Callable[[Tensors, Problem], Tensor]
    refusals: Callable[[Problem], tuple[str, ...]]
    computed: Callable[[Pattern], Pattern] = lambda pattern: pattern
    quadratic: bool = False
    computes: str = "the attention of the pattern"
    own_gradients: Callable[[Tensor, Tensor, Tensor, Problem, Tensor], tuple[Tensor, Tensor]] | None = None
    checked: Implementation | None = None

    def differs(self, problem: Problem) -> bool:
        """Whether it computes another function than the attention of the problem's pattern."""
        return (self.own_gradients is not None and problem.requires_grad) or self.computed(problem.pattern) != problem.pattern

    def once(self, inputs: Tensors, problem: Problem) -> Any:
        """One whole call: forward, and backward too where the problem asks for gradients."""
        import torch

        if not problem.requires_grad:
            with torch.no_grad():
                return self.attend(inputs, problem)
        out = self.attend(inputs, problem)
        return torch.autograd.grad(out, inputs.qkv, inputs.dout)

    def flops(self, problem: Problem) -> float:
        """Nominal FLOPs of one whole call of what it computes."""
        forward = replace(problem, pattern=self.computed(problem.pattern)).flops()
        return forward * (1 + BACKWARD_FLOPS * problem.requires_grad)


def backend_implementations(names: Sequence[str] | None = None) -> list[Implementation]:
    """The backends of these names, in this order; all known ones, broken ones too, when None."""
    return [_from_backend(name) for name in (registry.list_backends() if names is None else names)]


def automatic() -> Implementation:
    """A call that names no backend: the automatic choice."""
    return Implementation("automatic", "choice", "the automatic choice", partial(_attend, None), lambda problem: ())


def _attend(backend: str | None, inputs: Tensors, problem: Problem) -> Tensor:
    from dilkit.attention import dilated_attention

    options: dict[str, Any] = dict(is_causal=problem.is_causal, key_padding_mask=inputs.mask, backend=backend)
    out: Any = dilated_attention(inputs.query, inputs.key, inputs.value, problem.pattern, **options)
    return cast("Tensor", out)


def _from_backend(name: str) -> Implementation:
    from dilkit.backends.reference import Reference

    backend = registry.backends()[name]

    def refusals(problem: Problem) -> tuple[str, ...]:
        (decision,) = selector.trace(problem, {name: registry.backends()[name]}).decisions
        return () if decision.verdict == "picked" else decision.reasons

    summary = getattr(backend, "summary", "")
    return Implementation(name, "backend", summary, partial(_attend, name), refusals, quadratic=isinstance(backend, Reference))
