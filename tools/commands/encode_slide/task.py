"""What a process of `dilkit encode-slide` does: load the model, and embed its share of the slides."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from dilkit import environment
from dilkit.integrations.gigapath import SlideEncoder, load_slide_encoder
from dilkit.integrations.gigapath.checkpoint import config_of, is_pooling_open, needed_tile_encoder, read_checkpoint
from dilkit.integrations.gigapath.cohort.job import Job
from dilkit.integrations.gigapath.cohort.listing import Refusal
from dilkit.integrations.gigapath.cohort.manifest import SlideRecord
from dilkit.integrations.gigapath.cohort.run import Plan, Progress, embed_share
from dilkit.integrations.gigapath.cohort.settings import ModelRecord, ReadSettings, sha256_of
from dilkit.integrations.gigapath.config import known_as
from dilkit.integrations.gigapath.hub import local_file

MEAN, CLASS_TOKEN = "mean of tiles", "class token"


@dataclass(frozen=True)
class Outcome:
    """What became of the slides that were to be embedded."""

    records: list[SlideRecord]
    refused: list[Refusal]


@dataclass(frozen=True)
class Task:
    """The files, what is to be done with them, and where the model runs. It is pickled for other processes.

    `is_pooling_open`: neither the arguments nor the checkpoint hold what is pooled.
    """

    paths: list[Path]
    job: Job
    arch: str | None
    device: str
    backend: tuple[str, ...] | None
    is_pooling_open: bool

    def load(self) -> SlideEncoder:
        """The model, on the device of this process: of several with one GPU each, its own."""
        started, model = environment.launch(), self.job.model
        own = f"cuda:{started.local_rank % torch.cuda.device_count()}" if started and self.device == "cuda" else self.device
        pool, dtype = model.pooling == MEAN, getattr(torch, model.dtype)
        where = dict(device=own, dtype=dtype, backend=self.backend)
        return load_slide_encoder(model.checkpoint, self.arch, ngrids=model.ngrids, tail=model.tail, global_pool=pool, **where)

    def embed(self, plan: Plan, rank: int, progress: Progress, model: SlideEncoder | None = None) -> Outcome:
        """Embed the slides of a rank; `progress` is given the tiles of each."""
        return Outcome(*embed_share(model or self.load(), plan, self.job, rank, progress))


def task_of(args: argparse.Namespace, paths: list[Path]) -> Task:
    """The task that arguments and checkpoint describe.

    Raises OSError for a checkpoint that cannot be read or downloaded, ValueError for one that arguments contradict.
    """
    file = local_file(args.checkpoint)
    found = read_checkpoint(file, mapped=True)
    config = config_of(found, args.arch, dict(ngrids=args.ngrids, tail=args.tail, global_pool=args.global_pool))
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
    encoder = needed_tile_encoder(found, args.tile_encoder)
    reading = ReadSettings(args.tile_size, encoder, config.in_chans, args.coords, args.microns_per_pixel)
    is_open = args.global_pool is None and is_pooling_open(found, config)
    return Task(paths, Job(args.out, model, reading, args.heatmap), args.arch, args.device, args.backend, is_open)
