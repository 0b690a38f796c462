"""How the error of a rank is printed: once, each line marked with the rank whose fault it is."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable

from dilkit.comm.transports.errors import CommError

_installed = False


def error_text(error: BaseException, rank: int) -> str:
    """The traceback of `error`, each line marked with the rank; one line if the fault is another rank's, which shows its own."""
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
    """Have every exception that nobody catches, in any thread, printed, and `end(error)` called. Later calls do nothing.

    `end` matters where a rank that fails would wait, at the end of its interpreter, for others that wait for it.
    """
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
