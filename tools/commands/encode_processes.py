"""The work of `dilkit encode-slide`, alone or on each rank: it loads the model and embeds its share of the slides."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dilkit import environment, files
from dilkit.comm.collectives import gather_values
from dilkit.comm.launch.processes import torch_variables
from dilkit.comm.transports.base import Comm
from dilkit.integrations.gigapath import SlideEncoder, load_slide_encoder
from dilkit.integrations.gigapath.checkpoint import config_of, is_pooling_open, needed_tile_encoder, read_checkpoint
from dilkit.integrations.gigapath.cohort.listing import RefusedFile
from dilkit.integrations.gigapath.cohort.manifest import SlideRecord
from dilkit.integrations.gigapath.cohort.run import Plan, embed_share, finish, plan_cohort
from dilkit.integrations.gigapath.cohort.settings import CohortJob, ModelRecord, ReadSettings, sha256_of
from dilkit.integrations.gigapath.config import known_as
from dilkit.integrations.gigapath.hub import local_file
from dilkit.threads import usable_cores

MEAN, CLASS_TOKEN = "mean of tiles", "class token"
WAIT = 7 * 24 * 3600.0
"""Seconds that a rank waits for another, which may have much longer slides left."""
GRACE = 5.0
"""Seconds that processes have to end when one has failed."""


@dataclass(frozen=True)
class EncodeTask:
    """The arguments, the files of features, and what is to be done with them.

    `is_pooling_open`: neither the arguments nor the checkpoint hold what is pooled.
    """

    args: argparse.Namespace
    paths: list[Path]
    job: CohortJob
    is_pooling_open: bool

    def load(self) -> SlideEncoder:
        """Return the model on the device of this process: of several with one GPU each, its own."""
        started, model, device = environment.launch(), self.job.model, self.args.device
        if started and device == "cuda:0":  # as `device_here` writes --device cuda
            device = f"cuda:{started.local_rank % torch.cuda.device_count()}"
        options: dict[str, Any] = dict(device=device, dtype=getattr(torch, model.dtype), backend=self.args.backend)
        options |= dict(ngrids=model.ngrids, tail=model.tail, global_pool=model.pooling == MEAN)
        return load_slide_encoder(model.checkpoint, self.args.arch, **options)


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
    return EncodeTask(args, paths, CohortJob(args.out, model, reading, args.heatmap), is_open)


Share = tuple[list[SlideRecord], list[RefusedFile]]
"""Records of embedded slides, and refused ones."""


def work(task: EncodeTask, show: Callable[[Plan], None], report: Callable[[Plan, Share], int], comm: Comm | None = None) -> int:
    """Embed the slides of this rank. The first one shows the plan and reports; its exit code is what `report` returns."""
    rank, size = (comm.rank, comm.size) if comm else (0, 1)
    model = task.load()  # before anything is changed: a checkpoint that does not fit ends it here
    with files.locked(task.job.out) if rank == 0 else nullcontext():
        plan = plan_cohort(task.paths, task.job, size) if rank == 0 else None
        plan = gather_values(comm, plan)[0] if comm else plan
        assert plan is not None
        if rank == 0:
            show(plan)
        total = sum(slide.tiles for pack in plan.shares[rank] for slide in pack)
        hidden = rank > 0 or not sys.stderr.isatty()
        with tqdm(total=total, file=sys.stderr, disable=hidden, unit="tile") as bar:
            mine = embed_share(model, plan, task.job, rank, bar.update)
        shares = gather_values(comm, mine) if comm else [mine]
        if rank:
            return 0
        records = [record for share in shares for record in share[0]]
        refused = [one for share in shares for one in share[1]]
        finish(plan, task.job, [*plan.refused, *refused])
    return report(plan, (records, refused))


def start_ranks(args: argparse.Namespace) -> int:
    """Run the command once more as `args.ranks` processes; return the first exit code that is not 0.

    Raises ChildProcessError where a process is killed; what has been written until then stays, and is kept next time.
    """
    command = [sys.executable, "-m", "dilkit", *args.command_line]
    env = {**os.environ, "OMP_NUM_THREADS": str(max(1, usable_cores() // args.ranks))}
    ranks, end = list[subprocess.Popen[bytes]](), math.inf
    try:
        for of_rank in torch_variables(args.ranks):
            ranks.append(subprocess.Popen(command, env={**env, **of_rank}))
        while None in (codes := [process.poll() for process in ranks]) and time.monotonic() < end:
            end = min(end, time.monotonic() + GRACE) if any(codes) else end
            time.sleep(0.1)
    finally:
        for process in ranks:
            process.terminate()
        end = time.monotonic() + GRACE
        while any(process.poll() is None for process in ranks) and time.monotonic() < end:
            time.sleep(0.1)
        for process in ranks:
            process.kill()  # one that waits for another rank does not end by itself
            process.wait()
    code = next((code for code in codes if code), 0)
    if code < 0:
        raise ChildProcessError(f"--ranks {args.ranks}: a process was killed by signal {-code}, and all have been ended")
    return code
