"""What the result of the CPU suite says: every machine of the file side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import median

from dilkit.tools.bench.cpu.measured import MASKED
from dilkit.tools.bench.cpu.record import SHARED, CpuResult, of_peak
from dilkit.tools.bench.slides import PUBLISHED
from dilkit.tools.console.text import in_seconds
from dilkit.tools.report.document import Axis, Document, Plot, Point, Table, plots, tables
from dilkit.tools.report.entries import grouped, quartiles, reasons, times_as_long
from dilkit.tools.report.headline import suite_headline
from dilkit.tools.report.points import plain, series_of, speed_up
from dilkit.tools.report.roofline import Work, roofline
from dilkit.tools.report.speed import interval
from dilkit.tools.report.targets import machine_table, suite_sentence

TIMES = ("case", "who", "time", "quartiles", "samples", "GFLOP/s", "of the peak", "time / native's")
SENTENCES = {
    "dense forward / peak, head_dim 64": "on one thread the CPU kernel reaches {} of the multiply-add peak in dense attention",
    "A, all threads: torch's dense attention / native": "at configuration A torch's dense attention takes {} as long as it",
    "forward: sdpa's time / native's, worst": "torch's own kernels on strided views at least {}",
    "one million tokens: memory in all": "a forward pass of a million tokens needs {} of memory in all",
}
"""Figures by name, and the words that docs/measurements.md has for the worst value of each."""
NOTE = (
    "fp32, on one thread unless it says otherwise. The peak is the fastest sample of multiply-adds in registers in the same "
    f"rounds; of A's nominal FLOPs {SHARED} times fewer are left where a key of several branches is scored once."
)
IDLE = (
    "Of the time from the beginning of the first task to the end of the last, the part in which threads have no task or wait for "
    "one. Simulated: the kernel's own queue lists the tasks, in its order and with what each waits for; a thread that is free "
    "takes the next one, which lasts in proportion to the pairs that it scores; the kernel counts them: where scores are 0, "
    "exp(lse) is the number of keys that a query sees. Measured, where there are so many cores: by the clock around each task, "
    "the less of two calls. The figures above are of what was measured, else of what was simulated."
)
METHOD = (
    "Medians, three to twice {} samples, fewer where calls are long, taken in turns with the multiply-adds, each implementation "
    "checked against fp64 arithmetic before. GFLOP/s count the pattern's nominal FLOPs, keys of several branches each time. "
    "gather is LongNet's published procedure in plain PyTorch: gather each branch by reshaping and taking diagonals, one call of "
    "torch's flash attention a branch, scatter into zeros, weights from the softmax denominators; its gradient is exact, where "
    "the published code detaches the weights. dense is torch's attention of every token to every token. Calls on few tokens are "
    "dilated_attention beside scaled_dot_product_attention. Neighborhoods stand beside a sliding window that shows as many keys "
    "and beside torch's attention with a mask of all pairs that was made before; NATTEN's kernels for CPUs, in versions up to "
    "0.17, are not measured. GigaPath's encoder is trained under autocast to bfloat16, a forward and a backward "
    "pass on one slide, of which embedding and gradients are compared on a short one; the published procedure is that of the "
    "suite of slides, which measures forward passes in fp32."
)


def sentence(result: CpuResult) -> str:
    """For README.md: a sentence for each machine."""
    return " ".join(suite_sentence(one, SENTENCES, name) for name, one in result.machines().items())


def document(result: CpuResult) -> Document:
    """All figures, speed-ups and times."""
    machines = result.machines()
    speed_ups = _speed_ups(machines)
    return Document(
        headline=tuple(line for one in machines.values() for line in _headline(one)),
        tables=tables(
            machine_table({name: one.figures for name, one in machines.items()}, NOTE),
            _idle_table(machines),
            _speed_up_table(speed_ups, _with_threads(machines)),
            *(_times(name, one) for name, one in _with_threads(machines).items()),
        ),
        plots=plots(_fractions(machines), *_speed_up_bars(speed_ups), _halves(machines), *_rooflines(machines)),
        notes=tuple(note for name, one in machines.items() for note in _notes(name, one)),
        method=METHOD.format(result.repeats),
    )


def _headline(result: CpuResult) -> tuple[str, ...]:
    """The CPU, the instruction sets of the kernel and of torch, threads, versions and the date."""
    at = result.environment
    isa = f"instruction set {result.code}{f' (torch: {result.torch_isa})' * bool(result.torch_isa)}"
    return suite_headline(result, f"{at.device_name}, {isa}, {result.thread_count} threads of {at.cores} cores")


def _with_threads(machines: Mapping[str, CpuResult]) -> dict[str, CpuResult]:
    """The machines by names that say on how many threads their cases ran, where that is not one, as in older files."""
    most = {name: max((case.threads or one.thread_count for case in one.cases), default=1) for name, one in machines.items()}
    return {f"{name}{one.on_threads(most[name])}": one for name, one in machines.items()}


SpeedUps = dict[str, dict[str, list[Point]]]
"""How many times faster the kernel is, by the other implementation and the machine: points named by the case."""


def _speed_ups(machines: Mapping[str, CpuResult]) -> SpeedUps:
    speed_ups: SpeedUps = {}
    for name, result in _with_threads(machines).items():
        for title, case in result.titled():
            for other in ("sdpa", "gather", "dense", MASKED, PUBLISHED):
                if case.timed("native", other):
                    point = speed_up(title, case.entries[other].seconds, case.entries["native"].seconds)
                    speed_ups.setdefault(other, {}).setdefault(name, []).append(point)
    return speed_ups


def _speed_up_table(found: SpeedUps, machines: Iterable[str]) -> Table:
    rows = []
    for other, by_machine in found.items():
        shown = {(name, str(p.x)): f"{p.y:.2f}x ({interval(p)})" for name, points in by_machine.items() for p in points}
        for title in dict.fromkeys(title for _, title in shown):
            rows.append((title, other, *(shown.get((name, title), "not measured") for name in machines)))
    note = "Ratios of medians, with 95% intervals by resampling each side's samples."
    return Table("Speed-up of native", ("case", "over", *machines), tuple(rows), note)


def _speed_up_bars(found: SpeedUps) -> Iterator[Plot]:
    axes = Axis("", "number"), Axis("times faster", "times")
    for other, by_machine in found.items():
        yield Plot(f"Speed-up of native over {other}, with 95% intervals", "bars", series_of(by_machine), axes, mark=1.0)


def _idle_table(machines: Mapping[str, CpuResult]) -> Table:
    """The share of threads' time in which they have no task: simulated, and behind it what was measured."""
    counts = sorted({int(count) for one in machines.values() for load in one.idle for p in load.passes for count in p.simulated})
    rows = []
    for name, one in machines.items():
        for load in one.idle:
            for p in load.passes:
                cells = (_share(p.simulated.get(str(count)), p.measured.get(str(count))) for count in counts)
                rows.append((load.what, "backward" if p.backward else "forward", name, str(p.tasks), *cells))
    header = ("call", "pass", "on", "tasks", *(f"{count} threads" for count in counts))
    return Table("Idle share of threads", header, tuple(rows), IDLE)


def _share(simulated: float | None, measured: float | None) -> str:
    shown = "-" if simulated is None else f"{simulated:.2%}"
    return shown if measured is None else f"{shown}, measured {measured:.2%}"


def _fractions(machines: Mapping[str, CpuResult]) -> Plot:
    bars = {name: [plain(what, share) for what, share in one.peak_fractions().items()] for name, one in machines.items()}
    axes = Axis("", "number"), Axis("of the multiply-add peak, one thread", "number", log=False)
    return Plot("Native's share of the multiply-add peak", "bars", series_of(bars), axes, mark=1.0)


def _halves(machines: Mapping[str, CpuResult]) -> Plot:
    bars: dict[str, list[Point]] = {}
    for name, result in machines.items():
        for step in result.dtypes:
            for dtype in ("bfloat16", "float16"):
                if step.timed("float32", dtype):
                    point = speed_up(name, step.entries["float32"].seconds, step.entries[dtype].seconds)
                    bars.setdefault(f"{dtype}, d={step.head_dim}{', backward' * step.backward}", []).append(point)
    axes = Axis("", "number"), Axis("times fp32's speed", "times")
    return Plot("Half types beside fp32, configuration A", "bars", series_of(bars), axes, mark=1.0)


def _rooflines(machines: Mapping[str, CpuResult]) -> Iterator[Plot]:
    """One for each machine: their ceilings differ."""
    for name, result in machines.items():
        work = [Work(case, case.seq * case.heads * case.head_dim * 4, case.backward) for case in result.cases]
        yield roofline(f"Roofline, {name}", work)


def _times(machine: str, result: CpuResult) -> Table:
    rows = []
    for title, case in result.titled():
        for name, entry in case.entries.items():
            if entry.time:
                time = in_seconds(entry.time.median_s), quartiles(entry.time), str(len(entry.seconds))
                share = of_peak(case, name)
                of = "-" if share is None else f"{share:.0%}"
                speed = f"{entry.gflops or 0:,.0f}", of, times_as_long(case, name, "native")
                rows.append((title, name, *time, *speed))
    return Table(f"All times, {machine}", TIMES, tuple(rows))


def _notes(machine: str, result: CpuResult) -> Iterator[str]:
    """Who was not timed and why, and what is not among the figures."""
    yield from (f"{machine}: {note}" for note in grouped(reasons(result.titled())))
    alone = [*result.one_head, *(case for case in result.cases if case.threads == 1)]
    rates = [case.fma.peak_gflops for case in alone if case.fma] or [loops.fma_gflops for loops in result.inner_loops]
    if rates:
        low, high = min(rates), max(rates)
        yield f"{machine}: multiply-adds on one thread: {median(rates):,.0f} GFLOP/s, from {low:,.0f} to {high:,.0f} by step"
    for million in result.million:
        if million.time and million.gflops:
            yield f"{machine}: {million.seq:,} tokens: {in_seconds(million.time.median_s)}, {million.gflops:,.0f} GFLOP/s"
