"""What a bench result and an overhead result say, as tables and plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dilkit.tools.console.text import in_seconds
from dilkit.tools.measure import overhead
from dilkit.tools.report.document import Axis, Document, Plot, Point, Series, Table, plots, tables
from dilkit.tools.report.kinds import bench_report
from dilkit.tools.report.points import plain, rate, roof, sampled, series_of, speed_up
from dilkit.tools.report.untyped_headline import revision

Result = dict[str, Any]
Entry = dict[str, Any]
TOKENS = Axis("tokens", "tokens")
FORWARD_TENSORS, BACKWARD_TENSORS = 4, 8
"""The tensors of a call, each moved once: query, key, value, out; with a backward pass also their gradients."""
ROOFS = dict(matmul="torch's matmul, same rounds", fma="fused multiply-adds, same rounds")


def told(result: Result) -> Document:
    """A bench result as a whole."""
    return Document(
        headline=tuple(bench_report.headline(result)),
        tables=tables(Table.of("Time and memory", bench_report.table(result)), speed_ups(result)),
        plots=plots(*_plots(result)),
        notes=tuple(bench_report.notes(result)),
        method=bench_report.method(result),
    )


def _plots(result: Result) -> list[Plot]:
    more = [_by_rank(result, "sent_bytes", "Bytes that a rank sends in a call")] if "ranks" in result else []
    return [
        _over_lengths(result, "Time of a call", Axis("time", "seconds"), lambda x, e: sampled(x, e["time"]["samples_s"])),
        _over_lengths(result, "Peak extra memory of a call", Axis("memory", "bytes"), _field("peak_bytes")),
        _over_lengths(result, "Memory a token", Axis("memory a token", "kb"), _field("kb_per_token")),
        _bars(result),
        _roofline(result),
        *more,
    ]


def _field(name: str) -> Callable[[float | str, Entry], Point | None]:
    return lambda x, entry: plain(x, entry[name]) if entry.get(name) else None


def _measured(result: Result) -> list[tuple[dict[str, Any], dict[str, Entry]]]:
    """The lengths, each with the entries that were measured."""
    every = result["lengths"]
    return [(one, {name: e for name, e in one["entries"].items() if e["verdict"] == "measured"}) for one in every]


def _over_lengths(result: Result, title: str, axis: Axis, point: Callable[[float | str, Entry], Point | None]) -> Plot:
    """A line for each contestant; of one length, a bar for each."""
    single = len(result["lengths"]) == 1
    lines: dict[str, list[Point]] = {name: [] for name in bench_report.contestants(result["lengths"])}
    for length, entries in _measured(result):
        for name, entry in entries.items():
            if (found := point(_tokens(length) if single else length["seq"], entry)) is not None:
                lines[name].append(found)
    series = series_of(lines)
    return Plot(title, "bars" if single else "lines", series, (TOKENS, axis))


def _tokens(length: dict[str, Any]) -> str:
    return f"{length['seq']:,} tokens"


def _versus_first(result: Result) -> list[tuple[str, str, Point]]:
    """(who is the first, who is another, a bar labelled with the tokens: how many times faster the first is)."""
    found = []
    for length, entries in _measured(result):
        first, *others = entries or [""]
        for other in others:
            pair = (entries[name]["time"]["samples_s"] for name in (other, first))
            found.append((first, other, speed_up(_tokens(length), *pair)))
    return found


def _bars(result: Result) -> Plot:
    bars: dict[str, list[Point]] = {}
    for first, other, point in _versus_first(result):
        bars.setdefault(f"{first} over {other}", []).append(point)
    axes = Axis("", "tokens"), Axis("times faster", "times")
    return Plot("Speed-up, with 95% intervals", "bars", series_of(bars), axes, mark=1.0)


def speed_ups(result: Result) -> Table:
    """How many times faster the first contestant is than each other one, by length."""
    header = ("length", "who", "over", "speed-up", "95% interval")
    rows = [(str(p.x), who, other, f"{p.y:.2f}x", between(p)) for who, other, p in _versus_first(result)]
    return Table("Speed-ups", header, tuple(rows), "Ratios of medians; intervals by resampling each side's samples.")


def between(point: Point) -> str:
    """The interval of a ratio."""
    return f"{point.low:.2f}x - {point.high:.2f}x"


def _roofline(result: Result) -> Plot:
    """GFLOP/s over the FLOPs for each byte of the tensors, beside the matmul that was timed in the same rounds."""
    tensors = BACKWARD_TENSORS if result["problem"]["backward"] else FORWARD_TENSORS
    steps = [(length, tensors * length["output_bytes"], entries) for length, entries in _measured(result)]
    return roofline("Roofline: speed beside the measured matmul", steps)


def roofline(title: str, steps: Iterable[tuple[dict[str, Any], float, dict[str, Entry]]]) -> Plot:
    """GFLOP/s of everyone over the FLOPs a byte of the call's tensors; as roofs what was timed in the same rounds.

    `steps` are (what was measured with its ceilings, bytes of the call's tensors, entries with times).
    """
    lines: dict[str, list[Point]] = {}
    ceilings, slope = {name: [] for name in ROOFS}, []
    for step, nbytes, entries in steps:
        for name, entry in entries.items():
            x = entry["flops"] / nbytes
            lines.setdefault(name, []).append(rate(x, entry["flops"] / 1e9, entry["time"]["samples_s"]))
            slope += [plain(x, x * step["copy"]["gb_per_s"])] if "copy" in step else []
        for name, found in ceilings.items():
            found += [step[name]["gflops"]] if name in step else []
    along = [float(point.x) for points in lines.values() for point in points]
    roofs = [roof(ROOFS[name], found, along) for name, found in ceilings.items() if found]
    copies = Series("bytes at the speed of a copy", tuple(sorted(slope, key=lambda p: p.x)), dashed=True)
    axes = Axis("nominal FLOPs a byte of the call's tensors", "number"), Axis("speed", "gflops")
    return Plot(title, "points", (*series_of(lines), *roofs, copies), axes)


def _by_rank(result: Result, field: str, title: str) -> Plot:
    lengths = [(one, entries) for one, entries in _measured(result) if entries]
    *_, (longest, entries) = lengths or [({"seq": 0}, {})]
    series = tuple(
        Series(name, tuple(plain(f"rank {i}", value) for i, value in enumerate(entry["ranks"][field])))
        for name, entry in entries.items()
    )
    return Plot(f"{title}, {longest['seq']:,} tokens", "bars", series, (Axis("", "number"), Axis("bytes", "bytes", log=False)))


def told_overhead(result: Result) -> Document:
    """An overhead result as a whole."""
    first, second, *_ = overhead.text(result).splitlines()
    header = ("a call", "dilkit", "directly", "overhead", "of the fastest")
    rows = tuple((mode, *_micro(found)) for mode, found in result["modes"].items())
    public, direct = (
        Series(name, tuple(sampled(mode, found[way]["samples_s"]) for mode, found in result["modes"].items()))
        for name, way in (("dilkit.dilated_attention", "public"), (f"{result['backend']} directly", "direct"))
    )
    axes = Axis("", "number"), Axis("time of a call", "seconds", log=False)
    return Document(
        headline=(first, second, where(result)),
        tables=tables(Table("Time of a call", header, rows)),
        plots=plots(Plot("Time of a call, with 95% intervals", "bars", (public, direct), axes)),
        method="One thread; both ways timed in turns. The overhead is the median difference of samples of the same round.",
    )


def _micro(found: dict[str, Any]) -> tuple[str, ...]:
    times = found["public"]["median_s"], found["direct"]["median_s"], found["overhead_s"], found["overhead_of_fastest_s"]
    return tuple(f"-{in_seconds(-time)}" if time < 0 else in_seconds(time) for time in times)


def where(result: Result) -> str:
    """Device, versions, revision and date, in a line."""
    at = result["environment"]
    threads = f"{at['threads']} thread{'s' * (at['threads'] != 1)}"
    return f"{at['device_name']}, {threads}, torch {at['torch']}, dilkit {at['dilkit']}{revision(at)}, {result['date']}"
