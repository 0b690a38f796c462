"""The report of the suite `seeds`: all that was measured, and every published figure beside ours."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

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
OURS = ("auto", "head-split")
GROWING = {"lengths": "seq", "held": "seq", "heads": "heads", "batches": "batch"}
"""Groups along which one fact of the settings grows."""


class Claim(NamedTuple):
    """A published figure, and ours: here, and on a machine whose matmul reaches one TFLOP/s."""

    document: str
    figure: str
    hardware: str
    quantity: str
    claimed: float
    ours: float | None
    per_tflops: float | None
    about_ours: str
    note: str


def claims(result: RowsResult) -> list[Claim]:
    """Every published figure beside ours, in the order of the documents."""
    compared = []
    for document, figures in DATA["documents"].items():
        for facts in figures:
            setting, base = (SETTINGS.get(facts.get(name)) for name in ("setting", "base"))
            ranks = setting.ranks if setting else 2 if "2 GPUs" in facts["figure"] else 1
            quantity, ours, per_tflops = facts["quantity"], None, None
            try:
                ours, about = _ours(result, facts, setting, base)
                if setting and quantity in SPEEDS:
                    cases = result.cases("settings", **(setting.case() if setting.ranks == 1 else {}))
                    rates = [case.rows["matmul"].values["gflops"] / 1000 for case in cases if "matmul" in case.rows]
                    per_tflops = ours * statistics.median(rates) ** SPEEDS[quantity] if rates else None
            except LookupError as missing:
                about = str(missing.args[0])
            hardware = CARD if ranks == 1 else f"{ranks} x {CARD}"
            note, numbers = DATA["notes"].get(facts.get("note"), ""), (facts["claimed"], ours, per_tflops)
            compared.append(Claim(document, facts["figure"], hardware, quantity, *numbers, about, note))
    return compared


def _ours(result: RowsResult, facts: dict[str, Any], setting: Setting | None, base: Setting | None) -> tuple[float, str]:
    """Our figure in the place of a published one, with more about it. Raises LookupError, with the reason, if there is none."""
    if facts["quantity"] == "longest":  # the tokens that fit into a budget of memory
        cases = result.cases("longest", **{"pass": PASSES[0]})
        values = next((case.rows["auto"].values for case in cases if "auto" in case.rows), None)
        if values is None:
            raise LookupError(MISSING)
        return values["seq"], f"in {in_bytes(values['limit_bytes'])}"
    if setting is None:
        raise LookupError("nothing to measure")
    row = row_at(result, setting, facts.get("who") or ("ranks" if setting.ranks > 1 else "auto"))
    if base is None:
        return MEASURES[facts["quantity"]](row, row), ""
    base_row = row_at(result, base, facts.get("base_who") or ("ranks" if base.ranks > 1 else "auto"))
    if facts["quantity"] != "exponent":
        return MEASURES[facts["quantity"]](row, base_row), ""
    settings = [one for one in GROUPS["lengths"].values() if base.seq <= one.seq <= setting.seq]
    return exponent([one.seq for one in settings], [row_at(result, one, row.who).median_s for one in settings]), ""


def row_at(result: RowsResult, setting: Setting, who: str) -> Row:
    """The row of an implementation that was timed at a setting. Raises LookupError, with the reason, where there is none."""
    table = "ranks" if who in ("ranks", "one rank") else "settings"
    row = next((case.rows.get(who) for case in result.cases(table, **setting.case())), None)
    if row and row.samples:
        return row
    raise LookupError(f"{row.verdict}: {'; '.join(row.reasons)}" if row and row.reasons else MISSING)


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


def by_group(result: RowsResult) -> RowsResult:
    """Return `result` with the rows of each group of settings in a table of its own too, and with derived values in these.

    `first_s`: seconds at the group's first setting; `growth`: exponents along the group; of ranks, `memory_bytes`: of the one
    that needs most, and how that compares with one rank alone.
    """
    rows = [row for row in result.rows if row.table not in ("ranks", "growth")]
    rows += [*_beside_one_rank(result, "ranks"), *_beside_one_rank(result, "growth")]
    rows = [replace(row, case=row.case | dict(what=f"{row.case['seq']:,} tokens")) if "seq" in row.case else row for row in rows]
    for group, settings in [*((name, [*one.values()]) for name, one in GROUPS.items() if name != "ranks"), ("held", HELD)]:
        cases = [
            case for one in settings for backward in (False, True) for case in result.cases("settings", **one.case(backward))
        ]
        timed = [case.rows[who] for case in cases for who in case.rows if case.timed(who) and who not in YARDSTICKS]
        for row in timed:
            alike = [one for one in timed if (one.who, one.case["pass"]) == (row.who, row.case["pass"])]
            derived = dict(group=group, first_s=alike[0].median_s, growth=_growth(alike, GROWING.get(group, "")))
            rows.append(replace(row, table=group, values=row.values | derived))
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

    rows = sorted((row for row in result.rows if row.table == table), key=lambda row: (*job(row), row.case["ranks"]))
    alone = {job(row): max(row.values["rank_bytes"]) for row in rows if row.case["ranks"] == 1 and row.values.get("rank_bytes")}
    for row in rows:
        values, ranks, one = dict(row.values), row.case["ranks"], alone.get(job(row))
        if row.values.get("rank_bytes"):
            values["memory_bytes"] = most = max(row.values["rank_bytes"])
            if one and ranks > 1:
                share = one / most / (1 if table == "growth" else ranks)
                values |= dict(of_one=f"{one / most:.2f}x", efficiency=f"{share:.1%}")
        yield replace(row, values=values)


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


LENGTH, BATCH, PASS, WHO = fact("seq", "tokens", "{:,}"), fact("batch"), fact("pass"), views.WHO
SEGMENTS = views.label("segments / rates", "{segment_lengths} / {dilation_rates}")
SIZE = LENGTH, BATCH, fact("heads"), SEGMENTS
CALL = WHO, PASS, Column("time", _interval)
SPEED = Column("tokens/s", lambda row, case: f"{row.values['tokens'] / row.median_s:,.0f}")
MEMORY = views.value("memory_bytes", "memory", "bytes")
PER_TOKEN = Column("KiB/token", lambda row, case: f"{_per_token(row):.2f}" if row.values.get("memory_bytes") else "-")
OVER_FIRST = Column("over the first", lambda row, case: f"{row.median_s / row.values['first_s']:.1f}x")
SCALING = *SIZE, fact("dtype"), *CALL, OVER_FIRST, SPEED, MEMORY, PER_TOKEN
COMPARED = LENGTH, *CALL, faster_than("reference", "over reference"), MEMORY, Column("off the pattern by", _off)
ONE_RANK = views.of("one rank", CALL[-1], "one rank, all cores"), faster_than("one rank", "ranks over one")
BESIDE_ONE = MEMORY, PER_TOKEN, fact("of_one", "of p=1"), fact("efficiency")
RANKS = LENGTH, BATCH, PASS, fact("ranks"), fact("by"), CALL[-1], *ONE_RANK, SPEED, *BESIDE_ONE
CURVE = LENGTH, SEGMENTS, *CALL, SPEED, faster_than("auto", "over auto"), MEMORY
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
    every, rows = claims(result), []
    for claim in every:
        unit = DATA["units"][claim.quantity]
        ours, speed = (
            "" if x is None else (f"{x:,.0f}" if abs(x) >= 1000 or x == int(x) else f"{x:.3g}") + unit
            for x in (claim.ours, claim.per_tflops)
        )
        here = ", ".join(filter(None, (ours, claim.about_ours)))
        figure, published = f"{claim.document}: {claim.figure}", f"{claim.claimed:,.12g}{unit}"
        rows.append((figure, claim.hardware, published, here, speed or "-", claim.note))
    figures, measured = (
        Counter(one.document for one in part) for part in (every, [one for one in every if one.ours is not None])
    )
    in_short = tuple((name, str(count), str(measured[name])) for name, count in figures.items())
    yield Table("Published figures", ("document", "figures", "measured again"), in_short)
    header = ("seed figure", "hardware", "claimed", "ours here", "ours per measured TFLOP/s", "what to know about it")
    yield Table("Every published figure", header, tuple(rows))


def _published_speeds(result: RowsResult) -> Iterator[Plot]:
    pairs = sorted((claim.claimed, claim.ours) for claim in claims(result) if claim.quantity == "tokens/s" and claim.ours)
    ends = tuple(plain(x, x) for x, _ in (pairs[:1] + pairs[-1:]))
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
    """The number of published figures that were measured again."""
    every = claims(result)
    ours = sum(claim.ours is not None for claim in every)
    return placed(result, f"{ours} of the {len(every)} figures that older implementations published were measured again")


def _notes(result: RowsResult) -> Iterator[str]:
    """Notes on implementations that compute another function."""
    rows = [row for row in result.rows if row.table == "settings" and "differs" in row.values]
    yield from grouped(
        (f"{row.who} computes another function: {row.values['differs']['computes']}", row.case["what"]) for row in rows
    )


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
    method="Medians of {repeats} samples taken in turns (two or three where calls are long), with 95 % intervals (bootstrap), "
    "everyone checked against fp64 arithmetic just before, on random tensors of 64 dimensions a head. Memory is the peak with "
    "inputs counted: query, key and value, in training the output's gradient too; over ranks, of the rank that needs most. Over "
    "ranks both sides are timed in turns in one job, the cores shared out among them. The documents measured forward passes "
    "alone; backward passes of the longest calls and half types beyond 8,192 tokens are left to --full. auto computes LongNet's "
    "pattern, in which every head takes part in every branch; what they measured is head-split, a fraction of the work. Ours "
    "per TFLOP/s is what a speed would be on a machine whose matmul in fp32, timed in the same rounds, reaches one; "
    f"the {CARD} has 8.9 by its data sheet.",
)
