"""Jobs of several processes on this machine: ranks of `mpirun`, or of torch.distributed with gloo.

    job = start("mpi", 4, ["train.py"])     # `python train.py` as 4 ranks
    ended = job.finish(limit=120.0)         # exit code, output, seconds; `launch` does both

A job has a time limit. Its processes are found by a mark in their environment, whatever group or session they moved to, so that
those that outlive it are known and killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

MARK = "DILKIT_JOB"
LATE = 124
"""The exit code of a job that did not end within its limit."""
NOT_HERE = "" if hasattr(os, "pread") else "jobs of processes are started on POSIX systems alone; here, make ranks as threads"
"""Why this system can start no jobs; empty where it can."""
GRACE = 3.0
"""Seconds for which ranks may go on after one of them failed, so that they can say whom they miss."""
LAUNCHER_VARIABLES = ("OMPI_", "PMIX_", "PRTE_", "PMI_")
"""Variables of launchers for their ranks, which must not reach the ranks of another launcher."""


class JobError(RuntimeError):
    """A job that did not end well. The text holds what it printed."""


@dataclass(frozen=True)
class Ended:
    """A job that has ended: its exit code, what it printed, how long it took, and how many processes it left behind."""

    code: int
    text: str
    seconds: float
    ended_at: float
    """`time.monotonic()`, the same clock in all processes."""
    left_behind: int


@dataclass
class Job:
    """A job that is running: `mpirun`, or one process for each rank."""

    processes: list[subprocess.Popen[bytes]]
    output: IO[bytes]
    mark: str
    began: float

    @property
    def text(self) -> str:
        size = os.fstat(self.output.fileno()).st_size
        return os.pread(self.output.fileno(), size, 0).decode(errors="replace")  # moves no file offset that processes write at

    @property
    def code(self) -> int | None:
        """The exit code, that of the first rank that failed; None while a process is running."""
        codes = [process.poll() for process in self.processes]
        return None if None in codes else next((code for code in codes if code), 0)

    def finish(self, limit: float) -> Ended:
        """Wait for the end. After `limit` seconds, or `GRACE` after a rank failed, all processes are killed."""
        with self.output:
            try:
                late = not self._wait(self.began + limit)
                code = LATE if late else self._end_processes()
            finally:  # of a wait that is interrupted, nothing stays either
                self._end_processes()
                ended = time.monotonic()
                left_behind = self._kill_left_behind()
            return Ended(code, self.text, ended - self.began, ended, left_behind)

    def marked_processes(self) -> dict[int, str]:
        """Command lines of the job's processes that run, by process id; none is known where there is no /proc, as on macOS."""
        wanted, commands = f"{MARK}={self.mark}".encode(), {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
                if any(x.startswith(wanted) for x in (folder / "environ").read_bytes().split(b"\0")):
                    commands[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return commands

    def _wait(self, end: float) -> bool:
        """False if the job has to be ended at `end`, without a failure of its own."""
        failed = False
        while self.code is None and time.monotonic() < end:
            if not failed and any(process.poll() for process in self.processes):
                failed, end = True, min(end, time.monotonic() + GRACE)
            time.sleep(0.02)
        return failed or self.code is not None

    def _end_processes(self) -> int:
        """End those that run, first as they like it: mpirun ends its ranks. Returns the exit code."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        end = time.monotonic() + GRACE
        while self.code is None and time.monotonic() < end:
            time.sleep(0.02)
        for process in self.processes:
            process.kill()
            process.wait()
        return self.code or 0

    def _kill_left_behind(self) -> int:
        """Count the processes that run two seconds after the end: launchers do not wait for those that they kill."""
        end = time.monotonic() + 2.0
        while (left := self.marked_processes()) and time.monotonic() < end:
            time.sleep(0.05)
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return len(left)


def start(
    kind: str,
    size: int,
    arguments: Sequence[str],
    *,
    threads: int = 1,
    options: Sequence[str] = (),
    mpirun: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> Job:
    """Start `python arguments...` as `size` ranks of `kind` "mpi" or "torch"; `options` and `mpirun` are for the first."""
    command, environment = [sys.executable, *arguments], dict(variables or {})
    if kind == "mpi":
        program = mpirun or str(mpi_launchers()[0])
        # Open MPI refuses more ranks than cores unless asked; jobs that run at once would bind to the same cores.
        more = ("--oversubscribe", "--bind-to", "none") if is_open_mpi(program) else ()
        return start_processes([[program, *more, *options, "-n", str(size), *command]], [environment], threads)
    return start_processes([command] * size, [environment | of_rank for of_rank in torch_variables(size)], threads)


def start_processes(commands: Sequence[list[str]], variables: Sequence[Mapping[str, str]], threads: int = 1) -> Job:
    """Start every command, each with its environment variables beside those of this process, all of it one job."""
    if NOT_HERE:
        raise OSError(NOT_HERE)
    mark = f"{os.environ.get(MARK, '')}:{uuid.uuid4().hex}"  # a job within a job bears the marks of both
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env = inherited | {MARK: mark, "OMP_NUM_THREADS": str(threads)} | root
    output, began = tempfile.TemporaryFile(), time.monotonic()  # noqa: SIM115  (the job closes it when it has ended)
    started = [_popen(command, {**env, **more}, output) for command, more in zip(commands, variables, strict=True)]
    return Job(started, output, mark, began)


def launch(
    kind: str, size: int, arguments: Sequence[str], *, threads: int = 1, limit: float = 120.0, options: Sequence[str] = ()
) -> Ended:
    """Run a job as of `start` to its end; after `limit` seconds all is killed, and the exit code is `LATE`."""
    return start(kind, size, arguments, threads=threads, options=options).finish(limit)


def transports() -> tuple[str, ...]:
    """Return the kinds of jobs that can be started here: "torch", and "mpi" if `mpirun` and mpi4py fit each other."""
    return ("mpi", "torch") if mpi_version() else ("torch",)


@lru_cache(maxsize=1)
def mpi_version() -> str:
    """Return the MPI library that `mpirun` and mpi4py share; empty if one is missing or they differ."""
    launchers = mpi_launchers()
    return mpi_hello(launchers[0], limit=60.0)[0] if launchers else ""


def mpi_hello(mpirun: Path, limit: float) -> tuple[str, str]:
    """Run a sum over 2 ranks of mpi4py. Returns the name of their MPI, empty on failure, and their output."""
    ended = start("mpi", 2, ["-c", _HELLO], mpirun=str(mpirun)).finish(limit)
    lines = [line for line in ended.text.splitlines() if line.startswith("2 ")]
    greeting = " ".join(lines[0].removeprefix("2 ").strip("\0").replace("Version:", "").split()) if lines else ""
    late = f"took more than {limit:g} s; " if ended.code == LATE else ""
    return greeting if ended.code == 0 and len(lines) == 2 else "", f"{late}{ended.text}"


_HELLO = """
from mpi4py import MPI
print(MPI.COMM_WORLD.allreduce(1), MPI.Get_library_version().split(',')[0].splitlines()[0])
"""


def mpi_launchers() -> list[Path]:
    """Return every `mpirun`, that of this environment first, then those on the path; else `mpiexec`."""
    on_path = [shutil.which(name) for name in ("mpirun", "mpirun.openmpi", "mpirun.mpich")]
    places = [Path(sys.prefix, "bin", "mpirun"), *(Path(launchers) for launchers in on_path if launchers)]
    launchers = {path.resolve(): path for path in reversed(places) if path.exists()}
    other = shutil.which("mpiexec")
    return list(reversed(launchers.values())) or ([Path(other)] if other else [])


@lru_cache(maxsize=4)
def is_open_mpi(mpirun: str) -> bool:
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False, timeout=30)
    return "Open MPI" in version.stdout


def torch_variables(size: int) -> list[dict[str, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    return [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def _popen(command: list[str], env: dict[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
