"""The attention of Swin's blocks on whole maps, with the weights of timm's and MONAI's `WindowAttention`.

map (batch, *sizes, dim) --order--> windows as packed sequences --attention with a bias table--> map
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilkit.bias.tables import CoordinateTable
from dilkit.checks import boolean, integer, probability
from dilkit.nn.checks import even_heads
from dilkit.packed.attention import dilated_attention_varlen
from dilkit.pattern import Pattern

DENSE = Pattern.dense()

__all__ = ["ShiftedWindowAttention"]


class ShiftedWindowAttention(nn.Module):
    """The attention of a Swin block (arXiv 2103.14030), of a map or a volume: windows, shifted or not, with a bias table.

        out = proj(softmax_j(scale * q_i . k_j + table[h, x_i - x_j]) . v)        over the window of cell i

    `q, k, v = qkv(x)`. Windows are cut where the shifted map was rolled, without a mask: each part is a packed sequence. A map
    that windows do not divide is padded with zeros after its last cells, as in Swin. A side that is no longer than its window is
    one window, not shifted.

    - `dim`, `num_heads`: `head_dim = dim / num_heads`.
    - `window_size`, `shift_size`: an integer for each of two dimensions, or one for each dimension, up to three. Blocks alternate
      between a shift of 0 and of half a window.
    - `qkv_bias`, `attn_drop`, `proj_drop`: as in Swin.

    State dicts are those of `attn` of a block of timm or MONAI: `relative_position_bias_table`, `qkv`, `proj`; an index that they
    hold is left out. Raises TypeError or ValueError for arguments that do not fit.

        >>> import torch
        >>> from dilkit.integrations.swin import ShiftedWindowAttention
        >>> layer = ShiftedWindowAttention(32, num_heads=4, window_size=7, shift_size=3)
        >>> layer(torch.randn(2, 28, 30, 32)).shape
        torch.Size([2, 28, 30, 32])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window_size: int | Sequence[int],
        shift_size: int | Sequence[int] = 0,
        *,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, even_heads(dim, num_heads)
        window = tuple(window_size) if isinstance(window_size, Sequence) else (window_size, window_size)
        shift = tuple(shift_size) if isinstance(shift_size, Sequence) else (shift_size,) * len(window)
        if not 1 <= len(window) <= 3 or len(shift) != len(window):
            raise ValueError(f"window_size={window}, shift_size={shift}; one size for each of 1 to 3 dimensions is needed")
        for side, step in zip(window, shift, strict=True):
            integer("window_size", side, at_least=1)
            if integer("shift_size", step, at_least=0) >= side:
                raise ValueError(f"shift_size={shift} must be less than window_size={window}")
        self.window_size, self.shift_size = window, shift
        self.attn_drop = probability("attn_drop", attn_drop)
        boolean("qkv_bias", qkv_bias)
        table = torch.empty(math.prod(2 * side - 1 for side in window), num_heads)
        self.relative_position_bias_table = nn.Parameter(nn.init.trunc_normal_(table, std=0.02))
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        """Return `out` like `x`, `(batch, *map, dim)`, which a block has normalised, and to which it adds its input."""
        dims, dim = len(self.window_size), self.num_heads * self.head_dim
        if x.dim() != dims + 2 or x.shape[-1] != dim:
            raise ValueError(f"x has shape {tuple(x.shape)}; (batch, {dims} sizes of a map, dim={dim}) is needed")
        batch, *sizes = x.shape[:-1]
        missing = [-size % min(side, size) if size else 0 for size, side in zip(sizes, self.window_size, strict=True)]
        if any(missing):
            x = F.pad(x, (0, 0, *(side for count in reversed(missing) for side in (0, count))))
        padded = tuple(x.shape[1:-1])
        one_map, lengths, cells = _cut_windows(padded, self.window_size, self.shift_size, x.device)
        order = (torch.arange(batch, device=x.device)[:, None] * len(one_map) + one_map).flatten()
        starts = F.pad(lengths.repeat(batch).cumsum(0, dtype=torch.int32), (1, 0))
        query, key, value = self.qkv(x).view(-1, 3, self.num_heads, self.head_dim)[order].unbind(1)
        table = self.relative_position_bias_table.T.reshape(-1, *(2 * side - 1 for side in self.window_size))
        options: Any = dict(dropout_p=self.attn_drop if self.training else 0.0)
        options |= dict(max_seqlen=math.prod(self.window_size), bias=CoordinateTable(table, cells.repeat(batch, 1)))
        out = dilated_attention_varlen(query, key, value, DENSE, starts, **options)
        assert isinstance(out, Tensor)
        on_map = torch.empty_like(out).index_copy(0, order, out)
        result: Tensor = self.proj_drop(self.proj(on_map.view(batch, *padded, dim)))
        return result[(slice(None), *map(slice, sizes))]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Leave out the index of entries that MONAI and older versions of timm store."""
        state_dict.pop(f"{prefix}relative_position_index", None)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        sizes = f"num_heads={self.num_heads}, head_dim={self.head_dim}"
        return f"{sizes}, window_size={self.window_size}, shift_size={self.shift_size}"


@lru_cache(maxsize=16)
def _windows_of_map(
    padded: tuple[int, ...], window: tuple[int, ...], shift: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut a map into windows: its rows in their order, int64, the length of each, and cells `(rows, dims)`, int16.

    A cell is counted in its window. In a smaller window it is that of the same number in a whole one, as MONAI's entries are.
    """
    numbers, cells = (torch.zeros(padded, dtype=torch.int64, device=device) for _ in range(2))
    for axis, (size, side, step) in enumerate(zip(padded, window, shift, strict=True)):
        one, moved = (side, step) if size > side else (size, 0)
        rolled = (torch.arange(size, device=device) - moved) % size
        along = [1] * axis + [size] + [1] * (len(padded) - axis - 1)
        part = 2 * (rolled // one) + (rolled >= size - moved)  # what was rolled around is a part of its own
        numbers = numbers * (2 * size) + part.view(along)
        cells = cells * one + (rolled % one).view(along)
    numbers, cells = numbers.flatten(), cells.flatten()
    order = (numbers * (math.prod(window) + 1) + cells).argsort()
    places = torch.stack(torch.unravel_index(cells[order], window), -1)
    return order, torch.unique_consecutive(numbers[order], return_counts=True)[1], places.to(torch.int16)


def _kept_windows(*sizes_and_device: Any) -> tuple[Tensor, Tensor, Tensor]:
    is_traced = type(torch.empty(0, device=sizes_and_device[-1])) is not Tensor  # by torch.export: other calls must not get these
    cut: Callable[..., tuple[Tensor, Tensor, Tensor]] = _windows_of_map.__wrapped__ if is_traced else _windows_of_map
    return cut(*sizes_and_device)


_cut_windows: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.compiler.disable(_kept_windows)
"""`_windows_of_map`, at which torch.compile, which cannot trace it, breaks its graph."""
