"""Ranks of an MPI job, by mpi4py."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from dilkit.comm.transports import staging
from dilkit.comm.transports.base import DEFAULT_TIMEOUT, Comm, CommError, CommTimeout, Parts
from dilkit.comm.transports.flight import Flight, poll, unfinished
from dilkit.comm.transports.mpi_library import cuda_aware, mpi
from dilkit.comm.transports.uncaught import show, show_uncaught

TURN_SECONDS = 0.3
LAST_TURN_SECONDS = 1.0
FORWARDING_SECONDS = 0.2
"""What a launcher has not passed on when a rank asks for the end may never be seen: MPICH's drops it at times."""


class MPIComm(Comm):
    """The ranks of an mpi4py intracommunicator, by default of `MPI.COMM_WORLD`. All of them make theirs: it is duplicated.

    Works under `mpirun` with plain `python`: from now on an exception that nobody catches is shown, marked with the rank in
    `MPI.COMM_WORLD`, and ends the job. CUDA tensors go through host memory unless the MPI library says that it is CUDA-aware.
    Raises ImportError without mpi4py or an MPI library, TypeError for other communicators, `CommTimeout` if ranks do not join.
    """

    def __init__(self, communicator: Any = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        given = mpi().COMM_WORLD if communicator is None else communicator
        if not isinstance(given, mpi().Intracomm) or given == mpi().COMM_NULL:
            raise TypeError(
                f"communicator={communicator!r} is no intracommunicator of mpi4py that this rank is in; give MPI.COMM_WORLD, "
                "what Split returned for this rank, or None"
            )
        super().__init__(given.Get_rank(), given.Get_size(), timeout)
        if self.size > 1:
            _never_leave_others_waiting()
        self._comm = self._duplicate(given)

    def abort(self, why: BaseException) -> None:
        """Show `why`, marked with this rank, and end all processes of the job, this one too."""
        show(why, mpi().COMM_WORLD.Get_rank())
        _end_job()

    def _duplicate(self, given: Any) -> Any:
        own, request = given.Idup()
        if not poll(lambda: not request.Test(), self.timeout):
            raise CommTimeout(
                f"not all of the {self.size} ranks have made their MPIComm within {self.timeout:g} s", step="MPIComm"
            )
        own.Set_errhandler(mpi().ERRORS_RETURN)
        return own

    def _post(self, send: Parts, recv: Parts, device: torch.device, number: int, step: str) -> Callable[[], None]:
        flight = Flight(self._comm, number, step)
        if not self._reads(device):
            staged = staging.incoming(recv)
            flight.post(staging.outgoing(send, device), staged)

            def finish() -> None:
                flight.land(self.timeout)
                staging.deliver(staged, recv)

            return finish
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # MPI knows nothing of streams
        flight.post(send, recv)
        return lambda: flight.land(self.timeout)

    def _reads(self, device: torch.device) -> bool:
        """Whether MPI can be given the memory of tensors on `device`."""
        return device.type == "cpu" or (device.type == "cuda" and cuda_aware())


def _never_leave_others_waiting() -> None:
    show_uncaught(mpi().COMM_WORLD.Get_rank(), _end_job_in_turn)
    atexit.unregister(_end_job_if_unfinished)
    atexit.register(_end_job_if_unfinished)
    here = threading.current_thread() is threading.main_thread()  # others cannot say what signals do
    if here and "MPICH" in mpi().Get_library_version() and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        # With -disable-auto-cleanup, MPICH's mpirun tells ranks of another's death by a signal that ends who does not expect it.
        # Ranks that live on say in which step they miss whom.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _end_job_in_turn(error: BaseException) -> None:
    """Ranks that miss the same one notice it together. Open MPI's launcher can hang if they then all ask for the end at once."""
    if isinstance(error, CommError):
        time.sleep(min(TURN_SECONDS * mpi().COMM_WORLD.Get_rank(), LAST_TURN_SECONDS))
    _end_job()


def _end_job() -> None:
    time.sleep(FORWARDING_SECONDS)
    mpi().COMM_WORLD.Abort(1)
    os._exit(1)  # MPICH's Abort asks the launcher to end the job, and may return before that happens


def _end_job_if_unfinished() -> None:
    """At exit, before mpi4py ends MPI: that would wait for messages which, after an error, may never come."""
    if left := unfinished():
        names = ", ".join(flight.where for flight in left)
        print(f"[rank {mpi().COMM_WORLD.Get_rank()}] ends with messages under way: {names}", file=sys.stderr, flush=True)
        _end_job()
