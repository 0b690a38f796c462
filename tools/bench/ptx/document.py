"""Report on the trials of the kernels' PTX. Those of kernels that have changed since count as not run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dilkit.tools.bench.ptx.record import Broken, Executed, PTXResult
from dilkit.tools.bench.ptx.sources import digest
from dilkit.tools.report.document import Axis, Document, Plot, Series, Table, plots, tables
from dilkit.tools.report.headline import place
from dilkit.tools.report.points import plain

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
