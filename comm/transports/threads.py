"""Ranks as threads of one process: for tests, for teaching, and to try many more ranks than there are cores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from dilkit.checks import integer, one_of
from dilkit.comm.transports.base import Comm, CommTimeout, Parts, PeerLost, ranks_text

T = TypeVar("T")
FAULTS = ("drop", "delay", "kill", "corrupt")


class Killed(BaseException):
    """What a rank that a `kill` strikes dies of."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong in rank `rank` at its exchange number `number` (1, 2, ...).

    `kind`: "drop" (what it sends then is lost), "delay" (by `seconds`), "corrupt" (a bit of each message is turned), "kill" (the
    rank dies). `peer` restricts a drop, delay or corruption to the messages for one rank.
    """

    kind: str
    rank: int
    number: int
    peer: int | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        one_of("kind", self.kind, FAULTS)
        integer("number", self.number, at_least=1)


@dataclass
class _Office:
    """Where messages lie until they are fetched, by (from, to, number), and the ranks that gave up, with why."""

    size: int
    faults: tuple[Fault, ...]
    changed: threading.Condition = field(default_factory=threading.Condition)
    letters: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    lost: dict[int, BaseException] = field(default_factory=dict)

    def put(self, key: tuple[int, int, int], letter: Tensor) -> None:
        with self.changed:
            self.letters[key] = letter
            self.changed.notify_all()

    def give_up(self, rank: int, why: BaseException) -> None:
        with self.changed:
            self.lost.setdefault(rank, why)
            self.changed.notify_all()


class ThreadComm(Comm):
    """One rank among the threads of `run_threads`."""

    def __init__(self, office: _Office, rank: int, timeout: float) -> None:
        super().__init__(rank, office.size, timeout)
        self._office = office

    def abort(self, why: BaseException) -> None:
        """Make all ranks that wait for this one raise `PeerLost`."""
        self._office.give_up(self.rank, why)

    def _post(self, send: Parts, recv: Parts, device: torch.device, number: int, step: str) -> Callable[[], None]:
        faults = [f for f in self._office.faults if (f.rank, f.number) == (self.rank, number)]
        if any(f.kind == "kill" for f in faults):
            raise Killed(f"rank {self.rank} was killed at exchange {number} ({step})")
        for peer, letter in send:
            self._send(peer, letter, number, [f for f in faults if f.peer in (None, peer)])
        return lambda: self._receive(dict(recv), number, step)

    def _send(self, peer: int, letter: Tensor, number: int, faults: list[Fault]) -> None:
        letter = letter.clone()
        for fault in faults:
            if fault.kind == "drop":
                return
            if fault.kind == "delay":
                time.sleep(fault.seconds)
            if fault.kind == "corrupt":
                letter[len(letter) // 2] ^= 64
        self._office.put((self.rank, peer, number), letter)

    def _receive(self, missing: dict[int, Tensor], number: int, step: str) -> None:
        office, deadline = self._office, time.monotonic() + self.timeout
        while True:
            with office.changed:
                for peer in [p for p in missing if (p, self.rank, number) in office.letters]:
                    self._take(missing.pop(peer), office.letters.pop((peer, self.rank, number)), peer, number, step)
                if not missing:
                    return
                if (left := deadline - time.monotonic()) <= 0:  # first: others may have given up since, for want of this rank
                    who = sorted(missing)
                    raise CommTimeout(
                        f"exchange {number} ({step}): nothing came from {ranks_text(who)} within {self.timeout:g} s", who, step
                    )
                if lost := sorted(office.lost.keys() & missing.keys()):
                    why = office.lost[lost[0]]
                    raise PeerLost(
                        f"exchange {number} ({step}): rank {lost[0]} gave up: {type(why).__name__}: {why}", lost, step
                    ) from why
                office.changed.wait(left)

    def _take(self, place: Tensor, letter: Tensor, peer: int, number: int, step: str) -> None:
        if len(place) != len(letter):
            raise PeerLost(
                f"exchange {number} ({step}): rank {peer} sent {len(letter)} bytes where {len(place)} were expected", [peer], step
            )
        place.copy_(letter)


def run_threads(
    world_size: int, function: Callable[[ThreadComm], T], *, timeout: float = 30.0, faults: Sequence[Fault] = ()
) -> list[T]:
    """`function(comm)` on `world_size` ranks, each a thread; the results by rank.

    If ranks fail, the first failure that is a rank's own is raised, with a note that names the rank; other ranks that wait for
    it fail at once with `PeerLost`, and so do all after Ctrl-C. `faults` is a script of what shall go wrong.
    """
    size = integer("world_size", world_size, at_least=1)
    office = _Office(size, tuple(faults))
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            with torch.autograd.set_multithreading_enabled(False):  # or the backward passes of all ranks share one thread
                results[rank] = function(ThreadComm(office, rank, timeout))
            office.give_up(rank, RuntimeError("its function has returned"))
        except BaseException as error:
            errors[rank] = error
            office.give_up(rank, error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C, or no more threads: those there are shall not wait for each other, nor go on
        for rank in range(size):
            office.give_up(rank, error)
        raise
    if errors:
        raise _first(errors)
    return results


def _first(errors: dict[int, BaseException]) -> BaseException:
    """The error to show: one that is not about another rank if there is one."""
    rank = min(errors, key=lambda r: (isinstance(errors[r], PeerLost), r))
    errors[rank].args = (f"rank {rank}: {errors[rank]}",)
    return errors[rank]
