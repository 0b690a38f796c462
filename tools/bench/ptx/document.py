"""What the trials of the kernels' PTX say. Those of kernels that have changed since say nothing."""

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
    return f"{_verdict(result)}."


def document(result: PTXResult) -> Document:
    """Trials by backend and kind of GPU, and faults by kernel."""
    return Document(
        headline=(f"{_verdict(result)}.", place(result)),
        tables=tables(_trials(result), _faults(result)),
        plots=plots(_bars(result)),
    )


def current(one: Executed | Broken) -> bool:
    """Whether it is of the kernels as they are."""
    return one.source == digest(one.backend)


def _verdict(result: PTXResult) -> str:
    """Of trials, then of faults."""
    wrong = sum(len(one.wrong) for one in result.executed if current(one))
    *first, last = (_counted(backend, result.executed) for backend in BACKENDS)
    trials = (
        f"The PTX of today's kernels was executed on a CPU, instruction by instruction: {', '.join(first)} and {last}; "
        f"{f'{wrong} are WRONG' if wrong else 'none is wrong'}"
    )
    broken = [one for one in result.broken if current(one)]
    return f"{trials}. {_noticed(broken)}" if broken else trials


def _counted(backend: str, executed: Iterable[Executed]) -> str:
    own = [one for one in executed if one.backend == backend]
    run = [one for one in own if current(one) and one.run]
    kinds = len({one.architecture for one in run})
    counts = f"{sum(one.run for one in run):,} of {sum(one.trials for one in own):,} trials of {backend}"
    return f"{counts} for {kinds} kind{'s' * (kinds != 1)} of GPU" if run else counts


def _noticed(broken: list[Broken]) -> str:
    tried, explained = sum(one.tried for one in broken), sum(one.explained for one in broken)
    lives = sum(len(one.lives) for one in broken)
    caught = f"{tried - explained - lives:,} were caught and {explained} are explained as harmless"
    return f"Of {tried:,} faults put into it {caught}{f'; {lives} were NOT CAUGHT' if lives else ''}"


def _number(architecture: str) -> int:
    return int(architecture.removeprefix("sm_"))


def _trials(result: PTXResult) -> Table:
    """A row for each backend and kind of GPU."""
    groups: dict[tuple[str, str], list[Executed]] = {}
    for one in result.executed:
        groups.setdefault((one.backend, one.architecture), []).append(one)
    rows = (_row(*key, group) for key, group in sorted(groups.items(), key=_place))
    return Table("Trials, by backend and kind of GPU", COLUMNS, tuple(rows))


def _place(group: tuple[tuple[str, str], list[Executed]]) -> tuple[int, int]:
    (backend, architecture), _ = group
    return BACKENDS.index(backend), _number(architecture)


def _row(backend: str, architecture: str, group: list[Executed]) -> tuple[str, ...]:
    run = [one for one in group if current(one)]
    came = sum(len(one.wrong) for one in run), sum(len(one.refused) for one in run)
    counts = (_of([one for one in group if one.rounded == rounded]) for rounded in (False, True))
    return (backend, architecture, *counts, *map(str, came), *_spent(run))


def _of(group: list[Executed]) -> str:
    """How many of how many."""
    trials = sum(one.trials for one in group)
    return f"{sum(one.run for one in group if current(one)):,} of {trials:,}" if trials else ""


def _spent(rows: Sequence[Executed | Broken]) -> tuple[str, str]:
    """Minutes of CPU time, and the last day."""
    return f"{sum(one.seconds for one in rows) / 60:.1f}", max((one.date[:10] for one in rows), default="")


def _bars(result: PTXResult) -> Plot:
    """Trials that were run, beside all."""
    run, trials = dict[str, int](), dict[str, int]()
    for one in result.executed:
        label = f"{one.backend}, {one.architecture}"
        trials[label] = trials.get(label, 0) + one.trials
        run[label] = run.get(label, 0) + (one.run if current(one) else 0)
    series = (Series(name, tuple(plain(*bar) for bar in bars.items())) for name, bars in (("run", run), ("all", trials)))
    return Plot("Trials", "bars", tuple(series), (Axis("", "number"), Axis("trials", "number", log=False)))


def _faults(result: PTXResult) -> Table:
    """A row for each kernel."""
    rows = []
    for one in filter(current, result.broken):
        counts = one.tried, one.caught, one.explained, len(one.lives)
        rows.append((one.kernel, *map(str, counts), *_spent([one])))
    return Table("Faults that the PTX was given, by kernel", OF_FAULTS, tuple(rows))
