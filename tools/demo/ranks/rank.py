"""What a rank runs: `python -m dilkit.tools.demo.ranks.rank FOLDER` trains what the folder says, and rank 0 leaves the result."""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dilkit.comm import Comm
from dilkit.comm.launch.ranks import run_ranks
from dilkit.tools.demo.ranks.task import RanksTask, Setup, record, trained
from dilkit.tools.demo.text.record import Budget
from dilkit.tools.demo.trainer import Trainer
from dilkit.tools.results.decode import encode
from dilkit.tools.results.file import write_text

SETUP, PROGRESS, FOUND = "setup", "progress.json", "found"
"""Files of the folder."""
TIMEOUT = 300.0
"""Seconds that a rank waits for another: on a busy machine a step may take long."""


def main() -> int:
    """What the processes run."""
    folder = Path(sys.argv[1])
    setup: Setup = pickle.loads((folder / SETUP).read_bytes())
    return run_ranks("torch", partial(_train, setup, folder), timeout=TIMEOUT)


def _train(setup: Setup, folder: Path, world: Comm) -> int:
    """Train; rank 0 writes the course so far after each step, and in the end what was found."""
    task = RanksTask(setup, world, threading.Event())
    trainer = Trainer(task, Budget(steps=setup.steps))
    after_step: Callable[[], Any] = (lambda: None) if world.rank else partial(_write_progress, trainer, task, folder)
    trainer.run(1, after_step, lambda: None)
    found = trained(trainer, task, world)
    if world.rank == 0:
        (folder / FOUND).write_bytes(pickle.dumps(found))
    return 0


def _write_progress(trainer: Trainer, task: RanksTask, folder: Path) -> None:
    write_text(folder / PROGRESS, json.dumps(encode(record(trainer, task))))


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # torch 2.13 may abort as it frees what FSDP2 has made of process groups; nobody needs that done
