"""`dilkit verify`: every backend on the problem list against the fp64 oracle, forward and gradients."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from dilkit.environment import without_proofs
from dilkit.problem import DTYPES
from dilkit.registry import backends as known_backends
from dilkit.registry import list_backends
from dilkit.selector import requested_backends
from dilkit.testing.packings import SEQUENCES
from dilkit.testing.problems import DROPPING, LARGE, OTHER_KINDS, PROBLEMS, SCORES, cases_of
from dilkit.tools.console.arguments import add_backend_argument, add_written_pattern, device_here, whole
from dilkit.tools.console.interrupt import load_torch
from dilkit.tools.console.text import print_json
from dilkit.tools.report.document import Document, Row, Table
from dilkit.tools.report.terminal import document_text

if TYPE_CHECKING:
    from dilkit.testing.conformance import Result
    from dilkit.testing.problems import Case

HELP = """\
check every backend against the fp64 oracle on the problem list

On a CUDA device each of torch's kernels is checked by itself too (sdpa:flash and so on), the list goes on with larger cases, and
backends that promise equal bits run after run are held to it. With --pattern that pattern is checked instead of the list, with
every feature of a call. Exit code 1 when anything is wrong, or when a backend that --backend names computes no case at all."""
LISTED = (*PROBLEMS, *SEQUENCES, *DROPPING, *OTHER_KINDS, *SCORES)
OUTPUTS = ("out", "lse", "dq", "dk", "dv", "dsink")
REPEATS = 100
REPEATED = ("causal", "head_dim 128")
"""Large cases that are computed again and again."""
LEGEND = (
    "A number is the worst error against fp64, in units of what plain torch math in the same dtype makes: at most 2 is right, "
    "for gradients 3. -: refused or not computed; FAIL: wrong."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --backend, --device, --pattern, --seq, --heads, --large and --repeats."""
    add_backend_argument(parser, "those to check (default: DILKIT_BACKEND's, else all)")
    parser.add_argument("--device", type=device_here, default="cpu", metavar="cuda:0", help="where to run (default %(default)s)")
    add_written_pattern(parser, "one pattern instead of the problem list: ")
    parser.add_argument("--seq", type=whole(1), default=48, metavar="N", help="tokens with --pattern (default %(default)s)")
    parser.add_argument("--heads", type=whole(1), default=4, metavar="H", help="query heads with --pattern (default %(default)s)")
    parser.add_argument("--large", action="store_true", help="larger cases too: on a CPU they take minutes (on CUDA always)")
    repeats = f"how often to compute a large case anew and compare bits (default {REPEATS} on CUDA, else 0)"
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
    by_backend = {name: judged([r for r in results if r.backend == name]) for name in dict.fromkeys(r.backend for r in results)}
    counts = Counter(result.verdict for result in results)
    idle = [name for name in args.backend or () if not by_backend[name]["counts"]["passed"]]
    right = counts["passed"] > 0 and not idle and not counts["failed"] and not counts["broken"] and not any(differing.values())
    if args.json:
        again = dict(times=repeats, differing=differing)
        print_json("verify", dict(device=args.device, cases=len(cases), right=right, backends=by_backend, repeats=again))
        return 0 if right else 1
    headline = f"{len(cases)} cases on {args.device}, forward and gradients, against the fp64 oracle"
    notes = [note for name in by_backend for note in _notes([r for r in results if r.backend == name], name)]
    for name, count in differing.items():
        bits = f"{count} DIFFER" if count else "equal in every bit"
        notes.append(f"{name}: large cases computed {repeats} times more: {bits}")
    notes += [f"{name}: NOTHING was computed" for name in idle]
    verdict = "every result is right" if right else "NOT every result is right"
    shown = tuple(_table(name, one) for name, one in by_backend.items() if one["counts"]["passed"] or one["counts"]["failed"])
    print(document_text(Document((headline,), shown, notes=tuple(notes), method=f"{LEGEND}\n{verdict}")))
    return 0 if right else 1


def checked(backends: Sequence[str], cases: Sequence[Case], device: str) -> Iterator[Result]:
    """Yield the result of each backend on each case."""
    from tqdm import tqdm

    from dilkit.testing.conformance import check

    todo = [(backend, case) for case in cases for backend in backends]  # case by case: the oracle's results are used at once
    progress = tqdm(todo, file=sys.stderr, disable=not sys.stderr.isatty(), unit="check", leave=False)
    yield from (check(backend, case, device) for backend, case in progress)


def repeated(results: Sequence[Result], device: str, repeats: int) -> dict[str, int]:
    """Return for each backend that promises equal bits the computations of large cases that differ from the first of their case.

    Cases that it got wrong are left out: they have failed already.
    """
    from tqdm import tqdm

    from dilkit.testing.conformance import repeats_that_differ

    known = known_backends()
    again = [r for r in results if r.case in LARGE and r.case.variant in REPEATED and r.verdict == "passed"]
    todo = [(r.backend, r.case) for r in again if getattr(known[r.backend], "reproducible", False)]
    differing: dict[str, int] = {}
    for name, case in tqdm(todo, file=sys.stderr, disable=not sys.stderr.isatty(), unit="case", leave=False):
        differing[name] = differing.get(name, 0) + repeats_that_differ(name, case, device, repeats)
    return differing


def judged(results: Sequence[Result]) -> dict[str, Any]:
    """Return what the results of one backend amount to, as plain data for JSON."""
    by_verdict = Counter(result.verdict for result in results)
    cells: dict[str, dict[str, Any]] = {}
    for feature in dict.fromkeys(result.case.feature for result in results):
        for dtype in DTYPES:
            alike = [r for r in results if (r.case.feature, r.case.dtype) == (feature, dtype)]
            worst = _worst(r.worst for r in alike if r.ratios)
            cells.setdefault(feature, {})[dtype] = {**Counter(r.verdict for r in alike), "worst": worst}
    outputs = {o: {d: _worst(r.ratios.get(o) for r in results if r.case.dtype == d) for d in DTYPES} for o in OUTPUTS}
    failures = {r.case.name: r.reasons for r in results if r.verdict == "failed"}
    return dict(
        counts={verdict: by_verdict[verdict] for verdict in ("passed", "refused", "failed", "broken")},
        by_feature=cells,
        by_output=outputs,
        refusals=Counter("; ".join(r.reasons) for r in results if r.verdict in ("refused", "broken")),
        failures=[dict(case=case, reasons=reasons) for case, reasons in failures.items()],
        raised=[dict(traceback="".join(one[0].raised_in), cases=[r.case.name for r in one]) for one in _raised(results)],
    )


def _worst(ratios: Iterable[float | None]) -> float | str | None:
    """Return the largest ratio; infinity as text, for which JSON has no other word; None if there are none."""
    worst = max((ratio for ratio in ratios if ratio is not None), default=None)
    return "inf" if worst == float("inf") else worst


def _raised(results: Sequence[Result]) -> Iterable[list[Result]]:
    """Return the cases in which a backend raised, grouped by the line of its code that did."""
    by_line: dict[str, list[Result]] = {}
    for result in results:
        if result.raised_in:
            by_line.setdefault(result.raised_in[-1], []).append(result)
    return by_line.values()


def _table(name: str, one: dict[str, Any]) -> Table:
    """Return the worst error ratios of a backend."""

    def number(ratio: float | str | None) -> str:
        return "-" if ratio is None else ratio if isinstance(ratio, str) else f"{ratio:.2f}"

    rows: list[Row] = []
    for feature, by_dtype in one["by_feature"].items():
        rows.append((feature, *("FAIL " * ("failed" in cell) + number(cell["worst"]) for cell in by_dtype.values())))
    rows += [(f"all {output}", *map(number, by_dtype.values())) for output, by_dtype in one["by_output"].items()]
    counts = ", ".join(f"{n} {verdict}" for verdict, n in one["counts"].items() if n)
    return Table(f"{name}: {counts}", ("worst error", *DTYPES), tuple(rows))


def _notes(results: Sequence[Result], name: str) -> Iterator[str]:
    """Yield refusals, wrong results, and errors, each line of code once."""
    reasons = Counter(reason for r in results if r.verdict in ("refused", "broken") for reason in r.reasons)
    yield from (f"{name}: {times} refused: {reason}" for reason, times in reasons.most_common())
    wrong = (r for r in results if r.verdict == "failed" and not r.raised_in)
    yield from (f"FAIL {name}, {result.case.name}: {'; '.join(result.reasons)}" for result in wrong)
    for first, *others in _raised(results):
        more = f" and {len(others):,} more" if others else ""
        yield f"FAIL {name}, {first.case.name}{more}: {'; '.join(first.reasons)}\n{''.join(first.raised_in).rstrip()}"
