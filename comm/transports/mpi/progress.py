"""A thread that calls MPI while its rank computes: most MPI libraries move messages only while they are called.

    rank 0   Isend ------ computes ------------- Test      a long message goes once the other rank has said that it is ready,
    rank 1   Irecv, ready ------------ waits ------->      which rank 0 reads only when it calls MPI:
    thread   of rank 0:  Test . Test . Test                so this goes on calling it

Only where the library serves several threads at once, as mpi4py asks it to.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Collection

from dilkit.comm.transports.mpi.library import mpi

NAP = 0.001
"""Seconds between two calls: a long message needs a few, and a call with its nap takes a fiftieth of a core."""


class ProgressThread:
    """It calls MPI from `begin()` on as long as there is anything in `under_way`, and ends before MPI does."""

    def __init__(self, under_way: Collection[object]) -> None:
        self._under_way, self._begun, self._ended = under_way, threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="dilkit-mpi-progress", daemon=True)
        self._thread.start()
        self.begin = self._begun.set
        # Before mpi4py ends MPI; a program that does so itself deletes the attributes of COMM_SELF first.
        atexit.register(self._end)
        mpi().COMM_SELF.Set_attr(mpi().Comm.Create_keyval(delete_fn=lambda *_: self._end()), True)

    def _run(self) -> None:
        nothing = mpi().COMM_SELF.Dup().Irecv(bytearray(1))  # what never arrives
        while self._begun.wait() and not self._ended:
            self._begun.clear()
            while self._under_way and not self._ended:
                nothing.Test()
                time.sleep(NAP)
        nothing.Cancel()
        nothing.Wait()

    def _end(self) -> None:
        self._ended = True
        self.begin()
        self._thread.join()


def threads_may_call_mpi() -> bool:
    """Whether several threads of this process may call MPI at once."""
    return bool(mpi().Query_thread() == mpi().THREAD_MULTIPLE)
