"""`dilkit verify`: every backend on the problem list against the fp64 oracle, forward and gradients."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
"""The large cases that are computed again and again."""
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
    on_cuda = args.device.startswith("cuda")
    repeats = (REPEATS if on_cuda else 0) if args.repeats is None else args.repeats
    large = [case for case in LARGE if args.large or on_cuda or (repeats and case.variant in REPEATED)]
    cases = cases_of(args.pattern, args.seq, args.heads) if args.pattern else (*LISTED, *large)
    chosen = args.backend or requested_backends()
    with without_proofs(), _one_by_one(on_cuda and not chosen) as kernels:
        results = list(checked(chosen or (*list_backends(), *kernels), cases, args.device))
        differing = repeated(results, args.device, repeats) if repeats else {}
    by_backend = {name: Judged([r for r in results if r.backend == name]) for name in dict.fromkeys(r.backend for r in results)}
    counts = Counter(result.verdict for result in results)
    idle = [name for name in args.backend or () if not by_backend[name].counts["passed"]]
    right = counts["passed"] > 0 and not idle and not counts["failed"] and not counts["broken"] and not any(differing.values())
    if args.json:
        judged = {name: one.to_dict() for name, one in by_backend.items()}
        again = dict(times=repeats, differing=differing)
        print_json("verify", dict(device=args.device, cases=len(cases), right=right, backends=judged, repeats=again))
        return 0 if right else 1
    headline = f"{len(cases)} cases on {args.device}, forward and gradients, against the fp64 oracle"
    tables = [table for name, one in by_backend.items() for table in one.tables(name)]
    notes = [note for name, one in by_backend.items() for note in one.notes(name)]
    for name, count in differing.items():
        said = f"{count} DIFFER" if count else "equal in every bit"
        notes.append(f"{name}: large cases computed {repeats} times more: {said}")
    notes += [f"{name}: NOTHING was computed" for name in idle]
    verdict = "every result is right" if right else "NOT every result is right"
    print(document_text(Document((headline,), tuple(tables), notes=tuple(notes), method=f"{LEGEND}\n{verdict}")))
    return 0 if right else 1


def _one_by_one(wanted: bool) -> AbstractContextManager[tuple[str, ...]]:
    from dilkit.backends.sdpa.one_kernel import one_kernel_backends

    return one_kernel_backends("cuda") if wanted else nullcontext(())


def checked(backends: Sequence[str], cases: Sequence[Case], device: str) -> Iterator[Result]:
    """What becomes of each backend on each case."""
    from tqdm import tqdm

    from dilkit.testing.conformance import check

    todo = [(backend, case) for case in cases for backend in backends]  # case by case: the oracle's results are used at once
    progress = tqdm(todo, file=sys.stderr, disable=not sys.stderr.isatty(), unit="check", leave=False)
    yield from (check(backend, case, device) for backend, case in progress)


def repeated(results: Sequence[Result], device: str, repeats: int) -> dict[str, int]:
    """Of each backend that promises equal bits: how many computations of large cases differed from the first of their case.

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


@dataclass(frozen=True)
class Judged:
    """What became of one backend."""

    results: list[Result]

    @property
    def counts(self) -> dict[str, int]:
        """Cases by verdict."""
        by_verdict = Counter(result.verdict for result in self.results)
        return {verdict: by_verdict[verdict] for verdict in ("passed", "refused", "failed", "broken")}

    @property
    def refusals(self) -> dict[str, int]:
        """How many cases were refused for which reasons."""
        return dict(Counter("; ".join(r.reasons) for r in self.results if r.verdict in ("refused", "broken")))

    @property
    def raised(self) -> dict[str, list[Result]]:
        """The cases in which it raised, by the line of its code that did."""
        by_line: dict[str, list[Result]] = {}
        for result in self.results:
            if result.raised_in:
                by_line.setdefault(result.raised_in[-1], []).append(result)
        return by_line

    @property
    def failures(self) -> dict[str, tuple[str, ...]]:
        """Cases that it got wrong, and in what."""
        return {r.case.name: r.reasons for r in self.results if r.verdict == "failed"}

    def by_feature(self) -> dict[str, dict[str, list[Result]]]:
        """The results by feature and dtype."""
        features = dict.fromkeys(result.case.feature for result in self.results)
        return {f: {d: [r for r in self.results if (r.case.feature, r.case.dtype) == (f, d)] for d in DTYPES} for f in features}

    def by_output(self) -> dict[str, dict[str, float | None]]:
        """The worst error ratios by output and dtype; None where nothing was computed."""
        return {o: {d: _worst(r.ratios.get(o) for r in self.results if r.case.dtype == d) for d in DTYPES} for o in OUTPUTS}

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON, which has no word for infinity but as text."""
        cells = {
            feature: {
                d: {**Counter(r.verdict for r in found), "worst": _plain(_worst_of(found))} for d, found in by_dtype.items()
            }
            for feature, by_dtype in self.by_feature().items()
        }
        outputs = {output: {d: _plain(worst) for d, worst in found.items()} for output, found in self.by_output().items()}
        failures = [dict(case=case, reasons=reasons) for case, reasons in self.failures.items()]
        raised = [dict(traceback="".join(rs[0].raised_in), cases=[r.case.name for r in rs]) for rs in self.raised.values()]
        wrong = dict(failures=failures, raised=raised)
        return dict(counts=self.counts, by_feature=cells, by_output=outputs, refusals=self.refusals, **wrong)

    def tables(self, name: str) -> Iterator[Table]:
        """The worst error ratios, where something was computed."""
        if self.counts["passed"] or self.counts["failed"]:
            rows: list[Row] = [(feature, *map(_cell, found.values())) for feature, found in self.by_feature().items()]
            rows += [(f"all {output}", *map(_number, worst.values())) for output, worst in self.by_output().items()]
            counts = ", ".join(f"{n} {verdict}" for verdict, n in self.counts.items() if n)
            yield Table(f"{name}: {counts}", ("worst error", *DTYPES), tuple(rows))

    def notes(self, name: str) -> Iterator[str]:
        """What was refused, what is wrong, and what was raised, each place once."""
        reasons = Counter(reason for r in self.results if r.verdict in ("refused", "broken") for reason in r.reasons)
        yield from (f"{name}: {times} refused: {reason}" for reason, times in reasons.most_common())
        wrong = (r for r in self.results if r.verdict == "failed" and not r.raised_in)
        yield from (f"FAIL {name}, {result.case.name}: {'; '.join(result.reasons)}" for result in wrong)
        for first, *others in self.raised.values():
            more = f" and {len(others):,} more" if others else ""
            yield f"FAIL {name}, {first.case.name}{more}: {'; '.join(first.reasons)}\n{''.join(first.raised_in).rstrip()}"


def _worst(ratios: Iterable[float | None]) -> float | None:
    return max((ratio for ratio in ratios if ratio is not None), default=None)


def _worst_of(results: Iterable[Result]) -> float | None:
    return _worst(result.worst for result in results if result.ratios)


def _cell(results: list[Result]) -> str:
    return f"{'FAIL ' if any(r.verdict == 'failed' for r in results) else ''}{_number(_worst_of(results))}"


def _number(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _plain(ratio: float | None) -> float | str | None:
    return "inf" if ratio == float("inf") else ratio
