"""`dilkit bench --suite cpu`: how figures are judged, and machines side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.result_files import FOLDER

from dilkit.tools import cli
from dilkit.tools.bench import suites
from dilkit.tools.bench.cpu import machines
from dilkit.tools.bench.cpu.cases import CONFIGURATIONS
from dilkit.tools.bench.cpu.document import document
from dilkit.tools.bench.cpu.record import SHARED, CpuResult
from dilkit.tools.bench.target import Target
from dilkit.tools.results.file import read_result, write_result

EPYC = "AMD EPYC, avx2"


def run(out: Path, *arguments: str) -> int:
    return cli.main(["bench", "--suite", "cpu", "--out", str(out), *arguments])


def epyc() -> CpuResult:
    """The published result of another machine, which an older version measured."""
    published = read_result(FOLDER / "cpu.json", CpuResult)
    return replace(published.machines()[EPYC], beside=())


def test_shares_of_the_peak_are_those_of_the_fastest_multiply_adds_beside() -> None:
    a = next(case for case in epyc().cases if case.config == "A")
    fma = replace(a.fma, gflops=50.0, median_s=2.0, samples_s=(2.0, 1.0, 4.0))  # most were disturbed
    alone = replace(a, threads=1, fma=fma, entries=dict(native=replace(a.entries["native"], gflops=66.0)))
    shares = replace(epyc(), cases=(alone,)).peak_fractions()
    assert shares["A, d=64"] == pytest.approx(0.66 / SHARED)
    assert shares["dense, d=64"] == pytest.approx(68.3 / 101.2, abs=1e-3), "of a file that an older version wrote"
    assert "A, d=64" not in epyc().peak_fractions(), "four threads' rate says nothing of one thread's"
    lengths, rates = CONFIGURATIONS["A"].segment_lengths, CONFIGURATIONS["A"].dilation_rates
    nominal = sum(length / rate**2 for length, rate in zip(lengths, rates, strict=True))
    seen = sum(shorter / rate**2 for shorter, rate in zip(lengths, rates[1:], strict=False))
    assert nominal / (nominal - seen) == pytest.approx(SHARED, abs=0.005), "without what the branch before has seen"


@pytest.mark.usefixtures("without_pictures")
def test_machines_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    old, new = epyc(), replace(epyc(), isa="avx512", torch_isa="avx512", date="2026-12-01", inner_loops=())
    paths = [tmp_path / f"{name}.json" for name in ("old", "new", "both")]
    for path, result in zip(paths, (old, new, replace(new, beside=(replace(old, date="2026-12-02"),))), strict=True):
        write_result(result, path)
    assert run(tmp_path, "--merge", *map(str, paths)) == 0
    found = read_result(tmp_path / "suite.json", CpuResult)
    assert replace(new, isa="amx").machine == "AMD EPYC, avx512 + amx", "bf16 alone runs the other"
    assert [(name, one.date) for name, one in found.machines().items()] == [(EPYC, "2026-12-02"), ("AMD EPYC, avx512", new.date)]
    table = document(found).tables[0]
    assert table.header == ("figure", "must", "aim", EPYC, "AMD EPYC, avx512")
    cells = {row[0]: row[3:] for row in table.rows}
    assert cells["dense forward / peak, head_dim 64"] == ("0.675: short", "not measured")
    assert len({one.what for one in found.measurements()}) == len(list(found.measurements()))
    assert run(tmp_path, "--merge", str(paths[0]), "--repeats", "1") == 2
    assert "--repeats: does not go with --merge" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"--merge: measured with --quick .*: AMD EPYC, avx512"):
        machines.merged([old, replace(new, quick=32)])
    with pytest.raises(ValueError, match="--merge: --suite ring"):
        suites.suite("ring")().merged(())


@pytest.mark.parametrize(
    ("values", "lower", "verdict"),
    [
        ({"64": 2.0, "128": 1.0}, False, "short"),
        ({"64": 2.0, "128": 1.5}, False, "met"),
        ({"64": 2.0, "128": 3.0}, False, "aim met"),
        ({"64": 1.6, "128": 1.9}, True, "short"),
        ({"64": 1.2, "128": 1.5}, True, "met"),
        ({}, False, "not measured"),
    ],
)
def test_the_worst_value_decides(values: dict[str, float], lower: bool, verdict: str) -> None:
    target = Target("figure", 1.5, 1.0 if lower else 2.0, read=lambda _: values, lower=lower)
    assert target.judge(None).verdict == verdict
    missing = replace(target, missing=lambda _: "no such unit")
    assert missing.judge(None).verdict == "not measurable here: no such unit"
