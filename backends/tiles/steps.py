"""Decoding steps on GPUs: the division of one launch into work items, and the sizes that kernels get.

pairs    query rows x key/value heads                      each has a new row, if anything is written
merges   pairs x shares of the query heads of each         each makes rows of `out` of its pieces
pieces   merges x splits                                   each sees a share of the stored rows, and leaves a partial
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from dilkit.decoding.protocol import PlacedStep

MOST_GROUP, PIECE_ROWS = 8, 256
"""Query heads that are computed at once, with sums in registers; stored rows for which a block is worth a partial, about."""

MOST_ITEMS, MOST_TOKENS = 2**31 - 2**20, 2**31 - 1  # kernels count them by 32-bit numbers


class Division(NamedTuple):
    """Numbers of work items of a step."""

    writes: int
    merges: int
    splits: int

    @property
    def pieces(self) -> int:
        return self.merges * self.splits

    @property
    def items(self) -> int:
        """The number of all work items. Writes come first, then pieces, then merges."""
        return self.writes + self.pieces + self.merges


class Counts(NamedTuple):
    """Lengths of the tables of a step; `tokens`: those with positions for a bias, 0 without one."""

    pages: int
    spans: int
    writes: int
    stored: int
    positions: int
    unseen: int
    tokens: int


def group_of(problem: Problem) -> int:
    """Return the number of query heads that a block computes at once, a power of two."""
    return min(MOST_GROUP, 1 << (problem.heads // problem.kv_heads - 1).bit_length())


def divided(placed: PlacedStep, resident: int) -> Division:
    """Divide a step into as many pieces as blocks run at once, if they have work. Raises ValueError beyond `MOST_ITEMS`."""
    problem, pairs = placed.problem, placed.step.query.shape[:2].numel() * placed.problem.kv_heads
    merges = pairs * -(-problem.heads // problem.kv_heads // group_of(problem))
    splits = max(1, min(resident // max(1, merges), -(-placed.most // PIECE_ROWS)))
    division = Division(pairs if counts_of(placed).writes else 0, merges, splits)
    if division.items > MOST_ITEMS:
        raise ValueError(
            f"query has {pairs} rows and key/value heads, {division.items} items of work; at most {MOST_ITEMS}: "
            "make several calls"
        )
    return division


def counts_of(placed: PlacedStep) -> Counts:
    """Return the table lengths of a step. Raises ValueError for a bias with positions of more than `MOST_TOKENS`."""
    step = placed.step
    tokens = 0 if step.bias is None or step.bias.positions is None else step.bias.positions.shape[1]
    if tokens > MOST_TOKENS:
        raise ValueError(f"positions of the bias are of {tokens} tokens; at most {MOST_TOKENS}, or backend='reference'")
    writes = 0 if step.key is None else len(placed.writes)  # tables may change, and there is nothing to write
    lengths = len(step.stored), len(step.positions), len(step.unseen)
    return Counts(len(placed.pages), len(placed.spans), writes, *lengths, tokens)


def empty_partials(placed: PlacedStep, division: Division, head_dim: int) -> Tensor:
    """Allocate the partials of each piece and query head: `head_dim` sums, the largest score, the sum of weights."""
    import torch

    sizes = division.pieces, group_of(placed.problem), head_dim + 2
    return torch.empty(sizes, dtype=torch.float32, device=placed.step.query.device)
