"""The tensors that a slide encoder is given: checked, and packed to the tiles that there are."""

from __future__ import annotations

import torch
from torch import Tensor


def tiles_of(
    tiles: Tensor, coords: Tensor, key_padding_mask: Tensor | None, in_chans: int, weight: Tensor
) -> tuple[Tensor, Tensor, list[int]]:
    """Features `(rows, in_chans)` and coordinates `(rows, 2)` of the tiles that there are, slide by slide, and how many each has.

    Raises TypeError or ValueError for tensors that do not fit one another, `in_chans`, or the model that has `weight`.
    """
    kept = _kept(tiles, coords, key_padding_mask, in_chans, weight)
    lengths = [tiles.shape[1]] * len(tiles) if kept is None else kept.sum(dim=1).tolist()
    if 0 in lengths:
        mask = "" if kept is None else " (key_padding_mask is True where there is no tile: ~mask if yours says where one is)"
        raise ValueError(f"tiles: slide {lengths.index(0)} of {len(lengths)} has no tiles; leave it out{mask}")
    if kept is None:
        return tiles.flatten(0, 1), coords.flatten(0, 1), lengths
    return tiles[kept], coords[kept], lengths


def _kept(tiles: Tensor, coords: Tensor, key_padding_mask: Tensor | None, in_chans: int, weight: Tensor) -> Tensor | None:
    """Where there are tiles, bool `(batch, n)`; None means everywhere."""
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
