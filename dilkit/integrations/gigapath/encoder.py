"""`SlideEncoder`: tile features and coordinates in, embeddings of slides out; `attention_map`: what its class token looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dilkit.checks import boolean, check_type, integer
from dilkit.integrations.gigapath.config import SlideEncoderConfig
from dilkit.integrations.gigapath.layers import EPS, EncoderLayer
from dilkit.integrations.gigapath.positions import GridPositions, check_spacing
from dilkit.integrations.ranks import digest, over_ranks
from dilkit.nn import DilatedAttention
from dilkit.nn.checks import is_plain
from dilkit.op.boundary import lse_dtype
from dilkit.pattern import Pattern
from dilkit.weights import attention_mass, attention_rows


class SlideEncoder(nn.Module):
    """GigaPath's slide encoder, a LongNet over the tiles of a slide, on whichever backend suits the device.

    `config` says its sizes; `load_slide_encoder` makes one of a published architecture. The names and shapes of its parameters
    are those of the published checkpoints.

    - `tile_size`, `global_pool`: those of `config`. They can be set later and hold from the next call on; `config` follows.
    - `activation_checkpointing`: whether the backward pass computes each layer again instead of holding its activations.
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
        check_type("config", config, SlideEncoderConfig, "a SlideEncoderConfig is needed")
        boolean("activation_checkpointing", activation_checkpointing)
        self._config, self.activation_checkpointing = config, activation_checkpointing
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        dim = config.embed_dim
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim, **factory))
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(config.in_chans, dim, **factory)})
        self.positions = GridPositions(dim, config.ngrids, device)
        self.positions.to(dtype)
        self.ranks = None if comm is None else Ranks(comm, config.pattern)
        self.attention: nn.Module = DilatedAttention(config.pattern, backend=backend)
        if comm is not None:
            self.attention = over_ranks().attention_module(config.pattern, comm, backend)
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
        slide whose tiles lie as tiles of another size would: mostly further apart than `tile_size`, or a tenth of them and more
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
        x = self.patch_embed["proj"](tiles) + self.positions(cells)
        first = self.cls_token[0, : int(with_class)]  # no row of it still has a gradient, which is 0
        x = torch.cat([part for slide in torch.split(x, list(lengths)) for part in (first, slide)])
        return F.dropout(x, self.config.dropout, self.training)

    def layers(self) -> list[EncoderLayer]:
        return list(cast("Iterable[EncoderLayer]", self.encoder["layers"]))

    def _through(self, layer: EncoderLayer, x: Tensor, lengths: list[int]) -> tuple[Tensor, list[int]]:
        """Apply a layer. Returns its rows and their number per slide: 1 after the last layer if the class token is pooled."""
        factors = layer.draw(x, len(lengths))
        if self.ranks is not None and factors is not None:
            over_ranks().copy_from_rank([factors], self.ranks.comm)
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
    """Return features `(rows, in_chans)` and coordinates `(rows, 2)`, packed, and tiles per slide. Raises as `forward`."""
    there = _there(tiles, coords, key_padding_mask, in_chans, weight)
    lengths = [tiles.shape[1]] * len(tiles) if there is None else there.sum(dim=1).tolist()
    if 0 in lengths:
        mask = "" if there is None else " (key_padding_mask is True where there is no tile: ~mask if yours says where one is)"
        raise ValueError(f"tiles: slide {lengths.index(0)} of {len(lengths)} has no tiles; leave it out{mask}")
    if there is None:
        return tiles.flatten(0, 1), coords.flatten(0, 1), lengths
    return tiles[there], coords[there], lengths


def _there(tiles: Tensor, coords: Tensor, key_padding_mask: Tensor | None, in_chans: int, weight: Tensor) -> Tensor | None:
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


def attention_map(model: SlideEncoder, tiles: Tensor, coords: Tensor, layer: int = -1, *, of_tiles: bool = False) -> Tensor:
    """Return the weights of the class token in a layer's attention, `(batch, heads, n)`: one for each tile, exact.

    `tiles` and `coords` are those of `SlideEncoder.forward`, slides of one length. `layer` counts from 0, or from the last with
    -1. A head's weights sum to 1 less what the class token gives to itself and to padding. In a branch only heads with offset 0
    keep the class token: of the 16 heads of the published models 8 see tiles beyond the first 1,024 tokens, 4 beyond 5,792, 2
    beyond 32,768. `of_tiles=True` returns the mean of the tiles' weights instead, which suits a model with `global_pool`: its
    embedding is not the class token's.

    Raises IndexError for a layer that does not exist, ValueError in training mode with dropout, which would make another map of
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
        query, key = query.view(shape), key.view(shape)
        of_class = attention_rows(query, key, model.config.pattern, [0])[:, :, 0, 1:]
        if not boolean("of_tiles", of_tiles):
            return of_class
        return (attention_mass(query, key, model.config.pattern)[:, :, 1:] - of_class) / (lengths[0] - 1)


T = TypeVar("T")


class Ranks:
    """A slide over ranks: each holds some of its rows, and what is pooled is summed over all."""

    def __init__(self, comm: Any, pattern: Pattern) -> None:
        self.comm, self.pattern = comm, pattern

    def agreed(self, compute: Callable[[], T], facts: Callable[[T], dict[str, Any]]) -> T:
        """Return `compute()`. Raises on every rank if it raises on one, or if ranks differ in its `facts`."""
        values: list[T] = []

        def facts_here() -> dict[str, Any]:
            values.append(compute())
            return facts(values[0])

        over_ranks().agree_on(self.comm, facts_here, step="arguments of SlideEncoder")
        return values[0]

    def tiles(self, lengths: Sequence[int]) -> tuple[slice, bool]:
        """Return this rank's slice of a slide's tiles, and True if it holds the class token. Raises ValueError for several."""
        if len(lengths) != 1:
            raise ValueError(f"tiles has {len(lengths)} slides; over ranks (comm=) one at a time is computed: tiles[:1]")
        cuts = over_ranks().shard_cuts(lengths[0] + 1, self.comm.size, self.pattern)
        start, stop = cuts[self.comm.rank : self.comm.rank + 2]
        return slice(max(start - 1, 0), stop - 1), self.comm.rank == 0

    def pool(self, x: Tensor, global_pool: bool) -> Tensor:
        """Return the mean of all tiles, or the class token, `(1, embed_dim)`, the same on each rank, from the rows of each."""
        classes = int(self.comm.rank == 0)
        rows = x[classes:] if global_pool else x[:classes]
        wide = lse_dtype(rows.dtype)
        part = torch.cat((rows.sum(dim=0, dtype=wide), rows.new_full((1,), len(rows), dtype=wide)))
        total: Tensor = _SumOverRanks.apply(part, self.comm)  # type: ignore[no-untyped-call]
        return (total[:-1] / total[-1]).to(rows.dtype)[None]

    def on_first(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return `module(x)`, on every rank of the same `x`; only the first rank's parameters get gradients."""
        first = self.comm.rank == 0
        weights = {name: _OnFirst.apply(weight, first) for name, weight in module.named_parameters()}  # type: ignore[no-untyped-call]
        out: Tensor = torch.func.functional_call(module, weights, (x,))
        return out


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks. Each computes the same of it, so that the gradient of a part is what it is of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, comm: Any) -> Tensor:
        total = part.clone()
        over_ranks().sum_over_ranks([total], comm)
        return total

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Any, ...]:
        return dtotal, None


class _OnFirst(torch.autograd.Function):
    """`x`; its gradient is 0 but on the first rank, so that a sum over ranks counts it once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: bool) -> Tensor:
        ctx.first = first
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Any, ...]:
        return dx if ctx.first else torch.zeros_like(dx), None
