"""Ctrl-C while torch is being imported: numpy and torch catch exceptions in the course of it, and go on half loaded."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from typing import Any

INTERRUPTED = 130


def load_torch() -> None:
    """Import torch; an interruption meanwhile ends the process at once. Raises ImportError where torch is missing or broken."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        importlib.import_module("torch")
        return
    signal.signal(signal.SIGINT, _end)
    try:
        importlib.import_module("torch")
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: Any) -> None:
    os.write(2, b"dilkit: interrupted\n")
    os._exit(INTERRUPTED)
