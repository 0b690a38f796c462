"""The plots of the suite `seeds`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dilkit.tools.bench.published.claims import HELD, group
from dilkit.tools.report.document import Axis, Plot, Point, Series
from dilkit.tools.report.points import plain, sampled, series_of, speed_up
from dilkit.tools.report.roofline import Work, roofline
from dilkit.tools.results.kinds.published import Job, PublishedCase, PublishedResult
from dilkit.tools.results.record import Entry

RANKS, NAMES, TOKENS = Axis("ranks", "number"), Axis("", "number"), Axis("tokens", "tokens")
FORWARD, TRAINING = "forward", "training"
BOTH = ((False, FORWARD), (True, TRAINING))
Read = Callable[[PublishedCase, Entry], Point | None]


def all_plots(result: PublishedResult) -> Iterator[Plot]:
    """Those over lengths first."""
    title = "Time of a call; segments that grow with the length, or stay"
    yield _over_lengths(result, title, Axis("time", "seconds"), lambda case, entry: sampled(case.setting.seq, entry.seconds))
    yield _over_lengths(result, "Peak memory, inputs counted", Axis("memory", "bytes"), _memory)
    yield _published(result)
    yield _over_lengths(result, "Memory a token, inputs counted", Axis("memory a token", "kb"), _per_token)
    yield from (_over_reference(result, *one) for one in BOTH)
    yield from (_along_the_curve(result), _halves(result), _roofline(result))
    yield _ranks(result.ranks, "fixed length", grows=False)
    yield _ranks(result.growth, "fixed tokens a rank", grows=True)


def _memory(case: PublishedCase, entry: Entry) -> Point | None:
    return plain(case.setting.seq, entry.memory_bytes) if entry.memory_bytes else None


def _per_token(case: PublishedCase, entry: Entry) -> Point | None:
    return plain(case.setting.seq, entry.memory_bytes / 1000 / case.tokens) if entry.memory_bytes else None


def _over_lengths(result: PublishedResult, title: str, axis: Axis, read: Read) -> Plot:
    lines: dict[str, list[Point]] = {}
    for label, settings in (("grow", group("lengths").values()), ("stay", HELD)):
        for who, backward, name in (("auto", False, FORWARD), ("auto", True, TRAINING), ("head-split", False, FORWARD)):
            cases = [case for setting in settings if (case := result.case(setting, backward)) and case.timed(who)]
            points = (read(case, case.entries[who]) for case in cases)
            lines[f"{who}, {name}, {label}"] = [point for point in points if point]
    return Plot(title, "lines", series_of(lines), (TOKENS, axis))


def _over_reference(result: PublishedResult, backward: bool, name: str) -> Plot:
    """Bars by length: how many times faster than the reference everyone is."""
    bars: dict[str, list[Point]] = {}
    for setting in group("implementations").values():
        case = result.case(setting, backward)
        for who in case.entries if case and case.timed("reference") else ():
            if case and who != "reference" and case.timed(who):
                slow, fast = case.entries["reference"].seconds, case.entries[who].seconds
                bars.setdefault(who, []).append(speed_up(f"{setting.seq:,} tokens", slow, fast))
    return _ratios(f"Speed-up over the reference, {name}, with 95% intervals", "times faster", bars)


def _along_the_curve(result: PublishedResult) -> Plot:
    bars: dict[str, list[Point]] = {}
    for label, setting in group("orders").items():
        for backward, name in BOTH:
            slow, fast = (result.entry(setting, who, backward) for who in ("auto", "ordered"))
            if slow and fast:
                bars.setdefault(name, []).append(speed_up(label, slow.seconds, fast.seconds))
    return _ratios("Speed-up by a Hilbert order, moving of rows counted, with 95% intervals", "times faster", bars)


def _halves(result: PublishedResult) -> Plot:
    """Both half types beside fp32, by setting."""
    bars: dict[str, list[Point]] = {}
    for setting in group("lengths").values():
        for backward, name in BOTH:
            base = result.entry(setting, "float32", backward)
            for who, dtype in (("bfloat16", "bfloat16"), ("auto", "float16")):
                if base and (entry := result.entry(setting, who, backward)):
                    point = speed_up(f"{setting.seq:,} tokens", base.seconds, entry.seconds)
                    bars.setdefault(f"{dtype}, {name}", []).append(point)
    return _ratios("Half types beside fp32", "times fp32's speed", bars)


def _ratios(title: str, what: str, bars: dict[str, list[Point]]) -> Plot:
    return Plot(title, "bars", series_of(bars), (NAMES, Axis(what, "times")), mark=1.0)


def _roofline(result: PublishedResult) -> Plot:
    """Of those that are compared side by side, in fp32 like the matmul."""
    found = (result.case(setting, backward) for setting in group("implementations").values() for backward, _ in BOTH)
    return roofline("Roofline: speed beside the measured matmul", [Work(c, c.output_bytes, c.backward) for c in found if c])


def _ranks(jobs: tuple[Job, ...], what: str, grows: bool) -> Plot:
    """Memory of the rank that needs most, forward and backward where that was measured."""
    lines: dict[str, dict[int, float]] = {}
    for row in (row for job in jobs for row in job.rows):
        s = row.setting
        length, batch = s.seq // (s.ranks if grows else 1), f"{s.batch} x " if s.batch > 1 else ""
        label = f"{batch}{length:,} tokens{' a rank' * grows}, {TRAINING if row.backward else FORWARD}"
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
