"""Every kind of result: its record, the document that is made of it, and the sentence that docs/measurements.md has of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilkit.checks import visible
from dilkit.tools.bench.costs import document as costs
from dilkit.tools.bench.costs.record import CostsResult
from dilkit.tools.bench.cpu import document as cpu
from dilkit.tools.bench.cpu.record import CpuResult
from dilkit.tools.bench.gpu import document as gpu
from dilkit.tools.bench.gpu.record import GpuResult
from dilkit.tools.bench.hosts import document as hosts
from dilkit.tools.bench.hosts.record import HostsResult
from dilkit.tools.bench.kernels import document as kernels
from dilkit.tools.bench.kernels.record import KernelsResult
from dilkit.tools.bench.one_pattern import document as one_pattern
from dilkit.tools.bench.one_pattern.record import BenchResult
from dilkit.tools.bench.orders import document as orders
from dilkit.tools.bench.orders.record import OrdersResult
from dilkit.tools.bench.overhead import document as overhead
from dilkit.tools.bench.overhead.record import OverheadResult
from dilkit.tools.bench.patterns import document as patterns
from dilkit.tools.bench.patterns.record import PatternsResult
from dilkit.tools.bench.ptx import document as ptx
from dilkit.tools.bench.ptx.record import PTXResult
from dilkit.tools.bench.published import document as published
from dilkit.tools.bench.published.record import PublishedResult
from dilkit.tools.bench.ranks import document as ranks
from dilkit.tools.bench.ranks.record import RanksResult
from dilkit.tools.bench.scores import document as scores
from dilkit.tools.bench.scores.record import ScoresResult
from dilkit.tools.bench.serving import document as serving
from dilkit.tools.bench.serving.record import ServingResult
from dilkit.tools.bench.slides import document as slides
from dilkit.tools.bench.slides.record import SlidesResult
from dilkit.tools.demo.image import document as image_demo
from dilkit.tools.demo.image.record import ImageDemoResult
from dilkit.tools.demo.llama import document as llama_demo
from dilkit.tools.demo.llama.record import LlamaDemoResult
from dilkit.tools.demo.ranks import document as ranks_demo
from dilkit.tools.demo.ranks.record import RanksDemoResult
from dilkit.tools.demo.text import document as text_demo
from dilkit.tools.demo.text.record import DemoResult
from dilkit.tools.finetuning import document as finetuning
from dilkit.tools.finetuning.record import FinetuneResult
from dilkit.tools.gpu_day import document as gpu_day
from dilkit.tools.gpu_day.record import GpuDayResult
from dilkit.tools.report.document import Document, Section
from dilkit.tools.results.file import ResultError, read_json, read_result
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
        (HostsResult, hosts),
        (OrdersResult, orders),
        (SlidesResult, slides),
        (ServingResult, serving),
        (PatternsResult, patterns),
        (ScoresResult, scores),
        (BenchResult, one_pattern),
        (OverheadResult, overhead),
        (DemoResult, text_demo),
        (ImageDemoResult, image_demo),
        (LlamaDemoResult, llama_demo),
        (RanksDemoResult, ranks_demo),
        (KernelsResult, kernels),
        (PTXResult, ptx),
        (CostsResult, costs),
        (FinetuneResult, finetuning),
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
    document: Document = _words(path, "document")
    return document


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
