"""Ranks as threads of one process: for tests, for teaching, and to try more ranks than there are cores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from dilkit.checks import integer, one_of, real
from dilkit.comm.transports.base import Comm, PeerBytes
from dilkit.comm.transports.errors import CommTimeout, PeerLost, ranks_text

T = TypeVar("T")
FAULTS = ("drop", "delay", "kill", "corrupt")


class Killed(BaseException):
    """The exception of a rank that the fault "kill" ends."""


@dataclass(frozen=True)
class Fault:
    """A fault injected into rank `rank` at its exchange number `number` (1, 2, ...), for `run_threads`.

    `kind`: "drop" (what it sends then is lost), "delay" (by `seconds`), "corrupt" (one bit of each message is flipped), "kill"
    (the rank dies). `peer` restricts a drop, delay or corruption to the messages for one rank.

    Raises ValueError for a kind that is not known and for numbers below 1.

        >>> import torch
        >>> from dilkit.comm import Fault, run_threads
        >>> def on_rank(comm):
        ...     rows = torch.zeros(2, 1, dtype=torch.uint8)
        ...     return comm.exchange(rows, [1, 1], [1, 1]).wait().flatten().tolist()
        >>> run_threads(2, on_rank, faults=[Fault("corrupt", rank=1, number=1)])
        [[0, 64], [0, 0]]
    """

    kind: str
    rank: int
    number: int
    peer: int | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        one_of("kind", self.kind, FAULTS)
        integer("rank", self.rank, at_least=0)
        integer("number", self.number, at_least=1)
        if self.peer is not None:
            integer("peer", self.peer, at_least=0)
        if real("seconds", self.seconds) < 0:
            raise ValueError(f"seconds={self.seconds} must be at least 0")


@dataclass
class _Mailbox:
    """Messages that are not received yet, by (from, to, number); and the ranks that gave up, with why."""

    size: int
    faults: tuple[Fault, ...]
    changed: threading.Condition = field(default_factory=threading.Condition)
    messages: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    lost: dict[int, BaseException] = field(default_factory=dict)

    def give_up(self, rank: int, why: BaseException) -> None:
        with self.changed:
            self.lost.setdefault(rank, why)
            self.changed.notify_all()


class ThreadComm(Comm):
    """One rank of `run_threads`."""

    def __init__(self, mailbox: _Mailbox, rank: int, timeout: float) -> None:
        super().__init__(rank, mailbox.size, timeout)
        self._mailbox = mailbox

    def abort(self, why: BaseException) -> None:
        """Make all ranks that wait for this one raise `PeerLost`."""
        self._mailbox.give_up(self.rank, why)

    def _post(self, send: PeerBytes, recv: PeerBytes, device: torch.device, number: int, step: str) -> Callable[[], None]:
        faults = [f for f in self._mailbox.faults if (f.rank, f.number) == (self.rank, number)]
        if any(f.kind == "kill" for f in faults):
            raise Killed(f"rank {self.rank} was killed at exchange {number} ({step})")
        for peer, message in send:
            self._send(peer, message, number, [f for f in faults if f.peer in (None, peer)])
        return lambda: self._receive(dict(recv), number, step)

    def _send(self, peer: int, message: Tensor, number: int, faults: list[Fault]) -> None:
        message = message.clone()
        for fault in faults:
            if fault.kind == "drop":
                return
            if fault.kind == "delay":
                time.sleep(fault.seconds)
            if fault.kind == "corrupt":
                message[len(message) // 2] ^= 64
        with self._mailbox.changed:
            self._mailbox.messages[self.rank, peer, number] = message
            self._mailbox.changed.notify_all()

    def _receive(self, missing: dict[int, Tensor], number: int, step: str) -> None:
        mailbox, deadline = self._mailbox, time.monotonic() + self.timeout
        while True:
            with mailbox.changed:
                for peer in [p for p in missing if (p, self.rank, number) in mailbox.messages]:
                    place, message = missing.pop(peer), mailbox.messages.pop((peer, self.rank, number))
                    if len(place) != len(message):
                        sizes = f"{len(message)} bytes where {len(place)} were expected"
                        raise PeerLost(f"exchange {number} ({step}): rank {peer} sent {sizes}", [peer], step)
                    place.copy_(message)
                if not missing:
                    return
                if (left := deadline - time.monotonic()) <= 0:  # first: others may have given up since, for want of this rank
                    who = sorted(missing)
                    raise CommTimeout(
                        f"exchange {number} ({step}): nothing came from {ranks_text(who)} within {self.timeout:g} s", who, step
                    )
                if lost := sorted(mailbox.lost.keys() & missing.keys()):
                    why = mailbox.lost[lost[0]]
                    raise PeerLost(
                        f"exchange {number} ({step}): rank {lost[0]} gave up: {type(why).__name__}: {why}", lost, step
                    ) from why
                mailbox.changed.wait(left)


def run_threads(
    world_size: int, function: Callable[[ThreadComm], T], *, timeout: float = 30.0, faults: Sequence[Fault] = ()
) -> list[T]:
    """Run `function(comm)` on `world_size` ranks, each a thread of this process; returns the results by rank.

    `timeout` is the number of seconds that a rank waits for another. If ranks fail, the first error that is a rank's own is
    raised, with the rank in its text; other ranks that wait for it fail at once with `PeerLost`, and so do all after Ctrl-C.
    `faults` are injected on purpose, for tests.

    Raises ValueError for fewer than one rank, and what `function` raises.

        >>> from dilkit.comm import run_threads
        >>> run_threads(3, lambda comm: f"rank {comm.rank} of {comm.size}")
        ['rank 0 of 3', 'rank 1 of 3', 'rank 2 of 3']
    """
    size = integer("world_size", world_size, at_least=1)
    if not callable(function):
        raise TypeError(f"function={function!r} is a {type(function).__name__}; a function of a Comm is needed")
    if not isinstance(faults, Sequence) or not all(isinstance(fault, Fault) for fault in faults):
        raise TypeError(f"faults={faults!r} is no sequence of dilkit.comm.Fault")
    mailbox = _Mailbox(size, tuple(faults))
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            with torch.autograd.set_multithreading_enabled(False):  # or the backward passes of all ranks share one thread
                results[rank] = function(ThreadComm(mailbox, rank, timeout))
            mailbox.give_up(rank, RuntimeError("its function has returned"))
        except BaseException as error:
            errors[rank] = error
            mailbox.give_up(rank, error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C, or no more threads: those there are shall not wait for each other, nor go on
        for rank in range(size):
            mailbox.give_up(rank, error)
        raise
    if errors:  # raise one that is not about another rank, if there is one
        rank = min(errors, key=lambda r: (isinstance(errors[r], PeerLost), r))
        errors[rank].args = (f"rank {rank}: {errors[rank]}",)
        raise errors[rank]
    return results
