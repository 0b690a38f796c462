"""The forms of `overlap="once"`, which counts each pair once: each form leaves out the pairs of those before it.

    Global      first: of its rows that see all and columns that all see, none takes part in a later form
    Segments
    Band        ascending by rate; one begins where another ends whose rate divides its own
    Grid, CutGrid
    Runs        last: those of all branches are one form
    GivenBlocks by itself: what each call says is left out of no form, and leaves out none

What is left of any other two is no form: the later one names the earlier, whose pairs it leaves out one by one (`Form.without`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from dilkit.pattern.lowering.forms import Band, CutGrid, Form, GivenBlocks, Global, Grid, Runs, Segments, Unlowered
from dilkit.pattern.lowering.tables import RunTable
from dilkit.pattern.runs import union

_TURNS: tuple[type[Form], ...] = (Global, Segments, Band, Grid, CutGrid, Runs, GivenBlocks, Unlowered)


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
    yield from ((form, form.branch) for form in sorted(others, key=_turn))
    if runs:
        queries, keys = (RunTable.any_of(tables) for tables in zip(*((form.queries, form.keys) for form in runs), strict=True))
        branches = {form.branch for form in runs}
        yield replace(runs[0], queries=queries, keys=keys), runs[0].branch if len(branches) == 1 else None


def _turn(form: Form) -> tuple[int, int, int]:
    rate, back = (form.rate, form.back) if isinstance(form, Band) else (0, 0)
    return _TURNS.index(type(form)), rate, -back


def _one_after_another(forms: Iterable[tuple[Form, int | None]], first: int) -> Iterator[Form]:
    """Yield each form without those before it; `first`: the place of the first one that is left."""
    before: list[Form] = []
    for form, branch in forms:
        left = _without(form, [(place, other) for place, other in enumerate(before, first) if other.branch != branch])
        if not isinstance(left, Band) or left.first <= max(left.back, left.ahead):
            before.append(form)
            yield left


def _without(form: Form, others: Sequence[tuple[int, Form]]) -> Form:
    """Subtract other forms, each given with its place, from a form."""
    if others and any(isinstance(one, GivenBlocks) for one in (form, *(other for _, other in others))):
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


_GIVEN = 'with overlap="once", blocks that each call chooses go with no other branch; use overlap="count"'
_NO_FORM = 'with overlap="once", a branch without the pairs of one that some rows take no part in is no form; use overlap="count"'


def _ends_before(other: Form, form: Form) -> bool:
    """True if the rest of band `form` without band `other` is the part beyond the end of `other`."""
    if not (isinstance(other, Band) and isinstance(form, Band)):
        return False
    return form.rate % other.rate == 0 and other.begin == 0 and other.back == other.ahead
