"""Decoding protocol: a step as tables of numbers, and the method by which a backend computes it (docs/decoding-protocol.md).

    out[r, h] = softmax over the rows j of all spans of (r, h) of (softcap(scale * q[r, h] . k_j) + bias), times v_j

a span     query rows x key/value heads x stored rows at equal distances: a segment, a page, one of the two arcs of a ring
a write    where the key and the value of a new row go, before any span is read

    stored tensor, as one line of numbers      offset                       + row
                                               | head_dim numbers |   ...   | head_dim numbers |   ...     `seen` of them
    of the next head of the span               offset + head                + head + row
    of the next query row                      offset + sequence
    row x of a span in pages                   offset + pages[x // page_rows] * page + x % page_rows * row

The tables are int64, so that a kernel on any device reads them. They name tensors by number.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from dilkit.decoding._checked import check as check

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dilkit.backend import Backend
    from dilkit.bias.form import LoweredBias
    from dilkit.problem import Problem


class DecodingBackend(Protocol):
    """Second protocol of a backend, optional: steps of decoding over rows of the dtypes in `limits.stored`."""

    name: str

    def attend_stored(self, step: Step, problem: Problem) -> tuple[Tensor, Tensor]:
        """Store the new rows of `step`, then return `(out, lse)` of its queries, with the sink, as `Backend.forward` does.

        `problem.stored` is the dtype of the stored rows. Raises as `check` does, before anything is written.
        """


def decoding_backend(backend: Backend) -> DecodingBackend:
    """Return a backend whose limits take stored rows as one that has steps. Raises NotImplementedError if it has none."""
    if not hasattr(backend, "attend_stored"):
        raise NotImplementedError(f"backend {backend.name!r} states stored rows in its limits but has no attend_stored")
    return cast("DecodingBackend", backend)


class Span(NamedTuple):
    """Row of `Step.spans`: stored rows that the query rows `row` to `row + rows - 1` see, for some heads."""

    row: int
    rows: int
    first_head: int
    """The key/value heads are first_head, first_head + head_step, ..., `heads` of them."""
    head_step: int
    heads: int
    seen: int
    """Stored rows that are seen, the same number for each head."""
    key: int
    """Number of a tensor of `Step.stored`; its offset and its strides are in elements."""
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
    """Position of the query rows in their sequences; positions matter to a bias alone."""
    position: int = 0
    """Position of the first stored row in its sequence, and the step from row to row."""
    position_step: int = 0
    positions: int = -1
    """Number of a tensor of `Step.positions` in place of both, or -1."""
    unseen: int = -1
    """Number of a tensor of `Step.unseen`, or -1 where all is seen."""
    pages: int = -1
    """Index in `Step.pages` of the first page of the span, or -1 where its rows lie at equal distances."""
    page_rows: int = 0
    """Rows of a page, `key_row` and `value_row` apart."""
    page: int = 0
    """Elements from a page of the stored tensors to the next: page p begins at the offset plus p times as many."""
    page_first: int = 0
    """First row that is seen, counted from the first row of the first page, and the distance in rows to the next one."""
    page_step: int = 1


class Write(NamedTuple):
    """Row of `Step.writes`: places of the new rows `row` to `row + rows - 1`, for some heads, as in `Span`."""

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


class Step(NamedTuple):
    """Input of `attend_stored`. `check(step, problem)` holds its tables against the memory of its tensors.

    `query` `(batch, seq, heads, head_dim)`, of which row r is `query[r // seq, r % seq]`; `key` and `value` like it, with the
    key/value heads: new rows. Their last dimension is contiguous. `stored`: tensors of one dtype on the same device, any strides;
    an int8 row is head_dim integers and the `SCALE_BYTES` of their scale (`dilkit.decoding.layout`).
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
    """True if spans show a query row and a head one key and value a position, wherever it is stored: a backend may read it once
    and count it as often as it is shown."""


def table(rows: list[Span] | list[Write], columns: int) -> NDArray[np.int64]:
    """Return the rows as a table of `Step`; `columns` are those of a table without rows."""
    return np.array(rows, dtype=np.int64).reshape(len(rows), columns)


class PlacedStep(NamedTuple):
    """A checked step with its tables on the device of its tensors. All of it stays as long as a kernel may read it.

        spans | writes | pages | memory      int64, copied as one

    A CUDA graph that was captured with a placed step reads the tables again at each replay: write to them in place. Their sizes
    stay. No host checks them then; kernels leave out rows beyond the tensors (docs/gpu-kernels.md).
    """

    step: Step
    problem: Problem
    spans: Tensor
    """int64 `(spans, len(Span._fields))`; one of 0 rows or 0 stored rows shows nothing."""
    writes: Tensor
    pages: Tensor
    memory: Tensor
    """int64 `(tensors, 5)`: an address, how many elements are there, and the strides of an unseen tensor: heads, group, rows.

    A line for each tensor of `Step.stored`, `positions` and `unseen`.
    """
    most: int
    """Stored rows that a query row sees, about: kernels divide their work by it."""


def place(step: Step, problem: Problem, most: int | None = None) -> PlacedStep:
    """Check a step and copy its tables to the device of its tensors. Raises as `DecodingBackend.attend_stored`.

    `most`: stored rows that a query row may see when its tables have changed; by default, as many as now.
    """
    check(step, problem)
    lines: list[tuple[int, ...]] = [(*_memory(x), 0, 0, 0) for x in (*step.stored, *step.positions)]
    for x in step.unseen:
        lines.append((*_memory(x), *(stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True))))
    memory = np.array(lines, np.int64).reshape(len(lines), 5)
    tables = step.spans, step.writes, np.zeros(0, np.int64) if step.pages is None else step.pages, memory
    flat = torch.from_numpy(np.concatenate([x.ravel() for x in tables])).to(step.query.device)
    starts = [0, *accumulate(x.size for x in tables)]
    spans, writes, pages, memory_table = (flat[i:][: x.size].view(x.shape) for i, x in zip(starts, tables, strict=False))
    seen = int(step.spans[:, Span._fields.index("seen")].sum())
    return PlacedStep(step, problem, spans, writes, pages, memory_table, seen if most is None else most)


def _memory(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.untyped_storage().nbytes() // x.element_size() - int(x.storage_offset())
