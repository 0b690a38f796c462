"""What parts of queries see of parts of keys, as runs: of all ranks, but for what a rank computes by itself."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from dilkit.comm.plan.kinds.part_runs import Bools, PartRuns, Parts, summed, union
from dilkit.comm.plan.sharded_segments import IntArray


@dataclass(frozen=True, eq=False)
class SeenRuns:
    """Line by line: part `query` of the queries of a unit sees all keys of the parts `start .. stop - 1`, of rank `keys_of`."""

    unit: IntArray
    query: IntArray
    keys_of: IntArray
    start: IntArray
    stop: IntArray

    def __getitem__(self, chosen: Bools | IntArray | slice) -> SeenRuns:
        """Some of the lines."""
        return SeenRuns(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.query)

    def key_rows(self, parts: Parts) -> IntArray:
        """How many rows of keys each line has."""
        lengths: IntArray = parts.edges[self.stop] - parts.edges[self.start]
        return lengths


def seen_runs(layout_runs: IntArray, parts: Parts, is_causal: bool) -> SeenRuns:
    """The lines of a layout, `layout_runs` `(n, 4)`: unit, block of queries, and the blocks of keys from one to before another.

    What whole blocks of one rank see of one another is left out; with causality also what lies after a query, and what a part
    sees of itself.
    """
    unit, block, first, last = layout_runs.T
    low, high = parts.of_blocks(block), parts.of_blocks(block + 1)
    lines = SeenRuns(unit, low, unit, parts.of_blocks(first), parts.of_blocks(last))
    by_part = _repeated(lines, high - low, "query")
    low = parts.rank[by_part.start]
    by_rank = _repeated(_with(by_part, keys_of=low), parts.rank[by_part.stop - 1] - low + 1, "keys_of")
    start = np.maximum(by_rank.start, parts.of_ranks(by_rank.keys_of))
    stop = np.minimum(by_rank.stop, parts.of_ranks(by_rank.keys_of + 1))
    if is_causal:
        stop = np.minimum(stop, by_rank.query)
    return _without_local(_with(by_rank, start=start, stop=stop), parts)


def cut_diagonal(layout_runs: IntArray, parts: Parts) -> SeenRuns:
    """The parts of blocks that see themselves and are not whole."""
    unit, block = layout_runs[(layout_runs[:, 2] <= layout_runs[:, 1]) & (layout_runs[:, 1] < layout_runs[:, 3]), :2].T
    low, high = parts.of_blocks(block), parts.of_blocks(block + 1)
    lines = _repeated(SeenRuns(unit, low, unit, low, low), high - low, "query")
    lines = lines[~parts.whole[lines.query]]
    return _with(lines, keys_of=parts.rank[lines.query], start=lines.query, stop=lines.query + 1)


def _with(lines: SeenRuns, **changes: IntArray) -> SeenRuns:
    return SeenRuns(**{field.name: changes.get(field.name, getattr(lines, field.name)) for field in fields(lines)})


def _repeated(lines: SeenRuns, times: IntArray, counting: str) -> SeenRuns:
    """Each line so many times, where the field `counting` counts on from what it is."""
    of = np.repeat(np.arange(len(times)), times)
    repeated = lines[of]
    number = np.arange(len(of)) - (np.cumsum(times) - times)[of]
    return _with(repeated, **{counting: getattr(repeated, counting) + number})


def _without_local(lines: SeenRuns, parts: Parts) -> SeenRuns:
    """Without what whole blocks of a rank see of one another: of its own keys they see the parts that are cut, at its ends."""
    lines = lines[lines.start < lines.stop]
    local = parts.whole[lines.query] & (lines.keys_of == parts.rank[lines.query])
    own = lines[local]
    first, last = parts.of_ranks(own.keys_of), parts.of_ranks(own.keys_of + 1) - 1
    left = [lines[~local]]
    for part in (first, last):
        cut = ~parts.whole[part] & (own.start <= part) & (part < own.stop)
        left.append(_with(own[cut], start=part[cut], stop=part[cut] + 1))
    joined = SeenRuns(*(np.concatenate([getattr(some, field.name) for some in left]) for field in fields(SeenRuns)))
    return joined[np.lexsort((joined.start, joined.query, joined.unit))]


@dataclass(frozen=True, eq=False)
class Division:
    """Where lines are computed: where the queries are, or where the keys are, if fewer rows travel then.

    `group` and `width` are by unit: the units that share keys, and how many query heads of theirs do.
    """

    lines: SeenRuns
    parts: Parts
    group: IntArray
    width: IntArray

    @cached_property
    def heavy(self) -> Bools:
        """A block of queries is heavy where it sees more rows of another rank than it has itself, if that pays for the ranks."""
        lines, parts = self.lines, self.parts
        foreign = lines.keys_of != parts.rank[lines.query]
        size = int(parts.rank[-1]) + 1
        _, of_query, inverse = np.unique(
            (lines.unit * len(parts) + lines.query) * size + lines.keys_of, return_index=True, return_inverse=True
        )
        rows = parts.rows[lines.query] * self.width[lines.unit]
        many = foreign & (summed(inverse, lines.key_rows(parts), len(of_query))[inverse] > rows)
        _, pair = np.unique((self.group[lines.unit] * size + parts.rank[lines.query]) * size + lines.keys_of, return_inverse=True)
        pairs = int(pair.max(initial=-1)) + 1
        before, after = (self._key_rows(lines[chosen], pair[chosen], pairs) for chosen in (foreign, foreign & ~many))
        once = many[of_query]
        moved = summed(pair[of_query][once], rows[of_query][once], pairs)
        heavy: Bools = many & (after + moved < before)[pair]
        return heavy

    @cached_property
    def computed_at(self) -> IntArray:
        """The rank that computes each line."""
        return np.where(self.heavy, self.lines.keys_of, self.parts.rank[self.lines.query])

    def _key_rows(self, lines: SeenRuns, labels: IntArray, size: int) -> IntArray:
        """Rows of the keys of each label, each once."""
        runs = union(PartRuns(labels, lines.start, lines.stop))
        return summed(runs.label, runs.rows(self.parts), size)
