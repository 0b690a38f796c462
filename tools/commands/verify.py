"""`dilkit verify`: every backend on the problem list against the fp64 oracle, forward and gradients."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from dilkit.environment import without_proofs
from dilkit.problem import DTYPES
from dilkit.registry import backends as known_backends, list_backends
from dilkit.selector import requested_backends
from dilkit.testing.packings import SEQUENCES
from dilkit.testing.problems import DROPPING, LARGE, OTHER_KINDS, PROBLEMS, SCORES, cases_of
from dilkit.tools.console.arguments import add_backend_argument, add_written_pattern, device_here, whole
from dilkit.tools.console.interrupt import load_torch
from dilkit.tools.console.progress import progress
from dilkit.tools.console.text import print_json
from dilkit.tools.report.document import Document, Row, Table
from dilkit.tools.report.terminal import document_text

if TYPE_CHECKING:
    from dilkit.testing.conformance import CaseResult
    from dilkit.testing.problems import Case

HELP = """\
check every backend against the fp64 oracle on the problem list

On a CUDA device each of torch's kernels is checked by itself too, larger cases follow, and backends that promise equal bits are
held to it. --pattern checks that pattern in place of the list, with every feature of a call. Exit code 1 when anything is wrong,
or when a backend that --backend names computes no case at all."""
LISTED = (*PROBLEMS, *SEQUENCES, *DROPPING, *OTHER_KINDS, *SCORES)
OUTPUTS, VERDICTS = ("out", "lse", "dq", "dk", "dv", "dsink"), ("passed", "refused", "failed", "broken")
REPEATS = 100
REPEATED = ("causal", "head_dim 128")
"""Large cases that are computed again and again."""
SHOWN = 10
"""Failures of a backend that are printed."""
LEGEND = (
    "A number is the worst error against fp64, in units of what plain torch math in the same dtype makes: at most 2 is right, "
    "for gradients 3. -: refused or not computed. --json has them by feature and by output, and all reasons."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_backend_argument(parser, "those to check (default: DILKIT_BACKEND's, else all)")
    parser.add_argument("--device", type=device_here, default="cpu", metavar="cuda:0", help="where to run (default %(default)s)")
    add_written_pattern(parser, "one pattern instead of the problem list: ")
    parser.add_argument("--seq", type=whole(1), default=48, metavar="N", help="tokens with --pattern (default %(default)s)")
    parser.add_argument("--heads", type=whole(1), default=4, metavar="H", help="query heads with --pattern (default %(default)s)")
    parser.add_argument("--large", action="store_true", help="larger cases too: on a CPU they take minutes (on CUDA always)")
    repeats = f"times to compute a large case anew and compare bits (default {REPEATS} on CUDA, else 0)"
    parser.add_argument("--repeats", type=whole(0), metavar="N", help=repeats)


def run(args: argparse.Namespace) -> int:
    """Print the tables. 0 = every case that a backend takes is right, 1 = something failed or is broken, or nothing passed.

    1 also when nothing passed of a backend that is named.
    """
    load_torch()
    from dilkit.backends.sdpa.one_kernel import one_kernel_backends

    on_cuda = args.device.startswith("cuda")
    repeats = (REPEATS if on_cuda else 0) if args.repeats is None else args.repeats
    large = [case for case in LARGE if args.large or on_cuda or (repeats and case.variant in REPEATED)]
    cases = cases_of(args.pattern, args.seq, args.heads) if args.pattern else (*LISTED, *large)
    chosen = args.backend or requested_backends()
    one_by_one = one_kernel_backends("cuda") if on_cuda and not chosen else nullcontext(())
    with without_proofs(), one_by_one as kernels:
        results = list(checked(chosen or (*list_backends(), *kernels), cases, args.device))
        differing = repeated(results, args.device, repeats) if repeats else {}
    names = dict.fromkeys(result.backend for result in results)
    reports = {name: report_of([result for result in results if result.backend == name]) for name in names}
    counts = Counter(result.verdict for result in results)
    idle = [name for name in args.backend or () if not reports[name]["counts"]["passed"]]
    right = counts["passed"] > 0 and not idle and not counts["failed"] and not counts["broken"] and not any(differing.values())
    if args.json:
        again = dict(times=repeats, differing=differing)
        print_json("verify", dict(device=args.device, cases=len(cases), right=right, backends=reports, repeats=again))
        return 0 if right else 1
    headline = f"{len(cases)} cases on {args.device}, forward and gradients, against the fp64 oracle"
    notes = [note for name, report in reports.items() for note in _notes(name, report)]
    for name, count in differing.items():
        bits = f"{count} DIFFER" if count else "equal in every bit"
        notes.append(f"{name}: large cases computed {repeats} times more: {bits}")
    notes += [f"{name}: NOTHING was computed" for name in idle]
    verdict = "every result is right" if right else "NOT every result is right"
    shown = Table("worst errors", ("", *VERDICTS, *DTYPES), tuple(_row(name, one) for name, one in reports.items()))
    print(document_text(Document((headline,), (shown,), notes=tuple(notes), method=f"{LEGEND}\n{verdict}")))
    return 0 if right else 1


def checked(backends: Sequence[str], cases: Sequence[Case], device: str) -> Iterator[CaseResult]:
    from dilkit.testing.conformance import check

    todo = [(backend, case) for case in cases for backend in backends]  # case by case: the oracle's results are used at once
    yield from (check(backend, case, device) for backend, case in progress(todo, unit="check"))


def repeated(results: Sequence[CaseResult], device: str, repeats: int) -> dict[str, int]:
    """Return for each backend that promises equal bits the computations of large cases that differ from the first of their case.

    Cases that it got wrong are left out: they have failed already.
    """
    from dilkit.testing.conformance import repeats_that_differ

    known = known_backends()
    again = [r for r in results if r.case in LARGE and r.case.variant in REPEATED and r.verdict == "passed"]
    todo = [(r.backend, r.case) for r in again if getattr(known[r.backend], "reproducible", False)]
    differing: dict[str, int] = {}
    for name, case in progress(todo, unit="check"):
        differing[name] = differing.get(name, 0) + repeats_that_differ(name, case, device, repeats)
    return differing


def report_of(results: Sequence[CaseResult]) -> dict[str, Any]:
    """Return the results of one backend as plain data for JSON."""
    by_verdict = Counter(result.verdict for result in results)
    cells: dict[str, dict[str, Any]] = {}
    for feature in dict.fromkeys(result.case.feature for result in results):
        for dtype in DTYPES:
            alike = [r for r in results if (r.case.feature, r.case.dtype) == (feature, dtype)]
            worst = _worst(r.worst for r in alike if r.ratios)
            cells.setdefault(feature, {})[dtype] = {**Counter(r.verdict for r in alike), "worst": worst}
    raised: dict[str, list[CaseResult]] = {}  # by the line of code that did
    for result in results:
        if result.raised_in:
            raised.setdefault(result.raised_in[-1], []).append(result)
    return dict(
        counts={verdict: by_verdict[verdict] for verdict in VERDICTS},
        by_feature=cells,
        by_output={o: {d: _worst(r.ratios.get(o) for r in results if r.case.dtype == d) for d in DTYPES} for o in OUTPUTS},
        refusals=Counter("; ".join(r.reasons) for r in results if r.verdict in ("refused", "broken")),
        failures=[dict(case=r.case.name, reasons=r.reasons) for r in results if r.verdict == "failed"],
        raised=[dict(traceback="".join(one[0].raised_in), cases=[r.case.name for r in one]) for one in raised.values()],
    )


def _worst(ratios: Iterable[float | None]) -> float | str | None:
    """Return the largest ratio; infinity as text, for which JSON has no other word; None if there are none."""
    worst = max((ratio for ratio in ratios if ratio is not None), default=None)
    return "inf" if worst == float("inf") else worst


def _row(name: str, report: dict[str, Any]) -> Row:
    worst = [[one[dtype]["worst"] for one in report["by_feature"].values()] for dtype in DTYPES]
    shown = [_worst(float(ratio) for ratio in ratios if ratio is not None) for ratios in worst]
    return (name, *map(str, report["counts"].values()), *("-" if x is None else x if x == "inf" else f"{x:.2f}" for x in shown))


def _notes(name: str, report: dict[str, Any]) -> Iterator[str]:
    """Yield the most frequent refusal, wrong results, and errors, each line of code once."""
    yield from (f"{name}: {times} refused: {reason}" for reason, times in report["refusals"].most_common(1))
    places = {place["cases"][0]: place for place in report["raised"]}
    repeated_errors = {case for place in report["raised"] for case in place["cases"][1:]}
    failures = [one for one in report["failures"] if one["case"] not in repeated_errors]
    for failure in failures[:SHOWN]:
        case, place = failure["case"], places.get(failure["case"])
        more = f" and {len(place['cases']) - 1:,} more" if place and len(place["cases"]) > 1 else ""
        traceback = f"\n{place['traceback'].rstrip()}" if place else ""
        yield f"FAIL {name}, {case}{more}: {'; '.join(failure['reasons'])}{traceback}"
    if failures[SHOWN:]:
        failed = {feature: sum(cell.get("failed", 0) for cell in row.values()) for feature, row in report["by_feature"].items()}
        features = ", ".join(f"{feature} {count:,}" for feature, count in failed.items() if count)
        yield f"FAIL {name}: {len(failures) - SHOWN:,} more, which --json lists; all by feature: {features}"
