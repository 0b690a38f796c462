"""Attention of packed rows over pages: prompts as packed sequences, all other rows in one step of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.checks import real, shown
from dilkit.decoding._kept_tokens import KeptTokens
from dilkit.decoding._pages import SpanTables
from dilkit.decoding.branch_store import seen_by
from dilkit.decoding.layout import Layout, check_no_gradient, decoded, encoded, name_of, sink_logits
from dilkit.decoding.pages import PagePool, SequenceRows
from dilkit.decoding.protocol import DecodingBackend, Step, decoding_backend
from dilkit.inputs import Inputs
from dilkit.op.arguments import call_of, check_inputs
from dilkit.op.boundary import lse_dtype
from dilkit.op.operators import attend
from dilkit.op.scores import Scores, scores_of
from dilkit.packed.attention import batch_of_one
from dilkit.pattern import Branch, Pattern
from dilkit.pattern.heads import Heads
from dilkit.problem import Problem
from dilkit.selector import requested_backends, select

Rows = tuple[Tensor, Tensor, Tensor]
"""Query, key and value, `(rows, heads, head_dim)`."""


class PackedCall(NamedTuple):
    """Options that all rows of a call share. `backend`, `problem`: of its step; `asked`: the backends of its prompts."""

    backend: DecodingBackend
    problem: Problem
    scores: Scores
    sink: Tensor | None
    asked: str | Sequence[str] | None


def prepare_call(
    rows: Rows,
    pattern: Pattern,
    layout: Layout,
    most: int,
    *,
    sink: Tensor | None,
    scale: float | None,
    bias: Bias | None,
    softcap: float | None,
    backend: str | Sequence[str] | None,
) -> PackedCall:
    """Check the options of a call whose sequences have `most` tokens at most. Raises as `PagedCache.attend` does."""
    if isinstance(bias, Bias) and bias.by_row:
        raise ValueError(
            f"bias={shown(bias)} goes by coordinates of rows, which a PagedCache does not keep; use a DilatedCache a sequence"
        )
    scores = scores_of(bias, softcap, rows[0][None], pattern, layout.kv_heads, most)
    check_no_gradient(*rows, sink, scores.tensors[0])
    factor = layout.head_dim**-0.5 if scale is None else real("scale", scale)
    facts: dict[str, Any] = dict(scale=factor, softcap=scores.softcap, bias=scores.form, stored=name_of(layout.stored))
    problem = Problem.of(rows[0][None, :1], rows[1][None, :1], pattern, is_causal=True, **facts)
    return PackedCall(decoding_backend(select(problem, requested_backends(backend))), problem, scores, sink, backend)


def check_rows(rows: Rows, pattern: Pattern, layout: Layout, sink: Tensor | None) -> None:
    """Raise TypeError or ValueError unless the rows are those of a cache with this layout."""
    if torch._C._are_functorch_transforms_active():
        raise ValueError("a cache cannot keep the rows of vmap and other transforms")
    query, key, value = (batch_of_one(name, x) for name, x in zip(("query", "key", "value"), rows, strict=True))
    check_inputs(Inputs(query, key, value, sink=sink), pattern)
    for name, x, heads in (("query", query, layout.heads), ("key", key, layout.kv_heads), ("value", value, layout.kv_heads)):
        if (*x.shape[2:], x.dtype, x.device) != (heads, layout.head_dim, layout.dtype, layout.device):
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape[1:])} on {x.device}, but the cache is of {layout.dtype} (rows, {heads}, "
                f"{layout.head_dim}) on {layout.device}; it needs another cache"
            )


class Prompt(NamedTuple):
    """Rows of one sequence in a call that see none before them, and the token of the first of them."""

    rows: slice
    token: int = 0


def attend_prompts(
    prompts: Sequence[Prompt], rows: Rows, out: Tensor, pattern: Pattern, layout: Layout, call: PackedCall
) -> None:
    """Write the attention of all prompts into `out`, as if keys and values had been stored."""
    query, key, value = (torch.cat([x[prompt.rows] for prompt in prompts])[None] for x in rows)
    if layout.stored != layout.dtype:
        wide = lse_dtype(query.dtype)
        query, key, value = query.to(wide), *(decoded(encoded(x, layout.stored), wide) for x in (key, value))
    counts = [prompt.rows.stop - prompt.rows.start for prompt in prompts]
    cu_seqlens = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=query.device)
    spans = [(prompt.token, prompt.token + count) for prompt, count in zip(prompts, counts, strict=True)]
    scores = call.scores.of_rows(torch.cat([torch.arange(*span, device=query.device) for span in spans]))
    inputs = Inputs(query, key, value, cu_seqlens=cu_seqlens, sink=call.sink)
    computed = attend(*call_of(inputs, pattern, True, call.problem.scale, call.asked, scores=scores))[0][0]
    for prompt, part in zip(prompts, torch.split(computed, counts), strict=True):
        out[prompt.rows] = part


@dataclass
class PagedSpans:
    """Tables of a step over pages, to which the rows of one sequence after the other are added, with the tensors beside them.

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
        """Take the next `count` tokens into a sequence: they are the query rows from `row` on."""
        for span, stream, token in self._tables.add(sequence.streams, sequence.seen, row, count):
            device = self.pool.rows.device
            tokens = on_device(stream.kept.tokens(stream.kept.seen(token)), device)
            if isinstance(tokens, Tensor):
                self._tables.place(span, len(self.positions))
                self.positions.append(tokens)
            if (hidden := unseen_of(stream.kept, token, tokens, self.given, self.once, device)) is not None:
                self._tables.leave_out(span, len(self.unseen))
                self.unseen.append(hidden)
        sequence.seen += count

    def step(self, rows: Rows, stored: tuple[Tensor, ...], call: PackedCall) -> Step:
        """Return all of them as one step; `stored`: keys and values of all pages."""
        query, key, value = [x.resolve_neg()[:, None] for x in rows]
        tables, masks = (self._tables.spans, self._tables.writes), (tuple(self.positions), tuple(self.unseen))
        scores = None if call.sink is None else sink_logits(call.sink, query.dtype), call.scores.bias
        return Step(query, stored, *tables, key, value, *scores, *masks, self._tables.pages, by_position=True)


def on_device(tokens: range | NDArray[np.int64], device: torch.device) -> range | Tensor:
    """Return tokens that are at no equal distances as a tensor."""
    return tokens if isinstance(tokens, range) else torch.from_numpy(tokens).to(device)


def unseen_of(
    kept: KeptTokens, token: int, tokens: range | Tensor, given: Heads, once: tuple[Branch, ...], device: torch.device
) -> Tensor | None:
    """True for those of `tokens` that the row of `token` does not see after all; None if it sees all.

    Bool `(heads or 1, group or 1, count)`: those that the branch does not show, and those that a branch of `once` before it does.
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
