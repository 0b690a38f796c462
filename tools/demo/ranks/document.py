"""What the result of `dilkit demo --ranks` says."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from math import isfinite

from dilkit.tools.console.text import in_bytes
from dilkit.tools.demo.ranks.comparison import bound, relative
from dilkit.tools.demo.ranks.record import RanksDemoResult, RanksTraining, StepBytes
from dilkit.tools.demo.text.document import backend_rows, clock, counted, headline, model_rows
from dilkit.tools.report.document import Axis, Document, Plot, Row, Series, Table, plots, tables
from dilkit.tools.report.headline import placed
from dilkit.tools.report.points import plain

MOST_ROWS = 20
"""Of the table of losses: of more steps every second, third, ... one is shown, and the last."""
DIFFERENCES = ("of", "largest relative difference", "where", "bound", "")
SENT = ("branch", "route", "forward", "backward")
RING = "comparison: full KV ring"
METHOD = (
    "On {} ranks, each replica reads a window of {:,} bytes in a step, whose rows are cut over {}; attention is "
    "`RingDilatedAttention`. `fully_shard` of torch.distributed.fsdp (FSDP2) shards the parameters over the ranks of a sequence, "
    "copies them over the replicas, and averages gradients over all ranks: a rank's loss is the number of ranks over the rows of "
    "the step, times the sum over its rows. One process computes the same windows whole, with the same weights at first and the "
    "same optimizer (AdamW, gradients clipped to a norm of 1). A loss is in bits per byte and before the step; relative "
    "differences are those from one process, of a parameter by the norms of the tensors; bounds are units of rounding in fp32 "
    "by step, which tools/demo/ranks/comparison.py explains. Bytes sent are those of attention: planned by the exchange plan, "
    "counted by the transport (`comm.sent_bytes`); what FSDP2 sends is not among them. A ring of all keys and values passes "
    "those of each rank to all others, causal or not, and returns as many gradients."
)


def sentence(result: RanksDemoResult) -> str:
    """For docs/measurements.md."""
    return placed(result, outcome(result))


def outcome(result: RanksDemoResult) -> str:
    """How far the trainings are apart, and what is sent."""
    if not result.differences:
        return "not trained to their ends: nothing to compare"
    apart = ", ".join(f"{one.quantity} {one.value:.1e}" for one in result.differences)
    verdict = "rounding" if result.agrees else "MORE THAN ROUNDING"
    steps = 0 if result.alone is None else result.alone.steps
    sent, ring = (in_bytes(x) for x in (max(result.sent.planned), result.sent.full_ring.total))
    return (
        f"{counted(steps, 'step')} on {result.layout} ranks and in one process differ by {verdict} (relative, at most: {apart}); "
        f"attention sends {sent} a step from the busiest rank, a ring of all keys and values {ring}"
    )


def document(result: RanksDemoResult) -> Document:
    """Differences, losses, bytes."""
    layout = result.layout
    return Document(
        headline=headline("dilkit demo --ranks", outcome(result), result),
        tables=tables(
            Table("One process and the ranks", DIFFERENCES, tuple(_differences(result))),
            Table(f"Bytes of attention in a step: rank {result.sent.rank} of a sequence", SENT, tuple(_sent(result))),
            Table("Bits per byte", ("step", "one process", f"{layout} ranks", "relative difference"), tuple(_losses(result))),
            Table("The run", ("", "what"), _facts(result)),
        ),
        plots=plots(_loss_plot(result), _sent_plot(result), _difference_plot(result)),
        method=METHOD.format(layout, result.model.context, counted(layout.sequence, "rank")),
    )


def _differences(result: RanksDemoResult) -> list[Row]:
    verdicts = {True: "rounding", False: "MORE THAN ROUNDING"}
    return [
        (one.quantity, f"{one.value:.1e}", one.where, f"{one.bound:.1e}", verdicts[one.is_rounding]) for one in result.differences
    ]


def _sent(result: RanksDemoResult) -> list[Row]:
    """The branches, what a rank has sent in all, and the ring that is compared with."""
    rows: list[Row] = [(one.name, one.route, in_bytes(one.forward), in_bytes(one.backward)) for one in _bars(result)]
    trained = result.on_ranks
    if trained and result.sent.counted:
        all_ranks = trained.steps * result.layout.data * sum(result.sent.planned)
        total = sum(result.sent.counted)
        agreed = "as planned" if total == all_ranks else f"planned: {in_bytes(all_ranks)}"
        rows.append(("counted: all ranks, all steps", agreed, in_bytes(total), "both phases"))
    return rows


def _bars(result: RanksDemoResult) -> list[StepBytes]:
    """The branches, all of them, and the ring."""
    sent = result.sent
    both = dict(forward=sum(one.forward for one in sent.branches), backward=sum(one.backward for one in sent.branches))
    return [*sent.branches, StepBytes(name="all branches", route="", **both), replace(sent.full_ring, name=RING)]


def _losses(result: RanksDemoResult) -> list[Row]:
    alone, ranks = (_course(one) for one in (result.alone, result.on_ranks))
    apart = relative(alone, ranks)
    rows = list(zip_longest(alone, ranks, apart))
    every = -(-len(rows) // MOST_ROWS) or 1
    shown = [i for i in range(len(rows)) if i % every == 0 or i == len(rows) - 1]
    return [(f"{i + 1}", *("-" if x is None else f"{x:.5f}" for x in rows[i][:2]), _small(rows[i][2])) for i in shown]


def _small(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _course(training: RanksTraining | None) -> list[float]:
    """The loss of each step."""
    return [] if training is None else [loss for *_, loss in training.train_curve]


def _facts(result: RanksDemoResult) -> tuple[Row, ...]:
    """What is trained, on what, where, and how well."""
    text, ranks = result.text, result.ranks
    rows = [
        ("text", f"{text.source}: {text.train_bytes:,} bytes to learn from, {text.held_out_bytes:,} held out"),
        *model_rows(result.model, f"{result.model.context:,} bytes of context"),
    ]
    where = f"{counted(ranks.world_size, 'rank')} ({ranks.transport}) of "
    for name, on, one in ((f"{result.layout} ranks", where, result.on_ranks), ("one process", "", result.alone)):
        rows += [(name, _trained(one, on))] if one else []
    return (*rows, *backend_rows(result))


def _trained(training: RanksTraining, where: str) -> str:
    held_out = " -> ".join(f"{point.held_out:.3f}" for point in training.points)
    spent = f"{counted(training.steps, 'step')} in {clock(training.seconds)}"
    return f"{spent}, {where}{counted(training.threads, 'thread')}; held out: {held_out} bits per byte"


def _loss_plot(result: RanksDemoResult) -> Plot:
    courses = {"one process": result.alone, f"{result.layout} ranks": result.on_ranks}
    series = [
        Series(name, tuple(plain(step, loss) for step, loss in enumerate(_course(one), 1))) for name, one in courses.items()
    ]
    axes = Axis("step", "number", log=False), Axis("bits per byte", "number", log=False)
    return Plot("The same training in one process and on ranks", "lines", tuple(series), axes)


def _difference_plot(result: RanksDemoResult) -> Plot:
    """Relative differences by step, with the bound of each quantity; two losses that are equal have no place on the axis."""
    alone, ranks = result.alone, result.on_ranks
    series: list[Series] = []
    if alone and ranks:
        last = max(alone.steps, 1)
        apart = dict(loss=relative(_course(alone), _course(ranks)), norm=relative(alone.norms, ranks.norms))
        names = dict(loss="loss", norm="norm of the gradients")
        for name, values in apart.items():
            series.append(
                Series(names[name], tuple(plain(step, value) for step, value in enumerate(values, 1) if isfinite(value)))
            )
        for name in apart:
            limit = bound(name, last)
            series.append(Series(f"bound: {names[name]}", (plain(1, limit), plain(last, limit)), dashed=True))
    axes = Axis("step", "number", log=False), Axis("relative difference", "number")
    return Plot("How far they are apart", "points", tuple(series), axes)


def _sent_plot(result: RanksDemoResult) -> Plot:
    bars = _bars(result)
    series = (
        Series("forward", tuple(plain(one.name, one.forward) for one in bars)),
        Series("backward", tuple(plain(one.name, one.backward) for one in bars)),
    )
    axes = Axis("", "number"), Axis("bytes that the busiest rank sends", "bytes")
    return Plot("Attention in a step, by branch of the pattern", "bars", series, axes)
