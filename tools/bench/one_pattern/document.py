"""What the result of `dilkit bench` says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dilkit.tools.bench.one_pattern.record import BenchCase, BenchResult
from dilkit.tools.console.text import in_bytes, in_seconds
from dilkit.tools.report.document import Axis, Document, Plot, Point, Series, Table, plots, tables
from dilkit.tools.report.entries import grouped, quartiles, reasons
from dilkit.tools.report.headline import placed, revision
from dilkit.tools.report.points import plain, sampled, series_of, speed_up
from dilkit.tools.report.roofline import Work, roofline
from dilkit.tools.report.speed import interval
from dilkit.tools.results.record import Difference, Entry, Exchange

COLUMNS = ("tokens", "who", "time", "quartiles", "GFLOP/s", "of matmul", "tokens/s", "kB/token", "extra memory", "x output")
FORWARD_COLUMNS = ("of forward", "x output")
RANK_COLUMNS = ("a rank sends", "plan says", "work max/mean")
TOKENS = Axis("tokens", "tokens")
METHOD = (
    "Medians of {} samples of at least {:g} s, taken in interleaved rounds; each implementation was checked against fp64 "
    "arithmetic just before. GFLOP/s count the nominal FLOPs of what an implementation computes, and are compared with a square "
    "matmul timed in the same rounds. Extra memory is the peak over what was held before the call, its result included; one "
    "output is batch x tokens x heads x head_dim."
)
METHOD_OVER_RANKS = (
    "Medians of {} samples, one call each, in interleaved rounds: all ranks begin together, and a sample is the slowest rank's. "
    "Each schedule was checked against fp64 arithmetic on a shortened problem just before, and its bytes were counted. GFLOP/s "
    "are those of all ranks together, compared with a square matmul that every rank makes at the same time. Extra memory is the "
    "peak over what was held before the call, its result included, on the rank that needs most; one output is that of the whole "
    "sequence."
)


def sentence(result: BenchResult) -> str:
    """For README.md: the longest length at which anything was measured."""
    timed = [case for case in result.lengths if case.measured()]
    if not timed:
        return placed(result, "nothing was measured")
    longest = max(timed, key=lambda case: case.seq)
    costs = "; ".join(_cost(name, entry) for name, entry in longest.measured().items())
    return placed(result, f"{result.problem.text()}, {result.problem.pattern.text}, {longest.seq:,} tokens: {costs}")


def _cost(name: str, entry: Entry) -> str:
    other = " (another function)" if entry.differs else ""
    return f"{name} {in_seconds(_median(entry))} and {in_bytes(entry.peak_bytes)}{other}"


def document(result: BenchResult) -> Document:
    """Time, memory, speed-ups and the roofline, over lengths."""
    how, template = result.method, METHOD_OVER_RANKS if result.ranks else METHOD
    return Document(
        headline=_headline(result),
        tables=tables(_times(result), _speed_ups(result)),
        plots=plots(*_plots(result)),
        notes=tuple(_notes(result)),
        method=template.format(how.repeats, how.min_time_s),
    )


def _headline(result: BenchResult) -> tuple[str, ...]:
    """The problem, its pattern, and where it was measured."""
    at, job = result.environment, result.ranks
    ranks = f", over {job.world_size} ranks ({job.transport}), threads a rank: {job.threads}" if job else ""
    versions = f"torch {at.torch}, dilkit {at.dilkit}{revision(at)}, {result.date}"
    where = f"{at.device_name}, {at.threads} of {at.cores} cores in use, {versions}"
    return result.problem.text() + ranks, result.problem.pattern.text, where


def _times(result: BenchResult) -> Table:
    """A row for every measured entry; with the forward pass's memory where a call is more than that."""
    both, ranks = result.problem.backward, result.ranks is not None
    header = (*COLUMNS, *(FORWARD_COLUMNS if both else ()), *(RANK_COLUMNS if ranks else ()))
    rows = []
    for case in result.lengths:
        for name, entry in case.measured().items():
            forward = _memory(entry.forward_peak_bytes, case) if both else ()
            shared = _exchange(entry.ranks) if ranks else ()
            who = f"{name} (differs)" if entry.differs else name
            rows.append((f"{case.seq:,}", who, *_speed(entry), *_memory(entry.peak_bytes, case), *forward, *shared))
    return Table("Time and memory", header, tuple(rows))


def _speed(entry: Entry) -> tuple[str, ...]:
    if entry.time is None:
        return ()
    rates = f"{entry.gflops or 0:,.1f}", f"{entry.matmul_fraction or 0:.0%}", f"{entry.tokens_per_s or 0:,.0f}"
    per_token = "?" if entry.kb_per_token is None else f"{entry.kb_per_token:.2f}"
    return in_seconds(entry.time.median_s), quartiles(entry.time), *rates, per_token


def _memory(peak: int | None, case: BenchCase) -> tuple[str, str]:
    return ("?", "?") if peak is None else (in_bytes(peak), f"{peak / case.output_bytes:.1f}")


def _exchange(ranks: Exchange | None) -> tuple[str, ...]:
    """What the busiest rank sends, and how evenly work is shared out."""
    if ranks is None:
        return ("-",) * len(RANK_COLUMNS)
    mean = sum(ranks.work) / len(ranks.work)
    return in_bytes(max(ranks.sent_bytes)), in_bytes(max(ranks.planned_bytes)), f"{max(ranks.work) / mean:.2f}"


def _versus_first(result: BenchResult) -> Iterator[tuple[str, str, Point]]:
    """(the first, another, a bar labelled with the tokens: how many times faster the first is) of each length."""
    for case in result.lengths:
        first, *others = case.measured().items() or [("", Entry())]
        for name, entry in others:
            yield first[0], name, speed_up(f"{case.seq:,} tokens", entry.seconds, first[1].seconds)


def _speed_ups(result: BenchResult) -> Table:
    """How many times faster the first implementation is than each other one, by length."""
    header = ("length", "who", "over", "speed-up", "95% interval")
    rows = tuple((str(p.x), first, other, f"{p.y:.2f}x", interval(p)) for first, other, p in _versus_first(result))
    return Table("Speed-ups", header, rows, "Ratios of medians; intervals by resampling each side's samples.")


def _plots(result: BenchResult) -> Iterator[Plot]:
    yield _over_lengths(result, "Time of a call", Axis("time", "seconds"), lambda x, entry: sampled(x, entry.seconds))
    yield _over_lengths(
        result, "Peak extra memory of a call", Axis("memory", "bytes"), lambda x, entry: _known(x, entry.peak_bytes)
    )
    yield _over_lengths(result, "Memory a token", Axis("memory a token", "kb"), lambda x, entry: _known(x, entry.kb_per_token))
    bars: dict[str, list[Point]] = {}
    for first, other, point in _versus_first(result):
        bars.setdefault(f"{first} over {other}", []).append(point)
    axes = Axis("", "tokens"), Axis("times faster", "times")
    yield Plot("Speed-up, with 95% intervals", "bars", series_of(bars), axes, mark=1.0)
    work = [Work(case, case.output_bytes, result.problem.backward) for case in result.lengths]
    yield roofline("Roofline: speed beside the measured matmul", work)
    if result.ranks:
        yield _sent(result)


def _known(x: float | str, value: float | None) -> Point | None:
    return plain(x, value) if value else None


def _over_lengths(result: BenchResult, title: str, axis: Axis, point: Callable[[float | str, Entry], Point | None]) -> Plot:
    """A line for each implementation; of one length, a bar for each."""
    single = len(result.lengths) == 1
    lines: dict[str, list[Point]] = {name: [] for case in result.lengths for name in case.entries}
    for case in result.lengths:
        for name, entry in case.measured().items():
            plotted = point(f"{case.seq:,} tokens" if single else case.seq, entry)
            lines[name] += [plotted] if plotted else []
    return Plot(title, "bars" if single else "lines", series_of(lines), (TOKENS, axis))


def _sent(result: BenchResult) -> Plot:
    """Bytes by rank at the longest length."""
    *_, longest = [case for case in result.lengths if case.measured()] or result.lengths
    series = tuple(
        Series(name, tuple(plain(f"rank {i}", value) for i, value in enumerate(entry.ranks.sent_bytes)))
        for name, entry in longest.measured().items()
        if entry.ranks
    )
    axes = Axis("", "number"), Axis("bytes", "bytes", log=False)
    return Plot(f"Bytes that a rank sends in a call, {longest.seq:,} tokens", "bars", series, axes)


def _notes(result: BenchResult) -> Iterator[str]:
    """What the table leaves out: who was refused, skipped, wrong or failed and why, and how time grows with length."""
    notes: list[tuple[str, str]] = []
    for case in result.lengths:
        seq = f"{case.seq:,}"
        notes += reasons([(seq, case)])
        for name, entry in case.entries.items():
            notes += [(note, seq) for note in _difference(name, entry.differs)]
            notes += [(entry.memory_note, seq)] if entry.memory_note else []
    yield from grouped(notes, "(at {} tokens)")
    for name, fit in result.scaling.items():
        nominal = f"its nominal FLOPs ~ tokens^{fit.flops_exponent:.2f}"
        yield f"{name}: time ~ tokens^{fit.exponent:.2f}, {nominal}, fitted over {fit.lengths} lengths"
    fractions = [entry.matmul_fraction or 0.0 for case in result.lengths for entry in case.entries.values()]
    if max(fractions, default=0.0) > 1.0:
        yield "faster than the matmul beside it: other programs disturbed this run; measure again on a quiet machine"
    lengths = [case.seq for case in result.lengths]
    if len(lengths) > 1 and max(result.problem.pattern.segment_lengths, default=0) > min(lengths):
        yield "a segment longer than the sequence is the sequence: once all segments are shorter, FLOPs ~ tokens^1"
    if result.interrupted:
        yield "interrupted: the lengths shown were measured, later ones were not"


def _difference(name: str, found: Difference | None) -> Iterator[str]:
    """What an implementation computes in place of the pattern's attention, and how far apart the two are."""
    if found is None:
        return
    values = ("out", found.out_max_abs, found.out_relative), ("dquery", found.dquery_max_abs, found.dquery_relative)
    far = [
        f"{what} by {most:.2g} at most, {share:.2g} of the largest value"
        for what, most, share in values
        if most is not None and share is not None
    ]
    yield f"{name} computes another function: {found.computes}"
    if far:
        yield f"{name} differs from the pattern: {'; '.join(far)}"


def _median(entry: Entry) -> float:
    return entry.time.median_s if entry.time else 0.0
