"""`dilkit demo --ranks 2x2`: one training, data x sequence parallel and in one process, compared step by step."""

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
from dilkit.comm import Comm, TorchComm, copy_from_rank, shard_cuts, sum_over_ranks
from dilkit.comm.agreement import agree_on
from dilkit.comm.launch.processes import torch_variables
from dilkit.comm.launch.ranks import run_ranks
from dilkit.threads import torch_threads, usable_cores
from dilkit.tools.console.interrupt import stopping
from dilkit.tools.demo.corpus import Corpus, load_text
from dilkit.tools.demo.trainer import Run, Trainer, clock, judgements, rows_by_name, run_table, shared_clock, whole
from dilkit.tools.demo.transformer import ModelConfig, TextTask, seeded_model
from dilkit.tools.report.document import Axis, Table
from dilkit.tools.report.views import PlotView, Report, stored
from dilkit.tools.results.rows import CaseRows, ResultRow, RowsResult, cases_of

TITLE = "dilkit demo --ranks"
LAYERS, TIMEOUT, LONGEST_END, MOST_STARTED, DIFFERS = 2, 300.0, 30.0, 64, 1
"""Seconds that a rank waits for another, and for their end; processes on this machine; an exit code."""
PROCESSES, ALONE = get_context("spawn"), "one process"
LOSS_OF_STEP, NORM, PARAMETERS = "loss of a step", "norm of the gradients of a step", "parameters at the end"
EPSILON, FEWEST = float(torch.finfo(torch.float32).eps), 20
GROWTH = {LOSS_OF_STEP: 2.0, NORM: 20.0, PARAMETERS: 100.0}
"""Relative errors in units of fp32's that a step may add, by adding up in another order; of at least `FEWEST` steps.

Most cancel in a loss, fewer in a norm, and Adam counts those of nearly zero gradients in full. A tenth was seen in 20 steps.
"""


class RanksTask(TextTask):
    """This rank's rows of its replica's window; parameters sharded over the ranks of a sequence, and copied over replicas."""

    def __init__(self, corpus: Corpus, config: ModelConfig, seed: int, replicas: int, world: Comm) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.mesh = init_device_mesh("cpu", (replicas, world.size // replicas), mesh_dim_names=("dp", "cp"))
        self.comm = TorchComm(self.mesh["cp"], timeout=world.timeout)
        super().__init__(seeded_model(config, seed, self.comm), corpus, config.context, seed, replicas)
        self.world = world
        copy_from_rank([*self.model.parameters()], self.comm)
        for block in self.model.blocks:
            fully_shard(block, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)

    def loss(self, windows: Tensor) -> Tensor:
        """Return this rank's share of the bits per byte."""
        seq = windows.shape[1] - 1
        start, end = shard_cuts(seq, self.comm.size, self.model.config.pattern)[self.comm.rank :][:2]
        return super().loss(windows[:, start : end + 1]) * ((end - start) / seq)  # the byte after its rows is the last target

    def judge(self) -> float:
        bits = torch.tensor(super().judge(), dtype=torch.float64)
        sum_over_ranks([bits], self.comm)
        return bits.item()

    def batch(self, spent: float) -> tuple[Tensor, int]:
        window = self.windows(spent)[self.mesh["dp"].get_local_rank(), None]
        return self.loss(window) / self.count, self.context * self.count

    def backward(self, loss: Tensor) -> float:
        torch.autograd.backward(loss * self.world.size)  # FSDP2 averages over all ranks
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
    facts = corpus.facts | dict(layout=layout, data=data, world_size=world.size, steps=args.steps, layers=LAYERS)
    facts |= dict(transport=type(world).__name__, ranks=f"{sequence} ranks")
    model, keep_time = seeded_model(config, args.seed), partial(shared_clock, world, stop)
    with Run(TITLE, args, model, config.problem(), facts, speaks=world.rank == 0) as demo:
        on_ranks = RanksTask(corpus, config, args.seed, data, world)
        demo.train(f"{layout} ranks", Trainer(on_ranks, args.steps, clock=keep_time), 1)
        seen = {name: whole(p).double() for name, p in on_ranks.model.named_parameters()}
        if world.rank:
            for _ in range(args.steps):
                keep_time(0.0)
            return 0
        alone = TextTask(model, corpus, args.context, args.seed, data)
        with torch_threads(args.threads or usable_cores()):
            demo.train(ALONE, Trainer(alone, args.steps, clock=keep_time), 1)
        for who, trainer in demo.trainers.items():
            for step, ((*_, loss), norm) in enumerate(zip(trainer.curve, trainer.norms, strict=True), 1):
                demo.rows.append(ResultRow(table="steps", case=dict(step=step), who=who, values={LOSS_OF_STEP: loss, NORM: norm}))
        demo.rows += compared(demo.rows, {name: p.detach().double() for name, p in model.named_parameters()}, seen)
    return demo.code or DIFFERS * any(row.verdict == "wrong" for row in demo.rows)


def compared(rows: Iterable[ResultRow], exact: dict[str, Tensor], seen: dict[str, Tensor]) -> list[ResultRow]:
    """Return the largest relative difference of each quantity; "wrong" where it is more than rounding."""
    steps, differences = cases_of(rows, "steps"), []
    apart = {name: {f"step {i}": _apart(name, case) for i, case in enumerate(steps, 1)} for name in (LOSS_OF_STEP, NORM)}
    apart[PARAMETERS] = {name: float((seen[name] - x).norm() / x.norm().clamp(min=1e-30)) for name, x in exact.items()}
    for name, values in apart.items():
        where = [*values][torch.tensor([*values.values()]).argmax()]  # a NaN's place, if there is one
        bound = GROWTH[name] * max(len(steps), FEWEST) * EPSILON
        facts, verdict = dict(largest=values[where], where=where, bound=bound), "measured" if values[where] <= bound else "wrong"
        differences.append(ResultRow(table="differences", case=dict(quantity=name), who=name, verdict=verdict, values=facts))
    return differences


def _apart(name: str, case: CaseRows) -> float:
    seen, exact = (row.values[name] for row in case.rows.values())
    return float(abs(seen - exact) / exact)


def outcome(result: RowsResult) -> str:
    differences, facts = rows_by_name(result, "differences"), result.facts
    if not differences:
        return "not trained to their ends: nothing to compare"
    apart = ", ".join(f"{name} {row.values['largest']:.1e}" for name, row in differences.items())
    verdict = "MORE THAN ROUNDING" if any(row.verdict == "wrong" for row in differences.values()) else "rounding"
    steps = f"{facts['steps']:,} steps on {facts['layout']} ranks and in one process"
    return f"{steps} differ by {verdict} (relative, at most: {apart})"


AXES = Axis("step", "number", log=False), Axis("bits per byte", "number", log=False)
LOSSES = PlotView("The same training, in one process too", "steps", "step", stored(LOSS_OF_STEP), AXES, "lines")


def made_tables(result: RowsResult) -> Iterable[Table]:
    facts, rows = result.facts, []
    for name, row in rows_by_name(result, "differences").items():
        verdict = "MORE THAN ROUNDING" if row.verdict == "wrong" else "rounding"
        rows.append((name, f"{row.values['largest']:.1e}", row.values["where"], f"{row.values['bound']:.1e}", verdict))
    yield Table("One process and the ranks", ("of", "largest relative difference", "where", "bound", ""), tuple(rows))
    after = list[tuple[str, str]]()
    for who, row in rows_by_name(result, "training").items():
        held_out = " -> ".join(f"{point['loss']:.3f}" for point in judgements(result, who))
        where = "" if who == ALONE else f", {facts['world_size']} ranks ({facts['transport']})"
        spent = f"{row.values['steps']:,} steps in {clock(row.values['seconds'])}{where}, threads: {row.values['threads']}"
        after.append((who, f"{spent}; held out: {held_out} bits per byte"))
    yield run_table(result, after)


REPORT = Report(
    command=TITLE,
    summary=outcome,
    tables=(made_tables,),
    plots=(LOSSES,),
    method="On {layout} ranks, each replica reads a window of {context:,} bytes in a step, whose rows are cut over {ranks}; "
    "FSDP2 shards the parameters over these and copies them over the replicas. One process computes the same windows whole, "
    "with the same weights at first. A loss is in bits per byte and before the step; tools/demo/ranks.py explains the bounds.",
)
