"""The arguments of the kernels in numba.cuda: named tuples of tensors and numbers. Nothing here needs numba."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class ProblemSizes(NamedTuple):
    """The sizes of a problem."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int


class Options(NamedTuple):
    """Options of a problem; `causal` and `once` are 0 or 1."""

    causal: int
    once: int
    scale: float


class LaunchGroup(NamedTuple):
    """One launch's part of a schedule: int32 `(tiles, 4)` and `(branches, 4)`, as `tiles.schedule` defines them.
    `first` is 0 where an earlier group has left results, which are continued, and else 1."""

    tiles: Tensor
    branches: Tensor
    first: int


class TensorView(NamedTuple):
    """A tensor `(batch, seq, heads, head_dim)`: its numbers from the first to the last in memory, and the strides of all axes
    but the last, whose stride is 1."""

    numbers: Tensor
    batch: int
    row: int
    head: int


class MaskView(NamedTuple):
    """A mask `(batch, seq)` in bytes, and its strides; nothing is read unless `present`."""

    numbers: Tensor
    batch: int
    row: int
    present: int


def view(x: Tensor) -> TensorView:
    """`x` as kernels get it, in place."""
    batch, row, head = x.stride()[:3]
    return TensorView(_from_first_to_last(x), batch, row, head)


def mask_view(mask: Tensor | None, anything: Tensor) -> MaskView:
    """The mask as kernels get it, in place; where there is none, the memory of `anything` stands in for it."""
    import torch

    if mask is None:
        return MaskView(anything.view(torch.uint8).view(-1), 0, 0, 0)
    batch, row = mask.stride()
    return MaskView(_from_first_to_last(mask.view(torch.uint8)), batch, row, 1)


def _from_first_to_last(x: Tensor) -> Tensor:
    span = 1 + sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True))
    return x.detach().as_strided((span,), (1,))


@dataclass(frozen=True)
class Tiling:
    """Sizes of a kernel: score tiles of `rows` by `columns`, computed by blocks of `down x across` threads.

    `head_dim` is padded: a multiple of `4 * across`. `down` divides `rows` and `columns`; `across` and 4 divide `columns`. There
    are at least as many threads as rows, and a multiple of `columns`.
    """

    head_dim: int
    rows: int
    columns: int
    down: int
    across: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.down * self.across

    @property
    def row_tile(self) -> tuple[int, int, int]:
        """Shape in shared memory of the rows of a tensor, in quads of numbers: one quad more than are used."""
        return self.rows, self.head_dim // 4 + 1, 4

    @property
    def column_tile(self) -> tuple[int, int, int]:
        """Shape of a tile of columns in shared memory, as `row_tile`."""
        return self.columns, self.head_dim // 4 + 1, 4

    @property
    def weight_tile(self) -> tuple[int, int, int]:
        """Shape in shared memory of the weights, in quads of columns: one quad more than are used."""
        return self.rows, self.columns // 4 + 1, 4

    @property
    def own_rows(self) -> int:
        """Rows of the score tile that one thread computes."""
        return self.rows // self.down

    @property
    def own_scores(self) -> tuple[int, int]:
        """Rows and columns of the score tile that one thread computes."""
        return self.own_rows, self.columns // self.across

    @property
    def own_sums(self) -> tuple[int, int]:
        """Rows and columns of an accumulator, `rows x head_dim`, that one thread holds."""
        return self.own_rows, self.head_dim // self.across
