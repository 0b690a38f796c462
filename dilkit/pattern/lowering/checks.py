"""Checks of the results of branches: forms whose numbers kernels can follow, and `sees` of the right shape.

branch.forms  --->  forms_of  --->  lower, caches  --->  backends, ranks: they check no form again
branch.sees   --->  sees      --->  the oracle, the evaluation pair by pair, masks of decoding
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dilkit.checks import integer, shown
from dilkit.pattern.checks import WHOLE_SEQUENCE, PatternError
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
from dilkit.pattern.lowering.tables import RunTable, hash_of_pairs
from dilkit.pattern.runs import UNBOUNDED, Positions

if TYPE_CHECKING:
    from torch import Tensor

    from dilkit.pattern.heads import Heads
    from dilkit.pattern.kinds.branch import Branch

_LEAST: dict[type[Form], dict[str, int]] = {
    Segments: dict(length=1, rate=1),
    Band: dict(back=0, ahead=0, rate=1, begin=0),
    Global: {},
    Runs: dict(block=1),
    Grid: {},
    CutGrid: {},
    GivenBlocks: dict(block=1),
    GivenIntervals: dict(most=1),
    Unlowered: {},
}
"""The forms, and the least that each of their numbers can be."""


def forms_of(branch: Branch, heads: Heads, seq: int) -> list[Form]:
    """Return the forms of a branch for these heads, each of them checked; forms by formula are kept for all lengths.

    Raises `PatternError` naming the kind, the form, its field, the value and the limit.
    """
    kind = type(branch).__name__
    try:
        forms = list(branch.forms(heads, seq if branch.is_evaluated else WHOLE_SEQUENCE))
    except Exception as error:
        if isinstance(error, PatternError):
            raise
        raise PatternError(f"{kind}.forms raised {type(error).__name__}: {error}") from error
    if not forms:
        raise PatternError(f"{kind}.forms gives no form; at least one is needed, if only a Global without rows and columns")
    names = [type(form).__name__ for form in forms if isinstance(form, Given)]
    if len(names) != branch.is_given_by_call:
        needed = f"{int(branch.is_given_by_call)} is needed with is_given_by_call={branch.is_given_by_call}"
        what = names[0] if names else "Given"
        raise PatternError(f"{kind}.forms gives {len(names)} {what}, which stand for the tensor of a call; {needed}")
    served = branch.range_served(heads)
    return [_checked(form, branch, served, seq) for form in forms]


def sees(branch: Branch, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
    """Return `branch.sees`, bool `(heads served or 1, rows, keys)`. Raises `PatternError` for any other shape or dtype."""
    import torch

    seen, (start, stop) = branch.sees(rows, keys, heads), branch.range_served(heads)
    dtype: Any = getattr(seen, "dtype", type(seen).__name__)
    shape: Any = getattr(seen, "shape", ())
    if dtype is not torch.bool or shape[1:] != (len(rows), len(keys)) or shape[0] not in (1, stop - start):
        needed = f"torch.bool (1 or {stop - start} heads, {len(rows)} rows, {len(keys)} keys) is needed (seen[None])"
        raise PatternError(f"{type(branch).__name__}.sees returned {dtype} {tuple(shape)}; {needed}")
    return seen


def _checked(form: Form, branch: Branch, served: tuple[int, int], seq: int) -> Form:
    kind = f"{type(branch).__name__}.forms"
    if type(form) not in _LEAST:
        raise PatternError(f"{kind} gives {shown(form)}; one of {', '.join(one.__name__ for one in _LEAST)} is needed")
    name, heads = f"{kind}: {type(form).__name__}", form.heads
    is_range = isinstance(heads, tuple) and [type(x) for x in heads] == [int, int]
    if not is_range or not served[0] <= heads[0] < heads[1] <= served[1]:
        _refuse(name, "heads", heads, f"start < stop within those that the branch serves, {served} (range_served)")
    if form.without != ():
        _refuse(name, "without", form.without, '(), which overlap="once" alone changes')
    excluded = [runs for runs in (form.without_rows, form.without_columns) if runs is not None]
    if len(excluded) == 1:
        both = form.without_rows, form.without_columns
        _refuse(name, "without_rows and without_columns", both, "both or neither: an array (0, 2) leaves out none")
    for runs in excluded:
        _check_positions(name, "without_rows or without_columns", runs)
    numbers: dict[str, Any] = {
        field: _number(f"{name}.{field}", getattr(form, field), least) for field, least in _LEAST[type(form)].items()
    }
    form = replace(form, **numbers)
    match form:
        case Segments():
            _check_segments(name, form)
        case Band():
            if form.begin > max(form.back, form.ahead):
                _refuse(name, "begin", form.begin, f"at most the larger of back={form.back} and ahead={form.ahead}")
            if form.beyond != 0:
                _refuse(name, "beyond", form.beyond, '0, which overlap="once" alone changes (begin is that of a kind),')
        case Global():
            _check_positions(name, "rows", form.rows)
            _check_positions(name, "columns", form.columns)
            columns = _non_empty(form.columns)
            form = replace(form, columns=columns, rows=columns if form.rows is form.columns else _non_empty(form.rows))
        case Runs():
            _check_runs(name, form, seq)
        case Grid():
            _check_grid(name, form, branch)
    return form


def _check_segments(name: str, form: Segments) -> None:
    count = form.heads[1] - form.heads[0]
    if form.rate > form.length:
        _refuse(name, "rate", form.rate, f"at most length={form.length}")
    if not isinstance(form.offsets, tuple) or len(form.offsets) != count:
        _refuse(name, "offsets", form.offsets, f"a tuple of {count} numbers, one for each of heads={form.heads},")
    for head, offset in enumerate(form.offsets):
        _number(f"{name}.offsets[{head}]", offset, 0, form.rate - 1)


def _check_runs(name: str, form: Runs, seq: int) -> None:
    for field, table in dict(queries=form.queries, keys=form.keys).items():
        if not isinstance(table, RunTable):
            _refuse(name, field, table, "a RunTable")
        _check_positions(name, f"{field}.stop", table.stop, (-1,))
        _check_array(name, f"{field}.runs", table.runs, (-1,))
        _check_array(name, f"{field}.columns", table.columns, (-1, 2))
        if len(table.runs) != len(table.stop) or (table.runs < 0).any() or table.runs.sum() != len(table.columns):
            needed = f"{len(table.stop)} counts, one for each stop, {len(table.columns)} in all, as many as columns,"
            _refuse(name, f"{field}.runs", table.runs, needed)
        start, stop = table.columns.T
        row = np.repeat(np.arange(len(table.runs)), table.runs)
        is_apart = (row[1:] > row[:-1]) | (start[1:] >= stop[:-1])
        if not (is_apart.all() and (start >= 0).all() and (start <= stop).all()):
            needed = "start and stop from 0 on, those of a row ascending and apart,"
            _refuse(name, f"{field}.columns", table.columns, needed)
        if form.block < UNBOUNDED and (table.stop != np.arange(1, len(table.stop) + 1) * form.block).any():
            _refuse(name, "block", form.block, f"{field}.stop in multiples of it, or no block,")
    if hash_of_pairs(form.queries, seq) != hash_of_pairs(form.keys, seq, turned=True):
        _refuse(name, "keys", form.keys, "a table of the pairs of queries, with keys as rows,")


def _check_grid(name: str, form: Grid, branch: Branch) -> None:
    dims = len(form.shape) if isinstance(form.shape, tuple) else 0
    whole = (WHOLE_SEQUENCE,) * dims
    for field, most in dict(shape=whole, kernel=whole, dilation=form.shape, stride=form.kernel).items():
        sizes: Any = getattr(form, field) or ((1,) * dims if field == "stride" else ())
        if not isinstance(sizes, tuple) or len(sizes) != dims or not 1 <= dims <= 3:
            _refuse(name, field, sizes, "a tuple of 1 to 3 sizes, as many as shape has,")
        for size, limit in zip(sizes, most, strict=True):
            _number(f"{name}.{field}", size, 1, limit)
    if form.causal != () and list(map(type, form.causal)) != [bool] * dims:
        _refuse(name, "causal", form.causal, "a bool for each dimension, or (),")
    spans = [width * step for width, step in zip(form.kernel, form.dilation, strict=True)]
    if not isinstance(form, CutGrid) and any(span > size for span, size in zip(spans, form.shape, strict=True)):
        _refuse(name, "kernel", form.kernel, f"at most shape={form.shape} over dilation={form.dilation}, or CutGrid,")
    cells = math.prod(form.shape)
    for seq in (cells - 1, cells + 1):
        try:
            branch.check_seq(seq)
        except PatternError:
            continue
        _refuse(name, "shape", form.shape, f"a kind whose check_seq raises PatternError for all but {cells} tokens")


def _number(name: str, value: Any, least: int, most: int = UNBOUNDED) -> int:
    try:
        number = integer(name, value)
    except TypeError as error:
        raise PatternError(f"{error}; {_WAY_OUT}") from None
    if not least <= number <= most:
        raise PatternError(f"{name}={number} must be from {least} to {'2**62' if most == UNBOUNDED else most}; {_WAY_OUT}")
    return number


def _check_array(name: str, field: str, array: Any, shape: tuple[int, ...]) -> None:
    if not (isinstance(array, np.ndarray) and array.dtype == np.int64 and (-1, *array.shape[1:]) == shape):
        needed = "(n, 2), start and stop of each run" if len(shape) == 2 else "(n,)"
        _refuse(name, field, array, f"an int64 numpy array {needed},")


def _check_positions(name: str, field: str, runs: Any, shape: tuple[int, ...] = (-1, 2)) -> None:
    _check_array(name, field, runs, shape)
    numbers = runs.reshape(-1)
    if len(numbers) and not (numbers[0] >= 0 and (numbers[:-1] <= numbers[1:]).all()):
        _refuse(name, field, runs, "ascending positions from 0 on, none in two runs,")


def _non_empty(runs: Positions) -> Positions:
    return runs[runs[:, 0] < runs[:, 1]]


def _refuse(name: str, field: str, value: Any, needed: str) -> None:
    said = " ".join(shown(value).split())  # arrays take several lines
    raise PatternError(f"{name}.{field}={said}: {needed} is needed; {_WAY_OUT}")


_WAY_OUT = "mend forms, or leave it out: sees alone is enough for up to 32,768 tokens"
