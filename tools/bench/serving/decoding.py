"""Steps of decoding after a text of random rows: against what a `DilatedCache` keeps, and against all keys.

chunk 0            chunk 1            chunk 2                    a chunk is one period: all segments begin with it
|------------------|------------------|--------|- steps -|
                                               n                 a point: so many tokens were seen
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dilkit import DilatedCache, Pattern, dilated_attention_with_kvcache
from dilkit.tools.bench.serving.entries import checked
from dilkit.tools.bench.serving.record import CACHE, FULL, KVCACHE, READ, DecodePoint
from dilkit.tools.measure.case import CaseFields
from dilkit.tools.measure.single_call import agreement
from dilkit.tools.measure.timing import Call
from dilkit.tools.results.record import Entry, Samples

BACKEND = "native"
Row = tuple[Tensor, Tensor, Tensor]
"""Query, key and value of one token, `(1, 1, heads, head_dim)` each."""


@dataclass(frozen=True)
class Text:
    """Random rows without an end, the same whenever they are made."""

    pattern: Pattern
    heads: int
    head_dim: int

    @property
    def period(self) -> int:
        """Tokens after which the segments of all branches begin at once."""
        return math.lcm(*self.pattern.segment_lengths)

    @property
    def row_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * 4 * self.heads * self.head_dim

    def filled(self, most: int, count: int) -> int:
        """After how many tokens `count` steps fill the segments of all branches but for one row, within `most` tokens."""
        return most // self.period * self.period - count - 1

    def chunk(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of one period, `(1, period, heads, head_dim)` each."""
        generator = torch.Generator().manual_seed(number)
        query, key, value = torch.randn(3, 1, self.period, self.heads, self.head_dim, generator=generator).unbind()
        return query, key, value

    def after(self, seen: int, count: int) -> list[Row]:
        """The `count` rows after `seen`, which are all of one period."""
        number, first = divmod(seen, self.period)
        query, key, value = self.chunk(number)
        return [(query[:, i : i + 1], key[:, i : i + 1], value[:, i : i + 1]) for i in range(first, first + count)]

    def caches(self, points: Sequence[int]) -> Iterator[tuple[int, DilatedCache]]:
        """A cache that has seen so many tokens, for each of the ascending `points`; every token was attended to."""
        cache = DilatedCache(self.pattern, self.heads)
        for number in range(points[-1] // self.period + 1):
            rows = self.chunk(number)
            for seen in (n for n in points if n // self.period == number):
                ahead = DilatedCache(self.pattern, self.heads)
                ahead.load_state_dict(cache.state_dict())
                ahead.attend(*(x[:, : seen % self.period] for x in rows), backend=BACKEND)
                yield seen, ahead
            cache.attend(*rows, backend=BACKEND)


class FullCache:
    """Keys and values of the first `capacity` rows, all of them, in the layout that each attention reads best.

    `by_row` `(2, 1, capacity, heads, head_dim)`, `by_head` `(2, 1, heads, capacity, head_dim)`.
    """

    def __init__(self, text: Text, capacity: int) -> None:
        self.pattern = text.pattern
        chunks = [torch.stack(text.chunk(number)[1:]) for number in range(-(-capacity // text.period))]
        self.by_row = torch.cat(chunks, dim=2)[:, :, :capacity].contiguous()
        self.by_head = self.by_row.transpose(2, 3).contiguous()

    def dilated(self, rows: Sequence[Row], lengths: Sequence[Tensor]) -> list[Tensor]:
        """Steps of `dilated_attention_with_kvcache`; `lengths` is what it is given as `cache_seqlens`."""
        keys, values = self.by_row
        results: list[Any] = []
        for (query, key, value), length in zip(rows, lengths, strict=True):
            new: dict[str, Any] = dict(key=key, value=value, cache_seqlens=length, backend=BACKEND)
            results.append(dilated_attention_with_kvcache(query, keys, values, self.pattern, **new))
        return results

    def dense(self, rows: Sequence[Row], seen: int) -> list[Tensor]:
        """Steps of torch's attention over all keys so far. New ones are written in place: nothing else is copied."""
        keys, values = self.by_head
        results = []
        for i, (query, key, value) in enumerate(rows, seen):
            keys[:, :, i], values[:, :, i] = key[:, 0], value[:, 0]
            out = scaled_dot_product_attention(query.transpose(1, 2), keys[:, :, : i + 1], values[:, :, : i + 1])
            results.append(out.transpose(1, 2))
        return results


class Steps:
    """The `count` steps after `seen` tokens, by each kind of cache: `full` is there up to its capacity.

    When this is made they are taken once, checked, and not taken back. `calls` and `entries` go by `named` kinds.
    """

    def __init__(self, text: Text, seen: int, count: int, cache: DilatedCache, full: FullCache | None) -> None:
        self.text, self.seen, self.count, self.cache, self.full = text, seen, count, cache, full
        self.kept_bytes, self.rows = cache.nbytes, text.after(seen, count)
        kinds: dict[str, Call] = {CACHE: lambda: [cache.attend(*row) for row in self.rows]}
        if full is not None:
            lengths = [torch.tensor([seen + i], dtype=torch.int32) for i in range(count)]
            kinds |= {KVCACHE: partial(full.dilated, self.rows, lengths), FULL: partial(full.dense, self.rows, seen)}
        self.calls = {self.named(kind): call for kind, call in kinds.items()}
        checks = {kind: agreement(kind, torch.cat(call(), dim=1), self._exact(kind), seen) for kind, call in kinds.items()}
        self.entries = {self.named(kind): checked(check) for kind, check in checks.items()}

    def named(self, kind: str) -> str:
        """The steps by this kind of cache, among those after other numbers of tokens."""
        return f"{kind}, {self.seen}"

    def point(self, timed: CaseFields, filled: bool) -> DecodePoint:
        """What was found of these steps, among the entries `timed`, whose times are of all steps."""
        kinds = [kind for kind in (CACHE, KVCACHE, FULL, READ) if self.named(kind) in self.entries]
        entries = {kind: _of_one_step(timed["entries"][self.named(kind)], self.count) for kind in kinds}
        row = self.text.row_bytes
        return DecodePoint(
            seen=self.seen,
            filled=filled,
            kept_bytes=self.kept_bytes,
            allocated_bytes=self.cache.allocated_nbytes,
            bound_bytes=row * bound_rows(self.text.pattern),
            full_bytes=row * self.seen,
            entries=entries,
            fma=timed["fma"],
        )

    def _exact(self, kind: str) -> Tensor:
        """What the steps get, in fp64 by the definition: of all keys, or of those since all segments began."""
        queries = torch.cat([query for query, _, _ in self.rows], dim=1)
        if kind == FULL and self.full is not None:
            keys, values = self.full.by_row[:, :, : self.seen + self.count]
            return _last_rows(queries, keys, values, Pattern.dense())
        number, first = divmod(self.seen, self.text.period)
        _, keys, values = (x[:, : first + self.count] for x in self.text.chunk(number))
        return _last_rows(queries, keys, values, self.text.pattern)


def bound_rows(pattern: Pattern) -> int:
    """The most rows of a key/value head that a `DilatedCache` keeps, by docs/decoding.md.

    >>> bound_rows(Pattern([2048, 8192, 32768], [1, 4, 16]))
    6144
    """
    return sum(-(-branch.segment_length // branch.dilation_rate) for branch in pattern.segments)


def _of_one_step(entry: Entry, count: int) -> Entry:
    """An entry whose time was that of so many steps."""
    return replace(entry, time=Samples.of([seconds / count for seconds in entry.time.samples_s], count)) if entry.time else entry


def _last_rows(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> Tensor:
    lengths = torch.tensor([key.shape[1]], dtype=torch.int32)
    given = query.double(), key.double(), value.double(), pattern
    out: Any = dilated_attention_with_kvcache(*given, cache_seqlens=lengths, backend="reference")
    return torch.as_tensor(out)
