"""The errors of transports: each names the ranks at fault and the step that failed."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Sequence


class CommError(RuntimeError):
    """Ranks could not go on together. The base class of `PeerLost`, `CommTimeout` and `PlanMismatch`.

    `ranks` are those at fault, as far as known; `step` says what was being exchanged. After it the transport is not to be used.

        >>> from dilkit.comm import CommError, run_threads
        >>> def on_rank(comm):
        ...     if comm.rank == 1:
        ...         return "has left"
        ...     try:
        ...         comm.agree(b"ready", "start")
        ...     except CommError as error:
        ...         return type(error).__name__, error.ranks, error.step
        >>> run_threads(2, on_rank)
        [('PeerLost', (1,), 'start'), 'has left']
    """

    def __init__(self, message: str, ranks: Sequence[int] = (), step: str = "") -> None:
        super().__init__(message)
        self.ranks, self.step = tuple(ranks), step


class PeerLost(CommError):
    """A rank died, or gave up with an error of its own. `ranks` names it, `step` says what it was needed for.

    >>> from dilkit.comm import PeerLost, run_threads
    >>> def on_rank(comm):
    ...     if comm.rank == 1:
    ...         return "has left"
    ...     try:
    ...         comm.agree(b"ready", "start")
    ...     except PeerLost as error:
    ...         return error.ranks
    >>> run_threads(2, on_rank)
    [(1,), 'has left']
    """


class CommTimeout(CommError):
    """A rank did not answer within `timeout` seconds. `ranks` names it, `step` says what it was needed for.

    >>> import threading
    >>> from dilkit.comm import CommTimeout, run_threads
    >>> noticed = threading.Event()
    >>> def on_rank(comm):
    ...     if comm.rank == 1:
    ...         return noticed.wait(10)  # busy with something else
    ...     try:
    ...         comm.agree(b"ready", "start")
    ...     except CommTimeout as error:
    ...         noticed.set()
    ...         return str(error)
    >>> run_threads(2, on_rank, timeout=0.1)
    ['exchange 1 (start): nothing came from rank 1 within 0.1 s', True]
    """


class PlanMismatch(CommError, ValueError):
    """Ranks do not agree about what they are computing together, as when their arguments differ. It is raised on all of them.

    >>> from dilkit.comm import PlanMismatch, run_threads
    >>> def on_rank(comm):
    ...     try:
    ...         comm.agree(b"odd" if comm.rank == 2 else b"same", "the plan")
    ...     except PlanMismatch as error:
    ...         return str(error)
    >>> run_threads(3, on_rank)[0]
    'the plan: rank 2 of 3 differs from the others'
    """


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 1, 2, 5`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


_installed = False


def error_text(error: BaseException, rank: int) -> str:
    """Format the traceback of `error`, each line marked with the rank; one line if the fault is another rank's."""
    if isinstance(error, CommError):
        lines = [f"{type(error).__name__}: {error}"]
    else:
        lines = "".join(traceback.format_exception(type(error), error, error.__traceback__)).splitlines()
    return "".join(f"[rank {rank}] {line}\n" for line in lines)


def print_error(error: BaseException, rank: int) -> None:
    """Print `error_text(error, rank)` in one piece, after all that was printed before."""
    sys.stdout.flush()
    sys.stderr.write(error_text(error, rank))
    sys.stderr.flush()


def report_uncaught(rank: int, end: Callable[[BaseException], None]) -> None:
    """Print every exception that nobody catches, in any thread, and call `end(error)`: others may wait for this rank."""
    global _installed
    if _installed:
        return
    _installed = True

    def uncaught(error: BaseException) -> None:
        try:
            print_error(error, rank)
        finally:
            end(error)

    def uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
            uncaught(arguments.exc_value)

    sys.excepthook = lambda kind, error, trace: uncaught(error)
    threading.excepthook = uncaught_in_thread
