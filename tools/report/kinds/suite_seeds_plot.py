"""The picture of the suite of published settings: time and memory against length, and each published speed beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dilkit.tools.bench.published.settings import LENGTHS, held_lengths
from dilkit.tools.report.kinds.seed_rows import Cases

Result = dict[str, Any]
OURS, THEIRS = "#0b6e99", "#d1495b"


def draw(result: Result, path: Path) -> None:
    """Write the picture to `path`. Raises ImportError where matplotlib is missing."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), dpi=150, facecolor="white")
    time, memory, speeds = figure.subplots(1, 3)
    _lengths(time, memory, result)
    _speeds(speeds, result)
    for axes in (time, memory, speeds):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(result["environment"]["device_name"], fontsize=10)
    figure.tight_layout()
    figure.savefig(path)


def _lengths(time: Any, memory: Any, result: Result) -> None:
    cases = Cases(result)
    growing = sorted(LENGTHS, key=lambda s: s.seq)
    for label, settings, style in (("segments grow, fp16", growing, "o-"), ("segments held, fp32", held_lengths(True), "s-")):
        for who, color in (("auto", OURS), ("head-split", "#3a7d44")):
            found = [(s, entry) for s in settings if (entry := cases.entry(s, who))]
            marked = dict(color=color, markersize=4, label=f"{who}, {label}", fillstyle="full" if style == "o-" else "none")
            time.plot([s.seq for s, _ in found], [1000 * e["time"]["median_s"] for _, e in found], style, **marked)
            held = [(s.seq, e["memory_bytes"] / 1024 / e["tokens"]) for s, e in found if e.get("memory_bytes")]
            memory.plot([seq for seq, _ in held], [kib for _, kib in held], style, **marked)
    told = [f for f in result["figures"] if f["quantity"] == "ms" and f["figure"].endswith("tokens, batch 1")]
    points = [(float(f["figure"].split()[0].replace(",", "")), f["claimed"]) for f in told]
    time.plot([x for x, _ in points], [y for _, y in points], "x", color=THEIRS, label="published (fp16, GTX 1080)")
    for axes, unit in ((time, "ms, forward"), (memory, "KiB a token, forward, inputs counted")):
        axes.set(xlabel="tokens", ylabel=unit)
        _log(axes, "log" if axes is time else "linear")
    memory.set_ylim(bottom=0)
    time.legend(frameon=False, fontsize=6)


def _speeds(axes: Any, result: Result) -> None:
    """Every published tokens/s against ours: above the line ours is faster."""
    pairs = [(f["claimed"], f["ours"]) for f in result["figures"] if f["quantity"] == "tokens/s" and f["ours"]]
    if pairs:
        ends = [min(map(min, pairs)), max(map(max, pairs))]
        axes.plot(ends, ends, color="#222222", linewidth=1)
        axes.scatter([x for x, _ in pairs], [y for _, y in pairs], s=12, color=OURS)
    axes.set(xlabel="tokens/s as published", ylabel="tokens/s here")
    _log(axes)


def _log(axes: Any, upwards: str = "log") -> None:
    """Logarithmic axes, one or both, unless nothing was measured: then there is nothing that they could show."""
    if any(len(line.get_xdata()) for line in axes.lines):
        axes.set(xscale="log", yscale=upwards)
