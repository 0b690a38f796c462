"""What the result of `dilkit demo` says, and what that of `dilkit demo --image` says in the same words."""

from __future__ import annotations

from statistics import median

from dilkit.tools.console.text import in_bytes, in_seconds
from dilkit.tools.demo.text.record import DemoResult, Evaluation, Length, ModelFacts, NextByte, TrainedResult
from dilkit.tools.report.document import Axis, Document, Plot, Point, Row, Series, Table, plots, tables
from dilkit.tools.report.headline import place, placed
from dilkit.tools.report.points import plain, rate, sampled, series_of, speed_up
from dilkit.tools.report.speed import interval

MOST_STEPS = 200
"""Points of the loss curve: a step more or less is not seen."""
TRAINING = ("trained for", "bytes read", "training, bits per byte", "held out")
SCALING = ("tokens", "dilated", "dense", "speed-up", "95% interval", "dilated memory", "dense memory")
GENERATION = ("after", "with caches", "bytes/s", "every row again", "bytes/s", "speed-up", "95% interval")
METHOD = (
    "Held-out bits per byte are the mean over {} windows of {:,} bytes of files that were never trained on. Attention alone "
    "is measured forward and backward: 1 sequence, {} heads x {}, causal, {}; dilated is the model's pattern, computed by "
    "{}, dense is every earlier token, computed by {}. Time is the median of at most 5 calls taken in turns, memory the peak "
    "beyond what was held before the call. Neither kind holds a score matrix; the dilated one holds one branch's result and "
    "gradients beside the sum over the branches. Generation is the whole model's time for one byte more, after a text of about "
    "that length: with a cache in each layer, or by computing every row of the text again."
)


def sentence(result: DemoResult) -> str:
    """For docs/measurements.md."""
    return placed(result, outcome(result))


def outcome(result: DemoResult) -> str:
    """Held-out bits per byte before and after, and the speed, as far as training has come."""
    training = result.training
    if len(training.points) < 2:
        return "held out: not judged after training"
    before, after = (training.points[i].held_out for i in (0, -1))
    speed = f"{counted(training.steps, 'step')}, {training.tokens / training.seconds:,.0f} tokens/s"
    return f"held out: {before:.2f} -> {after:.2f} bits per byte in {training.seconds:.0f} s: {speed}"


def document(result: DemoResult) -> Document:
    """What was trained and how well, and dilated beside dense attention."""
    model, scaling, memory = result.model, result.scaling, result.scaling.memory_note
    computed = model.heads, model.head_dim, model.dtype, scaling.backends["dilated"], scaling.backends["dense"]
    evaluations = Table("Training", TRAINING, tuple(map(_training_row, result.training.points)))
    lengths = Table("Dilated against dense attention", SCALING, tuple(map(_scaling_row, scaling.rows)))
    generation = Table("Generation", GENERATION, tuple(map(_generation_row, result.generation)))
    notes = f"memory was not measured: {memory}" * bool(memory), "attention alone was not measured" * (not scaling.rows)
    return Document(
        headline=headline("dilkit demo", outcome(result), result),
        tables=tables(evaluations, lengths, generation, Table("The run", ("", "what"), _facts(result))),
        plots=plots(_loss_plot(result), *_scaling_plots(scaling.rows), _generation_plot(result.generation)),
        notes=tuple(filter(None, notes)),
        method=METHOD.format(result.training.held_out_windows, model.context, *computed),
    )


def headline(command: str, outcome: str, result: TrainedResult) -> tuple[str, ...]:
    """What came out, where, and what a run is lacking."""
    lacking = [f"INTERRUPTED while {result.interrupted}: this is what there was by then"] * bool(result.interrupted)
    return (f"{command}: {outcome}", place(result), *lacking)


def _facts(result: DemoResult) -> tuple[Row, ...]:
    """What is trained, on what, and which backend computes it and why."""
    text, model, budget = result.text, result.model, result.training.budget
    learnt = f"{counted(text.train_files, 'file')} ({_size(text.train_bytes)})"
    held_out = f"{counted(len(text.held_out_files), 'other')} ({_size(text.held_out_bytes)})"
    minutes = f"{budget.seconds / 60:g} minute{'s' * (budget.seconds != 60)}"
    length = counted(budget.steps, "step") if budget.steps else minutes
    ranks = f"{counted(result.ranks.world_size, 'rank')} ({result.ranks.transport}) of " if result.ranks else ""
    return (
        ("text", f"{text.source}: {learnt} to learn from, {held_out} held out"),
        *model_rows(model, f"{model.context:,} bytes of context"),
        ("training", f"{length} on {ranks}{counted(result.environment.threads, 'thread')} in {model.dtype}"),
        ("windows", _windows(result)),
        *backend_rows(result),
    )


def model_rows(model: ModelFacts, context: str) -> list[Row]:
    """The sizes of a model, and of its attention."""
    sizes = f"{counted(model.layers, 'layer')}, width {model.width}, {counted(model.heads, 'head')}, {context}"
    return [
        ("model", f"{model.parameters / 1e6:.2f} M parameters: {sizes}"),
        ("attention", f"{model.pattern}: {model.share_of_dense:.1%} of the work of dense attention"),
    ]


def _windows(result: DemoResult) -> str:
    """How long the windows are that it is trained on."""
    short, context = result.training.short_window_bytes, result.model.context
    if short == context:
        return f"{context:,} bytes throughout"
    share = f"{result.training.short_window_share:.0%}"
    return f"{short:,} bytes for the first {share} of training, then {context:,} bytes; held out always {context:,} bytes"


def backend_rows(result: TrainedResult) -> list[Row]:
    """Every backend with its verdict and reasons, the one that is picked first."""
    backends = result.backend.backends
    width = max((len(one.name) for one in backends), default=0)
    lines = []
    for one in backends:
        reasons = "; ".join([*filter(None, [one.detail]), *one.reasons])
        lines.append(f"{one.name:<{width}} {one.verdict}{f': {reasons}' if reasons else ''}")
    return [("" if i else "backend", line) for i, line in enumerate(lines)]


def _training_row(point: Evaluation) -> Row:
    train = "-" if point.train is None else f"{point.train:.3f}"
    return clock(point.seconds), f"{point.tokens:,}", train, f"{point.held_out:.3f}"


def _scaling_row(row: Length) -> Row:
    faster, kinds = _faster(row), (row.dilated, row.dense)
    peaks = ["-" if kind.peak_bytes is None else in_bytes(kind.peak_bytes) for kind in kinds]
    return f"{row.tokens:,}", *(in_seconds(kind.seconds) for kind in kinds), f"{faster.y:.1f}x", interval(faster), *peaks


def _faster(row: Length) -> Point:
    return speed_up(f"{row.tokens:,} tokens", row.dense.samples, row.dilated.samples)


def _generation_row(row: NextByte) -> Row:
    faster = speed_up("", row.recomputed, row.cached)
    cells = (cell for x in (median(row.cached), median(row.recomputed)) for cell in (in_seconds(x), f"{1 / x:,.1f}"))
    return f"{row.tokens:,}", *cells, f"{faster.y:.1f}x", interval(faster)


def _generation_plot(rows: tuple[NextByte, ...]) -> Plot:
    """Bytes a second against length, with caches and without."""
    speeds = {
        "with caches": [rate(row.tokens, 1.0, row.cached) for row in rows],
        "every row again": [rate(row.tokens, 1.0, row.recomputed) for row in rows],
    }
    axes = Axis("bytes before", "tokens"), Axis("bytes a second", "number")
    return Plot("Speed of generation", "lines", series_of(speeds), axes)


def _loss_plot(result: DemoResult) -> Plot:
    """Bits per byte against seconds of training, the training loss as means over groups of steps."""
    curve = result.training.train_curve
    group = -(-len(curve) // MOST_STEPS)
    parts = [curve[i : i + group] for i in range(0, len(curve), group or 1)]
    trained = tuple(plain(part[-1][0], sum(loss for *_, loss in part) / len(part)) for part in parts)
    held_out = tuple(plain(point.seconds, point.held_out) for point in result.training.points)
    axes = Axis("seconds of training", "number", log=False), Axis("bits per byte", "number", log=False)
    series = Series("training text", trained), Series("held-out text", held_out)
    return Plot("Bits per byte in the course of training", "lines", series, axes)


def _scaling_plots(rows: tuple[Length, ...]) -> list[Plot]:
    """Time, memory and speed-up against length, dilated and dense."""
    kinds = {name: [(row.tokens, getattr(row, name)) for row in rows] for name in ("dilated", "dense")}
    times = {name: [sampled(tokens, kind.samples) for tokens, kind in found] for name, found in kinds.items()}
    peaks = {name: [plain(tokens, kind.peak_bytes) for tokens, kind in found if kind.peak_bytes] for name, found in kinds.items()}
    faster = Series("dilated over dense", tuple(map(_faster, rows)))
    tokens, bars = Axis("tokens", "tokens"), (Axis("", "number"), Axis("times faster", "times"))
    return [
        Plot("Time of forward and backward", "lines", series_of(times), (tokens, Axis("time", "seconds"))),
        Plot("Peak extra memory", "lines", series_of(peaks), (tokens, Axis("memory", "bytes"))),
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
