"""The forward pass of a ring schedule: each rank's queries see one key/value block after the other."""

from __future__ import annotations

from torch import Tensor

from dilkit.comm.passes.attention_op import AttentionOp, QKVRows
from dilkit.comm.passes.partial_results import PartialResults
from dilkit.comm.passes.rank_bias import RankBias
from dilkit.comm.passes.rank_inputs import RankInputs
from dilkit.comm.passes.ring.kv_rotation import KVBlock, KVRotation
from dilkit.comm.passes.ring.segment import ring_branch
from dilkit.comm.passes.rows import collect_rows
from dilkit.comm.plan.exchange_plan import ExchangePlan
from dilkit.comm.transports.base import Comm


def ring_forward(
    op: AttentionOp, comm: Comm, plan: ExchangePlan, branch: int, inputs: RankInputs, bias: RankBias | None
) -> list[tuple[Tensor, PartialResults]]:
    """What this rank's queries see through a branch: `(rows, results)` for each of its segments."""
    query = inputs.query
    ring = ring_branch(plan, branch, comm.rank, len(query), query.device, bias is not None)
    rows = [tables.queries for tables in ring.tables]
    queries = [collect_rows(query, own) for own in rows]
    places = [own_positions(bias, query, own) for own in rows]
    partials = [PartialResults.empty(len(own), query.shape[-1], query) for own in rows]
    for hop, blocks in KVRotation(comm, ring, inputs, bias):
        for tables, own, at, results, block in zip(ring.tables, queries, places, partials, blocks, strict=True):
            if block is not None:
                for stack in tables.stacks_at(hop):
                    op.forward(results, stack, block_rows(own, at, block, bias))
    return list(zip(rows, partials, strict=True))


def own_positions(bias: RankBias | None, query: Tensor, rows: Tensor) -> Tensor | None:
    """The positions of rows of queries, by their numbers."""
    return None if bias is None else collect_rows(bias.by_head(len(query), query.shape[2]), rows)


def block_rows(queries: Tensor, positions: Tensor | None, block: KVBlock, bias: RankBias | None) -> QKVRows:
    """Own queries with a block of keys."""
    of_tables = None
    if bias is not None and positions is not None and block.positions is not None:
        of_tables = bias.of_tables(positions, block.positions)
    return QKVRows(queries, block.keys, block.values, block.flags, of_tables)
