"""What all of the suite's cases have in common: calls are checked, and those that are right are timed in turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dilkit.testing.accuracy import Check
from dilkit.tools.measure.case import CaseFields
from dilkit.tools.measure.ceilings import MultiplyAdds
from dilkit.tools.measure.single_call import SingleCall
from dilkit.tools.measure.timing import Call, time_interleaved
from dilkit.tools.results.record import Entries, Entry


def checked(check: Check, one: SingleCall | None = None) -> Entry:
    """The beginning of an entry: its verdict, and if it is right the memory of `one` call."""
    if not check.passed:
        return Entry(verdict="wrong", reasons=(check.complaint,), check=(check,))
    return Entry(check=(check,), peak_bytes=one.peak_bytes if one else None, memory_note=one.why if one else None)


def timed(entries: Entries, calls: Mapping[str, Call], repeats: int, before: Call | None = None) -> CaseFields:
    """`entries` with times, beside multiply-adds in the same rounds; `before` comes before each sample, untimed."""
    ceiling, able = MultiplyAdds(), {name: call for name, call in calls.items() if entries[name].verdict == "measured"}
    samples = time_interleaved({**ceiling.calls, **able}, repeats, warmup=0, before=before)
    return CaseFields(
        **ceiling.rates(samples), entries={name: replace(entry, time=samples.get(name)) for name, entry in entries.items()}
    )
