"""`RowTable`: a bias with values for each query, such as its products with learned relative positions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.bias.checks import check_reach, floating
from dilkit.bias.form import BiasForm, LoweredBias
from dilkit.bias.grids import axis_sizes, cells_of, check_cells, entry_of, grid_shape


@dataclass(frozen=True, eq=False)
class RowTable(Bias):
    """A number for each query and distance, such as the products of queries with learned relative positions.

        bias(h, i, j) = values[b, h, i, clip(i - j, -m, m) + m]                     values of 2 * m + 1 columns
        bias(h, i, j) = sum_k values[b, h, i, first_k + x_ik - x_jk + (a_k - 1) / 2]     shape: a grid, sizes: (a_0, ...)

    It is added to the scaled score, as every bias is: `scale * (q_i . k_j + q_i . r_(i - j))` has the values `scale * q_i . r`.
    On a grid rows are row-major, x are the coordinates of a cell, and each axis has columns of its own, one axis after the other.
    Memory is O(seq * columns).

    - `values`: floating-point `(batch, heads, seq, columns)`, which may require a gradient.
    - `shape`: of the grid, one to three sizes; None: distances along the sequence.
    - `sizes`: the columns of each axis, odd; offsets beyond are clipped. By default all offsets, `2 * n - 1` for n cells.

    Shaw's positions (arXiv 1803.02155) have `q @ table.T`, SAM's and MViT's decomposed ones `torch.cat([q @ rel_pos_h.T, q @
    rel_pos_w.T], -1)`. Caches, ranks, and other queries than keys are refused. Raises TypeError or ValueError for what does not
    fit.

        >>> import torch
        >>> from dilkit import Pattern, RowTable, dilated_attention
        >>> q = k = v = torch.randn(1, 64, 4, 8)
        >>> rel_pos_h, rel_pos_w = torch.randn(2, 15, 8).unbind()
        >>> values = torch.cat([q.transpose(1, 2) @ rel_pos_h.T, q.transpose(1, 2) @ rel_pos_w.T], -1)
        >>> dilated_attention(q, k, v, Pattern.dense(), bias=RowTable(values, (8, 8))).shape
        torch.Size([1, 64, 4, 8])
    """

    values: Tensor
    shape: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None
    weights_name: ClassVar[str] = "values"
    by_query: ClassVar[bool] = True

    def __post_init__(self) -> None:
        floating("values", self.values, (4,), "(batch, heads, seq, columns)")
        columns = self.values.shape[3]
        if self.shape is None:
            if self.sizes is not None or columns % 2 == 0:
                needed = "without shape= an odd number, and no sizes, are needed"
                raise ValueError(f"values has {columns} columns, sizes={self.sizes}; {needed}")
            return
        object.__setattr__(self, "shape", grid_shape(self.shape))
        sizes = tuple(2 * size - 1 for size in self.shape) if self.sizes is None else self.sizes
        object.__setattr__(self, "sizes", axis_sizes(sizes, len(self.shape), columns, "columns of values"))

    @property
    def weights(self) -> Tensor:
        """The values, `(heads, batch, seq, columns)`."""
        return self.values.transpose(0, 1)

    def with_weights(self, weights: Tensor) -> RowTable:
        return replace(self, values=weights.transpose(0, 1))

    @property
    def most_rows(self) -> int | None:
        return None if self.shape is None else math.prod(self.shape)

    def of_rows(self, rows: Tensor) -> RowTable:
        of_sequences = self.values[0][:, rows]
        return replace(self, values=of_sequences[None] if rows.dim() == 1 else of_sequences.transpose(0, 1))

    def of_sequence(self, number: int, length: int) -> RowTable:
        return replace(self, values=self.values[number : number + 1, :, :length])

    def matrix(self, queries: Tensor, keys: Tensor) -> Tensor:
        shape, sizes = self.shape or (1,), self.sizes or (self.values.shape[3],)
        apart = cells_of(queries, shape)[:, None] - cells_of(keys, shape)
        tables = self.values[:, :, queries].split_with_sizes(sizes, -1)
        entries = (entry_of((size,), apart[..., k : k + 1]) for k, size in enumerate(sizes))
        every = [x.gather(3, entry.expand(*x.shape[:3], -1)) for x, entry in zip(tables, entries, strict=True)]
        return torch.stack(every).sum(0)

    def lowered(self, dtype: Any) -> LoweredBias:
        weights = self.weights.to(dtype)
        if self.shape is None or self.sizes is None:
            return LoweredBias(BiasForm(sizes=(weights.shape[3],), by_query=True), weights)
        dims = len(self.shape)
        check_reach(f"positions on the grid shape={self.shape} of the bias", max(self.shape) - 1, dtype)
        rows = torch.arange(math.prod(self.shape), device=weights.device)
        form = BiasForm(dims=dims, sizes=self.sizes, placed=True, by_axis=dims > 1, by_query=True)
        return LoweredBias(form, weights, cells_of(rows, self.shape).to(dtype)[None])

    def check_rows(self, batch: int, seq: int) -> None:
        if self.shape is not None:
            check_cells(self.shape, seq)
