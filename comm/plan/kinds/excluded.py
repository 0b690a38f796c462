"""Excluded tokens: with `overlap="once"`, the global tokens whose pairs another branch shows already.

A global token is seen by all, and with `direction="both"` sees all. So a pair with one of them counts in the first branch of
global tokens that it belongs to, and is left out of all branches after it, and of those of other kinds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dilkit.comm.plan.divided import divided, is_stride
from dilkit.comm.plan.sharded_segments import ServedHead, served_heads
from dilkit.pattern import Pattern
from dilkit.pattern.lowering import Band, Form, Global, lower
from dilkit.pattern.runs import union

if TYPE_CHECKING:
    from dilkit.pattern.runs import Positions

Spans = tuple[tuple[int, int], ...]


def spans_within(runs: Positions, start: int, stop: int) -> Spans:
    """The runs of positions `(n, 2)`, ascending and apart, among the rows `start .. stop - 1`.

    >>> spans_within(np.array([[0, 3], [5, 6], [9, 10]]), 1, 9)
    ((1, 3), (5, 6))
    >>> spans_within(np.array([[0, 4]]), 3, 3)
    ()
    """
    first, last = np.searchsorted(runs[:, 1], start, "right"), np.searchsorted(runs[:, 0], stop, "left")
    return tuple((low, high) for low, high in np.clip(runs[first:last], start, stop).tolist() if low < high)


class ExcludedTokens(NamedTuple):
    """What a branch leaves out: `forms` are those of the branch in the pattern, none where every branch counts."""

    forms: tuple[Form, ...] = ()

    @classmethod
    def of(cls, pattern: Pattern, branch: int, seq: int, heads: int, kv_heads: int) -> ExcludedTokens:
        """Those of a branch of a pattern."""
        if pattern.overlap == "count":
            return cls()
        return cls(tuple(form for form in lower(pattern, seq, heads, kv_heads) if form.branch == branch))

    def queries(self, head: ServedHead, start: int, stop: int) -> tuple[int, ...]:
        """The queries of a head that are excluded among the rows `start .. stop - 1`: `(start, stop, start, stop, ...)`."""
        return _edges([form.without_rows for form in self.forms if form.serves(head.first)], start, stop)

    def keys(self, head: ServedHead, start: int, stop: int, more: Positions | None = None) -> tuple[int, ...]:
        """The keys that are excluded from these queries, and those of `more`."""
        return _edges([*(form.without_columns for form in self.forms if form.serves(head.first)), more], start, stop)


def _edges(positions: list[Positions | None], start: int, stop: int) -> tuple[int, ...]:
    given = [some for some in positions if some is not None]
    return tuple(edge for span in spans_within(union(*given), start, stop) for edge in span) if given else ()


def is_separable(pattern: Pattern, seq: int, heads: int, kv_heads: int) -> bool:
    """Whether each pair counts once where tokens are excluded.

    That takes windows of which none serve the same head, and no global tokens that are excluded from some of the query heads of a
    key/value head alone.
    """
    branches = divided(pattern, seq, heads, kv_heads)
    others = [forms for forms in branches if not forms or not isinstance(forms[0], Global)]
    if not all(forms and isinstance(forms[0], Band) and not is_stride(forms) for forms in others):
        return False
    if any(sum(forms[0].serves(head) for forms in others) > 1 for head in range(heads)):
        return False
    tokens = [forms[0] for forms in branches if isinstance(forms[0], Global)]
    served = {head for forms in branches for head in served_heads(forms, heads, kv_heads)}
    return all(len({form.serves(h.first + i) for i in range(h.width)}) == 1 for h in served for form in tokens)
