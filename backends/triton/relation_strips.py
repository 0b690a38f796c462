"""What a relation shows, strip by strip: a list for each part and residue modulo its rate, from the first token to the last.

Tiles of all heads and rows share the lists: between the bounds of its rows each tile sees a span of one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dilkit.backends.tiles.relations import Part, Relation
from dilkit.backends.triton.strips import Ints, Strips, cut, in_order
from dilkit.pattern.runs import classes
from dilkit.problem import Problem


def strips_of_relation(problem: Problem, relation: Relation, tiles: NDArray[np.void], of_keys: bool, columns: int) -> Strips:
    """The strips of these tiles of `relation`, of queries or `of_keys`."""
    rate = relation.rate
    strips = _strips(relation.numbered(of_keys), rate, columns)
    number = (tiles["set"].astype(np.int64) - 1) * rate + tiles["row"] % rate  # below 0, where there is no list, without a part
    if of_keys:
        number = np.where(_serves(relation, problem, tiles), number[:, None], -1).reshape(-1)
    return Strips(in_order(strips), np.zeros(columns, np.float32), number, np.zeros(len(tiles), np.int64))


def _strips(parts: list[tuple[int, Part]], rate: int, columns: int) -> Ints:
    own = [classes(part.columns, rate) for _, part in parts]
    first, step, count = np.concatenate([np.zeros((0, 3), np.int64), *own]).T
    lists = np.repeat([rate * p for p, _ in parts], [*map(len, own)]).astype(np.int64) + first % rate
    run, done = cut(count, columns)
    nothing = np.zeros(len(run), np.int64)
    return np.stack(
        (lists[run], first[run] + done * step[run], step[run], np.minimum(count[run] - done, columns), nothing), axis=1
    )


def _serves(relation: Relation, problem: Problem, tiles: NDArray[np.void]) -> NDArray[np.bool_]:
    """Whether the relation serves each query head of each tile of keys."""
    per_head = problem.heads // problem.kv_heads
    heads = tiles["head"].astype(np.int64)[:, None] * per_head + np.arange(per_head)
    start, stop = relation.heads
    return (start <= heads) & (heads < stop)
