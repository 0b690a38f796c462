"""The ranks of a command: `--comm mpi|torch|threads`, `--world-size N`, `--timeout S`.

    job.add_arguments(parser)              # adds the three; `args.comm` is None where the command runs alone
    job.check(args)                        # raises ValueError for what does not fit together, before anything is started
    code = job.run(args, work)             # work(comm) -> int on every rank; the largest result is everybody's exit code

`work` prints and writes on rank 0 alone (`comm.rank == 0`); what other processes print on stdout is dropped. An exception that
leaves `work` is shown once, marked with its rank, and ends the job on all ranks with a code that is not 0.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import platform
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dilkit import environment
from dilkit.tools.console.arguments import whole

if TYPE_CHECKING:
    from dilkit.comm import Comm

KINDS = ("mpi", "torch", "threads")
TIMEOUT = 300.0
FAILED = 1
_TURN = 1.5
"""Seconds by which other ranks let rank 0 speak first about input that does not fit: all ranks have the same, and its word ends
the job."""

Work = Callable[["Comm"], int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --comm, --world-size, --timeout."""
    group = parser.add_argument_group("ranks")
    group.add_argument(
        "--comm",
        choices=KINDS,
        help="run over ranks: those of mpirun, those of torchrun, or threads of this process (default: no ranks)",
    )
    group.add_argument("--world-size", type=whole(1), metavar="P", help="how many ranks, with --comm threads")
    group.add_argument(
        "--timeout", type=_seconds, metavar="S", help=f"seconds that a rank waits for another (default {TIMEOUT:g})"
    )


def check(args: Namespace) -> None:
    """Raise ValueError where the three arguments do not fit together, or not what started this process."""
    started, size = environment.launch(), args.world_size
    if args.comm is None:
        for name, value in (("world-size", size), ("timeout", args.timeout)):
            if value is not None:
                raise ValueError(f"--{name}: goes with --comm alone; say which ranks, as in --comm threads --world-size 4")
        if started is not None and started.size > 1:
            kind = "torch" if started.launcher == "torchrun" else "mpi"
            raise ValueError(
                f"--comm: {started.launcher} started {started.size} processes, which would all do the same; add --comm {kind}"
            )
    elif args.comm == "threads":
        if size is None:
            raise ValueError("--comm threads: how many? add --world-size, as in --comm threads --world-size 4")
        if started is not None and started.size > 1:
            raise ValueError(f"--comm threads: makes ranks in one process; start it without {started.launcher}")
    else:
        _check_processes(args.comm, size, started)


def _check_processes(comm: str, size: int | None, started: environment.Launch | None) -> None:
    launcher = "torchrun" if comm == "torch" else "mpirun"
    if comm == "torch" and (started is None or started.launcher != launcher):
        raise ValueError("--comm torch: not started by torchrun; run torchrun --nproc-per-node 4 -m dilkit ...")
    if started is not None and started.launcher != launcher and started.size > 1:
        raise ValueError(f"--comm {comm}: started by {started.launcher}; start it by {launcher}, or choose another --comm")
    there = 1 if started is None else started.size
    if size not in (None, there):
        raise ValueError(f"--world-size: {size}, but there are {there} ranks; {launcher} decides on them, leave it out")


def run(args: Namespace, work: Work) -> int:
    """`work(comm)` on every rank; the exit code. Raises what `check` does, and what `work` does if this process has all ranks.

    Torch computes with as many threads a rank as there are cores for each, unless `OMP_NUM_THREADS` says how many.
    """
    check(args)
    timeout = args.timeout or TIMEOUT
    if args.comm == "threads":
        return _in_threads(args.world_size, work, timeout)
    comm = connect(args.comm, timeout)
    with _threads_shared(_ranks_beside(comm)):
        if comm.size == 1:
            return work(comm)
        code = _in_process(comm, work)
    _disconnect(args.comm)
    return code


def connect(kind: str, timeout: float) -> Comm:
    """The transport of this process: "mpi", or "torch" (gloo, and NCCL where each rank of the host has a GPU of its own)."""
    from dilkit.comm import MPIComm, TorchComm

    if kind == "mpi":
        return MPIComm(timeout=timeout)
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    started = environment.launch()
    with_gpus = started is not None and torch.cuda.is_available() and torch.cuda.device_count() >= started.local_size
    if started is not None and with_gpus:
        torch.cuda.set_device(started.local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if with_gpus else "gloo", timeout=timedelta(seconds=timeout))
    return TorchComm(timeout=timeout)


def _disconnect(kind: str) -> None:
    if kind == "torch":
        import torch.distributed as dist

        dist.destroy_process_group()


def _in_threads(size: int, work: Work, timeout: float) -> int:
    from dilkit.comm import run_threads

    with _threads_shared(size):
        return max(run_threads(size, work, timeout=timeout))


def _in_process(comm: Comm, work: Work) -> int:
    """One of several processes: an error here ends them all."""
    from dilkit.comm import PlanMismatch
    from dilkit.comm.transports.rank_errors import print_error

    try:
        with _quiet(comm.rank > 0):
            code = work(comm)
        return max(int(shared) for shared in comm.share(str(code).encode(), "exit codes"))
    except Exception as error:
        if comm.rank and isinstance(error, (ValueError, TypeError)) and not isinstance(error, PlanMismatch):
            time.sleep(_TURN)
        if not _shows_itself(comm):
            print_error(error, comm.rank)
        comm.abort(error)
        return FAILED


def _shows_itself(comm: Comm) -> bool:
    """Whether `abort` shows the error: MPI's does, for it ends this process."""
    from dilkit.comm import MPIComm

    return isinstance(comm, MPIComm)


@contextlib.contextmanager
def _quiet(really: bool) -> Iterator[None]:
    if not really:
        yield
        return
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


@contextlib.contextmanager
def _threads_shared(sharing: int) -> Iterator[None]:
    """Within the block, torch computes with a share of this process's cores, those being shared by so many ranks."""
    import torch

    from dilkit.tools.results.environment import usable_cores

    before = torch.get_num_threads()
    if not environment.threads_are_set():
        torch.set_num_threads(max(1, usable_cores() // sharing))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _ranks_beside(comm: Comm) -> int:
    """How many ranks compute on the cores of this one, itself included: mpirun may bind each to cores of its own."""
    if not hasattr(os, "sched_getaffinity"):
        places = [shared.decode() for shared in comm.share(platform.node().encode(), "hosts")]
        return places.count(platform.node())
    mine = platform.node(), sum(1 << core for core in os.sched_getaffinity(0))
    shared = comm.share(f"{mine[0]} {mine[1]:x}".encode(), "hosts and cores")
    return _sharing(mine, [(host, int(cores, 16)) for host, cores in (record.decode().split(" ") for record in shared)])


def _sharing(mine: tuple[str, int], all_ranks: Sequence[tuple[str, int]]) -> int:
    return sum(host == mine[0] and bool(cores & mine[1]) for host, cores in all_ranks)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return number
