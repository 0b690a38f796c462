"""What a suite's result says: the figures beside their targets, then all times; as text, Markdown and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dilkit.tools.console.text import aligned, markdown_table
from dilkit.tools.report.kinds.bench_report import seconds
from dilkit.tools.report.untyped_headline import suite_headline

Result = dict[str, Any]
COLUMNS = ("figure", "must", "aim", "head_dim 64", "head_dim 128", "verdict")
TIMES = ("configuration", "head_dim", "", "who", "time", "quartiles", "samples", "GFLOP/s", "of matmul", "time / native's")


def headline(result: Result) -> list[str]:
    """Where it was measured, in two lines."""
    where = result["environment"]
    place = f"{where['device_name']}, instruction set {result['isa']}, {result['thread_count']} threads of {where['cores']} cores"
    return suite_headline(result, place)


def figure_rows(result: Result) -> list[tuple[str, ...]]:
    """The targets' table, its column names first."""
    return [COLUMNS, *(_figure_row(figure) for figure in result["figures"])]


def _figure_row(figure: dict[str, Any]) -> tuple[str, ...]:
    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.3g}{figure['unit']}"

    sign = "at most " if figure["lower"] else ""
    limits = [sign + shown(figure[name]) if figure[name] is not None else "-" for name in ("must", "aim")]
    return (figure["name"], *limits, *(shown(figure["values"].get(dim)) for dim in ("64", "128")), figure["verdict"])


def time_rows(result: Result) -> list[tuple[str, ...]]:
    """Every timed contestant of every configuration, the column names first."""
    rows: list[tuple[str, ...]] = [TIMES]
    for case in sorted(result["cases"], key=lambda c: (c["config"], c["backward"], c["head_dim"], c["is_causal"])):
        what = ("forward + backward" if case["backward"] else "forward") + (", causal" if case["is_causal"] else "")
        base = case["entries"]["native"].get("time", {}).get("median_s")
        for who, entry in case["entries"].items():
            if "time" in entry:
                time = entry["time"]
                quartiles = f"{seconds(time['q1_s'])} - {seconds(time['q3_s'])}"
                ratio = f"{time['median_s'] / base:.2f}" if base else "-"
                speed = f"{entry['gflops']:,.0f}", f"{entry['matmul_fraction']:.0%}", ratio
                samples = str(len(time["samples_s"]))
                rows.append(
                    (case["config"], str(case["head_dim"]), what, who, seconds(time["median_s"]), quartiles, samples, *speed)
                )
    return rows


def notes(result: Result) -> list[str]:
    """Who was not timed and why, and the half types that are not among the figures."""
    told: dict[str, list[str]] = {}
    for case in [*result["cases"], *result["dense"]]:
        for who, entry in case["entries"].items():
            for reason in entry["reasons"]:
                place = case.get("config", "dense")
                told.setdefault(f"{who} {entry['verdict']}: {reason}", []).append(place)
    lines = [f"{note} ({', '.join(dict.fromkeys(places))})" for note, places in told.items()]
    for step in result["dtypes"]:
        halves = {d: step["entries"]["float32"]["time"]["median_s"] / e["time"]["median_s"] for d, e in step["entries"].items()}
        lines.append(
            f"A, head_dim {step['head_dim']}: bf16 at {halves['bfloat16']:.2f}x, fp16 at {halves['float16']:.2f}x of fp32's speed"
        )
    for step in result["inner_loops"]:
        lines.append(
            f"one thread, head_dim {step['head_dim']}: {step['tile_gflops']:.0f} GFLOP/s in dense attention, "
            f"{step['fma_gflops']:.0f} in multiply-adds from registers"
        )
    for step in result["million"]:
        lines.append(f"{step['seq']:,} tokens: {seconds(step['time']['median_s'])}, {step['gflops']:,.0f} GFLOP/s")
    return lines


def method(result: Result) -> str:
    """How the figures were taken."""
    return (
        f"Medians of up to {result['repeats']} samples (three where calls are long), taken in turns, each contestant checked "
        "against fp64 arithmetic before. GFLOP/s count the pattern's nominal FLOPs, keys of several branches each time; the "
        "matmul is torch's in fp32, 4096 square, timed in the same rounds. gather is LongNet's published procedure in plain "
        "PyTorch: gather each branch by reshaping and taking diagonals, one call of torch's flash attention a branch, scatter "
        "into zeros, weights from the softmax denominators; its gradient is exact, where the published code detaches the "
        "weights. The fraction of the peak is that of dense attention on one thread, softmax included."
    )


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
    return "\n".join([*parts, method(result), "", f"`{result['command']}`", ""])


def draw(result: Result, path: Path) -> None:
    """Write a picture to `path`: times of the others in units of native's. Raises ImportError where matplotlib is missing."""
    from matplotlib.figure import Figure

    cases = [c for c in result["cases"] if "time" in c["entries"].get("native", {})]
    cases.sort(key=lambda c: (c["backward"], c["config"], c["head_dim"], c["is_causal"]))
    labels = [f"{c['config']} {c['head_dim']}{' causal' * c['is_causal']}{' + backward' * c['backward']}" for c in cases]
    figure = Figure(figsize=(8, 1.5 + 0.32 * max(len(cases), 1)), dpi=150, facecolor="white")
    axes = figure.subplots()
    for offset, (who, color) in enumerate((("sdpa", "#d1495b"), ("gather", "#e08e0b"))):
        timed = [(i, c) for i, c in enumerate(cases) if "time" in c["entries"].get(who, {})]
        ratios = [c["entries"][who]["time"]["median_s"] / c["entries"]["native"]["time"]["median_s"] for _, c in timed]
        axes.barh([i + 0.36 * offset for i, _ in timed], ratios, height=0.34, color=color, label=who)
    axes.axvline(1, color="#222222", linewidth=1)
    axes.set_yticks([i + 0.18 for i in range(len(cases))], labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"time of a call, in units of native's ({result['environment']['device_name']}, {result['isa']})")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
