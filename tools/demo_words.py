"""The demo's results as lines for people. Every function reads the plain data that report.json holds."""

from __future__ import annotations

import shlex
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
    learnt = f"{_count(text['train_files'], 'file')} ({_size(text['train_bytes'])})"
    held_out = f"{_count(len(text['held_out_files']), 'other')} ({_size(text['held_out_bytes'])})"
    rows = [
        ("text", f"{text['source']}: {learnt} to learn from, {held_out} held out"),
        ("model", f"{model['parameters'] / 1e6:.2f} M parameters: {sizes}"),
        ("attention", f"{model['pattern']}: {model['share_of_dense']:.1%} of the work of dense attention"),
        (
            "training",
            f"{_length(training['budget'])} on {_count(results['environment']['threads'], 'thread')} in {model['dtype']}",
        ),
        ("windows", curriculum(results)),
        *_verdicts(results["backend"]),
    ]
    return [f"{name:<11}{line}" for name, line in rows]


def curriculum(results: Data) -> str:
    """How long the windows are that it is trained on."""
    training, context = results["training"], results["model"]["context"]
    short, share = training["short_window_bytes"], training["short_window_share"]
    if short == context:
        return f"{context:,} bytes throughout"
    return f"{short:,} bytes for the first {share:.0%} of training, then {context:,} bytes; held out always {context:,} bytes"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def _length(budget: Data) -> str:
    return (
        _count(budget["steps"], "step")
        if budget["steps"]
        else f"{budget['seconds'] / 60:g} minute{'s' * (budget['seconds'] != 60)}"
    )


def _verdicts(backend: Data) -> list[tuple[str, str]]:
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
    return f"{_clock(point['seconds']):>8}  {point['tokens']:>12,}   {train:>8}   {point['held_out']:>8.3f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"


def speed(seconds: float, loss: float, tokens_per_second: float) -> str:
    """How training is going, for the progress bar."""
    return f"{_clock(seconds)}  {loss:.2f} bits/byte  {tokens_per_second:,.0f} tokens/s"


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
        f"in {training['seconds']:.0f} s: {_count(training['steps'], 'step')}, {training['tokens_per_second']:,.0f} tokens/s"
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
    memory = results["scaling"]["memory_note"]
    unmeasured = [f"memory was not measured: {memory}"] if memory else []
    lines = ["", *unmeasured, *notes, f"report     {out / 'report.md'}"]
    model = results["model"]["file"]
    if model is None:
        return lines
    place = f"--out {shlex.quote(str(out))} " if model == str(out / "model.pt") else f"--checkpoint {shlex.quote(model)} "
    return [
        *lines,
        f"model      {model}",
        f'try        dilkit demo {"" if place == "--out dilkit-demo " else place}--sample "def "',
    ]
