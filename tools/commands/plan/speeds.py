"""Speeds that were measured in a job, and kept in a file: `dilkit plan --calibrate FILE` writes it, `--speeds FILE` takes it.

mpirun -n 4 dilkit plan --calibrate speeds.json --seq 128K --heads 4 --dim 64
dilkit plan --speeds speeds.json --seq 128K --heads 4 --dim 64 --world-size 4
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from dilkit import environment
from dilkit.comm.plan.forecast import Speed
from dilkit.tools.console.arguments import problem_of, set_series
from dilkit.tools.console.quantities import bandwidth, flops
from dilkit.tools.results.file import new_result, read_result, write_result
from dilkit.tools.results.record import Result

if TYPE_CHECKING:
    from dilkit.comm import Comm

BANDWIDTH, FLOPS = "50GB/s", "400T"
"""What is assumed where nothing was measured."""


@dataclass(frozen=True, kw_only=True)
class SpeedsResult(Result):
    """What the slowest of so many ranks can do, measured with a problem; its seconds are of this dtype and these sizes."""

    KIND: ClassVar[str] = "speeds"

    problem: str
    ranks: int
    speed: Speed


def speed_of(args: argparse.Namespace) -> Speed:
    """The speed that the arguments name. Raises ValueError for a file beside numbers, and for one that is no such file."""
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
    from dilkit.tools.measure.rank_speed import rank_speed

    problem = problem_of(args)
    speed = rank_speed(comm, problem)
    if comm.rank == 0:
        write_result(new_result(SpeedsResult, problem.device, problem=str(problem), ranks=comm.size, speed=speed), args.calibrate)
        print(words(speed))
        print(f"wrote {args.calibrate}")
    return 0


def words(speed: Speed) -> str:
    """The speed in one line."""
    rates = f"{speed.bandwidth / 1e9:,.4g} GB/s each way, {speed.flops / 1e12:,.4g} TFLOP/s"
    if not speed.latency:
        return rates
    return f"{rates}, {1e6 * speed.latency:,.4g} us an exchange, backward {speed.backward:.3g} times as long as forward"
