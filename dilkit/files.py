"""Files: read only where they are regular and of a sane size, written whole or not at all.

>>> import tempfile
>>> from pathlib import Path
>>> from dilkit import files
>>> with tempfile.TemporaryDirectory() as folder:
...     with files.replacing(Path(folder, "new", "greeting")) as file:
...         _ = file.write(b"hello")
...     files.read_bytes(Path(folder, "new", "greeting"))
b'hello'
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

MOST_BYTES = 256 * 1024**2
"""The largest file that is read: far more than dilkit writes, and nothing that memory has no room for."""
NO_ROOM = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
"""Error numbers where a disk, a file or a user's share of a disk can have no more bytes."""


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read the content of `path`. Raises OSError for anything but a regular file of at most `most` bytes.

    A device such as /dev/zero never ends, and a pipe waits for its other end; neither is opened for longer than to see that.
    """
    check_regular(path, path.stat(), most)  # a folder too, which fdopen would name by a number
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb", closefd=True) as file:
        status = os.fstat(file.fileno())
        check_regular(path, status, most)
        return file.read(status.st_size or most)  # files of /proc say that they are empty


def why_not(error: OSError) -> str:
    """Return the end of a sentence on a file that cannot be used: "does not exist", or else the system's words."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return "does not exist"
    if isinstance(error, IsADirectoryError):
        return "is a folder, and a file is needed"
    if isinstance(error, PermissionError):
        return "is closed to this user: its permissions do not allow it"
    return f"cannot be used: {error.strerror or error}"


def check_regular(path: Path, status: os.stat_result, most: int = MOST_BYTES) -> None:
    """Raise OSError unless this is the status of a regular file of at most `most` bytes."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "no regular file", str(path))
    if status.st_size > most:
        raise OSError(errno.EFBIG, f"{status.st_size:,} bytes, and at most {most:,} are read", str(path))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of `path` in one step when the block ends; if the block raises, `path` stays as it was.

    Its content is on the disk before. Missing folders are made, a device or a pipe is written to directly, and a symbolic link is
    followed. Raises OSError with the path and, where a disk is full, the bytes written, also if the block hides that.
    """
    path = Path(os.path.realpath(path))
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
        else:
            with _temporary(path) as file:
                yield file
    except OSError as error:
        if error.errno is not None and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[IO[bytes]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".dilkit-{secrets.token_hex(8)}"
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # some disks say here alone that they are full
        if path.exists():
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException as error:
        written = temporary.stat().st_size if temporary.exists() else 0
        temporary.unlink(missing_ok=True)
        if full := _no_room(error):
            what = f"{full.strerror} after {written:,} bytes; what was there before is as it was"
            raise OSError(full.errno, what, str(path)) from error
        raise


def _sync_folder(path: Path) -> None:
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _no_room(error: BaseException | None) -> OSError | None:
    """Return the error of a full disk among the causes of `error`: torch.save hides it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return error
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes within the block, where the system can lock folders.

    Raises ValueError if another process holds the lock.
    """
    with contextlib.ExitStack() as open_handles:
        try:
            import fcntl

            handle = os.open(folder, os.O_RDONLY)
            open_handles.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is written to by another run; wait for its end, or choose another folder") from None
        except (ImportError, OSError):  # of another system, or on a disk that locks none
            pass
        yield


def write_privately(path: Path, content: bytes) -> None:
    """Write `content` to `path` if possible, in a folder that only this user can write; a reader never sees half of it."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not why_others_may_write(path.parent):
            with replacing(path) as file:
                file.write(content)


def why_others_may_write(path: Path) -> str:
    """Return why another user may have written `path`; empty if none can have, or if there is no such path."""
    try:
        status = path.stat()
    except OSError:
        return ""
    if hasattr(os, "geteuid") and status.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to another user (uid {status.st_uid}): make it yours"
    if os.name == "posix" and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):o}): run chmod go-w on it"
    return ""
