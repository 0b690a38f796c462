"""`TorchComm`: the ranks of a torch.distributed process group as a transport."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from dilkit.comm.transports.base import DEFAULT_TIMEOUT, Comm, PeerBytes, staged
from dilkit.comm.transports.errors import CommError, CommTimeout, PeerLost, ranks_text, report_uncaught

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SHORTEST_WAIT = 0.001
"""Seconds; gloo takes 0 for "no limit"."""
MAX_TAG = 2**31 - 1
TAGS, TRANSPORTS = 2**20, 2**10
"""Tags of one transport, and transports of one group that have tags of their own at a time."""

_made: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


class TorchComm(Comm):
    """The ranks of a torch.distributed process group, by default of all its processes. `timeout` is in seconds.

    `group` may be a `DeviceMesh` of one dimension, such as `mesh["cp"]`: its group is taken, and errors name the dimension.

    Ranks are those of the group, and all of them make their transports of it in the same order. Where gloo serves a device, each
    peer has messages of its own, so that errors name it (CUDA tensors go through host memory). Elsewhere, as with NCCL, an
    exchange is one `all_to_all_single` on this one group, and a timeout names all ranks that may be late. An exception that
    nobody catches is printed, marked with the global rank. Ranks have to agree about counts first (`agree`): gloo ends a process
    that is sent more bytes than it expects.

    Raises RuntimeError if torch.distributed is not initialized, TypeError for what is no process group, ValueError if this
    process is not in the group.

        >>> import torch.distributed as dist
        >>> from dilkit.comm import TorchComm
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> comm = TorchComm(timeout=60.0)
        >>> comm.rank, comm.size
        (0, 1)
        >>> dist.destroy_process_group()

    `torchrun` sets the rank and the world size, so that `init_process_group("gloo")` is enough there.
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        chosen = _group_of(group)
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialized: start the ranks with torchrun and call "
                "torch.distributed.init_process_group('gloo' or 'nccl') first"
            )
        chosen = dist.group.WORLD if chosen is None else chosen
        if not isinstance(chosen, dist.ProcessGroup) or (rank := dist.get_rank(chosen)) < 0:
            raise ValueError(
                f"group={group!r}: process {dist.get_rank()} is not in it; only the ranks that were given to new_group may make "
                "a TorchComm of it"
            )
        super().__init__(rank, dist.get_world_size(chosen), timeout)
        self._group = chosen
        if names := getattr(group, "mesh_dim_names", None):
            self.along = f" along {names[0]!r}"
        self._first_tag = next(_made.setdefault(chosen, count())) % TRANSPORTS * TAGS
        if self.size > 1:
            # The process ends, which gloo's peers notice and torchrun acts on.
            report_uncaught(dist.get_rank(), lambda error: None)
        config = dist.get_backend_config(self._group)  # such as cpu:gloo,cuda:nccl
        self._backends: dict[str, str] = dict(pair.split(":") for pair in config.split(","))
        self._record_device = torch.device("cpu" if "cpu" in self._backends else next(iter(self._backends)))

    def abort(self, why: BaseException) -> None:
        """Close gloo's connections, so that ranks waiting for this one fail at once; other backends wait until the timeout."""
        self._broken = f"{type(why).__name__}: {why}"
        if "gloo" in self._backends.values() and self.size > 1:
            # gloo's own abort() leaves connections open. A receive that takes too long closes them all.
            nothing = [((self.rank + 1) % self.size, torch.empty(1, dtype=torch.uint8, device="cpu"))]
            with contextlib.suppress(CommError):
                exchange = _Exchange("abort", "abort", SHORTEST_WAIT)
                exchange.wait(exchange.posted(dist.irecv, nothing, self._group, MAX_TAG), [])

    def _post(self, send: PeerBytes, recv: PeerBytes, device: torch.device, number: int, step: str) -> Callable[[], None]:
        exchange = _Exchange(f"exchange {number} ({step}){self.along}", step, self.timeout)
        if self._backends.get(device.type) != "gloo":
            return self._post_to_all(send, recv, device, exchange)
        tag = self._first_tag + number % TAGS

        def post(send: PeerBytes, recv: PeerBytes) -> Callable[[], None]:
            receives = exchange.posted(dist.irecv, recv, self._group, tag)
            sends = exchange.posted(dist.isend, send, self._group, tag)
            return lambda: exchange.wait(receives, sends)

        return post(send, recv) if self._reads(device) else staged(post, send, recv, device)

    def _reads(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def _post_to_all(self, send: PeerBytes, recv: PeerBytes, device: torch.device, exchange: _Exchange) -> Callable[[], None]:
        if device.type not in self._backends:
            served = ", ".join(f"{backend} for {name}" for name, backend in self._backends.items())
            raise ValueError(
                f"rows are on {device}, but the group has {served} only: move them, or add a backend for {device.type}"
            )
        out, sizes_out = _concatenate(send, self.size, device)
        into, sizes_into = _concatenate(recv, self.size, device)
        work = dist.all_to_all_single(into, out, sizes_into, sizes_out, group=self._group, async_op=True)
        others = [peer for peer in range(self.size) if sizes_into[peer] or sizes_out[peer]]

        def finish() -> None:
            exchange.wait_collective(work, others)
            for (_, part), piece in zip(recv, torch.split(into, [len(part) for _, part in recv]), strict=True):
                part.copy_(piece)

        return finish


def _group_of(group: object) -> object:
    """Return the process group of a `DeviceMesh`; a process group, or None, as it is."""
    if hasattr(group, "get_group"):
        return _group_of_mesh(group)
    if group is None or not dist.is_available() or group is dist.GroupMember.NON_GROUP_MEMBER:
        return group
    if isinstance(group, dist.ProcessGroup):
        return group
    raise TypeError(
        f"group={group!r} is a {type(group).__name__}; a process group or a DeviceMesh of one dimension is needed, such "
        "as mesh['cp']"
    )


def _group_of_mesh(mesh: Any) -> object:
    if mesh.ndim != 1:
        raise ValueError(
            f"group={mesh} has {mesh.ndim} dimensions; name the one that the sequence is cut along, such as "
            f"mesh[{(mesh.mesh_dim_names or ('cp',))[-1]!r}]"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"group={mesh}: process {dist.get_rank()} is not in it; only its ranks may make a TorchComm of it")
    return mesh.get_group()


@dataclass(frozen=True)
class _Exchange:
    name: str
    step: str
    timeout: float

    def posted(self, post: Callable[..., Any], parts: PeerBytes, group: dist.ProcessGroup, tag: int) -> list[tuple[int, Any]]:
        """Call `post` (isend or irecv) for each part; return the requests by peer."""
        works = []
        for peer, part in parts:
            try:
                works.append((peer, post(part, dist.get_global_rank(group, peer), group=group, tag=tag)))
            except RuntimeError as error:
                raise self._lost([peer], error) from error
        return works

    def wait(self, receives: Sequence[tuple[int, Any]], sends: Sequence[tuple[int, Any]]) -> None:
        """Wait for all, in the time of one wait. Raises `PeerLost` and `CommTimeout`."""
        deadline = time.monotonic() + self.timeout
        works = [*receives, *sends]
        for i, (peer, work) in enumerate(works):
            if error := _outcome(work, deadline - time.monotonic()):
                rest = [(p, _outcome(w, 0)) for p, w in (works if i >= len(receives) else receives)[i + 1 :]]
                failed = [(peer, error), *((p, e) for p, e in rest if e)]
                lost = sorted({p for p, e in failed if not _is_timeout(e)})
                if lost:
                    raise self._lost(lost, error) from error
                late = sorted({p for p, _ in failed})
                what = "nothing came from" if i < len(receives) else "nothing was taken by"
                raise CommTimeout(f"{self.name}: {what} {ranks_text(late)} within {self.timeout:g} s", late, self.step) from error

    def wait_collective(self, work: Any, others: Sequence[int]) -> None:
        """Wait for a collective operation, which does not say who is missing."""
        if error := _outcome(work, self.timeout):
            if not _is_timeout(error):
                raise self._lost(others, error) from error
            who = f"one of {ranks_text(others)}" if others else "a rank"
            raise CommTimeout(f"{self.name}: {who} did not take part within {self.timeout:g} s", others, self.step) from error

    def _lost(self, ranks: Sequence[int], error: RuntimeError) -> CommError:
        who = ranks_text(ranks) if ranks else "a rank"
        sentence = re.sub(r"^\[\S+\] ", "", str(error)).partition(". ")[0]  # no source file, as gloo begins with, and no advice
        return PeerLost(f"{self.name}: lost {who}: {sentence}", ranks, self.step)


def _outcome(work: Any, seconds: float) -> RuntimeError | None:
    try:
        work.wait(timedelta(seconds=max(seconds, SHORTEST_WAIT)))
    except RuntimeError as error:
        return error
    return None


def _is_timeout(error: RuntimeError) -> bool:
    """Also true of operations that fail because another one of this rank took too long: gloo then ends them all."""
    return re.search(r"timed out|timeout", str(error), re.IGNORECASE) is not None


def _concatenate(parts: PeerBytes, size: int, device: torch.device) -> tuple[Tensor, list[int]]:
    counts = {peer: len(part) for peer, part in parts}
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    return torch.cat([nothing, *(part for _, part in parts)]), [counts.get(peer, 0) for peer in range(size)]
