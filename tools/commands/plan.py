"""`dilkit plan`: work, memory and traffic of a call, worked out without running it; speeds of a job, measured for it."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dilkit import environment
from dilkit.comm import Rows, exchange_plan, shard_cuts
from dilkit.comm.plan.exchange_plan import KEEPS, SCHEDULES
from dilkit.comm.plan.explain import branch_facts, explanation
from dilkit.comm.plan.forecast import Forecast, Numbers, Speed, baselines
from dilkit.comm.simulation.delivery import Topology
from dilkit.comm.simulation.simulation import Stragglers, peers, simulate
from dilkit.pattern import Pattern
from dilkit.problem import DTYPE_BYTES, Problem
from dilkit.selector import explain
from dilkit.tools.console import arguments
from dilkit.tools.console.arguments import bandwidth, flops, number, pattern_of, problem_of, set_series, whole
from dilkit.tools.console.text import aligned, in_bytes, in_seconds, in_thousands, print_json, wrapped
from dilkit.tools.results.environment import Result
from dilkit.tools.results.file import new_result, read_result, write_result

if TYPE_CHECKING:
    from dilkit.comm import Comm

ALL = "all"
CALL = ("seq", "heads", "kv_heads", "head_dim", "dtype", "batch", "is_causal", "key_padding_mask")
MOST_ENTRIES = 2**21
"""The most ranks x key/value heads x branches that are planned: beyond that it takes more than a minute, and gigabytes."""
MOST_RANKS = 4_096
"""The most ranks that are simulated: a table of all pairs of them takes 128 MiB, and there are several."""
BANDWIDTH, FLOPS = "50GB/s", "400T"
"""Speeds that are assumed where nothing was measured."""
LINKS = ("ranks_per_host", "hosts_per_pod", "oversubscription", "inside")
HELP = """\
say what a call would compute and hold, who computes it, and what it moves over ranks, without running it

FLOPs and bytes are those of one call on one device, that of --assume or this CPU, and of `ring_dilated_attention` over the ranks.
Times are a model: FLOPs at --flops, bytes at --bandwidth, or both as measured (--speeds); the slowest rank is shown. --json has
pairs and FLOPs by branch, memory by kind, and what each rank sends, computes and holds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    seq_help = "tokens, as 1e9 or 64K (default %(default)s)"
    arguments.add_pattern_arguments(parser, seq=2**20, heads=32, segments=None, seq_help=seq_help)
    arguments.add_call_arguments(parser, dim=128, dtype="bfloat16", train=False)
    assume = "the device, a GPU that need not be here, or cpu"
    parser.add_argument("--assume", type=arguments.assumed_device, metavar="sm_80", help=assume)
    add = parser.add_argument_group("job").add_argument
    schedules = "how branches are computed over ranks (default %(default)s)"
    keep = "what is kept of received rows for the backward pass; nothing: they are sent again (default %(default)s)"
    add("--ranks", "--world-size", dest="world_size", type=whole(1), default=8, metavar="P", help="ranks (default %(default)s)")
    add("--schedule", choices=(*SCHEDULES, ALL), default=ALL, help=schedules)
    add("--keep", choices=KEEPS, default=KEEPS[0], help=keep)
    add("--bandwidth", type=bandwidth, metavar="B", help=f"of a rank, each way, as 400Gbit/s (default {BANDWIDTH})")
    add("--flops", type=flops, metavar="F", help=f"operations a second of a rank (default {FLOPS})")
    add("--speeds", type=Path, metavar="FILE", help="take both, and more, from a file that --calibrate wrote")
    calibrated = "in a job of mpirun or torchrun: measure links and kernel, write them into FILE, plan nothing"
    add("--calibrate", type=Path, metavar="FILE", help=calibrated)
    add = parser.add_argument_group("simulation").add_argument
    ratio = number("a ratio of at least 1", lambda x: x >= 1)
    more = "what the ranks of a pod could send, over what its uplink carries (default 1)"
    add("--simulate", action="store_true", help=f"also work out the time event by event, of {MOST_RANKS:,} ranks at most")
    add("--ranks-per-host", type=whole(1), metavar="N", help="ranks that are a host (default 1)")
    add("--hosts-per-pod", type=whole(1), metavar="N", help="hosts below one uplink (default: all, a flat network)")
    add("--oversubscription", type=ratio, metavar="X", help=more)
    add("--inside", type=bandwidth, metavar="B", help="between ranks of a host (default: as --bandwidth)")
    slow = f"ranks that compute {Stragglers.slowdown:g} times slower than the others (default 0)"
    add("--stragglers", type=whole(0), metavar="N", help=slow)


def run(args: argparse.Namespace) -> int:
    if args.calibrate:
        return calibrate(args)
    report = collect(args)
    if args.json:
        print_json("plan", report)
    else:
        print(*(part for line in lines(report) for part in wrapped("", line)), sep="\n")
    return 0


def collect(args: argparse.Namespace) -> dict[str, Any]:
    """Return the whole report as plain data. Raises ValueError naming the argument that does not fit."""
    if args.seq < args.world_size:
        raise ValueError(f"--ranks: {args.world_size} ranks cannot share out --seq {args.seq}; at least one token each")
    set_series(args)
    pattern, rows, speed = pattern_of(args), Rows(args.dim, args.dtype, args.batch, args.mask), speed_of(args)
    kv_heads, branches = args.kv_heads or args.heads, len(pattern.branches)
    if args.world_size * kv_heads * branches > MOST_ENTRIES:
        raise ValueError(
            f"--ranks {args.world_size:,} with {kv_heads:,} key/value heads and {branches:,} branches is too large a plan; "
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
    routes = Counter(route.kind for route in forecasts["auto"].plan.routes) if "auto" in forecasts else {}
    report = dict(
        problem=dict(pattern=str(pattern), world_size=args.world_size, **{name: getattr(problem, name) for name in CALL}),
        call=_call(problem),
        **vars(speed),
        schedules={name: _schedule(one) for name, one in forecasts.items()},
        refused=refused,
        baselines={name: dict(forward_bytes=count, seconds=count / speed.bandwidth) for name, count in sent.items()},
        choice="auto: " * bool(routes) + ", ".join(f"{count} {kind}" for kind, count in routes.items()),
    )
    simulated = simulation(args, forecasts, speed)
    return report if simulated is None else report | dict(simulated=simulated)


def _call(problem: Problem) -> dict[str, Any]:

    branches, pair = [], 4 * problem.head_dim
    for branch in problem.pattern.branches:
        alone = replace(problem, pattern=problem.pattern.with_branches(branch, overlap="count", tail="exact")).flops()
        branches.append(dict(kind=branch.kind, text=str(branch), pairs=alone // pair, flops=alone))
    tokens, row = problem.batch * problem.seq, problem.head_dim * DTYPE_BYTES[problem.dtype]
    lse = 8 if problem.dtype == "float64" else 4
    memory = dict(
        inputs=tokens * (row * (problem.heads + 2 * problem.kv_heads) + problem.key_padding_mask),
        results=tokens * problem.heads * (row + lse),
        gradients=tokens * row * (2 * problem.heads + 2 * problem.kv_heads),
    )
    memory |= dict(total=sum(memory.values()))
    dense = replace(problem, pattern=Pattern.dense()).flops() // pair
    facts = dict(branches=branches, flops=problem.flops(), dense_pairs=dense, memory_bytes=memory)
    return explain(problem).to_dict() | facts


def _schedule(one: Forecast) -> dict[str, Any]:
    sent, work = {phase: traffic.sent for phase, traffic in one.traffic.items()}, one.flops["total"]
    by_rank = {**{f"{phase}_bytes": counts for phase, counts in sent.items()}, "flops": work}
    by_rank |= {"exchange_bytes": one.memory["exchange buffers"], "kept_bytes": one.kept}
    return dict(
        explanation=explanation(one.plan, one.rows).split("\n"),
        branches=branch_facts(one.plan, one.rows),
        sent_bytes={phase: _spread(counts) for phase, counts in sent.items()},
        flops=_spread(work) | dict(balance=one.balance),
        memory_bytes={name: _spread(counts) for name, counts in one.memory.items()},
        kept_bytes=_spread(one.kept),
        seconds={name: float(by_name[one.slowest]) for name, by_name in one.seconds.items()},
        by_rank={name: counts.tolist() for name, counts in by_rank.items()},
    )


def _spread(counts: Numbers) -> dict[str, float]:
    return dict(min=int(counts.min()), mean=float(counts.sum() / len(counts)), max=int(counts.max()))


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the answer in at most eight lines; then the schedules, and the way of each branch."""
    call, schedules, size = report["call"], report["schedules"], report["problem"]["world_size"]
    picked = call["picked"] or "no backend (`dilkit info` says why)"
    share = call["flops"] / max(1, 4 * report["problem"]["head_dim"] * call["dense_pairs"])
    held, simulated = in_bytes(call["memory_bytes"]["total"]), report.get("simulated")
    yield call["problem"]
    yield f"on {call['device']} alone: {picked} computes it; {held} with gradients"
    yield f"forward {in_thousands(call['flops'] / 1e9)} GFLOP, {share:.3g} of those of dense attention"
    header, rows = ["schedule", "time", "sent forward", "backward", "memory", "kept"], list[tuple[str, ...]]()
    for name, one in schedules.items():
        seconds, counts = one["seconds"], (*one["sent_bytes"].values(), one["memory_bytes"]["total"], one["kept_bytes"])
        rows.append((name, in_seconds(seconds["overlapped"]), *(in_bytes(count["max"]) for count in counts)))
        if len(rows) == 1:
            limit = "sending" if seconds["communication"] > seconds["compute"] else "work"
            alone = f"work alone {in_seconds(seconds['compute'])}, sending alone {in_seconds(seconds['communication'])}"
            yield f"on {size:,} ranks, {words(report)}, schedule {name}:"
            yield f"forward and backward in {rows[0][1]} ({alone}): {limit} limits it"
            yield "the busiest rank sends {} forward, {} backward, and holds {}".format(*rows[0][2:5])
            elsewhere = (f"{peer.replace('_', ' ')} {in_bytes(x['forward_bytes'])}" for peer, x in report["baselines"].items())
            yield f"forward elsewhere: {', '.join(elsewhere)}"
    if report["choice"]:
        yield report["choice"]
    if simulated:
        header += ["simulated", "waiting", "longest at work"]
        more = {k: (in_seconds(x["seconds"]), f"{x['waiting']:.1%}", x["bottleneck"]) for k, x in simulated["schedules"].items()}
        rows = [(*row, *more[row[0]]) for row in rows]
        rows += [(peer, *"-----", in_seconds(seconds), "-", "-") for peer, seconds in simulated["peers"].items()]
    yield from ("", *(f"  {line}" for line in aligned([header, *rows])), "") if rows else ()
    yield from next(iter(schedules.values()), {"explanation": ()})["explanation"]
    refused: dict[str, list[str]] = {}
    for name, why in report["refused"].items():
        refused.setdefault(why.replace(f"schedule={name!r} is", "they are"), []).append(name)
    yield from (f"refused: {', '.join(names)}: {why}" for why, names in refused.items())


@dataclass(frozen=True, kw_only=True)
class SpeedsResult(Result):
    """The speed of the slowest of so many ranks, measured with a problem; its seconds are of this dtype and these sizes."""

    KIND: ClassVar[str] = "speeds"

    problem: str
    ranks: int
    speed: Speed


def speed_of(args: argparse.Namespace) -> Speed:
    """Return the speed that the arguments name. Raises ValueError for a file beside numbers, and for one that is no such file."""
    if args.speeds is None:
        return Speed(args.bandwidth or bandwidth(BANDWIDTH), args.flops or flops(FLOPS))
    for name in ("bandwidth", "flops"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name}: does not go with --speeds, which says it; leave one of them out")
    return read_result(args.speeds, SpeedsResult).speed


def calibrate(args: argparse.Namespace) -> int:
    """Measure on all ranks of the job and write the file; the exit code. Raises ValueError where there is no job."""
    started = environment.launch()
    if started is None or started.size == 1:
        raise ValueError("--calibrate: links are measured between ranks; start it as mpirun -n 4 dilkit plan --calibrate FILE")
    if args.seq < started.size:
        raise ValueError(f"--calibrate: {started.size} ranks cannot share out --seq {args.seq}; at least one token each")
    set_series(args)
    from dilkit.comm.launch.ranks import run_ranks
    from dilkit.tools.measure.rank_times import rank_speed

    def measure(comm: Comm) -> int:
        problem = problem_of(args)
        if comm.rank == 0:
            print("measures the links and the kernel: some minutes", file=sys.stderr)
        speed = rank_speed(comm, problem)
        if comm.rank == 0:
            result = new_result(SpeedsResult, problem.device, problem=str(problem), ranks=comm.size, speed=speed)
            write_result(result, args.calibrate)
            print(words(vars(speed)), f"wrote {args.calibrate}", sep="\n")
        return 0

    return run_ranks("torch" if started.launcher == "torchrun" else "mpi", measure)


def words(speed: Mapping[str, Any]) -> str:
    rates = f"{speed['bandwidth'] / 1e9:,.4g} GB/s each way, {speed['flops'] / 1e12:,.4g} TFLOP/s"
    if not speed["latency"]:
        return rates
    return f"{rates}, {1e6 * speed['latency']:,.4g} us an exchange, backward {speed['backward']:.3g} times as long as forward"


def simulation(args: argparse.Namespace, forecasts: Mapping[str, Forecast], speed: Speed) -> dict[str, Any] | None:
    """Return a forward and a backward pass by each schedule, and seconds of other ways; None without --simulate.

    Raises ValueError for arguments that do not fit.
    """
    chosen = {name: value for name in (*LINKS, "stragglers") if (value := getattr(args, name)) is not None}
    if not args.simulate:
        if chosen:
            raise ValueError(f"--{next(iter(chosen)).replace('_', '-')}: needs a simulation; add --simulate")
        return None
    if args.world_size > MOST_RANKS:
        raise ValueError(f"--ranks {args.world_size:,}: {MOST_RANKS:,} ranks are simulated at most; leave --simulate out")
    if "oversubscription" in chosen and "hosts_per_pod" not in chosen:
        raise ValueError("--oversubscription: needs pods; add --hosts-per-pod N")
    topology = Topology(speed.bandwidth, **{name: chosen[name] for name in LINKS if name in chosen})
    stragglers = Stragglers(args.stragglers or 0)
    schedules = {}
    for name, forecast in forecasts.items():
        one = simulate(forecast, topology, stragglers)
        schedules[name] = dict(seconds=one.seconds, waiting=one.waiting, bottleneck=one.bottleneck, busy_seconds=one.busy)
    others = peers(next(iter(forecasts.values())), topology) if forecasts else {}
    seconds = {name: peer.seconds for name, peer in others.items()}
    return dict(topology=vars(topology), stragglers=vars(stragglers), schedules=schedules, peers=seconds)
