"""`dilkit compare`: how measurements are found and matched, which changes count, and what the command says and returns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.result_files import COMMITTED, FOLDER, content, write

from dilkit.tools import cli
from dilkit.tools.commands import compare
from dilkit.tools.results import comparison, measurements, shapes
from dilkit.tools.results.comparison import FASTER, FEW, SAME, SLOWER, YARDSTICK, Measured
from dilkit.tools.results.record import Measurement

OVERHEAD = FOLDER / "overhead.json"
HEADER = dict(schema=1, **{name: content("overhead")[name] for name in ("command", "date", "environment")})
Samples = list[float]


def made(kind: str = "bench", **more: Any) -> dict[str, Any]:
    return HEADER | dict(kind=kind) | more


def bench(**samples: Samples) -> dict[str, Any]:
    """A result of one length, with these samples of each contestant."""
    entries = {name: dict(time=dict(samples_s=taken)) for name, taken in samples.items()}
    return made(lengths=[dict(seq=64, entries=entries)])


def run(tmp_path: Path, old: Any, new: Any, *options: str) -> int:
    paths = [str(write(tmp_path / f"{name}.json", found)) for name, found in (("old", old), ("new", new))]
    return cli.main(["compare", *paths, *options])


def noisy(median: float, count: int = 9, spread: float = 0.02) -> Samples:
    return [float(x) for x in median * np.linspace(1 - spread, 1 + spread, count)]


def compared(old: dict[str, Measurement], new: dict[str, Measurement]) -> comparison.Comparison:
    return comparison.compare(Measured("bench", 0, {}, old), Measured("bench", 0, {}, new), 0.05)


# Measurements


@pytest.mark.parametrize(
    ("path", "count"), [(p, None) for p in COMMITTED if p.stem != "kernels"], ids=lambda v: getattr(v, "stem", "")
)
def test_every_list_of_samples_is_found_once(path: Path, count: None) -> None:
    text = path.read_text()
    expected = text.count('"samples_s":') + text.count('"samples":')
    found = measurements.find(json.loads(text), shapes.SAMPLES)
    assert len(found) == expected
    assert not any(", no. " in what for what in found)


def test_a_measurement_is_known_by_its_facts_and_not_by_its_place() -> None:
    cases = [
        dict(
            config=config,
            seq=64,
            is_causal=causal,
            peak_bytes=seq,
            gflops=1.5,
            entries=dict(native=dict(time=dict(samples_s=[1.0]))),
        )
        for seq, (config, causal) in enumerate((("A", True), ("B", False)))
    ]
    found = measurements.find(made(cases=cases), shapes.SAMPLES)
    assert list(found) == ["cases (config A, seq 64, causal) native", "cases (config B, seq 64) native"]
    again = measurements.find(made(cases=cases[::-1]), shapes.SAMPLES)
    assert {what: one.samples for what, one in again.items()} == {what: one.samples for what, one in found.items()}


def test_what_came_out_is_no_fact() -> None:
    before = dict(seq=64, verdict="measured", scratch_bytes=7, isa="avx2", time=dict(samples_s=[1.0]))
    after = before | dict(verdict="short", scratch_bytes=9, isa="avx512", note="was slow")
    assert [list(measurements.find(made(memory=[one]), shapes.SAMPLES)) for one in (before, after)] == [["memory (seq 64)"]] * 2


def test_steps_without_facts_are_counted() -> None:
    found = measurements.find(made(steps=[dict(samples_s=[1.0]), dict(samples_s=[2.0])]), shapes.SAMPLES)
    assert [(what, one.samples) for what, one in found.items()] == [("steps", (1.0,)), ("steps, no. 2", (2.0,))]


# Verdicts


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [((1.06, 1.2), SLOWER), ((1.04, 1.2), SAME), ((0.8, 0.94), FASTER), ((0.8, 0.96), SAME), ((1.05, 1.2), SAME)],
)
def test_a_change_counts_when_all_of_its_interval_is_beyond_the_margin(interval: tuple[float, float], verdict: str) -> None:
    assert comparison.judge(interval, 0.05) == verdict


def test_the_largest_changes_come_first_and_only_what_is_in_both_is_compared() -> None:
    old = {what: Measurement(what, tuple(noisy(1.0))) for what in ("same", "slow", "fast", "gone")}
    new = {"same": old["same"], "slow": Measurement("slow", tuple(noisy(1.5))), "fast": Measurement("fast", tuple(noisy(0.25)))}
    new["fresh"] = Measurement("fresh", (1.0,))
    found = compared(old, new)
    assert [(c.what, c.verdict) for c in found.changes] == [("fast", FASTER), ("slow", SLOWER), ("same", SAME)]
    assert found.changes[1].ratio == pytest.approx(1.5)
    assert (found.only_old, found.only_new) == (("gone",), ("fresh",))
    assert [c.what for c in found.regressions] == ["slow"]


def test_two_samples_decide_on_nothing_and_neither_does_a_yardstick() -> None:
    old = {"two": Measurement("two", (1.0, 1.0)), "matmul": Measurement("matmul", tuple(noisy(1.0)), yardstick=True)}
    new = {"two": Measurement("two", (9.0, 9.0)), "matmul": Measurement("matmul", tuple(noisy(9.0)), yardstick=True)}
    found = compared(old, new)
    assert {c.what: c.verdict for c in found.changes} == {"two": FEW, "matmul": YARDSTICK}
    assert found.regressions == ()


def test_equal_code_on_a_noisy_machine_is_no_regression() -> None:
    rng = np.random.default_rng(0)
    flagged = 0
    for _ in range(100):
        pair = [{"": Measurement("", tuple(rng.normal(1.0, 0.05, 9)))} for _ in range(2)]
        flagged += bool(compared(*pair).regressions)
    assert flagged <= 2


# The command


def test_a_file_beside_itself_has_not_changed(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["compare", str(OVERHEAD), str(OVERHEAD)]) == 0
    assert "6 measurements in both: 0 slower, 0 faster, 6 without a change" in capsys.readouterr().out


def test_a_regression_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    old, new = bench(mine=noisy(1.0), other=noisy(2.0)), bench(mine=noisy(1.2), other=noisy(1.0))
    assert run(tmp_path, old, new) == 1
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if "lengths (seq 64)" in line]
    assert rows[0].split()[:1] == ["0.500"]
    assert "faster" in rows[0]
    assert rows[1].split()[:1] == ["1.200"]
    assert "slower" in rows[1]
    assert run(tmp_path, old, new, "--margin", "0.5") == 0
    assert run(tmp_path, new, old) == 1


def test_other_devices_patterns_and_contestants_are_pointed_out(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    old, new = (bench(both=noisy(1.0)) | dict(problem=dict(pattern=dict(text=text), heads=2)) for text in ("P1", "P2"))
    new["environment"] = new["environment"] | dict(device_name="another", threads=64)
    old["lengths"][0]["entries"]["gone"] = dict(time=dict(samples_s=[1.0]))
    assert run(tmp_path, old, new) == 0
    printed = capsys.readouterr().out
    assert "device_name differs: AMD EPYC -> another" in printed
    assert "pattern differs: P1 -> P2" in printed
    assert "heads differs" not in printed
    assert "only in old:\n  lengths (seq 64) gone" in printed


def test_json_holds_every_change(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(tmp_path, bench(a=noisy(1.0), b=noisy(1.0)), bench(a=noisy(2.0), b=noisy(1.0)), "--json") == 1
    printed = json.loads(capsys.readouterr().out)
    assert (printed["schema"], printed["command"], printed["regressions"]) == (1, "compare", 1)
    assert [(c["what"], c["verdict"]) for c in printed["changes"]] == [
        ("lengths (seq 64) a", SLOWER),
        ("lengths (seq 64) b", SAME),
    ]
    assert printed["changes"][0]["ratio"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (bench(a=[1.0]), made("demo", rows=[dict(samples=[1.0])]), "old.json is of 'bench'; compare two of a kind"),
        (bench(a=[1.0]), bench(b=[1.0]), "measures nothing that"),
        (bench(a=[1.0]) | dict(quick=0), bench(a=[1.0]) | dict(quick=32), "made with --quick, unlike"),
        (made(), bench(b=[1.0]), "without samples"),
        (bench(a=["1"]), bench(a=[1.0]), "'1' where a number"),
        (bench(a=[0.0]), bench(a=[1.0]), "0.0 where a number"),
        (bench(a=[]), bench(a=[1.0]), "a list of 0"),
        (bench(a=[1.0]), made(environment=3), "environment: 3 where an object is needed"),
    ],
)
def test_what_cannot_be_compared_is_exit_code_2(old: Any, new: Any, complaint: str, tmp_path: Path, capsys: Any) -> None:
    assert run(tmp_path, old, new) == 2
    told = capsys.readouterr().err
    assert complaint in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize("margin", ["-1", "x", "nan", "inf", "11"])
def test_a_margin_is_a_share(margin: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["compare", str(OVERHEAD), str(OVERHEAD), f"--margin={margin}"]) == 2
    assert "no share from 0 to 10" in capsys.readouterr().err


def test_the_default_margin_is_the_documented_one() -> None:
    page = (FOLDER.parent / "measurements.md").read_text()
    assert f"{compare.MARGIN:.0%} unless" in page
