"""`dilkit order` for people: tables of at most 100 columns, and what they say in one sentence."""

from __future__ import annotations

from typing import Any

from dilkit.tools.console.text import grid, wrapped

Found = dict[str, Any]
"""A `LocalityReport` as plain data."""
SAME = 0.005
"""Shares of neighbours that differ by less than this are called equal."""
SAME_DISTANCE = 0.02
_PER_TABLE = 6
_LEGEND = (
    "near 8, near 48: share of a token's 8 or 48 nearest neighbours that are in its segment. diameter: of a segment's bounding "
    "box, in cells. shifted: the same with segments displaced by half. r=R: distance from a token to the nearest key of its "
    "segment that dilation rate R keeps, in cells, mean and largest."
)


def report_lines(report: dict[str, Any]) -> list[str]:
    """The whole report."""
    extra = f" and {report['extra_tokens']} in front" * (report["extra_tokens"] > 0)
    lines = [f"{_sides(report['shape'])} cells{extra}: {report['tokens']:,} tokens; > marks {report['curve']}"]
    for segment in report["segments"]:
        curves, chosen = segment["curves"], report["curve"]
        first = curves[chosen]
        lines += ["", f"segments of {segment['segment_length']:,} tokens: {first['segments']:,}"]
        lines += compactness_table(curves, chosen)
        if rates := [kept["rate"] for kept in first["kept"]]:
            for start in range(0, len(rates), _PER_TABLE):
                lines += ["", *_distance_table(curves, chosen, slice(start, start + _PER_TABLE))]
        lines += ["", *_drawn(curves), *wrapped("", segment["reading"])]
    legend = _LEGEND
    if report["segments"][0]["curves"][report["curve"]]["window"]:
        legend += " blocks: blocks of keys that a block of queries needs for the window, mean."
    lines += ["", *wrapped("", legend)]
    if report["png"]:
        lines += ["", f"wrote {report['png']}"]
    return lines


def compactness_table(curves: dict[str, Found], chosen: str) -> list[str]:
    """Neighbours kept and diameters, also with segments shifted; with a window, its active blocks."""
    columns = ["near 8", "near 48", "diameter", "shifted: near 8", "near 48", "diameter"]
    first = curves[chosen]
    if first["window"]:
        columns.append(f"blocks, {_sides(first['window'])}")
    rows = []
    for curve, found in curves.items():
        cells = [text for part in ("aligned", "shifted") for text in compactness_cells(found[part])]
        rows.append((_marked(curve, found, chosen), cells + ([f"{found['active_blocks']:.2f}"] if first["window"] else [])))
    return grid("  curve", columns, rows, indent=0)


def _distance_table(curves: dict[str, Found], chosen: str, part: slice) -> list[str]:
    columns = [f"r={kept['rate']}" for kept in curves[chosen]["kept"][part]]
    rows = [
        (_marked(curve, found, chosen), [distance_cell(kept) for kept in found["kept"][part]]) for curve, found in curves.items()
    ]
    return grid("  curve", columns, rows, indent=0)


def compactness_cells(found: Found) -> list[str]:
    """Shares of neighbours and diameter, in words short enough for a table."""
    return [f"{found['near_8']:.3f}", f"{found['near_48']:.3f}", f"{found['diameter']:.1f}"]


def distance_cell(kept: Found) -> str:
    """Mean and largest distance, in words short enough for a table."""
    return "none" if kept["mean"] is None else f"{kept['mean']:.2f} ({kept['max']:.1f})"


def label(found: Found) -> str:
    """The curve, with its tile."""
    return f"{found['curve']} {_sides(found['tile'])}" if found["tile"] else str(found["curve"])


def reading(curves: dict[str, Found], chosen: str) -> str:
    """What the figures say about plain tiles beside the chosen curve, or beside Hilbert where tiles are the choice."""
    if len(curves[chosen]["shape"]) == 1:
        return "In one dimension the sequence's own order is the best there is: every curve is the identity."
    rival = "hilbert" if chosen == "tile" else chosen
    tiles, other = curves["tile"], curves[rival]
    shares = {part: (tiles[part]["near_48"], other[part]["near_48"]) for part in ("aligned", "shifted")}
    means = [found["kept"][-1]["mean"] or 0.0 for found in (tiles, other, curves["row-major"])]
    judged = {part: _judge(*pair, SAME) for part, pair in shares.items()} | {"dilated": _judge(means[1], means[0], SAME_DISTANCE)}
    compact = {1: "more compact than", 0: "as compact as", -1: "less compact than"}
    aligned, shifted = (f"near 48: {ours:.3f}, {theirs:.3f}" for ours, theirs in shares.values())
    far = {1: "nearer", 0: "as near", -1: "farther"}[judged["dilated"]]
    distances = f"{means[0]:.2f}, {means[1]:.2f}" + f"; row-major: {means[2]:.2f}" * (rival != "row-major")
    return (
        f"{_verdict(judged, rival)}: tiles of {_sides(tiles['tile'])} are {compact[judged['aligned']]} {rival} ({aligned}); with "
        f"segments shifted {compact[judged['shifted']]} it ({shifted}); at rate {tiles['kept'][-1]['rate']} their nearest kept "
        f"key is {far} (cells: {distances}){_window(curves, rival)}."
    )


def _window(curves: dict[str, Found], rival: str) -> str:
    """The active blocks of a window, if one was asked for: of tiles, the rival and row-major."""
    if not curves[rival]["window"]:
        return ""
    compared = (curves.get("block-tile", curves["tile"]), curves[rival], curves["row-major"])
    listed = {label(found): f"{found['active_blocks']:.2f} for {label(found)}" for found in compared}
    return f"; blocks for the window: {', '.join(listed.values())}"


def _judge(more: float, less: float, same: float) -> int:
    """1 if the first is larger, -1 if the second is, 0 if there is next to no difference."""
    return 0 if abs(more - less) < same else 1 if more > less else -1


def _verdict(judged: dict[str, int], rival: str) -> str:
    if judged["aligned"] < 0:
        return f"{rival.capitalize()} is the better choice here"
    needed = {"shifted": "aligned", "dilated": "undilated"}
    if worse := [word for part, word in needed.items() if judged[part] < 0]:
        return f"Plain tiles are enough as long as segments stay {' and '.join(worse)}"
    if any(judged.values()):
        return f"Plain tiles are the better choice here, beside {rival}"
    return f"Plain tiles are enough here, {rival} brings nothing more"


def _drawn(curves: dict[str, Found]) -> list[str]:
    """What was sampled, if anything was."""
    lines = []
    for found in curves.values():
        if found["segments_measured"] < found["segments"]:
            lines.append(f"{label(found)}: distances come from {found['segments_measured']:,} segments drawn at random")
        if found["blocks_measured"] < found["blocks"]:
            lines.append(f"{label(found)}: blocks come from {found['blocks_measured']:,} blocks of queries drawn at random")
    return lines


def _marked(curve: str, found: Found, chosen: str) -> str:
    return f"{'>' if curve == chosen else ' '} {label(found)}"


def _sides(sides: tuple[int, ...]) -> str:
    return "x".join(map(str, sides))
