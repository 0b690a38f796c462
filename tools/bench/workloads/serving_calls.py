"""Calls of the suite of serving: steps of decoding, and sequences of different lengths."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from dilkit import DilatedCache, PagedCache, Pattern, dilated_attention, dilated_attention_varlen, dilated_attention_with_kvcache
from dilkit.tools.bench.workloads.ways import BACKEND
from dilkit.tools.measure.case import CaseFields, agreeing, agreement, checked, in_turns
from dilkit.tools.measure.timing import Call
from dilkit.tools.results.rows import ResultRow, rows_of

CACHE, KVCACHE, FULL, READ = "DilatedCache", "dilated_attention_with_kvcache", "torch, full cache", "reading what is kept"
PAGED, SINGLE = "PagedCache", "a DilatedCache each"
PACKED, ALONE, MASKED, PADDED = "packed", "one by one", "padded and masked", "padded"
Token = tuple[Tensor, Tensor, Tensor]
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

    def filled(self, most: int, count: int) -> int:
        """Count the tokens after which `count` steps leave one row free in the segments of all branches; at most `most`."""
        return most // self.period * self.period - count - 1

    def chunk(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of one period, `(1, period, heads, head_dim)` each."""
        generator = torch.Generator().manual_seed(number)
        query, key, value = torch.randn(3, 1, self.period, self.heads, self.head_dim, generator=generator).unbind()
        return query, key, value

    def after(self, seen: int, count: int) -> list[Token]:
        """Return the `count` rows after `seen`, which are all of one period."""
        number, first = divmod(seen, self.period)
        return [*zip(*(torch.split(x[:, first : first + count], 1, dim=1) for x in self.chunk(number)), strict=True)]

    def caches(self, points: Sequence[int]) -> Iterator[tuple[int, DilatedCache]]:
        """Yield a cache that has attended to so many tokens, for each of the ascending `points`."""
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

    def dilated(self, tokens: Sequence[Token], lengths: Sequence[Tensor]) -> list[Tensor]:
        """Take steps of `dilated_attention_with_kvcache`, each with one of `lengths` as `cache_seqlens`."""
        keys, values = self.by_row
        results: list[Any] = []
        for (query, key, value), length in zip(tokens, lengths, strict=True):
            new: dict[str, Any] = dict(key=key, value=value, cache_seqlens=length, backend=BACKEND)
            results.append(dilated_attention_with_kvcache(query, keys, values, self.pattern, **new))
        return results

    def dense(self, tokens: Sequence[Token], seen: int) -> list[Tensor]:
        """Take steps of torch's attention over all keys so far; new keys are written in place, nothing else is copied."""
        keys, values = self.by_head
        results = []
        for i, (query, key, value) in enumerate(tokens, seen):
            keys[:, :, i], values[:, :, i] = key[:, 0], value[:, 0]
            out = scaled_dot_product_attention(query.transpose(1, 2), keys[:, :, : i + 1], values[:, :, : i + 1])
            results.append(out.transpose(1, 2))
        return results


class Steps:
    """The `count` steps after `seen` tokens, by each kind of cache; `full` is used up to its capacity.

    When this is made they are taken once, checked, and not taken back. `filled`: afterwards all segments are full.
    """

    def __init__(
        self, text: Text, seen: int, count: int, cache: DilatedCache, full: FullCache | None, filled: bool, **facts: Any
    ) -> None:
        self.text, self.seen, self.count, self.cache = text, seen, count, cache
        self.case = dict(what=f"{seen:,} tokens{', segments full' * filled}", seen=seen, filled=filled, **facts)
        self.kept_bytes, tokens = cache.nbytes, text.after(seen, count)
        self.calls: dict[str, Call] = {CACHE: lambda: [cache.attend(*token) for token in tokens]}
        number, first = divmod(seen, text.period)
        keys, values = (x[:, : first + count] for x in text.chunk(number)[1:])
        exact = {CACHE: (keys, values, text.pattern), KVCACHE: (keys, values, text.pattern)}
        if full is not None:
            lengths = [torch.tensor([seen + i], dtype=torch.int32) for i in range(count)]
            self.calls |= {KVCACHE: partial(full.dilated, tokens, lengths), FULL: partial(full.dense, tokens, seen)}
            keys, values = full.by_row[:, :, : seen + count]
            exact[FULL] = keys, values, Pattern.dense()
        queries = torch.cat([query for query, _, _ in tokens], dim=1)
        self.entries = {
            kind: checked([agreement(kind, torch.cat(call(), dim=1), _last_rows(queries, *exact[kind]), seen)])
            for kind, call in self.calls.items()
        }

    def read_kept(self) -> None:
        """Add as many readings of as many bytes as are kept, of the same ones each time: they lie where kept rows do."""
        rows = torch.ones(max(1, self.kept_bytes // 4))
        self.entries[READ] = ResultRow()
        self.calls[READ] = lambda: [rows.sum() for _ in range(self.count)]

    def memory(self, table: str) -> ResultRow:
        """Return the bytes that the cache holds, beside its bound by docs/decoding.md and a cache of all tokens."""
        token_bytes = 2 * 4 * self.text.heads * self.text.head_dim
        bound = sum(-(-branch.segment_length // branch.dilation_rate) for branch in self.text.pattern.segments)
        sizes = dict(kept_bytes=self.kept_bytes, allocated_bytes=self.cache.allocated_nbytes)
        sizes |= dict(bound_bytes=token_bytes * bound, full_bytes=token_bytes * self.seen)
        return ResultRow(table=table, case=self.case, who=CACHE, values=sizes)


def rows_of_steps(table: str, points: Sequence[Steps], repeats: int) -> list[ResultRow]:
    """Time the steps of all points in the same rounds, taken back between samples; a time is that of one step."""

    def take_back() -> None:
        for one in points:
            one.cache.crop(one.seen)

    entries = {f"{kind}, {one.seen}": entry for one in points for kind, entry in one.entries.items()}
    calls = {f"{kind}, {one.seen}": call for one in points for kind, call in one.calls.items()}
    measured = in_turns(entries, calls, repeats, before=take_back)
    rows = []
    for one in points:
        problem = f"{one.text.heads} heads of {one.text.head_dim}, {one.text.pattern}; {one.count} steps in a sample"
        of_point = {kind: measured["entries"][f"{kind}, {one.seen}"] for kind in one.entries}
        for kind, entry in of_point.items():
            of_point[kind] = replace(entry, samples=tuple(sample / one.count for sample in entry.samples), calls=one.count)
        values = {kind: dict(problem=problem, kept_bytes=one.kept_bytes) for kind in of_point}
        rows += rows_of(table, one.case, dict(entries=of_point, fma=measured["fma"]), values)
    return rows


def many_sequences(
    pattern: Pattern, lengths: Sequence[int], heads: int, kv_heads: int, head_dim: int, repeats: int
) -> CaseFields:
    """Time a step for sequences of these lengths: all in one call, and each by its own cache."""
    sizes: dict[str, Any] = dict(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    caches = [DilatedCache(pattern, kv_heads) for _ in lengths]
    for cache, length in zip(caches, lengths, strict=True):
        cache.attend(*(x[None] for x in _rows(length, **sizes)), backend=BACKEND)
    paged = PagedCache(pattern, **sizes, nbytes=2 * sum(cache.allocated_nbytes for cache in caches) + (1 << 26))
    numbers = [paged.add() for _ in lengths]
    for number, length in zip(numbers, lengths, strict=True):
        paged.attend(*_rows(length, **sizes), [number], [length], backend=BACKEND)
    new = _rows(len(lengths), **sizes)

    def one_by_one() -> Tensor:
        return torch.cat([cache.attend(*(x[None, i : i + 1] for x in new))[0] for i, cache in enumerate(caches)])

    calls: dict[str, Call] = {PAGED: partial(paged.attend, *new, numbers), SINGLE: one_by_one}
    together, alone = (call() for call in calls.values())
    entries = {PAGED: checked([agreement(PAGED, together, alone, max(lengths))]), SINGLE: ResultRow()}
    return in_turns(entries, calls, repeats)


def lengths_of(count: int, shortest: int, longest: int) -> tuple[int, ...]:
    """So many lengths, in an order that is random and fixed, each as many times the one before in size.

    >>> sorted(lengths_of(4, 8, 64))
    [8, 16, 32, 64]
    """
    lengths = shortest * (longest / shortest) ** (torch.arange(count, dtype=torch.float64) / (count - 1))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return tuple(lengths.round().long()[order].tolist())


def packed_sequences(lengths: Sequence[int], pattern: Pattern, heads: int, head_dim: int, repeats: int) -> CaseFields:
    """Time causal sequences, forward and backward: packed, one by one, and padded to the longest.

    All results and gradients are compared with those one by one. Sequences are cut out and padded before they are timed.
    """
    shape, generator = (4, sum(lengths), heads, head_dim), torch.Generator().manual_seed(0)
    rows = torch.randn(shape, generator=generator).unbind()
    cut = [torch.split(x, list(lengths)) for x in rows]
    options: dict[str, Any] = dict(pattern=pattern, is_causal=True, backend=BACKEND)
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    packed = partial(dilated_attention_varlen, cu_seqlens=cu_seqlens, max_seqlen=max(lengths), **options)
    each = [_leaves([x[None] for x in one]) for one in zip(*cut, strict=True)]
    filled = _leaves([pad_sequence(list(parts), batch_first=True) for parts in cut])
    mask = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    alone = partial(dilated_attention, **options)

    def joined(results: Sequence[Sequence[Tensor]]) -> Tensor:
        return torch.stack([torch.cat(parts, dim=1)[0] for parts in zip(*results, strict=True)])

    def without_padding(results: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(results))[:, ~mask]

    calls: dict[str, Call] = {
        PACKED: partial(_gradients, packed, _leaves(rows)),
        ALONE: lambda: [_gradients(alone, one) for one in each],
        MASKED: partial(_gradients, partial(alone, key_padding_mask=mask), filled),
        PADDED: partial(_gradients, alone, filled),
    }
    read: dict[str, Callable[[Any], Tensor]] = dict(
        zip(calls, (torch.stack, joined, without_padding, without_padding), strict=True)
    )
    return in_turns(agreeing(calls, max(lengths), joined(calls[ALONE]()), read), calls, repeats)


def _gradients(attend: Callable[..., Any], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return `out` and the gradients of query, key and value; `tensors` are these and the gradient of `out`."""
    *inputs, dout = tensors
    out = attend(*inputs)
    return (out.detach(), *torch.autograd.grad(out, inputs, dout))


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Queries, keys, values and the gradient of the results; the first three ask for gradients."""
    return [x.detach().requires_grad_(i < 3) for i, x in enumerate(tensors)]


def _rows(count: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(count)
    query = torch.randn(count, heads, head_dim, generator=draw)
    key, value = torch.randn(2, count, kv_heads, head_dim, generator=draw).unbind()
    return query, key, value


def _last_rows(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> Tensor:
    lengths = torch.tensor([key.shape[1]], dtype=torch.int32)
    rows = query.double(), key.double(), value.double()
    out: Any = dilated_attention_with_kvcache(*rows, pattern, cache_seqlens=lengths, backend="reference")
    return torch.as_tensor(out)
