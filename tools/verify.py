"""`dilkit verify`: every backend on the problem list against the fp64 oracle, forward and gradients."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from dilkit.problem import DTYPES
from dilkit.registry import list_backends
from dilkit.selector import requested_backends
from dilkit.tools.arguments import add_backend_argument, device_here
from dilkit.tools.interrupt import load_torch
from dilkit.tools.problems import PROBLEMS
from dilkit.tools.text import grid, print_json, table

if TYPE_CHECKING:
    from dilkit.tools.conformance import Result

HELP = "check every backend against the fp64 oracle on the problem list"
OUTPUTS = ("out", "lse", "dq", "dk", "dv")

_LEGEND = """\
A number is the worst error against fp64, in units of what plain torch math in the same dtype makes: at most 2 is right,
for gradients 3. -: refused or not computed; FAIL: wrong."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --backend and --device."""
    add_backend_argument(parser, "those to check (default: DILKIT_BACKEND's, else all)")
    parser.add_argument("--device", type=device_here, default="cpu", metavar="cuda:0", help="where to run (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print the tables. 0 = every case that a backend takes is right, 1 = something failed or is broken, or nothing passed."""
    results = _checked(args.backend or requested_backends() or list_backends(), args.device)
    report = collect(results, args.device)
    if args.json:
        print_json("verify", report)
    else:
        print("\n".join(_lines(report)))
    return 0 if report["right"] else 1


def collect(results: list[Result], device: str) -> dict[str, Any]:
    """The results as plain data: for each backend its counts, tables of worst ratios, refusals and failures."""
    by_backend: dict[str, list[Result]] = {}
    for result in results:
        by_backend.setdefault(result.backend, []).append(result)
    judged = {name: _judged(own) for name, own in by_backend.items()}
    counts = Counter(result.verdict for result in results)
    right = counts["passed"] > 0 and not counts["failed"] and not counts["broken"]
    return dict(device=device, cases=len(PROBLEMS), right=right, backends=judged)


def _checked(backends: tuple[str, ...], device: str) -> list[Result]:
    load_torch()
    from tqdm import tqdm

    from dilkit.tools.conformance import check

    todo = [(backend, case) for case in PROBLEMS for backend in backends]  # case by case: the oracle's results are used at once
    progress = tqdm(todo, file=sys.stderr, disable=not sys.stderr.isatty(), unit="check", leave=False)
    return [check(backend, case, device) for backend, case in progress]


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
    return [*lines, "", *_LEGEND.splitlines(), "every result is right" if report["right"] else "NOT every result is right"]


def _shown(cell: dict[str, Any]) -> str:
    return f"FAIL {_number(cell['worst'])}" if cell.get("failed") else _number(cell["worst"])


def _number(ratio: float | str | None) -> str:
    return "-" if ratio is None else ratio if isinstance(ratio, str) else f"{ratio:.2f}"
