"""`dilkit encode-slide`: embeddings of slides by GigaPath's slide encoder, from files of tile features."""

import argparse
from functools import partial
from pathlib import Path

from dilkit import environment
from dilkit.integrations.gigapath.config import ARCHITECTURES
from dilkit.tools.console.arguments import add_backend_argument, device_here, dtype_name, make_folder, positive, whole
from dilkit.tools.console.interrupt import load_torch

HELP = """\
embed slides with GigaPath's slide encoder, from files of tile features

Reads .h5, .pt, .npz and .npy files as TRIDENT, CLAM, STAMP, slide2vec and AtlasPatch write them: features, tile_embeds or
feats, and coords (needs h5py for .h5).

Writes NAME.pt into --out for each slide: {"embedding": (embed_dim,)}, or with --all-layers {"layers": (depth + 1, embed_dim)};
and manifest.json: the model, and one record a slide. Started again, it keeps what it has written of the same files with the same
model and settings; a folder of another model is refused. A slide that is refused is named, the others are embedded, and the exit
code is 1. Slides are divided over the processes of torchrun or mpirun."""


WEIGHTS = "the weights, such as slide_encoder.pth, or hf_hub:prov-gigapath/prov-gigapath"


def add_arguments(
    parser: argparse.ArgumentParser, checkpoint: str = WEIGHTS, out: str = "folder of the embeddings", layers: bool = True
) -> None:
    """Add the arguments of this command; `checkpoint` and `out` are help texts, `layers`: with --all-layers."""
    add = parser.add_argument
    parser.set_defaults(named="encode-slide")
    add("features", nargs="+", type=Path, metavar="FEATURES", help="files of tile features, or folders of them")
    add("--checkpoint", type=Path, required=True, metavar="FILE", help=checkpoint)
    add("--out", type=Path, required=True, metavar="DIR", help=out)
    add_encoder_arguments(parser, "class token")
    heatmap = "also the attention in the last layer, of the class token or, where their mean is pooled, of all tiles: NAME.png "
    heatmap += "(needs matplotlib), NAME.geojson for QuPath"
    add("--tail", choices=("zeros", "exact"), help="padded keys, or none (default: the checkpoint's, else zeros)")
    if layers:
        add("--all-layers", action="store_true", help="of the input and of each layer")
    else:
        parser.set_defaults(all_layers=False)
    add("--heatmap", action="store_true", help=heatmap)
    add("--dtype", type=dtype_name, default="float32", help="of weights and tiles (default %(default)s)")


def add_encoder_arguments(parser: argparse.ArgumentParser, pooled: str) -> None:
    """Add what describes a slide encoder, its files and where it runs; `pooled` is what it pools where nothing says so."""
    add = parser.add_argument
    size = "pixels a side of the tiles, where the file does not say (default 256, if tiles lie so)"
    encoder = "the tile encoder named in a file must have this in its name (default: the checkpoint's, else gigapath)"
    pool = f"the mean of the tiles, or the class token (default: the checkpoint's, else the {pooled})"
    arch = f"default: the sizes that the checkpoint stores, else {next(iter(ARCHITECTURES))}"
    add("--arch", choices=ARCHITECTURES, help=arch)
    add("--ngrids", type=whole(1), metavar="N", help="cells of a tile a side (default: the checkpoint's, else 1000)")
    add("--tile-size", type=whole(1), metavar="PIXELS", help=size)
    add("--tile-encoder", metavar="NAME", help=encoder)
    coords = "folder of coordinates, where they are not with the features: CLAM's or TRIDENT's patches, slide2vec's tiles"
    add("--coords", type=Path, metavar="DIR", help=coords)
    add("--microns-per-pixel", type=positive, metavar="UM", help="micrometres of a pixel of level 0, for STAMP's files")
    add("--global-pool", action=argparse.BooleanOptionalAction, help=pool)
    add("--device", type=device_here, default="cpu", metavar="cuda:0", help="where to run (default %(default)s)")
    add_backend_argument(parser, "that compute attention (default: DILKIT_BACKEND's, else what suits the slide and the device)")


def run(args: argparse.Namespace) -> int:
    started = environment.launch()
    load_torch()
    from dilkit.comm.launch.ranks import run_ranks
    from dilkit.integrations.gigapath.features import check_apart, features_in, others_in
    from dilkit.tools.commands import encode_processes as processes

    paths = features_in(args.features)
    check_apart("--out", args.out, args.features)
    unread = [path for path in others_in(args.features) if path.resolve() != args.out.resolve()]
    make_folder("--out", args.out)
    work = partial(processes.encode, args, *processes.job_of(args), paths, unread)
    if started is not None and started.size > 1:
        return run_ranks("torch" if started.launcher == "torchrun" else "mpi", work, timeout=processes.WAIT)
    return work()
