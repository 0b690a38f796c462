"""CI."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import shares
from helpers.project import ROOT
from matrix.variations import variations


@pytest.fixture
def newcomer(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    import newcomer

    return newcomer


def test_what_a_newcomer_may_lack_is_hidden(newcomer, tmp_path, monkeypatch):
    for name in ("VIRTUAL_ENV", "DILKIT_CPU_ISA", "PYTEST_ADDOPTS"):
        monkeypatch.setenv(name, "x")
    (tmp_path / "made").mkdir()
    found = newcomer.surroundings(tmp_path / "made")
    assert not {"VIRTUAL_ENV", "DILKIT_CPU_ISA", "PYTEST_ADDOPTS"} & {*found}
    assert not [*Path(found["HOME"]).iterdir(), *Path(found["TMPDIR"]).iterdir()]
    assert not [name for name in newcomer.CXX if shutil.which(name, path=found["PATH"])]


def test_its_rows_are_in_the_matrix(newcomer):
    names = {variation.name for variation in variations()}
    running = {"Python {}.{}".format(*sys.version_info)}
    assert {*newcomer.ROWS} <= names | running


FILES = {
    "comm/__init__.py": "if TYPE_CHECKING:\n    from dilkit.comm.ring import attend as attend\n",
    "comm/ring.py": "from dilkit.comm import rows\n",
    "comm/rows.py": "import dilkit.pattern\n",
    "dilkit/pattern.py": "",
    "backends/cuda/__init__.py": "",
    "tests/helpers/rank.py": "import dilkit.comm.ring\n",
    "tests/comm/conftest.py": "",
    "tests/comm/test_lazy.py": "from dilkit.comm import attend\n",
    "tests/comm/test_type.py": "if TYPE_CHECKING:\n    import dilkit.comm.ring\n",
    "tests/core/test_started.py": "run('tests/helpers/rank.py')\n",
    "tests/core/test_pattern.py": "import dilkit.pattern\n",
    "tests/project/test_docs.py": "ROOT / 'docs'\n",
    "tests/backends/cuda/test_built.py": "import dilkit.backends.cuda\n",
    **{f"tests/core/orders/test_{k}.py": "" for k in range(6)},
}


def test_a_change_chooses_the_tests_that_depend_on_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    monkeypatch.delitem(sys.modules, "reach", raising=False)
    import reach

    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(reach, "ROOT", tmp_path)

    def chosen(*changed):
        return {name.partition("test_")[2] for name in reach.reached(changed)[0]}

    assert chosen("comm/ring.py") == {"lazy.py", "started.py"}
    assert chosen("tests/comm/conftest.py") == {"lazy.py", "type.py"}
    assert chosen("backends/cuda/kernels/tile.cu") == {"built.py"}
    assert chosen("docs/page.md") == {"docs.py"}
    assert chosen("dilkit/pattern.py") == {"lazy.py", "started.py", "pattern.py"}
    monkeypatch.setattr(reach, "PART", 5)
    assert chosen("dilkit/pattern.py") == {"started.py", "pattern.py"}, "these are in its folder"
    assert chosen("docs/page.md", "dilkit/pattern.py") == {"docs.py"}, "the last change comes first"
    monkeypatch.setattr(reach, "PART", 10)
    assert chosen("comm/ring.py", "tests/comm/test_lazy.py") == {"lazy.py"}, "ring.py reaches two files, and one fits"
    monkeypatch.setattr(reach, "PART", 100)
    assert not chosen("tests/comm/test_lazy.py"), "one test is more than a hundredth"


@pytest.fixture
def items():
    nodes = (f"tests/test_{k}.py::test[{at}]" for k in range(10) for at in range(k))
    return [SimpleNamespace(nodeid=node, fixturenames=(), get_closest_marker=lambda name: None) for node in nodes]


def test_four_shares_have_each_test_once(items):
    found = [shares.of_share(items, number, 4) for number in (1, 2, 3, 4)]
    assert sorted(node for share in found for node in share) == sorted(item.nodeid for item in items)
    assert all(len(share) > 6 for share in found)


def test_quick_tests_that_did_not_pass_run_again(items):
    cache = SimpleNamespace(get=lambda key, default: {"passed": [item.nodeid for item in items[3:]]})
    options = {"--share": None, "--also": None, "--not-passed": True}
    config = SimpleNamespace(cache=cache, getoption=options.get, hook=SimpleNamespace(pytest_deselected=lambda items: None))
    items[0].get_closest_marker = {"slow": True}.get
    expected = items[1:3]
    shares.pytest_collection_modifyitems(config, items)
    assert items == expected


def test_wording_is_refused_by_file_and_line(tmp_path):
    """Code, generated parts and strings in single quotes are not read."""
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text("Made anew.\n`anew`\n<!-- generated: x -->\nanew\n<!-- end -->\nin\nvain\n")
    text = "'''Whether it is.'''\nodd = 'anew'\n\ndef f():\n    '''Return it.\n\n    Stand-ins.\n    '''\n"
    module.write_text(text.replace("'", '"'))
    command = [sys.executable, str(ROOT / ".ci" / "wording.py"), str(page), str(module)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    hits = [line.split(": ")[0].rpartition("/")[2] for line in done.stdout.splitlines()]
    assert (done.returncode, hits) == (1, ["page.md:1", "page.md:6", "module.py:1", "module.py:7"]), done.stdout
