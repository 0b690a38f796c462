"""What the demo's result and the compiler's report say, as tables and plots."""

from __future__ import annotations

from typing import Any

from dilkit.tools.bench import kernels as kernel_report
from dilkit.tools.console.text import in_bytes, in_seconds
from dilkit.tools.demo.text import words as demo_words
from dilkit.tools.report.document import Axis, Document, Plot, Point, Series, Table, plots, tables
from dilkit.tools.report.kinds.told_bench import TOKENS, between, where
from dilkit.tools.report.points import plain, sampled, speed_up

Result = dict[str, Any]
MOST_STEPS = 200
"""Points of the loss curve: a step more or less is not seen."""


def told_demo(result: Result) -> Document:
    """The demo: what was trained and how well, and dilated beside dense attention or what ranks hold and send."""
    scaling, points = result["scaling"], result["training"]["points"]
    evaluations = [(f"{p['seconds']:.0f} s", f"{p['tokens']:,}", _bits(p["train"]), _bits(p["held_out"])) for p in points]
    note = (result.get("ranks") or scaling)["memory_note"]
    return Document(
        headline=(f"dilkit demo: {demo_words.outcome(result)}", where(result)),
        tables=tables(
            Table("The run", ("", "what"), tuple((line[:11].strip(), line[11:].strip()) for line in demo_words.facts(result))),
            Table("Training", ("trained for", "bytes", "training, bits a byte", "held out"), tuple(evaluations)),
            _scaling(scaling),
            *_ranks(result),
        ),
        plots=plots(_loss(result), *_against_dense(scaling["rows"])),
        notes=(f"memory was not measured: {note}",) if note else (),
        method=" ".join(demo_words.scaling_subject(scaling)) + _INTERRUPTED * bool(result["interrupted"]),
    )


_INTERRUPTED = " INTERRUPTED: this is what there was by then."


def _bits(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _scaling(scaling: Result) -> Table:
    header = ("tokens", "dilated", "dense", "speed-up", "95% interval", "dilated memory", "dense memory", "")
    rows = []
    for row in scaling["rows"]:
        kinds = row["dilated"], row["dense"]
        times = ("-" if kind is None else in_seconds(kind["seconds"]) for kind in kinds)
        peaks = ("-" if kind is None or kind["peak_bytes"] is None else in_bytes(kind["peak_bytes"]) for kind in kinds)
        faster = _faster(row)
        ratio = ("-", "-") if faster is None else (f"{faster.y:.1f}x", between(faster))
        rows.append((f"{row['tokens']:,}", *times, *ratio, *peaks, row["note"]))
    return Table("Dilated against dense attention", header, tuple(rows))


def _faster(row: Result) -> Point | None:
    if row["dilated"] is None or row["dense"] is None:
        return None
    return speed_up(f"{row['tokens']:,} tokens", row["dense"]["samples"], row["dilated"]["samples"])


def _ranks(result: Result) -> list[Table]:
    if not result.get("ranks"):
        return []
    header = ("rank", "bytes", *(f"sent, window of {n:,}: KiB" for n in demo_words.rank_columns(result)), "peak, MiB")
    rows = tuple(tuple(demo_words.rank_cells(result, fact)) for fact in result["ranks"]["by_rank"])
    return [Table("What ranks hold and send", header, rows, f"Memory is that {demo_words.memory_of(result)}.")]


def _loss(result: Result) -> Plot:
    curve, points = result["training"]["train_curve"], result["training"]["points"]
    group = -(-len(curve) // MOST_STEPS)
    parts = [curve[i : i + group] for i in range(0, len(curve), group or 1)]
    trained = tuple(plain(part[-1][0], sum(loss for *_, loss in part) / len(part)) for part in parts)
    series = Series("training text", trained), Series("held-out text", tuple(plain(p["seconds"], p["held_out"]) for p in points))
    axes = Axis("seconds of training", "number", log=False), Axis("bits per byte", "number", log=False)
    return Plot("Bits per byte in the course of training", "lines", series, axes)


def _against_dense(rows: list[Result]) -> list[Plot]:
    lines: dict[str, list[Series]] = {"seconds": [], "peak_bytes": []}
    for kind in ("dilated", "dense"):
        made = [(row["tokens"], row[kind]) for row in rows if row[kind] is not None]
        lines["seconds"].append(Series(kind, tuple(sampled(n, found["samples"]) for n, found in made)))
        peaks = tuple(plain(n, found["peak_bytes"]) for n, found in made if found["peak_bytes"])
        lines["peak_bytes"].append(Series(kind, peaks))
    faster = Series("dilated over dense", tuple(point for row in rows if (point := _faster(row)) is not None))
    bars = Axis("", "number"), Axis("times faster", "times")
    return [
        Plot("Time of forward and backward", "lines", tuple(lines["seconds"]), (TOKENS, Axis("time", "seconds"))),
        Plot("Peak extra memory", "lines", tuple(lines["peak_bytes"]), (TOKENS, Axis("memory", "bytes"))),
        Plot("Speed-up over dense attention, with 95% intervals", "bars", (faster,), bars, mark=1.0),
    ]


def told_kernels(result: Result) -> Document:
    """The compiler's report: registers by architecture."""
    registers: dict[str, list[int]] = {}
    for row in kernel_report.rows_in(result):
        registers.setdefault(row["architecture"], []).append(row["registers"])
    most = Series("most of any kernel", tuple(plain(name, max(found)) for name, found in registers.items()))
    axes = Axis("", "number"), Axis("registers of a thread", "number", log=False)
    return Document(
        headline=(kernel_report.verdict(result), where(result)),
        tables=tables(Table.of("Registers of a thread, by architecture", kernel_report.table_rows(result))),
        plots=plots(Plot("Registers of the largest kernel", "bars", (most,), axes)),
    )
