"""`dilkit bench --suite orders`: the command at a tiny size among made-up packages, the real packages, and the verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dilkit.tools import cli
from dilkit.tools.bench.orders import checks as order_checks
from dilkit.tools.bench.orders import peers as order_peers
from dilkit.tools.bench.orders import suite as suite_orders
from dilkit.tools.bench.orders import targets as suite_orders_targets
from dilkit.tools.bench.orders.contest import TRIAL, Candidate, Contest
from dilkit.tools.bench.orders.engine import Dilkit
from dilkit.tools.bench.orders.peers import Array, Peer, Task
from dilkit.tools.measure import timing as measure
from dilkit.tools.report.kinds import suite_orders_report
from dilkit.tools.site import figures

TINY = {"square": (8, 8), "large": (16, 16), "cube": (4, 4, 4), "frame": (6, 10), "video": (3, 5, 4)}


class Right(Dilkit):
    """A package that is right: dilkit under another name."""

    name, summary = "numpy-hilbert-curve", "made up"

    def walker(self, ndim: int, bits: int, count: int, dtype: str, out: Array | None = None) -> Task:
        return Peer.walker(self, ndim, bits, count, dtype)

    def sorter(self, coords: Array, bits: int) -> Task:
        return Peer.sorter(self, coords, bits)

    def version(self) -> str:
        return "1.2"


class Rows(Right):
    """A package that is wrong: its codes are row-major indices, so that they come back, but rows are joined by jumps."""

    name = "hilbertcurve"

    def encoder(self, coords: Array, bits: int) -> Task:
        return Task(lambda: order_peers.row_major(coords.T, bits, "int64"))

    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        return Task(lambda: np.stack(np.unravel_index(codes, (1 << bits,) * ndim), 1))


class Broken(Right):
    """A package that raises where it should decode."""

    name = "broken"

    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        raise OverflowError("no such curve")


class Absent(Right):
    """A package that is not there."""

    name, python = "hilbertsfc", (9, 9)

    def version(self) -> None:
        return None


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_orders, "GRIDS", TINY)
    monkeypatch.setattr(suite_orders, "POINTS", {2: (300, (4, 16)), 3: (300, (3,))})
    monkeypatch.setattr(suite_orders, "SORTED", 300)
    monkeypatch.setattr(suite_orders, "NEAR", dict(shape=(16, 16), segment_length=64, dilation_rates=(4, 8, 16)))
    monkeypatch.setattr(suite_orders, "QUICK", 1)
    monkeypatch.setattr(order_peers, "PEERS", (Right(), Rows(), Broken(), Absent()))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_orders_report, "draw", lambda *_: None)


def run(out: Path, *arguments: str) -> int:
    return cli.main(["bench", "--suite", "orders", "--quick", "--repeats", "2", "--out", str(out), *arguments])


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for name in suite_orders.CONTESTS for row in result[name]]


@pytest.mark.usefixtures("tiny")
def test_the_suite_measures_and_judges_everything(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(tmp_path, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "suite.json").read_text()) == result
    assert [len(result[name]) for name in suite_orders.LISTS] == [10, 2, 6, 2, 5, 5, 1]
    for row in rows(result):
        ours = row["entries"]["dilkit"]
        assert ours["verdict"] == "measured", ours
        assert ours["check"]
        assert all(finding["passed"] for finding in ours["check"])
        assert len(ours["time"]["samples_s"]) == 2
        assert ours["points"] == row["points"]
    assert all(figure["values"] for figure in result["figures"] if "not m" not in figure["verdict"])
    verdicts = {figure["name"]: figure["verdict"] for figure in result["figures"]}
    assert list(verdicts) == [target.name for target in suite_orders_targets.TARGETS]
    assert (
        sum(verdict.startswith("not m") for verdict in verdicts.values()) == 2
    )  # of the package that is wrong, and the absent one
    assert (tmp_path / "suite.png").read_bytes().startswith(b"\x89PNG")
    results = tmp_path / "results"
    results.mkdir()
    (tmp_path / "suite.json").rename(results / "orders.json")
    assert figures.suite(results, "orders") in (tmp_path / "suite.md").read_text()
    assert "[orders.md](results/orders.md)" in figures.measurements(results)


@pytest.mark.usefixtures("tiny", "undrawn")
def test_packages_that_are_wrong_raise_or_are_absent_are_told_and_not_ranked(tmp_path: Path, capsys) -> None:
    assert run(tmp_path) == 0  # what others do wrong is no fault of ours
    result = json.loads((tmp_path / "suite.json").read_text())
    with_packages = [row for row in rows(result) if row.get("dtype") != "int64"]
    for row in with_packages:
        assert row["entries"]["numpy-hilbert-curve"]["verdict"] == "measured"
        for name, verdict in (("hilbertcurve", "wrong"), ("broken", "failed")):
            assert row["entries"][name]["verdict"] == verdict
            assert "time" not in row["entries"][name]
        assert "hilbertsfc" not in row["entries"]
    told = {figure["name"].split()[2]: figure for figure in result["figures"] if figure["name"].startswith("time of")}
    assert len(told["numpy-hilbert-curve"]["values"]) == len(with_packages)
    assert told["hilbertcurve"]["values"] == {}
    assert told["hilbertcurve"]["verdict"] == "not measured"
    assert told["hilbertsfc"]["verdict"].startswith("not measurable here: not installed: it needs Python 9.9 or newer")
    printed = capsys.readouterr().out
    assert "hilbertcurve wrong, not ranked: not so: they are a step of one cell apart" in printed
    assert "broken failed, not ranked: OverflowError: no such curve" in printed
    page = (tmp_path / "suite.md").read_text()
    assert "| hilbertsfc | - | " in page
    assert page.count("| hilbertcurve | ") == 1  # among the packages, and in no row of times
    assert "| numpy-hilbert-curve | 1.2 | " in page


@pytest.mark.usefixtures("tiny", "undrawn")
def test_what_was_measured_before_ctrl_c_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(suite_orders.Suite, "rank", interrupt)
    assert run(tmp_path) == 130
    kept = json.loads((tmp_path / "suite.json").read_text())
    assert kept["interrupted"]
    assert len(kept["permutations"]) == 10
    assert kept["ranks"] == kept["warm"] == []
    verdicts = {figure["name"]: figure["verdict"] for figure in kept["figures"]}
    assert verdicts["encode, random 2-D points"] == "not measured"
    assert verdicts["2-D Hilbert, 1024 x 1024"] in ("short", "met", "aim met")
    assert "INTERRUPTED" in suite_orders_report.text(kept)


@pytest.mark.usefixtures("tiny", "undrawn")
def test_a_wrong_order_of_ours_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dilkit, "encoder", Rows.encoder)
    assert run(tmp_path) == 1
    result = json.loads((tmp_path / "suite.json").read_text())
    encoded = [row["entries"]["dilkit"] for row in result["points"] if row["what"] == "encode"]
    assert all(entry["verdict"] == "wrong" and "time" not in entry for entry in encoded)
    verdicts = {figure["name"]: figure["verdict"] for figure in result["figures"]}
    assert verdicts["encode, random 2-D points"] == "not measured"


@pytest.mark.parametrize("peer", order_peers.PEERS, ids=lambda peer: peer.name)
@pytest.mark.parametrize(("ndim", "bits"), [(2, 6), (3, 4)])
def test_adapters_of_packages_compute_what_they_say(peer: Peer, ndim: int, bits: int) -> None:
    if reason := peer.absent():
        pytest.skip(f"{peer.name}: {reason}")
    cells = 1 << ndim * bits
    assert all(finding["passed"] for finding in order_checks.curve(peer, ndim, bits))
    walk = peer.walker(ndim, bits, cells, "int32").result()
    assert walk.dtype == np.int32
    assert all(finding["passed"] for finding in order_checks.walk(walk, (1 << bits,) * ndim))
    assert np.array_equal(peer.ranker(ndim, bits, cells).result()[walk], np.arange(cells))
    points = np.random.default_rng(0).integers(0, 1 << bits, (500, ndim)).astype(np.uint16)
    codes = peer.encoder(points, bits).result()
    assert np.array_equal(peer.decoder(codes, ndim, bits).result(), points)
    assert all(finding["passed"] for finding in order_checks.sorting(peer.sorter(points, bits).result(), codes))


def test_checks_can_fail() -> None:
    def passed(indices: list[int], shape: tuple[int, ...]) -> list[bool]:
        return [finding["passed"] for finding in order_checks.walk(np.array(indices), shape)]

    assert passed([0, 1, 3, 2], (2, 2)) == [True, True]
    assert passed([0, 1, 2, 3], (2, 2)) == [True, False]
    assert passed([0, 1, 0, 2], (2, 2)) == [False, True]
    assert passed([0, 1], (2, 2)) == [True, True]  # a part of the curve
    assert passed([0, 1, 2], (3, 1)) == [True, True]
    assert passed([0, 2, 1], (3, 1)) == [True, True]  # an odd side
    codes = np.array([5, 3, 4])
    assert [f["passed"] for f in order_checks.sorting(np.array([1, 2, 0]), codes)] == [True, True]
    assert [f["passed"] for f in order_checks.sorting(np.array([1, 0, 2]), codes)] == [True, False]
    assert [f["passed"] for f in order_checks.sorting(np.array([1, 1, 2]), codes)] == [False, False]


def test_who_is_slow_gets_fewer_points() -> None:
    def make(count: int) -> Task:
        return Task(lambda: np.sin(np.arange(40 * count)))

    def check(count: int, found: Array) -> list[order_checks.Finding]:
        return [order_checks.finding("all are there", len(found) == 40 * count)]

    both = dict(all=Candidate(make, check), few=Candidate(make, check, whole=False))
    entries = Contest(repeats=1, budget=1e-5, min_time=0.0).run(both, 10 * TRIAL)
    assert [entries[who]["points"] for who in both] == [10 * TRIAL, TRIAL]
    few = entries["few"]
    assert few["ns_per_point"] == pytest.approx(1e9 * few["time"]["median_s"] / TRIAL)


def test_what_is_done_before_a_sample_is_not_timed() -> None:
    done: list[str] = []
    calls = dict(a=lambda: done.append("a"), b=lambda: done.append("b"))
    timed = measure.time_interleaved(calls, repeats=2, warmup=0, before=lambda: done.append("-"))
    assert "".join(done) == "-a-b-a-b"
    assert timed["a"].calls_per_sample == 1
    with pytest.raises(ValueError, match="min_time"):
        measure.time_interleaved(calls, min_time=1.0, before=lambda: None)


def entry(ns: float, points: int = 1000) -> dict[str, Any]:
    """A contestant that takes `ns` nanoseconds a point in each of three rounds, but twice as long in the second."""
    samples = [1e-9 * ns * points * factor for factor in (1.0, 2.0, 1.0)]
    return dict(ns_per_point=ns, points=points, time=dict(samples_s=samples))


def made_up(ns: float, others: float | None = None, near: float = 1.0, warm: float = 4e-6) -> dict[str, Any]:
    """A result in which dilkit takes `ns` nanoseconds a point everywhere, and everyone else `others`."""

    def row(**fields: Any) -> dict[str, Any]:
        entries = {"dilkit": ns} | ({} if others is None else {"store loop": others, "hilbertsfc": others})
        return fields | dict(entries={who: entry(value) for who, value in entries.items()})

    grids = {name: row(grid=name, shape=list(shape), dtype="int32") for name, shape in suite_orders.GRIDS.items()}
    points = [
        row(what=what, ndim=ndim, bits=bits)
        for what in ("encode", "decode")
        for ndim, (_, sizes) in suite_orders.POINTS.items()
        for bits in sizes
    ]
    absent = "not installed" if others is None else None
    return dict(
        permutations=list(grids.values()),
        ranks=[],
        points=points,
        sorts=[],
        warm=[dict(shape=[4, 4], time=dict(median_s=warm)), dict(shape=[64, 64], time=dict(median_s=warm / 2))],
        packages=[dict(name=name, absent=absent) for name in suite_orders_targets.PACKAGES],
        locality=[dict(shape=[256, 256], nearest_kept=dict(hilbert={str(r): dict(mean=near) for r in (4, 8, 16)}))],
    )


def verdicts(result: dict[str, Any]) -> list[str]:
    return [figure["verdict"] for figure in suite_orders_targets.judge(result)]


def test_verdicts_go_by_the_limits() -> None:
    assert set(verdicts(made_up(9.0, 1.0, near=9.0, warm=6e-6))[:14]) == {"short"}
    assert verdicts(made_up(0.01, 0.02, near=0.1))[:14] == ["aim met"] * 10 + ["met"] + ["aim met"] * 3
    between = verdicts(made_up(0.15, 0.1, near=0.85))
    assert between[:4] == ["met", "aim met", "met", "met"]
    assert between[11:14] == ["met", "aim met", "aim met"]
    assert verdicts(made_up(0.1501, 0.1))[0] == "short"
    assert verdicts(made_up(0.1, 0.1, near=0.8549))[11] == "met"  # 0.85 to the digits that the limit has


def test_a_package_must_be_slower_everywhere() -> None:
    names = [target.name for target in suite_orders_targets.TARGETS]
    at = names.index("time of hilbertsfc over dilkit's, the least of all rows")
    assert verdicts(made_up(1.0))[at] == "not measurable here: not installed"
    result = made_up(1.0, 3.0)
    assert verdicts(result)[at] == "met"
    result["points"][-1]["entries"]["hilbertsfc"] = entry(0.99, points=10)
    figure = suite_orders_targets.judge(result)[at]
    assert figure["verdict"] == "short"
    shown = suite_orders_report.figure_rows(dict(figures=[figure]))[1]
    assert shown[3] == "0.99x (decode, 3-D, 10 bits), the worst of 13"
    assert verdicts(result)[names.index("time of hilbertcurve over dilkit's, the least of all rows")] == "not measured"


def test_the_worst_number_of_bits_decides() -> None:
    result = made_up(0.5, 1.0)
    name = "encode, random 2-D points"
    at = [target.name for target in suite_orders_targets.TARGETS].index(name)
    assert verdicts(result)[at] == "aim met"
    next(row for row in result["points"] if row["bits"] == 16)["entries"]["dilkit"] = entry(1.4)
    assert verdicts(result)[at] == "met"
    shown = suite_orders_report.figure_rows(dict(figures=[suite_orders_targets.judge(result)[at]]))[1]
    assert shown == (
        name,
        "at most 1.5 ns/point",
        "at most 0.9 ns/point",
        "1.4 ns/point (16 bits), 0.5 ns/point (10 bits)",
        "met",
    )


def test_a_ratio_is_that_of_the_same_round() -> None:
    """So that what disturbs the machine for most of the rounds disturbs no ratio."""
    ours, theirs = (1.0, 5.0, 7.0), (2.0, 10.0, 7.0)
    entries = {
        who: dict(points=points, time=dict(samples_s=samples))
        for who, samples, points in (("dilkit", ours, 4), ("other", theirs, 2))
    }
    assert suite_orders_targets.versus(dict(entries=entries), "other") == 4.0
    assert suite_orders_targets.versus(dict(entries=entries), "nobody") is None
