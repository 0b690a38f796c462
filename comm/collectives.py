"""Collective operations that training needs besides attention: parameters that start equal, summed gradients, small values."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from dilkit.checks import integer, not_distributed
from dilkit.comm.agreement import agree_on
from dilkit.comm.transports.base import Comm, check_comm
from dilkit.comm.transports.records import LONGEST_RECORD

T = TypeVar("T")


def sum_over_ranks(tensors: Iterable[Tensor], comm: Comm) -> None:
    """Replace each tensor, in place, by its sum over the ranks (an all-reduce): bitwise the same on every rank and in every run.

        x <- x_0 + x_1 + ... + x_(p-1)        added in this order, in fp32 (fp64 if a tensor is fp64)

    Tensors have any shapes and floating-point dtypes, on one device. Each rank receives its part of all numbers from the others,
    adds it up and sends the sums to them (a reduce-scatter and an all-gather): it sends `2 (p - 1) / p` times the numbers.

    Raises TypeError for what are no floating-point tensors, ValueError for tensors on several devices, `PlanMismatch` where ranks
    differ in number, shapes, dtypes or kind of device.

        >>> import torch
        >>> from dilkit.comm import run_threads, sum_over_ranks
        >>> def on_rank(comm):
        ...     weight = torch.ones(2, requires_grad=True)
        ...     (weight * (comm.rank + 1)).sum().backward()
        ...     sum_over_ranks([weight.grad], comm)
        ...     return weight.grad.tolist()
        >>> run_threads(2, on_rank)
        [[3.0, 3.0], [3.0, 3.0]]
    """
    tensors = _agree(tensors, comm, "sum_over_ranks")
    if comm.size == 1 or not tensors:
        return
    wide = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
    numbers = torch.cat([x.detach().reshape(-1).to(wide) for x in tensors])[:, None]
    cuts = [rank * len(numbers) // comm.size for rank in range(comm.size + 1)]
    counts = [stop - start for start, stop in pairwise(cuts)]
    own_count = counts[comm.rank]
    parts = comm.exchange(numbers, counts, [own_count] * comm.size, "parts of sums").wait()
    total, *others = torch.split(parts, [own_count] * comm.size)
    for part in others:
        total += part
    sums = comm.exchange(total.repeat(comm.size, 1), [own_count] * comm.size, counts, "sums").wait()
    for x, part in zip(tensors, torch.split(sums, [x.numel() for x in tensors]), strict=True):
        x.detach().copy_(part.view(x.shape))


def copy_from_rank(tensors: Iterable[Tensor], comm: Comm, source: int = 0) -> None:
    """Replace each tensor, in place, by that of rank `source` (a broadcast): parameters that start equal on all ranks.

    Tensors have any shapes and floating-point dtypes, on one device. Copies travel in `log2(p)` steps: at each, twice as many
    ranks have them.

    Raises what `sum_over_ranks` raises, and ValueError for a `source` that is no rank.

        >>> import torch
        >>> from dilkit.comm import copy_from_rank, run_threads
        >>> def on_rank(comm):
        ...     weight = torch.full((2,), float(comm.rank))
        ...     copy_from_rank([weight], comm, source=1)
        ...     return weight.tolist()
        >>> run_threads(2, on_rank)
        [[1.0, 1.0], [1.0, 1.0]]
    """
    check_comm(comm)
    if not 0 <= integer("source", source) < comm.size:
        raise ValueError(f"source={source} is no rank; ranks are 0 to {comm.size - 1}")
    tensors = _agree(tensors, comm, "copy_from_rank", source=source)
    for x in tensors:
        row = x.detach().contiguous().view(1, -1).clone()
        place = (comm.rank - source) % comm.size  # the source is at 0; at each step, twice as many have it
        held = 1
        while held < comm.size:
            sends, receives = [0] * comm.size, [0] * comm.size
            if place < held and place + held < comm.size:
                sends[(comm.rank + held) % comm.size] = 1
            if held <= place < 2 * held:
                receives[(comm.rank - held) % comm.size] = 1
            copied = comm.exchange(row[: sum(sends)], sends, receives, "copies").wait()
            row = copied if sum(receives) else row
            held *= 2
        x.detach().copy_(row.view(x.shape))


def _agree(tensors: Iterable[Tensor], comm: Comm, what: str, **more: int) -> list[Tensor]:
    """Return the tensors as a list. Raises on every rank unless all pass the same number, shapes, dtypes and kind of device."""
    check_comm(comm)
    parts: list[Tensor] = []

    def facts() -> dict[str, object]:
        parts.extend(_listed(tensors))
        devices = sorted({str(x.device) for x in parts})
        if len(devices) > 1:
            raise ValueError(f"tensors lie on {' and '.join(devices)}; one call takes those of one device")
        shapes, dtypes = ([list(x.shape) for x in parts], [x.dtype for x in parts])
        kind = devices[0].partition(":")[0] if devices else ""
        return dict(tensors=len(parts), shapes=str(shapes), dtypes=str(dtypes), device=kind, **more)

    agree_on(comm, facts, step=f"arguments of {what}")
    return parts


def _listed(tensors: Iterable[Tensor]) -> list[Tensor]:
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise TypeError(f"tensors is a {type(tensors).__name__}; a list of floating-point tensors is needed")
    listed = list(tensors)
    for x in listed:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = f"of {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise TypeError(f"tensors holds one that is {kind}; floating-point tensors are needed (None: no gradient came)")
        not_distributed("one of tensors", x)
        if x.layout is not torch.strided:
            raise TypeError(f"tensors holds one of layout {x.layout}; plain tensors, torch.strided, are needed")
        if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
            raise ValueError(f"tensors holds one of shape {tuple(x.shape)} whose numbers share memory; pass x.contiguous()")
    return listed


def gather_values(comm: Comm, value: T) -> list[T]:
    """Return small picklable values of all ranks, by rank, on every rank; no transport counts their bytes.

    >>> from dilkit.comm import run_threads
    >>> run_threads(2, lambda comm: gather_values(comm, {"rank": comm.rank}))[0]
    [{'rank': 0}, {'rank': 1}]
    """
    pickled = pickle.dumps(value)
    longest = max(int(length) for length in comm.share(str(len(pickled)).encode(), "lengths of values"))
    pieces = [comm.share(pickled[at : at + LONGEST_RECORD], "values") for at in range(0, longest, LONGEST_RECORD)]
    return [pickle.loads(b"".join(parts)) for parts in zip(*pieces, strict=True)]
