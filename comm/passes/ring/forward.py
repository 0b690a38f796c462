"""The forward pass of a ring schedule: each rank's queries see one key/value block after the other."""

from __future__ import annotations

from torch import Tensor

from dilkit.comm.passes.attention_op import AttentionOp, QKVRows
from dilkit.comm.passes.partial_results import PartialResults
from dilkit.comm.passes.ring.kv_rotation import KVRotation
from dilkit.comm.passes.ring.segment import hops, ring_segments
from dilkit.comm.passes.rows import collect_rows
from dilkit.comm.plan.exchange_plan import ExchangePlan
from dilkit.comm.transports.base import Comm


def ring_forward(
    op: AttentionOp, comm: Comm, plan: ExchangePlan, branch: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> list[tuple[Tensor, PartialResults]]:
    """What this rank's queries see through a branch: `(rows, results)` for each of its segments."""
    segments = ring_segments(plan, branch, comm.rank, len(query), query.device)
    rows = [segment.own_rows("q") for segment in segments]
    queries = [collect_rows(query, own) for own in rows]
    partials = [PartialResults.empty(len(own), query.shape[-1], query) for own in rows]
    for hop, blocks in KVRotation(comm, segments, hops(plan, branch), key, value, mask):
        for segment, own, results, block in zip(segments, queries, partials, blocks, strict=True):
            if block is not None:
                for stack in segment.stacks(hop):
                    op.forward(results, stack, QKVRows(own, *block))
    return list(zip(rows, partials, strict=True))
