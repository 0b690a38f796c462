"""What the result of the ring suite says, as tables and plots."""

from __future__ import annotations

from typing import Any

from dilkit.tools.bench.ranks.targets import good
from dilkit.tools.report.document import Axis, Document, Plot, Series, Table, plots, tables
from dilkit.tools.report.kinds import suite_ring_report as report
from dilkit.tools.report.points import plain, sampled

Result = dict[str, Any]
RANKS = Axis("ranks", "number")


def told(result: Result) -> Document:
    """The result as a whole."""
    return Document(
        headline=tuple(report.headline(result)),
        tables=tables(
            Table.of("Figures beside their limits", report.figure_rows(result)),
            Table.of("Memory per rank, forward and backward", report.memory_rows(result)),
            Table.of("Forward bytes of the busiest rank: one million tokens, bf16", report.volume_rows(result)),
            Table.of("Faults", report.fault_rows(result)),
        ),
        plots=plots(_rank_memory(result), _growth(result), _volumes(result), _race(result), *_waits(result)),
        notes=tuple(report.notes(result)),
        method=" ".join(report.METHOD.split()),
    )


def _rank_memory(result: Result) -> Plot:
    """Each line beside its first point shared out evenly."""
    lines: dict[str, dict[int, int]] = {}
    for e in sorted(good(result, "memory"), key=lambda e: (e["config"], -e["seq"], e["ranks"])):
        lines.setdefault(f"{e['config']}, {e['seq']:,} tokens", {})[e["ranks"]] = max(e["peak_bytes"])
    series = [Series(name, tuple(plain(p, peak) for p, peak in peaks.items())) for name, peaks in lines.items()]
    for name, peaks in list(lines.items())[:1]:
        first = min(peaks)
        series.append(Series(f"1/p of {name}", tuple(plain(p, peaks[first] * first / p) for p in peaks), dashed=True))
    axes = RANKS, Axis("peak memory of a rank", "bytes")
    return Plot("Ranks' memory at fixed length, forward and backward", "lines", tuple(series), axes)


def _growth(result: Result) -> Plot:
    peaks = sorted((e["ranks"], max(e["peak_bytes"])) for e in good(result, "growth"))
    series = (Series("fixed tokens a rank", tuple(plain(*pair) for pair in peaks)),)
    axes = RANKS, Axis("peak memory of a rank", "bytes", log=False)
    return Plot("Ranks' memory at fixed tokens a rank, forward and backward", "lines", series, axes)


def _volumes(result: Result) -> Plot:
    series = []
    for found in result["volumes"]:
        counts = {**found["schedules"], "all keys and values": found["full_ring"]}
        for name, column in counts.items():
            points = tuple(plain(p, count) for p, count in zip(found["ranks"], column, strict=True) if count)
            series.append(Series(name, points, dashed=name == "all keys and values"))
    axes = RANKS, Axis("bytes of the busiest rank", "bytes")
    return Plot("Forward bytes: one million tokens, bf16", "lines", tuple(series), axes)


def _race(result: Result) -> Plot:
    bars = []
    for e in good(result, "race"):
        ways = {f"{e['ranks']} ranks of one thread": "ranks", f"one rank of {e['one_rank_threads']} threads": "one rank"}
        bars += [sampled(name, e["entries"][way]["time"]["samples_s"]) for name, way in ways.items()]
    axes = Axis("", "number"), Axis("time of a step", "seconds")
    return Plot("One step of configuration A, with 95% intervals", "bars", (Series("a step", tuple(bars)),), axes)


def _waits(result: Result) -> list[Plot]:
    made = []
    for found in good(result, "timeline"):
        waited = [sum(max(wait["end"] - wait["begin"], 0.0) for wait in rank["waits"]) for rank in found["ranks"]]
        rows = list(enumerate(zip(found["ranks"], waited, strict=True)))
        series = (
            Series("the whole step", tuple(plain(f"rank {i}", rank["seconds"]) for i, (rank, _) in rows)),
            Series("of it sending, waiting, agreeing", tuple(plain(f"rank {i}", lost) for i, (_, lost) in rows)),
        )
        axes = Axis("", "number"), Axis("time", "seconds", log=False)
        made.append(Plot(f"One step of {found['seq']:,} tokens, causal ({found['transport']})", "bars", series, axes))
    return made
