"""What each version measured: the figures of its suites alone, in a file of docs/results/history that is named after it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dilkit.tools.results.decode import DecodeError, decode, encode
from dilkit.tools.results.file import ResultError, read_json, write_text
from dilkit.tools.results.rows import Figure, RowsResult

KIND = "history"


@dataclass(frozen=True, kw_only=True)
class PastFigure:
    """A figure as a version had it: the worst of its values. `lower`: less is better."""

    name: str
    value: float
    unit: str = ""
    lower: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run of a suite found on one machine."""

    suite: str
    machine: str
    date: str
    torch: str
    git_revision: str | None = None
    figures: tuple[PastFigure, ...]


@dataclass(frozen=True, kw_only=True)
class Version:
    """The runs that a version published and none before it had."""

    schema: int = 1
    kind: str = KIND
    version: str
    runs: tuple[Run, ...]


def runs_of(result: RowsResult) -> Iterator[Run]:
    """The run of `result`, if it has figures."""
    at = result.environment
    if figures := tuple(_past(result.figures)):
        yield Run(
            suite=result.suite,
            machine=f"{result.machine}, {at.cores} cores",
            date=result.date,
            torch=at.torch,
            git_revision=at.git_revision,
            figures=figures,
        )


def _past(figures: Iterable[object]) -> Iterator[PastFigure]:
    """Those that have a value."""
    for figure in figures:
        if isinstance(figure, Figure) and (worst := figure.worst) is not None:
            yield PastFigure(name=figure.name, value=worst, unit=figure.unit, lower=figure.lower)


def unpublished(runs: Iterable[Run], past: Iterable[Version]) -> tuple[Run, ...]:
    """Those of `runs` that no version has: a result that a later version carries on unchanged is one of the earlier."""
    known = {(run.suite, run.machine, run.date) for version in past for run in version.runs}
    return tuple(run for run in runs if (run.suite, run.machine, run.date) not in known)


def read_versions(folder: Path) -> list[Version]:
    """The versions of the files in `folder`, the oldest first. Raises `ResultError` for one that is no such file."""
    versions = [_read(path) for path in folder.glob("*.json")]
    return sorted(versions, key=lambda version: tuple(map(int, version.version.split("."))))


def _read(path: Path) -> Version:
    data = read_json(path)
    try:
        version = decode(Version, data)
    except DecodeError as error:
        raise ResultError(path, f"{error}: not a version's figures") from None
    if version.kind != KIND or version.version != path.stem or not version.version.replace(".", "").isdecimal():
        raise ResultError(
            path, f"the {version.kind[:40]} of version {version.version[:40]!r}; the file is named after its version"
        )
    return version


def write_version(version: Version, folder: Path) -> None:
    """Write the file of `version` into `folder`."""
    write_text(folder / f"{version.version}.json", json.dumps(encode(version), indent=1, allow_nan=False) + "\n")
