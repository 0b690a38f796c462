"""NATTEN's functions, and its layers before 0.20 with their learned relative biases and their weights, by NATTEN's names.

from dilkit.integrations.natten import na2d      in place of      from natten import na2d
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
from dilkit.pattern.kinds.neighborhood import Flags, Sizes

LARGEST = 2**20

_pattern: Callable[..., Pattern] = torch.compiler.disable(lru_cache(maxsize=256)(Pattern.natten))
"""`Pattern.natten`, once for each size of a map; torch.compile, which cannot trace it, breaks its graph there."""

__all__ = ["NeighborhoodAttention1D", "NeighborhoodAttention2D", "NeighborhoodAttention3D", "merge_attentions"]
__all__ += ["na1d", "na2d", "na3d", "neighborhood_attention_generic"]

TUNING = {"backward_kv_splits", "backward_use_pt_reduction", "run_persistent_kernel", "kernel_schedule", "torch_compile"}
TUNING |= {"q_tile_shape", "kv_tile_shape", "backward_q_tile_shape", "backward_kv_tile_shape", "attention_kwargs"}
"""NATTEN's arguments that change the speed of its kernels alone."""


def neighborhood_attention_generic(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = 1,
    dilation: Sizes | None = 1,
    is_causal: Flags | None = False,
    scale: float | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    *,
    backend: str | Sequence[str] | None = None,
    return_lse: bool = False,
    **tuning: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute neighborhood attention on a grid of one to three dimensions, which `dilkit.Neighborhood` defines.

    Args:
        query: `(batch, *grid, heads, head_dim)`.
        key, value: like `query`; their heads may be fewer, and `value` may have another head_dim.
        kernel_size, stride, dilation: integers for all dimensions, or one for each.
        is_causal: whether a cell sees no later coordinate, for all dimensions or one for each.
        scale: the factor of the scores; None or 0 for `head_dim ** -0.5`.
        additional_keys, additional_values: `(batch, n, kv_heads, head_dim)`, which all cells see beside their neighborhood.
        backend: a name of a backend of dilkit, or several.
        return_lse: whether to return `lse` too.
        tuning: NATTEN's arguments for tiles and schedules, which have no effect here.

    Returns:
        `out`, `(batch, *grid, heads, head_dim)`; with `return_lse` also `lse`, `(batch, *grid, heads)`.

    Raises TypeError or ValueError for arguments that do not fit, and `NoBackendError` if no backend can compute the call.

        >>> import torch
        >>> from dilkit.integrations.natten import na2d
        >>> x, text = torch.randn(1, 12, 16, 4, 8), torch.randn(1, 5, 4, 8)
        >>> na2d(x, x, x, kernel_size=(4, 7), stride=2, is_causal=(True, False)).shape
        torch.Size([1, 12, 16, 4, 8])
        >>> na2d(x, x, x, kernel_size=5, additional_keys=text, additional_values=text, return_lse=True)[1].shape
        torch.Size([1, 12, 16, 4])
    """
    of_lengths = {name for name in tuning.get("attention_kwargs") or () if "seqlen" in name}
    if unknown := sorted(set(tuning) - TUNING | of_lengths):
        raise TypeError(f"{unknown[0]} is no argument that neighborhood attention takes")
    dims, cells = query.dim() - 3, query.shape[:-2]
    if not 1 <= dims <= 3 or key.shape[:-2] != cells or value.shape[:-2] != cells:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(f"query, key and value have shapes {shapes}; (batch, *grid, heads, head_dim) of one grid are needed")
    if (additional_keys is None) != (additional_values is None):
        raise ValueError("one of additional_keys and additional_values is None; both or neither are needed")
    fields: dict[str, Any] = dict(kernel_size=kernel_size, dilation=dilation, stride=stride, causal=is_causal)
    sizes = {name: tuple(x) if isinstance(x, Sequence) else x for name, x in fields.items() if x is not None}
    pattern = _pattern(tuple(cells[1:]), **sizes)
    options: Any = dict(scale=scale or None, backend=backend, return_lse=True)
    flat = query.flatten(1, dims)
    out, lse = dilated_attention(flat, key.flatten(1, dims), value.flatten(1, dims), pattern, **options)
    lse = lse.transpose(1, 2)
    if additional_keys is not None and additional_values is not None:
        extra, extra_lse = dilated_attention(flat, additional_keys, additional_values, Pattern.dense(), **options)
        out, lse = merge_attentions([out, extra], [lse, extra_lse.transpose(1, 2)])
    out = out.unflatten(1, cells[1:])
    return (out, lse.unflatten(1, cells[1:])) if return_lse else out


def na1d(query: Tensor, key: Tensor, value: Tensor, kernel_size: Sizes, *arguments: Any, **options: Any) -> Any:
    """Call `neighborhood_attention_generic` for `(batch, length, heads, head_dim)`.

    >>> import torch
    >>> from dilkit.integrations.natten import na1d
    >>> query, key, value = torch.randn(3, 2, 50, 4, 8).unbind()
    >>> na1d(query, key, value, kernel_size=3).shape
    torch.Size([2, 50, 4, 8])
    """
    return neighborhood_attention_generic(_of_rank(query, 4), key, value, kernel_size, *arguments, **options)


def na2d(query: Tensor, key: Tensor, value: Tensor, kernel_size: Sizes, *arguments: Any, **options: Any) -> Any:
    """Call `neighborhood_attention_generic` for `(batch, height, width, heads, head_dim)`.

    >>> import torch
    >>> from dilkit.integrations.natten import na2d
    >>> query, key, value = torch.randn(3, 2, 20, 15, 4, 8).unbind()
    >>> na2d(query, key, value, kernel_size=3).shape
    torch.Size([2, 20, 15, 4, 8])
    """
    return neighborhood_attention_generic(_of_rank(query, 5), key, value, kernel_size, *arguments, **options)


def na3d(query: Tensor, key: Tensor, value: Tensor, kernel_size: Sizes, *arguments: Any, **options: Any) -> Any:
    """Call `neighborhood_attention_generic` for `(batch, depth, height, width, heads, head_dim)`.

    >>> import torch
    >>> from dilkit.integrations.natten import na3d
    >>> query, key, value = torch.randn(3, 1, 4, 6, 7, 4, 8).unbind()
    >>> na3d(query, key, value, kernel_size=3).shape
    torch.Size([1, 4, 6, 7, 4, 8])
    """
    return neighborhood_attention_generic(_of_rank(query, 6), key, value, kernel_size, *arguments, **options)


def merge_attentions(
    outputs: Sequence[Tensor], lse_tensors: Sequence[Tensor], torch_compile: bool = True, use_autograd_fix: bool = True
) -> tuple[Tensor, Tensor]:
    """Merge results over several sets of keys into `(out, lse)` over all of them, with gradients of both.

    `outputs` are `(batch, seq, heads, head_dim)`, `lse_tensors` `(batch, seq, heads)`. NATTEN's other arguments have no effect.

    >>> import torch
    >>> from dilkit.integrations.natten import merge_attentions
    >>> out, lse = merge_attentions(torch.randn(2, 1, 6, 4, 8), torch.zeros(2, 1, 6, 4))
    >>> out.shape, lse.shape
    (torch.Size([1, 6, 4, 8]), torch.Size([1, 6, 4]))
    """
    if len(outputs) < 2 or len(outputs) != len(lse_tensors):
        raise ValueError(f"{len(outputs)} outputs and {len(lse_tensors)} lse_tensors; two or more, equally many, are needed")
    lse = torch.stack(tuple(lse_tensors))
    is_empty = lse.isneginf().all(0)  # rows without a key, whose results are 0
    lse = lse.masked_fill(is_empty, 0)
    merged = (torch.stack(tuple(outputs)) * lse.softmax(0)[..., None]).sum(0)
    return merged.to(outputs[0].dtype), lse.logsumexp(0).masked_fill(is_empty, -math.inf)


def _of_rank(query: Tensor, rank: int) -> Tensor:
    if query.dim() != rank:
        raise ValueError(f"query has shape {tuple(query.shape)}; (batch, {rank - 3} sizes of a grid, heads, head_dim) is needed")
    return query


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
        stride: Sizes = 1,
        is_causal: Flags = False,
        rel_pos_bias: bool = True,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, even_heads(dim, num_heads)
        steps = 1 if dilation is None else dilation
        # which checks the sizes, and makes them tuples
        largest = Neighborhood([LARGEST] * self.dims, kernel_size, steps, stride=stride, causal=is_causal)
        self.kernel_size, self.dilation = largest.kernel_size, largest.dilation
        self.stride, self.is_causal = largest.stride, largest.causal
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
        padded = tuple(map(sum, zip(shape, missing, strict=True)))
        pattern = _pattern(padded, self.kernel_size, self.dilation, stride=self.stride, causal=self.is_causal)
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
        shared = f"stride={self.stride}, is_causal={self.is_causal}"
        return f"{sizes}, dilation={self.dilation}, {shared}, rel_pos_bias={self.rpb is not None}"


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
    - `kernel_size`, `dilation`, `stride`: an integer for both dimensions or one for each.
    - `is_causal`: whether a cell sees no later coordinate, for both dimensions or one for each.
    - `rel_pos_bias`: whether there is `rpb`, `(num_heads, 2 * k - 1, 2 * k - 1)`. NATTEN 0.14 calls it `bias`; 0.15 to 0.19 have
      False as the default.
    - `qkv_bias`, `qk_scale`: whether the projection has a bias; the factor of the scores, by default `head_dim ** -0.5`.
    - `attn_drop`, `proj_drop`: probabilities with which weights and numbers of the result are dropped in training mode.

    It loads the state dict of NATTEN's module (`qkv`, `rpb`, `proj`) and that of `attention` of a layer of transformers' Nat and
    Dinat (`self.query`, `self.key`, `self.value`, `self.rpb`, `output.dense`). Raises TypeError or ValueError for arguments that
    do not fit.

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
