"""Packed sequences at the boundary to the kernels: where they begin is checked.

cu_seqlens    0          14    20                38 = total
rows          |- seq. 0 -|- 1 -|------- 2 -------|
"""

from __future__ import annotations

import torch
from torch import Tensor

from dilkit.op.boundary import check_device, check_memory, check_tensor, lse_dtype
from dilkit.op.zero_keys import ZeroKeys
from dilkit.problem import Problem

_MANY_ROWS = 2**23
"""Rows of a sequence beyond which a packed call is prepared for its own length: that takes a moment of what the call takes."""


def check_cu_seqlens(cu_seqlens: object, query: Tensor, total: int, name: str = "cu_seqlens", of: str = "query") -> None:
    """Raise TypeError or ValueError unless this tensor can say where sequences of `total` rows begin, whatever its numbers."""
    cu_seqlens = check_tensor(name, cu_seqlens, "an int32 torch.Tensor (sequences + 1,)")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.layout is not torch.strided:
        raise TypeError(f"{name} is {cu_seqlens.dtype}, {cu_seqlens.layout}; torch.int32 is needed ({name}.int())")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"{name} has shape {tuple(cu_seqlens.shape)}; (sequences + 1,) is needed, [0] for none")
    check_device(name, cu_seqlens, query)
    if total >= 2**31:
        raise ValueError(f"{of} has {total} rows; int32 counts to 2**31 - 1: make several calls")


def longest(cu_seqlens: Tensor, max_seqlen: int | None, query: Tensor, mask: Tensor | None) -> int:
    """Return the length that a packed call is prepared for: the longest beyond `_MANY_ROWS`, else a power of two not below it.

    Raises TypeError or ValueError, naming the argument. With `max_seqlen`, numbers on a GPU are left to `assert_lengths`.
    """
    if query.dim() != 4 or query.shape[0] != 1:
        raise ValueError(f"query has shape {tuple(query.shape)}; with cu_seqlens (1, total, heads, head_dim) is needed")
    if mask is not None:
        raise ValueError("key_padding_mask and cu_seqlens cannot go together; leave the ignored keys out of the sequences")
    total = query.shape[1]
    check_cu_seqlens(cu_seqlens, query, total)
    check_memory(("cu_seqlens",), (cu_seqlens,))
    if max_seqlen is not None and max_seqlen < 0:
        raise ValueError(f"max_seqlen={max_seqlen} must be at least 0, the length of the longest sequence")
    if max_seqlen is None or cu_seqlens.device.type == "cpu":
        most = checked_longest(cu_seqlens, total)
        if max_seqlen is not None and most > max_seqlen:
            raise ValueError(f"max_seqlen={max_seqlen}, but cu_seqlens has a sequence of {most} rows; that or None is needed")
        max_seqlen = most
    max_seqlen = min(max_seqlen, total)
    return max_seqlen if max_seqlen > _MANY_ROWS else 1 << (max(max_seqlen, 1) - 1).bit_length()


def longest_keys(starts: Tensor, cu_seqlens: Tensor, keys: Tensor) -> int:
    """Return the length of the longest sequence of keys, beginning at `starts`, rounded as in `longest`; raise as it does."""
    check_cu_seqlens(starts, keys, keys.shape[1], "cu_seqlens_k", "key")
    check_memory(("cu_seqlens_k",), (starts,))
    if starts.shape != cu_seqlens.shape:
        raise ValueError(
            f"cu_seqlens_k is of {len(starts) - 1} sequences and cu_seqlens of {len(cu_seqlens) - 1}; as many are needed"
        )
    most = checked_longest(starts, keys.shape[1], "cu_seqlens_k", "key")
    return most if most > _MANY_ROWS else 1 << (max(most, 1) - 1).bit_length()


def assert_lengths(cu_seqlens: Tensor, max_seqlen: int, total: int) -> None:
    """Have the device of `cu_seqlens` fail where its numbers are not what `checked_longest` and `max_seqlen` ask for.

    Nothing waits for it: a later call says "device-side assert triggered". No kernel has read beyond the tensors by then.
    """
    lengths = cu_seqlens.diff()
    right = ((lengths >= 0) & (lengths <= max_seqlen)).all() & (cu_seqlens[0] == 0) & (cu_seqlens[-1] == total)
    needed = f"from 0 to the {total} rows of query without decreasing, and no sequence longer than max_seqlen={max_seqlen}"
    torch._assert_async(right, f"cu_seqlens is wrong: {needed}; without max_seqlen the error says where")


def checked_longest(cu_seqlens: Tensor, total: int, name: str = "cu_seqlens", of: str = "query") -> int:
    """Return the length of the longest sequence. Raises ValueError unless `cu_seqlens` cuts `total` rows into sequences."""
    lengths = cu_seqlens.diff()
    least, most = (0, 0) if len(lengths) == 0 else (int(x) for x in torch.stack(torch.aminmax(lengths)).tolist())
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0:
        raise ValueError(f"{name} begins with {first}; 0 is needed, the first row of the first sequence")
    if last != total:
        raise ValueError(f"{name} ends with {last}; the number of rows of {of} is needed, {total}")
    if least < 0:
        index = int(lengths.argmin())
        pair = f"from {int(cu_seqlens[index])} to {int(cu_seqlens[index + 1])}"
        raise ValueError(
            f"{name} decreases at index {index + 1}, {pair}; each sequence begins where one ends (lengths.cumsum(0))"
        )
    return most


def places(cu_seqlens: Tensor, total: int) -> Tensor:
    """Return the place of each of `total` rows in its sequence, int32; never read beyond `cu_seqlens`."""
    if not torch.compiler.is_compiling():
        check_memory(("cu_seqlens",), (cu_seqlens,))
    rows = torch.arange(total, dtype=torch.int32, device=cu_seqlens.device)
    return rows - cu_seqlens[_sequence_of(rows, cu_seqlens)]


def _sequence_of(rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    return torch.searchsorted(cu_seqlens.contiguous(), rows, right=True) - 1


def zero_keys(problem: Problem, query: Tensor, cu_seqlens: Tensor) -> ZeroKeys | None:
    """Return the zero keys that the padding of segment tails gives to each sequence; None without any."""
    if problem.pattern.tail != "zeros" or problem.is_causal:
        return None
    rows = torch.arange(query.shape[1], dtype=torch.int32, device=cu_seqlens.device)
    sequence, starts = _sequence_of(rows, cu_seqlens), cu_seqlens.long()
    count = problem.pattern.zero_keys_of(rows - starts[sequence], starts.diff()[sequence], problem.heads, problem.kv_heads)
    return ZeroKeys(0, count.to(lse_dtype(query.dtype)).log())
