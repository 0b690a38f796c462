"""The transport: one primitive, the all-to-all of rows between the ranks of a process group, with errors in place of hangs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from dilkit.checks import not_distributed, real
from dilkit.comm.transports.errors import CommError, PlanMismatch, ranks_text
from dilkit.comm.transports.records import LONGEST_RECORD, RECORD_BYTES, VERSION, packed, unpacked

DEFAULT_TIMEOUT = 300.0
PeerBytes: TypeAlias = "list[tuple[int, Tensor]]"
"""Bytes sent to, or received from, other ranks: `(rank, bytes)`."""


@dataclass
class Pending:
    """Rows under way, as `Comm.exchange` returns them.

    `wait()` returns the rows received, as often as it is called, or raises a `CommError` that names rank and step. What can be
    computed before they are needed is computed between `exchange` and `wait`.

        >>> import torch
        >>> from dilkit.comm import run_threads
        >>> def on_rank(comm):
        ...     pending = comm.exchange(torch.full((2, 1), comm.rank), send_counts=[1, 1], recv_counts=[1, 1])
        ...     return pending.wait().tolist()  # one row from each rank
        >>> run_threads(2, on_rank)
        [[[0], [1]], [[0], [1]]]
    """

    rows: Tensor
    finish: Callable[[], None] | None
    keep: Tensor | None = field(repr=False, default=None)
    """The tensor being sent: it must not change, nor be freed, before all is done."""

    def wait(self) -> Tensor:
        """Return the rows received, `(sum(recv_counts), width)`, by source rank."""
        if self.finish is not None:
            self.finish()
            self.finish = self.keep = None
        return self.rows


class Comm(ABC):
    """The process group, ranks 0 .. size - 1, seen from one of them. The base class of `MPIComm`, `TorchComm` and thread ranks.

    All ranks make the same calls of `exchange`, `share` and `agree` in the same order: each call has a number, the same on
    all ranks, which pairs messages and is named in errors. After an error the transport is not to be used again.

    A transport of your own defines `_post`, which moves bytes, and `abort`.

        >>> from dilkit.comm import run_threads
        >>> run_threads(2, lambda comm: (comm.rank, comm.size, comm.share(f"from {comm.rank}".encode())))
        [(0, 2, [b'from 0', b'from 1']), (1, 2, [b'from 0', b'from 1'])]
    """

    rank: int
    size: int
    timeout: float
    """Seconds that a wait may take before `CommTimeout`."""
    along: str = ""
    """The dimension of a device mesh that ranks are counted along, for errors: " along 'cp'"; empty without a mesh."""
    sent_bytes: int
    """Bytes of rows that this rank has sent to others so far; what `share` and `agree` send is not counted."""
    exchanges: int
    """Number of exchanges that have begun, those of `share` and `agree` too: the same on all ranks at the same call."""
    handle: str
    """Name by which compiled code of this process finds this transport."""
    _version = VERSION
    _record_device = torch.device("cpu")
    """The device on which the rows of `share` have to lie."""

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, real("timeout", timeout, above=0)
        self.sent_bytes = self.exchanges = 0
        self.handle = str(next(_NUMBERS))
        _TRANSPORTS[self.handle] = self
        self._broken: str | None = None

    def exchange(self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], step: str = "rows") -> Pending:
        """Begin an all-to-all: send `rows` `(sum(send_counts), width)`, those for rank 0 first, and receive in the same way.

        `send_counts[t]` rows go to rank t, `recv_counts[t]` come from it; a rank may send to itself. `step` says what the rows
        are, for errors. Raises ValueError or TypeError for rows that are not contiguous or do not fit the counts, `CommError`
        when the ranks cannot go on.
        """
        self._check(rows, send_counts, recv_counts)
        rows = rows.detach()
        received = rows.new_empty(sum(recv_counts), rows.shape[1])
        self.sent_bytes += (len(rows) - send_counts[self.rank]) * rows.shape[1] * rows.element_size()
        return self._begin(rows, send_counts, received, recv_counts, step)

    def share(self, record: bytes, step: str = "record") -> list[bytes]:
        """Return the records of all ranks, by rank (an all-gather of short texts). At most 986 bytes each.

        Raises `PeerLost` for a record that was damaged on its way: ranks go on from there by what records say. Raises
        `PlanMismatch`, on every rank, where ranks run different versions of dilkit: their bits may differ, and what they send.
        """
        if len(record) > LONGEST_RECORD:
            raise ValueError(f"record has {len(record)} bytes; at most {LONGEST_RECORD}")
        sent = bytearray(packed(record, self._version) * self.size)
        rows = torch.frombuffer(sent, dtype=torch.uint8).view(self.size, RECORD_BYTES)
        rows, ones = rows.to(self._record_device), [1] * self.size
        got = self._begin(rows, ones, torch.empty_like(rows), ones, step).wait().cpu().numpy()
        with self.broken_by_errors():
            return unpacked([row.tobytes() for row in got], f"{step}{self.along}")

    def agree(self, digest: bytes, step: str = "agreement") -> None:
        """Return if `digest` is the same on every rank; else raise `PlanMismatch` on every rank, naming who differs."""
        all_digests = self.share(digest, step)
        common = max(all_digests, key=all_digests.count)
        if odd := [rank for rank, other in enumerate(all_digests) if other != common]:
            raise PlanMismatch(f"{step}{self.along}: {ranks_text(odd)} of {self.size} differs from the others", odd, step)

    def __deepcopy__(self, memo: dict[int, object]) -> Comm:
        """Itself: a copy of a module that holds a transport, as `nn.TransformerEncoder` makes, sends through the same one."""
        return self

    @abstractmethod
    def abort(self, why: BaseException) -> None:
        """Give up: make the other ranks fail at once, if they can be reached, in place of waiting for this one."""

    @abstractmethod
    def _post(self, send: PeerBytes, recv: PeerBytes, device: torch.device, number: int, step: str) -> Callable[[], None]:
        """Begin to send and receive contiguous byte tensors on `device`, none of them empty. Returns what waits for the end.

        It is called on every rank for every exchange, with two empty lists where a rank has no part in it: what moves the bytes
        may be a collective operation, which waits for all.
        """

    def _begin(
        self, rows: Tensor, send_counts: Sequence[int], received: Tensor, recv_counts: Sequence[int], step: str
    ) -> Pending:
        if self._broken:
            raise CommError(f"{step}: this transport failed before and cannot be used again ({self._broken})", step=step)
        self.exchanges += 1
        sent, parts = torch.split(rows, [*send_counts]), torch.split(received, [*recv_counts])
        parts[self.rank].copy_(sent[self.rank])
        if self.size == 1:
            return Pending(received, None)
        with self.broken_by_errors():
            finish = self._post(self._to_others(sent), self._to_others(parts), rows.device, self.exchanges, step)

        def guarded() -> None:
            with self.broken_by_errors():
                finish()

        return Pending(received, guarded, rows)

    def _to_others(self, parts: Sequence[Tensor]) -> PeerBytes:
        some = [(peer, part) for peer, part in enumerate(parts) if peer != self.rank and part.numel()]
        return [(peer, part.view(torch.uint8).view(-1)) for peer, part in some]

    @contextmanager
    def broken_by_errors(self) -> Iterator[None]:
        """Within the block, an error makes this transport unusable, unless it has one rank only.

        Messages of a broken exchange may still be under way, and the other ranks go on to exchanges that this one does not make.
        """
        try:
            yield
        except BaseException as error:
            if self.size > 1:
                self._broken = f"{type(error).__name__}: {error}"
            raise

    def _check(self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> None:
        if not isinstance(rows, Tensor):
            raise TypeError(f"rows is a {type(rows).__name__}; a torch.Tensor is needed")
        not_distributed("rows", rows)
        if rows.dim() != 2 or not rows.is_contiguous():
            raise ValueError(
                f"rows has shape {tuple(rows.shape)} and strides {rows.stride()}; contiguous (rows, width) is needed: bytes are "
                "sent in the order in which they lie in memory (rows.contiguous())"
            )
        for name, counts in (("send_counts", send_counts), ("recv_counts", recv_counts)):
            if len(counts) != self.size or min(counts) < 0:
                raise ValueError(f"{name}={list(counts)} must have one count, 0 or more, for each of the {self.size} ranks")
        if send_counts[self.rank] != recv_counts[self.rank]:
            raise ValueError(
                f"send_counts={list(send_counts)} and recv_counts={list(recv_counts)} differ about what rank {self.rank} sends "
                f"to itself: {send_counts[self.rank]} rows, or {recv_counts[self.rank]}"
            )
        if sum(send_counts) != len(rows):
            raise ValueError(f"send_counts={list(send_counts)} add up to {sum(send_counts)}, but rows has {len(rows)} rows")


def check_comm(comm: object) -> None:
    if not isinstance(comm, Comm):
        raise TypeError(f"comm={comm!r} is a {type(comm).__name__}; a dilkit.comm.Comm is needed, such as MPIComm()")


_TRANSPORTS: WeakValueDictionary[str, Comm] = WeakValueDictionary()
"""Transports by their handles: compiled code holds texts, not objects."""
_NUMBERS = count()


def transport_of(handle: str) -> Comm:
    """Return the transport with this handle. Raises RuntimeError if it is gone, or was one of another process."""
    comm = _TRANSPORTS.get(handle)
    if comm is None:
        raise RuntimeError(
            f"comm: no transport of this process has the handle {handle!r}; code that was compiled for a transport runs as long "
            "as that is kept: keep it, or compile the code again with another"
        )
    return comm


def staged(
    post: Callable[[PeerBytes, PeerBytes], Callable[[], None]], send: PeerBytes, recv: PeerBytes, device: torch.device
) -> Callable[[], None]:
    """Do `post(send, recv)`, which returns what waits for the end, with copies in host memory."""
    buffers = [(peer, _host_memory(part)) for peer, part in recv]
    wait = post(host_copies(send, device), buffers)

    def finish() -> None:
        wait()
        for (_, host), (_, part) in zip(buffers, recv, strict=True):
            part.copy_(host, non_blocking=True)  # in the order of the current stream of the device

    return finish


def host_copies(parts: PeerBytes, device: torch.device) -> PeerBytes:
    """Copy `parts` to host memory; the copies are complete when this returns."""
    copies = [(peer, _host_memory(part).copy_(part, non_blocking=True)) for peer, part in parts]
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return copies


def _host_memory(part: Tensor) -> Tensor:
    """Allocate host memory like `part`, pinned for CUDA: copies then run at the bus's speed, and keep it until they are done."""
    return torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=part.device.type == "cuda")
