"""The measured figures of README.md and docs/: read out of the result files in docs/results, never written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilkit.tools.bench import kernels as kernel_report
from dilkit.tools.demo.text import report as demo_report
from dilkit.tools.measure import overhead
from dilkit.tools.report.document import Document, Table
from dilkit.tools.report.kinds import (
    bench_report,
    briefs,
    suite_gpu_report,
    suite_orders_report,
    suite_report,
    suite_ring_report,
    suite_seeds_report,
    told_bench,
    told_image,
    told_orders,
    told_others,
    told_ring,
    told_seeds,
    told_suites,
)
from dilkit.tools.results import measurements as found_in
from dilkit.tools.results import shapes, shapes_orders, shapes_seeds, shapes_suites
from dilkit.tools.results import untyped as results
from dilkit.tools.results.schema import Shape

Result = dict[str, Any]
NOTHING = "Nothing has been measured for this version yet."


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


def summary(folder: Path) -> str:
    """The results in `folder` in short, an item of a list for each, with a link to all of it."""
    found = sorted(read(folder), key=lambda one: list(KINDS).index(one[2]["kind"]))
    items = [f"* [{path.stem}](docs/measurements.md#{path.stem}): {kind.short(result)}" for path, kind, result in found]
    return "\n".join(items) or NOTHING


def measurements(folder: Path) -> str:
    """Every result in `folder` as a whole, with a link to its file, in which all samples are."""
    parts = [
        f"## {path.stem}\n\n{kind.whole(result)}\n\nThe file: [{path.name}](results/{path.name})"
        for path, kind, result in read(folder)
    ]
    return "\n\n".join(parts) or NOTHING


def suite(folder: Path, name: str) -> str:
    """The whole report of a suite."""
    path = folder / f"{name}.json"
    kind, report = SUITES[name]
    whole: str = report.markdown(load(path, kind)[1]) if path.exists() else NOTHING
    return whole


def gpu_suites(folder: Path) -> str:
    """The reports of the GPU suite, one for each device in `folder`; how to make one where there is none."""
    paths = sorted(folder.glob("gpu*.json"))
    if not paths:
        return f"{NOTHING} Where there is a GPU: `dilkit bench --suite gpu`."
    return "\n\n".join(f"## {path.stem}\n\n{suite_gpu_report.markdown(load(path, 'suite-gpu')[1])}" for path in paths)


def draw_suite(folder: Path, name: str, path: Path) -> None:
    """The picture of a suite's result. Raises ImportError where matplotlib is missing."""
    kind, report = SUITES[name]
    report.draw(load(folder / f"{name}.json", kind)[1], path)


def read(folder: Path) -> list[tuple[Path, Kind, Result]]:
    """The result files in `folder`, each with its kind. Raises `results.ResultError` for any other JSON file."""
    return [(path, *load(path)) for path in sorted(folder.glob("*.json"))]


def load(path: Path, kind: str | None = None) -> tuple[Kind, Result]:
    """The result in `path` and its kind, which is `kind` where that is given. Raises `results.ResultError` for any other file."""
    found = results.load(path, kind)
    if found["kind"] not in KINDS:
        raise results.ResultError(path, f"no result of a known kind ({', '.join(KINDS)}); keep other files elsewhere")
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
    return kernel_report.markdown(load(path, "kernels")[1]) if path.exists() else NOTHING


def _figures(result: Result) -> str:
    text: str = SUITES[result["suite"]][1].figures_markdown(result)
    return text


def _demo_whole(result: Result) -> str:
    return demo_report.markdown(result, drawn=False).removeprefix("# dilkit demo").strip().replace("\n## ", "\n### ")


KINDS = {
    "suite-seeds": Kind(shapes_seeds.SUITE_SEEDS, briefs.seeds, _suite_whole, told_seeds.told),
    "suite": Kind(shapes_suites.SUITE, briefs.cpu, _suite_whole, told_suites.told_cpu),
    "suite-gpu": Kind(shapes_suites.SUITE_GPU, briefs.gpu, _suite_whole, told_suites.told_gpu),
    "suite-ring": Kind(shapes_suites.SUITE_RING, briefs.ring, _suite_whole, told_ring.told),
    "suite-orders": Kind(shapes_orders.SUITE_ORDERS, briefs.orders, _suite_whole, told_orders.told),
    "bench": Kind(shapes.BENCH, briefs.bench, _bench_whole, told_bench.told),
    "overhead": Kind(shapes.OVERHEAD, briefs.calls, _overhead, told_bench.told_overhead),
    "demo": Kind(shapes.DEMO, briefs.demo, _demo_whole, told_others.told_demo),
    "demo-image": Kind(shapes_orders.DEMO_IMAGE, briefs.image, told_image.whole, told_image.told),
    "kernels": Kind(shapes.KERNELS, kernel_report.verdict, _kernels_whole, told_others.told_kernels),
}
"""The one place where a kind of result says how it is checked and told; README.md tells them in this order."""
SUITES: dict[str, tuple[str, Any]] = {
    "cpu": ("suite", suite_report),
    "gpu": ("suite-gpu", suite_gpu_report),
    "orders": ("suite-orders", suite_orders_report),
    "ring": ("suite-ring", suite_ring_report),
    "seeds": ("suite-seeds", suite_seeds_report),
}
"""By name: the kind of a suite's result, and the module of its report."""
