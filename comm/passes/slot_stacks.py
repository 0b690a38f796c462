"""Stacks of problems in slots: those of one pattern together in one call of a backend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from dilkit.comm.passes.kept_rows import RowRun, row_numbers
from dilkit.comm.passes.problem_stacks import ProblemStack, RunsByRole, RunsByRows
from dilkit.comm.plan.kept_rows import ProblemRows, SlotProblem
from dilkit.pattern import Pattern

Sides = tuple[ProblemRows, ...]


def stack_slots(
    problems: Iterable[SlotProblem], runs: RunsByRole, batch: int, most_rows: int, by_head: bool = False
) -> Iterator[ProblemStack]:
    """These problems as stacks, heads that follow one pattern together: one head at least, up to about `most_rows` query rows.

    `by_head`: those of different heads are apart.
    """
    alike: dict[tuple[int, int, Pattern, int, int], list[SlotProblem]] = defaultdict(list)
    for problem in problems:
        first = problem.queries[0].kept[0]
        alike[first.branch, problem.key_group, problem.pattern, first.width, first.first if by_head else 0].append(problem)
    for (_, _, pattern, width, _), found in alike.items():
        rows = found[0].slot * found[0].slots
        at_once = max(1, most_rows // (rows * width * max(batch, 1)))
        for start in range(0, len(found), at_once):
            yield _stack(pattern, rows, width, found[start : start + at_once], runs, batch)


def _stack(
    pattern: Pattern, rows: int, width: int, problems: Sequence[SlotProblem], runs: RunsByRole, batch: int
) -> ProblemStack:
    queries, keys, slot = [one.queries for one in problems], [one.keys for one in problems], problems[0].slot
    of_queries, of_results = (_row_numbers(queries, slot, rows, width, batch, runs[name]) for name in ("q", "qq"))
    of_keys, of_values, of_flags = (_row_numbers(keys, slot, rows, 1, batch, runs[name]) for name in ("k", "v", "kk"))
    real = _real(queries, slot, rows, width, batch), _real(keys, slot, rows, 1, batch)
    places = np.zeros((batch * len(problems), 5), np.int64)  # no weight is dropped: rows do not lie at equal steps
    tensors = of_queries, of_keys, of_values, of_results, of_flags
    first_head = queries[0][0].kept[0].first
    return ProblemStack(pattern, rows, width, first_head, False, places, *tensors, *real)


def _row_numbers(problems: Sequence[Sides], slot: int, rows: int, width: int, batch: int, runs: RunsByRows) -> Tensor:
    """The row numbers of one side of all problems. The last row of a side stands in where it does not fill its last slot.

    Such a row has seen the same keys, so that its lse is one that they may have in a backward pass.
    """
    numbered: list[RowRun] = []
    for sides in problems:
        filled = 0
        for at, side in enumerate(sides, 1):
            ((start, step, _, _, batch_step),) = (runs[kept] for kept in side.kept)
            numbered.append((start + step * side.first, step, side.rows, width, batch_step))
            whole = rows - filled if at == len(sides) else -(-side.rows // slot) * slot
            numbered.append((start + step * (side.first + side.rows - 1), 0, whole - side.rows, width, batch_step))
            filled += whole
    return row_numbers([run for run in numbered if run[2]], batch)


def _real(problems: Sequence[Sides], slot: int, rows: int, width: int, batch: int) -> Tensor | None:
    """Which rows of one side of all problems are no stand-ins; None: all."""
    real = np.zeros((len(problems), rows), np.bool_)
    for line, sides in zip(real, problems, strict=True):
        filled = 0
        for side in sides:
            line[filled : filled + side.rows] = True
            filled += -(-side.rows // slot) * slot
    return None if real.all() else torch.from_numpy(real).repeat(batch, 1).repeat_interleave(width, 1).view(-1)
