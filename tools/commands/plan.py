"""`dilkit plan`: work, memory and traffic of a call, worked out without running it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from dilkit.comm import Rows, exchange_plan, shard_cuts
from dilkit.comm.plan.exchange_plan import PHASES
from dilkit.comm.plan.explain import branch_facts, explanation
from dilkit.comm.plan.forecast import Forecast, Numbers, Speed, baselines
from dilkit.comm.plan.routes import KEEPS, SCHEDULES
from dilkit.pattern import Pattern
from dilkit.problem import DTYPE_BYTES, Problem
from dilkit.selector import Trace, explain
from dilkit.tools.commands import plan_speeds
from dilkit.tools.commands.plan_speeds import BANDWIDTH, FLOPS, Simulation, calibrate, speed_of, words
from dilkit.tools.console.arguments import (
    add_call_arguments,
    add_pattern_arguments,
    assumed_device,
    bandwidth,
    flops,
    pattern_of,
    problem_of,
    set_series,
    whole,
)
from dilkit.tools.console.text import in_bytes, in_seconds, in_thousands, print_json, wrapped
from dilkit.tools.report.document import Document, Table, tables
from dilkit.tools.report.terminal import document_text

ALL = "all"
MOST_ENTRIES = 2**21
"""The most ranks x key/value heads x branches that are planned: beyond that it takes more than a minute, and gigabytes."""
HELP = f"""\
say what a call would compute and hold, who computes it, and what it moves over ranks, without running it

Pairs and FLOPs of each branch, bytes, and who computes it and why, are those of one call on one device: --assume's, or this CPU.
Over ranks bytes and pairs are exact: what `ring_dilated_attention` over these shards counts. Times are a model: nominal FLOPs
at --flops and the bytes of the busier direction at --bandwidth, rank by rank, or as measured (--speeds); the slowest rank is
shown. Memory is that of one call: inputs, results, gradients, and the rows of other ranks in buffers, with --keep nothing those
of one branch at a time. --schedule {ALL} compares the schedules."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the pattern's and the call's arguments, and those of the job."""
    add_pattern_arguments(parser, seq=2**20, heads=32, segments=None, seq_help="tokens, as 1e9 or 64K (default %(default)s)")
    add_call_arguments(parser, dim=128, dtype="bfloat16", train=False)
    parser.add_argument("--assume", type=assumed_device, metavar="sm_80", help="the device, a GPU that need not be here, or cpu")
    group = parser.add_argument_group("job")
    group.add_argument("--world-size", type=whole(1), default=8, metavar="P", help="ranks (default %(default)s)")
    how = "how branches are computed over ranks (default %(default)s)"
    held = "what is kept of received rows for the backward pass; nothing: they are sent again (default %(default)s)"
    rate = f"operations a second of a rank (default {FLOPS})"
    each_way = f"of a rank, each way, as 400Gbit/s (default {BANDWIDTH})"
    group.add_argument("--schedule", choices=(*SCHEDULES, ALL), default=ALL, help=how)
    group.add_argument("--keep", choices=KEEPS, default=KEEPS[0], help=held)
    group.add_argument("--bandwidth", type=bandwidth, metavar="B", help=each_way)
    group.add_argument("--flops", type=flops, metavar="F", help=rate)
    group.add_argument("--speeds", type=Path, metavar="FILE", help="take both, and more, from a file that --calibrate wrote")
    calibrated = (
        "in a job of mpirun or torchrun: measure links and kernel with the problem given, write them into FILE, plan nothing"
    )
    group.add_argument("--calibrate", type=Path, metavar="FILE", help=calibrated)
    plan_speeds.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the report, or measure what a later one goes by."""
    if args.calibrate:
        return calibrate(args)
    report = collect(args)
    if args.json:
        print_json("plan", report.to_dict())
    else:
        print(document_text(document(report)))
    return 0


def _check_size(args: argparse.Namespace, pattern: Pattern) -> None:
    """Raise ValueError for a plan that would take minutes and gigabytes."""
    kv_heads, branches = args.kv_heads or args.heads, len(pattern.branches)
    if args.world_size * kv_heads * branches > MOST_ENTRIES:
        raise ValueError(
            f"--world-size {args.world_size:,} with {kv_heads:,} key/value heads and {branches:,} branches is too large a plan; "
            f"ranks x heads x branches may be {MOST_ENTRIES:,} at most"
        )


def collect(args: argparse.Namespace) -> Report:
    """The whole report. Raises ValueError naming the argument that does not fit."""
    if args.seq < args.world_size:
        raise ValueError(f"--world-size: {args.world_size} ranks cannot share out --seq {args.seq}; at least one token each")
    set_series(args)
    pattern, rows, speed = pattern_of(args), Rows(args.dim, args.dtype, args.batch, args.mask), speed_of(args)
    _check_size(args, pattern)
    cuts, shape = shard_cuts(args.seq, args.world_size, pattern), (args.heads, args.kv_heads)
    plans, refused = {}, {}
    for name in SCHEDULES if args.schedule == ALL else (args.schedule,):
        try:
            plan = exchange_plan(pattern, cuts, *shape, is_causal=args.causal, schedule=name, keep=args.keep)
            plans[name] = Forecast(plan, rows, speed)
        except ValueError as error:
            if args.schedule != ALL or (name == SCHEDULES[0] and pattern.only_segments):
                raise
            refused[name] = str(error)
    return Report(
        problem_of(args, args.assume), args.world_size, speed, plans, refused, plan_speeds.simulation(args, plans, speed)
    )


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


HEADER = ("branch", "kind", "pairs", "GFLOP", "of dense")


@dataclass(frozen=True)
class Call:
    """A call of `problem` on its device."""

    problem: Problem

    @property
    def trace(self) -> Trace:
        """Which backend computes it, and why no other."""
        return explain(self.problem)

    @property
    def pairs(self) -> tuple[int, ...]:
        """Of each branch, the pairs of a query and a key, over all heads and the batch."""
        pattern = self.problem.pattern
        return tuple(self._pairs(pattern.with_branches(branch, overlap="count", tail="exact")) for branch in pattern.branches)

    @property
    def dense_pairs(self) -> int:
        """Those of every token with every token, under the same causality."""
        return self._pairs(Pattern.dense())

    def _pairs(self, pattern: Pattern) -> int:
        return replace(self.problem, pattern=pattern).flops() // (4 * self.problem.head_dim)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by kind: query, key, value (and mask); out and lse; gradients of the results and of the inputs."""
        p = self.problem
        tokens, row = p.batch * p.seq, p.head_dim * DTYPE_BYTES[p.dtype]
        lse = 8 if p.dtype == "float64" else 4
        by_name = dict(
            inputs=tokens * (row * (p.heads + 2 * p.kv_heads) + p.key_padding_mask),
            results=tokens * p.heads * (row + lse),
            gradients=tokens * row * (2 * p.heads + 2 * p.kv_heads),
        )
        return by_name | dict(total=sum(by_name.values()))

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        rows = zip(self.problem.pattern.branches, self.pairs, strict=True)
        branches = [dict(kind=branch.kind, text=str(branch), pairs=pairs, flops=self._flops(pairs)) for branch, pairs in rows]
        return dict(self.trace.to_dict(), branches=branches, dense_pairs=self.dense_pairs, memory_bytes=self.memory)

    def _flops(self, pairs: int) -> int:
        return 4 * self.problem.head_dim * pairs

    def table(self) -> Table:
        """A row for each branch; below it what each of them is, and the bytes of the call."""
        rows, dense = [], self.dense_pairs
        for number, (branch, pairs) in enumerate(zip(self.problem.pattern.branches, self.pairs, strict=True)):
            share = f"{100 * pairs / dense:.3g} %"
            rows.append((str(number), branch.kind, in_thousands(pairs), in_thousands(self._flops(pairs) / 1e9), share))
        held = ", ".join(f"{name} {in_bytes(count)}" for name, count in self.memory.items())
        return Table("a call on one device, forward", HEADER, tuple(rows), f"{self.problem.pattern.describe()}\nmemory: {held}")

    def verdicts(self) -> Iterator[str]:
        """Who computes it and why, and what stands against every other backend."""
        trace = self.trace
        yield f"on {trace.problem.device}: {trace.picked or 'no backend'} computes it"
        for one in trace.decisions:
            yield f"{one.name} {one.verdict}: {'; '.join(filter(None, (one.detail, *one.reasons)))}"
