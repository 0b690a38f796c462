"""`dilkit verify`: every backend on the problem list against the fp64 oracle, forward and gradients."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from dilkit.problem import DTYPES
from dilkit.registry import backends as known_backends
from dilkit.registry import list_backends
from dilkit.selector import requested_backends
from dilkit.tools.console.arguments import add_backend_argument, device_here, whole
from dilkit.tools.console.interrupt import load_torch
from dilkit.tools.console.text import grid, print_json, table
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

_LEGEND = """\
A number is the worst error against fp64, in units of what plain torch math in the same dtype makes: at most 2 is right,
for gradients 3. -: refused or not computed; FAIL: wrong."""


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
        names = chosen or (*list_backends(), *kernels)
        results = _checked(names, cases, args.device)
        report = collect(results, args.device, len(cases))
        report["repeats"] = dict(times=repeats, differing=_repeated(results, args.device, repeats) if repeats else {})
    report["right"] = report["right"] and not any(report["repeats"]["differing"].values())
    if args.json:
        print_json("verify", report)
    else:
        print("\n".join(_lines(report)))
    return 0 if report["right"] else 1


def _one_by_one(wanted: bool) -> AbstractContextManager[tuple[str, ...]]:
    from dilkit.tools.verify.one_kernel import one_kernel_backends

    return one_kernel_backends("cuda") if wanted else nullcontext(())


def collect(results: list[Result], device: str, cases: int) -> dict[str, Any]:
    """The results as plain data: for each backend its counts, tables of worst ratios, refusals and failures."""
    by_backend: dict[str, list[Result]] = {}
    for result in results:
        by_backend.setdefault(result.backend, []).append(result)
    judged = {name: _judged(own) for name, own in by_backend.items()}
    counts = Counter(result.verdict for result in results)
    right = counts["passed"] > 0 and not counts["failed"] and not counts["broken"]
    return dict(device=device, cases=cases, right=right, backends=judged)


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


def _judged(results: list[Result]) -> dict[str, Any]:
    counts = Counter(result.verdict for result in results)
    features = list(dict.fromkeys(result.case.feature for result in results))
    return dict(
        counts={verdict: counts[verdict] for verdict in ("passed", "refused", "failed", "broken")},
        by_feature={
            f: {d: _cell([r for r in results if (r.case.feature, r.case.dtype) == (f, d)]) for d in DTYPES} for f in features
        },
        by_output={
            o: {d: _worst([r.ratios[o] for r in results if r.case.dtype == d and o in r.ratios]) for d in DTYPES} for o in OUTPUTS
        },
        refusals=dict(Counter("; ".join(r.reasons) for r in results if r.verdict in ("refused", "broken"))),
        failures=[dict(case=r.case.name, reasons=list(r.reasons)) for r in results if r.verdict == "failed"],
    )


def _cell(results: list[Result]) -> dict[str, Any]:
    counts = Counter(result.verdict for result in results)
    return {**counts, "worst": _worst([result.worst for result in results if result.ratios])}


def _worst(ratios: list[float]) -> float | str | None:
    """The largest ratio; None without any, "inf" for one that is infinite, which JSON cannot say otherwise."""
    worst = max(ratios, default=None)
    return "inf" if worst == float("inf") else worst


def _lines(report: dict[str, Any]) -> list[str]:
    lines = [f"{report['cases']} cases on {report['device']}, forward and gradients, against the fp64 oracle"]
    for name, judged in report["backends"].items():
        counts = ", ".join(f"{n} {verdict}" for verdict, n in judged["counts"].items() if n)
        lines += ["", f"{name}: {counts}"]
        if judged["counts"]["passed"] or judged["counts"]["failed"]:
            rows = [(feature, [_shown(cells[d]) for d in DTYPES]) for feature, cells in judged["by_feature"].items()]
            rows += [("", [""] * len(DTYPES))]
            rows += [(f"all {output}", [_number(cells[d]) for d in DTYPES]) for output, cells in judged["by_output"].items()]
            lines += grid("worst error", DTYPES, rows)
        lines += table((f"{times} refused", reason) for reason, times in judged["refusals"].items())
        lines += table((f"FAIL {f['case']}", "\n".join(f["reasons"])) for f in judged["failures"])
    for name, differing in report["repeats"]["differing"].items():
        said = "equal in every bit" if not differing else f"{differing} DIFFER"
        lines += ["", f"{name}: large cases computed {report['repeats']['times']} times more: {said}"]
    return [*lines, "", *_LEGEND.splitlines(), "every result is right" if report["right"] else "NOT every result is right"]


def _shown(cell: dict[str, Any]) -> str:
    return f"FAIL {_number(cell['worst'])}" if cell.get("failed") else _number(cell["worst"])


def _number(ratio: float | str | None) -> str:
    return "-" if ratio is None else ratio if isinstance(ratio, str) else f"{ratio:.2f}"
