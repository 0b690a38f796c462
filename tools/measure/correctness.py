"""Is an implementation right? Checked just before it is timed: on a shortened problem as a whole, and in rows at the real length.

Allowed is twice (gradients: three times) the error that plain torch arithmetic of the same dtype makes, and a few roundings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dilkit.oracle import oracle_attention
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.tools.measure.implementation import Function, Implementation, Inputs
from dilkit.tools.results.record import Check, Difference

if TYPE_CHECKING:
    from torch import Tensor

SHORT, WIDE, KEYS = 512, 8, 8
"""Tokens of the shortened problem, at most; heads in all sequences beyond which there are fewer; keys that segments keep."""
ROWS = 16
_LAST_PLACES = 8
_NAMES = ("out", "dquery", "dkey", "dvalue")

Known = dict[Hashable, Any]
"""The oracle's results by what they are of."""


def check(implementation: Implementation, problem: Problem, inputs: Inputs, known: Known | None = None) -> tuple[Check, ...]:
    """Everything that is checked before timing, in memory full of NaN.

    The shortened problem is left out where the implementation refuses it. `known` keeps the oracle's results for the next
    implementation that is checked on the same `inputs`.
    """
    short = shortened(problem)
    whole = () if implementation.refusals(short) else check_whole(implementation, short, known)
    return (*whole, *check_rows(implementation, problem, inputs, known))


def _remembered(known: Known | None, key: Hashable, make: Callable[[], Any]) -> Any:
    """What `make` returns, made once for a key where there is something to keep it in."""
    if known is None:
        return make()
    if key not in known:
        known[key] = make()
    return known[key]


def shortened(problem: Problem) -> Problem:
    """`problem` with lengths divided by the power of two that leaves at most `SHORT` tokens; rates stay as they are.

    Of many heads and sequences fewer tokens are left, so that the oracle's matrices are no larger than those of `WIDE`. A segment
    keeps `KEYS` of its keys, as far as it has them: of a single key no query would have a gradient.
    """
    most = SHORT * min(1.0, math.sqrt(WIDE / (problem.batch * problem.heads)))
    divisor = 1 << max(0, math.ceil(math.log2(max(problem.seq, 1) / most)))
    pattern = problem.pattern
    lengths = [
        max(rate, min(w, KEYS * rate), min(w, problem.seq) // divisor)
        for w, rate in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)
    ]
    scaled = Pattern(lengths, pattern.dilation_rates, pattern.offset, pattern.overlap, pattern.heads, pattern.head_shard)
    return replace(problem, seq=problem.seq // divisor, pattern=scaled)


def check_whole(implementation: Implementation, problem: Problem, known: Known | None = None) -> tuple[Check, ...]:
    """All of `out`, and all gradients where the problem asks for them, against the oracle."""
    from dilkit.testing.poison import poisoned_memory

    inputs, function = Inputs.random(problem, seed=1), implementation.function(problem)
    if function is not None:
        inputs = function.fitting(inputs)
    with poisoned_memory():
        computed = _with_gradients(implementation.attend(inputs, problem), inputs, problem)
    if function is None:
        return check_tensors(computed, problem, implementation.computed(problem.pattern), inputs, known)
    return _compared(computed, partial(_whole, function, problem, inputs), problem)


def check_tensors(
    computed: Sequence[Tensor], problem: Problem, pattern: Pattern, inputs: Inputs, known: Known | None = None
) -> tuple[Check, ...]:
    """`out`, and `dquery, dkey, dvalue` where the problem asks for them, against the oracle of `pattern`."""

    def exact(dtype: str) -> tuple[Tensor, ...]:
        key = "whole", problem, pattern, dtype
        found: tuple[Tensor, ...] = _remembered(known, key, partial(_oracle, pattern, problem, inputs, dtype))
        return found

    return _compared(computed, exact, problem)


def _compared(computed: Sequence[Tensor], exact: Callable[[str], Sequence[Tensor]], problem: Problem) -> tuple[Check, ...]:
    truth, plain = exact("float64"), exact(_plain_dtype(problem))
    return tuple(check_tensor(*row, problem) for row in zip(_NAMES, computed, plain, truth, strict=False))


def _whole(function: Function, problem: Problem, inputs: Inputs, dtype: str) -> tuple[Tensor, ...]:
    import torch

    rows = torch.arange(problem.seq, device=inputs.query.device)
    return _with_gradients(function.rows(inputs, problem, rows, dtype), inputs, problem)


def _oracle(pattern: Pattern, problem: Problem, inputs: Inputs, dtype: str) -> tuple[Tensor, ...]:
    options: dict[str, Any] = dict(is_causal=problem.is_causal, key_padding_mask=inputs.key_padding_mask, scale=problem.scale)
    out, _ = oracle_attention(inputs.query, inputs.key, inputs.value, pattern, dtype=dtype, **options)
    return _with_gradients(out, inputs, problem)


def _with_gradients(out: Tensor, inputs: Inputs, problem: Problem) -> tuple[Tensor, ...]:
    """`out`, and where the problem asks for gradients those of query, key and value."""
    import torch

    if not problem.requires_grad:
        return (out,)
    return (out, *torch.autograd.grad(out, (inputs.query, inputs.key, inputs.value), inputs.dout.to(out.dtype)))


def _plain_dtype(problem: Problem) -> str:
    return "float32" if problem.dtype == "float64" else problem.dtype


def check_rows(implementation: Implementation, problem: Problem, inputs: Inputs, known: Known | None = None) -> tuple[Check, ...]:
    """`out`, and the gradient of the query where the problem asks for it, in `ROWS` random rows at the real length.

    Each row is computed by itself out of the rows of the count; the gradient of a query needs its own row alone.
    """
    rows, function = _some_rows(problem, inputs), implementation.function(problem)
    if function is not None:
        inputs = function.fitting(inputs)

    def exact(dtype: str) -> tuple[Tensor, Tensor | None]:
        if function is not None:
            return _function_rows(function, inputs, problem, rows, dtype)
        pattern = implementation.computed(problem.pattern)
        make = partial(exact_rows, inputs, problem, pattern, rows, dtype)
        found: tuple[Tensor, Tensor | None] = _remembered(known, ("rows", problem, pattern, dtype), make)
        return found

    truth, plain = exact("float64"), exact(_plain_dtype(problem))
    computed = _rows_of(implementation, inputs, problem, rows)
    named = zip(("out rows", "dquery rows"), computed, plain, truth, strict=True)
    return tuple(
        check_tensor(name, x, y, z, problem) for name, x, y, z in named if x is not None and y is not None and z is not None
    )


def difference(implementation: Implementation, problem: Problem, inputs: Inputs) -> Difference | None:
    """How far its result is from the attention of the problem's pattern, in `ROWS` random rows at the real length; None where
    that is what it computes."""
    if not implementation.differs(problem):
        return None
    rows = _some_rows(problem, inputs)
    found: dict[str, float] = {}
    truth = exact_rows(inputs, problem, problem.pattern, rows, "float64")
    for name, computed, exact in zip(("out", "dquery"), _rows_of(implementation, inputs, problem, rows), truth, strict=True):
        if computed is not None and exact is not None:
            error = (computed.double() - exact).abs().max().item()
            found |= {f"{name}_max_abs": error, f"{name}_relative": error / max(exact.abs().max().item(), 1e-300)}
    return Difference(computes=implementation.computes, **found)


def _some_rows(problem: Problem, inputs: Inputs) -> Tensor:
    import torch

    chosen = torch.randperm(problem.seq, generator=torch.Generator().manual_seed(2))[:ROWS]
    return chosen.sort().values.to(inputs.query.device)


def _rows_of(implementation: Implementation, inputs: Inputs, problem: Problem, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """What the implementation computes: `out` in `rows`, and the gradient of their queries where the problem asks for it."""
    import torch

    from dilkit.testing.poison import poisoned_memory

    with poisoned_memory():
        result = implementation.once(inputs, problem)
    if not problem.requires_grad:
        return result[:, rows], None
    with torch.no_grad(), poisoned_memory():
        out = implementation.attend(inputs, problem)
    return out[:, rows], result[0][:, rows]


def _function_rows(
    function: Function, inputs: Inputs, problem: Problem, rows: Tensor, dtype: str
) -> tuple[Tensor, Tensor | None]:
    import torch

    gradients = problem.requires_grad and function.by_row
    with torch.set_grad_enabled(gradients):
        out = function.rows(inputs, problem, rows, dtype)
    if not gradients:
        return out, None
    (dquery,) = torch.autograd.grad(out, inputs.query, inputs.dout[:, rows].to(out.dtype))
    return out.detach(), dquery[:, rows]


def exact_rows(inputs: Inputs, problem: Problem, pattern: Pattern, rows: Tensor, dtype: str) -> tuple[Tensor, Tensor | None]:
    """`out` of `rows` and the gradient of their queries, both `(batch, rows, heads, head_dim)`, all arithmetic in `dtype`."""
    import torch

    kind, group = getattr(torch, dtype), problem.heads // problem.kv_heads
    count = pattern.count_rows(rows, problem.seq, problem.heads, kv_heads=problem.kv_heads, is_causal=problem.is_causal)
    outs: list[Tensor] = []
    grads: list[Tensor] = []
    for head in range(problem.heads):
        query = inputs.query.detach()[:, rows, head].to(kind).requires_grad_(problem.requires_grad)
        key, value = (x.detach()[:, :, head // group].to(kind) for x in (inputs.key, inputs.value))
        seen = count[head].to(kind).expand(problem.batch, -1, -1)
        if inputs.key_padding_mask is not None:
            seen = seen * ~inputs.key_padding_mask[:, None, :]
        sees_none = (seen == 0).all(-1, keepdim=True)
        scores = (problem.scale * (query @ key.mT) + seen.log()).masked_fill(sees_none, 0.0)
        out = torch.softmax(scores, -1).masked_fill(sees_none, 0.0) @ value
        if problem.requires_grad:
            grads += torch.autograd.grad(out, query, inputs.dout[:, rows, head].to(kind))
        outs.append(out.detach())
    return torch.stack(outs, 2), torch.stack(grads, 2) if grads else None


def check_tensor(what: str, computed: Tensor, plain: Tensor, truth: Tensor, problem: Problem) -> Check:
    """One result beside fp64 `truth`, and `plain` torch arithmetic of the dtype, which sets what is allowed."""
    import torch

    error, plain_error = ((x.detach().double() - truth.double()).abs().max().item() for x in (computed, plain))
    single, exact = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps
    result = torch.finfo(getattr(torch, problem.dtype)).eps
    if problem.dtype == "float64":  # the oracle's own dtype: plain arithmetic is done in fp32 and its error scaled down
        plain_error *= exact / single
    if math.isnan(plain_error):  # arithmetic so coarse that it fails by itself is no yardstick
        plain_error = 0.0
    # A few roundings where the sums are done (fp32 for half types), half a rounding of the result itself.
    places = (_LAST_PLACES * min(result, single) + result / 2) * truth.detach().abs().max().item()
    allowed = (3 if what.startswith("d") else 2) * plain_error + places
    return Check.of(what, problem.seq, error, plain_error, allowed)
