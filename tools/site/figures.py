"""The measured figures of README.md and docs/: read out of the result files in docs/results, never written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilkit.tools.bench import kernels as kernel_report
from dilkit.tools.measure import overhead
from dilkit.tools.report import registry
from dilkit.tools.report.document import Document, Table
from dilkit.tools.report.kinds import (
    bench_report,
    briefs,
    suite_gpu_report,
    told_bench,
    told_others,
    told_suites,
)
from dilkit.tools.report.markdown import document_markdown, escaped, table_markdown
from dilkit.tools.report.picture import write_png
from dilkit.tools.results import measurements as found_in
from dilkit.tools.results import shapes, shapes_suites
from dilkit.tools.results import untyped as results
from dilkit.tools.results.file import read_json
from dilkit.tools.results.schema import Shape

Result = dict[str, Any]
NOTHING = "Nothing has been measured for this version yet."
ORDER = (
    *("suite-seeds", "suite", "suite-gpu", "suite-ring", "suite-orders"),
    *("bench", "overhead", "demo", "demo-image", "kernels"),
)
"""Kinds in the order in which the page of measurements lists them."""
MOST_ROWS = 24
"""Of a table that stands on docs/measurements.md beside a link to the whole."""


@dataclass(frozen=True)
class Kind:
    """A kind of result file: the shape that it must have, its texts in the docs, in short and whole, and what a report tells.

    A kind that has no tables and plots of its own is told as a list of everything that was measured.
    """

    shape: Shape
    short: Callable[[Result], str]
    whole: Callable[[Result], str]
    tell: Callable[[Result], Document] = lambda result: tell_measurements(result)


def tell_measurements(result: Result) -> Document:
    """Where it was measured, and every measurement."""
    table = Table.of("All measurements", found_in.rows(result, shapes.SAMPLES))
    return Document((f"{result['kind']}: {result['command']}", told_bench.where(result)), (table,))


def is_typed(path: Path) -> bool:
    """Whether the kind of the result in `path` is in the registry. Raises `results.ResultError`."""
    return read_json(path)["kind"] in registry.KINDS


def summary(folder: Path) -> str:
    """The results in `folder` in short, an item of a list for each, with a link to its section of the page of measurements."""
    paths = sorted(sorted(folder.glob("*.json")), key=_place)
    items = [f"* [{path.stem}](#{path.stem}): {sentence(path)}" for path in paths]
    return "\n".join(items) or NOTHING


def _place(path: Path) -> int:
    kind = read_json(path)["kind"]
    return ORDER.index(kind) if kind in ORDER else len(ORDER)


def sentence(path: Path) -> str:
    """A result in a sentence or two."""
    if not is_typed(path):
        kind, found = load(path)
        return kind.short(found)
    return registry.sentence_of(path)


def measurements(folder: Path) -> str:
    """Every result in `folder`, with a link to its file, in which all samples are."""
    parts = [
        f"## {path.stem}\n\n{_shown(path)}\n\nThe file: [{path.name}](results/{path.name})"
        for path in sorted(folder.glob("*.json"))
    ]
    return "\n\n".join(parts) or NOTHING


def _shown(path: Path) -> str:
    """A document as a whole; of one that has a page of its own the headline, the first table if it is short, and a link."""
    if not is_typed(path):
        kind, found = load(path)
        return kind.whole(found)
    document = registry.document_of(path)
    page = path.with_suffix(".md")
    if not page.exists():
        return document_markdown(document, level=3)
    parts = ["  \n".join(map(escaped, document.headline))]
    parts += [table_markdown(table) for table in document.tables[:1] if len(table.rows) <= MOST_ROWS]
    return "\n\n".join([*parts, f"All measurements: [{page.name}](results/{page.name})"])


def whole(folder: Path, name: str) -> str:
    """The whole document of the result `name`."""
    path = folder / f"{name}.json"
    return document_markdown(registry.document_of(path)) if path.exists() else NOTHING


def suite(folder: Path, name: str) -> str:
    """The whole report of a suite."""
    path = folder / f"{name}.json"
    if not path.exists() or is_typed(path):
        return whole(folder, name)
    kind, report = SUITES[name]
    text: str = report.markdown(load(path, kind)[1])
    return text


def gpu_suites(folder: Path) -> str:
    """The reports of the GPU suite, one for each device in `folder`; how to make one where there is none."""
    paths = sorted(folder.glob("gpu*.json"))
    if not paths:
        return f"{NOTHING} Where there is a GPU: `dilkit bench --suite gpu`."
    return "\n\n".join(f"## {path.stem}\n\n{_gpu_suite(path)}" for path in paths)


def _gpu_suite(path: Path) -> str:
    if is_typed(path):
        return document_markdown(registry.document_of(path), level=3)
    return suite_gpu_report.markdown(load(path, "suite-gpu")[1])


def draw_suite(folder: Path, name: str, path: Path) -> None:
    """The picture of a suite's result. Raises ImportError where matplotlib is missing."""
    source = folder / f"{name}.json"
    if is_typed(source):
        write_png(registry.document_of(source).plots[:MOST_PLOTS], path)
    else:
        kind, report = SUITES[name]
        report.draw(load(source, kind)[1], path)


def load(path: Path, kind: str | None = None) -> tuple[Kind, Result]:
    """The result in `path` and its kind, which is `kind` where that is given. Raises `results.ResultError` for any other file."""
    found = results.load(path, kind)
    if found["kind"] not in KINDS:
        raise results.ResultError(path, f"no result of a known kind ({', '.join(ORDER)}); keep other files elsewhere")
    known = KINDS[found["kind"]]
    if complaint := known.shape(found, ""):
        raise results.ResultError(path, f"{complaint}: not what dilkit writes; run the command again")
    return known, found


def _bench_whole(result: Result) -> str:
    return bench_report.markdown(result).removeprefix("# dilkit bench").strip()


def _overhead(result: Result) -> str:
    return f"```text\n{overhead.text(result)}\n```"


def _suite_whole(result: Result) -> str:
    return f"{_figures(result)}\n\nAll measurements: [{result['suite']}.md](results/{result['suite']}.md)"


def _kernels_whole(result: Result) -> str:
    return f"{kernel_report.verdict(result)}\n\nAll registers: [kernels.md](results/kernels.md)"


def kernels(folder: Path) -> str:
    """The table of what the compiler makes of the CUDA kernels."""
    path = folder / "kernels.json"
    if not path.exists() or is_typed(path):
        return whole(folder, "kernels")
    return kernel_report.markdown(load(path, "kernels")[1])


def _figures(result: Result) -> str:
    text: str = SUITES[result["suite"]][1].figures_markdown(result)
    return text


KINDS = {
    "suite-gpu": Kind(shapes_suites.SUITE_GPU, briefs.gpu, _suite_whole, told_suites.told_gpu),
    "bench": Kind(shapes.BENCH, briefs.bench, _bench_whole, told_bench.told),
    "overhead": Kind(shapes.OVERHEAD, briefs.calls, _overhead, told_bench.told_overhead),
    "kernels": Kind(shapes.KERNELS, kernel_report.verdict, _kernels_whole, told_others.told_kernels),
}
"""The kinds that are not in the registry yet: how each is checked and told."""
SUITES: dict[str, tuple[str, Any]] = {
    "gpu": ("suite-gpu", suite_gpu_report),
}
"""By name: the kind of a suite's result, and the module of its report, where it is not in the registry yet."""
