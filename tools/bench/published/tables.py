"""The tables of the suite `seeds`: settings, implementations, ranks, orders, and every published figure beside ours."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import product
from typing import Any

from dilkit.tools.bench.published.claims import HELD, claims, group
from dilkit.tools.bench.published.implementations import SUMMARIES
from dilkit.tools.bench.published.record import PASSES, Job, PublishedCase, PublishedFigure, PublishedResult, Setting
from dilkit.tools.console.text import in_bytes, in_seconds
from dilkit.tools.report.document import Row, Table
from dilkit.tools.results.record import Entry
from dilkit.tools.results.statistics import exponent, median_interval, middle, ratio, ratio_interval

UNITS = {
    **{name: f" {name}" for name in ("ms", "MiB", "KiB/token", "tokens/s", "tokens", "GB", "%")},
    **dict.fromkeys(("speedup", "slowdown", "reduction", "KiB/token ratio"), "x"),
    **dict.fromkeys(("efficiency", "saved"), " %"),
    **dict.fromkeys(("longest", "tokens/rank"), " tokens"),
    "exponent": "",
}
SIZE = ("tokens", "batch", "heads", "segments / rates")
SCALING = (*SIZE, "dtype", "who", "forward", "over the first", "tokens/s", "memory", "KiB/token", "forward + backward")
IMPLEMENTATIONS = ("tokens", "who", "forward", "over reference", "memory", "forward + backward", "over reference", "its memory")
RANKS = ("tokens", "batch", "pass", "ranks", "by", "time", "one rank, all cores", "ranks over one", "tokens/s", "memory")
ORDERS = ("configuration", "tokens", "segments / rates", "as they come", "tokens/s", "along the curve", "tokens/s", "speed-up")
HALVES = (*SIZE, "pass", "float32", "bfloat16", "float16", "bfloat16 over float32", "float16 over float32", "memory, float32")
CLAIMS = ("seed figure", "hardware", "claimed", "ours here", "ours per measured TFLOP/s", "what to know about it")


def all_tables(result: PublishedResult) -> Iterator[Table]:
    """What became of the documents' figures, all that was measured, and last every published figure."""
    yield _document_table(result)
    for title, found, size in (
        ("Lengths: batch as published", group("as published").values(), ""),
        ("Lengths: batch 1, segments that grow with the sequence", group("lengths").values(), "seq"),
        ("Lengths: segments that stay as they are", HELD, "seq"),
        ("Heads", group("heads").values(), "heads"),
        ("Batches", group("batches").values(), "batch"),
        ("Configurations", group("configurations").values(), ""),
    ):
        yield _scaling_table(result, title, found, size)
    yield _implementation_table(result)
    yield _ranks_table("Ranks at a fixed length", result.ranks, grows=False)
    yield _ranks_table("Ranks at fixed tokens a rank", result.growth, grows=True)
    yield from (_order_table(result), _cache_table(result), _half_table(result), _longest_table(result))
    yield Table("Every published figure", CLAIMS, tuple(map(_claim_row, result.figures)))


def _document_table(result: PublishedResult) -> Table:
    """Of each document, how many of its figures were measured again."""
    rows: list[Row] = []
    for name in dict.fromkeys(figure.document for figure in result.figures):
        measured = [figure.ours is not None for figure in result.figures if figure.document == name]
        rows.append((name, str(len(measured)), str(sum(measured))))
    return Table("Published figures", ("document", "figures", "measured again"), tuple(rows))


def _scaling_table(result: PublishedResult, title: str, settings: Collection[Setting], size: str) -> Table:
    """Time and memory of settings, each beside the first; `size` is the attribute that they differ in."""
    rows: list[Row] = []
    firsts: dict[str, tuple[float, ...]] = {}
    for setting, who in product(settings, ("auto", "head-split")):
        case, entry, both = result.case(setting), result.entry(setting, who), result.entry(setting, who, True)
        if case and entry:
            times = ratio(entry.seconds, firsts.setdefault(who, entry.seconds))
            cells = (
                time(entry),
                f"{times:.1f}x",
                speed(entry),
                memory(entry),
                per_token(entry.memory_bytes, case.tokens),
            )
            published = claimed(setting, ("ms", "MiB", "tokens/s", "slowdown"), ("auto",)) if who == "auto" else ""
            rows.append((*_size(setting), setting.dtype, who, *cells, time(both), memory(both), published))
    note = "; ".join(_exponents(result, settings, size)) if size else ""
    return Table(title, (*SCALING, "its memory", "claimed, forward"), tuple(rows), note)


def _size(setting: Setting) -> Row:
    return f"{setting.seq:,}", str(setting.batch), str(setting.heads), _pattern(setting)


def _exponents(result: PublishedResult, settings: Collection[Setting], size: str) -> Iterator[str]:
    """How time and memory grow with an attribute of the settings, fitted, and the FLOPs beside."""
    for who, backward in (("auto", False), ("auto", True), ("head-split", False)):
        points = [(float(getattr(s, size)), entry) for s in settings if (entry := result.entry(s, who, backward))]
        sizes, entries = [x for x, _ in points], [entry for _, entry in points]
        if len(set(sizes)) > 1:
            fitted = {"time": [middle(e.seconds) for e in entries], "FLOPs": [e.flops or 0.0 for e in entries]}
            if all(e.memory_bytes for e in entries):
                fitted["memory"] = [float(e.memory_bytes or 0) for e in entries]
            fits = ", ".join(f"{name} ~ {size}^{exponent(sizes, values):.2f}" for name, values in fitted.items())
            yield f"{who}, {PASSES[backward]}: {fits}"


def _implementation_table(result: PublishedResult) -> Table:
    """Who computes a setting how fast, beside the reference."""
    rows: list[Row] = []
    for setting in group("implementations").values():
        case = result.case(setting)
        for who in case.entries if case else ():
            cells: list[str] = []
            passes = [result.entry(setting, who, backward) for backward in (False, True)]
            for backward, entry in enumerate(passes):
                base = result.entry(setting, "reference", bool(backward))
                cells += time(entry), times_faster(base, entry), memory(entry)
            if any(passes):
                rows.append((f"{setting.seq:,}", who, *cells, _off(passes), claimed(setting, ("ms", "speedup"), (who,))))
    who = "; ".join(f"{name}: {summary}" for name, summary in SUMMARIES.items())
    return Table("Implementations side by side", (*IMPLEMENTATIONS, "off the pattern by", "claimed, forward"), tuple(rows), who)


def _off(entries: Iterable[Entry | None]) -> str:
    """How far from the attention of the pattern, in units of its largest value, where another function is computed."""
    far: dict[str, float] = {}
    for differs in (entry.differs for entry in entries if entry and entry.differs):
        far["result"] = differs.out_relative
        if differs.dquery_relative is not None:
            far["gradient"] = differs.dquery_relative
    return ", ".join(f"{name} {value:.1%}" for name, value in far.items() if value > 1e-3) or "-"


def _ranks_table(title: str, jobs: tuple[Job, ...], grows: bool) -> Table:
    """Ranks beside one rank with all cores, and in memory. `grows`: the length goes by the number of ranks."""

    def job(row: PublishedCase) -> tuple[Any, ...]:
        """By what one rank is found to compare more with."""
        length = row.setting.seq // (row.setting.ranks if grows else 1)
        return length, row.setting.batch, row.setting.segment_lengths, row.backward, row.transport

    found = sorted((row for one in jobs for row in one.rows), key=lambda row: (job(row), row.setting.ranks))
    alone = {job(row): row.peak for row in found if row.setting.ranks == 1}
    rows = tuple(_ranks_row(row, alone.get(job(row)), grows) for row in found)
    return Table(title, (*RANKS, "KiB/token", "of p=1", "efficiency", "claimed, forward"), rows)


def _ranks_row(row: PublishedCase, alone: int | None, grows: bool) -> Row:
    """Times, and the memory of a rank beside that of one rank alone, and beside what that could be at best."""
    s, ranks, one = row.setting, row.entries.get("ranks"), row.entries.get("one rank")
    rate = f"{row.tokens / middle(ranks.seconds):,.0f}" if ranks and ranks.time else "-"
    of_one = efficiency = "-"
    if alone and row.peak and s.ranks > 1:
        of_one, efficiency = f"{alone / row.peak:.2f}x", f"{alone / row.peak / (1 if grows else s.ranks):.1%}"
    size = f"{s.seq:,}", str(s.batch), PASSES[row.backward], str(s.ranks), row.transport
    times = time(ranks), time(one), times_faster(one, ranks), rate
    published = "-" if row.backward else claimed(s, ("ms", "tokens/s", "MiB", "speedup", "reduction"))
    return *size, *times, in_bytes(row.peak) if row.peak else "-", per_token(row.peak, row.tokens), of_one, efficiency, published


def _order_table(result: PublishedResult) -> Table:
    rows: list[Row] = []
    for name, setting in group("orders").items():
        plain, ordered = (result.entry(setting, who) for who in ("auto", "ordered"))
        if plain and ordered:
            both = times_faster(result.entry(setting, "auto", True), result.entry(setting, "ordered", True))
            cells = time(plain), speed(plain), time(ordered), speed(ordered), times_faster(plain, ordered), both
            tail = memory(plain), memory(ordered), claimed(setting, ("tokens/s", "speedup", "MiB"))
            rows.append((name, f"{setting.seq:,}", _pattern(setting), *cells, *tail))
    more = "the same, forward + backward", "memory", "along the curve", "claimed"
    return Table("Along a Hilbert curve", (*ORDERS, *more), tuple(rows))


def _cache_table(result: PublishedResult) -> Table:
    rows: list[Row] = []
    for case in result.cache:
        kept, without = case.entries["auto"], case.entries["no cache"]
        rows.append((f"{case.setting.seq:,}", _pattern(case.setting), time(kept), time(without), times_faster(without, kept)))
    return Table("The cache of plans", ("tokens", "segments / rates", "plan in the cache", "made anew", "speed-up"), tuple(rows))


def _half_table(result: PublishedResult) -> Table:
    rows: list[Row] = []
    for case in result.cases:
        single, brain, half = (result.entry(case.setting, who, case.backward) for who in ("float32", "bfloat16", "auto"))
        if case.setting.dtype == "float16" and half and (single or brain):
            times = time(single), time(brain), time(half), times_faster(single, brain), times_faster(single, half)
            rows.append((*_size(case.setting), PASSES[case.backward], *times, memory(single), memory(half)))
    return Table("Half precision", (*HALVES, "float16"), tuple(rows))


def _longest_table(result: PublishedResult) -> Table:
    rows: list[Row] = []
    for e in result.longest:
        fitting = next((trial.bytes for trial in e.tried if trial.seq == e.seq), None)
        length, name = "-" if e.seq is None else f"{e.seq:,}", "training" if e.backward else "forward"
        tail = per_token(fitting, e.seq or 1), str(len(e.tried)), e.stopped or ""
        rows.append((e.who, name, in_bytes(e.limit_bytes), length, *tail))
    return Table("The longest sequence that fits", ("who", "pass", "memory", "tokens", "KiB/token", "tried", ""), tuple(rows))


def _claim_row(figure: PublishedFigure) -> Row:
    unit, found = UNITS[figure.quantity], (figure.ours, figure.per_tflops)
    ours, per_tflops = (None if value is None else f"{_rounded(value)}{unit}" for value in found)
    here = ", ".join(filter(None, (ours, figure.why)))
    name, published = f"{figure.document}: {figure.figure}", _as_published(figure.claimed, figure.quantity)
    return name, figure.hardware, published, here, per_tflops or "-", figure.note


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def _as_published(value: float, quantity: str) -> str:
    """With all its digits."""
    return f"{value:,.12g}{UNITS[quantity]}"


def claimed(setting: Setting, quantities: Collection[str], who: Iterable[str] | None = None) -> str:
    """What was published of a setting, and on what."""
    matching = [c for c in claims() if c.setting == setting and c.quantity in quantities and (who is None or c.who in who)]
    figures = dict.fromkeys(_as_published(c.claimed, c.quantity) for c in matching)
    return f"{', '.join(figures)} ({matching[0].hardware})" if matching else "-"


def times_faster(slow: Entry | None, fast: Entry | None) -> str:
    """How many times faster, with its interval."""
    if slow is None or fast is None:
        return "-"
    low, high = ratio_interval(slow.seconds, fast.seconds)
    return f"{ratio(slow.seconds, fast.seconds):.2f}x ({low:.2f} - {high:.2f})"


def time(entry: Entry | None) -> str:
    """The median, with its interval."""
    if entry is None or entry.time is None:
        return "-"
    low, high = median_interval(entry.seconds)
    return f"{in_seconds(entry.time.median_s)} ({in_seconds(low)} - {in_seconds(high)})"


def speed(entry: Entry) -> str:
    """Tokens a second."""
    return f"{entry.tokens_per_s or 0:,.0f}"


def memory(entry: Entry | None) -> str:
    """Peak memory, inputs counted."""
    return in_bytes(entry.memory_bytes) if entry and entry.memory_bytes else "-"


def per_token(peak: int | None, tokens: int) -> str:
    """KiB."""
    return f"{peak / 1024 / tokens:.2f}" if peak else "-"


def _pattern(setting: Setting) -> str:
    return f"{', '.join(map(str, setting.segment_lengths))} / {', '.join(map(str, setting.dilation_rates))}"
