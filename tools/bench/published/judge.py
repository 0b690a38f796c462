"""Every published figure beside what it is here: pure functions of a result."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from dilkit.tools.bench.published.claims import Claim, claims, group
from dilkit.tools.console.text import in_bytes
from dilkit.tools.results.kinds.published import PublishedFigure, PublishedResult, RanksCase, Setting
from dilkit.tools.results.record import Case
from dilkit.tools.results.statistics import exponent

KIB, MIB = 2**10, 2**20
SPEEDS = {"ms": 1.0, "tokens/s": -1.0}
"""Quantities that depend on the machine's speed, and the power of it that takes it out of them."""


def figures(result: PublishedResult) -> tuple[PublishedFigure, ...]:
    """Every claim beside what it is here, none left out. What was published are forward passes alone."""
    ranks = {row.setting: row for job in result.ranks for row in job.rows if not row.backward}
    return tuple(_figure(Reading(result, ranks, claim)) for claim in claims())


def _figure(reading: Reading) -> PublishedFigure:
    claim = reading.claim
    figure = PublishedFigure(
        document=claim.document,
        figure=claim.figure,
        claimed=claim.claimed,
        quantity=claim.quantity,
        note=claim.note,
        hardware=claim.hardware,
    )
    if claim.quantity == "longest":
        found = next((one for one in reading.result.longest if (one.who, one.backward) == (claim.who, False)), None)
        where = f"in {in_bytes(found.limit_bytes)}" if found else "not measured"
        return replace(figure, ours=found.seq if found else None, why=where)
    if claim.setting is None:
        return replace(figure, why="nothing to measure")
    ours = READ[claim.quantity](reading, claim.setting, claim.base or claim.setting)
    if ours is None:
        return replace(figure, why=reading.reasons(claim.setting))
    rate = reading.tflops(claim.setting) if claim.quantity in SPEEDS else None
    return replace(figure, ours=ours, per_tflops=ours * rate ** SPEEDS[claim.quantity] if rate else None)


@dataclass(frozen=True)
class Reading:
    """What a result holds of a claim. `ranks`: those at a fixed length, by setting."""

    result: PublishedResult
    ranks: dict[Setting, RanksCase]
    claim: Claim

    def seconds(self, setting: Setting, who: str = "") -> float | None:
        """The median of a call, by whom the claim names."""
        if setting.ranks > 1:
            return _median(self.ranks.get(setting), "ranks")
        return _median(self.result.case(setting), who or self.claim.who)

    def tokens(self, setting: Setting) -> float:
        """Those that were measured."""
        return setting.tokens / (self.result.quick or 1)

    def bytes(self, setting: Setting, sharded: bool = False) -> int | None:
        """Peak memory, of the rank that needs most; `sharded`: measured as over ranks, though it be one."""
        if setting.ranks > 1 or sharded:
            return self.ranks[setting].peak if setting in self.ranks else None
        case = self.result.case(setting)
        return case.entries[self.claim.who].memory_bytes if case and self.claim.who in case.entries else None

    def per_token(self, setting: Setting) -> float | None:
        """KiB."""
        return _over(_scaled(1 / KIB, self.bytes(setting)), self.tokens(setting))

    def speed_up(self, setting: Setting, base: Setting) -> float | None:
        """The time of base over that of the setting; of ranks beside one, both are of one job."""
        if setting.ranks > base.ranks:
            return _over(_median(self.ranks.get(setting), "one rank"), self.seconds(setting))
        return _over(self.seconds(base, self.claim.base_who), self.seconds(setting))

    def reduction(self, setting: Setting, base: Setting) -> float | None:
        """The memory of base over that of a rank."""
        return _over(self.bytes(base, sharded=True), self.bytes(setting, sharded=True))

    def exponent(self, setting: Setting, base: Setting) -> float | None:
        """Of time in the length, over all lengths between the two."""
        between = [s for s in group("lengths").values() if base.seq <= s.seq <= setting.seq]
        times = {s.seq: seconds for s in between if (seconds := self.seconds(s))}
        return exponent(list(times), list(times.values())) if len(times) > 1 else None

    def tflops(self, setting: Setting) -> float | None:
        """What the matmul beside the setting reached; of ranks, the median of all."""
        case = self.result.case(setting) if setting.ranks == 1 else None
        rates = [one.matmul.gflops / 1000 for one in ([case] if case else self.result.cases) if one.matmul]
        return statistics.median(rates) if rates else None

    def reasons(self, setting: Setting) -> str:
        """Why there is no figure."""
        case = self.result.case(setting)
        entry = case.entries.get(self.claim.who) if case else None
        return f"{entry.verdict}: {'; '.join(entry.reasons)}" if entry and entry.reasons else "not measured"


def _median(case: Case | None, who: str) -> float | None:
    time = case.entries[who].time if case and case.timed(who) else None
    return time.median_s if time else None


def _over(above: float | None, below: float | None) -> float | None:
    """The ratio, where there are both."""
    return above / below if above and below else None


def _scaled(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _saved(ratio: float | None) -> float | None:
    return 100 * (1 - 1 / ratio) if ratio else None


READ: dict[str, Callable[[Reading, Setting, Setting], float | None]] = {
    "ms": lambda one, setting, base: _scaled(1000, one.seconds(setting)),
    "tokens/s": lambda one, setting, base: _over(one.tokens(setting), one.seconds(setting)),
    "MiB": lambda one, setting, base: _scaled(1 / MIB, one.bytes(setting)),
    "KiB/token": lambda one, setting, base: one.per_token(setting),
    "KiB/token ratio": lambda one, setting, base: _over(one.per_token(setting), one.per_token(base)),
    "speedup": Reading.speed_up,
    "slowdown": lambda one, setting, base: _over(1.0, one.speed_up(setting, base)),
    "reduction": Reading.reduction,
    "efficiency": lambda one, setting, base: _scaled(100 / setting.ranks, one.reduction(setting, base)),
    "saved": lambda one, setting, base: _saved(one.reduction(setting, base)),
    "exponent": Reading.exponent,
    "tokens/rank": lambda one, setting, base: setting.seq / setting.ranks,
}
"""How a quantity is read, by the setting and what it is compared with."""
