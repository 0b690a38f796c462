"""Ctrl-C where a KeyboardInterrupt in the middle of things would do harm.

While torch is being imported: numpy and torch catch exceptions in the course of it, and go on half loaded. Where ranks work
together: one that stops in the middle of an exchange leaves the others waiting.
"""

from __future__ import annotations

import _thread
import contextlib
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

INTERRUPTED, TERMINATED = 130, 143
_SAME = 1.0
"""Seconds within which a second signal is the first one once more: a terminal and a launcher may both pass on one Ctrl-C."""


def load_torch() -> None:
    """Import torch; an interruption meanwhile ends the process at once. Raises ImportError where torch is missing or broken."""
    with _handled(_end, signal.SIGINT, signal.SIGTERM):
        importlib.import_module("torch")


def _end(number: int, *_: Any) -> None:
    os.write(2, b"dilkit: interrupted\n")
    os._exit(128 + number)


@contextlib.contextmanager
def terminable() -> Iterator[threading.Event]:
    """Within the block SIGTERM is Ctrl-C: no half-written file is left, and what there is so far is kept. It sets the event.

    An interruption in the middle of a destructor or of a weak reference's callback, where Python would print and forget it, comes
    again a moment later.
    """
    event, over = threading.Event(), threading.Event()
    usual = sys.unraisablehook

    def end(*_: Any) -> None:
        event.set()
        raise KeyboardInterrupt

    def interrupt(leaving: threading.Event) -> None:
        number, main = signal.SIGTERM if event.is_set() else signal.SIGINT, threading.main_thread().ident
        leaving.wait()
        if over.wait(0.01) or main is None:
            return
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(main, number)  # wakes the main thread also while it sleeps
        else:
            _thread.interrupt_main(number)

    def again(ignored: sys.UnraisableHookArgs) -> None:
        if issubclass(ignored.exc_type, KeyboardInterrupt):
            leaving = threading.Event()
            threading.Thread(target=interrupt, args=(leaving,), daemon=True).start()
            leaving.set()  # what is raised before that, in here, is ignored for good
        else:
            usual(ignored)

    with _handled(end, signal.SIGTERM):
        sys.unraisablehook = again
        try:
            yield event
        finally:
            sys.unraisablehook = usual
            over.set()


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
    """Within the block these signals call `handler`; not those that are ignored or handled by others, nor in another thread."""
    usual = (signal.default_int_handler, signal.SIG_DFL)
    ours = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in numbers if ours}
    before = {number: known for number, known in handlers.items() if known in usual or known in _HANDLERS}
    _HANDLERS.append(handler)
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
        _HANDLERS.remove(handler)


_HANDLERS: list[Callable[..., None]] = []
"""Handlers of blocks that are open."""
