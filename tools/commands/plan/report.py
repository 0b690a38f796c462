"""What `dilkit plan` finds, as a record and as a document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from dilkit.comm.plan.exchange_plan import PHASES
from dilkit.problem import Problem
from dilkit.tools.commands.plan.facts import LEGS, Baseline, Rank, Schedule, Speed
from dilkit.tools.console.text import in_bytes, in_seconds, in_thousands, wrapped
from dilkit.tools.report.document import Document, Table, tables
from dilkit.tools.results.decode import encode

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
    """All that is worked out: by schedule; why others are refused; `rank` where one was asked for."""

    problem: Problem
    world_size: int
    speed: Speed
    schedules: dict[str, Schedule]
    refused: dict[str, str]
    baselines: dict[str, Baseline]
    choice: str
    rank: dict[str, Rank]

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        p, found = self.problem, vars(self)
        sizes = dict(seq=p.seq, world_size=self.world_size, heads=p.heads, kv_heads=p.kv_heads, head_dim=p.head_dim)
        call = dict(dtype=p.dtype, batch=p.batch, is_causal=p.is_causal, key_padding_mask=p.key_padding_mask)
        rest = ("schedules", "refused", "baselines", "choice", *["rank"] * bool(self.rank))
        whole = dict(
            problem=dict(pattern=str(p.pattern)) | sizes | call, **vars(self.speed), **{name: found[name] for name in rest}
        )
        plain: dict[str, Any] = encode(whole)
        return plain


def document(report: Report) -> Document:
    """The report for people."""
    speed, (name, first) = report.speed, next(iter(report.schedules.items()))
    ranks = f"{report.world_size:,} rank{'s' * (report.world_size > 1)}"
    where = f"{ranks}, {speed.bandwidth / 1e9:,.4g} GB/s each way, {speed.flops / 1e12:,.4g} TFLOP/s"
    elsewhere = ((NAMES[key], in_bytes(b.forward_bytes), in_seconds(b.seconds)) for key, b in report.baselines.items())
    return Document(
        headline=tuple(line for text in (str(report.problem), where) for line in wrapped("", text)),
        tables=tables(
            Table(f"branches, schedule {name}", BRANCHES, tuple(_branch_rows(first)), "\n".join(first.explanation)),
            Table("a rank, by schedule", ("", *report.schedules), tuple(_schedule_rows(list(report.schedules.values())))),
            Table("sent forward by the rank that sends most, elsewhere", ("", "bytes", "time"), tuple(elsewhere)),
            Table(_rank_title(report), ("", *report.rank), tuple(_rank_rows(list(report.rank.values())))),
        ),
        notes=(*(f"{schedule} is refused: {why}" for schedule, why in report.refused.items()), *filter(None, [report.choice])),
    )


def _branch_rows(schedule: Schedule) -> Iterator[tuple[str, ...]]:
    for b in schedule.branches:
        sizes = (f"{b.segment_length:,}", f"{b.dilation_rate:,}", b.route, f"{b.ranks:,}", f"{b.group_size:,}")
        sent = (in_thousands(b.rows_moved), in_bytes(b.forward_bytes), in_bytes(b.backward_bytes))
        yield "all" if b.branch is None else str(b.branch), *sizes, *sent


def _schedule_rows(found: list[Schedule]) -> Iterator[tuple[str, ...]]:
    for phase, which in product(PHASES, ("min", "mean", "max")):
        yield f"sent {phase}, {which}", *(in_bytes(round(getattr(s.sent_bytes[phase], which))) for s in found)
    yield "forward GFLOP, max", *(in_thousands(s.flops.max / 1e9) for s in found)
    yield "forward GFLOP, max / mean", *(f"{s.flops.balance:.3f}" for s in found)
    for kind in found[0].memory_bytes:
        yield f"memory: {kind}, max", *(in_bytes(s.memory_bytes[kind].max) for s in found)
    for name, text in TIMES.items():
        yield f"time: {text}", *(in_seconds(s.seconds[name]) for s in found)


def _rank_title(report: Report) -> str:
    return next((f"rank {r.rank}: positions {r.positions[0]:,} to {r.positions[1] - 1:,}" for r in report.rank.values()), "")


def _rank_rows(ranks: list[Rank]) -> Iterator[tuple[str, ...]]:
    if not ranks:
        return
    for way in ("sent", "received"):
        by_schedule: list[dict[str, dict[str, int]]] = [getattr(rank, f"{way}_bytes") for rank in ranks]
        for phase, leg in product(PHASES, LEGS):
            yield f"{way} {phase}: {leg}", *(in_bytes(found[phase][leg]) for found in by_schedule)
    for kind in ranks[0].flops:
        yield f"forward GFLOP: {kind}", *(in_thousands(rank.flops[kind] / 1e9) for rank in ranks)
    for kind in ranks[0].memory_bytes:
        yield f"memory: {kind}", *(in_bytes(rank.memory_bytes[kind]) for rank in ranks)
    for name, text in TIMES.items():
        yield f"time: {text}", *(in_seconds(rank.seconds[name]) for rank in ranks)
