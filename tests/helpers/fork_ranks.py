"""`fork_ranks.py SIZE PROGRAM ARGUMENTS...`: run a Python program once for each rank of torch.distributed.

Ranks are forked after the modules that all of them need are loaded, which takes longer than most jobs. As with torchrun, a rank
that fails ends the others: those that still run `GRACE` seconds later are killed.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import sys
import time

GRACE = 2.5


def main() -> int:
    """Fork the ranks, and wait for their end. The exit code is 1 if one of them failed."""
    importlib.import_module("torch.distributed")
    running: set[int] = set()
    for rank in range(int(sys.argv[1])):
        if not (process := os.fork()):
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.environ |= {**of_rank, "WORLD_SIZE": sys.argv[1], "LOCAL_WORLD_SIZE": sys.argv[1]}
            sys.argv = sys.argv[2:]
            runpy.run_path(sys.argv[0], run_name="__main__")
            return 0
        running.add(process)
    return int(wait(running))


def wait(running: set[int]) -> bool:
    """Whether one of these processes failed, after the end of all."""
    failed, end = False, float("inf")
    while running:
        for process in [*running]:
            if time.monotonic() > end:
                os.kill(process, signal.SIGKILL)
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                running.remove(process)
                if status and not failed:
                    failed, end = True, time.monotonic() + GRACE
        time.sleep(0.02)
    return failed


if __name__ == "__main__":
    sys.exit(main())
