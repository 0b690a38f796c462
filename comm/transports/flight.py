"""The MPI messages of one exchange: posted, looked after until all are there, or given up with an error that names ranks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilkit.comm.transports.base import CommError, CommTimeout, Parts, PeerLost, ranks_text
from dilkit.comm.transports.mpi_library import mpi

PIECE_BYTES = 8 << 20
"""Longer messages go in pieces: any length then works on any MPI library, and a wait notices that bytes still come in."""
ATTENTIVE_SECONDS = 0.02
"""A wait in which nothing moves for longer than this begins to sleep between looks."""
LONGEST_NAP = 0.001

in_flight: set[Flight] = set()
"""Exchanges whose memory MPI may still read or write: it must outlive errors, and those who forget to wait."""


class Message:
    """A piece on its way to or from `peer`. `post` is Isend or Irecv of a communicator."""

    def __init__(self, post: Callable[..., Any], peer: int, piece: Tensor, tag: int) -> None:
        self.peer, self.piece, self.status = peer, piece, mpi().Status()
        memory = piece.numpy() if piece.device.type == "cpu" else piece
        self.request = post([memory, len(piece), mpi().BYTE], peer, tag)

    def done(self) -> bool:
        """Whether MPI is through with it. Raises `mpi4py.MPI.Exception`."""
        return bool(self.request.Test(self.status))


class Flight:
    """All messages of exchange `number`."""

    def __init__(self, comm: Any, number: int, step: str) -> None:
        self.comm, self.tag, self.step = comm, number % (mpi().COMM_WORLD.Get_attr(mpi().TAG_UB) + 1), step
        self.where = f"exchange {number} ({step})"
        self.coming: list[Message] = []
        self.going: list[Message] = []

    def post(self, send: Parts, recv: Parts) -> None:
        """Begin, receives first: what arrives then finds its place at once."""
        in_flight.add(self)
        for posted, post, parts in ((self.coming, self.comm.Irecv, recv), (self.going, self.comm.Isend, send)):
            for peer, piece in pieces(parts):
                posted.append(self._asked(peer, partial(Message, post, peer, piece, self.tag)))

    def left(self) -> int:
        """How many messages MPI is not through with. Raises `PeerLost`."""
        self.coming = [m for m in self.coming if not (self._asked(m.peer, m.done) and self._whole(m))]
        self.going = [m for m in self.going if not self._asked(m.peer, m.done)]
        if not self.coming and not self.going:
            in_flight.discard(self)
        return len(self.coming) + len(self.going)

    def land(self, timeout: float) -> None:
        """Return when all has arrived and all is sent. Raises `CommTimeout` and `PeerLost`."""
        if poll(self.left, timeout):
            return
        what, late = ("nothing came from", self.coming) if self.coming else ("nothing was taken by", self.going)
        ranks = sorted({message.peer for message in late})
        raise CommTimeout(f"{self.where}: {what} {ranks_text(ranks)} within {timeout:g} s", ranks, self.step)

    def _asked(self, peer: int, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except mpi().Exception as error:
            raise PeerLost(
                f"{self.where}: MPI cannot reach rank {peer}: {error.Get_error_string()}", [peer], self.step
            ) from error

    def _whole(self, message: Message) -> bool:
        if (count := message.status.Get_count(mpi().BYTE)) != len(message.piece):
            raise PeerLost(
                f"{self.where}: rank {message.peer} sent {count} bytes where {len(message.piece)} were expected",
                [message.peer],
                self.step,
            )
        return True


def pieces(parts: Parts) -> Iterator[tuple[int, Tensor]]:
    """`parts` cut into pieces. MPI keeps pieces of one message in order, so all can have the same tag."""
    for peer, part in parts:
        for piece in torch.split(part, PIECE_BYTES):
            yield peer, piece


def poll(left: Callable[[], int], timeout: float) -> bool:
    """Call `left()` until it returns 0, and return True; False after `timeout` seconds.

    As long as its result changes, or did so lately, this only yields the core between calls: messages move while MPI is called.
    After that it naps for a tenth of the time that nothing has moved, so that a long wait costs little.
    """
    began = moved = time.monotonic()
    before = 0
    while count := left():
        now = time.monotonic()
        if now - began >= timeout:
            return False
        if count != before:
            before, moved = count, now
        if now - moved < ATTENTIVE_SECONDS:
            os.sched_yield()
        else:
            time.sleep(min((now - moved) / 10, LONGEST_NAP))
    return True


def unfinished() -> list[Flight]:
    """Exchanges with messages that are still under way after one more look, or that have failed."""
    for flight in list(in_flight):
        with contextlib.suppress(CommError):
            flight.left()
    return list(in_flight)
