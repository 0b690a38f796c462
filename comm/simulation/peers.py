"""Other ways to compute the same pattern over ranks, in the same time model: those that move all keys and values, or all rows.

| way | forward | backward | as in |
|---|---|---|---|
| full ring | all keys and values go round, a block a hop | they and their gradients go round | ring-flash-attention |
| all-gather | every rank receives all keys and values | their gradients return | torchscale's `seq_parallel`, context parallel |
| Ulysses | queries, keys, values to the ranks of their heads, results back | gradients there and back | arXiv 2309.14509 |

Work is thought to be shared out evenly, and a full ring to hide its sends under it as far as they fit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dilkit.comm.plan.forecast import Forecast
from dilkit.comm.simulation.delivery import delivered
from dilkit.comm.simulation.pair_rows import Table
from dilkit.comm.simulation.topology import Topology


def peer_seconds(forecast: Forecast, topology: Topology) -> dict[str, float]:
    """A forward and a backward pass by each, in seconds; Ulysses is left out where there are more ranks than query heads."""
    return dict(_each(forecast, topology))


def _each(forecast: Forecast, topology: Topology) -> Iterator[tuple[str, float]]:
    plan, rows, speed = forecast.plan, forecast.rows, forecast.speed
    ranks, shard = plan.world_size, -(-plan.seq // plan.world_size) * rows.batch
    keys, queries = shard * plan.kv_heads * rows.key_value_bytes, shard * plan.heads * rows.row_bytes
    work = float(forecast.flops["total"].sum()) / ranks / speed.flops
    gradients = shard * plan.kv_heads * 2 * rows.row_bytes
    hop = (ranks - 1) / topology.bandwidth
    around = max(work, keys * hop), max(speed.backward * work, (keys + gradients) * hop)
    yield "full ring", sum(around) + 2 * (ranks - 1) * speed.latency
    computed, everyone = (1 + speed.backward) * work, np.ones((ranks, ranks)) - np.eye(ranks)
    gathered = sum(_seconds(everyone * size, topology) for size in (keys, gradients))
    yield "all-gather", computed + gathered + 2 * speed.latency
    if ranks <= plan.heads:
        forward, backward = keys + 2 * queries, gradients + 2 * queries
        moved = sum(_seconds(everyone * size / ranks, topology) for size in (forward, backward))
        yield "Ulysses", computed + moved + 4 * speed.latency


def _seconds(volume: Table, topology: Topology) -> float:
    """Of an exchange that all ranks begin at once."""
    return float(delivered(np.zeros(len(volume)), volume, topology).received.max())
