"""What the new rows of a call see of the streams of their sequences, as a `Step` over pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilkit.bias.form import LoweredBias
from dilkit.decoding._kept_tokens import KeptTokens
from dilkit.decoding.block import seen_by
from dilkit.decoding.paged._spans import SpanTables
from dilkit.decoding.paged.pool import PagePool
from dilkit.decoding.paged.sequence import SequenceRows
from dilkit.decoding.step import Step, resolved
from dilkit.op.boundary import lse_dtype
from dilkit.pattern import Branch
from dilkit.pattern.heads import Heads


@dataclass
class PagedSpans:
    """Collects the tables of a call, and the tensors beside them.

    `once`: the branches of the pattern where a key that several show counts once, else none.
    """

    given: Heads
    once: tuple[Branch, ...]
    pool: PagePool
    positions: list[Tensor] = field(default_factory=list)
    unseen: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tables = SpanTables(self.pool.numbers, bool(self.once))

    def add(self, sequence: SequenceRows, row: int, count: int) -> None:
        """The query rows `row` to `row + count - 1` are those of the next tokens of a sequence, which now takes them in."""
        for span, stream, token in self._tables.add(sequence.streams, sequence.seen, row, count):
            kept, device = stream.kept, self.pool.rows.device
            tokens = on_device(kept.tokens(kept.seen(token)), device)
            if isinstance(tokens, Tensor):
                self._tables.place(span, len(self.positions))
                self.positions.append(tokens)
            if (hidden := unseen_of(kept, token, tokens, self.given, self.once, device)) is not None:
                self._tables.leave_out(span, len(self.unseen))
                self.unseen.append(hidden)
        sequence.see(count)

    def step(
        self, rows: tuple[Tensor, Tensor, Tensor], stored: tuple[Tensor, ...], bias: LoweredBias | None, sink: Tensor | None
    ) -> Step:
        """All of them as one step. `rows`: query, key and value; `stored`: keys and values of all pages."""
        own = None if sink is None else resolved(sink).detach().to(lse_dtype(rows[0].dtype)).contiguous()
        query, key, value = (resolved(x)[:, None] for x in rows)
        tables, further = (self._tables.spans, self._tables.writes), (tuple(self.positions), tuple(self.unseen))
        return Step(query, stored, *tables, key, value, own, bias, *further, self._tables.pages, by_position=True)


def on_device(tokens: range | NDArray[np.int64], device: torch.device) -> range | Tensor:
    """Tokens that are at no equal distances as a tensor."""
    return tokens if isinstance(tokens, range) else torch.from_numpy(tokens).to(device)


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
