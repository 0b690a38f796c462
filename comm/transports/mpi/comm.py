"""`MPIComm`: the ranks of an MPI job as a transport."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from dilkit.comm.transports.base import DEFAULT_TIMEOUT, Comm, PeerBytes, staged
from dilkit.comm.transports.errors import CommError, CommTimeout, print_error, report_uncaught
from dilkit.comm.transports.mpi.requests import MPIExchange, cuda_aware, mpi, poll, unfinished_exchanges


class MPIComm(Comm):
    """The ranks of an mpi4py intracommunicator, by default of `MPI.COMM_WORLD`. `timeout` is in seconds.

    All ranks of the communicator make theirs: it is duplicated. It works under `mpirun` with plain `python`: from then on an
    exception that nobody catches is printed, marked with the rank in `MPI.COMM_WORLD`, and ends the job; so does a rank that
    ends, by `sys.exit` too, while others send to it. CUDA tensors go through host memory unless the MPI library is CUDA-aware.

    Raises ImportError without mpi4py or an MPI library, TypeError for other communicators, `CommTimeout` if ranks do not join.

        >>> import subprocess, sys
        >>> program = "from dilkit.comm import MPIComm; comm = MPIComm(timeout=60.0); print(f'rank {comm.rank} of {comm.size}')"
        >>> print(subprocess.check_output([sys.executable, "-c", program], text=True).strip())
        rank 0 of 1

    Without `mpirun`, as here, the process is a job of one rank; `mpirun -n 4 python -c "$program"` prints four lines.
    """

    def __init__(self, communicator: Any = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        parent = mpi().COMM_WORLD if communicator is None else communicator
        if not isinstance(parent, mpi().Intracomm) or parent == mpi().COMM_NULL:
            raise TypeError(
                f"communicator={communicator!r} is no intracommunicator of mpi4py that this rank is in; give MPI.COMM_WORLD, "
                "what Split returned for this rank, or None"
            )
        super().__init__(parent.Get_rank(), parent.Get_size(), timeout)
        if self.size > 1:
            end_job_on_failure()
        self._comm = self._duplicate(parent)
        if self.size > 1:
            leave_together(self._comm, timeout)

    def abort(self, why: BaseException) -> None:
        """Show `why`, marked with this rank, and end all processes of the job, this one too."""
        print_error(why, mpi().COMM_WORLD.Get_rank())
        end_job()

    def _duplicate(self, given: Any) -> Any:
        duplicate, request = given.Idup()
        if not poll(lambda: not request.Test(), self.timeout):
            raise CommTimeout(
                f"not all of the {self.size} ranks have made their MPIComm within {self.timeout:g} s", step="MPIComm"
            )
        duplicate.Set_errhandler(mpi().ERRORS_RETURN)
        return duplicate

    def _post(self, send: PeerBytes, recv: PeerBytes, device: torch.device, number: int, step: str) -> Callable[[], None]:
        def post(send: PeerBytes, recv: PeerBytes) -> Callable[[], None]:
            exchange = MPIExchange(self._comm, number, step)
            exchange.post(send, recv)
            return lambda: exchange.wait(self.timeout)

        if not self._reads(device):
            return staged(post, send, recv, device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # MPI knows nothing of streams
        return post(send, recv)

    def _reads(self, device: torch.device) -> bool:
        return device.type == "cpu" or (device.type == "cuda" and cuda_aware())


TURN_SECONDS = 0.3
LAST_TURN_SECONDS = 1.0
FORWARDING_SECONDS = 0.2
"""Output that a launcher has not passed on when a rank asks for the end may never be seen: MPICH's drops it at times."""

_communicators: list[tuple[Any, float]] = []


def end_job_on_failure() -> None:
    """Make every later uncaught exception end the job."""
    report_uncaught(mpi().COMM_WORLD.Get_rank(), _end_job_in_turn)
    here = threading.current_thread() is threading.main_thread()  # others cannot say what signals do
    if here and "MPICH" in mpi().Get_library_version() and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        # With -disable-auto-cleanup, MPICH's mpirun signals the death of a rank to the others, which would end them too. Ranks
        # that live on say in which step they miss whom.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def leave_together(comm: Any, timeout: float) -> None:
    """At exit, before mpi4py ends MPI, wait for the end of the other ranks of `comm`, `timeout` seconds at most.

    `sys.exit` calls no hook for exceptions, and MPI ends on all ranks or on none: those that wait for this one would wait on.
    """
    _communicators.append((comm, timeout))
    atexit.unregister(_leave)
    atexit.register(_leave)


def end_job() -> None:
    time.sleep(FORWARDING_SECONDS)
    mpi().COMM_WORLD.Abort(1)
    os._exit(1)  # MPICH's Abort asks the launcher to end the job, and may return before that happens


def _end_job_in_turn(error: BaseException) -> None:
    """End the job rank by rank: if several ranks miss the same one and ask at once, Open MPI's launcher can hang."""
    if isinstance(error, CommError):
        time.sleep(min(TURN_SECONDS * mpi().COMM_WORLD.Get_rank(), LAST_TURN_SECONDS))
    end_job()


def _leave() -> None:
    if mpi().Is_finalized():
        return
    if left := unfinished_exchanges():
        names = ", ".join(exchange.where for exchange in left)
        _end_job_with(f"ends with messages under way: {names}")
    with contextlib.suppress(mpi().Exception):  # of a communicator that has lost a rank: the others have noticed
        barriers = [(comm, comm.Ibarrier()) for comm, _ in _communicators]
        poll(lambda: sum(_goes_on(*one) for one in barriers), max(timeout for _, timeout in _communicators))


def _goes_on(comm: Any, barrier: Any) -> bool:
    """True if a rank of `comm` has not come to its end. Ends the job if one waits for this rank."""
    if comm.Iprobe(mpi().ANY_SOURCE, mpi().ANY_TAG, status := mpi().Status()):
        waiting = f"rank {status.Get_source()} waits for it in exchange {status.Get_tag()}"
        _end_job_with(f"PeerLost: rank {comm.Get_rank()} has ended, by sys.exit or with its program, and {waiting}")
    return not barrier.Test()


def _end_job_with(line: str) -> None:
    print(f"[rank {mpi().COMM_WORLD.Get_rank()}] {line}", file=sys.stderr, flush=True)
    end_job()
