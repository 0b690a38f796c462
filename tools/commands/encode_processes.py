"""The work of `dilkit encode-slide`, alone or on each rank: it loads the model and embeds its share of the slides."""

import argparse
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dilkit import environment, files
from dilkit.comm.collectives import gather_values
from dilkit.comm.transports.base import Comm
from dilkit.integrations.gigapath import SlideEncoder, load_slide_encoder
from dilkit.integrations.gigapath.checkpoint import config_of, is_pooling_open, local_file, needed_tile_encoder, read_checkpoint
from dilkit.integrations.gigapath.cohort.listing import CohortJob, ModelRecord, ReadSettings, sha256_of
from dilkit.integrations.gigapath.cohort.run import Plan, embed_share, finish, plan_cohort
from dilkit.integrations.gigapath.config import known_as
from dilkit.tools.console.progress import shown
from dilkit.tools.console.text import print_json, table

MEAN, CLASS_TOKEN = "mean of tiles", "class token"
WAIT = 7 * 24 * 3600.0
"""Seconds that a rank waits for another, which may have much longer slides left."""


UNSAID_POOLING = (
    "--global-pool is not given: the class token is pooled, which GigaPath's pretraining did not train; --global-pool takes "
    "the mean of the tiles, --no-global-pool suits weights that were tuned with the class token"
)


def encode(
    args: argparse.Namespace, job: CohortJob, notes: list[str], paths: list[Path], unread: list[Path], comm: Comm | None = None
) -> int:
    """Embed the slides of this rank; the first one prints the plan and the outcome. Return 1 where a slide was refused, else 0.

    `notes` is printed with the outcome. Raises ValueError for a checkpoint that does not fit.
    """
    rank, size = (comm.rank, comm.size) if comm else (0, 1)
    model = load(args, job.model)  # before anything is changed: a checkpoint that does not fit ends it here
    with files.locked(job.out) if rank == 0 else nullcontext():
        plan = plan_cohort(paths, job, size) if rank == 0 else None
        plan = gather_values(comm, plan)[0] if comm else plan
        assert plan is not None
        if rank == 0 and not args.json:
            show(plan)
        total = sum(slide.tiles for pack in plan.shares[rank] for slide in pack)
        with shown("tile", hidden=rank > 0) as move:
            mine = embed_share(model, plan, job, rank, partial(move, total=total))
        shares = gather_values(comm, mine) if comm else [mine]
        if rank:
            return 0
        records = [record for share in shares for record in share[0]]
        refused = [*plan.refused, *(one for share in shares for one in share[1])]
        finish(plan, job, refused)
    new, kept_outputs = len(records), {record.output for record in plan.kept}
    by_output = {record.output: record for record in (*plan.kept, *records)}
    slides = [by_output[slide.output.name] for slide in plan.slides if slide.output.name in by_output]
    refused.sort(key=lambda one: str(one.path))
    if args.json:
        listed = []
        for one in slides:
            maps = [str(args.out / name) for name in one.maps]
            facts: dict[str, Any] = dict(features=one.file, out=str(args.out / one.output), maps=maps)
            facts |= dict(kept=one.output in kept_outputs, tiles=one.tiles, tile_size=one.tile_size)
            listed.append(facts | dict(tile_size_from=one.tile_size_from, warnings=list(one.warnings)))
        settings = dict(arch=job.model.arch, device=args.device, dtype=job.model.dtype, pooling=job.model.pooling)
        reasons = [dict(features=str(one.path), reason=one.reason) for one in refused]
        print_json("encode-slide", {**settings, "slides": listed, "refused": reasons, "not_read": list(map(str, unread))})
    else:
        print(f"wrote {new} embeddings to {args.out}, kept {len(kept_outputs)}, refused {len(refused)}")
    notes = [*notes, *(f"{path} is no file of features, and is not read" for path in unread)]
    notes += [f"{record.file}: {text}" for record in slides for text in record.warnings]
    for note in (*notes, *(one.reason for one in refused)):
        print(f"dilkit {args.named}: {note}", file=sys.stderr)
    return 1 if refused else 0


def job_of(args: argparse.Namespace) -> tuple[CohortJob, list[str]]:
    """Return the job that arguments and checkpoint describe, and a note if neither holds what is pooled.

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
    return CohortJob(args.out, model, reading, args.heatmap), [UNSAID_POOLING] * is_open


def load(args: argparse.Namespace, model: ModelRecord) -> SlideEncoder:
    """Return the model on the device of this process: of several with one GPU each, its own."""
    started, device = environment.launch(), args.device
    if started and device == "cuda:0":  # as `device_here` writes --device cuda
        device = f"cuda:{started.local_rank % torch.cuda.device_count()}"
    options: dict[str, Any] = dict(device=device, dtype=getattr(torch, model.dtype), backend=args.backend)
    options |= dict(ngrids=model.ngrids, tail=model.tail, global_pool=model.pooling == MEAN)
    return load_slide_encoder(model.checkpoint, args.arch, **options)


def show(plan: Plan) -> None:
    done = {record.output for record in plan.kept}
    rows = [("slide", "tiles", "tile size", "")]
    for slide in plan.slides:
        size = f"{slide.tile_size} ({slide.tile_size_from})"
        rows.append((slide.path.name, f"{slide.tiles:,}", size, "kept" if slide.output.name in done else "to embed"))
    print("\n".join(table(rows)))
    print(f"{len(plan.slides) - len(done)} of {len(plan.slides)} slides to embed, {plan.tiles:,} tiles", flush=True)
