"""The attention of one rank, from its arguments on: what the ranks agree on, the exchange plan, the passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.bias.form import LoweredBias
from dilkit.comm.agreement import agree_on
from dilkit.comm.arguments import MAY_DIFFER, STEP, Arguments, asked_on_any_rank
from dilkit.comm.passes.attention_op import AttentionOp
from dilkit.comm.passes.autograd import AttentionOverRanks, PassContext
from dilkit.comm.passes.rank_bias import rank_bias
from dilkit.comm.plan.exchange_plan import exchange_plan
from dilkit.comm.reorder import Reordering, reorder_inputs, reorder_positions, restore_outputs
from dilkit.comm.transports.base import Comm
from dilkit.inputs import Inputs
from dilkit.op.call_options import flat
from dilkit.op.scores import Scores
from dilkit.orders.attention import each_head
from dilkit.orders.heads import check_orders, first_head, used_orders
from dilkit.pattern import Pattern


def agreed(arguments: Arguments, comm: Comm) -> RankAttention:
    """Return the attention of this rank once all ranks agree on their arguments. Raises the same on every rank."""
    every_rank = agree_on(comm, arguments.facts, STEP, MAY_DIFFER) if comm.size > 1 else [arguments.facts()]
    cuts = tuple(accumulate((facts["rows"] for facts in every_rank), initial=0))
    if not arguments.is_causal:
        arguments.pattern.check_tokens(cuts[-1])
    seed = torch.tensor(every_rank[0]["seed"], device="cpu") if arguments.dropout_p else None
    return RankAttention(arguments, comm, cuts, seed, asked_on_any_rank(every_rank))


@dataclass(frozen=True)
class RankAttention:
    """The attention of one rank, after all ranks agreed on their arguments. Rank t holds `cuts[t] .. cuts[t + 1] - 1`."""

    arguments: Arguments
    comm: Comm
    cuts: tuple[int, ...]
    seed: Tensor | None
    gradients: str
    """The inputs of which gradients are asked for on any rank."""

    def compute(self) -> tuple[Tensor, Tensor]:
        """Compute `(out, lse)` along the token orders of the call, if any; `lse` is then empty unless it is returned."""
        call, dtype = self.arguments, self.arguments.dtype
        query, key, value, mask, *_ = call.inputs
        rows = query.to(dtype), key.to(dtype), value.to(dtype)
        bias = self.bias(rows, call.bias)
        if call.order is not None:
            check_orders(call.orders, self.cuts[-1], rows[1].shape[2], call.pattern, call.is_causal)
        if call.order is None or all(order.is_identity for order in call.orders):
            return self.attend(Inputs(*rows, mask, sink=call.inputs.sink, bias=bias), call.pattern)
        return self.attend_in_order(rows, mask, bias)

    def bias(self, rows: Sequence[Tensor], given: Bias | None) -> LoweredBias | None:
        """Lower a bias for query, key and value of this rank."""
        if given is None:
            return None
        first, kv_heads = self.cuts[self.comm.rank], rows[1].shape[2]
        return rank_bias(given, rows[0], self.arguments.pattern, kv_heads, first, self.cuts[-1])

    def attend(self, inputs: Inputs, pattern: Pattern) -> tuple[Tensor, Tensor]:
        """Compute `(out, lse)` of rows that lie in the order of their attention."""
        out, lse = AttentionOverRanks.apply(self.context(inputs, pattern), *flat(inputs))  # type: ignore[no-untyped-call]
        return out, lse

    def context(self, inputs: Inputs, pattern: Pattern) -> PassContext:
        """Return what the passes need besides tensors. Raises ValueError for what no exchange plan serves."""
        call, query, heads = self.arguments, inputs.query, (inputs.query.shape[2], inputs.key.shape[2])
        options: dict[str, Any] = dict(is_causal=call.is_causal, schedule=call.schedule)
        plan = exchange_plan(pattern, self.cuts, *heads, **options, fuse_branches=call.fuse_branches, keep=call.keep)
        plan.check_dropout(call.dropout_p)
        shard = pattern.head_shard
        head = 0 if shard is None else shard[0] * (heads[0] // heads[1])
        form = None if inputs.bias is None else inputs.bias.form
        op = AttentionOp(call.options._replace(pattern=pattern, bias=form), self.seed, head)
        return PassContext(op, self.comm, plan, len(query), query.device, self.gradients, self.comm.exchanges)

    def attend_in_order(self, rows: Sequence[Tensor], mask: Tensor | None, bias: LoweredBias | None) -> tuple[Tensor, Tensor]:
        """Compute `(out, lse)` of row-major rows along the token orders; `lse` is empty unless it is returned."""
        call, pattern, sink = self.arguments, self.arguments.pattern, self.arguments.inputs.sink
        orders, first = used_orders(call.orders, first_head(pattern), rows[1].shape[2])
        reordering = Reordering(self.comm, orders, self.cuts, first, rows[1].shape[2])
        moved, masks = reorder_inputs(reordering, list(rows), mask)
        biases: list[LoweredBias | None] = [None] * reordering.kv_heads
        if bias is not None and bias.positions is not None:
            form, positions = replace(bias.form, placed=True), reorder_positions(reordering, bias.positions)
            biases = [LoweredBias(form, bias.weights, moved_positions) for moved_positions in positions]
        if len(orders) == 1 or (mask is None and bias is None):
            query, key, value = moved
            out, lse = self.attend(Inputs(query, key, value, masks[0], sink=sink, bias=biases[0]), pattern)
        else:
            out, lse = self._attend_by_head(moved, masks, biases)
        if not call.return_lse:
            return restore_outputs(reordering, out)[0], lse.new_empty(0)
        out, lse = restore_outputs(reordering, out, lse.transpose(1, 2))
        return out, lse.transpose(1, 2).contiguous()

    def _attend_by_head(
        self, rows: Sequence[Tensor], masks: Sequence[Tensor | None], biases: Sequence[LoweredBias | None]
    ) -> tuple[Tensor, Tensor]:
        """Attend with a mask and positions for each key/value head; autograd visits heads last to first on all ranks."""
        kv_heads = rows[1].shape[2]

        def attend_head(head: int, part: tuple[Tensor, ...], pattern: Pattern, sink: Tensor | None) -> tuple[Tensor, Tensor]:
            query, key, value = part
            bias = Scores(biases[head]).of_part(head, kv_heads).bias
            return self.attend(Inputs(query, key, value, masks[head], sink=sink, bias=bias), pattern)

        return each_head(attend_head, rows, self.arguments.pattern, self.arguments.inputs.sink)
