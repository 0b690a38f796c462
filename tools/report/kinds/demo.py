"""What the result of `dilkit demo` says. `dilkit demo` itself prints the rows of its tables as they come."""

from __future__ import annotations

from itertools import pairwise

from dilkit.tools.console.text import in_bytes, in_seconds
from dilkit.tools.report.document import Axis, Document, Plot, Point, Row, Series, Table, plots, tables
from dilkit.tools.report.headline import place, placed
from dilkit.tools.report.points import plain, sampled, speed_up
from dilkit.tools.report.speed import interval
from dilkit.tools.results.kinds.demo import Choice, DemoResult, Evaluation, Length, Measured, RankFacts

MOST_STEPS = 200
"""Points of the loss curve: a step more or less is not seen."""
TRAINING = ("trained for", "bytes read", "training, bits per byte", "held out")
SCALING = ("tokens", "dilated", "dense", "speed-up", "95% interval", "dilated memory", "dense memory", "")
METHOD = (
    "Held-out bits per byte are the mean over {} windows of {:,} bytes of files that were never trained on. Attention alone "
    "is measured forward and backward: {} sequence, {} heads x {}, causal, {}; dilated is the model's pattern, computed by "
    "{}, dense is every earlier token, computed by {}. Time is the median of 5 calls taken in turns (of one where it is "
    "long), memory the peak beyond what was held before the call. Neither kind holds a score matrix; the dilated one holds "
    "one branch's result and gradients beside the sum over the branches."
)
RANKS_METHOD = (
    "A step sends rows of queries, keys, values, results and their gradients for the attention, and sums of parameters' "
    "gradients. All ranks hold all of the text and of the model. Memory is that {}, at its peak, beyond what was held before "
    "the model was made."
)


def sentence(result: DemoResult) -> str:
    """For README.md."""
    return placed(result, outcome(result))


def outcome(result: DemoResult) -> str:
    """Held-out bits per byte before and after, and the speed, as far as training has come."""
    training = result.training
    if training.after is None:
        return "held out: not judged after training"
    speed = f"{counted(training.steps, 'step')}, {training.tokens_per_second:,.0f} tokens/s"
    return f"held out: {training.before or 0:.2f} -> {training.after:.2f} bits per byte in {training.seconds:.0f} s: {speed}"


def document(result: DemoResult) -> Document:
    """What was trained and how well, and dilated beside dense attention or what ranks hold and send."""
    training, scaling = result.training, result.scaling
    kinds = scaling.backends.dilated, scaling.backends.dense
    sizes = scaling.batch, scaling.heads, scaling.head_dim, scaling.dtype
    evaluations = Table("Training", TRAINING, tuple(map(training_row, training.points)))
    lengths = Table("Dilated against dense attention", SCALING, tuple(map(scaling_row, scaling.rows)))
    return Document(
        headline=(f"dilkit demo: {outcome(result)}", place(result), *interruption(result.interrupted)),
        tables=tables(evaluations, lengths, *rank_tables(result), Table("The run", ("", "what"), facts(result))),
        plots=plots(loss_plot(result), *scaling_plots(result)),
        notes=tuple(notes(result)),
        method=METHOD.format(training.held_out_windows, training.window_bytes, *sizes, *kinds),
    )


def interruption(stage: str | None) -> list[str]:
    """A line that says what a run is lacking."""
    return [f"INTERRUPTED while {stage}: this is what there was by then"] if stage else []


def notes(result: DemoResult) -> list[str]:
    """What was not measured."""
    memory = (result.ranks or result.scaling).memory_note
    found = [f"memory was not measured: {memory}"] if memory else []
    return [*found, *["attention alone was not measured"] * (not result.scaling.rows)]


def facts(result: DemoResult) -> tuple[Row, ...]:
    """What is trained, on what, and which backend computes it and why."""
    text, model, budget = result.text, result.model, result.training.budget
    learnt = f"{counted(text.train_files, 'file')} ({_size(text.train_bytes)})"
    held_out = f"{counted(len(text.held_out_files), 'other')} ({_size(text.held_out_bytes)})"
    sizes = f"{model.layers} layers, width {model.width}, {model.heads} heads, {model.context:,} bytes of context"
    seconds = budget.seconds or 0.0
    length = counted(budget.steps, "step") if budget.steps else f"{seconds / 60:g} minute{'s' * (seconds != 60)}"
    threads = counted(result.environment.threads, "thread")
    where = f"{counted(result.ranks.world_size, 'rank')} of {threads}" if result.ranks else threads
    return (
        ("text", f"{text.source}: {learnt} to learn from, {held_out} held out"),
        ("model", f"{model.parameters / 1e6:.2f} M parameters: {sizes}"),
        ("attention", f"{model.pattern}: {model.share_of_dense:.1%} of the work of dense attention"),
        ("training", f"{length} on {where} in {model.dtype}"),
        ("windows", _windows(result)),
        *_shares(result),
        *candidates(result.backend),
    )


def _windows(result: DemoResult) -> str:
    """How long the windows are that it is trained on."""
    short, context = result.training.short_window_bytes, result.model.context
    if short == context:
        return f"{context:,} bytes throughout"
    share = f"{result.training.short_window_share:.0%}"
    return f"{short:,} bytes for the first {share} of training, then {context:,} bytes; held out always {context:,} bytes"


def _shares(result: DemoResult) -> list[Row]:
    """How windows are cut over the ranks."""
    if (ranks := result.ranks) is None:
        return []
    parts = {stop - start for start, stop in pairwise(ranks.cuts)}
    each = " to ".join(f"{size:,}" for size in sorted({min(parts), max(parts)}))
    line = (
        f"{counted(ranks.world_size, 'rank')} ({ranks.transport}), each with {each} bytes of a window of {result.model.context:,}"
    )
    return [("ranks", line)]


def candidates(choice: Choice) -> list[Row]:
    """Every backend with its verdict and reasons, the one that is picked first."""
    width = max((len(one.name) for one in choice.backends), default=0)
    lines = []
    for one in choice.backends:
        reasons = "; ".join([*filter(None, [one.detail]), *one.reasons])
        lines.append(f"{one.name:<{width}} {one.verdict}{f': {reasons}' if reasons else ''}")
    return [("backend" if i == 0 else "", line) for i, line in enumerate(lines)]


def training_row(point: Evaluation) -> Row:
    """One evaluation in the course of training."""
    train = "-" if point.train is None else f"{point.train:.3f}"
    return clock(point.seconds), f"{point.tokens:,}", train, f"{point.held_out:.3f}"


def scaling_row(row: Length) -> Row:
    """Dilated and dense attention at one length."""
    faster = _faster(row)
    ratio = ("-", "-") if faster is None else (f"{faster.y:.1f}x", interval(faster))
    kinds = row.dilated, row.dense
    return f"{row.tokens:,}", *map(_time, kinds), *ratio, *map(_memory, kinds), row.note


def _time(kind: Measured | None) -> str:
    return "-" if kind is None else in_seconds(kind.seconds)


def _memory(kind: Measured | None) -> str:
    return "-" if kind is None or kind.peak_bytes is None else in_bytes(kind.peak_bytes)


def _faster(row: Length) -> Point | None:
    if row.dilated is None or row.dense is None:
        return None
    return speed_up(f"{row.tokens:,} tokens", row.dense.samples, row.dilated.samples)


def rank_tables(result: DemoResult) -> list[Table]:
    """What ranks hold and send in a step, once they have said so."""
    if (ranks := result.ranks) is None or not ranks.by_rank:
        return []
    header = ("rank", "bytes", *(f"sent, window of {window}: attention + gradients" for window in ranks.windows), "peak memory")
    together = len({fact.process for fact in ranks.by_rank}) < ranks.world_size
    whose = "of the process that all ranks are threads of" if together else "of the rank's process"
    rows = tuple(_rank_row(fact, ranks.cuts, ranks.windows) for fact in ranks.by_rank)
    return [Table("What ranks hold and send", header, rows, RANKS_METHOD.format(whose))]


def _rank_row(fact: RankFacts, cuts: tuple[int, ...], windows: list[str]) -> Row:
    sent = [f"{in_bytes(fact.sent[window].attention)} + {in_bytes(fact.sent[window].gradients)}" for window in windows]
    peak = "-" if fact.peak_bytes is None else in_bytes(fact.peak_bytes)
    return str(fact.rank), f"{cuts[fact.rank + 1] - cuts[fact.rank]:,}", *sent, peak


def loss_plot(result: DemoResult) -> Plot:
    """Bits per byte against seconds of training, the training loss as means over groups of steps."""
    curve = result.training.train_curve
    group = -(-len(curve) // MOST_STEPS)
    parts = [curve[i : i + group] for i in range(0, len(curve), group or 1)]
    trained = tuple(plain(part[-1][0], sum(loss for *_, loss in part) / len(part)) for part in parts)
    held_out = tuple(plain(point.seconds, point.held_out) for point in result.training.points)
    axes = Axis("seconds of training", "number", log=False), Axis("bits per byte", "number", log=False)
    series = Series("training text", trained), Series("held-out text", held_out)
    return Plot("Bits per byte in the course of training", "lines", series, axes)


def scaling_plots(result: DemoResult) -> list[Plot]:
    """Time, memory and speed-up against length, dilated and dense."""
    rows, times, peaks = result.scaling.rows, [], []
    for name in ("dilated", "dense"):
        found = [(row.tokens, kind) for row in rows if (kind := row.dilated if name == "dilated" else row.dense) is not None]
        times.append(Series(name, tuple(sampled(tokens, kind.samples) for tokens, kind in found)))
        peaks.append(Series(name, tuple(plain(tokens, kind.peak_bytes) for tokens, kind in found if kind.peak_bytes)))
    faster = Series("dilated over dense", tuple(point for row in rows if (point := _faster(row)) is not None))
    tokens, bars = Axis("tokens", "tokens"), (Axis("", "number"), Axis("times faster", "times"))
    return [
        Plot("Time of forward and backward", "lines", tuple(times), (tokens, Axis("time", "seconds"))),
        Plot("Peak extra memory", "lines", tuple(peaks), (tokens, Axis("memory", "bytes"))),
        Plot("Speed-up over dense attention, with 95% intervals", "bars", (faster,), bars, mark=1.0),
    ]


def counted(number: int, noun: str) -> str:
    """A number of things."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"
