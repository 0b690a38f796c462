"""A backend from outside, the package of docs/adding-a-backend.md, is found everywhere; a broken one does no harm."""

import json
import re
import sys

import pytest
from helpers.launch import fork
from helpers.project import ROOT, succeed

PAGE = (ROOT / "docs/adding-a-backend.md").read_text()
FILES = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = re.findall(r"^\$ (.+)$", PAGE, re.MULTILINE)
BROKEN = {"exploding": "exploding_plugin:Exploding", "leaving": "leaving_plugin:Leaving", "absent": "no_such_module:Backend"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Install the page's package into a folder, with three entry points that cannot be loaded."""
    project, site = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("site")
    for name, text in FILES.items():
        (project / name).write_text(text)
    assert COMMANDS[0] == "pip install ."
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(site))
    succeed(sys.executable, "-m", *COMMANDS[0].split(), *options, cwd=project)
    (site / "exploding_plugin.py").write_text("raise RuntimeError('no such driver')\n")
    (site / "leaving_plugin.py").write_text("import sys\nsys.exit('leaving')\n")
    metadata = site / "broken_plugins-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugins\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[dilkit.backends]\n" + "".join(f"{k} = {v}\n" for k, v in BROKEN.items()))
    return site


def test_the_page_names_what_it_makes():
    assert set(FILES) == {"dilkit_dense.py", "pyproject.toml"}
    assert [c.split()[1] for c in COMMANDS] == ["install", "info", "verify", "uninstall"]


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import dilkit, json, torch
p, small = dilkit.Pattern([8, 16], [1, 2]), dilkit.Pattern([8], [2])
problems = (dilkit.Problem(pattern=p, seq=n, heads=2, head_dim=4) for n in (64, 5000))
short, long = (dilkit.explain(problem, ("dense", "reference")) for problem in problems)
q = torch.ones(1, 8, 2, 4)
try:
    dilkit.dilated_attention(q, q, q, small, backend="absent")
except dilkit.NoBackendError as error:
    asked = str(error)
shown = dilkit.explain(dilkit.Problem(pattern=small, seq=64, heads=2, head_dim=4))
print(json.dumps(dict(short=short.to_dict(), long=long.to_dict(), text=str(long), shown=str(shown), asked=asked)))
"""


@pytest.fixture(scope="module")
def found(site, tmp_path_factory):
    program = tmp_path_factory.mktemp("program") / "plugin.py"
    program.write_text(PROGRAM)
    return json.loads(fork([str(program), str(site)]).finish(90.0).text)


def test_the_selector_picks_it_where_it_is_named(found):
    assert found["short"]["picked"] == "dense"
    assert found["long"]["picked"] == "reference"
    assert "seq 5000: at most 4096 (the score matrix would not fit)" in found["text"]


def test_broken_ones_are_shown_with_their_exception(found):
    lines = {line.split()[0]: line for line in found["shown"].splitlines()}
    for name, text in {
        "exploding": "RuntimeError: no such driver",
        "leaving": "SystemExit: leaving",
        "absent": "ModuleNotFoundError",
    }.items():
        assert "broken" in lines[name]
        assert text in lines[name]
        assert BROKEN[name] in lines[name]


def test_a_broken_one_cannot_be_asked_for(found):
    assert "no_such_module" in found["asked"]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS[1:3])
def test_the_commands_of_the_page_run_and_know_it(site, tmp_path, command):
    shown = succeed(*command.split(), cwd=tmp_path, python_path=site, OMP_NUM_THREADS="1")
    assert "dense" in shown


@pytest.mark.slow
def test_the_conformance_suite_takes_it_in(site, tmp_path):
    pytest_here = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "")
    options = dict(cwd=ROOT, python_path=site, OMP_NUM_THREADS="1")
    listed = succeed(*pytest_here, "--collect-only", "tests/backends/test_conformance.py", **options).splitlines()
    cases = {name: [line for line in listed if f"oracle[{name}-" in line] for name in ("dense", "reference")}
    assert len(cases["dense"]) == len(cases["reference"]) > 0
    assert not [line for line in listed if any(f"oracle[{name}-" in line for name in BROKEN)]
    shown = succeed(*pytest_here, *cases["dense"][:: max(1, len(cases["dense"]) // 12)], **options)
    assert re.search(r"^[1-9][0-9]* passed", shown, re.MULTILINE), shown  # others are refused by its limits
