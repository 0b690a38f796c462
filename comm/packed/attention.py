"""`ring_dilated_attention_varlen`: packed sequences over ranks, each of which holds a shard of the packing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.comm.agreement import agree_on
from dilkit.comm.arguments import MAY_DIFFER, Arguments, asked_on_any_rank
from dilkit.comm.packed.plan import PackedPlan, WholeSequences
from dilkit.comm.rank_attention import RankAttention
from dilkit.comm.transports.base import Comm, check_comm
from dilkit.compiler import not_compiled
from dilkit.inputs import Inputs
from dilkit.op.sequences import check_cu_seqlens, checked_longest
from dilkit.packed.attention import batch_of_one, dilated_attention_varlen
from dilkit.pattern import Pattern

STEP = "arguments of ring_dilated_attention_varlen"


@not_compiled
def ring_dilated_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    comm: Comm,
    cu_seqlens: Tensor,
    *,
    is_causal: bool = False,
    sink: Tensor | None = None,
    scale: float | None = None,
    backend: str | Sequence[str] | None = None,
    schedule: str = "auto",
    bias: Bias | None = None,
    softcap: float | None = None,
    keep: str = "rows",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact dilated attention of packed sequences over ranks: `dilkit.dilated_attention_varlen` of the whole packing.

        out[s:t] = dilated_attention(query[s:t], key[s:t], value[s:t], pattern)    for s, t = cu_seqlens[b], cu_seqlens[b + 1]

    Each rank passes the rows of its own shard, and gets their results: `query` `(rows, heads, head_dim)`, `key` and `value` with
    `kv_heads` heads. Shards follow each other by rank and may begin anywhere: in the middle of a sequence, too
    (`packed_cuts` says where to cut). Of a sequence that one rank has whole nothing is sent; what is sent of the others
    `PackedPlan` says. All ranks call with equal arguments, and all of them run the backward pass if one does.

    `cu_seqlens` int32 `(sequences + 1,)` are those of the whole packing, the same on every rank. `sink` is as in
    `ring_dilated_attention`, `schedule` and `keep` as in `dilkit.comm.ExchangePlan`; the other arguments, dtypes and the result,
    with `lse` `(heads, rows)`, are those of `dilkit.dilated_attention_varlen`. Raises what `ring_dilated_attention` raises.

        >>> import torch
        >>> from dilkit import Pattern, dilated_attention_varlen
        >>> from dilkit.comm import ring_dilated_attention_varlen, run_threads, shard, unshard
        >>> pattern = Pattern([8, 16], [1, 2])
        >>> whole, cu_seqlens = torch.randn(40, 4, 8), torch.tensor([0, 6, 34, 40], dtype=torch.int32)
        >>> def on_rank(comm):
        ...     rows = shard(whole, comm, dim=0)  # the sequence from 6 to 34 is cut at 20
        ...     return unshard(ring_dilated_attention_varlen(rows, rows, rows, pattern, comm, cu_seqlens), comm, dim=0)
        >>> first, second = run_threads(2, on_rank)
        >>> torch.allclose(first, dilated_attention_varlen(whole, whole, whole, pattern, cu_seqlens), atol=1e-6)
        True
    """
    check_comm(comm)

    def arguments() -> Arguments:
        q, k, v = (batch_of_one(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
        options = scale, 0.0, backend, schedule, True, None, return_lse
        return Arguments(Inputs(q, k, v, sink=sink), pattern, is_causal, *options, bias=bias, softcap=softcap, keep=keep)

    def facts() -> dict[str, Any]:
        own_facts = arguments().facts()
        check_cu_seqlens(cu_seqlens, query, query.shape[0])
        return dict(**own_facts, cu_seqlens=str(cu_seqlens.tolist()))

    every_rank = agree_on(comm, facts, STEP, MAY_DIFFER) if comm.size > 1 else [facts()]
    cuts = tuple(accumulate((facts["rows"] for facts in every_rank), initial=0))
    checked_longest(cu_seqlens, cuts[-1])
    plan = PackedPlan(pattern, cuts, tuple(cu_seqlens.tolist()), query.shape[1], key.shape[1], is_causal, schedule, keep)
    out, lse = _attend(arguments(), comm, plan, asked_on_any_rank(every_rank))
    return (out, lse) if return_lse else out


def _attend(call: Arguments, comm: Comm, plan: PackedPlan, gradients: str) -> tuple[Tensor, Tensor]:
    """Return `out` `(rows, heads, head_dim)` and `lse` `(heads, rows)` of this rank, which shares each cut sequence."""
    rows, results = [x.to(call.dtype) for x in call.inputs[:3]], []
    for sequence in plan.cut_sequences:
        here = sequence.rows(comm.rank, plan.cuts[comm.rank])
        attention = RankAttention(call, comm, sequence.plan.cuts, None, gradients)
        query, key, value = (x[:, here] for x in rows)
        bias = attention.bias((query, key, value), _bias(call, here))
        inputs = Inputs(query, key, value, sink=call.inputs.sink, bias=bias)
        results.append((here.start, *attention.attend(inputs, call.pattern)))
    whole = plan.whole(comm.rank)
    if whole.rows.start < whole.rows.stop:
        results.append((whole.rows.start, *_whole(call, [x[0, whole.rows] for x in rows], whole)))
    results.sort(key=lambda part: part[0])
    return torch.cat([out for _, out, _ in results], 1).squeeze(0), torch.cat([lse for _, _, lse in results], 2).squeeze(0)


def _bias(call: Arguments, rows: slice) -> Bias | None:
    if call.bias is None:
        return None
    return call.bias.of_rows(torch.arange(rows.start, rows.stop, device=call.inputs.query.device))


def _whole(call: Arguments, rows: Sequence[Tensor], sequences: WholeSequences) -> tuple[Tensor, Tensor]:
    starts = torch.tensor(sequences.starts, dtype=torch.int32, device=rows[0].device) - sequences.starts[0]
    options: dict[str, Any] = dict(is_causal=call.is_causal, sink=call.inputs.sink, scale=call.scale, backend=call.backend)
    options |= dict(bias=_bias(call, sequences.rows), softcap=call.softcap, return_lse=True)
    query, key, value = rows
    out, lse = dilated_attention_varlen(query, key, value, call.pattern, starts, max(sequences.lengths), **options)
    return out.unsqueeze(0), lse.unsqueeze(0)
