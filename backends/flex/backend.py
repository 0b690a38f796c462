"""torch's FlexAttention as a backend, on GPUs: torch generates a kernel for a pattern, and keeps it.

Backward, given `out` and `lse` of the whole softmax, of which FlexAttention may have computed a part: with

    w = exp(own lse - lse)      dout' = w dout      dlse' = w (dout . own out - dout . out)

its own backward pass, P' (dout' . v - dout' . own out + dlse'), is P (dout . v - dout . out), the gradient of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

from dilkit.backend import Backend, Limits, Refusal
from dilkit.backends.ignored_keys import without_ignored
from dilkit.backends.packed_sequences import backward_each, forward_each
from dilkit.bias.form import BIASES
from dilkit.device import capturing
from dilkit.inputs import Inputs
from dilkit.pattern.lowering import FORMS, GIVEN_FORMS, GivenIntervals
from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

LEAST_HEAD_DIM, MOST_HEAD_DIM = 16, 256
COMPILED = 64
MOST_GIVEN = 32
"""Intervals of a query that a call gives: a generated kernel compares each of them by itself."""
Attend = Callable[..., "tuple[Tensor, Tensor]"]


class Flex(Backend):
    """FlexAttention, compiled at the first call with a pattern, a dtype and one of a few lengths, which takes many seconds."""

    name = "flex"
    summary = "torch's FlexAttention, which generates a kernel for any pattern, bias and softcap: GPUs from 8.0 on"
    requires = ("torch", "triton")
    limits = Limits(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        min_capability=(8, 0),
        max_head_dim=MOST_HEAD_DIM,
        varlen=True,
        query_offset=True,
        softcap=True,
        biases=frozenset(BIASES),
        forms=FORMS | GIVEN_FORMS,
    )
    priority = 2

    def refusals(self, problem: Problem) -> tuple[Refusal, ...]:
        refusals = [*super().refusals(problem)]
        if problem.head_dim < LEAST_HEAD_DIM:
            refusals.append(Refusal("head_dim", str(problem.head_dim), f"at least {LEAST_HEAD_DIM}"))
        if problem.span >= 2**31 // 2:
            refusals.append(Refusal("seq", f"{problem.span:,}", "rows are counted in 32 bits"))
        if problem.queries is not None and (problem.varlen or problem.query_offset is None or problem.query_offset < 0):
            limit = "a batch is needed, and one query_offset for all of it, from 0 on"
            refusals.append(Refusal("queries", f"{problem.queries:,} for {problem.seq:,} keys", limit, "backend='reference'"))
        if (most := max((form.most for form in problem.forms if isinstance(form, GivenIntervals)), default=0)) > MOST_GIVEN:
            refusals.append(Refusal("intervals", f"{most} a query", f"at most {MOST_GIVEN}", "backend='reference'"))
        if refusals:  # so far without a table having been made, or torch imported
            return tuple(refusals)
        from torch.nn.attention import flex_attention

        if not hasattr(flex_attention, "AuxRequest"):
            needed = "one that returns lse with AuxRequest is needed"
            return (Refusal("torch", "its FlexAttention", needed, "install torch 2.9 or newer"),)
        from dilkit.pattern.flex.pairs import MOST_CELLS, table_cells

        if (cells := max(map(table_cells, problem.forms), default=0)) > MOST_CELLS:
            limit = f"at most {MOST_CELLS:,} cells of a table of runs"
            refusals.append(Refusal("branch kind", f"{cells:,} cells", limit, "fewer runs of keys a row, or backend='reference'"))
        return tuple(refusals)

    def detail(self, problem: Problem) -> str:
        return "torch.compile generates a kernel at the first call of a pattern and a padded length, in half a minute or so"

    def attend(self, problem: Problem) -> Attend:
        """The function that computes `(out, lse)`, compiled anew for problems that it was not made for."""
        return _compiled((problem.pattern.to_json(), problem.is_causal, problem.softcap, problem.bias, problem.varlen))

    def forward(self, inputs: Inputs, problem: Problem) -> tuple[Tensor, Tensor]:
        from dilkit.op.boundary import lse_dtype

        if _mixes_poison(inputs):
            return forward_each(self, inputs, problem)
        out, lse = self._of(_finite(inputs), problem)
        unseen = (lse == -math.inf).transpose(1, 2).unsqueeze(-1)
        out = out.masked_fill(unseen, 0.0)
        return out.contiguous(), lse.to(lse_dtype(inputs.query.dtype)).contiguous()

    def backward(self, dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, problem: Problem) -> tuple[Tensor, ...]:
        import torch

        if _mixes_poison(inputs):
            return backward_each(self, dout, inputs, out, lse, problem)
        inputs, learned = _finite(inputs), problem.bias is not None and problem.bias.learned
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        if learned and inputs.bias is not None:
            leaves.append(inputs.bias.weights.detach().requires_grad_())
            inputs = inputs._replace(bias=inputs.bias._replace(weights=leaves[3]))
        with _recording():
            own_out, own_lse = self._of(inputs._replace(query=leaves[0], key=leaves[1], value=leaves[2]), problem)
            unseen = (lse == -math.inf) | (own_lse == -math.inf)
            weight = (own_lse - lse).masked_fill(unseen, -math.inf).exp().detach()
            wide = dout.to(weight.dtype)
            apart = (wide * (own_out.detach().to(weight.dtype).masked_fill(unseen.transpose(1, 2)[..., None], 0.0) - out)).sum(-1)
            by_row = weight.transpose(1, 2).unsqueeze(-1)
            incoming = (wide * by_row).to(own_out.dtype), (weight * apart.transpose(1, 2)).to(own_lse.dtype)
            gradients = torch.autograd.grad((own_out, own_lse), leaves, incoming)
        return tuple(gradient.contiguous() for gradient in gradients)

    def _of(self, inputs: Inputs, problem: Problem) -> tuple[Tensor, Tensor]:
        from dilkit.backends.flex.call import flex_call

        out, lse = self.attend(problem)(*flex_call(inputs, problem), problem.kv_heads != problem.heads)
        rows = inputs.query.shape[1]
        return out[:, :, :rows].transpose(1, 2), lse[:, :, :rows]


def _mixes_poison(inputs: Inputs) -> bool:
    """True if packed keys or values are not finite: in the block of another sequence, 0 times them is NaN.

    False without a look while a CUDA graph is captured.
    """
    if inputs.cu_seqlens is None or capturing(inputs.key.device):
        return False
    return not bool(inputs.key.isfinite().all() & inputs.value.isfinite().all())


def _finite(inputs: Inputs) -> Inputs:
    """Inputs whose ignored keys are 0: 0 times what is not finite is NaN."""
    key, value = (without_ignored(x, inputs.key_padding_mask) for x in (inputs.key, inputs.value))
    return inputs._replace(key=key, value=value)


@contextmanager
def _recording() -> Iterator[None]:
    """Autograd records what is called, also within an operator, as backends are called."""
    import torch

    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "AutogradCPU", "AutogradCUDA"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


@lru_cache(maxsize=COMPILED)
def _compiled(key: tuple[Any, ...]) -> Attend:
    """A compiled function of its copied for each key: torch counts compilations by code object, and gives up after a few."""
    import torch
    from torch.nn.attention import flex_attention as flex

    def attend(q: Any, k: Any, v: Any, of_weights: Any, weights: Any, block_mask: Any, scale: float, grouped: bool) -> Any:
        score_mod = None if of_weights is None else of_weights(weights)
        out, aux = flex.flex_attention(*(q, k, v, score_mod, block_mask, scale, grouped), return_aux=flex.AuxRequest(lse=True))
        return out, aux.lse

    copied = FunctionType(attend.__code__.replace(), globals(), attend.__name__, None, attend.__closure__)
    function: Attend = torch.compile(copied, fullgraph=True, dynamic=False)
    return function
