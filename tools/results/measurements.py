"""Every measurement in a result of whatever kind: an object with samples, known by the facts that say what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from dilkit.tools.console.text import in_seconds
from dilkit.tools.results.record import Measurement
from dilkit.tools.results.schema import SHOWN, Shape
from dilkit.tools.results.statistics import median_interval, middle

SAMPLES = ("samples_s", "samples")
MOST = 20_000
"""Measurements of one result."""
YARDSTICKS = ("matmul", "copy", "fma")
"""What machines are measured by, under these names: how fast it is says nothing of dilkit."""
_NO_FACTS = frozenset({"verdict", "reasons", "note", "memory_note", "why", "error", "isa", "packages", "threads", "thread_count"})
"""Words and counts that tell what came out, or where, and not what was measured."""
_LISTED, MOST_LISTED = frozenset({"segment_lengths", "dilation_rates"}), 100
"""Lists that tell what was measured, and how long they may be."""
_MEASURED_ENDINGS = ("_bytes", "_s", "_per_s", "_per_sample")
_STRUCTURE = frozenset({"entries", "time", "times"})
"""Names that only hold a place."""

Result = dict[str, Any]


def find(result: Result, shape: Shape) -> dict[str, Measurement]:
    """All measurements of a result by what they measure, in its order. Raises ValueError for samples that lack that `shape`.

    Where several steps of a list have the same facts, the second is called "no. 2", and so on.
    """
    found: dict[str, Measurement] = {}
    alike: Counter[str] = Counter()
    for path, samples in _walk(result, ()):
        words = " ".join(path)
        if complaint := shape(samples, f"samples of {words[:SHOWN]}"):
            raise ValueError(complaint)
        if len(found) == MOST:
            raise ValueError(f"more than {MOST:,} measurements")
        alike[words] += 1
        what = words if alike[words] == 1 else f"{words}, no. {alike[words]}"
        found[what] = Measurement(what, tuple(map(float, samples)), bool(path) and path[-1] in YARDSTICKS)
    return found


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """(where it stands in words, samples) of all that is in `value`."""
    if isinstance(value, dict):
        for name in SAMPLES:
            if isinstance(value.get(name), list):
                yield path, value[name]
        for name, inner in value.items():
            if isinstance(inner, (dict, list)) and name not in SAMPLES:
                yield from _walk(inner, path if name in _STRUCTURE else (*path, name))
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, dict):
                yield from _walk(item, (*path, facts) if (facts := _facts(item)) else path)


def _facts(step: Result) -> str:
    """What a step of a list says of itself beside what it measured: its words, whole numbers and flags, its setting's too."""
    setting = step.get("setting")
    known = {**(setting if isinstance(setting, dict) else {}), **step}
    told = [_fact(name, value) for name, value in known.items() if _identifies(name, value)]
    return f"({', '.join(filter(None, told))})" if any(told) else ""


def _identifies(name: str, value: Any) -> bool:
    if name in _LISTED:
        return isinstance(value, list) and len(value) <= MOST_LISTED and all(isinstance(one, int) for one in value)
    return isinstance(value, (str, int)) and name not in _NO_FACTS and not name.endswith(_MEASURED_ENDINGS)


def _fact(name: str, value: str | int | list[int]) -> str:
    if isinstance(value, list):
        return f"{name} {'-'.join(map(str, value))}"
    if isinstance(value, bool):
        return name.removeprefix("is_") if value else ""
    return f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"


def rows(result: Result, shape: Shape) -> list[tuple[str, ...]]:
    """A table of all measurements: median, interval and number of samples; the column names first."""
    table = [("measured", "median", "95% interval", "samples")]
    for one in find(result, shape).values():
        low, high = median_interval(one.samples)
        told = in_seconds(middle(one.samples)), f"{in_seconds(low)} - {in_seconds(high)}", str(len(one.samples))
        table.append((one.what, *told))
    return table


def problem_facts(result: Result) -> dict[str, str]:
    """The facts of a result that say what was computed: words, numbers and flags of its problem, and of how it was run."""
    problem = result.get("problem")
    found = dict(problem) if isinstance(problem, dict) else {}
    pattern = found.pop("pattern", None)
    found |= dict(pattern=pattern.get("text")) if isinstance(pattern, dict) else {}
    found |= {name: result[name] for name in ("isa", "suite") if name in result}
    ranks = result.get("ranks")
    found |= {f"ranks: {name}": value for name, value in ranks.items()} if isinstance(ranks, dict) else {}
    return {name: str(value) for name, value in found.items() if isinstance(value, (str, int, float))}
