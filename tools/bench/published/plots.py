"""The plots of the suite `seeds`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product

from dilkit.tools.bench.published.claims import HELD, group
from dilkit.tools.bench.published.record import Job, PublishedCase, PublishedResult
from dilkit.tools.report.document import Axis, Plot, Point, Series
from dilkit.tools.report.points import plain, sampled, series_by_name, series_of, speed_up
from dilkit.tools.report.roofline import Work, roofline
from dilkit.tools.results.record import Entry

RANKS, NAMES, TOKENS = Axis("ranks", "number"), Axis("", "number"), Axis("tokens", "tokens")
PASSES = ((False, "forward"), (True, "training"))
Read = Callable[[PublishedCase, Entry], Point]
Pair = tuple[str, str, Entry | None, Entry | None]


def all_plots(result: PublishedResult) -> Iterator[Plot]:
    """Those over lengths first."""
    title = "Time of a call; segments that grow with the length, or stay"
    yield _over_lengths(result, title, Axis("time", "seconds"), lambda case, entry: sampled(case.setting.seq, entry.seconds))
    peak = Axis("memory", "bytes"), lambda case, entry: plain(case.setting.seq, entry.memory_bytes or 0)
    yield _over_lengths(result, "Peak memory, inputs counted", *peak)
    yield _published(result)
    by_token = (
        Axis("memory a token", "kb"),
        lambda case, entry: plain(case.setting.seq, (entry.memory_bytes or 0) / 1000 / case.tokens),
    )
    yield _over_lengths(result, "Memory a token, inputs counted", *by_token)
    for backward, name in PASSES:
        title = f"Speed-up over the reference, {name}, with 95% intervals"
        yield _ratios(title, "times faster", _over_reference(result, backward))
    title = "Speed-up by a Hilbert order, moving of rows counted, with 95% intervals"
    yield _ratios(title, "times faster", _along_the_curve(result))
    yield _ratios("Half types beside fp32", "times fp32's speed", _halves(result))
    yield _roofline(result)
    yield _ranks(result.ranks, "fixed length", grows=False)
    yield _ranks(result.growth, "fixed tokens a rank", grows=True)


def _over_lengths(result: PublishedResult, title: str, axis: Axis, read: Read) -> Plot:
    lines: dict[str, list[Point]] = {}
    for label, settings in (("grow", group("lengths").values()), ("stay", HELD)):
        for who, (backward, name) in (("auto", PASSES[0]), ("auto", PASSES[1]), ("head-split", PASSES[0])):
            cases = [case for setting in settings if (case := result.case(setting, backward)) and case.timed(who)]
            points = [read(case, case.entries[who]) for case in cases]
            lines[f"{who}, {name}, {label}"] = [point for point in points if point.y]
    return Plot(title, "lines", series_of(lines), (TOKENS, axis))


def _ratios(title: str, what: str, pairs: Iterable[Pair]) -> Plot:
    """Bars: how many times faster the second of a pair is, by the name of a series and a label."""
    bars = ((name, speed_up(label, slow.seconds, fast.seconds)) for name, label, slow, fast in pairs if slow and fast)
    return Plot(title, "bars", series_by_name(bars), (NAMES, Axis(what, "times")), mark=1.0)


def _over_reference(result: PublishedResult, backward: bool) -> Iterator[Pair]:
    for setting in group("implementations").values():
        case = result.case(setting, backward)
        for who in (who for who in (case.entries if case else ()) if who != "reference"):
            label = f"{setting.seq:,} tokens"
            yield who, label, result.entry(setting, "reference", backward), result.entry(setting, who, backward)


def _along_the_curve(result: PublishedResult) -> Iterator[Pair]:
    for (label, setting), (backward, name) in product(group("orders").items(), PASSES):
        yield name, label, result.entry(setting, "auto", backward), result.entry(setting, "ordered", backward)


def _halves(result: PublishedResult) -> Iterator[Pair]:
    """Both half types beside fp32, by setting."""
    for setting, (backward, name) in product(group("lengths").values(), PASSES):
        for who, dtype in (("bfloat16", "bfloat16"), ("auto", "float16")):
            series, label = f"{dtype}, {name}", f"{setting.seq:,} tokens"
            yield series, label, result.entry(setting, "float32", backward), result.entry(setting, who, backward)


def _roofline(result: PublishedResult) -> Plot:
    """Of those that are compared side by side, in fp32 like the matmul."""
    cases = (result.case(setting, backward) for setting in group("implementations").values() for backward, _ in PASSES)
    return roofline("Roofline: speed beside the measured matmul", [Work(c, c.output_bytes, c.backward) for c in cases if c])


def _ranks(jobs: tuple[Job, ...], what: str, grows: bool) -> Plot:
    """Memory of the rank that needs most, forward and backward where that was measured."""
    lines: dict[str, dict[int, float]] = {}
    for row in (row for job in jobs for row in job.rows):
        s = row.setting
        length, batch = s.seq // (s.ranks if grows else 1), f"{s.batch} x " if s.batch > 1 else ""
        label = f"{batch}{length:,} tokens{' a rank' * grows}, {PASSES[row.backward][1]}"
        if row.peak is not None:
            lines.setdefault(label, {})[s.ranks] = row.peak
    series = series_of({label: [plain(p, peaks[p]) for p in sorted(peaks)] for label, peaks in lines.items() if len(peaks) > 1})
    return Plot(f"Ranks' memory at {what}, inputs counted", "lines", series, (RANKS, Axis("peak memory of a rank", "bytes")))


def _published(result: PublishedResult) -> Plot:
    """Every published speed beside ours: above the line, ours is faster."""
    pairs = sorted((f.claimed, f.ours) for f in result.figures if f.quantity == "tokens/s" and f.ours)
    ends = tuple(plain(x, x) for x in (pairs[0][0], pairs[-1][0])) if pairs else ()
    series = Series("tokens/s", tuple(plain(*pair) for pair in pairs)), Series("as published", ends, dashed=True)
    axes = Axis("tokens/s as published, GTX 1080", "number"), Axis("tokens/s here", "number")
    return Plot("Every published speed beside ours", "points", series, axes)
