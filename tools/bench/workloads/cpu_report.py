"""Figures and report of the CPU suite: the kernel beside others, and beside what the machine can do at most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

from dilkit.environment import BF16_SETS
from dilkit.tools.bench.target import GIB, MIB, Target, Values, each, rate_ratio, stored, time_ratio
from dilkit.tools.bench.workloads.cpu_calls import PUBLISHED
from dilkit.tools.console.text import in_seconds
from dilkit.tools.report import views
from dilkit.tools.results.rows import CaseRows, Row, RowsResult

SHARED = 1.32
"""A's nominal FLOPs over those that are left where a key of several branches is scored once."""
HEAD, SHORT, FORMS, FEW = "one head", "short heads", "configurations", "few tokens"
TIMED = HEAD, SHORT, FORMS, "dense", FEW, "grids", "masks", "encoder"
WINDOW, MASKED = "native, window", "torch, masked"
OURS, OTHERS = "native", ("sdpa", "gather", "dense", MASKED, PUBLISHED)


def _of_peak(row: Row, case: CaseRows, share: float = 1.0) -> float | None:
    """Nominal rate over `share` times that of the fastest multiply-adds in the same rounds; None where one was not timed."""
    if not (row.samples and row.values.get("flops") and case.timed("fma")):
        return None
    fma = case.rows["fma"]  # what disturbs a peak can only lower it
    return row.gflops / float(share * fma.values["gflops"] * fma.median_s / min(fma.samples))


def _peak(name: str, must: float, aim: float, table: str, share: float = 1.0, **facts: Any) -> Target:
    return Target(name, must, aim, each(table, lambda case: _of_peak(case.rows[OURS], case, share), "", **facts), "")


def _over(other: str, passes: str, must: float, aim: float) -> Target:
    facts = dict(causal=passes == "causal forward", backward=passes == "forward + backward")
    return Target(f"{passes}: {other}'s time / native's, worst", must, aim, time_ratio(FORMS, other, OURS, "{of}", **facts))


def _first_short(result: RowsResult) -> Values:
    return dict(list(time_ratio(SHORT, "dense", OURS, "{seq:,} tokens")(result).items())[:1])


def _idle_share(case: CaseRows) -> float:
    """Return percents: measured ones, where there are so many cores, else simulated ones."""
    values = case.rows[OURS].values
    return 100 * float(values.get("measured", values["simulated"]))


def _no_pairs(result: RowsResult) -> str | None:
    return None if result.facts["isa"] in BF16_SETS else f"{result.facts['code']} has no dot products of bf16 pairs"


def _other_code(isa: str, result: RowsResult) -> str | None:
    return None if result.facts["isa"] == isa else f"{result.facts['code']} runs"


def _few_cores(result: RowsResult) -> str | None:
    threads = min((case.case["threads"] for case in result.cases("threads")), default=4)
    return None if threads >= 4 else f"{threads} cores"


def _trained(isa: str, must: float, aim: float) -> Target:
    ratio, name = time_ratio("dtypes", "float32", "bfloat16", "d={head_dim}", backward=True), "A, forward + backward, all threads"
    read: Callable[[RowsResult], Values] = lambda result: {} if _other_code(isa, result) else ratio(result)  # noqa: E731
    return Target(f"{name}: fp32's time / bf16's, on {isa}", must, aim, read, missing=partial(_other_code, isa))


D, N, OF_PEAK, IDLE = "d={head_dim}", "native's, worst", f"nominal rate / ({SHARED} x peak)", "idle share, worst"
RATES = {"13 x 13": (0.75, 0.9), "7 x 7 x 7": (0.5, 0.7), "7 x 7, 1 in 4": (0.4, 0.6)}
TARGETS = (
    _peak("dense forward / peak, head_dim 48", 0.72, 0.78, HEAD, head_dim=48, backward=False),
    _peak("dense forward / peak, head_dim 64", 0.75, 0.82, HEAD, head_dim=64, backward=False),
    _peak("dense forward / peak, head_dim 128", 0.78, 0.85, HEAD, head_dim=128, backward=False),
    _peak("dense forward + backward / peak, head_dim 48", 0.55, 0.70, HEAD, head_dim=48, backward=True),
    _peak("dense forward + backward / peak, head_dim 64", 0.60, 0.70, HEAD, head_dim=64, backward=True),
    _peak(f"A: forward, {OF_PEAK}", 0.68, 0.75, FORMS, SHARED, of="A, d=64", causal=False, backward=False),
    _peak(f"A: causal forward, {OF_PEAK}", 0.62, 0.75, FORMS, SHARED, of="A, d=64", causal=True, backward=False),
    _over("sdpa", "forward", 1.4, 1.8),
    _over("sdpa", "causal forward", 1.8, 2.5),
    _over("sdpa", "forward + backward", 1.4, 1.8),
    _over("gather", "forward", 2.2, 3.0),
    _over("gather", "causal forward", 2.8, 4.0),
    Target("one short head: torch's time / native's, worst", 1.0, 1.3, time_ratio(SHORT, "dense", OURS, "{seq:,} tokens")),
    Target("one head of 256 tokens: torch's time / native's", 1.0, 1.2, _first_short),
    *(
        Target(
            f"16 tokens{', with a graph' * graph}: native's time / torch's", *limits,
            time_ratio(FEW, OURS, "dense", "{seq:,} tokens", recorded=graph), lower=True,
        )
        for graph, limits in ((False, (4.0, 2.5)), (True, (5.0, 3.5)))
    ),
    *(
        Target(
            f"neighborhoods of {sides}: nominal rate / that of a window of as many keys", *limits,
            rate_ratio("grids", OURS, WINDOW, "{grid}", sides=sides), "",
        )
        for sides, limits in RATES.items()
    ),
    Target(f"neighborhoods: time of torch with a mask / {N}", 8, 20, time_ratio("masks", MASKED, OURS, "{sides} on {grid}")),
    *(
        Target(f"16 threads, {passes}: {IDLE}", 3, 1, each("idle", _idle_share, threads=16, passes=passes), "%", True)
        for passes in ("forward", "backward")
    ),
    Target("one million tokens, all threads: nominal rate / A's", 0.95, 1.0, rate_ratio("million", OURS, "A", "")),
    Target(
        "one million tokens: memory in all", 16, 16,
        each("million", stored(OURS, ("held_bytes",), lambda held: held / GIB), "d=64"), " GiB", lower=True,
    ),
    Target(
        "A: memory beyond out and lse", 8, 2,
        each("memory", stored(OURS, ("scratch_bytes",), lambda scratch: scratch / MIB), D), " MiB", lower=True,
    ),
    Target("A, all threads: torch's dense attention / native", 8, 12, time_ratio("dense", "dense", OURS, D)),
    Target(
        "A, all threads: fp32's time / bf16's", 1.4, 1.9, time_ratio("dtypes", "float32", "bfloat16", D, backward=False),
        missing=_no_pairs,
    ),
    *(_trained(*limits) for limits in (("amx", 2.0, 3.0), ("avx512bf16", 1.0, 1.5), ("avx2", 0.97, 1.0))),
    Target(
        "GigaPath's encoder, forward + backward, bf16 on amx: published procedure's time / native's", 1.8, 2.5,
        time_ratio("encoder", PUBLISHED, OURS, "{tiles:,} tiles"), missing=partial(_other_code, "amx"),
    ),
    Target("A: one thread's time / that of four", 3.4, 3.8, time_ratio("threads", "one", "all", D), missing=_few_cores),
)  # fmt: skip


def _idle_cell(row: Row, case: CaseRows) -> str:
    measured = row.values.get("measured")
    return f"{row.values['simulated']:.2%}" + (f", measured {measured:.2%}" if measured is not None else "")


def _peak_cell(row: Row, case: CaseRows) -> str:
    share = _of_peak(row, case)
    return "-" if share is None else f"{share:.0%}"


def _notes(result: RowsResult) -> Iterator[str]:
    """Multiply-adds, and the million tokens."""
    fastest = [case.rows["fma"] for case in result.cases(HEAD, SHORT, FORMS) if "fma" in case.rows and "threads" not in case.case]
    if rates := [row.values["gflops"] * row.median_s / min(row.samples) for row in fastest]:
        yield f"multiply-adds on one thread: {median(rates):,.0f} GFLOP/s, from {min(rates):,.0f} to {max(rates):,.0f} by step"
    for case in result.cases("million"):
        if case.timed(OURS):
            row = case.rows[OURS]
            yield f"{case.case['what']}: {in_seconds(row.median_s)}, {row.gflops:,.0f} GFLOP/s"


WHAT, IDLE_FACTS = views.fact("what", "case"), (("what", "call"), ("passes", "pass"), ("machine", "on"), ("tasks", "tasks"))
REPORT = views.Report(
    place="{device_name}, instruction set {code} (torch: {torch_isa}), {thread_count} threads of {cores} cores",
    tables=(
        views.TableView(
            "Idle share of threads",
            "idle",
            (*(views.fact(*one) for one in IDLE_FACTS), views.Column("threads", _idle_cell)),
            note="The part of the time from the first task's begin to the last one's end in which threads have no task or wait "
            "for one. Simulated: threads take the tasks of the kernel's queue in its order, each for a time in proportion to its "
            "pairs. Measured, where there are so many cores: by the clock around each task, the less of two calls.",
            timed=False,
            spread="{threads} threads",
        ),
        views.TableView(
            "Speed-up of native",
            TIMED,
            (WHAT, views.Column("over", views.WHO.cell), views.times_faster(OURS)),
            note="Ratios of medians, with 95% intervals by resampling each side's samples.",
            who=OTHERS,
            spread="{machine}",
        ),
        views.TableView(
            "All times, {machine}",
            TIMED,
            (
                *(WHAT, views.WHO, views.TIME, views.QUARTILES, views.SAMPLES),
                views.Column("GFLOP/s", lambda row, case: f"{row.gflops:,.0f}"),
                *(views.Column("of the peak", _peak_cell), views.over(OURS, "time / native's")),
            ),
        ),
    ),
    plots=(
        views.PlotView(
            "Speed-up of native over {who}, with 95% intervals",
            TIMED,
            "{what}",
            views.faster(OURS),
            (views.NAMES, views.TIMES),
            series="{machine}",
            mark=1.0,
            who=OTHERS,
        ),
    ),
    sentences={
        TARGETS[1].name: "on one thread the CPU kernel reaches {} of the multiply-add peak in dense attention",
        "A, all threads: torch's dense attention / native": "at configuration A torch's dense attention takes {} as long as it",
        "forward: sdpa's time / native's, worst": "torch's own kernels on strided views at least {}",
        "one million tokens: memory in all": "a forward pass of a million tokens needs {} of memory in all",
    },
    notes=_notes,
    side_by_side=True,
    figure_note="fp32, on one thread unless it says otherwise. The peak is the fastest sample of multiply-adds in registers in "
    f"the same rounds; of A's nominal FLOPs {SHARED} times fewer are left where a key of several branches is scored once.",
    method="Medians, three to twice {repeats} samples, fewer where calls are long, taken in turns with the multiply-adds, each "
    "implementation checked against fp64 arithmetic before. GFLOP/s count the pattern's nominal FLOPs, keys of several branches "
    "each time. gather is LongNet's published procedure in plain PyTorch: a call of torch's flash attention for each branch, "
    "weights from the softmax denominators; its gradient is exact, where the published code detaches the weights. dense is "
    "torch's attention of every token to every token; that with a mask has one of all pairs, made before. Calls on few tokens "
    "are dilated_attention beside scaled_dot_product_attention. GigaPath's encoder is trained under autocast to bfloat16; "
    "embedding and gradients are compared on a short slide before.",
)
