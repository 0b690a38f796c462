"""The attention of a layer in continuous batching.

cu_seq_lens, read_index ---> `BatchTables`, once for the layers of a pattern
                                  |
query, new keys and values -------+---> prompts: one packed call ------------+---> out
                                  |                                          |
the pool's keys and values -------+---> all other rows: one step ------------+
                                  |
new keys and values --------------+---> the pool, where `write_index` says; last, for a ring has older rows there
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilkit.compiler import not_compiled
from dilkit.decoding._kept_tokens import KeptTokens, kept_tokens
from dilkit.decoding.layout import Layout
from dilkit.decoding.paged_attention import Prompt, attend_prompts, check_rows, on_device, prepare_call, unseen_of
from dilkit.decoding.protocol import Span, Step, Write, table
from dilkit.decoding.stores import check_decodable
from dilkit.integrations.transformers.continuous.batch import BatchSequence, LayerBatch
from dilkit.integrations.transformers.patterns import is_of_windows
from dilkit.op.boundary import lse_dtype
from dilkit.pattern import Pattern

NO_WRITES = table([], len(Write._fields))
TABLES = "dilkit_tables"
"""The attribute of `cu_seq_lens_q`, which is of one batch alone, that has the `BatchTables` of its layers."""


@dataclass(frozen=True)
class BatchTables:
    """The tables that layers of one pattern with the same stored tokens share, `made_of` two more tensors of the batch."""

    made_of: tuple[Tensor, Tensor]
    versions: tuple[int, ...] | None
    prompts: list[Prompt]
    spans: NDArray[np.int64]
    unseen: tuple[Tensor, ...]
    pages: NDArray[np.int64]
    most: int

    @classmethod
    def of(cls, batch: LayerBatch, pattern: Pattern, layout: Layout, rows: int) -> BatchTables:
        """Return the tables of `rows` new rows; the first layer that asks makes them."""
        shared: dict[Any, BatchTables] = batch.ends_of_rows.__dict__.setdefault(TABLES, {})
        which, tensors = (batch.allocator.index, pattern, layout), (batch.ends_of_keys, batch.read_index)
        versions = _versions(batch.ends_of_rows, *tensors)
        known = shared.get(which)
        if known is not None and versions is not None and known.versions == versions and all(map(is_, known.made_of, tensors)):
            return known
        sequences, spans = batch.sequences(rows), BatchSpans(pattern, layout)
        for sequence in sequences:
            if not sequence.is_prompt:
                spans.add(sequence)
        prompts = [Prompt(sequence.rows) for sequence in sequences if sequence.is_prompt]
        tables = table(spans.spans, len(Span._fields)), tuple(spans.unseen), batch.read_index.cpu().numpy()
        most = max((sequence.length for sequence in sequences), default=0)
        shared[which] = cls(tensors, versions, prompts, *tables, most)
        return shared[which]

    def step(self, query: Tensor, stored: tuple[Tensor, ...], sink: Tensor | None) -> Step:
        """Make the step of the rows of `query` `(1, rows, heads, head_dim)` in no prompt; `stored`: the pool, and new rows."""
        if sink is not None:
            sink = sink.detach().to(lse_dtype(query.dtype)).contiguous()
        return Step(query, stored, self.spans, NO_WRITES, sink=sink, unseen=self.unseen, pages=self.pages)


def _versions(*tensors: Tensor) -> tuple[int, ...] | None:
    """Return numbers that differ once one of the tensors has been written to; None where torch counts none."""
    return None if any(x.is_inference() for x in tensors) else tuple(x._version for x in tensors)


@not_compiled
def attend_batch(
    layer: int, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, options: dict[str, Any], **call: Any
) -> Tensor:
    """Attend from the new rows, `(1, rows, heads, head_dim)`, and store their keys and values in the pool of `options`.

    `call`: the sink, the scale and the softcap. Raises TypeError or ValueError for calls that are not computed; nothing is stored
    then.
    """
    batch = LayerBatch.of(layer, options)
    _check_pattern(pattern, batch)
    rows, layout = (query[0], key[0].contiguous(), value[0].contiguous()), batch.layout(query.shape[2])
    check_rows(rows, pattern, layout, call["sink"])
    tables = BatchTables.of(batch, pattern, layout, query.shape[1])
    pattern.check_seq(tables.most)
    prepared = prepare_call(rows, pattern, layout, tables.most, bias=None, backend=None, **call)
    if len(tables.spans):
        step = tables.step(query, (*batch.pool, *rows[1:]), prepared.sink)
        out = prepared.backend.attend_stored(step, prepared.problem)[0]
    else:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if tables.prompts:
        attend_prompts(tables.prompts, rows, out[0], pattern, layout, prepared)
    batch.store(*rows[1:])
    return out


def _check_pattern(pattern: Pattern, batch: LayerBatch) -> None:
    """Raise ValueError for a pattern that needs more than the pool keeps."""
    check_decodable(pattern)
    window = getattr(batch.allocator, "sliding_window", None)
    if window is not None and not is_of_windows(pattern, window - 1):
        raise ValueError(
            f"the pool keeps the last {window - 1} tokens of layers with a window, but the pattern of layer {batch.layer} is "
            f"{pattern}; give windows of up to {window} tokens, or a configuration without sliding_window"
        )


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
        """Add the spans of the new rows of a sequence."""
        for row in range(sequence.rows.start, sequence.rows.stop):
            token = sequence.before + row - sequence.rows.start
            for one in self._kept:
                if indices := one.seen(token):
                    tokens = on_device(one.tokens(indices), self.layout.device)
                    hidden = unseen_of(one, token, tokens, self._given, self._once, self.layout.device)
                    self._see(sequence, row, one, tokens, hidden)

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
                layout = first, 0, step, width
                self.spans.append(Span(*served, len(run), _POOL[0], *layout, _POOL[1], *layout, unseen=number, **paged))
            else:
                layout = first + (sequence.rows.start + run.start - sequence.before) * width, 0, step, run.step * width
                self.spans.append(Span(*served, len(run), _NEW[0], *layout, _NEW[1], *layout, unseen=number))


def _runs(tokens: range | Tensor, before: int) -> Iterator[tuple[int, range]]:
    """Yield runs of tokens at equal distances, split at token `before`, and the place of each run's first token."""
    if isinstance(tokens, range):
        split = len(range(tokens.start, min(tokens.stop, before), tokens.step))
        yield from ((place, run) for place, run in ((0, tokens[:split]), (split, tokens[split:])) if run)
    else:
        yield from ((place, range(token, token + 1)) for place, token in enumerate(tokens.tolist()))
