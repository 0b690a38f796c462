"""Runs a suite, step by step. What was measured is on disk after every step, so that `--resume` can go on from there."""

from argparse import Namespace
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from dilkit.device import device_named
from dilkit.tools.bench.suite import Suite, SuiteStep
from dilkit.tools.console.arguments import make_folder
from dilkit.tools.console.interrupt import INTERRUPTED
from dilkit.tools.console.progress import progress
from dilkit.tools.results.decode import encode
from dilkit.tools.results.environment import now
from dilkit.tools.results.file import new_result, read_result, write_result
from dilkit.tools.results.rows import RowsResult

FILE = "suite.json"
BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} to go"


def run(suite: Suite, args: Namespace, changed: dict[str, str]) -> int:
    """Measure `suite` with the options `args`, write suite.json, .md and .png into `args.out`, print the report.

    `changed` are the options that are not at their defaults, by their names in `args`. Returns the exit code of `dilkit bench`.
    Raises ValueError for an option that does not go with the suite, and for a file that cannot be gone on from.
    """
    options = [field.name for field in fields(suite) if field.metadata.get("option", True)]
    for name, option in changed.items():
        if name not in (*options, "suite", "resume", "out", "against"):
            raise ValueError(f"{option}: does not go with --suite {suite.NAME}; leave it out")
    make_folder("--out", args.out)
    from dilkit.tools.report.files import publish

    chosen = {name: getattr(args, name) for name in options}
    suite = replace(suite, **{name: value for name, value in chosen.items() if value is not None})
    result = measure(suite, encode(chosen), args.out, args.resume)
    publish(result, args.out, "suite", f"dilkit bench --suite {suite.NAME}", args.json)
    return INTERRUPTED if result.interrupted else int(suite.wrong(result))


def measure(suite: Suite, chosen: dict[str, Any], folder: Path, resume: bool) -> RowsResult:
    """Return the result; after Ctrl-C, of the steps that were done until then."""
    steps = list(suite.steps())
    total = sum(step.weight for step in steps)
    with suite.prepared() as facts, progress(total=total, bar_format=BAR) as bar:
        result = begin(suite, steps, chosen, facts)
        if resume:
            result = _go_on(result, folder / FILE)
        bar.update(sum(step.weight for step in steps[: result.done]))
        try:
            for step in steps[result.done :]:
                bar.set_description(f"{result.done + 1}/{len(steps)} {step.what}")
                result = replace(result, rows=(*result.rows, *step.measure()), done=result.done + 1)
                _keep(suite, replace(result, interrupted=True), folder)
                bar.update(step.weight)
        except KeyboardInterrupt:
            pass
        return _keep(suite, replace(result, interrupted=result.done < len(steps)), folder)


def begin(suite: Suite, steps: list[SuiteStep], chosen: dict[str, Any], facts: dict[str, Any]) -> RowsResult:
    """Return the result of a run that has measured nothing yet."""
    plan = dict(suite=suite.NAME, repeats=suite.repeats, quick=suite.sizes.divisor * suite.quick, chosen=chosen)
    names = tuple((step.table, step.what) for step in steps)
    return new_result(RowsResult, device_named(suite.where()), kind=suite.kind(), facts=facts, **plan, steps=names)


def _keep(suite: Suite, result: RowsResult, folder: Path) -> RowsResult:
    result = replace(result, date=now(), figures=suite.figures(result))
    write_result(result, folder / FILE)
    return result


def _go_on(result: RowsResult, path: Path) -> RowsResult:
    """Return `result` with what an earlier run has left in `path`. Raises ValueError where that was another kind of run."""
    if not path.exists():
        raise ValueError(f"--resume: there is no {path} to go on from; leave --resume out")
    before = read_result(path, RowsResult, result.kind)
    fault, way_out = f"--resume: {path} is of another", "leave --resume out, or name another folder with --out"
    for what, here, there in (
        ("device", _machine(result), _machine(before)),
        ("options", result.chosen, before.chosen),
        ("method", dict(timed=result.facts.get("timed")), dict(timed=before.facts.get("timed"))),
    ):
        if differing := [name for name in here | there if here.get(name) != there.get(name)]:
            shown = ", ".join(f"{name} {there.get(name)}, here {here.get(name)}" for name in differing)
            raise ValueError(f"{fault} {what} ({shown}); {way_out}")
    if result.steps != before.steps:
        raise ValueError(f"{fault} list of steps; {way_out}")
    where = before.environment
    session = dict(date=before.date, git_revision=where.git_revision, git_dirty=where.git_dirty)
    return replace(result, rows=before.rows, done=before.done, earlier=(*before.earlier, session))


def _machine(result: RowsResult) -> dict[str, Any]:
    where = {name: getattr(result.environment, name) for name in ("device_name", "cores", "torch", "dilkit")}
    return where | dict(isa=result.facts.get("isa"))
