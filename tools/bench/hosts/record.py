"""The result of `dilkit bench --suite hosts`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from dilkit.comm.plan.forecast import Speed
from dilkit.tools.bench.ranks.record import Fault, Step, good
from dilkit.tools.results.record import Case, Measurement, SuiteResult, of_case

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Links(Step, Case):
    """Ways to compute one problem on `hosts` whose links carry `gbit` a second each way, timed in turns in one job.

    `wire_bytes`: those that each host's interface sent in a call, as its kernel counts. `predicted_s`: what the planner's model
    says, of `speeds` that were measured in the same job; `simulated_s`: what its simulation says. `hidden`: the share of the
    sends' time that no rank waits for, by `hidden.py`.
    """

    what: str = ""
    gbit: float = 0.0
    hosts: int = 0
    problem: str = ""
    wire_bytes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    predicted_s: dict[str, float] = field(default_factory=dict)
    simulated_s: dict[str, float] = field(default_factory=dict)
    hidden: dict[str, float] = field(default_factory=dict)
    speeds: tuple[Speed, ...] = ()

    @property
    def title(self) -> str:
        """The link, what starts the ranks, and the problem."""
        return f"{self.gbit:g} Gbit/s, {self.transport}{f', {self.what}' * bool(self.what)}"

    def bytes_ratio(self, name: str) -> float:
        """Bytes of the interfaces over planned bytes."""
        exchange = self.entries[name].ranks
        return sum(self.wire_bytes[name]) / sum(exchange.planned_bytes) if exchange else 0.0

    def foretold(self, name: str) -> float:
        """The predicted time over the measured one."""
        return self.predicted_s[name] / self.seconds(name)

    def as_simulated(self, name: str) -> float:
        """The simulated time over the measured one."""
        return self.simulated_s[name] / self.seconds(name)


@dataclass(frozen=True, kw_only=True)
class HostsResult(SuiteResult):
    """Attention over hosts: time beside other schemes, and bytes on the wire."""

    KIND: ClassVar[str] = "suite-hosts"

    mpi: str = ""
    links: tuple[Links, ...] = ()
    faults: tuple[Fault, ...] = ()

    def failures(self) -> Iterator[tuple[str, str]]:
        """(what, why) of each measurement that failed."""
        named = (*((one.title, one) for one in self.links), *((one.kind, one) for one in self.faults))
        return ((title, step.failed) for title, step in named if step.failed is not None)

    def measurements(self) -> Iterator[Measurement]:
        for links in good(self.links):
            yield from of_case(links.title, links)
