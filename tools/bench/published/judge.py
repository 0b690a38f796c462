"""What the published figures are here: pure functions of a result."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from dilkit.tools.bench.published.claim import Claim, Setting
from dilkit.tools.bench.published.figures import claims
from dilkit.tools.bench.published.settings import LENGTHS
from dilkit.tools.console.text import in_bytes
from dilkit.tools.report.kinds.bench_report import exponent

MIB = 2**20
SPEEDS = {"ms": 1.0, "tokens/s": -1.0}
"""Quantities that depend on the machine's speed, and the power of it that takes it out of them."""

Result = dict[str, Any]


class Found:
    """What a result holds, found by setting: forward passes alone, which is all that was ever published."""

    def __init__(self, result: Result) -> None:
        self._cases = {Setting.from_dict(c["setting"]): c for c in result["cases"] if not c["backward"]}
        rows = [row for job in result["ranks"] for row in job["rows"] if not row["backward"]]
        self._ranks = {Setting.from_dict(row["setting"]): row for row in rows}
        self._divisor = result["quick"] or 1
        self.longest = {e["who"]: e for e in result["longest"] if not e["backward"]}
        self.rates = [c["matmul"]["gflops"] / 1000 for c in result["cases"]]

    def seconds(self, setting: Setting, who: str) -> float | None:
        """The median of a call."""
        if setting.ranks > 1:
            return _median(self._ranks.get(setting), "ranks")
        return _median(self._cases.get(setting), who)

    def tokens(self, setting: Setting) -> float:
        """Those that were measured."""
        return setting.tokens / self._divisor

    def one_rank(self, setting: Setting) -> float | None:
        """The median of one rank beside the ranks of `setting`."""
        return _median(self._ranks.get(setting), "one rank")

    def bytes(self, setting: Setting, who: str, sharded: bool = False) -> int | None:
        """Peak memory, of the rank that needs most; `sharded`: measured as over ranks, though it be one."""
        if setting.ranks > 1 or sharded:
            peaks = self._ranks.get(setting, {}).get("peak_bytes")
            return max(peaks) if peaks else None
        found: int | None = self._cases.get(setting, {}).get("entries", {}).get(who, {}).get("memory_bytes")
        return found

    def tflops(self, setting: Setting) -> float | None:
        """What the matmul beside the setting reached; of ranks, the median of all."""
        if setting in self._cases and setting.ranks == 1:
            return float(self._cases[setting]["matmul"]["gflops"]) / 1000
        return statistics.median(self.rates) if self.rates else None

    def remark(self, claim: Claim) -> str:
        """Why there is no figure; of a longest sequence, in what memory it is."""
        if claim.quantity == "longest":
            found = self.longest.get(claim.who)
            return f"in {in_bytes(found['limit_bytes'])}" if found else "not measured"
        if claim.setting is None:
            return "nothing to measure"
        entry = self._cases.get(claim.setting, {}).get("entries", {}).get(claim.who)
        return f"{entry['verdict']}: {'; '.join(entry['reasons'])}" if entry and entry["reasons"] else "not measured"


def _median(case: dict[str, Any] | None, who: str) -> float | None:
    time = (case or {}).get("entries", {}).get(who, {}).get("time")
    return time["median_s"] if time else None


def judge(result: Result) -> list[dict[str, Any]]:
    """Every claim beside what it is here, as plain data, none left out.

    `ours` is None where there is no figure, and `why` says why; of a longest sequence, in what memory. `per_tflops`: `ours` on a
    machine of one TFLOP/s, going by the matmul measured beside it; None of what does not depend on speed.
    """
    found = Found(result)
    return [_judge(claim, found) for claim in claims()]


def _judge(claim: Claim, found: Found) -> dict[str, Any]:
    names = ("document", "figure", "claimed", "quantity", "note")
    told = {name: value for name, value in asdict(claim).items() if name in names} | dict(hardware=claim.hardware)
    read = READ.get(claim.quantity) if claim.setting or claim.quantity == "longest" else None
    ours = None if read is None else read(claim, found)
    why = found.remark(claim) if ours is None or claim.quantity == "longest" else None
    rate = found.tflops(claim.setting) if claim.setting and claim.quantity in SPEEDS else None
    per_tflops = ours * rate ** SPEEDS[claim.quantity] if ours is not None and rate else None
    return told | dict(ours=ours, per_tflops=per_tflops, why=why)


def _ms(claim: Claim, found: Found) -> float | None:
    taken = _seconds(claim, found)
    return taken and 1000 * taken


def _seconds(claim: Claim, found: Found) -> float | None:
    return found.seconds(claim.setting, claim.who)


def _rate(claim: Claim, found: Found) -> float | None:
    taken = _seconds(claim, found)
    return taken and found.tokens(claim.setting) / taken


def _mib(claim: Claim, found: Found) -> float | None:
    held = found.bytes(claim.setting, claim.who)
    return None if held is None else held / MIB


def _kib_per_token(claim: Claim, found: Found) -> float | None:
    held = _mib(claim, found)
    return held and 1024 * held / found.tokens(claim.setting)


def _speedup(claim: Claim, found: Found) -> float | None:
    taken = _seconds(claim, found)
    over = claim.setting.ranks > claim.base.ranks
    base = found.one_rank(claim.setting) if over else found.seconds(claim.base, claim.base_who)
    return base / taken if base and taken else None


def _slowdown(claim: Claim, found: Found) -> float | None:
    ratio = _speedup(claim, found)
    return 1 / ratio if ratio else None


def _reduction(claim: Claim, found: Found) -> float | None:
    many, one = found.bytes(claim.setting, claim.who, True), found.bytes(claim.base, claim.base_who, True)
    return one / many if one and many else None


def _efficiency(claim: Claim, found: Found) -> float | None:
    ratio = _reduction(claim, found)
    return ratio and 100 * ratio / claim.setting.ranks


def _saved(claim: Claim, found: Found) -> float | None:
    ratio = _reduction(claim, found)
    return ratio and 100 * (1 - 1 / ratio)


def _per_token_ratio(claim: Claim, found: Found) -> float | None:
    last, first = (found.bytes(s, claim.who) for s in (claim.setting, claim.base))
    return last / claim.setting.tokens / (first / claim.base.tokens) if last and first else None


def _exponent(claim: Claim, found: Found) -> float | None:
    between = [s for s in LENGTHS if claim.base.seq <= s.seq <= claim.setting.seq]
    times = {s.seq: taken for s in between if (taken := found.seconds(s, claim.who))}
    return exponent(list(times), list(times.values())) if len(times) > 1 else None


def _longest(claim: Claim, found: Found) -> float | None:
    return found.longest.get(claim.who, {}).get("seq")


READ: dict[str, Callable[[Claim, Found], float | None]] = {
    "ms": _ms,
    "tokens/s": _rate,
    "MiB": _mib,
    "KiB/token": _kib_per_token,
    "KiB/token ratio": _per_token_ratio,
    "speedup": _speedup,
    "slowdown": _slowdown,
    "reduction": _reduction,
    "efficiency": _efficiency,
    "saved": _saved,
    "exponent": _exponent,
    "longest": _longest,
    "tokens/rank": lambda claim, found: claim.setting.seq / claim.setting.ranks,
}
