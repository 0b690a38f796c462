"""A suite: a fixed set of measurements, run as a whole. `dilkit bench --suite NAME`.

After every step what was measured is on disk, so that a run that is interrupted, or dies, can go on from there with --resume.
"""

from __future__ import annotations

import importlib
import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dilkit.device import Device, probe
from dilkit.tools.console.arguments import make_folder
from dilkit.tools.console.interrupt import INTERRUPTED, load_torch

SUITES = {
    "cpu": "dilkit.tools.bench.cpu",
    "gpu": "dilkit.tools.bench.gpu",
}
"""The modules of the suites. Each has `Suite(quick, repeats, budget)` with `steps()`, `LISTS`, `prepared()`, `judge`, `REPORT`,
`wrong`, `QUICK`, `KIND` and `DEVICE`; and `OPTIONS`, the names of further arguments that its `Suite` takes, where it has any. A
step is (the list of the result that it goes to, what is going on, the measurement); a fourth part, where there is one, says how
long it takes in comparison with the others."""
FITTING = ("suite", "quick", "repeats", "budget", "resume", "out", "json")
"""The arguments that go with --suite; the suite itself decides on everything else."""
FILE = "suite.json"


def run(args: Namespace, defaults: dict[str, Any]) -> int:
    """Measure, write suite.json, suite.md and suite.png into `args.out`, print the tables; exit codes as of `dilkit bench`.

    Raises ValueError for an argument that differs from its default and does not go with a suite, and for a file that cannot be
    gone on from.
    """
    suite = importlib.import_module(SUITES[args.suite])
    fitting = (*FITTING, *getattr(suite, "OPTIONS", ()))
    for name, value in vars(args).items():
        if name not in fitting and value != defaults[name]:
            raise ValueError(f"--{name.replace('_', '-')}: does not go with --suite {args.suite}; leave it out")
    make_folder("--out", args.out)
    load_torch()
    result = measure(suite, args)
    _write(suite.REPORT, args, result)
    if result["interrupted"]:
        return INTERRUPTED
    return 1 if suite.wrong(result) else 0


def measure(suite: Any, args: Namespace) -> dict[str, Any]:
    """The result; what was measured before the interruption when there was one. `suite`: one of the modules of `SUITES`.

    What is measured is in suite.json in `args.out` after every step, as of a run interrupted there.
    """
    from tqdm import tqdm

    from dilkit.tools.results import untyped as results

    plan, chosen = _plan(suite, args)
    steps = list(plan.steps())
    shape = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} to go"
    with (
        suite.prepared() as facts,
        tqdm(total=sum(map(_weight, steps)), file=sys.stderr, disable=None, bar_format=shape) as bar,
    ):
        result = results.new(suite.KIND, _device(suite, args), suite=args.suite, repeats=plan.repeats, **facts)
        result |= dict(quick=suite.QUICK * args.quick, chosen=chosen, steps=[[name, what] for name, what, *_ in steps])
        result |= _begun(result, suite, args.out / FILE) if args.resume else dict.fromkeys(suite.LISTS) | dict(done=0, earlier=[])
        result |= {name: result[name] or [] for name in suite.LISTS}
        bar.update(sum(map(_weight, steps[: result["done"]])))
        try:
            for name, what, take, *_ in steps[result["done"] :]:
                bar.set_description(f"{result['done'] + 1}/{len(steps)} {what}")
                row = take()
                result = result | {name: [*result[name], row], "done": result["done"] + 1}  # at once, or not at all
                _keep(suite, args.out, result | dict(interrupted=True))
                bar.update(_weight(steps[result["done"] - 1]))
        except KeyboardInterrupt:
            pass
        return _keep(suite, args.out, result | dict(interrupted=result["done"] < len(steps)))


def _plan(suite: Any, args: Namespace) -> tuple[Any, dict[str, Any]]:
    """The suite's plan, and what was asked of it, as plain data."""
    chosen = dict(quick=args.quick, repeats=args.repeats, budget=args.budget)
    chosen |= {name: getattr(args, name) for name in getattr(suite, "OPTIONS", ())}
    return suite.Suite(**{name: value for name, value in chosen.items() if value is not None}), chosen


def _device(suite: Any, args: Namespace) -> Device:
    kind, _, index = (args.device if "device" in getattr(suite, "OPTIONS", ()) else suite.DEVICE).partition(":")
    return probe(kind, int(index or 0))


def _weight(step: Sequence[Any]) -> float:
    return step[3] if len(step) > 3 else 1.0


def _keep(suite: Any, folder: Path, result: dict[str, Any]) -> dict[str, Any]:
    """`result` with its figures, which is now the file."""
    from dilkit.tools.results import untyped as results

    result = result | dict(date=results.now())
    result |= dict(figures=suite.judge(result))
    results.save(result, folder / FILE)
    return result


def _begun(result: dict[str, Any], suite: Any, path: Path) -> dict[str, Any]:
    """What an earlier run that `result` goes on from has left in `path`. Raises ValueError where it was another kind of run."""
    from dilkit.tools.results import untyped as results

    if not path.exists():
        raise ValueError(f"--resume: there is no {path} to go on from; leave --resume out")
    before = results.load(path, kind=suite.KIND, needs=("steps", "done", "chosen", "earlier", *suite.LISTS))
    here, there = result["environment"], before["environment"]
    for what, now, then in (
        ("device", _machine(here), _machine(there)),
        ("options", result["chosen"], before["chosen"]),
        ("list of steps", result["steps"], before["steps"]),
    ):
        if now != then:
            told = "" if what == "list of steps" else f" ({_shown(then)}; here {_shown(now)})"
            raise ValueError(
                f"--resume: {path} is of another {what}{told}; leave --resume out, or name another folder with --out"
            )
    session = dict(date=before["date"], **{name: there[name] for name in ("git_revision", "git_dirty")})
    kept = {name: before[name] for name in (*suite.LISTS, "done")}
    return kept | dict(earlier=[*before["earlier"], session])


def _machine(where: dict[str, Any]) -> dict[str, Any]:
    return {name: where.get(name) for name in ("device_name", "cores", "torch", "dilkit")}


def _shown(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _write(report: Any, args: Namespace, result: dict[str, Any]) -> None:
    from dilkit.tools.results import untyped as results

    results.write_text(args.out / "suite.md", f"# dilkit bench --suite {args.suite}\n\n{report.markdown(result)}")
    written = [FILE, "suite.md"]
    try:
        report.draw(result, args.out / "suite.png")
        written.append("suite.png")
    except ImportError as error:
        print(f"no picture: {error} (pip install 'dilkit[plot]')", file=sys.stderr)
    print(json.dumps(result, allow_nan=False) if args.json else report.text(result))
    print(f"wrote {', '.join(written)} in {args.out}", file=sys.stderr)
