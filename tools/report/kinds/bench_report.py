"""What a bench result says: scaling exponents, table and Markdown. Pure functions of what is in the file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dilkit.tools.console.text import in_bytes
from dilkit.tools.report.untyped_headline import revision
from dilkit.tools.results.statistics import exponent as exponent

Result = dict[str, Any]
RANK_COLUMNS = ("a rank sends", "plan says", "work max/mean")
COLUMNS = ("tokens", "who", "time", "quartiles", "GFLOP/s", "of matmul", "tokens/s", "kB/token", "extra memory", "x output")


def scaling(lengths: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each contestant measured at two lengths or more: `time ~ seq**exponent`, fitted, and the same of its nominal FLOPs."""
    found = {}
    for name in contestants(lengths):
        points = [(length["seq"], length["entries"][name]) for length in lengths if _measured(length, name)]
        if len({seq for seq, _ in points}) > 1:
            seqs = [seq for seq, _ in points]
            time, flops = ([read(entry) for _, entry in points] for read in (_median, lambda entry: entry["flops"]))
            found[name] = dict(exponent=exponent(seqs, time), flops_exponent=exponent(seqs, flops), lengths=len(points))
    return found


def contestants(lengths: Sequence[dict[str, Any]]) -> list[str]:
    """The names that occur, in the order of their first occurrence."""
    return list(dict.fromkeys(name for length in lengths for name in length["entries"]))


def _measured(length: dict[str, Any], name: str) -> bool:
    return bool(length["entries"].get(name, {}).get("verdict") == "measured")


def _median(entry: dict[str, Any]) -> float:
    return float(entry["time"]["median_s"])


def table(result: Result) -> list[tuple[str, ...]]:
    """The column names, then a row for every measured entry; with the forward pass's memory where a call is more than that."""
    both = result["problem"]["backward"]
    ranks = "ranks" in result
    found = [(*COLUMNS, *(("of forward", "x output") if both else ()), *(RANK_COLUMNS if ranks else ()))]
    for length in result["lengths"]:
        for name, entry in length["entries"].items():
            if entry["verdict"] == "measured":
                forward = _memory(entry.get("forward_peak_bytes"), length) if both else ()
                memory = _memory(entry.get("peak_bytes"), length)
                who = f"{name} (differs)" if entry.get("differs") else name
                found.append((f"{length['seq']:,}", who, *_speed(entry), *memory, *forward, *(_ranks(entry) if ranks else ())))
    return found


def _ranks(entry: dict[str, Any]) -> tuple[str, ...]:
    """What the busiest rank sends, and how evenly work is shared out."""
    told = entry["ranks"]
    mean = sum(told["work"]) / len(told["work"])
    return in_bytes(max(told["sent_bytes"])), in_bytes(max(told["planned_bytes"])), f"{max(told['work']) / mean:.2f}"


def _speed(entry: dict[str, Any]) -> tuple[str, ...]:
    time, per_token = entry["time"], entry.get("kb_per_token")
    quartiles = f"{seconds(time['q1_s'])} - {seconds(time['q3_s'])}"
    rates = f"{entry['gflops']:,.1f}", f"{entry['matmul_fraction']:.0%}", f"{entry['tokens_per_s']:,.0f}"
    return seconds(time["median_s"]), quartiles, *rates, "?" if per_token is None else f"{per_token:.2f}"


def _memory(peak: int | None, length: dict[str, Any]) -> tuple[str, str]:
    return ("?", "?") if peak is None else (in_bytes(peak), f"{peak / length['output_bytes']:.1f}")


def seconds(value: float) -> str:
    """A time in the unit that suits it, three digits."""
    unit, size = next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if value >= size), ("us", 1e-6))
    return f"{value / size:.3g} {unit}"


def notes(result: Result) -> list[str]:
    """What the table leaves out: who was refused, skipped, wrong or failed and why, and how time grows with length."""
    told: dict[str, list[str]] = {}
    for length in result["lengths"]:
        for name, entry in length["entries"].items():
            reasons = [f"{name} {entry['verdict']}: {reason}" for reason in entry["reasons"]]
            for note in [*reasons, *_difference(name, entry.get("differs")), *filter(None, [entry.get("memory_note")])]:
                told.setdefault(note, []).append(f"{length['seq']:,}")
    lines = [f"{note} (at {', '.join(dict.fromkeys(seqs))} tokens)" for note, seqs in told.items()]
    for name, fit in scaling(result["lengths"]).items():
        nominal = f"its nominal FLOPs ~ tokens^{fit['flops_exponent']:.2f}"
        lines.append(f"{name}: time ~ tokens^{fit['exponent']:.2f}, {nominal}, fitted over {fit['lengths']} lengths")
    fractions = [e["matmul_fraction"] for length in result["lengths"] for e in length["entries"].values() if "time" in e]
    if max(fractions, default=0.0) > 1.0:
        lines.append("faster than the matmul beside it: other programs disturbed this run; measure again on a quiet machine")
    seqs = [length["seq"] for length in result["lengths"]]
    if len(seqs) > 1 and max(result["problem"]["pattern"]["segment_lengths"]) > min(seqs):
        lines.append("a segment longer than the sequence is the sequence: once all segments are shorter, FLOPs ~ tokens^1")
    return lines + (["interrupted: the lengths shown were measured, later ones were not"] if result["interrupted"] else [])


def _difference(name: str, told: dict[str, Any] | None) -> list[str]:
    """What a contestant computes in place of the pattern's attention, and how far apart the two are."""
    if not told:
        return []
    far = [
        f"{what} by {told[f'{what}_max_abs']:.2g} at most, {told[f'{what}_relative']:.2g} of the largest value"
        for what in ("out", "dquery")
        if f"{what}_max_abs" in told
    ]
    return [f"{name} computes another function: {told['computes']}", f"{name} differs from the pattern: {'; '.join(far)}"]


def headline(result: Result) -> list[str]:
    """The problem and where it was measured, in three lines."""
    problem, where = result["problem"], result["environment"]
    heads = f"{problem['heads']} heads" + (f" over {problem['kv_heads']}" if problem["kv_heads"] != problem["heads"] else "")
    flags = "".join(f", {text}" for name, text in (("is_causal", "causal"), ("key_padding_mask", "masked")) if problem[name])
    what = "forward + backward" if problem["backward"] else "forward"
    over = ""
    if "ranks" in result:
        over = ", over {world_size} ranks ({transport}), threads a rank: {threads}".format(**result["ranks"])
    return [
        f"{what}, {problem['batch']} x tokens x {heads} x {problem['head_dim']}, {problem['dtype']}{flags}{over}",
        problem["pattern"]["text"],
        f"{where['device_name']}, {where['threads']} of {where['cores']} cores in use, torch {where['torch']}, "
        f"dilkit {where['dilkit']}{revision(where)}, {result['date']}",
    ]


def text_table(result: Result) -> str:
    """The table for the terminal."""
    cells = table(result)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([*headline(result), "", *lines, "", *notes(result)])


def markdown(result: Result) -> str:
    """The result as a Markdown page."""
    names, *measured = table(result)
    lines = [f"| {' | '.join(row)} |" for row in (names, ("---:",) * len(names), *measured)]
    told = [f"* {note}" for note in notes(result)]
    head = [f"{line}  " for line in headline(result)]
    parts = ["# dilkit bench", "", *head, "", *lines, "", *told, "", method(result), "", f"`{result['command']}`", ""]
    return "\n".join(parts)


def method(result: Result) -> str:
    """How the figures were taken, in a paragraph."""
    how = result["method"]
    if "ranks" in result:
        return _method_over_ranks(how)
    return (
        f"Medians of {how['repeats']} samples of at least {how['min_time_s']:g} s, taken in interleaved rounds; each contestant "
        "was checked against fp64 arithmetic just before. GFLOP/s count the nominal FLOPs of what a contestant computes, and are "
        "compared with a square matmul timed in the same rounds. Extra memory is the peak over what was held before the call, "
        "its result included; one output is batch x tokens x heads x head_dim."
    )


def _method_over_ranks(how: dict[str, Any]) -> str:
    return (
        f"Medians of {how['repeats']} samples, one call each, in interleaved rounds: all ranks begin together, and a sample "
        "is the slowest rank's. Each schedule was checked against fp64 arithmetic on a shortened problem just before, and its "
        "bytes were counted. GFLOP/s are those of all ranks together, compared with a square matmul that every rank makes at the "
        "same time. Extra memory is the peak over what was held before the call, its result included, on the rank that needs "
        "most; one output is that of the whole sequence."
    )
