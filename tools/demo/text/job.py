"""The demo's job: train, then measure, then report. Over ranks all train, and rank 0 prints and writes."""

from __future__ import annotations

import argparse
import shlex
import sys
import threading

import torch

from dilkit.comm import Comm
from dilkit.comm.agreement import agree_on
from dilkit.device import probe
from dilkit.tools.console import rank_arguments as over_ranks
from dilkit.tools.console.interrupt import stopping
from dilkit.tools.demo.block import model_facts
from dilkit.tools.demo.job import Job, backend_choice
from dilkit.tools.demo.text.corpus import Corpus, load_text
from dilkit.tools.demo.text.generation import GenerationSweep
from dilkit.tools.demo.text.model import ModelConfig, save_model
from dilkit.tools.demo.text.record import Budget, DemoResult, ModelFacts, TextTraining
from dilkit.tools.demo.text.scaling import LengthSweep
from dilkit.tools.demo.text.task import JUDGEMENTS, SHORT_SHARE, Alone, TextTask, held_out_windows
from dilkit.tools.demo.trainer import Trainer
from dilkit.tools.results.file import new_result
from dilkit.tools.results.record import Job as Ranks


def train_and_measure(args: argparse.Namespace) -> int:
    """Run the job that `args` describes; 0, or 130 when interrupted: then the report holds what there was."""
    corpus = load_text(args.text, args.context)
    if args.comm is None:
        return TextJob(args, corpus, Alone()).run()
    with stopping() as stop:
        return over_ranks.run(args, lambda comm: TextJob(args, corpus, comm, stop).run())


class TextJob(Job):
    """One run of the demo."""

    TITLE = "dilkit demo"

    def __init__(self, args: argparse.Namespace, corpus: Corpus, comm: Comm, stop: threading.Event | None = None) -> None:
        super().__init__(args, speaks=comm.rank == 0)
        self.corpus, self.comm = corpus, comm
        facts = dict(text=corpus.digest(), context=args.context, steps=args.steps, minutes=args.minutes, seed=args.seed)
        agree_on(comm, lambda: facts, step="what the ranks train on")
        self.config = ModelConfig(context=args.context)
        self.problem = self.config.problem()
        held_out = held_out_windows(corpus.held_out, args.context)
        self.task = TextTask(corpus.train, held_out, self.config, args.seed, comm, stop)
        self.trainer = Trainer(self.task, Budget(60 * (args.minutes or 2.0), args.steps))
        self.sweep = LengthSweep(self.problem, [args.context * 2**i // 4 for i in range(5)])
        self.generation = GenerationSweep(self.task.model, [args.context * 4**i // 16 for i in range(4)])

    def work(self) -> None:
        """Train; without ranks, measure dilated against dense attention, and the speed of generation."""
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
            self.sweep.run()
            self.generation.run()

    def result(self, interrupted: str | None) -> DemoResult:
        """All there is so far."""
        comm, threads = self.comm, torch.get_num_threads()
        ranks = Ranks(comm=self.args.comm, transport=type(comm).__name__, world_size=comm.size, threads=threads)
        return new_result(
            DemoResult,
            probe("cpu"),
            interrupted=interrupted,
            text=self.corpus.facts,
            model=model_facts(ModelFacts, self.task.model, self.config.layers, self.problem),
            backend=backend_choice(self.problem),
            training=self.trainer.record(
                TextTraining,
                seed=self.args.seed,
                held_out_windows=len(self.task.held_out),
                short_window_bytes=self.task.short_window,
                short_window_share=SHORT_SHARE,
            ),
            scaling=self.sweep.scaling(),
            generation=tuple(self.generation.rows),
            ranks=ranks if self.args.comm else None,
        )
