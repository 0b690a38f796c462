"""What a step costs beside reading what is kept, on one thread; rows kept in fewer bytes; many sequences in one call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dilkit import DilatedCache, PagedCache, Pattern
from dilkit.testing.accuracy import Check
from dilkit.tools.bench.serving.decoding import BACKEND, Steps, Text
from dilkit.tools.bench.serving.entries import checked, timed
from dilkit.tools.bench.serving.record import PAGED, READ, SINGLE, ManySequences, StoredRows
from dilkit.tools.measure.single_call import agreement
from dilkit.tools.results.record import Entries, Entry


def read_kept(steps: Steps) -> None:
    """Add to `steps` as many readings of as many bytes as are kept, of the same ones each time: they lie where kept rows do."""
    rows = torch.ones(max(1, steps.kept_bytes // 4))
    name = steps.named(READ)
    steps.entries[name] = Entry()
    steps.calls[name] = lambda: [rows.sum() for _ in range(steps.count)]


def stored_rows(text: Text, seen: int, stored: str) -> StoredRows:
    """The bytes and the error of a step with rows kept as `stored`, after `seen` tokens of one period."""
    rows = text.chunk(0)
    alike = [DilatedCache(text.pattern, text.heads, stored=dtype) for dtype in (None, stored)]
    for cache in alike:
        cache.attend(*(x[:, :seen] for x in rows), backend=BACKEND)
    plain_bytes, kept_bytes = (cache.nbytes for cache in alike)
    plain, rounded = (cache.attend(*text.after(seen, 1)[0]) for cache in alike)
    error = float((rounded - plain).norm() / plain.norm())
    return StoredRows(stored=stored, seen=seen, kept_bytes=kept_bytes, plain_bytes=plain_bytes, error=error)


def many_sequences(
    pattern: Pattern, lengths: Sequence[int], heads: int, kv_heads: int, head_dim: int, repeats: int
) -> ManySequences:
    """A step for sequences of these lengths: all in one call, and each by its own cache."""
    sizes = dict(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    singles = [DilatedCache(pattern, kv_heads) for _ in lengths]
    for cache, length in zip(singles, lengths, strict=True):
        cache.attend(*_rows(length, **sizes, batch=1), backend=BACKEND)
    pool = 2 * sum(cache.allocated_nbytes for cache in singles) + (1 << 26)
    paged = PagedCache(pattern, heads=heads, kv_heads=kv_heads, head_dim=head_dim, nbytes=pool)
    numbers = [paged.add() for _ in lengths]
    for number, length in zip(numbers, lengths, strict=True):
        paged.attend(*_rows(length, **sizes), [number], [length], backend=BACKEND)
    new = _rows(len(lengths), **sizes)
    calls = {
        PAGED: partial(paged.attend, *new, numbers),
        SINGLE: partial(_one_by_one, singles, new),
    }
    together, alone = (call() for call in calls.values())
    check: Check = agreement(PAGED, together, alone, max(lengths))
    entries: Entries = {PAGED: checked(check), SINGLE: Entry()}
    case = timed(entries, calls, repeats)
    kept = sum(cache.nbytes for cache in singles)
    return ManySequences(pattern=str(pattern), lengths=tuple(lengths), **sizes, kept_bytes=kept, **case)


def _rows(count: int, heads: int, kv_heads: int, head_dim: int, batch: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(count)
    shape = (batch, count) if batch else (count,)
    query = torch.randn(*shape, heads, head_dim, generator=draw)
    key, value = torch.randn(2, *shape, kv_heads, head_dim, generator=draw).unbind()
    return query, key, value


def _one_by_one(caches: Sequence[DilatedCache], new: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return torch.cat([cache.attend(*(x[None, i : i + 1] for x in new))[0] for i, cache in enumerate(caches)])
