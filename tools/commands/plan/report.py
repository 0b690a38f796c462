"""`dilkit plan` for people: tables of at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dilkit.tools.console.text import grid, in_bytes, in_seconds, in_thousands, table, wrapped

TIMES = {
    "compute": "work alone",
    "communication": "sending alone",
    "overlapped": "both at once",
    "sequential": "one after the other",
}
NAMES = {"full_ring": "ring of all keys and values", "segment_all_gather": "all-gather within segments, as LongNet's"}


def report_lines(report: dict[str, Any]) -> list[str]:
    """The whole report."""
    schedules = report["schedules"]
    name, first = next(iter(schedules.items()))
    lines = [*_head(report), "", f"branches, schedule {name}", *_branch_table(first["branches"]), ""]
    for text in first["explanation"]:
        lines += wrapped("  ", text)
    lines += ["", "a rank, by schedule", *_schedule_table(schedules)]
    for refused, why in report["refused"].items():
        lines += wrapped(f"  {refused} is refused: ", why)
    lines += ["", "sent forward by the rank that sends most, elsewhere"]
    for key, found in report["baselines"].items():
        lines.append(f"  {NAMES[key]:<42}  {in_bytes(found['forward_bytes'])}, {in_seconds(found['seconds'])}")
    if report["choice"]:
        lines += ["", *wrapped("", report["choice"])]
    for name, found in report.get("rank", {}).items():
        lines += ["", *_rank_lines(name, found)]
    return lines


def _head(report: dict[str, Any]) -> list[str]:
    p = report["problem"]
    causal, mask = ", causal" * p["is_causal"], ", key padding mask" * p["key_padding_mask"]
    heads = f"{p['heads']} heads over {p['kv_heads']}" if p["kv_heads"] != p["heads"] else f"{p['heads']} heads"
    call = f"{p['batch']} x {p['seq']:,} tokens x {heads} x {p['head_dim']}, {p['dtype']}{causal}{mask}"
    ranks = f"{p['world_size']:,} rank{'s' * (p['world_size'] > 1)}"
    where = f"{ranks}, {report['bandwidth'] / 1e9:,.4g} GB/s each way, {report['flops'] / 1e12:,.4g} TFLOP/s"
    return [*wrapped("", call), *wrapped("", p["pattern"]), *wrapped("", where)]


def _branch_table(branches: list[dict[str, Any]]) -> list[str]:
    columns = ("segment", "rate", "route", "ranks", "group", "rows moved", "most bytes forward", "backward")
    rows = []
    for b in branches:
        sizes = [f"{b[key]:,}" for key in ("segment_length", "dilation_rate")]
        counts = [f"{b[key]:,}" for key in ("ranks", "group_size")]
        sent = [in_thousands(b["rows_moved"]), in_bytes(b["forward_bytes"]), in_bytes(b["backward_bytes"])]
        rows.append(("all" if b["branch"] is None else str(b["branch"]), [*sizes, b["route"], *counts, *sent]))
    return grid("branch", columns, rows)


def _schedule_table(schedules: dict[str, Any]) -> list[str]:
    found = list(schedules.values())
    rows = []
    for phase in ("forward", "backward"):
        for which in ("min", "mean", "max"):
            rows.append((f"sent {phase}, {which}", [in_bytes(round(s["sent_bytes"][phase][which])) for s in found]))
    rows.append(("forward GFLOP, max", [in_thousands(s["flops"]["max"] / 1e9) for s in found]))
    rows.append(("forward GFLOP, max / mean", [f"{s['flops']['balance']:.3f}" for s in found]))
    for kind in found[0]["memory_bytes"]:
        rows.append((f"memory: {kind}, max", [in_bytes(s["memory_bytes"][kind]["max"]) for s in found]))
    for name, text in TIMES.items():
        rows.append((f"time: {text}", [in_seconds(s["seconds"][name]) for s in found]))
    return grid("", list(schedules), rows)


def _rank_lines(name: str, found: dict[str, Any]) -> list[str]:
    start, stop = found["positions"]
    rows = [
        (f"{way} {phase}", _listed((leg, in_bytes(count)) for leg, count in legs.items()))
        for way in ("sent", "received")
        for phase, legs in found[f"{way}_bytes"].items()
    ]
    rows.append(("forward GFLOP", _listed((kind, in_thousands(count / 1e9)) for kind, count in found["flops"].items())))
    rows.append(("memory", _listed((kind, in_bytes(count)) for kind, count in found["memory_bytes"].items())))
    rows.append(("time", _listed((TIMES[kind], in_seconds(taken)) for kind, taken in found["seconds"].items())))
    return [f"rank {found['rank']}, schedule {name}: positions {start:,} to {stop - 1:,}", *table(rows)]


def _listed(pairs: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name}: {text}" for name, text in pairs)
