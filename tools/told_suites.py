"""What the suites' results say, as tables and plots: those of one device, and the one over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dilkit.tools import suite_cpu, suite_gpu, suite_gpu_report, suite_report, suite_ring_report
from dilkit.tools.suite_ring_targets import good
from dilkit.tools.told import Axis, Plot, Point, Series, Table, Told, plain, plots, rate, sampled, speed_up, tables
from dilkit.tools.told_bench import BACKWARD_TENSORS, FORWARD_TENSORS, TOKENS, between, roofline

Result = dict[str, Any]
Case = dict[str, Any]
SPEED_UPS = ("configuration", "over", "speed-up", "95% interval")
RANKS = Axis("ranks", "number")
_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def told_cpu(result: Result) -> Told:
    """The CPU suite."""
    cases = [(_label(case), case) for case in (*result["cases"], *(step | _DENSE for step in result["dense"]))]
    found = [entry for name in ("sdpa", "gather", "dense") for entry in _faster(cases, "native", name)]
    sizes = [(case, "float32", suite_cpu.HEADS) for case in result["cases"]]
    return Told(
        headline=tuple(suite_report.headline(result)),
        tables=tables(
            Table.of("Figures beside their targets", suite_report.figure_rows(result)),
            Table.of("All times", suite_report.time_rows(result)),
            _speed_ups("native", found),
        ),
        plots=plots(*_speed_up_bars("native", found), _roofline(sizes), _halves(result)),
        notes=tuple(suite_report.notes(result)),
        method=suite_report.method(result),
    )


_DENSE = dict(config="A beside dense attention", is_causal=False, backward=False)


def _halves(result: Result) -> Plot:
    steps = [(f"head_dim {step['head_dim']}", step["entries"]) for step in result["dtypes"]]
    series = tuple(
        Series(dtype, tuple(speed_up(at, e["float32"]["time"]["samples_s"], e[dtype]["time"]["samples_s"]) for at, e in steps))
        for dtype in ("bfloat16", "float16")
    )
    axes = Axis("", "number"), Axis("times fp32's speed", "times")
    return Plot("Half types beside fp32, configuration A", "bars", series, axes, mark=1.0)


def told_gpu(result: Result) -> Told:
    """The GPU suite."""
    cases = [(f"{_label(case)}, {case['dtype']}", case) for case in result["cases"]]
    ours = suite_gpu.OURS[0]
    found = [entry for name in result["backends"] if name != ours for entry in _faster(cases, ours, name)]
    sizes = [(case, case["dtype"], suite_gpu.HEADS) for case in result["cases"]]
    return Told(
        headline=tuple(suite_gpu_report.headline(result)),
        tables=tables(
            Table.of("Figures beside their targets", suite_gpu_report.figure_rows(result)),
            Table.of("All times", suite_gpu_report.time_rows(result)),
            _speed_ups(ours, found),
        ),
        plots=plots(_over_lengths(result["seeds"]), *_speed_up_bars(ours, found), *_rooflines(sizes)),
        notes=tuple(suite_gpu_report.notes(result)),
        method=" ".join(suite_gpu_report.METHOD.split()),
    )


def _over_lengths(steps: Iterable[Case]) -> Plot:
    lines: dict[str, list[Point]] = {}
    for step in steps:
        for name, entry in _timed(step).items():
            lines.setdefault(name, []).append(sampled(step["seq"], entry["time"]["samples_s"]))
    series = tuple(Series(name, tuple(points)) for name, points in lines.items())
    return Plot("Time of a forward pass, pattern of B, fp32", "lines", series, (TOKENS, Axis("time", "seconds")))


def _label(case: Case) -> str:
    passes = ", backward" if case["backward"] else ""
    return f"{case['config']}, d={case['head_dim']}{', causal' if case['is_causal'] else ''}{passes}"


def _timed(case: Case) -> dict[str, dict[str, Any]]:
    return {name: entry for name, entry in case["entries"].items() if "time" in entry}


def _faster(cases: Sequence[tuple[str, Case]], ours: str, other: str) -> list[tuple[str, Point]]:
    """(the other, a bar for each case: how many times faster ours is)."""
    found = []
    for label, case in cases:
        timed = _timed(case)
        if ours in timed and other in timed:
            found.append((other, speed_up(label, *(timed[name]["time"]["samples_s"] for name in (other, ours)))))
    return found


def _speed_ups(ours: str, found: Iterable[tuple[str, Point]]) -> Table:
    rows = tuple((str(p.x), other, f"{p.y:.2f}x", between(p)) for other, p in found)
    return Table(f"Speed-up of {ours}", SPEED_UPS, rows, "Ratios of medians; intervals by resampling each side's samples.")


def _speed_up_bars(ours: str, found: Sequence[tuple[str, Point]]) -> list[Plot]:
    axes = Axis("", "number"), Axis("times faster", "times")
    others = dict.fromkeys(other for other, _ in found)
    bars = [(other, tuple(p for name, p in found if name == other)) for other in others]
    titled = [(f"Speed-up of {ours} over {other}, with 95% intervals", Series(other, points)) for other, points in bars]
    return [Plot(title, "bars", (series,), axes, mark=1.0) for title, series in titled]


def _roofline(sizes: Sequence[tuple[Case, str, int]], title: str = "") -> Plot:
    """GFLOP/s over the FLOPs for each byte of the tensors; the ceilings are the matmuls, and the copies, of the same rounds."""
    lines: dict[str, list[Point]] = {}
    slope: list[Point] = []
    for case, dtype, heads in sizes:
        tensors = BACKWARD_TENSORS if case["backward"] else FORWARD_TENSORS
        moved = tensors * case["seq"] * heads * case["head_dim"] * _BYTES.get(dtype, 4)
        for name, entry in _timed(case).items():
            x = entry["flops"] / moved
            lines.setdefault(name, []).append(rate(x, entry["flops"] / 1e9, entry["time"]["samples_s"]))
            slope += [plain(x, x * case["copy"]["gb_per_s"])] if "copy" in case else []
    copies = Series("bytes at the speed of a copy", tuple(sorted(slope, key=lambda p: p.x)), dashed=True)
    return roofline(
        f"Roofline{title}: speed beside the measured matmul", lines, [case["matmul"]["gflops"] for case, _, _ in sizes], copies
    )


def _rooflines(sizes: Sequence[tuple[Case, str, int]]) -> list[Plot]:
    """One for each dtype: their ceilings differ."""
    dtypes = dict.fromkeys(dtype for _, dtype, _ in sizes)
    return [_roofline([size for size in sizes if size[1] == dtype], f", {dtype}") for dtype in dtypes]


def told_ring(result: Result) -> Told:
    """The suite over ranks."""
    report = suite_ring_report
    return Told(
        headline=tuple(report.headline(result)),
        tables=tables(
            Table.of("Figures beside their limits", report.figure_rows(result)),
            Table.of("Memory per rank, forward and backward", report.memory_rows(result)),
            Table.of("Forward bytes of the busiest rank: one million tokens, bf16", report.volume_rows(result)),
            Table.of("Faults", report.fault_rows(result)),
        ),
        plots=plots(_rank_memory(result), _growth(result), _volumes(result), _race(result), *_waits(result)),
        notes=tuple(report.notes(result)),
        method=" ".join(report.METHOD.split()),
    )


def _rank_memory(result: Result) -> Plot:
    """Each line beside its first point shared out evenly."""
    lines: dict[str, dict[int, int]] = {}
    for e in sorted(good(result, "memory"), key=lambda e: (e["config"], -e["seq"], e["ranks"])):
        lines.setdefault(f"{e['config']}, {e['seq']:,} tokens", {})[e["ranks"]] = max(e["peak_bytes"])
    series = [Series(name, tuple(plain(p, peak) for p, peak in peaks.items())) for name, peaks in lines.items()]
    for name, peaks in list(lines.items())[:1]:
        first = min(peaks)
        series.append(Series(f"1/p of {name}", tuple(plain(p, peaks[first] * first / p) for p in peaks), dashed=True))
    axes = RANKS, Axis("peak memory of a rank", "bytes")
    return Plot("Ranks' memory at fixed length, forward and backward", "lines", tuple(series), axes)


def _growth(result: Result) -> Plot:
    peaks = sorted((e["ranks"], max(e["peak_bytes"])) for e in good(result, "growth"))
    series = (Series("fixed tokens a rank", tuple(plain(*pair) for pair in peaks)),)
    axes = RANKS, Axis("peak memory of a rank", "bytes", log=False)
    return Plot("Ranks' memory at fixed tokens a rank, forward and backward", "lines", series, axes)


def _volumes(result: Result) -> Plot:
    series = []
    for found in result["volumes"]:
        counts = {**found["schedules"], "all keys and values": found["full_ring"]}
        for name, column in counts.items():
            points = tuple(plain(p, count) for p, count in zip(found["ranks"], column, strict=True) if count)
            series.append(Series(name, points, dashed=name == "all keys and values"))
    axes = RANKS, Axis("bytes of the busiest rank", "bytes")
    return Plot("Forward bytes: one million tokens, bf16", "lines", tuple(series), axes)


def _race(result: Result) -> Plot:
    bars = []
    for e in good(result, "race"):
        ways = {f"{e['ranks']} ranks of one thread": "ranks", f"one rank of {e['one_rank_threads']} threads": "one rank"}
        bars += [sampled(name, e["entries"][way]["time"]["samples_s"]) for name, way in ways.items()]
    axes = Axis("", "number"), Axis("time of a step", "seconds")
    return Plot("One step of configuration A, with 95% intervals", "bars", (Series("a step", tuple(bars)),), axes)


def _waits(result: Result) -> list[Plot]:
    made = []
    for found in good(result, "timeline"):
        waited = [sum(max(wait["end"] - wait["begin"], 0.0) for wait in rank["waits"]) for rank in found["ranks"]]
        rows = list(enumerate(zip(found["ranks"], waited, strict=True)))
        series = (
            Series("the whole step", tuple(plain(f"rank {i}", rank["seconds"]) for i, (rank, _) in rows)),
            Series("of it sending, waiting, agreeing", tuple(plain(f"rank {i}", lost) for i, (_, lost) in rows)),
        )
        axes = Axis("", "number"), Axis("time", "seconds", log=False)
        made.append(Plot(f"One step of {found['seq']:,} tokens, causal ({found['transport']})", "bars", series, axes))
    return made
