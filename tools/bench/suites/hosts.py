"""`dilkit bench --suite hosts`: attention over hosts on one machine, whose links are shaped, beside other schemes."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from dilkit.comm import Comm
from dilkit.comm.collectives import gather_values
from dilkit.comm.launch.processes import mpi_version
from dilkit.comm.launch.task import ended, run
from dilkit.comm.plan.forecast import Forecast
from dilkit.comm.plan.traffic import Rows
from dilkit.comm.simulation.simulation import simulate
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.configuration import Configuration
from dilkit.tools.bench.suite import NO_OPTION, Suite, SuiteStep
from dilkit.tools.bench.target import Target, Values, each, time_ratio
from dilkit.tools.bench.workloads import namespaces
from dilkit.tools.bench.workloads.rank_faults import CUTS, FAULT_RANKS, FAULT_TABLE, SLACK, fail, fault_row
from dilkit.tools.bench.workloads.rank_jobs import SCHEDULES, job_step
from dilkit.tools.bench.workloads.sequence_parallel import PEERS
from dilkit.tools.console.text import in_bytes
from dilkit.tools.measure.rank_times import rank_speed, time_in_turns
from dilkit.tools.measure.ranks_call import RanksCall, judged
from dilkit.tools.report.views import QUARTILES, TIME, WHO, Column, PlotView, Report, ResultTable, fact, over
from dilkit.tools.results.rows import CaseRows, ResultRow, RowsResult, row_of

LIMIT, FAULT_LIMIT, TIMEOUT = 900.0, 60.0, 5.0
"""Seconds that a job may take, and one with a fault, and that ranks wait for one at fault."""
SETTLED = 0.05
"""Seconds after a call in which the kernel sends what it still holds."""
SLOWEST = "slowest links"
HOSTS, GBITS, HEAD_DIM = 4, (1.0, 10.0), 64
"""Hosts, and Gbit/s of their links, each way."""
FIVE = Configuration(131_072, (128, 512, 2048, 8192, 131_072), (1, 4, 16, 64, 256), heads=4)
"""LongNet's series of lengths and rates, the last of them for the whole sequence. The first is a quarter of LongNet's at this
length, because a core has to do for two hosts: so computing does not outweigh what is sent."""
FEW_HEADS = 2
"""Half as many heads as hosts: a segment's ranks form groups (the hybrid route)."""
CHECKED = Problem(
    pattern=Pattern([16, 32, 64, 256, 512], [1, 2, 4, 8, 16]), seq=512, heads=4, head_dim=16, dtype="bfloat16", requires_grad=True
)
"""The problem on which every way is checked: five branches too, of which two are longer than a shard."""


def _wire_ratio(row: ResultRow) -> float:
    return float(sum(row.values["wire_bytes"]) / sum(row.values["planned_bytes"]))


def _predicted(choose: Callable[[list[float]], float]) -> Callable[[RowsResult], Values]:
    def measure(case: CaseRows) -> float | None:
        rows = [row for row in case.rows.values() if "predicted_s" in row.values and row.samples]
        return choose([row.values["predicted_s"] / row.median_s for row in rows]) if rows else None

    return each("links", measure, "{link}")


def _faults(measure: Callable[[Mapping[str, Any]], float]) -> Callable[[RowsResult], Values]:
    return each("faults", lambda case: measure(case.rows["rank 1"].values), "{kind}, {transport}")


TARGETS = (
    *(
        Target(f"{SLOWEST}: time of {scheme} over auto's", must, aim, time_ratio("links", who, "auto", "{link}", links=SLOWEST))
        for who, scheme, must, aim in (
            ("full ring", "a ring of all keys and values", 5.0, 20.0),
            ("ulysses", "Ulysses' all-to-all", 2.0, 4.0),
        )
    ),
    Target(
        "bytes of the hosts' interfaces over planned bytes", 1.05, 1.02,
        lambda result: {f"{row.who}, {row.case['link']}": _wire_ratio(row) for row in result.rows if row.table == "links"},
        lower=True,
    ),
    Target("schedules: predicted over measured time, the least", 0.75, None, _predicted(min), unit=""),
    Target("schedules: predicted over measured time, the most", 1.33, None, _predicted(max), unit="", lower=True),
    *(
        Target(name, must, None, _faults(measure), unit, lower=True)
        for name, must, measure, unit in (
            ("faults: seconds to an error beyond the timeout", SLACK, lambda v: v["seconds"] - v["timeout"], " s"),
            ("faults whose error does not name the rank", 0, lambda v: int(not v["names_rank"]), ""),
            ("faults: processes that the launcher left behind, and the job then ended", 0, lambda v: v["left_behind"], ""),
        )
    ),
)  # fmt: skip


def _over_time(name: str, header: str) -> Column:
    return Column(header, lambda row, case: f"{row.values[name] / row.median_s:.2f}x" if name in row.values else "-")


COLUMNS = (
    *(WHO, fact("routes"), TIME, QUARTILES, over("auto")),
    Column("a host sends", lambda row, case: in_bytes(max(row.values["planned_bytes"]))),
    Column("interface / planned", lambda row, case: f"{_wire_ratio(row):.3f}"),
    *(_over_time("predicted_s", "predicted"), _over_time("simulated_s", "simulated")),
)
REPORT = Report(
    place="{device_name}, {cores} cores for all hosts; mpirun: {mpi}",
    tables=(ResultTable("{hosts} hosts, {link}", "links", COLUMNS, "{problem}"), FAULT_TABLE),
    plots=(PlotView("Forward and backward: {link}", "links", "{who}"),),
    sentences={
        TARGETS[0].name: "over slow links a ring of all keys and values takes {} as long as dilkit",
        TARGETS[1].name: "Ulysses {}",
        TARGETS[2].name: "the interfaces send {} the planned bytes",
    },
    method="Hosts are network namespaces of one machine, joined by a bridge; both ends of every link are shaped with tc's token "
    "bucket to the rate that the table names, without a delay. Each host has one rank of one thread; all share the cores, which "
    "also move the packets, so that links of 10 Gbit/s are far from filled. A call is a forward and a backward pass; the slowest "
    "rank's time counts. Every way is first compared with the definition in fp64 on a short sequence of as many branches; then "
    "all are timed in turns. The other schemes are written for this suite on dilkit's kernels and transports: the full ring "
    "sends keys and values round, and backward once more with their gradients in fp32, as ring-flash-attention does; Ulysses "
    "deals out heads. The schedule gather sends what torchscale's sequence parallelism would. Bytes of interfaces are the "
    "kernel's, with headers and acknowledgements. Predicted is the planner's time over the measured one, by speeds measured in "
    "the same job, before and after.",
)


@dataclass(frozen=True)
class HostsSuite(Suite):
    """The slowest link first, on which the figures are taken."""

    NAME = "hosts"
    SUMMARY = "attention over hosts with slow links, beside a ring of all keys, and Ulysses"
    TARGETS = TARGETS

    net: list[namespaces.Hosts] = field(default_factory=list, metadata=NO_OPTION)
    """The hosts, once they are there."""

    @contextlib.contextmanager
    def prepared(self) -> Iterator[dict[str, Any]]:
        with contextlib.ExitStack() as stack:
            try:
                self.net[:] = [stack.enter_context(namespaces.hosts(HOSTS))]
            except OSError as error:
                raise ValueError(f"--suite hosts: {error}; {namespaces.NEEDED}") from None
            yield dict(mpi=mpi_version() or "not here")

    def steps(self) -> Iterator[SuiteStep]:
        first, *_ = namespaces.launchers()
        for gbit in GBITS:
            yield self._links(gbit, first)
        yield self._links(GBITS[0], first, SCHEDULES[:1], ("full ring",), FEW_HEADS)
        for kind, launcher in product((*CUTS, "frozen"), namespaces.launchers()):
            yield job_step("faults", f"{kind}, {launcher}", partial(self.fault, kind, launcher))

    def _links(
        self,
        gbit: float,
        launcher: str,
        schedules: Sequence[str] = SCHEDULES,
        peers: Sequence[str] = tuple(PEERS),
        heads: int = 0,
    ) -> SuiteStep:
        link = f"{gbit:g} Gbit/s, {launcher}{f', {heads} heads' * bool(heads)}"
        problem = FIVE._replace(heads=heads or FIVE.heads).problem(HEAD_DIM, self.divisor, dtype="bfloat16", requires_grad=True)
        case = dict(link=link, links=SLOWEST if gbit == GBITS[0] else "fastest links")
        task = partial(
            compare, problem=problem, checked=CHECKED, schedules=schedules, peers=peers,
            repeats=1 if self.quick else self.repeats, case=case,
        )  # fmt: skip

        def job() -> list[ResultRow]:
            (net,) = self.net
            net.shape(gbit)
            return run(launcher, net.size, task, limit=LIMIT, start=net.start)

        return job_step("links", link, job)

    def fault(self, kind: str, launcher: str) -> list[ResultRow]:
        """Return the seconds until the others know of a host that is cut off, or of a frozen rank; and what they say."""
        (net,) = self.net
        net.shape(GBITS[1])
        task = partial(fail, kind=kind, seconds=TIMEOUT)
        try:
            return [fault_row(kind, launcher, TIMEOUT, ended(launcher, FAULT_RANKS, task, limit=FAULT_LIMIT, start=net.start))]
        finally:
            net.connect()


def compare(
    comm: Comm,
    problem: Problem,
    checked: Problem,
    schedules: Sequence[str],
    peers: Sequence[str],
    repeats: int,
    case: Mapping[str, Any],
) -> list[ResultRow]:
    """Check every way, count its bytes, and time all in turns; every rank does."""
    calls: dict[str, RanksCall] = {name: RanksCall(comm, problem, name) for name in schedules}
    calls |= {name: PEERS[name](comm, problem) for name in peers}
    shard = calls[schedules[0]].shard()
    checks = {name: replace(call, problem=checked).check_whole() for name, call in calls.items()}
    for call in calls.values():
        call.once(shard)
    values: dict[str, dict[str, Any]] = {name: _counted(call, shard) for name, call in calls.items()}
    speeds = [rank_speed(comm, problem)]
    times = time_in_turns(comm, {name: partial(call.once, shard) for name, call in calls.items()}, repeats)
    speeds.append(rank_speed(comm, problem))  # after it too: others may have begun to use the machine meanwhile
    for name in schedules:
        plan = calls[name].plan
        forecasts = [Forecast(plan, Rows(problem.head_dim, problem.dtype, problem.batch), speed) for speed in speeds]
        predicted = statistics.fmean(float(one.seconds["overlapped"][one.slowest]) for one in forecasts)
        values[name] |= dict(routes=", ".join(dict.fromkeys(route.kind for route in plan.routes)), predicted_s=predicted)
        values[name]["simulated_s"] = statistics.fmean(simulate(one).seconds for one in forecasts)
    common = dict(hosts=comm.size, problem=str(problem))
    return [row_of("links", case, name, judged(checks[name], one, times[name]), **one, **common) for name, one in values.items()]


def _counted(call: RanksCall, shard: Tensors) -> dict[str, list[int]]:
    """Return bytes of rows that each rank sent in a call, those planned, and those of each host's interface."""
    call.comm.share(b"", "beginning together")
    time.sleep(SETTLED)
    wire_before = namespaces.sent_bytes()
    counted = call.count(shard)
    time.sleep(SETTLED)
    return counted | dict(wire_bytes=gather_values(call.comm, namespaces.sent_bytes() - wire_before))
