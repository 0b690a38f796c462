"""The pages against the code."""

import re
import shlex
import shutil
import sys
from dataclasses import replace
from functools import cache

import pytest
from helpers.pairwise import all_but
from helpers.project import ROOT

import dilkit
import dilkit.comm
import dilkit.nn
from dilkit.environment import VARIABLES
from dilkit.tools import cli
from dilkit.tools.bench import suites
from dilkit.tools.bench.suites.gpu_day import CORRECTNESS
from dilkit.tools.report import registry
from dilkit.tools.results.file import ResultError, write_result
from dilkit.tools.results.rows import ResultRow
from dilkit.tools.site import figures, pages as docs

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "page",
    all_but(
        [ROOT / "docs/transformers.md", ROOT / "docs/migration/flexattention.md"],
        [p for p in PAGES if PYTHON.search(p.read_text()) and p.parent.name != "lessons"],
    ),
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_python_on_a_page_runs(page):
    """The blocks of a page run as one program; a block with a title is a file, tested elsewhere."""
    if "from transformers import" in page.read_text():
        pytest.importorskip("transformers", reason="transformers is not installed (pip install dilkit[transformers])")
    names = {"__name__": "page"}
    for block in PYTHON.findall(page.read_text()):
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="Python 3.13 lays help texts out in another way than 3.10 to 3.12")
def test_generated_parts_are_current(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "read", cache(registry.read))  # pages name a file several times
    monkeypatch.chdir(tmp_path)
    assert not docs.stale_pages(ROOT).keys(), "write them anew with: make docs"


def test_a_changed_page_is_found(tmp_path):
    shutil.copy(ROOT / "README.md", tmp_path)
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "environment.md"
    page.write_text("before\n<!-- generated: environment -->\nold\n<!-- end -->\nafter\n")
    text = docs.stale_pages(tmp_path)[page]
    assert text.startswith("before\n<!-- generated: environment -->\n| variable |")
    assert text.endswith("\n<!-- end -->\nafter\n")
    assert all(variable.name in text for variable in VARIABLES)
    page.write_text(text)
    assert page not in docs.stale_pages(tmp_path)


@pytest.mark.parametrize("name", sorted(suites.SUITES))
def test_figures_in_words_are_figures_of_their_suite(name):
    suite = suites.suite(name)
    words = registry.words(suite.kind())
    assert getattr(words, "sentences", getattr(words, "SENTENCES", {})).keys() <= {target.name for target in suite.TARGETS}


@pytest.mark.parametrize("text", ["[]", '{"kind": "other"}', '{"kind": "bench"', '{"kind": "bench"}'])
def test_other_files_are_refused_among_the_results(tmp_path, text):
    assert figures.summary(tmp_path) == figures.measurements(tmp_path) == figures.NOTHING
    (tmp_path / "stray.json").write_text(text)
    with pytest.raises(ResultError, match=r"stray\.json"):
        figures.summary(tmp_path)


def test_a_new_result_of_a_gpu_changes_what_the_pages_say_of_gpus(tmp_path):
    result = registry.read(ROOT / "docs/results/gpu-day-h200.json")
    here = replace(result.environment, device_name="NVIDIA A100", capability="8.0")
    right = ResultRow(
        table="noted", case=dict(name="the_compiler", what="verify numba_cuda, 0"), values=dict(passed=7.0, wrong=1.0)
    )
    broken = ResultRow(
        table=CORRECTNESS, case=dict(name="test_in_a_cuda_graph[triton-float32]"), verdict="failed", reasons=("no",)
    )
    timed = ResultRow(table="configurations", case=dict(what="A"), who="sdpa:flash", samples=(0.1,))
    bad = replace(timed, who="sdpa:cudnn", samples=(), verdict="wrong", reasons=("out",))
    write_result(replace(result, environment=here, rows=(right, broken, timed, bad)), tmp_path / "gpu-a100.json")
    write_result(replace(result, environment=replace(here, device="cpu")), tmp_path / "gpu-rehearsal.json")
    text = figures.gpu_runs(tmp_path)
    assert "| NVIDIA A100 | `numba_cuda` | 7 right, 1 wrong | 0 cases | - |" in text
    assert "| NVIDIA A100 | `triton` | - | 0 cases | CUDA graphs WRONG |" in text
    assert "| NVIDIA A100 | `sdpa:flash` | - | 1 cases | - |" in text
    assert "Without a result: `cupy_raw`, `sdpa`, `flex`, every kernel once, side streams" in text
    assert "| NVIDIA A100 | `sdpa:cudnn` | 0 right, 1 wrong | 0 cases | - |" in text
    assert text.count("NVIDIA") == 4


def test_every_public_name_is_in_the_api_page():
    page = (ROOT / "docs/api.md").read_text()
    assert [name for name in (*dilkit.__all__, *dilkit.nn.__all__, *dilkit.comm.__all__) if f".{name}\n" not in page] == [
        "__version__"
    ]


def commands():
    """Every call of `dilkit` in the consoles on the pages, without a launcher before it, and in `--help`.

    The page on adding a backend, whose commands need that backend, is followed by a test of its own.
    """
    pages = [page for page in PAGES if page.name != "adding-a-backend.md"]
    consoles = "".join(block for page in pages for block in CONSOLE.findall(page.read_text()))
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in consoles.splitlines() if line.startswith("$ ")]
    examples = [[name, *shlex.split(arguments)] for name, pair in cli.COMMANDS.items() for arguments in pair]
    return [line[line.index("dilkit") + 1 :] for line in words if "dilkit" in line] + examples


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_commands_on_the_pages_are_understood(command, capsys, tmp_path, monkeypatch):
    """Inspections run; commands that take minutes, ranks, files or a GPU are only parsed."""
    name, *arguments = command
    cli.parser_of(name).parse_args(["cpu" if word == "cuda" else word for word in arguments])
    if name in ("info", "plan", "draw", "order") and not {"--calibrate", "--speeds"} & {*arguments}:
        monkeypatch.chdir(tmp_path)
        assert cli.main(command) == 0, capsys.readouterr().err
