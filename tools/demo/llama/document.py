"""What the result of `dilkit demo --llama` says."""

from __future__ import annotations

from itertools import zip_longest

from dilkit.tools.demo.llama.record import BEFORE, DILATED, FULL, LlamaDemoResult
from dilkit.tools.demo.text.document import backend_rows, counted, headline, model_rows
from dilkit.tools.report.document import Axis, Document, Plot, Row, Series, Table, plots, tables
from dilkit.tools.report.headline import placed
from dilkit.tools.report.points import plain

LOSSES = ("tokens", BEFORE, DILATED, FULL)
METHOD = (
    "Bits per byte are the mean over windows of {:,} bytes of files that were never trained on. The Llama has random weights at "
    "first, and learns with transformers' own attention (sdpa). Then one copy of it is converted by "
    "dilkit.integrations.transformers.convert, another is left as it is, and both go on from the same weights, with the same "
    "windows in the same order, the same rates of learning and an optimizer begun anew."
)


def sentence(result: LlamaDemoResult) -> str:
    """For docs/measurements.md."""
    return placed(result, outcome(result))


def document(result: LlamaDemoResult) -> Document:
    """Losses by tokens, and what was changed by layer."""
    layers = tuple((f"{i}", line) for i, line in enumerate(result.layers))
    return Document(
        headline=headline("dilkit demo --llama", outcome(result), result),
        tables=tables(
            Table("Held-out bits per byte", LOSSES, tuple(_rows(result))),
            Table("What was converted", ("layer", "what"), layers),
            Table("The run", ("", "what"), _facts(result)),
        ),
        plots=plots(*_loss_plots(result)),
        method=METHOD.format(result.model.context),
    )


def outcome(result: LlamaDemoResult) -> str:
    """The losses after full attention, right after the conversion, and at the end of both trainings."""
    before, dilated, full = map(result.of, (BEFORE, DILATED, FULL))
    if before is None or dilated is None or full is None or not dilated.points or not full.points:
        return "not trained to its end: nothing to compare"
    losses = before.points[-1], dilated.points[0], dilated.points[-1], full.points[-1]
    learnt, converted, after, without = (f"{point.held_out:.3f}" for point in losses)
    return (
        f"held-out bits per byte {learnt} with full attention, {converted} when {result.model.pattern} takes its place, "
        f"{after} after {counted(dilated.steps, 'step')} more; {without} where attention stays full"
    )


def _rows(result: LlamaDemoResult) -> list[Row]:
    columns = [() if (one := result.of(name)) is None else one.points for name in LOSSES[1:]]
    rows = zip_longest(*columns)
    return [
        (
            f"{next(point.tokens for point in row if point):,}",
            *("-" if point is None else f"{point.held_out:.3f}" for point in row),
        )
        for row in rows
    ]


def _facts(result: LlamaDemoResult) -> tuple[Row, ...]:
    text = result.text
    return (
        ("text", f"{text.source}: {text.train_bytes:,} bytes to learn from, {text.held_out_bytes:,} held out"),
        *model_rows(result.model, f"{result.model.context:,} bytes of context"),
        *((one.attention, counted(one.steps, "step")) for one in result.trainings),
        *backend_rows(result),
    )


def _loss_plots(result: LlamaDemoResult) -> list[Plot]:
    """The held-out losses: of all trainings, two to the right of the one that they go on from, and of those two,
    in the same colours."""
    before = result.of(BEFORE)
    start = before.tokens if before else 0
    series = tuple(
        Series(
            one.attention, tuple(plain(point.tokens + start * (one.attention != BEFORE), point.held_out) for point in one.points)
        )
        for one in result.trainings
    )
    bytes_read = Axis("bytes of training", "number", log=False)
    from_zero, closer = (Axis("held-out bits per byte", "number", log=log) for log in (False, True))
    first, after = ([one for one in series if (one.name == BEFORE) is wanted] for wanted in (True, False))
    return [
        Plot("A Llama goes on with dilated attention", "lines", (*after, *first), (bytes_read, from_zero)),
        Plot("From there on, closer", "lines", tuple(after), (bytes_read, closer)),
    ]
