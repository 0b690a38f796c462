"""The report of the suite `seeds`: settings, implementations, ranks and orders, and every published figure beside ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product

from dilkit.tools.bench.suites.seeds import DATA, GROUPS, HELD, PASSES, Setting
from dilkit.tools.bench.workloads.seeds_claims import CARD, KIB, Measured, claim_table, claimed, claims, peak
from dilkit.tools.bench.workloads.seeds_ways import SUMMARIES
from dilkit.tools.console.text import in_bytes, in_seconds
from dilkit.tools.report import document
from dilkit.tools.report.document import Axis, Document, Plot, Point, Series, Table
from dilkit.tools.report.headline import placed
from dilkit.tools.report.points import grouped, plain, sampled, series_by_name, series_of, speed_up
from dilkit.tools.report.views import BYTES, NAMES, SECONDS, TIMES, TOKENS, WHO, Column, Report, TableView, fact, value
from dilkit.tools.results.rows import YARDSTICKS, CaseRows, Row, RowsResult
from dilkit.tools.results.statistics import exponent, median_interval, ratio, ratio_interval

SIZE = ("tokens", "batch", "heads", "segments / rates")
SCALING = (*SIZE, "dtype", "who", "forward", "over the first", "tokens/s", "memory", "KiB/token", PASSES[1], "its memory")
IMPLEMENTATIONS = ("tokens", "who", "forward", "over reference", "memory", PASSES[1], "over reference", "its memory")
RANKS = ("tokens", "batch", "pass", "ranks", "by", "time", "one rank, all cores", "ranks over one", "tokens/s", "memory")
ORDERS = ("configuration", "tokens", "segments / rates", "as they come", "tokens/s", "along the curve", "tokens/s", "speed-up")
HALVES = (*SIZE, "pass", "float32", "bfloat16", "float16", "bfloat16 over float32", "float16 over float32", "memory, float32")


def measured_tables(result: RowsResult) -> Iterator[Table]:
    """The documents' figures in short, and all that was measured beside the search for the longest sequence."""
    measured = Measured.of(result)
    ours = {name: [measured.ours(claim)[0] for claim in claims() if claim.document == name] for name in DATA["documents"]}
    rows = tuple((name, str(len(values)), str(len(values) - values.count(None))) for name, values in ours.items())
    header: document.Row = ("document", "figures", "measured again")
    yield Table("Published figures", header, rows)
    for title, settings, size in (
        ("Lengths: batch as published", GROUPS["as published"].values(), ""),
        ("Lengths: batch 1, segments that grow with the sequence", GROUPS["lengths"].values(), "seq"),
        ("Lengths: segments that stay as they are", HELD, "seq"),
        ("Heads", GROUPS["heads"].values(), "heads"),
        ("Batches", GROUPS["batches"].values(), "batch"),
        ("Configurations", GROUPS["configurations"].values(), ""),
    ):
        note = "; ".join(_exponents(measured, settings, size)) if size else ""
        yield Table(title, (*SCALING, "claimed, forward"), tuple(_scaling_rows(measured, settings)), note)
    who = "; ".join(f"{name}: {summary}" for name, summary in SUMMARIES.items())
    header = (*IMPLEMENTATIONS, "off the pattern by", "claimed, forward")
    yield Table("Implementations side by side", header, tuple(_implementation_rows(measured)), who)
    header = (*RANKS, "KiB/token", "of p=1", "efficiency", "claimed, forward")
    yield Table("Ranks at a fixed length", header, tuple(_ranks_rows(measured, "ranks")))
    yield Table("Ranks at fixed tokens a rank", header, tuple(_ranks_rows(measured, "growth")))
    header = (*ORDERS, "the same, forward + backward", "memory", "along the curve", "claimed")
    yield Table("Along a Hilbert curve", header, tuple(_order_rows(measured)))
    header = ("tokens", "segments / rates", "plan in the cache", "made anew", "speed-up")
    yield Table("The cache of plans", header, tuple(_cache_rows(measured)))
    yield Table("Half precision", (*HALVES, "float16"), tuple(_half_rows(measured)))


def _scaling_rows(measured: Measured, settings: Iterable[Setting]) -> Iterator[document.Row]:
    """Time and memory of settings, each beside the first."""
    firsts: dict[str, tuple[float, ...]] = {}
    for setting, who in product(settings, ("auto", "head-split")):
        if row := measured.row(setting, who):
            times, both = ratio(row.samples, firsts.setdefault(who, row.samples)), measured.row(setting, who, True)
            cells = _time(row), f"{times:.1f}x", _speed(row), _memory(row), _per_token(row.values.get("memory_bytes"), row)
            published = claimed(setting, ("ms", "MiB", "tokens/s", "slowdown"), ("auto",)) if who == "auto" else ""
            yield *_size(setting), setting.dtype, who, *cells, _time(both), _memory(both), published


def _exponents(measured: Measured, settings: Iterable[Setting], size: str) -> Iterator[str]:
    """Growth of time, FLOPs and memory with a field of the settings, fitted."""
    for who, backward in (("auto", False), ("auto", True), ("head-split", False)):
        rows = {getattr(setting, size): row for setting in settings if (row := measured.row(setting, who, backward))}
        if len(rows) > 1:
            fitted = {"time": [row.median_s for row in rows.values()]}
            fitted |= {"FLOPs": [row.values.get("flops", 0.0) for row in rows.values()]}
            if all(row.values.get("memory_bytes") for row in rows.values()):
                fitted["memory"] = [row.values["memory_bytes"] for row in rows.values()]
            fits = ", ".join(f"{name} ~ {size}^{exponent(list(rows), values):.2f}" for name, values in fitted.items())
            yield f"{who}, {PASSES[backward]}: {fits}"


def _implementation_rows(measured: Measured) -> Iterator[document.Row]:
    for setting in GROUPS["implementations"].values():
        case = measured.cases.get(("settings", setting, False))
        for who in (who for who in (case.rows if case else ()) if who not in YARDSTICKS):
            passes = {backward: measured.row(setting, who, backward) for backward in (False, True)}
            cells: list[str] = []
            for backward, row in passes.items():
                cells += _time(row), _faster(measured.row(setting, "reference", backward), row), _memory(row)
            if any(passes.values()):
                yield f"{setting.seq:,}", who, *cells, _off(passes.values()), claimed(setting, ("ms", "speedup"), (who,))


def _off(rows: Iterable[Row | None]) -> str:
    """Distance from the attention of the pattern, in units of its largest value, where another function is computed."""
    far: dict[str, float] = {}
    for differs in (row.values["differs"] for row in rows if row and "differs" in row.values):
        far["result"] = differs["out_relative"]
        if differs.get("dquery_relative") is not None:
            far["gradient"] = differs["dquery_relative"]
    return ", ".join(f"{name} {value:.1%}" for name, value in far.items() if value > 1e-3) or "-"


def _ranks_rows(measured: Measured, table: str) -> Iterator[document.Row]:
    """Ranks beside one rank with all cores, and in memory beside one alone: of the same length, or as many tokens a rank."""
    jobs = {}
    for (group, setting, backward), case in measured.cases.items():
        if group == table:
            length = setting.seq // (setting.ranks if table == "growth" else 1)
            jobs[length, setting.batch, setting.segment_lengths, backward, case.case["by"], setting.ranks] = setting, case
    for key, (setting, case) in sorted(jobs.items(), key=lambda job: job[0]):
        ranks, one, most = case.rows["ranks"], case.rows.get("one rank"), peak(case.rows["ranks"])
        alone = peak(jobs[(*key[:-1], 1)][1].rows["ranks"]) if (*key[:-1], 1) in jobs else None
        of_one = efficiency = "-"
        if alone and most and setting.ranks > 1:
            of_one, share = f"{alone / most:.2f}x", alone / most / (1 if table == "growth" else setting.ranks)
            efficiency = f"{share:.1%}"
        size = f"{setting.seq:,}", str(setting.batch), str(case.case["pass"]), str(setting.ranks), str(case.case["by"])
        times = _time(ranks), _time(one), _faster(one, ranks), _speed(ranks) if ranks.samples else "-"
        quantities = ("ms", "tokens/s", "MiB", "speedup", "reduction")
        published = claimed(setting, quantities) if case.case["pass"] == PASSES[0] else "-"
        yield *size, *times, in_bytes(most) if most else "-", _per_token(most, ranks), of_one, efficiency, published


def _order_rows(measured: Measured) -> Iterator[document.Row]:
    for name, setting in GROUPS["orders"].items():
        plain_order, ordered = (measured.row(setting, who) for who in ("auto", "ordered"))
        if plain_order and ordered:
            both = _faster(measured.row(setting, "auto", True), measured.row(setting, "ordered", True))
            cells = _time(plain_order), _speed(plain_order), _time(ordered), _speed(ordered), _faster(plain_order, ordered), both
            tail = _memory(plain_order), _memory(ordered), claimed(setting, ("tokens/s", "speedup", "MiB"))
            yield name, f"{setting.seq:,}", _pattern(setting), *cells, *tail


def _cache_rows(measured: Measured) -> Iterator[document.Row]:
    for (table, setting, _), case in measured.cases.items():
        if table == "cache":
            cached, anew = case.rows["auto"], case.rows["no cache"]
            yield f"{setting.seq:,}", _pattern(setting), _time(cached), _time(anew), _faster(anew, cached)


def _half_rows(measured: Measured) -> Iterator[document.Row]:
    for table, setting, backward in measured.cases:
        single, brain, half = (measured.row(setting, who, backward) for who in ("float32", "bfloat16", "auto"))
        if table == "settings" and setting.dtype == "float16" and half and (single or brain):
            times = _time(single), _time(brain), _time(half), _faster(single, brain), _faster(single, half)
            yield *_size(setting), PASSES[backward], *times, _memory(single), _memory(half)


def _longest_per_token(row: Row, case: CaseRows) -> str:
    most = next((trial["bytes"] for trial in row.values["tried"] if trial["seq"] == row.values["seq"]), None)
    return f"{most / KIB / (row.values['seq'] or 1):.2f}" if most else "-"


LONGEST = (
    *(WHO, fact("pass"), value("limit_bytes", "memory", "bytes"), fact("seq", "tokens", "{:,}")),
    *(Column("KiB/token", _longest_per_token), Column("tried", lambda row, case: str(len(row.values["tried"]))), fact("stopped")),
)


def _size(setting: Setting) -> document.Row:
    return f"{setting.seq:,}", str(setting.batch), str(setting.heads), _pattern(setting)


def _pattern(setting: Setting) -> str:
    return f"{', '.join(map(str, setting.segment_lengths))} / {', '.join(map(str, setting.dilation_rates))}"


def _time(row: Row | None) -> str:
    """The median with its interval."""
    if row is None or not row.samples:
        return "-"
    return f"{in_seconds(row.median_s)} ({' - '.join(map(in_seconds, median_interval(row.samples)))})"


def _faster(slow: Row | None, fast: Row | None) -> str:
    """The speed-up with its interval."""
    if not (slow and fast and slow.samples and fast.samples):
        return "-"
    low, high = ratio_interval(slow.samples, fast.samples)
    return f"{ratio(slow.samples, fast.samples):.2f}x ({low:.2f} - {high:.2f})"


def _speed(row: Row) -> str:
    """Tokens a second."""
    return f"{row.values['tokens'] / row.median_s:,.0f}"


def _memory(row: Row | None) -> str:
    """Peak memory, inputs counted."""
    return in_bytes(row.values["memory_bytes"]) if row and row.values.get("memory_bytes") else "-"


def _per_token(bytes_: int | None, row: Row) -> str:
    """KiB."""
    return f"{bytes_ / KIB / row.values['tokens']:.2f}" if bytes_ else "-"


def all_plots(result: RowsResult) -> Iterator[Plot]:
    """Plots over lengths, then of published speeds and of speed-ups."""
    measured = Measured.of(result)
    yield _over_lengths(measured, "Time of a call; segments that grow with the length, or stay", SECONDS, _seconds)
    yield _over_lengths(measured, "Peak memory, inputs counted", BYTES, _bytes)
    pairs = sorted(
        (claim.claimed, ours) for claim in claims() if claim.quantity == "tokens/s" and (ours := measured.ours(claim)[0])
    )
    ends = tuple(plain(x, x) for x in (pairs[0][0], pairs[-1][0])) if pairs else ()
    series = Series("tokens/s", tuple(plain(*pair) for pair in pairs)), Series("as published", ends, dashed=True)
    axes = Axis(f"tokens/s as published, {CARD}", "number"), Axis("tokens/s here", "number")
    yield Plot("Every published speed beside ours", "points", series, axes)
    yield _over_lengths(measured, "Memory a token, inputs counted", Axis("memory a token", "kb"), _kb_per_token)
    for backward, name in ((False, "forward"), (True, "training")):
        bars = series_by_name(_over_reference(measured, backward))
        yield Plot(f"Speed-up over the reference, {name}, with 95% intervals", "bars", bars, (NAMES, TIMES), mark=1.0)


def _seconds(row: Row) -> Point:
    return sampled("", row.samples)


def _bytes(row: Row) -> Point:
    return plain("", row.values.get("memory_bytes", 0))


def _kb_per_token(row: Row) -> Point:
    return plain("", _bytes(row).y / 1000 / row.values["tokens"])


def _over_lengths(measured: Measured, title: str, axis: Axis, measure: Callable[[Row], Point]) -> Plot:
    lines: dict[str, list[Point]] = {}
    for label, settings in (("grow", GROUPS["lengths"].values()), ("stay", HELD)):
        for who, backward, name in (("auto", False, "forward"), ("auto", True, "training"), ("head-split", False, "forward")):
            rows = ((setting, measured.row(setting, who, backward)) for setting in settings)
            points = [replace(measure(row), x=setting.seq) for setting, row in rows if row]
            lines[f"{who}, {name}, {label}"] = [point for point in points if point.y]
    return Plot(title, "lines", series_of(lines), (TOKENS, axis))


def _over_reference(measured: Measured, backward: bool) -> Iterator[tuple[str, Point]]:
    for setting in GROUPS["implementations"].values():
        case = measured.cases.get(("settings", setting, backward))
        for who in case.rows if case else ():
            if case and who not in ("reference", *YARDSTICKS) and case.timed("reference", who):
                yield who, speed_up(f"{setting.seq:,} tokens", case.rows["reference"].samples, case.rows[who].samples)


def _summary(result: RowsResult) -> str:
    """The longest comparison with the reference, and how many published figures were measured again."""
    measured = Measured.of(result)
    settings = [setting for setting in GROUPS["implementations"].values() if measured.row(setting, "reference")]
    longest = max(settings, key=lambda setting: setting.seq, default=None)
    parts = [_comparison(longest, measured.cases["settings", longest, False])] if longest else []
    ours = sum(measured.ours(claim)[0] is not None for claim in claims())
    counted = f"{ours} of the {len(claims())} figures that older implementations published were measured again"
    return placed(result, "; ".join([*parts, counted]))


class SeedsReport(Report):
    """A report whose figures are published ones, without targets."""

    def document(self, *results: RowsResult) -> Document:
        """The document, its notes at the lengths that they hold for."""
        return replace(super().document(*results), notes=tuple(_notes(results[0])))


def _comparison(setting: Setting, case: CaseRows) -> str:
    """All implementations, the slowest first."""
    rows = sorted((row for who, row in case.rows.items() if row.samples and who not in YARDSTICKS), key=lambda row: -row.median_s)
    times = [f"{row.who}{'*' * ('differs' in row.values)} {in_seconds(row.median_s)}" for row in rows]
    star = " (*: another function)" * any("differs" in row.values for row in rows)
    return f"forward, {setting.seq:,} tokens, {setting.heads} heads, {setting.dtype}: {', '.join(times)}{star}"


def _notes(result: RowsResult) -> Iterator[str]:
    """Notes on implementations that were not timed or compute another function, and on failures."""
    places: list[tuple[str, str]] = []
    for row in (row for row in result.rows if row.table == "settings"):
        notes = [f"{row.who} {row.verdict}: {reason}" for reason in row.reasons]
        if "differs" in row.values:
            notes.append(f"{row.who} computes another function: {row.values['differs']['computes']}")
        places += [(note, f"{row.case['seq']:,}") for note in notes]
    yield from grouped(places, "(at {} tokens)")
    for row in (row for row in result.rows if row.table in ("ranks", "growth")):
        yield from (f"{row.verdict.upper()}, {row.case['ranks']} ranks, {row.case['by']}: {reason}" for reason in row.reasons)
    memory_notes = {row.values.get("memory_note", "") for row in result.rows}
    yield from (f"memory: {note}" for note in sorted(filter(None, memory_notes)))
    if result.chosen.get("device", "cpu") != "cpu":
        yield "ranks are measured on the CPU alone: `dilkit bench --suite seeds` there, `dilkit bench --comm` here"
    if result.earlier:
        yield f"measured in {len(result.earlier) + 1} runs, each going on from the one before"


REPORT = SeedsReport(
    summary=_summary,
    place="{device_name}, {threads} threads of {cores} cores; ranks: {ranks}",
    tables=(measured_tables, TableView("The longest sequence that fits", "longest", LONGEST, timed=False), claim_table),
    plots=(all_plots,),
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
