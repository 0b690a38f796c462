"""Refusals of patterns that strided views cannot express: `overlap="once"` with shared rows, rows at uneven distances."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from dilkit.backend import Refusal, offset_refusals
from dilkit.backends.sdpa.grids import FORMS
from dilkit.backends.sdpa.score_tiles import MOST_CELLS, Interval, inside, outside, run_cells, run_tiles
from dilkit.pattern.lowering import Band, Form, Global, Runs, Segments
from dilkit.pattern.runs import UNBOUNDED
from dilkit.problem import Problem


@lru_cache(maxsize=256)
def overlap_refusals(problem: Problem) -> tuple[Refusal, ...]:
    """Refuse `overlap="once"` where two forms of segments share a row, or what a form leaves out is no view."""
    forms = problem.forms
    if problem.pattern.overlap == "count" or not forms.names <= FORMS:
        return ()
    segments = [form for form in forms if isinstance(form, Segments)]
    of_heads = {
        tuple((form.length, form.rate, form.offset_of(head)) for form in segments if form.serves(head))
        for head in range(problem.heads)
    }
    last = max(end for _, end in _extent(problem))
    reasons = [_segments_refused(of_head, last) for of_head in of_heads]
    reasons += [_left_out_refused(form) for form in forms]
    return tuple(Refusal("overlap", "'once'", why, _HINT) for why in sorted(filter(None, reasons))[:1])


def _left_out_refused(form: Form) -> str:
    """Return why a form without its excluded pairs is no strided view; empty if it is one."""
    if form.without_rows is None and (isinstance(form, Segments) or not form.without):
        return ""
    if form.without or not isinstance(form, (Band, Runs)):
        return "two branches see the same key, and one without the pairs of the other is no strided view"
    return ""


def kind_refusals(problem: Problem) -> tuple[Refusal, ...]:
    """Refuse forms that need too many calls, and kinds that packed sequences and caches do not support."""
    forms, refusals = problem.forms, [*offset_refusals(problem), *_before_the_keys(problem)]
    rows, keys = _extent(problem)
    other_kinds = {problem.pattern.branches[form.branch].kind for form in forms if form.name in FORMS - {Segments.name}}
    if other_kinds and (problem.kv_cache or (problem.varlen and problem.queries is None)):
        where = "packed sequences" if problem.varlen else "a cache"
        refusals.append(Refusal("branch kind", ", ".join(sorted(other_kinds)), f"of {where}, segments alone", _OTHER))
    for form in (form for form in forms if form.name in FORMS):
        kind = problem.pattern.branches[form.branch].kind
        if problem.pattern.overlap == "count" and _left_out_refused(form):
            refusals.append(Refusal("branch kind", kind, "the rest without some queries and keys is no strided view", _OTHER))
        elif isinstance(form, Global):
            places = max(len(inside(form.rows, rows)), len(inside(form.columns, keys)))
            if places > MOST_PLACES:
                hint = "move them next to each other, or another backend"
                refusals.append(Refusal("global tokens", f"in {places} places", f"at most {MOST_PLACES}", hint))
    pieces = {form: count for form in forms if form.name in FORMS and (count := _pieces(form, problem)) > 1}
    if sum(pieces.values()) > MOST_TILES:
        kinds = {problem.pattern.branches[form.branch].kind for form in pieces}
        limit = f"at most {MOST_TILES} calls, each of runs that repeat at equal distances"
        refusals.append(Refusal("branch kind", ", ".join(sorted(kinds)), limit, _OTHER))
    return tuple(refusals)


def _pieces(form: Form, problem: Problem) -> int:
    """Count the calls of a form that are made of no formula, about."""
    rows, keys = _extent(problem)
    if isinstance(form, Band):
        pieces = len(outside(form.without_rows, rows)) * len(outside(form.without_columns, keys))
        return 3 * pieces if pieces > 1 else 1
    if not isinstance(form, Runs):
        return 0
    cells = len(run_cells(form, rows, keys, problem.is_causal))
    return cells if cells > MOST_CELLS else sum(1 for _ in run_tiles(form, rows, keys, problem.is_causal))


def _extent(problem: Problem) -> tuple[Interval, Interval]:
    """Return the positions of queries and of keys, the most that there can be where each call says its own."""
    keys = 0, problem.seq
    if problem.queries is None:
        return keys, keys
    if problem.query_offset is None:
        return (0, UNBOUNDED), keys
    return (problem.query_offset, problem.query_offset + problem.queries), keys


def _before_the_keys(problem: Problem) -> list[Refusal]:
    """Refuse queries before the first key unless all branches that reach them are plain bands."""
    offset, pattern = problem.query_offset, problem.pattern
    if problem.queries is None or problem.is_causal or (offset is not None and offset >= 0):
        return []
    by_distance = [form for form in problem.forms if pattern.branches[form.branch].goes_by_distance]
    mixed = pattern.overlap == "once" and len(by_distance) not in (0, len(problem.forms))
    if not mixed and all(isinstance(form, Band) for form in by_distance):
        return []
    limit = "from 0 on, one number for all, where what distances show is left out elsewhere, or shown as no band"
    return [Refusal("query_offset", "of each call" if offset is None else str(offset), limit, _OTHER)]


NO_VIEW = "another backend: grids are no strided views"
MOST_PLACES, MOST_TILES = 8, 64
"""Runs of global tokens, with n of which a branch takes about n * n calls; and calls of a branch that is made of runs."""
_OTHER = "another backend"
_HINT = 'overlap="count", or another backend'
_MOST_ROWS, _BLOCK = 2**26, 2**20
"""Rows that are looked at, most of all and at once."""


def _segments_refused(branches: tuple[tuple[int, int, int], ...], seq: int) -> str:
    """Return why segments `(segment_length, dilation_rate, offset)` need a joint softmax; empty if no two share a row."""
    if len(branches) < 2:
        return ""
    repeats = math.lcm(*(length if length < seq else rate for length, rate, _ in branches))
    rows = min(seq, repeats)
    if rows > _MOST_ROWS:
        return f"whether two branches see the same key shows after {rows:,} rows only, more than {_MOST_ROWS:,}"
    for start in range(0, rows, _BLOCK):
        block = np.arange(start, min(start + _BLOCK, rows))
        taken = sum((block % length % rate == offset).astype(np.int8) for length, rate, offset in branches)
        if np.max(taken) > 1:
            return "two branches see the same key, and one without the rows of the other is not evenly spaced"
    return ""
