"""`Documents`, `Prefix` and `Intervals`: runs of columns that each row sees."""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dilkit.checks import integer, shown
from dilkit.pattern.checks import WHOLE_SEQUENCE, PatternError
from dilkit.pattern.heads import Heads
from dilkit.pattern.kinds.branch import Branch
from dilkit.pattern.lowering.forms import Band, Form, GivenIntervals, Runs
from dilkit.pattern.lowering.tables import RunTable, turned
from dilkit.pattern.runs import UNBOUNDED, Positions

if TYPE_CHECKING:
    from torch import Tensor

MOST_ROWS = 2**26
"""The most rows: beyond that the tables of a pattern take more than 2 GiB."""


@dataclass(frozen=True)
class Documents(Branch):
    """Documents of `lengths` tokens one after the other: a token sees those of its own document.

        i sees j  if  document(i) == document(j)

    The same as dense attention of packed sequences (`dilated_attention_varlen`), as a branch beside others. A sequence may have
    fewer tokens than all documents together, of which it is the first ones, but not more. `heads`: the query heads (start,
    stop) that it serves; None means all. Raises `PatternError` or TypeError.

        >>> from dilkit import Documents, Pattern
        >>> Pattern.of(Documents([1, 2])).count(3, 1)[0].tolist()
        [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
    """

    kind: ClassVar[str] = "documents"

    lengths: tuple[int, ...]
    heads: tuple[int, int] | None = None

    def __init__(self, lengths: Iterable[int], heads: range | tuple[int, int] | None = None) -> None:
        if isinstance(lengths, (str, bytes)) or not isinstance(lengths, Iterable):
            raise TypeError(f"lengths={shown(lengths)} must be a sequence of integers, the tokens of each document")
        self._set(lengths=tuple(integer(f"lengths[{i}]", length) for i, length in enumerate(lengths)), heads=heads)
        if not self.lengths or min(self.lengths) < 1 or self.max_seq > WHOLE_SEQUENCE:
            raise PatternError(f"lengths={shown(self.lengths)}: one document at least, each of one token at least, is needed")
        self._settle()

    @property
    def max_seq(self) -> int:
        return sum(self.lengths)

    def sees(self, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
        import torch

        ends = torch.tensor([*accumulate(self.lengths)], device=rows.device)
        of_rows, of_keys = (torch.searchsorted(ends, x.contiguous(), right=True) for x in (rows, keys))
        return (of_rows[:, None] == of_keys)[None]

    def pairs(self, seq: int, heads: Heads, is_causal: bool) -> int:
        ends = [min(end, seq) for end in accumulate(self.lengths, initial=0)]
        sizes = [stop - start for start, stop in pairwise(ends)]
        return len(self.served(heads)) * sum(size * (size + 1) // 2 if is_causal else size * size for size in sizes)

    def forms(self, heads: Heads, seq: int) -> Iterable[Runs]:
        ends = np.array([min(end, UNBOUNDED) for end in accumulate(self.lengths, initial=0)], np.int64)
        table = RunTable(ends[1:], np.ones(len(self.lengths), np.int64), np.stack((ends[:-1], ends[1:]), axis=1))
        return [Runs(heads=self.range_served(heads), queries=table, keys=table)]

    def __str__(self) -> str:
        count = len(self.lengths)
        which = f"{count:,} documents, {self.max_seq:,} tokens in all" if count > 1 else f"a document of {self.max_seq:,} tokens"
        return f"{which}{self.heads_text()}"


@dataclass(frozen=True)
class Prefix(Branch):
    """A prefix language model: the first `length` tokens see each other, and every token those before it and itself.

        i sees j  if  j <= i  or  (i < length  and  j < length)

    It says itself what is causal, in a call with `is_causal=False`; with `is_causal=True` it is causal attention. T5 (arXiv
    1910.10683) calls it a causal mask with prefix. A prefix longer than the sequence is all of it. `heads`: the query heads
    (start, stop) that it serves; None means all. Raises `PatternError` or TypeError.

        >>> from dilkit import Pattern, Prefix
        >>> Pattern.of(Prefix(2)).count(4, 1)[0].tolist()
        [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    """

    kind: ClassVar[str] = "prefix"

    length: int
    heads: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self._settle(length=self.length)

    def sees(self, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
        return (keys <= rows[:, None].clamp(min=self.length - 1))[None]

    def pairs(self, seq: int, heads: Heads, is_causal: bool) -> int:
        first = 0 if is_causal else min(self.length, seq)
        return len(self.served(heads)) * (seq * (seq + 1) // 2 + first * (first - 1) // 2)

    def forms(self, heads: Heads, seq: int) -> Iterable[Form]:
        served, first = self.range_served(heads), np.array([[0, min(self.length, UNBOUNDED)]])
        yield Band(heads=served, ahead=0, without_rows=first, without_columns=first[:0])
        table = RunTable(first[0, 1:], np.ones(1, np.int64), first)
        yield Runs(heads=served, queries=table, keys=table)

    def __str__(self) -> str:
        return f"the first {self.length:,} tokens among themselves, and what is before each token{self.heads_text()}"


@dataclass(frozen=True)
class RowIntervals:
    """One or two intervals of columns for each row as `numbers`: int64 `(rows, intervals, 2)`, start and stop, row by row.

    The intervals of a row ascend and are apart; empty ones are 0, 0 and last. So rows that see the same are equal values.

        >>> from dilkit.pattern.kinds.intervals import RowIntervals
        >>> RowIntervals.of([0, 0, 1], [0, 5, 0]).array().tolist()
        [[[0, 1]], [[0, 3]], [[0, 0]]]
    """

    rows: int
    numbers: bytes

    @classmethod
    def of(cls, first: Any, last: Any) -> RowIntervals:
        """Make the intervals from `first` to `last`, each `(rows,)` or `(rows, 1 or 2)`: arrays, tensors or lists of integers."""
        start, stop = _columns("first", first), _columns("last", last)
        if start.shape != stop.shape:
            raise PatternError(f"first has shape {start.shape} and last {stop.shape}; they are needed for the same intervals")
        rows = len(start)
        start, stop = start.clip(0, rows), np.minimum(stop, rows - 1).clip(-1) + 1
        start, stop = (np.where(start < stop, x, rows) for x in (start, stop))  # empty ones come last
        order = np.argsort(start, axis=1, kind="stable")
        start, stop = (np.take_along_axis(x, order, axis=1) for x in (start, stop))
        if start.shape[1] == 2:
            joined = (start[:, 1] <= stop[:, 0]) & (start[:, 1] < stop[:, 1])
            stop[joined, 0] = np.maximum(stop[joined, 0], stop[joined, 1])
            start[joined, 1] = stop[joined, 1]
        table = np.where((start < stop)[..., None], np.stack((start, stop), axis=2), 0)
        table = table[:, : 2 if table[:, 1:].any() else 1]
        return cls(rows, table.astype("<i8").tobytes())

    def array(self) -> Positions:
        """Return the numbers, `(rows, 1 or 2, 2)`, read-only."""
        return np.frombuffer(self.numbers, "<i8").reshape(self.rows, -1, 2)

    def text(self) -> str:
        """Return the numbers in base64, each less the one of the row before, compressed."""
        changes = np.diff(self.array(), axis=0, prepend=0).astype("<i8")
        return base64.b64encode(zlib.compress(changes.tobytes(), 6)).decode()

    @classmethod
    def from_text(cls, rows: Any, text: Any) -> RowIntervals:
        """Return the intervals that `text` wrote. Raises `PatternError` for any other text."""
        if not 1 <= integer("rows", rows) <= MOST_ROWS:
            raise PatternError(f"rows={rows} must be from 1 to {MOST_ROWS:,}")
        try:
            unpacker = zlib.decompressobj()
            numbers = unpacker.decompress(base64.b64decode(text, validate=True), 32 * rows + 1)
        except (binascii.Error, TypeError, ValueError, zlib.error) as error:
            raise PatternError(f"intervals are not as Pattern.to_json() writes them: {error}") from None
        if len(numbers) not in (16 * rows, 32 * rows):
            raise PatternError(f"intervals are {len(numbers)} bytes for rows={rows}; 16 or 32 bytes a row are needed")
        table = np.cumsum(np.frombuffer(numbers, "<i8").reshape(rows, -1, 2), axis=0)
        intervals = cls.of(table[..., 0], table[..., 1] - 1)
        if intervals.array().shape != table.shape or (intervals.array() != table).any():
            raise PatternError("intervals of a row do not ascend, or reach beyond the rows; write them with Pattern.to_json()")
        return intervals


@dataclass(frozen=True, repr=False)
class Intervals(Branch):
    """Each row sees the columns from `first` up to `last`, in one interval or two; or each call gives its own intervals.

        i sees j  if  first[i] <= j <= last[i]              (or  first[i, n] <= j <= last[i, n]  for an n of 0 and 1)

    - `first`, `last`: integers `(rows,)` or `(rows, 2)`, arrays, tensors or lists; kept as `RowIntervals`, compared and hashed by
      content. An interval ends at the first and the last row; one whose last column is before its first is empty.
    - `most`: `Intervals(None, most=k)` has no intervals: each call gives up to k for each query, `intervals=` of
      `dilkit.dilated_attention`.
    - `heads`: the query heads (start, stop) that it serves; None means all.

    A sequence has at most as many tokens as there are rows; of fewer tokens, it has the first rows and columns. Each row has
    here what each column has in FlashMask (arXiv 2410.01359): documents that are causal, prefixes, windows of any lengths. Raises
    `PatternError` or TypeError.

        >>> from dilkit import Intervals, Pattern
        >>> Pattern.of(Intervals(first=[0, 0, 2, 2], last=[0, 1, 2, 3])).count(4, 1)[0].tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    """

    kind: ClassVar[str] = "intervals"
    argument: ClassVar[str] = "intervals"

    rows: RowIntervals | None
    most: int | None = None
    heads: tuple[int, int] | None = None

    def __init__(
        self, first: Any, last: Any = None, heads: range | tuple[int, int] | None = None, *, most: int | None = None
    ) -> None:
        if (first is None) != (most is not None) or (first is None and last is not None):
            raise PatternError("most is given beside intervals: give Intervals(first, last), or Intervals(None, most=k)")
        are_rows = first is None or (isinstance(first, RowIntervals) and last is None)
        self._set(rows=first if are_rows else RowIntervals.of(first, last), most=most, heads=heads)
        self._settle(**({} if most is None else dict(most=most)))

    @classmethod
    def of_rows(cls, rows: RowIntervals, heads: tuple[int, int] | None = None) -> Intervals:
        """Return the branch with these intervals."""
        return cls(rows, None, heads)

    @property
    def is_given_by_call(self) -> bool:
        return self.rows is None

    @property
    def is_of_whole_sequences(self) -> bool:
        return self.rows is None

    @property
    def own_rows(self) -> RowIntervals:
        """The intervals. Raises `PatternError` where they are given at each call."""
        if self.rows is None:
            way = "give it some, Intervals(first, last), or intervals= to dilated_attention"
            raise PatternError(f"{self.call()} has no intervals of its own; {way}")
        return self.rows

    @property
    def max_seq(self) -> int:
        return WHOLE_SEQUENCE if self.rows is None else self.rows.rows

    def sees(self, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
        import torch

        return self.shown_by(torch.from_numpy(self.own_rows.array().copy()).to(rows.device)[None], rows, keys)

    def shown_by(self, given: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
        start, stop = given[:, rows].unsqueeze(-1).unbind(3)
        return ((start <= keys) & (keys < stop)).any(2)

    def pairs(self, seq: int, heads: Heads, is_causal: bool) -> int:
        if self.rows is None:  # as many as a call can give
            return len(self.served(heads)) * (seq * (seq + 1) // 2 if is_causal else seq * seq)
        start, stop = np.moveaxis(self.rows.array()[:seq], 2, 0)
        ends = np.arange(1, len(start) + 1)[:, None] if is_causal else seq
        return len(self.served(heads)) * int((np.minimum(stop, ends) - start).clip(0).sum())

    def forms(self, heads: Heads, seq: int) -> Iterable[Form]:
        if self.most is not None:
            return [GivenIntervals(heads=self.range_served(heads), most=self.most)]
        table = self.own_rows.array()
        row, interval = np.nonzero(table[..., 0] < table[..., 1])
        runs = np.concatenate((row[:, None], table[row, interval]), axis=1)
        queries, keys = (RunTable.of_blocks(of_rows, len(table), 1).joined() for of_rows in (runs, turned(runs)))
        return [Runs(heads=self.range_served(heads), queries=queries, keys=keys)]

    def of_heads(self, heads: tuple[int, int] | None) -> Intervals:
        return Intervals(self.rows, None, heads, most=self.most)

    def to_fields(self) -> dict[str, Any]:
        if self.rows is None:
            return dict(kind=self.kind, most=self.most, heads=self.heads)
        return dict(kind=self.kind, rows=self.rows.rows, intervals=self.rows.text(), heads=self.heads)

    @classmethod
    def arguments(cls) -> dict[str, bool]:
        return dict(rows=False, intervals=False, most=False, heads=False)

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Intervals:
        rows, text, most = (values.get(name) for name in ("rows", "intervals", "most"))
        if (rows is None) != (text is None) or (rows is None) != (most is not None):
            raise PatternError("rows and intervals belong together, and most stands alone; give both, or most")
        return cls(None if rows is None else RowIntervals.from_text(rows, text), None, values.get("heads"), most=most)

    def call(self) -> str:
        if self.rows is None:
            which = f"None, most={self.most}"
        else:
            which = f"<{self.rows.rows} rows, {hashlib.sha256(self.rows.numbers).hexdigest()[:8]}>"
        return f"Intervals({which}{'' if self.heads is None else f', heads={self.heads!r}'})"

    def __repr__(self) -> str:
        return self.call() if self.rows is None else f"Intervals.of_rows({self.rows!r}, heads={self.heads!r})"

    def __str__(self) -> str:
        if self.rows is None:
            return f"up to {self.most} intervals of keys for each query, given at each call{self.heads_text()}"
        most = " or two" if self.rows.array().shape[1] == 2 else ""
        return f"an interval{most} of columns for each of {self.rows.rows:,} rows{self.heads_text()}"


def _columns(name: str, given: Any) -> Positions:
    try:
        array = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    except ValueError as error:
        raise PatternError(f"{name} is no rectangular array: {error}; all rows need as many columns") from None
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} is an array of {array.dtype}; integers are needed, a column for each row")
    array = array[:, None] if array.ndim == 1 else array
    if array.ndim != 2 or array.shape[1] not in (1, 2) or not 1 <= len(array) <= MOST_ROWS:
        raise PatternError(f"{name} has shape {array.shape}; (rows,) or (rows, 2) is needed, of 1 to {MOST_ROWS:,} rows")
    return array.astype(np.int64)
