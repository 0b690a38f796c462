"""`dilkit bench --suite orders`: the command at a tiny size, its checks, and other packages that are right or wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import small_suites

from dilkit.tools.bench.suites.orders import COMPARED, OTHERS, OrdersSizes
from dilkit.tools.bench.workloads import order_contenders
from dilkit.tools.bench.workloads.order_contenders import Array, Dilkit, HilbertCurve
from dilkit.tools.measure.timing import Call
from dilkit.tools.results.rows import RowsResult

GRIDS = {"square": (8, 8), "large": (16, 16), "cube": (4, 4, 4), "frame": (6, 10), "video": (3, 5, 4)}
TINY = OrdersSizes(1, GRIDS, {2: (300, (4, 16)), 3: (300, (3,))}, 300, (16, 16), 64)


class Right(Dilkit):
    """A package that is right: dilkit under another name."""

    name, module, summary = "numpy-hilbert-curve", "dilkit", "made up"

    def permutation(self, ndim: int, bits: int, out: Array) -> Call:
        return HilbertCurve.permutation(self, ndim, bits, out)

    def sorter(self, axes: Array, bits: int) -> Call:
        return HilbertCurve.sorter(self, axes, bits)

    def version(self) -> str | None:
        return "1.2"


class Rows(Right):
    """A package that is wrong: its codes are row-major indices, so that they come back, but rows are joined by jumps."""

    name = "hilbertcurve"

    def encoder(self, axes: Array, bits: int) -> Call:
        return lambda: order_contenders.row_major(axes, bits, np.zeros(len(axes[0]), np.int64))

    def decoder(self, codes: Array, ndim: int, bits: int) -> Call:
        return lambda: tuple(np.unravel_index(codes, (1 << bits,) * ndim))


class RowsWhereLarge(Rows):
    """A package that is right on small grids alone."""

    def encoder(self, axes: Array, bits: int) -> Call:
        return super().encoder(axes, bits) if bits > 4 else Dilkit().encoder(axes, bits)

    def decoder(self, codes: Array, ndim: int, bits: int) -> Call:
        return super().decoder(codes, ndim, bits) if bits > 4 else Dilkit().decoder(codes, ndim, bits)


def run(out: Path, *arguments: str) -> tuple[int, RowsResult]:
    return small_suites.run("orders", out, *arguments, sizes=TINY, packages=(Right(), Rows()))


pytestmark = pytest.mark.usefixtures("without_pictures")


def test_the_suite_measures_and_judges_everything_and_ranks_only_packages_that_are_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = run(tmp_path)
    assert code == 0  # what others do wrong is no fault of ours
    printed = capsys.readouterr().out
    assert [len(result.cases(table)) for table in (*COMPARED, "order", "locality")] == [10, 2, 3, 3, 2, 5, 3]
    shared = [case for case in result.cases(*COMPARED) if case.case.get("dtype") != "int64"]
    for case in result.cases(*COMPARED, "order"):
        ours = [row for who, row in case.rows.items() if who not in OTHERS]
        assert {(row.verdict, len(row.samples)) for row in ours} == {("measured", 2)}
        assert all(row.values["checked"] for row in ours)
    for case in shared:
        assert [case.rows[name].verdict for name in OTHERS[:2]] == ["measured", "wrong"]
        assert not case.timed("hilbertcurve")
    figures = {figure.name: figure for figure in result.figures}
    over = [figures.pop(f"time of {name} over dilkit's, the least of all rows") for name in OTHERS]
    assert [len(figure.values) for figure in over] == [len(shared), 0, 0]
    assert all(figure.values for figure in figures.values())
    assert "hilbertcurve wrong: not so: steps that are not of one cell:" in " ".join(printed.split())


def test_a_large_curve_is_looked_at_in_its_middle() -> None:
    axes = np.random.default_rng(0).integers(0, 1 << 10, (2, 50))
    for package, right in ((Right(), True), (RowsWhereLarge(), False)):
        contender = order_contenders.encode(axes, 10, [package])[package.name]
        assert all(contender.check(50, contender.make(50)()).values()) == right


def test_an_engine_that_is_wrong_is_not_timed_and_decides_on_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dilkit, "decoder", lambda self, codes, ndim, bits: Rows().decoder(codes, ndim, bits))
    code, result = run(tmp_path)
    assert code == 1
    assert not any(case.timed("dilkit") for case in result.cases("encode", "decode"))


@pytest.mark.parametrize(
    ("findings", "passed"),
    [
        (order_contenders.visits(np.array([0, 1, 3, 2]), (2, 2)), [True, True]),
        (order_contenders.visits(np.array([0, 1, 2, 3]), (2, 2)), [True, False]),
        (order_contenders.visits(np.array([0, 1, 0, 2]), (2, 2)), [False, True]),
        (order_contenders.visits(np.array([0, 2, 1]), (3, 1)), [True, True]),  # an odd side
        (order_contenders.sorts(np.array([1, 2, 0]), np.array([5, 3, 4])), [True]),
        (order_contenders.sorts(np.array([1, 0, 2]), np.array([5, 3, 4])), [False]),
    ],
)
def test_checks_of_curves_and_of_sorting_can_fail(findings: dict[str, bool], passed: list[bool]) -> None:
    assert list(findings.values()) == passed
