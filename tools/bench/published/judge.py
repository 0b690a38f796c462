"""Every published figure beside what it is here: pure functions of a result."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from dilkit.tools.bench.published.claims import Claim, claims
from dilkit.tools.bench.published.settings import lengths
from dilkit.tools.console.text import in_bytes
from dilkit.tools.results.kinds.published import Longest, PublishedFigure, PublishedResult, RanksCase, Setting
from dilkit.tools.results.record import Case
from dilkit.tools.results.statistics import exponent

KIB, MIB = 2**10, 2**20
SPEEDS = {"ms": 1.0, "tokens/s": -1.0}
"""Quantities that depend on the machine's speed, and the power of it that takes it out of them."""


def figures(result: PublishedResult) -> tuple[PublishedFigure, ...]:
    """Every claim beside what it is here, none left out."""
    found = Found(result)
    return tuple(_figure(claim, found) for claim in claims())


@dataclass(frozen=True)
class Found:
    """What a result holds, by setting: forward passes alone, which is all that was ever published."""

    result: PublishedResult

    @cached_property
    def ranks(self) -> dict[Setting, RanksCase]:
        """Ranks at a fixed length."""
        return {row.setting: row for job in self.result.ranks for row in job.rows if not row.backward}

    @cached_property
    def longest(self) -> dict[str, Longest]:
        """By implementation."""
        return {one.who: one for one in self.result.longest if not one.backward}

    def seconds(self, setting: Setting, who: str) -> float | None:
        """The median of a call."""
        if setting.ranks > 1:
            return _median(self.ranks.get(setting), "ranks")
        return _median(self.result.case(setting), who)

    def tokens(self, setting: Setting) -> float:
        """Those that were measured."""
        return setting.tokens / (self.result.quick or 1)

    def bytes(self, setting: Setting, who: str, sharded: bool = False) -> int | None:
        """Peak memory, of the rank that needs most; `sharded`: measured as over ranks, though it be one."""
        if setting.ranks > 1 or sharded:
            return self.ranks[setting].peak if setting in self.ranks else None
        case = self.result.case(setting)
        return case.entries[who].memory_bytes if case and who in case.entries else None

    def tflops(self, setting: Setting) -> float | None:
        """What the matmul beside the setting reached; of ranks, the median of all."""
        case = self.result.case(setting)
        if case and case.matmul and setting.ranks == 1:
            return case.matmul.gflops / 1000
        rates = [one.matmul.gflops / 1000 for one in self.result.cases if one.matmul]
        return statistics.median(rates) if rates else None

    def remark(self, claim: Claim) -> str:
        """Why there is no figure; of a longest sequence, in what memory it is."""
        if claim.quantity == "longest":
            return f"in {in_bytes(self.longest[claim.who].limit_bytes)}" if claim.who in self.longest else "not measured"
        if claim.setting is None:
            return "nothing to measure"
        case = self.result.case(claim.setting)
        entry = case.entries.get(claim.who) if case else None
        return f"{entry.verdict}: {'; '.join(entry.reasons)}" if entry and entry.reasons else "not measured"


def _median(case: Case | None, who: str) -> float | None:
    time = case.entries[who].time if case and case.timed(who) else None
    return time.median_s if time else None


def _figure(claim: Claim, found: Found) -> PublishedFigure:
    ours: float | None = None
    per_tflops: float | None = None
    if claim.quantity == "longest":
        ours = found.longest[claim.who].seq if claim.who in found.longest else None
    elif claim.setting:
        ours = READ[claim.quantity](found, claim, claim.setting, claim.base or claim.setting)
        rate = found.tflops(claim.setting) if claim.quantity in SPEEDS else None
        per_tflops = ours * rate ** SPEEDS[claim.quantity] if ours is not None and rate else None
    return PublishedFigure(
        document=claim.document,
        figure=claim.figure,
        claimed=claim.claimed,
        quantity=claim.quantity,
        note=claim.note,
        hardware=claim.hardware,
        ours=ours,
        per_tflops=per_tflops,
        why=found.remark(claim) if ours is None or claim.quantity == "longest" else None,
    )


def _over(above: float | None, below: float | None) -> float | None:
    """The ratio, where there are both."""
    return above / below if above and below else None


def _scaled(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _speed_up(found: Found, claim: Claim, setting: Setting, base: Setting) -> float | None:
    """The time of base over that of the setting; of ranks beside one, both are of one job."""
    over_one = setting.ranks > base.ranks
    slow = _median(found.ranks.get(setting), "one rank") if over_one else found.seconds(base, claim.base_who)
    return _over(slow, found.seconds(setting, claim.who))


def _slow_down(found: Found, claim: Claim, setting: Setting, base: Setting) -> float | None:
    return _over(1.0, _speed_up(found, claim, setting, base))


def _reduction(found: Found, claim: Claim, setting: Setting, base: Setting) -> float | None:
    """The memory of base over that of a rank."""
    return _over(found.bytes(base, claim.base_who, True), found.bytes(setting, claim.who, True))


def _saved(found: Found, claim: Claim, setting: Setting, base: Setting) -> float | None:
    ratio = _reduction(found, claim, setting, base)
    return 100 * (1 - 1 / ratio) if ratio else None


def _per_token(found: Found, claim: Claim, setting: Setting, base: Setting) -> float | None:
    return _over(_scaled(1 / KIB, found.bytes(setting, claim.who)), found.tokens(setting))


def _exponent(found: Found, claim: Claim, setting: Setting, base: Setting) -> float | None:
    """Of time in the length, over all lengths between the two."""
    between = [s for s in lengths() if base.seq <= s.seq <= setting.seq]
    times = {s.seq: taken for s in between if (taken := found.seconds(s, claim.who))}
    return exponent(list(times), list(times.values())) if len(times) > 1 else None


READ: dict[str, Callable[[Found, Claim, Setting, Setting], float | None]] = {
    "ms": lambda found, claim, setting, base: _scaled(1000, found.seconds(setting, claim.who)),
    "tokens/s": lambda found, claim, setting, base: _over(found.tokens(setting), found.seconds(setting, claim.who)),
    "MiB": lambda found, claim, setting, base: _scaled(1 / MIB, found.bytes(setting, claim.who)),
    "KiB/token": _per_token,
    "KiB/token ratio": lambda found, claim, setting, base: _over(
        _per_token(found, claim, setting, base), _per_token(found, claim, base, base)
    ),
    "speedup": _speed_up,
    "slowdown": _slow_down,
    "reduction": _reduction,
    "efficiency": lambda found, claim, setting, base: _scaled(100 / setting.ranks, _reduction(found, claim, setting, base)),
    "saved": _saved,
    "exponent": _exponent,
    "tokens/rank": lambda found, claim, setting, base: setting.seq / setting.ranks,
}
"""How a quantity is read, by the setting and what it is compared with."""
