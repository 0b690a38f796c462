"""`dilkit demo`: a small byte-level language model of dilated attention learns from text."""

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from dilkit import Pattern, Problem, explain
from dilkit.testing.memory import MeasureError, peak_memory
from dilkit.testing.tensors import Tensors
from dilkit.tools.demo.corpus import load_text
from dilkit.tools.demo.trainer import LOSS, SAMPLES, Run, Trainer, clock, judgements, rows_by_name, run_table
from dilkit.tools.demo.transformer import ModelConfig, TextTask, save_model, seeded_model
from dilkit.tools.measure.implementation import backend_implementations
from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.report import views
from dilkit.tools.report.document import Axis, Table
from dilkit.tools.report.views import PlotView, Report, ResultTable, fact, of
from dilkit.tools.results.rows import ResultRow, RowsResult

TITLE = "dilkit demo"
JUDGEMENTS, SHORT_SHARE = 8, 0.75
LONGEST = 1.0
"""Seconds of a call beyond which no longer sequence is measured."""
DILATED, DENSE = "dilated", "dense"


def run(args: argparse.Namespace) -> int:
    """Train, then measure attention; 0, or 130 when interrupted: the report holds all until then."""
    if (file := args.out / "model.pt").is_dir():
        raise ValueError(f"--out: {str(file)!r} is a folder, and the model is to be written there; name another --out")
    corpus, config = load_text(args.text, args.context), ModelConfig(args.context)
    model, problem = seeded_model(config, args.seed), config.problem()
    task = TextTask(model, corpus, args.context, args.seed, short_share=SHORT_SHARE)
    problems = {DILATED: problem, DENSE: replace(problem, pattern=Pattern.dense())}
    facts = corpus.facts | {kind: explain(problem).picked for kind, problem in problems.items()}
    facts |= dict(minutes=args.minutes, steps=args.steps, layers=config.layers, windows=len(task.held_out))
    facts |= dict(short_window=task.short_window, short_share=SHORT_SHARE)
    with Run(TITLE, args, model, problem, facts) as demo:
        trainer = Trainer(task, args.steps, args.minutes)
        try:
            demo.train("text", trainer, JUDGEMENTS)
        finally:
            if trainer.curve:  # an untrained model is not worth an earlier one
                save_model(model, file)
                command = f'dilkit demo --checkpoint {shlex.quote(str(file))} --sample "def "'
                print(f"the model is in {file}; to continue a text with it: {command}", file=sys.stderr)
        demo.facts["stage"] = "measuring"
        for tokens in (args.context * 2**i // 4 for i in range(5)):
            demo.rows += time_attention(problems, demo.facts, tokens)
            if demo.rows[-1].median_s > LONGEST:
                break
    return demo.code


def time_attention(problems: dict[str, Problem], backends: dict[str, Any], tokens: int) -> Iterator[ResultRow]:
    problems = {kind: replace(problem, seq=tokens) for kind, problem in problems.items()}
    inputs, calls = Tensors.random(problems[DILATED]), {}
    for kind, problem in problems.items():
        (backend,) = backend_implementations([backends[kind]])
        calls[kind] = partial(backend.once, inputs, problem)
    for kind, timed in time_interleaved(calls, repeats=SAMPLES).items():
        try:
            memory = peak_memory(calls[kind])
        except MeasureError as error:
            memory = None
            print(f"memory is not measured: {error}", file=sys.stderr)
        yield ResultRow(
            table="lengths", case=dict(tokens=tokens), who=kind, samples=timed.samples, values=dict(peak_bytes=memory)
        )


def outcome(result: RowsResult) -> str:
    training, points = rows_by_name(result, "training")["text"].values, judgements(result, "text")
    if len(points) < 2:
        return "held out: not judged after training"
    speed = f"{training['steps']:,} steps, {training['tokens'] / training['seconds']:,.0f} tokens/s"
    return f"held out: {points[0]['loss']:.2f} -> {points[-1]['loss']:.2f} bits per byte in {training['seconds']:.0f} s: {speed}"


TRAINING = (
    views.Column("trained for", lambda row, case: clock(row.values["seconds"])),
    fact("tokens", "bytes read", "{:,}"),
    fact("train", "training, bits per byte", "{:.3f}"),
    of("text", LOSS, "held out"),
)
PEAK = views.value("peak_bytes", "memory", "bytes")
LENGTHS = (
    fact("tokens", template="{:,}"),
    *(of(kind, views.TIME) for kind in (DILATED, DENSE)),
    *views.speed_up_columns(DILATED),
    *(of(kind, PEAK, f"{kind} memory") for kind in (DILATED, DENSE)),
)
TABLES = (
    ResultTable("Training", "held out", TRAINING, timed=False),
    ResultTable("Dilated against dense attention", "lengths", LENGTHS, who=(DENSE,)),
)
LEARNING = Axis("seconds of training", "number", log=False), Axis("held-out bits per byte", "number", log=False)
PLOTS = (
    PlotView("Bits per byte in the course of training", "held out", "seconds", views.stored("loss"), LEARNING, "lines"),
    PlotView("Time of forward and backward", "lengths", "tokens", views.time, (views.TOKENS, views.SECONDS), "lines"),
)


def made_tables(result: RowsResult) -> Iterable[Table]:
    facts = result.facts
    length = f"{facts['steps']:,} steps" if facts["steps"] else f"{facts['minutes']:g} minutes"
    windows = "{short_window:,} bytes for the first {short_share:.0%} of training, then {context:,}; held out always {context:,}"
    after = [
        ("training", f"{length} in {facts['dtype']}, threads: {result.environment.threads}"),
        ("windows", windows.format(**facts)),
    ]
    yield run_table(result, after)


REPORT = Report(
    command=TITLE,
    summary=outcome,
    tables=(*TABLES, made_tables),
    plots=PLOTS,
    method="Held-out bits per byte are the mean over {windows} windows of {context:,} bytes of files that were never trained on. "
    "Attention alone is measured forward and backward: 1 sequence, {heads} heads x {head_dim}, causal, {dtype}; dilated is the "
    "model's pattern, computed by {dilated}, dense is every earlier token, computed by {dense}. Time is the median of at most 5 "
    "calls taken in turns, memory the peak beyond what was held before the call.",
)
