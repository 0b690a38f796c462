"""Cells of the tables of the suite of published settings, and the tables of who computes what how fast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dilkit.tools.bench.published.claim import Setting
from dilkit.tools.bench.published.figures import claims
from dilkit.tools.bench.published.settings import IMPLEMENTATIONS
from dilkit.tools.console.text import in_bytes
from dilkit.tools.report.kinds.bench_report import exponent, seconds
from dilkit.tools.results.statistics import median_interval, ratio, ratio_interval

Result = dict[str, Any]
Entry = dict[str, Any]
Rows = list[tuple[str, ...]]
UNITS = {
    **{name: f" {name}" for name in ("ms", "MiB", "KiB/token", "tokens/s", "tokens", "GB", "%")},
    **dict.fromkeys(("speedup", "slowdown", "reduction", "KiB/token ratio"), "x"),
    **dict.fromkeys(("efficiency", "saved"), " %"),
    **dict.fromkeys(("longest", "tokens/rank"), " tokens"),
    "exponent": "",
}


class Cases:
    """Cases by setting and pass."""

    def __init__(self, result: Result) -> None:
        self._found = {(Setting.from_dict(c["setting"]), c["backward"]): c for c in result["cases"]}

    def get(self, setting: Setting, backward: bool = False) -> Result | None:
        """None where it was not measured."""
        return self._found.get((setting, backward))

    def entry(self, setting: Setting, who: str, backward: bool = False) -> Entry:
        """With the tokens that it was measured at; empty where it was not timed."""
        case = self.get(setting, backward)
        entry: Entry = case["entries"].get(who, {}) if case else {}
        return entry | dict(tokens=case["tokens"]) if case and "time" in entry else {}


def measured(value: float, quantity: str) -> str:
    """A figure with its unit."""
    digits = f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
    return f"{digits}{UNITS[quantity]}"


def as_published(value: float, quantity: str) -> str:
    """A figure with its unit and all its digits."""
    return f"{value:,.12g}{UNITS[quantity]}"


def claimed(setting: Setting, quantities: Iterable[str], who: Iterable[str] | None = None) -> str:
    """What was published of a setting, and on what."""
    found = [c for c in claims() if c.setting == setting and c.quantity in quantities and (who is None or c.who in who)]
    told = list(dict.fromkeys(as_published(c.claimed, c.quantity) for c in found))
    return f"{', '.join(told)} ({found[0].hardware})" if found else "-"


def times_faster(slow: Entry, fast: Entry) -> str:
    """How many times faster, with its interval."""
    if not slow or not fast:
        return "-"
    above, below = slow["time"]["samples_s"], fast["time"]["samples_s"]
    low, high = ratio_interval(above, below)
    return f"{ratio(above, below):.2f}x ({low:.2f} - {high:.2f})"


def time(entry: Entry) -> str:
    """The median, with its interval."""
    if not entry:
        return "-"
    low, high = median_interval(entry["time"]["samples_s"])
    return f"{seconds(entry['time']['median_s'])} ({seconds(low)} - {seconds(high)})"


def memory(entry: Entry) -> str:
    """Peak memory, inputs counted."""
    return in_bytes(entry["memory_bytes"]) if entry.get("memory_bytes") else "-"


def pattern(setting: Setting) -> str:
    """Segments and rates."""
    return f"{', '.join(map(str, setting.segment_lengths))} / {', '.join(map(str, setting.dilation_rates))}"


def scaling_rows(result: Result, settings: Sequence[Setting]) -> Rows:
    """Time and memory of settings, each beside the first, by who."""
    names = ("tokens", "batch", "heads", "segments / rates", "dtype", "who", "forward", "over the first", "tokens/s", "memory")
    cases, rows = Cases(result), [(*names, "KiB/token", "forward + backward", "its memory", "claimed, forward")]
    firsts: dict[str, float] = {}
    for setting in settings:
        for who in ("auto", "head-split"):
            entry, both = cases.entry(setting, who), cases.entry(setting, who, True)
            if entry:
                first = firsts.setdefault(who, entry["time"]["median_s"])
                rows.append((*_scaled(setting, who, entry, first), time(both), memory(both), _claimed_once(setting, who)))
    return rows


def _claimed_once(setting: Setting, who: str) -> str:
    return claimed(setting, ("ms", "MiB", "tokens/s", "slowdown"), ("auto",)) if who == "auto" else ""


def _scaled(setting: Setting, who: str, entry: Entry, first: float) -> tuple[str, ...]:
    size = f"{setting.seq:,}", str(setting.batch), str(setting.heads), pattern(setting), setting.dtype, who
    per_token = f"{entry['memory_bytes'] / 1024 / entry['tokens']:.2f}" if entry.get("memory_bytes") else "-"
    times = f"{entry['time']['median_s'] / first:.1f}x"
    return (*size, time(entry), times, f"{entry['tokens_per_s']:,.0f}", memory(entry), per_token)


def exponents(result: Result, settings: Sequence[Setting], size: str) -> Iterator[str]:
    """In lines: how time and memory grow with an attribute of the settings, fitted, and the FLOPs beside."""
    cases = Cases(result)
    for who, backward in (("auto", False), ("auto", True), ("head-split", False)):
        found = [(float(getattr(s, size)), entry) for s in settings if (entry := cases.entry(s, who, backward))]
        if len({x for x, _ in found}) > 1:
            sizes = [x for x, _ in found]
            told = dict(time=[e["time"]["median_s"] for _, e in found], FLOPs=[e["flops"] for _, e in found])
            if all(e.get("memory_bytes") for _, e in found):
                told["memory"] = [e["memory_bytes"] for _, e in found]
            fits = ", ".join(f"{name} ~ {size}^{exponent(sizes, values):.2f}" for name, values in told.items())
            yield f"{who}, {'forward + backward' if backward else 'forward'}: {fits}"


def implementation_rows(result: Result) -> Rows:
    """Who computes a setting how fast, beside the reference."""
    names = ("tokens", "who", "forward", "over reference", "memory", "forward + backward", "over reference", "its memory")
    cases, rows = Cases(result), [(*names, "off the pattern by", "claimed, forward")]
    for setting in sorted(IMPLEMENTATIONS, key=lambda s: s.seq):
        case = cases.get(setting)
        for who in case["entries"] if case else ():
            one, both = cases.entry(setting, who), cases.entry(setting, who, True)
            bases = cases.entry(setting, "reference"), cases.entry(setting, "reference", True)
            if one or both:
                told = *_beside(bases[0], one), *_beside(bases[1], both)
                rows.append((f"{setting.seq:,}", who, *told, _off(one, both), claimed(setting, ("ms", "speedup"), (who,))))
    return rows


def _off(one: Entry, both: Entry) -> str:
    """How far from the attention of the pattern, in units of its largest value, where another function is computed."""
    told = (one.get("differs") or {}) | (both.get("differs") or {})
    names = dict(out_relative="result", dquery_relative="gradient")
    return ", ".join(f"{name} {told[key]:.1%}" for key, name in names.items() if told.get(key, 0.0) > 1e-3) or "-"


def _beside(base: Entry, entry: Entry) -> tuple[str, str, str]:
    return time(entry), times_faster(base, entry), memory(entry)
