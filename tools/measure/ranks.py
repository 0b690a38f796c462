"""What is measured over ranks: values of all of them brought together, and times that are the slowest rank's."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from dilkit.tools.results.record import Samples

if TYPE_CHECKING:
    from dilkit.comm import Comm

T = TypeVar("T")
_PIECE = 1000
"""Bytes of one record; `Comm.share` takes little more."""


def gather(comm: Comm, value: T) -> list[T]:
    """The values of all ranks, by rank, on every rank: pickled, in records that no transport counts."""
    pickled = pickle.dumps(value)
    longest = max(int(length) for length in comm.share(str(len(pickled)).encode(), "lengths of values"))
    pieces = [comm.share(pickled[at : at + _PIECE], "values") for at in range(0, longest, _PIECE)]
    return [pickle.loads(b"".join(parts)) for parts in zip(*pieces, strict=True)]


def seconds_of(comm: Comm, call: Callable[[], Any]) -> float:
    """How long the slowest rank takes for `call`, all having begun together."""
    comm.share(b"", "beginning together")
    start = time.perf_counter()
    call()
    return max(gather(comm, time.perf_counter() - start))


def time_in_turns(comm: Comm, calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Samples]:
    """`measure.time_interleaved` over ranks: rounds A B A B ..., one call a sample, each the slowest rank's time."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in _rounds(calls, repeats):
        taken[name].append(seconds_of(comm, call))
    return {name: Samples.of(seconds) for name, seconds in taken.items()}


def _rounds(calls: dict[str, Callable[[], Any]], repeats: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    for _ in range(repeats):
        yield from calls.items()
