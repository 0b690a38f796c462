"""`dilkit bench --suite orders`: the command at a tiny size, its checks, the other packages, and how its figures are judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import small_suites

from dilkit.tools.bench.orders import checks, peers, suite
from dilkit.tools.bench.orders.cases import NEAR, OrdersSizes
from dilkit.tools.bench.orders.engine import Dilkit
from dilkit.tools.bench.orders.peers import Array, Peer, Task
from dilkit.tools.bench.orders.record import Finding, OrdersResult
from dilkit.tools.bench.orders.targets import PACKAGES

GRIDS = {"square": (8, 8), "large": (16, 16), "cube": (4, 4, 4), "frame": (6, 10), "video": (3, 5, 4)}
TINY = OrdersSizes(1, GRIDS, {2: (300, (4, 16)), 3: (300, (3,))}, 300, replace(NEAR, shape=(16, 16), segment_length=64))


class Right(Dilkit):
    """A package that is right: dilkit under another name."""

    name, summary = "numpy-hilbert-curve", "made up"

    def permutation(self, ndim: int, bits: int, out: Array) -> Task:
        return Peer.permutation(self, ndim, bits, out)

    def sorter(self, axes: Array, bits: int) -> Task:
        return Peer.sorter(self, axes, bits)

    def version(self) -> str | None:
        return "1.2"


class Rows(Right):
    """A package that is wrong: its codes are row-major indices, so that they come back, but rows are joined by jumps."""

    name = "hilbertcurve"

    def encoder(self, axes: Array, bits: int) -> Task:
        return Task(lambda: peers.row_major(axes, bits, np.zeros(len(axes[0]), np.int64)))

    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        return Task(lambda: np.unravel_index(codes, (1 << bits,) * ndim), tuple)


def run(out: Path, *arguments: str) -> tuple[int, OrdersResult]:
    return small_suites.run("orders", out, *arguments, sizes=TINY, packages=(Right(), Rows()))


pytestmark = pytest.mark.usefixtures("without_pictures")


def test_the_suite_measures_and_judges_everything_and_ranks_only_packages_that_are_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = run(tmp_path)
    assert code == 0  # what others do wrong is no fault of ours
    printed = capsys.readouterr().out
    assert [len(getattr(result, name)) for name in suite.OrdersSuite().lists()] == [10, 2, 6, 2, 5, 5, 1]
    for case in result.cases:
        ours = case.entries["dilkit"]
        assert (ours.verdict, ours.points, len(ours.ns)) == ("measured", case.points, 2), ours
        assert ours.check
        assert all(finding.passed for finding in ours.check)
    shared = [case for case in result.cases if case.dtype != "int64"]
    verdicts = {"numpy-hilbert-curve": "measured", "hilbertcurve": "wrong"}
    for case in shared:
        assert {name: case.entries[name].verdict for name in verdicts} == verdicts
    figures = {figure.name: figure for figure in result.figures}
    over = [figures[f"time of {name} over dilkit's, the least of all rows"] for name in PACKAGES]
    assert [len(figure.values) for figure in over[:2]] == [len(shared), 0]
    assert all(figure.values for figure in result.figures if figure not in over)
    assert "hilbertcurve wrong, not ranked: not so: they are a step of one cell apart" in printed


@pytest.mark.parametrize(
    ("findings", "passed"),
    [
        (checks.visits(np.array([0, 1, 3, 2]), (2, 2)), [True, True]),
        (checks.visits(np.array([0, 1, 2, 3]), (2, 2)), [True, False]),
        (checks.visits(np.array([0, 1, 0, 2]), (2, 2)), [False, True]),
        (checks.visits(np.array([0, 2, 1]), (3, 1)), [True, True]),  # an odd side
        (checks.sorting(np.array([1, 2, 0]), np.array([5, 3, 4])), [True, True]),
        (checks.sorting(np.array([1, 0, 2]), np.array([5, 3, 4])), [True, False]),
    ],
)
def test_checks_of_curves_and_of_sorting_can_fail(findings: list[Finding], passed: list[bool]) -> None:
    assert [finding.passed for finding in findings] == passed
