"""What the result of the suite `seeds` says: section by section, and last each published figure beside ours."""

from __future__ import annotations

from collections.abc import Iterator

from dilkit.tools.bench.published.claims import CARD, CARD_TFLOPS, group
from dilkit.tools.bench.published.plots import all_plots
from dilkit.tools.bench.published.record import PublishedCase, PublishedResult
from dilkit.tools.bench.published.tables import all_tables
from dilkit.tools.console.text import in_seconds
from dilkit.tools.report.document import Document, plots, tables
from dilkit.tools.report.entries import grouped
from dilkit.tools.report.headline import placed, suite_headline

METHOD = (
    "Medians of {} samples taken in turns (two or three where calls are long), with intervals that hold them with 95 % "
    "confidence (bootstrap); everyone was checked against fp64 arithmetic just before, on random tensors of 64 dimensions a "
    "head. Memory is the peak with inputs counted: query, key and value, in training the output's gradient too; over ranks, "
    "of the rank that needs most, in a process of its own. Over ranks both sides are timed in turns in one job, the cores "
    "shared out among them. The documents measured forward passes alone; backward passes of the longest calls are left to "
    "--full, as are their caches of plans, half types beyond 8,192 tokens, and long calls of other numbers of ranks than were "
    "published. auto computes LongNet's pattern, in which every head takes part in every branch; what they measured is "
    "head-split, a fraction of the work. A matmul in fp32 was timed in the same rounds: ours per TFLOP/s is what this would "
    f"be on a machine whose matmul reaches one, and holds for speeds alone. For comparison, the {CARD} has {CARD_TFLOPS:g} "
    "TFLOP/s in fp32 by its data sheet."
)


def sentence(result: PublishedResult) -> str:
    """For README.md: the longest comparison with the reference, and how many published figures were measured again."""
    timed = [case for setting in group("implementations").values() if (case := result.case(setting)) and case.timed("reference")]
    parts = [_comparison(max(timed, key=lambda case: case.setting.seq))] if timed else []
    ours = sum(figure.ours is not None for figure in result.figures)
    counted = f"{ours} of the {len(result.figures)} figures that older implementations published were measured again"
    return placed(result, "; ".join([*parts, counted]))


def _comparison(case: PublishedCase) -> str:
    """All implementations, the slowest first."""
    timed = [(entry.time.median_s, who, bool(entry.differs)) for who, entry in case.entries.items() if entry.time]
    others = [f"{who}{'*' * differs} {in_seconds(median)}" for median, who, differs in sorted(timed, reverse=True)]
    star = " (*: another function)" * any(differs for *_, differs in timed)
    return f"forward, {case.seq:,} tokens, {case.setting.heads} heads, {case.setting.dtype}: {', '.join(others)}{star}"


def document(result: PublishedResult) -> Document:
    """All that was measured, and every published figure."""
    return Document(
        headline=_headline(result),
        tables=tables(*all_tables(result)),
        plots=plots(*all_plots(result)),
        notes=tuple(_notes(result)),
        method=METHOD.format(result.repeats),
    )


def _headline(result: PublishedResult) -> tuple[str, ...]:
    at, runs = result.environment, len(result.earlier) + 1
    place = f"{at.device_name}, {at.threads} threads of {at.cores} cores; ranks: {', '.join(('threads', *result.processes))}"
    first, second, *rest = suite_headline(result, place)
    return first, second, *[f"measured in {runs} runs, each going on from the one before"] * (runs > 1), *rest


def _notes(result: PublishedResult) -> Iterator[str]:
    """Who was not timed and why, who computes another function, and what failed."""
    places: list[tuple[str, str]] = []
    for case in result.cases:
        for who, entry in case.entries.items():
            notes = [f"{who} {entry.verdict}: {reason}" for reason in entry.reasons]
            if entry.differs:
                notes.append(f"{who} computes another function: {entry.differs.computes}")
            places += [(note, f"{case.seq:,}") for note in notes]
    yield from grouped(places, "(at {} tokens)")
    yield from (f"FAILED, {job.ranks} ranks, {job.transport}: {job.failed}" for job in result.jobs if job.failed is not None)
    memory = {entry.memory_note for case in result.cases for entry in case.entries.values()}
    memory |= {row.memory_note for job in result.jobs for row in job.rows}
    yield from (f"memory: {note}" for note in sorted(filter(None, memory)))
    if result.chosen.get("device", "cpu") != "cpu":
        yield "ranks are measured on the CPU alone: `dilkit bench --suite seeds` there, `dilkit bench --comm` here"
