"""Ctrl-C where a KeyboardInterrupt in the middle of things would do harm.

While torch is being imported: numpy and torch catch exceptions in the course of it, and go on half loaded. Where ranks work
together: one that stops in the middle of an exchange leaves the others waiting.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

INTERRUPTED = 130
_SAME = 1.0
"""Seconds within which a second signal is the first one once more: a terminal and a launcher may both pass on one Ctrl-C."""


def load_torch() -> None:
    """Import torch; an interruption meanwhile ends the process at once. Raises ImportError where torch is missing or broken."""
    with _handled(_end, signal.SIGINT):
        importlib.import_module("torch")


def _end(*_: Any) -> None:
    os.write(2, b"dilkit: interrupted\n")
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def stopping() -> Iterator[threading.Event]:
    """Within the block, Ctrl-C sets the event and interrupts nothing; so does SIGTERM, which launchers make of it for ranks.

    A later Ctrl-C interrupts as usual.
    """
    event = threading.Event()
    asked: list[float] = []

    def ask(*_: Any) -> None:
        asked.append(time.monotonic())
        if asked[-1] - asked[0] > _SAME:
            raise KeyboardInterrupt
        event.set()

    with _handled(ask, signal.SIGINT, signal.SIGTERM):
        yield event


@contextlib.contextmanager
def _handled(handler: Callable[..., None], *numbers: int) -> Iterator[None]:
    """Within the block these signals call `handler`; not where Ctrl-C is ignored or handled by others, or in another thread."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        numbers = ()
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
