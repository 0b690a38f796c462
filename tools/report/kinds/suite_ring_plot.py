"""The picture of the ring suite: memory per rank against n and p, bytes against p, and the timeline of one step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dilkit.tools.bench.ranks.targets import good
from dilkit.tools.console.text import in_bytes
from dilkit.tools.report.kinds.bench_plot import COLORS, FAINT, INK, PALE

Result = dict[str, Any]


def draw(result: Result, path: Path) -> None:
    """Write the picture to `path`. Raises ImportError where matplotlib is missing."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9.5), dpi=130, facecolor="white", layout="constrained")
    (of_p, of_n), (volumes, steps) = figure.subplots(2, 2)
    _memory_of_p(of_p, result)
    _memory_of_n(of_n, result)
    _volumes(volumes, result)
    _timeline(steps, result)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _peaks(result: Result, config: str) -> dict[int, dict[int, int]]:
    """Bytes by tokens and ranks."""
    found: dict[int, dict[int, int]] = {}
    for entry in good(result, "memory"):
        if entry["config"] == config:
            found.setdefault(entry["seq"], {})[entry["ranks"]] = max(entry["peak_bytes"])
    return dict(sorted(found.items()))


def _memory_of_p(axes: Any, result: Result) -> None:
    lines = {f"{seq:,} tokens": peaks for seq, peaks in _peaks(result, "long").items()}
    lines |= {f"A, {seq:,} tokens": peaks for seq, peaks in _peaks(result, "A").items()}
    for color, (label, peaks) in zip(COLORS * 2, lines.items(), strict=False):
        ranks = sorted(peaks)
        axes.plot(ranks, [peaks[p] for p in ranks], color=color, marker="o", linewidth=2.2, label=label)
        axes.plot(ranks, [peaks[ranks[0]] * ranks[0] / p for p in ranks], color=color, linestyle=":", linewidth=1)
    if growth := {entry["ranks"]: max(entry["peak_bytes"]) for entry in good(result, "growth")}:
        ranks = sorted(growth)
        axes.plot(ranks, [growth[p] for p in ranks], color=PALE, marker="s", linewidth=2.2, label="fixed tokens a rank")
    _dress(axes, "peak memory per rank, forward + backward (dotted: 1/p)", "ranks", bool(lines))


def _memory_of_n(axes: Any, result: Result) -> None:
    by_seq = _peaks(result, "long")
    ranks = sorted({p for peaks in by_seq.values() for p in peaks})
    for color, p in zip(COLORS, ranks, strict=False):
        points = [(seq, peaks[p]) for seq, peaks in by_seq.items() if p in peaks]
        axes.plot(*zip(*points, strict=True), color=color, marker="o", linewidth=2.2, label=f"p={p}")
    _dress(axes, "peak memory per rank, forward + backward", "tokens", bool(ranks))


def _volumes(axes: Any, result: Result) -> None:
    for found in good(result, "volumes"):
        lines = {**found["schedules"], "all keys and values": found["full_ring"]}
        for i, (name, counts) in enumerate(lines.items()):
            sent = [(p, count) for p, count in zip(found["ranks"], counts, strict=True) if count]
            if sent:  # lines that lie on each other all show
                style = dict(color=COLORS[i], linewidth=(5, 2.2)[i % 2], linestyle=("-", "--")[i % 2], label=name)
                axes.plot(*zip(*sent, strict=True), marker="o", **style)
    _dress(axes, "forward bytes of the busiest rank, one million tokens, bf16", "ranks", True)


def _dress(axes: Any, title: str, along: str, filled: bool) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel(along, fontsize=9.5, color=INK)
    if not filled:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=PALE)
        return
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.yaxis.set_major_formatter(lambda y, _: in_bytes(round(y)))
    axes.minorticks_off()
    axes.grid(color=FAINT, linewidth=0.8)
    axes.spines[:].set_visible(False)
    axes.legend(frameon=False, fontsize=8.5)


def _timeline(axes: Any, result: Result) -> None:
    title = "one step, forward + backward"
    for found in good(result, "timeline"):
        title += f": {found['seq']:,} tokens, causal, {len(found['ranks'])} ranks ({found['transport']})"
        for rank, told in enumerate(found["ranks"]):
            axes.barh(rank, told["seconds"], height=0.6, color=COLORS[0], label="" if rank else "computing")
            waits = [(wait["begin"], wait["end"] - wait["begin"]) for wait in told["waits"]]
            axes.broken_barh(waits, (rank - 0.3, 0.6), color=COLORS[1], label="" if rank else "sending, waiting, agreeing")
        axes.set_yticks(range(len(found["ranks"])), [f"rank {rank}" for rank in range(len(found["ranks"]))])
        axes.invert_yaxis()
        axes.legend(frameon=False, fontsize=8.5, loc="lower center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel("seconds", fontsize=9.5, color=INK)
    axes.spines[:].set_visible(False)
