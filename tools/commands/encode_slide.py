"""`dilkit encode-slide`: embeddings of slides by GigaPath's slide encoder, from files of tile features."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilkit import files
from dilkit.integrations.gigapath.config import ARCHITECTURES
from dilkit.tools.console.arguments import add_backend_argument, device_here, dtype_name, make_folder, whole
from dilkit.tools.console.interrupt import load_torch
from dilkit.tools.console.text import print_json

if TYPE_CHECKING:
    from dilkit.integrations.gigapath import SlideEncoder

HELP = """\
embed slides with GigaPath's slide encoder, from files of tile features

Reads .pt (a dictionary of tensors: features or tile_embeds, and coords), .h5 (datasets of these names; needs h5py) and .npy (the
coordinates beside it: NAME.coords.npy). Writes NAME.pt into --out for each: {"embedding": (embed_dim,)}, or with --all-layers
{"layers": (depth + 1, embed_dim)}. A file is there whole or not at all. A slide that will not do is named, the others are
embedded all the same, and the exit code is 2."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the files, the checkpoint, and what differs from the architecture's own settings."""
    parser.add_argument("features", nargs="+", type=Path, metavar="FEATURES", help="files of tile features, or folders of them")
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="FILE", help="the weights, such as slide_encoder.pth")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the embeddings")
    parser.add_argument("--arch", choices=ARCHITECTURES, default=next(iter(ARCHITECTURES)), help="default %(default)s")
    parser.add_argument("--ngrids", type=whole(1), default=1000, metavar="N", help="cells of 256 pixels a side (default 1000)")
    parser.add_argument("--tail", choices=("zeros", "exact"), default="zeros", help="padded keys, or none (default zeros)")
    parser.add_argument("--global-pool", action="store_true", help="the mean of the tiles instead of the class token")
    parser.add_argument("--all-layers", action="store_true", help="of the input and of each layer")
    parser.add_argument("--device", type=device_here, default="cpu", metavar="cuda:0", help="where to run (default %(default)s)")
    parser.add_argument("--dtype", type=dtype_name, default="float32", help="of weights and tiles (default %(default)s)")
    add_backend_argument(parser, "that compute attention (default: DILKIT_BACKEND's, else what suits the slide and the device)")


def run(args: argparse.Namespace) -> int:
    """Embed all slides: 0, or 2 where one would not do. Raises ValueError or OSError where none can be embedded."""
    load_torch()
    import torch

    from dilkit.integrations.gigapath import load_slide_encoder
    from dilkit.integrations.gigapath.features import features_in

    paths = features_in(args.features)
    if twice := [name for name, times in Counter(path.stem for path in paths).items() if times > 1]:
        raise ValueError(f"several files would be written as {', '.join(f'{name}.pt' for name in twice)}; embed them apart")
    make_folder("--out", args.out)
    settings: dict[str, Any] = dict(ngrids=args.ngrids, tail=args.tail, global_pool=args.global_pool, backend=args.backend)
    model = load_slide_encoder(args.checkpoint, args.arch, device=args.device, dtype=getattr(torch, args.dtype), **settings)
    done, refused = _embed_all(model, paths, args)
    if args.json:
        print_json("encode-slide", dict(arch=args.arch, device=args.device, dtype=args.dtype, slides=done, refused=refused))
    else:
        print(f"wrote {len(done)} embedding{'s' * (len(done) != 1)} to {args.out}")
    for one in refused:
        print(f"dilkit encode-slide: {one['reason']}", file=sys.stderr)
    return 2 if refused else 0


def _embed_all(model: SlideEncoder, paths: list[Path], args: argparse.Namespace) -> tuple[list[Any], list[dict[str, str]]]:
    """What became of each slide: those embedded, and those that would not do with the reason."""
    from tqdm import tqdm

    done, refused = [], []
    for path in tqdm(paths, file=sys.stderr, disable=not sys.stderr.isatty(), unit="slide"):
        out = args.out / f"{path.stem}.pt"
        try:
            done.append(dict(features=str(path), out=str(out), tiles=_embed(model, path, out, args.all_layers)))
        except (ValueError, OSError) as error:
            named = str(error) if str(path) in str(error) else f"{path}: {error}"
            refused.append(dict(features=str(path), reason=named))
    return done, refused


def _embed(model: SlideEncoder, path: Path, out: Path, all_layers: bool) -> int:
    """Embed one slide into the file `out`; the number of its tiles."""
    import torch

    from dilkit.integrations.gigapath import read_features

    tiles, coords = read_features(path)
    if out.exists() and out.samefile(path):
        raise ValueError(f"{path} would be replaced by its own embedding; choose another --out")
    weights = model.cls_token
    with torch.no_grad():
        found = model(tiles[None].to(weights), coords[None].to(weights.device), all_layer_embed=all_layers)
    embeddings = torch.cat(found).float().cpu()
    with files.replacing(out) as file:
        torch.save({"layers": embeddings} if all_layers else {"embedding": embeddings[0]}, file)
    return len(tiles)
