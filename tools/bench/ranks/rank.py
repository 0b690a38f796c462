"""One rank of a job of the ring suite: `python -m dilkit.tools.bench.ranks.rank mpi|gloo FILE TASK '{"argument": ...}'`.

`run` starts such a job, or the same task on threads, and returns what its rank 0 found.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilkit.tools.bench.published import ranks as seed_ranks
from dilkit.tools.bench.ranks import tasks as ring_tasks
from dilkit.tools.console import launcher
from dilkit.tools.console import ranks as job
from dilkit.tools.console.launcher import Ended, JobError

if TYPE_CHECKING:
    from dilkit.comm import Comm

TIMEOUT = 60.0
"""Seconds that a rank waits for another: others may take long to compute."""


def run(kind: str, size: int, task: str, *, threads: int = 1, limit: float = 120.0, **arguments: Any) -> Any:
    """What a task found on rank 0: a function `(comm, **arguments)` of `ring_tasks` or `seed_ranks`.

    `kind`: "threads", "gloo" or "mpi".

    Raises `JobError` with what the job printed if it fails or takes more than `limit` seconds.
    """
    if kind == "threads":
        return _on_threads(size, task, arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        ended = start(kind, size, str(found), task, arguments, threads=threads, limit=limit)
        if ended.code or not found.exists():
            why = f"took more than {limit:g} s" if ended.code == launcher.LATE else f"ended with {ended.code}"
            raise JobError(f"{task} on {size} ranks of {kind} {why}:\n{ended.text[-2000:]}")
        return json.loads(found.read_text())


def start(kind: str, size: int, found: str, task: str, arguments: dict[str, Any], **options: Any) -> Ended:
    """Run such a job to its end, however it ends; `options` are those of `launcher.launch`."""
    command = ["-m", "dilkit.tools.bench.ranks.rank", kind, found, task, json.dumps(arguments)]
    return launcher.launch(kind, size, command, **options)


def _on_threads(size: int, task: str, arguments: dict[str, Any]) -> Any:
    from dilkit.comm import run_threads
    from dilkit.tools.measure.overhead import one_thread

    with one_thread():
        return run_threads(size, partial(_task(task), **arguments), timeout=TIMEOUT)[0]


def _task(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(ring_tasks if name in ring_tasks.__all__ else seed_ranks, name)
    return found


def main() -> int:
    """What the processes of a job run."""
    kind, file, task, arguments = sys.argv[1:]
    comm = job.connect("mpi" if kind == "mpi" else "torch", TIMEOUT)
    found = _task(task)(comm, **json.loads(arguments))
    if comm.rank == 0:
        Path(file).write_text(json.dumps(found))
    _leave(comm)
    return 0


def _leave(comm: Comm) -> None:
    """Wait for the others: the end of one must not look like its death to the rest."""
    comm.share(b"", "the end")


if __name__ == "__main__":
    sys.exit(main())
