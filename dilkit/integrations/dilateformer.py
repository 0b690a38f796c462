"""The attention layer of DilateFormer, by its own name and with its own weights.

from dilkit.integrations.dilateformer import MultiDilatelocalAttention      in place of DilateFormer's class of this name
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from dilkit.attention import dilated_attention
from dilkit.checks import probability, real
from dilkit.nn.checks import even_heads
from dilkit.pattern import Pattern

_pattern: Callable[..., Pattern] = torch.compiler.disable(lru_cache(maxsize=256)(Pattern.dilateformer))
"""`Pattern.dilateformer`, once for each size of a map; torch.compile, which cannot trace it, breaks its graph there."""

__all__ = ["MultiDilatelocalAttention"]


class MultiDilatelocalAttention(nn.Module):
    """Multi-scale dilated attention (DilateFormer, arXiv 2302.01791): a window of another dilation for each group of heads.

        out = proj(softmax_j(scale * q_i . k_j) . v)        over the window around cell i of a map that is padded with zeros

    `q, k, v = qkv(x)`. `x` and `out` are `(batch, height, width, dim)`, with any height and width; it is attention with the
    pattern `Pattern.dilateformer((height, width), num_heads, kernel_size, dilation)`, and no windows are copied out.

    - `dim`, `num_heads`: `head_dim = dim / num_heads`; `num_heads` is a multiple of the number of dilations.
    - `kernel_size`, `dilation`: the side of a window, odd, and the dilations of the groups of heads, in this order.
    - `qkv_bias`, `qk_scale`: whether the projection has a bias; the factor of the scores, by default `head_dim ** -0.5`.
    - `attn_drop`, `proj_drop`: probabilities with which weights and numbers of the result are dropped in training mode.

    State dicts are those of DilateFormer's class: `qkv`, a convolution of kernel size 1, and `proj`. Raises TypeError or
    ValueError for arguments that do not fit.

        >>> import torch
        >>> from dilkit.integrations.dilateformer import MultiDilatelocalAttention
        >>> layer = MultiDilatelocalAttention(48, num_heads=6)
        >>> layer(torch.randn(2, 14, 10, 48)).shape
        torch.Size([2, 14, 10, 48])
        >>> layer.qkv.weight.shape
        torch.Size([144, 48, 1, 1])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        qk_scale: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        kernel_size: int = 3,
        dilation: Sequence[int] = (1, 2, 3),
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, even_heads(dim, num_heads)
        self.kernel_size, self.dilation = kernel_size, tuple(dilation)
        self._pattern((1, 1))  # which checks the sizes
        self.scale = self.head_dim**-0.5 if qk_scale is None else real("qk_scale", qk_scale)
        self.attn_drop = probability("attn_drop", attn_drop)
        self.qkv = nn.Conv2d(dim, 3 * dim, 1, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def _pattern(self, shape: tuple[int, int]) -> Pattern:
        return _pattern(shape, self.num_heads, self.kernel_size, self.dilation)

    def forward(self, x: Tensor) -> Tensor:
        """Return `out` like `x`, `(batch, height, width, dim)`."""
        dim = self.num_heads * self.head_dim
        if x.dim() != 4 or x.shape[-1] != dim:
            raise ValueError(f"x has shape {tuple(x.shape)}; (batch, height, width, dim={dim}) is needed")
        batch, height, width, _ = x.shape
        pattern = self._pattern((height, width))
        projected = self.qkv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)  # channels last in memory, before and after
        query, key, value = projected.reshape(batch, height * width, 3, self.num_heads, self.head_dim).unbind(2)
        dropped = self.attn_drop if self.training else 0.0
        out = dilated_attention(query, key, value, pattern, scale=self.scale, dropout_p=dropped)
        assert isinstance(out, Tensor)
        result: Tensor = self.proj_drop(self.proj(out.reshape(batch, height, width, dim)))
        return result

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, kernel_size={self.kernel_size}, dilation={self.dilation}"
