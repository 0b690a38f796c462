"""The model of fine-tuning: a slide encoder with a linear head, on slides by number, and the encoder to begin with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from dilkit.integrations.gigapath.checkpoint import Checkpoint, config_of, load_weights, settled
from dilkit.integrations.gigapath.config import SIZES, SlideEncoderConfig, known_as
from dilkit.integrations.gigapath.encoder import SlideEncoder
from dilkit.integrations.gigapath.finetuning.slides import Slide, SlideFile


class SlideModel(nn.Module):
    """head(embedding of the slide of an index), `(outputs,)`; the head is one linear layer.

    `read` gives the slide of an index. With `freeze` the encoder stays as it is, in eval mode: the embedding of each slide is
    computed once and kept.
    """

    def __init__(self, encoder: SlideEncoder, outputs: int, read: Callable[[int], Slide], freeze: bool = False) -> None:
        super().__init__()
        weight = encoder.cls_token
        self.encoder, self.read, self.freeze = encoder, read, freeze
        self.head = nn.Linear(encoder.config.embed_dim, outputs, device=weight.device, dtype=weight.dtype)
        self._embeddings: dict[int, Tensor] = {}
        encoder.requires_grad_(not freeze)

    def train(self, mode: bool = True) -> SlideModel:
        super().train(mode)
        self.encoder.train(mode and not self.freeze)
        return self

    def forward(self, index: int) -> Tensor:
        if self.freeze and index not in self._embeddings:
            with torch.no_grad():
                self._embeddings[index] = self._embedding(index)
        out: Tensor = self.head(self._embeddings[index] if self.freeze else self._embedding(index))
        return out

    def trained(self) -> dict[str, Tensor]:
        """Return the parameters that are trained, by name."""
        return {name: weight for name, weight in self.named_parameters() if weight.requires_grad}

    def load_trained(self, weights: dict[str, Tensor]) -> None:
        """Take what `trained` gave for a model of the same kind."""
        with torch.no_grad():
            for name, weight in self.trained().items():
                weight.copy_(weights[name])

    def _embedding(self, index: int) -> Tensor:
        slide = self.read(index)
        self.encoder.tile_size = slide.tile_size
        [embedding] = self.encoder(slide.tiles, slide.coords)
        return embedding[0]  # type: ignore[no-any-return]


def saved(model: SlideModel, **facts: Any) -> dict[str, Any]:
    """Return the weights and settings that a file of a trained model holds; `load_slide_encoder` reads the encoder from it.

    Tiles have the size that each slide's own file says: there is none of the model.
    """
    weights = {name: weight.detach().cpu() for name, weight in model.encoder.state_dict().items()}
    head = {name: weight.detach().cpu() for name, weight in model.head.state_dict().items()}
    settings = asdict(model.encoder.config)
    del settings["tile_size"]
    return {"model": weights, "head": head, **settings, **facts}


def first_encoder(
    config: SlideEncoderConfig,
    found: Checkpoint | None = None,
    *,
    seed: int = 0,
    activation_checkpointing: bool = True,
    backend: str | Sequence[str] | None = None,
    device: str = "cpu",
) -> SlideEncoder:
    """Return an encoder of `config` with the weights of a checkpoint, or with random weights drawn from `seed`.

    Raises ValueError for weights that do not fit.
    """
    options: dict[str, Any] = dict(backend=backend, device=device)
    with seeded(seed, torch.device(device)):
        encoder = SlideEncoder(config, activation_checkpointing=activation_checkpointing, **options)
    if found is not None:
        load_weights(found, encoder, f"checkpoint {found.file}", f"arch={known_as(config)!r}")
    return encoder


def config_for(
    slides: Sequence[SlideFile], arch: str | None = None, found: Checkpoint | None = None, **changes: Any
) -> SlideEncoderConfig:
    """Return the configuration of `arch` with `changes` that are not None; `in_chans` defaults to the width of the tiles.

    The mean of the tiles is pooled, unless `changes` or the checkpoint asks for the class token. Raises ValueError for changes
    that contradict the checkpoint.
    """
    wanted = {name: value for name, value in changes.items() if value is not None}
    base = config_of(found, arch, {})
    if found is None:
        return replace(base, **{"in_chans": slides[0].width, "global_pool": True, **wanted})
    if differing := [f"{name}={wanted[name]}" for name in SIZES if wanted.get(name, getattr(base, name)) != getattr(base, name)]:
        raise ValueError(f"{', '.join(differing)}: {found.file} is of {known_as(base)!r}, which has other sizes; leave them out")
    return settled(found, replace(base, global_pool=True), wanted)


def check_tile_encoder(slides: Sequence[SlideFile], name: str) -> None:
    """Raise ValueError if the files name a tile encoder without `name` in it."""
    said = slides[0].tile_encoder
    if said is not None and name.lower() not in said.lower():
        raise ValueError(f"features are of {said!r}, as {slides[0].path} says, not of {name!r}, which the checkpoint is for")


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Within the block torch's random numbers on the CPU and on `device` begin with `seed`; afterwards they go on as before."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed % 2**63)
        yield
