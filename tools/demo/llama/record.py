"""The result of `dilkit demo --llama`: a Llama that goes on with dilated attention, and with full attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dilkit.tools.demo.text.record import ModelFacts, TextFacts, TrainedResult, Training

BEFORE, DILATED, FULL = "full attention at first", "dilated from here on", "full throughout"
"""The trainings: both of the latter go on from the weights of the first."""


@dataclass(frozen=True, kw_only=True)
class LlamaTraining(Training):
    """One of the three trainings."""

    attention: str


@dataclass(frozen=True, kw_only=True)
class LlamaDemoResult(TrainedResult):
    """The trainings that there are so far, and what `convert` said of each layer."""

    KIND: ClassVar[str] = "demo-llama"

    text: TextFacts
    model: ModelFacts
    layers: tuple[str, ...]
    trainings: tuple[LlamaTraining, ...]

    def of(self, attention: str) -> LlamaTraining | None:
        """The training of this name."""
        return next((one for one in self.trainings if one.attention == attention), None)
