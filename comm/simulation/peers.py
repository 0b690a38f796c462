"""Other ways to compute the same pattern over ranks, in the same time model: those that move all keys and values, or all rows.

| way | forward | backward | as in |
|---|---|---|---|
| full ring | all keys and values go round, a block a hop | they and their gradients go round | ring-flash-attention |
| all-gather | every rank receives all keys and values | their gradients return | torchscale's `seq_parallel`, context parallel |
| Ulysses | queries, keys, values to the ranks of their heads, results back | gradients there and back | arXiv 2309.14509 |

Work is thought to be shared out evenly, and a full ring to hide its sends under it as far as they fit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dilkit.comm.plan.forecast import Forecast
from dilkit.comm.simulation.delivery import Table, delivered, handed_over
from dilkit.comm.simulation.topology import Topology


class Peer(NamedTuple):
    """A forward and a backward pass: seconds, bytes that a rank sends, and the most bytes of others' rows that it holds."""

    seconds: float
    sent: int
    held: int


def peers(forecast: Forecast, topology: Topology) -> dict[str, Peer]:
    """Each of them; Ulysses is left out where there are more ranks than query heads."""
    plan, rows, speed = forecast.plan, forecast.rows, forecast.speed
    others, shard = plan.world_size - 1, -(-plan.seq // plan.world_size) * rows.batch
    block, gradients = shard * plan.kv_heads * rows.key_value_bytes, shard * plan.kv_heads * 2 * rows.row_bytes
    queries = 2 * shard * plan.heads * rows.row_bytes  # and results
    work = float(forecast.flops["total"].sum()) / plan.world_size / speed.flops
    computed, everyone = (1 + speed.backward) * work, np.ones((plan.world_size,) * 2) - np.eye(plan.world_size)
    ranks, each = np.arange(plan.world_size), np.ones(plan.world_size)
    hops = [
        others * float(handed_over(0 * each, ranks, np.roll(ranks, -1), size * each, topology).received.max())
        for size in (block, block + gradients)
    ]
    around = max(work, hops[0]) + max(speed.backward * work, hops[1]) + 2 * others * speed.latency
    gathered = computed + sum(_seconds(everyone * size, topology) for size in (block, gradients)) + 2 * speed.latency
    by_scheme = {
        "full ring": Peer(around, others * (2 * block + gradients), 2 * (block + gradients)),
        "all-gather": Peer(gathered, others * (block + gradients), others * block),
    }
    if plan.world_size <= plan.heads:
        passes = [(one + queries) * others // plan.world_size for one in (block, gradients)]
        moved = sum(_seconds(everyone * one / max(others, 1), topology) for one in passes)
        by_scheme["Ulysses"] = Peer(computed + moved + 4 * speed.latency, sum(passes), max(passes))
    return by_scheme


def _seconds(volume: Table, topology: Topology) -> float:
    return float(delivered(np.zeros(len(volume)), volume, topology).received.max())
