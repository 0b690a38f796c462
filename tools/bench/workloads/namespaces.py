"""Hosts on one machine: network namespaces with an address each, whose links are shaped.

    host 1 (namespace)      host 2 (namespace)
    eth0, shaped            eth0, shaped           what a host sends is shaped at its own end of the link,
      |                       |
    port1, shaped  -------  port2, shaped          what it is sent at the other
             bridge (namespace)

Nothing of it is seen outside the namespaces, and nothing gets out. They bear the number of the process that made them; what a
process that was killed left behind is removed by the next.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dilkit.comm.launch.processes import Job, is_open_mpi, mpi_launchers, start_processes

SUBNET, PORT, MTU = "10.83.0", 29_400, 9000
BURST_SECONDS, QUEUE_BYTES, WINDOW_BYTES = 0.001, 1 << 23, 1 << 20
"""What a shaped link lets through at once, and what waits in front of it at most: the windows of several senders, so that none of
it is dropped and sent again."""
SETTINGS = {"tcp_rmem": f"4096 131072 {WINDOW_BYTES}", "tcp_early_retrans": "0"}
"""Of each host. One that waits for a core acknowledges late, which would be taken for a loss: nothing is sent again so early."""
TOOLS = ("ip", "tc", "nsenter", "unshare")
NAMESPACES = Path("/run/netns")
_AGENT = """\
#!/bin/sh
# What mpirun calls in the place of ssh: ADDRESS COMMAND...
host="{tag}-${{1##*.}}"; shift
exec nsenter --net="{folder}/$host" unshare --uts sh -c 'echo "$0" > /proc/sys/kernel/hostname; eval "$*"' "$host" "$@"
"""


@dataclass(frozen=True)
class Hosts:
    """`size` hosts that are up, numbered from 1. `agent`: the program that starts a command on one of them, as ssh does."""

    tag: str
    size: int
    agent: Path

    def shape(self, gbit: float) -> None:
        """Limit every link to so many Gbit/s, each way."""
        burst = max(int(gbit * 1e9 / 8 * BURST_SECONDS), 1 << 17)
        limits = ("root", "tbf", "rate", f"{round(gbit * 1e6)}kbit", "burst", str(burst), "limit", str(QUEUE_BYTES))
        for host in range(1, self.size + 1):
            for end, device in ((host, "eth0"), (0, f"port{host}")):
                _call("tc", "-n", f"{self.tag}-{end}", "qdisc", "replace", "dev", device, *limits)

    def connect(self) -> None:
        """Put in the cables that were pulled."""
        for host in range(1, self.size + 1):
            _call("ip", "-n", f"{self.tag}-{host}", "link", "set", "eth0", "up")

    def on(self, host: int, command: Sequence[str]) -> list[str]:
        """`command` as it runs on a host, in the place of the process that is started: signals reach it."""
        name = f"{self.tag}-{host}"
        script = 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"'
        return ["nsenter", f"--net={NAMESPACES / name}", "unshare", "--uts", "sh", "-c", script, name, *command]

    def start(self, kind: str, size: int, arguments: Sequence[str], *, threads: int = 1) -> Job:
        """Start `python arguments...` as a rank on each of the first `size` hosts, as `processes.start` does on one machine."""
        addresses, environment = [f"{SUBNET}.{host}" for host in range(1, size + 1)], dict(GLOO_SOCKET_IFNAME="eth0")
        if kind == "mpi":
            net = f"{SUBNET}.0/24"
            ways = {"pml": "ob1", "btl": "tcp,self", "btl_tcp_if_include": net}
            options = [x for name, value in ways.items() for x in ("--mca", name, value)]
            options += ["--prtemca", "plm_ssh_agent", str(self.agent), "--prtemca", "prte_if_include", net]
            options += ["--bind-to", "none", "--host", ",".join(f"{address}:1" for address in addresses)]
            mpirun = [str(mpi_launchers()[0]), *options, "-n", str(size), sys.executable, *arguments]
            return start_processes([self.on(1, mpirun)], [environment], threads)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(size), "--nproc-per-node", "1"]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{addresses[0]}:{PORT}", "--rdzv-id", self.tag]
        commands = [
            self.on(host, [*torchrun, "--local-addr", address, "--rdzv-conf", f"is_host={int(host == 1)}", *arguments])
            for host, address in enumerate(addresses, 1)
        ]
        return start_processes(commands, [environment] * size, threads)


@contextlib.contextmanager
def hosts(size: int) -> Iterator[Hosts]:
    """Hosts that are there within the block, their links not shaped yet. Raises OSError where they cannot be."""
    for name in NAMESPACES.glob("dilkit-*-*"):
        made_by = re.fullmatch(r"dilkit-(\d+)-\d+", name.name)
        if made_by and not Path("/proc", made_by[1]).exists():
            _call("ip", "netns", "del", name.name)
    tag = f"dilkit-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        agent = Path(folder, "agent")
        agent.write_text(_AGENT.format(tag=tag, folder=NAMESPACES))
        agent.chmod(0o755)
        try:
            _make(tag, size)
            yield Hosts(tag, size, agent)
        finally:
            for name in NAMESPACES.glob(f"{tag}-*"):
                _call("ip", "netns", "del", name.name)


def why_not() -> str:
    """Why there can be no hosts on this machine; empty where they can be."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's alone"
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        return f"not installed: {', '.join(missing)} (Debian: iproute2, util-linux)"
    if os.geteuid():
        return "network namespaces are made by root; run it as root"
    try:
        with hosts(1) as one:
            one.shape(1.0)
            subprocess.run(one.on(1, ["true"]), check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return f"no shaped network namespace can be made: {error}"
    return ""


def launchers() -> tuple[str, ...]:
    """Launchers of ranks on hosts here: torchrun and, where it is Open MPI's, mpirun."""
    programs = mpi_launchers()
    return ("mpi", "torch") if programs and is_open_mpi(str(programs[0])) else ("torch",)


def sent_bytes() -> int:
    """Bytes that this host has sent so far, as the kernel counts them: headers too, and what is sent once more."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


def _make(tag: str, size: int) -> None:
    bridge = f"{tag}-0"
    _call("ip", "netns", "add", bridge)
    _call("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
    _call("ip", "-n", bridge, "link", "set", "bridge", "up", "mtu", str(MTU))
    for host in range(1, size + 1):
        name, port = f"{tag}-{host}", f"port{host}"
        _call("ip", "netns", "add", name)
        _call("ip", "-n", bridge, "link", "add", port, "mtu", str(MTU), "type", "veth", "peer", "eth0", "netns", name)
        _call("ip", "-n", bridge, "link", "set", port, "master", "bridge", "up")
        _call("ip", "-n", name, "addr", "add", f"{SUBNET}.{host}/24", "dev", "eth0")
        _call("ip", "-n", name, "link", "set", "eth0", "up", "mtu", str(MTU))
        _call("ip", "-n", name, "link", "set", "lo", "up")
        for setting, value in SETTINGS.items():
            _call("nsenter", f"--net={NAMESPACES / name}", "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{setting}")


def _call(*command: str) -> None:
    """Run a command. Raises OSError with what it said."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise OSError(f"{' '.join(command)}: {ended.stderr.strip() or ended.returncode}")
