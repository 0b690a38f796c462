"""`dilkit demo --ranks 2x2`: one training, data x sequence parallel and in one process, compared step by step."""

from __future__ import annotations

import argparse
import gc
import os
import threading
from collections.abc import Iterable
from functools import partial
from multiprocessing import get_context
from unittest import mock

import torch
from torch import Tensor

from dilkit import environment
from dilkit.comm import Comm, Rows, TorchComm, exchange_plan, shard_cuts, sum_over_ranks
from dilkit.comm.agreement import agree_on
from dilkit.comm.collectives import gather_values
from dilkit.comm.launch.processes import torch_variables
from dilkit.comm.launch.ranks import run_ranks
from dilkit.comm.plan.exchange_plan import PHASES
from dilkit.comm.plan.forecast import baselines
from dilkit.threads import torch_threads, usable_cores
from dilkit.tools.console.interrupt import stopping
from dilkit.tools.console.text import in_bytes
from dilkit.tools.demo.corpus import Corpus, load_text
from dilkit.tools.demo.trainer import Run, Trainer, clock, judgements, rows_by_name, run_table, shared_clock, whole
from dilkit.tools.demo.transformer import ModelConfig, SharedTextTask, TextTask, seeded_model
from dilkit.tools.report.document import Axis, Plot, Series, Table
from dilkit.tools.report.points import plain
from dilkit.tools.report.views import NAMES, Column, PlotView, RunReport, TableView, fact, of, stored, value
from dilkit.tools.results.rows import Row, RowsResult, cases_of

TITLE = "dilkit demo --ranks"
LAYERS, TIMEOUT, LONGEST_END, MOST_STARTED, DIFFERS = 2, 300.0, 30.0, 64, 1
"""Seconds that a rank waits for another, and for their end; processes on this machine; an exit code."""
PROCESSES = get_context("spawn")
ALONE, RING = "one process", "comparison: full KV ring"
LOSS_OF_STEP, NORM, PARAMETERS = "loss of a step", "norm of the gradients of a step", "parameters at the end"
EPSILON, FEWEST = float(torch.finfo(torch.float32).eps), 20
GROWTH = {LOSS_OF_STEP: 2.0, NORM: 20.0, PARAMETERS: 100.0}
"""Relative errors in units of fp32's that a step may add, by adding up in another order; of at least `FEWEST` steps.

Most cancel in a loss, fewer in a norm, and Adam counts those of nearly zero gradients in full. A tenth was seen in 20 steps.
"""


class RanksTask(SharedTextTask):
    """This rank's rows of its replica's window; parameters sharded over the ranks of a sequence, and copied over replicas."""

    def __init__(self, corpus: Corpus, config: ModelConfig, seed: int, replicas: int, world: Comm) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.mesh = init_device_mesh("cpu", (replicas, world.size // replicas), mesh_dim_names=("dp", "cp"))
        comm = TorchComm(self.mesh["cp"], timeout=world.timeout)
        super().__init__(comm, seeded_model(config, seed, comm), corpus, config.context, seed, replicas)
        self.world, self.sent_bytes = world, 0  # by attention in the steps of training
        for block in self.model.blocks:
            fully_shard(block, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)

    def batch(self, spent: float) -> tuple[Tensor, int]:
        self.sent_bytes -= self.comm.sent_bytes
        window = self.windows(spent)[self.mesh["dp"].get_local_rank(), None]
        return self.loss(window) / self.count, self.context * self.count

    def backward(self, loss: Tensor) -> float:
        torch.autograd.backward(loss * self.world.size)  # FSDP2 averages over all ranks
        self.sent_bytes += self.comm.sent_bytes
        total = loss.detach().double()
        sum_over_ranks([total], self.world)
        return total.item()


def run(args: argparse.Namespace) -> int:
    """Run the demo on torchrun's ranks, or on ranks that it starts itself; 0, `DIFFERS`, or 130 when interrupted."""
    data, sequence = args.ranks
    size, started, name = data * sequence, environment.launch(), f"--ranks: {data}x{sequence}"
    launched = started is not None and started.launcher == "torchrun"
    if started is not None and started.size != (size if launched else 1):
        raise ValueError(
            f"{name} is {size} ranks, but {started.launcher} started {started.size}; run torchrun --nproc-per-node {size}, or "
            "start dilkit alone: it starts the ranks itself"
        )
    if size > MOST_STARTED and not launched:
        raise ValueError(f"{name} is {size} processes, and at most {MOST_STARTED} are started on one machine; use torchrun")
    corpus = load_text(args.text, args.context)
    first, *others = [{}] if launched else torch_variables(size)
    processes = [PROCESSES.Process(target=on_rank, args=(args, corpus, variables), daemon=True) for variables in others]
    for process in processes:
        process.start()
    code = on_rank(args, corpus, first)
    for process in processes:
        process.join(LONGEST_END)
    return code


def on_rank(args: argparse.Namespace, corpus: Corpus, variables: dict[str, str]) -> int:
    """Run the demo as rank 0 or another; return the exit code of all."""

    def work(world: Comm) -> int:
        code = compare_trainings(args, corpus, world, stop)
        gc.collect()  # modules of FSDP2 hold process groups, which are to go before the process does
        return code

    data, sequence = args.ranks
    threads = max(1, usable_cores() // (data * sequence)) if variables else torch.get_num_threads()
    with stopping() as stop, torch_threads(threads), mock.patch.dict(os.environ, variables):
        return run_ranks("torch", work, timeout=TIMEOUT)


def compare_trainings(args: argparse.Namespace, corpus: Corpus, world: Comm, stop: threading.Event) -> int:
    """Train on the ranks, train in one process, compare; return `DIFFERS` for differences beyond rounding."""
    data, sequence = args.ranks
    layout, config = f"{data}x{sequence}", ModelConfig(args.context, layers=LAYERS)
    trained_on = dict(context=args.context, steps=args.steps, seed=args.seed, layout=layout) | corpus.digests()
    agree_on(world, lambda: trained_on, step="what the ranks train on")
    sent, planned = planned_bytes(config, sequence)
    facts = corpus.facts | dict(layout=layout, data=data, world_size=world.size, steps=args.steps, layers=LAYERS)
    facts |= dict(planned=planned, counted=[], transport=type(world).__name__, ranks=f"{sequence} ranks")
    model, keep_time = seeded_model(config, args.seed), partial(shared_clock, world, stop)
    with Run(TITLE, args, model, config.problem(), facts, speaks=world.rank == 0) as demo:
        demo.rows += sent
        on_ranks = RanksTask(corpus, config, args.seed, data, world)
        demo.train(f"{layout} ranks", Trainer(on_ranks, args.steps, clock=keep_time), 1)
        demo.facts["counted"] = gather_values(world, on_ranks.sent_bytes)
        parameters = whole_parameters(on_ranks)
        if world.rank:
            for _ in range(args.steps):
                keep_time(0.0)
            return 0
        alone = TextTask(model, corpus, args.context, args.seed, data)
        with torch_threads(args.threads or usable_cores()):
            demo.train(ALONE, Trainer(alone, args.steps, clock=keep_time), 1)
        for who, trainer in demo.trainers.items():
            for step, ((*_, loss), norm) in enumerate(zip(trainer.curve, trainer.norms, strict=True), 1):
                demo.rows.append(Row(table="steps", case=dict(step=step), who=who, values={LOSS_OF_STEP: loss, NORM: norm}))
        demo.rows += compared(demo.rows, whole_parameters(alone), parameters)
    return demo.code or DIFFERS * any(row.verdict == "wrong" for row in demo.rows)


def whole_parameters(task: TextTask) -> dict[str, Tensor]:
    """Return the whole parameters by name; all ranks ask for them."""
    return {name: whole(p).double() for name, p in task.model.named_parameters()}


def planned_bytes(config: ModelConfig, sequence: int) -> tuple[list[Row], list[int]]:
    """Return the bytes of attention in a step by the exchange plan: by branch on the busiest rank, and in all by rank."""
    pattern, width = config.pattern, Rows(config.width // config.heads, "float32")
    plan = exchange_plan(pattern, shard_cuts(config.context, sequence, pattern), config.heads, is_causal=True)
    by_phase = {phase: plan.traffic(phase, width).sent.tolist() for phase in PHASES}
    planned = [config.layers * sum(sent) for sent in zip(*by_phase.values(), strict=True)]
    busiest, rows = planned.index(max(planned)), []
    for phase in PHASES:
        sent = dict[tuple[str, str], int]()
        for i, (length, rate) in enumerate(zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)):
            sent[f"{length:,} bytes, 1 in {rate}", plan.routes[i].kind] = int(plan.traffic(phase, width, i).sent[busiest])
        sent["all branches", ""] = by_phase[phase][busiest]
        # Keys and values there, their gradients back. A ring that passes rows round again in the backward pass sends more.
        sent[RING, "ring"] = baselines(plan, width)["full_ring"]
        for (branch, route), number in sent.items():
            case, values = dict(rank=busiest, branch=branch, route=route), dict(bytes=config.layers * number)
            rows.append(Row(table="sent", case=case, who=phase, values=values))
    return rows, planned


def compared(rows: Iterable[Row], exact: dict[str, Tensor], seen: dict[str, Tensor]) -> list[Row]:
    """Return the largest difference of each quantity; "wrong" where it is more than rounding."""
    apart = {name: {f"step {i}": x for i, (*_, x) in enumerate(by_step(rows, name), 1)} for name in (LOSS_OF_STEP, NORM)}
    steps, differences = len(apart[NORM]), []
    apart[PARAMETERS] = {name: float((seen[name] - x).norm() / x.norm().clamp(min=1e-30)) for name, x in exact.items()}
    for name, values in apart.items():
        where = [*values][torch.tensor([*values.values()]).argmax()]  # a NaN's place, if there is one
        facts = dict(largest=values[where], where=where, bound=bound(name, steps))
        verdict = "measured" if values[where] <= bound(name, steps) else "wrong"
        differences.append(Row(table="differences", case=dict(quantity=name), who=name, verdict=verdict, values=facts))
    return differences


def by_step(rows: Iterable[Row], name: str) -> list[tuple[float, float, float]]:
    """Return a quantity of each step on the ranks and in one process, and its relative difference."""
    pairs = [[row.values[name] for row in case.rows.values()] for case in cases_of(rows, "steps")]
    return [(seen, exact, abs(seen - exact) / exact) for seen, exact in pairs]


def bound(name: str, steps: int) -> float:
    """Return the largest relative difference of a quantity that is taken for rounding after so many steps."""
    return GROWTH[name] * max(steps, FEWEST) * EPSILON


def outcome(result: RowsResult) -> str:
    """Return how far the trainings are apart, and the bytes sent."""
    differences, facts = rows_by_name(result, "differences"), result.facts
    if not differences:
        return "not trained to their ends: nothing to compare"
    apart = ", ".join(f"{name} {row.values['largest']:.1e}" for name, row in differences.items())
    verdict = "MORE THAN ROUNDING" if any(row.verdict == "wrong" for row in differences.values()) else "rounding"
    ring = sum(row.values["bytes"] for row in result.rows if row.case.get("branch") == RING)
    return (
        f"{facts['steps']:,} steps on {facts['layout']} ranks and in one process differ by {verdict} (relative, at most: "
        f"{apart}); attention sends {in_bytes(max(facts['planned']))} a step from the busiest rank, a ring of all keys and "
        f"values {in_bytes(ring)}"
    )


VERDICT = Column("", lambda row, case: "MORE THAN ROUNDING" if row.verdict == "wrong" else "rounding")
SIZES = fact("largest", "largest relative difference", "{:.1e}"), fact("where"), fact("bound", template="{:.1e}")
COMPARED = TableView("One process and the ranks", "differences", (fact("quantity", "of"), *SIZES, VERDICT), timed=False)
BRANCHES = fact("branch"), fact("route"), *(of(phase, value("bytes", phase, "bytes")) for phase in PHASES)
SENT = TableView("Bytes of attention in a step: rank {rank} of a sequence", "sent", BRANCHES, timed=False, who=PHASES[:1])
STEP, LOSS_AXIS = Axis("step", "number", log=False), Axis("bits per byte", "number", log=False)
SENT_AXES = NAMES, Axis("bytes that the busiest rank sends", "bytes")
PLOTS = (
    PlotView("The same training in one process and on ranks", "steps", "step", stored(LOSS_OF_STEP), (STEP, LOSS_AXIS), "lines"),
    PlotView("Attention in a step, by branch of the pattern", "sent", "{branch}", stored("bytes"), SENT_AXES),
)


def made_tables(result: RowsResult) -> Iterable[Table]:
    """Yield differences, bytes, losses, and the facts of the run."""
    facts, losses = result.facts, enumerate(by_step(result.rows, LOSS_OF_STEP), 1)
    yield COMPARED.made(result)
    yield from SENT.each(result)
    rows = tuple((f"{step}", f"{exact:.5f}", f"{seen:.5f}", f"{apart:.1e}") for step, (seen, exact, apart) in losses)
    yield Table("Bits per byte", ("step", ALONE, f"{facts['layout']} ranks", "relative difference"), rows)
    planned, counted = facts["steps"] * facts["data"] * sum(facts["planned"]), sum(facts["counted"])
    after = [("bytes sent", f"{in_bytes(counted)} by all ranks in all steps, as counted; {in_bytes(planned)} as planned")]
    for who, row in rows_by_name(result, "training").items():
        held_out = " -> ".join(f"{point['loss']:.3f}" for point in judgements(result, who))
        where = "" if who == ALONE else f", {facts['world_size']} ranks ({facts['transport']})"
        spent = f"{row.values['steps']:,} steps in {clock(row.values['seconds'])}{where}, threads: {row.values['threads']}"
        after.append((who, f"{spent}; held out: {held_out} bits per byte"))
    yield run_table(result, after)


def made_plots(result: RowsResult) -> Iterable[Plot]:
    """Yield losses, bytes by branch, and relative differences with their bounds, by step."""
    yield from (plot for view in PLOTS for plot in view.each(result))
    series, bounds = [], []
    for name, shown in ((LOSS_OF_STEP, "loss"), (NORM, "norm of the gradients")):
        points = [plain(step, apart) for step, (*_, apart) in enumerate(by_step(result.rows, name), 1)]
        ends = tuple(plain(step, bound(name, len(points))) for step in (1, len(points)))
        series.append(Series(shown, tuple(points)))
        bounds.append(Series(f"bound: {shown}", ends, dashed=True))
    yield Plot("How far they are apart", "points", (*series, *bounds), (STEP, Axis("relative difference", "number")))


REPORT = RunReport(
    TITLE, outcome, made_tables, made_plots,
    "On {layout} ranks, each replica reads a window of {context:,} bytes in a step, whose rows are cut over {ranks}; "
    "`fully_shard` of torch.distributed.fsdp (FSDP2) shards the parameters over the ranks of a sequence and copies them over the "
    "replicas. One process computes the same windows whole, with the same weights at first. A loss is in bits per byte and "
    "before the step; tools/demo/ranks.py explains the bounds. Bytes sent are those of attention, without FSDP2's. A ring of all "
    "keys and values passes those of each rank to all others, causal or not, and returns as many gradients.",
)  # fmt: skip
