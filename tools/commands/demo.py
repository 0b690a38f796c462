"""`dilkit demo`: a small byte-level language model of dilated attention, trained, judged and measured."""

import argparse
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from dilkit import environment
from dilkit.tools.console.arguments import number, positive, whole
from dilkit.tools.console.interrupt import load_torch

HELP = """\
train a small byte-level language model of dilated attention, and measure it

Trains a decoder-only transformer with 8,192 bytes of context on the Python sources of the standard library (or on --text), three
quarters of the time on windows of 512 bytes; judges it on files that it has never seen, on whole contexts; measures dilated
against dense attention; and writes report.md, report.json, report.png and model.pt into --out. Ctrl-C ends it with the report so
far. `dilkit demo --sample "def "` then continues a text with the trained model.

Three more need a checkout. --image: two small models fill in hidden patches of a photograph, alike in all but the order of their
tokens, row-major or along a Hilbert curve, with three seeds; whichever order loses less is reported. --llama (with
`pip install dilkit[transformers]`): a small Llama learns with full attention, a copy of it is converted, and both go on. --ranks
2x2 (replicas x ranks of a sequence): that many processes, or those of torchrun, train a smaller model; then one process trains
the same on whole windows, and the exit code is 1 where they differ by more than rounding."""

LENGTH = ("minutes", "steps")
MODES: dict[str, dict[str, Any]] = {
    "ranks": dict(out=Path("dilkit-demo-ranks"), ranks=None, text=None, context=4096, steps=20),
    "llama": dict(out=Path("dilkit-demo-llama"), llama=None, text=None, minutes=None, steps=400),
    "image": dict(out=Path("dilkit-demo-image"), image=None, minutes=None, steps=500),
    "sample": dict(out=Path("dilkit-demo"), sample=None, checkpoint=None, bytes=400, temperature=0.7),
    "text": dict(out=Path("dilkit-demo"), text=None, context=8192, minutes=2.0, steps=None),
}
"""The options of each mode besides those that all have, with their defaults. The first that is given chooses the mode."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options. Those of one mode alone have no default here: `run` refuses them in the others."""
    out = "folder of the results (default dilkit-demo; of another mode dilkit-demo-MODE)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=out)
    parser.add_argument("--seed", type=whole(0), default=0, help="of weights, windows or crops, and samples (default 0)")
    parser.add_argument("--threads", type=whole(1), metavar="N", help="CPU threads (default: torch's choice)")
    training = parser.add_argument_group("training")
    training.add_argument("--text", nargs="+", metavar="PATH", help="files and folders to learn from, at least two files in all")
    length = training.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=positive, metavar="M", help="of training (default 2; with --image see --steps)")
    steps = "steps of each training instead (default 500 with --image, 400 with --llama, 20 with --ranks)"
    length.add_argument("--steps", type=whole(1), metavar="N", help=steps)
    context = "that the model sees at once (default 8192; with --ranks 4096)"
    training.add_argument("--context", type=whole(64), metavar="BYTES", help=context)
    ranks = "train on replicas x ranks that share a sequence, as 2x2"
    parser.add_argument("--ranks", type=_layout, metavar="DATAxSEQUENCE", help=ranks)
    parser.add_argument("--image", nargs="?", const=True, metavar="FILE", help="learn from this picture, or matplotlib's sample")
    parser.add_argument("--llama", action="store_const", const=True, help="convert a small Llama of transformers while it learns")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--sample", metavar="TEXT", help="train nothing; continue TEXT with a trained model")
    sampling.add_argument("--checkpoint", type=Path, metavar="FILE", help="the model (default: model.pt in --out)")
    sampling.add_argument("--bytes", type=whole(1), metavar="N", help="to add to TEXT (default 400)")
    temperature = number("a number of 0 or more", lambda value: value >= 0)
    sampling.add_argument("--temperature", type=temperature, metavar="T", help="0 takes the likeliest byte (default 0.7)")


def run(args: argparse.Namespace) -> int:
    """Train and measure, or sample; 0, or 130 when interrupted. Raises ValueError or OSError for unusable input."""
    mode = next((name for name in MODES if name != "text" and getattr(args, name) is not None), "text")
    defaults, where = MODES[mode], "in training on text" if mode == "text" else f"with --{mode}"
    chosen_length = any(getattr(args, name) is not None for name in LENGTH)
    for name in {name: None for options in MODES.values() for name in options}:
        value = getattr(args, name)
        if value is not None and name not in defaults:
            raise ValueError(f"--{name.replace('_', '-')}: has no meaning {where}")
        if value is None and not (chosen_length and name in LENGTH):
            setattr(args, name, defaults.get(name))
    started = environment.launch()
    if mode not in ("ranks", "sample") and started is not None and started.size > 1:
        why = "which would all do the same; start one, or train over ranks with --ranks"
        raise ValueError(f"{started.launcher} started {started.size} processes, {why}")
    load_torch()
    module = import_module(f"dilkit.tools.demo.{'transformer' if mode == 'sample' else mode}")
    return int(module.sample(args) if mode == "sample" else module.run(args))


def _layout(text: str) -> tuple[int, int]:
    sizes = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text.strip(), re.ASCII)
    if sizes is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not DATAxSEQUENCE, two whole numbers of 1 or more, as 2x2")
    return int(sizes[1]), int(sizes[2])
