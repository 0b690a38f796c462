"""`dilkit encode-slide` as one of the processes that torchrun or mpirun started: the first one plans and reports for all."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain

from dilkit import files
from dilkit.comm.transports.base import Comm
from dilkit.integrations.gigapath.cohort.run import Plan, finish, plan_cohort
from dilkit.integrations.gigapath.encoder import SlideEncoder
from dilkit.tools.commands.encode_slide.task import Outcome, Task

WAIT = 7 * 24 * 3600.0
"""Seconds that a rank waits for another, which may have much longer slides left."""


def work(task: Task, comm: Comm, show: Callable[[Plan], None], report: Callable[[Plan, Outcome], int]) -> int:
    """Embed the slides of this rank. The first one shows the plan and reports; its exit code is what `report` returns."""
    model = task.load()
    with files.locked(task.job.out) if comm.rank == 0 else nullcontext():
        return _work(task, comm, model, show, report)


def _work(
    task: Task, comm: Comm, model: SlideEncoder, show: Callable[[Plan], None], report: Callable[[Plan, Outcome], int]
) -> int:
    planned = pickle.dumps(plan_cohort(task.paths, task.job, comm.size)) if comm.rank == 0 else b""
    plan: Plan = pickle.loads(comm.share(planned, "plan")[0])
    if comm.rank == 0:
        show(plan)
    own = task.embed(plan, comm.rank, lambda tiles: None, model)
    outcomes: list[Outcome] = [pickle.loads(one) for one in comm.share(pickle.dumps(own), "outcomes")]
    if comm.rank:
        return 0
    together = together_of(outcomes)
    finish(plan, task.job, [*plan.refused, *together.refused])
    return report(plan, together)


def together_of(outcomes: list[Outcome]) -> Outcome:
    """What became of the slides of all ranks."""
    records = chain.from_iterable(one.records for one in outcomes)
    return Outcome(list(records), list(chain.from_iterable(one.refused for one in outcomes)))
