"""`dilkit encode-slide`: embeddings of slides by GigaPath's slide encoder, from files of tile features."""

from __future__ import annotations

import argparse
import sys
import warnings
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
    from dilkit.integrations.gigapath.features import Features

USUAL_SIZE = 256
UNSAID_POOLING = (
    "--global-pool is not given: the class token is pooled, which GigaPath's pretraining did not train; --global-pool takes "
    "the mean of the tiles, --no-global-pool suits weights that were tuned with the class token"
)
HELP = """\
embed slides with GigaPath's slide encoder, from files of tile features

Reads .pt (a dictionary of tensors: features or tile_embeds, and coords), .h5 (datasets of these names; needs h5py) and .npy (the
coordinates beside it: NAME.coords.npy). Coordinates are pixels of level 0, and how many of them a tile has a side is what the
file says (patch_size_level0, as TRIDENT writes it), or --tile-size where it does not say.

Writes NAME.pt into --out for each: {"embedding": (embed_dim,)}, or with --all-layers {"layers": (depth + 1, embed_dim)}. A
file is there whole or not at all. A slide that will not do is named, the others are embedded all the same, and the exit code
is 2."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the files, the checkpoint, and what differs from the architecture's own settings."""
    parser.add_argument("features", nargs="+", type=Path, metavar="FEATURES", help="files of tile features, or folders of them")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="FILE",
        help="the weights, such as slide_encoder.pth, or hf_hub:prov-gigapath/prov-gigapath",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the embeddings")
    parser.add_argument("--arch", choices=ARCHITECTURES, default=next(iter(ARCHITECTURES)), help="default %(default)s")
    parser.add_argument("--ngrids", type=whole(1), default=1000, metavar="N", help="cells of a tile a side (default 1000)")
    size = f"pixels a side of the tiles, where the file does not say (default {USUAL_SIZE}, if tiles lie so)"
    parser.add_argument("--tile-size", type=whole(1), metavar="PIXELS", help=size)
    encoder = "what the file says made the features must have this in its name (default %(default)s)"
    parser.add_argument("--tile-encoder", default="gigapath", metavar="NAME", help=encoder)
    parser.add_argument("--tail", choices=("zeros", "exact"), default="zeros", help="padded keys, or none (default zeros)")
    pool = "the mean of the tiles, or the class token, which pretraining does not train (default, with a warning)"
    parser.add_argument("--global-pool", action=argparse.BooleanOptionalAction, help=pool)
    parser.add_argument("--all-layers", action="store_true", help="of the input and of each layer")
    parser.add_argument("--device", type=device_here, default="cpu", metavar="cuda:0", help="where to run (default %(default)s)")
    parser.add_argument("--dtype", type=dtype_name, default="float32", help="of weights and tiles (default %(default)s)")
    add_backend_argument(parser, "that compute attention (default: DILKIT_BACKEND's, else what suits the slide and the device)")


def run(args: argparse.Namespace) -> int:
    """Embed all slides: 0, or 2 where one would not do. Raises ValueError or OSError where none can be embedded."""
    load_torch()
    import torch

    from dilkit.integrations.gigapath import load_slide_encoder
    from dilkit.integrations.gigapath.features import features_in, others_in

    paths = features_in(args.features)
    if twice := [name for name, times in Counter(path.stem for path in paths).items() if times > 1]:
        raise ValueError(f"several files would be written as {', '.join(f'{name}.pt' for name in twice)}; embed them apart")
    make_folder("--out", args.out)
    pool = bool(args.global_pool)
    settings: dict[str, Any] = dict(ngrids=args.ngrids, tail=args.tail, global_pool=pool, backend=args.backend)
    model = load_slide_encoder(args.checkpoint, args.arch, device=args.device, dtype=getattr(torch, args.dtype), **settings)
    done, refused = _embed_all(model, paths, args)
    unread = [str(path) for path in others_in(args.features) if path.resolve() != args.out.resolve()]
    if args.json:
        facts = dict(arch=args.arch, device=args.device, dtype=args.dtype, pooling="mean of tiles" if pool else "class token")
        print_json("encode-slide", {**facts, "slides": done, "refused": refused, "not_read": unread})
    else:
        print(f"wrote {len(done)} embedding{'s' * (len(done) != 1)} to {args.out}{_sizes(done)}")
    notes = [UNSAID_POOLING] if args.global_pool is None else []
    notes += [f"{path} is no file of features, and is not read" for path in unread]
    notes += [f"{one['features']}: {text}" for one in done for text in one["warnings"]]
    for note in (*notes, *(one["reason"] for one in refused)):
        print(f"dilkit encode-slide: {note}", file=sys.stderr)
    return 2 if refused else 0


def _sizes(done: list[Any]) -> str:
    """How large the tiles of the slides were taken to be, who says so, and of how many slides."""
    sizes = Counter((one["tile_size"], one["tile_size_from"]) for one in done)
    return "".join(f"; {slides} with tiles of {size} pixels ({whence})" for (size, whence), slides in sizes.items())


def _embed_all(model: SlideEncoder, paths: list[Path], args: argparse.Namespace) -> tuple[list[Any], list[dict[str, str]]]:
    """What became of each slide: those embedded, and those that would not do with the reason."""
    from tqdm import tqdm

    done, refused = [], []
    for path in tqdm(paths, file=sys.stderr, disable=not sys.stderr.isatty(), unit="slide"):
        out = args.out / f"{path.stem}.pt"
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                facts = _embed(model, path, out, args)
            texts = [str(one.message) for one in warned]
            done.append({"features": str(path), "out": str(out), **facts, "warnings": texts})
        except (ValueError, OSError) as error:
            named = str(error) if str(path) in str(error) else f"{path}: {error}"
            refused.append(dict(features=str(path), reason=named))
    return done, refused


def _embed(model: SlideEncoder, path: Path, out: Path, args: argparse.Namespace) -> dict[str, int | str]:
    """Embed one slide into the file `out`: how many tiles it has, how large they are, and who says so."""
    import torch

    from dilkit.integrations.gigapath import read_features

    slide = read_features(path)
    _check_out(out, path)
    _check_tile_encoder(slide, args.tile_encoder)
    model.tile_size, whence = _tile_size(slide, args.tile_size)
    weights = model.cls_token
    with torch.no_grad():
        layers = model(slide.tiles[None].to(weights), slide.coords[None].to(weights.device), all_layer_embed=args.all_layers)
    embeddings = torch.cat(layers).float().cpu()
    if not bool(embeddings.isfinite().all()):
        raise ValueError(f"the embedding in {args.dtype} is not finite; features may be too large: try --dtype float32")
    with files.replacing(out) as file:
        torch.save({"layers": embeddings} if args.all_layers else {"embedding": embeddings[0]}, file)
    return dict(tiles=len(slide.tiles), tile_size=model.tile_size, tile_size_from=whence)


def _check_out(out: Path, path: Path) -> None:
    """Raise ValueError where `out` is there and is no embedding."""
    from dilkit.integrations.gigapath.checkpoint import load_tensors

    if not out.exists():
        return
    if out.samefile(path):
        raise ValueError(f"{path} would be replaced by its own embedding; choose another --out")
    content = load_tensors(out)
    if not isinstance(content, dict) or set(content) not in ({"embedding"}, {"layers"}):
        raise ValueError(f"{out} is there, and is no embedding to be replaced; choose another --out")


def _check_tile_encoder(slide: Features, name: str) -> None:
    if slide.tile_encoder is not None and name.lower() not in slide.tile_encoder.lower():
        raise ValueError(
            f"features are of {slide.tile_encoder!r}, not of {name!r}, as the file says; --tile-encoder {slide.tile_encoder} "
            "if the checkpoint was trained on them"
        )


def _tile_size(slide: Features, given: int | None) -> tuple[int, str]:
    """Pixels a side of the tiles, and who says so. Raises ValueError where the file says another than `given`, or nobody does."""
    from dilkit.integrations.gigapath.spacing import commonest_step

    if slide.tile_size is not None:
        if given not in (None, slide.tile_size):
            raise ValueError(f"tiles have {slide.tile_size} pixels a side, as the file says, but --tile-size says {given}")
        return slide.tile_size, "file"
    if given is not None:
        return given, "--tile-size"
    if (step := commonest_step(slide.coords)) not in (None, USUAL_SIZE):
        raise ValueError(
            f"most neighbours are {step} pixels apart, and neither the file nor --tile-size says how large tiles are; "
            f"give --tile-size {step}, or what it is if they overlap or have gaps between"
        )
    return USUAL_SIZE, "default"
