"""What the figures of the CPU suite must be, and how they are read out of a result."""

from __future__ import annotations

from functools import partial

from dilkit.environment import BF16_SETS
from dilkit.tools.bench.cpu.measured import MASKED, WINDOW, DimCase, GridCase
from dilkit.tools.bench.cpu.record import SHARED, CpuResult
from dilkit.tools.bench.slides import PUBLISHED, listed
from dilkit.tools.bench.target import GIB, MIB, Target, Values, least

SHORT_TOKENS = 1024
"""Of one head: up to so many, torch's attention is what to beat."""
IDLE_THREADS = "16"
"""So many threads are judged by the share of their time in which they have no task."""


def _of_peak(what: str, result: CpuResult) -> Values:
    fractions = result.peak_fractions()
    return {"": fractions[what]} if what in fractions else {}


def _slower(other: str, causal: bool, backward: bool, result: CpuResult) -> Values:
    """The time of another implementation over the kernel's, by configuration."""
    ratios = []
    for case in result.cases:
        if (case.is_causal, case.backward) == (causal, backward) and case.timed("native", other):
            name = f"{case.config}, d={case.head_dim}{result.on_threads(case.threads)}"
            ratios.append((name, case.ratio(other, "native")))
    return least(ratios)


def _short(result: CpuResult) -> Values:
    cases = [case for case in result.one_head if case.seq <= SHORT_TOKENS and not case.backward and case.timed("native", "dense")]
    return {f"{case.seq:,} tokens": case.ratio("dense", "native") for case in cases}


def _shortest(result: CpuResult) -> Values:
    return dict(list(_short(result).items())[:1])


def _ratio(steps: str, slow: str, fast: str, result: CpuResult) -> Values:
    cases: tuple[DimCase, ...] = getattr(result, steps)
    return {f"d={case.head_dim}": case.ratio(slow, fast) for case in cases if not case.backward and case.timed(slow, fast)}


def _pairs_trained(code: str, result: CpuResult) -> Values:
    cases = [case for case in result.dtypes if case.backward and result.isa == code]
    return {f"d={case.head_dim}": case.ratio("float32", "bfloat16") for case in cases if case.timed("float32", "bfloat16")}


def _other_code(code: str, result: CpuResult) -> str | None:
    return None if result.isa == code else f"{result.code} runs"


def _encoder(result: CpuResult) -> Values:
    return {listed(*case.tiles): case.ratio(PUBLISHED, "native") for case in result.encoder if case.timed(PUBLISHED, "native")}


def _few(recorded: bool, result: CpuResult) -> Values:
    cases = [case for case in result.few if case.recorded == recorded and case.timed("native", "dense")]
    return {f"{case.seq:,} tokens": case.ratio("native", "dense") for case in cases}


def _window_rates(sides: str, result: CpuResult) -> Values:
    cases = [case for case in result.grids if case.sides == sides and case.timed("native", WINDOW)]
    return {case.grid: rate / window for case in cases for rate, window in [(_gflops(case, "native"), _gflops(case, WINDOW))]}


def _gflops(case: GridCase, name: str) -> float:
    return case.entries[name].gflops or 0.0


def _masks(result: CpuResult) -> Values:
    cases = [case for case in result.masked if case.timed("native", MASKED)]
    return {f"{case.sides} on {case.grid}": case.ratio(MASKED, "native") for case in cases}


def _idle(backward: bool, result: CpuResult) -> Values:
    """In percent: measured, where there are so many cores."""
    passes = {load.what: one for load in result.idle for one in load.passes if one.backward == backward}
    shares = {what: one.measured.get(IDLE_THREADS, one.simulated.get(IDLE_THREADS)) for what, one in passes.items()}
    return {what: 100 * share for what, share in shares.items() if share is not None}


def _scratch(result: CpuResult) -> Values:
    return {f"d={m.head_dim}": m.scratch_bytes / MIB for m in result.memory if m.scratch_bytes is not None}


def _held(result: CpuResult) -> Values:
    return {"d=64": max(held) / GIB} if (held := [m.held_bytes for m in result.million if m.held_bytes]) else {}


def _against_a(result: CpuResult) -> Values:
    """Older files have A's rate among their cases."""
    cases = [c for c in result.cases if (c.config, c.head_dim, c.is_causal, c.backward) == ("A", 64, False, False)]
    of_cases = [c.entries["native"].gflops for c in cases if c.threads is None and c.timed("native")]
    rates = [million.a.gflops for million in result.million if million.a] or of_cases
    found = [million.gflops for million in result.million]
    return {"": found[0] / rates[0]} if found and found[0] and rates and rates[0] else {}


def _no_pairs(result: CpuResult) -> str | None:
    sets = {step.isa for step in result.dtypes}
    return None if sets <= set(BF16_SETS) else f"{result.code} has no dot products of bf16 pairs"


def _few_cores(result: CpuResult) -> str | None:
    threads = min((step.threads or 0 for step in result.threads), default=4)
    return None if threads >= 4 else f"{threads} cores"


def _peak(what: str, must: float, aim: float, of: str) -> Target[CpuResult]:
    return Target(what, must, aim, partial(_of_peak, of), unit="")


def _over(other: str, passes: str, must: float, aim: float) -> Target[CpuResult]:
    causal, backward = passes == "causal forward", passes == "forward + backward"
    return Target(f"{passes}: {other}'s time / native's, worst", must, aim, partial(_slower, other, causal, backward))


def _rate(sides: str, must: float, aim: float) -> Target[CpuResult]:
    name = f"neighborhoods of {sides}: nominal rate / that of a window of as many keys"
    return Target(name, must, aim, partial(_window_rates, sides), unit="")


def _trained(code: str, must: float, aim: float) -> Target[CpuResult]:
    name = f"A, forward + backward, all threads: fp32's time / bf16's, on {code}"
    return Target(name, must, aim, partial(_pairs_trained, code), missing=partial(_other_code, code))


TARGETS: tuple[Target[CpuResult], ...] = (
    _peak("dense forward / peak, head_dim 48", 0.72, 0.78, "dense, d=48"),
    _peak("dense forward / peak, head_dim 64", 0.75, 0.82, "dense, d=64"),
    _peak("dense forward / peak, head_dim 128", 0.78, 0.85, "dense, d=128"),
    _peak("dense forward + backward / peak, head_dim 48", 0.55, 0.70, "dense, d=48, backward"),
    _peak("dense forward + backward / peak, head_dim 64", 0.60, 0.70, "dense, d=64, backward"),
    _peak(f"A: forward, nominal rate / ({SHARED} x peak)", 0.68, 0.75, "A, d=64"),
    _peak(f"A: causal forward, nominal rate / ({SHARED} x peak)", 0.62, 0.75, "A, d=64, causal"),
    _over("sdpa", "forward", 1.4, 1.8),
    _over("sdpa", "causal forward", 1.8, 2.5),
    _over("sdpa", "forward + backward", 1.4, 1.8),
    _over("gather", "forward", 2.2, 3.0),
    _over("gather", "causal forward", 2.8, 4.0),
    Target("one short head: torch's time / native's, worst", 1.0, 1.3, _short),
    Target("one head of 256 tokens: torch's time / native's", 1.0, 1.2, _shortest),
    Target("16 tokens: native's time / torch's", 4.0, 2.5, partial(_few, False), lower=True),
    Target("16 tokens, with a graph: native's time / torch's", 5.0, 3.5, partial(_few, True), lower=True),
    *(_rate(*limits) for limits in (("13 x 13", 0.75, 0.9), ("7 x 7 x 7", 0.5, 0.7), ("7 x 7, 1 in 4", 0.4, 0.6))),
    Target("neighborhoods: time of torch with a mask / native's, worst", 8, 20, _masks),
    Target("16 threads, forward: idle share, worst", 3, 1, partial(_idle, False), unit="%", lower=True),
    Target("16 threads, backward: idle share, worst", 3, 1, partial(_idle, True), unit="%", lower=True),
    Target("one million tokens, all threads: nominal rate / A's", 0.95, 1.0, _against_a),
    Target("one million tokens: memory in all", 16, 16, _held, unit=" GiB", lower=True),
    Target("A: memory beyond out and lse", 8, 2, _scratch, unit=" MiB", lower=True),
    Target("A, all threads: torch's dense attention / native", 8, 12, partial(_ratio, "dense", "dense", "native")),
    Target("A, all threads: fp32's time / bf16's", 1.4, 1.9, partial(_ratio, "dtypes", "float32", "bfloat16"), missing=_no_pairs),
    *(_trained(*limits) for limits in (("amx", 2.0, 3.0), ("avx512bf16", 1.0, 1.5), ("avx2", 0.97, 1.0))),
    Target(
        "GigaPath's encoder, forward + backward, bf16 on amx: published procedure's time / native's", 1.8, 2.5, _encoder,
        missing=partial(_other_code, "amx"),
    ),
    Target("A: one thread's time / that of four", 3.4, 3.8, partial(_ratio, "threads", "one", "all"), missing=_few_cores),
)  # fmt: skip
