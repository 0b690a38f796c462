"""Suites of `dilkit bench --suite NAME` at sizes that take no time."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.slide_encoder import LENGTHS, SMALL

from dilkit import Pattern, SlidingWindow, dilated_attention
from dilkit.integrations.gigapath import SlideEncoderConfig
from dilkit.tools import cli
from dilkit.tools.bench import suites
from dilkit.tools.bench.configuration import Configuration
from dilkit.tools.bench.serving.llama import LlamaConfig
from dilkit.tools.results.file import read_result
from dilkit.tools.results.record import Entry

CONFIGURATIONS = {
    "A": Configuration(128, (16, 32, 128), (1, 2, 16)),
    "B": Configuration(64, (16, 32), (1, 2)),
    "C": Configuration(256, (16, 64, 256), (1, 4, 16)),
    "D": Configuration(128, (16, 128), (1, 16)),
    "G": Configuration(99, (16, 64, 512), (1, 2, 4), heads=4, offset="block", tail="zeros"),
    "million": Configuration(256, (16, 256), (1, 4)),
}


def in_reference(seq: int, window: int, is_causal: bool) -> Callable[..., Any]:
    """In the stead of FlexAttention, which takes many seconds to compile."""
    return partial(dilated_attention, pattern=Pattern.of(SlidingWindow(window)), is_causal=is_causal, backend="reference")


TINY: dict[str, dict[str, Any]] = {
    "cpu": dict(CONFIGURATIONS=CONFIGURATIONS, LONG=64, SHORT=(16, 32), THREADS=1),
    "gpu": dict(CONFIGURATIONS=CONFIGURATIONS, SEEDS=(32, 64), LONG=512, LAUNCH_BOUND=32),
    "serving": dict(
        **dict(HEADS=4, HEAD_DIM=8, THREADS=1, SEQUENCES=5, SHORTEST=2, LONGEST=40, STEPS=3, FULL=64, SEEN=(9, 50, 107)),
        **dict(PACKED=Pattern([8, 16], [1, 2]), DECODED=Pattern([8, 32], [1, 4]), PREFILLED=Pattern([8, 32], [1, 4])),
        **dict(PROMPT=40, CHECKED=20, CONFIG=LlamaConfig(layers=2, width=32, heads=4, hidden=48, vocabulary=50)),
    ),
    "patterns": dict(
        **dict(TOKENS=256, HEADS=2, HEAD_DIM=16, WINDOW_LENGTH=16, BLOCK=8, LONG=300, SHORT=100, LONG_GLOBALS=4, THREADS=1),
        compiled_window=in_reference,
        no_compiler=tuple,
    ),
    "slides": dict(
        **dict(TILES=40, LONG=70, SEVERAL=(5, 9, 33), SEVERAL_DEPTH=1, HEAD_DIMS=(12, 16), MATMUL=64, THREADS=1),
        CONFIG=SlideEncoderConfig(**SMALL, segment_lengths=LENGTHS),
    ),
}
"""By name of the suite: the constants of its module."""


def make_tiny(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the rest of a test, the suite of this name has tiny sizes, with --quick too."""
    kind = suites.suite(name)
    for constant, value in TINY[name].items():
        monkeypatch.setattr(importlib.import_module(kind.__module__), constant, value)
    monkeypatch.setattr(kind, "DIVISOR", 1)


def run(name: str, out: Path, *arguments: str) -> tuple[int, Any]:
    """Exit code and result of the suite, with two samples of everything."""
    code = cli.main(["bench", "--suite", name, "--quick", "--repeats", "2", "--out", str(out), *arguments])
    return code, read_result(out / "suite.json", suites.suite(name).RECORD)


def entries(found: object) -> Iterator[Entry]:
    """Every entry in a result, or in a part of one."""
    if isinstance(found, Entry):
        yield found
    elif dataclasses.is_dataclass(found):
        yield from entries(vars(found))
    elif isinstance(found, (dict, tuple)):
        for part in found.values() if isinstance(found, dict) else found:
            yield from entries(part)
