"""What the CPU suite's figures should be, and what they are: pure functions of a result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MIB, GIB = 2**20, 2**30

Result = dict[str, Any]
Values = dict[str, float]
"""Figures by head_dim."""


@dataclass(frozen=True)
class Target:
    """A figure: what it is, the least that it must be and what is aimed at (the most, where `lower`), how it is read.

    `missing(result)` is why this machine cannot show it, or None.
    """

    name: str
    must: float | None
    aim: float | None
    read: Callable[[Result], Values]
    unit: str = "x"
    lower: bool = False
    missing: Callable[[Result], str | None] = lambda result: None

    def judge(self, result: Result) -> dict[str, Any]:
        """The figure of `result` as plain data; the worst value decides on the verdict."""
        values = self.read(result)
        told = dict(name=self.name, must=self.must, aim=self.aim, unit=self.unit, lower=self.lower, values=values)
        if reason := self.missing(result):
            return told | dict(verdict=f"not measurable here: {reason}")
        return told | dict(
            verdict=self.verdict(max(values.values()) if self.lower else min(values.values())) if values else "not measured"
        )

    def verdict(self, worst: float) -> str:
        """ "aim met", "met" or "short"."""

        def reached(limit: float | None) -> bool:
            return limit is not None and (worst <= limit if self.lower else worst >= limit)

        if reached(self.aim):
            return "aim met"
        return "met" if reached(self.must) else "short"


def judge(result: Result) -> list[dict[str, Any]]:
    """All figures of `result`."""
    return [target.judge(result) for target in TARGETS]


def median(entry: dict[str, Any]) -> float:
    """The median of an entry's samples, in seconds."""
    return float(entry["time"]["median_s"])


def measured(case: dict[str, Any], *names: str) -> bool:
    """Whether all of these contestants were right, and timed."""
    return all("time" in case["entries"].get(name, {}) for name in names)


def _matmul_fraction(config: str) -> Callable[[Result], Values]:
    def read(result: Result) -> Values:
        cases = [c for c in result["cases"] if c["config"] == config and not c["is_causal"] and not c["backward"]]
        return {str(c["head_dim"]): c["entries"]["native"]["matmul_fraction"] for c in cases if measured(c, "native")}

    return read


def _worst_against_sdpa(backward: bool, causal: tuple[bool, ...]) -> Callable[[Result], Values]:
    def read(result: Result) -> Values:
        found: Values = {}
        for c in result["cases"]:
            if c["backward"] == backward and c["is_causal"] in causal and measured(c, "native", "sdpa"):
                ratio = median(c["entries"]["sdpa"]) / median(c["entries"]["native"])
                found[str(c["head_dim"])] = min(ratio, found.get(str(c["head_dim"]), ratio))
        return found

    return read


def _ratio(steps: str, slow: str, fast: str) -> Callable[[Result], Values]:
    def read(result: Result) -> Values:
        taken = [step for step in result[steps] if measured(step, slow, fast)]
        return {str(s["head_dim"]): median(s["entries"][slow]) / median(s["entries"][fast]) for s in taken}

    return read


def _peak_fraction(result: Result) -> Values:
    return {str(step["head_dim"]): step["tile_gflops"] / step["fma_gflops"] for step in result["inner_loops"]}


def _scratch(result: Result) -> Values:
    steps = [step for step in result["memory"] if step["scratch_bytes"] is not None]
    return {str(step["head_dim"]): step["scratch_bytes"] / MIB for step in steps}


def _held(result: Result) -> Values:
    held = [step["held_bytes"] / GIB for step in result["million"] if step["held_bytes"]]
    return {"64": max(held)} if held else {}


def _against_a(result: Result) -> Values:
    of_a = [c for c in result["cases"] if (c["config"], c["head_dim"], c["is_causal"], c["backward"]) == ("A", 64, False, False)]
    rates = [c["entries"]["native"]["gflops"] for c in of_a if measured(c, "native")]
    millions = [step["gflops"] for step in result["million"]]
    return {"64": millions[0] / rates[0]} if rates and millions else {}


def _no_pairs(result: Result) -> str | None:
    isa = {step["isa"] for step in result["dtypes"]}
    return None if isa == {"avx512bf16"} else "this CPU has no dot products of bf16 pairs"


def _few_cores(result: Result) -> str | None:
    threads = min((step["threads"] for step in result["threads"]), default=4)
    return None if threads >= 4 else f"{threads} cores"


TARGETS = (
    Target("A: fp32 forward, nominal rate over torch's fp32 matmul", 1.2, 1.6, _matmul_fraction("A")),
    Target("B: the same", 1.0, 1.4, _matmul_fraction("B")),
    Target("forward: sdpa's time over native's, worst of A-D", 1.6, 2.5, _worst_against_sdpa(False, (False,))),
    Target("the same, causal", 2.0, 3.5, _worst_against_sdpa(False, (True,))),
    Target("forward + backward: the same, causal and not", 1.6, 2.5, _worst_against_sdpa(True, (False, True))),
    Target("A: bf16 over its own fp32 speed", 1.4, 1.9, _ratio("dtypes", "float32", "bfloat16"), missing=_no_pairs),
    Target("A: four threads over one", 3.4, 3.8, _ratio("threads", "one", "all"), missing=_few_cores),
    Target("inner loops over the core's fused multiply-add peak", 0.60, 0.75, _peak_fraction, unit=""),
    Target("A: forward's memory beyond out and lse", 8, 2, _scratch, unit=" MiB", lower=True),
    Target("A: torch's dense attention over native", 8, 12, _ratio("dense", "dense", "native")),
    Target("one million tokens, forward: memory in all", 16, 16, _held, unit=" GiB", lower=True),
    Target("one million tokens: nominal rate over A's", None, 1.0, _against_a),
)
