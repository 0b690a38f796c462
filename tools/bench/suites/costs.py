"""Counts of what CUDA kernels issue, made by `tests/ptx/costs.py`, and bounds of their times."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from dilkit.device import Capability
from dilkit.tools.bench.suites.gpu import CONFIGURATIONS
from dilkit.tools.report.document import Table
from dilkit.tools.report.views import Report
from dilkit.tools.results.rows import ResultRow, RowsResult

SPECIAL = 16
"""Special functions that a multiprocessor does in a clock cycle: NVIDIA, CUDA C++ Programming Guide 13.1, Compute Capabilities
(6.0 and 7.5 to 10.0). It shuffles the numbers of one warp: CUDA C++ Best Practices Guide, Throughput of Native Arithmetic."""
PRODUCT = 2 * 16 * 16 * 8
"""FLOPs of a product of matrices."""


@dataclass(frozen=True)
class Card:
    """A GPU at its highest clock: FLOP/s of dense products of halves (0: no tensor cores) and of fp32, bytes/s of memory.

    `lanes`: fp32 operations of a multiprocessor in a cycle, by the Programming Guide.
    """

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
"""Published rates; where two are published, the higher, so that bounds of times are bounds by either (docs/gpu-costs.md)."""

Problem = tuple[str, int, str]
"""Configuration, head_dim and dtype; float16 of a card is "half", as bfloat16 of another."""
LAUNCHES, WHOLE = "launches", "run whole"
"""Tables of rows: every launch of A, B and C for each kind of GPU; launches of which all tiles were run, with the count in which
what a few tiles say differs most."""
PASSES = {"forward": ("forward",), "backward": ("dots", "dquery", "dkeyvalue")}
Bound = Mapping[str, float]
"""Seconds that each unit needs at least in a launch. Units work at the same time, launches one after the other."""


def _summary(result: RowsResult) -> str:
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
        shuffles=counts["shuffles"] / card.cycles,
        memory=counts["memory"] / card.memory,
    )


def seconds(launches: list[Bound]) -> float:
    return sum(max(bound.values()) for bound in launches)


def bounds(result: RowsResult, problem: Problem, card: Card, name: str) -> list[Bound]:
    rows = (row for row in result.rows if row.table == LAUNCHES and row.case["architecture"] == card.architecture)
    return [bound_of(row.values, card) for row in rows if row.case["role"] in PASSES[name] and _problem(row) == problem]


def nominal(problem: Problem, card: Card, name: str) -> float:
    """Return the seconds of the nominal FLOPs at the card's peak: one score per branch and key, five products in gradients."""
    configuration, head_dim, dtype = problem
    flops = CONFIGURATIONS[configuration].problem(head_dim).flops() * (2.5 if name == "backward" else 1.0)
    return flops / (card.fp32 if dtype == "float32" else card.tensor)


def _problem(row: ResultRow) -> Problem:
    return row.case["configuration"], row.case["head_dim"], "float32" if row.case["dtype"] == "float32" else "half"


def _digits(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def _milliseconds(launches: list[Bound]) -> str:
    _, limit = max(((need, unit) for bound in launches for unit, need in bound.items()), default=(0.0, ""))
    return f"{_digits(seconds(launches) * 1e3)} {limit}" if launches else ""


def _passes(result: RowsResult) -> Iterator[Table]:
    rows: list[tuple[str, ...]] = []
    problems = {_problem(row) for row in result.rows if row.table == LAUNCHES}
    for problem, name in product(sorted(problems), PASSES):
        ours = {card: bounds(result, problem, card, name) for card in CARDS}
        peaks = (_digits(nominal(problem, card, name) * 1e3) if launches else "" for card, launches in ours.items())
        for who, texts in (("cupy_raw", map(_milliseconds, ours.values())), ("the nominal FLOPs", peaks)):
            rows.append((*map(str, problem), name, who, *texts))
    header = ("configuration", "head_dim", "dtype", "pass", "who", *(card.name for card in CARDS))
    yield Table("Milliseconds below which a pass cannot be, and what limits its longest launch", header, tuple(rows))


def _apart(row: ResultRow) -> float:
    """Return the error of the count from a few tiles, as a share of that of all."""
    return float(abs(row.values["from_few"] - row.values["whole"]) / max(row.values["whole"], 1))


def _rates(result: RowsResult) -> Iterator[Table]:
    rows = []
    for card in CARDS:
        rates = f"{card.tensor / 1e12:,.5g}" if card.tensor else "", f"{card.fp32 / 1e12:.3g}", f"{card.memory / 1e9:,.0f}"
        rows.append((card.name, *rates, card.source))
    units = "TFLOP/s of tensor cores", "TFLOP/s of fp32", "GB/s"
    yield Table("Published rates", ("card", *units, "source"), tuple(rows))


REPORT = Report(
    summary=_summary,
    summary_first=True,
    place="{device_name}, threads: {threads}, NVRTC {nvrtc}",
    tables=(_passes, _rates),
)
