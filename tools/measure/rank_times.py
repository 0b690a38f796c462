"""Times over ranks, which are the slowest rank's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dilkit.comm.collectives import gather_values
from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.results.record import Samples

if TYPE_CHECKING:
    from dilkit.comm import Comm


def seconds_of(comm: Comm, call: Callable[[], Any]) -> float:
    """How long the slowest rank takes for `call`, all having begun together."""
    comm.share(b"", "beginning together")
    start = time.perf_counter()
    call()
    return max(gather_values(comm, time.perf_counter() - start))


def time_in_turns(comm: Comm, calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Samples]:
    """`time_interleaved` over ranks: rounds A B A B ..., one call a sample, each the slowest rank's time."""
    return time_interleaved(calls, repeats, warmup=0, clock=lambda call, _: seconds_of(comm, call))
