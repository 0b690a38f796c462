"""What of the kernels' PTX has been executed on the CPU: the result of `tests/ptx/run.py` and `tests/ptx/mutations.py`."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import dilkit.backends
from dilkit.tools.report.document import Axis, Document, Plot, Series, Table, plots, tables
from dilkit.tools.report.headline import place
from dilkit.tools.report.points import plain
from dilkit.tools.results.record import Result

Key = tuple[str, str, str, bool]
"""Backend, list, architecture and rounding of trials."""


@dataclass(frozen=True, kw_only=True)
class Executed:
    """Trials of one list that one backend has for one kind of GPU: how many there are, and what became of those that were run.

    `rounded`: as tensor cores are measured to round. `source`: a digest of the kernels. `date` of the last run, `seconds` of CPU
    time of all. `passed` and `refused`, as on a GPU or by the emulator, are names of cases, `wrong` too, each with its reason.
    """

    backend: str
    listed: str
    architecture: str
    rounded: bool
    trials: int
    source: str
    date: str = ""
    seconds: float = 0.0
    passed: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()

    @property
    def key(self) -> Key:
        """What it is, whatever came of it."""
        return self.backend, self.listed, self.architecture, self.rounded

    @property
    def run(self) -> int:
        """How many trials were run to their end."""
        return len(self.passed) + len(self.wrong)


@dataclass(frozen=True, kw_only=True)
class Broken:
    """Faults that the PTX of a kernel was given: how many were `caught`, or are `explained` as none; others, by name, that live.

    `source`: a digest of the kernels, `machine` of the emulator and of what shows faults of this kernel.
    """

    kernel: str
    backend: str
    source: str
    machine: str
    date: str
    seconds: float
    caught: int
    explained: int
    lives: tuple[str, ...] = ()

    @property
    def tried(self) -> int:
        """How many in all."""
        return self.caught + self.explained + len(self.lives)


@dataclass(frozen=True, kw_only=True)
class PTXResult(Result):
    """Every list of trials of every backend, and the kernels that were broken."""

    KIND: ClassVar[str] = "ptx"

    executed: tuple[Executed, ...] = ()
    broken: tuple[Broken, ...] = ()


BACKENDS = ("cupy_raw", "triton", "numba_cuda")
COLUMNS = ("backend", "architecture", "rounded once", "rounded as measured", "wrong", "refused", "minutes", "last run")
OF_FAULTS = ("kernel", "faults", "caught", "explained", "not noticed", "minutes", "last run")


def sentence(result: PTXResult) -> str:
    """For README.md: how much of what there is has been run, and what was wrong."""
    wrong = sum(len(one.wrong) for one in result.executed if current(one))
    *first, last = (_counted(backend, [one for one in result.executed if one.backend == backend]) for backend in BACKENDS)
    trials = (
        f"The PTX of today's kernels was executed on a CPU, instruction by instruction: {', '.join(first)} and {last}; "
        f"{f'{wrong} are WRONG' if wrong else 'none is wrong'}."
    )
    broken = [one for one in result.broken if current(one)]
    if not broken:
        return trials
    tried, caught, explained = (sum(getattr(one, name) for one in broken) for name in ("tried", "caught", "explained"))
    lives = sum(len(one.lives) for one in broken)
    noticed = f"Of {tried:,} faults put into it {caught:,} were caught and {explained} are explained as harmless"
    return f"{trials} {noticed}{f'; {lives} were NOT CAUGHT' if lives else ''}."


def document(result: PTXResult) -> Document:
    """Trials by backend and kind of GPU, and faults by kernel."""
    groups: dict[tuple[str, str], list[Executed]] = {}
    for one in result.executed:
        groups.setdefault((one.backend, one.architecture), []).append(one)
    faults = (
        (one.kernel, *map(str, (one.tried, one.caught, one.explained, len(one.lives))), *_spent([one]))
        for one in result.broken
        if current(one)
    )
    return Document(
        headline=(sentence(result), place(result)),
        tables=tables(
            Table("Trials, by backend and kind of GPU", COLUMNS, tuple(_row(groups[key]) for key in sorted(groups, key=_order))),
            Table("Faults that the PTX was given, by kernel", OF_FAULTS, tuple(faults)),
        ),
        plots=plots(_bars(groups)),
    )


def current(one: Executed | Broken) -> bool:
    """True if it is of the kernels as they are."""
    return one.source == digest(one.backend)


def _run(group: Iterable[Executed]) -> int:
    return sum(one.run for one in group if current(one))


def _counted(backend: str, group: Sequence[Executed]) -> str:
    """Trials of a backend, and the kinds of GPU for which some were run."""
    kinds = len({one.architecture for one in group if current(one) and one.run})
    counts = f"{_run(group):,} of {sum(one.trials for one in group):,} trials of {backend}"
    return f"{counts} for {kinds} kind{'s' * (kinds != 1)} of GPU" if kinds else counts


def _order(key: tuple[str, str]) -> tuple[int, int]:
    backend, architecture = key
    return BACKENDS.index(backend), int(architecture.removeprefix("sm_"))


def _row(group: Sequence[Executed]) -> tuple[str, ...]:
    """The row of a backend and kind of GPU."""
    counts = []
    for rounded in (False, True):
        alike = [one for one in group if one.rounded == rounded]
        trials = sum(one.trials for one in alike)
        counts.append(f"{_run(alike):,} of {trials:,}" if trials else "")
    run = [one for one in group if current(one)]
    came = sum(len(one.wrong) for one in run), sum(len(one.refused) for one in run)
    return (group[0].backend, group[0].architecture, *counts, *map(str, came), *_spent(run))


def _spent(rows: Sequence[Executed | Broken]) -> tuple[str, str]:
    """Minutes of CPU time, and the last day."""
    return f"{sum(one.seconds for one in rows) / 60:.1f}", max((one.date[:10] for one in rows), default="")


def _bars(groups: dict[tuple[str, str], list[Executed]]) -> Plot:
    """Trials that were run, beside all."""
    labelled = {", ".join(key): group for key, group in groups.items()}
    run = tuple(plain(label, _run(group)) for label, group in labelled.items())
    trials = tuple(plain(label, sum(one.trials for one in group)) for label, group in labelled.items())
    axes = Axis("", "number"), Axis("trials", "number", log=False)
    return Plot("Trials", "bars", (Series("run", run), Series("all", trials)), axes)


FOLDER = Path(dilkit.backends.__path__[0])
SOURCES = {
    "cupy_raw": ("cuda/kernels/*.cu*", "cuda/table.py", "cuda/scores.py", "cuda/steps.py"),
    "triton": ("triton/*.py",),
    "numba_cuda": ("numba/*.py",),
}
"""Files of kernels, and of the constants with which they are compiled, by backend."""
NO_SOURCE = "backend.py"
"""File that holds what a backend can compute, and for whom."""
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
DIGITS = 12


@cache
def digest(backend: str) -> str:
    """Return the digest of the kernels of `backend`."""
    paths = (path for pattern in SOURCES[backend] for path in FOLDER.glob(pattern) if path.name != NO_SOURCE)
    return code_digest(paths)


def code_digest(paths: Iterable[Path], *more: str) -> str:
    """Return a digest of code in Python, C and CUDA, and of `more` texts.

    Comments, docstrings, imports, layout, and the names of files do not count. Nor does the place of a statement of Python
    among those at the top of all files: definitions may move from file to file.
    """
    pieces = sorted(piece for path in paths for piece in _pieces(path))
    return hashlib.sha256("\0".join((*pieces, *more)).encode()).hexdigest()[:DIGITS]


def _pieces(path: Path) -> Iterator[str]:
    text = path.read_text()
    if path.suffix == ".py":
        yield from (_written(statement) for statement in ast.parse(text).body if not _is_silent(statement))
    else:
        yield " ".join(COMMENT.sub(" ", text).split())


def _written(node: object) -> str:
    """Write a syntax tree alike for all versions of Python: `ast.dump` is not."""
    if isinstance(node, list):
        return f"[{' '.join(_written(one) for one in node if not _is_silent(one))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = (f"{name}={_written(value)}" for name, value in ast.iter_fields(node) if value not in (None, []))
    return f"{type(node).__name__}({' '.join(fields)})"


def _is_silent(node: object) -> bool:
    """Return True for an import or a docstring."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, ast.Import | ast.ImportFrom)


RECORD = PTXResult
