"""Sequences that are decoded: prompts, chunks and steps in any order, forked and taken back, each row against the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from fuzz.calls import Call, tensors_of
from fuzz.checks import require, require_right
from torch import Tensor

from dilkit import DilatedCache, PagedCache
from dilkit.pattern import PatternError
from dilkit.testing.tensors import Tensors

POOL = 1 << 22
MOST_ROLLBACK = 3


def decoded(world: Any, call: dict[str, Any], actions: Sequence[tuple[int, int]], page_rows: int) -> None:
    """All sequences of a batch, each as fast as `actions` say, in one `PagedCache`, and at one pace in a `DilatedCache`.

    An action is a number of rows for a sequence; 0 forks it and goes on with the copy, less takes so many rows back.
    """
    one = Call.from_data(call)
    one = replace(one, case=replace(one.case, is_causal=True, mask="none", values="normal", dropout_p=0.0), through_lse=False)
    tensors = tensors_of(one)
    try:
        caches = _Paged(one, tensors, page_rows), _Together(one, tensors)
    except PatternError:  # a grid, or heads that a cache does not take
        return
    for cache in caches:
        for which, rows in actions:
            cache.act(which, rows)
        cache.finish()
        require_right(replace(one, wants=(False,) * 3), tensors, {"out": cache.out})


class _Together:
    """All sequences of the batch in a `DilatedCache`."""

    def __init__(self, one: Call, tensors: Tensors) -> None:
        case = one.case
        self.rows, self.seq = tensors.qkv, case.seq
        self.options: dict[str, Any] = dict(scale=case.scale, sink=tensors.sink)
        self.out = torch.full_like(tensors.query, torch.nan, memory_format=torch.contiguous_format)
        shortest = min(branch.forgets_every for branch in case.pattern.branches)
        self.longest = 0
        """Tokens at most so far: what is taken back counts from there."""
        self.cache = DilatedCache(case.pattern, case.kv_heads or case.heads, rollback=min(MOST_ROLLBACK, shortest))

    def act(self, which: int, rows: int) -> None:
        seen = self.cache.seen
        if rows < 0:
            if seen == self.longest:
                self.cache.crop(max(0, seen + max(rows, -self.cache.rollback)))
        elif rows == 0:
            restored = DilatedCache(self.cache.pattern, self.cache.kv_heads, rollback=self.cache.rollback)
            restored.load_state_dict(self.cache.state_dict())
            self.cache = restored
        else:
            self._attend(min(rows, self.seq - seen))

    def _attend(self, count: int) -> None:
        own = slice(self.cache.seen, self.cache.seen + count)
        if count:
            self.out[:, own] = self.cache.attend(*(x[:, own].detach() for x in self.rows), **self.options)
            self.longest = max(self.longest, own.stop)

    def finish(self) -> None:
        self._attend(self.seq - self.cache.seen)


class _Paged:
    """Each sequence of the batch by itself in a `PagedCache`, the pages of which hold NaN before anything is stored."""

    def __init__(self, one: Call, tensors: Tensors, page_rows: int) -> None:
        case = one.case
        sizes = case.heads, case.kv_heads or case.heads, case.head_dim
        options: dict[str, Any] = dict(page_rows=page_rows, rollback=MOST_ROLLBACK, dtype=tensors.query.dtype)
        page = 2 * page_rows * sizes[1] * sizes[2] * tensors.query.dtype.itemsize
        self.cache = PagedCache(case.pattern, *sizes, nbytes=max(POOL, 200 * page), **options)
        self.cache.pool.rows.fill_(torch.nan)
        self.rows, self.seq = tensors.qkv, case.seq
        self.options: dict[str, Any] = dict(scale=case.scale, sink=tensors.sink)
        self.numbers = [self.cache.add() for _ in range(len(tensors.query))]
        self.longest = [0] * len(self.numbers)
        self.out = torch.full_like(tensors.query, torch.nan, memory_format=torch.contiguous_format)

    def act(self, which: int, rows: int) -> None:
        which %= len(self.numbers)
        number, seen = self.numbers[which], self.cache.seen(self.numbers[which])
        if rows < 0 and seen == self.longest[which]:
            self.cache.crop(number, max(0, seen + max(rows, -MOST_ROLLBACK)))
        elif rows == 0:
            self.numbers[which] = self.cache.fork(number)
            self.cache.drop(number)
        elif rows > 0:  # another sequence has a row, too
            self._attend([min(rows, self.seq - seen) if i == which else min(1, self._left(i)) for i in range(len(self.numbers))])

    def _left(self, which: int) -> int:
        return self.seq - self.cache.seen(self.numbers[which])

    def _attend(self, counts: list[int]) -> None:
        starts = [self.cache.seen(number) for number in self.numbers]
        places = [(i, slice(start, start + count)) for i, (start, count) in enumerate(zip(starts, counts, strict=True))]
        query, key, value = (torch.cat([x[i, own].detach() for i, own in places]) for x in self.rows)
        if not len(query):
            return
        out = self.cache.attend(query, key, value, self.numbers, counts, **self.options)
        parts: list[Tensor] = list(out.split(counts))
        for (i, own), part in zip(places, parts, strict=True):
            self.out[i, own] = part
            self.longest[i] = max(self.longest[i], own.stop)

    def finish(self) -> None:
        self._attend([self._left(i) for i in range(len(self.numbers))])
        for number in self.numbers:
            self.cache.drop(number)
        require(self.cache.pool.free == self.cache.pool.pages, "pages have not come back")
