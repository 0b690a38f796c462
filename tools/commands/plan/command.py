"""`dilkit plan`: what a call would compute and hold, and what it moves over ranks, worked out without running it."""

from __future__ import annotations

import argparse
from pathlib import Path

from dilkit.comm import Rows, exchange_plan, shard_cuts
from dilkit.comm.plan.forecast import Forecast
from dilkit.comm.plan.routes import KEEPS, SCHEDULES
from dilkit.pattern import Pattern
from dilkit.tools.commands.plan import simulated
from dilkit.tools.commands.plan.report import Report, document
from dilkit.tools.commands.plan.speeds import BANDWIDTH, FLOPS, calibrate, speed_of
from dilkit.tools.console.arguments import (
    add_call_arguments,
    add_pattern_arguments,
    assumed_device,
    pattern_of,
    problem_of,
    set_series,
    whole,
)
from dilkit.tools.console.quantities import bandwidth, flops
from dilkit.tools.console.text import print_json
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
    simulated.add_arguments(parser)


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
    return Report(problem_of(args, args.assume), args.world_size, speed, plans, refused, simulated.simulation(args, plans, speed))
