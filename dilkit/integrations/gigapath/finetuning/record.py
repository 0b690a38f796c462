"""The record of a fine-tuning run, as values that a JSON file can hold. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dilkit.checks import boolean, integer, real
from dilkit.integrations.gigapath.finetuning.labels import Example


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of fine-tuning a slide encoder; the defaults are those of GigaPath's script for PANDA.

    - `epochs`, `warmup_epochs`: the learning rate rises from 0 for `warmup_epochs`, then falls as half a cosine.
    - `accumulate`: slides a step of the optimizer; the last step of an epoch may have fewer. Of a smaller cohort: all of them.
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

    def steps(self, slides: int) -> int:
        return -(-slides // self.accumulate) * self.epochs

    def for_cohort(self, slides: int) -> tuple[Settings, list[str]]:
        """Return the settings for so many slides to learn from, and notes: on a smaller `accumulate`, and on few steps."""
        settings, notes = self, []
        if self.accumulate > slides:
            settings = replace(self, accumulate=slides, least_rate=self.least_rate * slides / self.accumulate)
            notes = [
                f"accumulate={self.accumulate} is more than the {slides} slides to learn from: a step has {slides}, and the "
                f"highest learning rate falls alike, from {self.peak_rate:.3g} to {settings.peak_rate:.3g}"
            ]
        if (steps := settings.steps(slides)) < FEW_STEPS:
            cheap = "" if self.freeze else ", and --freeze makes them cheap: it embeds each slide once"
            more = f"--epochs {-(-FEW_STEPS * self.epochs // steps)}"
            notes += [f"{steps} steps hardly change the weights: more epochs ({more}) change them more{cheap}"]
        return settings, notes


FEW_STEPS = 100
"""GigaPath's script for PANDA, whose rates are the defaults, makes about 1,400."""


@dataclass(frozen=True)
class Interval:
    """A value with its 95% interval, of a bootstrap over patients; `resamples` are those that the value is defined for."""

    value: float
    low: float
    high: float
    resamples: int


@dataclass(frozen=True)
class Epoch:
    """Losses of an epoch: `train`, its mean, and `val` at its end, if any. `rate`: the learning rate of the last step."""

    epoch: int
    rate: float
    train: float
    val: float | None


@dataclass(frozen=True)
class Roc:
    """The ROC curve of a class against all others: (false-positive rate, true-positive rate) for falling thresholds."""

    label: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The metrics of a split; None for one that is not defined, such as the AUROC of slides of one class.

    `auroc`: of two classes that of the second; of more the mean of `by_class`, each against all others, over slides. `c_index`:
    over patients, each with the mean risk of the patient's slides.
    """

    slides: int
    patients: int
    auroc: Interval | None = None
    by_class: dict[str, Interval] = field(default_factory=dict)
    c_index: Interval | None = None
    roc: tuple[Roc, ...] = ()


@dataclass(frozen=True)
class Prediction(Example):
    """The result of a slide: probabilities of the classes, in their order, or a risk, the logarithm of a relative hazard."""

    probabilities: tuple[float, ...] = ()
    risk: float | None = None


@dataclass(frozen=True, kw_only=True)
class EncoderFacts:
    """The sizes and options of a trained encoder, and its numbers of parameters."""

    embed_dim: int
    depth: int
    num_heads: int
    in_chans: int
    pooling: str
    dropout: float
    drop_path: float
    activation_checkpointing: bool
    parameters: int
    trained_parameters: int


@dataclass(frozen=True, kw_only=True)
class Finetuning:
    """All of a run, as `finetune` returns it.

    - `labels`: the name of the table. `tiles`: of all slides together.
    - `losses`: of each step of the optimizer; `curve`: of each epoch.
    - `judged`: by split, `"train"`, `"val"` and `"test"`, those that have slides.
    - `predictions`: of all slides that are in a split, in the order of the table.
    - `seconds`: of training, in the earlier parts of a resumed run too.
    - `notes`: what makes the figures doubtful.

        >>> from dilkit.integrations.gigapath.finetuning import Finetuning
        >>> best = lambda record: min(record.curve, key=lambda epoch: epoch.val).epoch  # of a Finetuning, where val has slides
        >>> "curve" in Finetuning.__dataclass_fields__
        True
    """

    labels: str
    classes: tuple[str, ...]
    has_patients: bool
    drawn_splits: bool
    settings: Settings
    encoder: EncoderFacts
    tiles: int
    seconds: float
    losses: tuple[float, ...]
    curve: tuple[Epoch, ...]
    judged: dict[str, Judgement]
    predictions: tuple[Prediction, ...]
    notes: tuple[str, ...] = ()
