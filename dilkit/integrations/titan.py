"""Attention of TITAN's slide encoder: distances of tiles as a bias, in memory that grows with the tiles.

model = transformers.AutoModel.from_pretrained("MahmoodLab/TITAN", trust_remote_code=True)
replace_attention(model)        # then as before: model.encode_slide_from_patch_features(features, coords, patch_size_lv0)
"""

from __future__ import annotations

import inspect
import sys
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilkit.attention import dilated_attention
from dilkit.bias.alibi import CoordinateAlibi, alibi_slopes
from dilkit.checks import boolean
from dilkit.nn.checks import check_plain, even_heads
from dilkit.pattern import Pattern

DENSE = Pattern.dense()

__all__ = ["TitanAttention", "replace_attention"]


class TitanAttention(nn.Module):
    """The attention of a block of TITAN (arXiv 2411.19666): tiles of a slide behind a class token, which has no place.

        out = proj(softmax_j(scale * q_i . k_j + bias(h, i, j)) . v)
        bias(h, i, j) = -slopes[h] * |x_i - x_j|  of two tiles, euclidean;  0 if i or j is the class token

    `q, k, v = qkv(x)`, and `slopes` is `dilkit.alibi_slopes(num_heads)`.

    - `dim`, `num_heads`, `qkv_bias`: `head_dim = dim / num_heads`; the names of the state dict are TITAN's: `qkv`, `proj`.

    It is called as TITAN's own, with coordinates in place of a matrix of all pairs. Raises TypeError or ValueError for arguments
    that do not fit.

        >>> import torch
        >>> from dilkit.integrations.titan import TitanAttention
        >>> attention = TitanAttention(48, num_heads=4)
        >>> x = torch.randn(2, 1 + 20, 48)  # the class token first
        >>> coordinates = torch.randint(0, 10, (2, 20, 2)).float()
        >>> attention(x, coordinates).shape
        torch.Size([2, 21, 48])
    """

    slopes: Tensor

    def __init__(self, dim: int, num_heads: int, *, qkv_bias: bool = True) -> None:
        super().__init__()
        boolean("qkv_bias", qkv_bias)
        even_heads(dim, num_heads)
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        self.proj = nn.Linear(dim, dim)
        self.proj_drop: nn.Module = nn.Identity()
        self.register_buffer("slopes", alibi_slopes(num_heads), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> TitanAttention:
        """Convert the buffer, and fill it when it leaves the meta device (`to_empty`): no state dict holds the slopes."""
        had_none = self.slopes.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if had_none and not self.slopes.is_meta:
            self.slopes.copy_(alibi_slopes(self.num_heads))
        return self

    @classmethod
    def of(cls, module: Any) -> TitanAttention:
        """Make this attention with the parameters of TITAN's own. Raises ValueError for what is computed in another way.

        >>> from types import SimpleNamespace
        >>> from dilkit.integrations.titan import TitanAttention
        >>> TitanAttention.of(SimpleNamespace(pos_encode="abs"))
        Traceback (most recent call last):
        ...
        ValueError: pos_encode='abs' is not supported, only 'alibi': keep the module's own attention
        """
        if module.pos_encode != "alibi":
            raise ValueError(f"pos_encode={module.pos_encode!r} is not supported, only 'alibi': keep the module's own attention")
        if module.attn_drop_prob:
            raise ValueError(f"attn_drop_prob={module.attn_drop_prob} of the attention; 0 is needed, as in the published model")
        check_plain("the attention", module, type(module), "register hooks after replace_attention")
        attention = cls(module.num_heads, module.num_heads)  # whose layers those of the module replace
        for name in ("qkv", "q_norm", "k_norm", "proj", "proj_drop"):
            setattr(attention, name, getattr(module, name))
        place: Tensor = next(module.parameters(), attention.slopes)
        return attention.to(place.device).train(module.training)

    def forward(self, x: Tensor, attn_bias: Tensor, bg_mask: Tensor | None = None) -> Tensor:
        """Return `out` like `x`, `(batch, 1 + tiles, dim)`, the class token first.

        `attn_bias`: the coordinates of the tiles, `(batch or 1, tiles, 2)`, in units of a tile; a dimension of size 1 may come
        after the first. Half precision is refused beyond its whole numbers.

        `bg_mask`: bool, `(batch, tiles)` or on a grid, False = background, whose tokens see and are seen by themselves alone; of
        a batch of one it is ignored, as in TITAN, which takes such tiles out before.
        """
        batch, rows, dim = x.shape
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        q, k = self.q_norm(q), self.k_norm(k)
        coordinates, tiles = self._coordinates(attn_bias, batch, rows - 1), None
        if bg_mask is not None and batch > 1:
            tiles = F.pad(_tiles(bg_mask, batch, rows - 1), (1, 0), value=True)
        out = placed_attention(q, k, v, self.slopes, F.pad(coordinates, (0, 0, 1, 0)), 1, tiles)
        result: Tensor = self.proj_drop(self.proj(out.reshape(batch, rows, dim)))
        return result

    def _coordinates(self, given: Tensor, batch: int, tiles: int) -> Tensor:
        x = given.squeeze(1) if given.dim() == 4 and given.shape[1] == 1 else given
        if x.dim() != 3 or x.shape[0] not in (1, batch) or x.shape[1:] != (tiles, 2):
            raise ValueError(
                f"attn_bias has shape {tuple(given.shape)}; the coordinates of the tiles, ({batch} or 1, {tiles}, 2), are needed "
                "in place of a matrix of all pairs"
            )
        most = {torch.float16: 2**11, torch.bfloat16: 2**8}.get(x.dtype)
        if most and x.numel() and x.amax() >= most:
            raise TypeError(f"attn_bias is {x.dtype}, which rounds coordinates from {most} on; float32 is needed, as of features")
        return x


def replace_attention(model: nn.Module) -> None:
    """Have TITAN compute its attention here: every `attn` of its slide encoder becomes a `TitanAttention` of the same parameters.

    `model` is what `transformers.AutoModel.from_pretrained("MahmoodLab/TITAN", trust_remote_code=True)` gives, or its
    `vision_encoder`. The encoder then makes the coordinates of the tiles in place of a matrix of all pairs; state dict and calls
    stay as they are. Of a model that slide2vec has loaded, slide2vec's own matrix of all pairs is left out. Raises TypeError for
    another model, ValueError for one without that bias.

        >>> import torch
        >>> from dilkit.integrations.titan import replace_attention
        >>> replace_attention(torch.nn.Linear(1, 1))
        Traceback (most recent call last):
        ...
        TypeError: model is a Linear; TITAN's model or its vision_encoder is needed, with blocks and get_alibi
    """
    encoder: Any = getattr(model, "vision_encoder", model)
    if not all(hasattr(encoder, name) for name in ("blocks", "get_alibi", "pos_encode_type")):
        raise TypeError(
            f"model is a {type(model).__name__}; TITAN's model or its vision_encoder is needed, with blocks and get_alibi"
        )
    blocks = [block for block in encoder.blocks.modules() if hasattr(block, "attn")]
    ours = [block.attn if isinstance(block.attn, TitanAttention) else TitanAttention.of(block.attn) for block in blocks]
    for block, attention in zip(blocks, ours, strict=True):
        block.attn = attention
    if getattr(sys.modules.get(type(encoder).__module__), "_slide2vec_titan_patched", False):
        own_method = inspect.getclosurevars(type(encoder).forward_features).nonlocals.get("orig_forward_features")
        if own_method is None:
            raise ValueError("forward_features of the encoder is slide2vec's, of an unknown version; replace_attention before it")
        encoder.forward_features = MethodType(own_method, encoder)
    encoder.get_alibi = _grid_coordinates
    encoder.local_alibi, encoder.global_alibi = _grid_coordinates(6, 6), _grid_coordinates(14, 14)  # kept of two sizes
    encoder.local_alibi_status = encoder.global_alibi_status = False  # not yet of a batch, nor on its device


def placed_attention(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, coordinates: Tensor, neutral: int, tiles: Tensor | None = None
) -> Tensor:
    """Compute dense attention with a penalty by distance, of which the first `neutral` tokens have none.

    `query`, `key`, `value`: `(batch, seq, heads, head_dim)`. `slopes`: `(heads,)`. `coordinates`: `(batch or 1, seq, 2)`.
    `tiles`: bool `(batch, seq)`, False = background, whose tokens see and are seen by themselves alone.
    """
    unplaced = torch.arange(coordinates.shape[1], device=coordinates.device).expand(coordinates.shape[:2]) < neutral
    bias, unseen = CoordinateAlibi(slopes, coordinates, neutral=unplaced), None if tiles is None else ~tiles
    out = dilated_attention(query, key, value, DENSE, key_padding_mask=unseen, bias=bias)
    assert isinstance(out, Tensor)
    return out if tiles is None else torch.where(tiles[:, :, None, None], out, value)


def _grid_coordinates(w: int, h: int, bg_mask: Tensor | None = None) -> Tensor:
    """Return the cells of a grid that `bg_mask` has, row by row, as `TitanAttention` takes them: `(1, 1, tiles, 2)`."""
    device = None if bg_mask is None else bg_mask.device
    cells = torch.cartesian_prod(*(torch.arange(size, dtype=torch.float32, device=device) for size in (w, h)))
    return (cells if bg_mask is None else cells[bg_mask.flatten()])[None, None]


def _tiles(bg_mask: Tensor, batch: int, tiles: int) -> Tensor:
    if bg_mask.dtype != torch.bool or bg_mask.shape[0] != batch or bg_mask[0].numel() != tiles:
        raise ValueError(f"bg_mask is {bg_mask.dtype} {tuple(bg_mask.shape)}; bool ({batch}, {tiles}) is needed, True = a tile")
    return bg_mask.view(batch, -1)
