"""`ring_dilated_attention`: dilated attention over ranks, each of which holds a shard of the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dilkit.comm.agreement import agree_on
from dilkit.comm.arguments import STEP, Arguments
from dilkit.comm.passes.attention_op import AttentionOp
from dilkit.comm.passes.autograd import AttentionOverRanks, PassContext
from dilkit.comm.plan.exchange_plan import exchange_plan
from dilkit.comm.reorder import Reordering, reorder_inputs, restore_outputs
from dilkit.comm.transports.base import Comm, check_comm
from dilkit.compiler import not_compiled
from dilkit.orders.attention import nothing, sink_by_head
from dilkit.orders.heads import check_orders, first_head, head_texts, used_orders
from dilkit.orders.token_order import TokenOrder
from dilkit.pattern import Pattern


@not_compiled
def ring_dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    comm: Comm,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str | Sequence[str] | None = None,
    schedule: str = "auto",
    fuse_branches: bool = True,
    order: TokenOrder | Sequence[TokenOrder] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact dilated attention over the ranks of `comm`: what `dilkit.dilated_attention` finds for the whole sequence.

        out[i] = softmax_j(scale * q_i . k_j + log count[h, i, j]) . v        lse[i] = logsumexp of the same row

    Each rank passes the rows of its own shard, and gets their results: `query` `(batch, rows, heads, head_dim)`, `key` and
    `value` with `kv_heads` heads, `key_padding_mask` bool `(batch, rows)`. Shards follow each other by rank and may differ in
    length (`shard_cuts` says where to cut them so that little has to travel). All ranks call with equal arguments, and all of
    them run the backward pass if one does. Arguments are compared before any rows are sent; a difference raises on every rank.

    With `order`, one token order or several that the heads use in turn, it is `dilkit.ordered_dilated_attention`: shards are of
    the row-major sequence, rows travel to where they are along the order, in shards of the same lengths, and results travel back.
    Where tokens can be put in order before they are sharded (`order` of `shard`, `load_shard`, `positions` and `unshard`),
    leave it out here: nothing more travels then.

    `sink` `(heads,)` is the same on every rank. The rank with a row adds it, once, and its gradient is of the rank's own rows:
    sum it over ranks, as those of other parameters.

    With `dropout_p` the weights of the whole sequence are dropped that `dilkit.dilated_attention` drops, whatever the number of
    ranks. Each rank draws a seed, and that of rank 0 is taken.

    `schedule` and `fuse_branches` are those of `dilkit.comm.ExchangePlan`; the other arguments, dtypes and the result are those
    of `dilkit.dilated_attention`.

    Raises ValueError or TypeError for input that does not fit, and `PlanMismatch` on the other ranks and where ranks differ;
    `CommTimeout` or `PeerLost` when a rank does not answer. After one of these two, or a failure of this rank in the course of a
    pass, `comm` cannot be used again.

        >>> import torch
        >>> from dilkit import Pattern, dilated_attention
        >>> from dilkit.comm import ring_dilated_attention, run_threads, shard, unshard
        >>> pattern = Pattern([8, 16], [1, 2])
        >>> whole = torch.randn(1, 16, 4, 8)  # (batch, seq, heads, head_dim)
        >>> def on_rank(comm):
        ...     rows = shard(whole, comm, pattern)  # of a long sequence, no rank would hold all
        ...     return unshard(ring_dilated_attention(rows, rows, rows, pattern, comm, is_causal=True), comm)
        >>> first, second = run_threads(2, on_rank)
        >>> torch.allclose(first, dilated_attention(whole, whole, whole, pattern, is_causal=True), atol=1e-6)
        True

    Source: LongNet (arXiv 2307.02486), section 3.1, which gathers keys and values; the routes here are in `docs/ranks.md`.
    """
    check_comm(comm)
    arguments = Arguments(
        query,
        key,
        value,
        pattern,
        is_causal,
        key_padding_mask,
        sink,
        scale,
        dropout_p,
        backend,
        schedule,
        fuse_branches,
        order,
        return_lse,
    )
    every_rank = agree_on(comm, arguments.facts, ("rows", "seed"), STEP) if comm.size > 1 else [arguments.facts()]
    cuts = tuple(accumulate((facts["rows"] for facts in every_rank), initial=0))
    rows = [x.to(arguments.dtype) for x in (query, key, value)]
    attention = RankAttention(arguments, comm, cuts, torch.tensor(every_rank[0]["seed"], device="cpu") if dropout_p else None)
    orders = arguments.orders
    check_orders(orders, cuts[-1], key.shape[2], pattern, is_causal)
    if all(order.is_identity for order in orders):
        out, lse = attention.attend(rows, pattern, key_padding_mask, sink)
    else:
        out, lse = attention.attend_in_order(rows, key_padding_mask)
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class RankAttention:
    """The attention of one rank, after all ranks agreed on their arguments. Rank t holds `cuts[t] .. cuts[t + 1] - 1`."""

    arguments: Arguments
    comm: Comm
    cuts: tuple[int, ...]
    seed: Tensor | None

    def attend(self, rows: Sequence[Tensor], pattern: Pattern, mask: Tensor | None, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """`(out, lse)` of query, key and value, which lie in the order of their attention."""
        given, heads = self.arguments, (rows[0].shape[2], rows[1].shape[2])
        options: dict[str, Any] = dict(is_causal=given.is_causal, schedule=given.schedule, fuse_branches=given.fuse_branches)
        plan = exchange_plan(pattern, self.cuts, *heads, **options)
        plan.check_dropout(given.dropout_p)
        head = first_head(pattern) * (heads[0] // heads[1])
        op = AttentionOp(given.factor, given.backends, given.requires_grad, given.dropout_p, self.seed, head)
        context = PassContext(op, self.comm, plan, len(rows[0]), rows[0].device, given.return_lse)
        out, lse = AttentionOverRanks.apply(*rows, mask, sink, context)  # type: ignore[no-untyped-call]
        return out, lse

    def attend_in_order(self, rows: list[Tensor], mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """`(out, lse)` of row-major query, key and value along the token orders; `lse` is empty unless it is returned."""
        given, pattern = self.arguments, self.arguments.pattern
        orders, first = used_orders(given.orders, first_head(pattern), rows[1].shape[2])
        reordering = Reordering(self.comm, orders, self.cuts, first, rows[1].shape[2])
        rows, masks = reorder_inputs(reordering, rows, mask)
        one_mask = len(orders) == 1 or mask is None
        out, lse = self.attend(rows, pattern, masks[0], given.sink) if one_mask else self._attend_by_head(rows, masks)
        if not given.return_lse:
            return restore_outputs(reordering, out)[0], lse.new_empty(0)
        out, lse = restore_outputs(reordering, out, lse.transpose(1, 2))
        return out, lse.transpose(1, 2).contiguous()

    def _attend_by_head(self, rows: Sequence[Tensor], masks: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """`attend` with a mask for each key/value head.

        Backward, autograd visits the heads last to first, the same on all ranks, as it does with nodes that are ready alike.
        """
        kv_heads = rows[1].shape[2]
        texts = head_texts(self.arguments.pattern.to_json(), rows[0].shape[2], kv_heads)
        split = (x.tensor_split(kv_heads, 2) for x in rows)
        results = [
            nothing(q, own) if text is None else self.attend((q, k, v), Pattern.from_json(text), mask, own)
            for q, k, v, mask, text, own in zip(*split, masks, texts, sink_by_head(self.arguments.sink, kv_heads), strict=True)
        ]
        return torch.cat([out for out, _ in results], 2), torch.cat([lse for _, lse in results], 1)
