"""`dilkit demo`: a small byte-level language model of dilated attention, trained, judged and measured."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dilkit import environment
from dilkit.tools.console import ranks as job
from dilkit.tools.console.arguments import make_folder, whole
from dilkit.tools.console.interrupt import load_torch

HELP = """\
train a small byte-level language model of dilated attention, and measure it

Trains a decoder-only transformer with 8,192 bytes of context on the Python sources of the standard library (or on --text),
judges it on files that it has never seen, measures dilated against dense attention, and writes report.md, report.json,
pictures and the model into --out. Three quarters of the training are spent on windows of 512 bytes, from which it learns
faster, the rest on whole contexts; it is always judged on whole contexts. Ctrl-C ends it with the report so far.

`mpirun -n 2 dilkit demo --comm mpi` trains over ranks: all windows, the short ones too, are cut into one part a rank, and what
is learnt is the same up to rounding. Rank 0 prints and writes; attention alone is not measured then. Open MPI's mpirun leaves
no time after Ctrl-C: what is left is the report of the last judgement.

`dilkit demo --sample "def "` then continues a text with the trained model.

`dilkit demo --image` (or --image FILE) does something else: two small models fill in hidden patches of a photograph, alike in all
but the order of their tokens, row-major or along a Hilbert curve. They are trained beside a strip down its middle and judged on
it, with several seeds, and whichever order loses less is reported."""

_TEXT = ("text", "context", "save", "comm", "world_size", "timeout")
_LENGTH = ("minutes", "steps")
_SAMPLING = ("checkpoint", "bytes", "temperature")
_IMAGE = ("seeds",)
_MODEL_FILE = "model.pt"
IMAGE_STEPS = 500
MAX_SEED = 2**63 - 1
"""What torch takes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options whose default is None belong to training or to sampling alone; `run` fills them in."""
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the results (default dilkit-demo; with --image dilkit-demo-image)"
    )
    parser.add_argument("--seed", type=whole(0), default=0, help="of weights, windows or crops, and samples (default 0)")
    parser.add_argument("--threads", type=whole(1), metavar="N", help="CPU threads (default: torch's choice)")
    training = parser.add_argument_group("training")
    training.add_argument("--text", nargs="+", metavar="PATH", help="files and folders to learn from, at least two files in all")
    length = training.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=_positive, metavar="M", help="of training (default 2; with --image see --steps)")
    length.add_argument(
        "--steps",
        type=whole(1),
        metavar="N",
        help=f"end after N steps of training instead (with --image: of each model, by default {IMAGE_STEPS})",
    )
    training.add_argument("--context", type=whole(64), metavar="BYTES", help="that the model sees at once (default 8192)")
    training.add_argument("--save", type=Path, metavar="FILE", help=f"write the model here (default: {_MODEL_FILE} in --out)")
    job.add_arguments(parser)
    image = parser.add_argument_group("photograph")
    image.add_argument(
        "--image", nargs="?", const=True, metavar="FILE", help="learn from this picture (default: one that matplotlib brings)"
    )
    image.add_argument("--seeds", type=whole(3), metavar="N", help="seeds to train with, at least 3 (default 3), from --seed on")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--sample", metavar="TEXT", help="train nothing; continue TEXT with a trained model")
    sampling.add_argument("--checkpoint", type=Path, metavar="FILE", help=f"the model (default: {_MODEL_FILE} in --out)")
    sampling.add_argument("--bytes", type=whole(1), metavar="N", help="to add to TEXT (default 400)")
    sampling.add_argument("--temperature", type=_temperature, metavar="T", help="0 takes the likeliest byte (default 0.7)")


def run(args: argparse.Namespace) -> int:
    """Train and measure, or sample; 0, or 130 when interrupted. Raises ValueError or OSError for input that will not do."""
    _check_meaning(args)
    if args.seed > MAX_SEED:
        raise ValueError(f"--seed: {args.seed} is too large; at most {MAX_SEED}")
    if args.image is not None:
        return _run_image(args)
    _fill(args, out=Path("dilkit-demo"))
    if args.sample is not None:
        load_torch()
        from dilkit.tools.demo.text.sample import sample

        _fill(args, checkpoint=args.out / _MODEL_FILE, bytes=400, temperature=0.7)
        return sample(args)
    _fill(args, minutes=2.0, context=8192, save=args.out / _MODEL_FILE)
    job.check(args)
    if args.save.is_dir():
        raise ValueError(f"--save: {str(args.save)!r} is a folder; name a file")
    make_folder("--out", args.out)
    make_folder("--save", args.save.parent)
    load_torch()
    from dilkit.tools.demo.text.job import train_and_measure

    return train_and_measure(args)


def _run_image(args: argparse.Namespace) -> int:
    _fill(args, out=Path("dilkit-demo-image"), seeds=3)
    if args.minutes is None:
        _fill(args, steps=IMAGE_STEPS)
    if args.seed > MAX_SEED - args.seeds + 1:
        raise ValueError(f"--seed: {args.seed} is too large; at most {MAX_SEED - args.seeds + 1} with --seeds {args.seeds}")
    started = environment.launch()
    if started is not None and started.size > 1:
        raise ValueError(f"--image: trains in one process; start it without {started.launcher}")
    make_folder("--out", args.out)
    load_torch()
    from dilkit.tools.demo.image.job import ImageJob
    from dilkit.tools.demo.image.model import ImageConfig

    return ImageJob(args, ImageConfig()).run()


def _check_meaning(args: argparse.Namespace) -> None:
    """Raise ValueError for an option that would be ignored."""
    image, sampling = args.image is not None, args.sample is not None
    refused: dict[str, tuple[str, ...]] = {
        "with --image": (*_TEXT, "sample") if image else (),
        "without --image": () if image else _IMAGE,
    }
    refused |= {"with --sample": (*_TEXT, *_LENGTH) if sampling else (), "without --sample": () if sampling else _SAMPLING}
    for when, names in refused.items():
        for name in names:
            if getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')}: has no meaning {when}")


def _fill(args: argparse.Namespace, **defaults: Any) -> None:
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def _positive(text: str) -> float:
    return _number(text, "more than 0", lambda x: 0 < x < float("inf"))


def _temperature(text: str) -> float:
    return _number(text, "0 or more", lambda x: 0 <= x < float("inf"))


def _number(text: str, limit: str, fits: Any) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not fits(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {limit}")
    return number
