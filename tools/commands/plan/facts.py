"""The numbers of `dilkit plan`, out of exchange plans: bytes, work, memory and predicted times of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilkit.comm.plan.buffer_bytes import exchange_buffer_bytes, ring_buffer_bytes
from dilkit.comm.plan.exchange_plan import PHASES, ExchangePlan
from dilkit.comm.plan.explain import BranchFacts, branch_facts, explanation
from dilkit.comm.plan.row_counts import RowCounts
from dilkit.comm.plan.sharded_segments import segment_shards
from dilkit.comm.plan.traffic import PhaseTraffic, Rows
from dilkit.tools.console.text import in_bytes

BACKWARD = 2.5
"""Nominal FLOPs of a backward pass, in those of a forward pass."""
LEGS = ("there", "back", "ring", "total")
Numbers = NDArray[Any]


@dataclass(frozen=True)
class Speed:
    """What a rank can do: bytes a second each way, operations a second."""

    bandwidth: float
    flops: float


@dataclass(frozen=True)
class Spread:
    """The smallest, the mean and the largest number of all ranks; `balance` is the largest in units of the mean."""

    min: int
    mean: float
    max: int
    balance: float

    @classmethod
    def of(cls, counts: Numbers) -> Spread:
        """Of `(world_size,)` numbers."""
        mean = float(counts.sum() / len(counts))
        return cls(int(counts.min()), mean, int(counts.max()), float(counts.max() / mean) if mean else 1.0)


@dataclass(frozen=True)
class Schedule:
    """All about one schedule. Bytes are by phase, memory and times by what they are of; times are those of the slowest rank."""

    explanation: list[str]
    branches: list[BranchFacts]
    sent_bytes: dict[str, Spread]
    flops: Spread
    memory_bytes: dict[str, Spread]
    seconds: dict[str, float]
    by_rank: dict[str, list[int]]


def schedule_facts(plan: ExchangePlan, rows: Rows, speed: Speed) -> Schedule:
    """The facts of the schedule that `plan` follows."""
    sent = {phase: plan.traffic(phase, rows).sent for phase in PHASES}
    memory, times, work = memory_of(plan, rows), times_of(plan, rows, speed), plan.all_work.total * _flops_of_a_pair(rows)
    slowest, by_rank = int(np.argmax(times["overlapped"])), {f"{phase}_bytes": counts.tolist() for phase, counts in sent.items()}
    return Schedule(
        explanation=explanation(plan, rows).split("\n"),
        branches=branch_facts(plan, rows),
        sent_bytes={phase: Spread.of(counts) for phase, counts in sent.items()},
        flops=Spread.of(work),
        memory_bytes={name: Spread.of(counts) for name, counts in memory.items()},
        seconds={name: float(found[slowest]) for name, found in times.items()},
        by_rank=by_rank | dict(flops=work.tolist(), exchange_bytes=memory["exchange buffers"].tolist()),
    )


@dataclass(frozen=True)
class Rank:
    """One rank: its positions, bytes by phase and by what is sent, FLOPs by when they are done, memory and seconds."""

    rank: int
    positions: tuple[int, int]
    sent_bytes: dict[str, dict[str, int]]
    received_bytes: dict[str, dict[str, int]]
    flops: dict[str, int]
    memory_bytes: dict[str, int]
    seconds: dict[str, float]


def one_rank(plan: ExchangePlan, rows: Rows, rank: int, speed: Speed) -> Rank:
    """The facts of one rank."""
    where, work, unit = plan.positions(rank), plan.all_work, _flops_of_a_pair(rows)
    traffic = {phase: plan.traffic(phase, rows) for phase in PHASES}
    return Rank(
        rank=rank,
        positions=(where.start, where.stop),
        sent_bytes={phase: _by_leg(traffic[phase], "sent", rank) for phase in PHASES},
        received_bytes={phase: _by_leg(traffic[phase], "received", rank) for phase in PHASES},
        flops={name: int(getattr(work, name)[rank]) * unit for name in ("local", "moved", "ring", "total")},
        memory_bytes={name: int(counts[rank]) for name, counts in memory_of(plan, rows).items()},
        seconds={name: float(found[rank]) for name, found in times_of(plan, rows, speed).items()},
    )


def _by_leg(traffic: PhaseTraffic, way: str, rank: int) -> dict[str, int]:
    found = {name: int(getattr(getattr(traffic, name), way)[rank]) for name in LEGS[:-1]}
    return {**found, "total": sum(found.values())}


def _flops_of_a_pair(rows: Rows) -> int:
    """Nominal forward FLOPs of a query-key pair, as `Pattern.flops` counts them."""
    return 4 * rows.head_dim * rows.batch


def memory_of(plan: ExchangePlan, rows: Rows) -> dict[str, Numbers]:
    """Bytes on each rank, `(world_size,)`, by kind; weights and what a backend needs beside its results are not among them.

    Inputs are query, key, value (and mask); results out and lse; gradients those of the results and of the inputs.
    """
    tokens = np.diff(np.array(plan.cuts, np.int64)) * rows.batch
    queries, keys = plan.heads * rows.row_bytes, 2 * plan.kv_heads * rows.row_bytes
    found: dict[str, Numbers] = {
        "inputs": tokens * (queries + keys + rows.key_padding_mask),
        "results": tokens * (queries + plan.heads * rows.lse_bytes),
        "gradients": tokens * (2 * queries + keys),
        "exchange buffers": exchange_buffer_bytes(plan, rows),
        "ring buffers": ring_buffer_bytes(plan, rows),
    }
    return {**found, "total": np.sum(list(found.values()), axis=0)}


def times_of(plan: ExchangePlan, rows: Rows, speed: Speed) -> dict[str, Numbers]:
    """Seconds of each rank, `(world_size,)`, for forward and backward together; no rank is thought to wait for another's work.

    overlapped = max(local work, rows there) + work on rows moved + max(work round rings, ring + results back)
    """
    work, unit = plan.all_work, _flops_of_a_pair(rows) / speed.flops
    local, moved, ring = (np.array(part, float) * unit for part in (work.local, work.moved, work.ring))
    compute, sending, overlapped = (np.zeros(plan.world_size) for _ in range(3))
    for phase, factor in zip(PHASES, (1.0, BACKWARD), strict=True):
        traffic = plan.traffic(phase, rows)
        there, back, around = (leg.busier / speed.bandwidth for leg in (traffic.there, traffic.back, traffic.ring))
        compute += factor * (local + moved + ring)
        sending += there + back + around
        overlapped += np.maximum(factor * local, there) + factor * moved + np.maximum(factor * ring, back + around)
    return dict(compute=compute, communication=sending, overlapped=overlapped, sequential=compute + sending)


@dataclass(frozen=True)
class Baseline:
    """What the rank that sends most would send in a forward pass, and how long that takes."""

    forward_bytes: int
    seconds: float


def baselines(plan: ExchangePlan, rows: Rows, speed: Speed) -> dict[str, Baseline]:
    """What others would send in a forward pass, from the rank that sends most, beside what they would keep."""
    shard = int(np.diff(np.array(plan.cuts, np.int64)).max()) * plan.kv_heads * rows.batch * rows.key_value_bytes
    pattern, shape = plan.pattern, (plan.cuts, plan.heads, plan.kv_heads)
    branches = [segment_shards(pattern, branch, *shape) for branch in range(len(pattern.branches))]
    counts = (RowCounts(shards, plan.world_size, 1, False) for shards in branches)
    sparse = rows.batch * rows.key_value_bytes * sum(c.keys_sent for c in counts)
    sent = {"full_ring": (plan.world_size - 1) * shard, "segment_all_gather": int(np.max(sparse))}
    return {name: Baseline(count, count / speed.bandwidth) for name, count in sent.items()}


def choice(plans: Mapping[str, ExchangePlan], rows: Rows) -> str:
    """What the automatic choice is, and why, in one line."""
    if "auto" not in plans:
        return ""
    kinds = [route.kind for route in plans["auto"].routes]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    if set(kinds) == {"local"}:
        return f"auto: {counts}: every segment is within one rank, and nothing is sent"
    most = {name: int(plan.traffic("forward", rows).sent.max()) for name, plan in plans.items()}
    others = ", ".join(f"{name} {in_bytes(most[name])}" for name in plans if name != "auto")
    beside = f" ({others})" if others else ""
    reason = "the fewest rows through the busiest rank, branch by branch"
    return f"auto: {counts}: {reason}; {in_bytes(most['auto'])} sent forward{beside}"
