"""`dilkit demo`: a small byte-level language model of dilated attention learns from text, also over ranks."""

from __future__ import annotations

import argparse
import shlex
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from dilkit import Pattern, explain
from dilkit.comm import Comm, copy_from_rank, shard_cuts, sum_over_ranks
from dilkit.comm.agreement import agree_on
from dilkit.testing.memory import MeasureError, check_peak_memory, peak_memory
from dilkit.testing.tensors import Tensors
from dilkit.tools.console import rank_arguments as over_ranks
from dilkit.tools.console.arguments import make_folder
from dilkit.tools.console.interrupt import stopping
from dilkit.tools.demo.corpus import Corpus, load_text
from dilkit.tools.demo.trainer import LOSS, SAMPLES, Demo, Task, Trainer, clock, counted, judgements, rows_by_name, run_table
from dilkit.tools.demo.transformer import VOCABULARY, ByteTransformer, ModelConfig, save_model
from dilkit.tools.measure.implementation import backend_implementations
from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.report import views
from dilkit.tools.report.document import Axis, Plot, Series, Table
from dilkit.tools.report.points import plain, rate
from dilkit.tools.report.views import MOST_POINTS, PlotView, RunReport, TableView, fact, of
from dilkit.tools.results.rows import Row, RowsResult

JUDGEMENTS, SHORT_WINDOW, SHORT_SHARE = 8, 512, 0.75
"""For this share of the budget windows are short: the model takes many more steps, and learns what is near before what is far."""
LONGEST = 1.0
"""Seconds of a call beyond which no longer sequence is measured: dense attention would take four times as long."""
DILATED, DENSE, CACHED, AGAIN = "dilated", "dense", "with caches", "every row again"
STEP_END = struct.Struct("d?")
"""The record that a rank shares after each step: its seconds, and True if it is to stop."""
SEEDED = threading.Lock()
"""Ranks that are threads share torch's generator."""


class Alone(Comm):
    """The only rank."""

    def __init__(self) -> None:
        super().__init__(0, 1, timeout=1.0)

    def abort(self, why: BaseException) -> None:
        """Do nothing: there are no other ranks."""

    def _post(self, *_: Any) -> Callable[[], None]:
        return lambda: None


class TextTask(Task):
    """The next byte of a text. Each rank has its part of every window, and all the same losses.

    `stop`: set on any rank of `world`, by default `comm`, it ends the training on all of them, after the same step.
    `replicas`: as many whole windows in each step, and to be judged on; by default one, at first short, and all windows.
    """

    model: Any

    def __init__(
        self,
        corpus: Corpus,
        config: ModelConfig,
        seed: int,
        comm: Comm,
        stop: threading.Event | None = None,
        world: Comm | None = None,
        replicas: int | None = None,
    ) -> None:
        self.config, self.comm, self.world, self.stop = config, comm, world or comm, stop or threading.Event()
        self.replicas, self.short_share = (1, SHORT_SHARE) if replicas is None else (replicas, 0.0)
        self.short_window = min(SHORT_WINDOW, config.context)
        self._part(self.short_window)  # raises if there are more ranks than bytes
        with SEEDED:
            torch.manual_seed(seed)
            self.model = ByteTransformer(config, comm if comm.size > 1 else None)
        copy_from_rank([*self.model.parameters()], comm)
        self.held_out, self._windows = corpus.held_out_windows(config.context), corpus.random_windows(seed)
        if replicas is not None:
            self.held_out = self.held_out[torch.arange(replicas) % len(self.held_out)]

    def _part(self, seq: int) -> tuple[int, int]:
        """Return the first and last row of this rank's part of a window of `seq` bytes."""
        cuts = shard_cuts(seq, self.comm.size, self.config.pattern)
        return cuts[self.comm.rank], cuts[self.comm.rank + 1]

    def share(self, windows: Tensor) -> Tensor:
        """Return this rank's share of the mean bits per byte of windows `(replicas, seq + 1)`."""
        seq = windows.shape[1] - 1
        start, end = self._part(seq)
        mean: Tensor = self.model.bits_per_byte(windows[:, start : end + 1])  # the byte after its rows is the last one's target
        return mean * ((end - start) / seq)

    def batch(self, spent: float) -> tuple[Tensor, int]:
        seq = self.short_window if spent < self.short_share else self.config.context
        return self.share(self._windows.draw(self.replicas, seq)), self.replicas * seq

    def differentiate(self, share: Tensor) -> float:
        """Set the gradients of the sum of all ranks' shares; return the sum."""
        torch.autograd.backward(share)
        total = share.detach()
        sum_over_ranks([total, *(p.grad for p in self.model.parameters() if p.grad is not None)], self.comm)
        return total.item()

    @torch.no_grad()
    def judge(self) -> float:
        bits = torch.zeros((), dtype=torch.float64)
        for windows in torch.split(self.held_out, self.replicas):
            bits += self.share(windows).item()
            if self.clock(0.0)[1]:
                raise KeyboardInterrupt
        self.add_up(bits)
        return bits.item() * self.replicas / len(self.held_out)

    def add_up(self, value: Tensor) -> None:
        """Sum a value over the ranks that have shares."""
        sum_over_ranks([value], self.comm)

    def clock(self, seconds: float) -> tuple[float, bool]:
        """Return rank 0's `seconds`, which schedule the training on all ranks alike, and True if `stop` is set on any rank."""
        steps = [STEP_END.unpack(one) for one in self.world.share(STEP_END.pack(seconds, self.stop.is_set()), "end of a step")]
        return steps[0][0], any(stopped for _, stopped in steps)


def run(args: argparse.Namespace) -> int:
    """Run the demo that `args` describes; 0, or 130 when interrupted: then the report holds all until then."""
    args.save = args.save or args.out / "model.pt"
    make_folder("--out", args.out)
    make_folder("--save", args.save.parent)
    if args.save.is_dir():
        raise ValueError(f"--save: {str(args.save)!r} is a folder; name a file")
    corpus = load_text(args.text, args.context)
    if args.comm is None:
        return TextDemo(args, corpus, Alone(), threading.Event()).run()
    with stopping() as stop:
        return over_ranks.run(args, lambda comm: TextDemo(args, corpus, comm, stop).run())


class TextDemo(Demo):
    """Train; without ranks, measure dilated against dense attention, and the speed of generation."""

    KIND, TITLE = "demo", "dilkit demo"

    def __init__(self, args: argparse.Namespace, corpus: Corpus, comm: Comm, stop: threading.Event) -> None:
        trained_on = dict(text=corpus.digest(), context=args.context, steps=args.steps, minutes=args.minutes, seed=args.seed)
        agree_on(comm, lambda: trained_on, step="what the ranks train on")
        config = ModelConfig(args.context)
        self.task = TextTask(corpus, config, args.seed, comm, stop)
        self.problem = config.problem()
        super().__init__(args, self.task.model, config.layers, self.problem, speaks=comm.rank == 0)
        self.trainer = Trainer(self.task, args.steps, args.minutes)
        self.problems = {DILATED: self.problem, DENSE: replace(self.problem, pattern=Pattern.dense())}
        self.measured: list[Row] = []
        self.facts |= corpus.facts | dict(minutes=args.minutes, steps=args.steps, windows=len(self.task.held_out), memory_note="")
        self.facts |= dict(short_window=self.task.short_window, short_share=SHORT_SHARE)
        self.facts |= dict(transport=type(comm).__name__ if args.comm else None, world_size=comm.size)
        self.facts |= {name: explain(problem).picked or "" for name, problem in self.problems.items()}
        try:
            check_peak_memory()
        except MeasureError as error:
            self.facts["memory_note"] = str(error)

    def work(self) -> None:
        self.stage = "training"
        try:
            self.train(self.trainer, JUDGEMENTS)
        finally:
            if self.speaks and self.trainer.curve:  # an untrained model is not worth an earlier one
                save_model(self.task.model, self.args.save)
                command = f'dilkit demo --checkpoint {shlex.quote(str(self.args.save))} --sample "def "'
                print(f"the model is in {self.args.save}; to continue a text with it: {command}", file=sys.stderr)
        if self.args.comm is None:
            self.stage = "measuring"
            for measure, slow, lengths in (
                (self.lengths, DENSE, [self.args.context * 2**i // 4 for i in range(5)]),
                (self.generation, AGAIN, [self.args.context * 4**i // 16 for i in range(4)]),
            ):
                for tokens in lengths:
                    self.measured += measure(tokens)
                    if max(row.median_s for row in self.measured if row.who == slow) > LONGEST:
                        break

    def rows(self) -> list[Row]:
        return [*self.trainer.rows("text", seed=self.args.seed), *self.measured]

    def lengths(self, tokens: int) -> list[Row]:
        """Time attention alone, dilated and dense, forward and backward, each by the backend that is picked for it."""
        problems = {kind: replace(problem, seq=tokens) for kind, problem in self.problems.items()}
        inputs = Tensors.random(problems[DILATED])
        backends = dict(zip(problems, backend_implementations([self.facts[kind] for kind in problems]), strict=True))
        calls = {kind: partial(backends[kind].once, inputs, problem) for kind, problem in problems.items()}
        timed, rows = time_interleaved(calls, repeats=SAMPLES), []
        for kind, call in calls.items():
            values = dict(peak_bytes=None if self.facts["memory_note"] else peak_memory(call))
            rows.append(Row(table="lengths", case=dict(tokens=tokens), who=kind, samples=timed[kind].samples_s, values=values))
        return rows

    @torch.no_grad()
    def generation(self, tokens: int) -> list[Row]:
        """Time the last of so many bytes, where segments are nearly full and caches hold the most."""
        model, caches, steps = self.task.model, self.task.model.caches(), min(16, tokens // 2)
        text, first = torch.randint(VOCABULARY, (1, tokens)), tokens - steps - 1  # caches cannot go back from a segment's end
        model(text[:, :first], caches)

        def cached() -> None:
            for i in range(first, first + steps):
                model(text[:, i : i + 1], caches)

        def go_back() -> None:
            for cache in caches:
                cache.crop(first)

        samples = time_interleaved({CACHED: cached, AGAIN: lambda: model(text)}, repeats=SAMPLES, before=go_back)
        seconds = {CACHED: tuple(x / steps for x in samples[CACHED].samples_s), AGAIN: samples[AGAIN].samples_s}
        return [Row(table="generation", case=dict(tokens=tokens), who=who, samples=taken) for who, taken in seconds.items()]


def outcome(result: RowsResult) -> str:
    """Return held-out bits per byte before and after, and the speed."""
    training, points = rows_by_name(result, "training")["text"].values, judgements(result, "text")
    if len(points) < 2:
        return "held out: not judged after training"
    speed = f"{counted(training['steps'], 'step')}, {training['tokens'] / training['seconds']:,.0f} tokens/s"
    learnt = f"{points[0]['loss']:.2f} -> {points[-1]['loss']:.2f} bits per byte"
    return f"held out: {learnt} in {training['seconds']:.0f} s: {speed}"


TRAINED_FOR = views.Column("trained for", lambda row, case: clock(row.values["seconds"]))
READ, TRAINED = fact("tokens", "bytes read", "{:,}"), fact("train", "training, bits per byte", "{:.3f}")
RATE, PEAK = views.Column("bytes/s", lambda row, case: f"{1 / row.median_s:,.1f}"), views.value("peak_bytes", "memory", "bytes")
LENGTHS = views.label("tokens", "{tokens:,}"), of(DILATED, views.TIME), of(DENSE, views.TIME), *views.speed_up_columns(DILATED)
PEAKS = of(DILATED, PEAK, "dilated memory"), of(DENSE, PEAK, "dense memory")
GENERATION = (
    views.label("after", "{tokens:,}"),
    of(CACHED, views.TIME),
    of(CACHED, RATE, "bytes/s"),
    of(AGAIN, views.TIME),
    RATE,
    *views.speed_up_columns(CACHED),
)
TABLES = (
    TableView("Training", "held out", (TRAINED_FOR, READ, TRAINED, of("text", LOSS, "held out")), timed=False),
    TableView("Dilated against dense attention", "lengths", (*LENGTHS, *PEAKS), who=(DENSE,)),
    TableView("Generation", "generation", GENERATION, who=(AGAIN,)),
)
GENERATED = Axis("bytes before", "tokens"), Axis("bytes a second", "number")
INTERVALS = "Speed-up over dense attention, with 95% intervals"
PLOTS = (
    PlotView("Time of forward and backward", "lengths", "tokens", views.time, (views.TOKENS, views.SECONDS), "lines"),
    PlotView("Peak extra memory", "lengths", "tokens", views.stored("peak_bytes"), (views.TOKENS, views.BYTES), "lines"),
    PlotView(
        INTERVALS,
        "lengths",
        "{tokens:,} tokens",
        views.faster(DILATED),
        (views.NAMES, views.TIMES),
        series="dilated over dense",
        mark=1.0,
    ),
    PlotView("Speed of generation", "generation", "tokens", lambda row, case: rate("", 1.0, row.samples), GENERATED, "lines"),
)


def made_tables(result: RowsResult) -> Iterable[Table]:
    """Yield the course of training, dilated beside dense attention, generation, and the facts of the run."""
    yield from (view.made(result) for view in TABLES)
    facts, threads = result.facts, counted(result.environment.threads, "thread")
    learnt = f"{counted(facts['train_files'], 'file')} ({_size(facts['train_bytes'])})"
    held_out = f"{counted(len(facts['held_out_files']), 'other')} ({_size(facts['held_out_bytes'])})"
    length = counted(facts["steps"], "step") if facts["steps"] else f"{facts['minutes']:g} minute{'s' * (facts['minutes'] != 1)}"
    ranks = f"{counted(facts['world_size'], 'rank')} ({facts['transport']}) of " if facts["transport"] else ""
    short, context, share = facts["short_window"], facts["context"], facts["short_share"]
    mixed = f"{short:,} bytes for the first {share:.0%} of training, then {context:,} bytes; held out always {context:,} bytes"
    after = (
        ("training", f"{length} on {ranks}{threads} in {facts['dtype']}"),
        ("windows", f"{context:,} bytes throughout" if short == context else mixed),
    )
    before = [("text", f"{facts['text']}: {learnt} to learn from, {held_out} held out")]
    yield run_table(result, f"{context:,} bytes of context", before=before, after=after)


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def made_plots(result: RowsResult) -> Iterable[Plot]:
    """Yield the course of training, with the training loss as means over groups of steps, and all that was timed."""
    curve = rows_by_name(result, "training")["text"].values["curve"]
    group = -(-len(curve) // MOST_POINTS) or 1
    parts = [curve[i : i + group] for i in range(0, len(curve), group)]
    trained = tuple(plain(part[-1][0], fmean(loss for *_, loss in part)) for part in parts)
    held_out = tuple(plain(point["seconds"], point["loss"]) for point in judgements(result, "text"))
    axes = Axis("seconds of training", "number", log=False), Axis("bits per byte", "number", log=False)
    series = Series("training text", trained), Series("held-out text", held_out)
    yield Plot("Bits per byte in the course of training", "lines", series, axes)
    yield from (plot for view in PLOTS for plot in view.each(result))


def notes(result: RowsResult) -> list[str]:
    """Return what was not measured."""
    memory = [f"memory was not measured: {result.facts['memory_note']}"] if result.facts["memory_note"] else []
    return memory + ([] if result.cases("lengths") else ["attention alone was not measured"])


REPORT = RunReport(
    "dilkit demo", outcome, made_tables, made_plots,
    "Held-out bits per byte are the mean over {windows} windows of {context:,} bytes of files that were never trained on. "
    "Attention alone is measured forward and backward: 1 sequence, {heads} heads x {head_dim}, causal, {dtype}; dilated is the "
    "model's pattern, computed by {dilated}, dense is every earlier token, computed by {dense}. Time is the median of at most 5 "
    "calls taken in turns, memory the peak beyond what was held before the call. Neither kind holds a score matrix; the dilated "
    "one holds one branch's result and gradients beside the sum over the branches. Generation is the whole model's time for one "
    "byte more, after a text of about that length: with a cache in each layer, or by computing every row of the text again.",
    notes,
)  # fmt: skip
