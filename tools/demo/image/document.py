"""What the result of `dilkit demo --image` says."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from statistics import median

from dilkit.tools.demo.image.record import ORDERS, ImageDemoResult
from dilkit.tools.demo.text.document import backend_rows, clock, counted, headline, model_rows
from dilkit.tools.demo.text.record import Evaluation
from dilkit.tools.report.document import Axis, Document, Plot, Point, Row, Series, Table, plots, tables
from dilkit.tools.report.headline import placed
from dilkit.tools.report.points import plain

LOSSES = ("seed", *(f"{order} loss" for order in ORDERS), f"{ORDERS[1]} less {ORDERS[0]}")
METHOD = (
    "The loss is the mean squared error of the hidden pixels, in units of the variance of the pixels that were trained on. It "
    "is taken on the held-out strip, of which nothing was trained on: {} squares, being every crop of it with several choices "
    "of what is hidden, the same for all models. For one seed both models start from the same weights, and in each step see "
    "the same crops with the same patches hidden. A difference stands out if it has the same sign for all seeds and its median "
    "exceeds the spread, which is the largest less the smallest loss of one order over the seeds. The guess without any "
    "training is the mean of the visible patches, weighted by 1 / distance^4. An order does not change how many patches are "
    "seen, but where they lie. This is one photograph, one model and one pattern: it shows what an order can do, not what it "
    "does elsewhere. The attention alone is given the order, `DilatedAttention(pattern, order=dilkit.order((rows, columns)))`; "
    "all else stays row-major. Aligned segments of such a grid are squares along a Hilbert curve, but in plain tiles as well: "
    "`dilkit order` compares them."
)


def sentence(result: ImageDemoResult) -> str:
    """For docs/measurements.md."""
    return placed(result, outcome(result))


def document(result: ImageDemoResult) -> Document:
    """Losses by seed, beside an untrained guess."""
    return Document(
        headline=headline("dilkit demo --image", outcome(result), result),
        tables=tables(_losses(result), Table("The run", ("", "what"), _facts(result))),
        plots=plots(_loss_plot(result)),
        method=METHOD.format(result.judged),
    )


def outcome(result: ImageDemoResult) -> str:
    """Which order has the lower loss, and whether that stands out from the spread over the seeds."""
    losses = result.losses()
    if not losses:
        return "No seed was trained to its end: nothing to compare"
    by_order = dict(zip(ORDERS, zip(*losses.values(), strict=True), strict=True))
    lower, higher = sorted(ORDERS, key=lambda order: median(by_order[order]))
    differences = [x - y for x, y in zip(by_order[higher], by_order[lower], strict=True)]
    spread = max(max(found) - min(found) for found in by_order.values())
    stands_out = len(losses) > 1 and min(differences) > 0 and median(differences) > spread
    medians = ", ".join(f"{order} {median(by_order[order]):.4f}" for order in (lower, higher))
    return (
        f"Held-out loss, median of {counted(len(losses), 'seed')}: {medians}. The difference, {median(differences):.4f} in the "
        f"median, {'stands out' if stands_out else 'does not stand out'} from the spread over seeds, {spread:.4f}"
    )


def _losses(result: ImageDemoResult) -> Table:
    """A row a seed, then the median of each column."""
    rows = {str(seed): (*losses, losses[1] - losses[0]) for seed, losses in result.losses().items()}
    if rows:
        rows["median"] = tuple(median(column) for column in zip(*rows.values(), strict=True))
    shown = ((name, f"{first:.4f}", f"{second:.4f}", f"{less:+.4f}") for name, (first, second, less) in rows.items())
    return Table("Losses", LOSSES, tuple(shown))


def _facts(result: ImageDemoResult) -> tuple[Row, ...]:
    """What is trained, on what, and which backend computes it and why."""
    model = result.model
    patches = f"{model.grid} x {model.grid} patches of {model.patch} x {model.patch} pixels"
    return (
        ("picture", f"{result.photo}; the strip down its middle is held out"),
        ("task", f"crops of {patches}; {model.hidden:.0%} of the patches are hidden, and predicted from the rest"),
        *model_rows(model, f"{model.context:,} tokens"),
        *((order, _trained(result, order)) for order in ORDERS),
        ("guess", f"loses {result.guess:.4f} without any training"),
        *backend_rows(result),
    )


def _trained(result: ImageDemoResult, order: str) -> str:
    """What was spent on the trainings in one order."""
    trainings = [one for one in result.trainings if one.order == order]
    steps = counted(sum(one.steps for one in trainings), "step")
    return f"{counted(len(trainings), 'training')}: {steps} in {clock(sum(one.seconds for one in trainings))}"


def _loss_plot(result: ImageDemoResult) -> Plot:
    """For each order the median over the seeds, with the least and the largest; and what the guess loses."""
    series: list[Series] = []
    for order in ORDERS:
        by_judgement = zip_longest(*(one.points for one in result.trainings if one.order == order))
        series.append(Series(order, tuple(_range(list(filter(None, points))) for points in by_judgement)))
    last = max((point.tokens for one in result.trainings for point in one.points), default=0)
    series.append(Series("guess", (plain(0, result.guess), plain(last, result.guess)), dashed=True))
    axes = Axis("patches in training", "number", log=False), Axis("held-out loss", "number")
    return Plot("Held-out loss: median and range over the seeds", "lines", tuple(series), axes)


def _range(points: Sequence[Evaluation]) -> Point:
    losses = [point.held_out for point in points]
    return Point(median(point.tokens for point in points), median(losses), min(losses), max(losses))
