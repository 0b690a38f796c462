"""Bytes of the buffers in which a rank holds rows of other ranks."""

from __future__ import annotations

import numpy as np

from dilkit.comm.plan.exchange_plan import ExchangePlan
from dilkit.comm.plan.local_segments import local_row_counts
from dilkit.comm.plan.row_counts import RowCounts
from dilkit.comm.plan.sharded_segments import IntArray
from dilkit.comm.plan.traffic import Rows


def exchange_buffer_bytes(plan: ExchangePlan, rows: Rows) -> IntArray:
    """`(world_size,)`: bytes of the rows that each rank receives in a forward pass, and keeps for the backward pass.

        batch * (query rows computed * query_bytes + key rows computed with * key_value_bytes)

    Rows that a rank sends to itself are among them; blocks that go round a ring are not kept.
    """
    total = np.zeros(plan.world_size, np.int64)
    for branch, (route, counts) in enumerate(zip(plan.routes, plan.row_counts, strict=True)):
        if route.kind != "ring":
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
