"""Bytes of the buffers in which a rank holds rows of other ranks."""

from __future__ import annotations

import numpy as np

from dilkit.comm.plan.exchange_plan import ExchangePlan
from dilkit.comm.plan.local_segments import local_row_counts
from dilkit.comm.plan.row_counts import RowCounts
from dilkit.comm.plan.sharded_segments import IntArray
from dilkit.comm.plan.traffic import Rows


def exchange_buffer_bytes(plan: ExchangePlan, rows: Rows) -> IntArray:
    """`(world_size,)`: the most bytes of rows of queries, keys and values that lie on each rank at a time, as it received them.

        batch * (query rows computed * query_bytes + key rows computed with * key_value_bytes)

    Rows that a rank sends to itself are among them; blocks that go round a ring are not. With `keep="rows"` these are the rows of
    all branches, from the forward to the backward pass; with "nothing" those of one branch, in the course of either.
    """
    rounds = [sum((_received_bytes(plan, b, rows) for b in branches), _none(plan)) for branches in plan.rounds]
    most: IntArray = np.max([_none(plan), *rounds], axis=0)
    return most


def kept_bytes(plan: ExchangePlan, rows: Rows) -> IntArray:
    """`(world_size,)`: bytes of the rows of others, and its own beside them, that each rank keeps for the backward pass."""
    return exchange_buffer_bytes(plan, rows) if plan.keep == "rows" else _none(plan)


def _none(plan: ExchangePlan) -> IntArray:
    return np.zeros(plan.world_size, np.int64)


def _received_bytes(plan: ExchangePlan, branch: int, rows: Rows) -> IntArray:
    """Those of a branch, on each rank."""
    counts, total = plan.row_counts[branch], _none(plan)
    if plan.routes[branch].kind != "ring":
        total += counts.queries_computed * rows.query_bytes + counts.keys_computed * rows.key_value_bytes
    if not plan.fuse_branches:
        queries, keys = local_row_counts(plan.forms[branch], plan.cuts, plan.heads, plan.kv_heads)
        total += queries * rows.query_bytes + keys * rows.key_value_bytes
    return total * rows.batch


def ring_buffer_bytes(plan: ExchangePlan, rows: Rows) -> IntArray:
    """`(world_size,)`: the most bytes of key/value blocks of a ring that lie on each rank at a time.

        batch * 4 * rows of the largest block * key_value_bytes

    Four blocks lie in separate buffers: the rank's own, the one it computes with, the one it sends on, and the one it receives.
    """
    counted = zip(plan.row_counts, plan.routes, strict=True)
    rings = [c.largest_block for c, route in counted if route.kind == "ring" and isinstance(c, RowCounts)]
    most: IntArray = np.max([np.zeros(plan.world_size, np.int64), *rings], axis=0)
    return 4 * rows.batch * rows.key_value_bytes * most
