"""What a kernel in numba.cuda is told: named tuples of tensors and numbers. Facts that need no numba."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Sizes = namedtuple("Sizes", "batch seq heads kv_heads head_dim")
Options = namedtuple("Options", "causal once scale")

Group = namedtuple("Group", "tiles branches step first")
"""One launch's part: int32 `(tiles, 4)` and `(branches, 4)`, see `tiles.schedule`; `first`: no earlier group has left results."""

View = namedtuple("View", "numbers batch row head")
"""A tensor `(batch, seq, heads, head_dim)`: all numbers from its first on, and strides; the last one is 1."""

Mask = namedtuple("Mask", "numbers batch row given")
"""A mask `(batch, seq)` in bytes; nothing is read where none is `given`."""


def view(x: Tensor) -> Any:
    """`x` as kernels take it, in place."""
    return View(_from_first_to_last(x), *x.stride()[:3])


def mask_of(mask: Tensor | None, anything: Tensor) -> Any:
    """The mask as kernels take it, in place; `anything` stands in for one."""
    import torch

    if mask is None:
        return Mask(anything.view(torch.uint8).view(-1), 0, 0, 0)
    return Mask(_from_first_to_last(mask.view(torch.uint8)), *mask.stride(), 1)


def _from_first_to_last(x: Tensor) -> Tensor:
    span = 1 + sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True))
    return x.detach().as_strided((span,), (1,))


@dataclass(frozen=True)
class Tiling:
    """How a kernel cuts its work: tiles of `rows`, which meet `keys` at a time, in blocks of `down x across` threads.

    `head_dim` is padded: a multiple of `4 * across`. `down` divides `rows` and `keys`; `across` and 4 divide `keys`. There are at
    least as many threads as rows, and a multiple of `keys`.
    """

    head_dim: int
    rows: int
    keys: int
    down: int
    across: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.down * self.across

    @property
    def quads(self) -> tuple[int, int]:
        """Quads of a row in shared memory, of `head_dim` numbers and of `keys` numbers: one more than are used."""
        return self.head_dim // 4 + 1, self.keys // 4 + 1

    @property
    def shares(self) -> tuple[int, int, int]:
        """Rows, keys and columns that a thread has."""
        return self.rows // self.down, self.keys // self.across, self.head_dim // self.across
