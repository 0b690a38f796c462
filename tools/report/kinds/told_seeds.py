"""What the result of the suite of published settings says, as tables and plots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dilkit.tools.bench.published import settings
from dilkit.tools.bench.published.claim import HEAD_DIM, Setting
from dilkit.tools.bench.published.figures import HILBERT_SETTINGS
from dilkit.tools.report.document import Axis, Document, Plot, Point, Series, Table, plots, tables
from dilkit.tools.report.kinds import suite_seeds_report as report
from dilkit.tools.report.kinds.seed_rows import Cases, Entry
from dilkit.tools.report.kinds.told_bench import TOKENS
from dilkit.tools.report.kinds.told_suites import roofline_of
from dilkit.tools.report.points import plain, sampled, series_of, speed_up

Result = dict[str, Any]
Lines = dict[str, list[Point]]
RANKS, NAMES = Axis("ranks", "number"), Axis("", "number")
FORWARD, TRAINING = "forward", "training"


def told(result: Result) -> Document:
    """The result as a whole."""
    sections = (Table.of(title, rows, "; ".join(below)) for title, rows, below in report.sections(result))
    return Document(
        headline=tuple(report.headline(result)),
        tables=tables(*sections, Table.of("Every published figure", report.claim_rows(result))),
        plots=plots(
            _over_lengths(
                result,
                "Time of a call; segments that grow with the length, or stay",
                Axis("time", "seconds"),
                lambda x, e: sampled(x, e["time"]["samples_s"]),
            ),
            _over_lengths(result, "Peak memory, inputs counted", Axis("memory", "bytes"), _memory),
            _over_lengths(result, "Memory a token, inputs counted", Axis("memory a token", "kb"), _per_token),
            *(_over_reference(result, backward) for backward in (False, True)),
            _along_the_curve(result),
            _halves(result),
            _roofline(result),
            *(_ranks(result, *one) for one in (("ranks", "fixed length"), ("growth", "fixed tokens a rank"))),
            _published(result),
        ),
        notes=tuple(report.notes(result)),
        method=report.method(result),
    )


def _memory(x: float, entry: Entry) -> Point | None:
    return plain(x, entry["memory_bytes"]) if entry.get("memory_bytes") else None


def _per_token(x: float, entry: Entry) -> Point | None:
    return plain(x, entry["memory_bytes"] / 1000 / entry["tokens"]) if entry.get("memory_bytes") else None


def _over_lengths(result: Result, title: str, axis: Axis, point: Callable[[float, Entry], Point | None]) -> Plot:
    cases, lines = Cases(result), {}
    for label, found in (("grow", settings.LENGTHS), ("stay", settings.held_lengths(full=True))):
        for who, backward in (("auto", False), ("auto", True), ("head-split", False)):
            entries = [(setting.seq, cases.entry(setting, who, backward)) for setting in sorted(found, key=lambda s: s.seq)]
            points = [point(seq, entry) for seq, entry in entries if entry]
            lines[f"{who}, {TRAINING if backward else FORWARD}, {label}"] = [one for one in points if one]
    return Plot(title, "lines", series_of(lines), (TOKENS, axis))


def _over_reference(result: Result, backward: bool) -> Plot:
    """Bars by length: how many times faster than the reference everyone is."""
    cases, bars = Cases(result), {}
    for setting in sorted(settings.IMPLEMENTATIONS, key=lambda s: s.seq):
        base = cases.entry(setting, "reference", backward)
        for who in (cases.get(setting, backward) or {}).get("entries", ()) if base else ():
            if who != "reference" and (entry := cases.entry(setting, who, backward)):
                bars.setdefault(who, []).append(_faster(f"{setting.seq:,} tokens", base, entry))
    title = f"Speed-up over the reference, {TRAINING if backward else FORWARD}, with 95% intervals"
    return Plot(title, "bars", series_of(bars), (NAMES, Axis("times faster", "times")), mark=1.0)


def _faster(label: str, slow: Entry, fast: Entry) -> Point:
    return speed_up(label, slow["time"]["samples_s"], fast["time"]["samples_s"])


def _along_the_curve(result: Result) -> Plot:
    cases, bars = Cases(result), {}
    for name, setting in HILBERT_SETTINGS.items():
        for backward in (False, True):
            plain_, ordered = (cases.entry(setting, who, backward) for who in ("auto", "ordered"))
            if plain_ and ordered:
                bars.setdefault(TRAINING if backward else FORWARD, []).append(_faster(name, plain_, ordered))
    title = "Speed-up by a Hilbert order, moving of rows counted, with 95% intervals"
    return Plot(title, "bars", series_of(bars), (NAMES, Axis("times faster", "times")), mark=1.0)


def _halves(result: Result) -> Plot:
    """Both half types beside fp32, by setting."""
    cases, bars = Cases(result), {}
    for setting in sorted(settings.LENGTHS, key=lambda s: s.seq):
        for backward in (False, True):
            base = cases.entry(setting, "float32", backward)
            for who, name in (("bfloat16", "bfloat16"), ("auto", "float16")) if base else ():
                if entry := cases.entry(setting, who, backward):
                    label = f"{name}, {TRAINING if backward else FORWARD}"
                    bars.setdefault(label, []).append(_faster(f"{setting.seq:,} tokens", base, entry))
    return Plot("Half types beside fp32", "bars", series_of(bars), (NAMES, Axis("times fp32's speed", "times")), mark=1.0)


def _roofline(result: Result) -> Plot:
    """Of those that are compared side by side, in fp32 like the matmul."""
    cases = Cases(result)
    found = [case for s in settings.IMPLEMENTATIONS for backward in (False, True) if (case := cases.get(s, backward))]
    sizes = [(case, case["setting"]) for case in found]
    return roofline_of([(case | dict(head_dim=HEAD_DIM), s["dtype"], s["batch"] * s["heads"]) for case, s in sizes])


def _ranks(result: Result, name: str, what: str) -> Plot:
    """Memory of the rank that needs most, forward and backward where that was measured."""
    lines: dict[str, dict[int, float]] = {}
    for row in (row for job in result[name] for row in job["rows"] if row["peak_bytes"]):
        setting = Setting.from_dict(row["setting"])
        length = setting.seq // setting.ranks if name == "growth" else setting.seq
        batch = f"{setting.batch} x " if setting.batch > 1 else ""
        label = f"{batch}{length:,} tokens{' a rank' * (name == 'growth')}, {TRAINING if row['backward'] else FORWARD}"
        lines.setdefault(label, {})[setting.ranks] = max(row["peak_bytes"])
    series = series_of({label: [plain(p, peaks[p]) for p in sorted(peaks)] for label, peaks in lines.items() if len(peaks) > 1})
    return Plot(f"Ranks' memory at {what}, inputs counted", "lines", series, (RANKS, Axis("peak memory of a rank", "bytes")))


def _published(result: Result) -> Plot:
    """Every published speed beside ours: above the line, ours is faster."""
    pairs = sorted((f["claimed"], f["ours"]) for f in result["figures"] if f["quantity"] == "tokens/s" and f["ours"])
    ends = tuple(plain(x, x) for x in (pairs[0][0], pairs[-1][0])) if pairs else ()
    series = Series("tokens/s", tuple(plain(*pair) for pair in pairs)), Series("as published", ends, dashed=True)
    axes = Axis("tokens/s as published, GTX 1080", "number"), Axis("tokens/s here", "number")
    return Plot("Every published speed beside ours", "points", series, axes)
