"""`Intervals`: one or two intervals of columns that each row sees."""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dilkit.checks import integer
from dilkit.pattern.checks import PatternError
from dilkit.pattern.heads import Heads
from dilkit.pattern.kinds.branch import Branch
from dilkit.pattern.lowering.forms import Runs
from dilkit.pattern.lowering.tables import RunTable, turned

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

MOST_ROWS = 2**26
"""The most rows: beyond that the tables of a pattern take more than 2 GiB."""


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
        import numpy as np

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

    def array(self) -> NDArray[np.int64]:
        """Return the numbers, `(rows, 1 or 2, 2)`, read-only."""
        import numpy as np

        return np.frombuffer(self.numbers, "<i8").reshape(self.rows, -1, 2)

    def text(self) -> str:
        """Return the numbers in base64, each less the one of the row before, compressed."""
        import numpy as np

        changes = np.diff(self.array(), axis=0, prepend=0).astype("<i8")
        return base64.b64encode(zlib.compress(changes.tobytes(), 6)).decode()

    @classmethod
    def from_text(cls, rows: Any, text: Any) -> RowIntervals:
        """Return the intervals that `text` wrote. Raises `PatternError` for any other text."""
        import numpy as np

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
    """Each row sees the columns from `first` up to `last`, in one interval or two.

        i sees j  if  first[i] <= j <= last[i]              (or  first[i, n] <= j <= last[i, n]  for an n of 0 and 1)

    - `first`, `last`: integers `(rows,)` or `(rows, 2)`, arrays, tensors or lists; kept as `RowIntervals`, which are compared and
      hashed by their content. An interval ends at the first and the last row; one whose last column is before its first is empty.
    - `heads`: the range (start, stop) of query heads that the branch serves; None means all of them.

    A sequence has at most as many tokens as there are rows; of fewer tokens, it has the first rows and columns. Each row has
    here what each column has in FlashMask (arXiv 2410.01359): documents that are causal, prefixes, windows of any
    lengths. Raises `PatternError` or TypeError.

        >>> from dilkit import Intervals, Pattern
        >>> Pattern.of(Intervals(first=[0, 0, 2, 2], last=[0, 1, 2, 3])).count(4, 1)[0].tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    """

    kind: ClassVar[str] = "intervals"

    rows: RowIntervals
    heads: tuple[int, int] | None = None

    def __init__(self, first: Any, last: Any, heads: range | tuple[int, int] | None = None) -> None:
        self._make(RowIntervals.of(first, last), heads)

    def _make(self, rows: RowIntervals, heads: range | tuple[int, int] | None) -> None:
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "heads", heads)
        self._settle()

    @classmethod
    def of_rows(cls, rows: RowIntervals, heads: tuple[int, int] | None = None) -> Intervals:
        """Return the branch with these intervals."""
        branch = cls.__new__(cls)
        branch._make(rows, heads)
        return branch

    @property
    def max_seq(self) -> int:
        return self.rows.rows

    def check_seq(self, seq: int) -> None:
        if seq > self.max_seq:
            raise PatternError(
                f"seq={seq}: intervals of {self.max_seq} rows are given; give those of the rows after them as well"
            )

    def sees(self, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
        import torch

        table = torch.from_numpy(self.rows.array().copy()).to(rows.device)[rows]
        return ((table[:, :, :1] <= keys) & (keys < table[:, :, 1:])).any(1)[None]

    def pairs(self, seq: int, heads: Heads, is_causal: bool) -> int:
        import numpy as np

        start, stop = np.moveaxis(self.rows.array()[:seq], 2, 0)
        ends = np.arange(1, len(start) + 1)[:, None] if is_causal else seq
        return len(self.served(heads)) * int((np.minimum(stop, ends) - start).clip(0).sum())

    def forms(self, heads: Heads, seq: int) -> Iterable[Runs]:
        import numpy as np

        table = self.rows.array()
        row, interval = np.nonzero(table[..., 0] < table[..., 1])
        runs = np.concatenate((row[:, None], table[row, interval]), axis=1)
        queries, keys = (RunTable.of_blocks(of_rows, len(table), 1).joined() for of_rows in (runs, turned(runs)))
        return [Runs(heads=self.range_served(heads), queries=queries, keys=keys)]

    def of_heads(self, heads: tuple[int, int] | None) -> Intervals:
        return self.of_rows(self.rows, heads)

    def to_fields(self) -> dict[str, Any]:
        return dict(kind=self.kind, rows=self.rows.rows, intervals=self.rows.text(), heads=self.heads)

    @classmethod
    def arguments(cls) -> dict[str, bool]:
        return dict(rows=True, intervals=True, heads=False)

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Intervals:
        return cls.of_rows(RowIntervals.from_text(values["rows"], values["intervals"]), values.get("heads"))

    def call(self) -> str:
        digest = hashlib.sha256(self.rows.numbers).hexdigest()[:8]
        return f"Intervals(<{self.rows.rows} rows, {digest}>{'' if self.heads is None else f', heads={self.heads!r}'})"

    def __repr__(self) -> str:
        return f"Intervals.of_rows({self.rows!r}, heads={self.heads!r})"

    def __str__(self) -> str:
        most = " or two" if self.rows.array().shape[1] == 2 else ""
        return f"an interval{most} of columns for each of {self.rows.rows:,} rows{self.heads_text()}"


def _columns(name: str, given: Any) -> NDArray[np.int64]:
    """Convert `given` to int64 `(rows, 1 or 2)`. Raises TypeError or `PatternError` naming it."""
    import numpy as np

    try:
        array = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    except ValueError as error:
        raise PatternError(f"{name} is no array of columns: {error}; rows must have equally many") from None
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} is an array of {array.dtype}; integers are needed, a column for each row")
    array = array[:, None] if array.ndim == 1 else array
    if array.ndim != 2 or array.shape[1] not in (1, 2) or not 1 <= len(array) <= MOST_ROWS:
        raise PatternError(f"{name} has shape {array.shape}; (rows,) or (rows, 2) is needed, of 1 to {MOST_ROWS:,} rows")
    return array.astype(np.int64)
