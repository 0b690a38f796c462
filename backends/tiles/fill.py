"""How full the tiles of runs are. A tile takes as long as a full one, so that many short runs of rows are refused."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from dilkit.backend import Refusal
from dilkit.backends.tiles.schedule import LOW_ROWS
from dilkit.pattern.lowering import Runs, RunTable
from dilkit.problem import Problem

LEAST_ROWS = LOW_ROWS // 2
"""Rows of a tile on average, at least."""

FEW_TILES = 16
"""So many tiles of a head may be emptier: they take little time."""


def fill_refusals(problem: Problem) -> list[Refusal]:
    """Why the tiles of runs would be too empty, in the words of a backend; empty where they are not."""
    if (rows := least_rows(problem)) >= LEAST_ROWS:
        return []
    limit = f"at least {LEAST_ROWS} of {LOW_ROWS} on average, or at most {FEW_TILES} tiles of a head"
    return [Refusal("rows of a tile", f"{rows:.3g}", limit, 'longer runs of rows that see the same columns, or backend="flex"')]


@lru_cache(maxsize=1024)
def least_rows(problem: Problem) -> float:
    """The rows of a tile on average, of the form of runs where it is least: its tiles of queries or those of keys."""
    forms = (form for form in problem.forms if isinstance(form, Runs))
    return min((_mean_rows(table.below(problem.seq)) for form in forms for table in (form.queries, form.keys)), default=LOW_ROWS)


def _mean_rows(table: RunTable) -> float:
    """Without the shortest tile, which may be what the end of the sequence has left of a block."""
    seeing = table.joined()
    rows = np.diff(seeing.stop, prepend=0)[seeing.runs > 0]
    tiles = int((-(-rows // LOW_ROWS)).sum())
    if tiles <= FEW_TILES:
        return LOW_ROWS
    shortest = ((rows - 1) % LOW_ROWS + 1).min()
    return float((rows.sum() - shortest) / (tiles - 1))
