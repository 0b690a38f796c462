"""Bytes, work, memory and time of a call by an exchange plan on each rank, worked out without running it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilkit.comm.plan.exchange_plan import PHASES, ExchangePlan
from dilkit.comm.plan.messages import IntArray
from dilkit.comm.plan.segments import segment_counts, segment_shards
from dilkit.comm.plan.traffic import PhaseTraffic, Rows

BACKWARD = 2.5
"""Nominal FLOPs of a backward pass, in those of a forward pass; its seconds where they were not measured."""
Numbers = NDArray[Any]


@dataclass(frozen=True)
class Speed:
    """The speed of a rank: bytes a second each way, operations a second of a forward pass.

    `latency`: seconds of an exchange of next to nothing; `backward`: of the seconds of a forward pass, those of a backward pass.
    """

    bandwidth: float
    flops: float
    latency: float = 0.0
    backward: float = BACKWARD


@dataclass(frozen=True)
class Forecast:
    """Bytes, work, memory and time of a plan: arrays `(world_size,)`, a number for each rank.

    >>> from dilkit import Pattern
    >>> from dilkit.comm import Rows, exchange_plan
    >>> plan = exchange_plan(Pattern([4, 16], [1, 2]), cuts=(0, 8, 16), heads=2)
    >>> forecast = Forecast(plan, Rows(head_dim=64, dtype="float32"), Speed(bandwidth=50e9, flops=400e12))
    >>> forecast.traffic["forward"].sent.tolist(), forecast.flops["total"].tolist()
    ([4112, 4112], [32768, 32768])
    """

    plan: ExchangePlan
    rows: Rows
    speed: Speed

    @cached_property
    def traffic(self) -> dict[str, PhaseTraffic]:
        return {phase: self.plan.traffic(phase, self.rows) for phase in PHASES}

    @cached_property
    def flops(self) -> dict[str, Numbers]:
        """Nominal FLOPs of a forward pass, as `Pattern.flops` counts them, by when they are done."""
        unit = 4 * self.rows.head_dim * self.rows.batch
        return {name: pairs * unit for name, pairs in self.plan.all_work.items()}

    @cached_property
    def memory(self) -> dict[str, Numbers]:
        """Bytes by kind, gradients as far as they are asked for; without weights, and what a backend needs beside its results."""
        plan, rows = self.plan, self.rows
        tokens = np.diff(np.array(plan.cuts, np.int64)) * rows.batch
        queries, keys = plan.heads * rows.row_bytes, 2 * plan.kv_heads * rows.row_bytes
        by_name: dict[str, Numbers] = {
            "inputs": tokens * (queries + keys + rows.key_padding_mask),
            "results": tokens * (queries + plan.heads * rows.lse_bytes),
            "gradients": tokens * (queries + plan.heads * rows.dquery_bytes + plan.kv_heads * rows.dkey_value_bytes),
            "exchange buffers": exchange_buffer_bytes(plan, rows),
            "ring buffers": ring_buffer_bytes(plan, rows),
        }
        return {**by_name, "total": np.sum(list(by_name.values()), axis=0)}

    @cached_property
    def kept(self) -> Numbers:
        """Bytes of received rows that lie there between the passes, as long as later layers are computed."""
        return self.memory["exchange buffers"] * (self.plan.keep == "rows")

    @cached_property
    def exchanges(self) -> dict[str, int]:
        """Exchanges of all ranks, by phase: arguments (backward, which call it is), rows there and back, blocks round rings.

        Masks, positions and what else a call may have are not counted.
        """
        plan = self.plan
        hops = sum(ring.hops for ring in plan.rings)
        all_to_all, again, agreeing = len(plan.rounds), plan.keep == "nothing", int(plan.world_size > 1)
        return dict(zip(PHASES, (agreeing + 2 * all_to_all + hops, agreeing + (2 + again) * all_to_all + 2 * hops), strict=True))

    @cached_property
    def seconds(self) -> dict[str, Numbers]:
        """Seconds of forward and backward together; no rank is thought to wait for another's work.

        overlapped = max(local work, rows there) + work on rows moved + max(work round rings, ring + results back)
                     + exchanges * latency

        With `keep="nothing"` the rows of one branch alone travel during local work, and in a backward pass none do.
        """
        parts = (np.array(self.flops[name], float) / self.speed.flops for name in ("local", "moved", "ring"))
        local, moved, ring = parts
        compute, sending, overlapped = (np.zeros(self.plan.world_size) for _ in range(3))
        for (phase, traffic), factor in zip(self.traffic.items(), (1.0, self.speed.backward), strict=True):
            legs, latency = (traffic.there, traffic.back, traffic.ring), self.exchanges[phase] * self.speed.latency
            there, back, around = (leg.max(0) / self.speed.bandwidth for leg in legs)  # links work both ways at once
            compute += factor * (local + moved + ring)
            sending += there + back + around + latency
            early, late = there, 0 if phase == "backward" and self.plan.keep == "nothing" else back
            if self.plan.keep == "nothing" and self.plan.rounds:
                first = self.plan.traffic("forward", self.rows, self.plan.rounds[0][0]).there
                early = (first * (phase == "forward")).max(0) / self.speed.bandwidth
            overlapped += np.maximum(factor * local, early) + there - early + factor * moved + back - late
            overlapped += np.maximum(factor * ring, late + around) + latency
        return dict(compute=compute, communication=sending, overlapped=overlapped, sequential=compute + sending)

    @property
    def slowest(self) -> int:
        return int(np.argmax(self.seconds["overlapped"]))

    @property
    def balance(self) -> float:
        """The most FLOPs of a rank, in units of the mean."""
        work = self.flops["total"]
        return float(work.max() / (work.sum() / len(work))) if work.any() else 1.0


def baselines(plan: ExchangePlan, rows: Rows) -> dict[str, int]:
    """Return the bytes that other ways would have the busiest rank send in a forward pass.

    "full_ring": all keys and values go round; "segment_all_gather": LongNet's, of the kept ones of each segment.
    """
    shard = int(np.diff(np.array(plan.cuts, np.int64)).max()) * plan.kv_heads * rows.batch * rows.key_value_bytes
    pattern, shape = plan.pattern, (plan.cuts, plan.heads, plan.kv_heads)
    if not pattern.only_segments:
        return {"full_ring": (plan.world_size - 1) * shard}
    branches = [segment_shards(pattern, branch, *shape) for branch in range(len(pattern.branches))]
    keys = sum(segment_counts(shards, plan.world_size, False)[1][0] for shards in branches)
    sparse = int(np.max(rows.batch * rows.key_value_bytes * keys))
    return {"full_ring": (plan.world_size - 1) * shard, "segment_all_gather": sparse}


def exchange_buffer_bytes(plan: ExchangePlan, rows: Rows) -> IntArray:
    """Return the most bytes of received rows that lie on each rank at a time, `(world_size,)`, those sent to itself among them.

        batch * (query rows computed * query_bytes + key rows computed with * key_value_bytes)

    With `keep="rows"` these are the rows of all branches, between the passes too; with "nothing" those of one branch.
    """
    most: IntArray = np.zeros(plan.world_size, np.int64)
    for branches in plan.rounds:
        counts = [plan.exchanges[branch].counts for branch in branches]
        received = sum(queries[2] * rows.query_bytes + keys[2] * rows.key_value_bytes for queries, keys in counts)
        most = np.maximum(most, received * rows.batch)
    return most


def ring_buffer_bytes(plan: ExchangePlan, rows: Rows) -> IntArray:
    """Return the most bytes of key/value blocks of a ring that lie on each rank at a time, `(world_size,)`.

    Four blocks lie in separate buffers: the rank's own, the one it computes with, the one it sends on, and the one it receives.
    """
    blocks = [np.zeros(plan.world_size, np.int64), *(ring.largest_block for ring in plan.rings)]
    most: IntArray = 4 * rows.batch * rows.key_value_bytes * np.max(blocks, axis=0)
    return most
