"""Every kind of result in a sentence or two, for README.md: what came out, on what, and how many targets were met.

Tables, intervals, versions and dates are on docs/measurements.md.
"""

from __future__ import annotations

from typing import Any

from dilkit.tools.console.text import in_bytes
from dilkit.tools.report.kinds import bench_report
from dilkit.tools.report.kinds.bench_report import seconds

Result = dict[str, Any]

CPU = {
    "A: torch's dense attention over native": "at configuration A torch's dense attention takes {} as long as the CPU kernel",
    "forward: sdpa's time over native's, worst of A-D": "torch's own kernels on strided views at least {}",
    "one million tokens, forward: memory in all": "a forward pass of a million tokens needs {} of memory in all",
}
GPU = {
    "fp32 forward: sdpa memory-efficient's time over cupy_raw's, worst of A-C, causal and not": (
        "in fp32 torch's memory-efficient kernel takes at least {} as long as the CUDA kernels"
    ),
    "A: bf16 forward, the fastest sdpa kernel's time over cupy_raw's": "in bf16 torch's fastest {}",
    "the longest sequence, bf16 forward on one GPU": "the longest sequence measured has {}",
}
"""Figures of the suites that have targets, by name, and the words for the worst value of each."""


def bench(result: Result) -> str:
    """The longest length at which someone was measured."""
    timed = [length for length in result["lengths"] if any("time" in entry for entry in length["entries"].values())]
    if not timed:
        return _placed(result, "nothing was measured")
    longest = max(timed, key=lambda length: length["seq"])
    told = [f"{who} {_cost(entry)}" for who, entry in longest["entries"].items() if "time" in entry]
    what, pattern, _ = bench_report.headline(result)
    return _placed(result, f"{what}, {pattern}, {longest['seq']:,} tokens: {'; '.join(told)}")


def _cost(entry: dict[str, Any]) -> str:
    other = " (another function)" if entry.get("differs") else ""
    return f"{seconds(entry['time']['median_s'])} and {in_bytes(entry.get('peak_bytes'))}{other}"


def calls(result: Result) -> str:
    """What selection and the operator add to a call."""
    told = [f"{1e6 * found['overhead_s']:.1f} us ({mode})" for mode, found in result["modes"].items()]
    return _placed(result, f"`dilated_attention` adds to a call of its backend, {result['backend']}: {', '.join(told)}")


def cpu(result: Result) -> str:
    """The CPU kernel beside torch."""
    return _judged(result, CPU)


def gpu(result: Result) -> str:
    """The CUDA kernels beside torch."""
    return _judged(result, GPU)


def _judged(result: Result, words: dict[str, str]) -> str:
    """The figures that there are words for, and how many of all meet their targets."""
    figures, told = {figure["name"]: figure for figure in result["figures"]}, []
    for name, sentence in words.items():
        if (figure := figures.get(name)) and figure["values"]:
            worst = (max if figure["lower"] else min)(figure["values"].values())
            told.append(sentence.format(f"{worst:.3g}{figure['unit']}"))
    verdicts = [figure["verdict"] for figure in result["figures"]]
    kept, short = sum(verdict in ("met", "aim met") for verdict in verdicts), verdicts.count("short")
    others = len(verdicts) - kept - short
    missed = [f"{count} {what}" for count, what in ((short, "not"), (others, "not measured")) if count]
    return _placed(result, "; ".join([*told, ", ".join([f"{kept} of {len(verdicts)} targets met", *missed])]))


def _placed(result: Result, told: str) -> str:
    """With the device, and with what must be known of a run that was shortened or cut short."""
    flags = [name.upper() for name in ("quick", "interrupted") if result.get(name)]
    place = ", ".join([result["environment"]["device_name"], *flags])
    return f"{told} ({place})."
