"""The ranks as processes of this machine: started, followed, and ended whatever happens."""

from __future__ import annotations

import json
import math
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dilkit.comm.launch.processes import Ended, Job, JobError, start
from dilkit.tools.demo.ranks.rank import FOUND, PROGRESS, SETUP
from dilkit.tools.demo.ranks.record import RanksTraining
from dilkit.tools.demo.ranks.task import Setup, Trained
from dilkit.tools.results.decode import decode

PROGRAM = "dilkit.tools.demo.ranks.rank"
_LOOK = 0.1
"""Seconds between two looks at the ranks."""
_MOST_LINES = 40
"""Of what ranks that failed have printed: the end says why."""


def train_in_processes(setup: Setup, threads: int, follow: Callable[[RanksTraining], None]) -> Trained:
    """What ranks of `threads` threads each learn. `follow` is given the course so far, now and then.

    Raises `JobError` where a rank fails or dies. None of them runs any longer when this ends, in whatever way.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, limit = Path(name), 0.0
        (folder / SETUP).write_bytes(pickle.dumps(setup))
        job = start("torch", setup.layout.size, ["-m", PROGRAM, name], threads=threads)
        try:
            failed = _followed(job, folder / PROGRESS, follow)
            limit = math.inf  # they have ended, or one has failed, and the others are given a moment to say whom they miss
        finally:
            ended = job.finish(limit)
        if ended.code or not (folder / FOUND).exists():
            raise JobError(_complaint(setup, failed, ended))
        found: Trained = pickle.loads((folder / FOUND).read_bytes())
        return found


def _followed(job: Job, progress: Path, follow: Callable[[RanksTraining], None]) -> dict[int, int]:
    """Wait until all ranks have ended, or one has failed; the exit codes of those that have failed, by rank."""
    while job.code is None and not any(process.poll() for process in job.processes):
        time.sleep(_LOOK)
        if progress.exists():
            follow(decode(RanksTraining, json.loads(progress.read_text())))
    return {rank: code for rank, process in enumerate(job.processes) if (code := process.poll())}


def _complaint(setup: Setup, failed: dict[int, int], ended: Ended) -> str:
    """Which ranks failed first, how, and what all printed."""
    died = [f"rank {rank} {_how(code)}" for rank, code in failed.items()] or ["they left no result"]
    printed = "\n".join(ended.text.strip().splitlines()[-_MOST_LINES:])
    return f"--ranks {setup.layout}: {', '.join(died)}; all ranks have been ended. They printed:\n{printed or 'nothing'}"


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
