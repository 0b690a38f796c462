"""`dilkit verify`: every backend on the problem list against the fp64 oracle, forward and gradients."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dilkit.problem import DTYPES
from dilkit.registry import backends as known_backends
from dilkit.registry import list_backends
from dilkit.selector import requested_backends
from dilkit.tools.console.arguments import add_backend_argument, device_here, whole
from dilkit.tools.console.interrupt import load_torch
from dilkit.tools.console.text import print_json
from dilkit.tools.report.document import Document, Table
from dilkit.tools.report.terminal import document_text
from dilkit.tools.results.decode import encode
from dilkit.tools.verify.problems import LARGE, PROBLEMS

if TYPE_CHECKING:
    from dilkit.tools.verify.conformance import Result
    from dilkit.tools.verify.problems import Case

HELP = """\
check every backend against the fp64 oracle on the problem list

On a CUDA device each of torch's kernels is checked by itself too (sdpa:flash and so on), the list goes on with larger cases, and
backends that promise equal bits run after run are held to it. Exit code 1 when anything is wrong."""
OUTPUTS = ("out", "lse", "dq", "dk", "dv")
REPEATS = 100
REPEATED = ("causal", "head_dim 128")
"""The large cases that are computed again and again."""
LEGEND = (
    "A number is the worst error against fp64, in units of what plain torch math in the same dtype makes: at most 2 is right, "
    "for gradients 3. -: refused or not computed; FAIL: wrong."
)
Ratio = float | str | None
"""An error ratio; None where nothing was computed, "inf" where it is infinite, which JSON cannot say otherwise."""


@dataclass(frozen=True)
class Failed:
    """A case that a backend got wrong."""

    case: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Judged:
    """What became of one backend: worst ratios by feature and by output, for each dtype; how often each refusal was met."""

    counts: dict[str, int]
    by_feature: dict[str, dict[str, dict[str, Ratio]]]
    by_output: dict[str, dict[str, Ratio]]
    refusals: dict[str, int]
    failures: list[Failed]


@dataclass(frozen=True)
class Repeats:
    """How often large cases were computed anew, and how many of these differed in a bit from the first, by backend."""

    times: int
    differing: dict[str, int]


@dataclass(frozen=True)
class Report:
    """All that was checked."""

    device: str
    cases: int
    right: bool
    backends: dict[str, Judged]
    repeats: Repeats


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --backend, --device, --large and --repeats."""
    add_backend_argument(parser, "those to check (default: DILKIT_BACKEND's, else all)")
    parser.add_argument("--device", type=device_here, default="cpu", metavar="cuda:0", help="where to run (default %(default)s)")
    parser.add_argument("--large", action="store_true", help="larger cases too: on a CPU they take minutes (on CUDA always)")
    repeats = f"how often to compute a large case anew and compare bits (default {REPEATS} on CUDA, else 0)"
    parser.add_argument("--repeats", type=whole(0), metavar="N", help=repeats)


def run(args: argparse.Namespace) -> int:
    """Print the tables. 0 = every case that a backend takes is right, 1 = something failed or is broken, or nothing passed."""
    load_torch()
    on_cuda = args.device.startswith("cuda")
    repeats = (REPEATS if on_cuda else 0) if args.repeats is None else args.repeats
    large = [case for case in LARGE if args.large or on_cuda or (repeats and case.variant in REPEATED)]
    cases = (*PROBLEMS, *large)
    chosen = args.backend or requested_backends()
    with _one_by_one(on_cuda and not chosen) as kernels:
        results = _checked(chosen or (*list_backends(), *kernels), cases, args.device)
        differing = _repeated(results, args.device, repeats) if repeats else {}
    by_backend = {name: [r for r in results if r.backend == name] for name in dict.fromkeys(r.backend for r in results)}
    counts = Counter(result.verdict for result in results)
    right = counts["passed"] > 0 and not counts["failed"] and not counts["broken"] and not any(differing.values())
    judged = {name: _judged(own) for name, own in by_backend.items()}
    report = Report(args.device, len(cases), right, judged, Repeats(repeats, differing))
    if args.json:
        print_json("verify", encode(report))
    else:
        print(document_text(document(report)))
    return 0 if right else 1


def _one_by_one(wanted: bool) -> AbstractContextManager[tuple[str, ...]]:
    from dilkit.tools.verify.one_kernel import one_kernel_backends

    return one_kernel_backends("cuda") if wanted else nullcontext(())


def _checked(backends: tuple[str, ...], cases: tuple[Case, ...], device: str) -> list[Result]:
    from tqdm import tqdm

    from dilkit.tools.verify.conformance import check

    todo = [(backend, case) for case in cases for backend in backends]  # case by case: the oracle's results are used at once
    progress = tqdm(todo, file=sys.stderr, disable=not sys.stderr.isatty(), unit="check", leave=False)
    return [check(backend, case, device) for backend, case in progress]


def _repeated(results: list[Result], device: str, repeats: int) -> dict[str, int]:
    """Of each backend that promises equal bits: how many computations of large cases differed from the first of their case.

    Cases that it got wrong are left out: they have failed already.
    """
    from tqdm import tqdm

    from dilkit.tools.verify.conformance import repeats_that_differ

    known = known_backends()
    again = [r for r in results if r.case in LARGE and r.case.variant in REPEATED and r.verdict == "passed"]
    todo = [(r.backend, r.case) for r in again if getattr(known[r.backend], "reproducible", False)]
    found: dict[str, int] = {}
    for name, case in tqdm(todo, file=sys.stderr, disable=not sys.stderr.isatty(), unit="case", leave=False):
        found[name] = found.get(name, 0) + repeats_that_differ(name, case, device, repeats)
    return found


def _judged(results: list[Result]) -> Judged:
    counts = Counter(result.verdict for result in results)
    of = {(f, d): [r for r in results if (r.case.feature, r.case.dtype) == (f, d)] for f in _features(results) for d in DTYPES}
    ratios = {(o, d): [r.ratios[o] for r in results if r.case.dtype == d and o in r.ratios] for o in OUTPUTS for d in DTYPES}
    return Judged(
        counts={verdict: counts[verdict] for verdict in ("passed", "refused", "failed", "broken")},
        by_feature={feature: {d: _cell(of[feature, d]) for d in DTYPES} for feature in _features(results)},
        by_output={output: {d: _worst(ratios[output, d]) for d in DTYPES} for output in OUTPUTS},
        refusals=dict(Counter("; ".join(r.reasons) for r in results if r.verdict in ("refused", "broken"))),
        failures=[Failed(r.case.name, r.reasons) for r in results if r.verdict == "failed"],
    )


def _features(results: list[Result]) -> list[str]:
    return list(dict.fromkeys(result.case.feature for result in results))


def _cell(results: list[Result]) -> dict[str, Ratio]:
    return {
        **Counter(result.verdict for result in results),
        "worst": _worst([result.worst for result in results if result.ratios]),
    }


def _worst(ratios: Sequence[float]) -> Ratio:
    worst = max(ratios, default=None)
    return "inf" if worst == float("inf") else worst


def document(report: Report) -> Document:
    """The report for people: a table for each backend that computed something, notes on what was refused or wrong."""
    tables, notes = [], []
    for name, judged in report.backends.items():
        counts = ", ".join(f"{n} {verdict}" for verdict, n in judged.counts.items() if n)
        if judged.counts["passed"] or judged.counts["failed"]:
            tables.append(Table(f"{name}: {counts}", ("worst error", *DTYPES), tuple(_rows(judged))))
        notes += [f"{name}: {times} refused: {reason}" for reason, times in judged.refusals.items()]
        notes += [f"FAIL {name}, {failed.case}: {'; '.join(failed.reasons)}" for failed in judged.failures]
    again = ((name, f"{count} DIFFER" if count else "equal in every bit") for name, count in report.repeats.differing.items())
    notes += [f"{name}: large cases computed {report.repeats.times} times more: {said}" for name, said in again]
    headline = f"{report.cases} cases on {report.device}, forward and gradients, against the fp64 oracle"
    verdict = "every result is right" if report.right else "NOT every result is right"
    return Document((headline,), tuple(tables), notes=tuple(notes), method=f"{LEGEND}\n{verdict}")


def _rows(judged: Judged) -> Iterator[tuple[str, ...]]:
    for feature, cells in judged.by_feature.items():
        yield feature, *(f"{'FAIL ' if cells[d].get('failed') else ''}{_number(cells[d]['worst'])}" for d in DTYPES)
    for output, worst in judged.by_output.items():
        yield f"all {output}", *(_number(worst[d]) for d in DTYPES)


def _number(ratio: Ratio) -> str:
    return f"{ratio:.2f}" if isinstance(ratio, float) else ratio or "-"
