"""Transports by a text each, as the torch operators name them: compiled code holds texts, not objects."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from dilkit.comm.transports.base import Comm

_TRANSPORTS: WeakValueDictionary[str, Comm] = WeakValueDictionary()
_NUMBERS = count()


def handle_of(comm: Comm) -> str:
    """A text for `comm`, which no other transport of this process is given."""
    handle = str(next(_NUMBERS))
    _TRANSPORTS[handle] = comm
    return handle


def transport_of(handle: str) -> Comm:
    """The transport with this handle. Raises RuntimeError if it is gone, or was one of another process."""
    comm = _TRANSPORTS.get(handle)
    if comm is None:
        raise RuntimeError(
            f"comm: no transport of this process has the handle {handle!r}; code that was compiled for a transport runs as long "
            "as that is kept: keep it, or compile the code again with another"
        )
    return comm
