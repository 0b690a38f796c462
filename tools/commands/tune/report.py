"""What `dilkit tune` has found, as text and as plain data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from dilkit.environment import BACKEND
from dilkit.selection.tuned_file import Seconds, TunedEntry, TunedSetup, TunedShape
from dilkit.tools.console.text import in_seconds, table

Report = dict[str, Any]


def lines(report: Report) -> list[str]:
    """A run's findings: for each problem the backends in the order found, then those left out."""
    shown = [f"on {report['setup']}", ""]
    for found in report["problems"]:
        shown += [*table([(found["problem"],)], indent=0), *table(_rows(found)), ""]
    if report["interrupted"]:
        shown.append("interrupted; what was measured before is kept")
    if report["overridden"]:
        shown.append(f"{BACKEND.name}={','.join(report['overridden'])} is set, and wins over what was measured")
    kept = any(found["order"] for found in report["problems"])
    return [
        *shown,
        f"the automatic choice goes by {report['file']}" if kept else "no backend was measured; the file is as it was",
    ]


def _rows(found: Report) -> list[tuple[str, str, str]]:
    """Of the first it is said whether it would have been picked anyway."""
    expected = next(iter(found["by_table"]), None)
    rows = []
    for place, row in enumerate(found["order"]):
        note = "" if place or expected in (None, row["backend"]) else f"unmeasured, it would have been {expected}"
        rows.append((row["backend"], in_seconds(row["seconds"]), note))
    return rows + [(row["backend"], row["verdict"], "\n".join(row["reasons"])) for row in found["left_out"]]


def listed(entries: Collection[TunedEntry], here: Collection[TunedSetup]) -> Iterator[str]:
    """What a file holds, setup by setup; `here` are the setups of this machine."""
    for setup in dict.fromkeys(entry.setup for entry in entries):
        yield from ("", f"{setup}{'' if setup in here else ' (does not hold here)'}")
        yield from table((_key(entry.shape), _times(entry.seconds)) for entry in entries if entry.setup == setup)


def plain(entries: Iterable[TunedEntry], here: Collection[TunedSetup]) -> list[Report]:
    """The same as plain data."""
    return [dict(setup=str(e.setup), holds=e.setup in here, **vars(e.shape), seconds=dict(e.seconds)) for e in entries]


def _key(shape: TunedShape) -> str:
    flags = f"{', causal' if shape.is_causal else ''}{', training' if shape.requires_grad else ''}"
    return f"{shape.seq:,} tokens, {shape.branches}, {shape.dtype} x {shape.head_dim}{flags}"


def _times(seconds: Seconds) -> str:
    return ", ".join(f"{name} {in_seconds(taken)}" for name, taken in seconds)
