"""The demo's job: train, then measure, then report. Over ranks all train, and rank 0 prints and writes."""

from __future__ import annotations

import argparse
import shlex
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import fmean

from dilkit import explain
from dilkit.comm import Comm
from dilkit.comm.agreement import agree_on
from dilkit.device import probe
from dilkit.tools.console import ranks
from dilkit.tools.console.interrupt import stopping
from dilkit.tools.demo.job import Job, Picture, choice_of
from dilkit.tools.demo.text.corpus import Corpus, load_text
from dilkit.tools.demo.text.model import ModelConfig, save_model
from dilkit.tools.demo.text.ranks import Alone, Memory, gather_facts, world_of
from dilkit.tools.demo.text.scaling import LengthSweep
from dilkit.tools.demo.text.task import JUDGEMENTS, RECIPE, SHORT_SHARE, TextTask, held_out_windows
from dilkit.tools.demo.trainer import Trainer
from dilkit.tools.report.document import Document, Row, plots
from dilkit.tools.report.kinds import demo
from dilkit.tools.report.picture import write_png
from dilkit.tools.report.terminal import document_text
from dilkit.tools.results.file import new_result
from dilkit.tools.results.kinds.demo import Budget, DemoResult, Evaluation, Training


def train_and_measure(args: argparse.Namespace) -> int:
    """Run the job that `args` describes; 0, or 130 when interrupted: then the report holds what there was."""
    corpus = load_text(args.text, args.context)
    if args.comm is None:
        return TextJob(args, corpus, Alone()).run()
    memory = Memory()
    with stopping() as stop:
        return ranks.run(args, lambda comm: TextJob(args, corpus, comm, stop, memory).run())


class TextJob(Job[DemoResult]):
    """One run of the demo. With `memory`, ranks say what they send and hold."""

    TITLE, PICTURES = "dilkit demo", ("loss.png", "scaling.png")

    def __init__(
        self,
        args: argparse.Namespace,
        corpus: Corpus,
        comm: Comm,
        stop: threading.Event | None = None,
        memory: Memory | None = None,
    ) -> None:
        super().__init__(args)
        self.corpus, self.comm, self.memory, self.speaks = corpus, comm, memory, comm.rank == 0
        facts = dict(text=corpus.digest(), context=args.context, steps=args.steps, minutes=args.minutes, seed=args.seed)
        agree_on(comm, lambda: facts, step="what the ranks train on")
        config = ModelConfig(context=args.context)
        self.trace = explain(config.problem())
        held_out = held_out_windows(corpus.held_out, args.context)
        self.task = TextTask(corpus.train, held_out, config, args.seed, comm, stop)
        budget = Budget(steps=args.steps) if args.steps else Budget(seconds=60 * args.minutes)
        self.trainer = Trainer(self.task, budget, RECIPE)
        self.sweep = LengthSweep(config.problem(), [args.context * 2**i // 4 for i in range(5)])
        self.world = None if memory is None else world_of(comm, config, memory)

    def work(self) -> None:
        """Train; without ranks, measure dilated against dense attention."""
        if self.speaks:
            self.say_facts(demo.facts(self.result()))
        self.stage = "training"
        say_row = self.say_table(demo.TRAINING)
        try:
            self.train(self.trainer, JUDGEMENTS, self._speed, lambda: self._judged(say_row))
        finally:
            self._save()
            self.say(f"\n{demo.outcome(self.result())}")
        if self.args.comm is None:
            self.stage = "measuring"
            say_row = self.say_table(demo.SCALING)
            self.sweep.run(lambda row: say_row(demo.scaling_row(row)))

    def finish(self) -> None:
        """All ranks say what they send and hold; rank 0 reports."""
        self._gather()
        super().finish()

    def _gather(self) -> None:
        if self.world and self.memory:
            self.world = replace(self.world, by_rank=gather_facts(self.comm, self.task.sent, self.memory))

    def _speed(self) -> str:
        trainer, loss = self.trainer, fmean(point.loss for point in self.trainer.train[-20:])
        return f"{demo.clock(trainer.seconds)}  {loss:.2f} bits/byte  {trainer.tokens / trainer.seconds:,.0f} tokens/s"

    def _judged(self, say_row: Callable[[Row], None]) -> None:
        """Print the judgement. Over ranks, write what there is: launchers may end ranks before they can."""
        say_row(demo.training_row(self.evaluations()[-1]))
        if self.args.comm is None:
            return
        self._gather()
        self._save()
        if self.speaks:
            self.write(replace(self.result(), interrupted=self.stage), draw=False)

    def _save(self) -> None:
        if self.speaks and self.trainer.steps:  # an untrained model is not worth an earlier one
            save_model(self.task.model, self.args.save)

    def evaluations(self) -> tuple[Evaluation, ...]:
        """The judgements so far, each with the mean training loss since the one before (None where there was no step)."""
        found, done = [], 0
        for point in self.trainer.held_out:
            losses = [one.loss for one in self.trainer.train[done : point.steps]]
            found.append(Evaluation(point.seconds, point.tokens, fmean(losses) if losses else None, point.loss))
            done = point.steps
        return tuple(found)

    def result(self) -> DemoResult:
        """All there is so far."""
        return new_result(
            DemoResult,
            probe("cpu"),
            interrupted=self.interrupted,
            text=self.corpus.facts(),
            model=self.task.model.facts(self.args.save if self.trainer.steps else None),
            backend=choice_of(self.trace),
            training=self._training(),
            scaling=self.sweep.scaling(),
            ranks=self.world,
        )

    def _training(self) -> Training:
        trainer, judged = self.trainer, [point.loss for point in self.trainer.held_out]
        return Training(
            before=judged[0] if judged else None,
            after=judged[-1] if len(judged) > 1 else None,
            steps=trainer.steps,
            tokens=trainer.tokens,
            seconds=trainer.seconds,
            tokens_per_second=trainer.tokens / trainer.seconds if trainer.steps else 0.0,
            held_out_windows=len(self.task.held_out),
            window_bytes=self.args.context,
            short_window_bytes=self.task.short_window,
            short_window_share=SHORT_SHARE,
            budget=trainer.budget,
            points=self.evaluations(),
            train_curve=tuple((point.seconds, point.tokens, point.loss) for point in trainer.train),
            seed=self.args.seed,
        )

    def pictures(self, result: DemoResult) -> dict[str, Picture]:
        """The loss curve, and time and memory against length."""
        found = {"loss.png": plots(demo.loss_plot(result)), "scaling.png": plots(*demo.scaling_plots(result)[:2])}
        return {name: partial(write_png, shown) for name, shown in found.items() if shown}

    def closing(self, result: DemoResult) -> list[str]:
        """What ranks hold, where the model is, and what to try next; no model where no step was made."""
        tables, model, out = demo.rank_tables(result), result.model.file, self.args.out
        lines = [document_text(Document((), tuple(tables)))] if tables else []
        if model is None:
            return lines
        place = f"--out {shlex.quote(str(out))} " if model == str(out / "model.pt") else f"--checkpoint {shlex.quote(model)} "
        command = f'dilkit demo {"" if place == "--out dilkit-demo " else place}--sample "def "'
        return [*lines, f"model      {model}", f"try        {command}"]
