"""Trials of the kernels' PTX on the CPU, and faults put into it: what `tests/ptx/run.py` and `tests/ptx/mutations.py` write."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import dilkit.backends
from dilkit.tools.report.document import Axis, Plot, Series, Table
from dilkit.tools.report.points import plain
from dilkit.tools.report.views import NAMES, Report
from dilkit.tools.results.rows import Row, RowsResult

TRIALS, FAULTS = "trials", "faults"
"""Tables of rows, of which `who` is a backend. Values: `source`, a digest of its kernels; `date` of the last run; CPU `seconds`.

A row of trials is of one list for one kind of GPU, `rounded` as tensor cores are measured to round: how many `trials` there are,
and by name the cases that `passed`, were `refused`, as on a GPU or by the emulator, or are `wrong`, each with its reason.
A row of faults is of a kernel: how many were `caught`, or are `explained` as none; by name those that live, `lives`; `machine`,
a digest of the emulator and of what shows faults of this kernel.
"""
BACKENDS = ("cupy_raw", "triton", "numba_cuda")
COLUMNS = ("backend", "architecture", "rounded once", "rounded as measured", "wrong", "refused", "minutes", "last run")
OF_FAULTS = ("kernel", "faults", "caught", "explained", "not noticed", "minutes", "last run")


def current(row: Row) -> bool:
    """True if it is of the kernels as they are."""
    return bool(row.values["source"] == digest(row.who))


def ended(row: Row) -> int:
    """Trials that were run to their end."""
    return len(row.values["passed"]) + len(row.values["wrong"])


def tried(row: Row) -> int:
    """Faults in all."""
    return int(row.values["caught"] + row.values["explained"] + len(row.values["lives"]))


def _summary(result: RowsResult) -> str:
    """For README.md: how much of what there is has been run, and what was wrong."""
    trials, faults = ([row for row in result.rows if row.table == table] for table in (TRIALS, FAULTS))
    wrong = sum(len(row.values["wrong"]) for row in trials if current(row))
    *first, last = (_counted(backend, [row for row in trials if row.who == backend]) for backend in BACKENDS)
    executed = (
        f"The PTX of today's kernels was executed on a CPU, instruction by instruction: {', '.join(first)} and {last}; "
        f"{f'{wrong} are WRONG' if wrong else 'none is wrong'}."
    )
    if not (faults := [row for row in faults if current(row)]):
        return executed
    caught, explained = (sum(row.values[name] for row in faults) for name in ("caught", "explained"))
    lives = sum(len(row.values["lives"]) for row in faults)
    noticed = (
        f"Of {sum(map(tried, faults)):,} faults put into it {caught:,} were caught and {explained} are explained as harmless"
    )
    return f"{executed} {noticed}{f'; {lives} were NOT CAUGHT' if lives else ''}."


def _counted(backend: str, rows: Sequence[Row]) -> str:
    """Trials of a backend, and the kinds of GPU for which some were run."""
    kinds = len({row.case["architecture"] for row in rows if current(row) and ended(row)})
    counts = f"{_run(rows):,} of {_all(rows):,} trials of {backend}"
    return f"{counts} for {kinds} kind{'s' * (kinds != 1)} of GPU" if kinds else counts


def _run(rows: Iterable[Row]) -> int:
    return sum(ended(row) for row in rows if current(row))


def _all(rows: Iterable[Row]) -> int:
    return sum(row.values["trials"] for row in rows)


def _groups(result: RowsResult) -> dict[tuple[str, str], list[Row]]:
    """Rows of trials by backend and kind of GPU."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in (row for row in result.rows if row.table == TRIALS):
        groups.setdefault((row.who, row.case["architecture"]), []).append(row)
    return groups


def _tables(result: RowsResult) -> Iterator[Table]:
    """Trials by backend and kind of GPU, and faults by kernel."""

    def order(group: tuple[tuple[str, str], list[Row]]) -> tuple[int, int]:
        backend, architecture = group[0]
        return BACKENDS.index(backend), int(architecture.removeprefix("sm_"))

    rows = []
    for (backend, architecture), group in sorted(_groups(result).items(), key=order):
        alike = [[row for row in group if row.case["rounded"] == rounded] for rounded in (False, True)]
        counts = [f"{_run(rows_alike):,} of {_all(rows_alike):,}" if rows_alike else "" for rows_alike in alike]
        run = [row for row in group if current(row)]
        came = (str(sum(len(row.values[name]) for row in run)) for name in ("wrong", "refused"))
        rows.append((backend, architecture, *counts, *came, *_spent(run)))
    yield Table("Trials, by backend and kind of GPU", COLUMNS, tuple(rows))
    faults = []
    for row in (row for row in result.rows if row.table == FAULTS and current(row)):
        numbers = tried(row), row.values["caught"], row.values["explained"], len(row.values["lives"])
        faults.append((row.case["kernel"], *map(str, numbers), *_spent([row])))
    yield Table("Faults that the PTX was given, by kernel", OF_FAULTS, tuple(faults))


def _spent(rows: Sequence[Row]) -> tuple[str, str]:
    """Minutes of CPU time, and the last day."""
    days = (row.values["date"][:10] for row in rows)
    return f"{sum(row.values['seconds'] for row in rows) / 60:.1f}", max(days, default="")


def _bars(result: RowsResult) -> Iterator[Plot]:
    """Trials that were run, beside all."""
    labelled = {", ".join(key): rows for key, rows in _groups(result).items()}
    counted = (("run", _run), ("all", _all))
    series = (Series(name, tuple(plain(label, count(rows)) for label, rows in labelled.items())) for name, count in counted)
    yield Plot("Trials", "bars", tuple(series), (NAMES, Axis("trials", "number", log=False)))


REPORT = Report(
    summary=_summary, summary_first=True, place="{device_name}, threads: {threads}", tables=(_tables,), plots=(_bars,)
)  # fmt: skip


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
