"""Attention of new rows over the stores of a `DilatedCache`: of single rows by a backend's step, of a chunk in plain torch.

A chunk takes one softmax over all that its rows see, block beside block:

    columns of the scores    | branch 0: its slots | branch 1: its slots | ... | sink |

A row has scores in the blocks of the branches that show its head something. Its other columns are -inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilkit import registry
from dilkit.backend import Backend
from dilkit.bias.form import BiasForm, LoweredBias
from dilkit.decoding._tables import StepTables
from dilkit.decoding.branch_store import Block, BranchStore, seen_by, stacked
from dilkit.decoding.layout import Layout, decoded, encoded, name_of, sink_logits
from dilkit.decoding.protocol import DecodingBackend, Step, decoding_backend
from dilkit.op.boundary import lse_dtype
from dilkit.op.scores import Scores
from dilkit.pattern import Pattern
from dilkit.pattern.heads import Heads
from dilkit.problem import Problem
from dilkit.selector import select

Rows = tuple[Tensor, Tensor, Tensor]
"""Query, key and value, `(batch, rows, heads, head_dim)`."""


class ScoreOptions(NamedTuple):
    scale: float
    changed: Scores
    sink: Tensor | None


class StepFacts(NamedTuple):
    """Facts that the choice of a backend depends on: equal facts, the same choice. `state`: that of the selector."""

    layout: Layout
    scale: float
    softcap: float
    bias: BiasForm | None
    asked: tuple[str, ...]
    state: tuple[object, ...]


@dataclass(frozen=True)
class PreparedStep:
    """The backend and the problem of steps with the same facts, and the tables of a cache; `once` as from `shared_heads`."""

    facts: StepFacts
    backend: DecodingBackend
    problem: Problem
    tables: StepTables
    once: Heads | None

    def attend(self, stores: list[BranchStore], seen: int, rows: Rows, sink: Tensor | None, bias: LoweredBias | None) -> Tensor:
        """Store the key and the value of the row after `seen`, one of each sequence, and return the attention of its query."""
        query, key, value = rows
        tables, number, once = self.tables, 0, self.once
        by_slots = len(stores) if once is None else _apart(stores, seen)
        slots = [store.slots for store in stores]
        tables.begin()
        while (number := tables.go_on(slots, number, by_slots, seen)) < len(stores):
            if number >= by_slots or not (stores[number].make_room(seen) and tables.add(number, slots[number], seen)):
                for block in _extend(stores, number, seen, (key, value), once):
                    unseen = None if block.unseen is None else block.unseen[:, 0, 0]
                    tables.see_part(number, block.stored, block.heads, seen, block.keys, unseen)
            number += 1
        logits = None if sink is None else sink_logits(sink, query.dtype)
        stored, masks = tuple([one.rows for one in slots]), (tables.positions, tables.unseen)
        step = Step(query, stored, tables.spans, tables.writes, key, value, logits, bias, *masks, by_position=True)
        return self.backend.attend_stored(step, self.problem)[0]


def prepare(facts: StepFacts, query: Tensor, key: Tensor, pattern: Pattern) -> PreparedStep | None:
    """Choose a backend; None where some were asked for, and none of them has steps. Raises `NoBackendError` if they refuse."""
    known = registry.backends()
    candidates = [known.get(name) for name in facts.asked]
    if candidates and not any(isinstance(backend, Backend) and backend.limits.stored for backend in candidates):
        return None
    scores: dict[str, Any] = dict(scale=facts.scale, softcap=facts.softcap, bias=facts.bias)
    call = Problem.of(query, key, pattern, is_causal=True, stored=name_of(facts.layout.stored), **scores)
    problem = replace(call, seq=1)
    backend, tables = decoding_backend(select(problem, facts.asked)), StepTables(len(pattern.branches))
    return PreparedStep(facts, backend, problem, tables, shared_heads(pattern, facts.layout))


def shared_heads(pattern: Pattern, layout: Layout) -> Heads | None:
    """Return the heads, if a key that several branches show counts once; else None."""
    return pattern.among(layout.heads, layout.kv_heads) if pattern.overlap == "once" else None


def attend_chunk(stores: Sequence[BranchStore], seen: int, rows: Rows, options: ScoreOptions, once: Heads | None) -> Tensor:
    """Store `rows`, `BranchStore.at_once` at most, and return the attention of their queries; `once` as from `shared_heads`."""
    query, key, value = rows
    scale, changed, sink = options
    dtype = query.dtype
    batch, count, kv_heads, head_dim = key.shape
    query = query.view(batch, count, kv_heads, -1, head_dim).permute(2, 0, 1, 3, 4)  # (kv_heads, batch, count, group, head_dim)
    blocks: list[tuple[Block, int]] = []
    columns = 0
    for number in range(len(stores)):
        of_branch = _extend(stores, number, seen, (key, value), once)
        blocks += ((block, columns) for block in of_branch)
        columns += max((block.slots for block in of_branch), default=0)
    if blocks and blocks[0][0].stored.dtype != query.dtype:  # which halves would round once more
        query = query.to(lse_dtype(dtype))
        blocks = [(replace(block, stored=decoded(block.stored, query.dtype)), column) for block, column in blocks]
    scores = query.new_full((*query.shape[:-1], columns + (sink is not None)), -torch.inf, dtype=lse_dtype(query.dtype))
    if sink is not None:
        scores[..., -1] = sink.detach().view(kv_heads, 1, 1, -1)
    for block, column in blocks:
        block.score(query, _part(scores, block, column), scale, changed)
    weights = scores.softmax(-1).to(query.dtype)
    out = _gathered(blocks, weights, query, scores.dtype, careful=False)
    if any(block.unseen is not None for block, _ in blocks) and not bool(out.isfinite().all()):
        out = _gathered(blocks, weights, query, scores.dtype, careful=True)  # a row that it does not see may be NaN
    return out.permute(1, 2, 0, 3, 4).flatten(2, 3).to(dtype)


def _gathered(blocks: list[tuple[Block, int]], weights: Tensor, query: Tensor, dtype: torch.dtype, careful: bool) -> Tensor:
    out = torch.zeros_like(query, dtype=dtype)
    for block, column in blocks:
        block.gather(_part(weights, block, column), out, careful)
    return out


def _part(table: Tensor, block: Block, column: int) -> Tensor:
    return table[block.heads, :, block.rows, :, column : column + block.slots]


def _extend(stores: Sequence[BranchStore], number: int, seen: int, new: tuple[Tensor, Tensor], once: Heads | None) -> list[Block]:
    """Store keys and values in a branch, and return what rows see; with `once`, without keys that branches before it show."""
    blocks = stores[number].extend(seen, encoded(stacked(*new), stores[number].rows.dtype))
    if once is None or number == 0:
        return blocks
    counted_once = []
    for block in blocks:
        earlier = [store.branch for store in stores[:number]]
        shown = seen_by(earlier, block.queries, block.keys, once, block.heads, block.stored.device)
        counted_once.append(replace(block, unseen=shown if block.unseen is None else block.unseen | shown))
    return counted_once


def _apart(stores: Sequence[BranchStore], seen: int) -> int:
    """Count the first branches of which none shows the row after `seen` a key that one before it may show."""
    spans: list[range] = []
    for store in stores:
        span = store.span(seen)
        if not all(one.stop <= span.start or span.stop <= one.start for one in spans):
            break
        spans.append(span)
    return len(spans)
