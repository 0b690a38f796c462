"""The autograd function of attention over ranks: one forward and one backward pass, with all that they send.

    forward                                     backward
    -------                                     --------
    send q, k, v rows     all_to_all            send dout, out, lse rows
    local attention       attention_op          gradients of local attention
    compute, send back    all_to_all            compute, send gradients back
    rotate k, v blocks    ring                  rotate k, v blocks, return their gradients
    merge results         partial_results       add gradients
    add zero keys         zero_keys

What is sent first travels while the local attention is computed. With `keep="nothing"` the rows of q, k, v are sent again in the
backward pass; they go there and their gradients back before the local gradients are made, which take more room than they do.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilkit.comm.agreement import agree_on
from dilkit.comm.passes.all_to_all import AllToAllBackward, all_to_all_forward, merge_results, send_rows
from dilkit.comm.passes.attention_op import AttentionOp, QKVRows, local_backward, local_forward, merge_rows
from dilkit.comm.passes.index_tables import IndexTables, index_tables
from dilkit.comm.passes.rank_bias import RankBias
from dilkit.comm.passes.ring import ring_backward, ring_forward
from dilkit.comm.passes.row_index import add_rows
from dilkit.comm.plan.exchange_plan import ExchangePlan
from dilkit.comm.transports.base import Comm
from dilkit.comm.transports.errors import PlanMismatch, ranks_text
from dilkit.inputs import Inputs
from dilkit.op import boundary
from dilkit.op.autocast import without_autocast
from dilkit.op.call_options import unflat
from dilkit.op.schema import GRADIENTS, TENSORS
from dilkit.op.scores import check_bias
from dilkit.op.through_lse import through_lse
from dilkit.op.zero_keys import ZeroKeys, add_zero_keys, check_sink, sink_gradient, zero_keys_of
from dilkit.plan import cached


def differentiable_once(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Make `backward` of an autograd function return results that raise where they are differentiated again.

    torch's `once_differentiable` takes the results for constants if no gradient that comes in has a graph, though they depend on
    what the forward pass saved: a penalty on gradients would be left out silently.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        every: tuple[Any, ...] = _Refused.apply(len(results), *results, *ctx.saved_tensors, *grads)  # type: ignore[no-untyped-call]
        return every

    return once


class _Refused(torch.autograd.Function):
    """Results as they are, which depend on further tensors: the way from them to these has no derivative."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(
            "attention over ranks can be differentiated once only: double backward (create_graph=True) is not supported"
        )


UNKNOWN = 0
"""Time at which the forward pass of compiled code began."""


@dataclass(frozen=True)
class PassContext:
    op: AttentionOp
    comm: Comm
    plan: ExchangePlan
    batch: int
    device: torch.device
    gradients: str
    """Inputs that some rank needs gradients of: "qkv" or a part of it, the same on all ranks."""
    began: int
    """The transport's `exchanges` when the forward pass began, by which the backward pass knows its call."""

    @property
    def rounds(self) -> tuple[IndexTables, ...]:
        """This rank's index tables, for each round in which rows travel by all-to-all."""
        of_rank, options = (self.plan, self.comm.rank, self.batch, self.device), self.op.options
        facts = self.gradients, options.dropout_p > 0, options.bias is not None
        return tuple([index_tables(*of_rank, branches, *facts) for branches in self.plan.rounds])

    def zero_keys(self, query: Tensor) -> ZeroKeys | None:
        """Return the padding keys of segments that this rank's rows see; None without any."""
        plan = self.plan
        if plan.pattern.tail == "exact" or plan.is_causal:
            return None
        facts, rows = (plan.pattern, plan.seq, plan.heads, plan.kv_heads), plan.positions(self.comm.rank)
        return cached(("zero keys", facts, rows, query.dtype, query.device), zero_keys_of, *facts, query, rows)


class Saved(NamedTuple):
    """The tensors that the forward pass leaves to the backward pass.

    Positions of the bias are given with any form. `lse` is `(batch, seq, heads)`. What was received is None where nothing was, or
    nothing is kept.
    """

    inputs: Inputs
    out: Tensor
    lse: Tensor
    received: QKVRows | None


class AttentionOverRanks(torch.autograd.Function):
    """One autograd node for all that is sent: every rank makes the same exchanges in the same order, in both passes."""

    @staticmethod
    def forward(ctx: Any, context: PassContext, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.context = context
        _, out, lse, rows = forward_pass(context, unflat(tensors, context.op.options))
        received = () if rows is None else (rows.queries, rows.flags, rows.query_positions, rows.key_positions)
        ctx.save_for_backward(*tensors, out, lse, *received)
        return out, lse.transpose(1, 2).contiguous()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        context, needed = ctx.context, dict(zip(TENSORS, ctx.needs_input_grad[1:], strict=True))
        with context.comm.broken_by_errors():
            tensors = ctx.saved_tensors
        out, lse, *received = tensors[len(TENSORS) :]
        rows = QKVRows(*received[:1] * 3, *received[1:]) if received else None
        saved = Saved(unflat(tensors[: len(TENSORS)], context.op.options), out, lse, rows)
        gradients = dict(zip(GRADIENTS, backward_pass(context, dout, dlse, saved), strict=True))
        gradients["sink"] = gradient_of_sink(dout, dlse, saved) if needed["sink"] else None
        return None, *(gradients.get(name) if needed[name] else None for name in TENSORS)


def backward_pass(context: PassContext, dout: Tensor | None, dlse: Tensor | None, saved: Saved) -> tuple[Tensor | None, ...]:
    """Compute the gradients of query, key, value and the weights of a bias. None as `dout` or `dlse` means 0.

    `dlse`: `(batch, heads, seq)`. The gradient of an input is None if no rank asks for it.
    """
    inputs, out, lse, held = saved
    with context.comm.broken_by_errors():
        lse_in_loss = agree_on_call(context, dlse is not None)
        dout = torch.zeros_like(inputs.query) if dout is None else dout.contiguous()  # the others wait for this rank's part
        query, key, value, out, lse = _as_saved(dout, *inputs[:3], out, lse)
        inputs = inputs._replace(query=query, key=key, value=value)
        if inputs.bias is not None:
            form, weights, positions = inputs.bias
            check_bias(replace(form, placed=True), weights, positions, query, query.shape[1])
        if held is not None:
            rows = held.queries.to(query.dtype).contiguous()
            held = held._replace(queries=rows, keys=rows, values=rows)
        with without_autocast(out.device.type):
            dquery, dkey, dvalue, dweights = _backward(context, dout, inputs, out, lse, held)
            if lse_in_loss:
                by_query, by_key, by_weights = _through_lse(context, dlse, inputs, lse, held)
                dquery, dkey, dweights = dquery + by_query, dkey + by_key, dweights + by_weights
    by_role = zip("qkv", (dquery, dkey, dvalue), strict=True)
    return *(grad if role in context.gradients else None for role, grad in by_role), dweights


def gradient_of_sink(dout: Tensor | None, dlse: Tensor | None, saved: Saved) -> Tensor | None:
    """Compute the gradient of the sink from this rank's rows alone; None without a sink."""
    sink, query = saved.inputs.sink, saved.inputs.query
    if sink is None:
        return None
    check_sink(sink, query)
    return sink_gradient(sink, saved.out, saved.lse.transpose(1, 2), dout, dlse)


def _as_saved(dout: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in the layout that they were saved with. Raises where hooks have changed a shape or a dtype."""
    *inputs, lse = saved
    tensors = dout, *inputs, lse.transpose(1, 2)
    boundary.check_tensors(boundary.SAVED, tensors)
    boundary.check_memory(boundary.SAVED, tensors)
    return *map(boundary.in_rows, inputs), lse.contiguous()


def forward_pass(context: PassContext, inputs: Inputs) -> Saved:
    op, plan, comm = context.op, context.plan, context.comm
    with without_autocast(inputs.query.device.type), comm.broken_by_errors():
        rounds, bias = context.rounds, None if inputs.bias is None else RankBias.of(inputs.bias)
        first = [send_rows(comm, tables, inputs, bias) for tables in rounds[:1]]
        out, lse = local_forward(op, plan.local_ranges(comm.rank), plan.is_causal, inputs, bias)
        held, results = all_to_all_forward(op, comm, rounds, first, inputs, bias) if rounds else (None, [])
        for ring in plan.rings:
            for rows, partial_results in ring_forward(op, comm, plan, ring, inputs, bias):
                merge_rows(out, lse, rows, [(torch.arange(len(rows), device=rows.device), *partial_results)])
        if rounds:
            merge_results(rounds, results, out, lse)
        zero_keys = context.zero_keys(inputs.query)
        if zero_keys is not None or inputs.sink is not None:
            add_zero_keys(out, lse.transpose(1, 2), zero_keys, inputs.sink)
    return Saved(inputs, out, lse, held if plan.keep == "rows" else None)


def _backward(
    context: PassContext, dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, held: QKVRows | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of query, key, value and the weights of a bias, which are empty where there is none."""
    op, plan, comm = context.op, context.plan, context.comm
    bias = None if inputs.bias is None else RankBias.of(inputs.bias)
    of_others = None if inputs.bias is None else RankBias.of(inputs.bias)
    under_way = AllToAllBackward(op, comm, context.rounds, dout, out, lse, held is not None)
    if held is None:
        under_way.compute_anew(inputs, of_others)
    grads = local_backward(op, plan.local_ranges(comm.rank), plan.is_causal, dout, inputs, bias, out, lse)
    if held is not None:
        under_way.compute(held, of_others)
    for ring in plan.rings:
        for (queries, dquery), (keys, dkey, dvalue) in ring_backward(
            op, comm, plan, ring, inputs, bias, dout, out, lse, context.gradients
        ):
            for grad, rows, more in zip(grads, (queries, keys, keys), (dquery, dkey, dvalue), strict=True):
                add_rows(grad, rows, more)
    under_way.add_to(*grads)
    dweights = lse.new_empty(0) if bias is None or of_others is None else bias.gradient + of_others.gradient
    return *grads, dweights


def _through_lse(
    context: PassContext, dlse: Tensor | None, inputs: Inputs, lse: Tensor, held: QKVRows | None
) -> tuple[Tensor, ...]:
    """Compute gradients of query, key and weights through `lse`; `dlse`: `(batch, heads, seq)`. Dropout does not change `lse`."""
    op = context.op
    context = replace(context, op=replace(op, options=op.options._replace(dropout_p=0.0), seed=None))
    inputs = inputs._replace(value=inputs.value.new_zeros(()).expand(inputs.value.shape))
    held = None if held is None else held._replace(values=held.values.new_zeros(()).expand(held.values.shape))

    def backward(dout: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        dquery, dkey, _, dweights = _backward(context, dout, inputs, out, lse, held)
        return dquery, dkey, dweights

    def of_all(here: Tensor) -> Tensor:  # NaN where a rank has NaN
        records = context.comm.share(json.dumps(here.tolist()).encode(), "sizes of gradients")
        return torch.stack([here.new_tensor(json.loads(record)) for record in records]).amax(dim=0)

    dlse = torch.zeros_like(lse) if dlse is None else dlse.transpose(1, 2)
    scale = context.op.options.factor(inputs.query)
    return through_lse(dlse, lse, inputs.query, inputs.key, scale, context.plan.seq, of_all, backward)


STEP = "backward pass of ring_dilated_attention"
CALL, LSE = "call", "lse in the loss"


def agree_on_call(context: PassContext, lse_in_loss: bool) -> bool:
    """Return True if `lse` is in the loss of any rank. Raises PlanMismatch where ranks run the backward passes of other calls.

    A rank that does not know its call goes with the others.
    """
    if context.comm.size == 1:
        return lse_in_loss
    facts: dict[str, Any] = {CALL: context.began, LSE: lse_in_loss}
    every_rank = agree_on(context.comm, lambda: facts, STEP, (CALL, LSE))
    known = {rank: of_rank[CALL] for rank, of_rank in enumerate(every_rank) if of_rank[CALL] != UNKNOWN}
    calls = list(known.values())
    if odd := [rank for rank, call in known.items() if call != max(calls, key=calls.count)]:
        raise PlanMismatch(
            f"{STEP}{context.comm.along}: {ranks_text(odd)} and the others are in the backward passes of different calls; all "
            "ranks must run them in the same order",
            odd,
            STEP,
        )
    return any(of_rank[LSE] for of_rank in every_rank)
