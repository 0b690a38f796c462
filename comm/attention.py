"""`ring_dilated_attention`: dilated attention over ranks, each of which holds a shard of the sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.comm.arguments import Arguments
from dilkit.comm.operators import attention as operator
from dilkit.comm.rank_attention import agreed
from dilkit.comm.transports.base import Comm, check_comm
from dilkit.compiler import not_compiled
from dilkit.inputs import Inputs
from dilkit.orders.token_order import TokenOrder
from dilkit.pattern import Pattern


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
    bias: Bias | None = None,
    softcap: float | None = None,
    keep: str = "rows",
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

    With `softcap` and `bias` the score is `softcap * tanh(scale * q_i . k_j / softcap) + bias(h, i, j) + log count[h, i, j]`; the
    sink is as it is. A `CoordinateAlibi` has the coordinates of this rank's rows, which travel with them; any other bias is that
    of the whole sequence. The gradient of its slopes or table is of what the rank computes: sum it over ranks, as the sink's.

    `schedule`, `fuse_branches` and `keep` are those of `dilkit.comm.ExchangePlan`; the other arguments, dtypes and the result are
    those of `dilkit.dilated_attention`.

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
        Inputs(query, key, value, key_padding_mask, sink=sink),
        pattern,
        is_causal,
        scale,
        dropout_p,
        backend,
        schedule,
        fuse_branches,
        order,
        return_lse,
        bias=bias,
        softcap=softcap,
        keep=keep,
    )
    if torch.compiler.is_compiling() and operator.can_be_compiled(arguments):
        out, lse = operator.attend(arguments, comm)
    else:
        out, lse = _attend(arguments, comm)
    return (out, lse) if return_lse else out


@not_compiled
def _attend(arguments: Arguments, comm: Comm) -> tuple[Tensor, Tensor]:
    return agreed(arguments, comm).compute()
