"""What trials and mutations found, in docs/results/ptx.json: what is there of the kernels as they are is not run again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ptx.library import ROOT
from ptx.trials import Outcome, Trial

from dilkit.device import probe
from dilkit.tools.bench.ptx.record import Broken, Executed, Key, PTXResult
from dilkit.tools.bench.ptx.sources import digest
from dilkit.tools.results.environment import now
from dilkit.tools.results.file import new_result, read_result, write_result

PLACE = ROOT / "docs/results/ptx.json"


def read(path: Path) -> tuple[list[Executed], list[Broken]]:
    """What is known of the kernels as they are."""
    result = read_result(path, PTXResult) if path.exists() else None
    if result is None:
        return [], []
    return (
        [one for one in result.executed if one.source == digest(one.backend)],
        [one for one in result.broken if one.source == digest(one.backend)],
    )


def write(path: Path, executed: Iterable[Executed], broken: Iterable[Broken]) -> None:
    write_result(new_result(PTXResult, probe("cpu"), executed=tuple(executed), broken=tuple(broken)), path)


def is_known(trial: Trial, executed: Iterable[Executed]) -> bool:
    """Whether it was run, and was not wrong."""
    return any(trial.case_name in (*one.passed, *one.refused) for one in executed if one.key == key_of(trial))


def key_of(trial: Trial) -> Key:
    return trial.backend, trial.listed, trial.architecture, trial.rounded


def brought_up_to_date(known: Iterable[Executed], every: Iterable[Trial], outcomes: Iterable[Outcome]) -> list[Executed]:
    """A row for each group of `every`, with what is known and what was run now."""
    rows = {one.key: one for one in known}
    groups: dict[Key, list[Trial]] = {}
    anew: dict[Key, list[Outcome]] = {}
    for trial in every:
        groups.setdefault(key_of(trial), []).append(trial)
    for outcome in outcomes:
        anew.setdefault(key_of(outcome.trial), []).append(outcome)
    return [_row(key, group, rows.get(key), anew.get(key, [])) for key, group in groups.items()]


def _row(key: Key, group: list[Trial], known: Executed | None, outcomes: list[Outcome]) -> Executed:
    backend, listed, architecture, rounded = key
    of: dict[str, Any] = dict(backend=backend, listed=listed, architecture=architecture, rounded=rounded)
    row = replace(known or Executed(**of, trials=0, source=digest(backend)), trials=len(group))
    anew = {outcome.trial.case_name for outcome in outcomes}
    kept = {trial.case_name for trial in group} - anew
    came: dict[str, list[str]] = dict(
        passed=[name for name in row.passed if name in kept],
        refused=[name for name in row.refused if name in kept],
        wrong=[text for text in row.wrong if text.split(": ", 1)[0] in kept],
    )
    for outcome in outcomes:
        name = outcome.trial.case_name
        kind = "refused" if outcome.skipped else "wrong" if outcome.reason else "passed"
        came[kind].append(f"{name}: --seed {outcome.seed}: {outcome.reason}" if kind == "wrong" else name)
    seconds = round(row.seconds + sum(outcome.seconds for outcome in outcomes), 1)
    fields: dict[str, Any] = {kind: tuple(sorted(names)) for kind, names in came.items()}
    return replace(row, **fields, seconds=seconds, date=now() if outcomes else row.date)
