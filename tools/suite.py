"""A suite: a fixed set of measurements with targets, run as a whole. `dilkit bench --suite NAME`."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from typing import Any

from dilkit.device import probe
from dilkit.tools.arguments import make_folder
from dilkit.tools.interrupt import INTERRUPTED, load_torch

SUITES = ("cpu",)
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
    result = measure(args)
    _write(args, result)
    if result["interrupted"]:
        return INTERRUPTED
    entries = [entry for case in [*result["cases"], *result["dense"], *result["dtypes"]] for entry in case["entries"].values()]
    return 1 if any(entry["verdict"] == "wrong" for entry in entries) else 0


def measure(args: Namespace) -> dict[str, Any]:
    """The result; what was measured before the interruption when there was one."""
    from tqdm import tqdm

    from dilkit.tools import results, suite_cpu, suite_targets

    chosen = {name: value for name, value in dict(repeats=args.repeats, budget=args.budget).items() if value is not None}
    suite = suite_cpu.Suite(quick=args.quick, **chosen)
    lists: dict[str, list[Any]] = {"cases": []}
    steps = list(suite.steps())
    for name, _, _ in steps:
        lists.setdefault(name, [])
    interrupted = False
    with suite_cpu.four_threads() as threads, tqdm(total=len(steps), unit="step", file=sys.stderr, disable=None) as bar:
        try:
            for name, what, take in steps:
                bar.set_description(what)
                lists[name].append(take())
                bar.update()
        except KeyboardInterrupt:
            interrupted = True
    facts = dict(suite=args.suite, isa=suite_cpu.instruction_set(), thread_count=threads, repeats=suite.repeats)
    result = results.new("suite", probe("cpu"), **facts, quick=suite_cpu.QUICK * args.quick, interrupted=interrupted, **lists)
    return result | dict(figures=suite_targets.judge(result))


def _write(args: Namespace, result: dict[str, Any]) -> None:
    from dilkit.tools import results, suite_report

    results.save(result, args.out / "suite.json")
    results.write_text(args.out / "suite.md", f"# dilkit bench --suite {args.suite}\n\n{suite_report.markdown(result)}")
    written = ["suite.json", "suite.md"]
    try:
        suite_report.draw(result, args.out / "suite.png")
        written.append("suite.png")
    except ImportError as error:
        print(f"no picture: {error} (pip install 'dilkit[plot]')", file=sys.stderr)
    print(json.dumps(result, allow_nan=False) if args.json else suite_report.text(result))
    print(f"wrote {', '.join(written)} in {args.out}", file=sys.stderr)
