"""Hosts on one machine: network namespaces on a bridge, whose links are shaped at both ends; those of killed runs are removed."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dilkit.comm.launch.processes import Job, is_open_mpi, mpi_launchers, start_processes

NEEDED = "network namespaces need root on Linux, with iproute2 and util-linux"
SUBNET, PORT, MTU = "10.83.0", 29_400, 9000
BURST_SECONDS, QUEUE_BYTES, WINDOW_BYTES = 0.001, 1 << 23, 1 << 20
"""Seconds that a link lets through at once, and bytes that wait for it at most: the windows of several senders, so that none of
it is dropped and sent again."""
SETTINGS = {"tcp_rmem": f"4096 131072 {WINDOW_BYTES}", "tcp_early_retrans": "0"}
"""Per host. One that waits for a core acknowledges late, which would be taken for a loss: nothing is sent again so early."""
NAMESPACES = Path("/run/netns")
_AGENT = """\
#!/bin/sh
# What mpirun calls in place of ssh: ADDRESS COMMAND...
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
        limits = f"root tbf rate {round(gbit * 1e6)}kbit burst {burst} limit {QUEUE_BYTES}"
        for host in range(1, self.size + 1):
            for end, device in ((host, "eth0"), (0, f"port{host}")):
                _call(f"tc -n {self.tag}-{end} qdisc replace dev {device} {limits}")

    def connect(self) -> None:
        """Put in the cables that were pulled."""
        for host in range(1, self.size + 1):
            _call(f"ip -n {self.tag}-{host} link set eth0 up")

    def on(self, host: int, command: Sequence[str]) -> list[str]:
        """Return `command` as it runs on a host, in place of the process that is started: signals reach it."""
        name = f"{self.tag}-{host}"
        script = 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"'
        return ["nsenter", f"--net={NAMESPACES / name}", "unshare", "--uts", "sh", "-c", script, name, *command]

    def start(self, kind: str, size: int, arguments: Sequence[str], *, threads: int = 1) -> Job:
        """Start `python arguments...` as a rank on each of the first `size` hosts, as `processes.start` does on one machine."""
        addresses, environment = [f"{SUBNET}.{host}" for host in range(1, size + 1)], dict(GLOO_SOCKET_IFNAME="eth0")
        if kind == "mpi":
            options = f"--mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include {SUBNET}.0/24"
            options += f" --prtemca prte_if_include {SUBNET}.0/24 --bind-to none --host {':1,'.join(addresses)}:1 -n {size}"
            agent = ["--prtemca", "plm_ssh_agent", str(self.agent)]
            mpirun = [str(mpi_launchers()[0]), *agent, *options.split(), sys.executable, *arguments]
            return start_processes([self.on(1, mpirun)], [environment], threads)
        options = f"-m torch.distributed.run --nnodes {size} --nproc-per-node 1 --rdzv-backend c10d"
        options += f" --rdzv-endpoint {addresses[0]}:{PORT} --rdzv-id {self.tag}"
        commands = []
        for host, address in enumerate(addresses, 1):
            host_options = f"{options} --local-addr {address} --rdzv-conf is_host={int(host == 1)}"
            commands.append(self.on(host, [sys.executable, *host_options.split(), *arguments]))
        return start_processes(commands, [environment] * size, threads)


@contextlib.contextmanager
def hosts(size: int) -> Iterator[Hosts]:
    """Make hosts that are there within the block, their links not shaped yet. Raises OSError where they cannot be."""
    for name in NAMESPACES.glob("dilkit-*-*"):
        made_by = re.fullmatch(r"dilkit-(\d+)-\d+", name.name)
        if made_by and not Path("/proc", made_by[1]).exists():
            _call(f"ip netns del {name.name}")
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
                _call(f"ip netns del {name.name}")


def launchers() -> tuple[str, ...]:
    """Return the launchers of ranks on hosts here: torchrun and, where it is Open MPI's, mpirun."""
    programs = mpi_launchers()
    return ("mpi", "torch") if programs and is_open_mpi(str(programs[0])) else ("torch",)


def sent_bytes() -> int:
    """Return the bytes that this host has sent so far, as the kernel counts them: headers too, and what is sent once more."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


def _make(tag: str, size: int) -> None:
    bridge = f"{tag}-0"
    _call(f"ip netns add {bridge}")
    _call(f"ip -n {bridge} link add bridge type bridge")
    _call(f"ip -n {bridge} link set bridge up mtu {MTU}")
    for host in range(1, size + 1):
        name = f"{tag}-{host}"
        _call(f"ip netns add {name}")
        _call(f"ip -n {bridge} link add port{host} mtu {MTU} type veth peer eth0 netns {name}")
        _call(f"ip -n {bridge} link set port{host} master bridge up")
        _call(f"ip -n {name} addr add {SUBNET}.{host}/24 dev eth0")
        _call(f"ip -n {name} link set eth0 up mtu {MTU}")
        _call(f"ip -n {name} link set lo up")
        for setting, value in SETTINGS.items():
            _call(f"nsenter --net={NAMESPACES / name} sh -c", f"echo {value} > /proc/sys/net/ipv4/{setting}")


def _call(command: str, *script: str) -> None:
    ended = subprocess.run([*command.split(), *script], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise OSError(f"{command}: {ended.stderr.strip() or ended.returncode}")
