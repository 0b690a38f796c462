"""What training needs of ranks besides the attention: parameters that start equal, and gradients added up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dilkit.checks import integer
from dilkit.comm.agreement import agree_on
from dilkit.comm.transports.base import Comm


def sum_over_ranks(tensors: Sequence[Tensor], comm: Comm) -> None:
    """Put in place of each tensor its sum over the ranks: bitwise the same on every rank, and in every run.

    Each rank is sent its part of all numbers, adds it up in fp32 (fp64 if a tensor is fp64), rank by rank, and sends the sums
    to the others: `2 (p - 1) / p` times the numbers in all. For gradients, after `backward()`:

        sum_over_ranks([p.grad for p in model.parameters()], comm)

    Raises TypeError for what are no floating-point tensors, ValueError for those of several devices, `PlanMismatch` where ranks
    differ in number, shapes, dtypes or kind of device.
    """
    _agree(tensors, comm, "sum_over_ranks")
    if comm.size == 1 or not tensors:
        return
    wide = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
    numbers = torch.cat([x.detach().reshape(-1).to(wide) for x in tensors])[:, None]
    cuts = [rank * len(numbers) // comm.size for rank in range(comm.size + 1)]
    counts = [stop - start for start, stop in pairwise(cuts)]
    own = counts[comm.rank]
    total, *others = comm.exchange(numbers, counts, [own] * comm.size, "parts of sums").wait().split([own] * comm.size)
    for part in others:
        total += part
    sums = comm.exchange(total.repeat(comm.size, 1), [own] * comm.size, counts, "sums").wait()
    for x, part in zip(tensors, sums.split([x.numel() for x in tensors]), strict=True):
        x.detach().copy_(part.view(x.shape))


def copy_from_rank(tensors: Sequence[Tensor], comm: Comm, source: int = 0) -> None:
    """Put in place of each tensor what rank `source` has: parameters that start equal, whatever was drawn here.

    Raises as `sum_over_ranks` does, and ValueError for a rank that is none.
    """
    if not 0 <= integer("source", source) < comm.size:
        raise ValueError(f"source={source} is no rank; ranks are 0 to {comm.size - 1}")
    _agree(tensors, comm, "copy_from_rank", source=source)
    for x in tensors:
        row = x.detach().contiguous().view(1, -1).clone()
        place = (comm.rank - source) % comm.size  # the source is at 0; at each step, twice as many have it
        held = 1
        while held < comm.size:
            sends, wants = [0] * comm.size, [0] * comm.size
            if place < held and place + held < comm.size:
                sends[(comm.rank + held) % comm.size] = 1
            if held <= place < 2 * held:
                wants[(comm.rank - held) % comm.size] = 1
            came = comm.exchange(row[: sum(sends)], sends, wants, "copies").wait()
            row = came if sum(wants) else row
            held *= 2
        x.detach().copy_(row.view(x.shape))


def _agree(tensors: Sequence[Tensor], comm: Comm, what: str, **more: int) -> None:
    def facts() -> dict[str, object]:
        for x in tensors:
            if not isinstance(x, Tensor) or not x.is_floating_point():
                kind = f"of {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
                raise TypeError(f"tensors holds one that is {kind}; floating-point tensors are needed (None: no gradient came)")
        devices = sorted({str(x.device) for x in tensors})
        if len(devices) > 1:
            raise ValueError(f"tensors lie on {' and '.join(devices)}; one call takes those of one device")
        shapes, dtypes = ([list(x.shape) for x in tensors], [x.dtype for x in tensors])
        kind = devices[0].partition(":")[0] if devices else ""
        return dict(tensors=len(tensors), shapes=str(shapes), dtypes=str(dtypes), device=kind, **more)

    agree_on(comm, facts, step=f"arguments of {what}")
