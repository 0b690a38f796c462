"""The encoder that fine-tuning begins with: of a published architecture with its weights, or of other sizes with random ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dilkit.integrations.gigapath.checkpoint import Checkpoint, check_weights, config_of, settled
from dilkit.integrations.gigapath.config import SIZES, SlideEncoderConfig, known_as
from dilkit.integrations.gigapath.encoder import SlideEncoder
from dilkit.integrations.gigapath.finetuning.accumulation import seeded
from dilkit.integrations.gigapath.finetuning.slides import SlideFile


def first_encoder(
    config: SlideEncoderConfig,
    found: Checkpoint | None = None,
    *,
    seed: int = 0,
    activation_checkpointing: bool = True,
    backend: str | Sequence[str] | None = None,
    device: str = "cpu",
) -> SlideEncoder:
    """An encoder of `config` with the weights of a checkpoint, or with random weights that `seed` decides.

    Raises ValueError for weights that do not fit.
    """
    options: dict[str, Any] = dict(backend=backend, device=device)
    with seeded(seed, torch.device(device)):
        encoder = SlideEncoder(config, activation_checkpointing=activation_checkpointing, **options)
    if found is not None:
        check_weights(found.weights, encoder, f"checkpoint {found.file}", f"arch={known_as(config)!r}")
        encoder.load_state_dict(found.weights)
    return encoder


def config_for(
    slides: Sequence[SlideFile], arch: str | None = None, found: Checkpoint | None = None, **changes: Any
) -> SlideEncoderConfig:
    """`arch` with changes, those that are None left out; without a checkpoint it takes as many features as the tiles have.

    The mean of the tiles is pooled, unless `changes` or the checkpoint has the class token. Raises ValueError for changes that
    contradict what a checkpoint stores, and for other sizes than its own.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    base = config_of(found, arch, {})
    if found is None:
        return replace(base, **{"in_chans": slides[0].width, "global_pool": True, **given})
    if differing := [f"{name}={given[name]}" for name in SIZES if given.get(name, getattr(base, name)) != getattr(base, name)]:
        raise ValueError(f"{', '.join(differing)}: {found.file} is of {known_as(base)!r}, which has other sizes; leave them out")
    return settled(found, replace(base, global_pool=True), given)


def check_tile_encoder(slides: Sequence[SlideFile], name: str) -> None:
    """Raise ValueError where the files say that another network made the features than one with `name` in its own."""
    said = slides[0].tile_encoder
    if said is not None and name.lower() not in said.lower():
        raise ValueError(f"features are of {said!r}, as {slides[0].path} says, not of {name!r}, which the checkpoint is for")
