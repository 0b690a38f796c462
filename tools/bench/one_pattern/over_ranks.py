"""`dilkit bench --comm ...`: the benchmark of a problem whose sequence is sharded over ranks; it compares schedules."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dilkit.problem import Problem
from dilkit.tools.bench.one_pattern.record import BenchCase, BenchResult, Described, Job, Method, scaling
from dilkit.tools.console import rank_arguments as ranks
from dilkit.tools.console.arguments import make_folder
from dilkit.tools.results.file import new_result
from dilkit.tools.results.problem import ProblemFacts

if TYPE_CHECKING:
    from dilkit.comm import Comm

BUDGET = 20.0
"""Seconds that one call may take."""
SUMMARIES = {
    "auto": "for each branch what moves the fewest rows through the busiest rank",
    "scatter": "the ranks of a segment deal out its heads",
    "gather": "each rank is sent the keys and values that its queries see",
    "ring": "keys and values go round, hop by hop",
}


def run(args: Namespace, problem: Problem, lengths: Sequence[int], repeats: int) -> int:
    """Measure on all ranks of the job that `args` names; rank 0 writes the three files and prints the table."""
    ranks.check(args)
    make_folder("--out", args.out)
    return ranks.run(args, partial(_work, args=args, problem=problem, lengths=lengths, repeats=repeats))


def _work(comm: Comm, args: Namespace, problem: Problem, lengths: Sequence[int], repeats: int) -> int:
    from dilkit.tools.report.files import publish

    result = _result(comm, args, problem, _measure(comm, args, problem, lengths, repeats), repeats)
    if comm.rank == 0:
        publish(result, args.out, "bench", "dilkit bench", args.json)
    return 1 if any(entry.verdict == "wrong" for case in result.lengths for entry in case.entries.values()) else 0


def _measure(comm: Comm, args: Namespace, problem: Problem, lengths: Sequence[int], repeats: int) -> list[BenchCase]:
    from tqdm import tqdm

    from dilkit.tools.bench.one_pattern.ranks_runner import RanksRunner

    with tqdm(lengths, unit="length", disable=True if comm.rank else None) as bar:
        how = dict(backend=args.backend, repeats=repeats, budget=args.budget or BUDGET, alone=args.comm != "threads")
        runner = RanksRunner(comm, args.schedules, say=bar.set_description, **how)
        return [runner.run(replace(problem, seq=seq)) for seq in bar]


def _result(comm: Comm, args: Namespace, problem: Problem, found: list[BenchCase], repeats: int) -> BenchResult:
    import torch

    return new_result(
        BenchResult,
        problem.device,
        problem=ProblemFacts.of(problem),
        method=Method(repeats=repeats, min_time_s=0.0, budget_s=args.budget or BUDGET),
        implementations=tuple(Described(name=name, kind="schedule", summary=SUMMARIES[name]) for name in args.schedules),
        lengths=tuple(found),
        scaling=scaling(found),
        ranks=Job(comm=args.comm, transport=transport_name(args.comm), world_size=comm.size, threads=torch.get_num_threads()),
    )


def transport_name(kind: str) -> str:
    """What moves the rows, with its version."""
    import torch
    import torch.distributed as dist

    if kind == "mpi":
        from mpi4py import MPI

        first = str(MPI.Get_library_version()).splitlines()[0].split(",")[0].strip("\0")
        return " ".join(first.replace("Version:", "").split())
    if kind == "torch":
        return f"torch.distributed {torch.__version__}, {dist.get_backend()}"
    return "threads of one process"
