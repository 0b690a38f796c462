"""The forms of a pattern. With `overlap="once"`, which counts each pair once, each form leaves out the pairs of those before it.

    Global      first: of its rows that see all and columns that all see, none takes part in a later form
    Segments
    Band        ascending by rate; one begins where another ends whose rate divides its own
    Grid, CutGrid
    Runs        last: those of all branches are one form
    Given       by itself: what each call says is left out of no form, and leaves out none

The rest of any other two is not a form: the later one names the earlier, whose pairs it leaves out one by one (`Form.without`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dilkit import environment, plan
from dilkit.pattern.checks import WHOLE_SEQUENCE
from dilkit.pattern.lowering.checks import forms_of
from dilkit.pattern.lowering.forms import (
    Band,
    CutGrid,
    Form,
    Given,
    GivenBlocks,
    GivenIntervals,
    Global,
    Grid,
    Runs,
    Segments,
    Unlowered,
)
from dilkit.pattern.lowering.tables import RunTable
from dilkit.pattern.runs import union

if TYPE_CHECKING:
    from dilkit.pattern.pattern import Pattern


class Forms(tuple[Form, ...]):
    """The forms of a pattern, as the pattern cache keeps them."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(form.name for form in self)

    @property
    def nbytes(self) -> int:
        return sum(form.nbytes for form in self)


def lower(pattern: Pattern, seq: int, heads: int, kv_heads: int | None = None) -> Forms:
    """Lower `pattern` for `heads` query heads over `kv_heads` key/value heads to forms (`dilkit.pattern.lowering.forms`).

        count[h, i, j] = number of forms that serve h and show (i, j), less what they leave out

    With `overlap="count"` they are the forms of one branch after the other. With `overlap="once"` no two show the same pair. They
    hold for sequences of `seq` tokens and shorter ones; of branches that say their forms by formula, for any.

        >>> from dilkit import Pattern, SlidingWindow, Strided
        >>> from dilkit.pattern.lowering import lower
        >>> window, stride = lower(Pattern.of(Strided(4), SlidingWindow(6), overlap="once"), seq=64, heads=2)
        >>> (window.back, window.rate, window.first), (stride.rate, stride.first)
        ((5, 1, 0), (4, 6))
    """
    kv_heads = kv_heads or heads
    key = "forms", pattern.to_json(), heads, kv_heads, seq if pattern.is_evaluated else WHOLE_SEQUENCE
    return plan.cached(key, partial(_lowered, pattern, seq, heads, kv_heads))


def _lowered(pattern: Pattern, seq: int, heads: int, kv_heads: int) -> Forms:
    at_hand = pattern.among(heads, kv_heads)
    forms = [replace(form, branch=i) for i, branch in enumerate(pattern.branches) for form in forms_of(branch, at_hand, seq)]
    lowered = Forms(counted_once(forms) if pattern.overlap == "once" else forms)
    if (nbytes := lowered.nbytes) > _SMALL and 0 < (limit := environment.cache_bytes()) < 2 * nbytes:
        warnings.warn(
            f"{pattern}: its tables take {nbytes:,} bytes, and those of a backend as many, but {environment.CACHE_BYTES.name} is "
            f"{limit:,}: they are made anew at each call; {environment.CACHE_BYTES.name}={4 * nbytes} keeps them",
            stacklevel=2,
        )
    return lowered


_SMALL = 2**20
"""Bytes of tables that take no time worth a word to make again."""

_TURNS: tuple[type[Form], ...] = (Global, Segments, Band, Grid, CutGrid, Runs, GivenBlocks, GivenIntervals, Unlowered)


def counted_once(forms: Sequence[Form]) -> tuple[Form, ...]:
    """Return the forms in the order in which they leave each other out, cut into ranges of heads that the same forms serve."""
    bounds, disjoint = sorted({end for form in forms for end in form.heads}), list[Form]()
    for heads in pairwise(bounds):
        alike = [form.of_heads(*heads) for form in forms if form.serves(heads[0])]
        disjoint += _one_after_another(_in_order(alike), first=len(disjoint))
    return tuple(disjoint)


def _in_order(forms: Sequence[Form]) -> Iterator[tuple[Form, int | None]]:
    """Yield each form with the branch whose forms have no pair in common with it, if there is one."""
    runs = [form for form in forms if isinstance(form, Runs)]
    others = (form for form in forms if not isinstance(form, Runs))
    turns = {form: (form.rate, -form.back) if isinstance(form, Band) else (0, 0) for form in others}
    yield from ((form, form.branch) for form in sorted(turns, key=lambda form: (_TURNS.index(type(form)), *turns[form])))
    if runs:
        queries, keys = (RunTable.any_of(tables) for tables in zip(*((form.queries, form.keys) for form in runs), strict=True))
        branches = {form.branch for form in runs}
        yield replace(runs[0], queries=queries, keys=keys), runs[0].branch if len(branches) == 1 else None


def _one_after_another(forms: Iterable[tuple[Form, int | None]], first: int) -> Iterator[Form]:
    """Yield each form without those before it; `first`: the place of the first one that is left."""
    before: list[Form] = []
    for form, branch in forms:
        left = _without(form, [(place, other) for place, other in enumerate(before, first) if other.branch != branch])
        if not isinstance(left, Band) or left.first <= max(left.back, left.ahead):
            before.append(form)
            yield left


def _without(form: Form, others: Sequence[tuple[int, Form]]) -> Form:
    if others and any(isinstance(one, Given) for one in (form, *(other for _, other in others))):
        return Unlowered(heads=form.heads, branch=form.branch, why=_GIVEN)
    if any(other.without_rows is not None for _, other in others):
        return Unlowered(heads=form.heads, branch=form.branch, why=_NO_FORM)
    changes: dict[str, Any] = dict(
        without=tuple(place for place, other in others if not isinstance(other, Global) and not _ends_before(other, form))
    )
    if seen := [other for _, other in others if isinstance(other, Global)]:
        rows, columns = ([] if runs is None else [runs] for runs in (form.without_rows, form.without_columns))
        changes["without_rows"] = union(*rows, *(other.rows for other in seen))
        changes["without_columns"] = union(*columns, *(other.columns for other in seen))
    if isinstance(form, Band):
        ends = (other.back + 1 for _, other in others if isinstance(other, Band) and _ends_before(other, form))
        changes["beyond"] = max(ends, default=0)
    return replace(form, **changes)


_GIVEN = 'with overlap="once", what each call gives goes with no other branch; use overlap="count"'
_NO_FORM = 'with overlap="once", a branch without the pairs of one that some rows take no part in is no form; use overlap="count"'


def _ends_before(other: Form, form: Form) -> bool:
    """True if the rest of band `form` without band `other` is the part beyond the end of `other`."""
    if not (isinstance(other, Band) and isinstance(form, Band)):
        return False
    return form.rate % other.rate == 0 and other.begin == 0 and other.back == other.ahead
