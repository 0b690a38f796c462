"""What is worked out once for a pattern, a length and a number of heads, and kept: index tables and whatever backends derive."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dilkit import _plan, environment
from dilkit.cache import ByteLRU, CacheInfo, V
from dilkit.checks import integer
from dilkit.pattern import DilatedSegment, Pattern

Index: TypeAlias = NDArray[np.int32] | NDArray[np.int64]
"""Row numbers: int32 below 2**31 tokens, else int64."""

_CACHE = ByteLRU(environment.cache_bytes)


def cached(key: Hashable, make: Callable[[], V]) -> V:
    """`make()`, kept under `key` in the one cache of the process, which `DILKIT_CACHE_BYTES` bounds.

    Start the key with a name of your own, as all users share the cache, and put a pattern in as text, which hashes faster:
    `("sdpa", pattern.to_json(), seq)`. The value needs `nbytes`.
    """
    return _CACHE.get(key, make)


def cache_info() -> CacheInfo:
    """Hits, misses, entries, bytes and limit of the cache."""
    return _CACHE.info()


def cache_clear() -> None:
    """Empty the cache and its counts."""
    _CACHE.clear()


@dataclass(frozen=True, eq=False)
class BranchTable:
    """The rows of one branch of segments, as independent problems: one for each distinct offset `o` and segment `s`.

        rows[pointers[o, s] : pointers[o, s + 1]] = [p in segment s with (p mod segment_length) mod dilation_rate == offsets[o]]

    Through this branch, the queries at these rows (of the heads with this offset) see the keys at these rows and no others.
    All arrays are read-only; `torch.tensor(array)` copies one without a warning.
    """

    kind: str
    segment_length: int
    """Tokens in a segment, at most `seq`; the last segment may be shorter."""
    dilation_rate: int
    """The pattern's rate."""
    offsets: NDArray[np.int64]
    """`(offsets,)`: the distinct offsets of the heads that the branch serves, ascending."""
    head_offset: NDArray[np.int32]
    """`(heads,)`: for each query head the index of its offset in `offsets`, -1 where the branch does not serve it."""
    rows: Index
    """`(kept,)`: by offset, then ascending."""
    pointers: Index
    """`(offsets, segments + 1)`: an offset that keeps nothing in a segment has an empty range there."""

    @property
    def segments(self) -> int:
        """The number of segments, a short last one included."""
        return int(self.pointers.shape[1]) - 1

    def kept(self, offset_index: int, segment: int) -> Index:
        """The rows of one problem: a view, `rows[pointers[offset_index, segment] : pointers[offset_index, segment + 1]]`."""
        start, stop = self.pointers[offset_index, segment : segment + 2]
        return self.rows[start:stop]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.offsets.nbytes + self.head_offset.nbytes + self.rows.nbytes + self.pointers.nbytes


@dataclass(frozen=True, eq=False)
class Plan:
    """The index tables of a pattern for `seq` tokens, `heads` query and `kv_heads` key/value heads, branch by branch.

    Which rows meet, before any mask: causality, padding and `overlap` are left to whoever computes.
    """

    seq: int
    heads: int
    kv_heads: int
    branches: tuple[BranchTable, ...]
    nbytes: int


def plan_of(pattern: Pattern, seq: int, heads: int, kv_heads: int | None = None) -> Plan:
    """The index tables of `pattern`, made once and kept in the cache. `kv_heads` defaults to `heads`.

    Raises TypeError or ValueError for a size that cannot be or a pattern that does not fit the heads.
    """
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern={pattern!r} is a {type(pattern).__name__}; a dilkit.Pattern is needed")
    seq, heads = integer("seq", seq, at_least=0), integer("heads", heads, at_least=1)
    kv_heads = heads if kv_heads is None else integer("kv_heads", kv_heads, at_least=1)
    key = ("plan", pattern.to_json(), seq, heads, kv_heads)
    return cached(key, partial(_plan_of, pattern, seq, heads, kv_heads))


def _plan_of(pattern: Pattern, seq: int, heads: int, kv_heads: int) -> Plan:
    pattern.check_heads(heads, kv_heads)
    tables = tuple(_table(pattern, branch, seq, heads, kv_heads) for branch in pattern.branches)
    return Plan(seq, heads, kv_heads, tables, sum(table.nbytes for table in tables))


def _table(pattern: Pattern, branch: DilatedSegment, seq: int, heads: int, kv_heads: int) -> BranchTable:
    if branch.kind not in _TABLES:
        raise ValueError(f"branch {branch!r} is of kind {branch.kind!r}; index tables are known for {', '.join(_TABLES)}")
    return _TABLES[branch.kind](pattern, branch, seq, heads, kv_heads)


def _segment_table(pattern: Pattern, branch: DilatedSegment, seq: int, heads: int, kv_heads: int) -> BranchTable:
    rate, group = branch.dilation_rate, heads // kv_heads
    of_head = {h: pattern.head_offset(rate, h // group, kv_heads) for h in range(heads) if branch.serves(h)}
    offsets = sorted(set(of_head.values()))
    index = {offset: i for i, offset in enumerate(offsets)}
    head_offset = np.array([index[of_head[h]] if h in of_head else -1 for h in range(heads)], np.int32)

    length = min(branch.segment_length, max(seq, 1))
    full, tail = divmod(seq, length)
    kept = sum(full * len(range(offset, length, rate)) + len(range(offset, tail, rate)) for offset in offsets)
    dtype: np.dtype[Any] = np.dtype(np.int32 if seq < 2**31 else np.int64)
    rows, pointers = np.empty(kept, dtype), np.empty((len(offsets), full + (tail > 0) + 1), dtype)
    starts = np.array(offsets, np.int64)
    _plan.fill_segments(rows, pointers, starts, seq, length, min(rate, max(seq, 1)))
    for array in (starts, head_offset, rows, pointers):
        array.setflags(write=False)
    return BranchTable(branch.kind, length, rate, starts, head_offset, rows, pointers)


_TABLES: dict[str, Callable[[Pattern, DilatedSegment, int, int, int], BranchTable]] = {DilatedSegment.kind: _segment_table}
