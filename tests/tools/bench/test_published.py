"""`dilkit bench --suite seeds` at tiny sizes, how published figures are read, and runs that go on from others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.yardsticks import shrink

from dilkit import Pattern, Problem
from dilkit.device import probe
from dilkit.testing import memory
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench import run, suites
from dilkit.tools.bench.published import judge
from dilkit.tools.bench.published import longest as search
from dilkit.tools.bench.published.claims import HELD, claims, group, settings
from dilkit.tools.bench.published.document import document, sentence
from dilkit.tools.bench.published.implementations import SUMMARIES, implementation
from dilkit.tools.bench.published.record import Job, Longest, PublishedCase, PublishedResult, Setting
from dilkit.tools.bench.published.suite import PublishedSuite, Settings
from dilkit.tools.bench.suite import Step
from dilkit.tools.measure.correctness import check
from dilkit.tools.results.file import new_result, read_result
from dilkit.tools.results.record import Entry, MatmulRate, Samples

GROUPS = ("lengths", "implementations", "as published", "heads", "batches", "configurations")
CASES = (*(next(iter(group(name).values())) for name in GROUPS), *(HELD[0], group("orders")["multi-segment"]))
TWO = Setting(2048, (512, 1024), (1, 2), 2, ranks=2)
TINY = Settings(
    alone=CASES,
    cached=(group("orders")["multi-segment"],),
    over_ranks=tuple(replace(TWO, ranks=ranks) for ranks in (1, 2)),
    growing=tuple(replace(TWO, seq=1024 * ranks, ranks=ranks) for ranks in (1, 2)),
    peers=("longnet",),
    memory=32 << 20,
    grains=1 << 14,
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    monkeypatch.setattr(memory, "peak_memory", lambda function, device="cpu": held(function()))


def held(found: Any) -> int:
    """Bytes of all tensors in what a call returns: in place of the peak, which takes long to measure."""
    if isinstance(found, torch.Tensor):
        return found.nbytes
    parts = vars(found).values() if isinstance(found, Tensors) else found if isinstance(found, tuple) else ()
    return sum(map(held, parts))


@pytest.mark.slow
def test_the_suite_measures_and_reports_everything(tmp_path: Path) -> None:
    suite = PublishedSuite(quick=True, repeats=2, given=TINY)
    result = run.measure(suite, {}, tmp_path, resume=False)
    assert not suite.wrong(result)
    assert result == read_result(tmp_path / "suite.json", PublishedResult)
    assert (result.done, len(result.cases)) == (len(list(suite.steps())), 2 * len(CASES))
    for case in result.cases:
        assert case.timed("auto", "head-split")
        assert {entry.verdict for entry in case.entries.values()} <= {"measured", "refused"}, case
    half = result.case(CASES[0])
    assert half.entries["float32"].memory_bytes == 2 * half.entries["auto"].memory_bytes
    assert half.matmul.dtype == "float32"
    rows = [row for job in result.ranks for row in job.rows]
    assert [sorted(row.entries) for row in rows] == 2 * [["ranks"]] + 2 * [["one rank", "ranks"]]
    page = document(result)
    tables = {table.title: table for table in page.tables}
    assert (len(tables), len(tables["Every published figure"].rows)) == (15, len(claims()))
    off = {row[1]: row[8].split()[0] for row in tables["Implementations side by side"].rows}
    assert (off["auto"], off["head-split"], off["longnet"]) == ("-", "result", "gradient")
    drawn = {plot.title: [one.name for one in plot.series] for plot in page.plots}
    assert "longnet" in drawn["Speed-up over the reference, forward, with 95% intervals"]
    assert "auto, forward, grow" in drawn["Time of a call; segments that grow with the length, or stay"]
    assert "Ranks' memory at fixed length, inputs counted" not in drawn, "threads have no memory of a rank"
    notes = "\n".join(page.notes)
    assert "all ranks are in one process" in notes
    assert "head-split computes another function: the attention of each head in one branch alone" in notes
    assert sentence(result).startswith("forward, 64 tokens, 8 heads, float32: ")


@dataclass(frozen=True)
class Toy(PublishedSuite):
    """Five measurements that take no time; the third raises `error`."""

    error: BaseException | None = None

    def steps(self) -> Iterator[Step]:
        yield from (Step("cache", f"step {i}", partial(self.measure, i)) for i in range(5))

    def measure(self, number: int) -> PublishedCase:
        if number == 2 and self.error is not None:
            raise self.error
        entries = {name: Entry(time=Samples.of([1.0])) for name in ("auto", "no cache")}
        return PublishedCase(setting=CASES[0], seq=number, entries=entries)


def test_a_run_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    begun = run.measure(Toy(given=TINY, error=KeyboardInterrupt()), {}, tmp_path, resume=False)
    assert (begun.interrupted, begun.done) == (True, 2)
    assert "INTERRUPTED: later measurements are missing" in document(begun).headline
    result = run.measure(Toy(given=TINY), {}, tmp_path, resume=True)
    assert (result.interrupted, result.done) == (False, 5)
    assert [case.seq for case in result.cache] == [0, 1, 2, 3, 4]
    assert [session.date for session in result.earlier] == [begun.date]
    assert "measured in 2 runs, each going on from the one before" in document(result).headline


def test_what_a_run_that_dies_had_measured_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="out of luck"):
        run.measure(Toy(given=TINY, error=ValueError("out of luck")), {}, tmp_path, resume=False)
    kept = read_result(tmp_path / "suite.json", PublishedResult)
    assert (kept.interrupted, len(kept.cache)) == (True, 2)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (dict(kind="suite-ring"), "a result of kind 'suite-ring'"),
        (dict(steps=[["cases", "another step"]]), "is of another list of steps"),
        (dict(chosen=dict(repeats=9)), "is of another options \\(repeats 9"),
        (dict(device_name="a potato"), "is of another device \\(device_name a potato"),
        (None, "there is no"),
    ],
    ids=["kind", "steps", "options", "device", "no file"],
)
def test_a_run_does_not_go_on_from_another_one(tmp_path: Path, change: dict[str, Any] | None, complaint: str) -> None:
    if change is not None:
        run.measure(Toy(given=TINY), {}, tmp_path, resume=False)
        path = tmp_path / "suite.json"
        found = json.loads(path.read_text())
        found["environment"]["device_name"] = change.pop("device_name", found["environment"]["device_name"])
        path.write_text(json.dumps(found | change))
    with pytest.raises(ValueError, match=complaint):
        run.measure(Toy(given=TINY), {}, tmp_path, resume=True)


def test_every_suite_is_found_by_its_name() -> None:
    assert {name: suites.suite(name).NAME for name in suites.SUITES} == {name: name for name in suites.SUITES}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("name", SUMMARIES)
def test_every_implementation_computes_what_is_said(name: str, backward: bool) -> None:
    problem = Problem(pattern=Pattern([16, 32], [1, 2]), seq=64, heads=4, head_dim=8, requires_grad=backward)
    found = implementation(name, problem.heads)
    checks = check(found.checked or found, problem, Tensors.random(problem))
    assert checks
    assert all(one.passed for one in checks), checks


def test_along_the_curve_other_keys_are_seen() -> None:
    problem = Problem(pattern=Pattern([16], [1]), seq=64, heads=4, head_dim=8)
    assert not all(one.passed for one in check(implementation("ordered", 4), problem, Tensors.random(problem)))


@pytest.mark.parametrize(("limit", "longest"), [(0, 0), (9, 0), (10, 10), (159, 150), (160, 160), (1234, 1230)])
def test_the_longest_that_fits_is_found(limit: int, longest: int) -> None:
    tried: list[int] = []
    assert search.bisect(lambda seq: tried.append(seq) or seq <= limit, 10, lambda seq: False) == (longest, False)
    assert len(tried) == len(set(tried)) <= 16


def test_a_search_ends_where_calls_take_too_long() -> None:
    assert search.bisect(lambda seq: True, 10, lambda seq: seq > 100) == (80, True)


def test_memory_decides_on_the_longest_sequence() -> None:
    problem = Problem(pattern=Pattern([8], [1]), seq=8, heads=1, head_dim=8)
    found = search.longest(implementation("auto", 1), problem, limit=5 * 32 * 100, grain=4, budget=60.0)
    assert found.seq == 100  # of 32 bytes a token: query, key, value, a stand-in for the gradient, and the result
    assert found.stopped is None
    assert {trial.bytes for trial in found.tried if trial.seq == 100} == {5 * 32 * 100}


def result_of(seconds: Callable[[Setting, str], float], nbytes: Callable[[Setting], int]) -> PublishedResult:
    """A result in which every setting took `seconds` and `nbytes`."""

    def entries(setting: Setting, *names: str) -> dict[str, Entry]:
        return {who: Entry(memory_bytes=nbytes(setting), time=Samples.of([seconds(setting, who)])) for who in names}

    def case(s: Setting) -> PublishedCase:
        matmul = MatmulRate(**vars(Samples.of([1.0])), gflops=500.0)
        found = entries(s, "auto", "reference", "ordered", "multihead")
        return PublishedCase(setting=s, backward=False, tokens=s.tokens, seq=s.seq, matmul=matmul, entries=found)

    def row(s: Setting) -> PublishedCase:
        times, peaks = entries(s, "ranks", "one rank"), (nbytes(s) // s.ranks,)
        return PublishedCase(setting=s, backward=False, tokens=s.tokens, transport="mpi", entries=times, peak_bytes=peaks)

    both = [replace(s, ranks=ranks) for s in settings() if s.ranks == 2 for ranks in (1, 2)]
    return new_result(
        PublishedResult,
        probe("cpu"),
        suite="seeds",
        repeats=1,
        cases=tuple(case(s) for s in settings() if s.ranks == 1),
        ranks=(Job(ranks=2, transport="mpi", rows=tuple(map(row, both))),),
        longest=(Longest(who="auto", backward=False, seq=12345, limit_bytes=1 << 20),),
    )


def test_every_claim_is_measured_where_that_can_be() -> None:
    found = judge.figures(result_of(lambda setting, who: 2.0, lambda setting: 1 << 20))
    assert len(found) == len(claims()) == 188
    missing = {(figure.figure, figure.why) for figure in found if figure.ours is None}
    assert {why for _, why in missing} == {"nothing to measure"}
    assert {figure.why for figure in found if figure.quantity == "longest"} == {"in 1 MiB"}
    assert len(missing) == sum(c.setting is None and c.quantity != "longest" for c in claims())
    nothing = judge.figures(new_result(PublishedResult, probe("cpu"), suite="seeds", repeats=1))
    assert {figure.ours for figure in nothing if figure.quantity != "tokens/rank"} == {None}


def test_figures_are_read_as_they_were_published() -> None:
    slow = ("reference", "one rank")
    found = judge.figures(result_of(lambda s, who: 1e-9 * s.seq**2 * (4 if who in slow else 1), lambda s: s.tokens << 10))

    def ours(quantity: str, document: str = "") -> set[float]:
        return {round(f.ours, 6) for f in found if f.quantity == quantity and document in f.document and f.ours}

    assert ours("exponent") == {2.0}
    assert ours("reduction") == {2.0}
    assert ours("efficiency") == {100.0}
    assert ours("saved") == {50.0}
    assert ours("KiB/token", "Original") == {1.0}
    assert ours("KiB/token", "Hybrid") == {0.5}
    assert ours("speedup", "Ring Attention Benchmark") == {4.0}
    assert ours("speedup", "Comprehensive") == {4.0}
    assert ours("longest") == {12345}
    (one,) = (f for f in found if f.figure == "best tokens/s, 512 tokens")
    assert one.ours == pytest.approx(512 / (1e-9 * 512**2))
    assert one.per_tflops == pytest.approx(one.ours / 0.5)
    assert all(f.per_tflops == pytest.approx(f.ours * 0.5) for f in found if f.quantity == "ms")


def test_published_tables_agree_with_themselves() -> None:
    """A figure copied wrong stands out: documents derive some of their columns from others."""
    by = {(c.figure, c.quantity): c.claimed for c in claims() if c.document.startswith("Ring Attention")}
    for (figure, quantity), value in by.items():
        seq = int(figure.split()[0].replace(",", "")) if figure[0].isdigit() else 0
        if quantity == "KiB/token":
            assert not seq or value == pytest.approx(by[figure, "MiB"] * 1024 / (2 * seq), abs=0.006)
        if quantity == "reduction" and seq:
            ratio = by[f"{seq:,} tokens on 1 GPU", "MiB"] / by[f"{seq:,} tokens on 2 GPUs", "MiB"]
            assert value == pytest.approx(ratio, abs=0.006)
    times = {c.figure: c.claimed for c in claims() if c.quantity == "ms"}
    for claim in (c for c in claims() if c.quantity == "slowdown"):
        name = claim.figure.removesuffix(", over the first")
        first = next(ms for figure, ms in times.items() if figure.endswith(name.split(maxsplit=1)[1]))
        assert claim.claimed == pytest.approx(times[name] / first, rel=0.05)
