"""The job of `dilkit demo --ranks`: train on the ranks, train in one process, compare."""

from __future__ import annotations

import argparse
import gc
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import torch

from dilkit.comm import Comm
from dilkit.comm.agreement import agree_on
from dilkit.comm.launch.processes import JobError
from dilkit.comm.launch.ranks import run_ranks
from dilkit.device import probe
from dilkit.threads import usable_cores
from dilkit.tools.console.interrupt import stopping
from dilkit.tools.demo.block import model_facts
from dilkit.tools.demo.job import Job, backend_choice, show_progress
from dilkit.tools.demo.ranks.comparison import differences
from dilkit.tools.demo.ranks.layout import are_launched
from dilkit.tools.demo.ranks.processes import train_in_processes
from dilkit.tools.demo.ranks.rank import TIMEOUT
from dilkit.tools.demo.ranks.record import LargestDifference, RanksDemoResult, RanksTraining
from dilkit.tools.demo.ranks.task import AloneTask, RanksTask, Setup, Trained, parameters, record, trained
from dilkit.tools.demo.ranks.traffic import planned
from dilkit.tools.demo.text.corpus import Corpus, load_text
from dilkit.tools.demo.text.model import ByteTransformer, ModelConfig
from dilkit.tools.demo.text.record import Budget, ModelFacts
from dilkit.tools.demo.text.task import Alone, step_end
from dilkit.tools.demo.trainer import Trainer
from dilkit.tools.results.file import new_result
from dilkit.tools.results.record import Job as Ranks

LAYERS = 2
DIFFERS = 1
"""The exit code where the trainings are farther apart than rounding brings them."""


def train_and_compare(args: argparse.Namespace) -> int:
    """Run the job that `args` describes, on torchrun's ranks or on ranks of its own: 0, `DIFFERS`, or 130 when interrupted."""
    launched = are_launched(args.ranks)
    check_torch()
    corpus = load_text(args.text, args.context)
    if not launched:
        return RanksJob(args, corpus).run()
    with stopping() as stop:

        def work(world: Comm) -> int:
            code = RanksJob(args, corpus, world, stop).run()
            gc.collect()  # modules of FSDP2 hold process groups, which are to go before the process does
            return code

        return run_ranks("torch", work, timeout=TIMEOUT)


def check_torch() -> None:
    """Raise ValueError for a torch without FSDP2."""
    try:
        from torch.distributed.fsdp import fully_shard  # noqa: F401
    except ImportError:
        raise ValueError(
            f"--ranks: torch {torch.__version__} has no torch.distributed.fsdp.fully_shard, which shards the parameters; use "
            "torch 2.6 or newer, built with torch.distributed, or `dilkit demo --comm`, which shards none"
        ) from None


class RanksJob(Job):
    """One run of the demo. `world`: torchrun's ranks, of which this process is one; None: they are started."""

    TITLE = "dilkit demo --ranks"

    def __init__(
        self, args: argparse.Namespace, corpus: Corpus, world: Comm | None = None, stop: threading.Event | None = None
    ) -> None:
        super().__init__(args, speaks=world is None or world.rank == 0)
        config = ModelConfig(context=args.context, layers=LAYERS)
        self.corpus, self.world, self.stop, self.problem = corpus, world, stop or threading.Event(), config.problem()
        self.setup = Setup(corpus.train, corpus.held_out, config, args.ranks, args.seed, args.steps)
        if world is not None:
            facts = dict(text=corpus.digest(), context=args.context, steps=args.steps, seed=args.seed, layout=str(args.ranks))
            agree_on(world, lambda: facts, step="what the ranks train on")
        self.model = model_facts(ModelFacts, ByteTransformer(config), LAYERS, self.problem)
        self.sent = planned(config, args.ranks)
        self.threads = torch.get_num_threads() if world else args.threads or max(1, usable_cores() // args.ranks.size)
        self.on_ranks: Callable[[], RanksTraining | None] = lambda: None
        self.alone: Callable[[], RanksTraining | None] = lambda: None
        self.differences: tuple[LargestDifference, ...] = ()

    def run(self) -> int:
        """Work, report, and say by the exit code whether the trainings agree, or ranks have failed."""
        try:
            code = super().run()
        except JobError as error:
            print(f"dilkit demo: {error}", file=sys.stderr)
            return DIFFERS
        return code or DIFFERS * any(not one.is_rounding for one in self.differences)

    def work(self) -> None:
        """Both trainings, one after the other."""
        self.stage = "training on ranks"
        found = self._train_here(self.world) if self.world else self._train_in_processes()
        self.sent = replace(self.sent, counted=found.sent_bytes)
        self.stage = "training in one process"
        if not self.speaks:
            self._wait()
            return
        task = AloneTask(self.setup, self.world or Alone(), self.stop)
        trainer = Trainer(task, Budget(steps=self.setup.steps))
        self.alone = lambda: record(trainer, task)
        self.train(trainer, 1, "one process: ")
        self.differences = differences(record(trainer, task), found.training, parameters(task.model), found.parameters)

    def _train_here(self, world: Comm) -> Trained:
        """As one of torchrun's ranks."""
        task = RanksTask(self.setup, world, self.stop)
        trainer = Trainer(task, Budget(steps=self.setup.steps))
        self.on_ranks = lambda: record(trainer, task)
        self.train(trainer, 1, f"{self.setup.layout} ranks: ")
        return trained(trainer, task, world)

    def _train_in_processes(self) -> Trained:
        """On ranks that are started and followed."""
        with self.bar() as bar:

            def follow(training: RanksTraining) -> None:
                self.on_ranks = lambda: training
                show_progress(bar, f"{self.setup.layout} ranks: ", training)

            found = train_in_processes(self.setup, self.threads, follow)
        self.on_ranks = lambda: found.training
        return found

    def _wait(self) -> None:
        """While rank 0 trains alone, take part in the end of each of its steps. Raises KeyboardInterrupt where it is told to."""
        for _ in range(self.setup.steps):
            if self.world and step_end(self.world, 0.0, self.stop)[1]:
                raise KeyboardInterrupt

    def result(self, interrupted: str | None) -> RanksDemoResult:
        """All there is so far."""
        started = dict(comm="torchrun" if self.world else "processes", transport="TorchComm")
        return new_result(
            RanksDemoResult,
            probe("cpu"),
            interrupted=interrupted,
            text=self.corpus.facts,
            model=self.model,
            backend=backend_choice(self.problem),
            layout=self.setup.layout,
            ranks=Ranks(**started, world_size=self.setup.layout.size, threads=self.threads),
            on_ranks=self.on_ranks(),
            alone=self.alone(),
            differences=self.differences,
            sent=self.sent,
        )
