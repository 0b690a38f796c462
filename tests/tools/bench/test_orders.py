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
from dilkit.tools.bench.orders.implementations import TRIAL, OrderImplementation, measured
from dilkit.tools.bench.orders.peers import Array, Peer, Task
from dilkit.tools.bench.orders.record import Finding, OrderCase, OrderEntry, OrdersResult
from dilkit.tools.bench.orders.targets import PACKAGES
from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.results.file import write_result
from dilkit.tools.results.record import Samples

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


class Broken(Right):
    """A package that raises where it should decode."""

    name = "broken"

    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        raise OverflowError("no such curve")


class Absent(Right):
    """A package that is not there."""

    name, needs = "hilbertsfc", "Python 9.9 or newer"

    def version(self) -> None:
        return None


def run(out: Path, *arguments: str) -> tuple[int, OrdersResult]:
    return small_suites.run("orders", out, *arguments, sizes=TINY, packages=(Right(), Rows(), Broken(), Absent()))


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
    verdicts = {"numpy-hilbert-curve": "measured", "hilbertcurve": "wrong", "broken": "failed"}
    for case in shared:
        assert {name: case.entries[name].verdict for name in verdicts} == verdicts
        assert "hilbertsfc" not in case.entries
    figures = {figure.name: figure for figure in result.figures}
    over = [figures[f"time of {name} over dilkit's, the least of all rows"] for name in PACKAGES]
    assert len(over[0].values) == len(shared)
    assert (over[1].values, over[1].verdict) == ({}, "not measured")
    assert over[2].verdict.startswith("not measurable here: not installed: Python 9.9 or newer")
    assert all(figure.values for figure in result.figures if figure not in over)
    assert "hilbertcurve wrong, not ranked: not so: they are a step of one cell apart" in printed
    assert "broken failed, not ranked: OverflowError: no such curve" in printed


def test_what_was_measured_before_ctrl_c_is_kept_and_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(suite.OrdersSuite, "rank", interrupt)
        code, kept = run(tmp_path)
    assert (code, kept.interrupted) == (130, True)
    assert "INTERRUPTED" in (tmp_path / "suite.md").read_text()
    assert (len(kept.permutations), kept.ranks, kept.warm) == (10, (), ())
    found = {figure.name: figure.verdict for figure in kept.figures}
    assert found["encode, random 2-D points"] == "not measured"
    assert found["2-D Hilbert, 1024 x 1024"] in ("short", "met", "aim met")
    code, result = run(tmp_path, "--resume")
    assert (code, result.permutations) == (0, kept.permutations)
    write_result(replace(kept, isa="other"), tmp_path / "suite.json")
    with pytest.raises(ValueError, match="isa other"):
        run(tmp_path, "--resume")


def test_a_wrong_order_of_ours_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dilkit, "encoder", Rows.encoder)
    code, result = run(tmp_path)
    assert code == 1
    encoded = [case.entries["dilkit"] for case in result.points if case.what == "encode"]
    assert all(entry.verdict == "wrong" and entry.time is None for entry in encoded)
    assert {figure.name: figure.verdict for figure in result.figures}["encode, random 2-D points"] == "not measured"


@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.name)
@pytest.mark.parametrize(("ndim", "bits"), [(2, 6), (3, 4)])
def test_adapters_of_packages_compute_what_they_say(peer: Peer, ndim: int, bits: int) -> None:
    if reason := peer.absent():
        pytest.skip(f"{peer.name}: {reason}")
    cells = 1 << ndim * bits
    permutation = peer.permutation(ndim, bits, np.zeros(cells, np.int32)).result()
    assert np.array_equal(peer.ranks(ndim, bits, cells).result()[permutation], np.arange(cells))
    points = np.random.default_rng(0).integers(0, 1 << bits, (ndim, 500), np.uint16)
    codes = peer.encoder(points, bits).result()
    assert np.array_equal(np.stack(peer.decoder(codes, ndim, bits).result()), points)
    findings = [*checks.curve(peer, ndim, bits), *checks.visits(permutation, (1 << bits,) * ndim)]
    assert all(finding.passed for finding in (*findings, *checks.sorting(peer.sorter(points, bits).result(), codes)))


@pytest.mark.parametrize(
    ("findings", "passed"),
    [
        (checks.visits(np.array([0, 1, 3, 2]), (2, 2)), [True, True]),
        (checks.visits(np.array([0, 1, 2, 3]), (2, 2)), [True, False]),
        (checks.visits(np.array([0, 1, 0, 2]), (2, 2)), [False, True]),
        (checks.visits(np.array([0, 1]), (2, 2)), [True, True]),  # a part of the curve
        (checks.visits(np.array([0, 2, 1]), (3, 1)), [True, True]),  # an odd side
        (checks.sorting(np.array([1, 2, 0]), np.array([5, 3, 4])), [True, True]),
        (checks.sorting(np.array([1, 0, 2]), np.array([5, 3, 4])), [True, False]),
        (checks.sorting(np.array([1, 1, 2]), np.array([5, 3, 4])), [False, False]),
    ],
)
def test_checks_of_curves_and_of_sorting_can_fail(findings: list[Finding], passed: list[bool]) -> None:
    assert [finding.passed for finding in findings] == passed


def test_who_is_slow_gets_fewer_points() -> None:
    def make(count: int) -> Task:
        return Task(lambda: np.sin(np.arange(40 * count)))

    def check(count: int, found: Array) -> list[Finding]:
        return [Finding("all are there", len(found) == 40 * count)]

    both = dict(all=OrderImplementation(make, check), few=OrderImplementation(make, check, whole=False))
    entries = measured(both, 10 * TRIAL, repeats=1, budget=1e-5, min_time=0.0)
    assert [entries[name].points for name in both] == [10 * TRIAL, TRIAL]
    few = entries["few"]
    assert few.time is not None
    assert few.ns_per_point == pytest.approx(1e9 * few.time.median_s / TRIAL)


def test_what_is_done_before_a_sample_is_not_timed() -> None:
    done: list[str] = []
    calls = dict(a=lambda: done.append("a"), b=lambda: done.append("b"))
    timed = time_interleaved(calls, repeats=2, warmup=0, before=lambda: done.append("-"))
    assert "".join(done) == "-a-b-a-b"
    assert timed["a"].calls_per_sample == 1


def test_a_ratio_is_that_of_the_same_round() -> None:
    """So that what disturbs the machine for most of the rounds disturbs no ratio."""
    entries = {
        name: OrderEntry(points=points, time=Samples.of(samples))
        for name, samples, points in (("dilkit", (1.0, 5.0, 7.0), 4), ("other", (2.0, 10.0, 7.0), 2))
    }
    case = OrderCase(grid="square", shape=(2, 2), points=4, entries=entries)
    assert case.over("other") == 4.0
    assert case.over("nobody") is None
