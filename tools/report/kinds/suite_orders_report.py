"""What the result of the suite of token orders says: the figures beside their limits, then all times; as text and Markdown."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from dilkit.tools.bench.orders.targets import contests, size, versus
from dilkit.tools.console.text import aligned, markdown_table
from dilkit.tools.report.kinds.bench_report import seconds
from dilkit.tools.report.untyped_headline import suite_headline

Result = dict[str, Any]
Rows = list[tuple[str, ...]]
FIGURES = ("figure", "must", "aim", "measured", "verdict")
TIMES = ("what", "who", "ns a point", "quartiles", "samples", "points", "time / dilkit's")
CALLS = ("grid", "cold", "ns a point", "cold, with ranks", "ns a point", "warm")
SHOWN = 2
"""Of so many values all are shown, of more the worst."""


def headline(result: Result) -> list[str]:
    """Where it was measured, in two lines."""
    where = result["environment"]
    place = f"{where['device_name']}, one thread, encode and decode with {result['isa']}"
    return suite_headline(result, place, f"Python {where['python']}, numpy {where['numpy']}", "sides", "time")


def figure_rows(result: Result) -> Rows:
    """The figures' table, its column names first."""
    return [FIGURES, *(_figure_row(figure) for figure in result["figures"])]


def _figure_row(figure: dict[str, Any]) -> tuple[str, ...]:
    def limit(value: float | None) -> str:
        return "-" if value is None else f"{'at most' if figure['lower'] else 'at least'} {value:g}{figure['unit']}"

    values = sorted(figure["values"].items(), key=lambda item: item[1], reverse=figure["lower"])
    told = [f"{number(value)}{figure['unit']}{f' ({what})' * bool(what)}" for what, value in values]
    worst = told if len(told) <= SHOWN else [f"{told[0]}, the worst of {len(told)}"]
    return figure["name"], limit(figure["must"]), limit(figure["aim"]), ", ".join(worst) or "-", figure["verdict"]


def time_rows(result: Result) -> Rows:
    """Everyone who was timed, in every contest, the column names first."""
    rows: Rows = [TIMES]
    for title, row in contests(result):
        for who, entry in row["entries"].items():
            if "time" in entry:
                rows.append((title, who, *_time_cells(entry), "-" if (ratio := versus(row, who)) is None else number(ratio)))
    return rows


def _time_cells(entry: dict[str, Any]) -> tuple[str, ...]:
    time, scale = entry["time"], 1e9 / entry["points"]
    quartiles = " - ".join(number(time[name] * scale) for name in ("q1_s", "q3_s"))
    return number(entry["ns_per_point"]), quartiles, str(len(time["samples_s"])), f"{entry['points']:,}"


def number(value: float) -> str:
    """Three digits, or the whole ones."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def call_rows(result: Result) -> Rows:
    """What a call of `order` takes, by grid."""
    warm = {row["grid"]: seconds(row["time"]["median_s"]) for row in result["warm"]}
    rows: Rows = [CALLS]
    for row in result["cold"]:
        medians = [row["times"][what]["median_s"] for what in ("permutation", "both")]
        cells = [cell for median in medians for cell in (seconds(median), number(1e9 * median / prod(row["shape"])))]
        rows.append((size(row), *cells, warm.get(row["grid"], "-")))
    return rows


def near_rows(result: Result) -> Rows:
    """The mean distance to the nearest kept key, and the largest, by curve and dilation rate."""
    rows: Rows = []
    for row in result["locality"]:
        rates = [str(rate) for rate in row["dilation_rates"]]
        rows = [("curve", *(f"every {rate}th key kept" for rate in rates))]
        rows += [
            (curve, *(f"{near[rate]['mean']:.3f} ({near[rate]['max']:.3g})" for rate in rates))
            for curve, near in row["nearest_kept"].items()
        ]
    return rows


def package_rows(result: Result) -> Rows:
    """The packages: what they compute, and which took part."""
    rows = [(p["name"], p["version"] or "-", p["summary"], p["absent"] or "took part") for p in result["packages"]]
    return [("package", "version", "what it computes", ""), *rows]


def notes(result: Result) -> list[str]:
    """Who was wrong or failed, where and in what; how much was checked."""
    told: dict[str, list[str]] = {}
    for title, row in contests(result):
        for who, entry in row["entries"].items():
            if entry["reasons"]:
                told.setdefault(f"{who} {entry['verdict']}, not ranked: {entry['reasons'][0]}", []).append(title)
    lines = [f"{note} ({places[0]}{f', and {len(places) - 1} more' * (len(places) > 1)})" for note, places in told.items()]
    checks = sum(len(entry["check"]) for _, row in contests(result) for entry in row["entries"].values())
    return [*lines, f"{checks} checks of results, each just before its timing"]


METHOD = """\
Medians of all samples, on one thread, everyone in a row timed in turns; a sample is as many calls as last 20 ms, and a ratio
the median of those within a round. dilkit's permutations, ranks and codes go into arrays that were written to before; the store
loop is `out[i] = i`, compiled with the same flags, into the same array as dilkit's permutation. A cold call of `order` finds an
empty cache and gets fresh memory from the system, page faults included. A package that would take longer than the budget
(`--budget`, seconds a call) is given fewer points of the same row; what counts is time a point. Packages have codes and
coordinates on cubes of a power of two: their permutation is that of decoded coordinates, their ranks are the codes of all
cells, and on other grids their codes are sorted, which makes a curve with jumps. Before it is timed everyone must walk a small
grid, visiting each cell once by steps of one cell, and know its own codes again; in the row itself, give each cell once,
ascending codes, or the inputs back. Distances to the nearest kept key are means over the tokens of a grid of 256 x 256 in
segments of 4,096, and depend on no machine."""


def text(result: Result) -> str:
    """The report for the terminal."""
    tables = [aligned(rows(result)) for rows in (figure_rows, time_rows, call_rows, near_rows, package_rows) if rows(result)]
    return "\n".join([*headline(result), *(line for table in tables for line in ("", *table)), "", *notes(result)])


def figures_markdown(result: Result) -> str:
    """Where, and the figures beside their limits."""
    return "\n".join([*(f"{line}  " for line in headline(result)), "", *markdown_table(figure_rows(result))])


def markdown(result: Result) -> str:
    """The whole report."""
    parts = [figures_markdown(result)]
    for title, rows in (
        ("All times", time_rows(result)),
        ("Calls of `order`", call_rows(result)),
        ("Distance to the nearest kept key", near_rows(result)),
        ("Packages", package_rows(result)),
    ):
        parts += ["", f"## {title}", "", *(markdown_table(rows) if rows else ["Not measured."])]
    return "\n".join([*parts, "", *(f"* {note}" for note in notes(result)), "", METHOD, "", f"`{result['command']}`", ""])


def draw(result: Result, path: Path) -> None:
    """Write the picture to `path`. Raises ImportError where matplotlib is missing."""
    from dilkit.tools.report.kinds.suite_orders_plot import draw as draw_orders

    draw_orders(result, path)
