"""Every kind of result: its record, the document that is made of it, and the sentence that docs/measurements.md has of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dilkit.tools.console.text import visible
from dilkit.tools.report.document import Document, Section
from dilkit.tools.report.kinds import bench, cpu, demo, demo_image, gpu, kernels, orders, overhead, ranks
from dilkit.tools.report.kinds.published import document as published
from dilkit.tools.results.file import ResultError, read_json, read_result
from dilkit.tools.results.kinds.bench import BenchResult
from dilkit.tools.results.kinds.cpu import CpuResult
from dilkit.tools.results.kinds.demo import DemoResult
from dilkit.tools.results.kinds.demo_image import ImageDemoResult
from dilkit.tools.results.kinds.gpu import GpuResult
from dilkit.tools.results.kinds.kernels import KernelsResult
from dilkit.tools.results.kinds.orders import OrdersResult
from dilkit.tools.results.kinds.overhead import OverheadResult
from dilkit.tools.results.kinds.published import PublishedResult
from dilkit.tools.results.kinds.ranks import RanksResult
from dilkit.tools.results.record import Result

T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """A kind of result. `document` and `sentence` take a result of type `record`."""

    record: type[Result]
    document: Callable[[Any], Document]
    sentence: Callable[[Any], str]


KINDS = {
    kind.record.KIND: kind
    for kind in (
        Kind(PublishedResult, published.document, published.sentence),
        Kind(CpuResult, cpu.document, cpu.sentence),
        Kind(GpuResult, gpu.document, gpu.sentence),
        Kind(RanksResult, ranks.document, ranks.sentence),
        Kind(OrdersResult, orders.document, orders.sentence),
        Kind(BenchResult, bench.document, bench.sentence),
        Kind(OverheadResult, overhead.document, overhead.sentence),
        Kind(DemoResult, demo.document, demo.sentence),
        Kind(ImageDemoResult, demo_image.document, demo_image.sentence),
        Kind(KernelsResult, kernels.document, kernels.sentence),
    )
}  # fmt: skip
"""By name, in the order in which docs/measurements.md lists them."""


def read(path: Path) -> tuple[Kind, Result]:
    """The result in `path` and its kind. Raises `ResultError`."""
    name = read_json(path)["kind"]
    if name not in KINDS:
        raise ResultError(path, f"a result of kind {name[:40]!r}; known are {', '.join(KINDS)}")
    kind = KINDS[name]
    return kind, read_result(path, kind.record)


def document_of(path: Path) -> Document:
    """The document of the result in `path`. Raises `ResultError` also for values that no measurement has."""
    kind, result = read(path)
    return _made(path, kind.document, result)


def sentence_of(path: Path) -> str:
    """The sentence on the result in `path`. Raises `ResultError` as `document_of` does."""
    kind, result = read(path)
    return _made(path, kind.sentence, result)


def _made(path: Path, make: Callable[[Any], T], result: Result) -> T:
    try:
        return make(result)
    except (ValueError, ArithmeticError, LookupError) as error:
        raise ResultError(path, f"holds values that no measurement has ({error}); run the command again") from None


def sections_of(paths: Sequence[Path]) -> list[Section]:
    """A section for each file, in this order. Raises `ResultError`."""
    stems = [path.stem for path in paths]
    names = [path.stem if stems.count(path.stem) == 1 else str(path) for path in paths]
    found = [(read(path)[1], document_of(path)) for path in paths]
    pairs = zip(names, found, strict=True)
    return [Section(visible(name), result.kind, result.command, document) for name, (result, document) in pairs]
