"""The forms of a branch that has `sees` alone: it is evaluated for every pair.

    sees(rows, all columns)    rows that see the same, one after the other, are a run of rows; so are columns
    sees(all rows, columns)    the same with keys as rows

The time grows with the square of the length, memory with the number of runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dilkit.pattern.lowering.checks import sees
from dilkit.pattern.lowering.forms import Form, Runs, Unlowered
from dilkit.pattern.lowering.tables import RunTable
from dilkit.pattern.runs import UNBOUNDED

if TYPE_CHECKING:
    from dilkit.pattern.heads import Heads
    from dilkit.pattern.kinds.branch import Branch

Bools = NDArray[np.bool_]

MOST_TOKENS = 2**15
"""The longest sequence that a branch is evaluated for."""

_PAIRS_AT_ONCE = 2**24


def evaluated(branch: Branch, heads: Heads, seq: int) -> Iterator[Form]:
    """Evaluate `branch.sees` for the first `seq` tokens, as runs; adjacent heads that see the same share a form."""
    served = branch.range_served(heads)
    if seq > MOST_TOKENS:
        way_out = f"define {type(branch).__name__}.forms, which says it without looking at every pair"
        yield Unlowered(heads=served, why=f"sees is evaluated for at most {MOST_TOKENS:,} tokens; {way_out}")
        return
    queries, keys = ([*_tables(branch, heads, seq, of_keys)] for of_keys in (False, True))
    count = served[1] - served[0] if len(queries) > 1 else 1
    first = 0
    for head in range(1, count + 1):
        if head == count or not (_same(queries[head], queries[first]) and _same(keys[head], keys[first])):
            alike = served if count == 1 else (served[0] + first, served[0] + head)
            yield Runs(heads=alike, queries=queries[first], keys=keys[first])
            first = head


def counted(branch: Branch, seq: int, heads: Heads, is_causal: bool) -> int:
    """Count the pairs among the first `seq` tokens, over all heads that the branch serves, in time that grows as `seq ** 2`."""
    served, first, total = len(branch.served(heads)), 0, 0
    for block in _blocks(branch, heads, seq, of_keys=False):
        seen = np.tril(block, first) if is_causal else block
        total += int(seen.sum()) * (served // len(block))
        first += block.shape[1]
    return total


def _same(one: RunTable, other: RunTable) -> bool:
    return all(map(np.array_equal, one, other))


def _tables(branch: Branch, heads: Heads, seq: int, of_keys: bool) -> Iterator[RunTable]:
    none, first = np.zeros(0, np.int64), 0
    parts: list[list[RunTable]] = []
    for block in _blocks(branch, heads, seq, of_keys):
        parts = parts or [[] for _ in block]
        for tables, rows in zip(parts, block, strict=True):
            steps = np.diff(np.pad(rows, ((0, 0), (1, 1))).astype(np.int8), axis=1)
            row, start = np.nonzero(steps == 1)
            runs = np.stack((row, start, np.nonzero(steps == -1)[1]), axis=1)
            table = RunTable.of_blocks(runs, len(rows), 1).joined()
            tables.append(table._replace(stop=table.stop + first))
        first += block.shape[1]
    after = RunTable(np.array([UNBOUNDED]), np.zeros(1, np.int64), none.reshape(0, 2))  # later rows see nothing
    for tables in parts or [[]]:
        yield RunTable(*map(np.concatenate, zip(*tables, after, strict=True))).joined()


def _blocks(branch: Branch, heads: Heads, seq: int, of_keys: bool) -> Iterator[Bools]:
    import torch

    places = torch.arange(seq, device="cpu")
    at_once = max(1, _PAIRS_AT_ONCE // max(seq * heads.count, 1))
    for first in range(0, seq, at_once):
        some = places[first : first + at_once]
        seen = sees(branch, places, some, heads).transpose(1, 2) if of_keys else sees(branch, some, places, heads)
        yield seen.numpy()
