"""`delivered`: when what ranks send each other has arrived, on links that they share.

a link works whenever something waits for it, and shares itself out evenly: what it carries last has passed at

    max over its messages k of   start[k] + bytes of those that start no earlier than k / bandwidth

rank i's port ---> uplink of its pod ---> uplink of j's pod ---> rank j's port       j goes on when all of them have passed
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dilkit.checks import integer, real
from dilkit.comm.plan.messages import IntArray

Times = NDArray[np.float64]
"""`(world_size,)`: seconds, those of each rank."""
Table = NDArray[np.float64]
"""`(world_size, world_size)`, from a rank (line) to a rank (column)."""


@dataclass(frozen=True)
class Topology:
    """Ranks in hosts, hosts in pods; each link carries so many bytes a second each way.

        pod          |------------- uplink: bandwidth of all its ranks / oversubscription -------------|
        hosts        |   host 0    |   host 1    |  ...   a rank's port: `bandwidth`, to other hosts
        ranks        | 0  1  ..  7 | 8  9  ..    |  ...   `inside`: to ranks of the same host

    `ranks_per_host` ranks are a host, `hosts_per_pod` hosts a pod, numbered one after the other; None: one pod of all, a flat
    network. `inside` None: as fast as to other hosts. Switches within a pod are not limits: each rank may send and receive at
    `bandwidth` at the same time.

    Raises TypeError or ValueError for sizes below 1, rates that are not above 0 and an oversubscription below 1.

        >>> fat_tree = Topology(50e9, ranks_per_host=8, hosts_per_pod=4, oversubscription=2.0, inside=450e9)
        >>> fat_tree.uplink, fat_tree.hosts(64).tolist()[:9], fat_tree.pods(64).tolist()[-1]
        (800000000000.0, [0, 0, 0, 0, 0, 0, 0, 0, 1], 1)
    """

    bandwidth: float
    ranks_per_host: int = 1
    hosts_per_pod: int | None = None
    oversubscription: float = 1.0
    inside: float | None = None

    def __post_init__(self) -> None:
        integer("ranks_per_host", self.ranks_per_host, at_least=1)
        if self.hosts_per_pod is not None:
            integer("hosts_per_pod", self.hosts_per_pod, at_least=1)
        for name, rate in (("bandwidth", self.bandwidth), ("inside", self.within_host)):
            if not real(name, rate) > 0:
                raise ValueError(f"{name}={rate} must be above 0: bytes a second")
        if not real("oversubscription", self.oversubscription) >= 1:
            raise ValueError(
                f"oversubscription={self.oversubscription} must be at least 1: what the ranks of a pod could send over what its "
                "uplink carries"
            )

    @property
    def within_host(self) -> float:
        """Bytes a second to ranks of the same host."""
        return self.bandwidth if self.inside is None else self.inside

    @property
    def ranks_per_pod(self) -> int | None:
        """None: all ranks are in one."""
        return None if self.hosts_per_pod is None else self.hosts_per_pod * self.ranks_per_host

    @cached_property
    def uplink(self) -> float:
        """Bytes a second from a pod to the others, and from them to it."""
        return (self.ranks_per_pod or 1) * self.bandwidth / self.oversubscription

    def hosts(self, world_size: int) -> IntArray:
        """Return the host of each rank, `(world_size,)`."""
        return np.arange(world_size) // self.ranks_per_host

    def pods(self, world_size: int) -> IntArray:
        """Return the pod of each rank, `(world_size,)`."""
        return np.arange(world_size) // (self.ranks_per_pod or world_size)


class Delivery(NamedTuple):
    """Times at which each rank has received and sent all; `busy`: seconds of the link of each kind that works longest."""

    received: Times
    sent: Times
    busy: dict[str, float]


def delivered(start: Times, volume: Table, topology: Topology) -> Delivery:
    """Deliver `volume` bytes from rank to rank, sent at `start` by each rank."""
    source, target = np.nonzero(volume)
    return handed_over(start, source, target, volume[source, target], topology)


def handed_over(start: Times, source: IntArray, target: IntArray, volume: NDArray[Any], topology: Topology) -> Delivery:
    """Deliver messages, each from a rank to a rank, sent at `start` by each rank."""
    source, target, volume = (x[volume > 0] for x in (source, target, volume.astype(float)))
    hosts, pods = topology.hosts(len(start)), topology.pods(len(start))
    near, far = hosts[source] == hosts[target], pods[source] != pods[target]
    received, sent, busy = start.copy(), start.copy(), dict[str, float]()
    for kind, chosen, ends, rate in (
        ("within hosts", near, (source, target), topology.within_host),
        ("ports", ~near, (source, target), topology.bandwidth),
        ("uplinks", far, (pods[source], pods[target]), topology.uplink),
    ):
        if not chosen.any():
            continue
        busy[kind] = max(float(np.bincount(link[chosen], volume[chosen]).max()) for link in ends) / rate
        out, into = (_passed_by_link(link[chosen], start[source[chosen]], volume[chosen], rate) for link in ends)
        np.maximum.at(received, target[chosen], np.maximum(out, into))
        np.maximum.at(sent, source[chosen], out)
    return Delivery(received, sent, busy)


def _passed_by_link(link: IntArray, start: Times, volume: Times, rate: float) -> Times:
    if (start == start[0]).all():  # as at the begin of a pass: many messages need no order
        return start + np.bincount(link, volume)[link] / rate
    order = np.lexsort((-start, link))
    link, after = link[order], np.cumsum(volume[order])
    first = np.flatnonzero(np.concatenate(([True], link[1:] != link[:-1])))
    messages = np.concatenate((first[1:], [len(link)])) - first
    before = np.repeat(after[first] - volume[order[first]], messages)
    passed = np.empty(len(link))
    passed[order] = np.repeat(np.maximum.reduceat(start[order] + (after - before) / rate, first), messages)
    return passed
