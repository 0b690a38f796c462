"""`Step`: query rows, the stored rows that each of them sees, and new rows that are stored before, as tables of numbers.

    out[r, h] = softmax over the rows j of all spans of (r, h) of (softcap(scale * q[r, h] . k_j) + bias), times v_j

a span     query rows x key/value heads x stored rows at equal distances: a segment, a page, one of the two arcs of a ring
a write    where the key and the value of a new row go, before any span is read

    stored tensor, as one line of numbers      offset                       + row
                                               | head_dim numbers |   ...   | head_dim numbers |   ...     `seen` of them
    of the next head of the span               offset + head                + head + row
    of the next query row                      offset + sequence
    row x of a span in pages                   offset + pages[x // page_rows] * page + x % page_rows * row

The tables are int64, so that a kernel on any device reads them; tensors are named by their numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from dilkit.bias.form import LoweredBias

SCALE_BYTES = 4
"""Of a stored int8 row, after its head_dim integers: the float32 by which they are multiplied."""


class Span(NamedTuple):
    """A row of `Step.spans`: what the query rows `row` to `row + rows - 1` see of some heads."""

    row: int
    rows: int
    first_head: int
    """The key/value heads are first_head, first_head + head_step, ..., `heads` of them."""
    head_step: int
    heads: int
    seen: int
    """Stored rows that are seen, the same number for each head."""
    key: int
    """The number of a tensor of `Step.stored`; its offset and its strides are in elements."""
    key_offset: int
    key_sequence: int
    key_head: int
    key_row: int
    value: int
    value_offset: int
    value_sequence: int
    value_head: int
    value_row: int
    query_position: int = 0
    """Of the query rows in their sequences; positions matter to a bias alone."""
    position: int = 0
    """Of the first stored row in its sequence, and the step from row to row."""
    position_step: int = 0
    positions: int = -1
    """The number of a tensor of `Step.positions` in place of both, or -1."""
    unseen: int = -1
    """The number of a tensor of `Step.unseen`, or -1 where all is seen."""
    pages: int = -1
    """Where in `Step.pages` those of the span begin, or -1 where its rows lie at equal distances."""
    page_rows: int = 0
    """Rows of a page, `key_row` and `value_row` apart."""
    page: int = 0
    """Elements from a page of the stored tensors to the next: page p begins at the offset plus p times as many."""
    page_first: int = 0
    """The first row that is seen, counted from the first row of the first page, and how many rows it is to the next one seen."""
    page_step: int = 1


class Write(NamedTuple):
    """A row of `Step.writes`: where the new rows `row` to `row + rows - 1` go, of some heads, as in `Span`."""

    row: int
    rows: int
    first_head: int
    head_step: int
    heads: int
    key: int
    key_offset: int
    key_sequence: int
    key_head: int
    value: int
    value_offset: int
    value_sequence: int
    value_head: int


def resolved(x: Tensor) -> Tensor:
    """`x` with its numbers in memory as they are: of a view that negates them a copy. Kernels of a step read memory."""
    return x.resolve_neg()


class Step(NamedTuple):
    """What a kernel is given for a step of decoding. `dilkit.decoding._checked.check` holds it against the memory of its tensors.

    `query` `(batch, seq, heads, head_dim)`, of which row r is `query[r // seq, r % seq]`; `key` and `value` like it, with the
    key/value heads: new rows. Their last dimension is contiguous. `stored`: tensors of one dtype on the same device, any strides;
    an int8 row is head_dim integers and the `SCALE_BYTES` of their scale.
    """

    query: Tensor
    stored: tuple[Tensor, ...]
    spans: NDArray[np.int64]
    """`(spans, len(Span._fields))`, contiguous."""
    writes: NDArray[np.int64]
    """`(writes, len(Write._fields))`, contiguous; no two go to one place."""
    key: Tensor | None = None
    value: Tensor | None = None
    sink: Tensor | None = None
    """A logit for each query head, `(heads,)`, in the dtype of `lse`, contiguous."""
    bias: LoweredBias | None = None
    """Its positions, if it has any, are `(batch or 1, tokens, 1 to 3)`."""
    positions: tuple[Tensor, ...] = ()
    """int64 `(seen,)`, contiguous."""
    unseen: tuple[Tensor, ...] = ()
    """bool `(heads or 1, group or 1, seen or 1)`: stored rows of a span that query heads do not see, whatever these hold."""
    pages: NDArray[np.int64] | None = None
    """int64 `(pages,)`, contiguous: the numbers of the pages of all spans that have any, span by span."""
    by_position: bool = False
    """Whether what spans show a query row and a head at one position is one key, with one value, wherever it is stored: a backend
    may read it once and count it as often as it is shown."""


def table(rows: list[Span] | list[Write], columns: int) -> NDArray[np.int64]:
    """Rows as `Step` has them; `columns` are those of a table without rows."""
    return np.array(rows, dtype=np.int64).reshape(len(rows), columns)
