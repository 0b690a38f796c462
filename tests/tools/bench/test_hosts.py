"""The suite `hosts`."""

import subprocess
from functools import partial

import pytest

from dilkit.comm import run_threads
from dilkit.device import probe
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.testing.accuracy import expected
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.configuration import Configuration
from dilkit.tools.bench.suites import hosts
from dilkit.tools.bench.suites.hosts import REPORT, HostsSuite
from dilkit.tools.bench.workloads import namespaces
from dilkit.tools.bench.workloads.sequence_parallel import PEERS, FullRing
from dilkit.tools.results.file import new_result
from dilkit.tools.results.rows import RowsResult

SMALL = Problem(pattern=Pattern([8, 32, 64], [1, 2, 4]), seq=64, heads=4, head_dim=8, requires_grad=True)


@pytest.mark.parametrize("name", PEERS)
def test_a_scheme_is_right_and_sends_as_many_bytes_as_its_table_says(name):
    whole = Tensors.random(SMALL, seed=1)

    def on_rank(comm):
        call = PEERS[name](comm, SMALL)
        call.once(call.part(whole))
        sent = comm.sent_bytes
        assert call.planned_bytes() == (sent,) * comm.size
        return call.together(whole), sent

    found, sent = run_threads(4, on_rank)[0]
    assert {*found} == {"out", "dq", "dk", "dv"}
    assert [check.complaint for check in expected(SMALL, whole).checks(found, 64) if not check.passed] == []
    shard = 2 * 16 * 4 * 8 * 4
    assert sent == {"full ring": 10, "ulysses": 3}[name] * shard


def test_a_way_that_sends_other_bytes_than_planned_is_not_timed(monkeypatch):
    monkeypatch.setattr(namespaces, "sent_bytes", lambda: 0)
    monkeypatch.setattr(FullRing, "planned_bytes", lambda call: (1,) * call.comm.size)
    ways = dict(schedules=("auto",), peers=("full ring", "ulysses"))
    rows = run_threads(2, partial(hosts.compare, problem=SMALL, checked=SMALL, repeats=1, case={}, **ways))[0]
    assert [(row.who, row.verdict, len(row.samples)) for row in rows] == [
        ("auto", "measured", 1),
        ("full ring", "wrong", 0),
        ("ulysses", "measured", 1),
    ]


def test_where_no_hosts_can_be_the_reason_is_said(monkeypatch):
    def refuse(command):
        raise OSError(f"{command}: not permitted")

    monkeypatch.setattr(namespaces, "_call", refuse)
    with pytest.raises(ValueError, match=r"--suite hosts: ip netns .*: not permitted; .* need root"), HostsSuite().prepared():
        pass


def left():
    return {path.name for path in namespaces.NAMESPACES.glob("dilkit-*")}


@pytest.mark.slow
def test_the_suite_measures_every_way_on_a_link_and_leaves_nothing(monkeypatch):
    """One job of ranks on three hosts, and one with a host that is cut off; mpirun waits for that until it is killed."""
    try:
        with namespaces.hosts(1) as one:
            one.shape(1.0)
    except OSError as error:
        pytest.skip(str(error))
    launcher = namespaces.launchers()[0]
    monkeypatch.setattr(hosts, "TIMEOUT", 2.0)
    monkeypatch.setattr(hosts, "FAULT_LIMIT", 25.0 if launcher == "mpi" else 60.0)
    ended = subprocess.Popen(["true"])
    ended.wait()
    subprocess.run(["ip", "netns", "add", f"dilkit-{ended.pid}-1"], check=True)  # as a process that was killed leaves it
    tiny = Configuration(96, (8, 32, 96), (1, 2, 4), heads=6)
    for name, size in dict(HOSTS=3, FIVE=tiny, HEAD_DIM=8, CHECKED=tiny.problem(8, requires_grad=True)).items():
        monkeypatch.setattr(hosts, name, size)
    suite = HostsSuite(repeats=1)
    steps = list(suite.steps())
    with suite.prepared() as facts:
        assert f"dilkit-{ended.pid}-1" not in left()
        links = steps[0].measure()
        (cut,) = next(step for step in steps if step.what == f"faults: link down, {launcher}").measure()
    result = new_result(RowsResult, probe("cpu"), kind=suite.kind(), suite="hosts", repeats=1, facts=facts, rows=(*links, cut))
    assert not left()
    assert not suite.wrong(result)
    assert REPORT.document(result).tables
    assert cut.values["names_rank"]
    assert [row.who for row in links] == ["auto", "scatter", "gather", "ring", *PEERS]
    assert all(count > 0 for row in links for count in row.values["wire_bytes"])
