"""`Block`: rows of a chunk against the rows that are stored for one branch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dilkit.bias.evaluated import evaluate
from dilkit.bias.form import LoweredBias
from dilkit.op.scores import Scores
from dilkit.pattern import Branch
from dilkit.pattern.heads import Heads
from dilkit.pattern.lowering.checks import sees

Positions = range | Tensor


@dataclass(frozen=True)
class Block:
    """Rows `rows` of a chunk, for the key/value heads `heads`, and the keys that they may see.

    `stored` `(2, heads, batch, slots, head_dim)`: keys and values, a view of what a cache keeps. `queries` and `keys`: positions
    in the sequence of the rows and of the slots. `unseen`: which rows do not see which slots, bool that broadcasts to
    `(heads, 1, rows, group, slots)`; None where all see all.
    """

    heads: slice
    rows: slice
    stored: Tensor
    queries: range
    keys: Positions
    unseen: Tensor | None

    @property
    def slots(self) -> int:
        return self.stored.shape[3]

    def score(self, query: Tensor, scores: Tensor, scale: float, changed: Scores) -> None:
        """Fill `scores` `(heads, batch, rows, group, slots)` with `scale * q . k`, and -inf where a row does not see a key.

        They are capped, and have a bias, as `changed` says.
        """
        rows, keys = query[self.heads, :, self.rows].flatten(2, 3).flatten(0, 1), self.stored[0].flatten(0, 1)
        if rows.dtype == torch.float16:  # whose largest number a product may exceed before it is scaled
            rows, keys = rows.float(), keys.float()
        product = rows @ keys.mT
        scores.copy_(product.view(scores.shape)).mul_(scale)
        if changed.softcap:
            scores.div_(changed.softcap).tanh_().mul_(changed.softcap)
        if changed.bias is not None:
            scores.add_(self._added(changed.bias, len(query)))
        if self.unseen is not None:
            scores.masked_fill_(self.unseen, -torch.inf)

    def _added(self, bias: LoweredBias, kv_heads: int) -> Tensor:
        """What a bias of all heads adds, `(heads, batch or 1, rows, group, slots)`."""
        rows, keys = (positions(x, self.stored.device) for x in (self.queries, self.keys))
        added = evaluate(bias, rows, keys)
        grouped = added.reshape(len(added), kv_heads, added.shape[1] // kv_heads, *added.shape[2:])
        return grouped[:, self.heads].permute(1, 0, 3, 2, 4)

    def gather(self, weights: Tensor, out: Tensor, careful: bool) -> None:
        """Add what the rows get, by `weights` like `scores`, to `out` `(kv_heads, batch, rows, group, head_dim)`.

        `careful`: values of weight 0 add nothing, be they NaN.
        """
        target, values = out[self.heads, :, self.rows], self.stored[1].flatten(0, 1)
        if self.unseen is not None:
            weights = weights.masked_fill(self.unseen, 0.0)  # of a row that sees nothing they are NaN
        flat = weights.flatten(2, 3).flatten(0, 1)
        sums = weighted(flat, values) if careful else flat @ values
        target += sums.view(target.shape)


def weighted(weights: Tensor, values: Tensor) -> Tensor:
    """`weights @ values`, in which rows of `values` with weight 0 add nothing, be they NaN."""
    product, finite = weights @ values, values.isfinite()
    touched = (weights != 0).to(values.dtype) @ (~finite).to(values.dtype) > 0
    return product.where(touched, weights @ values.masked_fill(~finite, 0.0))


def seen_by(
    branches: Iterable[Branch], queries: Positions, keys: Positions, given: Heads, heads: slice, device: torch.device
) -> Tensor:
    """Whether any of `branches` shows a query a key, causality aside, for the key/value heads `heads` of those `given`.

    Bool `(heads, 1, rows, group, slots)`, or with one entry for all heads and groups.
    """
    rows, columns = (positions(x, device) for x in (queries, keys))
    seen = torch.zeros(1, len(rows), len(columns), dtype=torch.bool, device=device)
    for branch in branches:
        found = sees(branch, rows, columns, given)
        if branch.heads is not None or len(found) > 1:
            served = branch.served(given)
            seen = seen.expand(given.count, -1, -1).clone()
            seen[served.start : served.stop] |= found
        else:
            seen = seen | found
    if len(seen) == 1:
        return seen[:, None, :, None]
    return seen.view(given.kv_heads, given.group, *seen.shape[1:])[heads].transpose(1, 2).unsqueeze(1)


def unseen_by(branch: Branch, queries: Positions, keys: Positions, given: Heads, heads: slice, device: torch.device) -> Tensor:
    """Which keys a query does not see in `branch`, or not yet: the keys after it."""
    later = positions(keys, device) > positions(queries, device)[:, None]
    return ~seen_by((branch,), queries, keys, given, heads, device) | later[:, None]


def positions(given: Positions, device: torch.device) -> Tensor:
    """As int64 `(n,)`."""
    return given if isinstance(given, Tensor) else torch.arange(given.start, given.stop, given.step, device=device)
