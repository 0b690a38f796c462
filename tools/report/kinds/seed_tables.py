"""The other tables of the suite of published settings: orders, cache, half precision, ranks, longest sequences."""

from __future__ import annotations

from typing import Any

from dilkit.tools.bench.published.claim import Setting
from dilkit.tools.bench.published.figures import HILBERT_SETTINGS
from dilkit.tools.console.text import in_bytes
from dilkit.tools.report.kinds.seed_rows import Cases, Entry, Result, Rows, claimed, memory, pattern, time, times_faster


def order_rows(result: Result) -> Rows:
    """Along a Hilbert curve or not."""
    names = ("configuration", "tokens", "segments / rates", "as they come", "tokens/s", "along the curve", "tokens/s", "speed-up")
    cases, rows = Cases(result), [(*names, "the same, forward + backward", "memory", "along the curve", "claimed")]
    for name, setting in HILBERT_SETTINGS.items():
        plain, ordered = (cases.entry(setting, who) for who in ("auto", "ordered"))
        if plain and ordered:
            speeds = [f"{entry['tokens_per_s']:,.0f}" for entry in (plain, ordered)]
            both = times_faster(cases.entry(setting, "auto", True), cases.entry(setting, "ordered", True))
            told = (time(plain), speeds[0], time(ordered), speeds[1], times_faster(plain, ordered), both)
            tail = memory(plain), memory(ordered), claimed(setting, ("tokens/s", "speedup", "MiB"))
            rows.append((name, f"{setting.seq:,}", pattern(setting), *told, *tail))
    return rows


def cache_rows(result: Result) -> Rows:
    """With the cache of plans and without."""
    rows: Rows = [("tokens", "segments / rates", "plan in the cache", "made anew", "speed-up")]
    for case in result["cache"]:
        setting, entries = Setting.from_dict(case["setting"]), case["entries"]
        with_it, without = entries["auto"], entries["no cache"]
        rows.append((f"{setting.seq:,}", pattern(setting), time(with_it), time(without), times_faster(without, with_it)))
    return rows


def half_rows(result: Result) -> Rows:
    """Half precision beside fp32."""
    names = ("tokens", "batch", "heads", "segments / rates", "pass", "float32", "bfloat16", "float16", "bfloat16 over float32")
    cases, rows = Cases(result), [(*names, "float16 over float32", "memory, float32", "float16")]
    for case in result["cases"]:
        setting, backward = Setting.from_dict(case["setting"]), case["backward"]
        single, brain, half = (cases.entry(setting, who, backward) for who in ("float32", "bfloat16", "auto"))
        if setting.dtype == "float16" and half and (single or brain):
            size = f"{setting.seq:,}", str(setting.batch), str(setting.heads), pattern(setting), _passes(backward)
            over = times_faster(single, brain), times_faster(single, half)
            rows.append((*size, time(single), time(brain), time(half), *over, memory(single), memory(half)))
    return rows


def _passes(backward: bool) -> str:
    return "forward + backward" if backward else "forward"


def rank_rows(result: Result, name: str) -> Rows:
    """Ranks at a fixed length ("ranks") or at fixed tokens a rank ("growth"): beside one rank with all cores, and in memory."""
    names = ("tokens", "batch", "pass", "ranks", "by", "time", "one rank, all cores", "ranks over one", "tokens/s", "memory")
    found = [row for job in result[name] for row in job["rows"]]
    found.sort(key=lambda row: (_job(row, name)[:-1], row["setting"]["ranks"]))
    peaks = {_job(row, name): max(row["peak_bytes"]) for row in found if row["peak_bytes"]}
    rows: Rows = [(*names, "KiB/token", "of p=1", "efficiency", "claimed, forward")]
    for row in found:
        here, alone = peaks.get(_job(row, name)), peaks.get((*_job(row, name)[:-1], 1))
        rows.append((*_raced(row), *_shares(here, alone, row, name), _claimed_of_ranks(row)))
    return rows


def _raced(row: Entry) -> tuple[str, ...]:
    setting = Setting.from_dict(row["setting"])
    size = f"{setting.seq:,}", str(setting.batch), _passes(row["backward"]), str(setting.ranks), row["transport"]
    many, one = (row["entries"].get(who, {}) for who in ("ranks", "one rank"))
    rate = f"{row['tokens'] / many['time']['median_s']:,.0f}" if many else "-"
    return (*size, time(many), time(one), times_faster(one, many), rate)


def _claimed_of_ranks(row: Entry) -> str:
    quantities = "ms", "tokens/s", "MiB", "speedup", "reduction"
    return "-" if row["backward"] else claimed(Setting.from_dict(row["setting"]), quantities)


def _job(e: Result, name: str) -> tuple[Any, ...]:
    """By what one rank is found to compare more with: where the length grows with the ranks, it is that of a rank."""
    s = e["setting"]
    length = s["seq"] // s["ranks"] if name == "growth" else s["seq"]
    return length, s["batch"], tuple(s["segment_lengths"]), e["backward"], e["transport"], s["ranks"]


def _shares(here: int | None, alone: int | None, row: Entry, name: str) -> tuple[str, str, str, str]:
    """Memory of a rank, by token, beside that of one rank alone, and of what that could be at best."""
    if here is None:
        return "-", "-", "-", "-"
    per_token, ranks = f"{here / 1024 / row['tokens']:.2f}", row["setting"]["ranks"]
    if alone is None or ranks == 1:
        return in_bytes(here), per_token, "-", "-"
    share = alone / here
    efficiency = share / ranks if name == "ranks" else share
    return in_bytes(here), per_token, f"{share:.2f}x", f"{efficiency:.1%}"


def longest_rows(result: Result) -> Rows:
    """The longest sequences that fit."""
    rows: Rows = [("who", "pass", "memory", "tokens", "KiB/token", "tried", "")]
    for e in result["longest"]:
        fitting = [t["bytes"] for t in e["tried"] if t["seq"] == e["seq"]]
        per_token = f"{fitting[0] / 1024 / e['seq']:.2f}" if fitting and e["seq"] else "-"
        length = f"{e['seq']:,}" if e["seq"] is not None else "-"
        name = "training" if e["backward"] else "forward"
        rows.append((e["who"], name, in_bytes(e["limit_bytes"]), length, per_token, str(len(e["tried"])), e["stopped"] or ""))
    return rows
