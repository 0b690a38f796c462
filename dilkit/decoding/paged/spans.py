"""The tables of a `Step` over pages: what each new row sees of the streams of its sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilkit.bias.form import LoweredBias
from dilkit.decoding.block import seen_by
from dilkit.decoding._kept_tokens import KeptTokens
from dilkit.decoding.paged.sequence import SequenceRows
from dilkit.decoding.paged.stream import Stream
from dilkit.decoding.step import Span, Step, Write, resolved, table
from dilkit.op.boundary import lse_dtype
from dilkit.pattern import Branch
from dilkit.pattern.heads import Heads

_KEYS, _VALUES = 0, 1
"""The numbers of the stored tensors of a step."""


@dataclass
class PagedSpans:
    """Collects the writes and the spans of the rows of a call, with the pages that they lie in.

    `once`: the branches of the pattern where a key that several show counts once, else none.
    """

    given: Heads
    once: tuple[Branch, ...]
    device: torch.device
    spans: list[Span] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    unseen: list[Tensor] = field(default_factory=list)

    def add(self, sequence: SequenceRows, row: int, count: int) -> None:
        """The query rows `row` to `row + count - 1` are those of the next tokens of a sequence, which now takes them in."""
        first, pages = sequence.seen, dict[int, int]()
        for query, token in enumerate(range(first, first + count), row):
            for stream in sequence.of(token):
                self._write(stream, query, token)
        for query, token in enumerate(range(first, first + count), row):
            for stream in sequence.of(token):
                if indices := stream.kept.seen(token):
                    if id(stream) not in pages:
                        pages[id(stream)] = len(self.pages)
                        self.pages += stream.pages
                    self._see(stream, query, token, indices, pages[id(stream)])
        sequence.see(count)

    def _write(self, stream: Stream, query: int, token: int) -> None:
        """Where the new row goes, if the stream keeps it."""
        kept, index = stream.kept, stream.kept.before(token)
        if kept.before(token + 1) > index:
            stream.extend(index + 1)
            at = stream.offset(index), 0, stream.width
            self.writes.append(Write(query, 1, kept.head, kept.head_step, kept.heads, _KEYS, *at, _VALUES, *at))

    def _see(self, stream: Stream, query: int, token: int, indices: range, first_page: int) -> None:
        kept, width = stream.kept, stream.width
        tokens = self._on_device(kept.tokens(indices))
        along: dict[str, int] = dict(pages=first_page, page_rows=stream.room, page=stream.pool.numbers)
        along |= dict(page_first=indices.start - stream.base, page_step=indices.step)
        if isinstance(tokens, range):
            along |= dict(position=tokens.start, position_step=tokens.step)
        else:
            along |= dict(positions=len(self.positions))
            self.positions.append(tokens)
        if (hidden := unseen_of(kept, token, tokens, self.given, self.once, self.device)) is not None:
            along |= dict(unseen=len(self.unseen))
            self.unseen.append(hidden)
        served, strides = (query, 1, kept.head, kept.head_step, kept.heads), (0, 0, width, stream.row)
        self.spans.append(Span(*served, len(indices), _KEYS, *strides, _VALUES, *strides, token, **along))

    def _on_device(self, tokens: range | NDArray[np.int64]) -> range | Tensor:
        return tokens if isinstance(tokens, range) else torch.from_numpy(tokens).to(self.device)

    def step(
        self, rows: tuple[Tensor, Tensor, Tensor], stored: tuple[Tensor, ...], bias: LoweredBias | None, sink: Tensor | None
    ) -> Step:
        """All of them as one step. `rows`: query, key and value; `stored`: keys and values of all pages."""
        spans, writes = table(self.spans, len(Span._fields)), table(self.writes, len(Write._fields))
        own = None if sink is None else resolved(sink).detach().to(lse_dtype(rows[0].dtype)).contiguous()
        further: dict[str, Any] = dict(positions=tuple(self.positions), unseen=tuple(self.unseen))
        pages = np.array(self.pages, np.int64)
        query, key, value = (resolved(x)[:, None] for x in rows)
        return Step(query, stored, spans, writes, key, value, own, bias, **further, pages=pages, by_position=True)


def unseen_of(
    kept: KeptTokens, token: int, tokens: range | Tensor, given: Heads, once: tuple[Branch, ...], device: torch.device
) -> Tensor | None:
    """Which of `tokens` the row of `token` does not see after all, bool `(heads or 1, group or 1, count)`; None: it sees all.

    Those that the branch does not show, and those that a branch of `once` before it shows.
    """
    earlier = once[: kept.place]
    if not kept.masked and not earlier:
        return None
    heads = slice(kept.head, kept.head + kept.heads * kept.head_step, kept.head_step)
    row = range(token, token + 1)
    unseen = ~seen_by((kept.branch,), row, tokens, given, heads, device)
    if earlier:
        unseen = unseen | seen_by(earlier, row, tokens, given, heads, device)
    return unseen[:, 0, 0].contiguous()
