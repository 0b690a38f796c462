"""The schedule of the GPU kernels: the rows of a pattern as tiles, each of which runs one online softmax.

    rows(tile) = row, row + step, ..., row + (rows - 1) * step          rows of the same branches, one segment of each
    keys(tile) = union over b in set of { x in segment_b(row) : x = row (mod rate_b) }

`step` is a multiple of the rates of `set`, as small as rows of other branches between them allow: of rates 1, 2, 4 and 8, the odd
rows are 2 apart, for only the branch of rate 1 keeps them. All rows of a tile see the same keys; one that m branches of the set
keep is scored once, with `+ log m`. The tiles for the gradients of keys and values are made alike, by key/value head.

Branches whose rates are too large for the shortest segment of the others make a group of their own, and so does each relation
(`relations.py`). Each group is one launch, which merges its results with those that earlier ones left in `out` and `lse`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import lcm

import numpy as np
from numpy.typing import NDArray

from dilkit import plan
from dilkit.backend import Refusal, offset_refusals
from dilkit.backends.tiles import _tiles
from dilkit.backends.tiles.relations import FAR, Relation, part_table, relation_tiles, relations
from dilkit.pattern.lowering import Segments
from dilkit.problem import Problem

MAX_BRANCHES = 32
"""Branches of one group, at most: a set of them is the bits of a word."""
MAX_SEQ, MAX_HEADS = FAR + 1, 2**16 - 1
"""Tokens, as sums of two row numbers are 32-bit, and query heads, of whose number a tile has 16 bits, at most."""
MOST_ROWS, LOW_ROWS = 128, 64
"""Rows of a tall tile and of a low one."""

TILE = np.dtype([("row", np.int32), ("set", np.uint32), ("step", np.int32), ("head", np.uint16), ("rows", np.uint16)])
BRANCH = np.dtype([("segment", np.int32), ("rate", np.int32), ("head_start", np.int32), ("head_stop", np.int32)])


@dataclass(frozen=True, eq=False)
class Group:
    """The branches and tiles of one launch. All arrays are read-only.

    Query i sees no key before `i - back` and none after `i + ahead`.
    """

    branches: NDArray[np.void]
    """`BRANCH`, shortest segment first: segment length, dilation rate, and the query heads `head_start .. head_stop - 1`. Of a
    relation its `part_table`."""
    query_tiles: NDArray[np.void]
    """`TILE`, most keys first: `head` is a query head. In the first group every row of every head is in one tile, the rows
    that no branch keeps with an empty `set`; in later ones only rows that a branch keeps."""
    key_tiles: NDArray[np.void]
    """`TILE`: `head` is a key/value head, `set` holds the branches that serve any query head of it."""
    back: int = FAR
    ahead: int = FAR
    relation: Relation | None = None
    """With one, `set` of a tile is 1 + the number of the part that its rows are in, those of queries first; 0 for none."""

    def __post_init__(self) -> None:
        for array in (self.branches, self.query_tiles, self.key_tiles):
            array.setflags(write=False)

    @property
    def branch_count(self) -> int:
        """Number of branches; for a relation, minus its number of parts."""
        return -len(self.relation.parts) if self.relation else len(self.branches)

    @property
    def nbytes(self) -> int:
        return self.branches.nbytes + self.query_tiles.nbytes + self.key_tiles.nbytes


@dataclass(frozen=True, eq=False)
class Schedule:
    groups: tuple[Group, ...]

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)


def schedule_refusals(problem: Problem) -> list[Refusal]:
    forms, refusals = problem.forms, offset_refusals(problem)
    segments = len(_segment_branches(problem))
    if problem.seq > MAX_SEQ:
        refusals.append(Refusal("seq", str(problem.seq), f"at most {MAX_SEQ}"))
    if problem.heads > MAX_HEADS:
        refusals.append(Refusal("heads", str(problem.heads), f"at most {MAX_HEADS}"))
    if segments > MAX_BRANCHES and _scored_together(problem):
        refusals.append(Refusal("branches", str(segments), f'at most {MAX_BRANCHES} with overlap="once"'))
    if any(form.without_rows is not None if isinstance(form, Segments) else form.without for form in forms):
        limit = "in each head of segments alone, or of global tokens and of bands whose rates divide one another"
        refusals.append(Refusal("overlap", "once", limit, 'use overlap="count", or backend="native"'))
    return refusals


def schedule(problem: Problem, tile_rows: int) -> Schedule:
    """Return the tiles of `problem`, of at most `tile_rows` rows each, from the cache.

    Raises ValueError for more than `MAX_SEQ` tokens, or more than `MAX_BRANCHES` branches that must be scored together
    (`overlap="once"`); TypeError for a kind of branch that neither segments nor relations show.
    """
    sizes = problem.seq, problem.heads, problem.kv_heads, problem.is_causal
    return plan.cached(("tiles", problem.pattern.to_json(), sizes, tile_rows), partial(_schedule, problem, tile_rows))


def _schedule(problem: Problem, tile_rows: int) -> Schedule:
    if problem.seq > MAX_SEQ:
        raise ValueError(f"seq={problem.seq} exceeds {MAX_SEQ}, the most tokens whose numbers fit; use another backend")
    grouped = _grouped(_segment_branches(problem), problem, tile_rows)
    groups = [_group(branches, problem, tile_rows, first=i == 0) for i, branches in enumerate(grouped)]
    for relation in relations(problem):
        tiles = (relation_tiles(relation, problem, of_keys, tile_rows, not groups) for of_keys in (False, True))
        query_tiles, key_tiles = (_most_keys_first(*x) for x in tiles)
        table = part_table(relation).view(BRANCH).reshape(-1)
        groups.append(Group(table, query_tiles, key_tiles, relation.back, relation.ahead, relation))
    return Schedule(tuple(groups))


@dataclass(frozen=True)
class _Branch:
    segment: int
    rate: int
    heads: tuple[int, int]
    offsets: tuple[int, ...]
    """The offset of each key/value head; 0 of those that it does not serve."""


def _segment_branches(problem: Problem) -> list[_Branch]:
    """Return the branches of segments, cut to the sequence. Forms that differ in their heads alone are joined."""
    of_branch: dict[int, list[Segments]] = {}
    for form in problem.forms:
        if isinstance(form, Segments):
            of_branch.setdefault(form.branch, []).append(form)
    group, most, branches = problem.heads // problem.kv_heads, max(problem.seq, 1), list[_Branch]()
    for forms in of_branch.values():
        offsets = [0] * problem.kv_heads
        for form in forms:
            for head, offset in enumerate(form.offsets, form.heads[0]):
                offsets[head // group] = min(offset, most)
        heads = forms[0].heads[0], forms[-1].heads[1]
        branches.append(_Branch(min(forms[0].length, most), min(forms[0].rate, most), heads, tuple(offsets)))
    return branches


def _grouped(branches: list[_Branch], problem: Problem, tile_rows: int) -> Iterator[list[_Branch]]:
    """Group branches by ascending segment length: the shortest segment of a group holds a whole tile of a residue class.

    A causal tile scores the pairs above its diagonal for nothing; two low tiles in the shortest segment halve that waste. Few
    rows are so far apart that one tall tile fills it, and another group for them would cost as much.
    """
    ordered = sorted(branches, key=lambda b: (b.segment, b.rate))
    together = _scored_together(problem)
    if together and len(ordered) > MAX_BRANCHES:
        raise ValueError(f'overlap="once" over {len(ordered)} branches: at most {MAX_BRANCHES}; use another backend')
    span = max(tile_rows, min(2 * tile_rows, MOST_ROWS)) if problem.is_causal else tile_rows
    group: list[_Branch] = []
    for branch in ordered:
        step = lcm(*(b.rate for b in group), branch.rate)
        equal = all((b.segment, b.rate) == (branch.segment, branch.rate) for b in group)  # one more costs nothing
        fits = len(group) < MAX_BRANCHES and (not group or equal or step * span <= group[0].segment)
        if not (fits or together):
            yield group
            group = []
        group.append(branch)
    if group:
        yield group


def _scored_together(problem: Problem) -> bool:
    forms = problem.forms
    return any(isinstance(form, Segments) and form.without for form in forms)


def _group(branches: list[_Branch], problem: Problem, tile_rows: int, first: bool) -> Group:
    seq, heads, kv_heads = problem.seq, problem.heads, problem.kv_heads
    table = np.array([(b.segment, b.rate, *b.heads) for b in branches], BRANCH)
    offsets = np.array([b.offsets for b in branches], np.int32)
    sizes = seq, _steps(min(lcm(*(b.rate for b in branches)), max(seq, 1))), tile_rows, first
    per_head = heads // kv_heads
    query_heads, key_heads = np.arange(heads, dtype=np.int32), np.arange(kv_heads, dtype=np.int32) * per_head
    rows = table.view(np.int32).reshape(-1, 4)
    queries = _tiles.tiles(rows, offsets, query_heads, 1, per_head, *sizes)
    keys = _tiles.tiles(rows, offsets, key_heads, per_head, per_head, *sizes)
    query_tiles, key_tiles = (_most_keys_first(*x) for x in (queries, keys))
    key_tiles["head"] //= per_head
    return Group(table, query_tiles, key_tiles, ahead=0 if problem.is_causal else FAR)


def _steps(period: int) -> NDArray[np.int64]:
    """Return divisors of `period` from 1 up to it, each with one more prime factor, the least first: 1, p, p q, p q r, ..."""
    steps, prime = [1], 2
    while (left := period // steps[-1]) > 1:
        while left % prime and prime * prime <= left:
            prime += 1
        steps.append(steps[-1] * (left if left % prime else prime))
    return np.array(steps, np.int64)


def _most_keys_first(tiles: NDArray[np.int32], keys: NDArray[np.int64]) -> NDArray[np.void]:
    """Sort tiles by descending keys, so that short ones end the launch; equal ones stay in the order of memory."""
    order = np.argsort(-keys, kind="stable")
    return np.ascontiguousarray(tiles[order]).view(TILE).reshape(-1)
