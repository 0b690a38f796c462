"""The attention layers of NAT and DiNAT, with their learned relative biases, by the names and the weights of NATTEN before 0.20.

from dilkit.integrations.natten import NeighborhoodAttention2D      in place of      from natten import NeighborhoodAttention2D
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilkit.attention import dilated_attention
from dilkit.bias.tables import GridTable
from dilkit.checks import boolean, probability, real
from dilkit.nn.checks import even_heads
from dilkit.pattern import Neighborhood, Pattern

LARGEST = 2**20

_pattern: Callable[..., Pattern] = torch.compiler.disable(lru_cache(maxsize=256)(Pattern.natten))
"""`Pattern.natten`, once for each size of a map; torch.compile, which cannot trace it, breaks its graph there."""

__all__ = ["NeighborhoodAttention1D", "NeighborhoodAttention2D", "NeighborhoodAttention3D"]


class NeighborhoodAttention(nn.Module):
    """The base of the layers of all dimensions; `dims` is the number of dimensions of a map."""

    dims: ClassVar[int]
    rpb: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        num_heads: int,
        kernel_size: int | Sequence[int],
        dilation: int | Sequence[int] | None = 1,
        *,
        rel_pos_bias: bool = True,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, even_heads(dim, num_heads)
        steps = 1 if dilation is None else dilation
        largest = Neighborhood([LARGEST] * self.dims, kernel_size, steps)  # which checks the sizes, and makes them tuples
        self.kernel_size, self.dilation = largest.kernel_size, largest.dilation
        self.scale = self.head_dim**-0.5 if qk_scale is None else real("qk_scale", qk_scale)
        self.attn_drop = probability("attn_drop", attn_drop)
        boolean("qkv_bias", qkv_bias)
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        boolean("rel_pos_bias", rel_pos_bias)
        table = torch.empty(num_heads, *(2 * size - 1 for size in self.kernel_size)) if rel_pos_bias else None
        self._offset_dims = [*range(1, self.dims + 1)]
        self.register_parameter("rpb", None if table is None else nn.Parameter(nn.init.trunc_normal_(table, std=0.02)))
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        """Return `out` like `x`, `(batch, *map, dim)`."""
        dim = self.num_heads * self.head_dim
        if x.dim() != self.dims + 2 or x.shape[-1] != dim:
            raise ValueError(f"x has shape {tuple(x.shape)}; (batch, {self.dims} sizes of a map, dim={dim}) is needed")
        shape = tuple(x.shape[1:-1])
        missing = [max(0, k * d - size) for k, d, size in zip(self.kernel_size, self.dilation, shape, strict=True)]
        pattern = _pattern(tuple(map(sum, zip(shape, missing, strict=True))), self.kernel_size, self.dilation)
        if any(missing):  # as NAT does it: zeros after the map, which are then projected as all others are
            x = F.pad(x, (0, 0, *(side for count in reversed(missing) for side in (0, count))))
        out: Tensor = self.proj_drop(self.proj(self._attend(x, pattern)))
        return out[(slice(None), *map(slice, shape))] if any(missing) else out

    def _attend(self, x: Tensor, pattern: Pattern) -> Tensor:
        batch, *shape, dim = x.shape
        query, key, value = self.qkv(x).reshape(batch, math.prod(shape), 3, self.num_heads, self.head_dim).unbind(2)
        bias = None
        if self.rpb is not None:  # which counts the offsets of keys from queries
            bias = GridTable(self.rpb.flip(self._offset_dims), tuple(shape), self.dilation)
        dropped = self.attn_drop if self.training else 0.0
        out = dilated_attention(query, key, value, pattern, scale=self.scale, bias=bias, dropout_p=dropped)
        assert isinstance(out, Tensor)
        return out.reshape(batch, *shape, dim)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Rename transformers' weights in `state_dict`, the copy that `load_state_dict` makes, before they are loaded."""
        for kind in ("weight", "bias"):
            apart = [f"{prefix}self.{name}.{kind}" for name in ("query", "key", "value")]
            if all(name in state_dict for name in apart):
                state_dict[f"{prefix}qkv.{kind}"] = torch.cat([state_dict.pop(name) for name in apart])
        renamed = {"self.rpb": "rpb", "output.dense.weight": "proj.weight", "output.dense.bias": "proj.bias"}
        for there, here in renamed.items():
            if prefix + there in state_dict:
                state_dict[prefix + here] = state_dict.pop(prefix + there)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        sizes = f"num_heads={self.num_heads}, head_dim={self.head_dim}, kernel_size={self.kernel_size}"
        return f"{sizes}, dilation={self.dilation}, rel_pos_bias={self.rpb is not None}"


class NeighborhoodAttention1D(NeighborhoodAttention):
    """`NeighborhoodAttention2D` of a line, `(batch, length, dim)`, with `rpb` `(num_heads, 2 * k - 1)`.

    >>> import torch
    >>> from dilkit.integrations.natten import NeighborhoodAttention1D
    >>> NeighborhoodAttention1D(32, num_heads=4, kernel_size=7, dilation=2)(torch.randn(2, 50, 32)).shape
    torch.Size([2, 50, 32])
    """

    dims = 1


class NeighborhoodAttention2D(NeighborhoodAttention):
    """The attention of NAT (arXiv 2204.07143) and DiNAT (2209.15001): each cell of a map sees the cells nearest to it.

        out = proj(softmax_j(scale * q_i . k_j + rpb[h, (y_j - y_i) / d + k - 1, (x_j - x_i) / d + k - 1]) . v)

    over the neighborhood of cell i, `dilkit.Neighborhood`; `q, k, v = qkv(x)`, k is the kernel size, d the dilation. `x` and
    `out` are `(batch, height, width, dim)`, with any height and width. A map that is smaller than a window, which spans
    `kernel_size * dilation`, is padded with zeros after its last cells, which are projected and seen as all others, and `out` is
    cut to the map, as in NAT. The weights of the pairs are never held.

    - `dim`, `num_heads`: `head_dim = dim / num_heads`.
    - `kernel_size`, `dilation`: an integer for both dimensions or one for each; kernel sizes are odd.
    - `rel_pos_bias`: whether there is `rpb`, `(num_heads, 2 * k - 1, 2 * k - 1)`. NATTEN 0.14 calls it `bias`; 0.15 to 0.19 have
      False as the default.
    - `qkv_bias`, `qk_scale`: whether the projection has a bias; the factor of the scores, by default `head_dim ** -0.5`.
    - `attn_drop`, `proj_drop`: probabilities with which weights and numbers of the result are dropped in training mode.

    It loads the state dict of NATTEN's module (`qkv`, `rpb`, `proj`) and that of `attention` of a layer of transformers' Nat and
    Dinat (`self.query`, `self.key`, `self.value`, `self.rpb`, `output.dense`). NATTEN's causal option, which moves windows, it
    does not have. Raises TypeError or ValueError for arguments that do not fit.

        >>> import torch
        >>> from dilkit.integrations.natten import NeighborhoodAttention2D
        >>> layer = NeighborhoodAttention2D(32, num_heads=4, kernel_size=7, dilation=2)
        >>> layer(torch.randn(2, 20, 15, 32)).shape
        torch.Size([2, 20, 15, 32])
        >>> layer.rpb.shape
        torch.Size([4, 13, 13])
    """

    dims = 2


class NeighborhoodAttention3D(NeighborhoodAttention):
    """`NeighborhoodAttention2D` of a volume, `(batch, depth, height, width, dim)`, with `rpb` of three dimensions.

    >>> import torch
    >>> from dilkit.integrations.natten import NeighborhoodAttention3D
    >>> NeighborhoodAttention3D(32, num_heads=4, kernel_size=(3, 5, 5))(torch.randn(1, 4, 6, 7, 32)).shape
    torch.Size([1, 4, 6, 7, 32])
    """

    dims = 3
