"""Shards: which rows of a sequence each rank holds, and how they get there."""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dilkit.checks import check_type, not_distributed
from dilkit.comm.agreement import agree_on
from dilkit.comm.cuts import shard_cuts
from dilkit.comm.operators.positions import first_row, positions_of
from dilkit.comm.reorder import fingerprint
from dilkit.comm.transports.base import Comm, check_comm
from dilkit.compiler import not_compiled
from dilkit.files import check_regular
from dilkit.op.sequences import checked_longest
from dilkit.orders.checks import check_dim, check_tokens, wrong_length
from dilkit.orders.token_order import TokenOrder, check_order
from dilkit.pattern import Pattern


def shard(x: Tensor, comm: Comm, pattern: Pattern | None = None, dim: int = 1, order: TokenOrder | None = None) -> Tensor:
    """Return this rank's shard of `x` along `dim`, a copy; every rank holds `x` whole. Differentiable.

        shard(x) = x[:, cuts[rank] : cuts[rank + 1]]        cuts = shard_cuts(seq, world_size, pattern)

    `x` has any shape and dtype. Its gradient is on each rank that of the rank's own rows: sum it over the ranks. With `order`, it
    is the shard of the tokens put in that order (`order.apply(x, dim)`): attention over ranks then goes along the order with no
    rows to move. Nothing is sent: ranks have to pass the same `pattern` and `order`. For short sequences and for tests; of a long
    sequence no rank should hold all: see `load_shard`.

    Raises ValueError for fewer tokens than ranks, and for an order of another length.

        >>> import torch
        >>> from dilkit.comm import run_threads, shard
        >>> tokens = torch.arange(6).view(1, 6)
        >>> run_threads(2, lambda comm: shard(tokens, comm).tolist())
        [[[0, 1, 2]], [[3, 4, 5]]]
    """
    check_comm(comm)
    check_tensor(x, dim)
    start, stop = shard_cuts(x.shape[dim], comm.size, pattern)[comm.rank : comm.rank + 2]
    if order is not None:
        check_order(order)
        check_tokens(x, dim, order)
        return x.index_select(dim, _part(order, start, stop).to(x.device))
    return x.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def unshard(x: Tensor, comm: Comm, dim: int = 1, order: TokenOrder | None = None) -> Tensor:
    """Gather the whole sequence on every rank: all shards, put together along `dim`, without gradients.

    `x` is this rank's shard, of any dtype; shards may differ in length along `dim` alone. With the `order` that the tokens are
    in, they are put back into row-major order. It is for looking at results: in training each rank has its part of the loss.

    Raises TypeError for what is no tensor, ValueError for one that requires gradients (`x.detach()` does not), `PlanMismatch`
    where ranks differ in the other sizes, dtype, `dim` or `order`.

        >>> import torch
        >>> from dilkit.comm import run_threads, unshard
        >>> run_threads(2, lambda comm: unshard(torch.full((1, 2), comm.rank), comm).tolist())
        [[[0, 0, 1, 1]], [[0, 0, 1, 1]]]
    """
    check_comm(comm)
    facts = partial(shard_facts, x, dim, "unshard", order=order)
    counts = [fact["rows"] for fact in agree_on(comm, facts, "arguments of unshard", ("rows",))]
    if order is not None and sum(counts) != len(order):
        raise wrong_length(f"the shards have {sum(counts)} tokens", sum(counts), order)
    x = x.detach().movedim(dim, 0)
    rows = x.reshape(len(x), prod(x.shape[1:])).repeat(comm.size, 1)
    whole = comm.exchange(rows, [len(x)] * comm.size, counts, "shards").wait()
    whole = whole.view(len(whole), *x.shape[1:]).movedim(0, dim)
    return whole if order is None else order.restore(whole, dim)


def load_shard(
    path: str | Path, comm: Comm, pattern: Pattern | None = None, dtype: Any = None, order: TokenOrder | None = None
) -> Tensor:
    """Load this rank's shard of a file of tokens, a tensor `(rows, ...)`; nothing else of the file is read.

    `path` is an `.npy` file of shape `(seq, ...)`, or a raw file of numbers of numpy dtype `dtype`, `(seq,)`. `pattern` and
    `order` are those of `shard`.

    Nothing is sent: ranks have to see the same file and to pass the same `pattern` and `order`, or rows are left out, or there
    twice.

    Raises ValueError for a raw file without `dtype` or an `.npy` file with one, for a file that is damaged or goes on after its
    array, for fewer tokens than ranks, and for an order of another length.

        >>> import numpy, tempfile
        >>> from dilkit.comm import load_shard, run_threads
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     numpy.save(f"{folder}/tokens.npy", numpy.arange(6))
        ...     run_threads(2, lambda comm: load_shard(f"{folder}/tokens.npy", comm).tolist())
        [[0, 1, 2], [3, 4, 5]]
    """
    check_comm(comm)
    tokens = mapped_tokens(path, dtype)
    start, stop = shard_cuts(len(tokens), comm.size, pattern)[comm.rank : comm.rank + 2]
    rows: Any = slice(start, stop)
    if order is not None:
        check_order(order)
        check_tokens(tokens, 0, order, f"the file {str(path)!r}")
        rows = order.perm[start:stop]
    return torch.from_numpy(tokens[rows].astype(tokens.dtype.newbyteorder("=")))


def positions(
    rows: int,
    comm: Comm,
    device: torch.device | str | None = None,
    order: TokenOrder | None = None,
    *,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Return the positions in the sequence of this rank's `rows` rows, int64 `(rows,)`, for rotary embeddings.

    With the `order` that the tokens were put in before they were sharded, these are their row-major positions. With `cu_seqlens`
    int32 `(sequences + 1,)`, the packed sequences of all shards together, each row has its position in its own sequence. All
    ranks call it, with the same.

    Raises ValueError for a negative number of rows, for an order of another length than all shards together, and for sequences
    that do not end where the shards do; or with both.

        >>> import torch
        >>> from dilkit.comm import positions, run_threads
        >>> run_threads(2, lambda comm: positions(3 - comm.rank, comm).tolist())
        [[0, 1, 2], [3, 4]]
        >>> starts = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> run_threads(2, lambda comm: positions(3 - comm.rank, comm, cu_seqlens=starts).tolist())
        [[0, 1, 0], [1, 2]]
    """
    check_comm(comm)
    if torch.compiler.is_compiling() and order is None and cu_seqlens is None and type(rows) is int and rows >= 0:
        return positions_of(rows, comm, device)
    start, seq = _first_row(rows, comm, device, order, cu_seqlens)
    if order is not None:
        if seq != len(order):
            raise wrong_length(f"the shards have {seq} tokens", seq, order)
        return _part(order, start, start + rows).to(device)
    row_numbers = torch.arange(start, start + rows, device=device)
    if cu_seqlens is None:
        return row_numbers
    checked_longest(cu_seqlens, seq)
    starts = cu_seqlens.to(row_numbers)
    return row_numbers - starts[torch.searchsorted(starts, row_numbers, right=True) - 1]


_first_row = not_compiled(first_row)


def _part(order: TokenOrder, start: int, stop: int) -> Tensor:
    return torch.from_numpy(order.perm[start:stop].astype(np.int64))


def check_tensor(x: Tensor, dim: int) -> None:
    """Raise TypeError or ValueError for what is no plain tensor with this dimension."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}; a torch.Tensor is needed")
    not_distributed("x", x)
    if x.layout is not torch.strided or x.is_nested:
        raise TypeError(f"x has layout {x.layout}; a plain tensor, torch.strided, is needed (x.to_dense())")
    check_dim(x, dim)


def shard_facts(x: Tensor, dim: int, caller: str, order: TokenOrder | None = None) -> dict[str, Any]:
    """Return what ranks compare of shards, and their `rows`, which may differ. Raises as `check_tensor`, and for gradients."""
    check_tensor(x, dim)
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"x of shape {tuple(x.shape)} requires gradients, but {caller} has no backward pass: pass x.detach(), or give "
            "each rank its part of the loss"
        )
    rows, *shape = x.movedim(dim, 0).shape
    return dict(rows=rows, shape=shape, dtype=str(x.dtype), device=x.device.type, dim=dim, order=fingerprint(order))


_NPY = b"\x93NUMPY"
_HEADER_LOCK = threading.Lock()
"""Held while numpy parses a header: in Python 3.11 two threads that parse at once can end in a SystemError (recursion depth)."""
_MALFORMED = (
    *(ValueError, TypeError, EOFError, SyntaxError, MemoryError, OverflowError, RecursionError),
    TokenError,  # what numpy lets through of a header with an open bracket
)


def mapped_tokens(path: str | Path, dtype: Any) -> Any:
    """Map the tokens of a file, `(seq, ...)`. Raises TypeError or ValueError for a path, file or dtype that does not fit."""
    check_type("path", path, (str, os.PathLike), "a path is needed")
    path = Path(path)
    check_regular(path, path.stat(), most=sys.maxsize)
    is_npy = path.suffix == ".npy"
    if is_npy and dtype is not None:
        raise ValueError(f"dtype={dtype!r} is for raw files; path={str(path)!r} has a header with its dtype")
    if not is_npy and dtype is None:
        raise ValueError(f"path={str(path)!r} is no .npy file; name its dtype, as dtype='uint16'")
    return _mapped_npy(path) if is_npy else _mapped_numbers(path, dtype)


def _mapped_npy(path: Path) -> Any:
    try:
        with _HEADER_LOCK, np.errstate(over="ignore"):  # a size that overflows is refused as one that the file does not have
            tokens: Any = np.lib.format.open_memmap(path, mode="r")
    except _MALFORMED as error:
        raise ValueError(f"path={str(path)!r} cannot be read as .npy: {error}") from None
    _check_numbers(path, tokens.dtype, tokens.shape)
    if more := path.stat().st_size - tokens.offset - tokens.nbytes:
        raise ValueError(
            f"path={str(path)!r} goes on for {more} bytes after the {tokens.shape} numbers that its header counts, which would "
            "be left out: save one array in a file, whole"
        )
    return tokens


def _mapped_numbers(path: Path, dtype: Any) -> Any:
    try:
        numbers: Any = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(f"dtype={dtype!r} is no numpy dtype ({error}); give one such as 'uint16'") from None
    _check_numbers(path, numbers.base, ("seq",))
    with path.open("rb") as file:
        if file.read(len(_NPY)) == _NPY:
            raise ValueError(f"path={str(path)!r} begins like an .npy file; rename it to end in .npy")
    try:
        return np.memmap(path, dtype=numbers, mode="r")
    except _MALFORMED as error:
        raise ValueError(f"path={str(path)!r} cannot be read as {dtype}: {error}") from None


def _check_numbers(path: Path, dtype: Any, shape: tuple[Any, ...]) -> None:
    if not shape or dtype.kind not in "biufc" or dtype.itemsize > (16 if dtype.kind == "c" else 8):
        raise ValueError(f"path={str(path)!r} holds {dtype} of shape {shape}; numbers (seq, ...) are needed")
