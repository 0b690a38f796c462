"""The report of the suite `seeds`: all that was measured, and every published figure beside ours."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from dilkit.tools.bench.suites.seeds import DATA, GROUPS, HELD, PASSES, SETTINGS, SUMMARIES, TWINS, Setting
from dilkit.tools.console.text import in_bytes, in_seconds
from dilkit.tools.report import views
from dilkit.tools.report.document import Axis, Document, Plot, Point, Series, Table
from dilkit.tools.report.headline import placed
from dilkit.tools.report.points import grouped, plain, speed_up
from dilkit.tools.report.views import Column, TableView, fact
from dilkit.tools.results.rows import YARDSTICKS, CaseRows, Row, RowsResult
from dilkit.tools.results.statistics import exponent, median_interval, ratio, ratio_interval

CARD = "GTX 1080"
"""The hardware of all published figures (sm_61, 8 GB)."""
KIB, MIB = 2**10, 2**20
MISSING = "not measured"
SPEEDS = {"ms": 1.0, "tokens/s": -1.0}
"""Quantities that depend on the machine's speed, and the power of it that takes it out of them."""
SHOWN = ("ms", "MiB", "tokens/s", "speedup", "slowdown", "reduction")
"""Quantities that stand beside what was measured at their setting."""
OURS = ("auto", "head-split")
GROWING = {"lengths": "seq", "held": "seq", "heads": "heads", "batches": "batch"}
"""Groups along which one fact of the settings grows."""
SETTINGS_OF = {name: tuple(settings.values()) for name, settings in GROUPS.items() if name != "ranks"} | dict(held=HELD)
"""Settings on one device, by the group that compares them."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One published figure: a `quantity` of `who` at `setting`, or of that beside `base_who` at `base`.

    `setting` is None for "longest", the tokens that fit into a budget of memory, and for figures that nobody can measure.
    """

    document: str
    figure: str
    claimed: float
    quantity: str
    setting: Setting | None = None
    base: Setting | None = None
    who: str
    base_who: str
    note: str = ""

    @property
    def hardware(self) -> str:
        """The hardware on which it was taken."""
        ranks = self.setting.ranks if self.setting else 2 if "2 GPUs" in self.figure else 1
        return CARD if ranks == 1 else f"{ranks} x {CARD}"

    @property
    def published(self) -> str:
        """The figure with all its digits."""
        return f"{self.claimed:,.12g}{DATA['units'][self.quantity]}"

    def ours(self, result: RowsResult) -> tuple[float | None, float | None, str]:
        """The quantity here, the same on a machine whose matmul reaches one TFLOP/s, and why there is none."""
        if self.quantity == "longest":
            for case in result.cases("longest", **{"pass": PASSES[0]}):
                if row := case.rows.get(self.who):
                    return row.values["seq"], None, f"in {in_bytes(row.values['limit_bytes'])}"
            return None, None, MISSING
        if self.setting is None:
            return None, None, "nothing to measure"
        try:
            row = row_at(result, self.setting, self.who)
            base = row_at(result, self.base, self.base_who) if self.base else row
            amount = _exponent(result, base, row) if self.quantity == "exponent" else MEASURES[self.quantity](row, base)
        except LookupError as missing:
            return None, None, str(missing.args[0])
        rate = _matmul_tflops(result, self.setting) if self.quantity in SPEEDS else None
        return amount, amount * rate ** SPEEDS[self.quantity] if rate else None, ""


@cache
def claims() -> tuple[Claim, ...]:
    """All figures of the documents, in their order."""
    figures = []
    for name, rows in DATA["documents"].items():
        for row in rows:
            setting, base = (SETTINGS.get(row.get(name)) for name in ("setting", "base"))
            who, base_who = ("ranks" if one and one.ranks > 1 else "auto" for one in (setting, base))
            named = dict(setting=setting, base=base, note=DATA["notes"].get(row.get("note"), ""))
            figures.append(Claim(document=name, **dict(who=who, base_who=base_who) | row | named))
    return tuple(figures)


def row_at(result: RowsResult, setting: Setting, who: str) -> Row:
    """The row of an implementation that was timed at a setting. Raises LookupError, with the reason, where there is none."""
    table = "ranks" if who in ("ranks", "one rank") else "settings"
    row = next((case.rows.get(who) for case in result.cases(table, **setting.case())), None)
    if row and row.samples:
        return row
    raise LookupError(f"{row.verdict}: {'; '.join(row.reasons)}" if row and row.reasons else MISSING)


def _exponent(result: RowsResult, first: Row, last: Row) -> float:
    """The growth of time with the length, between two rows of one implementation."""
    settings = [one for one in GROUPS["lengths"].values() if first.case["seq"] <= one.seq <= last.case["seq"]]
    return exponent([one.seq for one in settings], [row_at(result, one, last.who).median_s for one in settings])


def peak_bytes(row: Row) -> int:
    """Peak memory with inputs, over ranks of the one that needs most. Raises LookupError where it was not measured."""
    if known := row.values.get("memory_bytes") or max(row.values.get("rank_bytes", (0,))):
        return int(known)
    raise LookupError(MISSING)


def _per_token(row: Row) -> float:
    return peak_bytes(row) / KIB / float(row.values["tokens"])


MEASURES: dict[str, Callable[[Row, Row], float]] = {
    "ms": lambda row, base: 1000 * row.median_s,
    "tokens/s": lambda row, base: float(row.values["tokens"]) / row.median_s,
    "tokens/rank": lambda row, base: float(row.case["seq"] / row.case["ranks"]),
    "MiB": lambda row, base: peak_bytes(row) / MIB,
    "KiB/token": lambda row, base: _per_token(row),
    "KiB/token ratio": lambda row, base: _per_token(row) / _per_token(base),
    "speedup": lambda row, base: base.median_s / row.median_s,
    "slowdown": lambda row, base: row.median_s / base.median_s,
    "reduction": lambda row, base: peak_bytes(base) / peak_bytes(row),
    "efficiency": lambda row, base: float(100 / row.case["ranks"] * peak_bytes(base) / peak_bytes(row)),
    "saved": lambda row, base: 100 * (1 - peak_bytes(row) / peak_bytes(base)),
}
"""Quantities of a row, or of it beside the base's."""


def _matmul_tflops(result: RowsResult, setting: Setting) -> float | None:
    """The rate of the matmul beside the setting; of ranks, the median of all."""
    cases = result.cases("settings", **(setting.case() if setting.ranks == 1 else {}))
    rates = [case.rows["matmul"].values["gflops"] / 1000 for case in cases if "matmul" in case.rows]
    return statistics.median(rates) if rates else None


def claimed(case: dict[str, Any], who: str = "") -> str:
    """Return the figures published of the forward pass of a case, and their hardware; `who`: of this implementation alone."""
    matching = [
        claim
        for claim in claims()
        if claim.setting and claim.quantity in SHOWN and who in ("", claim.who) and claim.setting.case().items() <= case.items()
    ]
    figures = ", ".join(dict.fromkeys(claim.published for claim in matching))
    return f"{figures} ({matching[0].hardware})" if matching else "-"


def by_group(result: RowsResult) -> RowsResult:
    """Return `result` with the rows of each group of settings in a table of its own too, and with derived values in these.

    `claimed`: published figures; `first_s`: seconds at the group's first setting; `growth`: exponents along the group; of ranks,
    `memory_bytes`: of the one that needs most, and how that compares with one rank alone.
    """
    rows = [row for row in result.rows if row.table not in ("ranks", "growth")]
    rows += [*_beside_one_rank(result, "ranks"), *_beside_one_rank(result, "growth")]
    rows = [replace(row, case=row.case | dict(what=f"{row.case['seq']:,} tokens")) if "seq" in row.case else row for row in rows]
    for group, settings in SETTINGS_OF.items():
        facts = [setting.case(backward) for setting in settings for backward in (False, True)]
        cases = [case for one in facts for case in result.cases("settings", **one)]
        timed = [case.rows[who] for case in cases for who in case.rows if case.timed(who) and who not in YARDSTICKS]
        for row in timed:
            alike = [one for one in timed if (one.who, one.case["pass"]) == (row.who, row.case["pass"])]
            derived = dict(group=group, first_s=alike[0].median_s, growth=_growth(alike, GROWING.get(group, "")))
            rows.append(replace(row, table=group, values=row.values | derived | dict(claimed=claimed(row.case, row.who))))
    return replace(result, rows=tuple(rows))


def _growth(rows: list[Row], size: str) -> str:
    """Growth of time, FLOPs and memory with a fact of the settings, fitted."""
    if not size or len(rows) < 2:
        return ""
    fitted = {"time": [row.median_s for row in rows], "FLOPs": [row.values["flops"] for row in rows]}
    if all(row.values.get("memory_bytes") for row in rows):
        fitted["memory"] = [row.values["memory_bytes"] for row in rows]
    sizes = [row.case[size] for row in rows]
    fits = ", ".join(f"{name} ~ {size}^{exponent(sizes, values):.2f}" for name, values in fitted.items())
    return f"{rows[0].who}, {rows[0].case['pass']}: {fits}"


def _beside_one_rank(result: RowsResult, table: str) -> Iterator[Row]:
    """Rows over ranks, those of one length together, or of as many tokens a rank; memory beside that of one rank alone."""

    def job(row: Row) -> tuple[Any, ...]:
        length = row.case["seq"] // (row.case["ranks"] if table == "growth" else 1)
        return length, *(row.case[name] for name in ("batch", "segment_lengths", "pass", "by"))

    alone: dict[tuple[Any, ...], int] = {}
    rows = [row for row in result.rows if row.table == table]
    for row in sorted(rows, key=lambda row: (*job(row), row.case["ranks"])):
        derived: dict[str, Any] = dict(claimed=claimed(row.case))
        if row.values.get("rank_bytes"):
            most, ranks = peak_bytes(row), row.case["ranks"]
            derived["memory_bytes"] = most
            one = alone.setdefault(job(row), most) if ranks == 1 else alone.get(job(row))
            if one and ranks > 1:
                share = one / most / (1 if table == "growth" else ranks)
                derived |= dict(of_one=f"{one / most:.2f}x", efficiency=f"{share:.1%}")
        yield replace(row, values=row.values | derived)


def _off(row: Row, case: CaseRows) -> str:
    """Distance from the attention of the pattern, in units of its largest value, where another function is computed."""
    differs = row.values.get("differs", {})
    far = {"result": differs.get("out_relative"), "gradient": differs.get("dquery_relative")}
    return ", ".join(f"{name} {share:.1%}" for name, share in far.items() if share and share > 1e-3) or "-"


def _interval(row: Row, case: CaseRows) -> str:
    return f"{in_seconds(row.median_s)} ({' - '.join(map(in_seconds, median_interval(row.samples)))})"


def faster_than(base: str, header: str) -> Column:
    """The speed-up over another implementation in the same case, with its interval."""

    def cell(row: Row, case: CaseRows) -> str:
        if not case.timed(base):
            return "-"
        samples = case.rows[base].samples, row.samples
        return "{:.2f}x ({:.2f} - {:.2f})".format(ratio(*samples), *ratio_interval(*samples))

    return Column(header, cell)


def _longest_per_token(row: Row, case: CaseRows) -> str:
    most = next((trial["bytes"] for trial in row.values["tried"] if trial["seq"] == row.values["seq"]), None)
    return f"{most / KIB / (row.values['seq'] or 1):.2f}" if most else "-"


LENGTH, BATCH, PASS, WHO, CLAIMED = fact("seq", "tokens", "{:,}"), fact("batch"), fact("pass"), views.WHO, fact("claimed")
SEGMENTS = views.label("segments / rates", "{segment_lengths} / {dilation_rates}")
SIZE = LENGTH, BATCH, fact("heads"), SEGMENTS
CALL = WHO, PASS, Column("time", _interval)
SPEED = Column("tokens/s", lambda row, case: f"{row.values['tokens'] / row.median_s:,.0f}")
MEMORY = views.value("memory_bytes", "memory", "bytes")
PER_TOKEN = Column("KiB/token", lambda row, case: f"{_per_token(row):.2f}" if row.values.get("memory_bytes") else "-")
OVER_FIRST = Column("over the first", lambda row, case: f"{row.median_s / row.values['first_s']:.1f}x")
SCALING = *SIZE, fact("dtype"), *CALL, OVER_FIRST, SPEED, MEMORY, PER_TOKEN, CLAIMED
COMPARED = LENGTH, *CALL, faster_than("reference", "over reference"), MEMORY, Column("off the pattern by", _off), CLAIMED
ONE_RANK = views.of("one rank", CALL[-1], "one rank, all cores"), faster_than("one rank", "ranks over one")
BESIDE_ONE = MEMORY, PER_TOKEN, fact("of_one", "of p=1"), fact("efficiency"), CLAIMED
RANKS = LENGTH, BATCH, PASS, fact("ranks"), fact("by"), CALL[-1], *ONE_RANK, SPEED, *BESIDE_ONE
CURVE = LENGTH, SEGMENTS, *CALL, SPEED, faster_than("auto", "over auto"), MEMORY, CLAIMED
CACHED = LENGTH, SEGMENTS, Column("plan in the cache", _interval), views.of("no cache", CALL[-1], "made anew")
HALVES = *SIZE, *CALL, faster_than("float32", "over float32"), MEMORY
TRIED = Column("tried", lambda row, case: str(len(row.values["tried"])))
LIMIT = views.value("limit_bytes", "memory", "bytes")
LONGEST = WHO, PASS, LIMIT, LENGTH, Column("KiB/token", _longest_per_token), TRIED, fact("stopped")
TABLES = (
    TableView("Lengths: batch as published", "as published", SCALING, who=OURS),
    TableView("Lengths: batch 1, segments that grow with the sequence", "lengths", SCALING, "{growth}", who=OURS),
    TableView("Lengths: segments that stay as they are", "held", SCALING, "{growth}", who=OURS),
    TableView("Heads", "heads", SCALING, "{growth}", who=OURS),
    TableView("Batches", "batches", SCALING, "{growth}", who=OURS),
    TableView("Configurations", "configurations", SCALING, who=OURS),
    TableView("Implementations side by side", "implementations", COMPARED, "; ".join(map(": ".join, SUMMARIES.items()))),
    TableView("Ranks at a fixed length", "ranks", RANKS, who=("ranks",)),
    TableView("Ranks at fixed tokens a rank", "growth", RANKS, who=("ranks",)),
    TableView("Along a Hilbert curve", "orders", CURVE, who=("auto", "ordered")),
    TableView("The cache of plans", "cache", (*CACHED, faster_than("no cache", "speed-up")), who=("auto",)),
    TableView("Half precision", "lengths", HALVES, "auto: in float16", who=(*TWINS, "auto")),
    TableView("The longest sequence that fits", "longest", LONGEST, timed=False),
)


def _claim_tables(result: RowsResult) -> Iterator[Table]:
    """The documents' figures in short, then every figure beside ours."""
    rows, counts = [], {name: [0, 0] for name in DATA["documents"]}
    for claim in claims():

        def rounded(amount: float, unit: str = DATA["units"][claim.quantity]) -> str:
            return (f"{amount:,.0f}" if abs(amount) >= 1000 or amount == int(amount) else f"{amount:.3g}") + unit

        ours, per_tflops, why = claim.ours(result)
        counts[claim.document][0] += 1
        counts[claim.document][1] += ours is not None
        here = ", ".join(filter(None, ("" if ours is None else rounded(ours), why)))
        speed = "-" if per_tflops is None else rounded(per_tflops)
        rows.append((f"{claim.document}: {claim.figure}", claim.hardware, claim.published, here, speed, claim.note))
    in_short = tuple((name, *map(str, numbers)) for name, numbers in counts.items())
    yield Table("Published figures", ("document", "figures", "measured again"), in_short)
    header = ("seed figure", "hardware", "claimed", "ours here", "ours per measured TFLOP/s", "what to know about it")
    yield Table("Every published figure", header, tuple(rows))


def _published_speeds(result: RowsResult) -> Iterator[Plot]:
    speeds = [claim for claim in claims() if claim.quantity == "tokens/s"]
    pairs = sorted((claim.claimed, ours) for claim in speeds if (ours := claim.ours(result)[0]))
    ends = tuple(plain(x, x) for x in (pairs[0][0], pairs[-1][0])) if pairs else ()
    series = Series("tokens/s", tuple(plain(*pair) for pair in pairs)), Series("as published", ends, dashed=True)
    axes = Axis(f"tokens/s as published, {CARD}", "number"), Axis("tokens/s here", "number")
    yield Plot("Every published speed beside ours", "points", series, axes)


def _kb_per_token(row: Row, case: CaseRows) -> Point | None:
    return plain("", peak_bytes(row) / 1000 / row.values["tokens"]) if row.values.get("memory_bytes") else None


def _over_reference(row: Row, case: CaseRows) -> Point | None:
    if row.who == "reference" or not case.timed("reference", row.who):
        return None
    return speed_up("", case.rows["reference"].samples, row.samples)


def _over_lengths(title: str, axis: Axis, measure: views.Measure) -> views.PlotView:
    axes, series = (views.TOKENS, axis), "{who}, {pass}, {group}"
    return views.PlotView(title, ("lengths", "held"), "seq", measure, axes, "lines", series=series, who=OURS)


BARS = "Speed-up over the reference, {pass}, with 95% intervals", "implementations", "{seq:,} tokens", _over_reference
PLOTS = (
    _over_lengths("Time of a call; segments that grow with the length, or are held", views.SECONDS, views.time),
    _over_lengths("Peak memory, inputs counted", views.BYTES, views.stored("memory_bytes")),
    _published_speeds,
    _over_lengths("Memory a token, inputs counted", Axis("memory a token", "kb"), _kb_per_token),
    views.PlotView(*BARS, axes=(views.NAMES, views.TIMES), mark=1.0),
)


def _summary(result: RowsResult) -> str:
    """The longest comparison with the reference, and how many published figures were measured again."""
    parts = []
    longest = max(GROUPS["implementations"].values(), key=lambda setting: setting.seq)
    for case in result.cases("settings", **longest.case()):
        rows = [row for who, row in case.rows.items() if row.samples and who not in YARDSTICKS]
        slowest_first = sorted(rows, key=lambda row: -row.median_s)
        times = [f"{row.who}{'*' * ('differs' in row.values)} {in_seconds(row.median_s)}" for row in slowest_first]
        star = " (*: another function)" * any("differs" in row.values for row in rows)
        parts.append(f"forward, {longest.seq:,} tokens, {longest.heads} heads, {longest.dtype}: {', '.join(times)}{star}")
    ours = sum(claim.ours(result)[0] is not None for claim in claims())
    counted = f"{ours} of the {len(claims())} figures that older implementations published were measured again"
    return placed(result, "; ".join([*parts, counted]))


def _notes(result: RowsResult) -> Iterator[str]:
    """Notes on implementations that compute another function, and on how it was measured."""
    rows = [row for row in result.rows if row.table == "settings" and "differs" in row.values]
    computed = ((f"{row.who} computes another function: {row.values['differs']['computes']}", row.case["what"]) for row in rows)
    yield from grouped(computed)
    if result.chosen.get("device", "cpu") != "cpu":
        yield "ranks are measured on the CPU alone: `dilkit bench --suite seeds` there, `dilkit bench --comm` here"
    if result.earlier:
        yield f"measured in {len(result.earlier) + 1} runs, each going on from the one before"


class SeedsReport(views.Report):
    """A report on rows that stand in a table of each group that compares them."""

    def document(self, *results: RowsResult) -> Document:
        """The document of a result."""
        return super().document(by_group(results[0]))


REPORT = SeedsReport(
    summary=_summary,
    place="{device_name}, {threads} threads of {cores} cores; ranks: {ranks}",
    tables=(_claim_tables, *TABLES),
    plots=PLOTS,
    notes=_notes,
    method="Medians of {repeats} samples taken in turns (two or three where calls are long), with intervals that hold them "
    "with 95 % confidence (bootstrap); everyone was checked against fp64 arithmetic just before, on random tensors of"
    " 64 dimensions a head. Memory is the peak with inputs counted: query, key and value, in training the output's "
    "gradient too; over ranks, of the rank that needs most, in a process of its own. Over ranks both sides are timed "
    "in turns in one job, the cores shared out among them. The documents measured forward passes alone; backward "
    "passes of the longest calls are left to --full, as are their caches of plans, half types beyond 8,192 tokens, "
    "and long calls of other numbers of ranks than were published. auto computes LongNet's pattern, in which every "
    "head takes part in every branch; what they measured is head-split, a fraction of the work. A matmul in fp32 was "
    "timed in the same rounds: ours per TFLOP/s is what this would be on a machine whose matmul reaches one, and "
    f"holds for speeds alone. For comparison, the {CARD} has 8.9 TFLOP/s in fp32 by its data sheet.",
)
