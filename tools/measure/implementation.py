"""An implementation of attention that is measured, a backend or a baseline, and the random tensors that all of them are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from dilkit import registry, selector
from dilkit.pattern import Pattern
from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

BACKWARD_FLOPS = 2.5
"""Nominal FLOPs of a backward pass in units of the forward pass."""


@dataclass(frozen=True)
class Inputs:
    """Random tensors for one problem; query, key and value ask for gradients where the problem does."""

    query: Tensor
    key: Tensor
    value: Tensor
    dout: Tensor
    key_padding_mask: Tensor | None

    @classmethod
    def random(cls, problem: Problem, seed: int = 0) -> Inputs:
        """Standard normal tensors; the mask, where there is one, ignores the last eighth of every sequence."""
        import torch

        where = torch.device(problem.device.type, problem.device.index)
        generator = torch.Generator(where).manual_seed(seed)

        def normal(heads: int) -> Tensor:
            shape = problem.batch, problem.seq, heads, problem.head_dim
            return torch.randn(shape, generator=generator, device=where).to(getattr(torch, problem.dtype))

        heads, kv_heads = problem.heads, problem.kv_heads
        query, key, value, dout = normal(heads), normal(kv_heads), normal(kv_heads), normal(heads)
        for x in (query, key, value):
            x.requires_grad_(problem.requires_grad)
        mask = None
        if problem.key_padding_mask:
            mask = torch.zeros(problem.batch, problem.seq, dtype=torch.bool, device=where)
            mask[:, problem.seq - problem.seq // 8 :] = True
        return cls(query, key, value, dout, mask)


@dataclass(frozen=True)
class Function:
    """What an implementation computes that is no pattern's attention, in plain arithmetic: the oracle that it is checked against.

    `rows(inputs, problem, rows, dtype)` is `out[:, rows]`, all arithmetic in `dtype`, with the gradients of this function.
    `flops` are the nominal ones of a forward pass. `by_row`: a row of `out` depends on its own query alone. `positive`: checked
    on positive values, because sums that cancel are divided by.
    """

    rows: Callable[[Inputs, Problem, Tensor, str], Tensor]
    flops: float
    by_row: bool = True
    positive: bool = False

    def fitting(self, inputs: Inputs) -> Inputs:
        """The inputs that it can be checked on: these, or these with positive values."""
        if not self.positive:
            return inputs
        return replace(inputs, value=inputs.value.detach().abs().requires_grad_(inputs.value.requires_grad))


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention.

    `attend(inputs, problem)` returns `out`; `refusals(problem)` why it cannot, empty when it can; `absent()` what is missing on
    this machine, None when nothing is. `computed(pattern)` is the pattern whose attention it really computes; where
    `function(problem)` is not None, that is computed instead. `computes` says it in words. `quadratic`: its work grows with
    `seq**2` whatever the pattern. `checked` is compared with the oracle in its place, where the oracle does not know what it
    computes.
    """

    name: str
    kind: str
    summary: str
    attend: Callable[[Inputs, Problem], Tensor]
    refusals: Callable[[Problem], tuple[str, ...]]
    computed: Callable[[Pattern], Pattern] = lambda pattern: pattern
    quadratic: bool = False
    computes: str = "the attention of the pattern"
    function: Callable[[Problem], Function | None] = lambda problem: None
    absent: Callable[[], str | None] = lambda: None
    checked: Implementation | None = None

    def differs(self, problem: Problem) -> bool:
        """Whether it computes another function than the attention of the problem's pattern."""
        return self.function(problem) is not None or self.computed(problem.pattern) != problem.pattern

    def once(self, inputs: Inputs, problem: Problem) -> Any:
        """One whole call: forward, and backward too where the problem asks for gradients."""
        import torch

        if not problem.requires_grad:
            with torch.no_grad():
                return self.attend(inputs, problem)
        out = self.attend(inputs, problem)
        return torch.autograd.grad(out, (inputs.query, inputs.key, inputs.value), inputs.dout)

    def flops(self, problem: Problem) -> float:
        """Nominal FLOPs of one whole call of what it computes."""
        sizes: dict[str, Any] = dict(batch=problem.batch, kv_heads=problem.kv_heads, is_causal=problem.is_causal)
        if function := self.function(problem):
            forward = function.flops
        else:
            forward = self.computed(problem.pattern).flops(problem.seq, problem.heads, problem.head_dim, **sizes)
        return forward * (1 + BACKWARD_FLOPS if problem.requires_grad else 1)


def backend_implementations(names: Sequence[str] | None = None) -> list[Implementation]:
    """The backends of these names, in this order; all known ones, broken ones too, when None."""
    return [_from_backend(name) for name in (registry.list_backends() if names is None else names)]


def _from_backend(name: str) -> Implementation:
    from dilkit.backends.reference import Reference

    found = registry.backends()[name]

    def attend(inputs: Inputs, problem: Problem) -> Tensor:
        from dilkit.attention import dilated_attention

        options: dict[str, Any] = dict(is_causal=problem.is_causal, key_padding_mask=inputs.key_padding_mask, backend=name)
        out: Any = dilated_attention(inputs.query, inputs.key, inputs.value, problem.pattern, **options)
        return cast("Tensor", out)

    def refusals(problem: Problem) -> tuple[str, ...]:
        (decision,) = selector.trace(problem, {name: registry.backends()[name]}).decisions
        return () if decision.verdict == "picked" else decision.reasons

    summary = getattr(found, "summary", "")
    return Implementation(name, "backend", summary, attend, refusals, quadratic=isinstance(found, Reference))
