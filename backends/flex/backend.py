"""torch's FlexAttention as a backend, on GPUs: torch generates a kernel for a pattern, and keeps it.

Backward, given `out` and `lse` of the whole softmax, of which FlexAttention may have computed a part: with

    w = exp(own lse - lse)      dout' = w dout      dlse' = w (dout . own out - dout . out)

its own backward pass, P' (dout' . v - dout' . own out + dlse'), is P (dout . v - dout . out), the gradient of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

from dilkit.backend import Backend, Limits, Refusal
from dilkit.backends.ignored_keys import without_ignored
from dilkit.backends.packed_sequences import backward_each, forward_each
from dilkit.backends.sdpa.kernels import installed
from dilkit.bias.form import BIASES
from dilkit.device import capturing
from dilkit.inputs import Inputs
from dilkit.pattern.lowering import FORMS, GIVEN_FORMS, GivenIntervals
from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from dilkit.backends.flex.call import FlexCall
    from dilkit.pattern.flex.class_order import ClassOrder

LEAST_HEAD_DIM, MOST_HEAD_DIM = 16, 256
COMPILED = 64
MOST_GIVEN = 32
"""Intervals of a query that a call gives: a generated kernel compares each of them by itself."""


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
        from dilkit.backends.flex.class_order import described

        words = "torch.compile generates a kernel at the first call of a pattern and a padded length, in half a minute or so"
        if (order := self.order(problem)) is None:
            return words
        kernel, why = kernel_in_classes(problem, order)
        return f"{described(problem, order)}; kernel {kernel}{why and f': {why}'}; {words}"

    def order(self, problem: Problem) -> ClassOrder | None:
        """Return the order of tokens in which one pass takes less time than along the tokens as given; None if there is none."""
        import torch

        from dilkit.backends.flex.class_order import order_of, pays

        if cast("Any", torch.__version__) < (2, 13):  # whose backward pass cannot be called by itself
            return None
        order = order_of(problem)
        return order if order is not None and pays(problem, order) else None

    def compiled(self, function: Callable[..., Any], problem: Problem, *options: Hashable) -> Callable[..., Any]:
        """Return `function`, compiled again for problems and options that it was not made for."""
        key = problem.pattern.to_json(), problem.is_causal, problem.softcap, problem.bias, problem.varlen
        return _compiled(function, (*key, *options))

    def forward(self, inputs: Inputs, problem: Problem) -> tuple[Tensor, Tensor]:
        from dilkit.backends.flex.call import GivenOrder
        from dilkit.backends.flex.class_order import ClassCall
        from dilkit.op.boundary import lse_dtype

        if _mixes_poison(inputs):
            return forward_each(self, inputs, problem)
        inputs, order = _finite(inputs), self.order(problem)
        call = GivenOrder(inputs, problem) if order is None else ClassCall(inputs, problem, order, back=False)
        arguments = call.arguments()
        query, key, value = (x.detach() for x in arguments[:3])
        weights = None if arguments.weights is None else arguments.weights.detach()
        arguments = arguments._replace(query=query, key=key, value=value, weights=weights)
        out, lse = call.results(*self._attend(arguments, problem, order))
        if not call.all_see:
            out = out.masked_fill((lse == -math.inf).transpose(1, 2).unsqueeze(-1), 0.0)
        return out.contiguous(), lse.to(lse_dtype(inputs.query.dtype)).contiguous()

    def backward(self, dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, problem: Problem) -> tuple[Tensor, ...]:
        import torch

        from dilkit.backends.flex.call import GivenOrder

        if _mixes_poison(inputs):
            return backward_each(self, dout, inputs, out, lse, problem)
        inputs = _finite(inputs)
        if (order := self.order(problem)) is not None:
            return self._backward_in_classes(dout, inputs, out, lse, problem, order)
        call = GivenOrder(inputs, problem)
        arguments = call.arguments()
        leaves = [x.detach().requires_grad_() for x in arguments[:3]]
        arguments = arguments._replace(query=leaves[0], key=leaves[1], value=leaves[2])
        if problem.bias is not None and problem.bias.learned and arguments.weights is not None:
            leaves.append(arguments.weights.detach().requires_grad_())
            arguments = arguments._replace(weights=leaves[3])
        with _recording():
            own_out, own_lse = call.results(*self._attend(arguments, problem))
            unseen = (lse == -math.inf) | (own_lse == -math.inf)
            weight = (own_lse - lse).masked_fill(unseen, -math.inf).exp().detach()
            wide = dout.to(weight.dtype)
            apart = (wide * (own_out.detach().to(weight.dtype).masked_fill(unseen.transpose(1, 2)[..., None], 0.0) - out)).sum(-1)
            by_row = weight.transpose(1, 2).unsqueeze(-1)
            incoming = (wide * by_row).to(own_out.dtype), (weight * apart.transpose(1, 2)).to(own_lse.dtype)
            gradients = torch.autograd.grad((own_out, own_lse), leaves, incoming)
        return tuple(gradient.contiguous() for gradient in call.gradients(*gradients))

    def _attend(self, given: FlexCall, problem: Problem, order: ClassOrder | None = None) -> tuple[Tensor, Tensor]:
        from dilkit.backends.flex.call import attend

        kernel = "AUTO" if order is None else kernel_in_classes(problem, order)[0]
        function = self.compiled(attend, problem, kernel, order is None)
        out, lse = function(*given, problem.kv_heads != problem.heads, kernel)
        return out, lse

    def _backward_in_classes(
        self, dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, problem: Problem, order: ClassOrder
    ) -> tuple[Tensor, ...]:
        """Compute the gradients in one call in class order, given `out` and `lse` of the whole softmax."""
        from torch import are_deterministic_algorithms_enabled

        from dilkit.backends.flex.class_order import ClassCall, differentiate

        kernel, _ = kernel_in_classes(problem, order)
        if kernel == "FLASH" and are_deterministic_algorithms_enabled():  # FlashAttention 4 adds up dquery in no fixed order
            kernel = "TRITON"
        call = ClassCall(inputs, problem, order, back=True)
        function = self.compiled(differentiate, problem, kernel)
        arguments = call.arguments()
        tensors = [x.detach() for x in (*call.of_whole(dout, out, lse), *arguments[:3])]
        with _recording():  # in which torch differentiates the change of scores
            gradients = function(*tensors, *arguments[3:], kernel)
        return call.gradients(*gradients)


def _mixes_poison(inputs: Inputs) -> bool:
    """True if packed keys or values are not finite: in the block of another sequence, 0 times them is NaN.

    False without a look while a CUDA graph is captured.
    """
    if inputs.cu_seqlens is None or capturing(inputs.key.device):
        return False
    return not bool(inputs.key.isfinite().all() & inputs.value.isfinite().all())


def _finite(inputs: Inputs) -> Inputs:
    """Set ignored keys and values to 0: 0 times an infinite or NaN number is NaN."""
    key, value = (without_ignored(x, inputs.key_padding_mask) for x in (inputs.key, inputs.value))
    return inputs._replace(key=key, value=value)


@contextmanager
def _recording() -> Iterator[None]:
    """Let autograd record within the block, even inside an operator, where backends are called."""
    import torch

    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "AutogradCPU", "AutogradCUDA"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def kernel_in_classes(problem: Problem, order: ClassOrder) -> tuple[str, str]:
    """Return FlexAttention's name of a kernel, and why it is not FlashAttention 4."""
    if problem.dtype == "float32" or problem.head_dim % 8 or problem.head_dim > 128:
        return "TRITON", "FlashAttention 4 takes halves, and a head_dim that is a multiple of 8 up to 128"
    if problem.device.capability != (9, 0):
        return "TRITON", "FlashAttention 4 takes blocks of 128 queries on capability 9.0 alone"
    if not installed("flash_attn.cute.interface"):
        return "TRITON", "FlashAttention 4 is not installed (pip install --pre flash-attn-4)"
    return ("TRITON", "some blocks are masked pair by pair") if len(order.partial.head) else ("FLASH", "")


@lru_cache(maxsize=COMPILED)
def _compiled(function: FunctionType, key: tuple[Any, ...]) -> Callable[..., Any]:
    """Compile a copy of a function for each key: torch counts compilations by code object, and gives up after a few."""
    import torch

    copied = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    compiled: Callable[..., Any] = torch.compile(copied, fullgraph=True, dynamic=False)
    return compiled
