"""`create_model` and `LongNetViT`: the slide encoder under the names, and with the calls, of GigaPath's own package."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilkit.checks import check_type, integer, one_of, shown
from dilkit.integrations.gigapath.checkpoint import (
    UNTRAINED,
    is_pooling_open,
    load_weights,
    local_file,
    read_checkpoint,
    settled,
)
from dilkit.integrations.gigapath.config import ARCHITECTURES, SIZES, SlideEncoderConfig, check_share, segment_lengths_of
from dilkit.integrations.gigapath.encoder import SlideEncoder

FIELDS = {
    "slide_ngrids": "ngrids",
    "tile_size": "tile_size",
    "global_pool": "global_pool",
    "dropout": "dropout",
    "drop_path_rate": "drop_path",
}
LENGTHS = ("max_wsi_size", "segment_length", "dilated_ratio")
HALVES = (
    "coords are torch.float16, in which pixels beyond 2,048 are rounded and those beyond 65,504 are lost: give them as integers "
    "or float32. A tile is put into the cell of the pixels given; GigaPath's own code numbers cells in half precision too, in "
    "which numbers beyond 2,048 run together"
)
TRAINING = (
    "the model is in training mode, as create_model leaves it, and computes without gradients: dropout changes the embeddings by "
    "chance; call .eval() first"
)


class LongNetViT(SlideEncoder):
    """`SlideEncoder` with GigaPath's call; it warns of float16 coordinates, and of training mode without gradients."""

    @property
    def slide_ngrids(self) -> int:
        return self.config.ngrids

    def forward(self, x: Tensor, coords: Tensor, all_layer_embed: bool = False) -> list[Tensor]:  # type: ignore[override]
        if self.training and not torch.is_grad_enabled() and (self.config.dropout or self.config.drop_path):
            warnings.warn(TRAINING, stacklevel=4)  # the call of the model
        if isinstance(coords, Tensor) and coords.dtype == torch.float16:
            warnings.warn(HALVES, stacklevel=4)
            coords = coords.float()
        return self.embeddings(x, coords, None, all_layer_embed)


def create_model(
    pretrained: str | Path, model_arch: str, in_chans: int, local_dir: str | Path | None = None, **settings: Any
) -> LongNetViT:
    """Make GigaPath's slide encoder by the arguments of `gigapath.slide_encoder.create_model`, which `install` replaces.

    - `pretrained`: a file such as the published `slide_encoder.pth`; `"hf_hub:prov-gigapath/prov-gigapath"`, which is
      downloaded to `local_dir`, `~/.cache` by default; or `""` for random weights.
    - `model_arch`: one of `dilkit.integrations.gigapath.ARCHITECTURES`. `in_chans`: the numbers of a tile.
    - `settings`: `global_pool`, `tile_size`, `slide_ngrids`, `dropout` and `drop_path_rate`, those of `SlideEncoderConfig`; None
      stands for the default. `max_wsi_size`: segment lengths are those for slides of so many pixels, `segment_lengths_of`. In its
      place `segment_length`, and with it or not `dilated_ratio`: numbers, or a text of them, which GigaPath's code ignores here.
      A setting that is not given is as the checkpoint stores it; one that contradicts it is refused.

    The model is in training mode, as theirs is, and has their `state_dict`. `model(x, coords)` returns `[embedding]`, and with
    `all_layer_embed=True` those of the input and of each layer. Warns of a checkpoint whose class token is pooled.

    Raises TypeError or ValueError for unknown settings, values that do not fit and weights of another architecture, OSError for a
    file that is missing or cannot be downloaded, and ImportError where that needs huggingface_hub.

        >>> from dilkit.integrations.gigapath import create_model
        >>> model = create_model("", "gigapath_slide_enc12l384d", 384, global_pool=True, max_wsi_size=250000)
        >>> model.config.segment_lengths, model.global_pool
        ((1024, 4870, 23170, 110217, 524288), True)
    """
    return created(pretrained, model_arch, in_chans, local_dir, None, settings)


def created(
    pretrained: str | Path,
    model_arch: str,
    in_chans: int,
    local_dir: str | Path | None,
    backend: str | Sequence[str] | None,
    settings: Mapping[str, Any],
) -> LongNetViT:
    base, changes = _config(model_arch, in_chans, {name: value for name, value in settings.items() if value is not None})
    check_type("pretrained", pretrained, (str, Path), "a path, 'hf_hub:NAME' or '' is needed")
    stored = None if pretrained == "" else read_checkpoint(local_file(pretrained, local_dir))
    config = settled(stored, base, changes)
    model = LongNetViT(config, backend=backend)
    if stored is not None:
        load_weights(stored, model, f"pretrained={str(pretrained)!r}", f"model_arch={model_arch!r}")
        if is_pooling_open(stored, config):
            warnings.warn(UNTRAINED, stacklevel=3)
    return model


def _config(model_arch: str, in_chans: int, given: Mapping[str, Any]) -> tuple[SlideEncoderConfig, dict[str, Any]]:
    one_of("model_arch", model_arch, tuple(ARCHITECTURES))
    if unknown := [name for name in given if name not in (*FIELDS, *LENGTHS)]:
        known = ", ".join((*FIELDS, *LENGTHS))
        raise TypeError(f"create_model takes no {', '.join(unknown)}; beside the architecture it takes {known}")
    if "slide_ngrids" in given:
        integer("slide_ngrids", given["slide_ngrids"], at_least=1)
    check_share("drop_path_rate", given.get("drop_path_rate", 0))
    pattern = _pattern(given)
    base = replace(ARCHITECTURES[model_arch], in_chans=in_chans, **pattern)
    if not {"segment_length", "max_wsi_size"} & given.keys():
        del pattern["segment_lengths"]
    fields = {FIELDS[name]: value for name, value in given.items() if name in FIELDS}
    return base, {**{name: getattr(base, name) for name in SIZES}, **fields, **pattern}


def _pattern(given: Mapping[str, Any]) -> dict[str, Any]:
    fields = {"dilation_rates": _numbers("dilated_ratio", given["dilated_ratio"])} if "dilated_ratio" in given else {}
    if "segment_length" in given:
        if "max_wsi_size" in given:
            raise ValueError("segment_length and max_wsi_size both say how long segments are; give one of them")
        return fields | {"segment_lengths": _numbers("segment_length", given["segment_length"])}
    size = integer("tile_size", given.get("tile_size", 256), at_least=1)
    pixels = integer("max_wsi_size", given.get("max_wsi_size", 262144), at_least=32 * size)  # 1,024 tiles, the first segment
    return fields | {"segment_lengths": segment_lengths_of(pixels, size)}


def _numbers(name: str, value: Any) -> tuple[int, ...]:
    """Parse whole numbers, or a text such as '[1024, 5792]', in which LongNet's configuration has them."""
    try:
        listed = list(ast.literal_eval(value) if isinstance(value, str) else value)
    except (SyntaxError, TypeError, ValueError):
        raise TypeError(f"{name}={shown(value)} must be numbers such as [1024, 5792], or a text of them") from None
    return tuple(integer(f"{name}[{place}]", number, at_least=1) for place, number in enumerate(listed))
