"""`SlideEncoder`: tile features and coordinates in, embeddings of slides out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dilkit.checks import boolean
from dilkit.integrations.gigapath.config import SlideEncoderConfig
from dilkit.integrations.gigapath.layers import EPS, EncoderLayer
from dilkit.integrations.gigapath.over_ranks import Ranks
from dilkit.integrations.gigapath.positions import GridPositions
from dilkit.integrations.gigapath.spacing import check_spacing
from dilkit.integrations.ranks import digest
from dilkit.nn import DilatedAttention
from dilkit.nn.checks import is_plain


class SlideEncoder(nn.Module):
    """GigaPath's slide encoder, a LongNet over the tiles of a slide, on whichever backend suits the device.

    `config` says its sizes; `load_slide_encoder` makes one of a published architecture. The names and shapes of its parameters
    are those of the published checkpoints.

    - `tile_size`, `global_pool`: those of `config`. They can be set later and hold from the next call on; `config` follows.
    - `activation_checkpointing`: whether the backward pass computes each layer anew instead of holding its activations.
    - `backend`: that of `dilkit.dilated_attention`.
    - `comm`: a `dilkit.comm.Comm`. Each rank is given the whole slide, computes its share of the rows, and returns the embedding,
      one slide at a time; ranks that differ in coordinates, class token, configuration or mode are refused. If each computes
      the same loss from it, the gradients of parameters are those of the rank's own rows: `dilkit.comm.sum_over_ranks` adds
      them up to those of one process.

        >>> import torch
        >>> from dilkit.integrations.gigapath import SlideEncoder, SlideEncoderConfig
        >>> config = SlideEncoderConfig(embed_dim=32, depth=2, num_heads=4, in_chans=16, segment_lengths=(4, 8, 16, 32, 64))
        >>> model = SlideEncoder(config).eval()
        >>> tiles, coords = torch.randn(1, 10, 16), torch.randint(0, 256000, (1, 10, 2))  # features, and pixels x and y
        >>> [embedding] = model(tiles, coords)
        >>> embedding.shape
        torch.Size([1, 32])
    """

    def __init__(
        self,
        config: SlideEncoderConfig,
        *,
        activation_checkpointing: bool = False,
        backend: str | Sequence[str] | None = None,
        comm: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, SlideEncoderConfig):
            raise TypeError(f"config={config!r} is a {type(config).__name__}; a SlideEncoderConfig is needed")
        boolean("activation_checkpointing", activation_checkpointing)
        self._config, self.activation_checkpointing = config, activation_checkpointing
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        dim = config.embed_dim
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim, **factory))
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(config.in_chans, dim, **factory)})
        self.positions = GridPositions(dim, config.ngrids, device)
        self.positions.to(dtype)
        self.ranks = None if comm is None else Ranks(comm, config.pattern)
        self.attention = self.ranks.attention(backend) if self.ranks else DilatedAttention(config.pattern, backend=backend)
        rates = torch.linspace(0, config.drop_path, config.depth, device="cpu").tolist()
        layers = [EncoderLayer(dim, config.num_heads, config.dropout, rate, factory) for rate in rates]
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(layers), "layer_norm": nn.LayerNorm(dim, eps=EPS, **factory)})
        self.norm = nn.LayerNorm(dim, eps=1e-6, **factory)
        self._reset_parameters()

    @property
    def config(self) -> SlideEncoderConfig:
        """The configuration. Its fields `tile_size` and `global_pool` can be set on the encoder itself."""
        return self._config

    @property
    def tile_size(self) -> int:
        """Pixels a side of the tiles, in the units of `coords`."""
        return self._config.tile_size

    @tile_size.setter
    def tile_size(self, value: int) -> None:
        self._config = replace(self._config, tile_size=value)

    @property
    def global_pool(self) -> bool:
        """True if the mean of the tiles is pooled, not the class token."""
        return self._config.global_pool

    @global_pool.setter
    def global_pool(self, value: bool) -> None:
        self._config = replace(self._config, global_pool=value)

    def _reset_parameters(self) -> None:
        nn.init.normal_(self.cls_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(
        self, tiles: Tensor, coords: Tensor, key_padding_mask: Tensor | None = None, all_layer_embed: bool = False
    ) -> list[Tensor]:
        """Return `[embedding]`, `(batch, embed_dim)`; with `all_layer_embed` those of the input, layer 0, layer 1, ...

        - `tiles`: `(batch, n, in_chans)`, the features of the tiles.
        - `coords`: `(batch, n, 2)`, their x and y in pixels, integers or float32 or float64.
        - `key_padding_mask`: bool `(batch, n)`, True where there is no tile. Each slide is computed as it would be alone, of the
          tiles that it has, in their order; whatever stands in the others, NaN too, has no part in it.
        - `all_layer_embed`: one embedding a layer, without the norm that follows the last layer, as in GigaPath. A loss of one
          of them gives no gradient to the layers after it, nor to `encoder.layer_norm`, which DDP takes for unused parameters.

        Raises TypeError or ValueError for tensors that do not fit, tiles outside the grid, and a slide without tiles. Warns of a
        slide whose tiles lie as tiles of another size would: mostly farther apart than `tile_size`, or a tenth of them and more
        in a cell with another. More than 16 to a cell raise ValueError.
        """
        return self.embeddings(tiles, coords, key_padding_mask, all_layer_embed)

    def embeddings(self, tiles: Tensor, coords: Tensor, key_padding_mask: Tensor | None, all_layer_embed: bool) -> list[Tensor]:
        """Compute `forward`. Only a `forward` may call it: warnings point at the caller of that."""
        boolean("all_layer_embed", all_layer_embed)
        x, lengths = self.packed(tiles, coords, key_padding_mask)
        pooled = [self._pool(x, lengths)] if all_layer_embed else []
        for layer in self.layers():
            x, lengths = self._through(layer, x, lengths)
            if all_layer_embed:
                pooled.append(self._pool(x, lengths))
        return pooled or [self._pool(self.encoder["layer_norm"](x), lengths)]

    def packed(self, tiles: Tensor, coords: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, list[int]]:
        """Return the rows that enter the first layer, `(rows, embed_dim)`, and their number per slide, class token first.

        Over ranks, they are this rank's.
        """
        if self.ranks is None:
            rows, cells, lengths = self._placed(tiles, coords, key_padding_mask)
            return self._embed(rows, cells, lengths), [length + 1 for length in lengths]
        placed = partial(self._placed, tiles, coords, key_padding_mask)
        rows, cells, lengths = self.ranks.agreed(placed, lambda slide: self._facts(*slide))
        held, first = self.ranks.tiles(lengths)
        x = self._embed(rows[held], cells[held], [held.stop - held.start], first)
        return x, [len(x)]

    def _placed(self, tiles: Tensor, coords: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor, list[int]]:
        """Return the tiles that there are, packed, the cells that they are in, and how many each slide has."""
        rows, where, lengths = tiles_of(tiles, coords, key_padding_mask, self.config.in_chans, self.cls_token)
        cells = self.positions.cells(where, self.tile_size)
        check_spacing(where, cells, lengths, self.tile_size)
        return rows, cells, lengths

    def _facts(self, rows: Tensor, cells: Tensor, lengths: list[int]) -> dict[str, Any]:
        """Return the values in which ranks must agree: each computes its own rows of one slide, with the same weights."""
        drops = self.training and (self.config.dropout > 0 or self.config.drop_path > 0)
        facts = dict(tiles=lengths, coords=digest(cells), cls_token=digest(self.cls_token), config=str(self.config))
        return facts | dict(dtype=str(rows.dtype), training=drops)

    def _embed(self, tiles: Tensor, cells: Tensor, lengths: Sequence[int], with_class: bool = True) -> Tensor:
        """Return the packed rows that enter the first layer, each slide's class token first if it is to be there.

        Under autocast they are of the model's dtype, as all sums of layers are: only what is added is of the half type.
        """
        x = self.patch_embed["proj"](tiles) + self.positions(cells)
        first = self.cls_token[0, : int(with_class)]  # no row of it still has a gradient, which is 0
        x = torch.cat([part for slide in torch.split(x, list(lengths)) for part in (first, slide)])
        return F.dropout(x, self.config.dropout, self.training)

    def layers(self) -> list[EncoderLayer]:
        """Return the encoder layers."""
        return list(cast("Iterable[EncoderLayer]", self.encoder["layers"]))

    def _through(self, layer: EncoderLayer, x: Tensor, lengths: list[int]) -> tuple[Tensor, list[int]]:
        """Apply a layer. Returns its rows and their number per slide: 1 after the last layer if the class token is pooled."""
        factors = layer.draw(x, len(lengths))
        if self.ranks is not None and factors is not None:
            self.ranks.take_from_first(factors)
        last_of_class = self.ranks is None and not self.config.global_pool and layer is self.layers()[-1]
        first_alone = last_of_class and is_plain(layer, EncoderLayer) and is_plain(self.attention, DilatedAttention)
        call: Callable[..., Tensor] = partial(layer, attention=self.attention)
        if first_alone:
            call = partial(layer.first_rows, pattern=self.config.pattern)
        if self.activation_checkpointing and torch.is_grad_enabled():
            out = cast(Tensor, checkpoint(call, x, lengths, factors=factors, use_reentrant=False))
        else:
            out = call(x, lengths, factors=factors)
        return out, [1] * len(lengths) if first_alone else lengths

    def _pool(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        if self.ranks is not None:
            return self.ranks.on_first(self.norm, self.ranks.pool(x, self.config.global_pool))
        slides = torch.split(x, list(lengths))
        pooled = torch.stack([slide[1:].mean(dim=0) if self.config.global_pool else slide[0] for slide in slides])
        out: Tensor = self.norm(pooled)
        return out


def tiles_of(
    tiles: Tensor, coords: Tensor, key_padding_mask: Tensor | None, in_chans: int, weight: Tensor
) -> tuple[Tensor, Tensor, list[int]]:
    """Return features `(rows, in_chans)` and coordinates `(rows, 2)` of all tiles, slide by slide, and the tiles per slide.

    Raises TypeError or ValueError for tensors that do not fit one another, `in_chans`, or the model that has `weight`.
    """
    there = _there(tiles, coords, key_padding_mask, in_chans, weight)
    lengths = [tiles.shape[1]] * len(tiles) if there is None else there.sum(dim=1).tolist()
    if 0 in lengths:
        mask = "" if there is None else " (key_padding_mask is True where there is no tile: ~mask if yours says where one is)"
        raise ValueError(f"tiles: slide {lengths.index(0)} of {len(lengths)} has no tiles; leave it out{mask}")
    if there is None:
        return tiles.flatten(0, 1), coords.flatten(0, 1), lengths
    return tiles[there], coords[there], lengths


def _there(tiles: Tensor, coords: Tensor, key_padding_mask: Tensor | None, in_chans: int, weight: Tensor) -> Tensor | None:
    """Return a mask that is True at tiles, bool `(batch, n)`, or None if all are. Raises as `tiles_of` does."""
    masks = {} if key_padding_mask is None else dict(key_padding_mask=key_padding_mask)
    _check_kinds(weight, tiles=tiles, coords=coords, **masks)
    if tiles.dim() != 3 or tiles.shape[2] != in_chans:
        raise ValueError(f"tiles has shape {tuple(tiles.shape)}; (batch, n, in_chans={in_chans}) is needed")
    if coords.shape != (*tiles.shape[:2], 2):
        raise ValueError(f"coords has shape {tuple(coords.shape)}; (batch, n, 2) = {(*tiles.shape[:2], 2)} is needed")
    if len(tiles) == 0:
        raise ValueError("tiles has no slides: the batch is 0, and at least 1 is needed")
    if key_padding_mask is None:
        return None
    if key_padding_mask.dtype != torch.bool or key_padding_mask.shape != tiles.shape[:2]:
        raise ValueError(
            f"key_padding_mask is {key_padding_mask.dtype} {tuple(key_padding_mask.shape)}; torch.bool (batch, n) = "
            f"{tuple(tiles.shape[:2])} is needed, True where there is no tile"
        )
    return None if not bool(key_padding_mask.any()) else key_padding_mask.logical_not()


def _check_kinds(weight: Tensor, **given: Tensor) -> None:
    """Raise TypeError or ValueError for what is no tensor, on another device than the weights, or tiles of another dtype."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; a torch.Tensor is needed")
        if x.device != weight.device:
            raise ValueError(
                f"{name} is on {x.device} but the model on {weight.device}; move it with .to({str(weight.device)!r})"
            )
    dtype = given["tiles"].dtype
    if dtype != weight.dtype and not (dtype.is_floating_point and torch.is_autocast_enabled(weight.device.type)):
        raise TypeError(f"tiles is {dtype} but the model {weight.dtype}; convert it with .to({weight.dtype})")
