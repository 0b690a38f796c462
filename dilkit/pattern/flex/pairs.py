"""Visibility of pairs as torch operators on indices, from which FlexAttention generates kernels.

count(h, i, j) = number of forms that serve h and show (i, j), less what they leave out      h, i, j: tensors of indices
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dilkit.pattern.flex.blocks import among
from dilkit.pattern.lowering import Band, Form, Given, Global, Grid, Runs, Segments
from dilkit.pattern.lowering.tables import RunTable
from dilkit.pattern.runs import UNBOUNDED

if TYPE_CHECKING:
    from torch import Tensor

    from dilkit.pattern.runs import Positions

Shows = Callable[[Any, Any, Any], Any]

MOST_INTERVALS = 4
"""Runs of columns of a row that are compared one by one; where a row has more, a table of all of them is read."""
MOST_CELLS = 2**27


def counter(forms: Sequence[Form], seq: int, device: torch.device) -> Shows:
    """Return a function that counts a pair, for sequences of up to `seq` tokens, causality aside."""
    shown = [None if isinstance(form, Given) else _shows(form, seq, device) for form in forms]

    def count(h: Any, i: Any, j: Any) -> Any:
        total = h * 0
        for form, shows in zip(forms, shown, strict=True):
            if shows is None:  # `given_pairs` adds what each call says
                continue
            seen = shows(h, i, j)
            for other in form.without:
                left_out = shown[other]
                assert left_out is not None  # no form leaves out what a call says
                seen = seen & ~left_out(h, i, j)
            total = total + seen.to(torch.int32)
        return total

    return count


def shown_by_several(forms: Sequence[Form], overlap: str) -> bool:
    """True if a pair may count more than once: forms of several branches serve one head under overlap="count"."""
    served = {(form.branch, head) for form in forms for head in range(*form.heads)}
    return overlap == "count" and len(served) > len({head for _, head in served})


def table_cells(form: Form) -> int:
    """Return the number of table cells that a form needs here; 0 without a table."""
    if not isinstance(form, Runs) or not len(form.queries.runs) or form.queries.runs.max() <= MOST_INTERVALS:
        return 0
    return len(form.queries.stop) * len(np.unique(form.queries.columns))


def _shows(form: Form, seq: int, device: torch.device) -> Shows:
    visible, (first, stop) = _of_kind(form, seq, device), form.heads
    rows, columns = (None if runs is None else _among(runs, seq, device) for runs in (form.without_rows, form.without_columns))

    def shows(h: Any, i: Any, j: Any) -> Any:
        seen = (h >= first) & (h < stop) & visible(h, i, j)
        if rows is not None:
            seen = seen & ~rows[i]
        return seen if columns is None else seen & ~columns[j]

    return shows


def _of_kind(form: Form, seq: int, device: torch.device) -> Shows:
    if isinstance(form, Segments):
        return _segments(form, seq, device)
    if isinstance(form, Band):
        return _band(form)
    if isinstance(form, Global):
        rows, columns = _among(form.rows, seq, device), _among(form.columns, seq, device)
        return lambda h, i, j: rows[i] | columns[j]
    if isinstance(form, Runs):
        return _runs(form.queries, seq, device)
    if isinstance(form, Grid):
        return _grid(form)
    raise TypeError(f"form {form!r} is unknown here")


def _segments(form: Segments, seq: int, device: torch.device) -> Shows:
    length, rate, first = min(form.length, max(seq, 1)), form.rate, form.heads[0]
    offsets = torch.tensor(form.offsets, dtype=torch.int32, device=device)

    def shows(h: Any, i: Any, j: Any) -> Any:
        offset = offsets[(h - first).clamp(0, len(form.offsets) - 1)]
        return (i // length == j // length) & (i % length % rate == offset) & (j % length % rate == offset)

    return shows


def _band(form: Band) -> Shows:
    back, ahead, rate, first = (min(number, UNBOUNDED) for number in (form.back, form.ahead, form.rate, form.first))

    def shows(h: Any, i: Any, j: Any) -> Any:
        apart = i - j
        seen = apart == apart
        for limit, beyond in ((back, apart), (ahead, -apart)):
            if limit < 2**31 - 1:
                seen = seen & (beyond <= limit)
        if first:
            seen = seen & (apart.abs() >= first)
        return seen & (i % rate == j % rate) if rate > 1 else seen

    return shows


def _runs(table: RunTable, seq: int, device: torch.device) -> Shows:
    if len(table.columns) == 0:
        return lambda h, i, j: i != i
    table = RunTable(np.append(table.stop, UNBOUNDED), np.append(table.runs, 0), table.columns)  # rows after the last see nothing
    run_of = torch.from_numpy(np.searchsorted(table.stop, np.arange(max(seq, 1)), side="right")).to(device, torch.int32)
    if table.runs.max() > MOST_INTERVALS:
        return _of_table(table, run_of, seq)
    ends = np.cumsum(table.runs)
    bounds = np.zeros((MOST_INTERVALS, 2, len(table.runs)), np.int64)
    for number in range(MOST_INTERVALS):
        there = np.flatnonzero(table.runs > number)
        bounds[number, :, there] = table.columns[(ends - table.runs)[there] + number]
    used = torch.from_numpy(bounds[: int(table.runs.max())]).clamp(max=2**31 - 1).to(device, torch.int32)

    def shows(h: Any, i: Any, j: Any) -> Any:
        run, seen = run_of[i], i != i
        for number in range(len(used)):
            seen = seen | ((j >= used[number, 0][run]) & (j < used[number, 1][run]))
        return seen

    return shows


def _of_table(table: RunTable, run_of: Tensor, seq: int) -> Shows:
    """Return a predicate that looks pairs up by run of rows and by piece of columns between any two ends of runs."""
    edges = np.unique(table.columns)
    steps = np.zeros((len(table.runs), len(edges) + 1), np.int32)
    row, piece = np.repeat(np.arange(len(table.runs)), table.runs), np.searchsorted(edges, table.columns) + 1
    np.add.at(steps, (row, piece[:, 0]), 1)
    np.add.at(steps, (row, piece[:, 1]), -1)
    sees = torch.from_numpy(steps.cumsum(1) > 0).to(run_of.device)
    piece_of = torch.from_numpy(np.searchsorted(edges, np.arange(max(seq, 1)), side="right")).to(run_of.device, torch.int32)
    return lambda h, i, j: sees[run_of[i], piece_of[j]]


def _grid(form: Grid) -> Shows:
    """Dimension by dimension: cell j is in the window of cell i."""

    def shows(h: Any, i: Any, j: Any) -> Any:
        near = i == i
        for dim, axis in enumerate(form.axes):
            cells = prod(form.shape[dim + 1 :])
            near = near & axis.sees(i // cells % axis.size, j // cells % axis.size)
        return near

    return shows


def _among(runs: Positions, seq: int, device: torch.device) -> Tensor:
    return torch.from_numpy(among(runs, max(seq, 1))).to(device)
