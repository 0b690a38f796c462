"""Who holds which rows of a sequence, and how they get there."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dilkit.checks import integer
from dilkit.comm.agreement import agree_on
from dilkit.comm.cuts import shard_cuts
from dilkit.comm.transport import Comm
from dilkit.pattern import Pattern


def shard(x: Tensor, comm: Comm, pattern: Pattern | None = None, dim: int = 1) -> Tensor:
    """This rank's part of `x`, which every rank holds whole, along `dim`: a copy; differentiable.

    For short sequences and for tests. Of long ones no rank should hold all: see `load_shard`.
    """
    start, stop = _bounds(shard_cuts(x.shape[dim], comm.size, pattern), comm.rank)
    return x.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def unshard(x: Tensor, comm: Comm, dim: int = 1) -> Tensor:
    """The shards of all ranks put together along `dim`, on every rank; without gradients. `x` is this rank's."""

    def facts() -> dict[str, Any]:
        if not isinstance(x, Tensor):
            raise TypeError(f"x is a {type(x).__name__}; a torch.Tensor is needed")
        shape = x.movedim(dim, 0).shape
        return dict(rows=shape[0], shape=list(shape[1:]), dtype=str(x.dtype), device=x.device.type, dim=dim)

    counts = [fact["rows"] for fact in agree_on(comm, facts, ("rows",), "arguments of unshard")]
    x = x.detach().movedim(dim, 0)
    rows = x.reshape(len(x), prod(x.shape[1:])).repeat(comm.size, 1)
    whole = comm.exchange(rows, [len(x)] * comm.size, counts, "shards").wait()
    return whole.view(len(whole), *x.shape[1:]).movedim(0, dim)


def load_shard(path: str | Path, comm: Comm, pattern: Pattern | None = None, dtype: Any = None) -> Tensor:
    """This rank's part of a file of tokens, the only one that it reads: a tensor `(rows, ...)`.

    `path` is an `.npy` file of shape `(seq, ...)`, or a raw file of numbers of numpy dtype `dtype`, `(seq,)`.
    Raises ValueError for a raw file without `dtype` or an `.npy` file with one, and for fewer tokens than ranks.
    """
    if Path(path).suffix == ".npy":
        if dtype is not None:
            raise ValueError(f"dtype={dtype!r} is for raw files; path={str(path)!r} says itself what is in it")
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    elif dtype is None:
        raise ValueError(f"path={str(path)!r} is no .npy file; say what is in it, as dtype='uint16'")
    else:
        tokens = np.memmap(path, dtype=np.dtype(dtype), mode="r")
    start, stop = _bounds(shard_cuts(len(tokens), comm.size, pattern), comm.rank)
    return torch.from_numpy(tokens[start:stop].astype(tokens.dtype.newbyteorder("=")))


def positions(rows: int, comm: Comm, device: torch.device | str | None = None) -> Tensor:
    """The positions in the sequence of this rank's `rows` rows, int64 `(rows,)`: for rotary embeddings."""
    counts = [
        fact["rows"]
        for fact in agree_on(comm, lambda: dict(rows=integer("rows", rows, at_least=0)), ("rows",), "positions of shards")
    ]
    start = sum(counts[: comm.rank])
    return torch.arange(start, start + rows, device=device)


def _bounds(cuts: Sequence[int], rank: int) -> tuple[int, int]:
    """Where a rank's shard begins and ends."""
    return cuts[rank], cuts[rank + 1]
