"""GigaPath's slide encoder in plain torch with the oracle's attention."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from dilkit import Pattern
from dilkit.integrations.gigapath import SlideEncoder, SlideEncoderConfig
from dilkit.oracle import oracle_attention

SMALL = dict(embed_dim=48, depth=2, num_heads=4, in_chans=10, ngrids=20, dilation_rates=(1, 2, 4))
LENGTHS = (8, 16, 32)
ARCH, FLASH_ARCH = "gigapath_slide_enc12l768d", "gigapath_slide_enc12l384d"
NARROW = {
    ARCH: SlideEncoderConfig(embed_dim=48, num_heads=4, in_chans=1536),
    FLASH_ARCH: SlideEncoderConfig(embed_dim=32, num_heads=4, in_chans=384),
}
"""The architectures as tests have them: of 12 layers and as many channels as published, but narrow."""


def small(**changes) -> SlideEncoder:
    torch.manual_seed(0)
    model = SlideEncoder(SlideEncoderConfig(**dict(SMALL, segment_lengths=LENGTHS) | changes), dtype=torch.float64).eval()
    for weight in model.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    return model


def slide(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, n, SMALL["in_chans"], dtype=torch.float64, generator=generator), places(n, seed)


def places(n: int, seed: int = 0) -> Tensor:
    generator, side = torch.Generator().manual_seed(seed), SMALL["ngrids"]
    cells = torch.randperm(side**2, generator=generator)[:n]
    within = torch.randint(0, 256, (n, 2), generator=generator)
    return (256 * torch.stack((cells // side, cells % side), dim=1) + within)[None]


def tiles_and_coords(channels: int, step: int = 256) -> tuple[Tensor, Tensor]:
    """Tiles `(1, 40, channels)` of a slide, and their pixels, `step` apart."""
    places = step * torch.cartesian_prod(torch.arange(8), torch.arange(5))
    return torch.randn(1, 40, channels, generator=torch.Generator().manual_seed(0)), places[None]


def manifest(dim: int, depth: int, in_chans: int = 1536) -> dict[str, tuple[int, ...]]:
    """Return names and shapes in a published checkpoint."""
    parts = {f"self_attn.{name}_proj": (dim, dim) for name in ("k", "v", "q", "out")}
    parts |= dict.fromkeys(("self_attn.inner_attn_ln", "self_attn_layer_norm", "final_layer_norm"), (dim,))
    parts |= {"ffn.fc1": (4 * dim, dim), "ffn.fc2": (dim, 4 * dim), "ffn.ffn_layernorm": (4 * dim,)}
    parts = {f"encoder.layers.{layer}.{name}": shape for layer in range(depth) for name, shape in parts.items()}
    parts |= {"patch_embed.proj": (dim, in_chans), "encoder.layer_norm": (dim,), "norm": (dim,)}
    shapes = {f"{name}.weight": shape for name, shape in parts.items()}
    return {"cls_token": (1, 1, dim)} | shapes | {f"{name}.bias": shape[:1] for name, shape in parts.items()}


def embeddings(weights: Mapping[str, Tensor], config: SlideEncoderConfig, tiles: Tensor, coords: Tensor) -> list[Tensor]:
    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x, name, eps=1e-5):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps)

    def pooled(x):
        return norm(x[1:].mean(dim=0) if config.global_pool else x[0], "norm", 1e-6)

    places = torch.stack([position(*place, config) for place in (coords // config.tile_size).tolist()])
    x = torch.cat((weights["cls_token"][0], linear(tiles, "patch_embed.proj") + places))
    found = [pooled(x)]
    for layer in (f"encoder.layers.{i}" for i in range(config.depth)):
        y = norm(x, f"{layer}.self_attn_layer_norm")
        q, k, v = (linear(y, f"{layer}.self_attn.{name}_proj") for name in "qkv")
        y = norm(attention(q, k, v, config), f"{layer}.self_attn.inner_attn_ln")
        x = x + linear(y, f"{layer}.self_attn.out_proj")
        y = F.gelu(linear(norm(x, f"{layer}.final_layer_norm"), f"{layer}.ffn.fc1"))
        x = x + linear(norm(y, f"{layer}.ffn.ffn_layernorm"), f"{layer}.ffn.fc2")
        found.append(pooled(x))
    return [*found, pooled(norm(x, "encoder.layer_norm"))]


def position(x: int, y: int, config: SlideEncoderConfig) -> Tensor:
    quarter = config.embed_dim // 4
    rates = [1 / 10000 ** (i / quarter) for i in range(quarter)]
    numbers = [wave(place * rate) for place in (y, x) for wave in (math.sin, math.cos) for rate in rates]
    return torch.tensor(numbers, dtype=torch.float64).float().double()


def attention(q: Tensor, k: Tensor, v: Tensor, config: SlideEncoderConfig) -> Tensor:
    pattern = Pattern(config.segment_lengths, config.dilation_rates, offset="block", tail=config.tail)
    out, _ = oracle_attention(*(x.unflatten(1, (config.num_heads, -1))[None] for x in (q, k, v)), pattern)
    return out[0].flatten(1)
