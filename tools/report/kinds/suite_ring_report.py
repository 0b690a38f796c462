"""What the ring suite's result says: the figures beside their limits, then the measurements; as text and Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dilkit.tools.bench.ranks.targets import good
from dilkit.tools.console.text import aligned, in_bytes, markdown_table
from dilkit.tools.report.kinds.bench_report import seconds
from dilkit.tools.report.untyped_headline import suite_headline

Result = dict[str, Any]
Rows = list[tuple[str, ...]]
COLUMNS = ("figure", "must", "measured", "verdict")


def headline(result: Result) -> list[str]:
    """Where it was measured, in two lines."""
    where = result["environment"]
    jobs = {"mpi": f"mpirun ({result['mpi']})", "gloo": "gloo processes"}
    started = ", ".join(jobs[name] for name in result["processes"]) or "no processes, only threads"
    return suite_headline(result, f"{where['device_name']}, {where['cores']} cores; ranks: threads, {started}")


def figure_rows(result: Result) -> Rows:
    """The figures' table, its column names first."""
    return [COLUMNS, *(_figure_row(figure) for figure in result["figures"])]


def _figure_row(figure: dict[str, Any]) -> tuple[str, ...]:
    unit = figure["unit"]
    must = (
        "at most " if figure["lower"] and figure["must"] else "" if figure["lower"] else "at least "
    ) + f"{figure['must']:g}{unit}"
    values = [f"{_number(value)}{unit} ({who})" for who, value in figure["values"].items()]
    return figure["name"], must, ", ".join(values) or "-", figure["verdict"]


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.3g}" if abs(value) < 1 else f"{value:.3f}"


def memory_rows(result: Result) -> Rows:
    """Peak memory of the rank that needs most, and what its part of the tensors alone takes."""
    names = ("configuration", "tokens", "p", "threads a rank", "peak a rank", "its tensors", "p=1 over this")
    rows = [("fixed n/p", e) for e in good(result, "growth")]
    rows = [(e["config"], e) for e in sorted(good(result, "memory"), key=lambda e: (e["config"], e["seq"], e["ranks"]))] + rows
    peaks = {(config, e["seq"], e["ranks"]): max(e["peak_bytes"]) for config, e in rows}
    return [names, *(_memory_row(config, e, peaks.get((config, e["seq"], 1))) for config, e in rows)]


def _memory_row(config: str, e: dict[str, Any], alone: int | None) -> tuple[str, ...]:
    peak = max(e["peak_bytes"])
    ratio = "-" if alone is None or e["ranks"] == 1 else f"{alone / peak:.3f}"
    name = {"long": "a quarter of the million"}.get(config, config)
    return name, f"{e['seq']:,}", str(e["ranks"]), str(e["threads"]), in_bytes(peak), in_bytes(e["tensors_bytes"]), ratio


def fault_rows(result: Result) -> Rows:
    """What became of each fault."""
    names = ("rank 1", "ranks are", "timeout", "others knew after", "names rank", "names step", "what was said")
    rows = []
    for e in good(result, "faults"):
        said = e["error"] if len(e["error"]) < 150 else f"{e['error'][:147]}..."
        who = " ".join(filter(None, (e["transport"], e["options"])))
        flags = ("yes" if e[name] else "no" for name in ("names_rank", "names_step"))
        rows.append(
            (e["kind"], who, f"{e['timeout']:g} s", f"{max(e['seconds'], 0):.2f} s", *flags, f"`{said.replace('|', ' ')}`")
        )
    return [names, *rows]


def volume_rows(result: Result) -> Rows:
    """Forward bytes of the busiest rank, for each schedule and number of ranks; no rows where there was no time for that."""
    rows: Rows = [("p",)]
    for found in result["volumes"]:
        columns = [*found["schedules"].values(), found["full_ring"]]
        rows = [("p", *found["schedules"], "a ring of all keys and values")]
        rows += [(str(p), *(in_bytes(column[i]) for column in columns)) for i, p in enumerate(found["ranks"])]
    return rows


def notes(result: Result) -> list[str]:
    """Counts, times, and what failed."""
    counted = sum(len(entry["calls"]) for entry in good(result, "bytes"))
    compared = sum(len(entry["calls"]) for entry in good(result, "agreement"))
    lines = [f"bytes were counted in {counted} calls, results compared in {compared}"]
    for e in good(result, "race"):
        times = {who: seconds(entry["time"]["median_s"]) for who, entry in e["entries"].items()}
        lines.append(
            f"A, forward + backward: {times['ranks']} on {e['ranks']} ranks of one thread, {times['one rank']} on one rank of "
            f"{e['one_rank_threads']} threads, medians of {result['repeats']} samples in turns"
        )
    for e in good(result, "million"):
        counted_by_run = "counted in a run as well" if e["sent_bytes"] == e["planned_bytes"] else e.get("why", "differs in a run")
        lines.append(f"{e['seq']:,} tokens, p={e['ranks']}: {max(e['planned_bytes']):,} bytes by the plan; {counted_by_run}")
    for name in ("bytes", "agreement", "faults", "memory", "growth", "race", "timeline", "million"):
        lines += [f"FAILED, {name}: {entry['failed']}" for entry in result[name] if "failed" in entry]
    return lines


METHOD = """\
Bytes are those that the transport counted in a forward and backward pass, beside the plan's formula, for each schedule:
threads with p = 1 .. 8, processes with p = 2, 3, 4; aligned and causal in bf16, odd lengths with a mask in fp32, grouped
heads in fp64. Errors are against fp64, in units of what is allowed: twice (gradients: three times) the error of plain torch
arithmetic of the same dtype, and a few roundings. Memory is the high-water mark of a fresh process's resident memory over
what it held before its tensors were made: inputs, results, gradients and all that lies between, of the rank that needs most,
in fp32. "A quarter of the million" is the pattern of a million tokens with sequence and segments a quarter as long: 262,144
tokens, w = 512, 2048, 8192, 32768, 131072, r = 1, 4, 16, 64, 256. A step's time is the slowest rank's, all having begun
together; both sides are timed in turns in one job. Faults strike rank 1 of three after one call went well; seconds are those
until the last of the others knew, or, where these are ended without a word, until the launcher had ended the job."""


def text(result: Result) -> str:
    """The report for the terminal."""
    tables = [aligned(rows(result)) for rows in (figure_rows, memory_rows, volume_rows, fault_rows)]
    return "\n".join([*headline(result), *(line for table in tables for line in ("", *table)), "", *notes(result)])


def figures_markdown(result: Result) -> str:
    """Where, and the figures beside their limits."""
    return "\n".join([*(f"{line}  " for line in headline(result)), "", *markdown_table(figure_rows(result))])


def markdown(result: Result) -> str:
    """The whole report."""
    parts = [figures_markdown(result)]
    for title, rows in (
        ("Memory per rank, forward and backward", memory_rows(result)),
        ("Forward bytes of the busiest rank: one million tokens, bf16", volume_rows(result)),
        ("Faults", fault_rows(result)),
    ):
        parts += ["", f"## {title}", "", *markdown_table(rows)]
    return "\n".join([*parts, "", *(f"* {note}" for note in notes(result)), "", METHOD, "", f"`{result['command']}`", ""])


def draw(result: Result, path: Path) -> None:
    """Write the picture to `path`. Raises ImportError where matplotlib is missing."""
    from dilkit.tools.report.kinds.suite_ring_plot import draw as draw_ring

    draw_ring(result, path)
