"""What became of the implementations of benchmark cases, as cells of tables and as notes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dilkit.tools.console.text import in_seconds
from dilkit.tools.results.record import Case, Samples


def quartiles(time: Samples) -> str:
    """Between which half of the samples lie."""
    return f"{in_seconds(time.q1_s)} - {in_seconds(time.q3_s)}"


def times_as_long(case: Case, name: str, ours: str) -> str:
    """The time of an implementation in units of ours."""
    return f"{case.ratio(name, ours):.2f}" if case.timed(name, ours) else "-"


def reasons(cases: Iterable[tuple[str, Case]]) -> Iterator[tuple[str, str]]:
    """(why an implementation was not measured, the title of the case)."""
    for title, case in cases:
        for name, entry in case.entries.items():
            yield from ((f"{name} {entry.verdict}: {reason}", title) for reason in entry.reasons)


def grouped(notes: Iterable[tuple[str, str]], places: str = "({})") -> list[str]:
    """Each note once, with all the places that it is of."""
    by_group: dict[str, list[str]] = {}
    for note, place in notes:
        by_group.setdefault(note, []).append(place)
    return [f"{note} {places.format(', '.join(dict.fromkeys(where)))}" for note, where in by_group.items()]
