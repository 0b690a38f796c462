"""What the result of `dilkit demo --image` says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import median

from dilkit.tools.report.document import Axis, Document, Plot, Point, Row, Series, Table, plots, tables
from dilkit.tools.report.headline import place, placed
from dilkit.tools.report.kinds.demo import candidates, clock, counted, interruption
from dilkit.tools.report.points import plain
from dilkit.tools.results.kinds.demo_image import CURVES, ImageDemoResult, Judgement, Outcome, PairTraining

NAMES = {"row-major": "row-major", "hilbert": "Hilbert"}
GUESSES = {
    "mean": "the mean of the visible patches",
    "nearest": "the nearest visible patch",
    "weighted": "all visible patches, weighted by 1 / distance^4",
}
TRAINING = ("seed", "step", *(f"{name} loss" for name in NAMES.values()), "Hilbert less row-major", "time")
METHOD = (
    "The loss is the mean squared error of the hidden pixels, in units of the variance of the pixels that were trained on. It "
    "is taken on the held-out strip, of which nothing was trained on: {} squares, being every crop of it with {} choices of "
    "what is hidden, the same for all models. For one seed both models start from the same weights, and in each step see the "
    "same crops with the same patches hidden. A difference stands out if it has the same sign for all seeds and its median "
    "exceeds the spread, which is the largest less the smallest loss of one order over the seeds. An order does not change "
    "how many patches are seen, but where they lie. This is one photograph, one model and one pattern: it shows what an order "
    "can do, not what it does elsewhere. The attention alone is given the order, `DilatedAttention(pattern, "
    "order=dilkit.order((rows, columns)))`; all else stays row-major. Aligned segments of such a grid are squares along a "
    "Hilbert curve, but in plain tiles as well: `dilkit order` compares them."
)


def sentence(result: ImageDemoResult) -> str:
    """For README.md."""
    return placed(result, outcome(result.outcome))


def document(result: ImageDemoResult) -> Document:
    """Losses by seed, beside untrained guesses, and what a patch sees under each order."""
    training = result.training
    return Document(
        headline=(f"dilkit demo --image: {outcome(result.outcome)}", place(result), *interruption(result.interrupted)),
        tables=tables(_losses(result), _guesses(result), _sight(result), Table("The run", ("", "what"), facts(result))),
        plots=plots(loss_plot(result)),
        notes=(_speed(result),),
        method=METHOD.format(training.judged_crops, training.masks),
    )


def facts(result: ImageDemoResult) -> tuple[Row, ...]:
    """What is trained, on what, and which backend computes it and why."""
    photo, model, training = result.photo, result.model, result.training
    first, last = photo.held_out_columns
    patches = f"{model.grid} x {model.grid} patches of {model.patch} x {model.patch} pixels"
    sizes = f"{model.layers} layers, width {model.width}, {model.heads} heads, {model.cells:,} tokens"
    pairs = f"{counted(training.seeds, 'seed')}, for each two models, alike in all but the order of their tokens"
    return (
        ("picture", f"{photo.source}, {photo.columns} x {photo.rows} pixels; columns {first}-{last - 1} are held out"),
        ("task", f"crops of {patches}; {model.hidden:.0%} of the patches are hidden, and predicted from the rest"),
        ("model", f"{model.parameters / 1e6:.2f} M parameters: {sizes}"),
        ("attention", f"{model.pattern}: {model.share_of_dense:.1%} of the work of dense attention"),
        ("training", f"{pairs}: {counted(training.steps, 'step')} of {counted(training.batch, 'crop')}"),
        *candidates(result.backend),
    )


def training_row(training: PairTraining) -> Row:
    """The last judgement of a seed's two trainings."""
    point = training.points[-1]
    seconds = clock(sum(training.seconds.values()))
    return str(training.seed), f"{point.step:,}", *_row(point.held_out), seconds


def _row(losses: Mapping[str, float]) -> Row:
    first, second = (losses[curve] for curve in CURVES)
    return f"{first:.4f}", f"{second:.4f}", f"{second - first:+.4f}"


def outcome(found: Outcome | None) -> str:
    """Which order has the lower loss, and whether that stands out from the spread over the seeds."""
    if found is None:
        return "No seed was trained to its end: nothing to compare"
    lower, higher = sorted(CURVES, key=found.medians.__getitem__)
    losses = ", ".join(f"{NAMES[curve]} {found.medians[curve]:.4f}" for curve in (lower, higher))
    return f"Held-out loss, median of {counted(len(found.seeds), 'seed')}: {losses}. {_judgement(found, NAMES[lower])}"


def _judgement(found: Outcome, lower: str) -> str:
    difference, spread = f"{abs(found.median_difference):.4f}", f"the spread over seeds, {found.spread:.4f}"
    if len(found.seeds) < 2:
        return "One seed says nothing of the spread"
    if found.stands_out:
        return f"{lower} order is better for every seed, by {difference} in the median, which exceeds {spread}"
    if len({x > 0 for x in found.differences}) > 1:
        return (
            f"Which is better depends on the seed: the difference, {difference} in the median, does not stand out from {spread}"
        )
    return f"The difference, {difference} in the median, has the same sign for all seeds, but does not exceed {spread}"


def _losses(result: ImageDemoResult) -> Table:
    """A row a seed, then the medians."""
    rows = [training_row(training) for training in result.training.twins if training.points]
    if found := result.outcome:
        decibels = (f"{found.decibels[curve]:.2f}" for curve in CURVES)
        median_difference = f"{found.median_difference:+.4f}"
        rows += [("median", "", *_row(found.medians)[:2], median_difference, ""), ("the same in dB", "", *decibels, "", "")]
    return Table("Losses", TRAINING, tuple(rows))


def _guesses(result: ImageDemoResult) -> Table:
    rows = ((GUESSES[name], f"{guess.loss:.4f}", f"{guess.decibels:.2f}") for name, guess in result.baselines.items())
    return Table("What a guess without any training loses", ("guess", "loss", "dB"), tuple(rows))


def _sight(result: ImageDemoResult) -> Table:
    header = [f"of the {(2 * reach + 1) ** 2 - 1} patches within {counted(reach, 'step')}" for reach in result.sight.reaches]
    rows = ((NAMES[curve], *(f"{share:.1%}" for share in result.sight.neighbours_seen[curve])) for curve in CURVES)
    return Table("Neighbours that a patch sees in one layer, in at least one head", ("order", *header), tuple(rows))


def _speed(result: ImageDemoResult) -> str:
    """How long a step takes under each order, and with how many threads."""
    trainings = result.training.twins
    steps = sum(training.steps for training in trainings)
    if not steps:
        return "No step was made"
    totals = {curve: sum(training.seconds[curve] for training in trainings) for curve in CURVES}
    times = " and ".join(f"{1e3 * seconds / steps:.0f} ms in {NAMES[curve]} order" for curve, seconds in totals.items())
    return f"A step took {times}, on {counted(result.environment.threads, 'thread')}"


def loss_plot(result: ImageDemoResult) -> Plot:
    """For each order the median over the seeds, with the least and the largest; and what the guesses lose."""
    points = [point for training in result.training.twins for point in training.points]
    series = [Series(name, tuple(_spreads(points, curve))) for curve, name in NAMES.items()]
    ends = (0, result.training.steps)
    for name, guess in result.baselines.items():
        line = tuple(plain(step, guess.loss) for step in ends)
        series.append(Series(f"guess, {name}: {guess.loss:.3f}", line, dashed=True))
    axes = Axis("steps of each model", "number", log=False), Axis("held-out loss", "number")
    return Plot("Held-out loss: median and range over the seeds", "lines", tuple(series), axes)


def _spreads(points: Iterable[Judgement], curve: str) -> Iterator[Point]:
    by_step: dict[int, list[float]] = {}
    for point in points:
        by_step.setdefault(point.step, []).append(point.held_out[curve])
    for step, losses in sorted(by_step.items()):
        yield Point(step, median(losses), min(losses), max(losses))
