"""One rank of a job: `python -m dilkit.tools.bench.ranks.rank mpi|gloo FILE MODULE:TASK '{"field": ...}'`.

`run` starts such a job, or the same task on threads, and returns what its rank 0 found.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from dilkit.tools.console import launcher, ranks
from dilkit.tools.console.launcher import Ended, JobError
from dilkit.tools.results.decode import decode, encode

if TYPE_CHECKING:
    from dilkit.comm import Comm

TIMEOUT = 60.0
"""Seconds that a rank waits for another: others may take long to compute."""
R = TypeVar("R")


class Task(ABC, Generic[R]):
    """What every rank of a job does: a dataclass, sent to the ranks as JSON, whose result is a record of type `RESULT`."""

    RESULT: ClassVar[type[Any]]

    @abstractmethod
    def run(self, comm: Comm) -> R:
        """Do it; rank 0's result counts."""


def run(kind: str, size: int, task: Task[R], *, threads: int = 1, limit: float = 120.0) -> R:
    """What a task found on rank 0 of `size` ranks of a `kind`: "threads", "gloo" or "mpi".

    Raises `JobError` with what the job printed if it fails or takes more than `limit` seconds.
    """
    if kind == "threads":
        return _on_threads(size, task)
    with tempfile.TemporaryDirectory() as folder:
        file, name = Path(folder) / "found.json", type(task).__name__
        ended = start(kind, size, task, str(file), threads=threads, limit=limit)
        if ended.code or not file.exists():
            why = f"took more than {limit:g} s" if ended.code == launcher.LATE else f"ended with {ended.code}"
            raise JobError(f"{name} on {size} ranks of {kind} {why}:\n{ended.text[-2000:]}")
        found: R = decode(task.RESULT, json.loads(file.read_text()))
        return found


def start(kind: str, size: int, task: Task[Any], file: str = "", **options: Any) -> Ended:
    """Run such a job to its end, however it ends; `options` are those of `launcher.launch`."""
    name = f"{type(task).__module__}:{type(task).__name__}"
    command = ["-m", "dilkit.tools.bench.ranks.rank", kind, file, name, json.dumps(encode(task))]
    return launcher.launch(kind, size, command, **options)


def _on_threads(size: int, task: Task[R]) -> R:
    from dilkit.comm import run_threads
    from dilkit.tools.measure.threads import torch_threads

    with torch_threads(1):
        return run_threads(size, task.run, timeout=TIMEOUT)[0]


def main() -> int:
    """What the processes of a job run."""
    kind, file, name, fields = sys.argv[1:]
    module, _, task = name.partition(":")
    made: Task[Any] = decode(getattr(importlib.import_module(module), task), json.loads(fields))
    comm = ranks.connect("mpi" if kind == "mpi" else "torch", TIMEOUT)
    found = made.run(comm)
    if comm.rank == 0:
        Path(file).write_text(json.dumps(encode(found)))
    comm.share(b"", "the end")  # of one must not look like its death to the others
    return 0


if __name__ == "__main__":
    sys.exit(main())
