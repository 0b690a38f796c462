"""Trials and faults of the kernels' PTX, written by `tests/ptx/run.py` and `tests/ptx/mutations.py`."""

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import dilkit.backends
from dilkit.tools.report.document import Table
from dilkit.tools.report.views import Report
from dilkit.tools.results.rows import ResultRow, RowsResult

TRIALS, FAULTS = "trials", "faults"
"""Tables of rows, of which `who` is a backend. Values: `source`, a digest of its kernels; `date` of the last run; CPU `seconds`.

A row of trials is of one list for one kind of GPU, `rounded` as tensor cores are measured to round: the number of `trials`, and
the names of cases that `passed`, were `refused`, or are `wrong`, each with its reason. A row of faults is of a kernel: how many
were `caught`, or are `explained` as none; the names of those that live, `lives`; `machine`, a digest of the emulator and trials.
"""
BACKENDS = ("cupy_raw", "hopper", "triton", "numba_cuda")
"""`hopper`: the kernels of `cupy_raw` that no other GPU has."""


def current(row: ResultRow) -> bool:
    """True if it is of the kernels as they are."""
    return bool(row.values["source"] == digest(row.who))


def ended(row: ResultRow) -> int:
    return len(row.values["passed"]) + len(row.values["wrong"])


def _rows(result: RowsResult, table: str) -> list[ResultRow]:
    return [row for row in result.rows if row.table == table]


def _run_of_all(rows: Iterable[ResultRow]) -> str:
    rows = list(rows)
    return f"{sum(map(ended, filter(current, rows))):,} of {sum(row.values['trials'] for row in rows):,}" * bool(rows)


def _summary(result: RowsResult) -> str:
    trials, counts = _rows(result, TRIALS), []
    for backend in BACKENDS:
        rows = [row for row in trials if row.who == backend]
        kinds = len({row.case["architecture"] for row in rows if current(row) and ended(row)})
        counts.append(
            f"{_run_of_all(rows) or '0 of 0'} trials of {backend}" + f" for {kinds} kind{'s' * (kinds > 1)} of GPU" * bool(kinds)
        )
    wrong = sum(len(row.values["wrong"]) for row in trials if current(row))
    executed = (
        f"The PTX of today's kernels was executed on a CPU, instruction by instruction: {', '.join(counts[:-1])} and "
        f"{counts[-1]}; {f'{wrong} are WRONG' if wrong else 'none is wrong'}."
    )
    if not (faults := [row.values for row in _rows(result, FAULTS) if current(row)]):
        return executed
    caught, explained = (sum(values[name] for values in faults) for name in ("caught", "explained"))
    lives = sum(len(values["lives"]) for values in faults)
    noticed = f"{caught:,} were caught and {explained} are explained as harmless"
    return (
        f"{executed} Of {caught + explained + lives:,} faults put into it {noticed}{f'; {lives} were NOT CAUGHT' * bool(lives)}."
    )


def _tables(result: RowsResult) -> Iterator[Table]:
    groups: dict[tuple[int, int], list[ResultRow]] = {}
    for row in _rows(result, TRIALS):
        groups.setdefault((BACKENDS.index(row.who), int(row.case["architecture"].removeprefix("sm_"))), []).append(row)
    rows = []
    for (backend, architecture), group in sorted(groups.items()):
        counts = [_run_of_all(row for row in group if row.case["rounded"] == rounded) for rounded in (False, True)]
        run = [row for row in group if current(row)]
        outcomes = [str(sum(len(row.values[name]) for row in run)) for name in ("wrong", "refused")]
        rows.append((BACKENDS[backend], f"sm_{architecture}", *counts, *outcomes))
    header = ("backend", "architecture", "rounded once", "rounded as measured", "wrong", "refused")
    yield Table("Trials, by backend and kind of GPU", header, tuple(rows))


REPORT = Report(summary=_summary, summary_first=True, place="{device_name}, threads: {threads}", tables=(_tables,))


FOLDER = Path(dilkit.backends.__path__[0])
HOPPER_INCLUDES = "intrinsics", "dilated", "scores", "stored"
SOURCES = {
    "cupy_raw": ("cuda/kernels/[!h]*.cu*", "cuda/table.py", "cuda/scores.py", "cuda/steps.py"),
    "hopper": ("cuda/kernels/hopper*.cu*", "cuda/hopper.py", *(f"cuda/kernels/{x}.cuh" for x in HOPPER_INCLUDES)),
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
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, ast.Import | ast.ImportFrom)
