"""What the GPU suite's result says: the figures beside their targets, then all times; as text, Markdown and a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dilkit.tools.bench.untyped_target import median
from dilkit.tools.console.text import aligned, in_bytes, markdown_table
from dilkit.tools.report.kinds.bench_report import seconds
from dilkit.tools.report.kinds.suite_report import figure_rows
from dilkit.tools.report.untyped_headline import suite_headline

Result = dict[str, Any]
Rows = list[tuple[str, ...]]
TIMES = ("configuration", "dtype", "head_dim", "", "who", "time", "quartiles", "TFLOP/s", "of matmul", "time / cupy_raw's")
COLORS = ("#d1495b", "#e08e0b", "#3a7d44", "#6a4c93", "#0b6e99")


def headline(result: Result) -> list[str]:
    """Where it was measured, in two lines."""
    where = result["environment"]
    device = f"{where['device_name']}, capability {where['capability']}, CUDA {where['cuda']}" if "capability" in where else ""
    return suite_headline(result, device or f"{where['device_name']}: NO GPU")


def time_rows(result: Result) -> Rows:
    """Every timed contestant of every configuration, the column names first."""
    order = sorted(result["cases"], key=lambda c: (c["config"], c["backward"], c["dtype"], c["head_dim"], c["is_causal"]))
    rows: Rows = [TIMES]
    for case in order:
        what = ("backward" if case["backward"] else "forward") + (", causal" if case["is_causal"] else "")
        rows += _entry_rows((case["config"], case["dtype"], str(case["head_dim"]), what), case)
    for step in result["launch_bound"]:
        rows += _entry_rows((f"B, {step['seq']:,} tokens", "float32", "64", "forward, launches too"), step)
    for step in result["seeds"]:
        rows += _entry_rows((f"B, {step['seq']:,} tokens", "float32", "64", "forward"), step)
    return rows


def _entry_rows(start: tuple[str, ...], step: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    ours = step["entries"].get("cupy_raw", {})
    for who, entry in step["entries"].items():
        if "time" in entry:
            time = entry["time"]
            quartiles = f"{seconds(time['q1_s'])} - {seconds(time['q3_s'])}"
            ratio = f"{median(entry) / median(ours):.2f}" if "time" in ours else "-"
            speed = f"{entry['gflops'] / 1000:,.1f}", f"{entry['matmul_fraction']:.0%}", ratio
            yield (*start, who, seconds(median(entry)), quartiles, *speed)


def notes(result: Result) -> list[str]:
    """Who was not timed and why, memory, and the longest sequence."""
    told: dict[str, list[str]] = {}
    for step in [*result["cases"], *result["seeds"], *result["launch_bound"]]:
        for who, entry in step["entries"].items():
            for reason in entry["reasons"]:
                told.setdefault(f"{who} {entry['verdict']}: {reason}", []).append(step.get("config", f"{step['seq']:,} tokens"))
    lines = [f"{note} ({', '.join(dict.fromkeys(places))})" for note, places in told.items()]
    for step in result["memory"]:
        held = (f"{who} {in_bytes(size) if size is not None else '?'}" for who, size in step["scratch_bytes"].items())
        lines.append(f"A, {step['dtype']}, head_dim 64: forward's memory beyond out and lse: {', '.join(held)}")
    for step in result["long"]:
        done = f"{seconds(median(step))}, {step['gflops'] / 1000:,.0f} TFLOP/s" if step["time"] else "; ".join(step["reasons"])
        lines.append(f"{step['seq']:,} tokens, bf16 forward: {step['verdict']}: {done}")
    return lines


METHOD = """\
CUDA events around each call by itself, the L2 cache flushed before it, contestants in turns, medians; a matmul of the same
dtype, 4096 square, and a copy of 1 GiB are timed in the same rounds. Each contestant is checked against fp64 arithmetic just
before it is timed, a short problem as a whole and rows at the real length. TFLOP/s count the pattern's nominal FLOPs, keys of
several branches each time; a backward pass counts 2.5 times a forward pass. sdpa:NAME is torch's kernel of that name on
strided views, one call a block, merged by lse. Where launches count, calls follow each other without a pause."""


def text(result: Result) -> str:
    """The report for the terminal."""
    tables = [aligned(figure_rows(result)), aligned(time_rows(result))]
    return "\n".join([*headline(result), "", *tables[0], "", *tables[1], "", *notes(result)])


def figures_markdown(result: Result) -> str:
    """Where, and the figures beside their targets."""
    return "\n".join([*(f"{line}  " for line in headline(result)), "", *markdown_table(figure_rows(result))])


def markdown(result: Result) -> str:
    """The whole report."""
    told = [f"* {note}" for note in notes(result)]
    parts = [figures_markdown(result), "", "## All times", "", *markdown_table(time_rows(result)), "", *told, ""]
    return "\n".join([*parts, METHOD, "", f"`{result['command']}`", ""])


def draw(result: Result, path: Path) -> None:
    """Write a picture to `path`: times in units of cupy_raw's. Raises ImportError where matplotlib is missing."""
    from matplotlib.figure import Figure

    cases = [c for c in result["cases"] if "time" in c["entries"].get("cupy_raw", {})]
    cases.sort(key=lambda c: (c["backward"], c["dtype"], c["config"], c["head_dim"], c["is_causal"]))
    labels = [
        f"{c['config']} {c['dtype']} {c['head_dim']}{' causal' * c['is_causal']}{' backward' * c['backward']}" for c in cases
    ]
    others = [name for name in result["backends"] if name != "cupy_raw"]
    figure = Figure(figsize=(9, 1.5 + 0.4 * max(len(cases), 1)), dpi=150, facecolor="white")
    axes, height = figure.subplots(), 0.8 / max(len(others), 1)
    for nth, who in enumerate(others):
        timed = [(i, c["entries"]) for i, c in enumerate(cases) if "time" in c["entries"].get(who, {})]
        ratios = [median(entries[who]) / median(entries["cupy_raw"]) for _, entries in timed]
        axes.barh([i + nth * height for i, _ in timed], ratios, height=height, color=COLORS[nth % len(COLORS)], label=who)
    axes.axvline(1, color="#222222", linewidth=1)
    axes.set_yticks([i + 0.3 for i in range(len(cases))], labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"time of a call, in units of cupy_raw's ({result['environment']['device_name']})")
    axes.spines[["top", "right"]].set_visible(False)
    if others:
        axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
