"""A suite: a fixed set of measurements with targets, run as a whole. `dilkit bench --suite NAME`."""

from __future__ import annotations

import importlib
import json
import sys
from argparse import Namespace
from typing import Any

from dilkit.device import probe
from dilkit.tools.arguments import make_folder
from dilkit.tools.interrupt import INTERRUPTED, load_torch

SUITES = {
    "cpu": "dilkit.tools.suite_cpu",
    "gpu": "dilkit.tools.suite_gpu",
    "orders": "dilkit.tools.suite_orders",
    "ring": "dilkit.tools.suite_ring",
}
"""The modules of the suites. Each has `Suite(quick, repeats, budget)` with `steps()`, `LISTS`, `prepared()`, `judge`, `REPORT`,
`wrong`, `QUICK`, `KIND` and `DEVICE`."""
FITTING = ("suite", "quick", "repeats", "budget", "out", "json")
"""The arguments that go with --suite; the suite itself decides on everything else."""


def run(args: Namespace, defaults: dict[str, Any]) -> int:
    """Measure, write suite.json, suite.md and suite.png into `args.out`, print the tables; exit codes as of `dilkit bench`.

    Raises ValueError for an argument that differs from its default and does not go with a suite.
    """
    for name, value in vars(args).items():
        if name not in FITTING and value != defaults[name]:
            raise ValueError(f"--{name.replace('_', '-')}: does not go with --suite, which decides on it; leave it out")
    make_folder("--out", args.out)
    load_torch()
    suite = importlib.import_module(SUITES[args.suite])
    result = measure(suite, args)
    _write(suite.REPORT, args, result)
    if result["interrupted"]:
        return INTERRUPTED
    return 1 if suite.wrong(result) else 0


def measure(suite: Any, args: Namespace) -> dict[str, Any]:
    """The result; what was measured before the interruption when there was one. `suite`: one of the modules of `SUITES`."""
    from tqdm import tqdm

    from dilkit.tools import results

    chosen = {name: value for name, value in dict(repeats=args.repeats, budget=args.budget).items() if value is not None}
    plan = suite.Suite(quick=args.quick, **chosen)
    lists: dict[str, list[Any]] = {name: [] for name in suite.LISTS}
    steps = list(plan.steps())
    interrupted = False
    with suite.prepared() as facts, tqdm(total=len(steps), unit="step", file=sys.stderr, disable=None) as bar:
        try:
            for name, what, take in steps:
                bar.set_description(what)
                lists[name].append(take())
                bar.update()
        except KeyboardInterrupt:
            interrupted = True
        told = dict(suite=args.suite, repeats=plan.repeats, **facts)
        told |= dict(quick=suite.QUICK * args.quick, interrupted=interrupted)
        result = results.new(suite.KIND, probe(suite.DEVICE), **told, **lists)
    return result | dict(figures=suite.judge(result))


def _write(report: Any, args: Namespace, result: dict[str, Any]) -> None:
    from dilkit.tools import results

    results.save(result, args.out / "suite.json")
    results.write_text(args.out / "suite.md", f"# dilkit bench --suite {args.suite}\n\n{report.markdown(result)}")
    written = ["suite.json", "suite.md"]
    try:
        report.draw(result, args.out / "suite.png")
        written.append("suite.png")
    except ImportError as error:
        print(f"no picture: {error} (pip install 'dilkit[plot]')", file=sys.stderr)
    print(json.dumps(result, allow_nan=False) if args.json else report.text(result))
    print(f"wrote {', '.join(written)} in {args.out}", file=sys.stderr)
