"""Memory for rows of other ranks."""

from __future__ import annotations

import numpy as np

from dilkit.comm.plan.exchange_plan import ExchangePlan
from dilkit.comm.plan.spread import Counts
from dilkit.comm.plan.traffic import Rows
from dilkit.comm.plan.within import rows_within


def held_bytes(plan: ExchangePlan, rows: Rows) -> Counts:
    """`(world_size,)`: bytes of the rows that each rank is sent in a forward pass, and keeps for the backward pass.

        batch * (queries computed * row + keys computed with * (2 * row + 1 with a mask))

    Rows that it sends to itself are among them; what goes round a ring is not kept.
    """
    total = np.zeros(plan.world_size, np.int64)
    for branch, (route, tally) in enumerate(zip(plan.routes, plan.tallies, strict=True)):
        if route.kind != "ring":
            total += tally.queries_computed * rows.row + tally.keys_computed * rows.key_and_value
        if not plan.fuse_branches:
            queries, keys = rows_within(plan.moved, branch, plan.cuts, plan.heads, plan.kv_heads)
            total += queries * rows.row + keys * rows.key_and_value
    return total * rows.batch


def ring_bytes(plan: ExchangePlan, rows: Rows) -> Counts:
    """`(world_size,)`: the most bytes of keys and values that lie on each rank at a time, of those that go round a ring.

        batch * 4 * rows of the largest block * (2 * row + 1 with a mask)

    Four blocks, in separate buffers: a rank's own, the one at hand, that on its way to the next rank, and the one that comes.
    """
    rings = [t.largest_block for t, route in zip(plan.tallies, plan.routes, strict=True) if route.kind == "ring"]
    most: Counts = np.max([np.zeros(plan.world_size, np.int64), *rings], axis=0)
    return 4 * rows.batch * rows.key_and_value * most
