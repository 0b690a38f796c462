"""What the ring suite's figures must be, and what they are: pure functions of a result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

MIB = 2**20
SLACK = 2.0
"""Seconds beyond the timeout within which an error must come."""

Result = dict[str, Any]
Values = dict[str, float]


@dataclass(frozen=True)
class Figure:
    """A figure: what it is, its limit (the most, where `lower`), and how its values are read; the worst one decides.

    `of`: the list of the result that it is read from. `exact`: it does not depend on the machine, so that falling short is an
    error.
    """

    of: str
    name: str
    must: float
    read: Callable[[Result], Values]
    unit: str = ""
    lower: bool = True
    exact: bool = False

    def judge(self, result: Result) -> dict[str, Any]:
        """The figure of `result` as plain data. Verdicts: "met", "short", "not measured" and why."""
        values = self.read(result)
        told = dict(name=self.name, must=self.must, unit=self.unit, lower=self.lower, exact=self.exact, values=values)
        if any("failed" in entry for entry in result[self.of]):
            return told | dict(verdict="not measured: a measurement failed")
        if not values:
            return told | dict(verdict="not measured")
        met = max(values.values()) <= self.must if self.lower else min(values.values()) >= self.must
        return told | dict(verdict="met" if met else "short")


def judge(result: Result) -> list[dict[str, Any]]:
    """All figures of `result`."""
    return [figure.judge(result) for figure in FIGURES]


def good(result: Result, name: str) -> list[dict[str, Any]]:
    """The entries of a list whose measurement did not fail."""
    return [entry for entry in result[name] if "failed" not in entry]


def _by_transport(result: Result, name: str, of: Callable[[dict[str, Any]], float], combine: Callable[..., float]) -> Values:
    """`combine` of what `of` says about every call of a list, by transport."""
    found: dict[str, list[float]] = {}
    for entry in good(result, name):
        found.setdefault(entry["transport"], []).extend(of(call) for call in entry["calls"])
    return {transport: combine(values) for transport, values in found.items() if values}


def _differing(result: Result) -> Values:
    return _by_transport(result, "bytes", lambda call: call["sent_bytes"] != call["planned_bytes"], sum)


def _errors(result: Result) -> Values:
    return _by_transport(result, "agreement", lambda call: call.get("ratio", 0.0), max)


def _other_bits(result: Result) -> Values:
    return _by_transport(result, "agreement", lambda call: call.get("bitwise") is False, sum)


def _million(result: Result) -> Values:
    entries = good(result, "million")
    named = (("plan", "planned_bytes"), ("counted", "sent_bytes"))
    return {name: max(entry[key]) / MIB for entry in entries for name, key in named if entry[key]}


def _shrinks(config: str, ranks: int) -> Callable[[Result], Values]:
    """One rank's memory over that of `ranks`, at the longest sequence measured."""

    def read(result: Result) -> Values:
        peaks = {(e["seq"], e["ranks"]): max(e["peak_bytes"]) for e in good(result, "memory") if e["config"] == config}
        longest = max((seq for seq, _ in peaks), default=0)
        if not {(longest, 1), (longest, ranks)} <= peaks.keys():
            return {}
        return {f"{longest:,} tokens": peaks[longest, 1] / peaks[longest, ranks]}

    return read


def _grows(result: Result) -> Values:
    peaks = {entry["ranks"]: max(entry["peak_bytes"]) for entry in good(result, "growth")}
    return {f"p={ranks}": 100 * (peak / peaks[1] - 1) for ranks, peak in peaks.items() if ranks > 1 and 1 in peaks}


def _uneven(result: Result) -> Values:
    calls = [call for entry in good(result, "work") for call in entry["calls"]]
    return {"worst": round(max(call["max_over_mean"] for call in calls), 4)} if calls else {}


def _race(result: Result) -> Values:
    entries = [(f"{e['ranks']} ranks, {e['transport']}", e["entries"]) for e in good(result, "race")]
    return {who: e["one rank"]["time"]["median_s"] / e["ranks"]["time"]["median_s"] for who, e in entries}


def _faults(result: Result) -> Iterator[tuple[str, dict[str, Any]]]:
    for entry in good(result, "faults"):
        yield " ".join(filter(None, (entry["transport"], entry["options"]))), entry


def _late(result: Result) -> Values:
    found: Values = {}
    for who, entry in _faults(result):
        found[who] = max(found.get(who, -1e9), entry["seconds"] - entry["timeout"])
    return found


def _unnamed(result: Result) -> Values:
    found: Values = {}
    for who, entry in _faults(result):
        found[who] = found.get(who, 0) + (not (entry["names_rank"] and entry["names_step"]))
    return found


def _left(result: Result) -> Values:
    found: Values = {}
    for who, entry in _faults(result):
        found[who] = found.get(who, 0) + entry["left_behind"]
    return found


FIGURES = (
    Figure("bytes", "calls whose bytes are not those of the plan", 0, _differing, exact=True),
    Figure("million", "one million tokens, p=8, bf16, forward: bytes that a rank sends", 1.6, _million, " MiB", exact=True),
    Figure("agreement", "out, lse, dq, dk, dv over ranks: error over what rounding allows", 1.0, _errors, exact=True),
    Figure("agreement", "fuse_branches=False: calls that differ from one rank in a bit", 0, _other_bits, exact=True),
    Figure("memory", "peak memory per rank, p=1 over p=2", 1.95, _shrinks("long", 2), "x", lower=False),
    Figure("memory", "the same, p=1 over p=4", 3.8, _shrinks("long", 4), "x", lower=False),
    Figure("memory", "configuration A: p=1 over p=2", 1.95, _shrinks("A", 2), "x", lower=False),
    Figure("memory", "configuration A: p=1 over p=4", 3.8, _shrinks("A", 4), "x", lower=False),
    Figure("growth", "growth of memory per rank at fixed n/p, from p=1", 3.0, _grows, " %"),
    Figure("work", "work per rank, causal: max over mean", 1.0, _uneven, exact=True),
    Figure("race", "A, forward + backward: ranks of one thread, in units of one rank's speed", 0.9, _race, "x", lower=False),
    Figure("faults", "faults: seconds to an error beyond the timeout", SLACK, _late, " s"),
    Figure("faults", "faults whose error does not name rank and step", 0, _unnamed),
    Figure("faults", "processes left behind", 0, _left),
)
