"""`BranchStore`: keys and values that a `DilatedCache` keeps for one branch, and `Block`, rows of a chunk against them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dilkit.bias.evaluated import evaluate
from dilkit.decoding._tables import Slots
from dilkit.decoding.layout import Layout
from dilkit.op.scores import Scores
from dilkit.pattern import Branch
from dilkit.pattern.heads import Heads
from dilkit.pattern.lowering.checks import sees

FIRST_SLOTS = 64

Positions = range | Tensor


class BranchStore(ABC):
    """Keys and values of one branch: `rows` in `slots`, which say what a single row sees of them.

    `latest`: the token after the last that was stored, whether it was taken back or not. `since`: the first token from which on
    all that later rows see is at hand. `saved`: rows for going back, beside `rows`.
    """

    def __init__(self, branch: Branch, heads: int, layout: Layout, rollback: int, slots: Slots) -> None:
        self.branch, self.rollback, self.since, self.slots = branch, rollback, 0, slots
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written to outside of it
            shape = (2, heads, layout.batch, 0, layout.width)
            self.rows = self.saved = torch.zeros(shape, dtype=layout.stored, device=layout.device)

    @abstractmethod
    def at_once(self, seen: int) -> int:
        """Return how many of the rows after `seen` may be taken together."""

    @abstractmethod
    def columns(self, seen: int, count: int) -> int:
        """Return how many slots so many rows after `seen` are held against, at most."""

    @abstractmethod
    def needed(self, seen: int) -> int:
        """Count the rows of all heads that some row from `seen - rollback` on can see, after `seen` tokens."""

    def span(self, seen: int) -> range:
        """Return the first to the last token that the row after `seen` can see in the branch, or more."""
        return range(seen + 1)

    @abstractmethod
    def extend(self, seen: int, new: Tensor) -> list[Block]:
        """Store what the branch keeps of rows after `seen`, `new` `(2, kv_heads, batch, rows, width)`; return what they see."""

    def make_room(self, seen: int) -> bool:
        """Make room for the row after `seen`. Return False, and do nothing, if only `extend` knows what the row sees."""
        return False

    @property
    def rows(self) -> Tensor:
        return self.slots.rows

    @rows.setter
    def rows(self, rows: Tensor) -> None:
        self.slots.lay_out(rows)

    @property
    def latest(self) -> int:
        return self.slots.latest

    @latest.setter
    def latest(self, latest: int) -> None:
        self.slots.latest = latest

    @abstractmethod
    def append_last(self, seen: int, key: Tensor, value: Tensor) -> None:
        """Store what later rows see of a chunk `(batch, rows, kv_heads, width)` that ends after `seen` and sees none before."""

    @abstractmethod
    def needed_from(self, length: int) -> int:
        """Return the first token that a row from `length` on sees, before all that it could see without the branch's pattern."""

    @abstractmethod
    def can_go_back(self, seen: int, length: int) -> bool:
        """True if the rows are at hand, of `seen` tokens, that are seen after the first `length` of them."""

    @abstractmethod
    def go_back(self, seen: int, length: int) -> None:
        """Forget all tokens of `seen` but the first `length`."""

    @abstractmethod
    def fits(self, seen: int, slots: int, saved: int) -> bool:
        """True if so many slots, with `since` and `latest`, can be what was kept after `seen` tokens."""

    def reorder(self, indices: Tensor) -> None:
        with torch.inference_mode(False):
            self.rows, self.saved = (x.index_select(2, indices) for x in (self.rows, self.saved))

    def _reserve(self, slots: int, most: int) -> None:
        if slots > (room := self.slots.count):
            grown = self._grown(min(most, max(slots, 2 * room, FIRST_SLOTS)))
            grown[:, :, :, :room] = self.rows
            self.rows = grown

    def _grown(self, slots: int) -> Tensor:
        with torch.inference_mode(False):
            return self.rows.new_zeros(*self.rows.shape[:3], slots, self.rows.shape[4])


def stacked(key: Tensor, value: Tensor) -> Tensor:
    """Return keys and values `(batch, rows, kv_heads, width)` as stores take them, `(2, kv_heads, batch, rows, width)`."""
    return torch.stack((key, value)).permute(0, 3, 1, 2, 4)


def served_heads(branch: Branch, given: Heads) -> tuple[slice, bool]:
    """Return the key/value heads that a branch serves, and True if it serves all query heads of each."""
    served = branch.served(given)
    heads = slice(served.start // given.group, -(-served.stop // given.group))
    return heads, len(served) == (heads.stop - heads.start) * given.group


@dataclass(frozen=True)
class Block:
    """Rows `rows` of a chunk, for the key/value heads `heads`, and the keys that they may see.

    `stored` `(2, heads, batch, slots, head_dim)`: keys and values, a view of what a store keeps. `queries` and `keys`: positions
    in the sequence of the rows and of the slots. `unseen`: bool that broadcasts to `(heads, 1, rows, group, slots)`, True for
    slots that a row does not see; None where all see all.
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
        """Fill `scores` `(heads, batch, rows, group, slots)` with `scale * q . k`, changed as `changed` says; -inf if unseen."""
        rows, keys = query[self.heads, :, self.rows].flatten(2, 3).flatten(0, 1), self.stored[0].flatten(0, 1)
        if rows.dtype == torch.float16:  # whose largest number a product may exceed before it is scaled
            rows, keys = rows.float(), keys.float()
        product = rows @ keys.mT
        scores.copy_(product.view(scores.shape)).mul_(scale)
        if changed.softcap:
            scores.div_(changed.softcap).tanh_().mul_(changed.softcap)
        if changed.bias is not None:
            added = evaluate(changed.bias, *(positions(x, self.stored.device) for x in (self.queries, self.keys)))
            grouped = added.reshape(len(added), len(query), added.shape[1] // len(query), *added.shape[2:])
            scores.add_(grouped[:, self.heads].permute(1, 0, 3, 2, 4))
        if self.unseen is not None:
            scores.masked_fill_(self.unseen, -torch.inf)

    def gather(self, weights: Tensor, out: Tensor, careful: bool) -> None:
        """Add `weights` times values to `out` `(kv_heads, batch, rows, group, head_dim)`; if `careful`, 0 times NaN is 0."""
        target, values = out[self.heads, :, self.rows], self.stored[1].flatten(0, 1)
        if self.unseen is not None:
            weights = weights.masked_fill(self.unseen, 0.0)  # of a row that sees nothing they are NaN
        flat = weights.flatten(2, 3).flatten(0, 1)
        sums = flat @ values
        if careful:
            finite = values.isfinite()
            touched = (flat != 0).to(values.dtype) @ (~finite).to(values.dtype) > 0
            sums = sums.where(touched, flat @ values.masked_fill(~finite, 0.0))
        target += sums.view(target.shape)


def seen_by(
    branches: Iterable[Branch], queries: Positions, keys: Positions, given: Heads, heads: slice, device: torch.device
) -> Tensor:
    """True where any of `branches` shows a query a key, causality aside: `(heads or 1, 1, rows, group or 1, slots)`."""
    rows, columns = (positions(x, device) for x in (queries, keys))
    seen = torch.zeros(1, len(rows), len(columns), dtype=torch.bool, device=device)
    for branch in branches:
        shown = sees(branch, rows, columns, given)
        if branch.heads is not None or len(shown) > 1:
            served = branch.served(given)
            seen = seen.expand(given.count, -1, -1).clone()
            seen[served.start : served.stop] |= shown
        else:
            seen = seen | shown
    if len(seen) == 1:
        return seen[:, None, :, None]
    return seen.view(given.kv_heads, given.group, *seen.shape[1:])[heads].transpose(1, 2).unsqueeze(1)


def unseen_by(branch: Branch, queries: Positions, keys: Positions, given: Heads, heads: slice, device: torch.device) -> Tensor:
    """True where a query does not see a key in `branch`, or not yet: the keys after it."""
    later = positions(keys, device) > positions(queries, device)[:, None]
    return ~seen_by((branch,), queries, keys, given, heads, device) | later[:, None]


def positions(given: Positions, device: torch.device) -> Tensor:
    return given if isinstance(given, Tensor) else torch.arange(given.start, given.stop, given.step, device=device)
