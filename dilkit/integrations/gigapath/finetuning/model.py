"""A slide encoder with a linear head, on slides by number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from dilkit.integrations.gigapath.encoder import SlideEncoder
from dilkit.integrations.gigapath.finetuning.slides import Slide


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
        out: Tensor = self.head(self._kept(index) if self.freeze else self._embedding(index))
        return out

    def trained(self) -> dict[str, Tensor]:
        """The parameters that are trained, by name."""
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

    def _kept(self, index: int) -> Tensor:
        if index not in self._embeddings:
            with torch.no_grad():
                self._embeddings[index] = self._embedding(index)
        return self._embeddings[index]


def saved(model: SlideModel, **facts: Any) -> dict[str, Any]:
    """The content of a file of a trained model, from which `load_slide_encoder` reads the encoder: its weights and settings.

    Tiles have the size that each slide's own file says: there is none of the model.
    """
    weights = {name: weight.detach().cpu() for name, weight in model.encoder.state_dict().items()}
    head = {name: weight.detach().cpu() for name, weight in model.head.state_dict().items()}
    settings = asdict(model.encoder.config)
    del settings["tile_size"]
    return {"model": weights, "head": head, **settings, **facts}
