"""What the new rows of a batch see, as the table of a `Step`: rows of the pool, and new rows.

tokens of a sequence         0 1 2 3 4 5 | 6 7 8       6 in the pool, 3 new
what the row of token 7 sees   1   3   5 |   7         two spans: pages of one row, by `read_index`, and rows at equal distances
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilkit.decoding._kept_tokens import KeptTokens, kept_tokens
from dilkit.decoding.layout import Layout
from dilkit.decoding.paged.spans import unseen_of
from dilkit.decoding.step import Span
from dilkit.integrations.transformers.continuous.batch import BatchSequence
from dilkit.pattern import Pattern

_POOL, _NEW = (0, 1), (2, 3)
"""The numbers of the stored tensors of a step: keys and values in the pool, and new ones."""


@dataclass
class BatchSpans:
    """Collects the spans of a batch, and the masks that they name."""

    pattern: Pattern
    layout: Layout
    spans: list[Span] = field(default_factory=list)
    unseen: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._given = self.pattern.among(self.layout.heads, self.layout.kv_heads)
        self._once = self.pattern.branches if self.pattern.overlap == "once" else ()
        self._kept = [one for of_branch in kept_tokens(self.pattern, self._given) for one in of_branch]

    def add(self, sequence: BatchSequence) -> None:
        """The new rows of a sequence."""
        for row in range(sequence.rows.start, sequence.rows.stop):
            token = sequence.before + row - sequence.rows.start
            for one in self._kept:
                if indices := one.seen(token):
                    tokens = self._on_device(one.tokens(indices))
                    hidden = unseen_of(one, token, tokens, self._given, self._once, self.layout.device)
                    self._see(sequence, row, one, tokens, hidden)

    def _on_device(self, tokens: range | NDArray[np.int64]) -> range | Tensor:
        return tokens if isinstance(tokens, range) else torch.from_numpy(tokens).to(self.layout.device)

    def _see(self, sequence: BatchSequence, row: int, kept: KeptTokens, tokens: range | Tensor, hidden: Tensor | None) -> None:
        width = self.layout.kv_heads * self.layout.head_dim
        served = row, 1, kept.head, kept.head_step, kept.heads
        first, step = kept.head * self.layout.head_dim, kept.head_step * self.layout.head_dim
        for place, run in _runs(tokens, sequence.before):
            number = -1
            if hidden is not None:
                number = len(self.unseen)
                self.unseen.append(hidden[..., place : place + len(run)].contiguous())
            if run.start < sequence.before:
                paged = dict(pages=sequence.first, page_rows=1, page=width, page_first=run.start, page_step=run.step)
                at = first, 0, step, width
                self.spans.append(Span(*served, len(run), _POOL[0], *at, _POOL[1], *at, unseen=number, **paged))
            else:
                at = first + (sequence.rows.start + run.start - sequence.before) * width, 0, step, run.step * width
                self.spans.append(Span(*served, len(run), _NEW[0], *at, _NEW[1], *at, unseen=number))


def _runs(tokens: range | Tensor, before: int) -> Iterator[tuple[int, range]]:
    """Tokens at equal distances, with the number of the first; none has some before token `before` and some from there on."""
    if isinstance(tokens, range):
        kept = len(range(tokens.start, min(tokens.stop, before), tokens.step))
        yield from ((place, run) for place, run in ((0, tokens[:kept]), (kept, tokens[kept:])) if run)
    else:
        yield from ((place, range(token, token + 1)) for place, token in enumerate(tokens.tolist()))
