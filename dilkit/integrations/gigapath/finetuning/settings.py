"""`Settings`: how a slide encoder is fine-tuned. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from dilkit.checks import boolean, integer, real


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of fine-tuning a slide encoder; the defaults are those of GigaPath's script for PANDA.

    - `epochs`, `warmup_epochs`: the learning rate rises from 0 for `warmup_epochs`, then falls as half a cosine.
    - `accumulate`: slides a step of the optimizer; the last step of an epoch may have fewer.
    - `base_rate`: the highest learning rate is `base_rate * accumulate / 256`. `least_rate`: the last.
    - `layer_decay`: by this factor each layer learns more slowly than the one after it.
    - `weight_decay`: of AdamW, on weights of two dimensions and more.
    - `freeze`: the head alone is trained, on embeddings of the encoder as it is, which are computed once.
    - `seed`: of the head's first weights, the order of slides, and dropout.
    - `resamples`: of the bootstrap that confidence intervals are read from.

    Raises TypeError or ValueError naming the field.

        >>> from dilkit.integrations.gigapath.finetuning import Settings
        >>> Settings(base_rate=2e-3, accumulate=32).peak_rate
        0.00025
    """

    epochs: int = 5
    warmup_epochs: float = 1.0
    accumulate: int = 32
    base_rate: float = 2e-3
    least_rate: float = 1e-6
    layer_decay: float = 0.95
    weight_decay: float = 0.05
    freeze: bool = False
    seed: int = 0
    resamples: int = 1000

    def __post_init__(self) -> None:
        for name in ("epochs", "accumulate", "resamples"):
            integer(name, getattr(self, name), at_least=1)
        integer("seed", self.seed, at_least=0)
        boolean("freeze", self.freeze)
        real("base_rate", self.base_rate, above=0)
        for name in ("least_rate", "weight_decay", "warmup_epochs"):
            if real(name, getattr(self, name)) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        if not 0 < real("layer_decay", self.layer_decay) <= 1:
            raise ValueError(f"layer_decay={self.layer_decay} must be more than 0 and at most 1; 1 lets all layers learn alike")
        if self.warmup_epochs >= self.epochs:
            raise ValueError(
                f"warmup_epochs={self.warmup_epochs} must be less than epochs={self.epochs}, or the rate never falls; "
                f"set warmup_epochs={self.epochs / 5:g}"
            )
        if self.least_rate > self.peak_rate:
            raise ValueError(
                f"least_rate={self.least_rate} is more than the highest rate, base_rate * accumulate / 256 = {self.peak_rate:g}; "
                "raise base_rate, or lower least_rate"
            )

    @property
    def peak_rate(self) -> float:
        """The highest learning rate, that of the head at the end of the warm-up."""
        return self.base_rate * self.accumulate / 256
