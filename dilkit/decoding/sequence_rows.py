"""`SequenceRows`: what caches keep of a sequence, or of a batch at one pace; `StepSpans`: what its new rows see, as a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from dilkit.bias.form import LoweredBias
from dilkit.decoding._kept_tokens import KeptTokens
from dilkit.decoding._streams import SpanTables, Stream, forget_before
from dilkit.decoding.layout import sink_logits
from dilkit.decoding.protocol import Step
from dilkit.pattern import Branch, Pattern
from dilkit.pattern.heads import Heads
from dilkit.pattern.lowering.checks import sees

StreamT = TypeVar("StreamT", bound=Stream)


class SequenceRows(Generic[StreamT]):
    """Streams of a sequence after `seen` tokens; `rollback` tokens before its `longest` length can be taken back."""

    def __init__(self, streams: Iterable[StreamT], rollback: int, seen: int = 0, longest: int = 0) -> None:
        self.streams, self.rollback, self.seen, self.longest = tuple(streams), rollback, seen, longest

    def append_prompt(self, key: Tensor, value: Tensor) -> None:
        """Store what later rows see of rows `(batch, count, kv_heads, head_dim)`, which see none of those before.

        Pages take those of one sequence, without the batch.
        """
        count = key.shape[-3]
        for stream, indices, begins in self.prompt_rows(count):
            kept = stream.kept
            if begins:
                stream.begin(indices.start)
            if indices:
                stream.extend(indices.stop, kept.needed(self.oldest(count)))
                rows, heads = kept.tokens(indices), slice(kept.head, kept.head + kept.heads * kept.head_step, kept.head_step)
                if isinstance(rows, range):
                    places: slice | Tensor = slice(rows.start - self.seen, rows.stop - self.seen, rows.step)
                else:
                    places = torch.from_numpy(rows - self.seen).to(key.device)
                stream.put(indices.start, *(x[..., places, :, :][..., heads, :] for x in (key, value)))
        self.seen += count

    def prompt_rows(self, count: int) -> Iterator[tuple[StreamT, range, bool]]:
        """Yield each stream with the indices of its rows of a prompt that later rows see; True if they see none before these."""
        next_row = max(0, self.seen + count - self.rollback)
        for stream in self.streams:
            first, begin = stream.kept.needed_after_crop(next_row), stream.kept.before(self.seen)
            yield stream, range(max(first, begin), stream.kept.before(self.seen + count)), first >= begin

    def oldest(self, count: int) -> int:
        """Return the first of the rows that are attended to while or after `count` rows more come."""
        end = self.seen + count
        row = (self.longest if self.longest > end else end) - self.rollback
        return self.seen if row > self.seen else max(0, row)

    def go_back(self, seen: int) -> None:
        """Forget all rows since `seen` tokens, provided that nothing was forgotten since."""
        self.seen = seen
        for stream in self.streams:
            stream.crop(min(stream.stop, stream.kept.before(seen)))

    def forget(self) -> None:
        seen = self.seen
        if seen > self.longest:
            self.longest = seen
        forget_before(self.streams, seen - self.rollback)

    def lacking(self, length: int) -> StreamT | None:
        """Return a stream that does not have what rows after the first `length` tokens see; None if all have it."""
        return next((stream for stream in self.streams if length and not stream.can_crop(length)), None)

    def crop(self, length: int) -> None:
        for stream in self.streams:
            stream.crop(stream.kept.before(length))
            if length == 0:
                stream.begin(0)
        self.seen, self.longest = length, self.longest if length else 0

    def clear(self) -> None:
        for stream in self.streams:
            stream.begin(0)


@dataclass
class StepSpans:
    """Tables of a step, sequence by sequence; `once`: the branches where a key that several show counts once.

    `page`: numbers of a page of the streams; 0: they are rings.
    """

    given: Heads
    once: tuple[Branch, ...]
    device: torch.device
    page: int = 0
    positions: list[Tensor] = field(default_factory=list)
    unseen: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tables = SpanTables(bool(self.once), self.page)

    def clear(self) -> None:
        self.tables.clear()
        if self.positions or self.unseen:
            self.positions, self.unseen = [], []

    def add(self, sequence: SequenceRows[StreamT], count: int, row: int = 0, batch: int = 1) -> None:
        """Take in the next `count` tokens of a sequence or batch: query rows from `row` on, sequence by sequence."""
        unfinished = self.tables.add(sequence.streams, sequence.seen, count, sequence.oldest(count), row, batch)
        for span, stream, token, indices, shown in unfinished:
            tokens = tokens_of(stream.kept, indices, self.device)
            if isinstance(tokens, Tensor):
                self.tables.place(span, len(self.positions))
                self.positions.append(tokens)
            once = self.once if shown else ()
            if (hidden := unseen_of(stream.kept, token, tokens, self.given, once, self.device)) is not None:
                self.tables.leave_out(span, len(self.unseen))
                self.unseen.append(hidden)
        if count > 1 and batch != 1:
            self.tables.repeat(batch, count)
        sequence.seen += count

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        bias: LoweredBias | None,
        stored: tuple[Tensor, ...] | None = None,
    ) -> Step:
        """Return all of them as one step; `stored`: keys and values of all pages."""
        tables, logits = self.tables, None if sink is None else sink_logits(sink, query.dtype)
        rings = tables.take_stored() if stored is None else stored
        masks = tuple(self.positions), tuple(self.unseen)
        return Step(query, rings, tables.spans, tables.writes, key, value, logits, bias, masks[0], masks[1], tables.pages, True)


def once_branches(pattern: Pattern) -> tuple[Branch, ...]:
    return pattern.branches if pattern.overlap == "once" else ()


def tokens_of(kept: KeptTokens, indices: range, device: torch.device) -> range | Tensor:
    """Return the tokens of kept rows; those at no equal distances begin with the first, and are remembered."""
    if kept.listed is not None and len(kept.listed) >= indices.stop:
        return kept.listed[: indices.stop]
    tokens = kept.tokens(indices)
    if isinstance(tokens, range):
        return tokens
    kept.listed = torch.from_numpy(tokens).to(device)
    return kept.listed


def unseen_of(
    kept: KeptTokens, token: int, tokens: range | Tensor, given: Heads, once: tuple[Branch, ...], device: torch.device
) -> Tensor | None:
    """True for `tokens` that the row of `token` does not see, `(heads or 1, group or 1, count or 1)`; None if it sees all."""
    heads = slice(kept.head, kept.head + kept.heads * kept.head_step, kept.head_step)
    unseen: Tensor | None = None
    if kept.by_pairs:
        unseen = ~_seen_by((kept.branch,), token, tokens, given, heads, device)
    elif kept.masked:
        if kept.unserved is None:
            served, unserved = kept.branch.served(given), torch.ones(given.count, dtype=torch.bool, device=device)
            unserved[served.start : served.stop] = False
            kept.unserved = unserved.view(given.kv_heads, given.group, 1)[heads]
        unseen = kept.unserved
    if earlier := once[: kept.place]:
        shown = _seen_by(earlier, token, tokens, given, heads, device)
        unseen = shown if unseen is None else unseen | shown
    return None if unseen is None else unseen.contiguous()


def _seen_by(
    branches: Iterable[Branch], token: int, tokens: range | Tensor, given: Heads, heads: slice, device: torch.device
) -> Tensor:
    """True where any of `branches` shows the row of `token` a key, causality aside: `(heads or 1, group or 1, tokens)`."""
    row, keys = torch.tensor([token], device=device), tokens
    if isinstance(keys, range):
        keys = torch.arange(keys.start, keys.stop, keys.step, device=device)
    seen = torch.zeros(1, len(keys), dtype=torch.bool, device=device)
    for branch in branches:
        shown = sees(branch, row, keys, given)[:, 0]
        if branch.heads is not None or len(shown) > 1:
            served = branch.served(given)
            seen = seen.expand(given.count, -1).clone()
            seen[served.start : served.stop] |= shown
        else:
            seen = seen | shown
    return seen[None] if len(seen) == 1 else seen.view(given.kv_heads, given.group, -1)[heads]
