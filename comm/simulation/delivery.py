"""`delivered`: when what ranks send each other has arrived, on links that they share.

a link works whenever something waits for it, and shares itself out evenly: what it carries last has passed at

    max over its messages k of   start[k] + bytes of those that start no earlier than k / bandwidth

rank i's port ---> uplink of its pod ---> uplink of j's pod ---> rank j's port       j goes on when all of them have passed
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dilkit.comm.plan.messages import IntArray
from dilkit.comm.simulation.topology import Topology

Times = NDArray[np.float64]
"""`(world_size,)`: seconds, those of each rank."""
Table = NDArray[np.float64]
"""`(world_size, world_size)`, from a rank (line) to a rank (column)."""


class Delivery(NamedTuple):
    """When each rank has received all that is for it, and sent all that it sends; and the seconds that links work, by kind.

    `busy`: of the link of each kind that works longest.
    """

    received: Times
    sent: Times
    busy: dict[str, float]


def delivered(start: Times, volume: Table, topology: Topology) -> Delivery:
    """Deliver `volume` bytes from rank to rank, sent at `start` by each rank."""
    world_size = len(start)
    hosts, pods = topology.hosts(world_size), topology.pods(world_size)
    near = volume * (hosts[:, None] == hosts)
    received, sent, busy = start.copy(), start.copy(), dict[str, float]()
    for kind, part, rate in (("within hosts", near, topology.within_host), ("ports", volume - near, topology.bandwidth)):
        if part.any():
            out, into = start + part.sum(1) / rate, _passed(start, part, rate)
            busy[kind] = float(max(part.sum(0).max(), part.sum(1).max())) / rate
            received, sent = np.maximum.reduce((received, into, _last_of(out, part))), np.maximum(sent, out)
    between = volume * (pods[:, None] != pods) if pods[-1] else near[:0]
    if between.any():
        up, busy["uplinks"] = _through_uplinks(start, between, pods, topology.uplink)
        received = np.maximum(received, up)
    return Delivery(received, sent, busy)


def handed_over(start: Times, source: IntArray, target: IntArray, volume: NDArray[Any], topology: Topology) -> Delivery:
    """Deliver few messages, as `delivered` does those of a table of all pairs of ranks."""
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
    order = np.lexsort((-start, link))
    link, after = link[order], np.cumsum(volume[order])
    first = np.flatnonzero(np.concatenate(([True], link[1:] != link[:-1])))
    messages = np.concatenate((first[1:], [len(link)])) - first
    before = np.repeat(after[first] - volume[order[first]], messages)
    passed = np.empty(len(link))
    passed[order] = np.repeat(np.maximum.reduceat(start[order] + (after - before) / rate, first), messages)
    return passed


def _through_uplinks(start: Times, volume: Table, pods: NDArray[np.int64], rate: float) -> tuple[Times, float]:
    """When all that comes to a rank from other pods has passed their uplinks and that of its own; and how long one works."""
    first = np.flatnonzero(np.diff(pods, prepend=-1))
    to_pod, from_pod = np.add.reduceat(volume, first, 1), np.add.reduceat(volume, first, 0)
    into, leaving = _passed(start, to_pod, rate), volume.sum(1)[:, None]
    out = np.array([_passed(start[pods == pod], leaving[pods == pod], rate)[0] for pod in range(len(first))])
    pod_arrival = np.where(volume.any(0), into[pods], -np.inf)
    return np.maximum(_last_of(out, from_pod), pod_arrival), float(max(to_pod.sum(0).max(), from_pod.sum(1).max())) / rate


def _last_of(out: Times, volume: Table) -> Times:
    """When the last of the links that bring each rank something is done; -inf where none does."""
    last: Times = np.where(volume > 0, out[:, None], -np.inf).max(0)
    return last


def _passed(start: Times, volume: Table, rate: float) -> Times:
    """When links `(links,)` have carried `volume` `(messages, links)` of messages that start at `start` `(messages,)`."""
    order = np.argsort(-start)
    start, volume = start[order], volume[order]
    passed: Times = np.where(volume > 0, start[:, None] + np.cumsum(volume, 0) / rate, -np.inf).max(0)
    return passed
