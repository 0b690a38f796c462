"""Attention of new rows over the open segments: one softmax over all that they see, branch beside branch.

    columns of the scores    | branch 0: slots 0, 1, ... | branch 1: slots 0, 1, ... | ... | sink |

A row has scores where the branch keeps it for its head. Its other columns are -inf, and their weights are never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dilkit.decoding.branch import Part
from dilkit.decoding.segment import OpenSegment
from dilkit.op.boundary import lse_dtype


@dataclass(frozen=True)
class Block:
    """Rows of one class of heads in one branch, and the column of the branch's first slot."""

    segment: OpenSegment
    part: Part
    column: int

    def of(self, table: Tensor) -> Tensor:
        """Its part of a table `(kv_heads, batch, rows, group, columns)`: `(heads, batch, count, group, slots)`."""
        part = self.part
        return table[part.of.heads, :, part.rows, :, self.column : self.column + part.end]

    def stored(self, which: int) -> Tensor:
        """Its keys (0) or values (1), `(heads * batch, slots, head_dim)`, without a copy."""
        return self.segment.rows[which, self.part.of.stored, :, : self.part.end].flatten(0, 1)

    @property
    def unserved(self) -> Tensor | None:
        """Which query heads `(heads, 1, 1, group, 1)` the branch leaves out, if it serves others of their key/value head."""
        return self.segment.kept.offsets[self.part.of.heads, None, None, :, None] < 0 if self.segment.kept.partly else None

    def score(self, query: Tensor, scores: Tensor, scale: float) -> None:
        """Fill in `scale * q . k` where a row sees a key."""
        rows, found = query[self.part.of.heads, :, self.part.rows], self.of(scores)
        product = rows.flatten(2, 3).flatten(0, 1) @ self.stored(0).mT
        found.copy_(product.view(found.shape)).mul_(scale)
        if (count := self.part.count) > 1:  # of the new rows, none sees a later one
            later = torch.ones(count, count, dtype=torch.bool, device=query.device).triu(1)
            found[..., self.part.first :].masked_fill_(later[:, None], -torch.inf)
        if (unserved := self.unserved) is not None:
            found.masked_fill_(unserved, -torch.inf)

    def count_once(self, earlier: OpenSegment, seen: int, scores: Tensor) -> None:
        """Take out the keys that rows see in the branch `earlier` as well."""
        part, rate, other = self.part, self.segment.kept.rate, earlier.kept
        start, other_start = (seen - segment.tokens(seen) for segment in (self.segment, earlier))
        offset = (seen - start + part.rows.start) % rate
        keys = start + offset + rate * torch.arange(part.end, device=scores.device)
        queries = keys[part.first :]
        there = (keys >= other_start) & ((queries[:, None] - keys) % other.rate == 0)  # (count, slots)
        taking_part = other.offsets[part.of.heads, None] == ((queries - other_start) % other.rate)[:, None]
        self.of(scores).masked_fill_((taking_part[..., None] & there[:, None])[:, None], -torch.inf)

    def gather(self, weights: Tensor, out: Tensor) -> None:
        """Add what the rows get from this branch to `out` `(kv_heads, batch, rows, group, head_dim)`."""
        target = out[self.part.of.heads, :, self.part.rows]
        found = self.of(weights).flatten(2, 3).flatten(0, 1) @ self.stored(1)
        found = found.view(target.shape)
        target += found if (unserved := self.unserved) is None else found.masked_fill(unserved, 0.0)


def attend_chunk(
    segments: list[OpenSegment], seen: int, rows: tuple[Tensor, Tensor, Tensor], scale: float, sink: Tensor | None, once: bool
) -> Tensor:
    """Store the keys and values of `rows`, which lie within one segment of every branch, and return what their queries get.

    `rows` are query, key and value, `(batch, count, heads, head_dim)`. `once`: a key that several branches show counts once.
    """
    query, key, value = rows
    batch, count, kv_heads, head_dim = key.shape
    query = query.view(batch, count, kv_heads, -1, head_dim).permute(2, 0, 1, 3, 4)  # (kv_heads, batch, count, group, head_dim)
    blocks: list[Block] = []
    columns, new = 0, torch.stack((key, value))
    for segment in segments:
        parts = segment.kept.parts(seen, count)
        segment.append(seen, parts, new)
        blocks += (Block(segment, part, columns) for part in parts)
        columns += max((part.end for part in parts), default=0)
    shape = (*query.shape[:-1], columns + (sink is not None))
    scores = query.new_full(shape, -torch.inf, dtype=lse_dtype(query.dtype))
    if sink is not None:
        scores[..., -1] = sink.detach().view(kv_heads, 1, 1, -1)
    for block in blocks:
        block.score(query, scores, scale)
        for earlier in segments[: segments.index(block.segment)] if once else ():
            block.count_once(earlier, seen, scores)
    weights = scores.softmax(-1).to(query.dtype)
    out = torch.zeros_like(query, dtype=scores.dtype)
    for block in blocks:
        block.gather(weights, out)
    return out.permute(1, 2, 0, 3, 4).flatten(2, 3).to(query.dtype)
