"""`finetune`: labels, files of tile features and a slide encoder in; a trained model, and a record of all that was found, out."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilkit import files
from dilkit.integrations.gigapath.config import SIZES
from dilkit.integrations.gigapath.encoder import SlideEncoder
from dilkit.integrations.gigapath.finetuning.labels import SPLITS, Example, Labels, Splits, check_splits, split_examples
from dilkit.integrations.gigapath.finetuning.metrics import auroc_interval, c_index_interval, margins, roc, torchmetrics_curves
from dilkit.integrations.gigapath.finetuning.model import SlideFile, SlideModel, saved, seeded, slide_reader
from dilkit.integrations.gigapath.finetuning.record import EncoderFacts, Finetuning, Judgement, Prediction, Settings
from dilkit.integrations.gigapath.finetuning.training import Objective, Training
from dilkit.integrations.ranks import digest

CHECKPOINT, MODEL = "checkpoint.pt", "model.pt"
UNKNOWN_PATIENTS = (
    "{} has no column patient: each slide was taken for a patient of its own. Where several are of one patient, they may lie on "
    "both sides, scores are too good and intervals too narrow"
)


def finetune(
    labels: Labels,
    slides: Sequence[SlideFile],
    encoder: SlideEncoder,
    out: str | Path,
    settings: Settings | None = None,
    *,
    splits: Splits | None = None,
    resume: bool = False,
    progress: Callable[[int, int, float], None] | None = None,
) -> Finetuning:
    """Train a linear head on the embeddings of slides, together with the encoder or alone, and return the results.

    - `labels`: of `read_labels`. Classes are learnt with cross entropy, survival with Cox's partial likelihood among the slides
      of a step, ties by Efron's rule.
    - `slides`: the files of the slides, of `look_through`.
    - `encoder`: a `SlideEncoder`, which is trained in place. `activation_checkpointing` and dropout are its own.
    - `out`: the folder of `checkpoint.pt`, from which an interrupted run goes on, and of `model.pt`: `{"model": weights of the
      encoder, "head": its own, "classes": names, ...}` and the encoder's settings, which `load_slide_encoder` reads.
    - `settings`: a `Settings`. `splits`: by default `split_examples(labels, settings.seed)`.
    - `resume`: go on from `checkpoint.pt`; the losses are those of a run without interruption.
    - `progress`: called with the step, the number of steps and the loss.

    Raises ValueError for slides that do not fit the encoder, an encoder over ranks, a checkpoint that is there without `resume`,
    is missing with it, or is of another run, and a loss that is not finite; ImportError where torchmetrics is missing, which
    classes are judged with.

        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from dilkit.integrations.gigapath import SlideEncoder, SlideEncoderConfig
        >>> from dilkit.integrations.gigapath.finetuning import Settings, finetune, look_through, read_labels
        >>> config = SlideEncoderConfig(embed_dim=16, depth=1, num_heads=2, in_chans=4, segment_lengths=(4, 8, 16, 32, 64))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lines = ["slide,patient,time,event,split"]
        ...     for i in range(6):
        ...         coords = 256 * torch.tensor([[x, 0] for x in range(4 + i)])
        ...         torch.save({"features": torch.randn(4 + i, 4), "coords": coords}, Path(folder, f"{i}.pt"))
        ...         lines.append(f"{i},{i},{10 + i},1,{'train' if i < 4 else 'test'}")
        ...     _ = Path(folder, "labels.csv").write_text("\\n".join(lines))
        ...     labels = read_labels(Path(folder, "labels.csv"))
        ...     settings = Settings(epochs=2, accumulate=4, resamples=10)
        ...     record = finetune(labels, look_through(labels, Path(folder)), SlideEncoder(config), Path(folder, "out"), settings)
        >>> len(record.losses), record.judged["test"].patients
        (2, 2)
    """
    settings, out = settings or Settings(), Path(out)
    if not labels.is_survival:
        torchmetrics_curves()
    _check_slides(labels, slides, encoder)
    if splits is None:
        splits = split_examples(labels, settings.seed)
    check_splits(labels, splits)
    settings, notes = settings.for_cohort(len(splits.train))
    objective = Objective(labels)
    with seeded(settings.seed, encoder.cls_token.device):
        model = SlideModel(encoder, objective.outputs, slide_reader(slides, encoder.cls_token), settings.freeze)
    training = Training(model, objective, splits, settings, _facts(labels, slides, encoder, splits, settings))
    _begin(training, out / CHECKPOINT, resume)
    training.run(out / CHECKPOINT, progress)
    with files.replacing(out / MODEL) as file:
        torch.save(saved(model, classes=list(labels.classes), tile_encoder=slides[0].tile_encoder), file)
    return _record(labels, slides, training, notes)


def _begin(training: Training, checkpoint: Path, resume: bool) -> None:
    if resume:
        if not checkpoint.exists():
            raise ValueError(f"resume: {checkpoint} is not there; nothing has been saved in this folder: leave resume out")
        training.load(checkpoint)
    for path in (checkpoint, checkpoint.with_name(MODEL)):
        if path.exists() and not resume:
            raise ValueError(f"{path} is there, of an earlier run; resume goes on from it, or else choose another folder")


def _check_slides(labels: Labels, slides: Sequence[SlideFile], encoder: SlideEncoder) -> None:
    if encoder.ranks is not None:
        raise ValueError("encoder is over ranks (comm=), which finetune is not; make it without comm")
    if len(slides) != len(labels.examples):
        raise ValueError(
            f"slides has {len(slides)} files for {len(labels.examples)} lines of labels; give look_through(labels, ...)"
        )
    needed = encoder.config.in_chans
    for one, example in zip(slides, labels.examples, strict=True):
        if one.width != needed:
            raise ValueError(
                f"{labels.source}: line {example.line}: {one.path} has {one.width} features a tile, and the encoder takes "
                f"in_chans={needed}"
            )


def _facts(
    labels: Labels, slides: Sequence[SlideFile], encoder: SlideEncoder, splits: Splits, settings: Settings
) -> dict[str, str]:
    places = [(one.path.name, one.tiles, one.tile_size) for one in slides]
    weights = "".join(digest(weight) for weight in encoder.state_dict().values())
    return dict(
        **{name: str(value) for name, value in asdict(settings).items()},
        **{name: _short(str(value)) for name, value in dict(labels=labels.examples, splits=splits, slides=places).items()},
        **{name: str(value) for name, value in asdict(encoder.config).items() if name != "tile_size"},
        weights=_short(weights),
    )


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _record(labels: Labels, slides: Sequence[SlideFile], training: Training, notes: Sequence[str]) -> Finetuning:
    scores = training.scores(range(len(labels.examples)))
    notes = [*notes, *([] if labels.has_patients else [UNKNOWN_PATIENTS.format(labels.source)])]
    notes += [f"{labels.source}: column {name} is not read" for name in labels.unread]
    return Finetuning(
        labels=labels.source,
        classes=labels.classes,
        has_patients=labels.has_patients,
        drawn_splits=training.splits.drawn,
        settings=training.settings,
        encoder=_encoder_facts(training.model),
        tiles=sum(one.tiles for one in slides),
        seconds=training.seconds,
        losses=tuple(training.losses),
        curve=tuple(training.curve),
        judged=judged(labels, training.splits, scores, training.settings),
        predictions=predictions(labels, training.splits, scores),
        notes=tuple(notes),
    )


def _encoder_facts(model: SlideModel) -> EncoderFacts:
    config = model.encoder.config
    return EncoderFacts(
        **{name: getattr(config, name) for name in (*SIZES, "dropout", "drop_path")},
        pooling="mean of tiles" if config.global_pool else "class token",
        activation_checkpointing=model.encoder.activation_checkpointing,
        parameters=sum(weight.numel() for weight in model.parameters()),
        trained_parameters=sum(weight.numel() for weight in model.trained().values()),
    )


def predictions(labels: Labels, splits: Splits, scores: Tensor) -> tuple[Prediction, ...]:
    side = {index: name for name in SPLITS for index in getattr(splits, name)}
    results = []
    for index in sorted(side):
        one, row = labels.examples[index], scores[index]
        found: dict[str, Any] = (
            dict(risk=row.item()) if labels.is_survival else dict(probabilities=tuple(row.softmax(0).tolist()))
        )
        results.append(Prediction(**asdict(one) | found | dict(split=side[index])))
    return tuple(results)


def judged(labels: Labels, splits: Splits, scores: Tensor, settings: Settings) -> dict[str, Judgement]:
    judge = _judged_survival if labels.is_survival else _judged_classes
    by_split = {}
    for name in SPLITS:
        if indices := list(getattr(splits, name)):
            by_split[name] = judge([labels.examples[i] for i in indices], scores[indices], labels.classes, settings)
    return by_split


def _judged_classes(examples: Sequence[Example], scores: Tensor, classes: Sequence[str], settings: Settings) -> Judgement:
    targets = torch.tensor([classes.index(one.label) for one in examples if one.label is not None])
    patients = [one.patient for one in examples]
    numbers = range(1 if len(classes) == 2 else 0, len(classes))
    drawing = settings.resamples, settings.seed
    whole = auroc_interval(scores, targets, numbers, patients, *drawing)
    single = {n: auroc_interval(scores, targets, [n], patients, *drawing) for n in numbers} if len(numbers) > 1 else {1: whole}
    by_margin, defined = margins(scores), [n for n in numbers if single[n]]
    curves = tuple(roc(classes[n], by_margin[:, n], targets == n) for n in defined)
    by_class = {classes[n]: interval for n, interval in single.items() if interval and len(numbers) > 1}
    return Judgement(slides=len(examples), patients=len(set(patients)), auroc=whole, by_class=by_class, roc=curves)


def _judged_survival(examples: Sequence[Example], scores: Tensor, classes: Sequence[str], settings: Settings) -> Judgement:
    risks: dict[str, list[float]] = defaultdict(list)
    of_patient: dict[str, Example] = {}
    for one, risk in zip(examples, scores[:, 0].tolist(), strict=True):
        risks[one.patient].append(risk)
        of_patient[one.patient] = one
    mean = torch.tensor([sum(values) / len(values) for values in risks.values()], dtype=torch.float64)
    times = torch.tensor([one.time for one in of_patient.values()], dtype=torch.float64)
    events = torch.tensor([bool(one.event) for one in of_patient.values()])
    interval = c_index_interval(mean, times, events, settings.resamples, settings.seed)
    return Judgement(slides=len(examples), patients=len(of_patient), c_index=interval)
