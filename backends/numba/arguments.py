"""Arguments of the kernels in numba.cuda: named tuples of tensors and numbers, their types, and the sizes of tiles.

Importing this module needs no numba.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class ProblemNumbers(NamedTuple):
    """Sizes and options of a problem; `causal`, `masked` and `once` (overlapping branches count once) are 0 or 1."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: int
    once: int
    masked: int
    scale: float


class LaunchGroup(NamedTuple):
    """One launch's part of a schedule: int32 `(tiles, 4)` and `(branches, 4)`, as `tiles.schedule` defines them.

    `first` is 0 where an earlier group has left results, which are continued, and else 1.
    """

    tiles: Tensor
    branches: Tensor
    first: int


class TensorView(NamedTuple):
    """A tensor `(batch, seq, heads, head_dim)` whose last stride is 1: its numbers, first to last in memory, and strides."""

    numbers: Tensor
    batch: int
    row: int
    head: int


def view(x: Tensor) -> TensorView:
    """Return a view of the memory of `x` for kernels."""
    batch, row, head = x.stride()[:3]
    span = 1 + sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True))
    return TensorView(x.detach().as_strided((span,), (1,)), batch, row, head)


RESULTS = {
    "forward": ("out", "lse"),
    "dots": ("dout", "out", "delta"),
    "dquery": ("dout", "lse", "delta", "dquery"),
    "dkeyvalue": ("dout", "lse", "delta", "dkey", "dvalue"),
}
"""Names of the last tensors among a kernel's arguments, by role."""

BY_ROW = {"lse", "delta"}
"""Tensors `(batch, heads, seq)`, which are passed as they are; the others are passed as views."""


def signature(role: str, dtype: str) -> Any:
    """Return numba's types of a kernel's arguments."""
    from numba import types

    problem = types.NamedTuple((*[types.int32] * 8, types.float32), ProblemNumbers)
    table, by_row = types.Array(types.int32, 2, "C"), types.Array(types.float32, 3, "C")
    group = types.NamedTuple((table, table, types.int32), LaunchGroup)
    dtypes = types.uint8, types.float16 if dtype == "float16" else types.float32
    strides = [types.int64] * 3
    mask, view = (types.NamedTuple((types.Array(x, 1, "C"), *strides), TensorView) for x in dtypes)
    inputs = () if role == "dots" else (group, mask, view, view, view)  # views: query, key, value
    return types.void(problem, *inputs, *(by_row if name in BY_ROW else view for name in RESULTS[role]))


@dataclass(frozen=True)
class Tiling:
    """Sizes of a kernel: score tiles of `rows` by `columns`, computed by blocks of `down x across` threads.

    `head_dim` is padded: a multiple of `4 * across`. `down` divides `rows` and `columns`; `across` and 4 divide `columns`.
    `threads` is at least `rows`, and a multiple of `columns`.
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
    def thread_scores(self) -> tuple[int, int]:
        """Rows and columns of the score tile that one thread computes."""
        return self.rows // self.down, self.columns // self.across

    @property
    def thread_sums(self) -> tuple[int, int]:
        """Rows and columns of an accumulator, `rows x head_dim`, that one thread holds."""
        return self.rows // self.down, self.head_dim // self.across
