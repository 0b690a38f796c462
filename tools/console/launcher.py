"""Starts jobs of several processes on this machine: by `mpirun`, or as ranks of torch.distributed with gloo.

A job has a hard time limit. Its processes are found by a mark in their environment, whatever group or session they moved to, so
that it is known, and mended, when one is left behind.
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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

MARK = "DILKIT_JOB"
LATE = 124
GRACE = 3.0
"""Seconds for which the ranks of torch.distributed may speak after one of them failed."""


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


def transports() -> tuple[str, ...]:
    """What can start processes here: "mpi" if `mpirun` and mpi4py find each other, and "gloo"."""
    return ("mpi", "gloo") if mpi_version() else ("gloo",)


@lru_cache(maxsize=1)
def mpi_version() -> str:
    """Which MPI `mpirun` and mpi4py both are; empty where one is missing, or they do not belong together."""
    if _mpirun() is None:
        return ""
    told = "from mpi4py import MPI; print(MPI.COMM_WORLD.Get_size(), MPI.Get_library_version().split(',')[0].splitlines()[0])"
    done = launch("mpi", 2, ["-c", told], limit=60.0)
    lines = [line for line in done.text.splitlines() if line.startswith("2 ")]
    found = " ".join(lines[0].removeprefix("2 ").strip("\0").replace("Version:", "").split()) if lines else ""
    return found if done.code == 0 and len(lines) == 2 else ""


def launch(
    kind: str, size: int, arguments: Sequence[str], *, threads: int = 1, limit: float = 120.0, options: Sequence[str] = ()
) -> Ended:
    """Run `python arguments...` as `size` ranks, to their end; after `limit` seconds all are killed, with exit code `LATE`.

    `kind` is "mpi" or "gloo"; `options` are further ones of `mpirun`.
    """
    mark = uuid.uuid4().hex
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PRTE_", "PMI_"))}
    env = inherited | {MARK: mark, "OMP_NUM_THREADS": str(threads), "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    command = [sys.executable, *arguments]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        began = time.monotonic()
        try:
            if kind == "mpi":
                code = _by_mpirun(size, command, env, limit, output, options)
            else:
                code = _by_gloo(size, command, env, limit, output)
        finally:  # of a run that is interrupted, nothing stays either
            ended = time.monotonic()
            left_behind = _kill_left_behind(mark)
        output.seek(0)
        return Ended(code, output.read(), ended - began, ended, left_behind)


def _mpirun() -> str | None:
    """The one of this environment, else the first on the path."""
    own = Path(sys.prefix) / "bin" / "mpirun"
    return str(own) if own.exists() else shutil.which("mpirun")


@lru_cache(maxsize=1)
def _is_open_mpi() -> bool:
    told = subprocess.run([str(_mpirun()), "--version"], capture_output=True, text=True, check=False, timeout=30)
    return "Open MPI" in told.stdout


def _by_mpirun(size: int, command: list[str], env: dict[str, str], limit: float, output: IO[str], options: Sequence[str]) -> int:
    more = ("--oversubscribe", "--bind-to", "none") if _is_open_mpi() else ()
    process = _start([str(_mpirun()), *more, *options, "-n", str(size), *command], env, output)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        process.kill()
        process.wait()
        return LATE


def _by_gloo(size: int, command: list[str], env: dict[str, str], limit: float, output: IO[str]) -> int:
    """As torchrun does, sooner and in fewer words: a rank that fails ends the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = env | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    ranks = [_start(command, env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, output) for rank in range(size)]
    end, failed = time.monotonic() + limit, False
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
        if not failed and any(rank.poll() for rank in ranks):
            failed, end = True, min(end, time.monotonic() + GRACE)
        time.sleep(0.02)
    late = not failed and any(rank.poll() is None for rank in ranks)
    for rank in ranks:
        rank.kill()
    codes = [rank.wait() for rank in ranks]
    return LATE if late else next((code for code in codes if code), 0)


def _start(command: list[str], env: dict[str, str], output: IO[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)


def _kill_left_behind(mark: str, grace: float = 2.0) -> int:
    """How many processes of the job still run `grace` seconds after its end: launchers do not wait for those that they kill."""
    end = time.monotonic() + grace
    while (left := _marked(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return len(left)


def _marked(mark: str) -> list[int]:
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
