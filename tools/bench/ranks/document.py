"""What the result of the suite `ring` says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dilkit.tools.bench.ranks.record import Fault, Memory, Race, RanksResult, Timeline, good
from dilkit.tools.console.text import in_bytes, in_seconds
from dilkit.tools.report.document import Axis, Document, Plot, Point, Series, Table, plots, tables
from dilkit.tools.report.headline import suite_headline
from dilkit.tools.report.points import plain, sampled, series_of
from dilkit.tools.report.targets import figure_table, suite_sentence

RANKS, TOKENS, NAMES = Axis("ranks", "number"), Axis("tokens", "tokens"), Axis("", "number")
PEAK = Axis("peak memory of a rank", "bytes")
MEMORY = ("configuration", "tokens", "p", "threads a rank", "peak a rank", "its tensors", "p=1 over this")
FAULTS = ("rank 1", "ranks are", "timeout", "others knew after", "names rank", "names step", "what was said")
FULL_RING = "a ring of all keys and values"
MOST_WORDS = 150
"""Characters of an error in the table of faults."""
SENTENCES = {
    "peak memory per rank, p=1 over p=2": "of the longest sequence a rank alone needs {} as much memory as each of two",
    "peak memory per rank, p=1 over p=4": "{} as much as each of four",
    "configuration A: p=1 over p=4": "of configuration A, which is shorter, {} as much as each of four",
    "one million tokens, p=8, bf16, forward: bytes that a rank sends": "of a million tokens each of eight ranks sends {}",
}
"""Figures by name, and the words that docs/measurements.md has for the worst value of each."""
METHOD = (
    "Bytes are those that the transport counted in a forward and backward pass, beside the plan's formula, for each schedule: "
    "threads with p = 1 .. 8, processes with p = 2, 3, 4; aligned and causal in bf16, odd lengths with a mask in fp32, "
    "grouped heads in fp64. Errors are against fp64, in units of what is allowed: twice (gradients: three times) the error of "
    "plain torch arithmetic of the same dtype, and a few roundings. Memory is the high-water mark of a fresh process's "
    "resident memory over what it held before its tensors were made: inputs, results, gradients and all that lies between, of "
    'the rank that needs most, in fp32. "A quarter of the million" is the pattern of a million tokens with sequence and '
    "segments a quarter as long: 262,144 tokens, w = 512, 2048, 8192, 32768, 131072, r = 1, 4, 16, 64, 256. A step's time is "
    "the slowest rank's, all having begun together; both sides are timed in turns in one job. Faults strike rank 1 of three "
    "after one call went well; seconds are those until the last of the others knew, or, where these are ended without a word, "
    "until the launcher had ended the job."
)


def sentence(result: RanksResult) -> str:
    """For README.md."""
    return suite_sentence(result, SENTENCES)


def document(result: RanksResult) -> Document:
    """Figures, memory, bytes, faults and the timeline of a step."""
    jobs = {"mpi": f"mpirun ({result.mpi})", "torch": "torch.distributed with gloo"}
    started = ", ".join(jobs.get(name, name) for name in result.processes) or "no processes, only threads"
    at = result.environment
    return Document(
        headline=suite_headline(result, f"{at.device_name}, {at.cores} cores; ranks: threads, {started}"),
        tables=tables(figure_table(result.figures), _memory_table(result), *_volume_tables(result), fault_table(result.faults)),
        plots=plots(
            _memory_by_ranks(result),
            _growth(result),
            _memory_by_length(result),
            *_volume_plots(result),
            *map(_race, good(result.race)),
            *map(_timeline, good(result.timeline)),
        ),
        notes=tuple(_notes(result)),
        method=METHOD,
    )


def _memory_table(result: RanksResult) -> Table:
    """Peak memory of the rank that needs most, and what its part of the tensors alone takes."""
    rows = sorted(good(result.memory), key=lambda m: (m.config, m.seq, m.ranks))
    rows += [replace(one, config="fixed n/p") for one in good(result.growth)]
    alone = {(m.config, m.seq): m.peak for m in rows if m.ranks == 1}
    cells = tuple(_memory_cells(m, alone.get((m.config, m.seq))) for m in rows)
    return Table("Memory per rank, forward and backward", MEMORY, cells)


def _memory_cells(m: Memory, alone: int | None) -> tuple[str, ...]:
    ratio = "-" if alone is None or m.ranks == 1 else f"{alone / m.peak:.3f}"
    name = {"long": "a quarter of the million"}.get(m.config, m.config)
    return name, f"{m.seq:,}", str(m.ranks), str(m.threads), in_bytes(m.peak), in_bytes(m.tensors_bytes), ratio


def _volume_tables(result: RanksResult) -> Iterator[Table]:
    """Forward bytes of the busiest rank, for each schedule and number of ranks."""
    for found in result.volumes:
        columns = [*found.schedules.values(), found.full_ring]
        rows = [(str(p), *(in_bytes(column[i]) for column in columns)) for i, p in enumerate(found.ranks)]
        title = "Forward bytes of the busiest rank: one million tokens, bf16"
        yield Table(title, ("p", *found.schedules, FULL_RING), tuple(rows))


def fault_table(faults: Sequence[Fault]) -> Table:
    """What became of each fault."""
    return Table("Faults", FAULTS, tuple(map(_fault_cells, good(tuple(faults)))))


def _fault_cells(f: Fault) -> tuple[str, ...]:
    said = f.error if len(f.error) < MOST_WORDS else f"{f.error[: MOST_WORDS - 3]}..."
    names = ("yes" if named else "no" for named in (f.names_rank, f.names_step))
    return f.kind, f.ranks_are, f"{f.timeout:g} s", f"{max(f.seconds, 0):.2f} s", *names, said


def _peaks(result: RanksResult, config: str) -> dict[int, dict[int, int]]:
    """Peak bytes by tokens and ranks, the longest sequence first."""
    peaks: dict[int, dict[int, int]] = {}
    for m in sorted(good(result.memory), key=lambda m: (-m.seq, m.ranks)):
        if m.config == config:
            peaks.setdefault(m.seq, {})[m.ranks] = m.peak
    return peaks


def _memory_by_ranks(result: RanksResult) -> Plot:
    """Each line beside its first point shared out evenly."""
    lines = {f"{config}, {seq:,} tokens": peaks for config in ("A", "long") for seq, peaks in _peaks(result, config).items()}
    series = list(series_of({name: [plain(*point) for point in peaks.items()] for name, peaks in lines.items()}))
    for name, peaks in list(lines.items())[:1]:
        first = min(peaks)
        series.append(Series(f"1/p of {name}", tuple(plain(p, peaks[first] * first / p) for p in peaks), dashed=True))
    return Plot("Ranks' memory at fixed length, forward and backward", "lines", tuple(series), (RANKS, PEAK))


def _growth(result: RanksResult) -> Plot:
    points = tuple(plain(m.ranks, m.peak) for m in sorted(good(result.growth), key=lambda m: m.ranks))
    title = "Ranks' memory at fixed tokens a rank, forward and backward"
    return Plot(title, "lines", (Series("fixed tokens a rank", points),), (RANKS, replace(PEAK, log=False)))


def _memory_by_length(result: RanksResult) -> Plot:
    lines: dict[str, list[Point]] = {}
    for seq, peaks in sorted(_peaks(result, "long").items()):
        for ranks, peak in peaks.items():
            lines.setdefault(f"p={ranks}", []).append(plain(seq, peak))
    return Plot("Ranks' memory against length, forward and backward", "lines", series_of(lines), (TOKENS, PEAK))


def _volume_plots(result: RanksResult) -> Iterator[Plot]:
    for found in result.volumes:
        lines = {
            name: tuple(plain(*point) for point in zip(found.ranks, counts, strict=True) if point[1])
            for name, counts in (*found.schedules.items(), ("all keys and values", found.full_ring))
        }
        series = tuple(Series(name, points, dashed=name == "all keys and values") for name, points in lines.items())
        yield Plot(
            "Forward bytes: one million tokens, bf16", "lines", series, (RANKS, Axis("bytes of the busiest rank", "bytes"))
        )


def _race(race: Race) -> Plot:
    names = {f"{race.ranks} ranks of one thread": "ranks", f"one rank of {race.one_rank_threads} threads": "one rank"}
    bars = tuple(sampled(name, race.entries[who].seconds) for name, who in names.items())
    axes = NAMES, Axis("time of a step", "seconds")
    return Plot("One step of configuration A, with 95% intervals", "bars", (Series("a step", bars),), axes)


def _timeline(found: Timeline) -> Plot:
    """The whole step of each rank, and when it was in its transport."""
    steps = [Point(f"rank {i}", rank.seconds, 0.0, rank.seconds) for i, rank in enumerate(found.ranks)]
    waits = [
        Point(f"rank {i}", wait.end, min(wait.begin, wait.end), wait.end)
        for i, rank in enumerate(found.ranks)
        for wait in rank.waits
    ]
    series = Series("computing", tuple(steps)), Series("sending, waiting, agreeing", tuple(waits))
    title = f"One step of {found.seq:,} tokens, causal ({found.transport})"
    return Plot(title, "spans", series, (NAMES, Axis("time", "seconds", log=False)))


def _notes(result: RanksResult) -> Iterator[str]:
    """Counts, times, and what failed."""
    counted, compared = (sum(len(one.calls) for one in steps) for steps in (result.bytes, result.agreement))
    yield f"bytes were counted in {counted} calls, results compared in {compared}"
    for race in good(result.race):
        ranks, one = (in_seconds(entry.time.median_s) for who in ("ranks", "one rank") if (entry := race.entries[who]).time)
        yield (
            f"A, forward + backward: {ranks} on {race.ranks} ranks of one thread, {one} on one rank of "
            f"{race.one_rank_threads} threads, medians of {result.repeats} samples in turns"
        )
    for found in good(result.million):
        run = "counted in a run as well" if found.sent_bytes == found.planned_bytes else found.why or "differs in a run"
        yield f"{found.seq:,} tokens, p={found.ranks}: {max(found.planned_bytes):,} bytes by the plan; {run}"
    for name, why in result.failures():
        yield f"FAILED, {name}: {why}"
