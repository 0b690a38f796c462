"""`dilkit demo`: a small byte-level language model of dilated attention, trained, judged and measured."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dilkit.tools.console import rank_arguments as job
from dilkit.tools.console.arguments import make_folder, positive, whole
from dilkit.tools.console.interrupt import load_torch

HELP = """\
train a small byte-level language model of dilated attention, and measure it

Trains a decoder-only transformer with 8,192 bytes of context on the Python sources of the standard library (or on --text),
judges it on files that it has never seen, measures dilated against dense attention, and writes report.md, report.json,
report.png and the model into --out. Three quarters of the training are spent on windows of 512 bytes, from which it learns
faster, the rest on whole contexts; it is always judged on whole contexts. Ctrl-C ends it with the report so far.

`mpirun -n 2 dilkit demo --comm mpi` trains over ranks: all windows, the short ones too, are cut into one part a rank, and what
is learnt is the same up to rounding. Rank 0 prints and writes; attention alone is not measured then. Open MPI's mpirun leaves
no time after Ctrl-C: what is left is report.json as of the last judgement.

`dilkit demo --sample "def "` then continues a text with the trained model, at the cost of one row a byte: caches hold the rest.

Three more need a checkout. `dilkit demo --image` (or --image FILE): two small models fill in hidden patches of a photograph,
alike in all but the order of their tokens, row-major or along a Hilbert curve. They are trained beside a strip down its middle
and judged on it, with several seeds, and whichever order loses less is reported.

`dilkit demo --llama` (with `pip install dilkit[transformers]`) trains a small Llama of transformers with full attention, puts
dilated attention into a copy of it, and goes on with both from the same weights.

`dilkit demo --ranks 2x2` (replicas x ranks of a sequence) starts that many processes, or takes those of torchrun, and trains a
smaller model on them: batches over the first dimension, sequences cut over the second, parameters sharded by FSDP2. Then one
process trains the same on whole windows. Losses, gradients and parameters are compared; the exit code is 1 where they differ by
more than rounding."""

_LENGTH: dict[str, Any] = dict(minutes=None, steps=None)
IMAGE_STEPS, LLAMA_STEPS, RANKS_STEPS = 500, 400, 20
_MODES: dict[str, dict[str, Any]] = {
    "with --ranks": dict(out=Path("dilkit-demo-ranks"), ranks=None, text=None, context=4096, steps=RANKS_STEPS),
    "with --llama": dict(_LENGTH, out=Path("dilkit-demo-llama"), llama=None, text=None),
    "with --image": dict(_LENGTH, out=Path("dilkit-demo-image"), image=None, seeds=3),
    "with --sample": dict(out=Path("dilkit-demo"), sample=None, checkpoint=None, bytes=400, temperature=0.7),
    "in training on text": dict(
        _LENGTH, out=Path("dilkit-demo"), text=None, context=8192, save=None, comm=None, world_size=None, timeout=None
    ),
}
"""The options that each of the modes has besides those that all have, with their defaults."""
_CHOOSING = ("ranks", "llama", "image", "sample")
"""The options that choose a mode."""
_MODEL_FILE = "model.pt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of one mode alone have no default here: `run` refuses them in the others."""
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the results (default dilkit-demo; of another mode dilkit-demo-MODE)"
    )
    parser.add_argument("--seed", type=whole(0), default=0, help="of weights, windows or crops, and samples (default 0)")
    parser.add_argument("--threads", type=whole(1), metavar="N", help="CPU threads (default: torch's choice)")
    training = parser.add_argument_group("training")
    training.add_argument("--text", nargs="+", metavar="PATH", help="files and folders to learn from, at least two files in all")
    length = training.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=positive, metavar="M", help="of training (default 2; with --image see --steps)")
    length.add_argument(
        "--steps",
        type=whole(1),
        metavar="N",
        help=f"end after N steps of training instead; of each model with --image ({IMAGE_STEPS}) and --llama "
        f"({LLAMA_STEPS}), of both trainings with --ranks ({RANKS_STEPS})",
    )
    training.add_argument(
        "--context", type=whole(64), metavar="BYTES", help="that the model sees at once (default 8192; with --ranks 4096)"
    )
    training.add_argument("--save", type=Path, metavar="FILE", help=f"write the model here (default: {_MODEL_FILE} in --out)")
    job.add_arguments(parser)
    parallel = parser.add_argument_group("data x sequence parallelism")
    parallel.add_argument(
        "--ranks",
        type=_layout,
        metavar="DATAxSEQUENCE",
        help="train on so many replicas, each of so many ranks that share its sequences, as 2x2, and in one process",
    )
    image = parser.add_argument_group("photograph")
    image.add_argument(
        "--image", nargs="?", const=True, metavar="FILE", help="learn from this picture (default: one that matplotlib brings)"
    )
    image.add_argument("--seeds", type=whole(3), metavar="N", help="seeds to train with, at least 3 (default 3), from --seed on")
    parser.add_argument("--llama", action="store_const", const=True, help="convert a small Llama of transformers while it learns")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--sample", metavar="TEXT", help="train nothing; continue TEXT with a trained model")
    sampling.add_argument("--checkpoint", type=Path, metavar="FILE", help=f"the model (default: {_MODEL_FILE} in --out)")
    sampling.add_argument("--bytes", type=whole(1), metavar="N", help="to add to TEXT (default 400)")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 takes the likeliest byte (default 0.7)")


def run(args: argparse.Namespace) -> int:
    """Train and measure, or sample; 0, or 130 when interrupted. Raises ValueError or OSError for input that will not do."""
    mode = next((f"with --{name}" for name in _CHOOSING if getattr(args, name) is not None), "in training on text")
    _set_mode(args, mode)
    if args.ranks:
        return _train_on_ranks(args)
    if args.sample is not None:
        load_torch()
        from dilkit.tools.demo.text.sample import sample

        args.checkpoint = args.checkpoint or args.out / _MODEL_FILE
        return sample(args)
    job.check(args)
    make_folder("--out", args.out)
    if args.llama:
        load_torch()
        from dilkit.tools.demo.llama.job import LlamaJob

        args.steps = args.steps or LLAMA_STEPS
        return LlamaJob(args).run()
    if args.image is not None:
        load_torch()
        from dilkit.tools.demo.image.job import ImageJob
        from dilkit.tools.demo.image.model import ImageConfig

        args.steps = args.steps or IMAGE_STEPS
        return ImageJob(args, ImageConfig()).run()
    args.save = args.save or args.out / _MODEL_FILE
    make_folder("--save", args.save.parent)
    if args.save.is_dir():
        raise ValueError(f"--save: {str(args.save)!r} is a folder; name a file")
    load_torch()
    from dilkit.tools.demo.text.job import train_and_measure

    return train_and_measure(args)


def _train_on_ranks(args: argparse.Namespace) -> int:
    """What `run` does with --ranks."""
    from dilkit.tools.demo.ranks.layout import are_launched, check_context

    check_context(args.ranks, args.context)
    are_launched(args.ranks)  # raises where a launcher has started others
    make_folder("--out", args.out)
    load_torch()
    from dilkit.tools.demo.ranks.job import train_and_compare

    return train_and_compare(args)


def _layout(text: str) -> Any:
    from dilkit.tools.demo.ranks.layout import layout

    return layout(text)


def _set_mode(args: argparse.Namespace, mode: str) -> None:
    """Fill in the defaults of a mode. Raises ValueError for an option that it would ignore."""
    own = _MODES[mode]
    for name in {name: None for options in _MODES.values() for name in options}:
        given = getattr(args, name)
        if given is not None and name not in own:
            raise ValueError(f"--{name.replace('_', '-')}: has no meaning {mode}")
        setattr(args, name, own.get(name) if given is None else given)
