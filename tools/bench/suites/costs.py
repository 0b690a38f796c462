"""Counts of what CUDA kernels issue, made by `tests/ptx/costs.py`, and bounds of their times on six GPUs.

A launch cannot be shorter than what it issues over what a unit does at most, unit by unit. Beside it stands FlashAttention-2, as
torch has it, on the strided views of each branch, with what merges the branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from dilkit.device import Capability
from dilkit.tools.bench.suites.gpu import CONFIGURATIONS
from dilkit.tools.report.document import Axis, Plot, Point, Table
from dilkit.tools.report.points import plain, series_of
from dilkit.tools.report.views import Report
from dilkit.tools.results.rows import Row, RowsResult

WARP, SPECIAL, SHARED_BYTES = 32, 16, 128
"""Threads of a warp; special functions, and bytes of shared memory, that a multiprocessor does in a clock cycle: NVIDIA, CUDA C++
Programming Guide 13.1, Compute Capabilities (special function units of 6.0 and 7.5 to 10.0; 32 banks of 4 bytes)."""
SHUFFLED = 32
"""Threads of a warp shuffle in a cycle: NVIDIA, CUDA C++ Best Practices Guide, Throughput of Native Arithmetic Instructions."""
PRODUCT = 2 * 16 * 16 * 8
"""FLOPs of a product of matrices."""


@dataclass(frozen=True)
class Card:
    """A GPU: FLOP/s of dense products of halves with sums in fp32 (0: no tensor cores that the kernels use) and of fp32, bytes/s
    of its memory, at its highest clock. `lanes`: fp32 operations of a multiprocessor in a cycle, by the Programming Guide."""

    name: str
    capability: Capability
    tensor: float
    fp32: float
    memory: float
    lanes: int
    source: str

    @property
    def architecture(self) -> str:
        return "sm_{}{}".format(*self.capability)

    @property
    def cycles(self) -> float:
        """Clock cycles of all multiprocessors in a second: an fp32 lane does two FLOPs in each."""
        return self.fp32 / (2 * self.lanes)


CARDS = (
    Card("P100", (6, 0), 0.0, 10.6e12, 732e9, 64, "NVIDIA Tesla P100 (SXM2), datasheet"),
    Card("T4", (7, 5), 65e12, 8.1e12, 320e9, 64, "NVIDIA T4 Tensor Core GPU, product page"),
    Card("A100", (8, 0), 312e12, 19.5e12, 1555e9, 64, "NVIDIA A100 Tensor Core GPU, whitepaper, table 4 (SXM4, 40 GB)"),
    Card("RTX 4090", (8, 9), 165.2e12, 82.6e12, 1008e9, 128, "NVIDIA Ada GPU Architecture, whitepaper 2.02, appendix A"),
    Card("H100", (9, 0), 989.4e12, 66.9e12, 3352e9, 128, "NVIDIA H100 Tensor Core GPU, whitepaper 1.04, table 3 (SXM5)"),
    Card("B200", (10, 0), 2250e12, 80e12, 8e12, 128, "NVIDIA Blackwell Architecture, technical brief (HGX B200)"),
)
"""Published rates. Where two are published, the higher is here, so that bounds of times are bounds by either: of P100 the
whitepaper has 720 GB/s, of T4 the datasheet 300, of B200 the driver 7,672, and at its clock fp32 has 75 TFLOP/s."""


COUNTS = {
    "TFLOP of products": (1e12 / PRODUCT, ("products",)),
    "G fp32 FMA": (1e9, ("fma",)),
    "G other fp32": (1e9, ("fp32",)),
    "G special functions": (1e9, ("special",)),
    "M wavefronts of matrices": (1e6, ("matrices",)),
    "M wavefronts of other accesses, at least": (1e6, ("shared",)),
    "M more of these, if 8 bytes a lane go by half a warp, 16 by a quarter": (1e6, ("conflicts",)),
    "M shuffles of a warp": (1e6, ("shuffles",)),
    "k barriers of a block": (1e3, ("barriers",)),
    "GB of tensors, each row once": (1e9, ("memory",)),
    "GB that loads and copies ask for": (1e9, ("loaded", "copied")),
    "GB that stores write": (1e9, ("stored",)),
}
"""Units and names of what a launch issues, by header, over all its blocks and all heads: values of a row.

By warps: `products` of (16, 16) by (16, 8) matrices; `matrices`, the wavefronts of shared memory that take what products are
given; `shared`, those of other loads and stores, at least; `shuffles`, votes and reductions. By threads: `fma`; `fp32`, other
sums and products; `special`, powers of 2, reciprocals and quotients. In bytes: `loaded` and `copied` from global memory, `stored`
to it; `memory`, what of it is there once, so that no cache saves it. Beside them: `tiles`, of which `run` were run.
"""
Problem = tuple[str, int, str]
"""Configuration, head_dim and dtype; float16 of a card is "half", as bfloat16 of another."""
LAUNCHES, WHOLE = "launches", "run whole"
"""Tables of rows: every launch of A, B and C, forward and backward, for each kind of GPU; launches of which all tiles were run,
with the count in which what a few tiles say differs most."""
PASSES = {"forward": ("forward",), "backward": ("dots", "dquery", "dkeyvalue")}
OURS, FLASH, NOMINAL = "cupy_raw", "FlashAttention-2 on views", "the nominal FLOPs"
UNITS = ("tensor", "fp32", "shared", "special", "shuffles", "memory")
Bound = Mapping[str, float]
"""Seconds that each of `UNITS` needs at least in a launch. Units work at the same time, launches one after the other."""


def _summary(result: RowsResult) -> str:
    """Return what was counted, and how well a few tiles speak for all."""
    launches, wholes = ([row for row in result.rows if row.table == table] for table in (LAUNCHES, WHOLE))
    few, tiles = (sum(row.values[name] for row in launches) for name in ("run", "tiles"))
    gpus, worst = len({row.case["architecture"] for row in launches}), max(map(_apart, wholes), default=0.0)
    return (
        f"{len(launches)} launches of CUDA kernels for {gpus} GPUs, counted from {few:,} of {tiles:,} tiles; of "
        f"{len(wholes)} launches that were run whole, a few tiles give every count within {worst:.2%}."
    )


def bound_of(counts: Mapping[str, int], card: Card) -> Bound:
    """Return the bound of a launch on a card of its architecture."""
    return dict(
        tensor=counts["products"] * PRODUCT / card.tensor if counts["products"] else 0.0,
        fp32=(counts["fma"] + counts["fp32"]) / (card.lanes * card.cycles),
        shared=(counts["matrices"] + counts["shared"]) / card.cycles,
        special=counts["special"] / (SPECIAL * card.cycles),
        shuffles=counts["shuffles"] * WARP / (SHUFFLED * card.cycles),
        memory=counts["memory"] / card.memory,
    )


def limit(bound: Bound) -> str:
    """Return the unit that needs the longest."""
    return max(bound, key=lambda unit: bound[unit])


def seconds(launches: list[Bound]) -> float:
    """Return the time of launches that follow one another."""
    return sum(max(bound.values()) for bound in launches)


def problem_of(row: Row) -> Problem:
    """Return configuration, head_dim and dtype of a launch."""
    return row.case["configuration"], row.case["head_dim"], "float32" if row.case["dtype"] == "float32" else "half"


def launches_of(result: RowsResult, card: Card) -> list[Row]:
    """Return the rows of our launches on a card."""
    return [row for row in result.rows if row.table == LAUNCHES and row.case["architecture"] == card.architecture]


def bounds(result: RowsResult, problem: Problem, card: Card, name: str) -> list[Bound]:
    """Return the bounds of our launches of a pass on a card."""
    rows = (row for row in launches_of(result, card) if row.case["role"] in PASSES[name] and problem_of(row) == problem)
    return [bound_of(row.values, card) for row in rows]


def flash_bounds(problem: Problem, card: Card, name: str) -> list[Bound]:
    """The bounds of FlashAttention-2; none where torch has it not.

    Counted by hand from its sources: tiles of `run_mha_fwd_hdim64` and `_hdim128` (aten/src/ATen/native/transformers/cuda/
    flash_attn/flash_fwd_launch_template.h), four warps, each of which loads all keys and values of a tile, and its queries anew
    for each tile; gradients in five products, those of queries summed in fp32 in global memory, what they load from shared
    memory not counted. Branches are merged, and gradients added, by a launch each that reads and writes the rows of the branch
    (`dilkit.backends.sdpa.row_kernels`). Each branch scores all its keys.
    """
    configuration, head_dim, dtype = problem
    if dtype != "half" or card.capability < (8, 0):
        return []
    launches, asked = _flash_forward if name == "forward" else _flash_backward, CONFIGURATIONS[configuration]
    bounds = list[Bound]()
    for segment, rate in zip(asked.segment_lengths, asked.dilation_rates, strict=True):
        merged = segment != asked.segment_lengths[0]
        bounds += launches(merged, segment // rate, asked.seq // segment * asked.heads, head_dim, card)
    return bounds


def _flash_forward(merged: bool, length: int, problems: int, head_dim: int, card: Card) -> Iterator[Bound]:
    narrow = card.capability[0] == 8 and card.capability[1] > 0
    keys_of_tile = 128 if head_dim <= 64 else 32 if narrow else 64
    tiles = problems * -(-length // 128) * -(-length // keys_of_tile)
    loaded = tiles * (4 * 2 * keys_of_tile + 128) * head_dim * 2  # by four warps, of halves
    rows, pairs = problems * length, problems * length * length
    yield dict(
        tensor=4 * head_dim * pairs / card.tensor,
        shared=loaded / SHARED_BYTES / card.cycles,
        special=pairs / (SPECIAL * card.cycles),
        memory=rows * (8 * head_dim + 4) / card.memory,
    )
    if merged:
        yield dict(memory=3 * rows * (2 * head_dim + 4) / card.memory)


def _flash_backward(merged: bool, length: int, problems: int, head_dim: int, card: Card) -> Iterator[Bound]:
    rows, pairs = problems * length, problems * length * length
    yield dict(memory=rows * (4 * head_dim + 4) / card.memory)  # rowsum(dout * out)
    yield dict(
        tensor=10 * head_dim * pairs / card.tensor,
        special=pairs / (SPECIAL * card.cycles),
        memory=rows * (16 * head_dim + 8) / card.memory,
    )
    yield dict(memory=rows * 6 * head_dim / card.memory)  # from fp32 to halves
    if merged:
        yield dict(memory=18 * rows * head_dim / card.memory)


def nominal(problem: Problem, card: Card, name: str) -> float:
    """Seconds of the nominal FLOPs at the card's peak: a key is scored once for each branch, gradients take five products."""
    configuration, head_dim, dtype = problem
    flops = CONFIGURATIONS[configuration].problem(head_dim).flops() * (2.5 if name == "backward" else 1.0)
    return flops / (card.fp32 if dtype == "float32" else card.tensor)


def _digits(value: float) -> str:
    """Three of them, without an exponent."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def _milliseconds(launches: list[Bound]) -> str:
    """Return the least time, and the unit that limits the launch that takes the longest."""
    return f"{_digits(seconds(launches) * 1e3)} {limit(max(launches, key=lambda one: max(one.values())))}" if launches else ""


def _problems(result: RowsResult) -> list[Problem]:
    return sorted({problem_of(row) for row in result.rows if row.table == LAUNCHES})


def _passes(result: RowsResult) -> Iterator[Table]:
    rows: list[tuple[str, ...]] = []
    for problem, name in product(_problems(result), PASSES):
        ours = {card: bounds(result, problem, card, name) for card in CARDS}
        cells = {OURS: [*map(_milliseconds, ours.values())]}
        cells[FLASH] = [_milliseconds(flash_bounds(problem, card, name)) for card in CARDS]
        cells[NOMINAL] = [_digits(nominal(problem, card, name) * 1e3) if launches else "" for card, launches in ours.items()]
        rows += [(*map(str, problem), name, who, *texts) for who, texts in cells.items() if any(texts) or who == NOMINAL]
    header = ("configuration", "head_dim", "dtype", "pass", "who", *(card.name for card in CARDS))
    note = "Of FlashAttention-2's gradients, loads from shared memory are not counted: its bounds are too low by as much."
    yield Table("Milliseconds below which a pass cannot be, and what limits its longest launch", header, tuple(rows), note)


def _first_launches(result: RowsResult) -> Iterator[Table]:
    """Yield bounds and counts of the first launch of each kernel of A, in halves where tensor cores take them."""
    needed, issued = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for card in CARDS:
        for row in launches_of(result, card):
            case, is_single = row.case, row.case["dtype"] == "float32"
            if (case["configuration"], case["launch"], is_single) == ("A", 0, not card.tensor):
                kernel = card.name, row.who, case["dtype"], str(case["head_dim"])
                bound = bound_of(row.values, card)
                needed.append((*kernel, *(_digits(bound[unit] * 1e3) for unit in UNITS), limit(bound)))
                counts = ((sum(row.values[name] for name in names), unit) for unit, names in COUNTS.values())
                issued.append((*kernel, *(_digits(count / unit) for count, unit in counts)))
    header, title = ("card", "kernel", "dtype", "head_dim"), "Configuration A, the first launch of each kernel: "
    yield Table(f"{title}milliseconds that each unit needs at least", (*header, *UNITS, "limit"), tuple(needed))
    yield Table(f"{title}what it issues", (*header, *COUNTS), tuple(issued))


def _compared(result: RowsResult) -> Iterator[Table]:
    rows = []
    for row in (row for row in result.rows if row.table == WHOLE):
        facts, counts = row.case | row.values, (f"{row.values[name]:,}" for name in ("whole", "from_few"))
        tiles = f"{facts['tiles']:,}", str(facts["run"])
        rows.append((facts["problem"], row.who, *tiles, facts["count"], *counts, f"{_apart(row):.2%}"))
    header = ("problem", "kernel", "tiles", "of which run", "count that differs most", "run whole", "from few", "apart")
    yield Table("Launches that were run whole, beside what a few of their tiles say", header, tuple(rows))


def _apart(row: Row) -> float:
    """Return the error of the count from a few tiles, as a share of that of all."""
    return float(abs(row.values["from_few"] - row.values["whole"]) / max(row.values["whole"], 1))


def _rates(result: RowsResult) -> Iterator[Table]:
    rows = []
    for card in CARDS:
        rates = f"{card.tensor / 1e12:,.5g}" if card.tensor else "", f"{card.fp32 / 1e12:.3g}", f"{card.memory / 1e9:,.0f}"
        rows.append((card.name, card.architecture, *rates, f"{card.cycles / 1e9:.1f}", card.source))
    units = "TFLOP/s of tensor cores", "TFLOP/s of fp32", "GB/s", "G cycles/s of all multiprocessors"
    yield Table("Published rates", ("card", "for", *units, "source"), tuple(rows))


def _bars(result: RowsResult) -> Iterator[Plot]:
    """Least times of passes over those of the nominal FLOPs: of halves where there are tensor cores for them."""
    for card in CARDS:
        drawn: dict[str, list[Point]] = {OURS: [], FLASH: []}
        for problem, name in product(_problems(result), PASSES):
            ours = bounds(result, problem, card, name)
            if (problem[2] == "half") == bool(card.tensor) and ours:
                for who, launches in ((OURS, ours), (FLASH, flash_bounds(problem, card, name))):
                    label = f"{problem[0]}, d={problem[1]}, {name}"
                    drawn[who] += [plain(label, seconds(launches) / nominal(problem, card, name))] if launches else []
        axes = Axis("", "number"), Axis("times as long", "times", log=False)
        title = f"{card.name}: least time, over that of the nominal FLOPs at its peak"
        yield Plot(title, "bars", series_of(drawn), axes, mark=1.0)


REPORT = Report(
    summary=_summary,
    summary_first=True,
    place="{device_name}, threads: {threads}, NVRTC {nvrtc}",
    tables=(_passes, _first_launches, _compared, _rates),
    plots=(_bars,),
)
