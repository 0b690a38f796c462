"""What the figures of attention over hosts must be, and how they are read out of a result."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dilkit.tools.bench.hosts.record import AUTO, HostsResult, Links
from dilkit.tools.bench.ranks.record import Fault, good
from dilkit.tools.bench.ranks.targets import SLACK
from dilkit.tools.bench.target import Target, Values


def _slowest(result: HostsResult) -> Iterator[Links]:
    """Those of the slowest links."""
    links = good(result.links)
    slowest = min((one.gbit for one in links), default=0.0)
    return (one for one in links if one.gbit == slowest)


def _over_auto(peer: str) -> Callable[[HostsResult], Values]:
    def read(result: HostsResult) -> Values:
        return {one.title: one.ratio(peer, AUTO) for one in _slowest(result) if one.timed(peer, AUTO)}

    return read


def _hidden(result: HostsResult) -> Values:
    links = good(result.links)
    fastest = max((one.gbit for one in links), default=0.0)
    return {one.title: one.hidden[AUTO] for one in links if one.gbit == fastest and AUTO in one.hidden}


def _foretold(choose: Callable[[list[float]], float]) -> Callable[[HostsResult], Values]:
    def read(result: HostsResult) -> Values:
        links = [one for one in good(result.links) if one.predicted_s and one.timed(*one.predicted_s)]
        return {one.title: choose([one.foretold(name) for name in one.predicted_s]) for one in links}

    return read


def _faults(value: Callable[[Fault], float]) -> Callable[[HostsResult], Values]:
    def read(result: HostsResult) -> Values:
        return {f"{fault.kind}, {fault.transport}": value(fault) for fault in good(result.faults)}

    return read


def _on_the_wire(result: HostsResult) -> Values:
    return {f"{name}, {one.title}": one.bytes_ratio(name) for one in good(result.links) for name in one.wire_bytes}


RING = "slowest links: time of a ring of all keys and values over auto's"
GATHER = "slowest links: time of an all-gather of keys and values over auto's"
ULYSSES = "slowest links: time of Ulysses' all-to-all over auto's"
HIDDEN = "fastest links: share of auto's sends that no rank waits for"
WIRE = "bytes of the hosts' interfaces over planned bytes"
LATE = "faults: seconds to an error beyond the timeout"
UNNAMED = "faults whose error does not name the rank"
TARGETS: tuple[Target[HostsResult], ...] = (
    Target(RING, 5.0, 20.0, _over_auto("full ring")),
    Target(GATHER, 2.0, 4.0, _over_auto("all-gather")),
    Target(ULYSSES, 2.0, 4.0, _over_auto("ulysses")),
    Target(HIDDEN, 0.6, 0.9, _hidden, unit=""),
    Target(WIRE, 1.05, 1.02, _on_the_wire, lower=True),
    Target("schedules: predicted over measured time, the least", 0.75, None, _foretold(min), unit=""),
    Target("schedules: predicted over measured time, the most", 1.33, None, _foretold(max), unit="", lower=True),
    Target(LATE, SLACK, None, _faults(lambda fault: fault.seconds - fault.timeout), unit=" s", lower=True),
    Target(
        "faults whose error does not name the rank", 0, None, _faults(lambda fault: int(not fault.names_rank)), "", lower=True
    ),
    Target(
        "faults: processes that the launcher left behind, and the job then ended",
        0,
        None,
        _faults(lambda fault: fault.left_behind),
        unit="",
        lower=True,
    ),
)
