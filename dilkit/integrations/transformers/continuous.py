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
from itertools import pairwise
from operator import is_
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilkit.compiler import not_compiled
from dilkit.decoding._kept_tokens import KeptTokens, kept_tokens
from dilkit.decoding.layout import Layout
from dilkit.decoding.paged_attention import attend_prompts, check_rows, prepare_call
from dilkit.decoding.protocol import Span, Step, Write, table
from dilkit.decoding.sequence_rows import once_branches, tokens_of, unseen_of
from dilkit.decoding.stores import check_decodable
from dilkit.integrations.transformers.patterns import is_of_windows
from dilkit.op.boundary import lse_dtype
from dilkit.pattern import Pattern


@dataclass(frozen=True)
class BatchSequence:
    """New `rows` of a sequence, after `before` others that `read_index` names from `first` on."""

    rows: slice
    before: int
    first: int

    @property
    def length(self) -> int:
        return self.before + self.count

    @property
    def count(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def is_prompt(self) -> bool:
        """True for two rows and more with none before: they are worth a kernel of their own."""
        return self.before == 0 and self.count > 1


@dataclass(frozen=True)
class LayerBatch:
    """The arguments that transformers hands to layer number `layer`, whose rows an `allocator` stores in a pool."""

    layer: int
    allocator: Any
    pool: tuple[Tensor, Tensor]
    """Keys and values, `(rows, kv_heads, head_dim)`, in the rows that `read_index` names."""
    ends_of_rows: Tensor
    ends_of_keys: Tensor
    read_index: Tensor
    write_index: Tensor

    @classmethod
    def of(cls, layer: int, options: dict[str, Any]) -> LayerBatch:
        """Read the options of a call. Raises TypeError where they are not as transformers' manager gives them."""
        try:
            allocator = options["cache"].layer_to_allocator[layer]
            ends, place, kind = options["cu_seq_lens_k"], allocator.index, allocator.layer_type  # no kind before 5.19
            ends_of_keys = ends if isinstance(ends, Tensor) else ends[kind]
            tensors = options["cu_seq_lens_q"], ends_of_keys, options["read_index"][place], options["write_index"][place]
            return cls(layer, allocator, allocator._kv_token_views[layer], *tensors)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise TypeError(
                f"cache={type(options['cache']).__name__}, and the arguments beside it, are not as transformers' continuous "
                f"batching gives them to layer {layer} ({type(error).__name__}: {error}); call "
                "generate_batch of transformers 5.19 or later"
            ) from error

    def layout(self, heads: int) -> Layout:
        keys = self.pool[0]
        kv_heads, head_dim = keys.shape[1:]
        return Layout(1, heads, kv_heads, head_dim, dtype=keys.dtype, device=keys.device, stored=keys.dtype)

    def sequences(self, total: int) -> list[BatchSequence]:
        """Return the sequences of `total` new rows. Raises ValueError where these and the tensors do not fit each other."""
        rows, keys, indexed = self.ends_of_rows.tolist(), self.ends_of_keys.tolist(), len(self.read_index)
        if rows[:1] != [0] or rows[-1] != total:
            raise ValueError(
                f"cu_seq_lens_q={rows} of {total} rows; from 0 to {total} is needed. Where transformers pads a batch, for CUDA "
                "graphs or torch.compile: ContinuousBatchingConfig(use_cuda_graph=False), without configurations for compiling"
            )
        sequences = [
            BatchSequence(slice(start, stop), (last - first) - (stop - start), first)
            for (start, stop), (first, last) in zip(pairwise(rows), pairwise(keys), strict=False)
        ]
        fits = all(x.rows.start <= x.rows.stop and x.before >= 0 <= x.first for x in sequences)
        if len(rows) != len(keys) or not fits or any(x.before and x.first + x.before > indexed for x in sequences):
            raise ValueError(
                f"cu_seq_lens_q={rows}, cu_seq_lens_k={keys} and a read_index of {indexed} do not fit one batch: ascending ones "
                "of one length are needed, at least as many keys as rows in each sequence, and an index of all keys"
            )
        return sequences

    def store(self, key: Tensor, value: Tensor) -> None:
        nothing = torch.empty_like(self.read_index[:0])
        self.allocator.update(key, value, self.layer, nothing, self.write_index)


NO_WRITES = table([], len(Write._fields))
TABLES = "dilkit_tables"
"""The attribute of `cu_seq_lens_q`, which is of one batch alone, that has the `BatchTables` of its layers."""


@dataclass(frozen=True)
class BatchTables:
    made_of: tuple[Tensor, Tensor]
    versions: tuple[int, ...] | None
    prompts: list[tuple[slice, int]]
    spans: NDArray[np.int64]
    unseen: tuple[Tensor, ...]
    pages: NDArray[np.int64]
    most: int

    @classmethod
    def of(cls, batch: LayerBatch, pattern: Pattern, layout: Layout, rows: int) -> BatchTables:
        shared: dict[Any, BatchTables] = batch.ends_of_rows.__dict__.setdefault(TABLES, {})
        which, tensors = (batch.allocator.index, pattern, layout), (batch.ends_of_keys, batch.read_index)
        written = (batch.ends_of_rows, *tensors)  # torch counts writes, but not to tensors of inference mode
        versions = None if any(x.is_inference() for x in written) else tuple(x._version for x in written)
        known = shared.get(which)
        if known is not None and versions is not None and known.versions == versions and all(map(is_, known.made_of, tensors)):
            return known
        sequences, spans = batch.sequences(rows), BatchSpans(pattern, layout)
        for sequence in sequences:
            if not sequence.is_prompt:
                spans.add(sequence)
        prompts = [(sequence.rows, 0) for sequence in sequences if sequence.is_prompt]
        tables = table(spans.spans, len(Span._fields)), tuple(spans.unseen), batch.read_index.cpu().numpy()
        most = max((sequence.length for sequence in sequences), default=0)
        shared[which] = cls(tensors, versions, prompts, *tables, most)
        return shared[which]

    def step(self, query: Tensor, stored: tuple[Tensor, ...], sink: Tensor | None) -> Step:
        if sink is not None:
            sink = sink.detach().to(lse_dtype(query.dtype)).contiguous()
        return Step(query, stored, self.spans, NO_WRITES, sink=sink, unseen=self.unseen, pages=self.pages)


@not_compiled
def attend_batch(
    layer: int, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, options: dict[str, Any], **call: Any
) -> Tensor:
    """Attend from the new rows, `(1, rows, heads, head_dim)`; store keys and values in the pool of `options`, unless it raises.

    `call`: the sink, the scale and the softcap. Raises TypeError or ValueError.
    """
    batch = LayerBatch.of(layer, options)
    _check_pattern(pattern, batch)
    rows, layout = (query[0], key[0].contiguous(), value[0].contiguous()), batch.layout(query.shape[2])
    widths, held = tuple(key.shape[2:]), tuple(batch.pool[0].shape[1:])
    if widths != held:
        raise ValueError(
            f"the pool of generate_batch has rows of {held}, (kv_heads, head_dim) by the configuration, but layer {layer} has "
            f"keys of {widths}, as DeepSeek does; take generate"
        )
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
    check_decodable(pattern)
    window = getattr(batch.allocator, "sliding_window", None)
    if window is not None and not is_of_windows(pattern, window - 1):
        raise ValueError(
            f"the pool keeps the last {window - 1} tokens of layers with a window, but the pattern of layer {batch.layer} is "
            f"{pattern}; give windows of up to {window} tokens, or a configuration without sliding_window"
        )


_POOL, _NEW = (0, 1), (2, 3)


@dataclass
class BatchSpans:
    pattern: Pattern
    layout: Layout
    spans: list[Span] = field(default_factory=list)
    unseen: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._given = self.pattern.among(self.layout.heads, self.layout.kv_heads)
        self._once, self._kept = once_branches(self.pattern), kept_tokens(self.pattern, self._given)

    def add(self, sequence: BatchSequence) -> None:
        for row in range(sequence.rows.start, sequence.rows.stop):
            token = sequence.before + row - sequence.rows.start
            for one in self._kept:
                if indices := one.seen(token):
                    tokens = tokens_of(one, indices, self.layout.device)
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
                part = hidden if hidden.shape[-1] == 1 else hidden[..., place : place + len(run)]
                self.unseen.append(part.contiguous())
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
