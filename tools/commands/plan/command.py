"""`dilkit plan`: what dilated attention over ranks would move, compute and hold, worked out without running it."""

from __future__ import annotations

import argparse
from typing import Any

from dilkit.comm import Rows, exchange_plan, shard_cuts
from dilkit.comm.plan.exchange_plan import ExchangePlan
from dilkit.comm.plan.routes import SCHEDULES
from dilkit.pattern import Pattern
from dilkit.tools.commands.plan.facts import baselines, choice, one_rank, schedule_facts
from dilkit.tools.commands.plan.report import report_lines
from dilkit.tools.console.arguments import add_call_arguments, add_pattern_arguments, pattern_of, set_series, whole
from dilkit.tools.console.quantities import bandwidth, flops
from dilkit.tools.console.text import print_json

ALL = "all"
HELP = f"""\
say what dilated attention over ranks would move, compute and hold, without running it

Bytes and pairs are exact: what `ring_dilated_attention` over these shards counts. Times are a model: nominal FLOPs at --flops and
the bytes of the busier direction at --bandwidth, rank by rank; the slowest rank is shown. Memory is that of one call: inputs,
results, gradients, and the rows of other ranks that are kept for the backward pass. --schedule {ALL} compares the schedules."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the pattern's and the call's arguments, and those of the job."""
    add_pattern_arguments(parser, seq=2**20, heads=32, segments=None, seq_help="tokens, as 1e9 or 64K (default %(default)s)")
    add_call_arguments(parser, dim=128, dtype="bfloat16", train=False)
    group = parser.add_argument_group("job")
    group.add_argument("--world-size", type=whole(1), default=8, metavar="P", help="ranks (default %(default)s)")
    group.add_argument(
        "--schedule", choices=(*SCHEDULES, ALL), default=ALL, help="how branches are computed over ranks (default %(default)s)"
    )
    group.add_argument(
        "--bandwidth",
        type=bandwidth,
        default="50GB/s",
        metavar="B",
        help="of a rank, each way, as 400Gbit/s (default %(default)s)",
    )
    group.add_argument(
        "--flops", type=flops, default="400T", metavar="F", help="operations a second of a rank (default %(default)s)"
    )
    group.add_argument("--rank", type=whole(0), metavar="R", help="also show one rank: its positions, bytes, work and memory")


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    report = collect(args)
    if args.json:
        print_json("plan", report)
    else:
        print("\n".join(report_lines(report)))
    return 0


def collect(args: argparse.Namespace) -> dict[str, Any]:
    """The whole report as plain data. Raises ValueError naming the argument that does not fit."""
    if args.rank is not None and args.rank >= args.world_size:
        raise ValueError(f"--rank: {args.rank} is not there; --world-size {args.world_size} has ranks 0 to {args.world_size - 1}")
    if args.seq < args.world_size:
        raise ValueError(f"--world-size: {args.world_size} ranks cannot share out --seq {args.seq}; at least one token each")
    set_series(args)
    pattern, rows = pattern_of(args), Rows(args.dim, args.dtype, args.batch, args.mask)
    plans, refused = _plans(args, pattern, shard_cuts(args.seq, args.world_size, pattern))
    rates = dict(bandwidth=args.bandwidth, flops=args.flops)
    report: dict[str, Any] = dict(problem=_problem(args, str(pattern)), **rates)
    report["schedules"] = {name: schedule_facts(plan, rows, **rates) for name, plan in plans.items()}
    report["refused"] = refused
    report["baselines"] = baselines(next(iter(plans.values())), rows, args.bandwidth)
    report["choice"] = choice(plans, rows)
    if args.rank is not None:
        report["rank"] = {name: one_rank(plan, rows, args.rank, **rates) for name, plan in plans.items()}
    return report


def _plans(args: argparse.Namespace, pattern: Pattern, cuts: tuple[int, ...]) -> tuple[dict[str, ExchangePlan], dict[str, str]]:
    """The plans that were asked for; of all schedules those that there can be, and for the others why not."""
    plans, refused = {}, {}
    for name in SCHEDULES if args.schedule == ALL else (args.schedule,):
        try:
            plans[name] = exchange_plan(pattern, cuts, args.heads, args.kv_heads, is_causal=args.causal, schedule=name)
        except ValueError as error:
            if args.schedule != ALL or name == SCHEDULES[0]:
                raise
            refused[name] = str(error)
    return plans, refused


def _problem(args: argparse.Namespace, pattern: str) -> dict[str, Any]:
    sizes = dict(seq=args.seq, world_size=args.world_size, heads=args.heads, kv_heads=args.kv_heads or args.heads)
    call = dict(head_dim=args.dim, dtype=args.dtype, batch=args.batch, is_causal=args.causal, key_padding_mask=args.mask)
    return dict(pattern=pattern, **sizes, **call)
