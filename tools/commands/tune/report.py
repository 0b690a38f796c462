"""What `dilkit tune` has found, as records and as text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilkit.environment import BACKEND, backend_names
from dilkit.problem import Problem
from dilkit.selection.preference_table import table_preference
from dilkit.selection.tuned_file import Seconds, TunedEntry, TunedSetup
from dilkit.tools.console.text import in_seconds, table
from dilkit.tools.results.record import Entry


@dataclass(frozen=True)
class Found:
    """What became of every backend on one problem."""

    problem: Problem
    entries: dict[str, Entry]

    @property
    def order(self) -> Seconds:
        """Those that were measured, each with its median seconds a call, the fastest first."""
        times = [(name, entry.time.median_s) for name, entry in self.entries.items() if entry.time]
        return tuple(sorted(times, key=lambda pair: pair[1]))

    @property
    def left_out(self) -> dict[str, Entry]:
        """Those that were not."""
        return {name: entry for name, entry in self.entries.items() if not entry.time}

    @property
    def by_table(self) -> list[str]:
        """The order in which those that were measured would come without being measured."""
        return [name for name in table_preference(self.problem).order if name in dict(self.order)]

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        order = [dict(backend=name, seconds=seconds) for name, seconds in self.order]
        left_out = [dict(backend=name, verdict=e.verdict, reasons=e.reasons) for name, e in self.left_out.items()]
        call = dict(problem=str(self.problem), seq=self.problem.seq, requires_grad=self.problem.requires_grad)
        return dict(**call, order=order, left_out=left_out, by_table=self.by_table)


def lines(path: Path, problems: Sequence[Found], interrupted: bool) -> Iterator[str]:
    """For each problem the backends in the order found, then those left out."""
    for found in problems:
        yield from (*table([(str(found.problem),)], indent=0), *table(_rows(found)), "")
    if interrupted:
        yield "interrupted; what was measured before is kept"
    if names := backend_names():
        yield f"{BACKEND.name}={','.join(names)} is set, and wins over what was measured"
    kept = any(found.order for found in problems)
    yield f"the automatic choice goes by {path}" if kept else "no backend was measured; the file is as it was"


def _rows(found: Found) -> Iterator[tuple[str, str, str]]:
    """Of the first it is said whether it would have been picked anyway."""
    for i, (name, seconds) in enumerate(found.order):
        note = "" if i or found.by_table[:1] in ([], [name]) else f"unmeasured, it would have been {found.by_table[0]}"
        yield name, in_seconds(seconds), note
    yield from ((name, entry.verdict, "\n".join(entry.reasons)) for name, entry in found.left_out.items())


def listed(entries: Sequence[TunedEntry], here: Collection[TunedSetup]) -> Iterator[str]:
    """What a file holds, setup by setup; `here` are the setups of this machine."""
    for setup in dict.fromkeys(entry.setup for entry in entries):
        yield from ("", f"{setup}{'' if setup in here else ' (does not hold here)'}")
        yield from table(_row(entry) for entry in entries if entry.setup == setup)


def _row(entry: TunedEntry) -> tuple[str, str]:
    shape = entry.shape
    said = dict(causal=shape.is_causal, training=shape.requires_grad, masked=shape.key_padding_mask, packed=shape.varlen)
    said |= dict(cached=shape.kv_cache, dropout=shape.dropout)
    flags = "".join(f", {name}" for name, there in said.items() if there)
    times = ", ".join(f"{name} {in_seconds(taken)}" for name, taken in entry.seconds)
    return f"{shape.seq:,} tokens, {shape.branches}, {shape.dtype} x {shape.head_dim}{flags}", times
