"""What the result of `dilkit finetune-slide` says."""

from __future__ import annotations

from collections.abc import Sequence

from dilkit.integrations.gigapath.finetuning.record import Finetuning, Interval, Judgement, Roc
from dilkit.tools.finetuning.record import FinetuneResult
from dilkit.tools.report.document import Axis, Document, Plot, Point, Row, Series, Table, plots, tables
from dilkit.tools.report.headline import place, placed
from dilkit.tools.report.points import plain

MOST_POINTS = 200
"""Of a curve: a step more or less is not seen."""
METHOD = (
    "Intervals hold 95% of {:,} resamples of a bootstrap over patients. AUROC is over slides, of more than two classes the mean "
    "of each against all others; Harrell's C-index is over patients, each with the mean risk of the patient's slides. Scores are "
    "those of the last epoch. AdamW; the learning rate of a layer is {:g} times that of the next, and that of the head {:.3g} "
    "after a warm-up of {:g} epochs, then half a cosine."
)


def sentence(result: FinetuneResult) -> str:
    """For docs/measurements.md."""
    return placed(result, outcome(result.run))


def outcome(run: Finetuning) -> str:
    """How right the scores of the held-out patients are."""
    held_out = run.judged["test"]
    return f"{_metric(run)} {_shown(_value(held_out))} on {held_out.patients:,} held-out patients ({held_out.slides:,} slides)"


def document(result: FinetuneResult) -> Document:
    """What was learnt and how well."""
    run = result.run
    judged = Table(
        "How right the scores are",
        ("split", "slides", "patients", _metric(run), "95% interval"),
        tuple((name, f"{one.slides:,}", f"{one.patients:,}", *_cells(_value(one))) for name, one in run.judged.items()),
    )
    classes = Table("By class, on test", ("class", "AUROC", "95% interval"), tuple(_class_rows(run.judged["test"])))
    curve = Table("Training", ("epoch", "rate", "loss", "loss on val"), tuple(_epoch_rows(run)))
    settings = run.settings
    return Document(
        headline=(f"dilkit finetune-slide: {outcome(run)}", place(result)),
        tables=tables(judged, classes, curve, Table("The run", ("", "what"), _facts(result))),
        plots=plots(_loss_plot(run), _roc_plot(run.judged["test"].roc)),
        notes=run.notes,
        method=METHOD.format(settings.resamples, settings.layer_decay, settings.peak_rate, settings.warmup_epochs),
    )


def _metric(run: Finetuning) -> str:
    return "AUROC" if run.classes else "C-index"


def _value(judgement: Judgement) -> Interval | None:
    return judgement.auroc or judgement.c_index


def _cells(interval: Interval | None) -> Row:
    return ("-", "-") if interval is None else (f"{interval.value:.3f}", f"{interval.low:.3f} - {interval.high:.3f}")


def _shown(interval: Interval | None) -> str:
    return "not defined" if interval is None else "{} ({})".format(*_cells(interval))


def _class_rows(judgement: Judgement) -> list[Row]:
    return [(name, *_cells(interval)) for name, interval in judgement.by_class.items()]


def _epoch_rows(run: Finetuning) -> list[Row]:
    return [
        (f"{one.epoch}", f"{one.rate:.3g}", f"{one.train:.4f}", "-" if one.val is None else f"{one.val:.4f}") for one in run.curve
    ]


def _facts(result: FinetuneResult) -> tuple[Row, ...]:
    run, encoder = result.run, result.run.encoder
    sizes = f"{encoder.depth} layers, width {encoder.embed_dim}, {encoder.num_heads} heads, {encoder.in_chans} features a tile"
    trained = f"{encoder.trained_parameters:,} of {encoder.parameters:,} parameters" + ", frozen" * run.settings.freeze
    return (
        ("labels", f"{run.labels}: {', '.join(run.classes) or 'time and event'}; {run.tiles:,} tiles"),
        ("splits", "drawn, patient by patient" if run.drawn_splits else "of the column split"),
        ("encoder", f"{sizes}, {encoder.pooling}; trained: {trained}"),
        ("began with", result.checkpoint or "random weights"),
        ("training", f"{len(run.losses):,} steps of {run.settings.accumulate} slides in {run.seconds:,.0f} s"),
    )


def _loss_plot(run: Finetuning) -> Plot:
    steps = len(run.losses) / max(len(run.curve), 1)
    by_step = _thinned([plain((i + 1) / steps, loss) for i, loss in enumerate(run.losses)])
    train = [plain(one.epoch, one.train) for one in run.curve]
    val = [plain(one.epoch, one.val) for one in run.curve if one.val is not None]
    series = Series("each step", tuple(by_step), dashed=True), Series("train", tuple(train)), Series("val", tuple(val))
    axes = Axis("epochs", "number", log=False), Axis("loss", "number", log=False)
    return Plot("Loss in the course of training", "lines", series, axes)


def _roc_plot(curves: Sequence[Roc]) -> Plot:
    """Held-out ROC curves beside what guessing gives."""
    drawn = [Series(one.label, tuple(_thinned([plain(x, y) for x, y in one.points]))) for one in curves]
    chance = Series("by chance", (plain(0.0, 0.0), plain(1.0, 1.0)), dashed=True)
    axes = Axis("false-positive rate", "number", log=False), Axis("true-positive rate", "number", log=False)
    return Plot("ROC of held-out slides", "lines", (*drawn, chance), axes)


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most so many of the points as are drawn, the last one always."""
    step = -(-len(points) // MOST_POINTS) or 1
    return [*points[::step], *(points[-1:] if (len(points) - 1) % step else [])]
