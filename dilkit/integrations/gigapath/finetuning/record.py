"""The record of a fine-tuning run, as values that a JSON file can hold. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from dilkit.integrations.gigapath.finetuning.settings import Settings


@dataclass(frozen=True)
class Interval:
    """A value with its 95% interval, of a bootstrap over patients; `resamples` are those that the value is defined for."""

    value: float
    low: float
    high: float
    resamples: int


@dataclass(frozen=True)
class Epoch:
    """Losses: `train` as the mean over the epoch, `val` at its end, where it is defined. `rate`: that of the last step."""

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


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The result of a slide: probabilities of the classes, in their order, or a risk, the logarithm of a relative hazard."""

    slide: str
    patient: str
    line: int
    split: str
    label: str | None = None
    time: float | None = None
    event: bool | None = None
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
