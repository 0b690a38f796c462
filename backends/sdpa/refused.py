"""Refusals of patterns that are no views: `overlap="once"` where branches share a row, and rows at uneven distances."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from dilkit.backend import Refusal, offset_refusals
from dilkit.backends.sdpa.grids import FORMS, token_runs
from dilkit.pattern.lowering import Band, Form, Global, Segments
from dilkit.problem import Problem


@lru_cache(maxsize=256)
def overlap_refusals(problem: Problem) -> tuple[Refusal, ...]:
    """`overlap="once"` is refused where two forms of segments share a row: each of them scores that row with itself.

    Bands leave out what narrower ones and global tokens have shown, as far as that is a view.
    """
    forms = problem.forms
    if problem.pattern.overlap == "count" or not forms.names <= FORMS:
        return ()
    segments = [form for form in forms if isinstance(form, Segments)]
    of_heads = {
        tuple((form.length, form.rate, form.offsets[head - form.heads[0]]) for form in segments if form.serves(head))
        for head in range(problem.heads)
    }
    reasons = [_segments_refused(of_head, problem.seq) for of_head in of_heads]
    reasons += [_left_out_refused(form, problem) for form in forms]
    return tuple(Refusal("overlap", "'once'", why, _HINT) for why in sorted(filter(None, reasons))[:1])


def _left_out_refused(form: Form, problem: Problem) -> str:
    """Why a form without what it leaves out is no view; empty where it is one."""
    if isinstance(form, Band) and not form.without:
        if form.without_rows is None or form.without_columns is None:
            return ""
        rows, columns = (token_runs(left_out, problem.seq)[0] for left_out in (form.without_rows, form.without_columns))
        if [start for start, _ in columns] not in ([], [0]):
            return "only a band without the first tokens is a strided view, and other tokens are global"
        if rows not in ([], columns):
            return "only a band without the same queries as keys is a strided view"
        if rows != columns and not problem.is_causal:
            return "a band without keys that are read alone is a strided view with is_causal=True only"
        return ""
    alone = form.without_rows is None and (isinstance(form, Segments) or not form.without)
    return "" if alone else "two branches see the same key, and one without the pairs of the other is no strided view"


def kind_refusals(problem: Problem) -> tuple[Refusal, ...]:
    """Global tokens in too many places, each of which is a call of its own; and kinds that packed calls and caches lack."""
    forms, refusals = problem.forms, [*offset_refusals(problem), *_queries_refused(problem)]
    other_kinds = {problem.pattern.branches[form.branch].kind for form in forms if form.name in FORMS - {Segments.name}}
    if other_kinds and (problem.varlen or problem.kv_cache):
        where = "packed sequences" if problem.varlen else "a cache"
        refusals.append(Refusal("branch kind", ", ".join(sorted(other_kinds)), f"of {where}, segments alone", _OTHER))
    for form in (form for form in forms if form.name in FORMS):
        kind = problem.pattern.branches[form.branch].kind
        if problem.pattern.overlap == "count" and _left_out_refused(form, problem):
            refusals.append(Refusal("branch kind", kind, "what is left without some queries and keys is no strided view", _OTHER))
        if not isinstance(form, Global):
            continue
        rows, columns = (token_runs(positions, problem.seq)[0] for positions in (form.rows, form.columns))
        if rows not in ([], columns):
            limit = "tokens that see all and are seen by all, or are read alone, are needed"
            refusals.append(Refusal("branch kind", kind, limit, _OTHER))
        if len(columns) > MOST_PLACES:
            hint = "move them next to each other, or another backend"
            refusals.append(Refusal("global tokens", f"in {len(columns)} places", f"at most {MOST_PLACES}", hint))
    return tuple(refusals)


def _queries_refused(problem: Problem) -> list[Refusal]:
    """Queries that are others than the keys, but where all of them see all keys, or under causality all up to their own."""
    if problem.queries is None:
        return []
    offset, forms = problem.query_offset, problem.forms
    is_dense = len(forms) == 1 and isinstance(forms[0], Segments) and forms[0].rate == 1 and forms[0].length >= problem.span
    inside = offset is not None and offset >= 0
    if problem.is_causal:
        inside = inside and problem.span == problem.seq
    if is_dense and forms[0].heads == (0, problem.heads) and inside and problem.queries > 0:
        return []
    limit = "a batch of dense attention is needed, under causality with each query at one of the keys"
    return [Refusal("queries", f"{problem.queries:,} for {problem.seq:,} keys", limit, _OTHER)]


NO_VIEW = "another backend: runs and grids are no strided views"
MOST_PLACES = 8
"""Runs of global tokens: with n of them a branch takes about n * n calls."""
_OTHER = "another backend"
_HINT = 'overlap="count", or another backend'
_MOST_ROWS, _BLOCK = 2**26, 2**20
"""Rows that are looked at, most of all and at once."""


def _segments_refused(branches: tuple[tuple[int, int, int], ...], seq: int) -> str:
    """Why segments `(segment_length, dilation_rate, offset)` cannot be computed one by one; empty where no two share a row."""
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
