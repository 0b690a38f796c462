"""The suite `hosts`: what is read out of a result, and, as root, every way on every link."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dilkit.device import probe
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.tools.bench.hosts import network, targets
from dilkit.tools.bench.hosts.cases import HostsSizes
from dilkit.tools.bench.hosts.document import document
from dilkit.tools.bench.hosts.peers import PEERS
from dilkit.tools.bench.hosts.record import HostsResult, Links
from dilkit.tools.bench.hosts.suite import HostsSuite
from dilkit.tools.bench.ranks.record import Fault
from dilkit.tools.results.decode import decode, encode
from dilkit.tools.results.file import new_result
from dilkit.tools.results.record import Entry, Exchange, Samples

SMALL = Problem(pattern=Pattern([8, 32, 64], [1, 2, 4]), seq=64, heads=4, head_dim=8, requires_grad=True)


def links(gbit: float, **seconds: float) -> Links:
    sent = Exchange(planned_bytes=(100, 100), sent_bytes=(100, 100), work=())
    entries = {name: Entry(time=Samples.of([value]), ranks=sent) for name, value in seconds.items()}
    return Links(transport="mpi", gbit=gbit, hosts=2, entries=entries, wire_bytes=dict.fromkeys(entries, (103, 101)))


def test_figures_are_those_of_the_slowest_links() -> None:
    ways = dict(zip(("auto", "full ring", "all-gather"), (1.0, 6.0, 1.5), strict=True))
    both = links(10.0, **dict.fromkeys(ways, 1.0)), links(1.0, **ways)
    faults = (Fault(kind="frozen", transport="mpi", names_rank=True),)
    result = new_result(HostsResult, probe("cpu"), suite="hosts", repeats=1, links=both, faults=faults)
    judged = {target.name: target.judge(result) for target in targets.TARGETS}
    assert decode(HostsResult, encode(replace(result, figures=tuple(judged.values())))).faults == faults
    assert judged[targets.RING].values == {"1 Gbit/s, mpi": 6.0}
    assert (judged[targets.GATHER].verdict, judged[targets.ULYSSES].verdict) == ("short", "not measured")
    assert judged[targets.WIRE].worst == 1.02
    failed = replace(result, links=(*both, Links(failed="late", entries={}, transport="torch", gbit=1.0)))
    assert "FAILED, 1 Gbit/s, torch: late" in document(failed).notes
    assert [HostsSuite().wrong(one) for one in (failed, result)] == [True, False]


def test_where_no_hosts_can_be_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "why_not", lambda: "network namespaces are made by root")
    with pytest.raises(ValueError, match="--suite hosts: network namespaces are made by root"), HostsSuite().prepared():
        pass


@pytest.mark.slow
def test_the_suite_measures_every_way_on_every_link() -> None:
    if why := network.why_not():
        pytest.skip(why)
    problem = replace(SMALL, dtype="bfloat16")
    suite = HostsSuite(sizes=HostsSizes(problem=problem, checked=SMALL), repeats=1)
    with suite.prepared() as facts:
        measured = tuple(step.measure() for step in suite.steps() if step.goes_to == "links")
        cut = next(step for step in suite.steps() if step.goes_to == "faults").measure()
    result = new_result(HostsResult, probe("cpu"), suite="hosts", repeats=1, links=measured, faults=(cut,), **facts)
    assert not suite.wrong(result)
    assert cut.seconds
    assert {*measured[0].entries} == {"auto", "scatter", "gather", "ring", *PEERS}
    assert all(count > 0 for of_hosts in measured[0].wire_bytes.values() for count in of_hosts)
