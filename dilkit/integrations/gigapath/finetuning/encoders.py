"""The encoder that fine-tuning begins with: of a published architecture with its weights, or of other sizes with random ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dilkit.integrations.gigapath.checkpoint import load_slide_encoder
from dilkit.integrations.gigapath.config import ARCHITECTURES, SlideEncoderConfig
from dilkit.integrations.gigapath.encoder import SlideEncoder
from dilkit.integrations.gigapath.finetuning.accumulation import seeded
from dilkit.integrations.gigapath.finetuning.slides import SlideFile


def first_encoder(
    config: SlideEncoderConfig,
    checkpoint: Path | None = None,
    arch: str | None = None,
    *,
    seed: int = 0,
    activation_checkpointing: bool = True,
    backend: str | Sequence[str] | None = None,
    device: str = "cpu",
) -> SlideEncoder:
    """An encoder of `config` with the weights of a checkpoint of `arch`, or with random weights that `seed` decides.

    Raises as `load_slide_encoder`, and ValueError where `config` has other sizes than `arch`, whose weights would not fit.
    """
    options: dict[str, Any] = dict(backend=backend, device=device)
    if checkpoint is not None and arch is not None:
        known, sizes = ARCHITECTURES[arch], ("embed_dim", "depth", "num_heads", "in_chans")
        if differing := [f"{name}={getattr(config, name)}" for name in sizes if getattr(config, name) != getattr(known, name)]:
            raise ValueError(f"{', '.join(differing)}: {arch!r}, which {checkpoint} is to be of, has other sizes; leave them out")
    with seeded(seed, torch.device(device)):
        encoder = SlideEncoder(config, activation_checkpointing=activation_checkpointing, **options)
    if checkpoint is not None and arch is not None:
        weights = load_slide_encoder(checkpoint, arch, ngrids=config.ngrids, global_pool=config.global_pool)
        encoder.load_state_dict(weights.state_dict())
    return encoder


def config_for(slides: Sequence[SlideFile], arch: str, with_weights: bool, **changes: Any) -> SlideEncoderConfig:
    """`arch` with changes, those that are None left out; without a checkpoint it takes as many features as the tiles have."""
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(ARCHITECTURES[arch], **given if with_weights else {"in_chans": slides[0].width, **given})


def check_tile_encoder(slides: Sequence[SlideFile], name: str) -> None:
    """Raise ValueError where the files say that another network made the features than one with `name` in its own."""
    said = slides[0].tile_encoder
    if said is not None and name.lower() not in said.lower():
        raise ValueError(f"features are of {said!r}, as {slides[0].path} says, not of {name!r}, which the checkpoint is for")
