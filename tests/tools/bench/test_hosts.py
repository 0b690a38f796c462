"""The suite `hosts`: the other schemes on threads, what is read out of a result, and, as root, hosts and what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from operator import attrgetter
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
from dilkit.tools.bench.hosts.document import document
from dilkit.tools.bench.hosts.peers import PEERS
from dilkit.tools.bench.hosts.record import HostsResult, Links
from dilkit.tools.bench.hosts.suite import HostsSuite
from dilkit.tools.results.file import new_result
from dilkit.tools.results.record import Entry, Exchange, Samples

SMALL = Problem(pattern=Pattern([8, 32, 64], [1, 2, 4]), seq=64, heads=4, head_dim=8, requires_grad=True)


class TestOtherSchemes:
    @pytest.mark.parametrize("name", PEERS)
    def test_is_right_and_sends_as_many_bytes_as_its_table_says(self, name: str) -> None:
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
    def test_a_problem_that_does_not_fit_whole_shards_is_refused(self, problem: Problem) -> None:
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
    assert judged[targets.GATHER].verdict == "short"
    assert judged[targets.ULYSSES].verdict == "not measured"
    assert judged[targets.WIRE].worst == 1.02
    failed = replace(result, links=(*both, Links(failed="late", entries={}, transport="torch", gbit=1.0)))
    assert "FAILED, 1 Gbit/s, torch: late" in document(failed).notes
    assert HostsSuite().wrong(failed)
    assert not HostsSuite().wrong(result)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="there is no root here")
def test_why_there_are_no_hosts_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(network.sys, "platform", "linux")
    assert "run it as root" in network.why_not()
    with pytest.raises(ValueError, match="--suite hosts: network namespaces are made by root"), HostsSuite().prepared():
        pass


def namespaces() -> set[str]:
    return {path.name for path in network.NAMESPACES.glob("dilkit-*")} if network.NAMESPACES.exists() else set()


@pytest.mark.slow
@pytest.mark.usefixtures("where_hosts_can_be")
class TestHosts:
    @pytest.fixture(scope="class")
    def where_hosts_can_be(self) -> None:
        if why := network.why_not():
            pytest.skip(why)

    @pytest.mark.parametrize("launcher", ["mpi", "torch"])
    def test_ranks_run_on_hosts_and_send_over_their_links(self, launcher: str) -> None:
        if launcher not in network.launchers():
            pytest.skip("mpirun is not here, or not Open MPI's")
        with network.hosts(2) as net:
            net.shape(1.0)
            assert task.run(launcher, 2, attrgetter("size"), start=net.start) == 2
            assert task.run(launcher, 2, on_wire, start=net.start) >= 2**20
        assert not namespaces()

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_nothing_is_left_of_hosts_whose_process_is_ended(self, number: signal.Signals, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "dilkit", "bench", "--suite", "hosts", "--quick", "--out", str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while len(namespaces()) < 5 and process.poll() is None:  # four hosts and a bridge
            time.sleep(0.05)
        time.sleep(1.0)
        process.send_signal(number)
        process.wait(timeout=60)
        assert not namespaces()

    def test_what_a_killed_process_left_is_removed_by_the_next(self) -> None:
        ended = subprocess.Popen(["true"])
        ended.wait()
        subprocess.run(["ip", "netns", "add", f"dilkit-{ended.pid}-1"], check=True)
        with network.hosts(1):
            assert f"dilkit-{ended.pid}-1" not in namespaces()

    def test_the_suite_measures_every_way_on_every_link(self) -> None:
        problem = replace(SMALL, dtype="bfloat16")
        suite = HostsSuite(sizes=HostsSizes(problem=problem, checked=SMALL), repeats=1)
        with suite.prepared() as facts:
            measured = tuple(step.measure() for step in suite.steps())
        result = new_result(HostsResult, probe("cpu"), suite="hosts", repeats=1, links=measured, **facts)
        assert not suite.wrong(result)
        assert {*measured[0].entries} == {"auto", "scatter", "gather", "ring", *PEERS}
        assert all(count > 0 for of_hosts in measured[0].wire_bytes.values() for count in of_hosts)


def on_wire(comm: Comm) -> int:
    """Bytes of this host's interface while it sends a MiB to the other."""
    import torch

    before, counts = network.sent_bytes(), [0, 0]
    counts[1 - comm.rank] = 1024
    comm.exchange(torch.ones(1024, 1024, dtype=torch.uint8), counts, counts).wait()
    comm.share(b"", "sent")
    return network.sent_bytes() - before
