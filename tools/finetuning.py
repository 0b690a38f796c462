"""The report of `dilkit finetune-slide`, from a result whose fact "run" is an encoded `Finetuning`."""

from __future__ import annotations

from collections.abc import Iterable

from dilkit.integrations.gigapath.finetuning.record import Finetuning, Interval, Judgement
from dilkit.tools.report.document import Axis, Plot, Series, Table
from dilkit.tools.report.points import plain
from dilkit.tools.report.runs import RunReport, thinned
from dilkit.tools.results.decode import decode
from dilkit.tools.results.rows import RowsResult


def run_of(result: RowsResult) -> Finetuning:
    """Return the record of the run. Raises `DecodeError` for a damaged one."""
    return decode(Finetuning, result.facts["run"], "facts.run")


def outcome(result: RowsResult) -> str:
    """Return how right the scores of the held-out patients are."""
    run = run_of(result)
    held_out = run.judged["test"]
    interval = _value(held_out)
    shown = "{} ({})".format(*_cells(interval)) if interval else "not defined"
    return f"{_metric(run)} {shown} on {held_out.patients:,} held-out patients ({held_out.slides:,} slides)"


def made_tables(result: RowsResult) -> Iterable[Table]:
    """Yield scores by split and class, the course of training, and the facts of the run."""
    run = run_of(result)
    judged = [(name, f"{one.slides:,}", f"{one.patients:,}", *_cells(_value(one))) for name, one in run.judged.items()]
    header = "split", "slides", "patients", _metric(run), "95% interval"
    yield Table("How right the scores are", header, tuple(judged))
    classes = [(name, *_cells(interval)) for name, interval in run.judged["test"].by_class.items()]
    yield Table("By class, on test", ("class", "AUROC", "95% interval"), tuple(classes))
    losses = [(f"{x.epoch}", f"{x.rate:.3g}", f"{x.train:.4f}", "-" if x.val is None else f"{x.val:.4f}") for x in run.curve]
    yield Table("Training", ("epoch", "rate", "loss", "loss on val"), tuple(losses))
    encoder = run.encoder
    sizes = f"{encoder.depth} layers, width {encoder.embed_dim}, {encoder.num_heads} heads, {encoder.in_chans} features a tile"
    trained = f"{encoder.trained_parameters:,} of {encoder.parameters:,} parameters" + ", frozen" * run.settings.freeze
    facts = (
        ("labels", f"{run.labels}: {', '.join(run.classes) or 'time and event'}; {run.tiles:,} tiles"),
        ("splits", "drawn, patient by patient" if run.drawn_splits else "of the column split"),
        ("encoder", f"{sizes}, {encoder.pooling}; trained: {trained}"),
        ("began with", result.facts["checkpoint"] or "random weights"),
        ("training", f"{len(run.losses):,} steps of {run.settings.accumulate} slides in {run.seconds:,.0f} s"),
    )
    yield Table("The run", ("", "what"), facts)


def made_plots(result: RowsResult) -> Iterable[Plot]:
    """Yield the losses, and ROC curves of held-out slides beside chance."""
    run = run_of(result)
    steps = len(run.losses) / max(len(run.curve), 1)
    by_step = thinned([plain((i + 1) / steps, loss) for i, loss in enumerate(run.losses)])
    train = tuple(plain(one.epoch, one.train) for one in run.curve)
    val = tuple(plain(one.epoch, one.val) for one in run.curve if one.val is not None)
    axes = Axis("epochs", "number", log=False), Axis("loss", "number", log=False)
    series = Series("each step", by_step, dashed=True), Series("train", train), Series("val", val)
    yield Plot("Loss in the course of training", "lines", series, axes)
    curves = [Series(one.label, thinned([plain(x, y) for x, y in one.points])) for one in run.judged["test"].roc]
    chance = Series("by chance", (plain(0.0, 0.0), plain(1.0, 1.0)), dashed=True)
    axes = Axis("false-positive rate", "number", log=False), Axis("true-positive rate", "number", log=False)
    yield Plot("ROC of held-out slides", "lines", (*curves, chance), axes)


def _metric(run: Finetuning) -> str:
    return "AUROC" if run.classes else "C-index"


def _value(judgement: Judgement) -> Interval | None:
    return judgement.auroc or judgement.c_index


def _cells(interval: Interval | None) -> tuple[str, str]:
    return ("-", "-") if interval is None else (f"{interval.value:.3f}", f"{interval.low:.3f} - {interval.high:.3f}")


REPORT = RunReport(
    "dilkit finetune-slide", outcome, made_tables, made_plots,
    "Intervals hold 95% of {run[settings][resamples]:,} resamples of a bootstrap over patients. AUROC is over slides, of more "
    "than two classes the mean of each against all others; Harrell's C-index is over patients, each with the mean risk of the "
    "patient's slides. Scores are those of the last epoch. AdamW; the learning rate of a layer is {run[settings][layer_decay]:g} "
    "times that of the next, and that of the head {peak_rate:.3g} after a warm-up of {run[settings][warmup_epochs]:g} epochs, "
    "then half a cosine.",
    lambda result: run_of(result).notes,
)  # fmt: skip
