"""Suites of `dilkit bench` at sizes that take no time."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.measuring import shrink
from helpers.slide_encoder import LENGTHS, SMALL

from dilkit import Neighborhood
from dilkit.integrations.gigapath import SlideEncoderConfig
from dilkit.tools import cli
from dilkit.tools.bench import run as measuring, suites
from dilkit.tools.bench.configuration import Configuration
from dilkit.tools.bench.suite import SuiteSizes
from dilkit.tools.bench.suites import preferences
from dilkit.tools.bench.suites.cpu import CpuSizes
from dilkit.tools.bench.suites.patterns import PatternsSizes
from dilkit.tools.bench.suites.scores import ScoresSizes
from dilkit.tools.bench.suites.serving import ServingSizes
from dilkit.tools.bench.suites.slides import SlidesSizes
from dilkit.tools.commands.bench import add_arguments
from dilkit.tools.console.arguments import changed
from dilkit.tools.results.file import read_result
from dilkit.tools.results.rows import ResultRow, RowsResult

CONFIGURATIONS = {
    "A": Configuration(128, (16, 32, 128), (1, 2, 16)),
    "B": Configuration(64, (16, 32), (1, 2)),
    "C": Configuration(256, (16, 64, 256), (1, 4, 16)),
    "D": Configuration(128, (16, 128), (1, 16)),
    "G": Configuration(99, (16, 64, 512), (1, 2, 4), heads=4, offset="block", tail="zeros"),
    "million": Configuration(256, (16, 256), (1, 4)),
}
LLAMA = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=8, intermediate_size=96, vocab_size=50)

SIZES: dict[str, SuiteSizes] = {
    "cpu": CpuSizes(
        **dict(divisor=1, long=64, short=(16, 32), configurations=CONFIGURATIONS, threads=1),
        grids=(Neighborhood((13, 13), 13), Neighborhood((7, 7, 7), 7), Neighborhood((28, 28), 7, dilation=4)),
        **dict(model=SlideEncoderConfig(**SMALL, segment_lengths=LENGTHS), tiles=40),
    ),
    "gpu": SuiteSizes(4096),
    "patterns": PatternsSizes(
        **dict(divisor=1, tokens=256, heads=2, head_dim=16, window=16, block=8, long=300, short=100, long_globals=4, threads=1)
    ),
    "preferences": SuiteSizes(1),
    "scores": ScoresSizes(
        **dict(divisor=1, configuration=CONFIGURATIONS["B"], head_dim=16, table=9, tiles=70, threads=1),
        **dict(layer_seq=40, layer_heads=4, layer_kv_heads=2, layer_head_dim=16),
    ),
    "serving": ServingSizes(256, threads=1, model=LLAMA),
    "slides": SlidesSizes(1, SlideEncoderConfig(**SMALL, segment_lengths=LENGTHS), 40, 70, (5, 9, 33), 1, threads=1),
}
"""Sizes by name of the suite. They are tiny without --quick, and no smaller with it."""


def run(name: str, out: Path, *arguments: str, **fields) -> tuple[int, Any]:
    suite = suites.suite(name)(**dict(sizes=SIZES.get(name)) | fields)
    args = cli.parser_of("bench").parse_args(["--suite", name, "--quick", "--repeats", "2", "--out", str(out), *arguments])
    code = measuring.run(suite, args, changed(args, add_arguments))
    return code, read_result(out / "suite.json", RowsResult, suite.kind())


def entries(found) -> Iterator[Any]:
    if isinstance(found, ResultRow):
        yield found
    elif dataclasses.is_dataclass(found):
        yield from entries(vars(found))
    elif isinstance(found, (dict, tuple)):
        for part in found.values() if isinstance(found, dict) else found:
            yield from entries(part)


def main(name: str, folder: str, *arguments: str) -> int:
    backends = {"gpu": "automatic", "preferences": "native,sdpa"}[name]
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        patch.setattr(preferences, "LAYERS", ((CONFIGURATIONS["B"], False),))
        patch.setattr(preferences, "HEAD_DIMS", (64,))
        return run(name, Path(folder), "--backend", backends, *arguments, device="cpu")[0]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
