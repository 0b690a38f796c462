"""What `dilkit plan` finds, as plain data and as a document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from dilkit.comm.plan.exchange_plan import PHASES
from dilkit.problem import Problem
from dilkit.tools.commands.plan.facts import Schedule, Speed, baselines, choice
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


@dataclass(frozen=True)
class Report:
    """The problem, its schedules by name, why others are refused, and the rank that is looked at, if any."""

    problem: Problem
    speed: Speed
    schedules: dict[str, Schedule]
    refused: dict[str, str]
    rank: int | None

    @property
    def first(self) -> Schedule:
        """Of the schedules."""
        return next(iter(self.schedules.values()))

    @property
    def baselines(self) -> dict[str, tuple[int, float]]:
        """Bytes that others would send, and the seconds that they take."""
        sent = baselines(self.first.plan, self.first.rows)
        return {name: (count, count / self.speed.bandwidth) for name, count in sent.items()}

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        names = ("seq", "heads", "kv_heads", "head_dim", "dtype", "batch", "is_causal", "key_padding_mask")
        call = {name: getattr(self.problem, name) for name in names}
        problem = dict(pattern=str(self.problem.pattern), world_size=self.first.plan.world_size, **call)
        elsewhere = {name: dict(forward_bytes=count, seconds=seconds) for name, (count, seconds) in self.baselines.items()}
        schedules = {name: one.to_dict() for name, one in self.schedules.items()}
        found = dict(problem=problem, **vars(self.speed), schedules=schedules, refused=self.refused, baselines=elsewhere)
        found["choice"] = choice(self.schedules)
        if self.rank is not None:
            found["rank"] = {name: one.rank_dict(self.rank) for name, one in self.schedules.items()}
        return found


def document(report: Report) -> Document:
    """The report for people."""
    schedules, speed, world_size = list(report.schedules.values()), report.speed, report.first.plan.world_size
    ranks = f"{world_size:,} rank{'s' * (world_size > 1)}"
    where = f"{ranks}, {speed.bandwidth / 1e9:,.4g} GB/s each way, {speed.flops / 1e12:,.4g} TFLOP/s"
    elsewhere = ((NAMES[name], in_bytes(count), in_seconds(seconds)) for name, (count, seconds) in report.baselines.items())
    return Document(
        headline=tuple(line for text in (str(report.problem), where) for line in wrapped("", text)),
        tables=tables(
            Table(
                f"branches, schedule {next(iter(report.schedules))}",
                BRANCHES,
                tuple(_branches(report.first)),
                report.first.explanation,
            ),
            Table("a rank, by schedule", ("", *report.schedules), tuple(_all_ranks(schedules))),
            Table("sent forward by the rank that sends most, elsewhere", ("", "bytes", "time"), tuple(elsewhere)),
            *([] if report.rank is None else [_rank_table(report, report.rank)]),
        ),
        notes=(*(f"{name} is refused: {why}" for name, why in report.refused.items()), *filter(None, [choice(report.schedules)])),
    )


def _branches(schedule: Schedule) -> Iterator[tuple[str, ...]]:
    for b in schedule.branches:
        sizes = (f"{b.segment_length:,}", f"{b.dilation_rate:,}", b.route, f"{b.ranks:,}", f"{b.group_size:,}")
        sent = (in_thousands(b.rows_moved), in_bytes(b.forward_bytes), in_bytes(b.backward_bytes))
        yield "all" if b.branch is None else str(b.branch), *sizes, *sent


def _all_ranks(found: list[Schedule]) -> Iterator[tuple[str, ...]]:
    for phase, which in product(PHASES, ("min", "mean", "max")):
        yield f"sent {phase}, {which}", *(in_bytes(round(getattr(s.traffic[phase].sent, which)())) for s in found)
    yield "forward GFLOP, max", *(in_thousands(s.flops["total"].max() / 1e9) for s in found)
    yield "forward GFLOP, max / mean", *(f"{s.balance:.3f}" for s in found)
    for kind in found[0].memory:
        yield f"memory: {kind}, max", *(in_bytes(int(s.memory[kind].max())) for s in found)
    for name, text in TIMES.items():
        yield f"time: {text}", *(in_seconds(s.seconds[name][s.slowest]) for s in found)


def _rank_table(report: Report, rank: int) -> Table:
    where = report.first.plan.positions(rank)
    rows = tuple(_one_rank(list(report.schedules.values()), rank))
    return Table(f"rank {rank}: positions {where.start:,} to {where.stop - 1:,}", ("", *report.schedules), rows)


def _one_rank(found: list[Schedule], rank: int) -> Iterator[tuple[str, ...]]:
    for way in ("sent", "received"):
        sent = [s.bytes_of(rank, way) for s in found]
        for phase, leg in product(PHASES, ("there", "back", "ring", "total")):
            yield f"{way} {phase}: {leg}", *(in_bytes(counts[phase][leg]) for counts in sent)
    for kind in found[0].flops:
        yield f"forward GFLOP: {kind}", *(in_thousands(s.flops[kind][rank] / 1e9) for s in found)
    for kind in found[0].memory:
        yield f"memory: {kind}", *(in_bytes(int(s.memory[kind][rank])) for s in found)
    for name, text in TIMES.items():
        yield f"time: {text}", *(in_seconds(s.seconds[name][rank]) for s in found)
