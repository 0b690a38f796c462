"""Blocks of a dilated pattern over tokens sorted by residue class: in one pass, each key block once for each count it has.

    token of class c and place t = t * rate + c        rate: the largest of the pattern, a multiple of all others
    slot of a query = c * places + t                   its block: `block` places of one class
    slot of a key = one of the slots of its block, of which there is one block for each count that queries see it with

In this order a dilated segment is a row of whole key blocks, so most pairs of blocks have one count m, and the score change is
log m, a constant of the slots of m. A pair of blocks with several counts is listed for each, and masked pair by pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dilkit.pattern.flex.blocks import BLOCK, BlockGrid, shown
from dilkit.pattern.lowering import Band, Form, Global, Segments

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]

MOST_CELLS = 2**24
"""Pairs of blocks that are looked at, over all heads, at most."""


class BlockPairs(NamedTuple):
    """Pairs of blocks that are seen, sorted by head, query block and key block: int64 `(pairs,)`."""

    head: Ints
    query: Ints
    key: Ints

    def listed(self, heads: int, rows: int, of_keys: bool = False) -> tuple[Ints, Ints]:
        """Return the number of key blocks of each query block, `(heads, rows)`, and their numbers `(heads, rows, most)`.

        With `of_keys`, of query blocks of each key block.
        """
        row, column = (self.key, self.query) if of_keys else (self.query, self.key)
        row = self.head * rows + row
        order = np.lexsort((column, row))
        numbers = np.bincount(row, minlength=heads * rows)
        place = np.arange(len(row)) - (np.cumsum(numbers) - numbers)[row[order]]
        table = np.zeros((heads * rows, max(int(numbers.max(initial=0)), 1)), np.int64)
        table[row[order], place] = column[order]
        return numbers.reshape(heads, rows), table.reshape(heads, rows, -1)


@dataclass(frozen=True)
class ClassOrder:
    """The blocks of one pass.

    `levels` holds each count with the first of its key blocks; `key_blocks[kv_head, key block]` the block of tokens that it
    shows, or -1 for none. In `whole` pairs of blocks all pairs of tokens have the count of the key block, in `partial` ones some.
    """

    rate: int
    places: int
    block: int
    levels: tuple[tuple[int, int], ...]
    key_blocks: Ints
    whole: BlockPairs
    partial: BlockPairs

    @cached_property
    def tokens(self) -> Ints:
        """The token of each slot of keys, `(kv_heads, slots)`; that of none is `rate * places`."""
        column, place = np.divmod(self.key_blocks[..., None] * self.block + np.arange(self.block), self.places)
        tokens = np.where(self.key_blocks[..., None] < 0, self.rate * self.places, place * self.rate + column)
        return tokens.reshape(len(self.key_blocks), -1)

    @property
    def pairs(self) -> int:
        """The pairs of tokens that are computed, over all heads."""
        return (len(self.whole.head) + len(self.partial.head)) * self.block**2

    @property
    def copies(self) -> float:
        """Copies of each key row, on average."""
        return float(self.key_blocks.shape[1] * self.block / (self.rate * self.places))

    @property
    def nbytes(self) -> int:
        arrays = self.key_blocks, *self.whole, *self.partial
        return sum(array.nbytes for array in arrays) + self.key_blocks.size * self.block * 8


def class_rate(forms: Sequence[Form], seq: int, least: int = BLOCK) -> int:
    """Return the number of residue classes of an order in which `forms` are blocks; 1 if there is none.

    Every rate must divide the largest, and segments and bands hold at least `least` tokens of each class.
    """
    rates = [form.rate for form in forms if isinstance(form, (Segments, Band))]
    rate = max((form.rate for form in forms if isinstance(form, Segments)), default=1)
    if any(rate % other for other in rates) or not all(isinstance(form, (Segments, Band, Global)) for form in forms):
        return 1
    for form in forms:
        reach = form.length if isinstance(form, Segments) else form.back + form.ahead + 1 if isinstance(form, Band) else seq
        whole_classes = not isinstance(form, Segments) or form.length >= seq or form.length % rate == 0
        if min(reach, seq) < least * rate or not whole_classes:
            return 1
    return rate


def class_order(
    forms: Sequence[Form],
    seq: int,
    places: int,
    rate: int,
    heads: tuple[int, int],
    is_causal: bool,
    several: bool,
    block: int = BLOCK,
) -> ClassOrder | None:
    """Find the blocks of `seq` tokens in classes of `places` tokens, for `(heads, kv_heads)`; None if they are too many.

    `several`: a pair counts once for each form that shows it; otherwise once.
    """
    first, near = _reach(forms, seq, places, rate, is_causal, block)
    if rate**2 * (places // block) * near * heads[0] > MOST_CELLS:
        return None
    classes, begins = np.arange(rate)[:, None], np.arange(0, places, block)[:, None, None]
    near_begins = ((first[:, None] + np.arange(near)) * block)[:, None]
    grid = BlockGrid(rate, places, block, classes[..., None, None], begins, classes, near_begins)
    counts: dict[tuple[int | None, ...], tuple[Ints, ...]] = {}
    parts = []
    for head in range(heads[0]):
        served = tuple(form.offset_of(head) if form.serves(head) else None for form in forms)
        if served not in counts:
            counts[served] = _counts(forms, served, grid, seq, is_causal, several)
        parts.append(np.stack((np.full(len(counts[served][0]), head), *counts[served])))
    head, query, key, level, is_whole = np.concatenate(parts, axis=1)
    return _numbered(head, query, key, level, is_whole > 0, (rate, places, block), heads, seq)


def _reach(forms: Sequence[Form], seq: int, places: int, rate: int, is_causal: bool, block: int) -> tuple[Ints, int]:
    """Return the first key block that each query block may see, and how many from there on, at most."""
    first = np.arange(0, places, block)
    low, high = first.copy(), first.copy()
    for form in forms:
        if isinstance(form, Segments):
            length = places if form.length >= seq else form.length // rate
            ends = first // length * length, ((first + block - 1) // length + 1) * length - 1
        elif isinstance(form, Band):
            ends = first - form.back // rate - 1, first + block + form.ahead // rate
        else:
            ends = first * 0, first * 0 + places
        low, high = np.minimum(low, ends[0]), np.maximum(high, ends[1])
    if is_causal:
        high = first
    low, high = (x.clip(0, places - 1) // block for x in (low, high))
    return low, int((high - low).max()) + 1


def _counts(
    forms: Sequence[Form], served: tuple[int | None, ...], grid: BlockGrid, seq: int, is_causal: bool, several: bool
) -> tuple[Ints, ...]:
    """Return query blocks, key blocks, each count their pairs may have, and 1 where all pairs of both blocks have that count."""
    least, most = np.zeros((2, grid.rate, grid.places // grid.block, grid.rate, grid.key_place.shape[-1]), np.int16)
    for form, offset in zip(forms, served, strict=True):
        if offset is None:
            continue
        assert isinstance(form, (Segments, Band, Global))  # by `class_rate`
        some, whole = shown(form, offset, grid, seq)
        most += some
        if not several or not (form.without or form.without_rows is not None):  # the pairs left out are those of other forms
            least += whole
    if not several:
        least, most = np.minimum(least, 1), np.minimum(most, 1)
    last, rate = grid.block - 1, grid.rate
    seen = grid.key_place < grid.places
    all_seen = seen
    if is_causal:
        classes = grid.query_class - grid.key_class
        seen = seen & ((grid.query_place + last - grid.key_place) * rate + classes >= 0)
        all_seen = (grid.query_place - grid.key_place - last) * rate + classes >= 0
    results = []
    for level in range(1, int(most.max(initial=0)) + 1):
        listed = seen & (least.clip(min=1) <= level) & (level <= most)
        where = np.nonzero(listed)
        query = where[0] * (grid.places // grid.block) + where[1]
        key = where[2] * (grid.places // grid.block) + np.broadcast_to(grid.key_place // grid.block, listed.shape)[where]
        results.append((query, key, np.full(len(query), level), (listed & all_seen & (least == most))[where]))
    return tuple(np.concatenate(part) for part in zip(*results, strict=True)) if results else (np.zeros(0, np.int64),) * 4


def _numbered(
    head: Ints,
    query: Ints,
    key: Ints,
    level: Ints,
    is_whole: Bools,
    sizes: tuple[int, int, int],
    heads: tuple[int, int],
    seq: int,
) -> ClassOrder:
    """Number the key blocks of each count, and leave out pairs of blocks of which one begins at no token before `seq`."""
    rate, places, block = sizes
    most, blocks = int(level.max(initial=1)), rate * places // block
    group, kv_heads = heads[0] // heads[1], heads[1]
    used = np.zeros((kv_heads, most, blocks), np.bool_)
    used[head // group, level - 1, key] = True
    counts = used.sum(2).max(0)
    start = np.cumsum(counts) - counts
    number = start[:, None] + used.cumsum(2) - 1
    key_blocks = np.full((kv_heads, max(int(counts.sum()), 1)), -1, np.int64)
    kv_head, at_level, chosen = np.nonzero(used)
    key_blocks[kv_head, number[kv_head, at_level, chosen]] = chosen

    def ends(numbers: Ints) -> tuple[Ints, Ints]:
        column, place = np.divmod(numbers * block, places)
        return place * rate + column, (place + block - 1) * rate + column

    (query_first, query_last), (key_first, key_last) = ends(query), ends(key)
    there = (query_first < seq) & (key_first < seq)
    is_whole = is_whole & (query_last < seq) & (key_last < seq)
    pairs = head, query, number[head // group, level - 1, key]
    whole, partial = (BlockPairs(*(x[chosen] for x in pairs)) for chosen in (there & is_whole, there & ~is_whole))
    levels = tuple((i + 1, int(start[i])) for i in range(most) if counts[i])
    return ClassOrder(rate, places, block, levels, key_blocks, whole, partial)
