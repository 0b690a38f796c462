"""The suite `hosts`: the other schemes on threads, its figures, and, as root, hosts on one machine and what is left of them."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from dilkit.comm import Comm, run_threads
from dilkit.device import probe
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.testing.accuracy import Results, expected
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.hosts import network
from dilkit.tools.bench.hosts.cases import HostsSizes
from dilkit.tools.bench.hosts.peers import PEERS
from dilkit.tools.bench.hosts.record import HostsResult
from dilkit.tools.bench.hosts.suite import HostsSuite
from dilkit.tools.results.file import new_result

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


def test_where_no_hosts_can_be_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000, raising=False)
    monkeypatch.setattr(network.sys, "platform", "linux")
    with pytest.raises(ValueError, match=r"--suite hosts: .*run it as root"), HostsSuite().prepared():
        pass


def namespaces() -> set[str]:
    return {path.name for path in network.NAMESPACES.glob("dilkit-*")} if network.NAMESPACES.exists() else set()


@pytest.mark.slow
def test_the_suite_measures_every_way_on_a_link_and_leaves_nothing() -> None:
    """One job of ranks, and one with a fault: the others of the suite differ by speeds and launchers."""
    if why := network.why_not():
        pytest.skip(why)
    ended = subprocess.Popen(["true"])
    ended.wait()
    subprocess.run(["ip", "netns", "add", f"dilkit-{ended.pid}-1"], check=True)  # as a process that was killed leaves it
    problem = replace(SMALL, dtype="bfloat16")
    suite = HostsSuite(sizes=HostsSizes(problem=problem, checked=SMALL), repeats=1)
    with suite.prepared() as facts:
        assert f"dilkit-{ended.pid}-1" not in namespaces()
        measured, cut = (next(s.measure() for s in suite.steps() if s.goes_to == kind) for kind in ("links", "faults"))
    result = new_result(HostsResult, probe("cpu"), suite="hosts", repeats=1, links=(measured,), faults=(cut,), **facts)
    assert not namespaces()
    assert not suite.wrong(result)
    assert cut.seconds
    assert {*measured.entries} == {"auto", "scatter", "gather", "ring", *PEERS}
    assert all(count > 0 for of_hosts in measured.wire_bytes.values() for count in of_hosts)
