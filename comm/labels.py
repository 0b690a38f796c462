"""Labels and losses of sharded sequences: rows moved along the sequence, over the borders of shards, and sums by sequence."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from dilkit.checks import integer
from dilkit.comm.agreement import agree_on
from dilkit.comm.collectives import sum_over_ranks
from dilkit.comm.shards import check_tensor, shard_facts
from dilkit.comm.transports.base import Comm, check_comm
from dilkit.op.sequences import check_cu_seqlens, checked_longest


def roll(
    x: Tensor, comm: Comm, shift: int, dim: int = 1, *, fill: float | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Return this rank's shard of the whole sequence rolled along `dim`, without gradients: labels shifted after the cut.

        roll(x)[i] = x[i - shift]        around the ends, as torch.roll; with `fill`, that where there is no such row

    `x` is this rank's shard, of any dtype; shards may differ in length along `dim` alone. `shift=-1` makes labels of tokens, and
    `-k` those of the k-th token ahead (multi-token prediction). `cu_seqlens` int32 `(sequences + 1,)` are the packed sequences of
    all shards together, the same on every rank: none gets rows of another, and `fill` is then needed. Each rank is sent the rows
    that others have for it, at most `abs(shift)` for each border of shards.

    Raises TypeError or ValueError for arguments that do not fit, `PlanMismatch` where ranks differ in them.

        >>> import torch
        >>> from dilkit.comm import roll, run_threads, shard
        >>> tokens = torch.tensor([[3, 5, 7, 9, 11, 13]])
        >>> run_threads(2, lambda comm: roll(shard(tokens, comm), comm, -1, fill=-100).tolist())
        [[[5, 7, 9]], [[11, 13, -100]]]
    """

    def facts() -> dict[str, Any]:
        row_facts = shard_facts(x, dim, "roll") | dict(shift=integer("shift", shift))
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, x, x.shape[dim])
            if fill is None:
                raise ValueError("cu_seqlens without fill; rows from beyond their sequence need a value, such as fill=-100")
        return row_facts | dict(fill=fill, cu_seqlens="" if cu_seqlens is None else str(cu_seqlens.tolist()))

    check_comm(comm)
    ranks = agree_on(comm, facts, "arguments of roll", ("rows",))
    cuts = list(accumulate((fact["rows"] for fact in ranks), initial=0))
    if cu_seqlens is not None:
        checked_longest(cu_seqlens, cuts[-1])
    moved = x.detach().movedim(dim, 0)
    rolled = _exchanged(moved.reshape(len(moved), prod(moved.shape[1:])), comm, cuts, shift).view(moved.shape)
    if fill is not None:
        rows = torch.arange(cuts[comm.rank], cuts[comm.rank + 1])
        ends = torch.tensor([0, cuts[-1]]) if cu_seqlens is None else cu_seqlens.cpu().long()
        sequence = torch.searchsorted(ends, rows, right=True)
        absent = ((rows - shift < ends[sequence - 1]) | (rows - shift >= ends[sequence])).to(x.device)
        rolled.masked_fill_(absent.view(-1, *[1] * (moved.dim() - 1)), fill)
    return rolled.movedim(0, dim).contiguous()


def sum_by_sequence(x: Tensor, comm: Comm, cu_seqlens: Tensor) -> Tensor:
    """Sum the rows of each packed sequence over all ranks, without gradients: losses per document.

        sums[b] = sum over i = cu_seqlens[b] .. cu_seqlens[b + 1] - 1 of x[i]        added in fp32, or in fp64 if `x` is

    `x` `(rows,)` is this rank's shard, floating-point; `cu_seqlens` int32 `(sequences + 1,)` are the sequences of all shards
    together, the same on every rank. Returns `(sequences,)`, the same on every rank.

    Raises TypeError or ValueError for arguments that do not fit, `PlanMismatch` where ranks differ in them.

        >>> import torch
        >>> from dilkit.comm import run_threads, shard, sum_by_sequence
        >>> losses, starts = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 3, 4], dtype=torch.int32)
        >>> run_threads(2, lambda comm: sum_by_sequence(shard(losses, comm, dim=0), comm, starts).tolist())
        [[6.0, 4.0], [6.0, 4.0]]
    """

    def facts() -> dict[str, Any]:
        check_tensor(x, 0)
        if x.dim() != 1 or not x.is_floating_point():
            raise TypeError(f"x is {x.dtype} {tuple(x.shape)}; a floating-point tensor (rows,) is needed")
        check_cu_seqlens(cu_seqlens, x, len(x))
        return dict(rows=len(x), dtype=str(x.dtype), device=x.device.type, cu_seqlens=str(cu_seqlens.tolist()))

    check_comm(comm)
    counts = [fact["rows"] for fact in agree_on(comm, facts, "arguments of sum_by_sequence", ("rows",))]
    checked_longest(cu_seqlens, sum(counts))
    rows = sum(counts[: comm.rank]) + torch.arange(len(x), device=x.device)
    sums = torch.zeros(len(cu_seqlens) - 1, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    sums.index_add_(0, torch.searchsorted(cu_seqlens.long(), rows, right=True) - 1, x.detach().to(sums.dtype))
    sum_over_ranks([sums], comm)
    return sums


def _exchanged(rows: Tensor, comm: Comm, cuts: list[int], shift: int) -> Tensor:
    seq, first = cuts[-1], cuts[comm.rank]
    if not seq:
        return rows.clone()
    send, mine = [], _sources(first, cuts[comm.rank + 1], shift, seq)
    for t in range(comm.size):  # one rank's rows at a time: together they are the whole sequence
        places = _sources(cuts[t], cuts[t + 1], shift, seq)
        send.append(places[(places >= first) & (places < cuts[comm.rank + 1])].sort().values - first)
    receive = [int(((mine >= cuts[t]) & (mine < cuts[t + 1])).sum()) for t in range(comm.size)]
    order = torch.cat(send).to(rows.device)
    received = comm.exchange(rows[order], [len(places) for places in send], receive, "rolled rows").wait()
    return received[mine.argsort().argsort().to(rows.device)]


def _sources(start: int, stop: int, shift: int, seq: int) -> Tensor:
    return (torch.arange(start, stop) - shift) % seq
