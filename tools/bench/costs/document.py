"""What counts say of the time of the CUDA kernels: bounds, not times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dilkit.tools.bench.costs import flash
from dilkit.tools.bench.costs.bounds import PRODUCT, UNITS, Bound, bound_of
from dilkit.tools.bench.costs.cards import CARDS, Card
from dilkit.tools.bench.costs.record import CostsResult, KernelCost
from dilkit.tools.bench.gpu.cases import CONFIGURATIONS
from dilkit.tools.report.document import Axis, Document, Plot, Point, Series, Table, plots, tables
from dilkit.tools.report.headline import place
from dilkit.tools.report.points import plain

PASSES = {"forward": ("forward",), "backward": ("dots", "dquery", "dkeyvalue")}
OURS, FLASH, NOMINAL = "cupy_raw", "FlashAttention-2 on views", "the nominal FLOPs"
Problem = tuple[str, int, str]
"""Configuration, head_dim and dtype; float16 of a card is "half", as bfloat16 of another."""


def sentence(result: CostsResult) -> str:
    """For docs/measurements.md: what was counted, and how well a few tiles speak for all."""
    return f"{_verdict(result)}."


def _verdict(result: CostsResult) -> str:
    costs = result.costs()
    gpus, few = len({cost.architecture for cost in costs}), sum(cost.run for cost in costs)
    counted = (
        f"{len(costs)} launches of CUDA kernels for {gpus} GPUs, counted from {few:,} of {sum(c.tiles for c in costs):,} tiles"
    )
    worst = max((whole.apart for whole in result.wholes), default=0.0)
    return f"{counted}; of {len(result.wholes)} launches that were run whole, a few tiles give every count within {worst:.2%}"


def document(result: CostsResult) -> Document:
    """Least times of passes, then of kernels by unit, the counts of A, and the launches that were run whole."""
    costs = result.costs()
    return Document(
        headline=(f"{_verdict(result)}.", place(result)),
        tables=tables(_passes(costs), _kernels(costs), _counts(costs), _wholes(result), _rates()),
        plots=plots(*(_bars(costs, card) for card in CARDS)),
    )


def _half(dtype: str) -> str:
    return dtype if dtype == "float32" else "half"


def _asked(costs: Iterable[KernelCost]) -> list[Problem]:
    return sorted({(cost.configuration, cost.head_dim, _half(cost.dtype)) for cost in costs})


def bounds(costs: Iterable[KernelCost], problem: Problem, card: Card, roles: Iterable[str]) -> list[Bound]:
    """Of each launch of these roles on a card."""
    mine = (c for c in costs if c.architecture == card.architecture and c.role in roles)
    return [bound_of(c, card) for c in mine if (c.configuration, c.head_dim, _half(c.dtype)) == problem]


def flash_bounds(problem: Problem, card: Card, name: str) -> list[Bound]:
    """The same of FlashAttention-2; none where torch has it not."""
    configuration, head_dim, dtype = problem
    if dtype != "half" or card.capability < flash.OLDEST:
        return []
    count = flash.forward if name == "forward" else flash.backward
    return [*count(CONFIGURATIONS[configuration], head_dim, card)]


def nominal(problem: Problem, card: Card, name: str) -> float:
    """Seconds of the nominal FLOPs at the card's peak: a key is scored once for each branch, gradients take five products."""
    configuration, head_dim, dtype = problem
    flops = CONFIGURATIONS[configuration].problem(head_dim).flops() * (2.5 if name == "backward" else 1.0)
    return flops / (card.fp32 if dtype == "float32" else card.tensor)


def seconds(found: Iterable[Bound]) -> float:
    """Launches follow one another."""
    return sum(bound.seconds for bound in found)


def _limit(found: list[Bound]) -> str:
    """The unit that limits the launch that takes the longest."""
    return max(found, key=lambda bound: bound.seconds).limit


def _digits(value: float) -> str:
    """Three of them, without an exponent."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def _milliseconds(found: list[Bound]) -> str:
    return f"{_digits(seconds(found) * 1e3)} {_limit(found)}" if found else ""


def _passes(costs: list[KernelCost]) -> Table:
    rows: list[tuple[str, ...]] = []
    for problem in _asked(costs):
        for name, roles in PASSES.items():
            both = (bounds(costs, problem, card, roles) for card in CARDS), (flash_bounds(problem, card, name) for card in CARDS)
            for who, found in zip((OURS, FLASH), both, strict=True):
                cells = [*map(_milliseconds, found)]
                rows += [(*map(str, problem), name, who, *cells)] if any(cells) else []
            peaks = (_digits(nominal(problem, card, name) * 1e3) if bounds(costs, problem, card, roles) else "" for card in CARDS)
            rows.append((*map(str, problem), name, NOMINAL, *peaks))
    header = ("configuration", "head_dim", "dtype", "pass", "who", *(card.name for card in CARDS))
    note = "Of FlashAttention-2's gradients, loads from shared memory are not counted: its bounds are too low by as much."
    return Table("Milliseconds below which a pass cannot be, and what limits its longest launch", header, tuple(rows), note)


def _kernels(costs: list[KernelCost]) -> Table:
    rows = []
    for card in CARDS:
        for cost in costs:
            if cost.architecture == card.architecture and cost.configuration == "A" and not cost.launch and _wanted(cost, card):
                bound = bound_of(cost, card)
                units = (_digits(getattr(bound, unit) * 1e3) for unit in UNITS)
                rows.append((card.name, cost.name, cost.dtype, str(cost.head_dim), *units, bound.limit))
    title = "Configuration A, the first launch of each kernel: milliseconds that each unit needs at least"
    return Table(title, ("card", "kernel", "dtype", "head_dim", *UNITS, "limit"), tuple(rows))


def _wanted(cost: KernelCost, card: Card) -> bool:
    """Halves where there are tensor cores for them, float32 elsewhere."""
    return (cost.dtype == "float32") == (not card.tensor)


COUNTS = {
    "products": "TFLOP of products",
    "fma": "G fp32 FMA",
    "fp32": "G other fp32",
    "special": "G special functions",
    "matrices": "M wavefronts of matrices",
    "shared": "M wavefronts of other accesses, at least",
    "conflicts": "M more of these, if 8 bytes a lane go by half a warp, 16 by a quarter",
    "shuffles": "M shuffles of a warp",
    "barriers": "k barriers of a block",
    "memory": "GB of tensors, each row once",
}
SCALES = {"products": 1e12 / PRODUCT, "fma": 1e9, "fp32": 1e9, "special": 1e9, "barriers": 1e3, "memory": 1e9}


def _counts(costs: list[KernelCost]) -> Table:
    rows = []
    for cost in costs:
        card = next(card for card in CARDS if card.architecture == cost.architecture)
        if cost.configuration == "A" and not cost.launch and _wanted(cost, card):
            numbers = (getattr(cost, name) / SCALES.get(name, 1e6) for name in COUNTS)
            requested = (cost.loaded + cost.copied) / 1e9, cost.stored / 1e9
            shown = (_digits(number) for number in (*numbers, *requested))
            rows.append((card.name, cost.name, cost.dtype, str(cost.head_dim), *shown))
    header = ("card", "kernel", "dtype", "head_dim", *COUNTS.values(), "GB that loads and copies ask for", "GB that stores write")
    return Table("Configuration A, the first launch of each kernel: what it issues", header, tuple(rows))


def _wholes(result: CostsResult) -> Table:
    rows = []
    for one in result.wholes:
        sizes = f"{one.tiles:,}", str(one.run), one.count, f"{one.whole:,}", f"{one.from_few:,}", f"{one.apart:.2%}"
        rows.append((one.problem, one.name, *sizes))
    header = ("problem", "kernel", "tiles", "of which run", "count that differs most", "run whole", "from few", "apart")
    return Table("Launches that were run whole, beside what a few of their tiles say", header, tuple(rows))


def _rates() -> Table:
    rows = []
    for card in CARDS:
        rates = f"{card.tensor / 1e12:,.5g}" if card.tensor else "", f"{card.fp32 / 1e12:.3g}", f"{card.memory / 1e9:,.0f}"
        rows.append((card.name, card.architecture, *rates, f"{card.cycles / 1e9:.1f}", card.source))
    header = (
        "card",
        "for",
        "TFLOP/s of tensor cores",
        "TFLOP/s of fp32",
        "GB/s",
        "G cycles/s of all multiprocessors",
        "source",
    )
    return Table("Published rates", header, tuple(rows))


def _bars(costs: list[KernelCost], card: Card) -> Plot:
    halves = [problem for problem in _asked(costs) if (problem[2] == "half") == bool(card.tensor)]
    return Plot(
        f"{card.name}: least time, over that of the nominal FLOPs at its peak",
        "bars",
        tuple(Series(who, tuple(_points(costs, halves, card, who))) for who in (OURS, FLASH)),
        (Axis("", "number"), Axis("times as long", "times", log=False)),
        mark=1.0,
    )


def _points(costs: list[KernelCost], problems: list[Problem], card: Card, who: str) -> Iterator[Point]:
    for problem in problems:
        for name, roles in PASSES.items():
            found = bounds(costs, problem, card, roles) if who == OURS else flash_bounds(problem, card, name)
            if found:
                configuration, head_dim, _ = problem
                yield plain(f"{configuration}, d={head_dim}, {name}", seconds(found) / nominal(problem, card, name))
