"""Speeds and simulated times of `dilkit plan`: --calibrate, --speeds, --simulate."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from dilkit import environment
from dilkit.comm.plan.forecast import Forecast, Speed
from dilkit.comm.simulation.peers import peers
from dilkit.comm.simulation.simulation import Stragglers, simulate
from dilkit.comm.simulation.topology import Topology
from dilkit.tools.console.arguments import bandwidth, flops, number, problem_of, set_series, whole
from dilkit.tools.console.text import in_seconds
from dilkit.tools.report.document import Table
from dilkit.tools.results.file import new_result, read_result, write_result
from dilkit.tools.results.record import Result

if TYPE_CHECKING:
    from dilkit.comm import Comm

BANDWIDTH, FLOPS = "50GB/s", "400T"
"""Speeds that are assumed where nothing was measured."""


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
        raise ValueError(
            "--calibrate: links are measured between ranks; start it as mpirun -n 4 dilkit plan --calibrate FILE ..."
        )
    if args.seq < started.size:
        raise ValueError(f"--calibrate: {started.size} ranks cannot share out --seq {args.seq}; at least one token each")
    set_series(args)
    from dilkit.comm.launch.ranks import run_ranks

    return run_ranks("torch" if started.launcher == "torchrun" else "mpi", partial(_measure, args=args))


def _measure(comm: Comm, args: argparse.Namespace) -> int:
    from dilkit.tools.measure.rank_times import rank_speed

    problem = problem_of(args)
    speed = rank_speed(comm, problem)
    if comm.rank == 0:
        write_result(new_result(SpeedsResult, problem.device, problem=str(problem), ranks=comm.size, speed=speed), args.calibrate)
        print(words(vars(speed)))
        print(f"wrote {args.calibrate}")
    return 0


def words(speed: Mapping[str, Any]) -> str:
    """Return the fields of a `Speed` in one line."""
    rates = f"{speed['bandwidth'] / 1e9:,.4g} GB/s each way, {speed['flops'] / 1e12:,.4g} TFLOP/s"
    if not speed["latency"]:
        return rates
    return f"{rates}, {1e6 * speed['latency']:,.4g} us an exchange, backward {speed['backward']:.3g} times as long as forward"


OF_SIMULATION = ("ranks_per_host", "hosts_per_pod", "oversubscription", "inside", "stragglers", "slowdown")
MOST_RANKS = 4_096
"""The most ranks that are simulated: a table of all pairs of them takes 128 MiB, and there are several."""
KINDS = ("compute", "within hosts", "ports", "uplinks")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a simulation."""
    group = parser.add_argument_group("simulation")
    group.add_argument(
        "--simulate", action="store_true", help=f"also work out the time event by event, of {MOST_RANKS:,} ranks at most"
    )
    group.add_argument("--ranks-per-host", type=whole(1), metavar="N", help="ranks that are a host (default 1)")
    group.add_argument(
        "--hosts-per-pod", type=whole(1), metavar="N", help="hosts below one uplink (default: all, a flat network)"
    )
    ratio = number("a ratio of at least 1", lambda x: x >= 1)
    more = "what the ranks of a pod could send, over what its uplink carries (default 1)"
    group.add_argument("--oversubscription", type=ratio, metavar="X", help=more)
    group.add_argument("--inside", type=bandwidth, metavar="B", help="between ranks of a host (default: as --bandwidth)")
    group.add_argument("--stragglers", type=whole(0), metavar="N", help="ranks that compute slower than the others (default 0)")
    group.add_argument("--slowdown", type=ratio, metavar="X", help="how many times as long they compute (default 1.5)")


def simulation(args: argparse.Namespace, forecasts: Mapping[str, Forecast], speed: Speed) -> dict[str, Any] | None:
    """Return a forward and a backward pass by each schedule, and seconds of other ways; None without --simulate.

    Raises ValueError for arguments that do not fit.
    """
    chosen = {name: value for name in OF_SIMULATION if (value := getattr(args, name)) is not None}
    if not args.simulate:
        if chosen:
            raise ValueError(f"--{next(iter(chosen)).replace('_', '-')}: it is of a simulation; add --simulate")
        return None
    if args.world_size > MOST_RANKS:
        raise ValueError(f"--world-size {args.world_size:,}: {MOST_RANKS:,} ranks are simulated at most; leave --simulate out")
    if "slowdown" in chosen and not chosen.get("stragglers"):
        raise ValueError("--slowdown: it is that of --stragglers N, of which there are none")
    if "oversubscription" in chosen and "hosts_per_pod" not in chosen:
        raise ValueError("--oversubscription: it is that of the uplinks of pods; add --hosts-per-pod N")
    links = {name: value for name, value in chosen.items() if name not in ("stragglers", "slowdown")}
    topology = Topology(speed.bandwidth, **links)
    stragglers = Stragglers(chosen.get("stragglers", 0), chosen.get("slowdown", Stragglers.slowdown))
    schedules = {}
    for name, forecast in forecasts.items():
        one = simulate(forecast, topology, stragglers)
        schedules[name] = dict(seconds=one.seconds, waiting=one.waiting, bottleneck=one.bottleneck, busy_seconds=one.busy)
    others = peers(next(iter(forecasts.values())), topology) if forecasts else {}
    seconds = {name: peer.seconds for name, peer in others.items()}
    return dict(topology=vars(topology), stragglers=vars(stragglers), schedules=schedules, peers=seconds)


def table(simulated: Mapping[str, Any]) -> Table:
    """Return the table of a simulation: a column for each schedule and each other way."""
    schedules, others = simulated["schedules"].values(), simulated["peers"]
    names, no_more = ("", *simulated["schedules"], *others), ("",) * len(others)
    rows = [("time", *(in_seconds(one["seconds"]) for one in schedules), *map(in_seconds, others.values()))]
    rows.append(("share of it that ranks wait", *(f"{one['waiting']:.1%}" for one in schedules), *no_more))
    for kind in KINDS:
        if any(kind in one["busy_seconds"] for one in schedules):
            busy = (in_seconds(one["busy_seconds"].get(kind, 0.0)) for one in schedules)
            rows.append((f"busiest of {kind}", *busy, *no_more))
    rows.append(("longest at work", *(one["bottleneck"] for one in schedules), *no_more))
    topology, slow = simulated["topology"], simulated["stragglers"]
    ranks, pods, inside = (topology[name] for name in ("ranks_per_host", "hosts_per_pod", "inside"))
    note = f"hosts of {ranks}"
    if ranks > 1:
        note += f", {(topology['bandwidth'] if inside is None else inside) / 1e9:,.4g} GB/s within"
    note += ", one pod" if pods is None else f", pods of {pods} hosts"
    if pods is not None:
        note += f", uplinks of 1/{topology['oversubscription']:g} of their ports"
    if slow["count"]:
        note += f"; {slow['count']:,} ranks compute {slow['slowdown']:g} times as long"
    return Table("simulated: forward and backward, event by event", names, tuple(rows), note)
