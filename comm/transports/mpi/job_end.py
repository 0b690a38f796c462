"""How a rank ends an MPI job: at once where it fails, and in the end only together with the ranks that may wait for it.

    exception that nobody catches --> printed, marked with the rank --+
    end with messages under way   --> a line that names them ---------+--> Abort
    end while another rank sends  --> a line that names both ---------+
    end of all ranks              --> mpi4py ends MPI

What ends without a word, as by `os._exit` or a signal, the launcher notices.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from typing import Any

from dilkit.comm.transports.errors import CommError
from dilkit.comm.transports.mpi.library import mpi
from dilkit.comm.transports.mpi.requests import poll, unfinished_exchanges
from dilkit.comm.transports.rank_errors import report_uncaught

TURN_SECONDS = 0.3
LAST_TURN_SECONDS = 1.0
FORWARDING_SECONDS = 0.2
"""What a launcher has not passed on when a rank asks for the end may never be seen: MPICH's drops it at times."""

_communicators: list[tuple[Any, float]] = []


def end_job_on_failure() -> None:
    """From now on, an exception that nobody catches ends the job."""
    report_uncaught(mpi().COMM_WORLD.Get_rank(), _end_job_in_turn)
    here = threading.current_thread() is threading.main_thread()  # others cannot say what signals do
    if here and "MPICH" in mpi().Get_library_version() and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        # With -disable-auto-cleanup, MPICH's mpirun signals the death of a rank to the others, which would end them too. Ranks
        # that live on say in which step they miss whom.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def leave_together(comm: Any, timeout: float) -> None:
    """At exit, before mpi4py ends MPI, wait for the end of the other ranks of `comm`, `timeout` seconds at most.

    `sys.exit` calls no hook for exceptions, and MPI ends on all ranks or on none: those that wait for this one would wait on. A
    rank that is needed has not received what the others have sent it.
    """
    _communicators.append((comm, timeout))
    atexit.unregister(_leave)
    atexit.register(_leave)


def end_job() -> None:
    """End all processes of the job."""
    time.sleep(FORWARDING_SECONDS)
    mpi().COMM_WORLD.Abort(1)
    os._exit(1)  # MPICH's Abort asks the launcher to end the job, and may return before that happens


def _end_job_in_turn(error: BaseException) -> None:
    """Ranks that miss the same one notice it together. Open MPI's launcher can hang if they then all ask for the end at once."""
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
    """Whether a rank of `comm` has not come to its end. Ends the job if one waits for this rank."""
    if comm.Iprobe(mpi().ANY_SOURCE, mpi().ANY_TAG, status := mpi().Status()):
        waiting = f"rank {status.Get_source()} waits for it in exchange {status.Get_tag()}"
        _end_job_with(f"PeerLost: rank {comm.Get_rank()} has ended, by sys.exit or with its program, and {waiting}")
    return not barrier.Test()


def _end_job_with(line: str) -> None:
    print(f"[rank {mpi().COMM_WORLD.Get_rank()}] {line}", file=sys.stderr, flush=True)
    end_job()
