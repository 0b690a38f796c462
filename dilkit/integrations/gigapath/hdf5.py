"""HDF5 files, read by a process of their own, without torch: over a damaged file HDF5 may hang, or end its process."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

SECONDS, BYTES_A_SECOND = 60.0, 1_000_000
"""Time that a file may take: this, and more for a large one."""
MOST_NUMBERS_A_BYTE = 4096
"""A dataset that claims more bytes for each one stored is damaged: deflate makes at most 1,032 of one."""
_READY = b"ready"
_SERVE = "import sys; sys.path[:] = {path!r}; from dilkit.integrations.gigapath.hdf5 import serve; serve()"


def list_datasets(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Return the shapes of datasets, in groups as GROUP/NAME, and all attributes. Raises ImportError or ValueError."""
    shapes, said = _reader().ask(path, None)
    return shapes, said


def read_dataset(path: Path, name: str) -> Any:
    return _reader().ask(path, name)


def _reader() -> _Reader:
    return _readers.setdefault(os.getpid(), _Reader())


class _Reader:
    """The process that reads, and the answers it gives: one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, path: Path, name: str | None) -> Any:
        if importlib.util.find_spec("h5py") is None:
            raise ImportError(_without_h5py(path, "No module named 'h5py'"))
        with self._lock:
            why, value = self._exchange(path, name)
        if why == "import":
            raise ImportError(_without_h5py(path, value))
        if why:
            raise ValueError(f"{path} {why}")
        return value

    def _exchange(self, path: Path, name: str | None) -> tuple[str, Any]:
        limit = SECONDS + path.stat().st_size / BYTES_A_SECOND
        if self._process is None or self._process.poll() is not None:
            self.end()
            self._process = _started()
        process = self._process
        timer = threading.Timer(limit, process.kill)
        timer.daemon = True
        timer.start()
        try:
            return _asked(process, str(path.absolute()), name)
        except (EOFError, OSError, pickle.UnpicklingError):
            self.end()
            if timer.is_alive():
                return f"is damaged: HDF5 ended with exit code {process.returncode} over it", None
            return f"is damaged: HDF5 was not done with it after {limit:.0f} s", None
        except BaseException:
            self.end()  # half an answer is in the pipe
            raise
        finally:
            timer.cancel()

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe and pipe.close()


_readers: dict[int, _Reader] = {}


@atexit.register
def _end() -> None:
    if reader := _readers.get(os.getpid()):
        reader.end()


def _started() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _SERVE.format(path=sys.path)]
    pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    process = subprocess.Popen(command, **pipes, pipesize=1 << 20)
    if process.stdout is None or process.stdout.read(len(_READY)) != _READY:
        raise OSError(
            f"the process that reads .h5 files ended with exit code {process.wait()}; try {sys.executable} -c 'import dilkit'"
        )
    return process


def _asked(process: subprocess.Popen[bytes], path: str, name: str | None) -> tuple[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    pickle.dump((path, name), process.stdin)
    process.stdin.flush()
    why, value = pickle.load(process.stdout)
    if name is None or why:
        return why, value
    numbers = np.empty(*value)
    room: Any = numbers
    if numbers.nbytes and process.stdout.readinto(memoryview(room).cast("B")) != numbers.nbytes:  # type: ignore[attr-defined]
        raise EOFError
    return "", numbers


def serve() -> None:
    """Answer questions until there are none. Whatever libraries print goes nowhere."""
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with contextlib.suppress(Exception):  # which the first answer reports
        importlib.import_module("h5py")  # before there is a limit of time
    answers.write(_READY)
    answers.flush()
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            path, name = pickle.load(questions)
            _answer(path, name, answers)
            answers.flush()


def _answer(path: str, name: str | None, answers: IO[bytes]) -> None:
    """Write why a file cannot be read, or "", and a value: what `list_datasets` returns, or shape and dtype before numbers."""
    why, value, numbers = "", cast(Any, None), None
    try:
        import h5py

        with h5py.File(path, "r") as file:
            if name is None:
                value = _listed(file)
                pickle.dumps(value)
            else:
                numbers = _numbers(file[name])
                value = (numbers.shape, numbers.dtype.str)
    except ImportError as error:
        why, value = "import", str(error)
    except BlockingIOError:
        why = "is locked by another program: start again when that has closed it (without one, set HDF5_USE_FILE_LOCKING=FALSE)"
    except MemoryError:
        why = "holds more numbers than memory has room for, or is damaged"
    except Exception as error:
        why = f"is damaged, or no .h5 file of numbers: {' '.join(str(error).split())}"
    pickle.dump((why, value), answers)
    if not why and numbers is not None and numbers.nbytes:
        answers.write(memoryview(numbers).cast("B"))


def _listed(file: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    parts = {str(name): file[name] for name in file}  # bytes where a name is damaged
    groups = {name: part for name, part in parts.items() if not hasattr(part, "shape") and hasattr(part, "keys")}
    parts |= {f"{name}/{inner!s}": group[inner] for name, group in groups.items() for inner in group}
    shapes = {name: tuple(part.shape) for name, part in parts.items() if getattr(part, "shape", None) is not None}
    said = {name: value for part in (file, *parts.values()) for name, value in part.attrs.items()}
    plain = (str, bytes, int, float, np.generic, np.ndarray)
    return shapes, {name: value if isinstance(value, plain) else str(value) for name, value in said.items()}


def _numbers(data: Any) -> Any:
    stored = data.id.get_storage_size()
    if data.nbytes > MOST_NUMBERS_A_BYTE * stored and not (data.is_virtual or data.external):
        raise ValueError(f"{data.name} claims {data.shape} numbers, and {stored:,} bytes of them are stored")
    if data.dtype.kind not in "biufc":
        raise TypeError(f"{data.name} is {data.dtype}, no numbers")
    return np.ascontiguousarray(data[()])


def _without_h5py(path: Path, why: str) -> str:
    return f"{path} needs h5py, which cannot be imported ({why}): pip install h5py, or give .pt, .npy or .npz"
