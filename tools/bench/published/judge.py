"""Every published figure beside what it is here: pure functions of a result."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from dilkit.tools.bench.published.claims import Claim, claims, group
from dilkit.tools.bench.published.record import PublishedCase, PublishedFigure, PublishedResult, Setting
from dilkit.tools.console.text import in_bytes
from dilkit.tools.results.statistics import exponent

KIB, MIB = 2**10, 2**20
MISSING = "not measured"
SPEEDS = {"ms": 1.0, "tokens/s": -1.0}
"""Quantities that depend on the machine's speed, and the power of it that takes it out of them."""


def figures(result: PublishedResult) -> tuple[PublishedFigure, ...]:
    """Every claim beside what it is here, none left out. What was published are forward passes alone."""
    ranks = {row.setting: row for job in result.ranks for row in job.rows if not row.backward}
    return tuple(_figure(Reading(result, ranks, claim)) for claim in claims())


def _figure(reading: Reading) -> PublishedFigure:
    claim = reading.claim
    fields = ("document", "figure", "claimed", "quantity", "note", "hardware")
    figure = PublishedFigure(**{name: getattr(claim, name) for name in fields})
    if claim.quantity == "longest":
        longest = [one for one in reading.result.longest if (one.who, one.backward) == (claim.who, False)]
        return (
            replace(figure, ours=longest[0].seq, why=f"in {in_bytes(longest[0].limit_bytes)}")
            if longest
            else replace(figure, why=MISSING)
        )
    if claim.setting is None:
        return replace(figure, why="nothing to measure")
    try:
        ours = READ[claim.quantity](reading, claim.setting, claim.base or claim.setting)
    except LookupError as missing:
        return replace(figure, why=str(missing.args[0]))
    rate = reading.tflops(claim.setting) if claim.quantity in SPEEDS else None
    return replace(figure, ours=ours, per_tflops=ours * rate ** SPEEDS[claim.quantity] if rate else None)


@dataclass(frozen=True)
class Reading:
    """What a result holds of a claim; LookupError, with the reason, where that is nothing. `ranks`: those at a fixed length."""

    result: PublishedResult
    ranks: dict[Setting, PublishedCase]
    claim: Claim

    def seconds(self, setting: Setting, who: str = "") -> float:
        """The median of a call, by whom the claim names."""
        over = setting.ranks > 1 or who == "one rank"
        case = self.ranks.get(setting) if over else self.result.case(setting)
        entry = case.entries.get(who or ("ranks" if over else self.claim.who)) if case else None
        if entry and entry.time:
            return entry.time.median_s
        raise LookupError(f"{entry.verdict}: {'; '.join(entry.reasons)}" if entry and entry.reasons else MISSING)

    def tokens(self, setting: Setting) -> float:
        """Those that were measured."""
        return setting.tokens / (self.result.quick or 1)

    def bytes(self, setting: Setting, sharded: bool = False) -> int:
        """Peak memory, of the rank that needs most; `sharded`: measured as over ranks, though it be one."""
        if setting.ranks > 1 or sharded:
            taken = self.ranks[setting].peak if setting in self.ranks else None
        else:
            entry = self.result.entry(setting, self.claim.who)
            taken = entry.memory_bytes if entry else None
        if taken is None:
            raise LookupError(MISSING)
        return taken

    def per_token(self, setting: Setting) -> float:
        """KiB."""
        return self.bytes(setting) / KIB / self.tokens(setting)

    def speed_up(self, setting: Setting, base: Setting) -> float:
        """The time of base over that of the setting; of ranks beside one, both are of one job."""
        beside = setting.ranks > base.ranks
        slow = self.seconds(setting, "one rank") if beside else self.seconds(base, self.claim.base_who)
        return slow / self.seconds(setting)

    def reduction(self, setting: Setting, base: Setting) -> float:
        """The memory of base over that of a rank."""
        return self.bytes(base, sharded=True) / self.bytes(setting, sharded=True)

    def exponent(self, setting: Setting, base: Setting) -> float:
        """Of time in the length, over all lengths between the two."""
        between = [s for s in group("lengths").values() if base.seq <= s.seq <= setting.seq]
        return exponent([s.seq for s in between], [self.seconds(s) for s in between])

    def tflops(self, setting: Setting) -> float | None:
        """What the matmul beside the setting reached; of ranks, the median of all."""
        case = self.result.case(setting) if setting.ranks == 1 else None
        rates = [one.matmul.gflops / 1000 for one in ([case] if case else self.result.cases) if one.matmul]
        return statistics.median(rates) if rates else None


READ: dict[str, Callable[[Reading, Setting, Setting], float]] = {
    "ms": lambda one, setting, base: 1000 * one.seconds(setting),
    "tokens/s": lambda one, setting, base: one.tokens(setting) / one.seconds(setting),
    "MiB": lambda one, setting, base: one.bytes(setting) / MIB,
    "KiB/token": lambda one, setting, base: one.per_token(setting),
    "KiB/token ratio": lambda one, setting, base: one.per_token(setting) / one.per_token(base),
    "speedup": Reading.speed_up,
    "slowdown": lambda one, setting, base: 1 / one.speed_up(setting, base),
    "reduction": Reading.reduction,
    "efficiency": lambda one, setting, base: 100 / setting.ranks * one.reduction(setting, base),
    "saved": lambda one, setting, base: 100 * (1 - 1 / one.reduction(setting, base)),
    "exponent": Reading.exponent,
    "tokens/rank": lambda one, setting, base: setting.seq / setting.ranks,
}
"""How a quantity is read, by the setting and what it is compared with."""
