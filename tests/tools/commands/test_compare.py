"""`dilkit compare`."""

import json
import re

import numpy as np
import pytest
from helpers.result_files import COMMITTED, FOLDER, content, write

from dilkit.tools import cli
from dilkit.tools.commands import compare
from dilkit.tools.commands.compare import FASTER, FEW, SAME, SLOWER, YARDSTICK
from dilkit.tools.results.rows import ResultRow

Samples = list[float]


def cpu(**samples):
    """A result of the CPU suite with one benchmark case, with these samples of each implementation."""
    found = content("cpu-intel-xeon-avx2")
    row = next(row for row in found["rows"] if row["who"] == "native")
    return found | dict(rows=[row | dict(who=name, samples=taken) for name, taken in samples.items()])


def run(tmp_path, old, new, *options):
    paths = [str(write(tmp_path / f"{name}.json", found)) for name, found in (("old", old), ("new", new))]
    return cli.main(["compare", *paths, *options])


def noisy(median, count=9, spread=0.02):
    return [float(x) for x in median * np.linspace(1 - spread, 1 + spread, count)]


UNTIMED = ("costs", "kernels", "ptx", "demo-llama", "demo-ranks", "gpu-day-h200")


@pytest.mark.parametrize("path", [path for path in COMMITTED if path.stem not in UNTIMED], ids=lambda path: path.stem)
def test_every_list_of_samples_is_found_once(path):
    result = json.loads(path.read_text())
    text, found = json.dumps(result), compare.load(path)[1]
    assert len(found) == sum(text.count(f'"{name}": [') - text.count(f'"{name}": []') for name in ("samples_s", "samples"))


def test_the_largest_changes_come_first_and_two_samples_or_a_yardstick_decide_on_nothing():
    old = {what: ResultRow(table=what, samples=tuple(noisy(1.0))) for what in ("same", "slow", "fast", "gone")}
    new = {
        "same": old["same"],
        "slow": ResultRow(table="slow", samples=tuple(noisy(1.5))),
        "fast": ResultRow(table="fast", samples=tuple(noisy(0.25))),
    }
    new["fresh"] = ResultRow(table="fresh", samples=(1.0,))
    found = compare.compare(old, new, 0.05)
    assert [(c["what"], c["verdict"]) for c in found] == [("fast", FASTER), ("slow", SLOWER), ("same", SAME)]
    assert found[1]["ratio"] == pytest.approx(1.5)
    old = {
        "two": ResultRow(table="two", samples=(1.0, 1.0)),
        "matmul": ResultRow(table="", who="matmul", samples=tuple(noisy(1.0))),
    }
    new = {
        "two": ResultRow(table="two", samples=(9.0, 9.0)),
        "matmul": ResultRow(table="", who="matmul", samples=tuple(noisy(9.0))),
    }
    found = compare.compare(old, new, 0.05)
    assert {c["what"]: c["verdict"] for c in found} == {"two": FEW, "matmul": YARDSTICK}


def test_a_regression_is_exit_code_1(tmp_path, capsys):
    old, new = cpu(mine=noisy(1.0), other=noisy(2.0)), cpu(mine=noisy(1.2), other=noisy(1.0))
    assert run(tmp_path, old, new) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.endswith((": mine", ": other"))]
    assert [(row[0], "slower" in row, "faster" in row) for row in rows] == [("0.500", False, True), ("1.200", True, False)]
    assert run(tmp_path, old, new, "--margin", "0.5") == 0
    assert run(tmp_path, new, old) == 1
    capsys.readouterr()
    assert run(tmp_path, old, new, "--json") == 1
    printed = json.loads(capsys.readouterr().out)
    assert (printed["schema"], printed["command"], printed["regressions"]) == (1, "compare", 1)
    assert [c["verdict"] for c in printed["changes"] if c["what"].endswith((": mine", ": other"))] == [FASTER, SLOWER]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (content("cpu-intel-xeon-avx2"), content("demo"), "old.json is of 'suite-cpu'; compare two of a kind"),
        (cpu(a=[1.0]) | dict(quick=0), cpu(a=[1.0]) | dict(quick=32), "made with --quick, unlike"),
        (cpu(), cpu(b=[1.0]), "without samples"),
        (cpu(a=["1"]), cpu(a=[1.0]), "rows[0].samples[0]: '1' where a number is needed"),
        (cpu(a=[0.0]), cpu(a=[1.0]), "rows[0]: samples: 0.0 s; all must be positive"),
        (cpu(a=[1.0]), cpu(a=[1.0]) | dict(environment=3), "environment: 3 where an object is needed"),
    ],
)
def test_what_cannot_be_compared_is_exit_code_2(old, new, complaint, tmp_path, capsys):
    assert run(tmp_path, old, new) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert len(said.splitlines()) == 1


def test_a_pattern_is_compared_with_an_earlier_run(tmp_path, capsys):
    call = "--seqs 32,64 --segments 16 --rates 1 --heads 2 --dim 8 --repeats 3 --backend reference"
    command = ["bench", *call.split(), "--out"]
    assert cli.main([*command, str(tmp_path / "before")]) == 0
    code = cli.main([*command, str(tmp_path / "after"), "--against", str(tmp_path / "before/bench.json")])
    shown = re.search(r"measurements in both: (\d+) slower", capsys.readouterr().out)
    assert shown
    assert code == int(shown[1] != "0")
    assert cli.main([*command, str(tmp_path / "after"), "--against", str(FOLDER / "seeds.json")]) == 2
    assert "a result of kind 'suite-seeds'; one of 'bench' is needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "file", "earlier"), [("--seqs 32", "bench.json", "lengths.json"), ("--suite seeds", "suite.json", "seeds.json")]
)
def test_no_run_writes_the_file_that_it_is_compared_with(options, file, earlier, tmp_path, capsys):
    against = tmp_path / file
    against.write_bytes((FOLDER / earlier).read_bytes())
    assert cli.main(["bench", *options.split(), "--out", f"{tmp_path}/x/..", "--against", str(against)]) == 2
    assert f"--against {against}: this run overwrites that file" in capsys.readouterr().err
    assert against.read_bytes() == (FOLDER / earlier).read_bytes()
