"""Arguments of any model of transformers: two texts, images, videos or sounds, always the same.

The sizes are those of the model's configuration. Several forms are tried, as `pixel_values` are images, videos or patches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor

from dilkit.integrations.transformers.proof.configurations import IMAGE, SEQ, VOCABULARY

GRID = 4
"""Patches of an image, in height and in width."""


IMAGES = ("pixel_values", "pixel_attention_mask", "spatial_shapes", "target_sizes", "image_attention_mask")
MEDIA = (
    *("input_ids", "decoder_input_ids", "pixel_values", "pixel_values_videos", "input_values", "input_features", "lang_ids"),
    *("input_features_mask", "mm_token_type_ids", "bbox", "future_values", "future_time_features"),
    "encoder_hidden_states",
)
FORMS = 16
"""Forms of the same arguments that are tried, at most."""


def inputs_of(model: Any) -> Iterator[dict[str, Any]]:
    """Yield arguments of `model.forward`, the fewest first."""
    accepted, main = inspect.signature(model.forward).parameters, getattr(model, "main_input_name", "input_ids")
    needed = {name for name, argument in accepted.items() if argument.default is argument.empty}
    forms = {name: values for name, values in forms_of(model.config).items() if name in accepted}
    fewest = {*needed, main if main in forms else next(iter(forms), main)}
    if main == "input_ids":
        fewest.add("decoder_input_ids")
    tried: list[list[str]] = []
    for wanted in (fewest, {*fewest, *IMAGES}, {*fewest, *MEDIA}):
        names = [name for name in forms if name in wanted]
        if names in tried:
            continue
        tried.append(names)
        for values in islice(product(*(forms[name] for name in names)), FORMS):
            inputs: dict[str, Any] = dict(zip(names, values, strict=True))
            yield inputs | ({"use_cache": False} if "use_cache" in accepted else {})


def forms_of(config: Any) -> dict[str, list[Tensor]]:
    """Return the values to try of each argument that is known, by its name."""
    torch.manual_seed(2)
    size = partial(_size, parts_of(config))
    ids, hidden = torch.randint(4, VOCABULARY - 4, (2, SEQ)), size("hidden_size d_model", 32)
    books = ids[..., None].expand(-1, -1, size("num_codebooks num_channels", 1))
    grid, whole = torch.tensor([[1, GRID, GRID]] * 2), torch.ones(2, GRID * GRID, dtype=torch.long)

    channels, side = size("num_channels in_channels in_chans", 3), size("image_size crop_size", IMAGE)
    patch = size("patch_size", 8)
    volume = channels * patch**2 * size("temporal_patch_size patch_temporal", 1)
    frames = size("num_frames frames_per_clip", 2)
    images = [torch.randn(2, channels, width, width) for width in dict.fromkeys((min(side, 128), 128, side))]
    video, rows = torch.randn(2, frames, channels, side, side), torch.randn(2 * GRID * GRID, volume)

    mels = size("num_mel_bins num_mel_features feature_projection_input_dim input_feat_size input_feat_per_channel", 64)
    steps, stacked = 2 * size("max_source_positions", 64), mels * size("num_stacked_frames", 1)
    shapes = (16, 64), (steps, mels), (mels, steps), (steps, stacked), (1, steps, mels)
    features = [torch.randn(2, *shape) for shape in shapes]
    heard = torch.ones(2, steps, dtype=torch.long)

    context, times = size("context_length prediction_length", 16), size("num_time_features", 0)
    past = context + size("lags_sequence", 0, max)
    return dict(
        input_ids=[ids],
        pixel_values=[*images, video, rows, rows.view(2, -1, volume), rows.view(len(rows), -1, patch, patch)],
        pixel_values_videos=[video, rows],
        input_values=[torch.randn(2, 3840), torch.randn(2, 1, 3840), features[1]],
        input_features=features,
        audio_mel=[features[1]],
        hidden_states=[rows],
        latents=[torch.randn(2, hidden, 16)],
        encoder_hidden_states=[torch.randn(2, SEQ, size("encoder_hidden_size", hidden))],
        query_embeds=[torch.randn(2, SEQ, hidden)],
        qformer_input_ids=[ids],
        grid_thw=[grid],
        image_grid_thw=[grid],
        merge_sizes=[torch.tensor([1, 1])],
        spatial_shapes=[grid[:, 1:]],
        target_sizes=[grid[:, 1:]],
        image_attention_mask=[torch.ones(2, SEQ, frames)],
        pixel_attention_mask=[whole],
        pixel_position_ids=[torch.cartesian_prod(*[torch.arange(GRID)] * 2).expand(2, -1, -1)],
        input_features_mask=[heard],
        audio_mel_mask=[heard == 0],
        mm_token_type_ids=[torch.zeros_like(ids)],
        bbox=[torch.zeros(2, SEQ, 4, dtype=torch.long)],
        lang_ids=[torch.zeros(2, dtype=torch.long)],
        decoder_input_ids=[ids, books],
        past_values=[torch.randn(2, past), torch.randn(2, context, size("num_input_channels", 1))],
        past_values_padding=[torch.zeros(2, past)],
        freq=[torch.zeros(2, 1, dtype=torch.long)],
        past_observed_mask=[torch.ones(2, past)],
        past_time_features=[torch.randn(2, past, times)],
        future_values=[torch.randn(2, size("prediction_length", 1))],
        future_time_features=[torch.randn(2, size("prediction_length", 1), times)],
    )


def _size(parts: list[Any], names: str, usual: int, of_several: Callable[[Any], int] = min) -> int:
    values = (getattr(part, name, None) for name in names.split() for part in parts)
    sizes = (of_several(x) if isinstance(x, (list, tuple)) and x else x for x in values)
    return next((x for x in sizes if type(x) is int and x > 0), usual)


def parts_of(config: Any) -> list[Any]:
    """Return a configuration and all that it holds."""
    held = (getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ())
    return [config, *(inner for part in held if part is not None for inner in parts_of(part))]
