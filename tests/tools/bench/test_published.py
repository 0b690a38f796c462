"""`dilkit bench --suite seeds` from end to end at tiny sizes, how published figures are read, and runs that go on from others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.tools import cli
from dilkit.tools.bench.published import figures as published
from dilkit.tools.bench.published import judge as seed_claims
from dilkit.tools.bench.published import suite as suite_seeds
from dilkit.tools.bench.published.claim import Setting
from dilkit.tools.bench.published.entrants import SUMMARIES, entrant
from dilkit.tools.bench.published.longest import Search, bisect
from dilkit.tools.bench.published.settings import (
    BATCHES,
    CONFIGURATIONS,
    HEADS,
    IMPLEMENTATIONS,
    LENGTHS,
    MULTI_SEGMENT,
    QUICK_TABLE,
    held_lengths,
)
from dilkit.tools.measure import ceilings, memory
from dilkit.tools.measure.correctness import check
from dilkit.tools.measure.implementation import Inputs
from dilkit.tools.report.kinds import briefs, seed_rows, suite_seeds_report
from dilkit.tools.report.kinds.bench_report import exponent
from dilkit.tools.site import figures

CASES = (
    *LENGTHS[:2],
    QUICK_TABLE[-1],
    held_lengths(False)[0],
    IMPLEMENTATIONS[0],
    MULTI_SEGMENT,
    HEADS[0],
    BATCHES[0],
    CONFIGURATIONS[0],
)
_native = find_spec("dilkit.backends.native._native")
TWO = Setting(2048, (512, 1024), (1, 2), 2, ranks=2)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few of the settings, a thirty-second of their lengths, two of the peers, ranks on threads."""
    monkeypatch.setattr(suite_seeds, "alone", lambda full: CASES)
    monkeypatch.setattr(suite_seeds, "over_ranks", lambda sizes: tuple(replace(TWO, ranks=ranks) for ranks in sizes))
    monkeypatch.setattr(suite_seeds, "growing", lambda sizes, full: tuple(replace(TWO, seq=1024 * p, ranks=p) for p in sizes))
    monkeypatch.setattr(suite_seeds, "HILBERT_SETTINGS", {"multi-segment": MULTI_SEGMENT})
    monkeypatch.setattr(suite_seeds, "PEERS", ("longnet", "torchscale"))
    monkeypatch.setattr(suite_seeds, "MEMORY", 32 << 20)
    monkeypatch.setattr(suite_seeds, "GRAINS", 1 << 14)
    monkeypatch.setattr(suite_seeds.launcher, "transports", lambda: ())
    monkeypatch.setattr(suite_seeds.launcher, "mpi_version", lambda: "")
    monkeypatch.setitem(ceilings.MATMUL_SIZE, "cpu", 64)
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(ceilings, "ROUNDS", 1 << 10)
    monkeypatch.setattr(memory, "peak_memory", lambda function, device="cpu": held(function()))


def held(found: Any) -> int:
    """Bytes of all tensors in what a call returns: in place of the peak, which takes long to measure."""
    if isinstance(found, torch.Tensor):
        return found.nbytes
    parts = vars(found).values() if isinstance(found, Inputs) else found if isinstance(found, tuple) else ()
    return sum(map(held, parts))


def run(out: Path, *arguments: str) -> int:
    return cli.main(["bench", "--suite", "seeds", "--quick", "--repeats", "2", "--out", str(out), *arguments])


def test_the_suite_measures_and_tells_everything(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(tmp_path, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "suite.json").read_text()) == printed
    assert len(printed["cases"]) == 2 * len(CASES)
    for case in printed["cases"]:
        verdicts = {who: entry["verdict"] for who, entry in case["entries"].items()}
        assert set(verdicts.values()) <= {"measured", "refused", "absent"}, verdicts
        assert {"auto", "head-split"} <= {who for who, verdict in verdicts.items() if verdict == "measured"}
        assert all(found["passed"] for entry in case["entries"].values() for found in entry.get("check", ()))
    (half,) = (c for c in printed["cases"] if c["setting"] == LENGTHS[0].to_dict() and not c["backward"])
    assert half["entries"]["float32"]["memory_bytes"] == 2 * half["entries"]["auto"]["memory_bytes"]
    assert [[name, what] for name, what, *_ in suite_seeds.Suite(quick=True, repeats=2).steps()] == printed["steps"]
    assert printed["done"] == len(printed["steps"])
    assert (tmp_path / "suite.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "suite.md").read_text()
    for title, rows, _ in suite_seeds_report.sections(printed):
        assert len(rows) > 1, title
        assert f"## {title}" in page
        assert {len(row) for row in rows} == {len(rows[0])}, title
    assert page.rindex("\n## ") == page.index("\n## Every published figure")
    assert page[page.rindex("\n## ") :].count("\n| ") == len(published.claims()) + 2
    assert suite_seeds_report.figures_markdown(printed) in page
    assert re.search(r"^forward, 1?\d\d tokens, .*reference .*figures .* measured again \(.*, QUICK\)\.$", briefs.seeds(printed))
    ranks = [row for job in printed["ranks"] for row in job["rows"]]
    assert [sorted(row["entries"]) for row in ranks] == 2 * [["ranks"]] + 2 * [["one rank", "ranks"]]
    assert all(found["passed"] for row in ranks for found in row["check"])
    assert "all ranks are in one process" in page
    assert {"matmul", "copy", "fma"} <= half.keys() | ({"fma"} if not _native else set())
    kind, found = figures.load(tmp_path / "suite.json", "suite-seeds")
    drawn = {plot.title: [one.name for one in plot.series] for plot in kind.tell(found).plots}
    assert "longnet" in drawn["Speed-up over the reference, forward, with 95% intervals"]
    assert "bfloat16, forward" in drawn["Half types beside fp32"]
    assert "auto, forward, grow" in drawn["Time of a call; segments that grow with the length, or stay"]
    assert "Ranks' memory at fixed length, inputs counted" not in drawn, "threads tell no memory of a rank"
    assert "torchscale absent: module torchscale" in page or find_spec("torchscale")
    trained = {row[1]: row[8] for row in seed_rows.implementation_rows(printed)}
    assert trained["auto"] == "-"
    assert trained["head-split"].startswith("result ")
    assert trained["longnet"].startswith("gradient ")
    assert "head-split computes another function: the attention of each head in one branch alone" in page


def test_a_run_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    take = suite_seeds.Suite.case

    def stop_at_third(suite: Any, setting: Setting, backward: bool) -> dict[str, Any]:
        if len(measured) == 3:
            measured.append("interrupted")
            raise KeyboardInterrupt
        measured.append(str(setting))
        return take(suite, setting, backward)

    monkeypatch.setattr(suite_seeds, "alone", lambda full: CASES[:2])
    monkeypatch.setattr(suite_seeds.Suite, "case", stop_at_third)
    assert run(tmp_path) == 130
    begun = json.loads((tmp_path / "suite.json").read_text())
    assert (begun["interrupted"], begun["done"], len(begun["cases"])) == (True, 3, 3)
    assert "INTERRUPTED" in (tmp_path / "suite.md").read_text()
    assert run(tmp_path, "--resume") == 0
    result = json.loads((tmp_path / "suite.json").read_text())
    assert (result["interrupted"], result["done"]) == (False, len(result["steps"]))
    assert result["cases"][:3] == begun["cases"]
    assert len(measured) == 1 + len(result["cases"])
    assert [session["date"] for session in result["earlier"]] == [begun["date"]]
    assert "measured in 2 runs" in (tmp_path / "suite.md").read_text()


def test_what_a_run_that_dies_had_measured_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise ValueError("out of luck")

    monkeypatch.setattr(suite_seeds, "alone", lambda full: CASES[:1])
    monkeypatch.setattr(suite_seeds.Suite, "cache", die)
    assert run(tmp_path) == 2
    kept = json.loads((tmp_path / "suite.json").read_text())
    assert (kept["interrupted"], len(kept["cases"])) == (True, 2)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (dict(kind="suite-ring"), "a result of kind 'suite-ring'"),
        (dict(steps=[["cases", "another step"]]), "is of another list of steps"),
        (dict(chosen=dict(repeats=9)), "is of another options (repeats 9"),
        (dict(environment=dict(device_name="a potato")), "is of another device (device_name a potato"),
        (None, "there is no"),
    ],
    ids=["kind", "steps", "options", "device", "no file"],
)
def test_a_run_does_not_go_on_from_another_one(
    tmp_path: Path, change: dict[str, Any] | None, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(
        suite_seeds.Suite, "steps", lambda suite: iter([("longest", "nothing", lambda: dict(who="", backward=True))])
    )
    monkeypatch.setattr(suite_seeds_report, "sections", lambda result: iter(()))
    if change is not None:
        assert run(tmp_path) == 0
        path = tmp_path / "suite.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert run(tmp_path, "--resume") == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert told in said
    assert "--resume" in said or "kind" in said


@pytest.mark.parametrize("option", ["--resume", "--full"])
def test_these_options_go_with_a_suite_alone(option: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["bench", option]) == 2
    assert f"{option}: goes with --suite alone" in capsys.readouterr().err


def test_full_is_for_this_suite_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["bench", "--suite", "cpu", "--full", "--out", str(tmp_path)]) == 2
    assert "--full: does not go with --suite cpu" in capsys.readouterr().err


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("name", SUMMARIES)
def test_everyone_computes_what_is_said(name: str, backward: bool) -> None:
    problem = Problem(pattern=Pattern([16, 32], [1, 2]), seq=64, heads=4, head_dim=8, requires_grad=backward)
    found = entrant(name, problem.heads)
    findings = check(found.checked or found, problem, Inputs.random(problem))
    assert findings
    assert all(finding.passed for finding in findings), findings


def test_along_the_curve_other_keys_are_seen() -> None:
    problem = Problem(pattern=Pattern([16], [1]), seq=64, heads=4, head_dim=8)
    assert not all(finding.passed for finding in check(entrant("ordered", 4), problem, Inputs.random(problem)))


@pytest.mark.parametrize(("limit", "longest"), [(0, 0), (9, 0), (10, 10), (159, 150), (160, 160), (1234, 1230)])
def test_the_longest_that_fits_is_found(limit: int, longest: int) -> None:
    tried: list[int] = []

    def fits(seq: int) -> bool:
        tried.append(seq)
        return seq <= limit

    assert bisect(fits, 10, lambda seq: False) == (longest, False)
    assert len(tried) == len(set(tried)) <= 16


def test_a_search_ends_where_calls_take_too_long() -> None:
    assert bisect(lambda seq: True, 10, lambda seq: seq > 100) == (80, True)


def test_memory_decides_on_the_longest_sequence() -> None:
    problem = Problem(pattern=Pattern([8], [1]), seq=8, heads=1, head_dim=8)
    token = 8 * 4
    found = Search(limit=5 * token * 100, grain=4, budget=60.0).longest(entrant("auto", 1), problem)
    assert found["seq"] == 100  # query, key, value, a stand-in for the gradient, and the result
    assert found["stopped"] is None
    assert {one["bytes"] for one in found["tried"] if one["seq"] == 100} == {5 * token * 100}


def result_of(seconds: Callable[[Setting, str], float], nbytes: Callable[[Setting], int]) -> dict[str, Any]:
    """A result in which every setting took `seconds` and `nbytes`."""

    def entry(setting: Setting, who: str) -> dict[str, Any]:
        taken = seconds(setting, who)
        return dict(verdict="measured", reasons=[], memory_bytes=nbytes(setting), time=dict(median_s=taken, samples_s=[taken]))

    def case(setting: Setting) -> dict[str, Any]:
        entries = {who: entry(setting, who) for who in ("auto", "reference", "ordered", "multihead")}
        return dict(setting=setting.to_dict(), backward=False, matmul=dict(gflops=500.0), tokens=setting.tokens, entries=entries)

    both = [replace(s, ranks=ranks) for s in published.settings() if s.ranks == 2 for ranks in (1, 2)]
    rows = [dict(case(s), peak_bytes=[nbytes(s)], entries={who: entry(s, who) for who in ("ranks", "one rank")}) for s in both]
    alone = [case(s) for s in published.settings() if s.ranks == 1]
    longest = [dict(who="auto", backward=False, seq=12345, limit_bytes=1 << 20)]
    return dict(cases=alone, ranks=[dict(rows=rows)], longest=longest, quick=0)


def test_every_claim_is_told_and_measured_where_that_can_be() -> None:
    told = seed_claims.judge(result_of(lambda setting, who: 2.0, lambda setting: 1 << 20))
    assert len(told) == len(published.claims())
    missing = {(figure["figure"], figure["why"]) for figure in told if figure["ours"] is None}
    assert {why for _, why in missing} == {"nothing to measure"}
    assert {figure["why"] for figure in told if figure["quantity"] == "longest"} == {"in 1 MiB"}
    assert len(missing) == sum(c.setting is None and c.quantity != "longest" for c in published.claims())
    nothing = seed_claims.judge(dict(cases=[], ranks=[], longest=[], quick=0))
    assert {figure["ours"] for figure in nothing if figure["quantity"] != "tokens/rank"} == {None}


def test_figures_are_read_as_they_were_published() -> None:
    quadratic = result_of(
        lambda s, who: 1e-9 * s.seq**2 * (4 if who in ("reference", "one rank") else 1), lambda s: s.tokens << 10
    )
    for row in quadratic["ranks"][0]["rows"]:
        row["peak_bytes"] = [row["tokens"] * 1024 // row["setting"]["ranks"]]
    told = seed_claims.judge(quadratic)

    def ours(quantity: str, document: str = "") -> set[float]:
        return {round(f["ours"], 6) for f in told if f["quantity"] == quantity and document in f["document"] and f["ours"]}

    assert ours("exponent") == {2.0}
    assert ours("reduction") == {2.0}
    assert ours("efficiency") == {100.0}
    assert ours("saved") == {50.0}
    assert ours("KiB/token", "Original") == {1.0}
    assert ours("KiB/token", "Hybrid") == {0.5}
    assert ours("speedup", "Ring Attention Benchmark") == {4.0}
    assert ours("speedup", "Comprehensive") == {4.0}
    assert ours("longest") == {12345}
    (one,) = (f for f in told if f["figure"] == "best tokens/s, 512 tokens")
    assert one["ours"] == pytest.approx(512 / (1e-9 * 512**2))
    assert one["per_tflops"] == pytest.approx(one["ours"] / 0.5)
    slow = [f for f in told if f["quantity"] == "ms"]
    assert all(f["per_tflops"] == pytest.approx(f["ours"] * 0.5) for f in slow)


def test_published_tables_agree_with_themselves() -> None:
    """A figure copied wrong stands out: documents derive some of their columns from others."""
    by = {(c.figure, c.quantity): c.claimed for c in published.claims() if c.document.startswith("Ring Attention")}
    for (figure, quantity), value in by.items():
        seq = int(figure.split()[0].replace(",", "")) if figure[0].isdigit() else 0
        if quantity == "KiB/token":
            assert not seq or value == pytest.approx(by[figure, "MiB"] * 1024 / (2 * seq), abs=0.006)
        if quantity == "reduction" and seq:
            ratio = by[f"{seq:,} tokens on 1 GPU", "MiB"] / by[f"{seq:,} tokens on 2 GPUs", "MiB"]
            assert value == pytest.approx(ratio, abs=0.006)
    factors = [c for c in published.claims() if c.quantity == "slowdown"]
    times = {(c.figure, c.quantity): c.claimed for c in published.claims()}
    for claim in factors:
        name = claim.figure.removesuffix(", over the first")
        kind = name.split(maxsplit=1)[1]
        first = next(c.claimed for c in published.claims() if c.quantity == "ms" and c.figure.endswith(kind))
        assert claim.claimed == pytest.approx(times[name, "ms"] / first, rel=0.05)


def test_settings_survive_their_way_through_a_file() -> None:
    for setting in published.settings():
        assert Setting.from_dict(json.loads(json.dumps(setting.to_dict()))) == setting


def test_segments_held_scale_with_length_alone() -> None:
    lengths = held_lengths(full=True)
    assert lengths[-1].seq >= 1 << 20
    flops = [s.pattern.flops(s.seq, s.heads, 64) for s in lengths]
    assert exponent([s.seq for s in lengths], flops) == pytest.approx(1.0, abs=0.01)


def test_speed_ups_have_intervals() -> None:
    slow, fast = (dict(time=dict(samples_s=[scale * x for x in (1.0, 1.1, 0.9, 1.0)])) for scale in (4.0, 2.0))
    shown = seed_rows.times_faster(slow, fast)
    assert shown.startswith("2.00x (1.")
    assert seed_rows.times_faster({}, fast) == "-"
