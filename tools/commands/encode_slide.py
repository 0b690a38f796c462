"""`dilkit encode-slide`: embeddings of slides by GigaPath's slide encoder, from files of tile features."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dilkit import environment, files
from dilkit.integrations.gigapath.config import ARCHITECTURES
from dilkit.tools.console.arguments import add_backend_argument, device_here, dtype_name, make_folder, positive, whole
from dilkit.tools.console.interrupt import load_torch
from dilkit.tools.console.text import print_json, table

if TYPE_CHECKING:
    from dilkit.integrations.gigapath.cohort.run import Plan
    from dilkit.tools.commands.encode_processes import EncodeTask, Outcome

MOST_STARTED = 64
HELP = """\
embed slides with GigaPath's slide encoder, from files of tile features

Reads .h5, .pt, .npz and .npy files as TRIDENT, CLAM, STAMP, slide2vec and AtlasPatch write them: features, tile_embeds or
feats, and coords (needs h5py for .h5). Where coordinates lie in files of their own, --coords names their folder. How many
pixels a tile has a side is what the file says, or --tile-size.

Lists the slides, then writes NAME.pt into --out for each: {"embedding": (embed_dim,)}, or with --all-layers
{"layers": (depth + 1, embed_dim)}; and manifest.json: the model, and one record a slide. A file is there whole or not at all.
Started again, it keeps what it has written of the same files with the same model and settings; a folder of another model is
refused. A slide that will not do is named, the others are embedded all the same, and the exit code is 1.

Slides are divided over the processes of torchrun or mpirun, or over --ranks N processes that it starts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the files, the checkpoint, and what differs from the architecture's own settings."""
    parser.add_argument("features", nargs="+", type=Path, metavar="FEATURES", help="files of tile features, or folders of them")
    weights = "the weights, such as slide_encoder.pth, or hf_hub:prov-gigapath/prov-gigapath"
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="FILE", help=weights)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the embeddings")
    arch = f"default: the sizes that the checkpoint stores, else {next(iter(ARCHITECTURES))}"
    parser.add_argument("--arch", choices=ARCHITECTURES, help=arch)
    grid = "cells of a tile a side (default: the checkpoint's, else 1000)"
    parser.add_argument("--ngrids", type=whole(1), metavar="N", help=grid)
    size = "pixels a side of the tiles, where the file does not say (default 256, if tiles lie so)"
    parser.add_argument("--tile-size", type=whole(1), metavar="PIXELS", help=size)
    coords = "folder of coordinates, where they are not with the features: CLAM's or TRIDENT's patches, slide2vec's tiles"
    parser.add_argument("--coords", type=Path, metavar="DIR", help=coords)
    microns = (
        "micrometres of a pixel of level 0, for STAMP's files that do not say how many pixels a tile has, and their --heatmap"
    )
    parser.add_argument("--microns-per-pixel", type=positive, metavar="UM", help=microns)
    encoder = "the tile encoder named in the file must have this in its name (default: the checkpoint's, else gigapath)"
    parser.add_argument("--tile-encoder", metavar="NAME", help=encoder)
    tail = "padded keys, or none (default: the checkpoint's, else zeros)"
    parser.add_argument("--tail", choices=("zeros", "exact"), help=tail)
    pool = (
        "the mean of the tiles, or the class token, which pretraining does not train (default: what the checkpoint stores, else "
        "the class token, with a warning)"
    )
    parser.add_argument("--global-pool", action=argparse.BooleanOptionalAction, help=pool)
    parser.add_argument("--all-layers", action="store_true", help="of the input and of each layer")
    heatmap = "also the class token's attention in the last layer: NAME.png (needs matplotlib), NAME.geojson for QuPath"
    parser.add_argument("--heatmap", action="store_true", help=heatmap)
    parser.add_argument("--ranks", type=whole(1), metavar="N", help="divide the slides over so many processes of this machine")
    parser.add_argument("--device", type=device_here, default="cpu", metavar="cuda:0", help="where to run (default %(default)s)")
    parser.add_argument("--dtype", type=dtype_name, default="float32", help="of weights and tiles (default %(default)s)")
    add_backend_argument(parser, "that compute attention (default: DILKIT_BACKEND's, else what suits the slide and the device)")


def run(args: argparse.Namespace) -> int:
    """Embed all slides: 0, or 1 where one would not do. Raises ValueError or OSError where none can be embedded."""
    started = environment.launch()
    if started is not None and started.size > 1 and args.ranks not in (None, started.size):
        raise ValueError(f"--ranks: {args.ranks}, but {started.launcher} started {started.size} processes; leave it out")
    if (args.ranks or 1) > MOST_STARTED:
        raise ValueError(f"--ranks: {args.ranks} processes, and at most {MOST_STARTED} are started on one machine; use torchrun")
    load_torch()
    from tqdm import tqdm

    from dilkit.comm.launch.ranks import run_ranks
    from dilkit.integrations.gigapath.cohort.run import finish, plan_cohort
    from dilkit.integrations.gigapath.features import check_apart, features_in, others_in
    from dilkit.tools.commands import encode_processes as processes

    paths = features_in(args.features)
    check_apart("--out", args.out, args.features)
    unread = [path for path in others_in(args.features) if path.resolve() != args.out.resolve()]
    make_folder("--out", args.out)
    task = processes.task_of(args, paths)
    if started is not None and started.size > 1:
        kind = "torch" if started.launcher == "torchrun" else "mpi"
        prints = partial(show, args), partial(report, args, task, unread)
        return run_ranks(kind, lambda comm: processes.work(task, comm, *prints), timeout=processes.WAIT)
    model = task.load()  # before anything is changed: a checkpoint that does not fit ends it here
    with files.locked(args.out):
        plan = plan_cohort(task.paths, task.job, args.ranks or 1)
        show(args, plan)
        with tqdm(total=plan.tiles, file=sys.stderr, disable=not sys.stderr.isatty(), unit="tile") as bar:
            if args.ranks is None:
                outcome = task.embed(plan, 0, bar.update, model)
            else:
                del model
                outcome = processes.embed_in_processes(task, plan, args.ranks, bar.update)
        finish(plan, task.job, [*plan.refused, *outcome.refused])
    return report(args, task, unread, plan, outcome)


UNSAID_POOLING = (
    "--global-pool is not given: the class token is pooled, which GigaPath's pretraining did not train; --global-pool takes "
    "the mean of the tiles, --no-global-pool suits weights that were tuned with the class token"
)


def show(args: argparse.Namespace, plan: Plan) -> None:
    """Print the slides with their tiles and tile sizes, and how much there is to do; nothing where programs read the output."""
    if args.json:
        return
    done = {record.output for record in plan.kept}
    rows = [("slide", "tiles", "tile size", "")]
    for slide in plan.slides:
        size = f"{slide.tile_size} ({slide.tile_size_from})"
        rows.append((slide.path.name, f"{slide.tiles:,}", size, "kept" if slide.output.name in done else "to embed"))
    print("\n".join(table(rows)))
    print(f"{len(plan.slides) - len(done)} of {len(plan.slides)} slides to embed, {plan.tiles:,} tiles", flush=True)


def report(args: argparse.Namespace, task: EncodeTask, unread: Sequence[Path], plan: Plan, outcome: Outcome) -> int:
    """Print the outcome of all slides; return the exit code, 1 where a slide was refused."""
    records = {one.output: (one, kept) for ones, kept in ((plan.kept, True), (outcome.records, False)) for one in ones}
    slides = [records[slide.output.name] for slide in plan.slides if slide.output.name in records]
    refused = sorted([*plan.refused, *outcome.refused], key=lambda one: str(one.path))
    if args.json:
        model, shown = task.job.model, []
        for record, kept in slides:
            size = dict(tile_size=record.tile_size, tile_size_from=record.tile_size_from)
            maps = [str(args.out / name) for name in record.maps]
            names = dict(features=record.file, out=str(args.out / record.output), maps=maps, kept=kept)
            shown.append({**names, "tiles": record.tiles, **size, "warnings": list(record.warnings)})
        facts = dict(arch=model.arch, device=args.device, dtype=model.dtype, pooling=model.pooling)
        reasons = [dict(features=str(one.path), reason=one.reason) for one in refused]
        print_json("encode-slide", {**facts, "slides": shown, "refused": reasons, "not_read": list(map(str, unread))})
    else:
        new, kept_text = len(outcome.records), f", kept {len(plan.kept)}" if plan.kept else ""
        sizes = Counter((record.tile_size, record.tile_size_from) for record, _ in slides)
        text = "".join(f"; {count} with tiles of {size} pixels ({whence})" for (size, whence), count in sizes.items())
        print(f"wrote {new} embedding{'s' * (new != 1)} to {args.out}{kept_text}{text}")
    notes = [UNSAID_POOLING] if task.is_pooling_open else []
    notes += [f"{path} is no file of features, and is not read" for path in unread]
    notes += [f"{record.file}: {text}" for record, _ in slides for text in record.warnings]
    for note in (*notes, *(one.reason for one in refused)):
        print(f"dilkit encode-slide: {note}", file=sys.stderr)
    return 1 if refused else 0
