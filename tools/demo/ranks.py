"""`dilkit demo --ranks 2x2`: one training, data x sequence parallel and in one process, compared step by step."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import inf, isfinite, isnan
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dilkit import environment
from dilkit.comm import Comm, Rows, TorchComm, exchange_plan, shard_cuts, sum_over_ranks
from dilkit.comm.agreement import agree_on
from dilkit.comm.collectives import gather_values
from dilkit.comm.launch.processes import start_processes, torch_variables
from dilkit.comm.launch.ranks import run_ranks
from dilkit.comm.plan.exchange_plan import PHASES
from dilkit.comm.plan.forecast import baselines
from dilkit.threads import torch_threads, usable_cores
from dilkit.tools.console.interrupt import stopping
from dilkit.tools.console.text import in_bytes
from dilkit.tools.demo.corpus import Corpus, load_text
from dilkit.tools.demo.text import Alone, TextTask
from dilkit.tools.demo.trainer import TEXT, Demo, Trainer, clock, counted, judgements, rows_by_name, run_table, whole
from dilkit.tools.demo.transformer import ByteTransformer, ModelConfig
from dilkit.tools.report.document import Axis, Plot, Series, Table
from dilkit.tools.report.points import plain
from dilkit.tools.report.views import NAMES, Column, PlotView, RunReport, TableView, fact, of, stored, thinned, value
from dilkit.tools.results.rows import Row, RowsResult, cases_of

LAYERS, TIMEOUT, LONGEST_END, MOST_STARTED, DIFFERS = 2, 300.0, 30.0, 64, 1
"""Seconds that a rank waits for another, and for their end after a failure; processes on this machine; an exit code."""
ALONE, RING = "one process", "comparison: full KV ring"
LOSS_OF_STEP, NORM, PARAMETERS = "loss of a step", "norm of the gradients of a step", "parameters at the end"
EPSILON, FEWEST = float(torch.finfo(torch.float32).eps), 20
GROWTH = {LOSS_OF_STEP: 2.0, NORM: 20.0, PARAMETERS: 100.0}
"""Rounding errors, relative and in units of fp32's, that a step may add to each quantity; of at least `FEWEST` steps.

Ranks add up in another order, so that each number of a step is rounded elsewhere, and steps hand that on to each other. A loss is
a mean over thousands of rows, in which errors cancel; a norm, taken before gradients are clipped, which makes up for a factor
that all have in common, has fewer large terms. A parameter is compared as a tensor, norm of
the difference over norm: Adam divides a gradient by its size, so that of one that is nearly zero, as of biases of attention,
what rounding left of it counts in full, from the first step on. Two trainings without ranks, in fp32 and in fp64, are as far
apart. What was seen in 20 steps lies a factor of ten and more below these bounds. Faults lie far above: gradients summed in
place of averaged show in their norms, a row too many or too few in everything.
"""
STEP_NAME = "step {step}"
MOST_LOSSES = 20
"""Rows of the table of losses: of more steps every second, third, ... one is shown, and the last."""


class RanksTask(TextTask):
    """This rank's rows of its replica's window; parameters sharded over the ranks of a sequence, and copied over replicas.

    `sent_bytes`: those that attention sent in the steps of training.
    """

    sent_bytes = 0

    def __init__(self, corpus: Corpus, config: ModelConfig, seed: int, replicas: int, stop: threading.Event, world: Comm) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        sizes = replicas, world.size // replicas
        self.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp"))
        super().__init__(corpus, config, seed, TorchComm(self.mesh["cp"], timeout=world.timeout), stop, world, replicas)
        for block in self.model.blocks:
            fully_shard(block, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)

    def share(self, windows: Tensor) -> Tensor:
        return super().share(windows[self.mesh["dp"].get_local_rank(), None]) / self.replicas

    def differentiate(self, share: Tensor) -> float:
        torch.autograd.backward(share * self.world.size)  # FSDP2 averages over all ranks
        total = share.detach().double()
        self.add_up(total)
        return total.item()

    def backward(self, spent: float) -> tuple[float, int]:
        before = self.comm.sent_bytes
        loss_and_tokens = super().backward(spent)
        self.sent_bytes += self.comm.sent_bytes - before
        return loss_and_tokens

    def add_up(self, value: Tensor) -> None:
        sum_over_ranks([value], self.world)


def run(args: argparse.Namespace) -> int:
    """Run the demo on torchrun's ranks, or on ranks that it starts itself; 0, `DIFFERS`, or 130 when interrupted."""
    launched = is_launched(args.ranks, args.context)
    try:
        from torch.distributed.fsdp import fully_shard  # noqa: F401
    except ImportError:
        raise ValueError(
            f"--ranks: torch {torch.__version__} has no torch.distributed.fsdp.fully_shard, which shards the parameters; use "
            "torch 2.6 or newer, built with torch.distributed, or `dilkit demo --comm`, which shards none"
        ) from None
    corpus = load_text(args.text, args.context)
    if launched:
        return _on_rank(args, corpus)
    data, sequence = args.ranks
    first, *others = torch_variables(data * sequence)
    options = [word for name in ("context", "steps", "seed") for word in (f"--{name}", str(getattr(args, name)))]
    text = ["--text", *args.text] if args.text else []
    command = [sys.executable, "-m", "dilkit", "demo", "--ranks", f"{data}x{sequence}", "--out", str(args.out), *options, *text]
    threads = args.threads or max(1, usable_cores() // (data * sequence))
    job, code = start_processes([command] * len(others), others, threads), DIFFERS
    try:
        with mock.patch.dict(os.environ, first):
            code = _on_rank(args, corpus)
    finally:
        ended = job.finish(time.monotonic() - job.began + LONGEST_END if code else inf)
        if ended.code not in (0, code) or (ended.code and ended.text.strip()):
            print(f"dilkit demo: another rank ended with {ended.code}\n{ended.text.strip()}".rstrip(), file=sys.stderr)
    return code


def is_launched(ranks: tuple[int, int], context: int) -> bool:
    """Return True if torchrun started this process as one of the ranks.

    Raises ValueError where a launcher started others, where they are too many to be started here, or have no bytes each.
    """
    data, sequence = ranks
    started, size, name = environment.launch(), data * sequence, f"--ranks: {data}x{sequence}"
    if sequence > context:
        raise ValueError(
            f"{name} cuts a context of {context:,} bytes over {sequence:,} ranks, and each needs one at least; use fewer ranks, "
            "or a larger --context"
        )
    if started is not None and started.launcher == "torchrun":
        if started.size != size:
            raise ValueError(
                f"{name} is {size:,} ranks, but torchrun started {started.size:,}; run torchrun --nproc-per-node {size}, or "
                "start dilkit alone: it starts the ranks itself"
            )
        return True
    if started is not None and started.size > 1:
        raise ValueError(f"--ranks: FSDP2 needs torch.distributed, but {started.launcher} started this; use torchrun, or neither")
    if size > MOST_STARTED:
        raise ValueError(
            f"{name} is {size:,} processes, and at most {MOST_STARTED} are started on one machine; use fewer, or torchrun on "
            "several machines"
        )
    return False


def _on_rank(args: argparse.Namespace, corpus: Corpus) -> int:
    """Run the demo as rank 0 or another; return the exit code of all."""
    threads = args.threads or torch.get_num_threads()
    with stopping() as stop:

        def work(world: Comm) -> int:
            code = RanksDemo(args, corpus, world, stop, threads).run()
            gc.collect()  # modules of FSDP2 hold process groups, which are to go before the process does
            return code

        return run_ranks("torch", work, timeout=TIMEOUT)


class RanksDemo(Demo):
    """Train on the ranks, train in one process, compare."""

    KIND, TITLE = "demo-ranks", "dilkit demo --ranks"

    def __init__(self, args: argparse.Namespace, corpus: Corpus, world: Comm, stop: threading.Event, threads: int) -> None:
        data, sequence = args.ranks
        self.name, self.corpus, self.world, self.threads = f"{data}x{sequence} ranks", corpus, world, threads
        trained_on = dict(text=corpus.digest(), context=args.context, steps=args.steps, seed=args.seed, layout=self.name)
        agree_on(world, lambda: trained_on, step="what the ranks train on")
        self.config = ModelConfig(context=args.context, layers=LAYERS)
        super().__init__(args, ByteTransformer(self.config), LAYERS, self.config.problem(), speaks=world.rank == 0)
        self.stop, self.replicas = stop, data
        self.compared: list[Row] = []
        self.trained: dict[str, tuple[Trainer, int]] = {}
        self.sent, planned = planned_bytes(self.config, sequence)
        self.facts |= corpus.facts | dict(layout=f"{data}x{sequence}", data=data, world_size=world.size, steps=args.steps)
        self.facts |= dict(planned=planned, counted=[], transport=type(world).__name__, ranks=counted(sequence, "rank"))

    def run(self) -> int:
        """Work and report; return `DIFFERS` where the trainings are farther apart than rounding brings them."""
        code = super().run()
        return code or DIFFERS * any(row.verdict == "wrong" for row in self.compared)

    def work(self) -> None:
        self.stage = "training on ranks"
        on_ranks = RanksTask(self.corpus, self.config, self.args.seed, self.replicas, self.stop, self.world)
        self._train(self.name, on_ranks)
        self.facts["counted"] = [*gather_values(self.world, on_ranks.sent_bytes)]
        parameters = whole_parameters(on_ranks)
        self.stage = "training in one process"
        if not self.speaks:  # take part in the end of each step of rank 0, and of both judgements
            for _ in range(self.args.steps + 2):
                if on_ranks.clock(0.0)[1]:
                    raise KeyboardInterrupt
            return
        alone = TextTask(self.corpus, self.config, self.args.seed, Alone(), self.stop, self.world, self.replicas)
        with torch_threads(self.threads):
            self._train(ALONE, alone)
        apart = differences([*self._steps()])
        apart[PARAMETERS] = {name: relative(exact, parameters[name]) for name, exact in whole_parameters(alone).items()}
        self.compared = largest(apart, self.args.steps)

    def _train(self, who: str, task: TextTask) -> None:
        trainer = Trainer(task, self.args.steps)
        self.trained[who] = trainer, torch.get_num_threads()
        self.train(trainer, 1, f"{who}: ")

    def _steps(self) -> Iterator[Row]:
        """Yield the loss and the norm of the gradients of each step."""
        for who, (trainer, _) in self.trained.items():
            for step, ((*_, loss), norm) in enumerate(zip(trainer.curve, trainer.norms, strict=False), 1):
                yield Row(table="steps", case=dict(step=step), who=who, values={LOSS_OF_STEP: loss, NORM: norm})

    def rows(self) -> list[Row]:
        trained = self.trained.items()
        courses = [row for who, (trainer, threads) in trained for row in trainer.rows(who, threads=threads)]
        return [*courses, *self._steps(), *self.compared, *self.sent]


def whole_parameters(task: TextTask) -> dict[str, Tensor]:
    """Return the whole parameters by name; all ranks ask for them."""
    return {name: whole(p).clone() for name, p in task.model.named_parameters()}


def planned_bytes(config: ModelConfig, sequence: int) -> tuple[list[Row], list[int]]:
    """Return the bytes of attention in a step by the exchange plan: by branch on the busiest rank, and in all by rank."""
    cuts = shard_cuts(config.context, sequence, config.pattern)
    plan = exchange_plan(config.pattern, cuts, config.heads, is_causal=True)
    widths = Rows(config.width // config.heads, "float32")
    planned = [sum(config.layers * int(plan.traffic(phase, widths).sent[rank]) for phase in PHASES) for rank in range(sequence)]
    busiest = max(range(sequence), key=planned.__getitem__)
    sent: dict[str, dict[str, Any]] = {}
    for i, (length, rate) in enumerate(zip(config.pattern.segment_lengths, config.pattern.dilation_rates, strict=True)):
        by_phase = {phase: config.layers * int(plan.traffic(phase, widths, i).sent[busiest]) for phase in PHASES}
        sent[f"{length:,} bytes" + f", 1 in {rate}" * (rate > 1)] = dict(route=plan.routes[i].kind) | by_phase
    sent["all branches"] = dict(route="") | {phase: sum(values[phase] for values in sent.values()) for phase in PHASES}
    # Keys and values there, their gradients back: the least. A ring that passes rows round again in the backward pass sends more.
    sent[RING] = dict(route="ring") | dict.fromkeys(PHASES, config.layers * baselines(plan, widths)["full_ring"])
    cases = [(dict(rank=busiest, branch=branch, route=values["route"]), values) for branch, values in sent.items()]
    rows = [
        Row(table="sent", case=case, who=phase, values=dict(bytes=values[phase])) for case, values in cases for phase in PHASES
    ]
    return rows, planned


def differences(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Return the relative differences of losses and norms by step, as far as both trainings have come."""
    apart: dict[str, dict[str, float]] = {LOSS_OF_STEP: {}, NORM: {}}
    for case in cases_of(rows, "steps"):
        if ALONE in case.rows and len(case.rows) == 2:
            (ranks,) = (row for who, row in case.rows.items() if who != ALONE)
            for name, values in apart.items():
                exact, seen = (torch.tensor(row.values[name], dtype=torch.float64) for row in (case.rows[ALONE], ranks))
                values[case.label(STEP_NAME)] = relative(exact, seen)
    return apart


def relative(exact: Tensor, seen: Tensor) -> float:
    """Return the norm of the difference over that of `exact`; inf for NaN, which `max` would pass over."""
    exact, seen = exact.double(), seen.double()
    difference = float((seen - exact).norm() / exact.norm()) if seen.ne(exact).any() else 0.0
    return inf if isnan(difference) else difference


def largest(apart: Mapping[str, Mapping[str, float]], steps: int) -> list[Row]:
    """Return the largest difference of each quantity; "wrong" where it is more than rounding."""
    rows = []
    for name, values in apart.items():
        where = max(values, key=values.__getitem__)
        facts: dict[str, Any] = dict(largest=values[where], where=where, bound=bound(name, steps))
        verdict = "measured" if facts["largest"] <= facts["bound"] else "wrong"
        rows.append(Row(table="differences", case=dict(quantity=name), who=name, verdict=verdict, values=facts))
    return rows


def bound(name: str, steps: int) -> float:
    """Return the largest relative difference of a quantity that is taken for rounding after so many steps."""
    return GROWTH[name] * max(steps, FEWEST) * EPSILON


def outcome(result: RowsResult) -> str:
    """Return how far the trainings are apart, and the bytes sent."""
    compared, facts = rows_by_name(result, "differences"), result.facts
    if not compared:
        return "not trained to their ends: nothing to compare"
    apart = ", ".join(f"{name} {row.values['largest']:.1e}" for name, row in compared.items())
    verdict = "MORE THAN ROUNDING" if any(row.verdict == "wrong" for row in compared.values()) else "rounding"
    (ring,) = result.cases("sent", branch=RING)
    busiest, all_keys = max(facts["planned"]), sum(row.values["bytes"] for row in ring.rows.values())
    return (
        f"{counted(facts['steps'], 'step')} on {facts['layout']} ranks and in one process differ by {verdict} (relative, at "
        f"most: {apart}); attention sends {in_bytes(busiest)} a step from the busiest rank, a ring of all keys and values "
        f"{in_bytes(all_keys)}"
    )


VERDICT = Column("", lambda row, case: "MORE THAN ROUNDING" if row.verdict == "wrong" else "rounding")
SIZES = fact("largest", "largest relative difference", "{:.1e}"), fact("where"), fact("bound", template="{:.1e}")
COMPARED = TableView("One process and the ranks", "differences", (fact("quantity", "of"), *SIZES, VERDICT), timed=False)
BRANCHES = fact("branch"), fact("route"), *(of(phase, value("bytes", phase, "bytes")) for phase in PHASES)
STEP, LOSS_AXIS = Axis("step", "number", log=False), Axis("bits per byte", "number", log=False)
SENT = NAMES, Axis("bytes that the busiest rank sends", "bytes")
PLOTS = (
    PlotView("The same training in one process and on ranks", "steps", "step", stored(LOSS_OF_STEP), (STEP, LOSS_AXIS), "lines"),
    PlotView("Attention in a step, by branch of the pattern", "sent", "{branch}", stored("bytes"), SENT),
)


def made_tables(result: RowsResult) -> Iterable[Table]:
    """Yield differences, bytes, losses, and the facts of the run."""
    facts, on_ranks = result.facts, f"{result.facts['layout']} ranks"
    yield COMPARED.made(result)
    title = f"Bytes of attention in a step: rank {result.cases('sent')[0].case['rank']} of a sequence"
    sent = TableView(title, "sent", BRANCHES, timed=False, who=(PHASES[0],)).made(result)
    if facts["counted"]:
        planned, total = facts["steps"] * facts["data"] * sum(facts["planned"]), sum(facts["counted"])
        agreed = "as planned" if total == planned else f"planned: {in_bytes(planned)}"
        sent = replace(sent, rows=(*sent.rows, ("counted: all ranks, all steps", agreed, in_bytes(total), "both phases")))
    yield sent
    loss, apart = fact(LOSS_OF_STEP, template="{:.5f}"), differences(result.rows)[LOSS_OF_STEP]
    difference = Column(
        "relative difference", lambda row, case: f"{apart[step]:.1e}" if (step := case.label(STEP_NAME)) in apart else "-"
    )
    columns = fact("step"), of(ALONE, loss), of(on_ranks, loss), difference
    losses = TableView("Bits per byte", "steps", columns, timed=False, who=(on_ranks,)).made(result)
    yield replace(losses, rows=thinned(losses.rows, MOST_LOSSES))
    where, after = f"{counted(facts['world_size'], 'rank')} ({facts['transport']}) of ", []
    for who, row in rows_by_name(result, "training").items():
        held_out = " -> ".join(f"{point['loss']:.3f}" for point in judgements(result, who))
        spent = f"{counted(row.values['steps'], 'step')} in {clock(row.values['seconds'])}, {where * (who != ALONE)}"
        after.append((who, f"{spent}{counted(row.values['threads'], 'thread')}; held out: {held_out} bits per byte"))
    yield run_table(result, f"{facts['context']:,} bytes of context", before=[("text", TEXT.format(**facts))], after=after)


def made_plots(result: RowsResult) -> Iterable[Plot]:
    """Yield losses, bytes by branch, and relative differences with their bounds, by step."""
    yield from (plot for view in PLOTS for plot in view.each(result))
    shown, series, bounds = {LOSS_OF_STEP: "loss", NORM: "norm of the gradients"}, [], []
    for name, values in differences(result.rows).items():
        points = [plain(step, value) for step, value in enumerate(values.values(), 1) if isfinite(value)]
        series.append(Series(shown[name], tuple(points)))
        ends = (plain(step, bound(name, len(values))) for step in (1, max(len(values), 1)))
        bounds.append(Series(f"bound: {shown[name]}", tuple(ends), dashed=True))
    axes = STEP, Axis("relative difference", "number")
    yield Plot("How far they are apart", "points", (*series, *bounds), axes)


REPORT = RunReport(
    "dilkit demo --ranks", outcome, made_tables, made_plots,
    "On {layout} ranks, each replica reads a window of {context:,} bytes in a step, whose rows are cut over {ranks}; "
    "attention is `RingDilatedAttention`. `fully_shard` of torch.distributed.fsdp (FSDP2) shards the parameters over the "
    "ranks of a sequence, copies them over the replicas, and averages gradients over all ranks: a rank's loss is the number "
    "of ranks over the rows of the step, times the sum over its rows. One process computes the same windows whole, with the "
    "same weights at first and the same optimizer (AdamW, gradients clipped to a norm of 1). A loss is in bits per byte and "
    "before the step; relative differences are those from one process, of a parameter by the norms of the tensors; bounds are"
    " units of rounding in fp32 by step, which tools/demo/ranks.py explains. Bytes sent are those of attention: planned by "
    "the exchange plan, counted by the transport (`comm.sent_bytes`); what FSDP2 sends is not among them. A ring of all keys "
    "and values passes those of each rank to all others, causal or not, and returns as many gradients.",
)  # fmt: skip
