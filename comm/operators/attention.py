"""`dilkit::attention_over_ranks` and its backward: `ring_dilated_attention` as compiled code calls it."""

from __future__ import annotations

import ast
import threading
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.fake_impl import allocate_size

from dilkit.comm.arguments import Arguments
from dilkit.comm.operators.order import below_autograd, in_order
from dilkit.comm.passes.attention_op import QKVRows
from dilkit.comm.passes.autograd import UNKNOWN, Saved, backward_pass, differentiable_once, forward_pass, gradient_of_sink
from dilkit.comm.plan.traffic import GRADIENTS
from dilkit.comm.rank_attention import RankAttention, agreed
from dilkit.comm.transports.base import Comm, transport_of
from dilkit.inputs import Inputs
from dilkit.op import boundary, operators
from dilkit.op.autocast import without_autocast
from dilkit.op.dropout import draw_seed
from dilkit.op.schema import library
from dilkit.pattern import Pattern
from dilkit.problem import DTYPES

_DTYPES = tuple(getattr(torch, name) for name in DTYPES)
_TAGS = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name))
"""Tags that keep exchanges out of CUDA graphs. torch 2.6 lacks the tag; it captures nothing that has results on the CPU."""

_FORMAT = "3"
"""The beginning of every call: change it with `encode` and with what autograd does, because torch.compile keeps whole graphs on
disk and finds them again by such constants."""
_LITERALS = (bool, int, float, str)
_OPTIONS = "is_causal", "backend", "schedule", "fuse_branches", "return_lse", "keep"

library.define(
    "attention_over_ranks(Tensor query, Tensor key, Tensor value, Tensor? key_padding_mask, Tensor? sink, float? scale, "
    "float dropout_p, str call, Tensor? dropout_seed, Tensor? after) "
    "-> (Tensor out, Tensor lse, Tensor rows, Tensor flags, Tensor agreed)",
    tags=_TAGS,
)
library.define(
    "attention_over_ranks_backward(Tensor? dout, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor? key_padding_mask, "
    "Tensor? sink, Tensor out, Tensor lse, Tensor rows, Tensor flags, Tensor agreed, float? scale, "
    "float dropout_p, str call, bool of_sink, Tensor? after) -> (Tensor dquery, Tensor dkey, Tensor dvalue, Tensor dsink)",
    tags=_TAGS,
)
forward_op = torch.ops.dilkit.attention_over_ranks.default
backward_op = torch.ops.dilkit.attention_over_ranks_backward.default


def can_be_compiled(given: Arguments) -> bool:
    """True if the operator takes these arguments, valid or not. Others, such as orders and biases, break the graph."""
    query, key, value, *others = given.inputs
    tensors = [query, key, value, *(x for x in others if x is not None)]
    names = given.backend if isinstance(given.backend, (list, tuple)) else (given.backend,)
    options = [getattr(given, name) for name in _OPTIONS if name != "backend"]
    return (
        given.order is None
        and given.softcap is None
        and given.bias is None
        and isinstance(given.pattern, Pattern)
        and all(isinstance(x, Tensor) for x in tensors)
        and all(type(x) in (int, float) for x in (0 if given.scale is None else given.scale, given.dropout_p))
        and all(x is None or type(x) in _LITERALS for x in (*options, *names))  # wrong ones are refused when the operator runs
    )


def attend(given: Arguments, comm: Comm) -> tuple[Tensor, Tensor]:
    """Compute `(out, lse)` by the operator. `torch.compile` traces this function, which raises nothing and waits for nobody."""
    inputs = given.inputs
    query, key, value = (x.to(given.dtype) if x.dtype in _DTYPES else x for x in inputs[:3])
    numbers = given.scale, given.dropout_p
    seed = draw_seed() if given.dropout_p else None  # outside of the operator: a checkpoint draws the same seed again
    out, lse, *_ = forward_op(query, key, value, inputs.key_padding_mask, inputs.sink, *numbers, encode(given, comm), seed, None)
    return out, lse


class Call(NamedTuple):
    """The arguments, as they were given; `recorded`: whether a backward pass may follow, `wanted`: for which inputs."""

    version: str
    handle: str
    recorded: bool
    wanted: str
    pattern: str
    options: tuple[Any, ...]

    @property
    def comm(self) -> Comm:
        return transport_of(self.handle)

    def arguments(self, inputs: Inputs, scale: float | None, dropout_p: float, seed: Tensor | None = None) -> Arguments:
        return Arguments(
            inputs,
            Pattern.from_json(self.pattern),
            scale=scale,
            dropout_p=dropout_p,
            order=None,
            recorded=self.recorded,
            seed=seed,
            wanted=self.wanted,
            **dict(zip(_OPTIONS, self.options, strict=True)),
        )


def encode(given: Arguments, comm: Comm) -> str:
    """Return the call as text. This is traced, so that code is compiled again where an option changes."""
    options = tuple([getattr(given, name) for name in _OPTIONS])
    return f"{(_FORMAT, comm.handle, given.requires_grad, given.gradients, given.pattern.to_json(), options)!r}"


_parsing = threading.Lock()
"""Ranks that are threads parse one after the other: CPython 3.11 may raise SystemError where several build syntax trees."""


@lru_cache(maxsize=256)
def decode(text: str) -> Call:
    """Return the call that `encode` wrote. Raises ValueError for any other text."""
    try:
        with _parsing:
            return Call(*ast.literal_eval(text))
    except (SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"call={text!r} is not what dilkit writes: {error}") from None


def _forward(*given: Any) -> tuple[Tensor, ...]:
    """Return `out`, `lse` and what the backward pass needs: received rows, their flags, and what the ranks agreed on."""
    query, key, value, mask, sink, scale, dropout_p, text, drawn, _ = given
    inputs, call = Inputs(query, key, value, mask, sink=sink), decode(text)
    with without_autocast(query.device.type):
        attention = agreed(call.arguments(inputs, scale, dropout_p, drawn), call.comm)
        context = attention.context(inputs, attention.arguments.pattern)
        _, out, lse, received = forward_pass(context, inputs)
    rows = query.new_empty(0, query.shape[-1]) if received is None else received.queries
    flags = query.new_empty(0, dtype=torch.bool) if received is None or received.flags is None else received.flags
    seed = torch.zeros((), dtype=torch.int64, device="cpu") if attention.seed is None else attention.seed
    agreement = torch.tensor([*attention.cuts, GRADIENTS.index(attention.gradients)], device="cpu")
    return out, lse.transpose(1, 2).contiguous(), rows, flags, torch.cat((agreement, seed.view(1)))


def _backward(dout: Tensor | None, dlse: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
    """Return gradients of query, key, value and the sink; those that this rank has not asked for, or has not, are empty."""
    query, key, value, mask, sink, out, lse, rows, flags, agreement, scale, dropout_p, text, of_sink, _ = given
    inputs, call = Inputs(query, key, value, mask, sink=sink), decode(text)
    arguments = call.arguments(inputs, scale, dropout_p)
    seed = agreement[-1] if dropout_p else None
    *cuts, number, _ = agreement.tolist()
    attention = RankAttention(arguments, call.comm, tuple(cuts), seed, GRADIENTS[number])
    # The results of an operator are those of its inputs, so the forward pass could not return when it began.
    context = replace(attention.context(inputs, arguments.pattern), began=UNKNOWN)
    keeps_rows = context.plan.keep == "rows" and context.plan.rounds
    received = QKVRows(rows, rows, rows, None if mask is None else flags) if keeps_rows else None
    saved = Saved(inputs, out, lse.transpose(1, 2), received)
    by_role = zip("qkv", backward_pass(context, dout, dlse, saved), strict=False)
    gradients = (query.new_empty(0) if grad is None or role not in call.wanted else grad for role, grad in by_role)
    dsink = gradient_of_sink(dout, dlse, saved) if of_sink else None
    return *gradients, query.new_empty(0) if dsink is None else dsink


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sink: Any, scale: Any, dropout_p: Any, text: str, *_: Any
) -> tuple[Tensor, ...]:
    """Make tensors of the shapes of the results. Row counts are unknown before ranks agree on them."""
    size = decode(text).comm.size
    # Of inputs that the operator refuses, too: it does so when it runs, so that all ranks know of it.
    out, lse = boundary.empty_outputs(query) if query.dim() == 4 else (query.new_empty(query.shape), query.new_empty(0))
    rows = query.new_empty((_unknown_size(), *query.shape[-1:]))
    flags = query.new_empty(0 if mask is None else _unknown_size(), dtype=torch.bool)
    return out, lse, rows, flags, torch.empty(size + 3, dtype=torch.int64, device="cpu")


def _unknown_size() -> Any:
    """Return a size that is known when the operator has run.

    `new_dynamic_size` breaks the graph unless an option is set, for the sake of code that goes on with such a size: none does
    here.
    """
    context = torch.library.get_ctx()
    return context.new_dynamic_size() if context._shape_env is None else allocate_size(context._shape_env)  # type: ignore[no-untyped-call]


def _fake_backward(dout: Any, dlse: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, sink: Any, *rest: Any) -> Any:
    *_, text, of_sink, _ = rest
    wanted = decode(text).wanted
    gradients = (x.new_empty(x.shape if role in wanted else 0) for role, x in zip("qkv", (query, key, value), strict=True))
    return *gradients, sink.new_empty(sink.shape) if of_sink else query.new_empty(0)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            results: tuple[Tensor, ...] = forward_op(*inputs)
        *tensors, ctx.scale, ctx.dropout_p, ctx.call, _, _ = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*results[2:])
        ctx.save_for_backward(*tensors, *results)
        return results

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
        of_sink = ctx.needs_input_grad[4]
        *computed, dsink = backward_op(dout, dlse, *ctx.saved_tensors, ctx.scale, ctx.dropout_p, ctx.call, of_sink, None)
        gradients = [grad if needed else None for grad, needed in zip(computed, ctx.needs_input_grad, strict=False)]
        return *gradients, None, dsink if of_sink else None, None, None, None, None, None


library.impl("attention_over_ranks", _forward, "CompositeExplicitAutograd")
library.impl("attention_over_ranks_backward", _backward, "CompositeExplicitAutograd")
library.impl("attention_over_ranks", in_order(operators.autograd(forward_op, _Differentiable.apply), "forward"), "Autograd")
library.impl("attention_over_ranks_backward", in_order(below_autograd(backward_op), "backward"), "Autograd")
torch.library.register_fake("dilkit::attention_over_ranks", _fake_forward, lib=library)
torch.library.register_fake("dilkit::attention_over_ranks_backward", _fake_backward, lib=library)
