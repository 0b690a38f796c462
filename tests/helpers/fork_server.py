"""A process that has torch and `dilkit.comm` loaded, and forks jobs from itself: loading them takes longer than most jobs.

`start(program, ...)` has it run a Python program once for each rank of torch.distributed, or once, with the output of all in a
file. One server serves a test process to its end; what it and its jobs use counts as CPU time of the test that is running.

Requests and answers are lines of JSON on the socket that is the server's standard input. A job is a process that leads a
session, loads what the program imports, forks its ranks, and waits for them. As with torchrun, a rank that fails ends the
others: those that still run `GRACE` seconds later are killed.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

GRACE = 2.5
LOADED = ("pytest", "torch.distributed.device_mesh", "dilkit.comm.attention", "dilkit.comm.nn", "dilkit.packed.attention")


class Server:
    """The server, seen by the test process that started it."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        variables = {"PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"}
        with theirs:
            self.process = subprocess.Popen([sys.executable, __file__], stdin=theirs, env={**os.environ, **variables})
        self.answers = self.socket.makefile()

    def ask(self, request: dict[str, Any], *files: int) -> Any:
        from helpers import cpu_time

        socket.send_fds(self.socket, [json.dumps(request).encode() + b"\n"], files)
        answer, seconds = json.loads(self.answers.readline())
        cpu_time.add(seconds)
        return answer

    def end(self) -> None:
        self.answers.close()
        self.socket.close()
        self.process.wait()


@functools.cache
def server() -> Server:
    """That of this process."""
    made = Server()
    atexit.register(made.end)
    return made


class Forked:
    """A job of the server: what `dilkit.comm.launch.processes.Job` asks of a `subprocess.Popen`."""

    def __init__(self, size: int, arguments: Sequence[str], variables: Mapping[str, str], output: IO[bytes]) -> None:
        request = dict(size=size, arguments=[*arguments], variables=dict(variables), folder=str(Path.cwd()))
        self.pid = server().ask(request, output.fileno())
        self.code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            self.code = server().ask(dict(ended=self.pid))
        return self.code

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def serve() -> dict[str, Any] | None:
    """Answer requests to the end of their socket. In the process of a job, return what it shall run."""
    asked, told = socket.socket(fileno=os.dup(0)), 0.0
    while todo := received(asked):
        answer, of_jobs = ended(todo["ended"]) if "ended" in todo else (os.fork(), 0.0)
        if not answer and "ended" not in todo:
            asked.close()
            become(todo)
            return todo
        for file in todo["files"]:
            os.close(file)
        now = time.process_time()
        asked.sendall(json.dumps([answer, of_jobs + now - told]).encode() + b"\n")
        told = now
    return None


def received(asked: socket.socket) -> dict[str, Any]:
    """The next request, with the files that came with it; empty after the last."""
    text, files = b"", []
    while not text.endswith(b"\n"):
        part, more, *_ = socket.recv_fds(asked, 1 << 16, 1)
        text, files = text + part, files + list(more)
        if not part:
            return {}
    return {**json.loads(text), "files": files}


def ended(job: int) -> tuple[int | None, float]:
    """The exit code of a job, None while it runs, and the seconds of CPU time that it and its ranks have used."""
    process, status, used = os.wait4(job, os.WNOHANG)
    return (os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime) if process else (None, 0.0)


def become(todo: dict[str, Any]) -> None:
    """Make this forked process a job of its own."""
    os.setsid()
    (output,) = todo["files"]
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(todo["variables"])
    os.chdir(todo["folder"])
    if "triton" in sys.modules:
        atexit.register(gc.unfreeze)  # or it says that what was frozen has leaked


def run(size: int, arguments: list[str]) -> None:
    """Fork the ranks, wait for their end, and leave: with 1 if one of them failed. 0 ranks are this process itself.

    A program of several ranks is first run under another name than `__main__`, for what it imports.
    """
    running: set[int] = set()
    sys.argv = arguments
    if size > 1:
        runpy.run_path(arguments[0], run_name="loaded")
    for rank in range(size):
        if not (process := os.fork()):
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.environ |= {**of_rank, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
            size = 0
            break
        running.add(process)
    if size:
        os._exit(wait(running))  # to free what is loaded takes longer than to end
    runpy.run_path(arguments[0], run_name="__main__")


def wait(running: set[int]) -> bool:
    """Whether one of these processes failed, after the end of all."""
    failed, end = False, float("inf")
    while running:
        for process in [*running]:
            if time.monotonic() > end:
                os.kill(process, signal.SIGKILL)
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                running.remove(process)
                if status and not failed:
                    failed, end = True, time.monotonic() + GRACE
        time.sleep(0.02)
    return failed


def main() -> None:
    for name in LOADED:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a process that forks others must have no threads"
    gc.collect()
    gc.freeze()  # what is loaded is not looked through for garbage in each job
    job = serve()
    if job is None:
        os._exit(0)
    run(job["size"], job["arguments"])


if __name__ == "__main__":
    main()
