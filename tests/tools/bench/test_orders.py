"""`dilkit bench --suite orders`."""

import numpy as np
import pytest
from helpers import small_suites

from dilkit.tools.bench.suites.orders import COMPARED, OTHER, OrdersSizes
from dilkit.tools.bench.workloads import order_contenders
from dilkit.tools.bench.workloads.order_contenders import Dilkit

GRIDS = {"square": (8, 8), "large": (16, 16), "cube": (4, 4, 4), "frame": (6, 10), "video": (3, 5, 4)}
TINY = OrdersSizes(1, GRIDS, {2: (300, (4, 16)), 3: (300, (3,))}, (16, 16), 64)


class Right(Dilkit):
    name = "hilbertsfc"

    def version(self):
        return "1.2"


class Rows(Right):
    """A package that is wrong: its codes are row-major indices, so that they come back, but rows are joined by jumps."""

    def permutation(self, ndim, bits, out):
        return lambda: np.arange(len(out))

    def encoder(self, axes, bits):
        return lambda: order_contenders.row_major(axes, bits, np.zeros(len(axes[0]), np.int64))

    def decoder(self, codes, ndim, bits):
        return lambda: tuple(np.unravel_index(codes, (1 << bits,) * ndim))


class RowsWhereLarge(Rows):
    """A package that is right on small grids alone."""

    def encoder(self, axes, bits):
        return super().encoder(axes, bits) if bits > 4 else Dilkit().encoder(axes, bits)

    def decoder(self, codes, ndim, bits):
        return super().decoder(codes, ndim, bits) if bits > 4 else Dilkit().decoder(codes, ndim, bits)


def run(out, other):
    return small_suites.run("orders", out, sizes=TINY, other=other)


pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.mark.parametrize("other", [Right(), Rows()])
def test_the_suite_measures_and_judges_everything_and_a_package_only_if_it_is_right(other, tmp_path, capsys):
    wrong = isinstance(other, Rows)
    code, result = run(tmp_path, other)
    assert code == 0  # what others do wrong is no fault of ours
    printed = capsys.readouterr().out
    assert [len(result.cases(table)) for table in (*COMPARED, "order", "locality")] == [5, 0, 3, 3, 0, 5, 3]
    shared = [case for case in result.cases(*COMPARED) if OTHER in case.rows]
    assert len(shared) == 9
    for case in result.cases(*COMPARED, "order"):
        ours = [row for who, row in case.rows.items() if who != OTHER]
        assert {(row.verdict, len(row.samples)) for row in ours} == {("measured", 2)}
        assert all(row.values["checked"] for row in ours)
    for case in shared:
        assert case.rows[OTHER].verdict == ("wrong" if wrong else "measured")
        assert case.timed(OTHER) != wrong
    figures = {figure.name: figure for figure in result.figures}
    over = figures.pop("time of hilbertsfc over dilkit's, the least of all rows")
    assert len(over.values) == (0 if wrong else len(shared))
    assert all(figure.values for figure in figures.values())
    assert ("hilbertsfc wrong: not so: steps that are not of one cell:" in " ".join(printed.split())) == wrong


def test_a_large_curve_is_looked_at_in_its_middle():
    axes = np.random.default_rng(0).integers(0, 1 << 10, (2, 50))
    for package, right in ((Right(), True), (RowsWhereLarge(), False)):
        contender = order_contenders.encode(axes, 10, [package])[package.name]
        assert all(contender.check(contender.make()()).values()) == right


def test_an_engine_that_is_wrong_is_not_timed_and_decides_on_the_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr(Dilkit, "decoder", lambda self, codes, ndim, bits: Rows().decoder(codes, ndim, bits))
    code, result = run(tmp_path, Right())
    assert code == 1
    assert not any(case.timed("dilkit") for case in result.cases("encode", "decode"))


@pytest.mark.parametrize(
    ("findings", "passed"),
    [
        (order_contenders.visits(np.array([0, 1, 3, 2]), (2, 2)), [True, True]),
        (order_contenders.visits(np.array([0, 1, 2, 3]), (2, 2)), [True, False]),
        (order_contenders.visits(np.array([0, 1, 0, 2]), (2, 2)), [False, True]),
        (order_contenders.visits(np.array([0, 2, 1]), (3, 1)), [True, True]),  # an odd side
    ],
)
def test_checks_of_curves_can_fail(findings, passed):
    assert list(findings.values()) == passed
