"""`dilkit encode-slide`: embeddings of slides by GigaPath's slide encoder, from files of tile features."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dilkit import environment
from dilkit.integrations.gigapath.config import ARCHITECTURES
from dilkit.tools.console.arguments import add_backend_argument, device_here, dtype_name, make_folder, positive, whole
from dilkit.tools.console.interrupt import load_torch
from dilkit.tools.console.text import print_json, table

if TYPE_CHECKING:
    from dilkit.integrations.gigapath.cohort.run import Plan
    from dilkit.tools.commands.encode_processes import EncodeTask, Share

MOST_STARTED = 64
HELP = """\
embed slides with GigaPath's slide encoder, from files of tile features

Reads .h5, .pt, .npz and .npy files as TRIDENT, CLAM, STAMP, slide2vec and AtlasPatch write them: features, tile_embeds or
feats, and coords (needs h5py for .h5).

Writes NAME.pt into --out for each slide: {"embedding": (embed_dim,)}, or with --all-layers {"layers": (depth + 1, embed_dim)};
and manifest.json: the model, and one record a slide. Started again, it keeps what it has written of the same files with the same
model and settings; a folder of another model is refused. A slide that is refused is named, the others are embedded, and the exit
code is 1. Slides are divided over the processes of torchrun or mpirun, or over --ranks N processes that it starts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the files, the checkpoint, and what differs from the architecture's own settings."""
    add = parser.add_argument
    arch = f"default: the sizes that the checkpoint stores, else {next(iter(ARCHITECTURES))}"
    coords = "folder of coordinates, where they are not with the features: CLAM's or TRIDENT's patches, slide2vec's tiles"
    encoder = "the tile encoder named in a file must have this in its name (default: the checkpoint's, else gigapath)"
    pool = "the mean of the tiles, or the class token (default: what the checkpoint stores, else the class token)"
    heatmap = "also the class token's attention in the last layer: NAME.png (needs matplotlib), NAME.geojson for QuPath"
    size = "pixels a side of the tiles, where the file does not say (default 256, if tiles lie so)"
    add("features", nargs="+", type=Path, metavar="FEATURES", help="files of tile features, or folders of them")
    checkpoint = "the weights, such as slide_encoder.pth, or hf_hub:prov-gigapath/prov-gigapath"
    add("--checkpoint", type=Path, required=True, metavar="FILE", help=checkpoint)
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the embeddings")
    add("--arch", choices=ARCHITECTURES, help=arch)
    add("--ngrids", type=whole(1), metavar="N", help="cells of a tile a side (default: the checkpoint's, else 1000)")
    add("--tile-size", type=whole(1), metavar="PIXELS", help=size)
    add("--coords", type=Path, metavar="DIR", help=coords)
    add("--microns-per-pixel", type=positive, metavar="UM", help="micrometres of a pixel of level 0, for STAMP's files")
    add("--tile-encoder", metavar="NAME", help=encoder)
    add("--tail", choices=("zeros", "exact"), help="padded keys, or none (default: the checkpoint's, else zeros)")
    add("--global-pool", action=argparse.BooleanOptionalAction, help=pool)
    add("--all-layers", action="store_true", help="of the input and of each layer")
    add("--heatmap", action="store_true", help=heatmap)
    add("--ranks", type=whole(1), metavar="N", help="divide the slides over so many processes of this machine")
    add("--device", type=device_here, default="cpu", metavar="cuda:0", help="where to run (default %(default)s)")
    add("--dtype", type=dtype_name, default="float32", help="of weights and tiles (default %(default)s)")
    add_backend_argument(parser, "that compute attention (default: DILKIT_BACKEND's, else what suits the slide and the device)")


def run(args: argparse.Namespace) -> int:
    """Embed all slides: 0, or 1 where one would not do. Raises ValueError or OSError where none can be embedded."""
    started = environment.launch()
    if started is not None and started.size > 1 and args.ranks not in (None, started.size):
        raise ValueError(f"--ranks: {args.ranks}, but {started.launcher} started {started.size} processes; leave it out")
    if (args.ranks or 1) > MOST_STARTED:
        raise ValueError(f"--ranks: {args.ranks} processes, and at most {MOST_STARTED} are started on one machine; use torchrun")
    load_torch()
    from dilkit.comm.launch.ranks import run_ranks
    from dilkit.integrations.gigapath.features import check_apart, features_in, others_in
    from dilkit.tools.commands import encode_processes as processes

    paths = features_in(args.features)
    check_apart("--out", args.out, args.features)
    unread = [path for path in others_in(args.features) if path.resolve() != args.out.resolve()]
    make_folder("--out", args.out)
    task = processes.task_of(args, paths)
    work = partial(processes.work, task, partial(show, args), partial(report, task, unread))
    if started is not None and started.size > 1:
        return run_ranks("torch" if started.launcher == "torchrun" else "mpi", work, timeout=processes.WAIT)
    if args.ranks is None or args.ranks == 1:
        return work()
    task.load()  # a checkpoint that does not fit ends it here
    return processes.start_ranks(args)


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


def report(task: EncodeTask, unread: Sequence[Path], plan: Plan, share: Share) -> int:
    """Print the outcome of all slides; return the exit code, 1 where a slide was refused."""
    args, (new, refused_here) = task.args, share
    kept_outputs = {record.output for record in plan.kept}
    records = {record.output: record for record in (*plan.kept, *new)}
    slides = [records[slide.output.name] for slide in plan.slides if slide.output.name in records]
    refused = sorted([*plan.refused, *refused_here], key=lambda one: str(one.path))
    if args.json:
        shown = [
            {
                "features": record.file,
                "out": str(args.out / record.output),
                "maps": [str(args.out / name) for name in record.maps],
                "kept": record.output in kept_outputs,
                "tiles": record.tiles,
                "tile_size": record.tile_size,
                "tile_size_from": record.tile_size_from,
                "warnings": list(record.warnings),
            }
            for record in slides
        ]
        model = task.job.model
        facts = dict(arch=model.arch, device=args.device, dtype=model.dtype, pooling=model.pooling)
        reasons = [dict(features=str(one.path), reason=one.reason) for one in refused]
        print_json("encode-slide", {**facts, "slides": shown, "refused": reasons, "not_read": list(map(str, unread))})
    else:
        print(f"wrote {len(new)} embeddings to {args.out}, kept {len(kept_outputs)}, refused {len(refused)}")
    notes = [UNSAID_POOLING] if task.is_pooling_open else []
    notes += [f"{path} is no file of features, and is not read" for path in unread]
    notes += [f"{record.file}: {text}" for record in slides for text in record.warnings]
    for note in (*notes, *(one.reason for one in refused)):
        print(f"dilkit encode-slide: {note}", file=sys.stderr)
    return 1 if refused else 0
