"""The demo's results as lines for people. Every function reads the plain data that report.json holds."""

from __future__ import annotations

import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

Data = dict[str, Any]

CURVE_HEADER = """\
            bytes read   bits per byte
    time   in training   training   held out"""
_MIB = 2**20


def facts(results: Data) -> list[str]:
    """What is trained, on what, and which backend computes it and why."""
    text, model, training = results["text"], results["model"], results["training"]
    sizes = f"{model['layers']} layers, width {model['width']}, {model['heads']} heads, {model['context']:,} bytes of context"
    learnt = f"{counted(text['train_files'], 'file')} ({_size(text['train_bytes'])})"
    held_out = f"{counted(len(text['held_out_files']), 'other')} ({_size(text['held_out_bytes'])})"
    rows = [
        ("text", f"{text['source']}: {learnt} to learn from, {held_out} held out"),
        ("model", f"{model['parameters'] / 1e6:.2f} M parameters: {sizes}"),
        ("attention", f"{model['pattern']}: {model['share_of_dense']:.1%} of the work of dense attention"),
        (
            "training",
            f"{_length(training['budget'])} on {_where(results)} in {model['dtype']}",
        ),
        ("windows", curriculum(results)),
        *_ranks(results),
        *verdicts(results["backend"]),
    ]
    return [f"{name:<11}{line}" for name, line in rows]


def _where(results: Data) -> str:
    threads, ranks = counted(results["environment"]["threads"], "thread"), results.get("ranks")
    return f"{counted(ranks['world_size'], 'rank')} of {threads}" if ranks else threads


def _ranks(results: Data) -> list[tuple[str, str]]:
    """How windows are shared out; nothing where there are no ranks."""
    if not (ranks := results.get("ranks")):
        return []
    context, size = results["model"]["context"], ranks["world_size"]
    parts = [stop - start for start, stop in pairwise(ranks["cuts"])]
    largest = f"{max(parts):,}" if len({*parts}) == 1 else f"{min(parts):,} to {max(parts):,}"
    line = f"{counted(size, 'rank')} ({ranks['transport']}), each with {largest} bytes of a window of {context:,}"
    shorter = results["training"]["short_window_bytes"] < context
    return [("ranks", f"{line}; shorter windows are cut over all of them, too" if shorter else line)]


def rank_columns(results: Data) -> list[int]:
    """The lengths of windows that were trained on."""
    return sorted({int(seq) for fact in results["ranks"]["by_rank"] for seq in fact["sent"]})


def rank_cells(results: Data, fact: Data) -> list[str]:
    """What a rank holds and sends: bytes of a window, KiB sent in a step for attention + gradients by window, peak MiB."""
    start, stop = results["ranks"]["cuts"][fact["rank"] :][:2]
    sent = [fact["sent"][str(seq)] for seq in rank_columns(results)]
    peak = "-" if fact["peak_bytes"] is None else f"{fact['peak_bytes'] / _MIB:,.0f}"
    each = [f"{one['attention'] / 1024:,.0f} + {one['gradients'] / 1024:,.0f}" for one in sent]
    return [str(fact["rank"]), f"{stop - start:,}", *each, peak]


def memory_of(results: Data) -> str:
    """Whose peak memory it is: a rank's, or, with ranks that are threads of one process, that of them all."""
    processes = {fact["process"] for fact in results["ranks"]["by_rank"]}
    together = len(processes) < results["ranks"]["world_size"]
    return "of the process that all ranks are threads of" if together else "of the rank's process"


def rank_lines(results: Data) -> list[str]:
    """What each rank sent and held, as a table for the terminal; nothing where there are no ranks."""
    if not results.get("ranks") or not results["ranks"]["by_rank"]:
        return []
    windows = [f"window of {seq:,}" for seq in rank_columns(results)]
    rows = [["rank", "bytes", *windows, "MiB"], *(rank_cells(results, fact) for fact in results["ranks"]["by_rank"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return ["", f"KiB sent a step, attention + gradients; peak extra memory {memory_of(results)}:", *lines]


def curriculum(results: Data) -> str:
    """How long the windows are that it is trained on."""
    training, context = results["training"], results["model"]["context"]
    short, share = training["short_window_bytes"], training["short_window_share"]
    if short == context:
        return f"{context:,} bytes throughout"
    return f"{short:,} bytes for the first {share:.0%} of training, then {context:,} bytes; held out always {context:,} bytes"


def counted(number: int, noun: str) -> str:
    """A number of things."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def _length(budget: Data) -> str:
    return (
        counted(budget["steps"], "step")
        if budget["steps"]
        else f"{budget['seconds'] / 60:g} minute{'s' * (budget['seconds'] != 60)}"
    )


def verdicts(backend: Data) -> list[tuple[str, str]]:
    """Every backend with its verdict and reasons, the one that is picked first."""
    width = max((len(b["name"]) for b in backend["backends"]), default=0)
    lines = [f"{b['name']:<{width}} {b['verdict']}{_reasons(b)}" for b in backend["backends"]]
    return [("backend" if i == 0 else "", line) for i, line in enumerate(lines)]


def _reasons(decision: Data) -> str:
    reasons = [*filter(None, [decision["detail"]]), *decision["reasons"]]
    return f": {'; '.join(reasons)}" if reasons else ""


def curve_line(point: Data) -> str:
    """One evaluation in the course of training."""
    train = "" if point["train"] is None else f"{point['train']:.3f}"
    return f"{clock(point['seconds']):>8}  {point['tokens']:>12,}   {train:>8}   {point['held_out']:>8.3f}"


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"


def speed(seconds: float, loss: float, tokens_per_second: float) -> str:
    """How training is going, for the progress bar."""
    return f"{clock(seconds)}  {loss:.2f} bits/byte  {tokens_per_second:,.0f} tokens/s"


def markdown_point(point: Data) -> str:
    """One evaluation, as a row of a Markdown table."""
    train = "" if point["train"] is None else f"{point['train']:.3f}"
    return f"| {point['seconds']:.0f} | {point['tokens']:,} | {train} | {point['held_out']:.3f} |"


def outcome(results: Data) -> str:
    """Held-out bits per byte before and after, and the speed, as far as training has come."""
    training = results["training"]
    if training["after"] is None:
        return "held out: not judged after training"
    return (
        f"held out: {training['before']:.2f} -> {training['after']:.2f} bits per byte "
        f"in {training['seconds']:.0f} s: {counted(training['steps'], 'step')}, {training['tokens_per_second']:,.0f} tokens/s"
    )


def scaling_subject(scaling: Data) -> list[str]:
    """What is measured, and by which backends."""
    sizes = f"{scaling['batch']} sequence, {scaling['heads']} heads x {scaling['head_dim']}, causal, {scaling['dtype']}"
    dilated, dense = scaling["backends"]["dilated"], scaling["backends"]["dense"]
    return [
        f"Attention alone, forward and backward: {sizes}.",
        f"Dilated is the model's pattern, computed by {dilated}; dense is every earlier token, computed by {dense}.",
    ]


def scaling_header(scaling: Data) -> list[str]:
    """What is measured, and the head of its table."""
    head = [
        "                time, ms                     peak extra memory, MiB",
        "  tokens     dilated       dense speedup       dilated       dense",
    ]
    return ["", *scaling_subject(scaling), "", *head]


def scaling_line(row: Data) -> str:
    """One length of the table."""
    dilated, dense, ratio, dilated_memory, dense_memory = _cells(row)
    note = f"   {row['note']}" if row["note"] else ""
    return f"{row['tokens']:>8,}{dilated:>12}{dense:>12}{ratio:>8}{dilated_memory:>14}{dense_memory:>12}{note}"


def markdown_row(row: Data) -> str:
    """One length of the table, in Markdown."""
    return f"| {row['tokens']:,} | {' | '.join(_cells(row))} | {row['note']} |"


def _cells(row: Data) -> tuple[str, ...]:
    times = _time(row["dilated"]), _time(row["dense"])
    ratio = "-" if row["speedup"] is None else f"{row['speedup']:.1f}x"
    return *times, ratio, _memory(row["dilated"]), _memory(row["dense"])


def _time(measured: Data | None) -> str:
    return "-" if measured is None else f"{1e3 * measured['seconds']:,.1f}"


def _memory(measured: Data | None) -> str:
    return "-" if measured is None or measured["peak_bytes"] is None else f"{measured['peak_bytes'] / _MIB:,.1f}"


def closing(results: Data, out: Path, notes: list[str]) -> list[str]:
    """What could not be done, where the results are, and what to try next; no model where no step was made."""
    memory = (results.get("ranks") or results["scaling"])["memory_note"]
    unmeasured = [f"memory was not measured: {memory}"] if memory else []
    lines = [*rank_lines(results), "", *unmeasured, *notes, f"report     {out / 'report.md'}"]
    model = results["model"]["file"]
    if model is None:
        return lines
    place = f"--out {shlex.quote(str(out))} " if model == str(out / "model.pt") else f"--checkpoint {shlex.quote(model)} "
    return [
        *lines,
        f"model      {model}",
        f'try        dilkit demo {"" if place == "--out dilkit-demo " else place}--sample "def "',
    ]
