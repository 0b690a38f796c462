"""What the image demo's models learn: to fill in the hidden patches of random crops."""

from __future__ import annotations

import torch
from torch import Tensor

from dilkit.tools.demo.image.model import PatchTransformer, hidden_loss
from dilkit.tools.demo.image.photo import Crops
from dilkit.tools.demo.trainer import Task


class FillIn(Task):
    """The hidden patches of crops. Two tasks of the same seed differ in the order of the tokens alone."""

    def __init__(self, crops: Crops, order: str, seed: int) -> None:
        self.crops = crops
        torch.manual_seed(seed)
        self.model = PatchTransformer(crops.config, order)
        self._generator = torch.Generator().manual_seed(seed)

    def backward(self, spent: float) -> tuple[float, int]:
        patches, hidden = self.crops.batch(self._generator)
        loss = hidden_loss(self.model(patches, hidden), patches, hidden)
        torch.autograd.backward(loss)
        return loss.item(), hidden.numel()

    def judge(self) -> float:
        return hidden_loss(self.filled_in(), self.crops.held_out, self.crops.hidden).item()

    @torch.no_grad()
    def filled_in(self) -> Tensor:
        """What the model makes of the held-out crops, a few at a time."""
        parts = zip(torch.split(self.crops.held_out, 4), torch.split(self.crops.hidden, 4), strict=True)
        return torch.cat([self.model(patches, hidden) for patches, hidden in parts])
