"""The figures that older implementations published, and how each is read from the result of the suite `seeds`."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from dilkit.tools.bench.suites.seeds import DATA, GROUPS, PASSES, SETTINGS, Setting
from dilkit.tools.console.text import in_bytes
from dilkit.tools.report.document import Table
from dilkit.tools.results.rows import CaseRows, Row, RowsResult
from dilkit.tools.results.statistics import exponent

CARD = "GTX 1080"
"""The hardware of all published figures (sm_61, 8 GB)."""
KIB, MIB = 2**10, 2**20
CLAIMS = ("seed figure", "hardware", "claimed", "ours here", "ours per measured TFLOP/s", "what to know about it")
MISSING = "not measured"
SPEEDS = {"ms": 1.0, "tokens/s": -1.0}
"""Quantities that depend on the machine's speed, and the power of it that takes it out of them."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One published figure.

    Attributes:
        quantity: measure of `setting`, or of it beside `base`, that `Measured.quantity` reads.
        setting: None for "longest", the tokens that fit into a budget of memory, and for figures that nobody can measure.
        who: implementation, "auto" being the automatic choice; `base_who`: that of `base`.
    """

    document: str
    figure: str
    claimed: float
    quantity: str
    setting: Setting | None = None
    base: Setting | None = None
    who: str = "auto"
    base_who: str = "auto"
    note: str = ""

    @property
    def unit(self) -> str:
        """The unit of the figure, to stand behind a number."""
        return str(DATA["units"][self.quantity])

    @property
    def hardware(self) -> str:
        """The hardware on which it was taken."""
        ranks = self.setting.ranks if self.setting else 2 if "2 GPUs" in self.figure else 1
        return CARD if ranks == 1 else f"{ranks} x {CARD}"


@cache
def claims() -> tuple[Claim, ...]:
    """All figures of the documents, in their order."""
    named: dict[str, Mapping[str, Any]] = dict(setting=SETTINGS, base=SETTINGS, note=DATA["notes"])
    return tuple(
        Claim(document=name, **{field: named.get(field, {}).get(value, value) for field, value in row.items()})
        for name, rows in DATA["documents"].items()
        for row in rows
    )


def peak(row: Row | None) -> int | None:
    """Bytes of the rank that needs most."""
    return max(row.values["rank_bytes"]) if row and row.values.get("rank_bytes") else None


@dataclass(frozen=True)
class Measured:
    """The cases of a result by table, setting and pass."""

    result: RowsResult
    cases: Mapping[tuple[str, Setting, bool], CaseRows]

    @classmethod
    def of(cls, result: RowsResult) -> Measured:
        """The cases of `result`, those of ranks that failed left out."""
        cases = (case for case in result.cases("settings", "ranks", "growth", "cache") if "seq" in case.case)
        return cls(result, {(c.table, Setting.of(dict(c.case)), c.case["pass"] == PASSES[1]): c for c in cases})

    def row(self, setting: Setting, who: str, backward: bool = False, table: str = "settings") -> Row | None:
        """The row of an implementation that was timed at a setting."""
        case = self.cases.get((table, setting, backward))
        return case.rows[who] if case and case.timed(who) else None

    def ours(self, claim: Claim) -> tuple[float | None, float | None, str]:
        """A published quantity here, the same on a machine whose matmul reaches one TFLOP/s, and why there is none."""
        if claim.quantity == "longest":
            for case in self.result.cases("longest", **{"pass": PASSES[0]}):
                values = case.rows[claim.who].values if claim.who in case.rows else {}
                return values.get("seq"), None, f"in {in_bytes(values['limit_bytes'])}" if values else MISSING
            return None, None, MISSING
        if claim.setting is None:
            return None, None, "nothing to measure"
        try:
            value = self.quantity(claim, claim.setting, claim.base or claim.setting)
        except LookupError as missing:
            return None, None, str(missing.args[0])
        rate = self.tflops(claim.setting) if claim.quantity in SPEEDS else None
        return value, value * rate ** SPEEDS[claim.quantity] if rate else None, ""

    def quantity(self, claim: Claim, setting: Setting, base: Setting) -> float:
        """A quantity at `setting`, or of it beside `base`. Raises LookupError, with the reason, where it was not measured."""
        match claim.quantity:
            case "ms":
                return 1000 * self.seconds(setting, claim.who)
            case "tokens/s":
                return setting.tokens / (self.result.quick or 1) / self.seconds(setting, claim.who)
            case "MiB":
                return self.bytes(setting, claim.who) / MIB
            case "KiB/token":
                return self.per_token(setting, claim.who)
            case "KiB/token ratio":
                return self.per_token(setting, claim.who) / self.per_token(base, claim.who)
            case "speedup" | "slowdown":
                one_job = setting.ranks > base.ranks  # of ranks beside one, both are of one job
                slow = self.seconds(setting, "one rank") if one_job else self.seconds(base, claim.base_who)
                faster = slow / self.seconds(setting, claim.who)
                return faster if claim.quantity == "speedup" else 1 / faster
            case "reduction" | "efficiency" | "saved":
                less = self.bytes(base, "ranks") / self.bytes(setting, "ranks")
                return dict(reduction=less, efficiency=100 / setting.ranks * less, saved=100 * (1 - 1 / less))[claim.quantity]
            case "exponent":
                between = [one for one in GROUPS["lengths"].values() if base.seq <= one.seq <= setting.seq]
                return exponent([one.seq for one in between], [self.seconds(one, claim.who) for one in between])
            case _:
                return setting.seq / setting.ranks

    def seconds(self, setting: Setting, who: str) -> float:
        """The median time of a call; over several ranks, of all of them unless `who` is "one rank"."""
        over_ranks = setting.ranks > 1 or who == "one rank"
        case = self.cases.get(("ranks" if over_ranks else "settings", setting, False))
        row = case.rows.get("ranks" if over_ranks and who != "one rank" else who) if case else None
        if row and row.samples:
            return row.median_s
        raise LookupError(f"{row.verdict}: {'; '.join(row.reasons)}" if row and row.reasons else MISSING)

    def bytes(self, setting: Setting, who: str) -> int:
        """Peak memory; over several ranks, or where `who` is "ranks", of the rank that needs most."""
        if setting.ranks > 1 or who == "ranks":
            known = peak(self.row(setting, "ranks", table="ranks"))
        else:
            row = self.row(setting, who)
            known = row.values.get("memory_bytes") if row else None
        if known is None:
            raise LookupError(MISSING)
        return int(known)

    def per_token(self, setting: Setting, who: str) -> float:
        """Peak memory a token, in KiB."""
        return self.bytes(setting, who) / KIB / setting.tokens * (self.result.quick or 1)

    def tflops(self, setting: Setting) -> float | None:
        """The rate of the matmul beside the setting; of ranks, the median of all."""
        case = self.cases.get(("settings", setting, False)) if setting.ranks == 1 else None
        cases = [case] if case else [case for (table, *_), case in self.cases.items() if table == "settings"]
        rates = [one.rows["matmul"].values["gflops"] / 1000 for one in cases if "matmul" in one.rows]
        return statistics.median(rates) if rates else None


def claim_table(result: RowsResult) -> Iterator[Table]:
    """Every published figure beside ours."""
    measured = Measured.of(result)
    yield Table("Every published figure", CLAIMS, tuple(_claim_row(claim, *measured.ours(claim)) for claim in claims()))


def _claim_row(claim: Claim, ours: float | None, per_tflops: float | None, why: str) -> tuple[str, ...]:
    def rounded(value: float) -> str:
        shown = f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
        return shown + claim.unit

    here = ", ".join(filter(None, (None if ours is None else rounded(ours), why)))
    speed = "-" if per_tflops is None else rounded(per_tflops)
    return f"{claim.document}: {claim.figure}", claim.hardware, _as_published(claim), here, speed, claim.note


def _as_published(claim: Claim) -> str:
    """The figure with all its digits."""
    return f"{claim.claimed:,.12g}{claim.unit}"


def claimed(setting: Setting, quantities: Collection[str], who: Collection[str] = ()) -> str:
    """Return the figures published of a setting, and their hardware; `who`: of these implementations alone."""
    matching = [c for c in claims() if c.setting == setting and c.quantity in quantities and (not who or c.who in who)]
    return f"{', '.join(dict.fromkeys(map(_as_published, matching)))} ({matching[0].hardware})" if matching else "-"
