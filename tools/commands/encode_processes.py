"""Processes of `dilkit encode-slide`: each loads the model and embeds its share of the slides."""

from __future__ import annotations

import argparse
import math
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from dilkit import environment, files
from dilkit.comm.launch import processes
from dilkit.comm.transports.base import Comm
from dilkit.integrations.gigapath import SlideEncoder, load_slide_encoder
from dilkit.integrations.gigapath.checkpoint import config_of, is_pooling_open, needed_tile_encoder, read_checkpoint
from dilkit.integrations.gigapath.cohort.listing import RefusedFile
from dilkit.integrations.gigapath.cohort.manifest import SlideRecord, read_manifest
from dilkit.integrations.gigapath.cohort.run import Plan, Progress, embed_share, finish, plan_cohort
from dilkit.integrations.gigapath.cohort.settings import CohortJob, ModelRecord, ReadSettings, sha256_of
from dilkit.integrations.gigapath.config import known_as
from dilkit.integrations.gigapath.hub import local_file
from dilkit.threads import usable_cores

MEAN, CLASS_TOKEN = "mean of tiles", "class token"


@dataclass(frozen=True)
class Outcome:
    """Records of embedded slides, and refused ones."""

    records: list[SlideRecord]
    refused: list[RefusedFile]


@dataclass(frozen=True)
class EncodeTask:
    """The files, what is to be done with them, and where the model runs. It is pickled for other processes.

    `is_pooling_open`: neither the arguments nor the checkpoint hold what is pooled.
    """

    paths: list[Path]
    job: CohortJob
    arch: str | None
    device: str
    backend: tuple[str, ...] | None
    is_pooling_open: bool

    def load(self) -> SlideEncoder:
        """Return the model on the device of this process: of several with one GPU each, its own."""
        started, model = environment.launch(), self.job.model
        device = f"cuda:{started.local_rank % torch.cuda.device_count()}" if started and self.device == "cuda" else self.device
        pool, dtype = model.pooling == MEAN, getattr(torch, model.dtype)
        options = dict(device=device, dtype=dtype, backend=self.backend)
        return load_slide_encoder(model.checkpoint, self.arch, ngrids=model.ngrids, tail=model.tail, global_pool=pool, **options)

    def embed(self, plan: Plan, rank: int, progress: Progress, model: SlideEncoder | None = None) -> Outcome:
        """Embed the slides of a rank; `progress` is given the tiles of each."""
        return Outcome(*embed_share(model or self.load(), plan, self.job, rank, progress))


def task_of(args: argparse.Namespace, paths: list[Path]) -> EncodeTask:
    """Return the task that arguments and checkpoint describe.

    Raises OSError for a checkpoint that cannot be read or downloaded, ValueError for one that arguments contradict.
    """
    file = local_file(args.checkpoint)
    checkpoint = read_checkpoint(file, mapped=True)
    config = config_of(checkpoint, args.arch, dict(ngrids=args.ngrids, tail=args.tail, global_pool=args.global_pool))
    model = ModelRecord(
        arch=args.arch or known_as(config),
        checkpoint=str(file),
        sha256=sha256_of(file),
        pooling=MEAN if config.global_pool else CLASS_TOKEN,
        dtype=args.dtype,
        tail=config.tail,
        ngrids=config.ngrids,
        layers=args.all_layers,
    )
    encoder = needed_tile_encoder(checkpoint, args.tile_encoder)
    reading = ReadSettings(args.tile_size, encoder, config.in_chans, args.coords, args.microns_per_pixel)
    is_open = args.global_pool is None and is_pooling_open(checkpoint, config)
    return EncodeTask(paths, CohortJob(args.out, model, reading, args.heatmap), args.arch, args.device, args.backend, is_open)


PLAN, OUTCOME = "plan", "outcome-{rank}"
_LOOK = 0.5
"""Seconds between two looks at what is there."""
_MOST_LINES = 40


def embed_in_processes(task: EncodeTask, plan: Plan, ranks: int, progress: Progress) -> Outcome:
    """Embed all slides in processes of this machine, and return their outcome.

    Raises ChildProcessError where a process fails or is killed; what has been written until then stays, and is kept next time.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, limit = Path(name), 0.0
        (folder / PLAN).write_bytes(pickle.dumps((task, plan)))
        threads = max(1, usable_cores() // ranks)
        job = processes.start("torch", ranks, ["-m", "dilkit.tools.commands.encode_processes", name], threads=threads)
        try:
            _follow(job, task, plan, progress)
            limit = math.inf  # they have ended, or one has failed
        finally:
            ended = job.finish(limit)
        outcomes = [folder / OUTCOME.format(rank=rank) for rank in range(ranks)]
        if ended.code or not all(path.exists() for path in outcomes):
            printed = "\n".join(ended.text.strip().splitlines()[-_MOST_LINES:]) or "nothing"
            failed = f"a process ended with {ended.code}, and all have been ended"
            raise ChildProcessError(f"--ranks {ranks}: {failed}. They printed:\n{printed}")
        return together_of([pickle.loads(path.read_bytes()) for path in outcomes])


def _follow(job: processes.Job, task: EncodeTask, plan: Plan, progress: Progress) -> None:
    """Wait until all processes have ended or one has failed; report the tiles of slides whose records are there."""
    wanted = {slide.output.name: slide.tiles for share in plan.shares for pack in share for slide in pack}
    while job.code is None and not any(process.poll() for process in job.processes):
        time.sleep(_LOOK)
        done = wanted.keys() & read_manifest(task.job.out, task.job.model).slides.keys()
        progress(sum(wanted.pop(name) for name in done))


def main(folder: Path) -> int:
    """Run one of the processes."""
    task, plan = pickle.loads((folder / PLAN).read_bytes())
    started = environment.launch()
    rank = 0 if started is None else started.rank
    outcome = task.embed(plan, rank, lambda tiles: None)
    (folder / OUTCOME.format(rank=rank)).write_bytes(pickle.dumps(outcome))
    return 0


WAIT = 7 * 24 * 3600.0
"""Seconds that a rank waits for another, which may have much longer slides left."""


def work(task: EncodeTask, comm: Comm, show: Callable[[Plan], None], report: Callable[[Plan, Outcome], int]) -> int:
    """Embed the slides of this rank. The first one shows the plan and reports; its exit code is what `report` returns."""
    model = task.load()
    with files.locked(task.job.out) if comm.rank == 0 else nullcontext():
        planned = pickle.dumps(plan_cohort(task.paths, task.job, comm.size)) if comm.rank == 0 else b""
        plan: Plan = pickle.loads(comm.share(planned, "plan")[0])
        if comm.rank == 0:
            show(plan)
        mine = task.embed(plan, comm.rank, lambda tiles: None, model)
        outcomes: list[Outcome] = [pickle.loads(one) for one in comm.share(pickle.dumps(mine), "outcomes")]
        if comm.rank:
            return 0
        together = together_of(outcomes)
        finish(plan, task.job, [*plan.refused, *together.refused])
        return report(plan, together)


def together_of(outcomes: list[Outcome]) -> Outcome:
    """Return the outcome of all ranks."""
    records = chain.from_iterable(one.records for one in outcomes)
    return Outcome(list(records), list(chain.from_iterable(one.refused for one in outcomes)))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
