"""Functions run in a forked child, which is killed if it hangs."""

import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable

LIMIT = 60.0


def in_child(function: Callable[[], object], limit: float = LIMIT) -> str:
    """Run `function` in a forked child; return "done", "raised" (with a printed traceback), "hung" or the signal."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*fork", DeprecationWarning)  # of Python 3.12, where there are other threads
        child = os.fork()
    if not child:
        _run_and_leave(function)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return {0: "done", 256: "raised"}.get(status, f"signal {status & 127}")
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"


def _run_and_leave(function: Callable[[], object]):
    """Leave nothing of the parent to run in the child, on its stack or at its exit."""
    code = 1
    try:
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
