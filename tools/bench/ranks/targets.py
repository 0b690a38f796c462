"""What the figures of attention over ranks must be, and how they are read out of a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dilkit.tools.bench.ranks.record import Fault, RanksResult, good
from dilkit.tools.bench.target import MIB, Target, Values

SLACK = 2.0
"""Seconds beyond the timeout within which an error must come."""
Read = Callable[[RanksResult], Values]


def _figure(
    of: str, name: str, must: float, read: Read, unit: str = "", lower: bool = True, exact: bool = False
) -> Target[RanksResult]:
    """A target that is read from the list `of`; where one of its measurements failed, there is no figure."""

    def found(result: RanksResult) -> Values:
        return {} if of in dict(result.failures()) else read(result)

    return Target(name, must, None, found, unit, lower, exact)


def _by_transport(of: str, value: Callable[[Any], float | None], combine: Callable[[list[float]], float]) -> Read:
    """`combine` of the values of all calls of a list that have one, by transport."""

    def read(result: RanksResult) -> Values:
        found: dict[str, list[float]] = {}
        for step in getattr(result, of):
            found.setdefault(step.transport, []).extend(x for call in step.calls if (x := value(call)) is not None)
        return {transport: combine(values) for transport, values in found.items() if values}

    return read


_differing = _by_transport("bytes", lambda call: call.sent_bytes != call.planned_bytes, sum)
_errors = _by_transport("agreement", lambda call: call.ratio, max)
_other_bits = _by_transport("agreement", lambda call: None if call.bitwise is None else not call.bitwise, sum)


def _million(result: RanksResult) -> Values:
    counts = [pair for one in result.million for pair in (("plan", one.planned_bytes), ("counted", one.sent_bytes))]
    return {name: max(sent) / MIB for name, sent in counts if sent}


def _shrinks(config: str, ranks: int) -> Read:
    """One rank's memory over that of `ranks`, at the longest sequence measured."""

    def read(result: RanksResult) -> Values:
        peaks = {(m.seq, m.ranks): m.peak for m in good(result.memory) if m.config == config}
        longest = max((seq for seq, _ in peaks), default=0)
        if not {(longest, 1), (longest, ranks)} <= peaks.keys():
            return {}
        return {f"{longest:,} tokens": peaks[longest, 1] / peaks[longest, ranks]}

    return read


def _grows(result: RanksResult) -> Values:
    peaks = {m.ranks: m.peak for m in good(result.growth)}
    return {f"p={ranks}": 100 * (peak / peaks[1] - 1) for ranks, peak in peaks.items() if ranks > 1 and 1 in peaks}


def _uneven(result: RanksResult) -> Values:
    shares = [share.max_over_mean for work in result.work for share in work.calls]
    return {"worst": round(max(shares), 4)} if shares else {}


def _race(result: RanksResult) -> Values:
    return {f"{race.ranks} ranks, {race.transport}": race.ratio("one rank", "ranks") for race in result.race}


def _faults(value: Callable[[Fault], float], combine: Callable[[list[float]], float]) -> Read:
    """`combine` of the values of all faults, by what the ranks are."""

    def read(result: RanksResult) -> Values:
        found: dict[str, list[float]] = {}
        for fault in result.faults:
            found.setdefault(fault.ranks_are, []).append(value(fault))
        return {who: combine(values) for who, values in found.items()}

    return read


_late = _faults(lambda fault: fault.seconds - fault.timeout, max)
_unnamed = _faults(lambda fault: not (fault.names_rank and fault.names_step), sum)
_left = _faults(lambda fault: fault.left_behind, sum)
BYTES = "one million tokens, p=8, bf16, forward: bytes that a rank sends"
SPEED = "A, forward + backward: ranks of one thread, in units of one rank's speed"
TARGETS = (
    _figure("bytes", "calls whose bytes are not those of the plan", 0, _differing, exact=True),
    _figure("million", BYTES, 1.6, _million, " MiB", exact=True),
    _figure("agreement", "out, lse, dq, dk, dv over ranks: error over what rounding allows", 1.0, _errors, exact=True),
    _figure("agreement", "fuse_branches=False: calls that differ from one rank in a bit", 0, _other_bits, exact=True),
    _figure("memory", "peak memory per rank, p=1 over p=2", 1.95, _shrinks("long", 2), "x", lower=False),
    _figure("memory", "peak memory per rank, p=1 over p=4", 3.8, _shrinks("long", 4), "x", lower=False),
    _figure("memory", "configuration A: p=1 over p=2", 1.95, _shrinks("A", 2), "x", lower=False),
    _figure("memory", "configuration A: p=1 over p=4", 3.8, _shrinks("A", 4), "x", lower=False),
    _figure("memory", "configuration A with nothing kept: p=1 over p=2", 1.9, _shrinks("A, nothing kept", 2), "x", lower=False),
    _figure("memory", "configuration A with nothing kept: p=1 over p=4", 3.6, _shrinks("A, nothing kept", 4), "x", lower=False),
    _figure("growth", "growth of memory per rank at fixed n/p, from p=1", 3.0, _grows, " %"),
    _figure("work", "work per rank, causal: max over mean", 1.0, _uneven, exact=True),
    _figure("race", SPEED, 0.9, _race, "x", lower=False),
    _figure("faults", "faults: seconds to an error beyond the timeout", SLACK, _late, " s"),
    _figure("faults", "faults whose error does not name rank and step", 0, _unnamed),
    _figure("faults", "processes left behind", 0, _left),
)
