"""A function that is run on the ranks of a job of its own: `run(kind, size, task)` returns what `task(comm)` gives on rank 0.

A task is a function of the transport, or a `functools.partial` of one; it and its result are pickled.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dilkit.comm.launch import processes
from dilkit.comm.launch.processes import Ended, Job, JobError, start
from dilkit.comm.launch.ranks import connect
from dilkit.comm.transports.base import Comm
from dilkit.comm.transports.threads import run_threads
from dilkit.threads import torch_threads

TIMEOUT = 60.0
"""Seconds that a rank waits for another: others may take long to compute."""
TASK, FOUND = "task", "found"
R = TypeVar("R")
Start = Callable[..., Job]


def run(kind: str, size: int, task: Callable[[Comm], R], *, threads: int = 1, limit: float = 120.0, start: Start = start) -> R:
    """Return what `task` gives on rank 0 of `size` ranks of a `kind`: "threads", "torch" or "mpi", which `start` starts.

    Raises `JobError` with what the job printed if it fails or takes more than `limit` seconds.
    """
    if kind == "threads":
        with torch_threads(1):
            return run_threads(size, task, timeout=TIMEOUT)[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = _ended(kind, size, task, folder, limit, start, threads=threads)
        if job.code or not (folder / FOUND).exists():
            why = f"took more than {limit:g} s" if job.code == processes.LATE else f"ended with {job.code}"
            raise JobError(f"{size} ranks of {kind}: the job {why}:\n{job.text[-2000:]}")
        result: R = pickle.loads((folder / FOUND).read_bytes())
        return result


def ended(
    kind: str, size: int, task: Callable[[Comm], Any], *, limit: float = 120.0, start: Start = start, **options: Any
) -> Ended:
    """Run such a job to its end, however it ends; `options` are those of `start`."""
    with tempfile.TemporaryDirectory() as name:
        return _ended(kind, size, task, Path(name), limit, start, **options)


def _ended(kind: str, size: int, task: Callable[[Comm], Any], folder: Path, limit: float, start: Start, **options: Any) -> Ended:
    (folder / TASK).write_bytes(pickle.dumps(task))
    return start(kind, size, ["-m", "dilkit.comm.launch.task", kind, str(folder)], **options).finish(limit)


def main() -> int:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    task = pickle.loads((folder / TASK).read_bytes())
    comm = connect(kind, TIMEOUT)
    result = task(comm)
    if comm.rank == 0:
        (folder / FOUND).write_bytes(pickle.dumps(result))
    comm.share(b"", "the end")  # of one must not look like its death to the others
    return 0


if __name__ == "__main__":
    sys.exit(main())
