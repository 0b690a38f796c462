"""Every kind of result: its record, the document that is made of it, and the sentence that docs/measurements.md has of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilkit.checks import visible
from dilkit.tools.report.document import Document, Section
from dilkit.tools.report.kinds import (
    bench,
    cpu,
    demo,
    demo_image,
    gpu,
    gpu_day,
    kernels,
    llama,
    orders,
    overhead,
    patterns,
    ranks,
    serving,
    slides,
)
from dilkit.tools.report.kinds.published import document as published
from dilkit.tools.results.file import ResultError, read_json, read_result
from dilkit.tools.results.kinds.bench import BenchResult
from dilkit.tools.results.kinds.cpu import CpuResult
from dilkit.tools.results.kinds.demo import DemoResult
from dilkit.tools.results.kinds.demo_image import ImageDemoResult
from dilkit.tools.results.kinds.gpu import GpuResult
from dilkit.tools.results.kinds.gpu_day import GpuDayResult
from dilkit.tools.results.kinds.kernels import KernelsResult
from dilkit.tools.results.kinds.llama import LlamaDemoResult
from dilkit.tools.results.kinds.orders import OrdersResult
from dilkit.tools.results.kinds.overhead import OverheadResult
from dilkit.tools.results.kinds.patterns import PatternsResult
from dilkit.tools.results.kinds.published import PublishedResult
from dilkit.tools.results.kinds.ranks import RanksResult
from dilkit.tools.results.kinds.serving import ServingResult
from dilkit.tools.results.kinds.slides import SlidesResult
from dilkit.tools.results.record import Result


@dataclass(frozen=True)
class Kind:
    """A kind of result. The functions `document` and `sentence` of the module `words` take a result of type `record`."""

    record: type[Result]
    words: Any


KINDS = {
    record.KIND: Kind(record, words)
    for record, words in (
        (PublishedResult, published),
        (CpuResult, cpu),
        (GpuResult, gpu),
        (GpuDayResult, gpu_day),
        (RanksResult, ranks),
        (OrdersResult, orders),
        (SlidesResult, slides),
        (ServingResult, serving),
        (PatternsResult, patterns),
        (BenchResult, bench),
        (OverheadResult, overhead),
        (DemoResult, demo),
        (ImageDemoResult, demo_image),
        (LlamaDemoResult, llama),
        (KernelsResult, kernels),
    )
}
"""By name, in the order in which docs/measurements.md lists them."""


def read(path: Path) -> Result:
    """The result in `path`. Raises `ResultError`."""
    name = read_json(path)["kind"]
    if name not in KINDS:
        raise ResultError(path, f"a result of kind {name[:40]!r}; known are {', '.join(KINDS)}")
    return read_result(path, KINDS[name].record)


def document_of(path: Path) -> Document:
    """The document of the result in `path`. Raises `ResultError` also for values that no measurement has."""
    found: Document = _words(path, "document")
    return found


def sentence_of(path: Path) -> str:
    """The sentence on the result in `path`. Raises `ResultError` as `document_of` does."""
    return str(_words(path, "sentence"))


def _words(path: Path, what: str) -> Any:
    result = read(path)
    try:
        return getattr(KINDS[result.kind].words, what)(result)
    except (ValueError, ArithmeticError, LookupError) as error:
        raise ResultError(path, f"holds values that no measurement has ({error}); run the command again") from None


def sections_of(paths: Sequence[Path]) -> list[Section]:
    """A section for each file, in this order. Raises `ResultError`."""
    stems, sections = [path.stem for path in paths], []
    for path in paths:
        result, name = read(path), path.stem if stems.count(path.stem) == 1 else str(path)
        sections.append(Section(visible(name), result.kind, result.command, document_of(path)))
    return sections
