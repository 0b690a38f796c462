"""Attention of new rows over what is stored: one softmax over all that they see, block beside block.

    columns of the scores    | branch 0: its slots | branch 1: its slots | ... | sink |

A row has scores in the blocks of the branches that show its head something. Its other columns are -inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dilkit.decoding.block import Block, seen_by
from dilkit.decoding.branch_rows import BranchRows
from dilkit.decoding.stored import decoded, encoded
from dilkit.op.boundary import lse_dtype
from dilkit.op.scores import Scores
from dilkit.pattern.heads import Heads

Table = tuple[Block, int]
"""A block, and the column of its first slot."""


def attend_chunk(
    stores: Sequence[BranchRows],
    seen: int,
    rows: tuple[Tensor, Tensor, Tensor],
    scale: float,
    changed: Scores,
    sink: Tensor | None,
    once: Heads | None,
) -> Tensor:
    """Store the keys and values of `rows`, of which there are `BranchRows.at_once` at most, and return what their queries get.

    `rows` are query, key and value, `(batch, count, heads, head_dim)`. `changed`: the bias and the softcap of their scores.
    `once`: the heads, where a key that several branches show counts once.
    """
    query, key, value = rows
    dtype = query.dtype
    batch, count, kv_heads, head_dim = key.shape
    query = query.view(batch, count, kv_heads, -1, head_dim).permute(2, 0, 1, 3, 4)  # (kv_heads, batch, count, group, head_dim)
    tables, columns = _blocks(stores, seen, (key, value), once)
    if tables and tables[0][0].stored.dtype != query.dtype:  # which halves would round once more
        query = query.to(lse_dtype(dtype))
        tables = [(replace(block, stored=decoded(block.stored, query.dtype)), column) for block, column in tables]
    scores = query.new_full((*query.shape[:-1], columns + (sink is not None)), -torch.inf, dtype=lse_dtype(query.dtype))
    if sink is not None:
        scores[..., -1] = sink.detach().view(kv_heads, 1, 1, -1)
    for block, column in tables:
        block.score(query, _part(scores, block, column), scale, changed)
    weights = scores.softmax(-1).to(query.dtype)
    out = _gathered(tables, weights, query, scores.dtype, careful=False)
    if any(block.unseen is not None for block, _ in tables) and not bool(out.isfinite().all()):
        out = _gathered(tables, weights, query, scores.dtype, careful=True)  # a row that it does not see may be NaN
    return out.permute(1, 2, 0, 3, 4).flatten(2, 3).to(dtype)


def extend(stores: Sequence[BranchRows], number: int, seen: int, new: tuple[Tensor, Tensor], once: Heads | None) -> list[Block]:
    """Store keys and values in a branch, and say what rows see; with `once`, without keys that they see in those before it."""
    blocks = stores[number].extend(seen, encoded(torch.stack(new), stores[number].rows.dtype))
    if once is None or number == 0:
        return blocks
    return [_counted_once(block, stores[:number], once) for block in blocks]


def _blocks(stores: Sequence[BranchRows], seen: int, new: tuple[Tensor, Tensor], once: Heads | None) -> tuple[list[Table], int]:
    """The blocks of all branches with their columns, and how many columns there are."""
    tables: list[Table] = []
    columns = 0
    for i in range(len(stores)):
        blocks = extend(stores, i, seen, new, once)
        tables += ((block, columns) for block in blocks)
        columns += max((block.slots for block in blocks), default=0)
    return tables, columns


def _counted_once(block: Block, earlier: Sequence[BranchRows], given: Heads) -> Block:
    """The block without the keys that its rows see in branches before it."""
    before = seen_by((store.branch for store in earlier), block.queries, block.keys, given, block.heads, block.stored.device)
    return replace(block, unseen=before if block.unseen is None else block.unseen | before)


def _part(table: Tensor, block: Block, column: int) -> Tensor:
    """The part of `table` `(kv_heads, batch, rows, group, columns)` that is a block's."""
    return table[block.heads, :, block.rows, :, column : column + block.slots]


def _gathered(found: list[Table], weights: Tensor, query: Tensor, dtype: torch.dtype, careful: bool) -> Tensor:
    out = torch.zeros_like(query, dtype=dtype)
    for block, column in found:
        block.gather(_part(weights, block, column), out, careful)
    return out
