"""`simulate`: a forward and a backward pass by an exchange plan in time, rank by rank, event by event.

    rank i   | agree | send rows there ............| compute with rows that came | ring: send a block on, compute  ... | add
             |       | compute what is local ......|                             | results go back ....................|
                                                   ^ waits for the slowest of those that send to it

Backward the same with the bytes and the work of a backward pass; round a ring, gradients return at each hop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dilkit.checks import real
from dilkit.comm.plan.exchange import Sent
from dilkit.comm.plan.exchange_plan import PHASES, ExchangePlan
from dilkit.comm.plan.forecast import Forecast
from dilkit.comm.plan.traffic import leg_bytes
from dilkit.comm.simulation.delivery import Delivery, Table, Times, Topology, delivered, handed_over


@dataclass(frozen=True)
class Stragglers:
    """`count` ranks, evenly spread, whose computation takes `slowdown` times as long as that of the others."""

    count: int = 0
    slowdown: float = 1.5

    def slower(self, world_size: int) -> Times:
        """Return how many times as long each rank computes, `(world_size,)`."""
        if not 0 <= self.count <= world_size:
            raise ValueError(f"stragglers: {self.count:,} of {world_size:,} ranks cannot be slower; give 0 to {world_size:,}")
        if not real("slowdown", self.slowdown) >= 1:
            raise ValueError(f"slowdown={self.slowdown} must be at least 1: how many times as long they compute")
        times = np.ones(world_size)
        times[np.arange(self.count) * world_size // max(self.count, 1)] = self.slowdown
        return times


@dataclass(frozen=True)
class Simulated:
    """Simulated times, in seconds.

    `finish`, `compute` `(world_size,)`: when each rank is done, and what of it it computed. `busy`: by kind of resource, how long
    the one works that works longest: no schedule with these bytes takes less.
    """

    finish: Times
    compute: Times
    busy: dict[str, float]

    @property
    def seconds(self) -> float:
        return float(self.finish.max())

    @property
    def waiting(self) -> float:
        """The share of all ranks' time that they do not compute."""
        return 1.0 - float(self.compute.sum()) / (len(self.compute) * self.seconds) if self.seconds else 0.0

    @property
    def bottleneck(self) -> str:
        return max(self.busy, key=lambda kind: self.busy[kind])


def simulate(forecast: Forecast, topology: Topology | None = None, stragglers: Stragglers = Stragglers()) -> Simulated:
    """Simulate a forward and a backward pass of `forecast.plan`, at the speed of `forecast.speed`, on the links of `topology`.

    None: a flat network of the bandwidth of the speed, and no rank slower. Bytes are those that the plan counts, work is in
    proportion to its pairs.

    >>> from dilkit import Pattern
    >>> from dilkit.comm import Rows, exchange_plan
    >>> from dilkit.comm.plan.forecast import Speed
    >>> plan = exchange_plan(Pattern([64, 256], [1, 1]), cuts=(0, 128, 256), heads=2)
    >>> forecast = Forecast(plan, Rows(head_dim=64, dtype="float32"), Speed(bandwidth=1e9, flops=1e9))
    >>> simulated = simulate(forecast)
    >>> round(simulated.seconds, 4), simulated.bottleneck
    (0.0735, 'compute')
    """
    topology, stragglers = topology or Topology(forecast.speed.bandwidth), stragglers or Stragglers()
    run = _Run(forecast, topology, stragglers.slower(forecast.plan.world_size))
    for phase in PHASES:
        run.phase(phase)
    run.busy["compute"] = float(run.compute.max())
    return Simulated(run.now, run.compute, run.busy)


def rows_by_pair(plan: ExchangePlan) -> tuple[Table, Table]:
    """Count the query rows and key rows that each rank sends each other one, for a batch of 1; ring traffic is left out."""
    tables = np.zeros((2, plan.world_size, plan.world_size))
    for exchange in plan.exchanges:
        if exchange.route.kind not in ("local", "ring"):
            for source, target, *by_role in exchange.messages():
                for table, rows in zip(tables, by_role, strict=True):
                    np.add.at(table, (source, target), rows * (source != target))
    return tables[0], tables[1]


@dataclass
class _Run:
    forecast: Forecast
    topology: Topology
    slower: Times
    busy: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now, self.compute = np.zeros((2, self.forecast.plan.world_size))
        self.rows_by_pair = rows_by_pair(self.forecast.plan)

    def phase(self, phase: str) -> None:
        """One of the passes; with `keep="nothing"` the rows are sent again in a backward pass, before what is local."""
        plan, speed, rows = self.forecast.plan, self.forecast.speed, self.forecast.rows
        backward, latency = phase == "backward", len(plan.rounds) * speed.latency
        again = backward and plan.keep == "nothing"
        there, back = leg_bytes(*self.rows_by_pair, "again" if again else phase, rows)
        latency *= 1 + again
        if plan.world_size > 1:  # arguments are compared, or backward which call it is: all wait for all
            self.now[:] = self.now.max() + speed.latency
        sent = self._count(delivered(self.now, there, self.topology))
        arrived = sent.received + latency
        if not again:
            self._work("local", phase)
        self.now = np.maximum(self.now, arrived)
        self._work("moved", phase)
        sent = self._count(delivered(self.now, back.T, self.topology))
        returned = np.maximum(sent.received, sent.sent) + len(plan.rounds) * speed.latency
        if again:
            self.now = np.maximum(self.now, returned)
            self._work("local", phase)
        self._rings(phase)
        self.now = np.maximum(self.now, returned)

    def _rings(self, phase: str) -> None:
        """Hop by hop: a block is sent on while the one before is computed with; backward, its gradients return to its rank."""
        plan, rows, backward = self.forecast.plan, self.forecast.rows, phase == "backward"
        for ring in plan.rings:
            work = self._seconds("ring", phase) / len(plan.rings) / (ring.hops + 1)
            for hop in range(ring.hops + 1):
                last = hop == ring.hops
                if last:
                    self._compute(work)
                blocks, gradients = ring.ring_messages(hop)
                legs = [] if last else [(blocks, rows.key_value_bytes)]
                legs += [(gradients, rows.dkey_value_bytes)] if backward and hop else []
                if legs:
                    self._send(legs, 0 * work if last else work)

    def _send(self, legs: list[tuple[Sent, int]], work: Times) -> None:
        batch, latency = self.forecast.rows.batch, self.forecast.speed.latency
        volumes = [(source, target, keys * size * batch) for (source, target, _, keys), size in legs]
        source, target, volume = map(np.concatenate, zip(*volumes, strict=True))
        sent = self._count(handed_over(self.now, source, target, volume, self.topology))
        self._compute(work)
        self.now = np.maximum.reduce((self.now, sent.received, sent.sent)) + len(legs) * latency

    def _work(self, name: str, phase: str) -> None:
        self._compute(self._seconds(name, phase))

    def _seconds(self, name: str, phase: str) -> Times:
        factor = self.forecast.speed.backward if phase == "backward" else 1.0
        return np.array(self.forecast.flops[name], float) / self.forecast.speed.flops * factor

    def _compute(self, seconds: Times) -> None:
        self.now = self.now + seconds * self.slower
        self.compute = self.compute + seconds * self.slower

    def _count(self, sent: Delivery) -> Delivery:
        for kind, seconds in sent.busy.items():
            self.busy[kind] = self.busy.get(kind, 0.0) + seconds
        return sent


class Peer(NamedTuple):
    """An estimate of another scheme, forward and backward: seconds, bytes a rank sends, most bytes of others' rows it holds."""

    seconds: float
    sent: int
    held: int


def peers(forecast: Forecast, topology: Topology) -> dict[str, Peer]:
    """Estimate other schemes by name. Ulysses is left out if there are more ranks than query heads."""
    plan, rows, speed = forecast.plan, forecast.rows, forecast.speed
    others, shard = plan.world_size - 1, -(-plan.seq // plan.world_size) * rows.batch
    block, gradients = shard * plan.kv_heads * rows.key_value_bytes, shard * plan.kv_heads * 2 * rows.row_bytes
    queries = 2 * shard * plan.heads * rows.row_bytes  # and results
    work = float(forecast.flops["total"].sum()) / plan.world_size / speed.flops
    computed, everyone = (1 + speed.backward) * work, np.ones((plan.world_size,) * 2) - np.eye(plan.world_size)
    byte_to_all = float(delivered(np.zeros(plan.world_size), everyone, topology).received.max())
    ranks, each = np.arange(plan.world_size), np.ones(plan.world_size)
    hops = [
        others * float(handed_over(0 * each, ranks, np.roll(ranks, -1), size * each, topology).received.max())
        for size in (block, block + gradients)
    ]
    around = max(work, hops[0]) + max(speed.backward * work, hops[1]) + 2 * others * speed.latency
    gathered = computed + (block + gradients) * byte_to_all + 2 * speed.latency
    by_scheme = {
        "full ring": Peer(around, others * (2 * block + gradients), 2 * (block + gradients)),
        "all-gather": Peer(gathered, others * (block + gradients), others * block),
    }
    if plan.world_size <= plan.heads:
        passes = [(one + queries) * others // plan.world_size for one in (block, gradients)]
        seconds = computed + sum(passes) / max(others, 1) * byte_to_all + 4 * speed.latency
        by_scheme["Ulysses"] = Peer(seconds, sum(passes), max(passes))
    return by_scheme
