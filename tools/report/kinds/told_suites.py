"""What the results of the CPU suite and of the GPU suite say, as tables and plots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dilkit.tools.bench import cpu as suite_cpu
from dilkit.tools.bench import gpu as suite_gpu
from dilkit.tools.report.document import Axis, Document, Plot, Point, Series, Table, plots, tables
from dilkit.tools.report.kinds import suite_gpu_report, suite_report
from dilkit.tools.report.kinds.told_bench import BACKWARD_TENSORS, FORWARD_TENSORS, TOKENS, between, roofline
from dilkit.tools.report.points import sampled, series_of, speed_up

Result = dict[str, Any]
Case = dict[str, Any]
SPEED_UPS = ("configuration", "over", "speed-up", "95% interval")
_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def told_cpu(result: Result) -> Document:
    """The CPU suite."""
    cases = [(_label(case), case) for case in (*result["cases"], *(step | _DENSE for step in result["dense"]))]
    found = [entry for name in ("sdpa", "gather", "dense") for entry in _faster(cases, "native", name)]
    sizes = [(case, "float32", suite_cpu.HEADS) for case in result["cases"]]
    return Document(
        headline=tuple(suite_report.headline(result)),
        tables=tables(
            Table.of("Figures beside their targets", suite_report.figure_rows(result)),
            Table.of("All times", suite_report.time_rows(result)),
            _speed_ups("native", found),
        ),
        plots=plots(*_speed_up_bars("native", found), roofline_of(sizes), _halves(result)),
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


def told_gpu(result: Result) -> Document:
    """The GPU suite."""
    cases = [(_label(case, _SHORT.get(case["dtype"], case["dtype"])), case) for case in result["cases"]]
    ours = suite_gpu.OURS[0]
    found = [entry for name in result["backends"] if name != ours for entry in _faster(cases, ours, name)]
    sizes = [(case, case["dtype"], suite_gpu.HEADS) for case in result["cases"]]
    return Document(
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
    return Plot("Time of a forward pass, pattern of B, fp32", "lines", series_of(lines), (TOKENS, Axis("time", "seconds")))


def _label(case: Case, dtype: str = "") -> str:
    flags = ("causal" if case["is_causal"] else "", "backward" if case["backward"] else "")
    return ", ".join(filter(None, (case["config"], dtype, f"d={case['head_dim']}", *flags)))


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
    bars: dict[str, list[Point]] = {}
    for other, point in found:
        bars.setdefault(other, []).append(point)
    title = f"Speed-up of {ours} over {{}}, with 95% intervals"
    return [Plot(title.replace("{}", one.name), "bars", (one,), axes, mark=1.0) for one in series_of(bars)]


def roofline_of(sizes: Sequence[tuple[Case, str, int]], title: str = "") -> Plot:
    """The roofline of cases, each with its dtype and its heads in all sequences."""
    steps = []
    for case, dtype, heads in sizes:
        tensors = BACKWARD_TENSORS if case["backward"] else FORWARD_TENSORS
        steps.append((case, tensors * case["seq"] * heads * case["head_dim"] * _BYTES.get(dtype, 4), _timed(case)))
    return roofline(f"Roofline{title}: speed beside the measured matmul", steps)


def _rooflines(sizes: Sequence[tuple[Case, str, int]]) -> list[Plot]:
    """One for each dtype: their ceilings differ."""
    dtypes = dict.fromkeys(dtype for _, dtype, _ in sizes)
    return [roofline_of([size for size in sizes if size[1] == dtype], f", {dtype}") for dtype in dtypes]
