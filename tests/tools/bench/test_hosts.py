"""The suite `hosts`: the other schemes on threads, its figures, and, as root, hosts on one machine and what is left of them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dilkit.comm import Comm, run_threads
from dilkit.comm.launch import task
from dilkit.device import probe
from dilkit.pattern import Pattern, SlidingWindow
from dilkit.problem import Problem
from dilkit.testing.accuracy import Results, expected
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.hosts import network, targets
from dilkit.tools.bench.hosts.cases import HostsSizes
from dilkit.tools.bench.hosts.peers import PEERS
from dilkit.tools.bench.hosts.record import HostsResult, Links
from dilkit.tools.bench.hosts.suite import HostsSuite
from dilkit.tools.results.file import new_result
from dilkit.tools.results.record import Entry, Exchange, Samples

SMALL = Problem(pattern=Pattern([8, 32, 64], [1, 2, 4]), seq=64, heads=4, head_dim=8, requires_grad=True)


@pytest.mark.parametrize("name", PEERS)
def test_a_scheme_is_right_and_sends_as_many_bytes_as_its_table_says(name: str) -> None:
    whole = Tensors.random(SMALL, seed=1)

    def on_rank(comm: Comm) -> tuple[Results, int]:
        call = PEERS[name](comm, SMALL)
        call.once(call.part(whole))
        sent = comm.sent_bytes
        assert call.planned_bytes() == (sent,) * comm.size
        return call.together(whole), sent

    found, sent = run_threads(4, on_rank)[0]
    assert {*found} == {"out", "dq", "dk", "dv"}
    assert [check.complaint for check in expected(SMALL, whole).checks(found, 64) if not check.passed] == []
    shard = 2 * 16 * 4 * 8 * 4
    assert sent == {"full ring": 10, "all-gather": 6, "ulysses": 3}[name] * shard


@pytest.mark.parametrize(
    "problem",
    [
        replace(SMALL, is_causal=True),
        replace(SMALL, pattern=Pattern([24, 64], [1, 4])),
        replace(SMALL, pattern=Pattern.of(SlidingWindow(4))),
        replace(SMALL, seq=66),
    ],
)
def test_a_problem_that_does_not_fit_whole_shards_is_refused(problem: Problem) -> None:
    with pytest.raises(ValueError, match="whole shards are sent"):
        run_threads(4, lambda comm: PEERS["all-gather"](comm, problem).once(Tensors.random(problem)))


def links(gbit: float, **seconds: float) -> Links:
    sent = Exchange(planned_bytes=(100, 100), sent_bytes=(100, 100), work=())
    entries = {name: Entry(time=Samples.of([value]), ranks=sent) for name, value in seconds.items()}
    return Links(transport="mpi", gbit=gbit, hosts=2, entries=entries, wire_bytes=dict.fromkeys(entries, (103, 101)))


def test_figures_are_those_of_the_slowest_links() -> None:
    ways = dict(zip(("auto", "full ring", "all-gather"), (1.0, 6.0, 1.5), strict=True))
    both = links(10.0, **dict.fromkeys(ways, 1.0)), links(1.0, **ways)
    result = new_result(HostsResult, probe("cpu"), suite="hosts", repeats=1, links=both)
    judged = {target.name: target.judge(result) for target in targets.TARGETS}
    assert judged[targets.RING].values == {"1 Gbit/s, mpi": 6.0}
    assert (judged[targets.GATHER].verdict, judged[targets.ULYSSES].verdict) == ("short", "not measured")
    assert judged[targets.WIRE].worst == 1.02
    failed = replace(result, links=(*both, Links(failed="late", entries={}, transport="torch", gbit=1.0)))
    assert [HostsSuite().wrong(one) for one in (failed, result)] == [True, False]


def test_where_no_hosts_can_be_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000, raising=False)
    monkeypatch.setattr(network.sys, "platform", "linux")
    with pytest.raises(ValueError, match=r"--suite hosts: .*run it as root"), HostsSuite().prepared():
        pass


def namespaces() -> set[str]:
    return {path.name for path in network.NAMESPACES.glob("dilkit-*")} if network.NAMESPACES.exists() else set()


@pytest.fixture
def where_hosts_can_be() -> None:
    if why := network.why_not():
        pytest.skip(why)


@pytest.mark.slow
@pytest.mark.usefixtures("where_hosts_can_be")
@pytest.mark.parametrize("launcher", ["mpi", "torch"])
def test_ranks_run_on_hosts_and_send_over_their_links(launcher: str) -> None:
    if launcher not in network.launchers():
        pytest.skip("mpirun is not here, or not Open MPI's")
    ended = subprocess.Popen(["true"])
    ended.wait()
    subprocess.run(["ip", "netns", "add", f"dilkit-{ended.pid}-1"], check=True)  # as a process that was killed leaves it
    with network.hosts(2) as net:
        assert f"dilkit-{ended.pid}-1" not in namespaces()
        net.shape(1.0)
        assert task.run(launcher, 2, on_wire, start=net.start) >= 2**20
    assert not namespaces()


@pytest.mark.slow
@pytest.mark.usefixtures("where_hosts_can_be")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_hosts_whose_process_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dilkit", "bench", "--suite", "hosts", "--quick", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(namespaces()) < 5 and process.poll() is None:  # four hosts and a bridge
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(number)
    process.wait(timeout=60)
    assert not namespaces()


def on_wire(comm: Comm) -> int:
    """Bytes of this host's interface while it sends a MiB to the other."""
    import torch

    before, counts = network.sent_bytes(), [0, 0]
    counts[1 - comm.rank] = 1024
    comm.exchange(torch.ones(1024, 1024, dtype=torch.uint8), counts, counts).wait()
    comm.share(b"", "sent")
    return network.sent_bytes() - before


@pytest.mark.slow
@pytest.mark.usefixtures("where_hosts_can_be")
def test_the_suite_measures_every_way_on_a_link() -> None:
    """One job of ranks, and one with a fault: the others of the suite differ by speeds and launchers."""
    problem = replace(SMALL, dtype="bfloat16")
    suite = HostsSuite(sizes=HostsSizes(problem=problem, checked=SMALL), repeats=1)
    with suite.prepared() as facts:
        measured, cut = (next(s.measure() for s in suite.steps() if s.goes_to == kind) for kind in ("links", "faults"))
    result = new_result(HostsResult, probe("cpu"), suite="hosts", repeats=1, links=(measured,), faults=(cut,), **facts)
    assert not suite.wrong(result)
    assert cut.seconds
    assert {*measured.entries} == {"auto", "scatter", "gather", "ring", *PEERS}
    assert all(count > 0 for of_hosts in measured.wire_bytes.values() for count in of_hosts)
