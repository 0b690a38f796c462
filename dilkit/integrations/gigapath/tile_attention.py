"""`attention_map`: how much the class token of a slide looks at each tile."""

from __future__ import annotations

import torch
from torch import Tensor

from dilkit.checks import integer
from dilkit.integrations.gigapath.encoder import SlideEncoder
from dilkit.weights import attention_rows


def attention_map(model: SlideEncoder, tiles: Tensor, coords: Tensor, layer: int = -1) -> Tensor:
    """Return the weights of the class token in a layer's attention, `(batch, heads, n)`: one for each tile, exact.

    `tiles` and `coords` are those of `SlideEncoder.forward`, slides of one length. `layer` counts from 0, or from the last with
    -1. A head's weights sum to 1 less what the class token gives to itself and to padding. In a branch only heads with offset 0
    keep the class token: of the 16 heads of the published models 8 see tiles beyond the first 1,024 tokens, 4 beyond 5,792, 2
    beyond 32,768. `dilkit.attention_mass` says it of all tiles. With `global_pool` the embedding is not the class
    token's, which GigaPath's pretraining did not train.

    Raises IndexError for a layer that is not there, ValueError in training mode with dropout, which would make another map of
    each call, and as `SlideEncoder.forward` does.

        >>> import torch
        >>> from dilkit.integrations.gigapath import SlideEncoder, SlideEncoderConfig, attention_map
        >>> config = SlideEncoderConfig(embed_dim=32, depth=2, num_heads=4, in_chans=16, segment_lengths=(16, 32, 64, 128, 256))
        >>> model = SlideEncoder(config).eval()
        >>> tiles, coords = torch.randn(1, 10, 16), torch.randint(0, 256000, (1, 10, 2))
        >>> attention_map(model, tiles, coords).shape
        torch.Size([1, 4, 10])
    """
    depth = model.config.depth
    if not -depth <= integer("layer", layer) < depth:
        raise IndexError(f"layer={layer} is not there: the model has {depth} layers, 0 to {depth - 1}")
    if model.ranks is not None:
        raise ValueError("model is over ranks (comm=), which attention_map is not; load it without comm")
    if model.config.dropout > 0 and any(module.training for module in model.modules()):
        raise ValueError(
            f"model is in training mode with dropout={model.config.dropout}: maps would differ by chance; call model.eval() first"
        )
    with torch.no_grad():
        x, lengths = model.packed(tiles, coords)
        *before, last = model.layers()[: layer % depth + 1]
        for one in before:
            x = one(x, lengths, model.attention)
        query, key, _ = last.self_attn.heads(last.self_attn_layer_norm(x))
        shape = (len(lengths), lengths[0], *query.shape[1:])
        return attention_rows(query.view(shape), key.view(shape), model.config.pattern, [0])[:, :, 0, 1:]
