"""`dilkit bench --suite hosts`: attention over hosts on one machine, whose links are shaped, beside other schemes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from dilkit.comm.launch.processes import JobError, mpi_version
from dilkit.comm.launch.task import ended, run
from dilkit.tools.bench.hosts import network, targets, tasks
from dilkit.tools.bench.hosts.cases import HostsSizes
from dilkit.tools.bench.hosts.network import Hosts
from dilkit.tools.bench.hosts.peers import PEERS
from dilkit.tools.bench.hosts.record import HostsResult, Links
from dilkit.tools.bench.ranks import faults
from dilkit.tools.bench.ranks.record import Fault
from dilkit.tools.bench.suite import NO_OPTION, Step, Suite

SCHEDULES = ("auto", "scatter", "gather", "ring")
LIMIT, FAULT_LIMIT, TIMEOUT = 900.0, 60.0, 5.0
"""Seconds that a job may take, and one with a fault, and that ranks wait for one at fault."""


@dataclass(frozen=True)
class HostsSuite(Suite[HostsResult]):
    """The slowest link first, on which the figures are taken."""

    NAME = "hosts"
    SUMMARY = "attention over hosts with slow links, beside a ring of all keys, their all-gather and Ulysses"
    RECORD = HostsResult
    TARGETS = targets.TARGETS

    sizes: HostsSizes = field(default_factory=HostsSizes, metadata=NO_OPTION)
    net: list[Hosts] = field(default_factory=list, metadata=NO_OPTION)
    """The hosts, while they are there."""

    @contextlib.contextmanager
    def prepared(self) -> Iterator[dict[str, Any]]:
        if why := network.why_not():
            raise ValueError(f"--suite hosts: {why}")
        with network.hosts(self.sizes.hosts) as net:
            self.net.append(net)
            try:
                yield dict(mpi=mpi_version())
            finally:
                self.net.clear()

    def wrong(self, result: HostsResult) -> bool:
        """Whether a check failed, or a measurement."""
        verdicts = {entry.verdict for links in result.links for entry in links.entries.values()}
        return super().wrong(result) or any(result.failures()) or bool(verdicts - {"measured"})

    def steps(self) -> Iterator[Step]:
        first, *others = network.launchers()
        for gbit in self.sizes.gbits:
            yield self._step(gbit, first)
        slowest, few = min(self.sizes.gbits), self.sizes.few_heads
        yield self._step(slowest, first, f"{few} heads", SCHEDULES[:1], ("full ring", "all-gather"), few)
        for other in others:
            yield self._step(slowest, other, "", SCHEDULES[:1])
            yield self._step(max(self.sizes.gbits), other, "", ("auto", "ring"), ("full ring",))

        for kind, launcher in product((*faults.CUTS, "frozen"), network.launchers()):
            yield Step("faults", f"{kind}, {launcher}", partial(self.fault, kind, launcher))

    def fault(self, kind: str, launcher: str) -> Fault:
        """Seconds until the other hosts know of a host that is cut off, or of a rank that is frozen; and what they say."""
        (net,) = self.net
        net.shape(max(self.sizes.gbits))
        task = partial(faults.fail, kind=kind, seconds=TIMEOUT)
        ending = faults.read(kind, ended(launcher, faults.RANKS, task, limit=FAULT_LIMIT, start=net.start))
        for host in range(1, net.size + 1):
            net.set_link(host, up=True)
        return replace(ending, transport=launcher, kind=kind, timeout=TIMEOUT)

    def _step(
        self,
        gbit: float,
        launcher: str,
        what: str = "",
        schedules: tuple[str, ...] = SCHEDULES,
        peers: tuple[str, ...] = tuple(PEERS),
        heads: int | None = None,
    ) -> Step:
        problem = self.sizes.shortened(self.divisor)
        problem = replace(problem, heads=heads or problem.heads, kv_heads=heads or problem.kv_heads)
        task = partial(
            tasks.compare,
            problem=problem,
            checked=self.sizes.checked,
            schedules=schedules,
            peers=peers,
            repeats=1 if self.quick else self.repeats,
        )

        def measure() -> Links:
            (net,) = self.net
            net.shape(gbit)
            try:
                links: Links = run(launcher, net.size, task, limit=LIMIT, start=net.start)
            except JobError as error:
                links = Links(failed=str(error), entries={})
            return replace(links, transport=launcher, gbit=gbit, what=what, problem=str(problem))

        return Step("links", f"links of {gbit:g} Gbit/s, {launcher}{f', {what}' * bool(what)}", measure)
