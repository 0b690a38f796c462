"""What the result of the suite of published settings says: section by section, and last each published figure beside ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dilkit.tools.bench.published import settings as seed_settings
from dilkit.tools.bench.published.claim import CARD, CARD_TFLOPS
from dilkit.tools.bench.published.entrants import SUMMARIES
from dilkit.tools.console.text import aligned, markdown_table
from dilkit.tools.report.kinds import seed_rows, seed_tables
from dilkit.tools.report.kinds.seed_rows import Rows, as_published, measured
from dilkit.tools.report.untyped_headline import suite_headline

Result = dict[str, Any]
CLAIMS = ("seed figure", "hardware", "claimed", "ours here", "ours per measured TFLOP/s", "what to know about it")


def headline(result: Result) -> list[str]:
    """Where it was measured, in two lines."""
    where = result["environment"]
    started = ", ".join(("threads", *result["processes"]))
    place = f"{where['device_name']}, {where['threads']} threads of {where['cores']} cores; ranks: {started}"
    earlier = len(result["earlier"])
    runs = [f"measured in {earlier + 1} runs, each going on from the one before"] if earlier else []
    first, second, *rest = suite_headline(result, place)
    return [first, second, *runs, *rest]


def claim_rows(result: Result) -> Rows:
    """Every published figure beside what it is here, the column names first."""
    return [CLAIMS, *(_claim_row(figure) for figure in result["figures"])]


def _claim_row(figure: dict[str, Any]) -> tuple[str, ...]:
    quantity = figure["quantity"]
    told = [] if figure["ours"] is None else [measured(figure["ours"], quantity)]
    ours = ", ".join([*told, *filter(None, [figure["why"]])])
    per_tflops = "-" if figure["per_tflops"] is None else measured(figure["per_tflops"], quantity)
    name = f"{figure['document']}: {figure['figure']}"
    return name, figure["hardware"], as_published(figure["claimed"], quantity), ours, per_tflops, figure["note"]


def sections(result: Result) -> Iterator[tuple[str, Rows, list[str]]]:
    """Title, table and the lines below it, of all that was measured."""
    s = seed_settings
    held = s.held_lengths(full=True)
    for title, settings, size in (
        ("Lengths: batch as published", s.QUICK_TABLE, ""),
        ("Lengths: batch 1, segments that grow with the sequence", s.LENGTHS, "seq"),
        ("Lengths: segments that stay as they are", held, "seq"),
        ("Heads", s.HEADS, "heads"),
        ("Batches", s.BATCHES, "batch"),
        ("Configurations", s.CONFIGURATIONS, ""),
    ):
        ordered = sorted(settings, key=lambda one: (one.seq, one.batch, one.heads, len(one.segment_lengths)))
        fits = list(seed_rows.exponents(result, ordered, size)) if size else []
        yield title, seed_rows.scaling_rows(result, ordered), fits
    yield "Implementations side by side", seed_rows.implementation_rows(result), _who()
    yield "Ranks at a fixed length", seed_tables.rank_rows(result, "ranks"), []
    yield "Ranks at fixed tokens a rank", seed_tables.rank_rows(result, "growth"), []
    yield "Along a Hilbert curve", seed_tables.order_rows(result), []
    yield "The cache of plans", seed_tables.cache_rows(result), []
    yield "Half precision", seed_tables.half_rows(result), []
    yield "The longest sequence that fits", seed_tables.longest_rows(result), []


def _who() -> list[str]:
    return [f"{name}: {summary}" for name, summary in SUMMARIES.items()]


def notes(result: Result) -> list[str]:
    """Who was not timed and why, who computes another function, and what failed."""
    told: dict[str, list[str]] = {}
    for case in result["cases"]:
        for who, entry in case["entries"].items():
            notes = [f"{who} {entry['verdict']}: {reason}" for reason in entry["reasons"]]
            if differs := entry.get("differs"):
                notes.append(f"{who} computes another function: {differs['computes']}")
            for note in notes:
                told.setdefault(note, []).append(f"{case['seq']:,}")
    lines = [f"{note} (at {', '.join(dict.fromkeys(places))} tokens)" for note, places in told.items()]
    memory = {e["memory_note"] for case in result["cases"] for e in case["entries"].values() if e.get("memory_note")}
    jobs = [*result["ranks"], *result["growth"]]
    lines += [f"FAILED, {job['ranks']} ranks, {job['transport']}: {job['failed']}" for job in jobs if "failed" in job]
    memory |= {row["memory_note"] for job in jobs for row in job["rows"] if row["memory_note"]}
    lines += [f"memory: {note}" for note in sorted(memory)]
    if result["chosen"]["device"] != "cpu":
        lines.append("ranks are measured on the CPU alone: `dilkit bench --suite seeds` there, `dilkit bench --comm` here")
    return lines


def method(result: Result) -> str:
    """How the figures were taken."""
    return (
        f"Medians of {result['repeats']} samples taken in turns (two or three where calls are long), with intervals that hold "
        "them with 95 % confidence (bootstrap); everyone was checked against fp64 arithmetic just before, on random tensors of "
        "64 dimensions a head. Memory is the peak with inputs counted: query, key and value, in training the output's gradient "
        "too; over ranks, of the rank that needs most, in a process of its own. Over ranks both sides are timed in turns in one "
        "job, the cores shared out among them. The documents measured forward passes alone; backward passes of the longest calls "
        "are left to --full, as are their caches of plans, half types beyond 8,192 tokens, and long calls of other numbers of "
        "ranks than were published. auto computes LongNet's pattern, in which every head takes part in every branch; what they "
        "measured is head-split, a fraction of the work. A matmul in fp32 was timed in the same rounds: ours per TFLOP/s is what "
        "this would be on a machine whose matmul reaches one, and holds for speeds alone. For comparison, the "
        f"{CARD} has {CARD_TFLOPS:g} TFLOP/s in fp32 by its data sheet."
    )


def text(result: Result) -> str:
    """The report for the terminal."""
    lines = headline(result)
    for title, rows, below in sections(result):
        if len(rows) > 1:
            lines += ["", title, "", *aligned(rows), *(f"  {line}" for line in below)]
    return "\n".join([*lines, "", *notes(result), "", *aligned(claim_rows(result))])


def figures_markdown(result: Result) -> str:
    """Where, and how many of the published figures there are here."""
    ours = sum(figure["ours"] is not None for figure in result["figures"])
    told = f"{len(result['figures'])} figures of five documents, {ours} of them measured again."
    return "\n".join([*(f"{line}  " for line in headline(result)), "", told])


def markdown(result: Result) -> str:
    """The whole report; the published figures come last."""
    parts = [figures_markdown(result), "", method(result)]
    for title, rows, below in sections(result):
        if len(rows) > 1:
            parts += ["", f"## {title}", "", *markdown_table(rows), *(["", *(f"* {line}" for line in below)] if below else [])]
    told = [f"* {note}" for note in notes(result)]
    last = ["", "## Every published figure", "", *markdown_table(claim_rows(result)), ""]
    return "\n".join([*parts, "", *told, "", f"`{result['command']}`", *last])


def draw(result: Result, path: Path) -> None:
    """Write the picture to `path`. Raises ImportError where matplotlib is missing."""
    from dilkit.tools.report.kinds.suite_seeds_plot import draw as draw_seeds

    draw_seeds(result, path)
