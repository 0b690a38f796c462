"""What `dilkit plan` finds, as plain data and as a document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from dilkit.comm.plan.exchange_plan import PHASES
from dilkit.comm.plan.explain import branch_facts, explanation
from dilkit.comm.plan.forecast import Forecast, Numbers, Speed, baselines
from dilkit.problem import Problem
from dilkit.tools.commands.plan.call import Call
from dilkit.tools.commands.plan.simulated import Simulation
from dilkit.tools.commands.plan.speeds import words
from dilkit.tools.console.text import in_bytes, in_seconds, in_thousands, wrapped
from dilkit.tools.report.document import Document, Table, tables

BRANCHES = ("branch", "segment", "rate", "route", "ranks", "group", "rows moved", "most bytes forward", "backward")
TIMES = {
    "compute": "work alone",
    "communication": "sending alone",
    "overlapped": "both at once",
    "sequential": "one after the other",
}
NAMES = {"full_ring": "ring of all keys and values", "segment_all_gather": "all-gather within segments, as LongNet's"}
CALL = ("seq", "heads", "kv_heads", "head_dim", "dtype", "batch", "is_causal", "key_padding_mask")


@dataclass(frozen=True)
class Report:
    """The problem, the ranks and their speed, a forecast for each schedule, and why others are refused."""

    problem: Problem
    world_size: int
    speed: Speed
    schedules: dict[str, Forecast]
    refused: dict[str, str]
    simulation: Simulation | None = None

    @property
    def first(self) -> Forecast:
        """That of the first schedule."""
        return next(iter(self.schedules.values()))

    @property
    def baselines(self) -> dict[str, tuple[int, float]]:
        """Bytes that others would send, and the seconds that they take."""
        sent = baselines(self.first.plan, self.first.rows) if self.schedules else {}
        return {name: (count, count / self.speed.bandwidth) for name, count in sent.items()}

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        call = {name: getattr(self.problem, name) for name in CALL}
        elsewhere = {name: dict(forward_bytes=count, seconds=seconds) for name, (count, seconds) in self.baselines.items()}
        return dict(
            problem=dict(pattern=str(self.problem.pattern), world_size=self.world_size, **call),
            call=Call(self.problem).to_dict(),
            **vars(self.speed),
            schedules={name: _plain(one) for name, one in self.schedules.items()},
            refused=self.refused,
            baselines=elsewhere,
            choice=choice(self.schedules),
            **({} if self.simulation is None else dict(simulated=self.simulation.to_dict())),
        )


def _plain(one: Forecast) -> dict[str, Any]:
    """The smallest, the mean and the largest number of all ranks, and the times of the slowest."""
    sent, work = {phase: traffic.sent for phase, traffic in one.traffic.items()}, one.flops["total"]
    by_rank = {**{f"{phase}_bytes": found for phase, found in sent.items()}, "flops": work}
    by_rank |= {"exchange_bytes": one.memory["exchange buffers"], "kept_bytes": one.kept}
    return dict(
        explanation=explanation(one.plan, one.rows).split("\n"),
        branches=[branch.to_dict() for branch in branch_facts(one.plan, one.rows)],
        sent_bytes={phase: _spread(counts) for phase, counts in sent.items()},
        flops=_spread(work) | dict(balance=one.balance),
        memory_bytes={name: _spread(counts) for name, counts in one.memory.items()},
        kept_bytes=_spread(one.kept),
        seconds={name: float(found[one.slowest]) for name, found in one.seconds.items()},
        by_rank={name: counts.tolist() for name, counts in by_rank.items()},
    )


def _spread(counts: Numbers) -> dict[str, float]:
    return dict(min=int(counts.min()), mean=float(counts.sum() / len(counts)), max=int(counts.max()))


def choice(schedules: Mapping[str, Forecast]) -> str:
    """What the automatic choice is, and why, in one line."""
    if "auto" not in schedules:
        return ""
    kinds = [route.kind for route in schedules["auto"].plan.routes]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    if set(kinds) == {"local"}:
        return f"auto: {counts}: no rank needs rows of another, and nothing is sent"
    most = {name: in_bytes(int(one.traffic["forward"].sent.max())) for name, one in schedules.items()}
    others = ", ".join(f"{name} {sent}" for name, sent in most.items() if name != "auto")
    chosen = {"scatter", "gather", "hybrid"} & {*kinds}
    reason = "the fewest rows through the busiest rank, branch by branch" if chosen else "rows go to the queries that see them"
    return f"auto: {counts}: {reason}; {most['auto']} sent forward{f' ({others})' * bool(others)}"


def document(report: Report) -> Document:
    """The report for people."""
    ranks, call = f"{report.world_size:,} rank{'s' * (report.world_size > 1)}", Call(report.problem)
    where = f"{ranks}, {words(report.speed)}"
    by_reason: dict[str, list[str]] = {}
    for name, why in report.refused.items():
        by_reason.setdefault(why, []).append(name)
    refused = (f"{', '.join(names)} is refused: {why}" for why, names in by_reason.items())
    return Document(
        headline=tuple(line for text in (str(report.problem), where) for line in wrapped("", text)),
        tables=(call.table(), *(_over_ranks(report) if report.schedules else ())),
        notes=(*call.verdicts(), *refused, *filter(None, [choice(report.schedules)])),
    )


def _over_ranks(report: Report) -> tuple[Table, ...]:
    forecasts, first = list(report.schedules.values()), report.first
    elsewhere = tuple((NAMES[name], in_bytes(count), in_seconds(seconds)) for name, (count, seconds) in report.baselines.items())
    why, names = explanation(first.plan, first.rows), ("", *report.schedules)
    return tables(
        Table(f"branches, schedule {names[1]}", BRANCHES, tuple(_branches(first)), why),
        Table("a rank, by schedule", names, tuple(_all_ranks(forecasts))),
        Table("sent forward by the rank that sends most, elsewhere", ("", "bytes", "time"), elsewhere),
        *(() if report.simulation is None else (report.simulation.table(),)),
    )


def _branches(forecast: Forecast) -> Iterator[tuple[str, ...]]:
    for b in branch_facts(forecast.plan, forecast.rows):
        sizes = (f"{b.segment_length:,}", f"{b.dilation_rate:,}", b.route, f"{b.ranks:,}", f"{b.group_size:,}")
        sent = (in_thousands(b.rows_moved), in_bytes(b.forward_bytes), in_bytes(b.backward_bytes))
        yield "all" if b.branch is None else str(b.branch), *sizes, *sent


def _all_ranks(found: list[Forecast]) -> Iterator[tuple[str, ...]]:
    for phase, which in product(PHASES, ("min", "mean", "max")):
        yield f"sent {phase}, {which}", *(in_bytes(round(getattr(s.traffic[phase].sent, which)())) for s in found)
    yield "forward GFLOP, max", *(in_thousands(s.flops["total"].max() / 1e9) for s in found)
    yield "forward GFLOP, max / mean", *(f"{s.balance:.3f}" for s in found)
    for kind in found[0].memory:
        yield f"memory: {kind}, max", *(in_bytes(int(s.memory[kind].max())) for s in found)
    yield "kept for the backward pass, max", *(in_bytes(int(s.kept.max())) for s in found)
    for name, text in TIMES.items():
        yield f"time: {text}", *(in_seconds(s.seconds[name][s.slowest]) for s in found)
