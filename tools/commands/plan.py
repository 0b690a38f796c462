"""`dilkit plan`: work, memory and traffic of a call, worked out without running it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from dilkit.comm import Rows, exchange_plan, shard_cuts
from dilkit.comm.plan.exchange_plan import KEEPS, PHASES, SCHEDULES
from dilkit.comm.plan.explain import branch_facts, explanation
from dilkit.comm.plan.forecast import Forecast, Numbers, baselines
from dilkit.pattern import Pattern
from dilkit.problem import DTYPE_BYTES, Problem
from dilkit.selector import explain
from dilkit.tools.commands import plan_speeds
from dilkit.tools.commands.plan_speeds import BANDWIDTH, FLOPS, calibrate, speed_of, words
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
    """Print the report, or measure the speeds of a later one."""
    if args.calibrate:
        return calibrate(args)
    report = collect(args)
    if args.json:
        print_json("plan", report)
    else:
        print(document_text(document(report, pattern_of(args).describe())))
    return 0


CALL = ("seq", "heads", "kv_heads", "head_dim", "dtype", "batch", "is_causal", "key_padding_mask")


def collect(args: argparse.Namespace) -> dict[str, Any]:
    """Return the whole report as plain data. Raises ValueError naming the argument that does not fit."""
    if args.seq < args.world_size:
        raise ValueError(f"--world-size: {args.world_size} ranks cannot share out --seq {args.seq}; at least one token each")
    set_series(args)
    pattern, rows, speed = pattern_of(args), Rows(args.dim, args.dtype, args.batch, args.mask), speed_of(args)
    kv_heads, branches = args.kv_heads or args.heads, len(pattern.branches)
    if args.world_size * kv_heads * branches > MOST_ENTRIES:
        raise ValueError(
            f"--world-size {args.world_size:,} with {kv_heads:,} key/value heads and {branches:,} branches is too large a plan; "
            f"ranks x heads x branches may be {MOST_ENTRIES:,} at most"
        )
    cuts, shape = shard_cuts(args.seq, args.world_size, pattern), (args.heads, args.kv_heads)
    forecasts, refused = dict[str, Forecast](), {}
    for name in SCHEDULES if args.schedule == ALL else (args.schedule,):
        try:
            plan = exchange_plan(pattern, cuts, *shape, is_causal=args.causal, schedule=name, keep=args.keep)
            forecasts[name] = Forecast(plan, rows, speed)
        except ValueError as error:
            if args.schedule != ALL or (name == SCHEDULES[0] and pattern.only_segments):
                raise
            refused[name] = str(error)
    problem = problem_of(args, args.assume)
    sent = next((baselines(one.plan, one.rows) for one in forecasts.values()), {})
    report = dict(
        problem=dict(pattern=str(pattern), world_size=args.world_size, **{name: getattr(problem, name) for name in CALL}),
        call=_call(problem),
        **vars(speed),
        schedules={name: _schedule(one) for name, one in forecasts.items()},
        refused=refused,
        baselines={name: dict(forward_bytes=count, seconds=count / speed.bandwidth) for name, count in sent.items()},
        choice=choice(forecasts),
    )
    simulated = plan_speeds.simulation(args, forecasts, speed)
    return report if simulated is None else report | dict(simulated=simulated)


def _call(problem: Problem) -> dict[str, Any]:
    """Return a call on one device: who computes it, pairs and FLOPs by branch, and bytes by kind."""

    def pairs(pattern: Pattern) -> int:
        return replace(problem, pattern=pattern).flops() // (4 * problem.head_dim)

    branches = []
    for branch in problem.pattern.branches:
        alone = pairs(problem.pattern.with_branches(branch, overlap="count", tail="exact"))
        branches.append(dict(kind=branch.kind, text=str(branch), pairs=alone, flops=4 * problem.head_dim * alone))
    tokens, row = problem.batch * problem.seq, problem.head_dim * DTYPE_BYTES[problem.dtype]
    lse = 8 if problem.dtype == "float64" else 4
    memory = dict(
        inputs=tokens * (row * (problem.heads + 2 * problem.kv_heads) + problem.key_padding_mask),
        results=tokens * problem.heads * (row + lse),
        gradients=tokens * row * (2 * problem.heads + 2 * problem.kv_heads),
    )
    memory |= dict(total=sum(memory.values()))
    return dict(explain(problem).to_dict(), branches=branches, dense_pairs=pairs(Pattern.dense()), memory_bytes=memory)


def _schedule(one: Forecast) -> dict[str, Any]:
    """Return the least, the mean and the largest number of all ranks, and the times of the slowest."""
    sent, work = {phase: traffic.sent for phase, traffic in one.traffic.items()}, one.flops["total"]
    by_rank = {**{f"{phase}_bytes": counts for phase, counts in sent.items()}, "flops": work}
    by_rank |= {"exchange_bytes": one.memory["exchange buffers"], "kept_bytes": one.kept}
    return dict(
        explanation=explanation(one.plan, one.rows).split("\n"),
        branches=[branch.to_dict() for branch in branch_facts(one.plan, one.rows)],
        sent_bytes={phase: _spread(counts) for phase, counts in sent.items()},
        flops=_spread(work) | dict(balance=one.balance),
        memory_bytes={name: _spread(counts) for name, counts in one.memory.items()},
        kept_bytes=_spread(one.kept),
        seconds={name: float(by_name[one.slowest]) for name, by_name in one.seconds.items()},
        by_rank={name: counts.tolist() for name, counts in by_rank.items()},
    )


def _spread(counts: Numbers) -> dict[str, float]:
    return dict(min=int(counts.min()), mean=float(counts.sum() / len(counts)), max=int(counts.max()))


def choice(schedules: Mapping[str, Forecast]) -> str:
    """Return the automatic choice, and its reason, in one line."""
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


BRANCHES = ("branch", "segment", "rate", "route", "ranks", "group", "rows moved", "most bytes forward", "backward")
TIMES = {
    "compute": "work alone",
    "communication": "sending alone",
    "overlapped": "both at once",
    "sequential": "one after the other",
}
NAMES = {"full_ring": "ring of all keys and values", "segment_all_gather": "all-gather within segments, as LongNet's"}


def document(report: Mapping[str, Any], description: str) -> Document:
    """Return the report for people; `description` is that of the pattern."""
    call, schedules, ranks = report["call"], report["schedules"], report["problem"]["world_size"]
    by_reason: dict[str, list[str]] = {}
    for name, why in report["refused"].items():
        by_reason.setdefault(why, []).append(name)
    notes = [f"on {call['device']}: {call['picked'] or 'no backend'} computes it"]
    notes += [f"{b['name']} {b['verdict']}: {'; '.join(filter(None, (b['detail'], *b['reasons'])))}" for b in call["backends"]]
    notes += [f"{', '.join(names)} is refused: {why}" for why, names in by_reason.items()]
    rows = []
    for number, branch in enumerate(call["branches"]):
        share = f"{100 * branch['pairs'] / call['dense_pairs']:.3g} %"
        rows.append((str(number), branch["kind"], *map(in_thousands, (branch["pairs"], branch["flops"] / 1e9)), share))
    held = ", ".join(f"{name} {in_bytes(count)}" for name, count in call["memory_bytes"].items())
    header, note = ("branch", "kind", "pairs", "GFLOP", "of dense"), f"{description}\nmemory: {held}"
    shown = [Table("a call on one device, forward", header, tuple(rows), note)]
    if schedules:
        names, first = ("", *schedules), next(iter(schedules.values()))
        others = report["baselines"].items()
        elsewhere = tuple((NAMES[name], in_bytes(one["forward_bytes"]), in_seconds(one["seconds"])) for name, one in others)
        shown += [
            Table(f"branches, schedule {names[1]}", BRANCHES, tuple(_branches(first)), "\n".join(first["explanation"])),
            Table("a rank, by schedule", names, tuple(_all_ranks(list(schedules.values())))),
            Table("sent forward by the rank that sends most, elsewhere", ("", "bytes", "time"), elsewhere),
        ]
        shown += [plan_speeds.table(report["simulated"])] if "simulated" in report else []
    where = f"{ranks:,} rank{'s' * (ranks > 1)}, {words(report)}"
    headline = tuple(line for text in (call["problem"], where) for line in wrapped("", text))
    return Document(headline, tables(*shown), notes=(*notes, *filter(None, [report["choice"]])))


def _branches(schedule: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for b in schedule["branches"]:
        sizes = (f"{b['segment_length']:,}", f"{b['dilation_rate']:,}", b["route"], f"{b['ranks']:,}", f"{b['group_size']:,}")
        sent = (in_thousands(b["rows_moved"]), in_bytes(b["forward_bytes"]), in_bytes(b["backward_bytes"]))
        yield "all" if b["branch"] is None else str(b["branch"]), *sizes, *sent


def _all_ranks(schedules: list[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for phase, which in product(PHASES, ("min", "mean", "max")):
        yield f"sent {phase}, {which}", *(in_bytes(round(one["sent_bytes"][phase][which])) for one in schedules)
    yield "forward GFLOP, max", *(in_thousands(one["flops"]["max"] / 1e9) for one in schedules)
    yield "forward GFLOP, max / mean", *(f"{one['flops']['balance']:.3f}" for one in schedules)
    for kind in schedules[0]["memory_bytes"]:
        yield f"memory: {kind}, max", *(in_bytes(one["memory_bytes"][kind]["max"]) for one in schedules)
    yield "kept for the backward pass, max", *(in_bytes(one["kept_bytes"]["max"]) for one in schedules)
    for name, text in TIMES.items():
        yield f"time: {text}", *(in_seconds(one["seconds"][name]) for one in schedules)
