"""Every kind of result: its record, its document and its sentence."""

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from dilkit.checks import visible
from dilkit.tools.bench.suites import SUITES, suite
from dilkit.tools.report.document import Document, Section
from dilkit.tools.results.environment import Result
from dilkit.tools.results.file import ResultError, read_json, read_result
from dilkit.tools.results.rows import RowsResult

KINDS = {f"suite-{name}": f"bench.suites.{name}" for name in SUITES} | {
    "suite-gpu-day": "bench.suites.gpu_day",
    "bench": "bench.one_pattern",
    "overhead": "bench.overhead",
    "demo": "demo.text",
    "demo-image": "demo.image",
    "demo-llama": "demo.llama",
    "demo-ranks": "demo.ranks",
    "kernels": "bench.suites.kernels",
    "ptx": "bench.suites.ptx",
    "costs": "bench.suites.costs",
    "finetune-slide": "commands.finetune_slide",
}
"""The module below `dilkit.tools` of each, in the order in which docs/measurements.md lists them: with a `REPORT`, or
with a `RECORD` and functions `document` and `sentence`."""


def words(kind: str) -> Any:
    """Return what has the functions `document` and `sentence` of results of this kind."""
    module = import_module(f"dilkit.tools.{KINDS[kind]}")
    return getattr(module, "REPORT", module)


def read(path: Path) -> Result:
    """Return the result in `path`, without figures that its suite no longer has. Raises `ResultError`."""
    data = read_json(path)
    name = data["kind"]
    if name not in KINDS:
        raise ResultError(path, f"a result of kind {name[:40]!r}; known are {', '.join(KINDS)}")
    record: type[Result] = getattr(words(name), "RECORD", RowsResult)
    result = read_result(path, record, name)
    if isinstance(result, RowsResult) and result.suite in SUITES:
        known = {target.name for target in suite(result.suite).TARGETS}
        result = replace(result, figures=tuple(figure for figure in result.figures if figure.name in known))
    return result


def document_of(*paths: Path) -> Document:
    """Return the document of the result in a file, or of several machines' results side by side. Raises `ResultError`."""
    document: Document = _words(paths, "document")
    return document


def sentence_of(*paths: Path) -> str:
    """Return the sentence on the results in files. Raises `ResultError`."""
    return str(_words(paths, "sentence"))


def _words(paths: Sequence[Path], what: str) -> Any:
    results = [read(path) for path in paths]
    try:
        return getattr(words(results[0].kind), what)(*results)
    except (ValueError, ArithmeticError, LookupError) as error:
        raise ResultError(paths[0], f"holds values that no measurement has ({error}); run the command again") from None


def sections_of(paths: Sequence[Path]) -> list[Section]:
    """Return a section for each file, in this order. Raises `ResultError`."""
    stems, sections = [path.stem for path in paths], []
    for path in paths:
        result, name = read(path), path.stem if stems.count(path.stem) == 1 else str(path)
        sections.append(Section(visible(name), result.kind, result.command, document_of(path)))
    return sections
