"""Tables as biases: `RelativeTable` by distance along the sequence, `GridTable` and `CoordinateTable` by offset on a grid."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dilkit.bias.base import Bias, PlacedBias
from dilkit.bias.checks import check_range, check_reach, floating, integers, whole
from dilkit.bias.form import BiasForm, LoweredBias
from dilkit.bias.grids import axis_sizes, cells_of, check_cells, entry_of, grid_shape
from dilkit.checks import boolean, check_type, integer


def t5_buckets(num_buckets: int = 32, max_distance: int = 128, *, bidirectional: bool = True) -> Tensor:
    """Compute the buckets of T5's relative attention bias (arXiv 1910.10683), int64 `(2 * max_distance + 1,)`.

    Entry `i - j + max_distance` is the bucket of query i and key j. Half of the buckets of a direction are single distances, the
    others grow as logarithms up to `max_distance`, beyond which all share the last. `bidirectional`, as in T5's encoder: keys
    before and after the query have buckets of their own; in its decoder keys after it share bucket 0. Raises ValueError for too
    small numbers.

        >>> from dilkit import t5_buckets
        >>> t5_buckets(8, 6).tolist()  # of keys 6 after the query, ..., at its place, ..., 6 before it
        [7, 7, 7, 6, 6, 5, 0, 1, 2, 2, 3, 3, 3]
    """
    boolean("bidirectional", bidirectional)
    integer("num_buckets", num_buckets, at_least=4 if bidirectional else 2)
    one_way = num_buckets // 2 if bidirectional else num_buckets
    exact = one_way // 2
    integer("max_distance", max_distance, at_least=exact + 1)
    after = torch.arange(max_distance, -max_distance - 1, -1)  # j - i, which T5 calls the relative position
    distance = after.abs() if bidirectional else (-after).clamp(min=0)
    far = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (one_way - exact)
    bucket = torch.where(distance < exact, distance, (exact + far.long()).clamp(max=one_way - 1))
    return bucket + (after > 0) * one_way if bidirectional else bucket


@dataclass(frozen=True, eq=False)
class RelativeTable(Bias):
    """A learned number for each bucket of distances along the sequence, as T5 has it.

        bias(h, i, j) = table[h, buckets[clip(i - j, -m, m) + m]]

    - `table`: floating-point `(heads, entries)`, which may require a gradient.
    - `buckets`: whole numbers `(2 * m + 1,)`, the entry for each `i - j` from -m to m, such as `dilkit.t5_buckets()`. The
      default is entry `i - j + m` of a table of `2 * m + 1` entries: distances are clipped (Shaw et al., arXiv 1803.02155).

    Raises TypeError or ValueError for what does not fit.

        >>> import torch
        >>> from dilkit import Pattern, RelativeTable, dilated_attention, t5_buckets
        >>> q = k = v = torch.randn(1, 64, 4, 8)
        >>> table = torch.randn(4, 32, requires_grad=True)
        >>> dilated_attention(q, k, v, Pattern([64], [1]), bias=RelativeTable(table, t5_buckets())).sum().backward()
        >>> table.grad.shape
        torch.Size([4, 32])
    """

    table: Tensor
    buckets: Tensor | None = None
    weights_name: ClassVar[str] = "table"

    def __post_init__(self) -> None:
        floating("table", self.table, (2,), "(heads, entries)")
        entries = self.table.shape[1]
        if self.buckets is None:
            if entries % 2 == 0:
                raise ValueError(f"table has {entries} entries; without buckets an odd number is needed, i - j from -m to m")
            return
        buckets = whole("buckets", self.buckets)
        check_range("buckets", buckets, entries, "the entries of table")
        object.__setattr__(self, "buckets", buckets)

    def _by_difference(self) -> Tensor:
        """Return `(heads, 2 * m + 1)`, differentiable."""
        return self.table if self.buckets is None else self.table[:, self.buckets.to(self.table.device)]

    def matrix(self, queries: Tensor, keys: Tensor) -> Tensor:
        table = self._by_difference()
        most = table.shape[1] // 2
        return table[:, (queries[:, None] - keys).clamp(-most, most) + most]

    def lowered(self, dtype: Any) -> LoweredBias:
        table = self._by_difference()
        return LoweredBias(BiasForm(sizes=(table.shape[1],)), table.to(dtype))


@dataclass(frozen=True, eq=False)
class GridTable(Bias):
    """A learned number for each offset on a grid, as Swin and the neighborhood attention of NAT and DiNAT have it.

        bias(h, i, j) = table[h, y_i - y_j + (a - 1) / 2, x_i - x_j + (b - 1) / 2]        (a, b) = table.shape[1:]

    for rows of a row-major grid, `(y, x) = divmod(row, shape[1])`; an offset beyond the table takes its nearest entry.

    - `table`: floating-point `(heads, a)`, `(heads, a, b)` or `(heads, a, b, c)`, odd numbers; it may require a gradient. For a
      window of k tokens they are `2 * k - 1`. Swin's table, `((2 * k - 1) ** 2, heads)`, is `table.T.unflatten(1, (a, b))`.
      NATTEN counts offsets the other way round, `y_j - y_i`: its `rpb` is `rpb.flip(1, 2)`.
    - `shape`: the sizes of the grid, up to 2**24 + 1 beside a query other than float64. A sequence is at most its product.
    - `dilation`: offsets are counted in steps of so many tokens, as in DiNAT.

    Raises TypeError or ValueError for what does not fit.

        >>> import torch
        >>> from dilkit import GridTable, Pattern, dilated_attention
        >>> q = k = v = torch.randn(1, 64, 4, 8)
        >>> bias = GridTable(torch.randn(4, 5, 5), (8, 8))
        >>> dilated_attention(q, k, v, Pattern.natten((8, 8), (3, 3)), bias=bias).shape
        torch.Size([1, 64, 4, 8])
    """

    table: Tensor
    shape: tuple[int, ...]
    dilation: int | tuple[int, ...] = 1
    weights_name: ClassVar[str] = "table"

    def __post_init__(self) -> None:
        floating("table", self.table, (2, 3, 4), "(heads, a), (heads, a, b) or (heads, a, b, c)")
        shape = grid_shape(self.shape)
        steps = self.dilation if isinstance(self.dilation, (tuple, list)) else (self.dilation,) * len(shape)
        dilation = tuple(integer("dilation", step, at_least=1) for step in steps)
        sizes = self.table.shape[1:]
        if not len(shape) == len(dilation) == len(sizes):
            raise ValueError(
                f"table has shape {tuple(sizes)} without heads, {shape=}, {dilation=}; one size a dimension is needed"
            )
        _check_odd(self.table)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dilation", dilation)

    @property
    def most_rows(self) -> int | None:
        return math.prod(self.shape)

    def _coordinates(self, rows: Tensor) -> Tensor:
        assert isinstance(self.dilation, tuple)
        return cells_of(rows, self.shape, self.dilation)

    def matrix(self, queries: Tensor, keys: Tensor) -> Tensor:
        apart = self._coordinates(queries)[:, None] - self._coordinates(keys)
        return self.table.flatten(1)[:, entry_of(tuple(self.table.shape[1:]), apart)]

    def lowered(self, dtype: Any) -> LoweredBias:
        check_reach(f"positions on the grid shape={self.shape} of the bias", max(self.shape) - 1, dtype)
        rows = torch.arange(math.prod(self.shape), device=self.table.device)
        form = BiasForm(dims=len(self.shape), sizes=tuple(self.table.shape[1:]), placed=True)
        return LoweredBias(form, self.table.to(dtype).flatten(1), self._coordinates(rows).to(dtype)[None])

    def check_rows(self, batch: int, seq: int) -> None:
        check_cells(self.shape, seq)


@dataclass(frozen=True, eq=False)
class CoordinateTable(PlacedBias):
    """A learned number for each offset of two tokens at given cells: of windows that are cut out of a map, or of points.

        bias(h, i, j) = table[h, x_i - x_j + (a - 1) / 2, ...]        (a, ...) = table.shape[1:], each offset clipped to it

    - `table`: as that of `GridTable`; with `sizes`, `(heads, a + b + c)`.
    - `sizes`: those of a table for each axis, (a, b, c), odd; their entries are summed, as Point Transformer V3 has it with
      `rpe_table.T` and three times the same size. None: a table of all combinations.
    - `coordinates`: integers `(batch, seq, 1 to 3)`, or `(seq, 1 to 3)` for all sequences; of packed sequences
      `(total, 1 to 3)`.

    Raises TypeError or ValueError for what does not fit, and for coordinates beyond the whole numbers of float32, 2**24, beside a
    query other than float64.

        >>> import torch
        >>> from dilkit import CoordinateTable, Pattern, dilated_attention
        >>> q = k = v = torch.randn(1, 64, 4, 8)
        >>> points = torch.randint(0, 100, (64, 3))
        >>> dilated_attention(q, k, v, Pattern.dense(), bias=CoordinateTable(torch.randn(4, 9, 9, 9), points)).shape
        torch.Size([1, 64, 4, 8])
    """

    table: Tensor
    coordinates: Tensor
    sizes: tuple[int, ...] | None = None
    weights_name: ClassVar[str] = "table"

    def __post_init__(self) -> None:
        if self.sizes is None:
            floating("table", self.table, (2, 3, 4), "(heads, a), (heads, a, b) or (heads, a, b, c)")
            _check_odd(self.table)
            dims = self.table.dim() - 1
        else:
            floating("table", self.table, (2,), "(heads, a + b + c), the sum of sizes,")
            check_type("sizes", self.sizes, (tuple, list), "a sequence of sizes is needed")
            dims = len(self.sizes)
            object.__setattr__(self, "sizes", axis_sizes(self.sizes, dims, self.table.shape[1], "entries of table"))
        x = integers("coordinates", self.coordinates, "the cell of each token")
        if x.dim() not in (2, 3) or x.shape[-1] != dims:
            raise ValueError(f"coordinates has shape {tuple(x.shape)}; (batch, seq, {dims}) or (seq, {dims}) is needed")

    def matrix(self, queries: Tensor, keys: Tensor) -> Tensor:
        x = self.coordinates.long()
        apart = x[..., queries, :].unsqueeze(-2) - x[..., keys, :].unsqueeze(-3)
        if self.sizes is None:
            return self.table.flatten(1)[:, entry_of(tuple(self.table.shape[1:]), apart)].movedim(0, -3)
        entries = (entry_of((size,), apart[..., k : k + 1]) for k, size in enumerate(self.sizes))
        every = [x[:, entry] for x, entry in zip(self.table.split_with_sizes(self.sizes, 1), entries, strict=True)]
        return torch.stack(every).sum(0).movedim(0, -3)

    def lowered(self, dtype: Any) -> LoweredBias:
        check_reach("coordinates", self.coordinates, dtype)
        sizes = self.sizes or tuple(self.table.shape[1:])
        form = BiasForm(dims=len(sizes), sizes=sizes, placed=True, by_axis=self.sizes is not None and len(sizes) > 1)
        return LoweredBias(form, self.table.to(dtype).flatten(1), self._batched["coordinates"].to(dtype))


def _check_odd(table: Tensor) -> None:
    if any(size % 2 == 0 for size in table.shape[1:]):
        raise ValueError(f"table has shape {tuple(table.shape)}; odd sizes, 2 * k - 1 for k tokens, are needed")
