"""`ring_dilated_attention`: dilated attention over ranks, each holding a part of the sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dilkit.comm.agreement import agree_on
from dilkit.comm.arguments import STEP, Arguments
from dilkit.comm.passes.compute import Kernel
from dilkit.comm.passes.exchange import BackwardExchange, ForwardExchange, Held
from dilkit.comm.passes.local import Range, local_backward, local_forward, local_ranges
from dilkit.comm.passes.partial import join_rows
from dilkit.comm.passes.ring import ring_backward, ring_forward
from dilkit.comm.passes.rows import add_rows
from dilkit.comm.passes.tables import Tables, tables_of
from dilkit.comm.plan.exchange_plan import ExchangePlan, exchange_plan
from dilkit.comm.reorder import Reordering, along_orders, row_major
from dilkit.comm.transports.base import Comm, check_comm
from dilkit.orders.attention import nothing
from dilkit.orders.heads import check_orders, first_head, head_texts
from dilkit.orders.token_order import TokenOrder
from dilkit.pattern import Pattern


@torch.compiler.disable
def ring_dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    comm: Comm,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    backend: str | Sequence[str] | None = None,
    schedule: str = "auto",
    fuse_branches: bool = True,
    order: TokenOrder | Sequence[TokenOrder] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Dilated attention over the ranks of `comm`, exact: `dilkit.dilated_attention` of the shards put together.

        out[i] = softmax_j(scale * q_i . k_j + log count[h, i, j]) . v        lse[i] = logsumexp of the same row

    Rank t passes, and gets, the rows of its own shard: `query` `(batch, rows, heads, head_dim)`, `key` and `value` with
    `kv_heads` heads, `key_padding_mask` bool `(batch, rows)`. Shards follow each other by rank and may differ in length
    (`shard_cuts` says where to cut them so that little has to travel). All ranks call with equal arguments, and all of them run
    the backward pass if one does; what differs is found before any rows are sent, and raises on every rank.

    With `order`, one or several that the heads take in turn, it is `dilkit.ordered_dilated_attention`: shards are of the
    row-major sequence, rows travel to where they are along the order, in shards of the same lengths, and results travel back.
    Where tokens can be put in order before they are shared out (`order` of `shard`, `load_shard`, `positions` and `unshard`),
    leave it out here: nothing more travels then.

    `schedule` and `fuse_branches` as in `dilkit.comm.ExchangePlan`; the other arguments, dtypes and the result as in
    `dilkit.dilated_attention`. Raises ValueError or TypeError for input that does not fit,
    and `PlanMismatch` on the other ranks and where ranks differ; `CommTimeout` or `PeerLost` when a rank does not answer.
    After one of these two, or a failure of this rank in the course of a pass, `comm` cannot be used again.
    """
    check_comm(comm)
    arguments = Arguments(
        query, key, value, pattern, is_causal, key_padding_mask, scale, backend, schedule, fuse_branches, order, return_lse
    )
    told = agree_on(comm, arguments.facts, ("rows",), STEP) if comm.size > 1 else [arguments.facts()]
    cuts = tuple(accumulate((facts["rows"] for facts in told), initial=0))
    rows = [x.to(arguments.dtype) for x in (query, key, value)]
    over = _Over(arguments, comm, cuts)
    orders = arguments.orders
    check_orders(orders, cuts[-1], key.shape[2], pattern, is_causal)
    if all(order.is_identity for order in orders):
        out, lse = over.attend(rows, pattern, key_padding_mask)
        return (out, lse) if return_lse else out
    job = Reordering(comm, orders, cuts, first_head(pattern), key.shape[2])
    rows, masks = along_orders(job, rows, key_padding_mask)
    one_mask = len(orders) == 1 or key_padding_mask is None
    found = over.attend(rows, pattern, masks[0]) if one_mask else over.head_by_head(rows, masks)
    if not return_lse:
        return row_major(job, found[0])[0]
    out, lse = row_major(job, found[0], found[1].transpose(1, 2))
    return out, lse.transpose(1, 2).contiguous()


@dataclass(frozen=True)
class _Over:
    """Attention of this rank's rows, which lie along whatever order, as all ranks have agreed."""

    arguments: Arguments
    comm: Comm
    cuts: tuple[int, ...]

    def attend(self, rows: Sequence[Tensor], pattern: Pattern, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """`(out, lse)` of query, key and value."""
        told, heads = self.arguments, (rows[0].shape[2], rows[1].shape[2])
        options: dict[str, Any] = dict(is_causal=told.is_causal, schedule=told.schedule, fuse_branches=told.fuse_branches)
        plan = exchange_plan(pattern, self.cuts, *heads, **options)
        kernel = Kernel(told.factor, told.backends, told.requires_grad)
        job = Job(kernel, self.comm, plan, len(rows[0]), rows[0].device, told.return_lse)
        out, lse = _RingAttention.apply(*rows, mask, job)
        return out, lse

    def head_by_head(self, rows: Sequence[Tensor], masks: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """`attend` with a mask for each key/value head.

        Backward, autograd takes up the heads last to first, the same on all ranks, as it does nodes that are ready alike.
        """
        kv_heads = rows[1].shape[2]
        texts = head_texts(self.arguments.pattern.to_json(), rows[0].shape[2], kv_heads)
        split = (x.tensor_split(kv_heads, 2) for x in rows)
        found = [
            nothing(q) if text is None else self.attend((q, k, v), Pattern.from_json(text), mask)
            for q, k, v, mask, text in zip(*split, masks, texts, strict=True)
        ]
        return torch.cat([out for out, _ in found], 2), torch.cat([lse for _, lse in found], 1)


@dataclass(frozen=True)
class Job:
    """What the passes over ranks are told besides tensors."""

    kernel: Kernel
    comm: Comm
    plan: ExchangePlan
    batch: int
    device: torch.device
    returns_lse: bool

    @property
    def tables(self) -> Tables:
        """This rank's index tables."""
        return tables_of(self.plan, self.comm.rank, self.batch, self.device)

    @property
    def ranges(self) -> tuple[Range, ...]:
        """What this rank computes by itself."""
        return local_ranges(self.plan, self.comm.rank)

    @property
    def rings(self) -> list[int]:
        """The branches that go round a ring."""
        return [b for b, route in enumerate(self.plan.routes) if route.kind == "ring"]


class _RingAttention(torch.autograd.Function):
    """One node for all that is sent: every rank makes the same exchanges in the same order, in both passes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, job: Job) -> tuple[Tensor, Tensor]:
        with torch.autocast(query.device.type, enabled=False), job.comm.failing_for_good():
            out, lse, held = _forward(job, query, key, value, mask)
        ctx.set_materialize_grads(False)
        ctx.job, kept = job, (None, None) if held is None else held
        ctx.save_for_backward(query, key, value, mask, out, lse, *kept)
        return out, lse.transpose(1, 2).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        with ctx.job.comm.failing_for_good():
            *inputs, out, lse, rows, flags = ctx.saved_tensors
            dout = torch.zeros_like(out) if dout is None else dout.contiguous()  # the others wait for this rank's part
            with torch.autocast(out.device.type, enabled=False):
                dquery, dkey, dvalue = _backward(ctx.job, dout, inputs, out, lse, Held(rows, flags))
                if ctx.job.returns_lse and _on_any_rank(ctx.job.comm, dlse is not None):
                    by_query, by_key = _through_lse(ctx.job, dlse, inputs, lse)
                    dquery, dkey = dquery + by_query, dkey + by_key
        return dquery, dkey, dvalue, None, None


def _forward(job: Job, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Held | None]:
    plan, comm, held, under_way = job.plan, job.comm, None, None
    if plan.exchanges:
        under_way = ForwardExchange(job.kernel, comm, job.tables, query, key, value, mask)
    out, lse = local_forward(job.kernel, job.ranges, plan.is_causal, query, key, value, mask)
    if under_way is not None:
        held = under_way.compute()
    for branch in job.rings:
        for rows, found in ring_forward(job.kernel, comm, plan, branch, query, key, value, mask):
            join_rows(out, lse, rows, found)
    if under_way is not None:
        under_way.land(out, lse)
    return out, lse, held


def _on_any_rank(comm: Comm, said: bool) -> bool:
    return b"yes" in comm.share(b"yes" if said else b"no", "whether lse is in the loss")


def _through_lse(job: Job, dlse: Tensor | None, inputs: Sequence[Any], lse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of query and key through `lse`, `dlse` `(batch, heads, seq)`, by the passes that there are.

        dq_i = scale * dlse_i * sum_j P_ij k_j      dk_j = scale * sum_i P_ij dlse_i q_i

    The first sum is attention with the keys as values; the second is that attention's dvalue for dout = scale * dlse * q.
    """
    query, key, _, mask = inputs
    dlse = torch.zeros_like(lse) if dlse is None else dlse.transpose(1, 2)
    weight = job.kernel.scale * dlse.masked_fill(lse == -math.inf, 0.0)[..., None]
    mean_key, _, held = _forward(job, query, key, key, mask)
    dout = (weight * query).to(query.dtype)
    _, _, dkey = _backward(job, dout, (query, key, key, mask), mean_key, lse, held or Held(None, None))
    return (weight * mean_key).to(query.dtype), dkey


def _backward(
    job: Job, dout: Tensor, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], out: Tensor, lse: Tensor, held: Held
) -> tuple[Tensor, Tensor, Tensor]:
    plan, comm, under_way = job.plan, job.comm, None
    if plan.exchanges:
        under_way = BackwardExchange(job.kernel, comm, job.tables, dout, out, lse)
    grads = local_backward(job.kernel, job.ranges, plan.is_causal, dout, inputs, out, lse)
    if under_way is not None:
        under_way.compute(held)
    for branch in job.rings:
        for found in ring_backward(job.kernel, comm, plan, branch, *inputs, dout, out, lse):
            add_rows(grads[0], found.queries, found.dquery)
            add_rows(grads[1], found.keys, found.dkey)
            add_rows(grads[2], found.keys, found.dvalue)
    if under_way is not None:
        under_way.land(*grads)
    return grads
