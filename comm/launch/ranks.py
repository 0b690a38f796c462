"""The ranks of a command or a script: how each gets its transport, and how all end when one of them fails.

`work` prints and writes on rank 0 alone (`comm.rank == 0`); what other processes print on stdout is dropped. An exception that
leaves `work` is shown once, marked with its rank, and ends the job on all ranks with a code that is not 0.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dilkit import environment
from dilkit.comm.transports.base import Comm
from dilkit.comm.transports.errors import PlanMismatch, print_error
from dilkit.comm.transports.threads import run_threads
from dilkit.threads import torch_threads, usable_cores

FAILED = 1
"""The exit code of a rank that raised."""
_TURN = 1.5
"""Seconds by which other ranks let rank 0 speak first about input that does not fit: all ranks have the same, and its word ends
the job."""

Work = Callable[[Comm], int]


def run_ranks(kind: str, work: Work, *, world_size: int = 1, timeout: float = 300.0) -> int:
    """Run `work(comm)` on every rank; return the exit code of the first rank whose is not 0.

    The ranks are those of mpirun for `kind` "mpi", those of torchrun for "torch", or, for "threads", `world_size` threads of this
    process. A rank waits `timeout` seconds for another. Torch computes with as many threads a rank as there are cores for each,
    unless `OMP_NUM_THREADS` says how many.

    >>> run_ranks("threads", lambda comm: comm.rank, world_size=3)
    1
    """
    if kind == "threads":
        with _share_of_cores(world_size):
            return _worst(run_threads(world_size, work, timeout=timeout))
    comm = connect(kind, timeout)
    with _share_of_cores(_ranks_beside(comm)):
        code = work(comm) if comm.size == 1 else _in_process(kind, comm, work)
    if kind == "torch":
        dist.destroy_process_group()
    return code


def connect(kind: str, timeout: float) -> Comm:
    """Make the transport of this process: "mpi", or "torch" (gloo, and NCCL if each rank of the host has a GPU of its own)."""
    from dilkit.comm import MPIComm, TorchComm

    if kind == "mpi":
        return MPIComm(timeout=timeout)
    started = environment.launch()
    with_gpus = started is not None and torch.cuda.is_available() and torch.cuda.device_count() >= started.local_size
    if started is not None and with_gpus:
        torch.cuda.set_device(started.local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if with_gpus else "gloo", timeout=timedelta(seconds=timeout))
    return TorchComm(timeout=timeout)


def _in_process(kind: str, comm: Comm, work: Work) -> int:
    try:
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere if comm.rank else sys.stdout):
            code = work(comm)
        return _worst([int(shared) for shared in comm.share(str(code).encode(), "exit codes")])
    except BaseException as error:  # SystemExit too: the others would wait for this rank
        if comm.rank and isinstance(error, (ValueError, TypeError)) and not isinstance(error, PlanMismatch):
            time.sleep(_TURN)
        if kind != "mpi":  # whose `abort` shows the error itself: it ends this process
            print_error(error, comm.rank)
        comm.abort(error)
        return FAILED


def _worst(codes: Sequence[int]) -> int:
    return next((code for code in codes if code), 0)


def _share_of_cores(ranks: int) -> contextlib.AbstractContextManager[int]:
    """Within the block, torch computes with this process's cores divided by `ranks`."""
    return torch_threads(torch.get_num_threads() if environment.threads_are_set() else max(1, usable_cores() // ranks))


def _ranks_beside(comm: Comm) -> int:
    """Count the ranks that compute on the cores of this one, itself included: mpirun may bind each to its own cores."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
    mine = platform.node(), sum(1 << core for core in cores)
    shared = comm.share(f"{mine[0]} {mine[1]:x}".encode(), "hosts and cores")
    return _sharing(mine, [(host, int(cores, 16)) for host, cores in (record.decode().split(" ") for record in shared)])


def _sharing(mine: tuple[str, int], all_ranks: Sequence[tuple[str, int]]) -> int:
    return sum(host == mine[0] and bool(cores & mine[1]) for host, cores in all_ranks)
