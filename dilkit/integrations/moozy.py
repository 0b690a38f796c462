"""Attention of MOOZY's slide encoder: distances of tiles as a bias, in memory that grows with the tiles.

encoder = moozy's MOOZYSlideEncoder, with its weights
replace_attention(encoder)      # then as before: encoder(x, coords_xy=..., patch_sizes=...)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dilkit.integrations.gigapath.layers import CHUNK
from dilkit.integrations.titan import placed_attention
from dilkit.nn.checks import check_plain

__all__ = ["replace_attention"]

PARTS = "q_proj", "k_proj", "v_proj", "out_proj", "q_norm", "k_norm", "pos_bias", "ls_attn", "ls_mlp", "fc1", "fc2"


class MoozyBlock(nn.Module):
    """A block of MOOZY's slide encoder, with 2-D ALiBi between tiles; the class token and the registers have no place.

        x = x + ls_attn(out_proj(softmax_j(scale * q_i . k_j + slopes[h] * |x_i - x_j| / patch_size) . v))
        x = x + ls_mlp(fc2(gelu(fc1(norm2(x)))))

    `block`: one of MOOZY's own, whose submodules this one takes over, with the names of its state dict. Slopes that are learned
    get their gradient. Raises ValueError for dropout of attention weights, and for hooks of the block, which would be lost.
    """

    def __init__(self, block: Any) -> None:
        super().__init__()
        if block.attn_drop_prob:
            raise ValueError(f"attn_drop_prob={block.attn_drop_prob} of the block; 0 is needed, MOOZY's default")
        check_plain("the block", block, type(block), "register hooks after replace_attention")
        self.head_dim: int = block.head_dim
        for name, part in block._modules.items():
            setattr(self, name, part)
        self.train(block.training)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        attn_mask: Tensor | None = None,
        patch_sizes: Tensor | None = None,
        num_registers: int = 0,
    ) -> Tensor:
        """Return `x`, `(batch, 1 + registers + tiles, dim)`, the class token first, after this block.

        `positions`: `(batch, seq, 2)`, in pixels. `patch_sizes`: `(batch,)`, the pixels of a tile. `attn_mask`: MOOZY's own,
        `(batch, 1, seq, seq)`: 0 between tiles, lowest for background.
        """
        if patch_sizes is None:
            raise ValueError("patch_sizes is None; the pixels of a tile, (batch,), are needed to scale distances")
        part: Any = self
        positions = positions if positions.is_floating_point() else positions.float()  # for pixels that are no integers
        pixels = patch_sizes.to(positions).clamp(min=1e-6).view(-1, 1, 1)
        # Distances are divided by the slopes' share, for coordinates that were divided would be rounded.
        coordinates, slopes = positions * (pixels[:1] / pixels), -part.pos_bias.slopes.flatten() / pixels.flatten()[:1]
        tiles = None if attn_mask is None else attn_mask[:, 0, 0] == 0
        out = placed_attention(*self._heads(part.norm1(x)), slopes, coordinates, 1 + num_registers, tiles)
        x = x + part.drop_path(part.ls_attn(part.out_proj(out.flatten(2))))
        del out
        if torch.is_grad_enabled():
            return x + part.drop_path(self._hidden(x))  # type: ignore[no-any-return]
        hidden = torch.empty_like(x)
        for rows, chunk in zip(*(torch.split(one, CHUNK, dim=1) for one in (hidden, x)), strict=True):
            rows.copy_(self._hidden(chunk))
        return x + part.drop_path(hidden)  # type: ignore[no-any-return]

    def _heads(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        part: Any = self
        query, key, value = (
            project(normed).unflatten(-1, (-1, self.head_dim)) for project in (part.q_proj, part.k_proj, part.v_proj)
        )
        return part.q_norm(query), part.k_norm(key), value

    def _hidden(self, x: Tensor) -> Tensor:
        part: Any = self
        hidden = part.mlp_dropout(part.activation(part.fc1(part.norm2(x))))
        return part.ls_mlp(part.mlp_dropout(part.fc2(hidden)))  # type: ignore[no-any-return]


def replace_attention(model: nn.Module) -> None:
    """Have MOOZY compute its attention here: every block of its slide encoder becomes a `MoozyBlock` of the same parameters.

    `model`: MOOZY's slide encoder, or a model that holds it. State dict and calls stay as they are. Raises TypeError for a model
    without such blocks.

        >>> import torch
        >>> from dilkit.integrations.moozy import replace_attention
        >>> replace_attention(torch.nn.Linear(1, 1))
        Traceback (most recent call last):
        ...
        TypeError: model is a Linear without a block of MOOZY's slide encoder
    """
    places = [
        (module, name, block)
        for module in model.modules()
        for name, block in module.named_children()
        if all(hasattr(block, part) for part in PARTS)
    ]
    if not places:
        raise TypeError(f"model is a {type(model).__name__} without a block of MOOZY's slide encoder")
    blocks = [block if isinstance(block, MoozyBlock) else MoozyBlock(block) for _, _, block in places]
    for (module, name, _), block in zip(places, blocks, strict=True):
        setattr(module, name, block)
