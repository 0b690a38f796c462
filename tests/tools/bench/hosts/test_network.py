"""Hosts, as root, and what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from operator import attrgetter
from pathlib import Path

import pytest

from dilkit.comm import Comm
from dilkit.comm.launch import task
from dilkit.tools.bench.hosts import network


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="there is no root here")
def test_why_there_are_no_hosts_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(network.sys, "platform", "linux")
    assert "run it as root" in network.why_not()


def namespaces() -> set[str]:
    return {path.name for path in network.NAMESPACES.glob("dilkit-*")} if network.NAMESPACES.exists() else set()


@pytest.fixture
def where_hosts_can_be() -> None:
    if why := network.why_not():
        pytest.skip(why)


@pytest.mark.slow
@pytest.mark.usefixtures("where_hosts_can_be")
class TestHosts:
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


def on_wire(comm: Comm) -> int:
    """Bytes of this host's interface while it sends a MiB to the other."""
    import torch

    before, counts = network.sent_bytes(), [0, 0]
    counts[1 - comm.rank] = 1024
    comm.exchange(torch.ones(1024, 1024, dtype=torch.uint8), counts, counts).wait()
    comm.share(b"", "sent")
    return network.sent_bytes() - before
